"Damaged and forged cache files: an error of ours or the right data, never a crash, a hang or memory beyond the file's claim."
import json, math, random, time, tracemalloc
import mlx.core as mx, numpy as np, pytest
from mlx_lm.models import cache as stock
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache, RotatingKVCache
from small import Stepped, cache, damage, forge, packed, profile
from veloxquant_mlx.codecs.lossless import ZSTD
from veloxquant_mlx.coders import zstd
from veloxquant_mlx.container import CacheFileError, FormatError, to_numpy
from veloxquant_mlx.prompt_cache import MAX_RATIO, load_prompt_cache, save_prompt_cache, save_stock_cache, inspect, stored_tokens, verify

CODECS = ['lossless', 'cachegen', 'kivi', 'zipcache', 'velox', 'velox, named']   # the profile in the file, or beside it
N = 300   # cases per file and kind in the fast suite

def array(*shape):
    "Something like keys: channels of their own size, slow along tokens"
    x = np.random.default_rng(sum(shape)).normal(size=shape)
    return mx.array((np.cumsum(x, -2)*.1 + 3*x[...,:1,:]).astype('f2'))

def filled(c, n=300, H=2, D=32):
    c.update_and_fetch(array(1, H, n, D), array(1, H, n, D))
    return c

def caches(codec):
    if codec!='lossless': return [filled(KVCache()), filled(KVCache())]
    a = ArraysCache(2)
    a[1] = array(1, 5, 7)
    return [filled(KVCache()), filled(QuantizedKVCache(32, 4)), filled(RotatingKVCache(256, 4)), CacheList(a, KVCache()), KVCache()]

@pytest.fixture(scope='module', autouse=True)
def home(tmp_path_factory):
    "A profile folder of its own"
    with pytest.MonkeyPatch.context() as m:
        m.setenv('XDG_CACHE_HOME', str(tmp_path_factory.mktemp('home')))
        yield

def velox(named):
    "Two caches, and how they are saved: bases over both layers, keys turned back; with their profile, or in batches with steps and a window"
    cs = [cache(300, seed=2*i, **dict(B=2, dtype=mx.bfloat16) if named else {}) for i in range(2)]
    p = profile(cs, 2, True)
    if not named: return cs,dict(codec='velox', profile=p, scale=.2, embed_profile=True)
    p.save()
    return cs,dict(codec=Stepped(), profile=p, scale=.5, recent=20)

@pytest.fixture(scope='module', params=CODECS)
def sample(request, tmp_path_factory):
    "A real file of each codec: its bytes, and what it holds"
    p,codec = tmp_path_factory.mktemp('fuzz')/'cache',request.param
    cs,how = velox('named' in codec) if 'velox' in codec else (caches(codec), dict(codec=codec))
    save_prompt_cache(p, cs, {'model': 'm'}, tokens=list(range(300)), **how)
    return p.read_bytes(), contents(p), p

def arrays_in(c):
    for v in vars(c).values():
        if isinstance(v, mx.array): yield v
        elif isinstance(v, (list, tuple)):
            for o in v:
                if isinstance(o, mx.array): yield o
                elif o is not None and not isinstance(o, (int, str)): yield from arrays_in(o) if hasattr(o, '__dict__') else arrays_in(_Box(o))

class _Box:
    def __init__(self, o): self.o = list(o)

def contents(p):
    cache,meta = load_prompt_cache(p, True, progress=False)
    return meta,[[type(c).__name__, *(to_numpy(x).tobytes() for x in arrays_in(c))] for c in cache]

def by_tokens(p): load_prompt_cache(p, tokens=list(range(300)), progress=False)

def attempt(f, p):
    try: return f(p)
    except CacheFileError as e: return e

def try_file(p, data):
    "`contents` or the error; fails on anything else, on a hang and on memory out of proportion"
    p.write_bytes(data)
    tracemalloc.start()
    before,_ = mx.get_active_memory(),mx.reset_peak_memory()
    t = time.time()
    res,*_ = [attempt(f, p) for f in (contents, inspect, stored_tokens, by_tokens, lambda p: verify(p, progress=False))]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    arrays = max(0, mx.get_peak_memory()-before)   # MLX's memory, which tracemalloc does not see
    assert time.time()-t<20, 'slow'
    assert peak < 40e6 + 2000*len(data), f'{peak} bytes for a file of {len(data)}'
    assert arrays < 10e6 + 2*MAX_RATIO*len(data), f'{arrays} bytes of arrays for a file of {len(data)}'
    return res

