# make train   train the small default model and show it. RUN=name (a folder below runs/),
#              CONFIG=recipe, RANKS=processes, OPTIONS='--section.option value ...',
#              THREADS=a process (1: matrices of the tiny recipes are too small for two)
# make test    lint and the whole test suite. WORKERS=processes (3: tests often wait)
# make lint    ruff, mypy, who imports whom, marsopt's prose, and the schemas of two YAML files
# make docs    the documentation site: open build/site/index.html
# make gpu     correctness, speed and a training on one GPU, nine minutes of each; a second
#              call does what is missing. With REHEARSAL=1, without a GPU: every kernel compiled
#              for sm_80, sm_90 and sm_100, its bytes counted. Numbers in runs/gpu
#
# The first call of each installs what it needs into .venv (VENV=folder): gigabytes.

PYTHON  ?= python3
VENV    ?= .venv
CONFIG  ?= tiny_moonlight
RUN     ?= $(CONFIG)
RANKS   ?= 1
THREADS ?= $(if $(filter tiny_%,$(CONFIG)),1)
WORKERS ?= 3
BIN     := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
SITE    := $(VENV)/lib/python3.*/site-packages
SHELL   := bash
.PHONY: help train test lint docs gpu

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

train: $(VENV)/train $(if $(filter tiny_%,$(CONFIG)),data/python/meta.json)
	$(THREADS:%=OMP_NUM_THREADS=%) $(BIN)/$(if $(filter 1,$(RANKS)),python,torchrun --nproc-per-node $(RANKS)) -m train \
		--config $(CONFIG) --dump-folder 'runs/$(RUN)' $(OPTIONS)

test: lint $(VENV)/test $(VENV)-triton/ready $(VENV)-ports/ready
	@echo "pytest imports what it tests (half a minute), and then prints a dot a test"
	MARSOPT_TRITON=$(VENV)-triton MARSOPT_PORTS=$(VENV)-ports \
		$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

lint: $(VENV)/lint
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tests.voice
	$(BIN)/check-jsonschema --builtin-schema github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema citation-file-format CITATION.cff
	$(BIN)/python -m mypy --cache-dir $(VENV)/mypy

docs: $(VENV)/docs
	rm -rf build/site
	$(BIN)/python -m sphinx -W --keep-going -E -c docs/site -d build/doctrees . build/site
	@echo "build/site/index.html; search shows excerpts after $(BIN)/python -m http.server -d build/site"

ifdef REHEARSAL
gpu: $(VENV)/gpu $(VENV)-triton/ready
	@mkdir -p runs/gpu
	PYTHONPATH=$(VENV)-triton $(BIN)/python -m benchmarks.gpu.rehearsal \
		--workers $(WORKERS) --json runs/gpu/rehearsal.json
else
gpu: $(VENV)/gpu data/packages/meta.json
	$(BIN)/python -m benchmarks.gpu
endif

# torch first: what depends on it would otherwise choose a build of it
$(VENV)/torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "got Python %d.%d, expected 3.11 or newer: make PYTHON=python3.12" % sys.version_info[:2])'
	@echo "torch into $(VENV): 0.8 GB, or 5 GB with CUDA (minutes; pip unpacks it in silence)"
	@$(PYTHON) -m venv $(VENV)
	$(INSTALL) pip
	$(INSTALL) torch
	@touch $@

# groups of pyproject.toml in the environment; those that it must not have, beside it
$(VENV)/%: pyproject.toml constraints.txt $(VENV)/torch
	@echo "$* into $(VENV): 0.2 to 1.4 GB (minutes; pip unpacks it in silence)"
	$(INSTALL) --group $*
	@touch $@

$(VENV)-%/ready: pyproject.toml constraints.txt $(VENV)/torch
	@echo "$* into $(VENV)-$*: 27 MB of ports, 0.7 GB of triton (a minute)"
	@rm -rf $(VENV)-$*
	$(INSTALL) --no-deps --target $(VENV)-$* --group $*
	@touch $@

data/python/meta.json: | $(VENV)/train
	$(BIN)/python -m train.prepare --source python --out data/python

data/packages/meta.json: | $(VENV)/train  # two packages are held out
	$(BIN)/python -m train.prepare --source text --tokenizer gpt2 --out data/packages \
		$(SITE)/{sympy,numpy,matplotlib,pygments,torchtitan,*.dist-info} \
		$(SITE)/torch/{_inductor,distributed,nn,optim,utils} \
		--held-out $(SITE)/{networkx,huggingface_hub}
