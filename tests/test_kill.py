"A writer that is stopped at any moment leaves the old file or the new one, whole."
import os, random, signal, subprocess, sys, time
from pathlib import Path
import pytest
from veloxquant_mlx.container import Container
from veloxquant_mlx.prompt_cache import load_prompt_cache, verify

WRITER = '''
import sys, numpy as np, mlx.core as mx
from mlx_lm.models.cache import KVCache
from veloxquant_mlx.prompt_cache import save_prompt_cache
file,made = sys.argv[1],[]
for tag in (1., 2.):
    cs = [KVCache() for _ in range(2)]
    for c in cs: c.update_and_fetch(mx.full((1, 2, 2000, 64), tag, mx.float16), mx.random.normal((1, 2, 2000, 64)).astype(mx.float16))
    mx.eval([c.keys for c in cs])
    made.append(cs)
save_prompt_cache(file, made[0], {'tag': '1'})
print('ready', flush=True)
while True:
    for i,cs in enumerate(made): save_prompt_cache(file, cs, {'tag': str(i+1)})
'''

def start(file):
    p = subprocess.Popen([sys.executable, '-c', WRITER, str(file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if p.stdout.readline().strip()!='ready': raise AssertionError(p.stderr.read())
    return p

def whole(file):
    "The file loads and its keys are those of its tag"
    verify(file, progress=False)
    cache,meta = load_prompt_cache(file, True, progress=False)
    assert [c.keys[...,:2000,:].max().item() for c in cache]==[float(meta['tag'])]*2

def stop(file, sig, delay):
    p = start(file)
    try:
        time.sleep(delay)
        p.send_signal(sig)
        p.wait(20)
    finally:
        if p.poll() is None: p.kill()
        p.stdout.close(); p.stderr.close()
    whole(file)

@pytest.mark.parametrize('n', [4, pytest.param(50, marks=pytest.mark.slow)])
def test_sigkill(tmp_path, n):
    r,file = random.Random(n),tmp_path/'cache'
    for _ in range(n): stop(file, signal.SIGKILL, r.random()*.4)

def test_ctrl_c(tmp_path):
    file = tmp_path/'cache'
    stop(file, signal.SIGINT, .1)
    assert [p.name for p in tmp_path.iterdir()]==['cache'], 'Ctrl-C leaves nothing behind'

def test_orphans_go(tmp_path):
    "What a killed writer left is removed by the next one"
    file = tmp_path/'cache'
    for i in range(40):
        stop(file, signal.SIGKILL, .02*i)
        if len(list(tmp_path.iterdir()))>1: break
    assert len(list(tmp_path.iterdir()))>1, 'no kill left a temporary: nothing is tested'
    for p in tmp_path.glob('.cache.*.tmp'): os.utime(p, (0, 0))
    stop(file, signal.SIGINT, .3)
    assert [p.name for p in tmp_path.iterdir()]==['cache']

FULL = '''
import sys, resource, mlx.core as mx
from mlx_lm.models.cache import KVCache
from veloxquant_mlx.prompt_cache import save_prompt_cache
c = KVCache(); c.update_and_fetch(*2*[mx.random.normal((1, 2, 2000, 64)).astype(mx.float16)])
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
try: save_prompt_cache(sys.argv[1], [c])
except OSError as e: sys.exit(f'refused: {e}')
'''

def test_full_disk(tmp_path):
    "The disk fills up in the middle: an error, the old file, nothing else"
    file = tmp_path/'cache'
    stop(file, signal.SIGINT, .1)
    before = file.read_bytes()
    r = subprocess.run([sys.executable, '-c', FULL, str(file)], capture_output=True, text=True)
    assert r.returncode and 'refused' in r.stderr, r.stderr
    assert file.read_bytes()==before and [p.name for p in tmp_path.iterdir()]==['cache']