# blind damage

def check_damage(sample, n, seed):
    data,right,p = sample
    r = random.Random(seed)
    for i in range(n):
        bad = damage(r, data)
        if bad==data: continue
        res = try_file(p, bad)
        assert isinstance(res, CacheFileError), f'case {i}: damage went unnoticed'

def test_damage(sample): check_damage(sample, N, 0)

@pytest.mark.slow
def test_damage_long(sample): check_damage(sample, 10_000, 1)

# forgery: the checksums are made right again, so that everything behind them is reached

def check_forgery(sample, n, seed):
    data,right,p = sample
    r,refused = random.Random(seed),0
    for _ in range(n): refused += isinstance(try_file(p, forge(r, data)), CacheFileError)
    assert refused>n//3

def test_forgery(sample): check_forgery(sample, N, 2)

@pytest.mark.slow
def test_forgery_long(sample): check_forgery(sample, 10_000, 3)

def manifest(*caches, position=None, **kw):
    top = max((c['attrs']['offset'] for c in caches if 'attrs' in c), default=0)
    return dict(codec='lossless', params={}, position=top, chunk=256, caches=[*caches], metadata={}, model=None, tokens=None) | kw

def leaf(cls, attrs, rows, pairs): return {'class': cls, 'attrs': attrs, 'rows': rows, 'pairs': pairs, 'exact': False, 'kind': 'kv'}

def zeros(*shape): return bytes([ZSTD]) + zstd.compress(bytes(4*math.prod(shape)), 3)

def test_room_counts(tmp_path):
    "One row in a buffer for 256: the room is bounded, not only the row"
    spec = leaf('KVCache', {'offset': 1}, 1, [['uint32', [1, 1, 4_000_000], [1, 1, 1]]])
    data = packed(manifest(spec, metadata={'pad': 'x'*20_000}), [['c000000.k000', zeros(4_000_000)], ['c000000.v001', zeros(1)]])
    assert isinstance(try_file(tmp_path/'a', data), CacheFileError)

@pytest.mark.parametrize('codec', CODECS[:5])
@pytest.mark.parametrize('shape', [(1, 8, 1024, 128), (1, 1, 1, 65536), (2, 3, 257, 8)])
def test_saved_loads(tmp_path, codec, shape):
    "Constant data pack better than the bound on memory allows; they load all the same"
    c = KVCache()
    c.update_and_fetch(*[mx.full(shape, 1, mx.float16)]*2)
    save_prompt_cache(tmp_path/'a', [c], codec=codec)
    res = try_file(tmp_path/'a', (tmp_path/'a').read_bytes())
    assert not isinstance(res, Exception)
    assert mx.array_equal(load_prompt_cache(tmp_path/'a')[0].keys[..., :shape[2], :], c.keys[..., :shape[2], :])

Q = [['uint32', [1, 1, 4], [1, 1, 4]], *[['float16', [1, 1, 1], [1, 1, 1]]]*2]
@pytest.mark.parametrize('spec', [
    leaf('QuantizedKVCache', dict(offset=4, group_size=0, bits=0), 4, Q),
    leaf('QuantizedKVCache', dict(offset=4, group_size=64, bits=4), 4, Q),
    leaf('QuantizedKVCache', dict(offset=4, group_size=32, bits=7), 4, Q),
    leaf('RotatingKVCache', dict(offset=4, keep=0, max_size=0, _idx=4), 4, [['float16', [1, 1, 1], [1, 1, 1]]]),
    leaf('RotatingKVCache', dict(offset=4, keep=0, max_size=8, _idx=1<<39), 4, [['float16', [1, 1, 1], [1, 1, 1]]]),
    leaf('RotatingKVCache', dict(offset=9, keep=0, max_size=8, _idx=4), 4, [['float16', [1, 1, 1], [1, 1, 1]]]),
    leaf('RotatingKVCache', dict(offset=1<<39, keep=0, max_size=4, _idx=4), 4, [['float16', [1, 1, 1], [1, 1, 1]]]),
    leaf('ChunkedKVCache', dict(offset=4, chunk_size=0, start_position=0), 4, [['float16', [1, 1, 1], [1, 1, 1]]]),
    leaf('KVCache', dict(offset=1<<39), 0, []),
    leaf('KVCache', dict(offset=4), 4, [['float16', [1, 1, 0], [1, 1, 0]]]),
])
def test_attributes(tmp_path, spec):
    "Attributes that contradict the arrays are refused: they would crash the process later"
    s = [[f'c000000.{"kv"[j]}{j:03d}', b'\0'*9] for j in range(2*bool(spec['rows']))]
    res = try_file(tmp_path/'a', packed(manifest(spec), s))
    assert isinstance(res, FormatError) and 'bad manifest' in str(res)

