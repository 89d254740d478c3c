# `make demo` trains a model, `make test` checks what takes seconds; both install what they need into .venv.
PYTHON ?= python3
BIN := .venv/bin
KERNELS := $(wildcard native/* native/kernels/*)
RUN := runs/demo-$(shell date +%Y%m%d-%H%M%S)

.DELETE_ON_ERROR:
.PHONY: demo test test-slow check

demo: .venv/train.stamp
	$(BIN)/python -m aft train bytes-tiny --out "$(RUN)"
	$(BIN)/python -m aft generate "$(RUN)" --prompt "def " --max-new-tokens 400

test: .venv/test.stamp check
	$(BIN)/python -m pytest -n auto -m "not slow"

test-slow: .venv/test.stamp
	$(BIN)/python -m pytest -n auto -m slow

check: .venv/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyrefly check

# One stamp for each set of extras; the set for tests contains the one for training.
.venv/%.stamp: pyproject.toml $(KERNELS) | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[$*]"
	touch "$@"

.venv/bin/python:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "attention-free needs Python 3.11 or newer; set PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip' || \
		{ echo "this Python cannot make virtual environments; on Debian: apt-get install python3-venv" >&2; exit 1; }
	"$(PYTHON)" -m venv .venv
