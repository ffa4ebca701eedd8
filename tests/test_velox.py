"velox and its profiles in the hands of clumsy and hostile users; damage and forgery of cache files are in test_fuzz."
import os, random, signal, subprocess, sys, threading, time
from dataclasses import replace
import mlx.core as mx, numpy as np, pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache
from small import cache, damage, forge, held, packed, profile, rotation, rows, signed, taken
from veloxquant_mlx.codecs.velox import VeloxCodec
from veloxquant_mlx.container import CacheFileError, CodecError, Context, FormatError, LayerInfo, VersionError
from veloxquant_mlx.profile import Profile, ProfileError, calibrate, find_profile, identity_profile, known_profiles, profile_dir
from veloxquant_mlx.prompt_cache import convert, inspect, load_prompt_cache, save_prompt_cache, stored_tokens, verify

N = 300

@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    "A profile folder of its own for each test"
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path/'home'))

@pytest.fixture(scope='module')
def made(): return profile([cache(seed=2*i) for i in range(2)], rope=True)

def pair(n=300, **kw): return [cache(n, seed=2*i, **kw) for i in range(2)]

def error(a, b):
    "Largest mean error of keys and of values, as a share of their mean magnitude"
    return max(np.abs(x-y).mean()/max(1e-9, np.abs(x).mean()) for l,m in zip(held(a), held(b), strict=True) for x,y in zip(l, m))

def through(file, caches, **kw):
    "Save, load, compare; the report and what came back"
    r = save_prompt_cache(file, caches, codec='velox', progress=False, **kw)
    back = load_prompt_cache(file, profile=None if kw.get('embed_profile') else kw.get('profile'), progress=False)
    verify(file, profile=kw.get('profile'), progress=False)
    return r,back

# profile files

def check_file(data):
    "Load a profile and use all of it; a `CacheFileError` or nothing"
    t = time.time()
    try:
        p = Profile.load(data)
        for g in p.groups: g.backward(g.forward(np.ones((3, len(g.mean)), np.float32)))
        repr(p),p.predict_bits(1.),p.scale_for(2.),p.costs
        return p
    except CacheFileError as e: return e
    finally: assert time.time()-t<10, 'slow'

def check_damage(data, n, seed):
    r = random.Random(seed)
    for i in range(n):
        bad = damage(r, data)
        assert bad==data or isinstance(check_file(bad), CacheFileError), f'case {i}: damage went unnoticed'

def check_forgery(data, n, seed):
    r,refused = random.Random(seed),0
    for _ in range(n): refused += isinstance(check_file(forge(r, data)), CacheFileError)
    assert refused>n//3

@pytest.fixture(scope='module', params=['basis', 'joint', 'identity'])
def profile_bytes(request, made):
    cs = pair()
    p = dict(basis=made, joint=profile(cs, 2, True), identity=identity_profile(held(cs)))[request.param]
    data = p.to_bytes()
    assert Profile.load(data).digest==p.digest
    return data

def test_profile_damage(profile_bytes): check_damage(profile_bytes, N, 0)
def test_profile_forgery(profile_bytes): check_forgery(profile_bytes, N, 1)

@pytest.mark.slow
def test_profile_long(profile_bytes):
    check_damage(profile_bytes, 10_000, 2)
    check_forgery(profile_bytes, 10_000, 3)

def forged(data, change):
    "The profile after `change(manifest, sections as a dict of bytearrays)`, its checksums and digest made right"
    m,s = taken(data)
    d = dict(s)
    change(m, d)
    s = [[k, v] for k,v in d.items()]
    return packed(signed(m, s), s)

def put(name, value, dtype='<f4', at=0):
    def f(m, s): s[name][at:at+np.dtype(dtype).itemsize] = np.array(value, dtype).tobytes()
    return f

def alter(*path, value):
    def f(m, s):
        for k in path[:-1]: m = m[k]
        m[path[-1]] = value
    return f

def reorder(m, s): s['edges'][:4],s['edges'][4:8] = s['edges'][4:8],s['edges'][:4]

BAD = dict(
    nan_mean=(put('g000.mean', np.nan), 'g000.mean: not finite'), inf_basis=(put('g001.basis', np.inf, '<f2'), 'g001.basis: not finite'),
    inf_metric=(put('g000.metric', -np.inf), 'g000.metric: not finite'), nan_level=(put('g000.level', np.nan), 'g000.level: not finite'),
    negative_level=(put('g000.level', -1e-9), 'negative level'), nan_edge=(put('edges', np.nan, at=40), 'edges: not finite'),
    edges_turned=(reorder, 'edges that do not increase'), edge_zero=(put('edges', 0), 'edges that do not increase'),
    table=(put('rows', 7, '<u2', at=2), 'rows must all sum'), table_full=(put('rows', 4096, '<u2'), '0 .. 4095'),
    layer_twice=(alter('groups', 0, 'layers', value=[1]), 'two groups'), layer_far=(alter('groups', 0, 'layers', value=[2]), 'bad list'),
    layer_same=(alter('groups', 0, 'layers', value=[0, 0]), 'section g000'), no_layer=(alter('groups', 0, 'layers', value=[]), '64 components of 0'),
    no_group=(alter('groups', value=[]), 'no layer'), rank=(alter('groups', 0, 'rank', value=63), 'section g000'),
    rank_huge=(alter('groups', 0, 'rank', value=1<<19), 'components of 64'), rank_true=(alter('groups', 0, 'rank', value=True), 'bad list'),
    blocks=(alter('groups', 0, 'blocks', value=[64]), 'section g000.metric'), blocks_sum=(alter('groups', 0, 'blocks', value=[32, 33]), 'blocks'),
    shape_huge=(alter('shapes', 0, value=[[65535, 65535], [65535, 65535]]), 'components|wanted'), shape=(alter('shapes', 0, 0, value=[4, 8]), 'rotation of 16 channels'),
    rotation_pair=(alter('rotations', 0, 'pairs', 0, value=[0, 0]), 'rotation out of range'), rotation_twice=(alter('rotations', 0, 'pairs', 0, value=[1, 9]), 'rotation out of range'),
    rotation_far=(alter('rotations', 0, 'pairs', 0, value=[0, 16]), 'bad list'), rotation_fast=(alter('rotations', 0, 'freq', 0, value=1e30), 'rotation out of range'),
    rotation_nan=(alter('rotations', 0, 'freq', 0, value=float('nan')), 'rotation out of range'), rotation_flat=(alter('rotations', 0, 'amplitude', 3, value=0), 'rotation out of range'),
    rotation_dim=(alter('rotations', 0, 'dim', value=17), 'bad rotation'), rotation_of=(alter('rotation', 0, value=9), 'bad list'),
    rotation_text=(alter('rotations', 0, 'freq', 0, value='1.0'), 'more in it'),
    model_path=(alter('meta', 'model', value='../../../etc/x'), 'bad model'), kind=(alter('meta', 'kind', value='a/b'), 'bad model'),
    kind_none=(alter('meta', 'kind', value=None), 'bad model'), gamma=(alter('meta', 'gamma', value='x'), 'gamma'), gamma_nan=(alter('meta', 'gamma', value=float('nan')), 'gamma'),
    meta=(alter('meta', value=[]), 'bad entries'), version=(alter('profile', value=3), 'newer'), version_true=(alter('profile', value=True), 'not a profile'),
    more=(alter('more', value=1), 'bad entries'), section=(lambda m, s: s.update(more=bytearray(9)), 'more in it'), gone=(lambda m, s: s.pop('g000.mean'), 'no section g000.mean'))

