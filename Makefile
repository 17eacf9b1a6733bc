# Two commands set everything up by themselves, on a machine that has Python, make and git:
#
#   make demo                  fine-tunes a pretrained model (BACKEND=tensorflow|jax|torch, ARGS="--seeds 2")
#   make check                 what to run while you work: a few minutes
#   make test                  every check there is; .ci/run is this command
#
# Environments live in .venv-*; each is made again from nothing when its requirements change.

BACKEND ?= jax
ARGS ?=
EXAMPLE ?= examples/finetune_backbone_and_head.py
# TORCH=torch==2.13.0 takes the default build instead of the CPU build.
TORCH ?= -r requirements/torch.txt
JOBS ?= 2
# Where benchmarks leave what they measured.
RESULTS ?= build/benchmarks

BACKENDS := tensorflow jax torch
ifeq ($(filter $(BACKENDS),$(BACKEND)),)
$(error BACKEND must be one of: $(BACKENDS). Received: BACKEND=$(BACKEND))
endif
# Keras, JAX and TensorFlow at the pinned versions have no builds for other Pythons.
SUPPORTED_PYTHONS := 3.11 3.12 3.13
PYTHON ?= $(shell tools/find_python.sh $(SUPPORTED_PYTHONS))
OLDEST_PYTHON ?= $(shell tools/find_python.sh 3.10 2>/dev/null || echo $(PYTHON))

pins = $(if $(filter torch,$(1)),$(TORCH),-r requirements/$(1).txt)
test_python := .venv-test/bin/python
quiet_backends := TF_CPP_MIN_LOG_LEVEL=3
logs := build/checks

export PYTHONHASHSEED := 0
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c

.DEFAULT_GOAL := help
.PHONY: help
help:
	@sed -n '/^#/!q;s/^# \{0,1\}//p' Makefile

# --- Environments ------------------------------------------------------------------------------

.venv-test/ready: requirements/base.txt requirements/test.txt requirements/demo.txt \
		requirements/constraints.txt $(BACKENDS:%=requirements/%.txt)
	@tools/make_env.sh .venv-test "$(PYTHON)" -r requirements/base.txt \
		$(foreach backend,$(BACKENDS),$(call pins,$(backend))) -r requirements/test.txt
	@$(test_python) -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

.venv-demo-%/ready: requirements/base.txt requirements/%.txt requirements/demo.txt \
		requirements/constraints.txt
	@tools/make_env.sh .venv-demo-$* "$(PYTHON)" -r requirements/base.txt $(call pins,$*) \
		-r requirements/demo.txt
	@touch $@

.venv-wheel-%/ready: requirements/base.txt requirements/%.txt requirements/constraints.txt
	@tools/make_env.sh .venv-wheel-$* "$(PYTHON)" -r requirements/base.txt $(call pins,$*)
	@touch $@

.venv-lowest/ready: requirements/lowest.txt
	@tools/make_env.sh .venv-lowest "$(OLDEST_PYTHON)" -r requirements/lowest.txt
	@touch $@

.PHONY: env
env: .venv-test/ready

# --- For people --------------------------------------------------------------------------------

.PHONY: demo
demo: .venv-demo-$(BACKEND)/ready
	@KERAS_BACKEND=$(BACKEND) PYTHONPATH=. $(quiet_backends) \
		.venv-demo-$(BACKEND)/bin/python $(EXAMPLE) $(ARGS)

.PHONY: benchmark
benchmark: .venv-test/ready
	@for backend in $(BACKENDS); do \
		KERAS_BACKEND=$$backend $(quiet_backends) $(test_python) benchmarks/step_time.py \
			--folder $(RESULTS) $(ARGS); \
	done
	@$(test_python) benchmarks/report.py $(RESULTS)

