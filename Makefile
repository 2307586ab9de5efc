# Everything runs from a fresh clone: each target makes the environment it needs.

PYTHON ?= python3
# One exact version for development: a plain range would take the newest CUDA build, several GB, where the CPU build of
# this one (2.13.0+cpu, which this pin also accepts) has 200 MB. Users install any torch in pyproject.toml's range.
TORCH ?= torch==2.13.0
JOBS ?= 2
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help env native demo test lint types pytest test-gpu bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

env: $(STAMP)  ## create .venv with the package, the demo's and the tests' dependencies

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" -e ".[demo,test]"
	@touch $@

native: env  ## compile the CUDA kernels of csrc/ in place; needs nvcc, takes minutes
	$(BIN)/python -m csrc.build

demo: env  ## train a small MoE transformer on 2 processes; ARGS="--help" lists its options
	$(BIN)/python -m moe_ops demo $(ARGS)

test: lint types pytest  ## lint, types and every test that needs no GPU

lint: env  ## style, format and spelling
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run -Werror $(wildcard csrc/*.cu csrc/*.cuh csrc/*.h)
	$(BIN)/codespell

types: env  ## type hints
	$(BIN)/mypy

# One thread a process: the tests already fill the cores, and small tensors gain nothing from more.
pytest: env
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) $(ARGS)

test-gpu: env  ## the tests that need a GPU
	$(BIN)/python -m pytest -m gpu $(ARGS)

bench: env  ## time operators on this machine, all or OP=permute; ARGS="--help" lists options
	$(BIN)/python -m benchmarks.bench_ops $(if $(OP),--op $(OP)) $(ARGS)

clean:  ## remove the environment, caches, builds and the demo's output
	rm -rf $(VENV) build moe_ops/lib demo_out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
