# Everything sets itself up in .venv on a fresh machine, and can be run again.

PYTHON ?= python3
# The version that is tested. Without an NVIDIA card, give the CPU build of it where you have an index for that.
TORCH ?= torch==2.13.0
BIN := .venv/bin

.PHONY: quickstart quickstart-images test test-slow lint types bench clean

quickstart: .venv/installed
	$(BIN)/rigsweep sweep quickstart --resume

# A sweep that trains, then one that only samples from its best: how strongly to guide towards a class.
quickstart-images: .venv/installed
	$(BIN)/rigsweep sweep digits-lr-width --resume
	$(BIN)/rigsweep sweep guidance-digits --resume

test: .venv/installed-test
	$(BIN)/python -m pytest -m "not slow"

# Compilers, and more sweeps that are killed and resumed.
test-slow: .venv/installed-test
	$(BIN)/python -m pytest -m slow

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed-test
	$(BIN)/basedpyright

bench: .venv/installed-test
	$(BIN)/python -P tests/benchmarks/run.py

# torch first and alone: where a machine offers its own build, the other packages then take that one.
.venv/torch:
	@echo "setting up .venv: PyTorch, Ray, MLflow and what they need (a few minutes, once)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --upgrade "pip>=24"
	@$(BIN)/pip install --quiet "$(TORCH)"
	@touch $@

SOURCES := pyproject.toml README.md $(wildcard cluster/* datasets/* trainables/* sweeps/*)

.venv/installed: .venv/torch $(SOURCES)
	@rm -rf build  # a module that was deleted would be installed from there
	@$(BIN)/pip install --quiet .
	@touch $@

.venv/installed-test: .venv/installed
	@rm -rf build
	@$(BIN)/pip install --quiet ".[test,lint]"
	@touch $@

clean:
	rm -rf .venv build *.egg-info
