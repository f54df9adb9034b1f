"""Environment report: versions, devices, which backends and doors work, and what to install."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import fp8moe
from fp8moe.kernels_cuda.runtime.compiler import cache_folder_name

#: modules that exist both in `fp8moe.reference` and in `fp8moe.kernels_cuda`
ROOMS = (
    *("plan", "permute", "quantize", "layout", "transpose", "swiglu", "grouped_gemm", "router"),
    *("bias", "adamw", "expert_parallel", "forms"),
)
# door -> (package that it requires, how to install it)
_TORCH, _JAX = ("torch", "pip install 'fp8moe[torch]'"), ("jax", "pip install 'fp8moe[jax]'")
DOORS = {
    "torch": _TORCH,
    "jax": _JAX,
    "transformers": ("transformers", "pip install 'fp8moe[transformers]'"),
    "torchtitan": ("torchtitan", "pip install 'fp8moe[torchtitan]'"),
    "megatron": ("megatron", "pip install 'fp8moe[megatron]'"),
    "transformer_engine.pytorch": _TORCH,
    "transformer_engine.jax": _JAX,
    "cupy": ("cupy", "pip install 'fp8moe[cuda13]' nvidia-nccl-cu13"),
}
# libraries that fp8moe.torch calls where they are installed
OPTIONAL = {
    "deep_gemm": "build DeepGEMM from its repository",
    "deep_ep": "build DeepEP from its repository",
}


def report() -> str:
    lines = [
        f"fp8moe {fp8moe.__version__}, Python {platform.python_version()}, {platform.platform()}",
        f"CPU      {os.cpu_count()} cores",
    ]
    for package in ("numpy", "ml_dtypes", "numba", "torch", "jax", "numba-cuda"):
        lines.append(f"{package:12} {_version(package) or 'not installed'}")
    cupy = next((p for p in ("cupy-cuda13x", "cupy-cuda12x", "cupy") if _version(p)), None)
    lines.append(f"{'cupy':12} {f'{_version(cupy)} ({cupy})' if cupy else 'not installed'}")
    lines.append(f"{'cache':12} {cache_folder_name()}")
    lines += ["", "devices", *_devices(), "", "backends"]
    lines.append(f"  reference     {_try(_load_reference)}")
    if cupy is None:
        lines.append("  kernels_cuda  not working: CuPy is missing; pip install 'fp8moe[cuda13]'")
    else:
        lines.append(f"  kernels_cuda  {_try(_require_device)}")
        lines += _products()
    lines += ["", "doors"]
    entries: list[tuple[str, str, str, Callable[[], object]]] = [
        *((f"fp8moe.{d}", package, fix, partial(_load_door, d, fix)) for d, (package, fix) in DOORS.items()),
        *((p, p, fix, partial(importlib.import_module, p)) for p, fix in OPTIONAL.items()),
    ]
    for name, package, fix, load in entries:
        is_there = importlib.util.find_spec(package) is not None
        state = _try(load) if is_there else f"not working: {package} is missing; {fix}"
        lines.append(f"  {name:34} {state}")
    return "\n".join(lines)


#: rows of `memory_rows`
_FORMS: tuple[dict[str, str], ...] = (
    *({"recipe": "bf16"}, {"recipe": "fp8_blockwise"}, {"recipe": "fp8_flow"}),
    {"recipe": "fp8_flow", "save": "fp8"},
    {"recipe": "fp8_flow", "recompute": "moe_expert"},
    {"recipe": "fp8_flow", "save": "fp8", "weight_copies": "rowwise"},
)


def memory_rows(sizes: tuple[int, int, int, int, int]) -> dict[str, fp8moe.LayerMemory]:
    """`fp8moe.memory` of a layer in the recipes and their options, by their names."""
    return {
        ", ".join([form["recipe"], *(f"{n}={v}" for n, v in form.items() if n != "recipe")]): fp8moe.memory(
            *sizes,
            **form,  # type: ignore[arg-type]
        )
        for form in _FORMS
    }


MEMORY_COLUMNS = ("saved", "x", "h", "a", "copies", "copies_saved", "forward", "backward", "peak")


def memory_report(sizes: tuple[int, int, int, int, int]) -> str:
    """`memory_rows` as text, in MiB."""
    head = "".join(f"{name.replace('_', ' '):>14}" for name in MEMORY_COLUMNS)
    lines = [f"{'MiB, without master weights':48}{head}"]
    for name, of in memory_rows(sizes).items():
        lines.append(f"{name:48}" + "".join(f"{getattr(of, c) / 2**20:14.1f}" for c in MEMORY_COLUMNS))
    return "\n".join(lines)


def _load_door(door: str, fix: str) -> None:
    importlib.import_module(f"fp8moe.{door}")
    # CuPy imports without NCCL's library, and stands in for the module that needs it
    if door == "cupy" and not getattr(importlib.import_module("cupy").cuda.nccl, "available", True):
        raise RuntimeError(f"CuPy does not find NCCL; {fix}")


def cuda_is_ready() -> bool:
    """Whether operations can run on a CUDA device of this machine."""
    return missing_for_cuda() is None


def missing_for_cuda() -> str | None:
    """Why operations cannot run on a CUDA device of this machine; None if they can."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    try:
        _require_device()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _require_device() -> None:
    runtime = importlib.import_module("cupy").cuda.runtime
    if runtime.getDeviceCount() == 0:
        raise RuntimeError("no CUDA device")
    for room in ROOMS:
        importlib.import_module(f"fp8moe.kernels_cuda.{room}")
    importlib.import_module("fp8moe.kernels_cuda.runtime.driver").architecture(
        0
    )  # raises for one that is too old


