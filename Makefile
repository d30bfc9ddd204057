# Two commands set up everything on a fresh machine: `make apply` (Python and git are enough) and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check --quiet

.PHONY: apply test lint

apply:
	$(PYTHON) apply.py apply

# A file of tests stays in one process, with one thread for torch; what measures time runs by itself.
test: $(VENV)/ready
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n auto --dist loadfile -m "not alone"
	$(VENV)/bin/python -m pytest -m alone

lint: $(VENV)/ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/python apply.py lint
	$(VENV)/bin/python apply.py export --check

# Made anew when a lock changes. torch comes last: of its needs only the parts of a CUDA build are then missing.
$(VENV)/ready: requirements-test.lock requirements-torch.lock
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) install --require-hashes --only-binary :all: -r requirements-test.lock
	$(PIP) install --only-binary :all: -r requirements-torch.lock
	touch $@
