# Needs make, Python 3.11 or newer and its pip. Everything else goes into .venv.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

.DEFAULT_GOAL := help
.PHONY: help demo test up wheel bench-quick lint lock clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /make \1\t/p' Makefile | expand -t 18

demo: $(INSTALLED) ## See 300 orders delivered three times each take effect once (a minute)
	@$(BIN)/python manage.py demo

up: $(INSTALLED) ## Run the application with servers of its own, until Ctrl-C
	@$(BIN)/python manage.py up

test: $(INSTALLED) ## Run all tests on servers that they start themselves
	@$(BIN)/python -m pytest -n 2 $(ARGS)

lint: $(INSTALLED) ## Check style and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench-quick: $(INSTALLED) ## Compare with a hand-written actor on the stock broker
	@$(BIN)/python -m benchmarks.quick

wheel: $(INSTALLED) ## Build the wheel of the middleware into dist/
	@$(BIN)/hatchling build -t wheel

# The folder is the target of who asks for it by name; the file says that it is complete.
.PHONY: .venv
.venv: $(INSTALLED)

# `venv --without-pip` needs no package beyond Python itself; Debian has ensurepip apart.
$(INSTALLED): requirements.lock
	@command -v $(PYTHON) >/dev/null || { \
	  echo "There is no $(PYTHON). Install Python 3.11 or newer, or name it: make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else \
	  "Onetake needs Python 3.11 or newer, and $(PYTHON) is %d.%d. Name another: make PYTHON=..." \
	  % sys.version_info[:2])'
	@echo "Installing into .venv ..."
	@$(PYTHON) -m venv --clear --without-pip .venv
	@$(PYTHON) -m pip --python $(BIN)/python install --quiet --disable-pip-version-check \
	  --require-hashes --only-binary :all: --requirement requirements.lock
	@touch $@

# For every platform and every Python from 3.11 on at once, which pip cannot do.
lock: ## Bring requirements.lock up to date with pyproject.toml
	@$(PYTHON) -m venv --clear .venv-lock
	@.venv-lock/bin/python -m pip install --quiet --disable-pip-version-check uv
	@.venv-lock/bin/uv pip compile pyproject.toml --extra gevent --extra periodic --group app --group dev \
	  --universal --python-version 3.11 --generate-hashes --only-binary :all: --upgrade \
	  --no-emit-index-url --no-emit-find-links --no-annotate --quiet \
	  --custom-compile-command "make lock" --output-file requirements.lock
	@rm -rf .venv-lock

clean: ## Remove what can be made again; the data of `make up` stay
	rm -rf .venv .venv-lock dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
