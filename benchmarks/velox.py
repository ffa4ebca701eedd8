"""Saving and loading of velox files and those of the other codecs, beside a memory copy and mlx_lm's own files: `python benchmarks/velox.py [--tokens 4096]`.

The demo model's keys and values of a text, in float16. Seconds of the wall clock, best of some runs; `x memcpy`: as a share of the
speed at which the same bytes are copied; `x stock`: in loads of mlx_lm's file. Files are in the system's memory, or, in the last two columns (on
Linux), have just been dropped from it. Saving is measured without the runs through the model that show where attention goes; `--prefill` times those too, and the prefill, once."""
import argparse, os, tempfile
from pathlib import Path
from time import perf_counter
import mlx.core as mx, numpy as np
from mlx_lm.models import cache as stock
from veloxquant_mlx import load_prompt_cache, save_prompt_cache
from veloxquant_mlx.demo import captured_kv, demo_tokens, load_demo, prefill
from veloxquant_mlx.profile import Profile, find_profile, model_key, probe_attention

def best(f, n=5):
    times = []
    for _ in range(n):
        start = perf_counter()
        f()
        times.append(perf_counter()-start)
    return min(times)

def cold(file, f, n=3):
    "As `best`, each time with the file dropped from memory"
    if not hasattr(os, 'posix_fadvise'): return float('nan')
    def drop():
        with open(file, 'rb') as o:
            os.fsync(o.fileno())
            os.posix_fadvise(o.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    times = []
    for _ in range(n):
        drop()
        times.append(best(f, 1))
    return min(times)

def caches(n):
    res = []
    for k,v in captured_kv('prose', n):
        c = stock.KVCache()
        c.keys,c.values,c.offset = k,v,n
        res.append(c)
    mx.eval([c.state for c in res])
    return res

def main():
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    p.add_argument('--tokens', type=int, default=4096)
    p.add_argument('--profile', help='a profile file; without it the small one in the profile folder')
    p.add_argument('--prefill', action='store_true', help='time the prefill of as many tokens too')
    a = p.parse_args()
    model,_ = load_demo(kv_dtype=mx.float16)
    profile = Profile.load(a.profile) if a.profile else find_profile(model=model_key(model), kind='small')
    if profile is None: print('without velox: no profile of the demo model, `veloxquant calibrate smollm2` makes one')
    rows = {o: dict(codec='velox', preset=o, saliency=False) for o in ('near-lossless', 'high', 'balanced', 'small')} if profile else {}
    rows |= {c: dict(codec=c) for c in ('lossless', 'cachegen', 'kivi', 'zipcache')}
    cache = caches(a.tokens)
    size = sum(2*c.keys.nbytes for c in cache)
    src = np.ones(1<<27, np.uint8)
    dst = np.empty_like(src)
    copy = best(lambda: np.copyto(dst, src), 9)/src.size*size
    with tempfile.TemporaryDirectory() as d:
        file = Path(d)/'cache.safetensors'
        stock.save_prompt_cache(str(file), cache)
        read = lambda: [mx.eval(c.state) for c in stock.load_prompt_cache(str(file))]
        base,base_cold = best(read, 9),cold(file, read)
        print(f'{profile or ""} {a.tokens} tokens, {size/1e6:.1f} MB; copy {copy*1e3:.1f} ms, stock load {base*1e3:.1f} ms, cold {base_cold*1e3:.1f}')
        print(f'{"":14}{"bits":>7}{"save s":>9}{"x memcpy":>10}{"load s":>9}{"x memcpy":>10}{"x stock":>9}{"cold s":>9}{"x stock":>9}')
        for name,how in rows.items():
            save = lambda: save_prompt_cache(file, cache, profile=profile if 'preset' in how else None, **how)
            load = lambda: load_prompt_cache(file, profile=profile)
            save(), load()
            s,l = best(save),best(load)
            print(f'{name:14}{16*file.stat().st_size/size:7.2f}{s:9.3f}{copy/s:10.4f}{l:9.3f}{copy/l:10.4f}{l/base:9.1f}'
                  f'{(o := cold(file, load)):9.3f}{o/base_cold:9.1f}', flush=True)
    if a.prefill:
        tokens = demo_tokens('prose', a.tokens)
        t = best(lambda: prefill(model, tokens, stock.make_prompt_cache(model)), 1)
        print(f'prefill {t:.1f} s')
        if profile: print(f'what velox runs through the model to see where attention goes, {best(lambda: probe_attention(model, tokens, cache), 1):.1f} s')

if __name__=='__main__': main()