# Takes hours: every model, and all that is switched on one.
.PHONY: benchmark-long
benchmark-long:
	@for model in efficientnetb7 vit_b16 variables2000 variables200; do \
		$(MAKE) --no-print-directory benchmark ARGS="--model $$model"; \
	done
	@$(MAKE) --no-print-directory benchmark ARGS="--dtype bfloat16"
	@$(MAKE) --no-print-directory benchmark ARGS="--sets peers switches --builds 2 --memory"

.PHONY: format
format: .venv-test/ready
	@$(test_python) -m ruff check --fix . && $(test_python) -m ruff format .

.PHONY: clean
clean:
	rm -rf .venv-test .venv-lowest .venv-demo-* .venv-wheel-* build dist

# --- Checks ------------------------------------------------------------------------------------
# Each leaves what it printed in build/checks, so that two can run at a time and be read one by one.

CHECKS := suite-tensorflow suite-jax suite-torch programs-tensorflow lowest once types lint \
	programs-jax programs-torch $(BACKENDS:%=wheel-%)
# What to run while you work.
DAILY := once step-and-rules types lint
test_on = KERAS_BACKEND=$(1) $(quiet_backends) $(test_python) -m pytest -p no:cacheprovider
# What JAX compiles is kept from one run of a check to the next. Each check has a folder of its own,
# as a file that another process is writing cannot be read.
jax_cache = JAX_COMPILATION_CACHE_DIR=$(CURDIR)/build/jax/$@ \
	JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1
# $(call check,NAME,COMMAND)
define check
	@mkdir -p $(logs)
	@start=$$(date +%s); code=0; ( $(2) ) > $(logs)/$(1).txt 2>&1 || code=$$?; \
	word=$$([ $$code = 0 ] && echo passed || echo FAILED); \
	echo "$$word after $$(( $$(date +%s) - start )) s" > $(logs)/$(1).status; \
	{ echo "=== $(1)"; cat $(logs)/$(1).txt; }; exit $$code
endef

.PHONY: test check checks daily $(CHECKS) $(DAILY)
# $(call run,TARGET,CHECKS)
define run
	@rm -rf $(logs)
	@status=0; $(MAKE) --no-print-directory --keep-going --jobs=$(JOBS) $(1) || status=$$?; \
	tools/summarise_checks.sh $(logs) $(2); \
	exit $$status
endef
test:
	$(call run,checks,$(CHECKS))
check:
	$(call run,daily,$(DAILY))
checks: $(CHECKS)
daily: $(DAILY)

lint: .venv-test/ready
	$(call check,$@,$(test_python) -m ruff check . && $(test_python) -m ruff format --check .)

types: .venv-test/ready
	$(call check,$@,$(test_python) -m mypy)

# What does not depend on the backend runs on torch, which starts and steps soonest.
once: .venv-test/ready
	$(call check,$@,$(call test_on,torch) -m once)

step-and-rules: .venv-test/ready
	$(call check,$@,$(call test_on,torch) -m "not once" tests/step tests/rules)

$(BACKENDS:%=suite-%): suite-%: .venv-test/ready
	$(call check,$@,$(jax_cache) $(call test_on,$*) -m "not once and not program")

$(BACKENDS:%=programs-%): programs-%: .venv-test/ready
	$(call check,$@,$(call test_on,$*) -m "program and not once")

lowest: .venv-lowest/ready
	$(call check,$@,KERAS_BACKEND=jax $(jax_cache) .venv-lowest/bin/python -m pytest \
		-p no:cacheprovider -m "once or keras_api")

# The wheel is tried outside of the checkout, beside one backend and nothing else.
dist/built: .venv-test/ready pyproject.toml README.md LICENSE $(shell find keras_groupopt -name '*.py*')
	@rm -rf dist
	@$(test_python) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@touch $@

$(BACKENDS:%=wheel-%): wheel-%: .venv-wheel-%/ready dist/built
	$(call check,$@,tools/check_wheel.sh .venv-wheel-$* $* dist/*.whl)
