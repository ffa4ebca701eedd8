"Tiny random models of mlx_lm's families: calibrated or not, their caches go through velox files and on from there."
import importlib
import mlx.core as mx, numpy as np, pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from veloxquant_mlx.profile import calibrate, held_tokens
from veloxquant_mlx.prompt_cache import load_prompt_cache, save_prompt_cache

BASE = dict(hidden_size=64, num_hidden_layers=2, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5,
            vocab_size=50, rope_theta=1e4, max_position_embeddings=512, tie_word_embeddings=True)
MLA = dict(kv_lora_rank=24, q_lora_rank=16, qk_rope_head_dim=16, v_head_dim=16, qk_nope_head_dim=16, moe_intermediate_size=32,
           n_routed_experts=None, first_k_dense_replace=10)
YARN = dict(rope_type='yarn', factor=32., original_max_position_embeddings=64)
LLAMA3 = dict(rope_type='llama3', factor=8., low_freq_factor=1., high_freq_factor=4., original_max_position_embeddings=64)
FAMILIES = dict(llama={}, llama3=dict(rope_scaling=LLAMA3), linear=dict(rope_scaling=dict(type='linear', factor=4.)), qwen2={},
    qwen3=dict(head_dim=32), yarn=dict(head_dim=32, rope_scaling=YARN), gemma3_text=dict(head_dim=32, sliding_window=100, sliding_window_pattern=2),
    phi=dict(partial_rotary_factor=.5, layer_norm_eps=1e-5), phi3=dict(partial_rotary_factor=.5), nanochat={},
    longrope=dict(rope_scaling=dict(type='longrope', long_factor=[1.]*8, short_factor=[1.]*8), original_max_position_embeddings=64),
    smollm3=dict(no_rope_layers=[0, 0]), deepseek_v2=dict(MLA, rope_scaling=dict(YARN, type='yarn')), deepseek_v3=MLA,
    gpt_oss=dict(head_dim=16, num_local_experts=2, num_experts_per_tok=1, sliding_window=100, rope_scaling=YARN),
    gpt2=dict(n_ctx=512, n_embd=64, n_head=4, n_layer=2, n_positions=512, layer_norm_epsilon=1e-5))
MODULE = dict(llama3='llama', linear='llama', yarn='qwen3', longrope='phi3')
TOKENS = np.random.default_rng(0).integers(0, 50, 900).tolist()

def tiny(name):
    m = importlib.import_module(f'mlx_lm.models.{MODULE.get(name, name)}')
    mx.random.seed(3)
    net = m.Model(m.ModelArgs.from_dict({**BASE, 'model_type': MODULE.get(name, name), **FAMILIES[name]}))
    net.set_dtype(mx.float32)
    return net

@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch): monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path/'home'))

def filled(net, n=300, dtype=mx.float16):
    cache = make_prompt_cache(net)
    net(mx.array(TOKENS[:n])[None], cache=cache)
    for c in cache: c.keys,c.values = c.keys.astype(dtype),c.values.astype(dtype)
    return cache

def goes_on(net, cache): return np.array(net(mx.array(TOKENS[300:320])[None], cache=cache)[0].astype(mx.float32))

def error(a, b):
    "Relative squared error of what two caches hold; the first four tokens of a context must be the same bits"
    (first,*x),(other,*y) = held_tokens(a),held_tokens(b)
    assert first==other and [o.shape for o in x]==[o.shape for o in y]
    if first==0: assert all(mx.array_equal(o[:,:,:4], p[:,:,:4]) for o,p in zip(x, y))
    x,y = (np.concatenate([np.array(o.astype(mx.float32)).reshape(-1) for o in l]) for l in (x, y))
    return ((x-y)**2).sum()/(x**2).sum()

def check(net, path, limit, after, **kw):
    cache = filled(net)
    r = save_prompt_cache(path, cache, codec='velox', model=net, tokens=TOKENS[:300], progress=False, **kw)
    back = load_prompt_cache(path, model=net, tokens=TOKENS[:300], profile=kw.get('profile'), progress=False)
    assert [(type(c), c.offset) for c in back]==[(type(c), c.offset) for c in cache] and not r.exact
    assert max(map(error, cache, back))<limit
    want,got = goes_on(net, cache),goes_on(net, back)
    assert ((want-got)**2).mean()<after*(want**2).mean()
    return r

