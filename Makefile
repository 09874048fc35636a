# Two commands from a fresh clone: `make demo` and `make test`. Both install everything first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test docs setup clean

demo: $(VENV)/.ready
	$(BIN)/testtime demo --out demo

test: $(VENV)/.ready
	scripts/check

# Updates the generated pages, then builds the site, which works offline: open site/index.html.
docs: $(VENV)/.ready
	$(BIN)/python scripts/make_docs.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

setup: $(VENV)/.ready

# Plain pip, or uv where it is installed: the same packages, faster.
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	if command -v uv >/dev/null; then \
	  uv pip install --quiet --compile-bytecode --python $(BIN)/python -e '.[offline,report,dev]'; \
	else \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[offline,report,dev]'; \
	fi
	touch $@

clean:
	rm -rf $(VENV) demo site .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
