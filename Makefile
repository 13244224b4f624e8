# make figure · make demo · make test · make matrix · make bench · make lint · make overhead
# make demo-maxtext · make jax-releases (MaxText on tpu-inference) · make seams
#
# Every target builds the virtual environments it needs (tools/venv.py; PYTHON chooses the Python).
# A lane is the list of test files in manifests/tests/LANE.txt.

VLLM   ?= 0.32.0
PYTHON ?= python3
MATRIX ?= 0.23.0 0.24.0 0.26.0 0.28.0 0.29.0 0.30.0 0.31.0 0.32.0 0.33.0
MAXTEXT ?= 0.2.3 0.2.4
TPU     ?= 0.27.0 0.28.0

PYTHON3 := $(shell command -v python3.11 || command -v python3.12 || command -v python3)
DEV      = .venvs/dev
ENGINE   = .venvs/vllm-$(VLLM)
JAX      = .venvs/jax
lane     = -m pytest -q --durations=5 $$(cat manifests/tests/$(1).txt)
# Two workers, each with whole test files: most tests are one process on one thread.
TWO      = -n 2 --dist loadfile

.PHONY: figure demo demo-maxtext test unit install-proofs engine jax jax-releases matrix gpu ran \
        support readme lint bench seams overhead dev venv-jax

# Memory over time, stock against patched, measured here: the README's first figure.
figure: dev venv-$(VLLM)
	@$(ENGINE)/bin/python -m bench.reclaim --results out/figure
	@$(DEV)/bin/python -m bench.figure out/figure

demo: venv-$(VLLM)
	@$(ENGINE)/bin/python -m tools.demo

demo-maxtext: venv-jax
	@$(JAX)/bin/python -m tools.demo_maxtext

test: unit engine jax

unit: dev
	$(DEV)/bin/python $(call lane,unit) $(TWO)

# On every Python that is found; EVERY_PYTHON=1 wants them all.
install-proofs: dev
	$(DEV)/bin/python $(call lane,install) -n 2

engine: venv-$(VLLM)
	$(ENGINE)/bin/python $(call lane,engine)

jax: venv-jax
	$(JAX)/bin/python $(call lane,jax)

jax-releases: $(addprefix jax-maxtext-,$(MAXTEXT)) $(addprefix jax-tpu-,$(TPU))

jax-maxtext-%: venv-jax
	PYTHONPATH=$(JAX)/releases/maxtext-$* $(JAX)/bin/python -m pytest -q tests/jax/test_models.py tests/jax/test_pools.py

jax-tpu-%: venv-jax
	PYTHONPATH=$(JAX)/releases/tpu-inference-$* $(JAX)/bin/python -m pytest -q tests/jax/test_sharding.py

matrix: $(addprefix matrix-,$(MATRIX)) $(addprefix several-,$(MATRIX)) ran

matrix-%: venv-%
	.venvs/vllm-$*/bin/python $(call lane,matrix) $(TWO) --junitxml=out/matrix/$*.xml

# On a machine with an NVIDIA GPU, in any Python with torch, Triton and cuda-bindings.
gpu:
	$(PYTHON) -m tests.gpu

several-%: venv-%
	.venvs/vllm-$*/bin/python $(call lane,several)

# What ran on which release; `support` also records it, in manifests/matrix.json and the README.
ran: venv-$(VLLM)
	@$(ENGINE)/bin/python -m tools.support $(SUPPORT)

support: venv-$(VLLM)
	@$(ENGINE)/bin/python -m tools.support --record

# The settings, from kvcached_patch/config.py into the README.
readme: dev
	@$(DEV)/bin/python -m tools.readme

lint: dev
	$(DEV)/bin/ruff check .
	$(DEV)/bin/ruff format --check .
	$(DEV)/bin/mypy

BENCHMARKS = reclaim fragmentation scheduling overhead colocation

bench: dev venv-$(VLLM) venv-jax
	@for name in $(BENCHMARKS); do $(ENGINE)/bin/python -m bench.$$name || exit; done
	@$(JAX)/bin/python -m bench.compiling
	@$(JAX)/bin/python -m bench.scanning
	@PYTHONPATH=$(JAX)/releases/maxtext-0.2.4 $(JAX)/bin/python -m bench.scanning
	@$(DEV)/bin/python -m bench.figure

seams: venv-$(VLLM)
	@$(ENGINE)/bin/python -m tools.seams

overhead: venv-$(VLLM)
	@$(ENGINE)/bin/python -m tools.overhead

dev:
	@$(PYTHON3) tools/venv.py dev $(DEV)

venv-jax:
	@$(PYTHON3) tools/venv.py jax $(JAX)

venv-%:
	@$(PYTHON3) tools/venv.py vllm $* .venvs/vllm-$*
