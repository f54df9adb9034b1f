"""The CUDA backend on a CPU: the unmodified launchers and kernels, compiled by g++ with `cuda.h`.

The threads of a block, or of a cluster of blocks, run one at a time, so test cases must be small. A seed
determines the order of threads and the time of asynchronous copies (`schedule.h`). A launch that deadlocks,
violates the rules of a barrier or accesses a misaligned address raises `LaunchFailure`, which contains the
seed. The harness does not reproduce the hardware's rounding or speed.
"""

import ctypes
import fcntl
import functools
import hashlib
import operator
import os
import random
import re
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
from cases import SEED, poison

from fp8moe.kernels_cuda.runtime import compiler
from fp8moe.records import DeviceArray
from fp8moe.runtime import dispatch, interop
from fp8moe.runtime.disk_cache import make_folder
from fp8moe.runtime.record_trees import map_arrays

HERE = Path(__file__).parent
SCHEDULER = "schedule.h", "schedule.cpp"
SIGNATURE = re.compile(r'extern "C" __global__ void((?:\s+__\w+__\([^{]*?\))*)\s+(\w+)\(([^{]*?)\) \{')
available = shutil.which("g++") is not None
COMPILER = subprocess.run(["g++", "--version"], capture_output=True).stdout if available else b""

OPTIONS = ["-std=c++20", "-O1", "-ffp-contract=off", "-fpermissive", "-w", "-fPIC", "-pthread"]
# otherwise the shared memory of variants, in templates, would be one object
OPTIONS.append("-fno-gnu-unique")
# Ubuntu's g++ defines it: glibc then takes a switch to another thread's stack for a longjmp into a finished
# function, and aborts
OPTIONS.append("-U_FORTIFY_SOURCE")
CHECKED = "-fsanitize=alignment"  # schedule.h has what it calls
ALIGNMENT_CHECKED = float(os.environ.get("FP8MOE_ALIGNMENT_CHECKED", 1 / 3))  # the share of variants


def options_of(source, defines):
    """g++'s options. Accesses are checked for alignment in a third of the variants, which the run's seed
    selects, as the check takes 60 % of the compile time and 40 % of a test's; never in GEMMs by wgmma, whose
    launchers require 16 bytes."""
    selected = random.Random(f"{SEED} {source} {defines}").random() < ALIGNMENT_CHECKED
    return [*OPTIONS, CHECKED] if selected and "wgmma" not in source else OPTIONS


def folder_of(text, options, make):
    """The folder that make(folder) fills, once for all processes of a test run; a text and g++'s options
    identify it. Set FP8MOE_TEST_CACHE_DIR to keep it for later runs."""
    key = hashlib.sha256(repr((text, options, COMPILER)).encode()).hexdigest()[:32]
    folder = Path(os.environ["FP8MOE_TEST_CACHE_DIR"]) / key
    make_folder(folder)  # what lies in it is loaded
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be making it
        if not (folder / "made").exists():
            make(folder)
            (folder / "made").touch()
    return folder


@functools.cache
def scheduler(*options):
    """A folder with `schedule.h`, precompiled with g++'s options, and `schedule.o`."""

    def make(folder):
        shutil.copy(HERE / "schedule.h", folder)
        subprocess.run(["g++", *options, "-x", "c++-header", "schedule.h"], cwd=folder, check=True)
        subprocess.run(
            ["g++", *OPTIONS, "-c", HERE / "schedule.cpp", "-o", "schedule.o"], cwd=folder, check=True
        )

    return folder_of([(HERE / name).read_text() for name in SCHEDULER], options, make)


@functools.cache
def library(source, defines):
    """One compiled source, with a C function ``run_NAME`` for each of its kernels."""
    options = options_of(source, defines)
    macros = [f"-D{d}" for d in defines]
    files = [*compiler.headers(), compiler.files()[f"{source}.cu"], *HERE.glob("*.cuh")]
    texts = {path.name: path.read_text() for path in [*files, HERE / "cuda.h"]}

    def make(folder):
        for name, text in texts.items():
            (folder / name).write_text(text)
        preprocess = ["g++", "-std=c++20", "-E", "-P", "-DONLY_NAMES", *macros]
        compiled = subprocess.run(
            [*preprocess, "-include", "cuda.h", "-x", "c++", f"{source}.cu"],
            cwd=folder,
            capture_output=True,
            text=True,
        ).stdout
        runs = [
            f'extern "C" const char* run_{name}(unsigned seed, unsigned gx, unsigned gy, unsigned threads,'
            f" unsigned shared, {parameters}) {{\n"
            f"  return run_grid(seed, {'CLUSTER' if 'cluster_dims' in attributes else 1}, gx, gy, threads,"
            f" shared, [=] {{ {name}({', '.join(names(parameters))}); }});\n}}\n"
            for attributes, name, parameters in SIGNATURE.findall(texts[f"{source}.cu"])
            if f" {name}(" in compiled  # definitions exclude some kernels
        ]
        (folder / "all.cpp").write_text(f'#include "cuda.h"\n#include "{source}.cu"\n' + "".join(runs))
        scheduled = scheduler(*options)
        command = ["g++", *options, *macros, "-I", scheduled, "-include", "schedule.h"]
        subprocess.run([*command, "-c", "all.cpp", "-o", "all.o"], cwd=folder, check=True)
        # without CHECKED, for which the linker would want GCC's library; symbols are the library's own, also
        # where Python exports one of the same name
        link = ["g++", "-shared", "-pthread", "-Wl,-Bsymbolic", "all.o", scheduled / "schedule.o"]
        subprocess.run([*link, "-o", "all.so"], cwd=folder, check=True)

    text = sorted(texts.items()), source, *((HERE / name).read_text() for name in SCHEDULER)
    return ctypes.CDLL(str(folder_of(text, (*options, *macros), make) / "all.so"))


