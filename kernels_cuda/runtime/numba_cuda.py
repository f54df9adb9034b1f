"""The only module that imports Numba's CUDA target (numba-cuda is in maintenance and may have to be
replaced).

Numba compiles a kernel to PTX, once per architecture and set of types. It is launched like the kernels of the
`.cu` files, since Numba's own launcher costs 15 to 20 us of host time per launch (1340 us for a plan, with
its array views). With NUMBA_ENABLE_CUDASIM=1 the same kernels run in Numba's simulator on NumPy arrays,
without a GPU.

Kernels take flat pointers, integers, and named tuples of those, whose fields become separate parameters.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import operator
import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fp8moe.records import DeviceArray

try:
    cuda: Any = importlib.import_module("numba.cuda")
except Exception as error:  # NumPy 2.5 causes an AttributeError deep inside
    raise ImportError(
        f"Numba's CUDA target cannot be imported ({type(error).__name__}: {error}); "
        "pip install 'fp8moe[cuda13]', which asks for numpy<2.5"
    ) from error
SIMULATED = bool(importlib.import_module("numba.core.config").ENABLE_CUDASIM)
driver: Any = None if SIMULATED else importlib.import_module("fp8moe.kernels_cuda.runtime.driver")
launch: Any = None if SIMULATED else importlib.import_module("fp8moe.kernels_cuda.runtime.launch")
BLOCK = 4 if SIMULATED else 512  # threads per block; the simulator starts a Python thread for each
types: Any = importlib.import_module("numba.core.types")
uint32, uint64, int32 = types.uint32, types.uint64, types.int32

Kernel = Callable[..., None]
Kind = str | tuple[type, tuple[Any, ...]]
_compiling = threading.local()  # .capability: of the device this thread compiles for


def _instruction(ptx: str) -> Any:
    """A device function of one PTX instruction from sm_90 on; a no-op before and in the simulator."""
    if SIMULATED:
        return lambda: None
    ir = importlib.import_module("llvmlite.ir")

    def instruction(typing: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            if _compiling.capability >= (9, 0):
                builder.call(
                    ir.InlineAsm(ir.FunctionType(ir.VoidType(), []), ptx, "~{memory}", side_effect=True), []
                )
            return context.get_dummy_value()

        return types.void(), generate

    return importlib.import_module("numba.cuda.extending").intrinsic(instruction)


# The same as in ptx.cuh.
pdl_wait = _instruction("griddepcontrol.wait;")
pdl_launch_dependents = _instruction("griddepcontrol.launch_dependents;")


def inlined(function: Kernel) -> Any:
    """A device function. Numba inlines it before type inference, so that it is compiled for the kernel's
    architecture; a separate device function would be compiled for the current device. The simulator calls
    it directly: its device functions take the simulated ``cuda`` from their module when the first thread
    exits."""
    return function if SIMULATED else cuda.jit(function, device=True, inline="always")


def shared_limit() -> int:
    """Maximum bytes of shared memory per thread block."""
    return 1 << 30 if SIMULATED else launch.shared_limit()


def run(kernel: Kernel, blocks: int, shared_bytes: int, *arguments: Any) -> None:
    """Launches thread blocks of BLOCK threads on the current stream. None is a null pointer."""
    if blocks == 0:
        return
    if SIMULATED:
        views = [_flat(a) for a in arguments]
        cuda.jit(kernel)[blocks, BLOCK, 0, shared_bytes](*views)
        return
    device = launch.current_device()
    key = (kernel, device, *[a.dtype for a in arguments if isinstance(a, DeviceArray)])
    loaded = _loaded.get(key) or _loaded.setdefault(key, load_numba_kernel(kernel, arguments, device))
    parameters = [v for a in arguments for v in (a if isinstance(a, tuple) else (a,))]
    launch.launch_loaded(loaded, blocks, BLOCK, shared_bytes, parameters)


_loaded: dict[Any, Any] = {}  # by kernel, device and dtypes; a kernel always gets the same named tuples


def load_numba_kernel(kernel: Kernel, arguments: tuple[Any, ...], device: int) -> Any:
    """The kernel for these argument types."""

    def run(function: Callable[..., Any], *given: Any) -> Any:
        # assembling PTX may call the driver, in a thread that has no device yet
        return launch.run_on(device, driver.while_capturing, function, *given)

    code = requested(kernel, tuple(map(kind_of, arguments)), driver.architecture(device), run)
    return launch.Kernel(code, kernel.__name__, device)


def kind_of(argument: Any) -> Kind:
    """Type of an argument: a pointer's dtype name (None: int32), "i" for an integer, or a named tuple's class
    and the kinds of its fields."""
    if isinstance(argument, tuple):
        return type(argument), tuple(map(kind_of, argument))
    if argument is None:
        return "int32"
    return "i" if isinstance(argument, int) else argument.dtype.name


def scratch(*sizes: int) -> list[Any]:
    """Uninitialised int32 arrays, in one allocation."""
    if SIMULATED:
        return [np.empty(size, np.int32) for size in sizes]
    memory = launch.scratch((sum(sizes),), np.int32)
    starts = itertools.accumulate(sizes, initial=0)
    return [memory.part(start, (size,)) for start, size in zip(starts, sizes, strict=False)]


def as_words(x: Any) -> Any:
    """Views an array of bytes as 8-byte words."""
    if SIMULATED:
        return x.reshape(-1).view(np.uint64)
    return x.part(0, (x.size // 8,), np.dtype(np.uint64))


def cubin(kernel: Kernel, kinds: tuple[Kind, ...], architecture: str) -> bytes:
    """Machine code of a kernel, whose entry point has the kernel's own name. kinds: its arguments' types by
    `kind_of`. Needs no GPU."""
    return requested(kernel, kinds, architecture).result()  # type: ignore[no-any-return]


def requested(
    kernel: Kernel, kinds: tuple[Kind, ...], architecture: str, run: Callable[..., Any] = operator.call
) -> Any:
    """The `Code` of a kernel. run: makes a call, in the thread that compiles."""
    from fp8moe.kernels_cuda.runtime import compiler

    version = importlib.import_module("numba_cuda").__version__
    source = Path(inspect.getfile(kernel)).read_bytes()
    key = repr((source, BLOCK, kernel.__name__, kinds, architecture, version))
    compile = partial(run, _compile, kernel, kinds, architecture)
    name = kernel.__name__
    return compiler.requested_by(compiler.numba_threads, name, name, architecture, key, compile)


def _compile(kernel: Kernel, kinds: tuple[Kind, ...], architecture: str) -> bytes:
    signature = types.void(*(_type(k) for k in kinds))
    capability = _compiling.capability = _capability(architecture)
    options = {"device": False, "abi": "numba", "launch_bounds": BLOCK, "output": "ptx"}
    try:
        ptx, _ = cuda.compile(kernel, signature, cc=capability, **options)
    except AttributeError as error:  # numba-cuda 0.30 needs row_stack, removed in NumPy 2.5
        raise ImportError(
            f"Numba's CUDA target does not work with NumPy {np.__version__} ({error}); "
            "pip install 'fp8moe[cuda13]', which asks for numpy<2.5"
        ) from error
    mangled = re.search(r"\.entry (\w+)\(", ptx).group(1)  # type: ignore[union-attr]
    core = importlib.import_module("cuda.core")
    options = core.ProgramOptions(arch=architecture)
    program = core.Program(ptx.replace(mangled, kernel.__name__), "ptx", options)
    return bytes(program.compile("cubin").code)


def _capability(architecture: str) -> tuple[int, int]:
    number = re.sub(r"\D", "", architecture)
    return int(number[:-1]), int(number[-1])


def _type(kind: Kind) -> Any:
    if isinstance(kind, tuple):
        named, fields = kind
        return types.BaseTuple.from_types(tuple(map(_type, fields)), named)
    if kind == "i":
        return types.int64
    return types.CPointer(types.uint8 if kind == "bool" else getattr(types, kind))


def _flat(argument: Any) -> Any:
    if isinstance(argument, tuple):
        return type(argument)(*map(_flat, argument))
    if isinstance(argument, np.ndarray):
        return argument.reshape(-1).view(np.uint8) if argument.dtype == bool else argument.reshape(-1)
    return np.empty(0, np.int32) if argument is None else argument
