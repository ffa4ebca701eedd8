"Live caches under random use, against a slow model of what they should hold."
import copy, random, threading
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, LRUPromptCache
from veloxquant_mlx.codecs.zipcache import _decode_any
from veloxquant_mlx.builder import KVCacheFactory
from veloxquant_mlx.config import KVCacheConfig
from veloxquant_mlx.group_quant import group_round

CONFIGS = [KVCacheConfig('cachegen', cachegen_bits=3, cachegen_group_size=16), KVCacheConfig('kivi', kivi_bits=8),
           KVCacheConfig('zipcache', zipcache_hi_fraction=.3), KVCacheConfig('zipcache', zipcache_quantize_values=False, zipcache_saliency='inverse_key_norm')]
DTYPES = [mx.float16, mx.bfloat16, mx.float32]

def rows(rng, n, dtype, H=2, Dk=24, Dv=40):
    k = rng.normal(size=(1, H, n, Dk))*rng.lognormal(size=Dk)*3 + rng.normal(size=Dk)*20
    return mx.array(k).astype(dtype),mx.array(rng.normal(size=(1, H, n, Dv))).astype(dtype)

def same(a, b): return all(mx.array_equal(x, y, equal_nan=False) for x,y in zip(a.state, b.state, strict=True))

class Slow:
    "The rows of one sequence, closed block by block"
    def __init__(self, config):
        self.like,self.k,self.v,self.closed = KVCacheFactory.create(config),None,None,0
    def add(self, k, v):
        self.k = k if self.k is None else mx.concatenate([self.k, k], 2)
        self.v = v if self.v is None else mx.concatenate([self.v, v], 2)
        while self.closed + self.like.block <= self.k.shape[2]:
            at = slice(self.closed, self.closed + self.like.block)
            rk,rv,_ = self.like._close(self.k[:, :, at], self.v[:, :, at])
            self.k[:, :, at],self.v[:, :, at] = rk,rv
            self.closed += self.like.block
    def trim(self, n):
        m = max(0, self.k.shape[2] - n)
        self.k,self.v,self.closed = self.k[:, :, :m],self.v[:, :, :m],min(self.closed, m//self.like.block*self.like.block)

@pytest.mark.parametrize('seed', range(12))
@pytest.mark.parametrize('config', CONFIGS, ids=lambda c: f'{c.method}-{c.width}')
def test_random_use(config, seed):
    rng,pick = np.random.default_rng(seed),random.Random(seed)
    dtype = DTYPES[seed%3]
    c,slow = KVCacheFactory.create(config),Slow(config)
    for _ in range(25):
        what = pick.random()
        if what<.6 or c.empty():
            k,v = rows(rng, pick.choice([0, 1, 1, 1, 7, 31, 32, 130, 300]), dtype)
            got = c.update_and_fetch(k, v)
            slow.add(k, v)
            assert mx.array_equal(got[0], slow.k) and mx.array_equal(got[1], slow.v)
        elif what<.8:
            n = pick.choice([0, 1, 3, 16, 60, 200, 10**6])
            assert c.trim(n)==min(n, slow.k.shape[2])
            slow.trim(n)
        elif what<.9: c = copy.deepcopy(c)
        else:
            mx.eval(c.state)
            c = type(c).from_state(c.state, '')
        assert (c.offset, c._closed)==(slow.k.shape[2], slow.closed)
    if c.offset:
        name = str(dtype).removeprefix('mlx.core.')
        for i in range(c.n_chunks):
            for n,x in zip('kv', c.keys_and_values()):
                x = x[:, :, 256*i:256*(i + 1)]
                got = _decode_any(c.encode_chunk(i)[n], x.shape, name)
                want = np.array(x.view(mx.uint16)) if dtype==mx.bfloat16 else np.array(x)
                assert got.tobytes()==want.tobytes()
    assert c.compressed_key_bytes<=c.fixed_width_key_bytes and c.compressed_value_bytes<=c.fixed_width_value_bytes

@pytest.mark.parametrize('seed', range(12))
@pytest.mark.parametrize('config', CONFIGS[::2], ids=lambda c: c.method)
def test_random_batches(config, seed):
    "Batches that grow, shrink, merge and split hold what each sequence would hold alone"
    rng,pick,dtype = np.random.default_rng(seed),random.Random(seed),DTYPES[seed%3]
    cls = type(KVCacheFactory.create(config))
    def start(n): # a sequence alone, and a cache to merge: ours, mlx_lm's own, or a fresh one
        alone = KVCacheFactory.create(config)
        if n: alone.update_and_fetch(*(r:=rows(rng, n, dtype)))
        if n and pick.random()<.3:
            stock = KVCache(); stock.update_and_fetch(*r)
            return alone,stock
        return alone,copy.deepcopy(alone)
    def group(k):
        pairs = [start(pick.choice([0, 5, 64, 140])) for _ in range(k)]
        if not any(type(c) is cls for _,c in pairs): pairs[0] = (pairs[0][0], copy.deepcopy(pairs[0][0]))
        return [a for a,_ in pairs],cls.merge([c for _,c in pairs])
    def feed(alone, batch, lengths):
        n = max(lengths)
        if n==0: return
        new = [rows(rng, l, dtype) for l in lengths]
        pads = [n - l for l in lengths]
        if max(pads): batch.prepare(lengths=lengths, right_padding=pads)
        block = [mx.concatenate([mx.pad(r[j], [(0, 0), (0, 0), (0, p), (0, 0)]) for r,p in zip(new, pads)]) for j in (0, 1)]
        cut = pick.randrange(1, n + 1)
        for a,b in ((0, cut), (cut, n)):
            if b>a: batch.update_and_fetch(*(x[:, :, a:b] for x in block))
        if max(pads): batch.finalize()
        for c,r in zip(alone, new):
            if r[0].shape[2]: c.update_and_fetch(*r)
    alone,batch = group(3)
    for _ in range(6):
        feed(alone, batch, [pick.choice([1, 1, 20, 150]) for _ in alone])
        what = pick.random()
        if what<.3 and len(alone)>1:
            keep = sorted(pick.sample(range(len(alone)), len(alone) - 1))
            batch.filter(keep); alone = [alone[i] for i in keep]
        elif what<.6:
            more,other = group(2)
            feed(more, other, [1, 40])
            batch.extend(other); alone += more
        elif what<.8: batch = copy.deepcopy(batch)
    for i,c in enumerate(alone): assert same(batch.extract(i), c)

@pytest.mark.parametrize('axis', (-2, -1))
def test_fused_is_plain(axis):
    "One pass over a large block gives the bits of the separate operations"
    x = mx.random.normal((1, 8, 1024, 128))
    x[0, 0, 5, 7],x[0, 3, 900, 100] = float('nan'),float('inf')
    for dtype in DTYPES:
        y = x.astype(dtype)
        whole = group_round(y, 4, 32, axis)
        parts = zip(*(group_round(y[:, i:i+1], 4, 32, axis) for i in range(8)))
        for a,b in zip(whole, parts): assert mx.array_equal(a, mx.concatenate(list(b), 1), equal_nan=True)

@pytest.mark.parametrize('config', CONFIGS[::2], ids=lambda c: c.method)
def test_server_store(config):
    "mlx_lm's server keeps caches in memory and trims copies of them"
    kept = [KVCacheFactory.create(config) for _ in range(2)]
    for c in kept: c.update_and_fetch(*rows(np.random.default_rng(0), 300, mx.float16))
    store = LRUPromptCache()
    store.insert_cache('model', [*range(300)], kept)
    got,rest = store.fetch_nearest_cache('model', [*range(200), 999])
    assert rest==[999] and [c.offset for c in got]==[200]*2 and [c.offset for c in kept]==[300]*2
    assert store.nbytes==sum(c.nbytes for c in kept)

def test_threads():
    "A cache may live in a thread of its own, as in mlx_lm's server"
    x,out = mx.random.normal((1, 8, 2048, 128)),[]
    mx.eval(x)
    def run():
        c = KVCacheFactory.create(CONFIGS[0])
        c.update_and_fetch(x, x)
        out.append(c.compressed_key_bytes)
    threads = [threading.Thread(target=run) for _ in range(3)]
    for t in threads: t.start()
    for t in threads: t.join()
    run()
    assert len(set(out))==1 and len(out)==4
