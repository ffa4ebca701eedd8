from __future__ import annotations

import hashlib, json, math, tempfile, threading
import mlx.core as mx, numpy as np
from dataclasses import dataclass, field, asdict, is_dataclass
from fastcore.basics import patch
from functools import cached_property
from pathlib import Path
from fastcore.xdg import xdg_cache_home
from mlx_lm.models.cache import KVCache, make_prompt_cache
from veloxquant_mlx.container import CacheFileError, Container, ContainerWriter, to_numpy
from veloxquant_mlx.rans import RansModel, quantise_rows
from veloxquant_mlx.saliency import normalized_attention, observe_attention
from veloxquant_mlx.token_axis import dct_blocks, frequencies, step_profile
from veloxquant_mlx.transform import (Moments, Rotation, block_diagonal, cached_rotations, join_heads, key_metric, klt,
                                      metric_root, scalar_metric, weight_moments)

SINKS,LENGTH,DC = 4,16,.5     # tokens kept exact, tokens in a DCT block, step of its DC row
EDGE0,OCTAVE,CLASSES = -8.,3,40 # classes of components: a third of an octave of mean magnitude each, from 2**-8 on
PRESETS = {'near-lossless': .6, 'high': 1.2, 'balanced': 2., 'small': 3.5}

class ProfileError(CacheFileError): "A profile is missing, damaged, or belongs to another model"

_lock = threading.Lock()
def _once(o, name, make):
    "An attribute that is made when first asked for, by one thread"
    if name not in o.__dict__:
        with _lock:
            if name not in o.__dict__: o.__dict__[name] = make()
    return o.__dict__[name]

def _dual(synthesis, metric):
    "`[F, R]`: the projection on the rows of `synthesis` that is orthogonal in the metric"
    b,i = synthesis.astype(np.float64),0
    m = np.empty_like(b)
    for block in metric:
        m[:,i:i+len(block)] = b[:,i:i+len(block)]@block.astype(np.float64)
        i += len(block)
    return np.ascontiguousarray(np.linalg.solve(m@b.T, m).T, np.float32)

@dataclass(frozen=True, eq=False)
class Group:
    "Layers that share a basis: keys before RoPE of all of them, then their values, `F` numbers a token"
    layers: tuple              # indices in the list of caches
    mean: np.ndarray           # `[F]` float32
    level: np.ndarray|None     # `[2, R]` float32: mean magnitude of each component at scale 1, DC rows and others
    synthesis: np.ndarray|None # `[R, F]` float16, largest variance first; None: `gain` instead
    metric: tuple = ()         # blocks of the metric's diagonal, float32, in the order of the channels
    gain: np.ndarray|None = None # `[F]` float32: step of each channel, where there is no basis

    @property
    def inverse(self) -> np.ndarray: # `[R, F]` float32
        "Components to channels."
        return _once(self, '_inverse', lambda: self.synthesis.astype(np.float32))
    @property
    def analysis(self) -> np.ndarray: # `[F, R]` float32
        "Channels to components: the projection that is orthogonal in the metric."
        return _once(self, '_analysis', lambda: _dual(self.synthesis, self.metric))

@patch
def forward(self:Group,
    x: np.ndarray, # `[T, F]` float32
    r: int|None=None, # components wanted, from the first
) -> np.ndarray: # `[T, r]` float32, in units of the step at scale 1
    "Vectors to components."
    if self.synthesis is None: return (x-self.mean)/self.gain
    return (x-self.mean)@self.analysis[:,:r]

@patch
def backward(self:Group,
    y: np.ndarray, # `[T, r]` float32
) -> np.ndarray: # `[T, F]` float32
    "Components to vectors; those left out count as 0."
    if self.synthesis is None: return y*self.gain+self.mean
    return y@self.inverse[:y.shape[1]]+self.mean

