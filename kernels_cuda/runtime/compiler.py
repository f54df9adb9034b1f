"""Compiles `.cu` files to machine code with NVRTC: no nvcc, no build step, and for `compile` no GPU.

`requested` has threads compile one source for one architecture, cached on disk, and `finish` waits for what
a call launches: a dry run requests all of its kernels before the first is needed.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import heapq
import importlib
import importlib.util
import itertools
import logging
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from fp8moe.runtime.disk_cache import locked_entry, read_entry, write_entry
from fp8moe.runtime.workers import Task, Workers

_log = logging.getLogger(__name__)
_FOLDER = Path(__file__).resolve().parents[1]
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a")
# -fmad=false: a * b + c must round twice, as the reference does; CuPy would add -ftz=true by default.
# FP8MOE_NVRTC_OPTIONS adds options for debugging.
OPTIONS: tuple[str, ...] = (
    *("--std=c++17", "-fmad=false", "-ftz=false", "-prec-div=true", "--ptxas-options=-v"),
    *os.environ.get("FP8MOE_NVRTC_OPTIONS", "").split(),
)


# Sets of definitions that a source is compiled with, each when first requested.
_FORMATS: list[tuple[str, ...]] = [(f"FMT={fmt}", f"MX={mx}") for fmt in (0, 1) for mx in (0, 1)]
_KINDS = ("BF16", "F16", "F32")
_CONVERSIONS: list[tuple[str, ...]] = [(f"KIND={kind}", *formats) for kind in _KINDS for formats in _FORMATS]
_UNGATED = (
    *(("BARE=1", f"ACT={act}", "GATED=0") for act in ("GELU", "GELU_TANH", "RELU2")),
    *((f"BARE={bare}", "GATED=0") for bare in (1, 0)),
)
VARIANTS: dict[str, list[tuple[str, ...]]] = {
    "adamw": [
        (f"KIND={kind}", f"STATE={state}", f"WHOLE={whole}")
        for whole in (1, 0)
        for kind in ("BF16", "F32")
        for state in ("BF16", "F32")
    ],
    "expert_parallel": [(*c, f"PEERS={n}") for c in _CONVERSIONS if "MX=0" in c for n in (8, 1)],
    "grouped_gemm_mma": [
        *((f"KIND={kind}", f"TRANSPOSED={t}") for kind in ("BF16", "F16") for t in (0, 1)),
        *((f"A_FMT={a}", f"B_FMT={b}") for a in (0, 1) for b in (0, 1)),
    ],
    "grouped_gemm_wgrad_mma": [
        *((f"KIND={kind}",) for kind in ("BF16", "F16")),
        *((f"A_FMT={a}", f"B_FMT={b}", f"BLOCKS={c}") for a in (0, 1) for b in (0, 1) for c in (1, 0)),
    ],
    "grouped_gemm_wgmma": [
        (f"A_FMT={a}", f"B_FMT={b}", *other)
        for other in ((), ("GATHER=1",), ("GATHER=1", "BIAS=1"), ("BIAS=1",))
        for a in (0, 1)
        for b in (0, 1)
    ],
    "grouped_gemm_wgmma16": [
        (f"KIND={kind}", f"TRANSPOSED={transposed}", f"STAGES={stages}")
        for stages in (4, 3)
        for kind in ("BF16", "F16")
        for transposed in (0, 1)
    ]
    + [("KIND=BF16", f"TRANSPOSED={transposed}", "ADDEND=1", "STAGES=3") for transposed in (1, 0)],
    "grouped_gemm_wgrad_wgmma16": [(f"KIND={kind}", "STAGES=3") for kind in ("BF16", "F16")],
    "grouped_gemm_wgrad_wgmma": [
        (f"A_FMT={a}", f"B_FMT={b}", f"BLOCKS={blocks}") for a in (0, 1) for b in (0, 1) for blocks in (0, 1)
    ],
    "permute": [(), ("BLOCKED=1",)],
    "quantize": [*_CONVERSIONS, *((*c, "BLOCKED=1") for c in _CONVERSIONS if "MX=1" in c)],
    "swiglu": [
        *((*c, f"BARE={bare}") for c in _CONVERSIONS for bare in (1, 0)),
        *(
            (*c, f"BARE={bare}", f"ACT={act}")
            for c in _CONVERSIONS[:1]
            for bare in (1, 0)
            for act in ("GELU", "GELU_TANH")
        ),
        *((*_CONVERSIONS[0], *ungated) for ungated in _UNGATED),
    ],
    "swiglu_transpose": [
        *((*c, f"BARE={bare}") for c in _CONVERSIONS if "MX=0" in c for bare in (1, 0)),
        *(
            (*_CONVERSIONS[0], *activation, *of_layer)
            for of_layer in ((), ("SUMS=1",), ("CODED=1",), ("CODED=1", "SUMS=1"))
            for activation in (
                *(("BARE=1", f"ACT={act}") for act in ("GELU", "GELU_TANH")),
                *_UNGATED,
                *((f"BARE={bare}",) for bare in (1, 0) if of_layer),
            )
        ),
    ],
    "router": [(f"PER_LANE={n}", f"LOSSES={losses}") for n in (4, 1, 8, 32) for losses in (0, 1)],
    "transpose": [
        (*formats, *blocked, f"TILE_TARGET={tile}")
        for blocked in ((), ("BLOCKED=1",))
        for formats in _FORMATS
        for tile in (0, 1)
        if not blocked or "MX=1" in formats
    ],
}


# The oldest NVRTC that the tests compile the sources with, and the first that knows every architecture
# above. From 12.1 on, older ones compile for sm_90a (12.0 has neither st.async nor vectors in red), with
# spills before 12.8.
OLDEST_NVRTC = (12, 9)


class CompileError(RuntimeError):
    """A kernel does not compile; the message is the compiler's, with file and line."""


