# `make bench` and `make test` need nothing but python3 with venv, make and g++: they install everything into .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
OUT := runs/$(shell date +%Y%m%d-%H%M%S)-bench
# By module: what a module has set up for its tests is set up once. Many tests wait for processes: three share two cores.
# In the order of tests/conftest.py: by default, modules with few tests come last, also those whose tests take minutes.
PYTEST_ARGS ?= -n 3 --dist loadscope --no-loadscope-reorder
# Containers often forbid bytecode. Without it each process compiles the package again, and each run rewrites all tests.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install bench test test-slow test-all test-extra lint types format docs readme files figures studies dist stale clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

install: $(INSTALLED)  ## everything into .venv; again only when pyproject.toml or constraints.txt changed

bench: $(INSTALLED)  ## the main job at a size for a laptop: a small sweep, its table, its records and its HTML report
	$(BIN)/cs-systems time --size tiny small --context-length 64 --batch-size 1 --attention naive sdpa_flash \
	    --mode forward forward-backward train-step --warmup 2 --steps 10 --out $(OUT)
	$(BIN)/cs-systems report $(OUT) --relative-to attention=naive --columns size mode attention step.median_s
	$(BIN)/cs-systems report $(OUT) --format html --output $(OUT)/report.html

test: $(INSTALLED)  ## the tests that this machine can run, but for test-slow (PYTEST_ARGS='-k word' for some of them)
	$(BIN)/python -m pytest -m 'not slow' $(PYTEST_ARGS)

test-slow: $(INSTALLED)  ## those that compile kernels or models, interpret kernels, or take 20 s: for a change of these
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

test-all: $(INSTALLED)  ## test and test-slow in one run: the modules that take longest come first, and no core waits for them
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-extra: $(INSTALLED)  ## those that need a program or package beyond this list: nsys, Chromium, cuda-core (pytest --markers)
	$(BIN)/python -m pytest -m extra $(PYTEST_ARGS)

lint: $(INSTALLED)  ## style, the usual mistakes, and which folder imports which
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

types: $(INSTALLED)  ## mypy --strict
	$(BIN)/mypy

format: $(INSTALLED)  ## let ruff repair what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(INSTALLED)  ## the documentation as pages that need no network, site/index.html
	@$(BIN)/python -c 'import material' 2>/dev/null || \
	    $(BIN)/python -m pip install --progress-bar off -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=$(CURDIR) $(BIN)/python -m mkdocs build --strict --quiet
	@echo site/index.html

readme: $(INSTALLED)  ## the tables of README.md, docs/results.md and the course page, and profiles/README.md, from the committed records
	$(BIN)/python scripts/readme_table.py
	$(BIN)/python scripts/course_page.py
	$(BIN)/python scripts/studies/_study.py --index

files:  ## every file with its first line, which says what it is for (FOLDER=readers for some of them)
	@$(PYTHON) scripts/files.py $(FOLDER)

figures: $(INSTALLED)  ## every figure of profiles/, which README and docs show too, from the committed records; fails if a text is cut
	$(BIN)/python scripts/studies/_gallery.py
	$(BIN)/python scripts/answer_picture.py
	$(BIN)/python scripts/benchmarks/profile_page.py --picture profiles/profile_page/page.png --kernels > /dev/null

studies: $(INSTALLED)  ## every study at the size that fits this machine; again: goes on with the rest
	$(BIN)/python scripts/studies/_study.py --all

dist: $(INSTALLED)  ## dist/: sdist and wheel, checked, and run in a clean environment
	rm -rf dist
	$(BIN)/python -m build --quiet --no-isolation
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python .ci/check_dist.py dist

stale:  ## the quoted figures whose code has changed since they were measured
	@$(PYTHON) scripts/benchmarks/stale_figures.py

clean:  ## take .venv and the caches away; runs/ stays
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import platform as p, sys; sys.version_info >= (3, 11) or sys.exit(f"cs-systems needs Python 3.11 or newer, $(PYTHON) is {p.python_version()}: install one and say make PYTHON=python3.11")'
	@$(PYTHON) -c 'import ensurepip' || { echo 'python3 has no venv: apt install python3-venv' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --progress-bar off -c constraints.txt -e '.[test,dev,triton,nvtx]'
	@touch $@
