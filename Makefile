# Two commands do everything on a fresh machine with Python 3.11+: `make serve` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet
BEGUN := $(VENV)/.begun
READY := $(VENV)/.ready

.PHONY: install model serve test lint types check tests clean

install: $(READY)

# what `paceline check` needs comes first, so that it can compile kernels while the rest is installed
$(BEGUN): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) --constraint constraints.txt numpy numba tokenizers safetensors jinja2 typer rich
	touch $(BEGUN)

$(READY): $(BEGUN)
	$(PIP) --constraint constraints.txt --editable '.[serve,dev]'
	touch $(READY)

model: $(BEGUN)
	$(BIN)/python -m paceline models pull smollm2-135m

serve: install model
	$(BIN)/paceline serve

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

# compiles kernels for the tests: two test processes would do it twice
check: model
	$(BIN)/python -m paceline check

# other plugins are not used, and take seconds to import
PLUGINS := -p xdist.plugin -p _hypothesis_pytestplugin
tests: export PYTEST_DISABLE_PLUGIN_AUTOLOAD := 1
tests: export OMP_NUM_THREADS := 1
tests: install model
	$(BIN)/python -m pytest $(PLUGINS) --numprocesses 2 --dist loadfile --no-loadscope-reorder

# two cores always have something to do
test:
	$(MAKE) --jobs 2 install check
	$(MAKE) --jobs 3 lint types tests

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
