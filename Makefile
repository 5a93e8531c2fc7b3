# Every target works by itself on a fresh clone.
#
# torch comes from pip's own index. Without a GPU its CPU build is smaller, and enough: point
# PIP_EXTRA_INDEX_URL at PyTorch's index of CPU builds.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: setup demo demo-samples test lint bench bench-limit bench-shapes bench-io bench-planners bench-samples sanitize sanitize-asan sanitize-tsan

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*.cpp csrc/*.hpp csrc/arena/* csrc/planning/* csrc/samples/*)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --editable '.[cli,plan,report,dev]'
	touch $@

demo: setup
	$(BIN)/python examples/demo.py

demo-samples: setup
	$(BIN)/python examples/samples_demo.py

test: lint
	$(BIN)/pytest -n 2

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# A quarter of an hour on two cores that do nothing else, 4 GB of free disk and 8 GB of memory.
bench: setup
	$(BIN)/python benchmarks/step_time.py -o out/step_time.json

# Needs root, for a memory control group and a swap file: half an hour, 8 GB of free disk.
bench-limit: setup
	$(BIN)/python benchmarks/memory_limit.py -o out/memory_limit.json

bench-shapes: setup
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --editable '.[bench-train]'
	$(BIN)/python benchmarks/changing_shapes.py -o out/changing_shapes.json

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

# The tests of the C++ parts, for errors of memory and undefined behaviour, and for races. Needs CMake,
# a C++ compiler with its sanitizers, and no Python.
sanitize: sanitize-asan sanitize-tsan

sanitize-asan: SANITIZERS := address,undefined
sanitize-tsan: SANITIZERS := thread
sanitize-asan sanitize-tsan: sanitize-%:
	cmake -S . -B build/$* -D PENSTOCK_TESTS=ON -D CMAKE_BUILD_TYPE=RelWithDebInfo \
	  -D CMAKE_CXX_FLAGS="-fsanitize=$(SANITIZERS) -fno-sanitize-recover=all"
	cmake --build build/$* --parallel 2
	ctest --test-dir build/$* --output-on-failure
