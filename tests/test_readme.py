"""The README is short, and the examples run. tests/test_docs.py tests its programs and tables."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: test_pretrain.py runs the other one
EXAMPLES = sorted(p for p in (ROOT / "examples").glob("*.py") if p.stem != "pretrain_moe")


def needs_gpu(text):
    return [pytest.mark.gpu] if "import cupy" in text else []


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 170
    assert "make test " in text
    assert "make demo " in text


def test_the_installation_begins_with_a_new_pip():
    """pip 23.2, of Python 3.11 and 3.12, raises ResolutionImpossible for torch with a CUDA extra."""
    text = (ROOT / "README.md").read_text()
    block = text.split("## Install\n\n```\n")[1].split("```")[0]
    commands = [line.split("#")[0].strip() for line in block.splitlines()]
    assert commands[0] == "pip install --upgrade pip"
    assert "pip install '.[cuda13,torch]'" in commands


@pytest.mark.parametrize(
    "path", [pytest.param(p, marks=needs_gpu(p.read_text())) for p in EXAMPLES], ids=lambda p: p.stem
)
def test_the_examples_run(path):
    subprocess.run([sys.executable, str(path)], check=True)
