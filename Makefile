# One command each. Everything runs in a virtual environment that these targets make: VENV=... puts it elsewhere.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
GPU_RESULTS ?= gpu-tests.json
PYTEST_ARGS ?= -n 2 -m 'not compile_table'

.PHONY: help demo test check format oracle models compile-test gpu-test gpu-test-quick gpu-sanitize bench clean

help:  ## show these lines
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(VENV)/.base:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python {sys.version.split()[0]} is too old: set PYTHON=... to 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.demo: pyproject.toml | $(VENV)/.base
	$(BIN)/pip install --quiet --editable '.[rtx,ort]'
	touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/.base
	$(BIN)/pip install --quiet --editable '.[rtx,test]'
	touch $@

$(VENV)/.oracle: pyproject.toml | $(VENV)/.base
	$(BIN)/pip install --quiet --editable '.[rtx,test,oracle]'
	touch $@

demo: $(VENV)/.demo  ## patch, compare and build an engine from the sample model (no GPU, no torch)
	$(BIN)/python tools/demo.py

test: $(VENV)/.test  ## run the tests (those that need torch, a GPU or TensorRT say so when it is absent)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# The oldest NVRTC and the newest, each in a small environment of its own.
NVRTCS := 13.0.88 13.5.37
.PRECIOUS: $(VENV)-nvrtc-%/.made

$(VENV)-nvrtc-%/.made:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet nvidia-cuda-nvrtc==$* 'nvidia-cuda-runtime==$(basename $*).*' \
		'cuda-core>=1,<2' 'cuda-bindings>=13,<14' 'numpy>=2' 'ml-dtypes>=0.5' 'pytest>=8' 'pytest-xdist>=3.6'
	touch $@

compile-test: $(NVRTCS:%=compile-test-%)  ## compile every kernel for every architecture with two NVRTCs (no GPU)

compile-test-%: $(VENV)-nvrtc-%/.made
	$(<D)/bin/python -m pytest -n 2 -m compile_table --nvrtc=$(basename $*) tests/plugin/test_*_compile.py

bench: $(VENV)/.oracle  ## time the plugin on this machine's GPU; BENCH_ARGS='--quick --json FILE'
	$(BIN)/qsa-trt bench $(BENCH_ARGS)

gpu-test: $(VENV)/.oracle  ## prove the CUDA kernels on this machine's GPU (5 minutes); writes GPU_RESULTS
	$(BIN)/python -m pytest -m gpu --gpu-results $(GPU_RESULTS) tests/gpu

gpu-test-quick: $(VENV)/.oracle  ## the minute's part of gpu-test
	$(BIN)/python -m pytest -m 'gpu and quick' tests/gpu

gpu-sanitize: $(VENV)/.oracle  ## a short run of every kernel under compute-sanitizer: memcheck, racecheck, initcheck
	for tool in memcheck racecheck initcheck; do \
		compute-sanitizer --tool $$tool --error-exitcode 1 $(BIN)/python -m pytest -q tests/gpu/test_short_run.py || exit 1; \
	done

check: $(VENV)/.test  ## lint, format check and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.test  ## format and sort imports
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

oracle: $(VENV)/.oracle  ## add torch and transformers, against which `make test` then compares too

models: $(VENV)/.oracle  ## make models/ again at the pinned versions
	$(BIN)/python tools/make_models.py

clean:  ## remove the virtual environment and build results
	rm -rf $(VENV) $(VENV)-nvrtc-* build dist demo-out .pytest_cache .mypy_cache .ruff_cache
