"""The README's programs run, and its tables are those of the results files."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fp8moe.benchmarks import scaling, table

ROOT = Path(__file__).parents[1]
PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def needs_gpu(text):
    return [pytest.mark.gpu] if "import cupy" in text else []


@pytest.mark.parametrize("program", [pytest.param(p, marks=needs_gpu(p)) for p in PROGRAMS])
def test_the_programs_run(program):
    assert len(program.strip().splitlines()) <= 16
    subprocess.run([sys.executable, "-c", program], check=True)


EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize(
    "path", [pytest.param(p, marks=needs_gpu(p.read_text())) for p in EXAMPLES], ids=lambda p: p.stem
)
def test_the_examples_run(path):
    subprocess.run([sys.executable, str(path)], check=True)


def test_the_tables_are_those_of_the_results():
    text = (ROOT / "README.md").read_text()
    assert table.render(text) == text
    assert text.count("<!-- table") == 10
    text = scaling.DOC.read_text()
    assert scaling.render(text) == text
    assert text.count("<!-- table") == 2
