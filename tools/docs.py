"Build `README.md` and `_docs/`: Quarto renders the site where it is installed, smalldocs where it is not."
import html, os, re, shutil, subprocess, sys, yaml
from base64 import b64decode
from pathlib import Path
from fastcore.nbio import join_out, read_nb
from nbdev.config import get_config
from nbdev.doclinks import _build_modidx
from nbdev.quarto import refresh_quarto_yml
from nbdev.serve import proc_nbs

cfg = get_config()

def front(p): return yaml.safe_load(read_nb(p).cells[0].source.strip().strip('-'))

def output(o, figs, cap):
    "One stored output as Markdown; pictures become files in `figs`"
    d = {k: join_out(v) for k,v in o.get('data', {}).items()}
    if 'text/markdown' in d: return re.sub(r'\{target=[^}]*\}', '', d['text/markdown'])
    for mime,ext in (('image/svg+xml', 'svg'), ('image/png', 'png')):
        if mime not in d: continue
        figs.mkdir(exist_ok=True)
        f = figs/f'{len(list(figs.iterdir()))}.{ext}'
        f.write_bytes(d[mime].encode() if ext=='svg' else b64decode(d[mime]))
        return f'![{cap}]({figs.name}/{f.name})'
    return f'```\n{(join_out(o.get("text", "")) or d.get("text/plain", "")).rstrip()}\n```'

FLOORS = {0: 'Stages', 1: 'Codecs', 2: 'Caches', 3: 'Files', 4: 'Tools', 5: 'Experiments'}

def sidebar(nbs):
    "The reading order, in sections by the tens of each notebook's number"
    res = ['index.ipynb']
    for tens,name in FLOORS.items():
        pages = sorted(p.name for p in nbs.glob(f'{tens}[0-9]_*.ipynb'))
        if pages: res.append(dict(section=name, contents=pages))
    text = yaml.safe_dump(dict(website=dict(sidebar=dict(contents=res))), sort_keys=False, indent=2)
    (nbs/'sidebar.yml').write_text(text)

def to_md(p, dest, figs=None):
    "A processed notebook as GitHub Markdown"
    figs = figs or dest.with_name(dest.name.split('.')[0]+'_files')
    meta,res = front(p),[]
    shutil.rmtree(figs, ignore_errors=True)
    for c in read_nb(p).cells[1:]:
        opts = dict(re.findall(r'^#\| *([\w-]+): *"?(.*?)"?$', c.source, re.M))
        src = re.sub(r'^#\|.*\n?', '', c.source, flags=re.M).strip()
        if c.cell_type!='code': res.append(c.source)
        elif opts.get('include')!='false':
            if src and opts.get('echo')!='false': res.append(f'```python\n{src}\n```')
            if opts.get('output')!='false': res += [output(o, figs, opts.get('fig-cap', '')) for o in c.outputs]
    text = '\n\n'.join([f'# {meta["title"]}', res[0], f'> {meta.get("description", "")}', *res[1:]])+'\n'
    dest.write_text(text.replace(f']({figs.name}/', f']({figs.relative_to(dest.parent)}/'))

def final_names(proc):
    "smalldocs ignores `output-file`: give pages the names in nbdev's links, and make those links relative"
    names = {p.name: Path(front(p)['output-file']).stem+'.ipynb' for p in sorted(proc.glob('*.ipynb'))}
    new_names = lambda text, before: re.sub(rf'(?<={before})({"|".join(map(re.escape, names))})', lambda m: names[m[1]], text)
    for old,new in names.items():
        text = (proc/old).read_text().replace(cfg.doc_url.rstrip('/')+'/', '')
        (proc/old).unlink()
        (proc/new).write_text(new_names(text, r'\]\('))
    side = proc/'sidebar.yml'
    side.write_text(new_names(side.read_text(), '- '))

def mathml(page):
    "smalldocs leaves TeX to a script from a CDN: turn it into MathML"
    from latex2mathml.converter import convert
    def f(m):
        tex = re.sub(r'\\[bB]igg?[lr]?(?![a-zA-Z])', '', html.unescape(m[2])).replace('{aligned}', '{split}')
        res = convert(tex, display='block' if m[1]=='display' else 'inline')
        if '\\' in res or '<mi>&</mi>' in res or 'operatorname*' in tex: sys.exit(f'{page}: cannot set {tex}')
        return f'<span class="math {m[1]}">{res}</span>'
    text = re.sub(r'<span class="math (inline|display)">\\[\[(](.*?)\\[\])]</span>', f, page.read_text(), flags=re.S)
    page.write_text(re.sub(r'<(?:link|script)[^>]*/katex@[^>]*>(?:</script>)?', '', text))

def offline(out):
    "Themes import fonts from a font service: leave that out, so that a page asks nobody"
    for p in out.rglob('*.css'): p.write_text(re.sub(r'@import\s+url\([^)]*\);?', '', p.read_text()))

def main():
    refresh_quarto_yml()
    _build_modidx()
    sidebar(cfg.nbs_path)
    os.chdir(cfg.nbs_path)  # where notebooks run, and some of their cells do here
    proc,out = proc_nbs(force=True),cfg.doc_path  # what nbdev-proc-nbs does, without its attempt to install Quarto
    to_md(proc/cfg.readme_nb, cfg.config_path/'README.md', cfg.config_path/'nbs'/'readme_files')
    if shutil.which('quarto'):
        code = subprocess.run(['nbdev-docs']).returncode
        offline(out)
        return code
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    for p in proc.glob('*.ipynb'): to_md(p, out/(front(p)['output-file']+'.md'))  # module docstrings point to X.html.md
    final_names(proc)
    r = subprocess.run([Path(sys.executable).with_name('smalldocs'), 'render', proc], capture_output=True, text=True)
    if r.returncode or 'broken link' in r.stderr: return r.stderr
    shutil.copytree(proc/out.name, out, dirs_exist_ok=True)
    offline(out)
    for p in out.glob('*.html'): mathml(p)

if __name__=='__main__': sys.exit(main())  # the guard matters: nbdev's spawned workers import this file again