@dataclass(frozen=True, eq=False)
class Profile:
    "What calibration learned of a model: bases, steps, code tables"
    groups: tuple          # of `Group`
    rotations: tuple       # per layer (of keys, of values): `Rotation` or None
    shapes: tuple          # per layer ((H, D) of keys, (H, D) of values)
    rows: np.ndarray       # `uint16 [CLASSES, 256]`: code tables
    edges: np.ndarray      # `[CLASSES-1]` float32: borders of the classes
    meta: dict             # JSON: model, size, what it was made from, gamma

    def __repr__(self):
        r = sum(g.level.shape[1] for g in self.groups)
        return (f'Profile({self.meta.get("kind")}, {len(self.groups)} groups of {len(self.groups[0].layers)} layers, '
                f'{r} of {sum(len(g.mean) for g in self.groups)} components, {self.nbytes/1e6:.1f} MB)')

    @property
    def nbytes(self) -> int:
        "Bytes of all arrays, as stored."
        return sum(len(d) for d in _arrays(self).values())
    @cached_property
    def digest(self) -> str: # 32 hex digits
        "Names the profile in the files that need it."
        h = hashlib.blake2b(json.dumps(self.meta, sort_keys=True).encode(), digest_size=16)
        for k,v in sorted(_arrays(self).items()): h.update(k.encode()); h.update(v)
        return h.hexdigest()
    @cached_property
    def costs(self) -> np.ndarray: # float32 `[CLASSES, 256]`: bits of each symbol, 14 for one that must escape
        return 12-np.log2(np.where(self.rows>0, self.rows, .25)).astype(np.float32)
    @cached_property
    def model(self) -> RansModel: # without channel classes
        m = RansModel(self.rows)
        m.encode_tables # made once, for `with_classes` hands them on
        return m

@patch
def classes(self:Profile,
    level: np.ndarray, # mean magnitude, float32, any shape
    scale: float,      # multiple of the step
) -> np.ndarray: # uint8
    "Class of each component; the same on every machine, for float32 division and comparison are exact."
    return np.searchsorted(self.edges, level/np.float32(scale)).astype(np.uint8)

@patch
def predict_bits(self:Profile,
    scale: float, # multiple of the step
) -> float: # bits per element of keys and values, exact tokens left aside
    "What the calibration texts would take: the entropy of each component's table."
    p = self.rows/4096
    H = -(p*np.log2(np.where(p>0, p, 1))).sum(-1)
    bits = sum((H[self.classes(g.level, scale)]*np.array([[1/LENGTH], [1-1/LENGTH]])).sum() for g in self.groups)
    return float(bits/sum(len(g.mean) for g in self.groups))

@patch
def scale_for(self:Profile,
    bits: float, # bits per element wanted
) -> float:
    "The scale at which `predict_bits` gives that many."
    lo,hi = -5.,7.
    for _ in range(40):
        mid = (lo+hi)/2
        lo,hi = (mid,hi) if self.predict_bits(2**mid)>bits else (lo,mid)
    return float(np.float32(2**lo))

def _pack(m): return m[np.tril_indices(len(m))]
def _unpack(v, n):
    m = np.zeros((n, n), np.float32)
    m[np.tril_indices(n)] = v
    return m+np.tril(m, -1).T

def _arrays(p):
    "Section name -> bytes of all arrays of a profile"
    res = {'rows': p.rows.astype('<u2').tobytes(), 'edges': p.edges.astype('<f4').tobytes()}
    for i,g in enumerate(p.groups):
        res[f'g{i:03d}.mean'],res[f'g{i:03d}.level'] = (a.astype('<f4').tobytes() for a in (g.mean, g.level))
        if g.synthesis is None: res[f'g{i:03d}.gain'] = g.gain.astype('<f4').tobytes(); continue
        res[f'g{i:03d}.basis'] = g.synthesis.astype('<f2').tobytes()
        res[f'g{i:03d}.metric'] = b''.join(_pack(m).astype('<f4').tobytes() for m in g.metric)
    return res

def _manifest(p):
    rot = [None if r is None else dict(dim=r.dim, pairs=r.pairs.tolist(), freq=r.freq.astype(float).tolist(),
           amplitude=r.amplitude.astype(float).tolist()) for pair in p.rotations for r in pair]
    kinds,index = [],[]
    for r in rot:
        if r not in kinds: kinds.append(r)
        index.append(kinds.index(r))
    return dict(profile=1, digest=p.digest, meta=p.meta, shapes=p.shapes, rotations=kinds, rotation=index,
                groups=[dict(layers=list(g.layers), rank=g.level.shape[1], basis=g.synthesis is not None,
                             blocks=[len(m) for m in g.metric]) for g in p.groups])

