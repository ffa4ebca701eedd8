"KV-cache compression for MLX"
__version__ = "0.0.1"

from importlib import import_module as _import

_public = { # name -> module; imported at first use, so that `import veloxquant_mlx` costs nothing
    'KVCacheConfig': 'config', 'KVCacheBuilder': 'builder', 'KVCacheFactory': 'builder', 'compress_model': 'builder',
    'CacheGenKVCache': 'cache.cachegen_cache', 'ZipCacheKVCache': 'cache.zipcache_cache',
    'zipcache_compress': 'codecs.zipcache', 'zipcache_reconstruct': 'codecs.zipcache',
    'save_prompt_cache': 'prompt_cache', 'load_prompt_cache': 'prompt_cache', 'convert': 'prompt_cache', 'inspect': 'prompt_cache',
    'verify': 'prompt_cache', 'CacheFileError': 'container', 'calibrate': 'profile', 'Profile': 'profile',
}
__all__ = [*_public]

def __getattr__(name):
    if name not in _public: raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(_import(f'{__name__}.{_public[name]}'), name)

def __dir__(): return sorted([*globals(), *_public])
