"Tests marked `slow` run only when asked for: `pytest -m slow`."
import pytest

def pytest_configure(config):
    config.addinivalue_line('markers', 'slow: minutes of work; run with -m slow')

def pytest_collection_modifyitems(config, items):
    if config.option.markexpr: return
    for i in items:
        if 'slow' in i.keywords: i.add_marker(pytest.mark.skip(reason='slow: run with -m slow'))
