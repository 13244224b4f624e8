# make demo · make test · make matrix · make lint · make overhead
#
# Every target builds the virtual environments it needs (tools/venv.py; PYTHON chooses the Python).
# A lane is the list of test files in manifests/tests/LANE.txt.

VLLM   ?= 0.32.0
MATRIX ?= 0.24.0 0.28.0 0.32.0

PYTHON3 := $(shell command -v python3.11 || command -v python3.12 || command -v python3)
DEV      = .venvs/dev
ENGINE   = .venvs/vllm-$(VLLM)
lane     = -m pytest -q --durations=5 $$(cat manifests/tests/$(1).txt)

.PHONY: demo test unit engine matrix lint overhead dev

demo: venv-$(VLLM)
	@$(ENGINE)/bin/python -m tools.demo

test: unit engine

unit: dev
	$(DEV)/bin/python $(call lane,unit)

engine: venv-$(VLLM)
	$(ENGINE)/bin/python $(call lane,engine)

matrix: $(addprefix matrix-,$(MATRIX))

matrix-%: venv-%
	.venvs/vllm-$*/bin/python $(call lane,matrix)

lint: dev
	$(DEV)/bin/ruff check .
	$(DEV)/bin/ruff format --check .
	$(DEV)/bin/mypy

overhead: venv-$(VLLM)
	@$(ENGINE)/bin/python -m tools.overhead

dev:
	@$(PYTHON3) tools/venv.py dev $(DEV)

venv-%:
	@$(PYTHON3) tools/venv.py vllm $* .venvs/vllm-$*
