from __future__ import annotations

import os, struct, threading
import mlx.core as mx, numpy as np
from dataclasses import dataclass, replace
from numba import njit
from mlx_lm.models.cache import KVCache
from veloxquant_mlx.codecs.lossless import pack_array, unpack_array
from veloxquant_mlx.coders import G32Coder, _blob, _Reader, _unblob, _varint
from veloxquant_mlx.container import CHUNK, CacheFileError, Context, to_numpy
from veloxquant_mlx.profile import (DC, LENGTH, PRESETS, SINKS, Profile, ProfileError, find_profile, identity_profile, model_key, probe_attention, weights_profile,
                                    token_classes)
from veloxquant_mlx.rans import RansModel, quantise_rows
from veloxquant_mlx.token_axis import dct_matrix

try: from threadpoolctl import ThreadpoolController
except ImportError: ThreadpoolController = None

class _OneThread:
    "While chunks run side by side, numpy's matrix products stay in their threads: two levels of threads fight for the cores"
    def __init__(self): self.users,self.limit,self.lock = 0,None,threading.Lock()
    def __enter__(self):
        with self.lock:
            self.users += 1
            if self.users==1 and ThreadpoolController is not None:
                c = ThreadpoolController()
                own = [l.filepath for l in c.lib_controllers if 'numpy' in l.filepath]
                self.limit = c.select(filepath=own[0]).limit(limits=1) if own else None
    def __exit__(self, *e):
        with self.lock:
            self.users -= 1
            if self.users==0 and self.limit is not None: self.limit.restore_original_limits(); self.limit = None
_one_thread = _OneThread()

def _blocks(T, start):
    "First row and length of each DCT block, aligned to position"
    a,res = 0,[]
    while a<T:
        n = min(T-a, LENGTH-(start+a)%LENGTH)
        res.append((a, n))
        a += n
    return np.array(res, np.int64).reshape(-1, 2)

def _matrices():
    "`[17, 16, 16]` float32: the DCT of every block length, its DC row divided by the finer step"
    m = np.zeros((LENGTH+1, LENGTH, LENGTH), np.float32)
    for n in range(1, LENGTH+1):
        m[n,:n,:n] = dct_matrix(n)
        if n>1: m[n,0] /= np.float32(DC)
    return m

def _inverses():
    m = np.zeros((LENGTH+1, LENGTH, LENGTH), np.float32)
    for n in range(1, LENGTH+1):
        m[n,:n,:n] = dct_matrix(n).T
        if n>1: m[n,:,0] *= np.float32(DC)
    return m

@njit(cache=True, nogil=True, error_model='numpy')
def _quantize(y, inv, blocks, mats, dc, ac, col, total, big):
    "Components to symbols: scale, DCT, round. Fills columns `col`.. of `dc` and `ac`, sums of magnitudes, escapes; -1 where a value is not finite"
    R,acc,n_big = y.shape[1],np.empty(y.shape[1], np.float32),0
    arow = 0
    for b in range(len(blocks)):
        t0,n = blocks[b]
        for k in range(n):
            acc[:] = 0
            for j in range(n):
                m = mats[n, k, j]*inv[t0+j]
                for r in range(R): acc[r] += m*y[t0+j, r]
            bad = np.float32(0)
            for r in range(R): bad += acc[r]*np.float32(0)
            if bad!=0: return -1
            out = dc[b] if k==0 else ac[arow]
            stream = 0 if k==0 else 1
            for r in range(R):
                q = np.rint(acc[r])
                total[r] += abs(q)
                out[col+r] = np.uint8(np.int32(q))
            for r in range(R):
                if abs(acc[r])>=127.5:
                    if abs(acc[r])>=2.**30: return -1
                    if n_big<len(big):
                        big[n_big, 0],big[n_big, 1],big[n_big, 2] = stream,(b if k==0 else arow)*dc.shape[1]+col+r,np.int64(np.rint(acc[r]))
                    n_big += 1
                    out[col+r] = 0
            if k: arow += 1
    return n_big