def profile_dir() -> Path: # `$XDG_CACHE_HOME/veloxquant/profiles`
    "Where profiles are kept and looked for."
    d = xdg_cache_home()/'veloxquant'/'profiles'
    d.mkdir(parents=True, exist_ok=True)
    return d

@patch
def save(self:Profile,
    file: str|Path|None=None, # None: in `profile_dir`, under the model's digest
) -> Path: # where it lies
    "Write the profile as one safetensors file."
    file = Path(file or profile_dir()/f'{self.meta["model"]}-{self.meta["kind"]}-{self.digest[:12]}.safetensors')
    with ContainerWriter(file, _manifest(self)) as w:
        for k,v in _arrays(self).items(): w.add(k, v)
    return file

@patch
def to_bytes(self:Profile) -> bytes:
    "The profile's file, as bytes."
    with tempfile.TemporaryDirectory() as d: return self.save(Path(d)/'p.safetensors').read_bytes()

def _ints(v, n=None, low=0, high=1<<20):
    if type(v) is not list or (n is not None and len(v)!=n) or not all(type(i) is int and low<=i<high for i in v): raise ValueError(f'bad list {str(v)[:60]}')
    return v

def _floats(f, name, shape, dtype='<f4'):
    "An array of a section whose size must fit; all finite"
    n,d = math.prod(shape)*np.dtype(dtype).itemsize,f.section(name)
    if len(d)!=n: raise ValueError(f'section {name}: {len(d)} bytes, {n} wanted')
    a = np.frombuffer(d, dtype).reshape(shape)
    if a.dtype.kind=='f' and not np.isfinite(a).all(): raise ValueError(f'section {name}: not finite')
    return a

def _rotation(r):
    if r is None: return None
    d,n = r['dim'],len(r['pairs'])
    _ints([d, n], high=1<<16)
    pairs = np.array([_ints(p, 2, high=d) for p in r['pairs']], np.int32).reshape(n, 2)
    freq,amp = np.array(r['freq'], np.float32),np.array(r['amplitude'], np.float32)
    if freq.shape!=(n,) or amp.shape!=(d,) or not np.isfinite(freq).all() or not np.isfinite(amp).all() or not (amp>0).all(): raise ValueError('bad rotation')
    return Rotation(d, pairs, freq, amp)

