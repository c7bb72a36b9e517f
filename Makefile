# make demo, make test: everything else follows from these two.
PYTHON ?= python3
VENV := .venv
VLLM023_VENV := .venv-vllm-023
CORE_VENV := .venv-core
PACKAGES := -e core -e plugins/backend_cpu -e plugins/backend_ssd -e plugins/eviction_policies -e plugins/transport_tcp \
	-e plugins/transport_local -e plugins/sharing_p2p -e plugins/host_staging -e plugins/connector_vllm
MANIFESTS := pyproject.toml requirements/engine.txt $(wildcard core/pyproject.toml csrc/pyproject.toml plugins/*/pyproject.toml)
NATIVE := $(wildcard csrc/CMakeLists.txt csrc/src/*.cc csrc/src/*.cpp csrc/src/*/*.py csrc/include/*.h)
SEED ?= 1
EVENTS ?= 1000000
# One thread pool setting for every engine, or engines with and without a connector get different cores.
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1

.PHONY: demo demo-ssd demo-p2p test test-core test-vllm-023 check format docs bench simulate simulate-fleet mutants clean

demo: $(VENV)/.engine
	$(VENV)/bin/python -m tests.demo

# A cache on an SSD that outlives the engine, and a kill -9 while it writes.
demo-ssd: $(VENV)/.engine
	$(VENV)/bin/python -m tests.demo_ssd

# A controller and two engines: one answers out of the other's memory.
demo-p2p: $(VENV)/.engine
	$(VENV)/bin/python -m tests.demo_p2p

test: $(VENV)/.engine
	$(VENV)/bin/python -m pytest

test-core: $(CORE_VENV)/.core
	$(CORE_VENV)/bin/python -m pytest -m "not engine"

# The end-to-end tests on the vLLM that vLLM-Ascend was last seen at, in an environment of its own.
test-vllm-023: $(VLLM023_VENV)/.engine
	$(VLLM023_VENV)/bin/python -m pytest tests/e2e plugins/connector_vllm

check: $(CORE_VENV)/.core
	$(CORE_VENV)/bin/ruff check .
	$(CORE_VENV)/bin/ruff format --check .
	$(CORE_VENV)/bin/mypy
	$(CORE_VENV)/bin/lint-imports

format: $(CORE_VENV)/.core
	$(CORE_VENV)/bin/ruff format .
	$(CORE_VENV)/bin/ruff check --fix .

docs: $(CORE_VENV)/.core
	$(CORE_VENV)/bin/kvferry docs docs/generated --tree plugins

simulate: $(CORE_VENV)/.core
	$(CORE_VENV)/bin/python -m tests.simulation --seed $(SEED) --events $(EVENTS)

# Several instances that read from each other.
simulate-fleet: $(CORE_VENV)/.core
	$(CORE_VENV)/bin/python -m tests.simulation.fleet_runs --seed $(SEED) --events $(EVENTS)

# Small mistakes in a copy of the control plane: the simulation must catch each.
mutants: $(CORE_VENV)/.core
	$(CORE_VENV)/bin/python -m tests.simulation.mutants
	$(CORE_VENV)/bin/python -m tests.simulation.fleet_mutants

bench: $(VENV)/.engine
	$(VENV)/bin/python -m tests.bench

clean:
	rm -rf $(VENV) $(CORE_VENV) $(VLLM023_VENV) .demo bench-results.json csrc/build
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
	rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

$(CORE_VENV)/.core: $(MANIFESTS) $(NATIVE)
	$(PYTHON) requirements/check_python.py
	$(PYTHON) -m venv $(CORE_VENV)
	$(CORE_VENV)/bin/python -m pip install -q -U 'pip>=25.1'  # for --group
	$(CORE_VENV)/bin/python -m pip install -q --group dev $(PACKAGES) ./csrc
	touch $@

$(VENV)/.engine: $(MANIFESTS) $(NATIVE)
	$(PYTHON) requirements/check_python.py
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q -U 'pip>=25.1'
	$(VENV)/bin/python -m pip install -q -r requirements/engine.txt || { $(PYTHON) requirements/explain_torch.py; exit 1; }
	# These come along for other builds of torch and break the import of transformers beside this one.
	$(VENV)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec triton
	$(VENV)/bin/python -m pip install -q --group dev $(PACKAGES) ./csrc
	touch $@

$(VLLM023_VENV)/.engine: $(MANIFESTS) $(NATIVE) requirements/engine-023.txt
	$(PYTHON) requirements/check_python.py
	$(PYTHON) -m venv $(VLLM023_VENV)
	$(VLLM023_VENV)/bin/python -m pip install -q -U 'pip>=25.1' packaging  # the second for the script below
	$(VLLM023_VENV)/bin/python -m pip install -q -r requirements/engine-023.txt \
	  || $(VLLM023_VENV)/bin/python requirements/install_with_plain_torch.py requirements/engine-023.txt
	$(VLLM023_VENV)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec triton
	$(VLLM023_VENV)/bin/python -m pip install -q --group dev $(PACKAGES) ./csrc
	touch $@