@njit(cache=True, nogil=True, error_model='numpy')
def _dequantize(dc, ac, col, w, blocks, mats, y):
    "Symbols to components: inverse DCT, times the token's step"
    R,q = y.shape[1],np.empty((16, y.shape[1]), np.float32)
    arow = 0
    for b in range(len(blocks)):
        t0,n = blocks[b]
        for r in range(R): q[0, r] = np.float32(dc[b, col+r])
        for k in range(1, n):
            for r in range(R): q[k, r] = np.float32(ac[arow, col+r])
            arow += 1
        for j in range(n):
            for r in range(R): y[t0+j, r] = 0
            for k in range(n):
                m = mats[n, j, k]*w[t0+j]
                for r in range(R): y[t0+j, r] += m*q[k, r]

WEIGHTS = RansModel(quantise_rows(np.array([[3, 12, 45, 120, 220, 130, 60, 1]]), 10), None)  # of the token classes 0 .. 6
MAX_SHIFT = 12

def _parts(n): # groups that share a section
    k = min(n, 6)
    return [range(i*n//k, (i+1)*n//k) for i in range(k)]

def _floats(x, dtype):
    "What the bits of a cache stand for, float32"
    if dtype=='bfloat16': return (x.astype(np.uint32)<<16).view(np.float32)
    return x.astype(np.float32)

def _bits(x, dtype):
    "float32 to the bits of a cache, rounded to nearest even"
    if dtype=='bfloat16':
        u = x.view(np.uint32)
        return ((u+0x7fff+((u>>16)&1))>>16).astype(np.uint16)
    return x.astype(dtype)

def _gather(chunk, where, group, profile, start, b):
    "`[T, F]`: keys turned back, then values, of the group's layers"
    out,at = np.empty((chunk[where[group.layers[0]][0]][0].shape[2], len(group.mean)), np.float32),0
    for j in (0, 1):
        for l in group.layers:
            i,info = where[l]
            x = _floats(chunk[i][j][b], info.dtype)
            if (rot := profile.rotations[l][j]) is not None: x = rot.undo(x, start)
            H,T,D = x.shape
            out[:,at:at+H*D].reshape(T, H, D)[...] = x.swapaxes(0, 1)
            at += H*D
    return out

def _spread(x, where, group, profile, start, b, chunk):
    "The inverse of `_gather`, into the arrays of `chunk`"
    at = 0
    for j in (0, 1):
        for l in group.layers:
            i,info = where[l]
            o = chunk[i][j][b]
            H,T,D = o.shape
            h = np.ascontiguousarray(x[:,at:at+H*D].reshape(T, H, D).swapaxes(0, 1))
            if (rot := profile.rotations[l][j]) is not None: h = rot.redo(h, start)
            o[...] = _bits(h, info.dtype)
            at += H*D

def _plain(cache):
    "K and V of plain caches as float32"
    f = lambda x: np.array(x.astype(mx.float32))
    return [(f(c.keys[...,:c.offset,:]), f(c.values[...,:c.offset,:])) for c in cache if type(c) is KVCache and c.keys is not None]

def _settings(params):
    "Defaults filled in, ranges checked"
    o = dict(preset=None, scale=None, bits=None, embed_profile=False, sinks=SINKS, recent=0, saliency=True) | params
    if sum(o[k] is not None for k in ('preset', 'bits', 'scale'))>1: raise ValueError('preset, bits and scale exclude each other')
    for k,lo,hi in (('scale', .01, 100), ('bits', .02, 12), ('sinks', 0, 1024), ('recent', 0, 1<<20)):
        if o[k] is not None and not lo<=o[k]<=hi: raise ValueError(f'{k} = {o[k]!r}; allowed: {lo} to {hi}')
    if o['scale'] is None and o['bits'] is None:
        o['preset'] = o['preset'] or 'high'
        o['scale'] = PRESETS[o['preset']]
    return o

def _make(model, kv):
    "A profile where none was made: from the model's weights, else from the cache"
    if not kv: raise ProfileError('velox needs plain caches')
    if model is not None:
        try:
            p = weights_profile(model, kv)
            p.save()
            return p
        except (ValueError, AttributeError): pass
    return identity_profile(kv, model)

@dataclass(frozen=True)
class Prepared:
    "A profile and what `prepare` learned of one cache"
    profile: Profile
    classes: np.ndarray|None = None # uint8 `[groups, tokens]`, see `token_classes`

def _profile(context):
    p = context.profile
    return (p.profile, p.classes) if isinstance(p, Prepared) else (p, None)

def _layout(context):
    "layer -> (place, info); groups whose layers are all there"
    p,_ = _profile(context)
    if not isinstance(p, Profile): raise ProfileError('velox needs a profile; see `calibrate`')
    where = {l.index: (i, l) for i,l in enumerate(context.layers)}
    groups = [g for g in p.groups if all(l in where for l in g.layers)]
    missing = where.keys()-{l for g in groups for l in g.layers}
    if missing: raise ProfileError(f'the profile does not cover layers {sorted(missing)[:8]}')
    for i,(_,l) in where.items():
        got = tuple((s[1], s[3]) for s in (l.k_shape, l.v_shape))
        if got!=tuple(map(tuple, p.shapes[i])): raise ProfileError(f'layer {i}: the cache has (heads, size) {got}, the profile {p.shapes[i]}')
    return p,where,groups

def _exact(T, start, params, total):
    "Tokens at the start and the end of a chunk that are stored as they are"
    lead = min(T, max(0, params.get('sinks', SINKS)-start))
    tail = max(0, min(T-lead, start+T-max(total-params.get('recent', 0), 0))) if total else 0
    return lead,tail

class VeloxCodec:
    "Bases over layers, one step, steps by attention, G32; see the notebook"
    id,kinds,threads = 'velox',('kv',),True

    options = ('bits', 'scale', 'embed_profile', 'sinks', 'recent', 'saliency')

    def params(self, preset=None) -> dict:
        "Settings of a preset: `near-lossless`, `high` (the default), `balanced` or `small`."
        if preset is not None and preset not in PRESETS: raise ValueError(f'preset {preset!r}; allowed: {", ".join(PRESETS)}')
        return dict(preset=preset)
    def n_sections(self, n): return 3+len(_parts(max(n, 1)))

    def prepare(self, cache: list, tokens: list|None, context: Context) -> Context:
        "Find or make the profile, look where attention goes, settle the step; called once for a cache."
        o,kv,p = _settings(context.params),_plain(cache),context.profile
        if isinstance(p, (str, os.PathLike)): p = Profile.load(p)
        if p is None and context.model is not None: p = find_profile(model=model_key(context.model))
        if p is None: p = _make(context.model, kv)
        if context.model is not None and p.meta.get('model') not in ('', model_key(context.model)): raise ProfileError('the profile was made for another model')
        scores = None
        if o.pop('saliency') and p.meta.get('gamma') and context.model is not None and tokens and kv and len(kv)==len(cache):
            try: scores = probe_attention(context.model, tokens, cache)
            except ValueError: pass   # a model whose attention cannot be observed
        if scores and scores[0] is not None:
            scores = np.stack([token_classes([scores[l] for l in g.layers], p.meta['gamma']) for g in p.groups])
        else: scores = None
        ready,bits = Prepared(p, scores),o.pop('bits')
        if o['scale'] is None: o['scale'] = self._scale(bits, cache, replace(context, profile=ready, params=o))
        embed = bool(o.pop('embed_profile')) or p.meta['kind']=='identity'
        return replace(context, profile=ready, params=o|dict(bits=bits, predicted=round(p.predict_bits(o['scale']), 4), profile=p.digest, kind=p.meta['kind'], embedded=embed))

    def _scale(self, bits, cache, context):
        "The scale that gives so many bits, corrected by what one chunk of this cache takes"
        p,n = context.profile.profile,cache[0].offset
        a = n//2//CHUNK*CHUNK
        chunk = [tuple(np.ascontiguousarray(to_numpy(x[...,a:min(n, a+CHUNK),:])) for x in (c.keys, c.values)) for c in cache]
        from veloxquant_mlx.container import LayerInfo, dtype_name
        layers = [LayerInfo(i, 'kv', dtype_name(c.keys), k.shape, v.shape) for i,(c,(k,v)) in enumerate(zip(cache, chunk))]
        size,want = sum(x.size for kv in chunk for x in kv),bits
        if context.params.get('sinks'): want -= 12*min(n, context.params['sinks'])/n
        scale = p.scale_for(max(want, .02))
        for _ in range(3):
            s = self.encode(chunk, replace(context, start=a, layers=layers, params=context.params|dict(scale=scale)))
            real = 8*sum(map(len, s.values()))/size
            scale = p.scale_for(max(.02, p.predict_bits(scale)*want/real))
        return scale

    def head(self, context: Context) -> dict:
        "The profile, if the file carries it."
        return {'profile': context.profile.profile.to_bytes()} if context.params['embedded'] else {}

    def open(self, sections: dict, context: Context) -> Context:
        "Find the profile that a file needs: given, in the file, or in the cache folder."
        p,digest = context.profile,context.params['profile']
        scale = context.params['scale']
        if type(scale) not in (int, float) or not .005<=scale<=200: raise ValueError(f'scale {scale!r}')
        if isinstance(p, (str, os.PathLike)): p = Profile.load(p)
        if p is not None and p.digest!=digest: raise ProfileError(f'the file was written with profile {digest}, not with {p.digest}')
        if p is None and 'profile' in sections: p = Profile.load(sections['profile'])
        if p is None: p = find_profile(digest)
        if p is None or p.digest!=digest:
            raise ProfileError(f'needs the profile {digest} ({context.params.get("kind")}), which is not in the profile folder: copy it there or pass `profile=`; '
                               '`veloxquant calibrate` makes one for new files; `embed_profile=True` puts it into the file')
        return replace(context, profile=p)

    def encode(self, chunk: list, context: Context) -> dict:
        "See `Codec`."
        p,where,groups = _layout(context)
        B,_,T,_ = context.layers[0].k_shape
        res = {}
        with _one_thread:
            for b in range(B):
                for k,v in self._encode(chunk, context, b, p, where, groups, T).items(): res[f'b{b:02d}.{k}' if B>1 else k] = v
        return res

    def _encode(self, chunk, context, b, p, where, groups, T):
        start,scale = context.start,np.float32(context.params['scale'])
        lead,tail = _exact(T, start, context.params, context.total)
        mid,res = T-lead-tail,{}
        cls = _profile(context)[1]
        if cls is not None: cls = cls[:,start+lead:start+lead+mid]
        if lead+tail:
            cut = lambda x: np.concatenate([x[b,:,:lead], x[b,:,T-tail:]], 1)
            res['exact'] = b''.join(_sized(pack_array(np.concatenate([cut(chunk[i][j]) for i in idx]), dtype)) for j,dtype,_,idx in _alike(context.layers))
        if cls is not None and mid: res['steps'] = G32Coder().encode(np.ascontiguousarray(cls.T)[None], 8, WEIGHTS)
        head = [struct.pack('<HHB', lead, tail, cls is not None)]
        if mid:
            blocks,jobs = _blocks(mid, start+lead),_parts(len(groups))
            part = [[o[...,lead:T-tail,:] for o in kv] for kv in chunk]
            for i,gs in enumerate(jobs):
                heads,res[f'p{i:02d}'] = self._part(part, where, [(groups[g], None if cls is None else cls[g]) for g in gs], p, start+lead, b, blocks, scale)
                head += heads
        res['head'] = b''.join(head)
        return res

    def _part(self, chunk, where, groups, p, start, b, blocks, scale):
        "Heads of the groups and the bytes of one section"
        T,nb = int(blocks[-1].sum()),len(blocks)
        F = sum(g.level.shape[1] for g,_ in groups)
        dc,ac = np.empty((nb, F), np.uint8),np.empty((T-nb, F), np.uint8)
        spans,bigs,at = [],[],0
        for g,c in groups:
            y = g.forward(_gather(chunk, where, g, p, start, b))
            inv = np.full(T, 1/scale, np.float32) if c is None else (1/(_STEPS[c]*scale)).astype(np.float32)
            total,big = np.zeros(y.shape[1], np.float32),np.empty((1024, 3), np.int64)
            n = _quantize(y, inv, blocks, _MATS, dc, ac, at, total, big)
            if n>len(big): n = _quantize(y, inv, blocks, _MATS, dc, ac, at, np.zeros_like(total), big := np.empty((n, 3), np.int64))
            if n<0: raise ValueError('keys or values that are not finite cannot be coded with velox; use lossless')
            bigs.append(big[:n])
            live = np.flatnonzero(total>=3)
            spans.append((at, int(live[-1])+1 if len(live) else 0))
            at += y.shape[1]
        return self._code(dc, ac, spans, [g for g,_ in groups], p, scale, np.concatenate(bigs))

    def _code(self, dc, ac, spans, groups, p, scale, bigs):
        heads,F = [],dc.shape[1]
        shifts = [[_shift(x[:,at:at+r], g.level[k,:r], scale, p) for k,x in enumerate((dc, ac))] for g,(at,r) in zip(groups, spans)]
        heads = [struct.pack('<Hbb', r, *sh) for (_,r),sh in zip(spans, shifts)]
        cols,out,new = np.concatenate([np.arange(at, at+r) for at,r in spans]),[],np.full(F, -1, np.int64)
        new[cols] = np.arange(len(cols))
        for k,x in enumerate((dc, ac)):
            big = bigs[(bigs[:,0]==k) & (new[bigs[:,1]%F]>=0)]
            pos = big[:,1]//F*len(cols)+new[big[:,1]%F]
            o = np.argsort(pos)
            out.append(_sized(_blob(pos[o], big[o,2]))+_sized(G32Coder().encode(x[:,cols][None], 256, _tables(p, groups, spans, shifts, k, scale))))
        return heads,b''.join(out)

    def decode(self, sections: dict, context: Context) -> list:
        "See `Codec`."
        p,where,groups = _layout(context)
        B,_,T,_ = context.layers[0].k_shape
        chunk = [tuple(np.empty(s, np.uint16 if l.dtype=='bfloat16' else l.dtype) for s in (l.k_shape, l.v_shape)) for l in context.layers]
        for b in range(B):
            pre = f'b{b:02d}.' if B>1 else ''
            with _one_thread: self._decode({k[len(pre):]: v for k,v in sections.items() if k.startswith(pre)}, chunk, context, b, p, where, groups, T)
        return chunk

    def _decode(self, sections, chunk, context, b, p, where, groups, T):
        r,scale = _Reader(sections['head']),np.float32(context.params['scale'])
        lead,tail,steps = struct.unpack('<HHB', r.take(5, 'head'))
        mid = T-lead-tail
        if mid<0 or steps>1: raise ValueError(f'{lead} and {tail} exact tokens of {T}')
        if lead+tail: self._read_exact(_Reader(sections['exact']), chunk, context, b, lead, T-tail)
        if not mid: return
        heads = [struct.unpack('<Hbb', r.take(4, 'head')) for _ in groups]
        w = np.full((len(groups), mid), scale, np.float32)
        if steps: w *= _STEPS[G32Coder().decode(sections['steps'], (1, mid, len(groups)), 8, WEIGHTS)[0].T]
        blocks = _blocks(mid, context.start+lead)
        out = [[o[...,lead:T-tail,:] for o in kv] for kv in chunk]
        for i,gs in enumerate(_parts(len(groups))):
            self._read_part(sections[f'p{i:02d}'], out, where, [(groups[g], heads[g], w[g]) for g in gs], p, context.start+lead, b, blocks, scale)

    def _read_part(self, data, chunk, where, groups, p, start, b, blocks, scale):
        nb,T,rd = len(blocks),int(blocks[-1].sum()),_Reader(data)
        spans,at = [],0
        for g,(r,*sh),_ in groups:
            if r>g.level.shape[1]: raise ValueError(f'{r} components of {g.level.shape[1]}')
            spans.append((at, r)); at += r
        streams = []
        for k,n in enumerate((nb, T-nb)):
            pos,val,_ = _unblob(rd.take(rd.varint('escapes'), 'escapes'), n*at)
            d = rd.take(rd.varint('section'), 'section')
            x = G32Coder().decode(d, (1, n, at), 256, _tables(p, [g for g,_,_ in groups], spans, [h[1:] for _,h,_ in groups], k, scale))[0].view(np.int8)
            if len(pos): x = x.astype(np.int32); x.reshape(-1)[pos] = val
            streams.append(x)
        for (at,r),(g,_,w) in zip(spans, groups):
            y = np.empty((T, r), np.float32)
            _dequantize(*streams, at, w, blocks, _INVS, y)
            _spread(g.backward(y), where, g, p, start, b, chunk)

    @staticmethod
    def _read_exact(r, chunk, context, b, lead, end):
        for j,dtype,(_,H,T,D),idx in _alike(context.layers):
            xs = unpack_array(bytes(r.take(r.varint('exact'), 'exact')), dtype, (len(idx)*H, lead+T-end, D))
            for i,x in zip(idx, np.split(xs, len(idx))):
                o = chunk[i][j]
                x = x.view(o.dtype)
                o[b,:,:lead],o[b,:,end:] = x[:,:lead],x[:,lead:]

_STEPS,_MATS,_INVS = (2.**((np.arange(8)-4)/2)).astype(np.float32),_matrices(),_inverses()

def _sized(b): return _varint(len(b))+b

def _alike(layers):
    "(0 for keys or 1 for values, type, shape, places) of tensors that are packed together"
    g = {}
    for i,l in enumerate(layers):
        for j,s in enumerate((l.k_shape, l.v_shape)): g.setdefault((j, l.dtype, tuple(s)), []).append(i)
    return [(*k, v) for k,v in g.items()]

def _tables(p, groups, spans, shifts, k, scale):
    "The code tables for all columns of stream `k`"
    c = [np.clip(p.classes(g.level[k,:r], scale).astype(np.int16)+sh[k], 0, len(p.rows)-1) for g,(_,r),sh in zip(groups, spans, shifts)]
    return p.model.with_classes(np.concatenate(c).astype(np.uint8))

@njit(cache=True, nogil=True)
def _histogram(x, c, out):
    for t in range(x.shape[0]):
        for r in range(x.shape[1]): out[c[r], x[t, r]] += 1

def _shift(x, level, scale, p):
    "How many classes the data lie above the profile, by size"
    if not x.size: return 0
    h,cost = np.zeros((len(p.rows), 256), np.int64),p.costs
    _histogram(x, p.classes(level, scale), h)
    used = np.flatnonzero(h.any(1))
    bits = lambda s: float((h[used]*cost[np.clip(used+s, 0, len(cost)-1)]).sum())
    best,least = 0,bits(0)
    for d in (1, -1):
        for s in range(d, d*MAX_SHIFT, d):
            if (n := bits(s))>=least: break
            best,least = s,n
    return best
