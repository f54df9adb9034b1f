"""Compiles `.cu` files to machine code with NVRTC: no nvcc, no build step, and for `compile` no GPU.

`cubin` compiles one source for one architecture and caches the result on disk. `main` is ``python -m fp8moe
compile``: every source for several architectures, with registers and spills.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib
import os
import re
import threading
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

from fp8moe.runtime.disk_cache import read_entry, write_entry
from fp8moe.runtime.workers import Task, Workers

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
    + [("KIND=BF16", "TRANSPOSED=1", "ADDEND=1", "STAGES=3")],
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
            (*_CONVERSIONS[0], *activation, *sums)
            for sums in ((), ("SUMS=1",))
            for activation in (
                *(("BARE=1", f"ACT={act}") for act in ("GELU", "GELU_TANH")),
                *_UNGATED,
                *((f"BARE={bare}",) for bare in (1, 0) if sums),
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


def cubin(path: Path, architecture: str, defines: tuple[str, ...] = ()) -> bytes:
    """Machine code of one source, from the disk cache if present.

    The cache is ``FP8MOE_CACHE_DIR``, by default ``~/.cache/fp8moe``. Each entry has a checksum: a truncated
    or damaged entry is compiled again. So is one that others could have written
    (`fp8moe.runtime.disk_cache`).
    """
    if (code := _read(_entry(path.stem, architecture, _key(path, architecture, defines)))) is not None:
        return code
    job = _submit(path, architecture, defines)
    prefetch(architecture)
    return job.result()  # type: ignore[no-any-return]


def prefetch(architecture: str) -> None:
    """Compiles every source in its first variant in background threads; the matrix products last, which take
    longest and are not needed first."""
    for path in sorted(sources(architecture), key=lambda p: "mma" in p.stem):
        _submit(path, architecture, variants(path)[0])


def cached(name: str, architecture: str, key: str, compile: Callable[[], bytes]) -> bytes:
    """The result of ``compile``, cached on disk by ``key``, which must determine it."""
    entry = _entry(name, architecture, key)
    if (code := _read(entry)) is not None:
        return code
    code = compile()
    _write(entry, code)
    return code


def _submit(path: Path, architecture: str, defines: tuple[str, ...]) -> Task:
    """Compiles in a background thread, once per key (NVRTC releases the GIL)."""
    key = _key(path, architecture, defines)
    with _lock:
        if key not in _jobs:
            # more threads slow down Numba, which compiles concurrently
            _jobs[key] = _workers.submit(
                *(2, cached, path.stem, architecture, key),
                lambda: compile_source(path, architecture, defines)[0],
            )
        return _jobs[key]


_jobs: dict[str, Task] = {}
_lock = threading.Lock()
_workers = Workers()


@atexit.register
def _finish() -> None:
    """Wait for the threads: NVRTC must not compile while the process ends, and the next one finds all
    kernels."""
    for job in list(_jobs.values()):
        job.wait()


def _key(path: Path, architecture: str, defines: tuple[str, ...]) -> str:
    return repr((_digest(), path.name, architecture, OPTIONS, defines, _nvrtc().getVersion()))


def _entry(name: str, architecture: str, key: str) -> str:
    return f"{name}-{architecture}-{hashlib.sha256(key.encode()).hexdigest()[:24]}"


def main(architectures: list[str] | None) -> int:
    """Compiles everything into the cache and prints registers and spills; returns 1 if anything fails or
    spills."""
    nvrtc = _nvrtc()
    version = ".".join(map(str, nvrtc.getVersion()))
    # those of `driver.architecture`
    known = [f"sm_{n}" + ("a" if n >= 90 else "") for n in nvrtc.getSupportedArchs() if n >= 80]
    for architecture in architectures or ():
        if architecture not in known:
            raise ValueError(
                f"--arch: got {architecture}; wanted one that NVRTC {version} compiles these kernels for: "
                + ", ".join(known)
            )
    print(f"NVRTC {version}")
    print(f"{'kernel':58} {'arch':9} {'registers':>9} {'spill bytes':>11} {'shared':>7} {'ms':>6}")
    failed = kernels = spilling = 0
    for architecture in architectures or ARCHITECTURES:
        for path, defines in ((p, d) for p in sources(architecture) for d in variants(p)):
            start = time.perf_counter()
            try:
                code, log = compile_source(path, architecture, defines)
            except CompileError as error:
                print(f"{path.name:58} {architecture:9} FAILED {' '.join(defines)}\n{error}")
                failed += 1
                continue
            took = (time.perf_counter() - start) * 1e3
            _write(_entry(path.stem, architecture, _key(path, architecture, defines)), code)
            for name, registers, spills, shared in usage(log):
                label = f"{path.stem}.{name} {' '.join(defines)}"
                print(f"{label:58} {architecture:9} {registers:9} {spills:11} {shared:7} {took:6.0f}")
                kernels, spilling = kernels + 1, spilling + (spills > 0)
    print(f"{kernels} kernels, {spilling} with spills, {failed} variants of sources that do not compile")
    return 1 if failed or spilling else 0


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
    nvrtc = _nvrtc()
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
    return Path(os.environ.get("FP8MOE_CACHE_DIR") or Path.home() / ".cache" / "fp8moe")


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


def _nvrtc() -> ModuleType:
    try:
        return importlib.import_module("cupy_backends.cuda.libs.nvrtc")
    except ImportError as error:
        raise ImportError(
            f"compiling needs CuPy and NVRTC ({error}); pip install 'fp8moe[cuda13]' (or fp8moe[cuda12])"
        ) from error
