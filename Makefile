# Everything one does with this repository. `make` alone lists the targets.
# Needs Python >= 3.11 with venv, and make; all else is set up in .venv on first use.

PYTHON ?= python3
# A process of tests that dies fails its one test (tests/lost_processes.py).
# Three on two cores: tests of several workers wait for these to start, and for each other.
PYTEST_FLAGS ?= -n 3 --dist loadgroup --max-worker-restart 50 --durations 10
# No workers (their tests have a timeout of their own) and no pipelines, but for a case
# of each way to run; and not what takes most of the time: many examples of one property.
SLOW := passes/test_fill_with* core/test_check_against_slow* core/test_simulate_random* \
	planner/test_rank* planner/test_published* planner/search/test_optimum* \
	planner/teachers/test_compare* planner/replicas/test_buckets* \
	planner/ranking/test_report* run/nets/test_two_workers* \
	run/weights/test_delay_limits* run/diagnostics/test_flight_recorder* \
	schedules/test_every_schedule* schedules/test_zb_auto*
QUICK ?= -m "quick or not (long or timeout or browser or network)" \
	$(foreach name,$(SLOW),--ignore-glob 'tests/$(name)') tests/conformance \
	$(addprefix tests/,core schedules passes planner draw freeze) \
	$(addprefix tests/model/,guards trace) \
	$(addprefix tests/run/,comm data device diagnostics nets weights)

VENV := .venv
BIN := $(VENV)/bin
SET_UP := $(VENV)/.set-up
DOCS_SET_UP := $(VENV)/.set-up-docs

.DEFAULT_GOAL := help
.PHONY: help setup demo test quick check lint format types sizes docs golden \
	bench test-long release clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' \
		$(firstword $(MAKEFILE_LIST))

# ---------------------------------------------------------------- environment

setup: $(SET_UP) ## make .venv with all that is needed; again when pins change

# torch comes first: whatever asks for torch later must find the pinned one in place.
$(SET_UP): pyproject.toml constraints.txt src/hocket/version.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "hocket needs Python >= 3.11; this is $$($(PYTHON) -V)." \
			"Name another: make setup PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt \
		--editable '.[recipes,vision,search,plot,notebook,dev]'
	@touch $@

$(DOCS_SET_UP): $(SET_UP)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $@

# ---------------------------------------------------------------- use

demo: setup ## train a vision transformer on real digits, on two local workers
	$(BIN)/hocket train digits-vit

bench: setup ## run every benchmark: best on an idle machine, takes long
	@for run in bench/*/run.py bench/emulated/flush_free.py; do \
		name=$$(echo $${run%.py} | tr / .); \
		echo "== $$name"; $(BIN)/python -m $$name || exit 1; done

# ---------------------------------------------------------------- checks

test: setup lint types sizes ## lint, types, file sizes and all but the long tests
	$(BIN)/pytest $(PYTEST_FLAGS)

quick: setup ## orders, planning, pictures, batches; one exact case for each way to run
	HYPOTHESIS_PROFILE=quick $(BIN)/pytest $(PYTEST_FLAGS) $(QUICK)

test-long: setup ## the tests that take minutes
	$(BIN)/pytest $(PYTEST_FLAGS) -m long --timeout 1800

check: test docs ## all that CI runs: `make test`, then the documentation

lint: setup ## style, import rules and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: setup ## mend what ruff can mend
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: setup ## mypy --strict over the package and the tests
	$(BIN)/mypy

sizes: setup ## no long file, no full folder; count the lines of code
	$(BIN)/python scripts/check_sizes.py

docs: $(DOCS_SET_UP) ## build docs/_build/html; a warning is an error
	$(BIN)/sphinx-build -W --keep-going --quiet --builder html docs docs/_build/html

release: setup ## build wheel and source archive; try them in empty environments
	scripts/check_release.sh 2.13.0 2.14.1

golden: setup ## write tests/golden anew; then read `git diff tests/golden`
	$(BIN)/pytest -m golden --write-golden

clean: ## remove .venv, caches and what was built; runs/ stays
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis docs/_build \
		build dist
	find src tests scripts docs -name __pycache__ -prune -exec rm -rf {} +
