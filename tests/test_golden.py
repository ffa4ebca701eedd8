"""Files written once by format version 1 must load for ever, with every mlx_lm.

`python tests/test_golden.py` writes the set for the mlx_lm that is installed; it is done once for each format version.
The short files hold every class of cache; the long ones, one set for all, every coded stream. What the lossy ones decode to
is recorded as digests in `long.json`.

`python tests/test_golden.py velox` writes the velox files and their profile anew, and nothing else. Their numbers come out of a
matrix product, which every machine sums in its own order: some rows are kept in `velox.npz` and compared within a unit of float16."""
import hashlib, json, sys
from pathlib import Path
import mlx.core as mx, mlx_lm, numpy as np, pytest
from mlx_lm.models import cache as stock
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, RotatingKVCache
from small import Stepped, profile
from veloxquant_mlx.builder import KVCacheFactory
from veloxquant_mlx.codecs import cachegen, zipcache
from veloxquant_mlx.config import KVCacheConfig
from veloxquant_mlx.container import to_numpy
from veloxquant_mlx.profile import Profile
from veloxquant_mlx.prompt_cache import _held, load_prompt_cache, save_prompt_cache, stored_tokens, verify

DATA = Path(__file__).parent/'data'
CODECS = ('lossless', 'cachegen', 'kivi', 'zipcache')

