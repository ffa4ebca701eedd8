from __future__ import annotations

import os, struct
import mlx.core as mx, numpy as np
from dataclasses import dataclass, replace
from numba import njit
from mlx_lm.models.cache import KVCache
from veloxquant_mlx.codecs.lossless import pack_array, unpack_array
from veloxquant_mlx.coders import G32Coder, _get_escapes, _put_escapes, _Reader, _varint
from veloxquant_mlx.container import CHUNK, CacheFileError, Context, to_numpy
from veloxquant_mlx.profile import (DC, LENGTH, PRESETS, SINKS, Profile, ProfileError, find_profile, identity_profile, model_key, probe_attention,
                                    token_classes)
from veloxquant_mlx.rans import RansModel, quantise_rows
from veloxquant_mlx.token_axis import dct_matrix

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

    def params(self, preset=None) -> dict:
        "Settings of a preset: `near-lossless`, `high` (the default), `balanced`, `small`."
        preset = preset or 'high'
        if preset not in PRESETS: raise ValueError(f'preset {preset!r}; allowed: {", ".join(PRESETS)}')
        return dict(preset=preset, scale=PRESETS[preset])
    def n_sections(self, n): return 3+len(_parts(max(n, 1)))

    def encode(self, chunk: list, context: Context) -> dict:
        "See `Codec`."
        p,where,groups = _layout(context)
        B,_,T,_ = context.layers[0].k_shape
        res = {}
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
            res['exact'] = b''.join(_sized(pack_array(cut(o), l.dtype)) for kv,l in zip(chunk, context.layers) for o in kv)
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
            out.append(_put_escapes(pos[o], big[o,2])+_sized(G32Coder().encode(x[:,cols][None], 256, _tables(p, groups, spans, shifts, k, scale))))
        return heads,b''.join(out)

    def decode(self, sections: dict, context: Context) -> list:
        "See `Codec`."
        p,where,groups = _layout(context)
        B,_,T,_ = context.layers[0].k_shape
        chunk = [tuple(np.empty(s, np.uint16 if l.dtype=='bfloat16' else l.dtype) for s in (l.k_shape, l.v_shape)) for l in context.layers]
        for b in range(B):
            pre = f'b{b:02d}.' if B>1 else ''
            self._decode({k[len(pre):]: v for k,v in sections.items() if k.startswith(pre)}, chunk, context, b, p, where, groups, T)
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
            pos,val = _get_escapes(rd, n*at)
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
        for kv,l in zip(chunk, context.layers):
            for o in kv:
                H,T,D = o.shape[1:]
                x = unpack_array(bytes(r.take(r.varint('exact'), 'exact')), l.dtype, (H, lead+T-end, D)).view(o.dtype)
                o[b,:,:lead],o[b,:,end:] = x[:,:lead],x[:,lead:]

_STEPS,_MATS,_INVS = (2.**((np.arange(8)-4)/2)).astype(np.float32),_matrices(),_inverses()

def _sized(b): return _varint(len(b))+b

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
