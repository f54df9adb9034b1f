"""Tables for a terminal: cells in aligned columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def line(cells: Iterable[object], widths: Iterable[int]) -> str:
    """One line of a table that is printed as it is measured. A positive width aligns to the right, a
    negative one to the left; a longer cell takes the room that it needs."""
    pairs = zip(map(str, cells), widths, strict=True)
    return " ".join(c.rjust(w) if w > 0 else c.ljust(-w) for c, w in pairs).rstrip()


def table(rows: Sequence[Sequence[object]], left: int = 1) -> list[str]:
    """Lines of a table, each column as wide as its longest cell; the first ``left`` columns are aligned to
    the left, the others to the right."""
    longest = [max(len(str(c)) for c in column) for column in zip(*rows, strict=True)]
    widths = [-w if n < left else w + 1 for n, w in enumerate(longest)]
    return [line(row, widths) for row in rows]
