# Two commands for a newcomer, each of which makes its own environment from nothing:
#   make quickstart    install, fetch a small model, run examples/quickstart.py
#   make test          install with the test tools, run the tests (with the small model, without a GPU)
# and for a change:
#   make check         format, lint, types, layers, sizes, quick tests
#
# Torch is pinned. Where pip is pointed at a CPU build (TORCH="torch==2.13.0+cpu", PIP_EXTRA_INDEX_URL), no CUDA is
# downloaded; see the README.

TORCH ?= torch==2.13.0
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
RUN_ENV ?= .venv-run
TEST_ENV ?= .venv-test
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help quickstart test check check-types check-rest format sizes clean

help:
	@sed -n '2,5s/^#  *//p' Makefile

quickstart: $(RUN_ENV)/.ready
	@$(RUN_ENV)/bin/python examples/quickstart.py

test: $(TEST_ENV)/.ready
	@$(TEST_ENV)/bin/python -m pytest -m "not gpu and not slow" $(PYTEST_ARGS)

check: $(TEST_ENV)/.ready
	@$(MAKE) --no-print-directory --jobs 2 --output-sync check-types check-rest

check-types:
	@echo "--- types";   $(TEST_ENV)/bin/pyright --pythonpath $(TEST_ENV)/bin/python

check-rest:
	@echo "--- format";  $(TEST_ENV)/bin/ruff format --check .
	@echo "--- lint";    $(TEST_ENV)/bin/ruff check .
	@echo "--- layers";  $(TEST_ENV)/bin/lint-imports
	@echo "--- sizes";   $(TEST_ENV)/bin/python scripts/sizes.py
	@echo "--- tests";   $(TEST_ENV)/bin/python -m pytest -q --quick $(PYTEST_ARGS)

format: $(TEST_ENV)/.ready
	@$(TEST_ENV)/bin/ruff format .
	@$(TEST_ENV)/bin/ruff check --fix .

sizes:
	@$(PYTHON) scripts/sizes.py

clean:
	rm -rf $(RUN_ENV) $(TEST_ENV) build dist *.egg-info

# Two stamps an environment: the first stands when torch is there, so that an interrupted run goes on behind it. What
# pyproject.toml changes is installed into the environment that there is; `make clean` makes it from nothing.
$(RUN_ENV)/.ready: pyproject.toml $(RUN_ENV)/.torch
	$(call install,$(RUN_ENV),.)

$(TEST_ENV)/.ready: pyproject.toml $(TEST_ENV)/.torch
	$(call install,$(TEST_ENV),.[dev])

$(RUN_ENV)/.torch:
	$(call make_env,$(RUN_ENV))

$(TEST_ENV)/.torch:
	$(call make_env,$(TEST_ENV))

define make_env
	@test -n "$(PYTHON)" || { echo "sglite needs Python 3.11 or newer; name one with PYTHON=..."; exit 1; }
	@echo "=== Making $(1) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv --clear $(1) || { echo "python's venv module is missing (Debian: apt install python3-venv)"; exit 1; }
	@echo "=== Installing $(TORCH) (the largest part; a few hundred MB on a CPU)"
	@$(1)/bin/python -m pip install --disable-pip-version-check "$(TORCH)"
	@touch $(1)/.torch
endef

define install
	@echo "=== Installing sglite and the rest"
	@$(1)/bin/python -m pip install --disable-pip-version-check "$(TORCH)" --editable "$(2)"
	@touch $(1)/.ready
endef