def _read_group(f, i, g, shapes):
    layers = tuple(_ints(g['layers'], high=len(shapes)))
    F,(R,) = sum(h*d for j in (0, 1) for l in layers for h,d in [shapes[l][j]]),_ints([g['rank']], high=1<<20)
    if not layers or R>F: raise ValueError(f'group {i}: {R} components of {F}')
    name = lambda s: f'g{i:03d}.{s}'
    mean,level = _floats(f, name('mean'), (F,)),_floats(f, name('level'), (2, R))
    if (level<0).any(): raise ValueError(f'group {i}: negative level')
    if not g['basis']:
        if R!=F or not ((gain := _floats(f, name('gain'), (F,)))>0).all(): raise ValueError(f'group {i}: gain')
        return Group(layers, mean, level, None, (), gain)
    blocks = _ints(g['blocks'], low=1)
    if sum(blocks)!=F: raise ValueError(f'group {i}: blocks')
    m,at,metric = _floats(f, name('metric'), (sum(n*(n+1)//2 for n in blocks),)),0,[]
    for n in blocks: metric.append(_unpack(m[at:at+n*(n+1)//2], n)); at += n*(n+1)//2
    return Group(layers, mean, level, _floats(f, name('basis'), (R, F), '<f2'), tuple(metric))

@patch(cls_method=True)
def load(cls:Profile,
    file: str|Path|bytes, # the file, or its bytes
) -> Profile:
    "Read a profile and check it; raises `ProfileError` or another `CacheFileError`."
    with Container(file) as f:
        m = f.metadata
        try:
            if type(m) is not dict or m.get('profile')!=1: raise ValueError('not a profile')
            shapes = tuple(tuple(tuple(_ints(s, 2, 1, 1<<16)) for s in p) for p in m['shapes'])
            if len(shapes)>4096 or any(len(p)!=2 for p in shapes): raise ValueError('bad shapes')
            kinds = [_rotation(r) for r in m['rotations']]
            rot = [kinds[i] for i in _ints(m['rotation'], 2*len(shapes), 0, len(kinds))]
            rows,edges = _floats(f, 'rows', (CLASSES, 256), '<u2'),_floats(f, 'edges', (CLASSES-1,))
            p = cls(tuple(_read_group(f, i, g, shapes) for i,g in enumerate(m['groups'])), tuple(zip(rot[::2], rot[1::2])), shapes, rows, edges, m['meta'])
            if not p.groups or len(seen := [l for g in p.groups for l in g.layers])!=len(set(seen)): raise ValueError('a layer in two groups')
            if p.model.prec!=12: raise ValueError('bad tables')
            if p.digest!=m.get('digest'): raise ValueError('its digest does not fit')
        except CacheFileError: raise
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError) as e:
            raise ProfileError(f'no usable profile: {e}', f.file) from None
    return p

def model_key(
    model, # an mlx_lm model
) -> str: # 16 hex digits
    "Names a model by its configuration and its final norm, whether its weights are quantized or not."
    args = getattr(model, 'args', None)
    args = asdict(args) if is_dataclass(args) else dict(vars(args)) if args is not None else {}
    args = {k: v for k,v in args.items() if 'quant' not in k}
    h = hashlib.blake2b(json.dumps(args, sort_keys=True, default=str).encode(), digest_size=8)
    norm = getattr(getattr(model, 'model', model), 'norm', None)
    if norm is not None and 'weight' in norm: h.update(np.array(norm.weight.astype(mx.float32)).tobytes())
    return h.hexdigest()

def find_profile(
    digest: str|None=None, # of the profile (its first digits are enough)
    model: str|None=None,  # key of the model, see `model_key`
    kind: str|None=None,   # 'small', 'large', …; None: any calibrated one, larger ones first
) -> Profile|None:
    "Look in `profile_dir`; the newest that fits."
    files = sorted(profile_dir().glob('*.safetensors'), key=lambda p: -p.stat().st_mtime)
    rank = {k: i for i,k in enumerate(('large', 'small', 'weights'))}
    files.sort(key=lambda p: rank.get(p.stem.split('-')[1] if p.stem.count('-')==2 else '', 9))
    for p in files:
        m,k,d = (p.stem.split('-')+['', '', ''])[:3]
        if (digest and not digest.startswith(d)) or (model and m!=model) or (kind and k!=kind) or not d: continue
        try: res = Profile.load(p)
        except CacheFileError: continue
        if digest is None or res.digest==digest: return res

class _Watched(KVCache):
    "A cache that keeps the queries of its last call"
    def observe_queries(self, q, scale): self.queries,self.scale = q,scale

def probe_attention(
    model,               # an mlx_lm model
    tokens: list,        # the ids that the caches hold
    cache: list,         # exact `KVCache`s (others are left out)
    windows: int=4,      # places along the context from which we look back
    size: int=64,        # queries at each
) -> list: # per cache `[tokens]` float32 or None: attention a token gets, over the probes that see it; NaN where too few do
    "Let a few short runs over the cache's own tokens say which tokens attention reads."
    n = len(tokens)
    plain = [type(c) is KVCache and c.offset==n for c in cache]
    total,seen = [np.zeros(n) for _ in cache],np.zeros(n)
    ends = sorted({int(n*(i+1)/windows) for i in range(windows)}-{0})
    for b in ends if all(plain) else []:
        a = max(0, b-size)
        run = make_prompt_cache(model)
        for i,c in enumerate(cache):
            w = run[i] = _Watched()
            if a: w.keys,w.values,w.offset = c.keys[...,:a,:],c.values[...,:a,:],a
        with observe_attention(model): mx.eval(model(mx.array(tokens[a:b])[None], cache=run))
        vis = np.maximum(0, np.minimum(b-a, b-np.arange(n)))
        for i,(c,w) in enumerate(zip(cache, run)):
            s = normalized_attention(w.queries, c.keys[...,:b,:], mx.arange(a, b), w.scale)
            total[i][:b] += np.array(s.mean((0, 1)))*vis[:b]
        seen += vis
    with np.errstate(invalid='ignore', divide='ignore'):
        return [np.where(seen>=16, t/seen, np.nan).astype(np.float32) if p and seen.any() else None for t,p in zip(total, plain)]

def token_classes(
    scores: list,     # per layer `[tokens]`, see `probe_attention`
    gamma: float=.3,  # step ∝ attention**-gamma
) -> np.ndarray: # uint8 `[tokens]`, 0 .. 6: the step is multiplied by 2**((class-4)/2)
    "Seven classes of half an octave: what attention reads much gets a finer step."
    lg = np.mean([np.log2(s+1e-9) for s in scores], 0)
    lg = np.nan_to_num(lg-np.nanmedian(lg))
    return (np.clip(np.rint(-2*gamma*lg), -4, 2)+4).astype(np.uint8)

class _Given(KVCache):
    "A cache whose content is a variable of differentiation"
    def __init__(self, k, v): super().__init__(); self.keys,self.values,self.offset = k,v,k.shape[2]
    def update_and_fetch(self, k, v):
        return mx.concatenate([self.keys, k.astype(self.keys.dtype)], 2),mx.concatenate([self.values, v.astype(self.values.dtype)], 2)

def cache_gradients(
    model,        # an mlx_lm model
    kv: list,     # (K, V) per layer, `[1, H, T, D]`
    ids: list,    # tokens that follow the context
    seed: int=0,  # of the tokens drawn from the model's own prediction
) -> tuple: # gradients of K, of V: lists of arrays
    "Gradient of the log-probability of tokens drawn from the model, with respect to every cached key and value."
    def logp(ks, vs):
        z = model(mx.array(ids)[None], cache=[_Given(k, v) for k,v in zip(ks, vs)])[0].astype(mx.float32)
        z = z-mx.logsumexp(z, -1, keepdims=True)
        y = mx.random.categorical(mx.stop_gradient(z), key=mx.random.key(seed))
        return mx.take_along_axis(z, y[:,None], -1).sum()
    gk,gv = mx.grad(logp, (0, 1))([k for k,_ in kv], [v for _,v in kv])
    mx.eval(gk, gv)
    return gk,gv

@dataclass
class Observed:
    "One calibration text: what the model cached, what it attended to, what it is sensitive to"
    n: int            # tokens in the cache
    kv: list          # per layer (K before RoPE, V) as numpy `[H, T, D]`
    scores: list|None # per layer `[T]`, see `probe_attention`
    fisher: list      # per layer second moments `[F, F]` of the gradients of K before RoPE and of V

def _flat(x): return np.ascontiguousarray(x.swapaxes(0, 1).reshape(x.shape[1], -1))

def observe(
    model,              # an mlx_lm model
    tokens: list,       # ids of a text, at least `score`+16 of them
    score: int=256,     # tokens whose prediction is differentiated: the text's last ones, and as many of a far passage repeated
    draws: int=2,       # gradients per passage
    step: int=256,      # tokens per call of the model
) -> Observed:
    "Run a text through the model once, then differentiate what follows with respect to the cache."
    n = len(tokens)-score
    if n<score+16: raise ValueError(f'{len(tokens)} tokens: a calibration text needs at least {2*score+16}')
    cache = make_prompt_cache(model)
    if any(type(c) is not KVCache for c in cache):
        raise ValueError(f'calibration needs plain caches, this model makes {sorted({type(c).__name__ for c in cache})}')
    for i in range(0, n, step):
        model(mx.array(tokens[i:min(n, i+step)])[None], cache=cache)
        mx.eval([c.state for c in cache])
    kv = [(c.keys[...,:n,:], c.values[...,:n,:]) for c in cache]
    rots = [cached_rotations(l, k.shape[-1], v.shape[-1])[0] for l,(k,v) in zip(model.layers, kv)]
    scores,fisher = probe_attention(model, tokens[:n], cache),[[0., 0.] for _ in kv]
    del cache
    far = n//4
    for ids in (tokens[n:], tokens[far:far+score]):
        for s in range(draws):
            for l,(gk,gv) in enumerate(zip(*cache_gradients(model, kv, ids, s))):
                gk,gv = (np.array(g[0,:,SINKS:], np.float32) for g in (gk, gv))
                if rots[l] is not None: gk = rots[l].undo(gk, SINKS)*rots[l].amplitude**2   # rotations keep lengths
                for j,g in enumerate((_flat(gk), _flat(gv))): fisher[l][j] = fisher[l][j]+(g.T@g)/(2*draws*len(ids)*(n-SINKS))
    host = lambda x: np.array(x[0].astype(mx.float32))
    res = [(host(k) if r is None else rots[l].undo(host(k)), host(v)) for l,((k,v),r) in enumerate(zip(kv, rots))]
    return Observed(n, [(k.astype(np.float16), v.astype(np.float16)) for k,v in res], None if scores[0] is None else scores, fisher)

def _vectors(o, layers):
    "`[T-SINKS, F]`: keys of the layers, then values"
    return np.concatenate([_flat(o.kv[l][j][:,SINKS:].astype(np.float32)) for j in (0, 1) for l in layers], 1)

def _coefficients(y, weight=None):
    "DCT coefficients of components `[T, R]` from position SINKS on, in steps; which rows are DC"
    if weight is not None: y = y/weight[SINKS:,None]
    f = frequencies(len(y), LENGTH, SINKS)
    return dct_blocks(y, LENGTH, SINKS)/step_profile(len(y), LENGTH, SINKS, DC)[:,None],f==0

def _count(counts, z, level, edges, scales=(.8, 1.2, 2., 3.5)):
    "Add the codes of `z` at several scales to the class counts"
    for s in scales:
        q = np.clip(np.rint(z/np.float32(s)), -127, 127).astype(np.int16) & 255
        q += 256*np.searchsorted(edges, level/np.float32(s)).astype(np.int16)
        counts += np.bincount(q.reshape(-1), minlength=counts.size).reshape(counts.shape)

def code_rows(
    counts: np.ndarray, # `[CLASSES, 256]` codes seen, as symbols mod 256
) -> np.ndarray: # `uint16 [CLASSES, 256]`
    "Tables from counts: symmetric, with a little of a geometric law where few codes were seen."
    v = np.minimum(np.arange(256), 256-np.arange(256))
    n = (counts+counts[:,-np.arange(256)])/2
    m = 2.**((np.arange(CLASSES)+.0)/OCTAVE+EDGE0)[:,None]
    prior = (m/(1+np.sqrt(1+m*m)))**v
    p = n+20*prior/prior.sum(1, keepdims=True)
    p /= p.sum(1, keepdims=True)
    return quantise_rows(np.where((p<2**-13.5) & (v>0), 0, p), 12)

def class_edges(): return (2.**((np.arange(CLASSES-1)+.5)/OCTAVE+EDGE0)).astype(np.float32)

def make_profile(
    texts: list,          # of `Observed`
    model,                # the model they were observed in
    span: int=1,          # layers that share a basis
    gamma: float=.3,      # steps ∝ attention**-gamma; 0: all tokens alike
    ratio: float=1.4,     # how much coarser keys are coded than their metric says
    mix: float=.9,        # share of the full metric of values; the rest counts all directions of a layer alike
    floor: float=.15,     # components below this mean magnitude (in steps at scale 1) are left out
    made_from: list=(),   # names of the texts
) -> Profile:
    "Bases, steps and tables from observed texts."
    L,o = len(texts[0].kv),texts[0]
    F = lambda l,j: sum(t.fisher[l][j] for t in texts)/len(texts)
    dims = sum(k.shape[0]*k.shape[2]+v.shape[0]*v.shape[2] for k,v in o.kv)
    unit = math.sqrt(.225/(np.mean([t.n for t in texts])*dims))    # the step at which the metric predicts KL 0.0094
    edges,counts,groups = class_edges(),np.zeros((CLASSES, 256), np.int64),[]
    for a in range(0, L, span):
        ls = tuple(range(a, min(L, a+span)))
        metric = [F(l, 0)/ratio**2 for l in ls]+[mix*F(l, 1)+(1-mix)*scalar_metric(F(l, 1)) for l in ls]
        metric = [(m+.02*np.trace(m)/len(m)*np.eye(len(m)))/unit**2 for m in metric]
        mom = None
        for t in texts: mom = (m := Moments.of(_vectors(t, ls))) if mom is None else mom+Moments.of(_vectors(t, ls))
        b = klt(mom, metric, ridge=0)
        ws = [2.**((token_classes([t.scores[l] for l in ls], gamma).astype(np.float32)-4)/2) if gamma and t.scores else None for t in texts]
        zs = [_coefficients(b.forward(_vectors(t, ls)), w) for t,w in zip(texts, ws)]
        dc,ac = (np.concatenate([z[i==k] for z,i in zs]) for k in (True, False))
        level = np.stack([np.abs(x).mean(0) for x in (dc, ac)]).astype(np.float32)
        keep = level.max(0)>floor
        level = level[:,keep]
        for x,lv in zip((dc, ac), level): _count(counts, x[:,keep], lv, edges)
        groups.append(Group(ls, b.mean, level, b.synthesis[keep].astype(np.float16), tuple(m.astype(np.float32) for m in metric)))
    rots = tuple(cached_rotations(l, k.shape[-1], v.shape[-1]) for l,(k,v) in zip(model.layers, o.kv))
    shapes = tuple(tuple((x.shape[0], x.shape[2]) for x in kv) for kv in o.kv)
    meta = dict(model=model_key(model), kind='small' if span==1 else 'large', span=span, gamma=gamma, ratio=ratio, mix=mix, unit=unit,
                texts=[dict(name=str(n), tokens=t.n) for n,t in zip(list(made_from)+['']*len(texts), texts)])
    return Profile(tuple(groups), rots, shapes, code_rows(counts), edges, meta)

def _from_cache(kv, model, basis, kind, made):
    "A profile whose means, levels and tables come from a cache; `basis(l, xs)` gives a layer's (mean, synthesis, metric, gain)"
    groups,rots,edges,counts = [],[],class_edges(),np.zeros((CLASSES, 256), np.int64)
    for l,(k,v) in enumerate(kv):
        rots.append((None, None) if model is None else cached_rotations(model.layers[l], k.shape[-1], v.shape[-1]))
        xs = [np.asarray(x, np.float32) if r is None else r.undo(x) for x,r in zip((k, v), rots[l])]
        xs = [x[:,:,SINKS if x.shape[2]>2*SINKS else 0:].swapaxes(1, 2).reshape(-1, x.shape[1]*x.shape[3]) for x in xs]
        x = np.concatenate(xs, 1)
        g = Group((l,), x.mean(0).astype(np.float16).astype(np.float32), None, *basis(l, xs, rots[l]))
        z,dc = _coefficients(g.forward(x))
        level = np.stack([np.abs(z[dc==t]).mean(0) for t in (True, False)]).astype(np.float32)
        for t,lv in zip((True, False), level): _count(counts, z[dc==t], lv, edges)
        groups.append(Group((l,), g.mean, level, g.synthesis, g.metric, g.gain))
    shapes = tuple(tuple((x.shape[1], x.shape[3]) for x in o) for o in kv)
    meta = dict(model='' if model is None else model_key(model), kind=kind, span=1, gamma=.3, texts=made)
    return Profile(tuple(groups), tuple(rots), shapes, code_rows(counts), edges, meta)

def weights_profile(
    model,          # an mlx_lm model
    kv: list,       # per layer (K, V) `[B, H, T, D]`, numpy float32: gives means and tables
    logit: float=.1, # step of keys at scale 1, as an error of an attention logit
    gain: float=.8, # step of values at scale 1, in standard deviations
) -> Profile:
    "Bases from the weights alone: covariances of projections of isotropic inputs, keys in the metric of the queries."
    def basis(l, xs, rot):
        H,D = kv[l][0].shape[1],kv[l][0].shape[3]
        mk,mv,q = weight_moments(model.layers[l], H)
        metric = [m/logit**2 for m in key_metric(q, rot[0], D**-.5)]
        metric = [m+.02*np.trace(m)/D*np.eye(D) for m in metric]
        metric.append(np.eye(len(mv.mean))/(gain*xs[1].std(0).mean())**2)
        mom = Moments(1, np.concatenate([mk.mean, mv.mean]), block_diagonal([mk.cov*xs[0].var(0).sum()/np.trace(mk.cov), mv.cov*xs[1].var(0).sum()/np.trace(mv.cov)]))
        return klt(mom, metric, ridge=0).synthesis.astype(np.float16),tuple(m.astype(np.float32) for m in metric),None
    return _from_cache(kv, model, basis, 'weights', [])

def identity_profile(
    kv: list,       # per layer (K, V) `[B, H, T, D]`, numpy float32
    model=None,     # given: keys are turned back before RoPE
    gain: float=.4, # step of a layer at scale 1, in standard deviations
) -> Profile:
    "No bases: one step for a layer's keys and one for its values."
    basis = lambda l, xs, rot: (None, (), np.concatenate([np.full(x.shape[1], max(gain*x.std(0).mean(), 1e-6), np.float32) for x in xs]))
    return _from_cache(kv, model, basis, 'identity', [])