class LaunchFailure(AssertionError):
    """A launch that deadlocks, violates the rules of a barrier or accesses a misaligned address; the message
    names the thread and the line."""


seeds = random.Random(SEED)  # seeds of the launches' schedules; conftest.py resets it for every test


def next_seed():
    """FP8MOE_SCHEDULE if it is set, to repeat a failure; FP8MOE_TEST_SEED repeats its inputs."""
    seed = seeds.getrandbits(32)
    return int(os.environ.get("FP8MOE_SCHEDULE", seed))


def names(parameters):
    return [re.search(r"(\w+)\s*$", p).group(1) for p in parameters.split(",")]


class Array:
    """A NumPy array that reports a CUDA device."""

    def __init__(self, host):
        self.host = np.ascontiguousarray(host)
        self.device = 0

    def __getitem__(self, index):
        return Array(self.host[index])

    def reshape(self, shape):
        return Array(self.host.reshape(shape))


class Device(interop.Framework):
    always_writable = True

    def view(self, x, name):
        return raw(x.host, x.device)

    def empty(self, spec, device):
        host = np.empty(spec.shape, spec.dtype)
        host.view(np.uint8).fill(poison(spec.dtype)) if host.ndim else None
        return raw(host)

    def wrap(self, value):
        return Array(whole_or_part(value))


def raw(host, device=0):
    return DeviceArray(host.ctypes.data, host.shape, host.dtype, device, host)


def whole_or_part(value):
    """Packed arrays are parts of their owner's memory."""
    owner = value.owner
    if owner.shape == tuple(value.shape) and owner.dtype == value.dtype:
        return owner
    start = value.ptr - owner.ctypes.data
    part = owner.reshape(-1).view(np.uint8)[start : start + value.nbytes]
    return part.view(value.dtype).reshape(value.shape)


def upload(value):
    return map_arrays(lambda a: Array(a), value)


def download(value):
    return map_arrays(lambda a: a.host, value)


class Runtime:
    """The parts of CUDA's runtime that driver.py and launch.py use."""

    memcpyHostToDevice = memcpyDeviceToHost = eventDisableTiming = 0

    def __init__(self):
        self.bound_threads = []  # threads that have requested a device's context
        self.waits = []  # (stream, stream that it waits for)

    getDevice = int  # 0, without a Python call, as in CuPy

    def setDevice(self, device):
        self.bound_threads.append(threading.get_ident())

    def memcpyAsync(self, to, source, size, kind, stream):
        ctypes.memmove(to, source, size)

    def streamSynchronize(self, stream): ...

    def streamIsCapturing(self, stream):
        return False

    def eventCreateWithFlags(self, flags):
        return [None]

    def eventRecord(self, event, stream):
        event[0] = stream

    def streamWaitEvent(self, stream, event):
        self.waits.append((stream, event[0]))

    def eventDestroy(self, event): ...


class Config(ctypes.Structure):
    """The beginning of a CUlaunchConfig, to the stream."""

    _fields_ = [(n, ctypes.c_uint) for n in ("x", "y", "z", "block", "block_y", "block_z", "shared")]
    _fields_ += [("stream", ctypes.c_int64)]


def driver_function(*arguments):
    return ctypes.CFUNCTYPE(ctypes.c_int, *arguments)


