# make train         train the small default model and show it
# make test          lint and the whole test suite
# make test-installed TORCH=version
#                    the built wheel and sdist in an environment of their own, on a torch
#                    of your choice, or on the oldest that the library declares
# make gpu           correctness, speed and a training on one GPU, nine minutes of each;
#                    again: what is missing. Numbers in runs/gpu
# make gpu-rehearsal all of the GPU path that can be verified without one: half an hour on
#                    two cores; again: what is missing. runs/gpu/rehearsal-*.json
# make docs          the documentation site, in build/site: open build/site/index.html
# make clean         delete the virtual environments and what tests and builds leave
#
# All but clean and test-installed create .venv on first use: gigabytes. make train takes
# RUN=name (a folder below runs/), CONFIG=recipe, RANKS=processes and
# OPTIONS='--section.option value ...'; make test WORKERS=processes, each with files of
# its own.

PYTHON  ?= python3
VENV    ?= .venv
CONFIG  ?= tiny_moonlight_transport
RUN     ?= $(CONFIG)
RANKS   ?= 1
WORKERS ?= 2
OPTIONS ?=
SDISTS  ?= data/sdists
TORCH   ?= 2.11.0
INSTALLED := $(abspath $(VENV))-torch-$(TORCH)
LIBRARY_TESTS := rules identities golden newton_schulz against_torch flat optimizer \
	optimizer_edges saving contract torch_suite collectives sharding checkpoint
BIN     := $(VENV)/bin

LAUNCH := $(BIN)/python -m
ifneq ($(RANKS),1)
LAUNCH := $(BIN)/torchrun --nproc-per-node $(RANKS) -m
endif

.PHONY: help train test test-installed lint docs gpu gpu-rehearsal clean

# what the header of this file says
help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

train: $(VENV)/ready $(if $(filter tiny_%,$(CONFIG)),data/python/meta.json)
	$(LAUNCH) train --config $(CONFIG) --dump-folder runs/$(RUN) $(OPTIONS)

test: lint $(addprefix $(VENV),/evaluate /examples /docs -triton/ready -ports/ready)
	@echo "pytest imports what it tests (half a minute), and then prints a dot a test"
	MARSOPT_TRITON=$(VENV)-triton MARSOPT_PORTS=$(VENV)-ports \
		$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

