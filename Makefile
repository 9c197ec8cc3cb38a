PYTHON ?= python3
PIP_ARGS ?=
NPROC ?= 2
WORKERS ?= 2
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS := .venv-docs
LATEST := .venv-latest
SITE ?= site

.DEFAULT_GOAL := help
.PHONY: help setup train two-tower has-data online frontier test test-slow test-all test-latest lint bench sweep docs

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo 'Start with make setup, then make train. Variables:'
	@echo '  PYTHON    Python 3.11 or later that makes .venv (default: python3)'
	@echo '  PIP_ARGS  more options for pip. Where pip would take the CUDA build of torch,'
	@echo '            name the index of the CPU builds: PIP_ARGS="--extra-index-url URL",'
	@echo '            with the URL that pytorch.org/get-started shows for pip and CPU'
	@echo '  NPROC     processes of make train (default: 2)'
	@echo '  WORKERS   test files that are run at a time (default: 2); many of'
	@echo '            them start up to 4 processes'
	@echo '  ARGS      options of train, two-tower, online, frontier or sweep, such as'
	@echo '            make train ARGS="--sharding row_wise". These list them:'
	@echo '            .venv/bin/python examples/dlrm/main.py --help'
	@echo '            .venv/bin/dist-sparse frontier --help'
	@echo '            .venv/bin/python -m benchmarks.sweep --help'

setup: $(READY)  ## creates .venv with pinned versions of everything; some minutes
	@echo 'Everything is in $(VENV). Next: make train; or `. $(BIN)/activate`, then `dist-sparse --help`.'

$(READY): requirements/cpu.txt requirements/common.txt pyproject.toml
	@test ! -L $(VENV) || { echo '$(VENV) is a symbolic link: nothing is installed into the environment of another checkout. Remove the link.' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than 3.11: make setup PYTHON=..." >&2; exit 1; }
	@echo 'Installing 2.4 GB into $(VENV): a minute or more, in which pip prints nothing.'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(PIP_ARGS) -r requirements/cpu.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-index -e .
	@$(BIN)/python -c 'import torch, fbgemm_gpu, torchrec' 2>$(VENV)/check.log || { \
	  tail -n 1 $(VENV)/check.log >&2; \
	  echo 'torch or torchrec was installed but cannot be imported. If pip took the CUDA build of torch (without its CUDA libraries),' >&2; \
	  echo 'start again from the index of the CPU builds: rm -r .venv; make setup PIP_ARGS="--extra-index-url URL"; see make help.' >&2; \
	  exit 1; }
	@touch $@

train: $(READY)  ## removes the rows that a DLRM never read; trains smaller ones
	@echo 'Training a DLRM dense, sparsified and with smaller tables, on $(NPROC) processes.'
	@echo 'That takes two to three minutes. torch and TorchRec load first.'
	OMP_NUM_THREADS=1 $(BIN)/dist-sparse launch --nproc $(NPROC) --ranks 0 \
	  examples/dlrm/main.py -- $(ARGS)

two-tower: has-data $(READY)  ## trains two towers wide, narrowed and narrow: DATA=gowalla.npz
	$(BIN)/dist-sparse launch --nproc $(NPROC) --ranks 0 examples/two_tower/main.py -- --data '$(DATA)' $(ARGS)

# Before the setup, which takes minutes.
has-data:
	@test -f '$(DATA)' || { { echo "DATA='$(DATA)' is not a file."; \
	  echo 'Name one of interactions: make two-tower DATA=FILE.npz, with train_user,'; \
	  echo 'train_item, test_user, test_item, num_users and num_items: docs/columns.md.'; } >&2; exit 2; }

online: $(READY)  ## trains, publishes and serves MovieLens-100K by day; 2 minutes
	$(BIN)/dist-sparse launch --nproc $(NPROC) --ranks 0 examples/online/main.py -- $(ARGS)

frontier: $(READY)  ## measures the DLRM of train at 50, 20, 10 and 5% of its bytes
	OMP_NUM_THREADS=1 $(BIN)/python -m dist_sparse frontier examples/dlrm/planned.py:measured --out runs/frontier $(ARGS)

PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: lint  ## lint, then all tests except the slow ones
	$(PYTEST) -m 'not slow'

test-slow: $(READY)  ## whole examples, jobs, the notebook, the site, a browser
	$(PYTEST) -m slow

test-all: test test-slow  ## both, as CI does

test-latest: $(LATEST)/.ready  ## the tests of make test, on the newest known TorchRec, in .venv-latest
	$(LATEST)/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m 'not slow'

$(LATEST)/.ready: requirements/latest.txt requirements/common.txt pyproject.toml
	@echo 'Installing up to 7 GB into $(LATEST): some minutes, in which pip prints nothing.'
	test -x $(LATEST)/bin/python || $(PYTHON) -m venv $(LATEST)
	$(LATEST)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) $$(grep '^torch==' requirements/latest.txt)
	$(LATEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(PIP_ARGS) -r requirements/latest.txt
	$(LATEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-index -e .
	@touch $@

lint: $(READY)  ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict dist_sparse launch
	$(BIN)/lint-imports

bench: $(READY)  ## mask updates, enforcement, serving, against alternatives
	$(BIN)/python -m benchmarks.mask_update
	$(BIN)/python -m benchmarks.enforce
	$(BIN)/python -m benchmarks.serving
	$(BIN)/python -m benchmarks.deltas
	$(BIN)/python -m benchmarks.compact

sweep: $(READY)  ## measures levels, blocks and norms on the DLRM; 10 minutes
	$(BIN)/python -m benchmarks.sweep $(ARGS)

docs: $(DOCS)/.ready  ## the documentation as a site in site/, with checked links
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict --site-dir $(SITE)
	@echo 'Open $(SITE)/index.html'

$(DOCS)/.ready: requirements/docs.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than 3.11: make docs PYTHON=..." >&2; exit 1; }
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(PIP_ARGS) -r requirements/docs.txt || { \
	  echo 'make docs needs a package index, for what requirements/docs.txt lists.' >&2; exit 1; }
	@touch $@
