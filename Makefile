# The project's own verbs. `make` alone lists them.

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.complete
LOCK  := requirements.lock
NODES ?= 1
# Most of the time of a test on a real Kafka is waiting, so four processes share two cores. A
# file's tests stay in one process; the files are taken in the order of tests/conftest.py, the
# longest first.
WORKERS ?= 4
# A broker of a test ends before the optimising compiler pays, and the first compiler pays sooner
# than by default: together they halve the processor time of such a broker.
test test-broker chaos chaos-models: export KAFKA_JVM_PERFORMANCE_OPTS ?= \
  -XX:TieredStopAtLevel=1 -XX:CompileThresholdScaling=0.3
# The tests start hundreds of processes. Where bytecode may not be written (containers often forbid
# it), each of them would compile all modules again: a quarter of a second.
test test-import test-fast test-broker chaos chaos-models: export PYTHONDONTWRITEBYTECODE =
# Each of them that imports NumPy would also start threads of OpenBLAS, which spin before they sleep.
test test-fast test-broker chaos chaos-models: export OPENBLAS_NUM_THREADS ?= 1
# And pydantic would look for plugins in all installed packages, which takes 12 ms of each start.
test test-fast test-broker chaos chaos-models: export PYDANTIC_DISABLE_PLUGINS ?= __all__

# The first of these that is Python 3.11 or newer makes the environment.
PYTHON ?=
PYTHONS := $(PYTHON) python3 python3.13 python3.12 python3.11

# On a terminal pip shows what it fetches; elsewhere its lines would fill the log.
PIP_QUIET = $(shell test -t 2 || echo --quiet)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

.PHONY: help
help: ## list what can be done here
	@awk -F ':[^#]*## ' '/^[a-z-]+:[^#]*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# --- the environment ---------------------------------------------------------------------------

.PHONY: setup
setup: $(STAMP) ## make .venv with everything in it; `.venv/bin/headrace` is then on hand

$(BIN)/pip: # what makes an environment writes it last
	@python=; \
	for name in $(PYTHONS); do \
	  if $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$name; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "make: Python 3.11 or newer is needed; none of these is one: $(strip $(PYTHONS))." >&2; \
	  echo "make: name one with 'make setup PYTHON=/path/to/python3'." >&2; \
	  exit 1; \
	fi; \
	echo "setup: $(VENV) from $$($$python --version)"; \
	$$python -m venv --clear $(VENV)

$(STAMP): pyproject.toml $(LOCK) | $(BIN)/pip
	@rm -f $@
	@echo "setup: packages, as pinned in $(LOCK); 1 GB, and a few minutes the first time"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(LOCK) --upgrade pip
	@$(BIN)/python -m pip install $(PIP_QUIET) --disable-pip-version-check \
	  --constraint $(LOCK) --build-constraint $(LOCK) \
	  --editable '.[audio,avro,claims,cpu,demo,extensions,image,jwt,local-kafka,report,store,text]' --group test --group lint
	@touch $@
	@echo "setup: done"

.PHONY: lock
lock: ## pin anew the newest versions that pyproject.toml allows, in requirements.lock
	@tools/lock.sh $(LOCK) $(PYTHONS)

# --- the code ----------------------------------------------------------------------------------

.PHONY: fmt
fmt: setup ## format the code, and fix what ruff can fix
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

.PHONY: lint
lint: setup ## ruff's rules, the format, and which module may import which
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports

.PHONY: types
types: setup ## mypy, strict, on code and tests
	@$(BIN)/mypy

.PHONY: schemas
schemas: setup ## write schemas/ anew from the types in headrace/protocol and headrace/gateway
	@$(BIN)/python -m headrace.protocol.schemas
	@$(BIN)/python -m headrace.gateway.openapi

.PHONY: schemas-check
schemas-check: setup ## fail if schemas/ differs from the types
	@$(BIN)/python -m headrace.protocol.schemas --check
	@$(BIN)/python -m headrace.gateway.openapi --check

