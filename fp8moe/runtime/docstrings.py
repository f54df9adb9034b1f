"""Docstrings of framework-specific functions, derived from those of the core functions they wrap."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

WIDTH = 106


def docstring_of(core: Callable[..., Any], array: str, note: str) -> str:
    """The docstring of ``core``, with ArrayLike replaced by ``array`` and ``note`` added to its Notes."""
    text = (inspect.getdoc(core) or "").replace("ArrayLike", array)
    before, heading, examples = text.partition("Examples\n--------\n")
    paragraph = f"{textwrap.fill(note.strip(), WIDTH)}\n\n"
    if "Notes\n-----\n" in before:
        paragraph = f"\n{paragraph}"
        before = before.rstrip("\n") + "\n"
    else:
        paragraph = f"Notes\n-----\n{paragraph}"
    return f"{before}{paragraph}{heading}{examples}"


def differentiable_in(names: tuple[str, ...]) -> str:
    return f"Differentiable in {' and '.join(f'``{n}``' for n in names)}"
