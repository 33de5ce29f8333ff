# All targets need only Python: the virtual environment is built on first use. PYTHON=... selects the interpreter; the
# default is the newest one that runs. TESTS=... are arguments of pytest.
PYTHON ?= $(firstword $(foreach p,python3.13 python3.12 python3.11 python3,$(if $(shell $(p) -c "import venv" 2>/dev/null && echo ok),$(p))))
CONSTRAINTS ?= constraints.txt
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo formats moe decode processes test test-examples test-all test-mutations test-gpu-compile test-maxtext \
	test-checkpoints lint bench clean

demo: $(STAMP)
	$(BIN)/python -m examples.demo

formats: $(STAMP)
	$(BIN)/python -m examples.formats

moe: $(STAMP)
	$(BIN)/python -m examples.moe

decode: $(STAMP)
	$(BIN)/python -m examples.decode

processes: $(STAMP)
	$(BIN)/python -m examples.processes

# `test` runs covering arrays of the parametrised tests (tests/selection.py), `test-all` every case. There are two runs,
# because XLA's flags for cheap compilation hold for a whole process, and tests of compiled programs and of exact bits
# need the defaults.
PYTEST = $(BIN)/python -m pytest -n auto --dist worksteal $(TESTS)

test: $(STAMP)
	$(PYTEST) --compilation cheap
	$(PYTEST) --compilation optimized

# Runs every example to its end.
test-examples: $(STAMP)
	$(PYTEST) --all --compilation cheap -m "end_to_end and not exhaustive"

test-all: $(STAMP)
	$(PYTEST) --all --compilation cheap
	$(PYTEST) --all --compilation optimized

# Mutation testing: ten named and thirty random mutants (tests/mutations).
test-mutations: $(STAMP)
	$(BIN)/python -m tests.mutations

# Compiles for a B200 and an H200 on a machine without a GPU. The CUDA plugin is about 4 GB; kernels need jax 0.11.2.
test-gpu-compile: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) 'jax[cuda13]'
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest tests/test_compile_blackwell.py
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest tests/test_compile_hopper.py tests/test_compile_hopper_weight_only.py \
		tests/test_compile_hopper_meshes.py tests/test_compile_hopper_models.py

# Trains unmodified MaxText on four virtual CPU devices. It needs Python 3.12 or newer and an environment of its own
# (1.4 GB), without most of MaxText's dependencies.
MAXTEXT := .venv-maxtext

test-maxtext: $(MAXTEXT)/.installed
	$(MAXTEXT)/bin/python -m pytest -n 2 --dist loadgroup --confcutdir=tests/maxtext_training -o addopts= -o filterwarnings= tests/maxtext_training

$(MAXTEXT)/.installed: tests/maxtext_training/requirements.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 12) or sys.exit("MaxText needs Python 3.12 or newer; pass PYTHON=...")'
	rm -rf $(MAXTEXT)
	$(PYTHON) -m venv $(MAXTEXT)
	$(MAXTEXT)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps maxtext==0.2.5
	$(MAXTEXT)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/maxtext_training/requirements.txt
	$(MAXTEXT)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

# Opens saved checkpoints with compressed-tensors, ModelOpt, transformers and safetensors, and loads what those and gguf
# write. It needs an environment of its own, of 1.9 GB if torch comes without CUDA, and takes two minutes then.
CHECKPOINTS := .venv-checkpoints

test-checkpoints: $(CHECKPOINTS)/.installed
	$(CHECKPOINTS)/bin/python -m pytest --confcutdir=tests/checkpoint_readers -o addopts= -o filterwarnings= \
		-o pythonpath=tests -p no:cacheprovider tests/checkpoint_readers

$(CHECKPOINTS)/.installed: pyproject.toml tests/checkpoint_readers/requirements.txt $(CONSTRAINTS)
	rm -rf $(CHECKPOINTS)
	$(PYTHON) -m venv $(CHECKPOINTS)
	$(CHECKPOINTS)/bin/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) \
		-r tests/checkpoint_readers/requirements.txt -e '.[flax]'
	touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(STAMP)
	$(BIN)/python -m benchmarks.run --suite cpu
	$(BIN)/python -m benchmarks.run --suite contractions
	$(BIN)/python -m benchmarks.run --suite eager

# A change of dependencies or pins rebuilds the environment.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer was found; pass PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("scaledot needs Python 3.11 or newer, this is " + sys.version)'
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev]'
	# Its models, for tests/test_transform_frameworks.py, need none of its dependencies.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) --no-deps google-tunix
	touch $@

clean:
	rm -rf $(VENV) .venv-* build *.egg-info
