# make train   set everything up and train the default model      make test   set everything up and run the tests
#
# The environment lives in .venv. PYTHON=… picks another interpreter to build it with (3.11 to 3.13);
# TRAIN="--training.steps 50 …" hands flags to the training run, TESTS="-m slow tests/test_x.py" to pytest,
# FUZZ="--kinds wrapped --seed 7" to the fuzzer; PART="kernels triton" names parts of the slow tests, ROWS versions
# to test; JOBS=1 runs these in one process.

SHELL  := /bin/bash
VENV   := .venv
BIN    := $(VENV)/bin
TRAIN  :=
TESTS  :=
MINUTES := 60
FUZZ   :=
PART   :=
ROWS   :=
JOBS   := 2
CODE   := adjoint benchmarks examples scripts tests $(wildcard train.py)

# Set-up leaves compiling a module to its first import: kept, or every process of a test compiles torch again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help train test test-slow test-versions test-integrations test-external test-mutations fuzz lint format benchmarks site setup setup-dev clean distclean
.DEFAULT_GOAL := help

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9.-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' Makefile

train: setup  ## train the default model on real text: minutes on two cores
	$(BIN)/python train.py $(TRAIN)

test: setup-dev  ## run the tests (without those marked slow or gpu)
	$(BIN)/python -m pytest -n 2 --dist loadgroup --durations=30 $(TESTS)

fuzz: setup-dev  ## random cases against references for an hour, or MINUTES=5; prints its seed, lists what deviates
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --minutes $(MINUTES) $(FUZZ)

test-slow: setup-dev  ## run the tests marked slow, part by part, and record what passed in docs/versions.md; PART=kernels runs one
	JOBS=$(JOBS) $(BIN)/python scripts/slow_tests.py $(PART)

test-mutations: setup-dev  ## break the code behind each of some promises, and see that a test fails; PART="hooks noise" names some
	$(BIN)/python scripts/mutations.py $(PART)

test-versions: setup-dev  ## run tests under other versions, row by row (docs/versions.md); ROWS="triton-3.6 python-3.13" runs two
	JOBS=$(JOBS) $(BIN)/python scripts/versions.py $(ROWS)

test-integrations: setup-dev  ## run training frameworks' own commands with our line and without it (docs/integrations.md)
	JOBS=1 $(BIN)/python scripts/versions.py axolotl lightning llamafactory ms-swift sentence-transformers verl

# absolute: tests start processes in folders of their own
EXTERNAL := $(CURDIR)/build/external
KERNELS := $(CURDIR)/build/external-kernels
STORES := $(CURDIR)/build/external-stores
test-external: setup-dev  ## compare with mamba-ssm, causal-conv1d, fla, mamba.py, xlstm, s5-pytorch, minGRU, vortex, quantized bases, Lightning and servers of buckets, fetched into build/
	CAUSAL_CONV1D_FORCE_BUILD=TRUE CAUSAL_CONV1D_SKIP_CUDA_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE \
		$(BIN)/python -m pip install -q --no-deps --no-build-isolation --upgrade --target $(KERNELS) \
		mamba-ssm causal-conv1d flash-linear-attention fla-core einops mambapy \
		xlstm s5-pytorch scipy minGRU-pytorch vtx rich
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(EXTERNAL) bitsandbytes torchao \
		lightning lightning-utilities pytorch-lightning torchmetrics
	PYTHONPATH=$(KERNELS) $(BIN)/python -m pytest -rs tests/external \
		--ignore tests/external/test_quantized.py --ignore tests/external/test_lightning.py --ignore tests/external/test_s3.py --ignore tests/external/test_gs.py
	@# apart: where transformers finds fla, it runs fla's kernels, which need a GPU
	PYTHONPATH=$(EXTERNAL) $(BIN)/python -m pytest -rs tests/external/test_quantized.py tests/external/test_lightning.py
	$(BIN)/python -m pip install -q --upgrade --target $(STORES) s3fs gcsfs "moto[server]" gcp-storage-emulator
	PYTHONPATH=$(STORES) $(BIN)/python -m pytest -rs tests/external/test_s3.py tests/external/test_gs.py

benchmarks: setup-dev  ## measure every figure of README and docs again, in hours; QUICK=1 tries each, in minutes
	$(BIN)/python -m benchmarks $(if $(QUICK),--quick)

site: setup  ## build the documentation as a site, in build/site
	$(BIN)/python -m pip install -q -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q

lint: setup-dev  ## style, formatting and types
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy

format: setup-dev  ## rewrite the code the way lint wants it
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

setup: $(VENV)/ready  ## install what training needs into .venv

setup-dev: $(VENV)/ready-dev  ## install what the tests and lint need too

# A stamp a set of packages: nothing is installed again until the lists of them change.
$(VENV)/ready: pyproject.toml constraints.txt scripts/setup.sh
	@scripts/setup.sh $(VENV) ""
	@touch $@

$(VENV)/ready-dev: pyproject.toml constraints.txt scripts/setup.sh
	@scripts/setup.sh $(VENV) "dev"
	@touch $(VENV)/ready $@

clean:  ## remove caches and builds (runs/ and .venv stay)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find adjoint benchmarks tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## remove .venv as well
	rm -rf $(VENV)
