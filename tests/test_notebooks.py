"""The notebooks run from top to bottom on the CPU, what they assert holds, and their outputs are those of
their cells."""

import re

import pytest
from notebooks import NOTEBOOKS, code_cells, read, run

NEEDS = {
    "quantisation_and_transpose": "numpy",
    "train_three_ways": "torch",
    "bf16_checkpoint_to_fp8": "transformers",
}


def printed(outputs):
    """The text of a cell's outputs without digits, which other versions and processors round differently."""
    text = "".join(line for one in outputs for line in one.get("text", ()))
    return re.sub(r"-?\d[\d.]*(e[+-]\d+)?", "#", text)


def pictures(outputs):
    return [name for one in outputs for name in one.get("data", ())]


def test_every_notebook_is_run_here():
    assert {path.stem for path in NOTEBOOKS} == set(NEEDS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_has_the_outputs_of_its_cells(path):
    """Statements of the text are assertions of the cells. `python tests/notebooks.py` writes the outputs."""
    pytest.importorskip("matplotlib")
    pytest.importorskip(NEEDS[path.stem])
    notebook = read(path)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert "pip install" in "".join(notebook["cells"][0]["source"])
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    assert any("\nassert " in "".join(cell["source"]) for cell in cells)
    for cell, of_cell in zip(cells, run(path), strict=True):
        assert printed(cell["outputs"]) == printed(of_cell)
        assert pictures(cell["outputs"]) == pictures(of_cell)
