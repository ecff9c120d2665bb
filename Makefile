# course, test: each does its own set-up. A second call finds everything in place and starts in seconds.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
INSTALL := $(PY) nbutils/environments/installer.py -q  # uv with pip's settings
# This exact torch first: on machines whose index knows a CPU build, it is the one taken, and nothing later replaces it.
TORCH := torch==2.13.0

# Environments keep their bytecode, also where PYTHONDONTWRITEBYTECODE is set: without it every import takes twice as long.
export PYTHONDONTWRITEBYTECODE :=

# Two workers with a thread each; tests/conftest.py says how they share the work.
PYTEST := $(PY) -m pytest -n $(or $(WORKERS),2) --dist loadfile --no-loadscope-reorder
# What is in git: a file of yours in the checkout is not linted, tested or synced.
LESSONS = $(shell git ls-files 'notebooks/*.py')

.PHONY: quickstart course test test-fast test-long test-gpu sync lint graph bench wheels kaggle site site-test clean

quickstart: $(VENV)/ready  ## lesson 00 in the terminal: ARGS='--NAME Momo'
	$(PY) "$$($(PY) -c 'from nbutils import course; print(course.edition())')/00_quickstart.py" $(ARGS)

course: $(VENV)/ready  ## lessons 01-05, headless; beside the first ones the server's environment, for which 05 waits
	$(MAKE) -s .venv-serve/ready.json >.venv-serve.log 2>&1 & $(PY) -m nbutils run $(ARGS)

test: $(VENV)/site .venv-serve/ready.json .venv-export/ready.json  ## the gate: lessons, servers, environments
	$(PYTEST) -m "not gpu and not long" $(ARGS)

test-long: $(VENV)/site .venv-serve/ready.json .venv-export/ready.json  ## before a release: kills, all exports, all installs, DeepSpeed, JupyterLab
	$(INSTALL) --no-build-isolation setuptools deepspeed jupyterlab
	$(PYTEST) -m long $(ARGS)

test-fast: $(VENV)/ready  ## a minute and a half: no lesson, no server, no installation, no kill
	$(PYTEST) -m "not gpu and not notebook and not serve and not install and not slow and not long" $(ARGS)

test-gpu: $(VENV)/ready  ## needs a CUDA GPU
	$(PY) -m pytest -m gpu $(ARGS)

sync: $(VENV)/ready  ## notebooks/*.ipynb, setup cells, badges and docs/choosing.md from their sources and git's origin
	$(PY) .ci/translations.py
	$(PY) .ci/sync.py

lint: $(VENV)/ready
	$(PY) -m ruff check .ci benchmarks docs/site nbutils tests $(LESSONS)
	$(PY) -m ruff format --check -q .ci benchmarks docs/site nbutils tests
	$(PY) -m mypy
	$(PY) .ci/sync.py --check
	$(PY) .ci/translations.py --check
	$(PY) .ci/density.py --check
	$(VENV)/bin/lint-imports --no-cache

graph: $(VENV)/ready  ## docs/imports.svg: which room imports which
	$(PY) .ci/graph.py

bench: $(VENV)/ready  ## ratios on this machine; benchmarks/gpu_lessons.sh is for one with a GPU
	$(PY) benchmarks/threads.py && $(PY) benchmarks/sync.py

wheels: $(VENV)/ready  ## dist/wheels, for notebooks without network; IMAGE: kaggle, none, or a file with `pip freeze` of the image
	$(PY) .ci/wheels.py $(if $(PYTHON_VERSION),--python-version $(PYTHON_VERSION)) $(if $(PLATFORM),--platform $(PLATFORM)) $(if $(IMAGE),--image $(IMAGE))

kaggle: $(VENV)/ready  ## dist/kaggle, for the `kaggle` command: KAGGLE_USER=me LESSON=03_qlora, OFFLINE=1 for the internet off
	$(PY) .ci/kaggle.py --user "$(KAGGLE_USER)" $(if $(LESSON),--lesson "$(LESSON)") $(if $(OFFLINE),--offline)

site: $(VENV)/site .venv-serve/ready.json .venv-export/ready.json  ## build/site/html: executes the lessons that changed, in both languages
	$(PY) .ci/website.py

site-test: $(VENV)/site  ## what the gate asks of a site, asked of all of build/site/html, in a browser
	COURSE_SITE=build/site/html $(PY) -m pytest tests/test_site.py $(ARGS)

$(VENV)/ready: pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) $(TORCH)
	$(INSTALL) -c .ci/constraints.txt -e ".[train,serve,documents,dev]"
	touch $@

$(VENV)/site: $(VENV)/ready
	$(INSTALL) -c .ci/constraints.txt -e ".[site]"
	touch $@

.venv-serve/ready.json: | $(VENV)/ready
	$(PY) -m nbutils serve-env

.venv-export/ready.json: | $(VENV)/ready  # the exports of lesson 08; also made by the first export that needs it
	$(PY) -m nbutils export-env

clean:  ## environments only; runs/ is yours
	rm -rf $(VENV) .venv-serve* .venv-export*