class Driver:
    """The functions of CUDA's driver that make launches, as functions of C.

    kernels: by handle. error: what the last one that failed has raised."""

    def __init__(self):
        self.kernels, self.error, self._running = {}, None, threading.Lock()
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        words = ctypes.POINTER(ctypes.c_uint64)
        boxes = ctypes.POINTER(ctypes.c_uint32)
        encode = pointer, integer, integer, pointer, words, words, boxes, boxes, *(integer,) * 4
        self._held = (
            driver_function(ctypes.POINTER(Config), pointer, words, pointer)(self._guarded(self._launch)),
            driver_function(pointer, ctypes.c_ubyte, ctypes.c_size_t, pointer)(self._guarded(self._fill)),
            driver_function(*encode)(self._guarded(self._encode)),
        )
        self.functions = tuple(ctypes.cast(function, pointer).value for function in self._held)

    def _guarded(self, body):
        def run(*arguments):
            try:
                with self._running:  # kernels on the CPU use global variables
                    body(*arguments)
            except BaseException as error:
                self.error = error
                return 1
            return 0

        return run

    def _launch(self, config, handle, parameters, _):
        kernel, c = self.kernels[handle], config.contents
        values = [kind.from_address(at) for kind, at in zip(kernel.kinds, parameters, strict=False)]
        watch(kernel.name, c.x, values)
        kernel(c.x, c.y, c.block, c.shared, *values)

    def _fill(self, address, value, size, stream):
        watch("memset", 0, [])
        ctypes.memset(address, value, size)

    def _encode(self, to, kind, rank, address, dimensions, strides, box, steps, *_):
        columns, rows = dimensions[:2]
        assert (rank, strides[0], box[0], steps[:2]) == (2, columns, 128, [1, 1])
        if not rows * columns:
            raise RuntimeError("a tensor map of an empty array, which the driver rejects")
        assert to % 64 == 0
        TensorMap.from_address(to).__init__(address, rows, columns, box[1])


def watch(name, x, values):
    """Called before each launch with the kernel's name ("memset"), its blocks in x and its parameters."""


def install(monkeypatch, shared_limit=227 << 10, architecture="sm_90a", multiprocessors=2):
    """Until the end of the test, `Array` is a device array whose kernels run here. The seed of the run draws
    whether Python or Numba runs the loop of launches."""
    from fp8moe.kernels_cuda.runtime import driver, launch, replay

    functions = Driver()

    def load_kernel(source, name, defines, device):
        path = compiler.files()[f"{source}.cu"]
        defines = defines or compiler.variants(path)[0]
        number = "".join(filter(str.isdigit, architecture))
        chip = () if architecture == "sm_90a" else (f"__CUDA_ARCH__={number}0",)
        function = getattr(library(source, (*defines, *chip)), f"run_{name}")
        (parameters,) = {p for _, n, p in SIGNATURE.findall(path.read_text()) if n == name}
        kernel = Kernel(name, function, map(kind_of, parameters.split(",")))
        return functions.kernels.setdefault(kernel.ptr, kernel)

    def error_of(plan, *status):
        error, functions.error = functions.error, None
        return error

    family = Device()
    dispatch.clear_recordings()
    others = interop.framework_of_type
    monkeypatch.setattr(interop, "framework_of_type", lambda kind: family if kind is Array else others(kind))
    monkeypatch.setattr(launch, "load_kernel", functools.cache(load_kernel))
    monkeypatch.setattr(replay.LOOP, "run", seeds.choice((replay.loop, replay.LOOP.compiled)))
    monkeypatch.setattr(replay.Plan, "_error", error_of)
    monkeypatch.setattr(driver, "functions", functools.cache(lambda: functions.functions))
    runtime = Runtime()
    monkeypatch.setattr(driver, "runtime", runtime)
    monkeypatch.setattr(driver, "while_capturing", operator.call)
    monkeypatch.setattr(driver, "architecture", lambda device: architecture)
    monkeypatch.setattr(driver, "has_dependent_launch", lambda device: True)
    monkeypatch.setattr(driver, "multiprocessors", lambda device: multiprocessors)
    monkeypatch.setattr(driver, "shared_limit", lambda device: shared_limit)
    return runtime


class Kernel:
    """The parts of a loaded kernel that launch.py uses. kinds: its parameters, as types of C."""

    parameters, shared = None, 1 << 30

    def __init__(self, name, function, kinds=()):
        self.name, self.function, self.kinds = name, function, [*kinds]
        self.ptr = ctypes.cast(function, ctypes.c_void_p).value
        function.restype = ctypes.c_char_p

    def __setattr__(self, name, value):
        if name == "parameters":  # the driver reads as many as the kernel has, whatever it is given
            words = ["f4x" if kind is ctypes.c_float else "q" for kind in self.kinds if kind is not TensorMap]
            assert value.format == "".join(words), f"{self.name}: parameters {value.format}"
        super().__setattr__(name, value)

    def __call__(self, *arguments):
        seed = next_seed()
        if reason := self.function(seed, *arguments):
            raise LaunchFailure(f"{self.name}: {reason.decode()}. FP8MOE_SCHEDULE={seed} repeats it.")


class TensorMap(ctypes.Structure):
    _fields_ = [("codes", ctypes.c_int64), *((n, ctypes.c_int64) for n in ("rows", "columns", "box"))]
    _fields_ += [("unused", ctypes.c_int64 * 12)]


def kind_of(parameter):
    """The type of a kernel's parameter, given by its declaration."""
    if "TensorMap " in parameter:
        return TensorMap
    return ctypes.c_float if re.match(r"\s*(const )?float \w", parameter) else ctypes.c_int64
