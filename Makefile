# Two commands do everything: `make serve` and `make test`. Both set up what they need in .venv first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
MODEL  ?=
MINUTES ?= 30
REPLICAS ?= 1
NAMES  ?=
CORES  := $(shell $(PYTHON) -c "import os; print(len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count())")
# Tests that mostly wait, for servers that come and go: one more worker than there are cores. All others compute: a worker a core.
WAITING := tests/agents tests/cli tests/faults tests/page tests/server tests/serving
WORKERS ?= $(shell expr $(CORES) + 1)
PYTEST := $(BIN)/pytest --dist loadgroup -n

# Compiled Python files are kept: tests start a hundred processes, and setting up compiles nothing in advance.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: serve test browser pictures conformance newest oldest mutants check bench compare compare-quick soak redteam test-ray tools race arm exact-gpu bench-gpu serve-gpu profile-gpu clean

serve: $(READY)  ## set up and serve the default model, or MODEL=…
	$(BIN)/weft serve $(MODEL)

test: browser $(READY)  ## set up and run the tests: what CI does
	$(BIN)/ruff check .
	$(BIN)/mypy
	@$(BROWSER_IS_THERE)
	$(PYTEST) $(CORES) tests $(WAITING:%=--ignore=%)
	$(PYTEST) $(WORKERS) $(WAITING)

browser:  ## a Chromium for the tests of the page, where it may be installed; without one they are skipped and say so
	@command -v chromium >/dev/null || [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || { mkdir -p build && touch build/installing && \
	  { ( DEBIAN_FRONTEND=noninteractive timeout 120 sh -c 'apt-get update && apt-get install -y chromium'; rm -f build/installing ) \
	    </dev/null >/dev/null 2>&1 & }; }

# It is installed while the rest is being set up.
BROWSER_IS_THERE = for second in $$(seq 130); do [ -e build/installing ] || break; sleep 1; done

pictures: browser $(READY)  ## the README's pictures of the page, made anew
	@$(BROWSER_IS_THERE)
	$(BIN)/python -m bench.pictures

conformance: $(READY)  ## every oracle on all architectures of the zoo, a downloaded model, longer searches and a soak of two minutes
	WEFT_TEST_ALL=1 $(PYTEST) $(WORKERS) $(CONFORMANCE)

CONFORMANCE := tests/oracle tests/properties tests/test_zoo.py tests/engine/test_memory.py tests/model/test_mlx_lm_contract.py \
  tests/grammar/test_corpus_in_a_batch.py tests/text/tools/test_tools_in_a_batch.py tests/server/test_constrained_crowd.py \
  tests/server/test_bad_requests.py tests/faults/test_killed_engine.py tests/faults/test_killed_replica.py tests/faults/test_shards.py \
  tests/serving/test_pool.py tests/faults/test_short_soak.py

newest:  ## conformance with the newest mlx and mlx-lm there are, also beyond weft's range, in .venv-newest: before users meet them
oldest:  ## conformance with the oldest mlx-lm of weft's range, in .venv-oldest
newest: PACKAGES := mlx-lm 'mlx[cpu]'
oldest: PACKAGES := mlx-lm==$(shell sed -n 's/.*"mlx-lm>=\([0-9.]*\).*/\1/p' pyproject.toml)
# pip says that weft wants another version, and installs: whether it works is the question here.
newest oldest:
	$(MAKE) VENV=.venv-$@ .venv-$@/.ready
	.venv-$@/bin/pip install --quiet --no-compile --upgrade $(PACKAGES)
	@.venv-$@/bin/pip freeze | grep -i '^mlx'
	PYTEST_ADDOPTS="-rs --deselect tests/model/test_mlx_lm_contract.py::test_mlx_lm_lies_in_the_range" \
	  $(MAKE) VENV=.venv-$@ conformance

mutants: $(READY)  ## break every guard of tests/guards.py, or NAMES=…, in a copy of the source: the test named for it must fail
	$(BIN)/python tests/mutants.py $(NAMES)

check: test  ## what CI does, and the formatting
	$(BIN)/ruff format --check .

bench: $(READY)  ## speed and memory against a bare loop, as ratios in one run (about 12 minutes on two cores)
	$(BIN)/python -m bench

compare: $(READY)  ## weft and other servers on the same work in one run (seventy minutes, installing them included); writes docs/log.md
	$(BIN)/python -m bench.compare --log
	$(BIN)/python -m bench.compare.speculation --log
	$(BIN)/python -m bench.compare.images

compare-quick: $(READY)  ## the same in ten minutes: SmolLM2, mlx-lm and llama.cpp (where `make compare` has built it), no log
	$(BIN)/python -m bench.compare --quick

soak: $(READY)  ## MINUTES=30 of mixed load while an engine is killed every 20 seconds; REPLICAS=3 engines of each model
	$(BIN)/python tests/soak.py $(MINUTES) $(REPLICAS)

redteam: MINUTES = 10
redteam: $(READY) .venv-fuzz/.ready  ## MINUTES=10 of attacks beside eight ordinary streams, then schemathesis on every operation
	$(BIN)/python tests/redteam.py $(MINUTES)

test-ray:  ## a Ray cluster on loopback, in .venv-ray: engines placed, a machine lost, the head lost (six minutes on two cores)
	$(MAKE) VENV=.venv-ray .venv-ray/.ready
	.venv-ray/bin/pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev,ray]'
	.venv-ray/bin/pytest tests/with_ray