# Sources that are empty for every other architecture.
ONLY = {
    "grouped_gemm_wgmma": "sm_90a",
    "grouped_gemm_wgmma16": "sm_90a",
    "grouped_gemm_wgrad_wgmma": "sm_90a",
    "grouped_gemm_wgrad_wgmma16": "sm_90a",
}


@cache
def files() -> dict[str, Path]:
    """Every source and header by its name, which is unique: includes name no folder."""
    return {path.name: path for path in sorted(_FOLDER.rglob("*.cu*"), key=lambda path: path.name)}


def headers() -> list[Path]:
    return [path for name, path in files().items() if name.endswith(".cuh")]


def sources(architecture: str) -> list[Path]:
    every = [path for name, path in files().items() if name.endswith(".cu")]
    return [path for path in every if ONLY.get(path.stem, architecture) == architecture]


def variants(path: Path) -> list[tuple[str, ...]]:
    """The sets of definitions that a source is compiled with, the most common first."""
    return VARIANTS.get(path.stem, [()])


class Code:
    """Machine code, or what starts the task of a thread that compiles it."""

    def __init__(self, label: str, architecture: str, code: bytes | Callable[[], Task]):
        self.label, self.architecture, self._code = label, architecture, code
        self.is_cached = isinstance(code, bytes)
        self._task = None if isinstance(code, bytes) else code()

    def is_ready(self) -> bool:
        """Whether it is compiled. If not, a thread does so."""
        return isinstance(self._code, bytes) or self._running(self._code).has_ended()

    def result(self) -> bytes:
        """The code, once it is compiled, or the compiler's error; the next call compiles it again then."""
        if isinstance(self._code, bytes):
            return self._code
        try:
            return self._running(self._code).result()  # type: ignore[no-any-return]
        except BaseException:
            self._task = None
            raise

    def _running(self, start: Callable[[], Task]) -> Task:
        """The task, which is started again where it was dropped before it began, as in a forked child."""
        task = self._task
        if task is None or not task.given:
            task = self._task = start()
        return task


def requested(path: Path, architecture: str, defines: tuple[str, ...] = ()) -> Code:
    """Machine code of one source, which a thread compiles unless it is in the disk cache.

    The cache is ``FP8MOE_CACHE_DIR``, or else ``fp8moe`` in ``XDG_CACHE_HOME`` or ``~/.cache``. Each entry
    has a checksum: a truncated or damaged entry is compiled again. So is one that others could have written
    (`fp8moe.runtime.disk_cache`).
    """
    label, key = " ".join((path.name, *defines)), _key(path, architecture, defines)
    return requested_by(
        nvrtc_threads, label, path.stem, architecture, key, partial(_cubin, path, architecture, defines)
    )


def requested_by(
    threads: Threads, label: str, name: str, architecture: str, key: str, compile: Callable[[], bytes]
) -> Code:
    """Machine code that a thread makes by ``compile``, unless it is `cached`."""
    _announce(architecture)
    if (code := _read(_entry(name, architecture, key))) is not None:
        return Code(label, architecture, code)
    start = partial(threads.start, NEEDED, key, cached, name, architecture, key, compile)
    missing = Code(label, architecture, start)
    prefetch(architecture)
    return missing


def keep(path: Path, architecture: str, defines: tuple[str, ...], code: bytes) -> None:
    """Put machine code into the cache, as `requested` reads it."""
    _write(_entry(path.stem, architecture, _key(path, architecture, defines)), code)


def prefetch(architecture: str) -> None:
    """Compiles every source in its first variant, after all that is needed now; the matrix products last,
    which are not needed first."""
    for path in sources(architecture):
        defines = variants(path)[0]
        key = _key(path, architecture, defines)
        call = cached, path.stem, architecture, key, partial(_cubin, path, architecture, defines)
        nvrtc_threads.start(LATER + ("mma" in path.stem), key, *call)