def wave(n, D=32, dtype=mx.float16):
    "Smooth numbers, the same on every machine"
    i = mx.arange(n*D)
    return ((i*37 % 64 - 32)/8 + (i//D % 7)/4).reshape(1, 1, n, D).astype(dtype)

def caches(lossy):
    cs = [KVCache(), KVCache()] if lossy else [KVCache(), QuantizedKVCache(32, 4), RotatingKVCache(16, 4), CacheList(KVCache(), KVCache())]
    for c in cs:
        for o in c.caches if type(c) is CacheList else [c]: o.update_and_fetch(wave(40), wave(40, dtype=mx.float16)[..., ::-1])
    return cs

def bits(c):
    if type(c) is CacheList: return [bits(o) for o in c.caches]
    ks = [_held(c, k) for k in ('keys', 'values')]
    return [type(c).__name__, c.offset, *(to_numpy(x).tobytes() for k in ks for x in (k if isinstance(k, (tuple, list)) else [k]))]

@pytest.mark.parametrize('version', ['0.31.3', '0.32.2'])
@pytest.mark.parametrize('codec', CODECS)
def test_ours(codec, version):
    p = DATA/f'{codec}-{version}.v1'
    verify(p, progress=False)
    cache,meta = load_prompt_cache(p, True)
    assert meta=={'written by': f'mlx_lm {version}'} and stored_tokens(p)==list(range(40))
    if codec=='lossless': assert [bits(c) for c in cache]==[bits(c) for c in caches(False)]
    else:
        for a,b in zip(cache, caches(True)):
            assert mx.abs(a.keys[...,:40,:]-b.keys[...,:40,:]).max().item()<2
        assert [bits(c) for c in cache]==[bits(c) for c in load_prompt_cache(DATA/f'{codec}-0.32.2.v1')]

@pytest.mark.parametrize('version', ['0.31.3', '0.32.2'])
def test_stock(version):
    cache,meta = load_prompt_cache(DATA/f'stock-{version}.v1', True)
    assert meta=={'written by': version} and [bits(c) for c in cache]==[bits(c) for c in caches(False)]

# long files: two chunks and more, so that every method has codes, in three types, from stock and from live caches

LONG = 600
NAMES = [*(f'{c}-{t}' for c in CODECS for t in ('float16', 'bfloat16', 'float32')),
         'cachegen-mla', 'zipcache-mla', 'kivi-live', 'cachegen-live', 'zipcache-live']
ERROR = {'lossless': 0, 'cachegen': .2, 'kivi': .6, 'zipcache': .6}   # root mean square, as a share of the numbers'

def normal(n, H, D, seed, dtype):
    "Channels with means of their own, slow along tokens; numpy promises that this generator never changes"
    x = np.random.RandomState(seed).normal(size=(1, H, n, D))
    x[:, :, 1:] = .7*x[:, :, :-1] + .7*x[:, :, 1:]
    return mx.array((x + 2*x[:, :, :1]).astype('f4')).astype(dtype)

def long_caches(name):
    codec,case = name.split('-')
    n = 300 if codec=='lossless' else LONG
    dtype = getattr(mx, case) if 'float' in case else mx.float16
    c = KVCacheFactory.create(KVCacheConfig(codec)) if case=='live' else KVCache()
    H,D,Dv = (1, 48, 16) if case=='mla' else (1, 16, 16) if codec=='lossless' else (2, 32, 32)
    c.update_and_fetch(normal(n, H, D, 1, dtype), normal(n, H, Dv, 2, dtype))
    return [c]

def digest(c): return hashlib.sha256(b''.join(bits(c)[2:])).hexdigest()

@pytest.fixture(scope='module')
def recorded(): return json.loads((DATA/'long.json').read_text())

@pytest.mark.parametrize('name', NAMES)
def test_long(name, recorded):
    "What was written decodes to the same bits, near the numbers that were saved"
    p = DATA/f'{name}.v1'
    verify(p, progress=False)
    (c,),(o,) = load_prompt_cache(p, tokens=stored_tokens(p)),long_caches(name)
    assert digest(c)==recorded[name]
    for a,b in ((_held(c, k), getattr(o, k)[..., :o.offset, :]) for k in ('keys', 'values')):
        a,b = (x.astype(mx.float32) for x in (a, b))
        assert (((a-b)**2).mean()/(b**2).mean()).item()**.5 <= ERROR[name.split('-')[0]]

def test_every_stream(monkeypatch):
    "Taken together the long files hold G32 streams of cachegen and coded tokens of zipcache"
    seen = dict.fromkeys(('PackedCoder', 'ZstdCoder', 'G32Coder'), 0)
    def counting(cls):
        class Counting(cls):
            def decode(self, *args, **kw):
                seen[cls.__name__] += 1
                return super().decode(*args, **kw)
        return Counting
    for k in seen: monkeypatch.setattr(cachegen, k, counting(getattr(cachegen, k)))
    closed,read = [],zipcache._read_split
    def reading(*args):
        res = read(*args)
        closed.append(res[0])
        return res
    monkeypatch.setattr(zipcache, '_read_split', reading)
    for name in NAMES:
        if name[0] in 'cz': load_prompt_cache(DATA/f'{name}.v1')
    assert seen['G32Coder'] and max(closed)>0, (seen, closed)

# velox: files that name a profile, one that carries it, and the profile itself

VELOX = {f'velox-{t}': dict(dtype=t) for t in ('float16', 'bfloat16', 'float32')} | {'velox-batch': dict(B=2), 'velox-window': dict(recent=40, sinks=9),
         'velox-fine': dict(scale=.05), 'velox-embedded': dict(embed_profile=True), 'velox-far': dict(loud=30), 'velox-steps': dict(codec=Stepped())}

def velox_caches(dtype='float16', B=1, loud=1, **how):
    "Two layers, the first with other sizes than the second; what is left are options of the codec"
    res = []
    for i,(H,D,Dv) in enumerate([(2, 16, 16), (1, 32, 32)]):
        c = KVCache()
        k,v = (mx.concatenate([normal(LONG, H, d, 10*i+j+5*b, mx.float32)*loud for b in range(B)]) for j,d in enumerate((D, Dv)))
        c.update_and_fetch(k.astype(getattr(mx, dtype)), v.astype(getattr(mx, dtype)))
        res.append(c)
    return res,how

def sample(cache): return {f'{i}.{k}': np.array(_held(c, k).astype(mx.float32))[:, :, ::17] for i,c in enumerate(cache) for k in ('keys', 'values')}

@pytest.mark.parametrize('name', VELOX)
def test_velox(name):
    "What was written decodes to the same numbers within a unit of float16 of the row's largest, near those that were saved"
    if not (DATA/'velox.npz').exists(): pytest.skip('python tests/test_golden.py velox writes the files')
    (cs,_),p = velox_caches(**VELOX[name]),None if name=='velox-embedded' else Profile.load(DATA/'velox.profile.v1')
    f = DATA/f'{name}.v1'
    verify(f, profile=p, progress=False)
    got = load_prompt_cache(f, profile=p, tokens=stored_tokens(f))
    with np.load(DATA/'velox.npz') as z: want = {k.split('/')[1]: z[k] for k in z if k.startswith(f'{name}/')}
    assert [c.keys.dtype for c in got]==[c.keys.dtype for c in cs]
    for k,x in sample(got).items():
        unit = np.abs(want[k]).max(-1, keepdims=True)*2.**(-7 if 'bfloat16' in name else -10)
        assert (np.abs(x-want[k])<=unit).all() and want[k].shape==x.shape
    for k,x in sample(cs).items(): assert ((x-want[k])**2).mean()<=.05*(x**2).mean()

def test_velox_profile():
    "Its digest names it for ever"
    if not (DATA/'velox.profile.v1').exists(): pytest.skip('python tests/test_golden.py velox writes the files')
    p = Profile.load(DATA/'velox.profile.v1')
    assert p.digest==json.loads((DATA/'long.json').read_text())['velox.profile']
    assert [g.synthesis.dtype for g in p.groups]==[np.float16]*len(p.groups) and p.rotations[0][0].dim==16

def write_velox():
    p,res = profile(velox_caches()[0], 2, True),{}
    p.save(DATA/'velox.profile.v1')
    for name,kw in VELOX.items():
        cs,how = velox_caches(**kw)
        save_prompt_cache(DATA/f'{name}.v1', cs, {'case': name}, profile=p, tokens=list(range(LONG)), **dict(codec='velox') | how)
        res |= {f'{name}/{k}': x for k,x in sample(load_prompt_cache(DATA/f'{name}.v1', profile=p)).items()}
    np.savez_compressed(DATA/'velox.npz', **{k: x.astype('f4' if np.abs(x).max()>6e4 else 'f2') for k,x in res.items()})
    all_ = json.loads((DATA/'long.json').read_text()) | {'velox.profile': p.digest}
    (DATA/'long.json').write_text(json.dumps(all_, indent=1)+'\n')

def write_long():
    for name in NAMES:
        cs = long_caches(name)
        save_prompt_cache(DATA/f'{name}.v1', cs, {'case': name}, codec=name.split('-')[0], tokens=list(range(cs[0].offset)))
    res = {n: digest(load_prompt_cache(DATA/f'{n}.v1')[0]) for n in NAMES}
    (DATA/'long.json').write_text(json.dumps(res, indent=1)+'\n')

if __name__=='__main__':
    if sys.argv[1:]==['velox']: sys.exit(write_velox())
    v = mlx_lm.__version__
    for codec in CODECS:
        save_prompt_cache(DATA/f'{codec}-{v}.v1', caches(codec!='lossless'), {'written by': f'mlx_lm {v}'}, codec=codec, tokens=list(range(40)))
    stock.save_prompt_cache(str(DATA/'s.safetensors'), caches(False), {'written by': v})
    (DATA/'s.safetensors').rename(DATA/f'stock-{v}.v1')
    if not (DATA/'long.json').exists(): write_long()
