"""Files written once by format version 1 must load for ever, with every mlx_lm.

`python tests/test_golden.py` writes the set for the mlx_lm that is installed; it is done once for each format version."""
from pathlib import Path
import mlx.core as mx, mlx_lm, pytest
from mlx_lm.models import cache as stock
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, RotatingKVCache
from veloxquant_mlx.container import to_numpy
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

if __name__=='__main__':
    v = mlx_lm.__version__
    for codec in CODECS:
        save_prompt_cache(DATA/f'{codec}-{v}.v1', caches(codec!='lossless'), {'written by': f'mlx_lm {v}'}, codec=codec, tokens=list(range(40)))
    stock.save_prompt_cache(str(DATA/'s.safetensors'), caches(False), {'written by': v})
    (DATA/'s.safetensors').rename(DATA/f'stock-{v}.v1')
