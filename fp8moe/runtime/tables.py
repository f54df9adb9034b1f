"""Tables for a terminal: cells in aligned columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def line(cells: Iterable[object], widths: Iterable[int]) -> str:
    """One line of a table that is printed as it is measured. A positive width aligns to the right, a
    negative one to the left; a longer cell takes room of the next ones, as far as they have it."""
    text, end = "", 0
    for cell, width in zip(map(str, cells), widths, strict=True):
        end += abs(width)
        room = end - len(text)
        text += (cell.rjust(room) if width > 0 else cell.ljust(room)) + " "
        end += 1
    return text.rstrip()


def table(rows: Sequence[Sequence[object]], left: int = 1) -> list[str]:
    """Lines of a table, each column as wide as its longest cell; the first ``left`` columns are aligned to
    the left, the others to the right."""
    longest = [max(len(str(c)) for c in column) for column in zip(*rows, strict=True)]
    widths = [-w if n < left else w + 1 for n, w in enumerate(longest)]
    return [line(row, widths) for row in rows]
