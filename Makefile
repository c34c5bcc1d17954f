# Needs python3 (3.10 to 3.13), make and gcc. Each command makes the environment that it needs under .venv.
PYTHON ?= python3
TEST_ENV := .venv/test/stamp.json
DEMO_ENV := .venv/demo/stamp.json
TEST_PYTHON := .venv/test/bin/python
DEMO_PYTHON := .venv/demo/bin/python
ENV_SOURCES := pyproject.toml setup.py $(wildcard csrc/*) tools/make_env.py tools/unmet.py tools/constraints-cpu.txt
GPU_LOG ?= bench/results/gpu-test.log
DEMO_ARGS ?=
BENCH_ARGS ?=
SANITIZE_ARGS ?= --tools memcheck racecheck synccheck
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test gpu-test hub-test lint format bench sanitize clean

help:
	@echo "make demo      embed sentences with a pretrained model, before and after fusedmlp.patch()"
	@echo "make test      lint, types and all tests (2 workers; TEST_WORKERS=n for another number)"
	@echo "make gpu-test  the GPU tests and the suite on this machine's GPU, none skipped; log in GPU_LOG=$(GPU_LOG)"
	@echo "make hub-test  the core of the GPU tests on a Hub tree, and its speed beside the package's, on this machine's GPU"
	@echo "make bench     bench/first.py on this machine's GPU (BENCH_ARGS=...)"
	@echo "make sanitize  every kernel under compute-sanitizer on this machine's GPU (SANITIZE_ARGS=...)"
	@echo "make lint      ruff and mypy alone"
	@echo "make format    let ruff fix and format the code"
	@echo "make clean     remove environments, caches and build results"
	@echo
	@echo "PYTHON=/path/to/python3.12 picks the Python; FUSEDMLP_TORCH=cpu, cuda or 'torch==2.11.0' the PyTorch"
	@echo "that a new environment gets."

$(TEST_ENV): $(ENV_SOURCES)
	$(PYTHON) tools/make_env.py test

$(DEMO_ENV): $(ENV_SOURCES)
	$(PYTHON) tools/make_env.py demo

demo: $(DEMO_ENV)
	$(DEMO_PYTHON) -m fusedmlp demo $(DEMO_ARGS)

test: $(TEST_ENV)
	$(TEST_PYTHON) tools/check.py test

lint: $(TEST_ENV)
	$(TEST_PYTHON) tools/check.py lint

format: $(TEST_ENV)
	$(TEST_PYTHON) -m ruff check --fix .
	$(TEST_PYTHON) -m ruff format .

gpu-test: $(TEST_ENV)
	mkdir -p $(dir $(GPU_LOG))
	$(TEST_PYTHON) tools/check.py gpu 2>&1 | tee $(GPU_LOG)

hub-test: $(TEST_ENV)
	$(TEST_PYTHON) tools/check.py hub

bench: $(TEST_ENV)
	$(TEST_PYTHON) bench/first.py $(BENCH_ARGS)

sanitize: $(TEST_ENV)
	$(TEST_PYTHON) bench/sanitize.py $(SANITIZE_ARGS)

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
