# Two commands from a fresh clone: `make demo` and `make test`. Each installs what it needs first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEVELOPMENT := .[offline,report,dev]

.PHONY: demo test docs dist setup clean

demo: $(VENV)/.ready
	$(BIN)/testtime demo --out demo

test: $(VENV)/.dev
	scripts/check

# Updates the generated pages, then builds the site, which works offline: open site/index.html.
docs: $(VENV)/.dev
	$(BIN)/python scripts/make_docs.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Builds the wheel and the sdist into dist/, and tries them out.
dist:
	PYTHON=$(PYTHON) scripts/release-check

setup: $(VENV)/.dev

# Plain pip, or uv where it is installed: the same packages, faster.
install = if command -v uv >/dev/null; then \
	  uv pip install --quiet --compile-bytecode --python $(BIN)/python -e '$(1)'; \
	else \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '$(1)'; \
	fi

# For use: the package and what it depends on.
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(call install,.)
	touch $@

# For development, on top: what the tests, the checks and the documentation need.
$(VENV)/.dev: $(VENV)/.ready
	$(call install,$(DEVELOPMENT))
	touch $@

clean:
	rm -rf $(VENV) .venvs build dist demo site .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
