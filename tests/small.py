"Small caches, small profiles and forged files, for the tests beside this file."
import json, struct, zlib
import mlx.core as mx, numpy as np
from dataclasses import replace
from mlx_lm.models.cache import KVCache
from veloxquant_mlx.codecs.velox import VeloxCodec
from veloxquant_mlx.container import Container, _make_header
from veloxquant_mlx.profile import CLASSES, Group, Profile, class_edges, code_rows
from veloxquant_mlx.transform import Moments, Rotation, klt

def rows(n, H=2, D=16, seed=0, B=1, scale=1.):
    "Something like keys `[B, H, n, D]`: channels of their own size, slow along tokens; float32"
    r = np.random.default_rng(seed)
    x = np.cumsum(r.normal(size=(B, H, n, D)), -2)*.1+r.normal(size=(B, H, n, D))*.3
    return ((x+3*r.normal(size=(1, H, 1, D)))*r.lognormal(size=(1, H, 1, D), sigma=.5)*scale).astype(np.float32)

def cache(n=300, H=2, D=16, Dv=None, seed=0, B=1, dtype=mx.float16, make=KVCache, scale=1.):
    "A cache that holds `n` such rows"
    c = make()
    if n: c.update_and_fetch(*(mx.array(rows(n, H, d, seed+j, B, scale)).astype(dtype) for j,d in enumerate((D, Dv or D))))
    return c

def held(c): # [(K, V)] of plain caches, float32
    return [tuple(np.array(x[...,:o.offset,:].astype(mx.float32)) for x in (o.keys, o.values)) for o in c]

