# Two commands matter to a newcomer: `make demo` and `make test`. Everything they need is set up on the way.
SHELL := /bin/bash
CACHE := $(or $(MARLAAS_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/marlaas)
UV := $(shell command -v uv 2>/dev/null || echo $(CACHE)/uv/bin/uv)
BIN := .venv/bin
ACCEL ?= cpu
TEST_PROCESSES ?= 2
EXPLORE_ROUNDS ?= 10
PYTEST = OMP_NUM_THREADS=1 MKL_DYNAMIC=FALSE $(BIN)/python -m pytest -n $(TEST_PROCESSES) --no-loadscope-reorder --durations=20
export UV_PYTHON_DOWNLOADS ?= never
export MYPY_CACHE_DIR ?= $(CACHE)/mypy
export RUFF_CACHE_DIR ?= $(CACHE)/ruff
unexport PYTHONDONTWRITEBYTECODE  # hundreds of processes would compile torch, transformers and vllm anew
STAMP := .venv/.installed-$(ACCEL)

.PHONY: help demo demo-tiny test test-fast explore check lint bench soak crds lock setup clean

help:  ## Show this list
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-20s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: setup  ## Teach a real language model arithmetic on this machine, and show what it learnt (about ten minutes)
	$(BIN)/marlaas run examples/arithmetic.yaml --out runs/demo-$$(date +%Y%m%d-%H%M%S)

demo-tiny: setup  ## Train two teams' jobs on a tiny model that this machine makes itself (about three minutes)
	$(BIN)/marlaas run examples/quickstart.yaml --out runs/demo-tiny-$$(date +%Y%m%d-%H%M%S)

test: setup  ## Run every test; those of a real cluster are `make e2e`
	@$(E2E) tools $(CONTROL_PLANE_TOOLS) & $(PYTEST) $(PYTEST_ARGS)  # tests of the API server wait for what is not built yet

test-fast: setup  ## Run the tests that start no engine, no API server and no run (three minutes)
	$(PYTEST) -m "not gpu and not engine and not api_server and not processes and not slow" $(PYTEST_ARGS)

explore: setup  ## Draw fresh examples for the property tests, EXPLORE_ROUNDS times; a failing seed is printed
	@for round in $$(seq $(EXPLORE_ROUNDS)); do \
	  seed=$$RANDOM$$RANDOM; echo "round $$round of $(EXPLORE_ROUNDS): seed $$seed"; \
	  MARLAAS_HYPOTHESIS=explore OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m hypothesis --hypothesis-seed=$$seed $(PYTEST_ARGS) \
	    || { echo "failed: repeat it with MARLAAS_HYPOTHESIS=explore pytest -m hypothesis --hypothesis-seed=$$seed"; exit 1; }; \
	done

check: setup  ## The law: format, lint, types, import contracts, generated files
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.crd --check crds
	$(BIN)/python -m tools.reasons_page docs/reference/reasons.md --check
	$(BIN)/python -m tools.api_docs docs/reference/api.md --check
	$(BIN)/python -m tools.measurements_page docs/reference/measurements.md --check
	$(BIN)/python -m tools.promises_page docs/reference/promises.md --check
	$(MKDOCS) --site-dir $(CACHE)/site

lint: setup  ## Mend what a machine can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup  ## Measure: every figure of the README and the notes (about an hour and a half)
	$(BIN)/python -m bench

soak: setup  ## Run two hundred short jobs one after another, and show each process's memory (hours)
	$(BIN)/python -m bench soak

crds: setup  ## Generate crds/ and the generated pages: fields, reasons, measurements, guarantees
	$(BIN)/python -m tools.crd crds
	rm -f charts/marlaas/files/crds/*.yaml && cp crds/*.yaml charts/marlaas/files/crds/
	$(BIN)/python -m tools.reasons_page docs/reference/reasons.md
	$(BIN)/python -m tools.api_docs docs/reference/api.md
	$(BIN)/python -m tools.measurements_page docs/reference/measurements.md
	$(BIN)/python -m tools.promises_page docs/reference/promises.md

.PHONY: docs
MKDOCS = NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

docs: setup  ## Build the documentation into site/; a broken link or a page outside the menu is an error
	$(MKDOCS)

lock: $(UV)  ## Resolve the dependencies anew into locks/
	for accel in cpu gpu; do $(UV) pip compile pyproject.toml --extra $$accel --extra operator --extra trackers --extra verifiers --group dev \
	  --universal --generate-hashes --no-header --quiet -o locks/$$accel.txt || exit 1; done
	$(UV) pip compile locks/operator.in --constraint locks/cpu.txt --universal --python-version 3.11 --generate-hashes --no-header \
	  --quiet -o locks/operator.txt

setup: $(STAMP)  ## Create .venv from the committed lock

$(STAMP): locks/$(ACCEL).txt pyproject.toml | $(UV)
	@test -x $(BIN)/python || $(UV) venv --quiet .venv
	$(UV) pip sync --quiet --python $(BIN)/python locks/$(ACCEL).txt
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --editable .
	@rm -f .venv/.installed-*; touch $@

$(CACHE)/uv/bin/uv:
	python3 -m venv $(CACHE)/uv
	$(CACHE)/uv/bin/pip install --quiet --disable-pip-version-check uv==0.13.8

clean:  ## Remove the environment and every run
	rm -rf .venv runs

include e2e/e2e.mk
