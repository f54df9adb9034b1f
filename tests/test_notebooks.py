"""The notebooks run from top to bottom on the CPU, their statements hold, and they are committed without
outputs."""

import ast
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def cells(path, kind):
    notebook = json.loads(path.read_text())
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def run(name):
    """Runs a notebook's code cells and returns its variables."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    variables = {"__name__": "__main__"}
    for number, cell in enumerate(cells(ROOT / "examples" / "notebooks" / name, "code")):
        exec(compile("".join(cell["source"]), f"{name}, cell {number}", "exec"), variables)
    matplotlib.pyplot.close("all")
    return variables


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_is_stripped_and_plain(path):
    """Outputs and execution counts would change with every run; magics work only in a notebook."""
    notebook = json.loads(path.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    identities = [cell["id"] for cell in notebook["cells"]]
    assert len(set(identities)) == len(identities)
    for cell in cells(path, "code"):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
        ast.parse("".join(cell["source"]))
    assert "pip install" in "".join(cells(path, "markdown")[0]["source"])


def test_every_notebook_is_run_here():
    assert {path.stem for path in NOTEBOOKS} == {
        "quantisation_and_transpose",
        "train_three_ways",
        "bf16_checkpoint_to_fp8",
    }


def test_quantisation_and_transpose(capsys):
    variables = run("quantisation_and_transpose.ipynb")
    # half a step of E4M3's eight steps, except for subnormal values
    normal = abs(variables["x"]) > abs(variables["x"]).max() * 2.0**-6
    assert variables["relative"][normal].max() <= 2.0**-4
    assert variables["lost"][None] > 10 * variables["lost"][1, 128]
    assert variables["double"] > 0.5
    assert variables["single"] < 0.1
    assert "same bytes as quantising the dequantised rows: True" in capsys.readouterr().out


def test_train_three_ways():
    pytest.importorskip("torch")
    variables = run("train_three_ways.ipynb")
    assert variables["casts"] == {"bf16": 0, "fp8_blockwise": 12, "fp8_flow": 2}
    losses = variables["losses"]
    for recipe in ("bf16", "fp8_blockwise", "fp8_flow"):
        assert losses[recipe][-1] < 0.7 * losses[recipe][0]
        assert abs(losses[recipe][-1] / losses["bf16"][-1] - 1) < 0.05


def test_bf16_checkpoint_to_fp8():
    pytest.importorskip("transformers")
    variables = run("bf16_checkpoint_to_fp8.ipynb")
    assert 0 < variables["error"] < 0.16  # FP8 rounding error, derived in tests/cases.py
    assert variables["losses"][-1] < variables["losses"][0]
    assert variables["before"] == pytest.approx(variables["after"], rel=0.01)