def rotation(D, base=100.):
    "RoPE on halves"
    i = np.arange(D//2)
    return Rotation(D, np.stack([i, i+D//2], 1).astype(np.int32), (base**(-2*i/D)).astype(np.float32), np.ones(D, np.float32))

def group(layers, kv, rots, step=.3, keep=1.):
    "One basis over the keys and values of `layers`"
    xs = []
    for j in (0, 1):
        for l in layers:
            x = kv[l][j][0] if rots[l][j] is None else rots[l][j].undo(kv[l][j][0])
            xs.append(x.swapaxes(0, 1).reshape(x.shape[1], -1))
    x,metric = np.concatenate(xs, 1),[np.eye(o.shape[1])/(step*o.std())**2 for o in xs]
    b = klt(Moments.of(x), metric, ridge=0)
    level = np.abs(b.forward(x)).mean(0).astype(np.float32)
    r = max(1, int(keep*len(level)))
    return Group(tuple(layers), b.mean, np.stack([level[:r]*2, level[:r]]), b.synthesis[:r].astype(np.float16),
                 tuple(m.astype(np.float32) for m in metric))

def profile(caches, span=1, rope=False, model='', kind='small', keep=1., step=.3):
    "A profile of plain caches, as calibration would make it"
    kv = held(caches)
    rots = [(rotation(k.shape[-1]) if rope else None, None) for k,_ in kv]
    groups = [group(range(a, min(a+span, len(kv))), kv, rots, step, keep) for a in range(0, len(kv), span)]
    shapes = tuple(tuple((x.shape[1], x.shape[3]) for x in l) for l in kv)
    return Profile(tuple(groups), tuple(rots), shapes, code_rows(np.zeros((CLASSES, 256), np.int64)), class_edges(),
                   dict(model=model, kind=kind, span=span, gamma=.3, texts=[]))

class Stepped(VeloxCodec):
    "velox as if it had seen where attention goes: classes drawn by lot"
    def prepare(self, cache, tokens, context):
        c = super().prepare(cache, tokens, context)
        classes = np.random.RandomState(1).randint(0, 7, (len(c.profile.profile.groups), context.total)).astype(np.uint8)
        return replace(c, profile=replace(c.profile, classes=classes))

# files taken apart, changed and put together again with right checksums

def taken(data):
    "Manifest and sections `[name, bytearray]` of a file"
    with Container(data) as c: return c.metadata,[[n, bytearray(c.section(n))] for n in c.names]

def packed(m, s):
    "A file of manifest `m` and sections `s` whose checksums are right"
    end,spans = 0,[]
    for n,x in s: spans.append((n, end, end:=end+len(x), zlib.crc32(x)))
    h = _make_header(spans, m)
    return len(h).to_bytes(8, 'little') + h + b''.join(bytes(x) for _,x in s)

def signed(m, s):
    "The manifest of a changed profile under a digest that fits again"
    from veloxquant_mlx.profile import _digest
    if type(m) is not dict: return m
    return m | dict(digest=_digest({k: v for k,v in m.items() if k!='digest'}, {n: bytes(x) for n,x in s}))

NASTY = [None, True, -1, 0, 1, 255, 257, 1<<31, (1<<40)-1, 1<<63, 1e308, float('nan'), .5, '', 'x', 'KVCache', 'ArraysCache',
         'float32', 'uint64', [], {}, [0]*50, [[[[]]]], '../../x', '0'*32, -1e-9]
NUMBERS = [struct.pack(f, v) for f,vs in (('<f', (np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-45, -1, 0, 1e10)),
    ('<e', (np.nan, np.inf, 65504, -65504, 6e-8, 0)), ('<H', (4096, 65535)), ('<i', (-1<<31, (1<<31)-1))) for v in vs]

def nodes(o, path=()):
    yield path
    for k,v in (o.items() if isinstance(o, dict) else enumerate(o) if isinstance(o, list) else ()): yield from nodes(v, (*path, k))

def forge_manifest(r, m):
    m = json.loads(json.dumps(m))
    for _ in range(r.choice((1, 1, 2))):
        *a,b = r.choice([o for o in nodes(m) if o])
        o = m
        for k in a: o = o[k]
        kind = r.randrange(4)
        if kind==0: del o[b]
        elif kind==1 and isinstance(o, list): o.insert(b, o[b])
        elif isinstance(o[b], (int, float)) and kind==2: o[b] += r.choice((-1, 1, 64, 1<<20))
        else: o[b] = r.choice(NASTY)
    return m

def forge_section(r, x):
    "Other bytes, other numbers, the same number everywhere, or another length"
    kind = r.randrange(6)
    for _ in range(r.choice((1, 1, 5))):
        i = r.choice((r.randrange(len(x)), r.randrange(min(40, len(x)))))
        n = r.choice(NUMBERS)
        at = i//len(n)*len(n)
        if kind==0 and r.random()<.5: del x[i:]; x += b'\0'
        elif kind==1: x[at:at+len(n)] = n
        elif kind==2: x[:] = (n*(len(x)//len(n)+1))[:len(x)]
        elif kind==3: x[i] ^= 1<<r.randrange(8)
        else: x[i] = r.randrange(256)

def forge(r, data):
    "A file whose manifest or sections are wrong, with right checksums; the profile inside it is one more file"
    m,s = taken(data)
    inner = [o for o in s if o[0]=='h.profile']
    if inner and r.random()<.6:
        inner[0][1] = bytearray(forge(r, bytes(inner[0][1])))
        if r.random()<.9: m['params']['profile'] = taken(bytes(inner[0][1]))[0].get('digest')
        return packed(m, s)
    kind = r.randrange(5)
    if kind<2: new = forge_manifest(r, m)
    elif kind==2: del s[r.randrange(len(s))]
    elif kind==3:
        a,b = r.randrange(len(s)),r.randrange(len(s))
        s[a][1],s[b][1] = s[b][1],s[a][1]
    else: forge_section(r, r.choice([x for _,x in s if x]))
    if kind>1: new = m
    if 'profile' in m and r.random()<.9: new = signed(new, s)
    return packed(new, s)

def damage(r, d):
    "Bytes flipped, cut, repeated, turned round"
    d = bytearray(d)
    a,b = sorted(r.randrange(len(d)+1) for _ in range(2))
    kind = r.randrange(7)
    if kind==0: d[r.randrange(len(d))] ^= 1<<r.randrange(8)
    elif kind==1: d = d[:a]
    elif kind==2: del d[a:b]
    elif kind==3: d[a:a] = d[a:b][:50_000]
    elif kind==4: d[a:b] = d[a:b][::-1]
    elif kind==5: d[r.randrange(8)] = r.randrange(256)
    else: d[a:a+8] = r.randbytes(8)
    return bytes(d)