# what the sdist and the wheel install, beside copies of tests, of what they read and of the
# application's reader of checkpoints: the checkout is not on the path
test-installed: $(INSTALLED)/ready
	rm -rf build/installed && mkdir -p build/installed
	cp -r tests train docs README.md pyproject.toml build/installed
	$(INSTALLED)/bin/python -m build --outdir build/installed/dist
	cd build/installed && for archive in dist/*.tar.gz dist/*.whl; do \
		$(INSTALLED)/bin/pip install --force-reinstall --no-deps $$archive && \
		$(INSTALLED)/bin/pip check && \
		$(INSTALLED)/bin/python -m pytest tests/test_guide.py || exit 1; done
	cd build/installed && $(INSTALLED)/bin/python -m marsopt.profile \
		--model gpt2-small --rule mars-adamw
	cd build/installed && $(INSTALLED)/bin/python -m pytest \
		$(addprefix tests/test_,$(addsuffix .py,$(LIBRARY_TESTS)))

$(INSTALLED)/ready:
	@echo "torch $(TORCH) into $(INSTALLED): 0.8 GB, or 5 GB with CUDA (minutes)"
	@$(PYTHON) -m venv $(INSTALLED)
	$(INSTALLED)/bin/pip install --disable-pip-version-check \
		torch==$(TORCH) numpy safetensors pytest build
	@touch $@

lint: $(VENV)/ready
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/check-jsonschema --builtin-schema github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema citation-file-format CITATION.cff
	$(BIN)/python -m mypy

# of README, docs, examples and docstrings, without a network; a warning is an error
docs: $(VENV)/docs
	rm -rf build/site
	$(BIN)/python -m sphinx -W --keep-going -q -E -c docs/site -d build/doctrees . build/site

gpu: $(VENV)/ready data/packages/meta.json
	$(BIN)/python -m benchmarks.gpu

gpu-rehearsal: $(VENV)/ready $(VENV)-triton/ready
	@mkdir -p runs/gpu
	PYTHONPATH=$(VENV)-triton $(BIN)/python -m benchmarks.gpu.rehearsal \
		--json runs/gpu/rehearsal-kernels.json
	for part in interpreted host ranks models; do \
		PYTHONPATH=$(VENV)-triton $(BIN)/python -m benchmarks.gpu.rehearsal.$$part \
			--json runs/gpu/rehearsal-$$part.json || exit 1; done

# Triton, which torch for a CPU comes without, on the path of the rehearsal alone: where
# it can be imported, inductor answers otherwise. A torch for GPUs brings its own
$(VENV)-triton/ready: requirements-rehearsal.txt constraints.txt $(VENV)/ready
	@rm -rf $(VENV)-triton && mkdir $(VENV)-triton
	@echo "Triton into $(VENV)-triton, 0.7 GB (a minute)"
	@$(BIN)/python -c 'import triton' 2>/dev/null || \
		$(BIN)/pip install --disable-pip-version-check --no-deps --target $(VENV)-triton \
			-r requirements-rehearsal.txt -c constraints.txt || \
		echo "no Triton for this machine: tests that rehearse the GPU path are skipped"
	@touch $@

# ports of MARS that are judged, 27 MB: what they need beside torch is not for the environment
$(VENV)-ports/ready: requirements-ports.txt constraints.txt $(VENV)/ready
	@rm -rf $(VENV)-ports
	$(BIN)/pip install --disable-pip-version-check --no-deps --target $(VENV)-ports \
		-r requirements-ports.txt -c constraints.txt
	@touch $@

# sources and documentation of installed packages; two packages are held out
data/packages/meta.json: | $(VENV)/ready
	site=$$(echo $(VENV)/lib/python3.*/site-packages) && \
	torch=$$site/torch && \
	$(BIN)/python -m train.prepare --source text --tokenizer gpt2 --out data/packages \
		$$site/sympy $$site/numpy $$site/matplotlib $$site/pygments $$site/torchtitan \
		$$torch/_inductor $$torch/distributed $$torch/nn $$torch/optim $$torch/utils \
		$$site/*.dist-info --held-out $$site/networkx $$site/huggingface_hub

data/python/meta.json: | $(VENV)/ready
	$(BIN)/python -m train.prepare --source python --out data/python

data/python_bpe/meta.json: | $(VENV)/ready
	$(BIN)/python -m train.prepare --source python --tokenizer bpe1024 --out data/python_bpe

# English: the documentation of three packages; whole files are held out
PROSE := django-5.2.8/docs celery-5.7.0/docs sphinx-9.0.4/doc
PROSE_READY := $(foreach docs,$(PROSE),$(SDISTS)/$(dir $(docs))unpacked)
data/prose/meta.json: | $(VENV)/ready $(PROSE_READY)
	$(BIN)/python -m train.prepare --source text --tokenizer bytes --out data/prose \
		$(addprefix $(SDISTS)/,$(PROSE)) --val-files 0.05

# a source distribution, NAME-VERSION: its wheel has no documentation
$(PROSE_READY): $(SDISTS)/%/unpacked: | $(VENV)/ready
	$(BIN)/pip download --disable-pip-version-check --no-deps --dest $(SDISTS) \
		--no-binary $(firstword $(subst -, ,$*)) $(subst -,==,$*)
	tar -xzf $(SDISTS)/$*.tar.gz -C $(SDISTS)
	@touch $@

# torch first: what depends on it would otherwise choose a build of it
$(VENV)/ready: requirements.txt constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "got Python %d.%d, expected 3.11 or newer: make PYTHON=python3.12" % sys.version_info[:2])'
	@echo "1 of 3: an empty environment, $(VENV) (seconds)"
	@$(PYTHON) -m venv $(VENV)
	@echo "2 of 3: torch, 0.8 GB, or 5 GB with CUDA (minutes; pip unpacks it in silence)"
	$(BIN)/pip install --disable-pip-version-check torch -c constraints.txt
	@echo "3 of 3: all others, 0.9 GB (minutes; pip unpacks them in silence)"
	$(BIN)/pip install --disable-pip-version-check -r requirements.txt -c constraints.txt
	@touch $@

$(VENV)/evaluate $(VENV)/examples $(VENV)/docs: $(VENV)/%: requirements-%.txt constraints.txt $(VENV)/ready
	@echo "what $< names, up to 0.5 GB (minutes; pip unpacks it in silence)"
	$(BIN)/pip install --disable-pip-version-check -r $< -c constraints.txt
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-torch-* $(VENV)-triton $(VENV)-ports .pytest_cache .hypothesis .ruff_cache build dist