def finish(codes: Collection[Code]) -> None:
    """Return when all of this is compiled, which can take seconds: not in silence."""
    missing = {(code.label, code.architecture): code for code in codes if not code.is_ready()}
    if not missing:
        return
    start, (*_, architecture) = time.perf_counter(), next(iter(missing))
    what = f"{len(missing)} kernel{'s' * (len(missing) > 1)} for {architecture}"
    _log.info("compiling %s, cache %s", what, cache_folder_name())
    with progress(len(missing), f"fp8moe: compiling kernels for {architecture}", delay=2) as bar:
        for code in missing.values():
            code.result()
            bar.update()
    _log.info("compiled %s in %.1f s", what, time.perf_counter() - start)


@cache
def _announce(architecture: str) -> None:
    _log.info("CUDA kernels for %s, cache of compiled kernels %s", architecture, cache_folder_name())


class NoBar(contextlib.AbstractContextManager["NoBar"]):
    def __exit__(self, *_: object) -> None: ...

    def update(self) -> None: ...


def progress(total: int, text: str, delay: float) -> Any:
    """A bar of tqdm on a terminal, if that is installed, shown after ``delay`` seconds."""
    if not sys.stderr.isatty() or importlib.util.find_spec("tqdm") is None:
        return NoBar()
    bar = importlib.import_module("tqdm").tqdm
    return bar(total=total, desc=text, delay=delay, leave=False, unit="kernel", dynamic_ncols=True)


def cached(name: str, architecture: str, key: str, compile: Callable[[], bytes]) -> bytes:
    """The result of ``compile``, cached on disk by ``key``, which must determine it. Of several processes
    that want the same, such as the ranks of a host, one compiles and the others wait for it."""
    entry = _entry(name, architecture, key)
    if (code := _read(entry)) is not None:
        return code
    with contextlib.ExitStack() as stack:
        # a folder that is not used, of which `_read` or `_write` warns, or a system without such locks
        with contextlib.suppress(OSError, RuntimeError, ImportError):
            stack.enter_context(locked_entry(_cache_folder(), entry))
        if (code := _read(entry)) is not None:
            return code
        code = compile()
        _write(entry, code)
        return code


def _key(path: Path, architecture: str, defines: tuple[str, ...]) -> str:
    return repr((_digest(), path.name, architecture, OPTIONS, defines, load_nvrtc().getVersion()))


def _entry(name: str, architecture: str, key: str) -> str:
    return f"{name}-{architecture}-{hashlib.sha256(key.encode()).hexdigest()[:24]}"


def _cubin(path: Path, architecture: str, defines: tuple[str, ...]) -> bytes:
    return compile_source(path, architecture, defines)[0]


# ---------------------------------------------------------------- threads that compile

NEEDED, LATER = 0, 1  # by a call now, perhaps by a later one


class Threads:
    """Threads that make each call once, by its key, the most urgent first, and again if it has failed and
    is needed."""

    def __init__(self, count: int):
        self._count, self._workers, self._numbers = count, Workers(), itertools.count()
        self._ended = False
        self.forget()

    def forget(self) -> None:
        """Begin anew, as in a forked child, which has none of the threads."""
        self.lock = threading.Lock()
        self._tasks: dict[str, Task] = {}
        # a heap of (urgency, number, key, task); of the same task twice, if it has become more urgent
        self._waiting: list[tuple[int, int, str, Task]] = []

    def start(self, urgency: int, key: str, function: Callable[..., Any], *arguments: Any) -> Task:
        with self.lock:
            task = self._tasks.get(key)
            if task is not None and (urgency != NEEDED or (task.given and not task.has_failed())):
                return task
            if task is None or task.has_failed():
                task = self._tasks[key] = Task(function, arguments)
            heapq.heappush(self._waiting, (urgency, next(self._numbers), key, task))
            run_one = Task(self._run_one, ())
            if not self._ended and self._workers.give(run_one, self._count):
                return task
        if urgency == NEEDED:
            run_one.run()  # here: the lock is free
        return task

    def _run_one(self) -> None:
        with self.lock:
            task = next((t for *_, t in self._most_urgent() if not t.given), None)
            if task is None:
                return
            task.given = True
        task.run()

    def _most_urgent(self) -> Iterator[tuple[int, int, str, Task]]:
        while self._waiting:
            yield heapq.heappop(self._waiting)

    def drop(self) -> None:
        """Begin nothing that waits."""
        with self.lock:
            for *_, key, task in self._most_urgent():
                if not task.given:
                    self._tasks.pop(key, None)

    def end(self) -> None:
        """Let no thread begin anything from now on, and return when all that has begun has ended. A caller
        makes what it needs itself."""
        self._ended = True
        self.drop()
        self.wait()

    def wait(self) -> None:
        """Return when all that has begun has ended."""
        for task in [*self._tasks.values()]:
            if task.given:
                task.wait()


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# NVRTC's calls do not wait for each other: 4 threads blocked for 1 % of their time. Numba's do, by its lock.
nvrtc_threads, numba_threads = Threads(cores()), Threads(1)