.PHONY: stubs
stubs: setup ## generate headrace/gateway/open_inference_pb2.py anew from the .proto
	@$(BIN)/python tools/stubs.py

.PHONY: deploy-check
deploy-check: setup ## hold deploy/compose.yaml against the Compose specification
	@$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec deploy/compose.yaml

# --- the tests ---------------------------------------------------------------------------------

.PHONY: test
test: setup ## every test, those on a real Kafka included
	@$(BIN)/pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(if $(CI),--durations=20)

.PHONY: test-import
test-import: setup ## import every test, and keep the bytecode for the processes of `make test`
	@printed=$$($(BIN)/pytest --collect-only --quiet --quiet) || { echo "$$printed"; exit 1; }

CLIENTS := .venv-clients

.PHONY: test-tools
test-tools: setup $(CLIENTS)/.complete ## get what some tests run: Jaeger, promtool, grpcurl, ghz and versitygw, with Go; KServe's and Confluent's clients
	@$(BIN)/python -m tests.support.go_tools

# A few of its thousands of modules are imported, so none is compiled in advance.
$(CLIENTS)/.complete: tests/clients.txt | $(BIN)/pip
	@$(BIN)/python -m venv --clear $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r tests/clients.txt
	@touch $@

.PHONY: test-fast
test-fast: setup ## the tests that need neither a broker nor patience
	@$(BIN)/pytest -m 'not broker and not slow'

.PHONY: test-broker
test-broker: setup ## the tests on a real Kafka
	@$(BIN)/pytest -m broker

SEEDS ?= 20
FIRST_SEED ?= 1
AT_ONCE ?= 1
KAFKA ?=

.PHONY: chaos
chaos: setup ## seeds of faults on a real Kafka, checked by what callers saw; SEEDS=200 for long
	@$(BIN)/python -m tests.chaos --seeds $(SEEDS) --first-seed $(FIRST_SEED) --at-once $(AT_ONCE)

.PHONY: chaos-models
chaos-models: setup ## seeds of faults at every step of changes of models; KAFKA=--kafka on a real one
	@$(BIN)/python -m tests.chaos.model_changes --seeds $(SEEDS) --first-seed $(FIRST_SEED) $(KAFKA)

.PHONY: check
check: lint types schemas-check deploy-check test ## all of the above that can fail

# --- running it --------------------------------------------------------------------------------

.PHONY: demo
demo: setup ## all four services on real files, in one process, without a broker
	@$(BIN)/headrace demo

.PHONY: kafka
kafka: setup ## a real Kafka on this machine without Docker; NODES=3 for a cluster
	@$(BIN)/python -m headrace.tools.local_kafka --nodes $(NODES)

# --- measuring it ------------------------------------------------------------------------------

PEERS := .venv-bench
BENCH ?=
MINUTES ?= 60

.PHONY: bench
bench: setup $(PEERS)/.complete ## measure it against others on a local Kafka; 20 minutes, BENCH=--quick three
	@$(BIN)/python -m benchmarks $(BENCH)

.PHONY: bench-peers
bench-peers: $(PEERS)/.complete ## make .venv-bench, with the frameworks that bench measures

$(PEERS)/.complete: benchmarks/peers.txt | $(BIN)/pip
	@rm -f $@
	@$(BIN)/python -m venv --clear $(PEERS)
	@$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/peers.txt
	@touch $@

.PHONY: bench-doors
bench-doors: setup ## measure its doors beside MLServer, LitServe and BentoML; 25 minutes, BENCH=--quick three
	@$(BIN)/python -m benchmarks.doors $(BENCH)

.PHONY: soak
soak: setup ## hold a load for an hour and watch the memory; MINUTES=60
	@$(BIN)/python -m benchmarks.soak --minutes $(MINUTES)

.PHONY: clean
clean: ## remove caches and build results; .venv stays
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find headrace services tests -name __pycache__ -type d -prune -exec rm -rf {} +
