# make serve            install into .venv, then serve serve_config.yaml on 127.0.0.1:8000
# make serve CONFIG=configs/laptop.yaml
# make compile CONFIG=configs/trn2.yaml   fill the compile cache for a configuration, without serving
# make test             the fast suite, then the end-to-end suite
# make test-loss        ranks and replicas killed, stopped and made to fail under streaming clients
# make test-xla         the Neuron backend on torch_xla's CPU device; creates .venv-xla (7 GB)
# make fuzz             10,000 hostile cases against the whole request path in one process; a few hundred are in `make test`
# make soak             everything at once while ranks are killed, MINUTES=30 of it: no wrong answer, leak or error
# make bench            measure this engine over HTTP, and others beside it: PEER='command {checkpoint} {port}'
# make test-fast, make test-e2e, make lint, make format

SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
VENV_XLA := .venv-xla
CONFIG ?= serve_config.yaml
MINUTES ?= 30
# Processes of the fast suite; some tests only wait, so that two cores have room for three.
WORKERS ?= 3

# Built when the project is installed.
KERNELS := $(wildcard neuron/amx/*.cpp neuron/amx/*.h)

# HAProxy in front and fewer thread hops inside the replicas: several milliseconds less per request.
SERVE_ENV := RAY_SERVE_ENABLE_HA_PROXY=1 RAY_SERVE_THROUGHPUT_OPTIMIZED=1 \
             RAY_USAGE_STATS_ENABLED=0 RAY_DEDUP_LOGS=0

, := ,
define install
@echo "installing into $(VENV) (a few minutes the first time)"
@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
@$(BIN)/pip install -q -U pip
@$(BIN)/pip install -q --no-compile -e '$(1)'
@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # pip would do it on one core; some packages hold templates
endef

.PHONY: install serve compile test test-fast test-e2e test-loss test-xla prometheus fuzz soak bench lint format clean
.DELETE_ON_ERROR:

install: $(VENV)/.installed
$(VENV)/.installed: pyproject.toml $(KERNELS)
	$(call install,.)
	@touch $@

# Everything at once on a fresh machine: resolving twice takes half a minute.
$(VENV)/.installed-test: pyproject.toml $(KERNELS)
	$(call install,.[test$(,)lint])
	@touch $(VENV)/.installed $@

serve: $(VENV)/.installed
	@$(BIN)/python -m configs.check $(CONFIG)
	@if [ -t 1 ]; then export TRN_VISION_SERVE_PROGRESS=bar; fi; \
	$(SERVE_ENV) exec $(BIN)/python -m deployments.run $(CONFIG)

compile: $(VENV)/.installed
	$(BIN)/python -m actors.compile $(CONFIG)

test: test-fast test-e2e

# Debian's prometheus and promtool, which the tests run for real.
prometheus:
	@command -v promtool > /dev/null || { \
	  test "$$(id -u)" = 0 || { echo "the tests need Prometheus: apt-get install prometheus"; exit 1; }; \
	  apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends prometheus; \
	  service prometheus stop > /dev/null 2>&1 || true; }

test-fast: $(VENV)/.installed-test prometheus
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not e2e and not xla and not loss" -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-e2e: $(VENV)/.installed-test prometheus
	$(BIN)/python -m pytest -m e2e tests/e2e

test-loss: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m loss tests/loss

$(VENV_XLA)/.installed: pyproject.toml
	@echo "installing torch_xla into $(VENV_XLA)"
	@test -x $(VENV_XLA)/bin/python || $(PYTHON) -m venv $(VENV_XLA)
	@$(VENV_XLA)/bin/pip install -q -U pip
	@$(VENV_XLA)/bin/pip install -q -e '.[xla]'
	@touch $@

test-xla: $(VENV_XLA)/.installed
	PJRT_DEVICE=CPU $(VENV_XLA)/bin/python -m pytest -m xla tests/xla

fuzz: $(VENV)/.installed-test
	FUZZ_CASES=$(or $(CASES),10000) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/fuzz -n $(WORKERS) --dist loadfile

soak: $(VENV)/.installed-test
	$(BIN)/python -m tests.soak.soak --minutes $(MINUTES) $(SOAK)

bench: $(VENV)/.installed-test
	$(BIN)/python benchmarks/bench.py $(if $(PEER),--peer '$(PEER)') $(BENCH)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VENV_XLA) .pytest_cache .mypy_cache .ruff_cache .hypothesis
