"""Environment report: versions, devices, operations and what runs them, interfaces, what to install."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import pkgutil
import platform
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fp8moe
from fp8moe.kernels_cuda.runtime.compiler import cache_folder_name
from fp8moe.runtime.tables import line, table

_TORCH, _JAX = ("torch", "pip install 'fp8moe[torch]'"), ("jax", "pip install 'fp8moe[jax]'")
#: public module -> (package that it requires, how to install it)
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


def state() -> dict[str, Any]:
    """What `lines` prints, as one object for JSON."""
    return dict(_parts())


def lines() -> Iterator[str]:
    """The report, line by line, since importing every installed framework takes some seconds."""
    for part, of in _parts():
        yield from _IN_WORDS[part](of)


def _parts() -> Iterator[tuple[str, Any]]:
    yield "versions", {"fp8moe": fp8moe.__version__, "python": platform.python_version(), **_packages()}
    yield "platform", {"system": platform.platform(), "cores": os.cpu_count()}
    yield "cache", cache_folder_name()
    missing = missing_for_cuda()
    devices = [] if missing else _cuda_devices()
    yield "cuda", {"missing": missing, "devices": devices}
    cpu = _error_of(lambda: [importlib.import_module(f"fp8moe.reference.{topic}") for topic in _topics()])
    yield "operations", {"cpu": cpu or "works", "cuda": missing or "works", "topics": operations()}
    yield "grouped_gemms", {d["name"]: d.pop("grouped_gemms") for d in devices}
    yield "interfaces", {name: _interface(name, *needs) for name, needs in _interfaces().items()}


def operations() -> dict[str, list[str]]:
    """Public operations by topic."""
    topics: dict[str, list[str]] = {}
    for name in fp8moe.__all__:
        room, _, topic = getattr(getattr(fp8moe, name), "__module__", "").rpartition(".")
        if room == "fp8moe.ops" and name.islower():
            topics.setdefault(topic, []).append(name)
        elif topic == "moe" and name.islower():
            topics.setdefault("layer", []).append(name)
    return topics


def _versions_in_words(of: dict[str, str]) -> Iterator[str]:
    named = dict(of)
    yield f"fp8moe {named.pop('fp8moe')}, Python {named.pop('python')}"
    yield from _wrapped("  with ", [f"{name} {version}" for name, version in named.items()])


def _operations_in_words(of: dict[str, Any]) -> Iterator[str]:
    cpu = "by NumPy and Numba" if of["cpu"] == "works" else f"not working: {of['cpu']}"
    yield f"operations    on the CPU {cpu}"
    if of["cuda"] == "works":
        yield "              on CUDA by kernels that are compiled when they are first called"
    for topic, names in of["topics"].items():
        yield from _wrapped(f"  {topic:13} ", names)


def _gemms_in_words(of: dict[str, list[str]]) -> Iterator[str]:
    for name, gemms in of.items():
        yield f"grouped GEMMs on {name}"
        yield from (f"  {gemm}" for gemm in gemms)


def _cuda_in_words(of: dict[str, Any]) -> Iterator[str]:
    if of["missing"]:
        fix = "" if "cupy" in sys.modules else "; pip install 'fp8moe[cuda13]'"
        yield f"CUDA          not used: {of['missing']}{fix}"
    for d in of["devices"]:
        yield (
            f"{d['name']}        {d['model']}, {d['architecture']}, {d['multiprocessors']} SMs, "
            f"{d['memory_bytes'] / 2**30:.0f} GiB, driver for CUDA {d['driver']}, runtime {d['runtime']}"
        )


def _interfaces_in_words(of: dict[str, dict[str, str]]) -> Iterator[str]:
    yield "interfaces"
    there = [(name, one["state"]) for name, one in of.items() if one["state"] != "not installed"]
    yield from (line(row, (-35, -1)) for row in ((f"  {name}", state) for name, state in there))
    absent: dict[str, list[str]] = {}
    for name, one in of.items():
        if one["state"] == "not installed":
            absent.setdefault(one["install"], []).append(name.removeprefix("fp8moe."))
    yield from _wrapped("  not installed: ", [f"{', '.join(n)} ({fix})" for fix, n in absent.items()], "; ")


def _wrapped(head: str, words: Sequence[str], by: str = ", ") -> list[str]:
    """The words after a head, in lines of 100 characters that are broken between words only."""
    if not words:
        return []
    texts = [head + words[0]]
    for word in words[1:]:
        if len(texts[-1]) + len(by) + len(word) > 100:
            texts[-1] += by.rstrip()
            texts.append(" " * len(head) + word)
        else:
            texts[-1] += by + word
    return texts


_IN_WORDS: dict[str, Callable[[Any], Iterable[str]]] = {
    "versions": _versions_in_words,
    "platform": lambda of: [f"CPU           {of['cores']} cores, {of['system']}"],
    "cache": lambda of: [f"kernel cache  {of}"],
    "cuda": _cuda_in_words,
    "operations": _operations_in_words,
    "grouped_gemms": _gemms_in_words,
    "interfaces": _interfaces_in_words,
}


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
    rows = [["MiB, without master weights", *(name.replace("_", " ") for name in MEMORY_COLUMNS)]]
    for name, of in memory_rows(sizes).items():
        rows.append([name, *(f"{getattr(of, c) / 2**20:.1f}" for c in MEMORY_COLUMNS)])
    return "\n".join(table(rows))


def _interfaces() -> dict[str, tuple[str, str]]:
    return {f"fp8moe.{name}": needs for name, needs in DOORS.items()} | {
        p: (p, f) for p, f in OPTIONAL.items()
    }


def _interface(name: str, package: str, fix: str) -> dict[str, str]:
    """Whether a module can be imported here: "works", "not installed", or what is wrong."""
    if importlib.util.find_spec(package) is None:
        return {"state": "not installed", "install": fix}
    if error := _error_of(lambda: _load(name)):
        return {"state": f"not working: {error}", "install": fix}
    if not name.startswith("fp8moe.transformer_engine."):
        return {"state": "works"}
    engine = "installed" if importlib.util.find_spec("transformer_engine") else "not installed"
    return {"state": f"Transformer Engine's names for these operations ({engine}, and not needed)"}


def _load(name: str) -> None:
    with warnings.catch_warnings(action="ignore"):  # of others, as CuPy's about NCCL
        importlib.import_module(name)
        # CuPy imports without NCCL's library, and stands in for the module that needs it
        if name == "fp8moe.cupy" and not getattr(
            importlib.import_module("cupy").cuda.nccl, "available", True
        ):
            raise RuntimeError("CuPy does not find NCCL; pip install 'fp8moe[cuda13]' nvidia-nccl-cu13")


def _error_of(action: Callable[[], object]) -> str | None:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def cuda_is_ready() -> bool:
    """Whether operations can run on a CUDA device of this machine."""
    return missing_for_cuda() is None


def missing_for_cuda() -> str | None:
    """Why operations cannot run on a CUDA device of this machine; None if they can."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    return _error_of(_require_device)


