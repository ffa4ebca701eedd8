"Every check of the project, one line each; the last line says `N passed, N failed, N skipped`."
import glob, json, os, re, subprocess, sys, tempfile, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from html.parser import HTMLParser

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
OLDEST = 'mlx-lm==0.31.3'                 # besides the newest: tested for the caches alone
CACHE_NBS = ['21_cachegen_cache', '22_zipcache_cache', '23_builder', '30_prompt_cache']
KERNEL = {'kernelspec': {'display_name': 'python3', 'language': 'python', 'name': 'python3'}}
results = []

def environment(**kw):
    "One thread per process (two run side by side), OpenBLAS where it is, the numbers of the smoke section"
    env = dict(os.environ, VELOXQUANT_PROFILE='smoke', PATH=f'{BIN}{os.pathsep}{os.environ["PATH"]}', MPLBACKEND='agg', **kw)
    blas = glob.glob('/usr/lib/*/libopenblas.so.0')
    if blas: env['LD_PRELOAD'] = blas[0]
    return env

def sh(*args, **env):
    r = subprocess.run([str(a) for a in args], cwd=ROOT, env=environment(**env), capture_output=True, text=True)
    return r.returncode, (r.stdout+r.stderr).strip()

def check(name, f):
    "Run `f`; it returns '' when all is well, a reason when not, or raises; `skip: …` counts as skipped"
    t = time.time()
    try: why = f()
    except Exception as e: why = f'{type(e).__name__}: {e}'
    word = 'ok' if not why else 'skipped' if why.startswith('skip: ') else 'FAILED'
    results.append(word)
    print(f'{word:8}{time.time()-t:6.1f} s  {name}' + (f'\n{why[-6000:]}' if why else ''), flush=True)

def export():
    before = {p: p.read_bytes() for p in (ROOT/'veloxquant_mlx').rglob('*.py')}
    code,out = sh('nbdev-export')
    if code: return out
    after = {p: p.read_bytes() for p in (ROOT/'veloxquant_mlx').rglob('*.py')}
    return ' '.join(str(p.relative_to(ROOT)) for p in before.keys()|after.keys() if before.get(p)!=after.get(p)) and \
        'modules and notebooks disagree; run nbdev-export'

def notebook(nb, **env):
    code,out = sh('nbdev-test', nb, **env)
    return '' if code==0 and 'Success' in out else out or f'exit {code}'

def clean():
    nbs = {p: p.read_bytes() for p in (ROOT/'nbs').glob('*.ipynb')}
    code,out = sh('nbdev-clean')
    return out if code else ' '.join(p.name for p,b in nbs.items() if p.read_bytes()!=b)

def tidy():
    bad = []
    for p in (ROOT/'veloxquant_mlx').rglob('*.py'):
        m = re.search(r'File to edit: \.\./(?:\.\./)*(nbs/\w+\.ipynb)', p.read_text())
        if m and not (ROOT/m[1]).exists(): bad.append(f'{p.name} has no notebook {m[1]}')
    for p in (ROOT/'nbs').glob('*.ipynb'):
        nb = json.loads(p.read_text())
        if nb['metadata']!=KERNEL: bad.append(f'{p.name}: metadata is not the kernelspec alone')
        code = [c for c in nb['cells'] if c['cell_type']=='code']
        if not any(c['outputs'] for c in code): bad.append(f'{p.name}: no stored outputs')
        for c in code:
            if len(c['source'])>45: bad.append(f'{p.name}: a cell of {len(c["source"])} lines')
            if any(o['output_type']=='error' for o in c['outputs']): bad.append(f'{p.name}: a stored error')
    return '\n'.join(bad)

class Links(HTMLParser):
    "Anchors, links and fetched addresses of one page"
    def __init__(self, text): super().__init__(); self.ids,self.hrefs,self.fetched = set(),[],[]; self.feed(text)
    def handle_starttag(self, tag, attrs):
        a = dict(attrs)
        if a.get('id'): self.ids.add(a['id'])
        if tag=='a' and a.get('href'): self.hrefs.append(a['href'])
        src = a.get('href') if tag=='link' and a.get('rel')!='canonical' else a.get('src') if tag in ('script', 'img') else None
        if src: self.fetched.append(src)

