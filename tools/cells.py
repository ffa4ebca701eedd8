"""Run a notebook's experiment in plain Python, where there is no Jupyter: `python tools/cells.py NOTEBOOK EXPRESSION`

Executes the code cells up to the first `#| slow` one, hidden cells and tests left out, then the expression."""
import json, os, sys
from pathlib import Path

def cells(path):
    for c in json.loads(path.read_text(encoding='utf-8'))['cells']:
        src = ''.join(c['source'])
        if c['cell_type']!='code' or src.startswith('#| hide'): continue
        if src.startswith('#| slow') or 'test_eq' in src: return
        yield src

if __name__=='__main__':
    path, expression = Path(sys.argv[1]).resolve(), sys.argv[2]
    os.chdir(path.parent)
    space = {'__name__': path.stem}
    for src in cells(path): exec(compile(src, path.name, 'exec'), space)
    exec(compile(expression, 'expression', 'exec'), space)