@pytest.mark.parametrize('name', [n for n in FAMILIES if n!='deepseek_v3'])
def test_uncalibrated(name, tmp_path):
    "Bases from the weights where they can be read, else none; the steps are fine, so what comes back is near"
    r = check(tiny(name), tmp_path/'a', .01, .01, scale=.1)
    no_norms = {'nanochat', 'phi', 'phi3', 'longrope', 'gpt2', 'deepseek_v2'}   # fused or other projections
    assert r.params['kind'] in (('weights', 'identity') if name in no_norms else ('weights',))

@pytest.mark.parametrize('size', ['small', 'large'])
@pytest.mark.parametrize('name', [n for n in FAMILIES if n not in ('deepseek_v3', 'gpt2')])
def test_calibrated(name, size, tmp_path):
    net = tiny(name)
    try: p = calibrate(net, dict(random=TOKENS), size, context=600, score=60, draws=1, save=False, progress=False)
    except ValueError as e:
        if 'gather_axis' in str(e): pytest.skip('this mlx_lm has no gradients through experts')
        raise
    windows = [type(c) is RotatingKVCache for c in make_prompt_cache(net)]
    assert sorted(g.layers for g in p.groups)==([(0, 1)] if size=='large' and len({*windows})==1 else [(0,), (1,)])
    r = check(net, tmp_path/'a', 1, .05, scale=.3, profile=p)   # what hardly matters to a random model is left out
    assert r.params['kind']==size and (r.sections.get('steps', 0)>0 or name=='gpt_oss')

def test_mla(tmp_path):
    "The latent vectors of MLA are small already, and shared by all heads: they are kept exact"
    net = tiny('deepseek_v3')
    cache = filled(net)
    with pytest.raises(ValueError, match='MLA.*use lossless'): save_prompt_cache(tmp_path/'a', cache, codec='velox', model=net)
    both = [*cache, *filled(tiny('llama'))]
    r = save_prompt_cache(tmp_path/'a', both, codec='velox', progress=False)
    assert r.exact==2 and '2 of the layers without loss' in repr(r)
    for a,b in zip(both[:2], load_prompt_cache(tmp_path/'a', progress=False)):
        assert mx.array_equal(a.keys[...,:300,:], b.keys[...,:300,:]) and mx.array_equal(a.values[...,:300,:], b.values[...,:300,:])

@pytest.mark.parametrize('sizes', [[300], [150, 150], [150]+[1]*150, [299, 1]], ids=['once', 'halves', 'single', 'last'])
def test_rings(sizes, tmp_path):
    "However a ring was filled, the same last tokens are stored, and it goes on alike"
    net,at = tiny('gemma3_text'),0
    cache = make_prompt_cache(net)
    for n in sizes: net(mx.array(TOKENS[at:at+n])[None], cache=cache); at += n
    r = save_prompt_cache(tmp_path/'a', cache, codec='velox', scale=.02, model=net, tokens=TOKENS[:300], progress=False)
    back = load_prompt_cache(tmp_path/'a', progress=False)
    assert [c.keys.shape[2] for c in back if type(c) is RotatingKVCache]==[100] and [l[1] for l in r.layers]==[100, 300]
    assert any(k.startswith('c000000.w200.') for k in names(tmp_path/'a')) and max(map(error, cache, back))<1e-3
    for n in (1, 1, 20, 1, 200):
        step = mx.array(TOKENS[at:at+n])[None]
        a,b = (np.array(net(step, cache=c)[0]) for c in (cache, back))
        assert ((a-b)**2).mean()<.01*(a**2).mean()
        at += n

def names(p):
    from veloxquant_mlx.container import Container
    with Container(p) as f: return f.names

def test_kept_tokens(tmp_path):
    "A ring whose first tokens stay (`--max-kv-size`) is no run of tokens: it is kept exact, and the report says so"
    net = tiny('llama')
    cache = [KVCache(), RotatingKVCache(100, keep=4)]
    net(mx.array(TOKENS[:300])[None], cache=cache); net(mx.array(TOKENS[300:301])[None], cache=cache)
    r = save_prompt_cache(tmp_path/'a', cache, codec='velox', progress=False)
    back = load_prompt_cache(tmp_path/'a', progress=False)
    assert r.exact==1 and mx.array_equal(back[1].keys, cache[1].keys)

def test_refused():
    "Calibration says which caches it does not know"
    m = importlib.import_module('mlx_lm.models.mamba')
    net = m.Model(m.ModelArgs.from_dict(dict(model_type='mamba', vocab_size=50, hidden_size=64, intermediate_size=64, state_size=8,
        num_hidden_layers=2, conv_kernel=4, use_bias=False, use_conv_bias=True, time_step_rank=8)))
    with pytest.raises(ValueError, match='this model makes'): calibrate(net, dict(random=TOKENS), context=600, score=60)