def _require_device() -> None:
    runtime = importlib.import_module("cupy").cuda.runtime
    if runtime.getDeviceCount() == 0:
        raise RuntimeError("no CUDA device")
    for topic in _topics():
        importlib.import_module(f"fp8moe.kernels_cuda.{topic}")
    # raises for one that is too old
    importlib.import_module("fp8moe.kernels_cuda.runtime.driver").architecture(0)


def _topics() -> Iterator[str]:
    """Modules of kernels that CUDA operations call, as the reference has them."""
    names = (m.name for m in pkgutil.iter_modules(importlib.import_module("fp8moe.reference").__path__))
    return (name for name in names if name != "numerics")


def _cuda_devices() -> list[dict[str, Any]]:
    runtime = importlib.import_module("cupy").cuda.runtime
    driver = importlib.import_module("fp8moe.kernels_cuda.runtime.driver")
    grouped_gemm = importlib.import_module("fp8moe.kernels_cuda.grouped_gemm")
    devices = []
    for i in range(runtime.getDeviceCount()):
        p = runtime.getDeviceProperties(i)
        try:
            architecture = driver.architecture(i)
        except RuntimeError as error:  # of another device than the first, that is too old
            architecture, gemms = str(error), []
        else:
            gemms = grouped_gemm.describe(architecture)
        devices.append(
            {
                "name": f"cuda:{i}",
                "model": p["name"].decode(),
                "architecture": architecture,
                "multiprocessors": p["multiProcessorCount"],
                "memory_bytes": p["totalGlobalMem"],
                "driver": _cuda(runtime.driverGetVersion()),
                "runtime": _cuda(runtime.runtimeGetVersion()),
                "grouped_gemms": gemms,
            }
        )
    return devices


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _packages() -> dict[str, str]:
    """Versions of the installed packages that run operations or call them."""
    return _installed(
        "numpy ml_dtypes numba cupy-cuda13x cupy-cuda12x cupy numba-cuda torch jax transformers"
    )


def _installed(packages: str) -> dict[str, str]:
    """Versions of those that are installed."""
    found = {}
    for package in packages.split():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


# Metadata that is stored with benchmark results.


def versions() -> dict[str, str]:
    installed = _installed("numpy numba ml_dtypes cupy-cuda13x")
    return {"python": platform.python_version(), "fp8moe": fp8moe.__version__, **installed}


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
