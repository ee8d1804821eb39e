# Everything a newcomer needs: `make demo` and `make test` set up a virtual environment in this folder first.
# Another Python or other versions, in an environment of their own: see CONTRIBUTING.md.
PYTHON ?= python3
VENV := .venv
CONSTRAINTS := constraints.txt
BIN := $(VENV)/bin
READY := $(VENV)/.ready
C := $(filter-out %/declared.h,$(wildcard asyncoll/_core/*.[ch] tests/stand_in/*.cpp))

# The fast tests of `make check`: unit tests, and the laws in a few worlds. `make test` runs everything.
FAST := $(addprefix tests/,algorithms/dense/test_collectives.py::test_every_dtype_and_reduction \
	algorithms/dense/test_collectives.py::test_split_orders_by_key_and_colours_do_not_mix \
	algorithms/rounds/test_engine.py algorithms/rounds/test_persistent.py algorithms/seam/test_backend.py \
	algorithms/sparse/test_selection.py project/test_architecture.py project/test_docstrings.py rpc/test_codec.py \
	runtime/test_interruption.py runtime/test_liveness.py runtime/test_matching.py runtime/test_pending.py \
	runtime/test_schedule.py tensors/test_flat.py testing/laws/test_laws.py::test_a_few_worlds_of_each_kind \
	testing/test_worlds.py training/test_replicas.py transport/memory/test_arena.py transport/messages/test_slots.py \
	transport/test_transport.py transport/test_wire.py world/test_environment.py world/test_joining.py)

# The tests that use memory between processes, for a second run with another core.
SHARING := $(addprefix tests/,algorithms/test_shared_memory.py algorithms/rounds/test_wait_avoiding.py \
	rpc/test_in_memory.py testing/laws/test_laws.py transport/memory/test_arena.py) \
	-k "arena or shm or few_worlds or (rpc and in_memory and not twin)"

# The tests start hundreds of interpreters, and each compiles the package again where Python writes no bytecode.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-python gpu-stand-in torch-tests screen-tests check sanitize core format style lint docs wheel benchmarks benchmarks-age compatibility clean

demo: core
	$(BIN)/python -m trainers demo

# Without -X dev: asyncio's debug mode takes a third of the time, and checks nothing in a world on one loop. Tests of
# programs with several threads turn it on. Without PYTHONMALLOC=debug: it takes a tenth of the time, and `make sanitize`
# checks the memory of the core more strictly. Warnings are errors in any case. mypy uses one core, so it runs beside the
# tests. A third worker uses the processors while tests wait.
test: style core
	@$(BIN)/mypy & types=$$!; \
	$(BIN)/python -m pytest -n 3 --dist worksteal; tests=$$?; \
	wait $$types || { echo "mypy found errors: see above"; exit 1; }; \
	exit $$tests

test-python: core
	ASYNCOLL_CORE=python $(BIN)/python -m pytest -q -n 2 --dist worksteal $(SHARING)

# The acceptance of GPU staging, with a stand-in for CUDA instead of a GPU. It needs a compiler of C++.
CHECKS := --all
GPU_RANKS := 2,3
gpu-stand-in: core
	$(BIN)/python tests/stand_in python benchmarks/gpu.py $(CHECKS) --ranks $(GPU_RANKS) --out build/stand_in

# PyTorch's own distributed tests and ours, with Gloo and with asyncoll. See torch_tests/README.md.
torch-tests: $(VENV)/.extra-frameworks core
	$(BIN)/python -m torch_tests

check: lint core
	$(BIN)/python -m pytest -q -m "not slow" -n 2 --dist worksteal $(FAST)

# Tests under the sanitizers of the C compiler.
sanitize: $(READY)
	BIN=$(abspath $(BIN)) .ci/sanitize

# Builds the compiled core if a file in C, or a declaration that it is generated from, has changed. Without a compiler this prints a warning.
core: $(READY)
	$(BIN)/python hatch_build.py

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(C)

style: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(C)

lint: style
	$(BIN)/mypy

# The wheel for this architecture, which needs no compiler where it is installed, and the source distribution, in dist/.
wheel: $(VENV)/.extra-release
	rm -rf build/wheel dist
	ASYNCOLL_BUILD_CORE=1 $(BIN)/python -m build --outdir build/wheel
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl
	cp build/wheel/*.tar.gz dist

docs: core
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python docs/_site.py

# The site in a browser. It needs Debian's chromium and chromium-driver.
screen-tests: $(VENV)/.extra-screen core
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python -m pytest -q screen_tests

# Measures the claims of docs/benchmarks.md beside their peers, and writes the page: two hours, on a machine that does
# nothing else; several hosts need root. `make benchmarks CLAIM=rpc` measures one.
CLAIM :=
benchmarks: $(VENV)/.extra-peers core
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python benchmarks/page.py renew $(CLAIM)

# Lists the records that are older than the code that they measure, and fails if there are any: a part of a release.
benchmarks-age: $(READY)
	$(BIN)/python benchmarks/page.py age

# Runs asyncoll in an environment for each row of docs/reference/compatibility.md, and writes the page: an hour, and two
# gigabytes at a time. `make compatibility ROWS="1 5"` renews two rows.
ROWS :=
compatibility: $(VENV)/.extra-compatibility
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python compatibility/run.py renew $(ROWS)

$(READY): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[dev]'
	touch $@

# What an extra of pyproject.toml needs beside the set-up for development.
$(VENV)/.extra-%: $(READY)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[$*]'
	touch $@

clean:
	rm -rf $(VENV) .cache build dist asyncoll/_core/*.abi3.so asyncoll/_core/declared.h .mypy_cache .ruff_cache .pytest_cache runs
