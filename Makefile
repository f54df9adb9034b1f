# Two commands: `make test` and `make demo`. Each makes its own environment on a fresh machine.
PYTHON ?= python3

# A machine with an NVIDIA driver gets the CUDA backend too, for the driver's CUDA version.
CUDA := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: \(1[23]\).*/,cuda\1/p')

.PHONY: test test-minimum test-multigpu lint types-library types-client docs build demo sanitize clean

# pip would compile all installed modules to bytecode, which takes longer than the rest of an installation (178
# instead of 80 s), and a third of them is imported. Python compiles those at their first import, also where the
# environment turns that off: the tests start hundreds of processes.
INSTALL := -m pip install --quiet --no-compile
export PYTHONDONTWRITEBYTECODE :=

# One process more than cores, since tests wait for ranks that they start (694 s instead of 742 on two cores), and
# four at most (1 to 2 GB each). NumPy's and torch's own threads would take each other's time.
PROCESSES = $(shell $(PYTHON) -c "import os; print(min(os.cpu_count() + 1, 4))")
test: .venv/ready lint
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n $(PROCESSES) --dist worksteal

# The lowest versions that pyproject.toml claims for what runs on a CPU, and the operations with them; with the
# lowest torch, compiled code differs most. Adapters of transformers, Megatron-Core and torchtitan need more than
# their lowest version to be tested. Warnings are errors in other runs only: old releases warn of what new ones
# of their own dependencies deprecate.
MINIMUM := torch jax bench
test-minimum: .venv-minimum/ready
	OMP_NUM_THREADS=1 .venv-minimum/bin/python -m pytest -q -W default -n $(PROCESSES) $(addprefix tests/test_,$(addsuffix .py, \
	  plan permute quantize transpose swiglu grouped_gemm router moe torch_ops torch_moe torch_training \
	  torch_weights torch_functional transformers jax_ops cli))

# On a machine with several GPUs, in an environment that has the CUDA extra. One test after another took 194 s on two
# H200s: 24 s to compile all kernels for the first time, 31 s for each lost rank, 37 s to import all other test files.
# JAX would take most of a GPU's memory from the tests beside it, and pytest-benchmark, where it is installed, warns
# of xdist, which is an error here.
test-multigpu:
	OMP_NUM_THREADS=1 XLA_PYTHON_CLIENT_PREALLOCATE=false timeout 300 $(PYTHON) -m pytest -p no:benchmark -n 4 \
	  --dist worksteal -m multigpu --durations=0 $(shell grep -l 'mark\.multigpu' tests/test_*.py)

# The source archive and the wheel, as a package index takes them.
build: .venv-build/ready
	rm -rf dist
	.venv-build/bin/python -m build
	.venv-build/bin/python -m twine check --strict dist/*

# A user's program has its own options, not this project's.
CLIENT := --strict --config-file= --follow-imports=silent --ignore-missing-imports --cache-dir .mypy_cache/client
lint: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	$(MAKE) --no-print-directory -j2 -O types-library types-client
	find kernels_cuda tests -name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name '*.cpp' | xargs -r .venv/bin/clang-format --dry-run --Werror

# Each takes a core for 50 s.
types-library:
	.venv/bin/mypy
types-client:
	.venv/bin/mypy $(CLIENT) tests/typed_client.py

# The documentation site, into site/: a broken link or an unknown name fails.
docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict

# On a machine with a GPU, in an environment that has the CUDA extra: the tests marked `sanitize`. Others time out
# under the tools or run other programs; Numba's probing of the driver is no error of ours. ARRIVING=32: racecheck
# does not know that a warp is behind the lane that arrives at a barrier for it.
SANITIZER := compute-sanitizer --report-api-errors no --error-exitcode 9
sanitize:
	for tool in memcheck racecheck initcheck; do \
	  FP8MOE_NVRTC_OPTIONS=-DARRIVING=32 $(SANITIZER) --tool $$tool $(PYTHON) -m pytest -q -x -m sanitize \
	    $(shell grep -lE '^from backends import|mark\.sanitize' tests/test_*.py) || exit 1; \
	done

demo: .venv-demo/ready
	.venv-demo/bin/python -m fp8moe demo $(DEMO)

# torch is pinned and goes first, so that no extra pulls another build of it
.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/python $(INSTALL) --upgrade pip
	.venv/bin/python $(INSTALL) torch==2.13.0
	.venv/bin/python $(INSTALL) -e '.[dev]'
	touch $@

# setuptools warns of any editable installation
.venv-demo/ready: export PYTHONWARNINGS := ignore
.venv-demo/ready: pyproject.toml
	$(PYTHON) -m venv .venv-demo
	.venv-demo/bin/python $(INSTALL) --upgrade pip
	.venv-demo/bin/python $(INSTALL) -e '.[bench$(CUDA)]'
	touch $@

.venv-minimum/ready: pyproject.toml tests/minimum.py
	$(PYTHON) -m venv .venv-minimum
	.venv-minimum/bin/python $(INSTALL) --upgrade pip
	$(PYTHON) tests/minimum.py $(MINIMUM) > .venv-minimum/constraints.txt
	.venv-minimum/bin/python $(INSTALL) -c .venv-minimum/constraints.txt -e '.[torch,jax,bench]' \
	  accelerate hypothesis pytest pytest-xdist transformers
	touch $@

.venv-build/ready:
	$(PYTHON) -m venv .venv-build
	.venv-build/bin/python $(INSTALL) --upgrade build pip twine
	touch $@

clean:
	rm -rf .venv .venv-build .venv-demo .venv-minimum build dist site *.egg-info