def docs():
    readme = (ROOT/'README.md').read_text()
    code,out = sh(sys.executable, 'tools/docs.py')
    if code: return out
    if (ROOT/'README.md').read_text()!=readme: return 'README.md is not what tools/docs.py writes'
    pages = {p.name: Links(p.read_text()) for p in (ROOT/'_docs').glob('*.html')}
    bad = []
    for name,l in pages.items():
        for h in l.hrefs:
            page,_,anchor = h.partition('#')
            page = (page or name).removeprefix('./')
            if re.match(r'\w+:', h) or h in ('', '#') or page.startswith('..'): continue
            if not (ROOT/'_docs'/page).exists(): bad.append(f'{name}: no page {h}')
            elif anchor and page in pages and anchor not in pages[page].ids: bad.append(f'{name}: no anchor {h}')
        bad += [f'{name} fetches {s}' for s in l.fetched if re.match(r'(https?:)?//', s)]
    return '\n'.join(bad)

def pytest(folder='tests'):
    code,out = sh(sys.executable, '-m', 'pytest', '-q', '-rsfE', folder)
    for word in ('passed', 'failed', 'skipped', 'error'):
        m = re.search(rf'(\d+) {word}', out.splitlines()[-1] if out else '')
        if m: results.extend([{'passed': 'ok', 'skipped': 'skipped'}.get(word, 'FAILED')]*int(m[1]))
    skips = '\n'.join(l for l in out.splitlines() if l.startswith('SKIPPED'))
    if skips: print(skips)
    return out if code else ''

def wheel():
    with tempfile.TemporaryDirectory() as d:
        code,out = sh(sys.executable, '-m', 'pip', 'wheel', '-q', '--no-deps', '-w', d, '.')
        if code: return out
        code,out = sh(sys.executable, '-m', 'pip', 'install', '-q', '--no-deps', '--target', f'{d}/site', *glob.glob(f'{d}/*.whl'))
        if code: return out
        have = {str(p.relative_to(f'{d}/site')) for p in Path(d, 'site').rglob('veloxquant_mlx/**/*') if p.is_file()}
        tracked = subprocess.run(['git', 'ls-files', 'veloxquant_mlx'], cwd=ROOT, capture_output=True, text=True).stdout.split()
        missing = [f for f in tracked if f not in have]
        if missing: return f'not in the wheel: {missing}'
        code,out = sh(sys.executable, '-c', f'import sys; sys.path.insert(0, {d+"/site"!r}); import veloxquant_mlx as v; assert v.__file__.startswith({d!r})')
        return out if code else ''

def oldest(nb):
    target = ROOT/'.venv'/'oldest'
    if not target.exists():
        code,out = sh(sys.executable, '-m', 'pip', 'install', '-q', '--no-deps', '--target', target, OLDEST)
        if code: return out
    return notebook(nb, PYTHONPATH=str(target))

def main():
    nbs = sorted((ROOT/'nbs').glob('[0-9]*.ipynb'))+[ROOT/'nbs'/'index.ipynb']
    check('modules are what the notebooks export', export)
    check('41_demo', lambda: notebook(ROOT/'nbs'/'41_demo.ipynb'))  # first: it makes the model that others share
    with ThreadPoolExecutor(2) as pool:
        for nb in nbs:
            if nb.stem!='41_demo': pool.submit(check, nb.stem, lambda nb=nb: notebook(nb))
    for n in CACHE_NBS: check(f'{n} with {OLDEST}', lambda: oldest(ROOT/'nbs'/f'{n}.ipynb'))
    check('notebooks are clean', clean)
    check('notebooks and modules are tidy', tidy)
    check('README and site', docs)
    check('tests/', pytest)
    check('wheel', wheel)
    n = {w: results.count(w) for w in ('ok', 'FAILED', 'skipped')}
    print(f'{n["ok"]} passed, {n["FAILED"]} failed' + (f', {n["skipped"]} skipped' if n['skipped'] else ''))
    return int(n['FAILED']>0)

if __name__=='__main__': sys.exit(__doc__ if sys.argv[1:] else main())