def _devices() -> list[str]:
    if importlib.util.find_spec("cupy") is None:
        return ["  CPU only as far as can be seen: CuPy is not installed"]
    try:
        runtime = importlib.import_module("cupy").cuda.runtime
        entries = []
        for i in range(runtime.getDeviceCount()):
            p = runtime.getDeviceProperties(i)
            entries.append(
                f"  cuda:{i}  {p['name'].decode()}, sm_{p['major']}{p['minor']}, "
                f"{p['multiProcessorCount']} SMs, {p['totalGlobalMem'] / 2**30:.0f} GiB"
            )
        driver, toolkit = runtime.driverGetVersion(), runtime.runtimeGetVersion()
        return [*entries, f"  driver for CUDA {_cuda(driver)}, runtime {_cuda(toolkit)}"]
    except Exception as error:
        return [f"  CuPy finds no usable CUDA device: {error}"]


def _products() -> list[str]:
    """The grouped GEMM backend that each device uses, and why no faster one."""
    lines: list[str] = []
    try:
        driver = importlib.import_module("fp8moe.kernels_cuda.runtime.driver")
        grouped_gemm = importlib.import_module("fp8moe.kernels_cuda.grouped_gemm")
        for i in range(driver.runtime.getDeviceCount()):
            architecture = driver.architecture(i)
            lines += ["", f"products on cuda:{i}, {architecture}"]
            lines += [f"  {line}" for line in grouped_gemm.describe(architecture)]
    except Exception as error:
        return [*lines, "", f"products: not known, {type(error).__name__}: {error}"]
    return lines


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _version(package: str | None) -> str | None:
    try:
        return importlib.metadata.version(package) if package else None
    except importlib.metadata.PackageNotFoundError:
        return None


def _load_reference() -> None:
    for room in ROOMS:
        importlib.import_module(f"fp8moe.reference.{room}")


def _try(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:
        return f"not working: {type(error).__name__}: {error}"
    return "works"


# Metadata that is stored with benchmark results.


def versions() -> dict[str, str]:
    entries = {"python": platform.python_version(), "fp8moe": fp8moe.__version__}
    for package in ("numpy", "numba", "ml_dtypes", "cupy-cuda13x"):
        try:
            entries[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return entries


def commit() -> str:
    """The commit of the tree this package runs from, followed by "+" when its code has changed since.

    For a copy that is not a git checkout, FP8MOE_COMMIT gives the commit; without it the result is "unknown",
    also where the package is installed inside another project's checkout.
    """
    if environment_commit := os.environ.get("FP8MOE_COMMIT"):
        return environment_commit
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return "unknown"
    results = ":!benchmarks/results", ":!README.md", ":!docs"
    try:
        call = {"cwd": root, "capture_output": True, "text": True, "check": True}
        name = subprocess.run(["git", "rev-parse", "--short", "HEAD"], **call).stdout.strip()  # type: ignore[call-overload]
        status = ["git", "status", "--porcelain", "--", ".", *results]
        changed = subprocess.run(status, **call).stdout.strip()  # type: ignore[call-overload]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + ("+" if changed else "")


def command() -> str:
    """The command line of this run, without its output paths."""
    words = sys.argv[1:]
    for option in ("--out", "--picture"):
        if option in words:
            index = words.index(option)
            words = words[:index] + words[index + 2 :]
    return " ".join(["python -m fp8moe", *map(shlex.quote, words)])