def test_good_quantized(tmp_path):
    for bits in (2, 3, 4, 6, 8):
        save_prompt_cache(tmp_path/'a', [filled(QuantizedKVCache(32, bits), D=64)])
        load_prompt_cache(tmp_path/'a')

def test_many_caches(tmp_path):
    "Work that grows with caches times chunks is bounded"
    empty = leaf('KVCache', {'offset': 0}, 0, [])
    t = time.time()
    with pytest.raises(FormatError, match='allowed: 4096'): inspect(packed_file(tmp_path, manifest(*[empty]*5000), []))
    assert time.time()-t<5
    full = leaf('KVCache', {'offset': 256*2000}, 256*2000, [['uint8', [1, 1, 1], [1, 1, 1]]])
    s = [[f'c{c:06d}.{n}', zeros(64)] for c in range(2000) for n in ('k000', 'v001')]
    t = time.time()
    inspect(packed_file(tmp_path, manifest(*[empty]*4000, full), s))
    assert time.time()-t<5

def packed_file(tmp_path, m, s):
    (tmp_path/'p').write_bytes(packed(m, s))
    return tmp_path/'p'

def test_forged_stock(tmp_path):
    "Names without end, and shapes whose product is 0"
    import struct
    meta = {'2.0': '', '1.0': 'KVCache'}
    for name,shape in (('0.'*3000 + '0', [1]), ('0.0', [1<<39, 0]), ('0.0', [1<<30, 1<<30, 0])):
        n = 4*math.prod(shape)
        h = json.dumps({'__metadata__': meta, name: dict(dtype='F32', shape=shape, data_offsets=[0, n])}).encode()
        assert isinstance(try_file(tmp_path/'s.safetensors', struct.pack('<Q', len(h)) + h + bytes(n)), CacheFileError)
    q = filled(QuantizedKVCache(32, 8))
    save_stock_cache(tmp_path/'q.safetensors', [q])
    q.group_size = 0
    with pytest.raises(ValueError, match='does not fit'): save_stock_cache(tmp_path/'q.safetensors', [q])
    stock.save_prompt_cache(str(tmp_path/'q.safetensors'), [q])
    with pytest.raises(FormatError, match='does not fit'): load_prompt_cache(tmp_path/'q.safetensors')

def test_tokens_section(tmp_path):
    "A section of token ids that is no whole number of ids"
    t = dict(count=4, stored=True, digests=['0'*32])
    p = packed_file(tmp_path, manifest(position=4, tokens=t), [['c000000.tokens', b'\0'*15]])
    for f in (stored_tokens, verify, by_tokens):
        with pytest.raises(FormatError, match='token ids'): f(p)

# files of mlx_lm: no checksums, so damage may go unnoticed, but nothing may break

def check_stock(tmp_path, layout, n, seed):
    p = tmp_path/'s.safetensors'
    save_stock_cache(p, [filled(KVCache(), 40), filled(RotatingKVCache(64, 4), 40), filled(QuantizedKVCache(32, 4), 40)], {'a': 'b'}, layout)
    data,r = p.read_bytes(),random.Random(seed)
    n_head = 8+int.from_bytes(data[:8], 'little')
    for _ in range(n):
        head = bytearray(data[:n_head])
        for _ in range(r.choice((1, 1, 3))):
            i = r.randrange(len(head))
            if r.random()<.5: head[i] = r.choice(b'0123456789"{}[],:.F')
            else: head[i] ^= 1<<r.randrange(8)
        try_file(p, bytes(head)+data[n_head:] if r.random()<.8 else damage(r, data))

@pytest.mark.parametrize('layout', ['0.31', '0.32'])
def test_stock(tmp_path, layout): check_stock(tmp_path, layout, N, 4)

@pytest.mark.slow
@pytest.mark.parametrize('layout', ['0.31', '0.32'])
def test_stock_long(tmp_path, layout): check_stock(tmp_path, layout, 10_000, 5)
