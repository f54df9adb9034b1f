"""The tables of docs/compatibility.md: the backend of each product on each architecture, and every kernel."""

import inspect
import re
from pathlib import Path

import pytest

import fp8moe
from fp8moe.kernels_cuda.gemm.product import Product
from fp8moe.kernels_cuda.runtime import compiler

TEXT = (Path(__file__).parents[1] / "docs/compatibility.md").read_text()
OPERANDS = {
    "FP8, 1x128 and 128x128 scales": "e4m3",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
}


def table_of(title):
    """Rows of a section's table: the first columns, and one cell per architecture."""
    section = TEXT.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert tuple(header[2:]) == compiler.ARCHITECTURES
    return {tuple(row[:2]): dict(zip(header[2:], row[2:], strict=True)) for row in rows}


def test_products():
    pytest.importorskip("cupy")
    grouped_gemm = pytest.importorskip("fp8moe.kernels_cuda.grouped_gemm")
    table = table_of("Grouped products")
    verbs = "grouped_gemm", "grouped_gemm_wgrad"
    assert set(table) == {(operands, verb) for operands in OPERANDS for verb in verbs}
    for (operands, verb), cells in table.items():
        kind = OPERANDS[operands]
        out = "float32" if verb == "grouped_gemm_wgrad" else "bfloat16" if kind == "e4m3" else kind
        product = Product(verb, (kind, kind), out, experts=8, rows=256, width=256, depth=256)
        for architecture, cell in cells.items():
            assert cell == grouped_gemm.choose(product, architecture, None).backend, (operands, architecture)


def test_every_kernel_is_listed():
    table = table_of("Every kernel")
    sources = {name for name in compiler.files() if name.endswith(".cu")}
    assert {name.strip("`") for name, _ in table if name.endswith(".cu`")} == sources
    for (name, _), cells in table.items():
        for architecture, cell in cells.items():
            compiled = {path.name for path in compiler.sources(architecture)} | {"plan.py"}
            is_compiled = name.split()[0].strip("`") in compiled
            may_be = {"compiled", "run"} if architecture == "sm_90a" else {"compiled"}
            assert cell in (may_be if is_compiled else {"-"}), name


def test_every_operation_is_listed():
    operations = {name for name in fp8moe.__all__ if inspect.isfunction(getattr(fp8moe, name))}
    assert operations - set(re.findall(r"`(\w+)`", TEXT)) <= {"trace", "memory"}
