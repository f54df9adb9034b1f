"""Runs the notebooks of `examples/notebooks/`; as a command it writes their outputs into them.

``python tests/notebooks.py`` after a change of a cell; `tests/test_notebooks.py` fails if the outputs in a
file are not those of its cells.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(path: Path) -> list[list[dict[str, Any]]]:
    """The outputs of every code cell, as the notebook format has them: what it prints, and its last
    expression's figure. A cell's assertions say what the text around it claims."""
    import matplotlib
    from matplotlib import pyplot

    matplotlib.use("agg")
    variables: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    for number, cell in enumerate(code_cells(read(path)), 1):
        tree = ast.parse("".join(cell["source"]))
        shown = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        printed = io.StringIO()
        label = f"{path.name}, cell {number}"
        value = None
        with contextlib.redirect_stdout(printed):
            exec(compile(tree, label, "exec"), variables)
            if shown is not None:
                value = eval(compile(ast.Expression(shown.value), label, "eval"), variables)
        of_cell = []
        if text := printed.getvalue():
            lines = text.splitlines(keepends=True)
            of_cell.append({"name": "stdout", "output_type": "stream", "text": lines})
        if hasattr(value, "savefig"):
            of_cell.append(_of_figure(value, number))
        outputs.append(of_cell)
    pyplot.close("all")
    return outputs


def _of_figure(figure: Any, number: int) -> dict[str, Any]:
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=72, bbox_inches="tight", metadata={"Software": None})
    data = {"image/png": base64.b64encode(image.getvalue()).decode(), "text/plain": ["<Figure>"]}
    return {"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"}


def main() -> None:
    for path in NOTEBOOKS:
        notebook, outputs = read(path), run(path)
        for number, (cell, of_cell) in enumerate(zip(code_cells(notebook), outputs, strict=True), 1):
            cell |= {"execution_count": number, "outputs": of_cell}
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
