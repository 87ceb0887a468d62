# `make demo` and `make test` need nothing but make, Python >= 3.11 and a package index.

PYTHON ?= $(shell command -v python3.11 2>/dev/null || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test check format bench-peers bench-frozen bench-fusion clean

demo: $(INSTALLED)
	$(BIN)/lowtide optimize unet:batch=8,size=128,width=16,mode=train --memory 50% --report report.html

test: check
	$(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist loadfile

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# PEERS="--quick" sweeps less; `.venv/bin/python -m benchmarks.peers --help` has all options.
bench-peers: $(INSTALLED)
	$(BIN)/python -m benchmarks.peers --markdown build/peers.md --json build/peers.json --svg build/peers.svg $(PEERS)

# Four training graphs of the MAGIS paper in files with their judges; GRAPHS is their folder.
GRAPHS ?= ../shared/graphs
FROZEN ?= --seconds 60
bench-frozen: $(INSTALLED)
	$(BIN)/python bench/frozen.py --table $(GRAPHS) $(FROZEN)

# Generated kernels against eager and, where installed, Inductor, ONNX Runtime and OpenVINO; then kernel counts.
bench-fusion: $(INSTALLED)
	$(BIN)/python -m pip install -q --editable '.[peers]'
	$(BIN)/python bench/fusion.py --rivals all $(FUSION)
	$(BIN)/python bench/counts.py

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The source is installed in place, so only a change of the requirements installs again.
$(INSTALLED): requirements-dev.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Lowtide needs Python 3.11 or later, this is " + sys.version if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -r requirements-dev.txt
	$(BIN)/python -m pip install --no-deps --editable .
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis report.html
