# Two commands do everything on a fresh machine with Python 3.11+: `make serve` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: install model serve test lint types check clean

install: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[serve,dev]'
	touch $(READY)

model: install
	$(BIN)/paceline models pull smollm2-135m

serve: model
	$(BIN)/paceline serve

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

# `check` compiles kernels for the tests, on a core that types leave free; two test processes would do it twice
test: model
	$(MAKE) --jobs 2 lint types check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

check: install
	$(BIN)/paceline check

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
