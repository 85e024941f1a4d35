# Two commands do everything on a fresh machine with Python 3.11+: `make serve` and `make test`.
PYTHON ?= python3
ARGS ?=
MINUTES ?= 10
VENV := .venv
BIN := $(VENV)/bin
# --no-compile: Python compiles what is imported; most of torch and transformers never is
PIP := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable
SERVING := $(VENV)/.serving
READY := $(VENV)/.ready
SCALED := $(VENV)/.scaled
TIMES := $(VENV)/times

# some machines set it: every process, of which tests start a hundred, would compile the package again
unexport PYTHONDONTWRITEBYTECODE

EVERYTHING := '.[serve,dev]'
WITH_RAY := '.[serve,dev,ray]'

# $(call timed,PART,COMMANDS): run commands, and note how long the part took. A comma would end an argument:
# what has one goes into a variable.
timed = @begin=$$(date +%s); ($(2)); status=$$?; \
	printf '%-8s %5d s\n' $(1) $$(($$(date +%s) - begin)) >> $(TIMES); exit $$status

.PHONY: install model serve test test-large test-scale lint types check portable checked-tests tests fuzz clean

# what serving needs: no torch, nothing for tests
$(SERVING): pyproject.toml constraints.txt
	@echo "paceline: creating the environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "paceline: installing the server, about 45 packages"
	$(call timed,server,$(PIP) '.[serve]' && touch $(SERVING))

$(READY): $(SERVING)
	@echo "paceline: installing what tests need, about 45 packages more, torch among them"
	$(call timed,install,$(PIP) $(EVERYTHING) && touch $(READY))

install: $(READY)

model: $(SERVING)
	@$(BIN)/python -m paceline models pull smollm2-135m

serve: model
	@echo "paceline: starting; the first start compiles kernels, which takes one to two minutes"
	@$(BIN)/paceline serve $(ARGS)

lint: install
	$(call timed,lint,$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports)

types: install
	$(call timed,types,$(BIN)/mypy)

# compiles kernels for the tests: two test processes would do it twice
check: model
	$(call timed,check,$(BIN)/python -m paceline check)

# and those for any CPU on the second core, while packages are fetched; the test that holds all CPUs to them
# says what is wrong
PORTABLE := from paceline.check.digest import generation_digest; generation_digest()
portable: $(SERVING)
	$(call timed,portable,PACELINE_ISA=portable $(BIN)/python -c '$(PORTABLE)' || true)

# other plugins are not used, and take seconds to import
PLUGINS := -p xdist.plugin -p _hypothesis_pytestplugin
tests: export PYTEST_DISABLE_PLUGIN_AUTOLOAD := 1
tests: export OMP_NUM_THREADS := 1
tests: install model
	$(call timed,tests,$(BIN)/python -m pytest $(PLUGINS) --numprocesses 2 --dist loadfile --no-loadscope-reorder \
		--max-worker-restart 0 --durations 15)

# kernels are compiled while the rest is installed, linted and type-checked: tests wait for them alone
checked-tests: install check portable
	@$(MAKE) tests

# two cores always have something to do
test:
	@rm -f $(TIMES)
	@$(MAKE) --jobs 3 --keep-going lint types checked-tests; status=$$?; \
		echo "time by part; some run beside each other:"; cat $(TIMES); exit $$status

# and what only repeats: more pairs of methods and requests, and a larger model if it was pulled
test-large: export PACELINE_TEST_LARGE := 1
test-large: test

$(SCALED): $(READY)
	@echo "paceline: installing Ray, about 35 packages more"
	$(call timed,ray,$(PIP) $(WITH_RAY) && touch $(SCALED))

# replicas on a real Ray cluster: they are killed, hung, upgraded and scaled under load; five to ten minutes
test-scale: export PACELINE_TEST_SCALE := 1
test-scale: export OMP_NUM_THREADS := 1
test-scale: $(SCALED) model
	$(call timed,scale,$(BIN)/python -m pytest tests/scale/ray --durations 15)

# property tests with fresh seeds, until the time is up or one fails: `make fuzz MINUTES=60`
fuzz: install model
	@$(BIN)/python -m tests.fuzz $(MINUTES) $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
