# make demo      train the language model of configs/austen.toml on two emulated devices, test it, let it write
# make test      the gate: formatting, lint, types, tests
# make test-all  the gate with the slow tests and ten times the random examples
# make bench     measure training speed beside PyTorch and flax (BENCH_ARGS="--peers torch,flax --json FILE" for more)
# make clean     remove everything that was built, except trained models (runs/)

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet

RUN        := runs/austen
PROMPT     := it is a truth universally acknowledged ,
BENCH_ARGS ?= --peers torch,flax

.PHONY: demo test test-all bench clean lint

# A new run each time. One that was interrupted can instead be continued:
#   mp-lstm train configs/austen.toml --run-dir runs/austen --resume
demo: $(VENV)/.installed-plot
	rm -rf $(RUN)
	$(BIN)/mp-lstm train configs/austen.toml --run-dir $(RUN) --train.emulate_devices 2
	$(BIN)/mp-lstm evaluate $(RUN)
	$(BIN)/mp-lstm generate $(RUN) --prompt "$(PROMPT)" --tokens 50
	@echo "Loss curves: $(RUN)/loss.png"

# pytest comes last: what it prints last is the result. Most of its time goes into compiling, one core for each worker.
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal

test: lint
	$(PYTEST)

test-all: lint
	$(PYTEST) -m "not gpu" --hypothesis-profile=all

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/basedpyright

bench: $(VENV)/.installed-bench
	$(BIN)/python scripts/bench.py $(BENCH_ARGS)

# One stamp for each set of extras: an installation is repeated only when what it depends on has changed.
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --editable '.[$*]' --constraint constraints.txt
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