@pytest.mark.parametrize('name', BAD)
def test_forged_profile(made, name):
    "Each is refused with the reason, though all checksums are right"
    change,why = BAD[name]
    with pytest.raises(CacheFileError, match=why) as e: Profile.load(forged(made.to_bytes(), change))
    assert '<bytes>' in str(e.value)
    assert type(e.value) in (ProfileError, VersionError, FormatError)

def test_deep(made):
    "Nesting that Python can just read, or just not write again"
    m,s = taken(made.to_bytes())
    for n in (500, 900, *range(940, 1000, 3), 2000):
        x,limit = [],sys.getrecursionlimit()
        for _ in range(n): x = [x]
        m['meta']['texts'] = x
        sys.setrecursionlimit(20_000)
        data = packed(signed(m, s), s)
        sys.setrecursionlimit(limit)
        check_file(data)

def test_digest_covers_rotations(made):
    "What the keys are turned by is named by the digest like every other number"
    slow = replace(rotation(16), freq=rotation(16).freq*np.float32(.5))
    p = replace(made, rotations=((slow, None), (slow, None)))
    assert p.digest!=made.digest
    m,s = taken(made.to_bytes())
    m['rotations'][0]['freq'] = [x/2 for x in m['rotations'][0]['freq']]
    with pytest.raises(ProfileError, match='digest'): Profile.load(packed(m, s))

def test_singular_metric(made, tmp_path):
    "A metric without an inverse is found when it is first used, and named"
    data = forged(made.to_bytes(), lambda m, s: s['g000.metric'].__init__(len(s['g000.metric'])))
    p = Profile.load(data)
    with pytest.raises(ProfileError, match='basis and metric'): p.groups[0].analysis
    with pytest.raises(ProfileError, match='basis and metric'): save_prompt_cache(tmp_path/'a', pair(), codec='velox', profile=p)
    assert [f.name for f in tmp_path.iterdir()]==[]

def test_not_profiles(made, tmp_path):
    "Other files in a profile's place"
    save_prompt_cache(tmp_path/'a', pair(5))
    (tmp_path/'b').write_bytes(b'')
    mx.save_safetensors(str(tmp_path/'c.safetensors'), dict(x=mx.zeros(3)))
    for f in ('a', 'b', 'c.safetensors'):
        with pytest.raises(CacheFileError, match=f): Profile.load(tmp_path/f)
    with pytest.raises(CacheFileError): load_prompt_cache(made.save(tmp_path/'p'))
    with pytest.raises(FileNotFoundError): Profile.load(tmp_path/'none')

# the folder of profiles

def test_found(made):
    "By digest, by its first digits, by model; whatever the file is called"
    made.save()
    other = replace(made, meta=made.meta | dict(model='abc', kind='large'))
    other.save()
    assert find_profile(made.digest).digest==find_profile(made.digest[:6]).digest==made.digest
    assert find_profile(model='abc').digest==other.digest and find_profile(model='abc', kind='small') is None
    assert find_profile('0'*32) is None
    third = replace(made, meta=made.meta | dict(model='third'))
    third.save(profile_dir()/'from a friend.safetensors')
    assert find_profile(third.digest).digest==find_profile(model='third').digest==third.digest

def test_newest(made, tmp_path, capsys):
    "Of one model and kind the newest is taken, `profiles` says which, and a converted file which it got; what is in a header moves no cursor"
    from veloxquant_mlx.cli import main
    ps = [replace(made, meta=made.meta | dict(model='abc', kind=k, gamma=g, name='my\x1b[2J model', texts=t))
          for k,g,t in (('small', .1, [dict(name='a', tokens=5)]), ('small', .2, 3), ('weights', .3, [4, dict(name=[], tokens='x')]))]
    for i,p in enumerate(ps): os.utime(p.save(), (1e9+i, 1e9+i))
    assert [m['digest'] for _,m in known_profiles()]==[ps[i].digest for i in (1, 0, 2)] and find_profile(model='abc').digest==ps[1].digest
    assert main(['profiles'])==0
    first,*rest = capsys.readouterr().out.splitlines()
    assert str(profile_dir()) in first and [r[0] for r in rest]==['*', ' ', ' '] and ps[1].digest[:12] in rest[0]
    assert 'my[2J model' in rest[0] and 'from a (5 tokens)' in rest[1]
    save_prompt_cache(tmp_path/'a.kv', pair())
    assert main(['convert', str(tmp_path/'a.kv'), str(tmp_path/'b.kv'), '--codec', 'velox', '--profile', str(ps[0].save(tmp_path/'p'))])==0
    assert f'{ps[0].digest} (small, abc-small-{ps[0].digest[:12]}.safetensors), needed' in capsys.readouterr().out

