PYTHON ?= python3
PIP_ARGS ?=
NPROC ?= 2
WORKERS ?= 2
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS := .venv-docs
SITE ?= site

.DEFAULT_GOAL := help
.PHONY: help setup train frontier test lint bench sweep docs

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo 'Variables:'
	@echo '  PYTHON    Python 3.11 or later that makes .venv (default: python3)'
	@echo '  PIP_ARGS  more options for pip. Where pip would take the CUDA build of torch, name the index of the CPU builds:'
	@echo '            make setup PIP_ARGS="--extra-index-url URL", with the URL that pytorch.org/get-started shows for pip and CPU'
	@echo '  NPROC     processes of make train (default: 2)'
	@echo '  WORKERS   test files of make test that run at a time (default: 2); many start up to 4 processes of their own'
	@echo '  ARGS      options of make train, e.g. ARGS="--sharding row_wise"; `python examples/dlrm/main.py --help` lists them'
	@echo '            or of make sweep, e.g. ARGS="--resume"; `python -m benchmarks.sweep --help` lists them'
	@echo '            or of make frontier, e.g. ARGS="--budget 3%"; `dist-sparse frontier --help` lists them'

setup: $(READY)  ## makes .venv with all that training, development and tests need, pinned

$(READY): requirements/cpu.txt pyproject.toml
	@test ! -L $(VENV) || { echo '$(VENV) is a symbolic link: nothing is installed into the environment of another checkout. Remove the link.' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than 3.11: make setup PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(PIP_ARGS) -r requirements/cpu.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-index -e .
	@$(BIN)/python -c 'import torch, fbgemm_gpu, torchrec' 2>$(VENV)/check.log || { \
	  tail -n 1 $(VENV)/check.log >&2; \
	  echo 'torch or torchrec was installed but cannot be imported. If pip took the CUDA build of torch (without its CUDA libraries),' >&2; \
	  echo 'start again from the index of the CPU builds: rm -r .venv; make setup PIP_ARGS="--extra-index-url URL"; see make help.' >&2; \
	  exit 1; }
	@touch $@

train: $(READY)  ## trains a DLRM on MovieLens-100K under torchrun: dense, sparsified, small and dense
	@echo 'Training on $(NPROC) process(es), three runs: dense, sparsified, small and dense. About a minute; torch and TorchRec load first.'
	$(BIN)/python -m launch --nproc $(NPROC) --ranks 0 --env OMP_NUM_THREADS=1 examples/dlrm/main.py $(ARGS)

frontier: $(READY)  ## what the DLRM of make train is worth at 50, 20, 10 and 5% of its tables' bytes: table, plot; a minute
	OMP_NUM_THREADS=1 $(BIN)/python -m dist_sparse frontier examples/dlrm/planned.py:measured --out runs/frontier $(ARGS)

test: lint  ## lint, then every test
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

lint: $(READY)  ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict dist_sparse launch
	$(BIN)/lint-imports

bench: $(READY)  ## a due step(), and enforcement at every step, against what one would do without the library
	$(BIN)/python -m benchmarks.mask_update
	$(BIN)/python -m benchmarks.enforce
	$(BIN)/python -m benchmarks.serving
	$(BIN)/python -m benchmarks.compact

sweep: $(READY)  ## what each level of sparsity costs and saves on the main job: CSV, plot; 10 minutes
	$(BIN)/python -m benchmarks.sweep $(ARGS)

docs: $(DOCS)/.ready  ## the documentation as a site in site/; every link and anchor is checked
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict --site-dir $(SITE)
	@echo 'Open $(SITE)/index.html'

$(DOCS)/.ready: requirements/docs.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than 3.11: make docs PYTHON=..." >&2; exit 1; }
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(PIP_ARGS) -r requirements/docs.txt || { \
	  echo 'make docs needs a package index, for what requirements/docs.txt lists.' >&2; exit 1; }
	@touch $@