.venv-fuzz/.ready:
	$(PYTHON) -m venv .venv-fuzz
	.venv-fuzz/bin/pip install --quiet --no-compile schemathesis
	@touch $@

tools: $(READY)  ## 200 tool calls of every family by a random model, each must be valid (two minutes); CI runs 10
	WEFT_TOOL_CALLS=200 $(BIN)/pytest tests/text/tools/test_tools_in_a_batch.py

race:  ## the kernels' thread pool under a thread sanitizer (needs gcc or clang with it; half a minute)
	mkdir -p build
	$(CC) -O1 -g -std=gnu11 -ffp-contract=off -fsanitize=thread tests/native/race.c -o build/race -ldl -lm -lpthread
	TSAN_OPTIONS=halt_on_error=1 build/race

arm:  ## on x86: the kernels that ARM runs, emulated, have the bits of AVX2 and AVX-512 (needs Debian's gcc-aarch64-linux-gnu and qemu-user)
	@command -v aarch64-linux-gnu-gcc qemu-aarch64 >/dev/null || { echo "make arm needs a compiler for ARM and an emulator: apt-get install gcc-aarch64-linux-gnu qemu-user"; exit 1; }
	mkdir -p build
	$(CC) $(BITS) -o build/bits -ldl -lm -lpthread
	aarch64-linux-gnu-gcc $(BITS) -o build/bits-arm -ldl -lm -lpthread
	qemu-aarch64 -L /usr/aarch64-linux-gnu build/bits-arm > build/bits-arm.txt
	@for name in avx2 avx512 avx512_tiled; do \
	  build/bits $$name > build/bits-here.txt; \
	  case $$? in 0) diff build/bits-here.txt build/bits-arm.txt && echo "$$name: $$(wc -l < build/bits-arm.txt) results, all with ARM's bits" || exit 1;; \
	    2) echo "$$name: not on this machine";; *) exit 1;; esac; done

BITS := -O3 -std=gnu11 -ffp-contract=off -fno-fast-math tests/native/bits.c

# With what is set up in .venv, or else with a Python that has a GPU build of MLX.
GPU_PYTHON = $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

exact-gpu:  ## on a Mac, or with a CUDA GPU: under --exact a row's logits are bit-equal in any crowd and from the cache (6 minutes)
	PYTHONPATH=src $(GPU_PYTHON) -m bench.exact_gpu

bench-gpu:  ## on a machine with a CUDA GPU: steps and prefill against mlx-lm
	PYTHONPATH=src $(GPU_PYTHON) -m bench.gpu

serve-gpu:  ## on a machine with a CUDA GPU: a server under load, weft and mlx_lm.server in one run (10 minutes)
	PYTHONPATH=src $(GPU_PYTHON) -m bench.serve_gpu

profile-gpu:  ## on a machine with a CUDA GPU: where the time of steps and prompts goes, by kernel where torch is installed
	PYTHONPATH=src $(GPU_PYTHON) -m bench.gpu_profile

$(READY): pyproject.toml constraints.txt setup.py $(wildcard src/weft/kernels/native/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "weft needs Python 3.11 or newer: set PYTHON=…"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --build-constraint constraints.txt --editable '.[dev]'
	@touch $(READY)

clean:
	rm -rf $(VENV) .venv-newest .venv-oldest .venv-ray .venv-fuzz build src/weft/kernels/*.so src/*.egg-info