def test_litter(made, monkeypatch):
    "What else may lie in the folder does no harm"
    f = made.save()
    d,data = profile_dir(),f.read_bytes()
    (d/'-small-000000000000.safetensors').mkdir()
    (d/'gone.safetensors').symlink_to(d/'nowhere')
    (d/'empty.safetensors').touch()
    os.mkfifo(d/'pipe.safetensors')
    (d/'cut.safetensors').write_bytes(data[:len(data)//2])
    (d/'late.safetensors').write_bytes(data[:-5]+b'wrong')
    os.utime(d/'late.safetensors', (2e9, 2e9))   # newer than the good one, and its header is right
    assert find_profile(made.digest).digest==made.digest
    f.unlink()
    assert find_profile(made.digest) is None

def test_no_folder(made, tmp_path, monkeypatch):
    "A home that is a file, or that nobody may write to or look into"
    (tmp_path/'home').write_text('no folder')
    assert find_profile(made.digest) is None
    with pytest.raises(OSError): made.save()
    with pytest.raises(OSError): calibrate(None, {})
    r,back = through(tmp_path/'a', pair(), profile=made, embed_profile=True)
    assert error(pair(), back)<.2
    r,back = through(tmp_path/'a', pair(), profile=made)
    with pytest.raises(ProfileError, match='copy it there'): load_prompt_cache(tmp_path/'a')
    (tmp_path/'home').unlink()
    made.save()
    def refuse(*args, **kw): raise PermissionError(13, 'no entry')
    monkeypatch.setattr('veloxquant_mlx.profile.Container', refuse)
    assert find_profile(made.digest) is None

SAVER = '''
import sys
from veloxquant_mlx.profile import Profile
p = Profile.load(sys.argv[1])
p.save(); print('ready', flush=True)
while True: p.save()
'''

def test_savers(made, tmp_path):
    "Two processes save the same profile again and again and are killed; a reader never sees a part of it"
    source = made.save(tmp_path/'p')
    for n in range(2):
        ps = [subprocess.Popen([sys.executable, '-c', SAVER, str(source)], stdout=subprocess.PIPE, text=True) for _ in range(2)]
        try:
            for p in ps: assert p.stdout.readline().strip()=='ready'
            t = time.time()
            while time.time()-t<.2+.1*n: assert find_profile(made.digest).digest==made.digest
        finally:
            for p in ps: p.send_signal(signal.SIGKILL); p.wait(20); p.stdout.close()
        assert Profile.load(next(profile_dir().glob('*.safetensors'))).digest==made.digest
    assert next(profile_dir().glob('*.safetensors')).stat().st_mode & 0o777==0o600

# prefixes, trimming, going on

def whole(c): return [tuple(x[...,:o.offset,:] for x in (o.keys, o.values)) for o in c]

def same(a, b):
    "Bit for bit"
    return all(x.shape==y.shape and x.dtype==y.dtype and mx.array_equal(x, y) for l,m in zip(a, b, strict=True) for x,y in zip(l, m))

def cut(c, n): return [tuple(x[...,:n,:] for x in l) for l in whole(c)]

@pytest.mark.parametrize('how', [{}, dict(recent=40), dict(sinks=0), dict(sinks=300, recent=300), dict(recent=257, scale=.05)], ids=str)
@pytest.mark.parametrize('B,dtype', [(1, mx.float16), (3, mx.bfloat16), (1, mx.float32)], ids=['1', '3', '1f'])
def test_prefixes(made, tmp_path, how, B, dtype):
    "The first n tokens of a file are the first n of what the whole file gives"
    cs,ids,f = pair(600, B=B, dtype=dtype),list(range(600)),tmp_path/'a'
    save_prompt_cache(f, cs, codec='velox', profile=made, tokens=ids, **how)
    full = load_prompt_cache(f, profile=made, tokens=ids)
    assert error(cs, full)<.2
    sinks,recent = how.get('sinks', 4),how.get('recent', 0)
    assert same(cut(cs, sinks), cut(full, sinks))
    late = lambda c: [tuple(x[...,600-recent:,:] for x in l) for l in whole(c)]
    assert same(late(cs), late(full))
    for n in (1, 3, 4, 5, 16, 255, 256, 257, 511, 512, 513, 599, 600):
        part = load_prompt_cache(f, profile=made, tokens=ids[:n] if n%2 else n)
        assert same(whole(part), cut(full, n)) and all(c.offset==n and c.keys.shape[2]%256==0 for c in part)
    for bad in (0, 601, -1):
        with pytest.raises(CacheFileError): load_prompt_cache(f, profile=made, tokens=bad)
    with pytest.raises(CacheFileError, match='the first 300 agree'): load_prompt_cache(f, profile=made, tokens=ids[:300]+[7]*300)

@pytest.mark.parametrize('n', [255, 256, 257, 300])
def test_trim_and_go_on(made, tmp_path, n):
    "Trimmed, appended, saved again: what is held is what is stored, and nothing of what was trimmed"
    f,g = tmp_path/'a',tmp_path/'b'
    save_prompt_cache(f, pair(600), codec='velox', profile=made, embed_profile=True)
    cs = load_prompt_cache(f)
    for c in cs: assert c.trim(600-n)==600-n
    assert same(whole(cs), cut(load_prompt_cache(f), n)) and same(whole(cs), whole(load_prompt_cache(f, tokens=n)))
    for i,c in enumerate(cs): c.update_and_fetch(*(mx.array(rows(5, seed=9+i)).astype(mx.float16) for _ in 'kv'))
    save_prompt_cache(g, cs, codec='velox', profile=made)
    again = load_prompt_cache(g, profile=made)
    assert [c.offset for c in again]==[n+5]*2 and error(cs, again)<.2
    save_prompt_cache(g, cs)
    assert same(whole(load_prompt_cache(g)), whole(cs))

def test_saved_again(made, tmp_path):
    "Loading and saving over and over does not pile up errors"
    cs,f = pair(600),tmp_path/'a'
    save_prompt_cache(f, cs, codec='velox', profile=made)
    once = load_prompt_cache(f, profile=made)
    for _ in range(4):
        last = load_prompt_cache(f, profile=made)
        save_prompt_cache(f, last, codec='velox', profile=made)
    assert error(cs, load_prompt_cache(f, profile=made))<1.2*error(cs, once)

# reports and other codecs

def test_report(made, tmp_path):
    "Every byte is counted once, in the report of saving, of `inspect` and of `verify`"
    for named in (True, False):
        f = tmp_path/f'{named}'
        r = save_prompt_cache(f, pair(600), dict(my='own'), codec='velox', profile=made, tokens=list(range(600)), embed_profile=not named)
        assert r==inspect(f)==verify(f, profile=made) and r.bytes==f.stat().st_size and r.payload==sum(r.sections.values())
        assert (r.codec, r.tokens, r.stored, r.metadata)==('velox', 600, 'ids', dict(my='own'))
        assert abs(sum(l[2] for l in r.layers)-r.payload)<=2 and r.fp16_bytes==2*2*2*2*16*600
        assert r.params['profile']==made.digest and ('h.profile' in r.sections)==(not named)
        assert stored_tokens(f)==list(range(600)) and f.stat().st_mode & 0o777==0o600
        if not named: assert r.sections['h.profile']==len(made.to_bytes())

def stocks():
    "Lists of all kinds of caches of mlx_lm that have plain ones among them"
    rot = lambda n: cache(n, make=lambda: RotatingKVCache(256, 4), seed=5)
    wrapped = rot(300)
    wrapped.update_and_fetch(*(mx.array(rows(1)).astype(mx.float16) for _ in 'kv'))
    state = ArraysCache(2)
    state[0] = mx.array(rows(3))
    return dict(rotating=[cache(100), rot(100)], wrapped=[cache(300), wrapped], quantized=[cache(300), cache(300, D=32, seed=3).to_quantized(32, 4)],
        state=[cache(300), state], listed=[cache(300), CacheList(state, RotatingKVCache(8))], empty=[cache(300), KVCache()],
        shorter=[cache(300), cache(200, seed=3)], longer=[cache(300), cache(300, seed=3), cache(513, seed=5)], batches=[cache(300), cache(300, B=2, seed=3)],
        latent=[cache(300), cache(300, 1, 16, 24, seed=3)], types=[cache(300), cache(300, dtype=mx.float32, seed=3)])

@pytest.mark.parametrize('name', stocks())
def test_stock_kinds(tmp_path, name):
    "What velox does not take is kept to the bit beside it; there and back again through other codecs"
    cs = stocks()[name]
    p = profile([c if type(c) is KVCache and not c.empty() else cache(300, seed=3) for c in cs])
    f,g = tmp_path/'a',tmp_path/'b'
    save_prompt_cache(f, cs, codec='velox', profile=p, scale=.3)
    back = load_prompt_cache(f, profile=p)
    verify(f, profile=p)
    assert [type(c) for c in back]==[type(c) for c in cs]
    exact = {'wrapped', 'quantized', 'latent', 'shorter', 'longer', 'batches'}
    for i,(a,b) in enumerate(zip(cs, back)):
        if type(a) is KVCache and not a.empty():
            assert a.offset==b.offset and error([a], [b])<.1
            if name in exact and i==len(cs)-1: assert same(whole([a]), whole([b]))
        elif type(a) is RotatingKVCache and name=='wrapped': assert mx.array_equal(a.keys[...,:256,:], b.keys[...,:256,:])
    for codec in ('lossless', 'mlx_lm'):
        convert(f, g, codec, profile=p)
        for a,b in zip(back, load_prompt_cache(g)):
            if type(a) is KVCache and not a.empty(): assert same(whole([a]), whole([b]))
    convert(g, f, 'velox', profile=p, scale=.3)
    assert inspect(f).codec=='velox'
    for a,b in zip(back, load_prompt_cache(f, profile=p)):
        if type(a) is KVCache and not a.empty(): assert error([a], [b])<.1

# odd shapes, odd numbers

@pytest.mark.parametrize('n', [1, 3, 4, 5, 15, 16, 17, 255, 256, 257, 511, 513])
@pytest.mark.parametrize('given', [True, False], ids=['profile', 'none'])
def test_lengths(made, tmp_path, n, given):
    "Few tokens, ends of blocks and of chunks; with a profile and without"
    cs = pair(n)
    r,back = through(tmp_path/'a', cs, profile=made if given else None)
    assert [c.offset for c in back]==[n]*2 and error(cs, back)<.2
    assert same(cut(cs, min(n, 4)), cut(back, min(n, 4)))

@pytest.mark.parametrize('H,D,Dv', [(1, 1, 1), (1, 2, 2), (1, 33, 33), (3, 1, 2), (2, 256, 256), (5, 7, 9), (2, 16, 128), (40, 2, 2)])
@pytest.mark.parametrize('given', [True, False], ids=['profile', 'none'])
def test_sizes(tmp_path, H, D, Dv, given):
    cs = [cache(270, H, D, Dv, seed=2*i) for i in range(2)]
    r,back = through(tmp_path/'a', cs, profile=profile(cs) if given else None)
    assert error(cs, back)<.2

@pytest.mark.parametrize('dtype', [mx.float16, mx.bfloat16, mx.float32], ids=str)
def test_types(made, tmp_path, dtype):
    "The same data in another type give the same within the type's rounding"
    cs = pair(300, dtype=dtype)
    r,back = through(tmp_path/'a', cs, profile=made)
    assert all(c.keys.dtype==c.values.dtype==dtype for c in back) and error(cs, back)<.2

def test_no_components(tmp_path):
    "A profile whose bases hold almost nothing: means are left"
    cs = pair(300)
    r,back = through(tmp_path/'a', cs, profile=profile(cs, keep=0))
    assert error(cs, back)<1

def constant(v, dtype=mx.float16, n=300):
    c = KVCache()
    c.update_and_fetch(*[mx.full((1, 2, n, 16), v).astype(dtype)]*2)
    return c

@pytest.mark.parametrize('v,dtype', [(0, mx.float16), (1, mx.float16), (6e4, mx.float16), (-65504, mx.float16), (6e-8, mx.float16), (1e4, mx.bfloat16),
                                     (1e-40, mx.float32), (3e38, mx.bfloat16)], ids=str)
@pytest.mark.parametrize('given', [True, False], ids=['profile', 'none'])
def test_constant(made, tmp_path, v, dtype, given):
    "Numbers that calibration has never seen: right within the profile's step, or refused with nothing written"
    cs = [constant(v, dtype) for _ in range(2)]
    try: r,back = through(tmp_path/'a', cs, profile=made if given else None)
    except ValueError as e: assert v==3e38 and given and 'lossless' in str(e) and not list(tmp_path.glob('*a*'))
    else: assert all(np.abs(x-y).max()<=max(1.5, 2e-3*abs(v)) for l,m in zip(held(cs), held(back)) for x,y in zip(l, m))

@pytest.mark.parametrize('v', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('at', [1, 100, 299])
def test_not_finite(made, tmp_path, v, at):
    "Refused before the old file goes, unless it lies among the exact tokens"
    f = tmp_path/'a'
    save_prompt_cache(f, pair(10))
    old = f.read_bytes()
    for p in (made, None):
        cs = pair(300)
        cs[1].keys[0,1,at,3] = v
        if at==1:
            through(f, cs, profile=p)
            assert np.array_equal(held(load_prompt_cache(f, profile=p))[1][0][0,1,1,3], np.float32(v), equal_nan=True)
            f.write_bytes(old)
            continue
        with pytest.raises(ValueError, match='use lossless'): save_prompt_cache(f, cs, codec='velox', profile=p)
        assert f.read_bytes()==old and [p.name for p in tmp_path.iterdir() if p.is_file()]==['a']

@pytest.mark.parametrize('f', [1, 10, 100, 1000])
def test_far_from_profile(made, tmp_path, f):
    "Larger numbers, or noise: the file grows, the error stays within the steps of the profile"
    for make in (lambda: pair(300, scale=f), lambda: [noise(c, f) for c in pair(300)]):
        cs,base = make(),pair(300)
        r,back = through(tmp_path/'a', cs, profile=made)
        r0,back0 = through(tmp_path/'b', base, profile=made)
        size = lambda a, b: max(np.abs(x-y).mean() for l,m in zip(held(a), held(b)) for x,y in zip(l, m))
        fp16 = max(np.abs(x).max() for l in held(cs) for x in l)*2**-11    # what float16 itself rounds
        assert size(cs, back)<=1.5*size(base, back0)+fp16
        assert f==1 or r.bytes>1.5*r0.bytes

def noise(c, f):
    for k in ('keys', 'values'):
        x = getattr(c, k)
        setattr(c, k, (x.astype(mx.float32)+mx.random.normal(x.shape, key=mx.random.key(3))*(f-1)).astype(x.dtype))
    return c

# settings

# data that the profile does not expect, at any place

@pytest.fixture(scope='module')
def narrow():
    "A profile that expects next to nothing of some components, and has none for others"
    p = profile([cache(600, 4, 32)], keep=.8)
    g, = p.groups
    level = g.level.copy()
    level[:,64:] *= 1e-3
    return replace(p, groups=(replace(g, level=level),))

def coded(p, x, start=0, **params):
    "Root mean square error of each row of `x`, off the mean, in steps per channel, after `velox`"
    g,(H,D) = p.groups[0],p.shapes[0][0]
    kv = (x+g.mean).astype(np.float32).reshape(len(x), 2, H, D)
    chunk = [tuple(np.ascontiguousarray(kv[:,j].swapaxes(0, 1))[None] for j in (0, 1))]
    c = Context(start, [LayerInfo(0, 'kv', 'float32', *(a.shape for a in chunk[0]))], dict(scale=1., sinks=0)|params, profile=p)
    back = VeloxCodec().decode(VeloxCodec().encode(chunk, c), c)
    e = np.concatenate([(a-b)[0].swapaxes(0, 1).reshape(len(x), -1) for a,b in zip(back[0], chunk[0])], 1)
    return np.sqrt(sum(np.einsum('tc,cd,td->t', e[:,i*H*D:(i+1)*H*D], m, e[:,i*H*D:(i+1)*H*D]) for i,m in enumerate(g.metric))/len(g.mean))

def directions(p, size):
    "What a component far down looks like, and something that no component can express; `size` steps per channel"
    g = p.groups[0]
    M = np.zeros((len(g.mean),)*2)
    at = 0
    for m in g.metric: M[at:at+len(m),at:at+len(m)] = m; at += len(m)
    out = np.random.RandomState(3).normal(size=len(g.mean))
    out -= out@M@g.inverse.T@np.linalg.inv(g.inverse@M@g.inverse.T)@g.inverse
    return [v*size/np.sqrt(v@M@v/len(v)) for v in (g.inverse[150], out)]

@pytest.mark.parametrize('n,start,sinks', [(16, 0, 0), (17, 0, 0), (44, 256, 0), (256, 0, 4), (256, 512, 0)])
def test_wild_token(narrow, n, start, sinks):
    "Wherever it is, it is not lost"
    g,r = narrow.groups[0],np.random.RandomState(1)
    base = r.normal(size=(n, 64))*3@g.inverse[:64]
    usual = coded(narrow, base, start, sinks=sinks).max()
    for v in directions(narrow, 16):
        for t in range(n):
            x = base.copy()
            x[t] += v
            assert coded(narrow, x, start, sinks=sinks).max()<1.5*usual, t

@pytest.mark.parametrize('many', [2, 4, 8, 64])
def test_wild_tokens(narrow, many):
    "Nor are several that are alike"
    g,r = narrow.groups[0],np.random.RandomState(2)
    base = r.normal(size=(256, 64))*3@g.inverse[:64]
    usual = coded(narrow, base).max()
    for v in directions(narrow, 16):
        for _ in range(10):
            x = base.copy()
            x[r.choice(256, many, False)] += v
            assert coded(narrow, x).max()<1.5*usual

@pytest.mark.parametrize('n', [1, 2, 3, 17, 33])
def test_last_token(made, n):
    "A token at the end of a cache is as good as one in the middle"
    r = np.random.RandomState(4)
    g = made.groups[0]
    values = lambda *n: r.laplace(size=(*n, g.level.shape[1]))*g.level[1]@g.inverse
    whole,last = coded(made, values(256), 256),[coded(made, x, 256)[-1] for x in values(60, n)]
    assert np.sqrt(np.mean(np.square(last)))<1.15*np.sqrt(np.mean(whole**2))

def test_many_escapes(narrow):
    "Codes that fit no byte, thousands in each stream"
    g,r = narrow.groups[0],np.random.RandomState(5)
    for many in (40, 200):
        assert coded(narrow, r.normal(size=(256, many))*1000@g.inverse[:many]).max()<.5

LAYOUTS = dict(heads_turned=lambda k: mx.contiguous(k[:,::-1])[:,::-1], tokens_turned=lambda k: mx.contiguous(k[:,:,::-1])[:,:,::-1],
               swapped=lambda k: mx.contiguous(k.swapaxes(1, 2)).swapaxes(1, 2), part=lambda k: mx.concatenate([k, k], -1)[...,:k.shape[-1]],
               batch=lambda k: mx.concatenate([k, k])[1:], one_head=lambda k: mx.broadcast_to(k[:,:1], k.shape))

@pytest.mark.parametrize('name', LAYOUTS)
@pytest.mark.parametrize('n', [64, 300])
def test_layouts(tmp_path, name, n):
    "However keys and values lie in memory"
    a,b = pair(n),pair(n)
    for c,d in zip(a, b):
        for side in ('keys', 'values'):
            x = LAYOUTS[name](getattr(c, side)[...,:n,:])
            setattr(c, side, x)
            setattr(d, side, mx.array(np.array(x)))
    p = profile(b)
    for file,c in (('a', a), ('b', b)): save_prompt_cache(tmp_path/file, c, codec='velox', profile=p, progress=False)
    assert (tmp_path/'a').read_bytes()==(tmp_path/'b').read_bytes()

@pytest.mark.parametrize('scale', [.1, 1.2, 3.5])
def test_largest_numbers(tmp_path, scale):
    "Finite in, finite out"
    c = KVCache()
    c.update_and_fetch(*(mx.array(np.random.RandomState(i).uniform(-65504, 65504, (1, 2, 300, 16))).astype(mx.float16) for i in range(2)))
    _,back = through(tmp_path/'a', [c], scale=scale, embed_profile=True)
    assert all(np.isfinite(x).all() for l in held(back) for x in l)

@pytest.mark.parametrize('how,why', [
    (dict(preset='x'), 'near-lossless'), (dict(preset='high', bits=1), 'exclude'), (dict(bits=1, scale=1), 'exclude'), (dict(preset='small', scale=1), 'exclude'),
    (dict(foo=1), 'no option'), *[(dict(scale=v), 'scale') for v in (0, -1, 1000, float('nan'), float('inf'))],
    *[(dict(bits=v), 'bits') for v in (0, -1, 17, float('nan'))], (dict(sinks=-1), 'sinks'), (dict(sinks=5000), 'sinks'), (dict(recent=-1), 'recent'),
    *[(dict([o]), o[0]) for o in [('scale', '1'), ('scale', True), ('scale', [1]), ('bits', '2'), ('sinks', 2.5), ('sinks', None),
        ('recent', 10.5), ('recent', None), ('preset', ['high'])]]], ids=str)
def test_settings(made, tmp_path, how, why):
    "What makes no sense is refused in words before anything is written"
    with pytest.raises((ValueError, TypeError), match=why): save_prompt_cache(tmp_path/'a', pair(), codec='velox', profile=made, **how)
    assert not list(tmp_path.glob('*a*'))

@pytest.mark.parametrize('how', [dict(preset='small'), dict(scale=100), dict(scale=.01), dict(bits=1), dict(bits=2.), dict(sinks=0), dict(sinks=1024), dict(recent=1<<20), dict(saliency=False),
    dict(scale=np.float32(1)), dict(bits=np.int64(2))], ids=str)
def test_good_settings(made, tmp_path, how): through(tmp_path/'a', pair(), profile=made, **how)

@pytest.mark.parametrize('n', [300, 2048])
@pytest.mark.parametrize('bits', [.7, 1, 2, 4])
def test_bits(tmp_path, n, bits):
    "`bits=` is met within 5 %, the profile not counted"
    x = [KVCache() for _ in range(2)]
    for i,c in enumerate(x): c.update_and_fetch(*(mx.array(np.random.default_rng(i).normal(size=(1, 4, n, 32))*np.linspace(.1, 2, 32)).astype(mx.float16) for _ in 'kv'))
    r = save_prompt_cache(tmp_path/'a', x, codec='velox', profile=profile(x), bits=bits)
    assert abs(16*r.payload/r.fp16_bytes/bits-1)<.05

def test_bits_of_unequal(tmp_path):
    "Layers of other lengths, the longest first"
    save_prompt_cache(tmp_path/'a', [cache(600, seed=1), cache(100, seed=2), cache(100, seed=3)], codec='velox', bits=2, embed_profile=True)
    assert load_prompt_cache(tmp_path/'a')[0].offset==600

def test_bits_out_of_reach(made, tmp_path):
    with pytest.warns(UserWarning, match='bits'): save_prompt_cache(tmp_path/'a', pair(), codec='velox', profile=made, bits=12)

# profiles that do not fit, and other objects in their place

def test_other_profiles(made, tmp_path):
    "Of other shapes, of fewer layers, of more, of other numbers: refused on saving and on loading"
    f = tmp_path/'a'
    for p in (profile(pair(D=8)), profile([cache()]), profile([cache(seed=i) for i in range(3)], 3)):
        with pytest.raises(ProfileError, match='profile'): save_prompt_cache(f, pair(), codec='velox', profile=p)
    assert not list(tmp_path.glob('*a*'))
    save_prompt_cache(f, pair(), codec='velox', profile=made)
    with pytest.raises(ProfileError, match=f'{made.digest}.*copy it there'): load_prompt_cache(f)
    for p in (profile(pair()), profile(pair(D=8))):
        with pytest.raises(ProfileError, match=made.digest): load_prompt_cache(f, profile=p)
    made.save(tmp_path/'b')
    assert same(whole(load_prompt_cache(f, profile=tmp_path/'b')), whole(load_prompt_cache(f, profile=made)))
    with pytest.raises(FileNotFoundError, match='none'): load_prompt_cache(f, profile=tmp_path/'none')
    with pytest.raises(FileNotFoundError, match='none'): save_prompt_cache(f, pair(), codec='velox', profile=tmp_path/'none')

@pytest.mark.parametrize('what', [b'abc', 3, {}], ids=str)
def test_no_profile_at_all(made, tmp_path, what):
    f = tmp_path/'a'
    save_prompt_cache(f, pair(), codec='velox', profile=made)
    for run in (lambda: save_prompt_cache(f, pair(), codec='velox', profile=what), lambda: load_prompt_cache(f, profile=what)):
        with pytest.raises((CacheFileError, TypeError), match='profile'): run()

def test_empty(tmp_path):
    "Nothing cached yet: nothing to code"
    for cs in ([KVCache(), KVCache()], []):
        save_prompt_cache(tmp_path/'a', cs, codec='velox')
        assert len(load_prompt_cache(tmp_path/'a'))==len(cs)

@pytest.mark.parametrize('name,bits', [(n, b) for n in stocks() for b in (None, 2)])
def test_mixed_without_profile(tmp_path, name, bits):
    "Lists of several kinds of caches, the plain ones among them coded without calibration"
    cs = stocks()[name]
    for order in (cs, cs[::-1]):
        save_prompt_cache(tmp_path/'a', order, codec='velox', **({} if bits is None else dict(bits=bits)))
        back = load_prompt_cache(tmp_path/'a')
        for a,b in zip(order, back):
            if type(a) is KVCache and not a.empty(): assert error([a], [b])<.2

# threads and machines

def test_threads(made, tmp_path):
    "One profile, read first by many threads at once, saving and loading side by side; no numpy product is left limited"
    p,out = Profile.load(made.to_bytes()),[]
    cs = [pair(600) for _ in range(4)]
    mx.eval([(c.keys, c.values) for l in cs for c in l])
    def run(i):
        for k in range(4):
            f = tmp_path/f'{i}'
            save_prompt_cache(f, cs[i], codec='velox', profile=p, embed_profile=bool(k%2))
            out.append((i, same(whole(load_prompt_cache(f, profile=None if k%2 else p)), want), f.read_bytes() if not k%2 else None))
    save_prompt_cache(tmp_path/'w', pair(600), codec='velox', profile=made)
    want = whole(load_prompt_cache(tmp_path/'w', profile=made))
    mx.eval(want)
    ts = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for t in ts: t.start()
    for t in ts: t.join()
    assert len(out)==16 and all(ok for _,ok,_ in out) and {b for *_,b in out if b}=={(tmp_path/'w').read_bytes()}

ALONE = '''
import sys, numpy as np
sys.path.insert(0, sys.argv[2])
for name in sys.argv[3:]: sys.modules[name] = None
from small import cache, profile
from veloxquant_mlx.prompt_cache import load_prompt_cache, save_prompt_cache
cs = [cache(40, seed=2*i) for i in range(2)]
p = profile(cs, 1, True)
save_prompt_cache(sys.argv[1], cs, codec='velox', profile=p, embed_profile=True)
print(sum(np.array(x).astype(float).sum() for c in load_prompt_cache(sys.argv[1]) for x in (c.keys, c.values)))
'''

@pytest.mark.parametrize('how', ['plain', 'NUMBA_DISABLE_JIT', 'NUMBA_CACHE_DIR', 'threadpoolctl'])
def test_machines(tmp_path, how):
    "Without the compiler, without a folder for compiled code, without threadpoolctl: the same bytes"
    (tmp_path/'no').touch()
    env = dict(os.environ) | {'NUMBA_DISABLE_JIT': dict(NUMBA_DISABLE_JIT='1'), 'NUMBA_CACHE_DIR': dict(NUMBA_CACHE_DIR=str(tmp_path/'no'/'where'))}.get(how, {})
    args = [sys.executable, '-c', ALONE, tmp_path/'a', os.path.dirname(__file__)] + (['threadpoolctl'] if how=='threadpoolctl' else [])
    r = subprocess.run(args, env=env, capture_output=True, text=True)
    assert r.returncode==0, r.stderr
    cs = [cache(40, seed=2*i) for i in range(2)]
    save_prompt_cache(tmp_path/'b', cs, codec='velox', profile=profile(cs, 1, True), embed_profile=True)
    assert (tmp_path/'a').read_bytes()==(tmp_path/'b').read_bytes()

# the command line

def cli(line, capsys):
    from veloxquant_mlx.cli import main
    code = main([str(a) for a in line])
    return code,capsys.readouterr().err

@pytest.fixture
def no_work(monkeypatch):
    "No model is loaded and nothing is prefilled"
    import veloxquant_mlx.cli as c
    def work(*args, **kw): raise AssertionError('work was begun')
    for f in ('_load', '_fill', '_reference'): monkeypatch.setattr(c, f, work)
    return monkeypatch

def test_refused_before_work(made, tmp_path, capsys, no_work):
    "A calibration that is missing, damaged or something else, and settings out of range, are refused before the model is loaded"
    f,bad,none = tmp_path/'a.kv',tmp_path/'bad.safetensors',tmp_path/'none.safetensors'
    save_prompt_cache(f, pair(), dict(model='smollm2'), codec='velox', profile=made, tokens=list(range(300)))
    bad.write_bytes(made.to_bytes()[:-9])
    cache = ['cache', '--prompt', 'x', '--prompt-cache-file', tmp_path/'x.kv', '--codec', 'velox']
    use = [cache, ['generate', '--prompt-cache-file', f, '--prompt', 'x'], ['eval', f], ['eval', '--codec', 'velox'],
           ['convert', f, tmp_path/'y.kv', '--model', 'smollm2'], ['verify', f]]
    for line in use:
        for p in (none, bad, f):
            code,err = cli([*line, '--profile', p], capsys)
            assert code==1 and p.name in err and 'begun' not in err
    for more in (['--bits', 99], ['--bits', 'nan'], ['--preset', 'high', '--bits', 1], ['--bits', -1]):
        code,err = cli(cache+more, capsys)
        assert code==1 and 'allowed' in err or 'exclude' in err, err
    assert {p.name for p in tmp_path.iterdir()}=={'a.kv', 'bad.safetensors'}

def test_other_models_profile(made, tmp_path, capsys, no_work):
    "Refused after the model is known and before the prompt is read"
    from types import SimpleNamespace
    import veloxquant_mlx.cli as c
    p = replace(made, meta=made.meta | dict(model='0123456789abcdef')).save(tmp_path/'p.safetensors')
    tok = SimpleNamespace(has_chat_template=False, encode=lambda text: [1, 2, 3])
    no_work.setattr(c, '_load', lambda *a, **k: (SimpleNamespace(args=SimpleNamespace(layers=2)), tok, {}))
    code,err = cli(['cache', '--prompt', 'x', '--prompt-cache-file', tmp_path/'x.kv', '--codec', 'velox', '--profile', p], capsys)
    assert code==1 and 'p.safetensors' in err and 'another model' in err

@pytest.mark.parametrize('more,why', [(['--max-kv-size', 64], 'makes its own caches'), (['--kv-bits', 4, '--quantized-kv-start', 3], 'nothing for velox')], ids=str)
def test_nothing_to_gain(tmp_path, capsys, no_work, more, why):
    "What mlx_lm would ignore, or what would leave velox nothing, is refused before the prompt is read"
    from types import SimpleNamespace
    import veloxquant_mlx.cli as c
    tok = SimpleNamespace(has_chat_template=False, encode=lambda text: [1, 2, 3])
    no_work.setattr(c, '_load', lambda *a, **k: (SimpleNamespace(make_cache=list), tok, {}))
    code,err = cli(['cache', '--prompt', 'x', '--prompt-cache-file', tmp_path/'x.kv', '--codec', 'velox', *more], capsys)
    assert code==1 and why in err and 'begun' not in err

def test_inspect_and_verify(made, tmp_path, capsys):
    "A file without its profile can be inspected; to verify it, the profile is asked for by digest"
    f = tmp_path/'a.kv'
    save_prompt_cache(f, pair(), codec='velox', profile=made)
    assert cli(['inspect', f], capsys)[0]==0
    code,err = cli(['verify', f], capsys)
    assert code==1 and made.digest in err
    assert cli(['verify', f, '--profile', made.save(tmp_path/'p')], capsys)[0]==0
    for c in ('inspect', 'verify'):
        code,err = cli([c, tmp_path/'p'], capsys)
        assert code==1 and err.endswith('p: this is a profile, not a prompt cache\n')

@pytest.mark.parametrize('change', [lambda c: c[1].update(rows=200, attrs=dict(offset=200)), lambda c: c[1]['pairs'][0][2].__setitem__(0, 2),
    lambda c: [c[1]['pairs'][0][j].__setitem__(0, 2) for j in (1, 2)], lambda c: c[0]['pairs'][0][1].__setitem__(0, 3)])
def test_forged_lengths(made, tmp_path, change):
    "Layers of a chunk that differ in length or batch are refused, not read into memory that nobody wrote"
    f = tmp_path/'a'
    save_prompt_cache(f, pair(), codec='velox', profile=made)
    m,s = taken(f.read_bytes())
    change(m['caches'])
    f.write_bytes(packed(m, s))
    for _ in range(3):
        with pytest.raises(CodecError, match='batches or lengths'): load_prompt_cache(f, profile=made)
