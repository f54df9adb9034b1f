"""What the documentation's pictures share: files for light and dark backgrounds and for narrow screens, text
that stays text, equal files for equal rows, and a digest of the rows, which a test compares with the results.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from benchmarks.table import ROOT, Rows

#: keyword arguments of a picture's ``draw``, by the ending of its file's name
VARIANTS = {
    f"{'-dark' * dark}{'-narrow' * narrow}": {"dark": bool(dark), "narrow": bool(narrow)}
    for dark in (0, 1)
    for narrow in (0, 1)
}


def files(name: str) -> dict[Path, dict[str, bool]]:
    """A picture's files, with the keyword arguments that draw them."""
    return {ROOT / "docs" / "images" / f"{name}{end}.svg": variant for end, variant in VARIANTS.items()}


def digest(rows: Rows | list[Rows]) -> str:
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def styled(dark: bool) -> AbstractContextManager[Any]:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    # equal results give the same picture; text stays text, which is sharp and 5 times as small as outlines
    own = {"svg.hashsalt": "fp8moe", "svg.fonttype": "none", "font.family": "sans-serif"}
    context: AbstractContextManager[Any] = pyplot.style.context([*["dark_background"] * dark, own])
    return context


def write(figure: Any, out: Path, description: str) -> None:
    from matplotlib import pyplot

    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, transparent=True, metadata={"Date": None, "Description": description})
    pyplot.close(figure)
