# `make demo` and `make test` build their own virtual environment (.venv) and need nothing but Python >= 3.11.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Exact, so that the build and the lint see the same torch everywhere; override it for another build.
TORCH ?= torch==2.13.0
INSTALL ?= $(BIN)/pip install --quiet

# Parts of `make gpu`: all, or some of tests, trainer, memory, bridges, head.
PART ?= all

.PHONY: demo test drills lint bench docs gpu agents clean

# Tests and drills wait for processes and timers: three workers keep two cores busy (tests 320 s).
#
# Unset, PYTHONDONTWRITEBYTECODE lets the hundreds of processes that tests start compile each module once.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) $(TORCH)
	$(INSTALL) -e '.[dev]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/atropos-demo $(DEMO_ARGS)

test: $(VENV)/.installed
	$(PYTEST) -n 3 $(PYTEST_ARGS)

drills: $(VENV)/.installed
	$(PYTEST) -n 3 -m "drill and not slow" tests $(PYTEST_ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -p no:cacheprovider tests/contract/test_layers.py tests/contract/test_shell.py

bench: $(VENV)/.installed
	for script in benchmarks/[a-z]*.py; do PYTHONPATH=. OMP_NUM_THREADS=1 $(BIN)/python $$script || exit 1; done

docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "python -m http.server -d runs/docs 8001"

gpu: $(VENV)/.installed
	PYTHONPATH=. $(BIN)/python benchmarks/trainer.py --device cuda --part $(PART) --out runs/gpu.json

agents: $(VENV)/.installed
	VENV=$(VENV) bash .ci/agents_env.sh
	ATROPOS_AGENTS_PYTHON=$(or $(ATROPOS_AGENTS_VENV),.venv-agents)/bin/python $(BIN)/python -m pytest -m agents tests/proxy -p no:cacheprovider

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache
