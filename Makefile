# make demo · make test · make matrix · make lint
# Every target builds the virtual environments it needs (tools/venv.py); PYTHON chooses the Python.

VLLM   ?= 0.32.0
MATRIX ?= 0.24.0 0.28.0 0.32.0
PYTEST  = -m pytest -q

DEV     = .venvs/dev
ENGINE  = .venvs/vllm-$(VLLM)
PY3    := $(shell command -v python3.11 || command -v python3.12 || command -v python3)

.PHONY: demo test unit engine matrix lint dev venv-%

demo: venv-$(VLLM)
	$(ENGINE)/bin/python -m tools.demo

test: unit engine

unit: dev
	$(DEV)/bin/python -m tools.lane unit

engine: venv-$(VLLM)
	$(ENGINE)/bin/python -m tools.lane engine

matrix: $(addprefix matrix-,$(MATRIX))

matrix-%: venv-%
	.venvs/vllm-$*/bin/python -m tools.lane matrix

lint: dev
	$(DEV)/bin/ruff check .
	$(DEV)/bin/ruff format --check .
	$(DEV)/bin/mypy

dev:
	@$(PY3) tools/venv.py dev $(DEV)

venv-%:
	@$(PY3) tools/venv.py vllm $* .venvs/vllm-$*
