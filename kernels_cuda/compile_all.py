"""``python -m fp8moe compile``: every kernel for several architectures, into the cache that a first step
reads, with registers and spills; needs no GPU."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fp8moe.kernels_cuda import plan
from fp8moe.kernels_cuda.runtime import compiler, numba_cuda, replay
from fp8moe.runtime.tables import line

#: title and width of the printed columns
COLUMNS = {"kernel": -58, "arch": -9, "registers": 9, "spill bytes": 11, "shared": 7, "ms": 6}


class _Compiled(NamedTuple):
    """What the command prints of a source's variant, or of a kernel of Numba's."""

    source: str
    defines: tuple[str, ...]  # of Numba's its arguments' types
    architecture: str
    seconds: float
    kernels: list[tuple[str, int, int, int]]  # see `compiler.usage`; not of Numba's
    error: str = ""


def main(architectures: list[str] | None, as_json: bool = False) -> int:
    """Compiles everything into the cache, on all cores, and prints registers and spills; returns 1 if
    anything fails or spills."""
    nvrtc, start = compiler.load_nvrtc(), time.perf_counter()
    version = ".".join(map(str, nvrtc.getVersion()))
    # those of `driver.architecture`
    known = [f"sm_{n}" + ("a" if n >= 90 else "") for n in nvrtc.getSupportedArchs() if n >= 80]
    for architecture in architectures or ():
        if architecture not in known:
            raise ValueError(
                f"--arch: got {architecture}; wanted one that NVRTC {version} compiles these kernels for: "
                + ", ".join(known)
            )
    if not as_json:
        print(f"NVRTC {version}, cache {compiler.cache_folder_name()}")
        print(line(COLUMNS, COLUMNS.values()))
    of = architectures or compiler.ARCHITECTURES
    start_one, now = compiler.nvrtc_threads.start, compiler.NEEDED
    rows = []
    with _plan_kernels(of) as plans:
        given = [(p, a, d) for a in of for p in compiler.sources(a) for d in compiler.variants(p)]
        tasks = [start_one(now, repr(("command", *variant)), _compiled, *variant) for variant in given]
        with _progress(as_json, len(tasks) + len(plans)) as bar:
            for row in itertools.chain((task.result() for task in tasks), (one.get() for one in plans)):
                rows.append(row)
                bar.update()
                if not as_json:
                    _print_row(row)
    replay.LOOP.compile().wait()
    failed, spilling = sum(bool(r.error) for r in rows), sum(k[2] > 0 for r in rows for k in r.kernels)
    kernels, seconds = sum(len(r.kernels) for r in rows), time.perf_counter() - start
    if as_json:
        told = {"nvrtc": version, "cache": compiler.cache_folder_name(), "seconds": round(seconds, 1)}
        told |= {"kernels": kernels, "spilling": spilling, "failed": failed}
        print(json.dumps({**told, "rows": [_described(row) for row in rows]}))
    else:
        failures = f"{failed} variants of sources that do not compile, {seconds:.0f} s"
        print(f"{kernels} kernels, {spilling} with spills, {failures}")
    return 1 if failed or spilling else 0


def _compiled(path: Path, architecture: str, defines: tuple[str, ...]) -> _Compiled:
    start = time.perf_counter()
    try:
        code, log = compiler.compile_source(path, architecture, defines)
    except compiler.CompileError as error:
        return _Compiled(path.name, defines, architecture, time.perf_counter() - start, [], str(error))
    seconds = time.perf_counter() - start
    compiler.keep(path, architecture, defines, code)
    return _Compiled(path.name, defines, architecture, seconds, compiler.usage(log))


@contextlib.contextmanager
def _plan_kernels(architectures: Collection[str]) -> Iterator[list[Any]]:
    """The kernels that Numba compiles, in processes, since in each it compiles one after the other (1 to 4
    s). Those in the cache are left as they are."""
    given = [(i, a) for a in architectures for i in range(len(plan.kernels()))]
    with multiprocessing.get_context("spawn").Pool(min(compiler.cores(), len(given))) as pool:
        yield [pool.apply_async(_compiled_plan, one) for one in given]


def _progress(as_json: bool, total: int) -> Any:
    """A bar, unless the rows are on the terminal and show the progress."""
    if sys.stdout.isatty() and not as_json:
        return compiler.NoBar()
    return compiler.progress(total, "fp8moe compile", 0)


def _compiled_plan(number: int, architecture: str) -> _Compiled:
    kernel, kinds = plan.kernels()[number]
    start, error = time.perf_counter(), ""
    try:
        numba_cuda.cubin(kernel, kinds, architecture)
    except Exception as failure:  # it may be any of Numba's
        error = f"{type(failure).__name__}: {failure}"
    label = f"plan.{kernel.__name__}"
    types = tuple(k for k in kinds if isinstance(k, str))
    return _Compiled(label, types, architecture, time.perf_counter() - start, [], error)


def _described(row: _Compiled) -> dict[str, Any]:
    names = "name", "registers", "spill_bytes", "shared_bytes"
    return {**row._asdict(), "kernels": [dict(zip(names, k, strict=True)) for k in row.kernels]}


def _print_row(row: _Compiled) -> None:
    took, of = row.seconds * 1e3, " ".join(row.defines)
    if row.error:
        print(line((row.source, row.architecture, f"FAILED {of}"), (-58, -9, -1)), row.error, sep="\n")
    for name, registers, spills, shared in row.kernels:
        label = f"{row.source.removesuffix('.cu')}.{name} {of}"
        print(line((label, row.architecture, registers, spills, shared, f"{took:.0f}"), COLUMNS.values()))
    if not row.kernels and not row.error:
        label = f"{row.source} {of}"
        print(line((label, row.architecture, "", "", "", f"{took:.0f}"), COLUMNS.values()))
