"""What the live caches cost beside mlx_lm's own, all measured in one run.

    python benchmarks/caches.py            # tables
    python benchmarks/caches.py --json     # the same as JSON

Three questions: one token into a cache that holds about 2,000 (closing of groups included), a block of 2,047 tokens into an
empty one, and a decode step of the demo model. The contestants take turns, so that a busy machine is busy for all.

On Linux glibc gives memory back to the system and takes it again, at 0.25 ms a megabyte, now for one contestant and now for
another. The script therefore starts itself again with an allocator that keeps what it has (`--system-malloc` leaves it alone).
"""
import argparse, json, os, random, statistics as st, sys, time
import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache
from veloxquant_mlx import KVCacheBuilder, KVCacheConfig, KVCacheFactory

METHODS = {m: KVCacheConfig(m) for m in ('cachegen', 'kivi', 'zipcache')}
ALL = {'KVCache': KVCache, 'QuantizedKVCache(bits=4)': lambda: QuantizedKVCache(64, 4),
       **{m: (lambda c=c: KVCacheFactory.create(c)) for m,c in METHODS.items()}}

def shuffled(names): return random.sample([*names], len(names))

clock = time.perf_counter

def timed(f):
    t = clock()
    mx.eval(f())
    return clock() - t

def token(dtype, held=1900, n=256, repeats=7):
    "Microseconds of a one-token update of [1, 8, 1, 128]: mean over tokens, so that closing counts, of the median of repeats"
    k = mx.random.normal((1, 8, held, 128)).astype(dtype)
    xs = mx.split(mx.random.normal((1, 8, n, 128)).astype(dtype), n, axis=2)
    took = {m: [[] for _ in xs] for m in ALL}
    for _ in range(repeats):
        caches = {m: f() for m,f in ALL.items()}
        for c in caches.values(): mx.eval(c.update_and_fetch(k, k))
        for i,x in enumerate(xs):
            mx.eval(x)
            for m in shuffled(ALL): took[m][i].append(timed(lambda: caches[m].update_and_fetch(x, x)))
    return {m: 1e6*st.mean(map(st.median, t)) for m,t in took.items()}

def block(dtype, repeats=25):
    "Median milliseconds of a block of [1, 8, 2047, 128] into an empty cache"
    k,v = (mx.random.normal((1, 8, 2047, 128)).astype(dtype) for _ in range(2))
    mx.eval(k, v)
    took = {m: [] for m in ALL}
    for i in range(repeats + 1):
        for m in shuffled(ALL):
            c = ALL[m]()
            t = timed(lambda: c.update_and_fetch(k, v))
            if i: took[m].append(1e3*t) # the first one compiles
    return {m: st.median(t) for m,t in took.items()}

def decode(prompt=512, steps=200):
    "Median milliseconds of a decode step of the demo model after `prompt` tokens"
    from veloxquant_mlx.demo import demo_tokens, load_demo
    model,_ = load_demo()
    ids = demo_tokens('prose', prompt + steps)
    caches = {'KVCache': make_prompt_cache(model), **{m: KVCacheBuilder.for_model(model, c) for m,c in METHODS.items()}}
    for c in caches.values(): mx.eval(model(mx.array([ids[:prompt]]), cache=c))
    took = {m: [] for m in caches}
    for i in ids[prompt:]:
        for m in shuffled(caches): took[m].append(1e3*timed(lambda: model(mx.array([[i]]), cache=caches[m])))
    return {m: st.median(t) for m,t in took.items()}

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--json', action='store_true', help='print JSON')
    p.add_argument('--no-model', action='store_true', help='leave out the decode step of the demo model')
    p.add_argument('--steps', type=int, default=200, help='decode steps (200)')
    p.add_argument('--cpu', action='store_true', help='CPU time in place of wall time: for a busy machine, on the CPU back end')
    p.add_argument('--system-malloc', action='store_true', help='with the allocator as it is')
    a = p.parse_args()
    keep = dict(MALLOC_MMAP_THRESHOLD_='1073741824', MALLOC_TRIM_THRESHOLD_='4294967296', MALLOC_TOP_PAD_='268435456')
    if sys.platform=='linux' and not a.system_malloc and 'MALLOC_TOP_PAD_' not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | keep)
    if a.cpu: globals()['clock'] = time.process_time
    res = {}
    for name in ('float16', 'bfloat16', 'float32'):
        d = getattr(mx, name)
        res[f'one token at 2k, {name}, us (x KVCache)'] = token(d),'KVCache'
        res[f'block of 2047, {name}, ms (median; x QuantizedKVCache)'] = block(d),'QuantizedKVCache(bits=4)'
    if not a.no_model: res['decode step of the demo model, ms (median; x KVCache)'] = decode(steps=a.steps),'KVCache'
    if a.json: return print(json.dumps({n: t for n,(t,_) in res.items()}, indent=1))
    for n,(t,base) in res.items():
        print(n)
        for m,x in t.items(): print(f'  {m:26}{x:10.1f}{x/t[base]:8.2f}x')

if __name__=='__main__': main()
