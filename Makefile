# `make study` and `make test` need only Python >= 3.11 and make; everything else is installed into .venv.
# Where `python3` was built by pyenv without optimisations, that of the distribution is faster, if it is new enough and complete.
SLOW   = import sys, sysconfig as c; sys.exit('.pyenv' not in sys.base_prefix or '-optimizations' in c.get_config_var('CONFIG_ARGS'))
WHOLE  = import ensurepip, os, sys, sysconfig as c; \
	sys.exit(sys.version_info < (3, 11) or not os.path.exists(c.get_path('include') + '/Python.h'))
ifndef PYTHON
PYTHON := $(shell python3 -c "$(SLOW)" 2>/dev/null && /usr/bin/python3 -c "$(WHOLE)" 2>/dev/null && echo /usr/bin/python3 || echo python3)
endif
VENV   ?= .venv
PEERS  ?= .venv-peers
VLLM   ?= .venv-vllm
TITAN  ?= .venv-torchtitan
# How to get torch; for example TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu".
TORCH  ?= torch==2.13.0
STUDY  ?= studies/first.toml

# Compiled later by all cores, where that is worth it, and not by one.
PIP  = -m pip --disable-pip-version-check install -qq --no-compile
# That which comes with Python 3.11 takes twice as long.
NEW_PIP = 'pip>=25'
# Much that tests never import, and would take long to compile.
UNUSED  = /tests?/|transformers/models/[b-z]|/ray/|/pip/
BIN  = $(VENV)/bin
COMPILE = $(BIN)/python -m compileall -q -j 0 -x '$(UNUSED)' $(VENV)/lib > /dev/null || true
# One thread for each of three workers on two cores, since some tests wait; they take neighbours together and so make what these
# share once. Tests that compile need a session without shape checks, and those that interpret kernels one of their own.
# The processes that tests start read compiled files, whatever the caller's setting is.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q
CORE = $(VENV)/.core-installed
DEV  = $(VENV)/.dev-installed
SITE = $(VENV)/.site-installed

.DEFAULT_GOAL := help
.PHONY: help study test check format bench engines docs site conformance clean

help:  ## lists the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

study: $(CORE)  ## runs the default study and writes its report
	$(BIN)/twoaxis study $(STUDY) --jobs 2

test: $(DEV)  ## runs the whole suite
	$(PYTEST) -n 3 --dist worksteal
	$(PYTEST) -n 2 --dist worksteal -m compile
	$(PYTEST) -n 2 -m interpret

check: $(DEV)  ## lint, format, types, spelling, import arrows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/codespell
	$(BIN)/lint-imports --no-cache

format: $(DEV)  ## formats the code and repairs what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DEV)  ## writes all generated pages, drawings and formulas, and builds the site
	$(BIN)/python docs/kept_reports.py
	$(BIN)/python docs/kept_benchmarks.py
	$(BIN)/python docs/build.py
	$(BIN)/python docs/engines.py
	$(BIN)/python docs/page_formulas.py
	$(BIN)/python docs/structure.py
	$(MAKE) site

# Nothing in it may be loaded from elsewhere.
site: $(SITE)  ## builds the site from docs into docs/_build/html; warnings are errors
	$(BIN)/python -m sphinx -W --keep-going -q docs docs/_build/html
	@! grep -rlE '(src|href)="(https?:)?//[^">]*[.](js|css|woff2?|png|svg)|(url|import) *\(?["'"'"']?(https?:)?//' docs/_build/html \
	    --include=*.html --include=*.css
	@echo "open docs/_build/html/index.html"

conformance: $(DEV)  ## runs the conformance checks of one mixer: make conformance NAME=deep_delta
	CONFORMANCE=every $(PYTEST) tests/conformance -k "$(or $(NAME),$(error say which mixer: make conformance NAME=deep_delta))"
	$(PYTEST) tests/conformance -m compile -k "$(NAME)"

bench: $(PEERS)/.installed  ## compares speed and memory with other libraries, as ratios in one run
	$(PEERS)/bin/python -m benchmarks --save benchmarks/results/cpu.md

# What fails in an engine is kept too, and the page says so.
engines: $(VLLM)/.installed $(TITAN)/.installed $(CORE)  ## runs models in vLLM and torchtitan, and keeps what came of it
	$(TITAN)/bin/python -m pytest -q tests/interop/engines/test_torchtitan.py
	-$(VLLM)/bin/python -m benchmarks.engines.vllm_pairs
	-$(TITAN)/bin/python -m benchmarks.engines.titan_runs
	$(BIN)/python docs/engines.py

clean:  ## removes the environments, build leftovers and caches; runs/ stays
	rm -rf $(VENV) $(PEERS) $(VLLM) $(TITAN) build dist docs/_build src/*.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone, so that nothing installed later changes which build of it is chosen.
$(VENV)/.torch-installed:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "twoaxis needs Python >= 3.11; set PYTHON=, got " + sys.version)'
	@echo "creating $(VENV): torch comes first and takes a few minutes" >&2
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) $(NEW_PIP)
	$(BIN)/python $(PIP) $(TORCH)
	@touch $@

$(CORE): $(VENV)/.torch-installed pyproject.toml constraints.txt
	$(BIN)/python $(PIP) -c constraints.txt -e .
	@touch $@

$(DEV): $(CORE)
	@# What is there is compiled meanwhile. Some packages carry templates that are no Python.
	@($(COMPILE)) & \
	$(BIN)/python $(PIP) -c constraints.txt -e '.[dev]' && wait
	@$(COMPILE)
	@touch $@

$(SITE): $(CORE)
	$(BIN)/python $(PIP) -c constraints.txt -e '.[docs]'
	@touch $@

# The peers ask for older versions of some libraries, so they get an environment of their own.
$(PEERS)/.installed: benchmarks/requirements-peers.txt pyproject.toml
	@echo "creating $(PEERS): the libraries to compare with" >&2
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python $(PIP) $(TORCH)
	$(PEERS)/bin/python $(PIP) -r benchmarks/requirements-peers.txt -e .
	@touch $@

# Each engine asks for versions of its own.
$(VLLM)/.installed: benchmarks/engines/requirements-vllm.txt pyproject.toml
	@echo "creating $(VLLM): vLLM for CPUs takes some minutes" >&2
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python $(PIP) $(TORCH)
	$(VLLM)/bin/python $(PIP) -r benchmarks/engines/requirements-vllm.txt -e .
	$(VLLM)/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	@touch $@

$(TITAN)/.installed: benchmarks/engines/requirements-torchtitan.txt pyproject.toml
	@echo "creating $(TITAN): torchtitan and triton take some minutes" >&2
	$(PYTHON) -m venv $(TITAN)
	$(TITAN)/bin/python $(PIP) $(TORCH)
	$(TITAN)/bin/python $(PIP) -r benchmarks/engines/requirements-torchtitan.txt -e .
	@touch $@
