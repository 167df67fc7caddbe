# Every target works from a clean clone: it makes .venv and installs what it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export JAX_PLATFORMS ?=
WORKERS ?= 2

.PHONY: demo test test-fast test-hf test-all bench gpu-check lint format clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q -e '.[test,lint,plot,models]'
	touch $@

$(VENV)/.installed-aot: $(VENV)/.installed
	$(BIN)/pip install -q -e '.[aot]'
	touch $@

# The GPU libraries, of the driver's CUDA version, where there is an NVIDIA GPU; nothing elsewhere.
CUDA := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: \([0-9]*\).*/\1/p')

$(VENV)/.installed-gpu: $(VENV)/.installed
	$(if $(CUDA),$(BIN)/pip install -q 'jax[cuda$(CUDA)]')
	touch $@

demo: $(VENV)/.installed-gpu
	$(BIN)/python examples/train_gpt.py --config examples/ds_config.json --demo

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Without the programs of an earlier run: loaded from a file, one in some thousands hangs on simulated devices.
test: $(VENV)/.installed-aot lint
	rm -rf .cache/jax
	JAX_PLATFORMS=cpu $(BIN)/pytest -n $(WORKERS) -m "not full and not hf"
	PYTHON=$(PYTHON) BIN=$(BIN) bash tests/other_python.sh

test-fast: $(VENV)/.installed
	JAX_PLATFORMS=cpu $(BIN)/pytest -n $(WORKERS) -m "not full and not slow and not hf"

# Against PyTorch and transformers themselves: a large download, which is why `test` compares with their files. In an
# environment of its own: `models` needs an older transformers.
$(VENV)-hf/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-hf
	$(VENV)-hf/bin/pip install -q --upgrade pip
	$(VENV)-hf/bin/pip install -q -e '.[test,hf]'
	touch $@

test-hf: $(VENV)-hf/.installed
	JAX_PLATFORMS=cpu $(VENV)-hf/bin/pytest tests/hf

test-all: $(VENV)/.installed-aot
	rm -rf .cache/jax
	JAX_PLATFORMS=cpu $(BIN)/pytest -n $(WORKERS)

bench: $(VENV)/.installed-aot
	JAX_PLATFORMS=cpu $(BIN)/python benchmarks/run.py

gpu-check: $(VENV)/.installed-gpu
	$(BIN)/python benchmarks/gpu_check.py

clean:
	rm -rf $(VENV) $(VENV)-hf out .cache