@atexit.register
def _finish() -> None:
    """Neither NVRTC nor Numba must compile while the process ends."""
    for threads in (nvrtc_threads, numba_threads):
        threads.end()


def _before_fork() -> None:
    """Let no thread begin, and those that have begun end: a lock that one holds stays held in the child."""
    for threads in (nvrtc_threads, numba_threads):
        threads.lock.acquire()
        threads.wait()


def _after_fork(in_child: bool) -> None:
    for threads in (nvrtc_threads, numba_threads):
        threads.forget() if in_child else threads.lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=partial(_after_fork, False),
        after_in_child=partial(_after_fork, True),
    )


def usage(log: str) -> list[tuple[str, int, int, int]]:
    """(kernel, registers, spilled bytes, static shared bytes) from ptxas' report."""
    rows = []
    for part in re.split(r"Compiling entry function '", log)[1:]:
        name = part.partition("'")[0]
        registers = int(_number(r"Used (\d+) registers", part))
        spills = int(_number(r"(\d+) bytes spill stores", part))
        shared = int(_number(r"(\d+) bytes smem", part))
        rows.append((name, registers, spills, shared))
    return sorted(rows)


def _number(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match.group(1) if match else "0"


def compile_source(path: Path, architecture: str, defines: tuple[str, ...] = ()) -> tuple[bytes, str]:
    """(machine code, compiler log) of one source; needs no GPU."""
    nvrtc = load_nvrtc()
    # #line keeps the file's name and line numbers in messages and profilers
    text = f'#line 1 "kernels_cuda/{path.name}"\n{path.read_text()}'
    names = [h.name.encode() for h in headers()]
    program = nvrtc.createProgram(text, path.name, [h.read_bytes() for h in headers()], names)
    options = (*OPTIONS, *(f"-D{d}" for d in defines), f"-arch={architecture}")
    try:
        nvrtc.compileProgram(program, list(options))
        return nvrtc.getCUBIN(program), nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError as error:
        raise CompileError(f"{error}{_too_old(nvrtc.getVersion())}\n{nvrtc.getProgramLog(program)}") from None
    finally:
        nvrtc.destroyProgram(program)


def _too_old(version: tuple[int, int]) -> str:
    if version >= OLDEST_NVRTC:
        return ""
    found, oldest = (".".join(map(str, v)) for v in (version, OLDEST_NVRTC))
    return (
        f": NVRTC {found} was found; these kernels need {oldest} or newer, which runs with every driver of "
        "its major version: pip install --upgrade 'fp8moe[cuda13]' (or fp8moe[cuda12])"
    )


@cache
def _digest() -> str:
    """Digest of every source and header, so that a changed header invalidates old cubins."""
    digest = hashlib.sha256()
    for name, path in files().items():
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _cache_folder() -> Path:
    """FP8MOE_CACHE_DIR, or fp8moe in XDG_CACHE_HOME, which counts only if absolute, or in ~/.cache."""
    if given := os.environ.get("FP8MOE_CACHE_DIR"):
        return Path(given)
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (shared if shared.is_absolute() else Path.home() / ".cache") / "fp8moe"


def cache_folder_name() -> str:
    try:
        return str(_cache_folder())
    except RuntimeError as error:  # this user has no home folder
        return str(error)


def _read(entry: str) -> bytes | None:
    try:
        return read_entry(_cache_folder(), entry)
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home folder
        _warn(error)
        return None


def _write(entry: str, code: bytes) -> None:
    try:
        write_entry(_cache_folder(), entry, code)
    except (OSError, RuntimeError) as error:
        _warn(error)


def _warn(error: Exception) -> None:
    """Warn once per process: other entries fail for the same reason."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"FP8MOE_CACHE_DIR: the cache of compiled kernels is not used ({error}): every process compiles "
            "them again; set FP8MOE_CACHE_DIR to a folder that belongs to this user and that nobody else may "
            "write to",
            RuntimeWarning,
            stacklevel=2,
        )


_warned = False


def load_nvrtc() -> ModuleType:
    try:
        nvrtc = importlib.import_module("cupy_backends.cuda.libs.nvrtc")
        nvrtc.getVersion()  # loads the library, which CuPy does not contain
    except (ImportError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]  # the folders that were searched follow
        raise ImportError(
            f"compiling needs CuPy and NVRTC ({reason}); pip install 'fp8moe[cuda13]' (or fp8moe[cuda12])"
        ) from error
    return nvrtc
