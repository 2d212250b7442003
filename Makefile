# make demo    from a bare machine to a trained small model and its report, CPU only
# make test    everything CI runs: format, lint, types, layers, spelling, tests
PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
RUN    ?= runs/first-run
SEED   ?= 0

.DEFAULT_GOAL := help
.PHONY: help install install-dev demo check test test-slow test-gpu bench clean

help:
	@sed -n 's/^# //p' Makefile; grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | sort

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first: a bare `torch` pulls gigabytes of accelerator libraries on some systems.
$(VENV)/.torch: | $(BIN)/python
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install -q --disable-pip-version-check "$(TORCH)"
	@touch $@

$(VENV)/.first-run: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install -q --disable-pip-version-check -e '.[first-run]'
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install -q --disable-pip-version-check -e '.[dev]'
	@touch $@ $(VENV)/.first-run

install: $(VENV)/.first-run ## a virtual environment in .venv with torch and treadle

install-dev: $(VENV)/.dev ## the same with everything that checks and tests need

demo: install ## install, pull the model, train, evaluate, report
	$(BIN)/treadle doctor
	$(BIN)/treadle models pull smollm2-135m
	$(BIN)/treadle train 10_first_run --run-dir $(RUN) $(if $(wildcard $(RUN)/run.db),--resume,--set seed=$(SEED))
	$(BIN)/treadle report $(RUN) --html $(RUN)/report.html

check: install-dev ## format, lint, types, layers, spelling; no tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports --config pyproject.toml
	$(BIN)/codespell

test: check ## everything CI runs
	$(BIN)/python -m pytest

test-slow: install-dev ## minutes: crash drills, real models, real servers
	$(BIN)/python -m pytest -m 'slow or network'

test-gpu: install-dev ## needs an accelerator
	$(BIN)/python -m pytest -m gpu

bench: install ## performance figures with JSON results under benchmarks/results
	$(BIN)/python -m benchmarks.engine --json
	$(BIN)/python -m benchmarks.step_vs_trl --json
	$(BIN)/pip install -q --disable-pip-version-check -e '.[gateway]'
	$(BIN)/python -m benchmarks.gateway --json
	$(BIN)/python -m benchmarks.routing --json
	$(BIN)/python -m benchmarks.staleness --json

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis
