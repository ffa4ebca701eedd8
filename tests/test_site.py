"The built site in headless Chromium: formulas, figures and search work, and nothing is fetched from elsewhere."
import functools, http.server, os, re, shutil, threading
from pathlib import Path
from urllib.parse import urlparse
import pytest

SITE = Path(__file__).parent.parent/'_docs'
CHROME = shutil.which('chromium') or shutil.which('google-chrome') or shutil.which('chrome')
FLAGS = ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking',
         '--disable-component-update', '--disable-sync']
pytestmark = [pytest.mark.skipif(not CHROME, reason='no Chromium: the site was not opened'),
              pytest.mark.skipif(not SITE.exists(), reason='no _docs: run `python tools/docs.py`')]

@pytest.fixture(scope='module')
def url():
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=SITE)
    handler.log_message = lambda *a: None
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as s:
        threading.Thread(target=s.serve_forever, daemon=True).start()
        yield f'http://127.0.0.1:{s.server_port}'
        s.shutdown()

@pytest.fixture(scope='module')
def browser():
    from playwright.sync_api import sync_playwright
    with sync_playwright() as p:
        env = {k: v for k,v in os.environ.items() if k!='LD_PRELOAD'} # the browser's GPU process dies with a preloaded BLAS
        b = p.chromium.launch(executable_path=CHROME, args=FLAGS, env=env)
        yield b
        b.close()

def visit(browser, url):
    "Open a page; returns it, the hosts it asked and the errors it logged"
    page,hosts,errors = browser.new_page(),set(),[]
    page.route('**/*', lambda r: r.continue_() if r.request.url.startswith('http://127.0.0.1:') else r.abort())
    page.on('request', lambda r: hosts.add(urlparse(r.url).hostname) if r.url.startswith('http') else None)
    page.on('pageerror', lambda e: errors.append(str(e)))
    page.goto(url, wait_until='networkidle')
    return page,hosts,errors

PAGES = sorted(p.name for p in SITE.glob('*.html'))

@pytest.mark.parametrize('name', PAGES)
def test_page(browser, url, name):
    page,hosts,errors = visit(browser, f'{url}/{name}')
    assert hosts=={'127.0.0.1'} and not errors, (hosts, errors)
    heights = page.eval_on_selector_all('math', 'es => es.map(e => e.getBoundingClientRect().height)')
    assert all(h>4 for h in heights), 'a formula has no height'
    text = page.inner_text('main')
    assert '$$' not in text and not re.search(r'\\(frac|sum|mathbf|begin)\b', text), 'raw TeX is shown'
    sizes = page.eval_on_selector_all('main img', 'es => es.map(e => [e.currentSrc.slice(0, 60), e.naturalWidth])')
    assert all(w>0 for _,w in sizes), f'a figure does not show: {sizes}'
    page.close()

def test_search(browser, url):
    page,hosts,_ = visit(browser, f'{url}/index.html')
    page.click('#quarto-search')
    page.keyboard.type('quantiz', delay=20)
    page.wait_for_selector('.search-result, .aa-Item', timeout=10000)
    assert 'quantiz' in page.locator('.search-result, .aa-Item').first.inner_text().lower()
    assert hosts=={'127.0.0.1'}
    page.close()
