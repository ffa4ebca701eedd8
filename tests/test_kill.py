"A writer that is stopped at any moment leaves the old file or the new one, whole."
import os, random, signal, subprocess, sys, time
from pathlib import Path
import mlx.core as mx, pytest
from veloxquant_mlx.prompt_cache import inspect, load_prompt_cache, verify

WRITER = '''
import signal, sys, numpy as np, mlx.core as mx
signal.signal(signal.SIGINT, signal.default_int_handler)   # a job in the background ignores it
from mlx_lm.models.cache import KVCache
from veloxquant_mlx.prompt_cache import save_prompt_cache
sys.path.insert(0, sys.argv[2])
from small import cache, profile
file,made,how,p = sys.argv[1],[],{},None
for tag in (1., 2.):
    cs = [KVCache() for _ in range(2)]
    for c in cs: c.update_and_fetch(mx.full((1, 2, 2000, 64), tag, mx.float16), mx.random.normal((1, 2, 2000, 64)).astype(mx.float16))
    mx.eval([c.keys for c in cs])
    made.append(cs)
if sys.argv[3]!='lossless': how = dict(codec='velox', profile=(p := profile([cache(300, 2, 64, seed=2*i) for i in range(2)], step=.02)), embed_profile=sys.argv[3]=='velox')
def save(i):
    if p: p.save()
    save_prompt_cache(file, made[i], {'tag': str(i+1)}, **how)
save(0)
print('ready', flush=True)
while True:
    for i in (0, 1): save(i)
'''
CODECS = ('lossless', 'velox', 'velox, named')   # the profile in the file, or beside it and saved again each time

@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch): monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path_factory.mktemp('home')))

def start(file, codec):
    args = [sys.executable, '-c', WRITER, file, Path(__file__).parent, codec]
    p = subprocess.Popen([str(a) for a in args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if p.stdout.readline().strip()!='ready': raise AssertionError(p.stderr.read())
    return p

def whole(file):
    "The file loads and its keys are those of its tag"
    verify(file, progress=False)
    cache,meta = load_prompt_cache(file, True, progress=False)
    for c in cache: assert abs(c.keys[...,:2000,:].astype(mx.float32)-float(meta['tag'])).max().item()<=TOLERANCE[inspect(file).codec]

TOLERANCE = dict(lossless=0, velox=.2)

def stop(file, sig, delay, codec='lossless'):
    p = start(file, codec)
    try:
        time.sleep(delay)
        p.send_signal(sig)
        p.wait(20)
    finally:
        if p.poll() is None: p.kill()
        p.stdout.close(); p.stderr.close()
    whole(file)

@pytest.mark.parametrize('codec', CODECS)
@pytest.mark.parametrize('n', [2, pytest.param(50, marks=pytest.mark.slow)])
def test_sigkill(tmp_path, n, codec):
    r,file = random.Random(n),tmp_path/'cache'
    for _ in range(n): stop(file, signal.SIGKILL, r.random()*.4, codec)

@pytest.mark.parametrize('codec', CODECS)
def test_two_writers(tmp_path, codec):
    "Two writers of one file, killed; a reader finds it whole at any time"
    file = tmp_path/'cache'
    ps = [start(file, codec) for _ in range(2)]
    try:
        t = time.time()
        while time.time()-t<.5: whole(file)
    finally:
        for p in ps: p.kill(); p.wait(20); p.stdout.close(); p.stderr.close()
    whole(file)

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
for n in map(int, sys.argv[2:]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (n, resource.RLIM_INFINITY))
    try: save_prompt_cache(sys.argv[1], [c])
    except OSError as e: print(f'refused: {e}')
'''

def test_full_disk(tmp_path):
    "The disk fills up in the middle: an error, the old file, nothing else"
    file = tmp_path/'cache'
    stop(file, signal.SIGINT, .1)
    before = file.read_bytes()
    sizes = 1000, 100_001, 300_000, 345_678   # also where the rest of a buffer is what does not fit
    r = subprocess.run([sys.executable, '-c', FULL, str(file), *map(str, sizes)], capture_output=True, text=True)
    assert r.stdout.count('refused')==len(sizes), r.stderr
    assert file.read_bytes()==before and [p.name for p in tmp_path.iterdir()]==['cache']
