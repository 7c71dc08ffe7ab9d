# make train       set up what training needs, and train the example GPT
# make test        set up what the tests need, and run them, but for those that are long by nature
# make test-long   run those; make test-all: both
# make test-xla   set up torch_xla in an environment of its own and run the tests of the XLA backend
# make test-package   build the source distribution and the wheel, and use the package outside of the repository
# make test-matrix    a part of the tests on releases of torch and Python; writes docs/compatibility.md
# make gpu        checks of this machine's accelerator, right and fast; without one a rehearsal. PART=A, B, C
# make replay     what of all graphs, programs and reports of a corpus has changed since AGAINST (default: HEAD)
# make compatibility  models and trainers of other libraries, in an environment of its own; writes the same page
# make docs           the site of the documentation, into build/site
# make lint, make types, make clean
#
# PYTHON=python3.12   the interpreter that the environment is made with
# TORCH=2.9.1         another torch than the pinned one, in an environment of its own
# NPROC=2 DEVICE=cpu BACKEND=inductor STEPS=20 ARGS="--bf16"   for train
# ARGS="-k verify" JOBS=2    for test and test-long: what to run, and how many files at a time
# ARGS=--random-order-seed=7    for the same: in a random order

PYTHON ?= python3
TORCH  ?=
NPROC  ?= 2
DEVICE ?= cpu
STEPS  ?=
ARGS   ?=
JOBS   ?= 3
# Inductor needs a C++ compiler on CPU; without one the example runs its graphs as they are.
BACKEND ?= $(if $(shell command -v $${CXX:-g++}),inductor,eager)

VENV := .venv$(if $(TORCH),-$(TORCH))
BIN  := $(VENV)/bin
PIN  := $(if $(TORCH),torch==$(TORCH),-c constraints.txt)
# The torchao of today needs torch 2.10: with an older one its tests are skipped, and transformers does not see it.
COMMA := ,
FLOAT8 := $(if $(filter 2.9%,$(TORCH)),,$(COMMA)float8)
PIP  := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off
# Bytecode of an environment: pip makes it on one core, this on all of them. Without it each process compiles what it
# imports, which takes as long again. Files that are no Python of this release have none: no error. Nor have tests of
# packages, and transformers' models, of which few are imported.
bytecode = $(1)/bin/python -m compileall -qq -j 0 -x '/tests/|/transformers/models/' $(1)/lib \
	graph_fsdp passes runtime || true

LIBRARIES := timm transformers diffusers torch_geometric x-transformers reformer-pytorch \
	accelerate peft trl datasets torchtitan triton

.PHONY: train test test-long test-all test-xla test-package test-matrix compatibility gpu replay docs lint types clean

train: $(VENV)/.train
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $(NPROC) \
		examples/train_gpt.py --device $(DEVICE) --backend $(BACKEND) $(if $(STEPS),--steps $(STEPS)) $(ARGS)

# pytest keeps the assertions that it has written anew, for the next workers, where the environment has no bytecode kept
# (`PYTHONDONTWRITEBYTECODE`, as in many containers).
test test-long test-xla: export PYTHONDONTWRITEBYTECODE :=

# Its environment has no bytecode yet: what the first process compiles, the next three import. 10 CPU seconds for each.
test-package: export PYTHONDONTWRITEBYTECODE :=

# A process of tests that dies ends the run, which names its test: with one in its place, pytest-xdist may wait for ever.
BY_FILE := --dist loadfile --no-loadscope-reorder --max-worker-restart 0

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n $(JOBS) $(BY_FILE) -m "not long" $(ARGS)

test-long: $(VENV)/.installed
	$(BIN)/python -m pytest -n $(JOBS) $(BY_FILE) -m long $(ARGS)

test-all: test test-long

test-xla: .venv-xla/.installed
	.venv-xla/bin/python -m pytest -n 2 $(BY_FILE) tests/xla $(ARGS)

# In an environment that has only the package and what it requires. The wheel is made from the source distribution, and
# that from a copy of the tracked files: other targets build in the repository, and may do so at the same time.
test-package:
	rm -rf build/package && mkdir -p build/package/elsewhere build/package/source
	git ls-files -z | tar -c --null -T - | tar -x -C build/package/source
	$(PYTHON) -m venv build/package/tools
	build/package/tools/bin/python -m pip install --quiet build
	build/package/tools/bin/python -m build --outdir build/package build/package/source
	$(PYTHON) -m venv build/package/environment
	build/package/environment/bin/python -m pip install --quiet --no-compile $(PIN) build/package/*.whl
	build/package/environment/bin/python -m pip check
	cp tests/installed_package.py build/package/elsewhere/program.py
	cd build/package/elsewhere && OMP_NUM_THREADS=1 ../environment/bin/python program.py $(CURDIR)/graph_fsdp
	cd build/package/elsewhere && OMP_NUM_THREADS=1 ../environment/bin/torchrun --standalone --nproc-per-node 2 program.py
	rm -rf build/package

replay: $(VENV)/.installed
	$(BIN)/python tests/replay.py --jobs $(JOBS) $(if $(AGAINST),--against $(AGAINST)) $(ARGS)

# PAIRS="2.11.0:3.12 newest:3.13"   those only
test-matrix: $(VENV)/.installed
	$(BIN)/python benchmarks/compatibility.py $(addprefix --pair ,$(PAIRS))
	$(BIN)/python benchmarks/update_docs.py

gpu: $(VENV)/.installed
	$(BIN)/python benchmarks/gpu_checks.py $(PART) $(ARGS)

# ARGS="--only Llama"   those only. Some 40 minutes on two cores.
compatibility: .venv-libraries/.installed
	.venv-libraries/bin/python benchmarks/models_compatibility.py $(ARGS); found=$$?; \
		.venv-libraries/bin/python benchmarks/update_docs.py && exit $$found

docs: $(VENV)/.docs
	rm -rf build/lib build/bdist* build/installed build/site
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --target build/installed .
	$(BIN)/python -m mkdocs build --strict --quiet

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy does not follow an editable install, and the folders of the source are not laid out as the package is.
types: $(VENV)/.types
	rm -rf build/lib build/bdist* build/types
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --target build/types .
	MYPYPATH=build/types $(BIN)/python -m mypy -p graph_fsdp

# One environment. Each stamp says that what one job needs is in it, and nothing is installed for a job that is not run.
# The linter and the site read source files only: they need neither the package nor torch.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.train: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --no-compile $(PIN) -e ".[train]"
	$(call bytecode,$(VENV))
	touch $@

$(VENV)/.installed: $(VENV)/.train
	$(PIP) --no-compile $(PIN) -e ".[test,examples,benchmarks$(FLOAT8)]"
	$(call bytecode,$(VENV))
	touch $@

$(VENV)/.types: $(VENV)/.train
	$(PIP) --no-compile $(PIN) -e ".[types]"
	touch $@

$(VENV)/.lint: Makefile | $(BIN)/python
	$(PIP) ruff
	touch $@

$(VENV)/.docs: Makefile | $(BIN)/python
	$(PIP) mkdocs-material "mkdocstrings[python]"
	touch $@

.venv-xla/.installed: pyproject.toml constraints-xla.txt
	$(PYTHON) -m venv .venv-xla
	.venv-xla/bin/python -m pip install --progress-bar off --no-compile -c constraints-xla.txt -e ".[test-xla,xla]"
	$(call bytecode,.venv-xla)
	touch $@

.venv-libraries/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-libraries
	.venv-libraries/bin/python -m pip install $(PIN) -e ".[benchmarks]" $(LIBRARIES)
	touch $@

clean:
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
