"""The text that the demo and the examples train on: generated source code, the same on all machines.

The standard library's source would differ by machine: 10 to 31 MB, by version and distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np

_VERBS = [
    "read",
    "write",
    "parse",
    "make",
    "find",
    "send",
    "load",
    "save",
    "check",
    "merge",
    "split",
    "count",
    "open",
    "close",
]
_NOUNS = [
    "file",
    "line",
    "name",
    "value",
    "token",
    "index",
    "buffer",
    "table",
    "record",
    "message",
    "node",
    "path",
    "group",
    "item",
]
_KINDS = ["int", "str", "list", "dict", "bool", "float", "bytes"]


def generated_text(nbytes: int = 4_000_000) -> np.ndarray:
    """The first bytes of an endless program, as uint8 [nbytes].

    Only `random.Random.random` draws, whose sequence Python keeps the same in all versions.
    """
    draw = Random(0).random
    parts: list[str] = []
    size = 0
    while size < nbytes:
        parts.append(_function(draw))
        size += len(parts[-1])
    return np.frombuffer("".join(parts)[:nbytes].encode("ascii"), np.uint8)


_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


def _function(draw: Callable[[], float]) -> str:
    def one(words: list[str]) -> str:
        return words[int(len(words) * draw() ** 2)]  # the first ones most often

    verb, noun, other, kind = one(_VERBS), one(_NOUNS), one(_NOUNS), one(_KINDS)
    lines = [f"def {verb}_{noun}({noun}, {other}={int(draw() * 100)}):"]
    if draw() < 0.5:
        lines.append(f'    """{verb.capitalize()} the {noun} of a {other}, and return its {kind}."""')
    # a third of the bytes cannot be predicted, as in source code: without them losses fall to 0.33, where
    # recipes differ by more per cent
    key = "".join([_LETTERS[int(draw() * len(_LETTERS))] for _ in range(80)])
    lines.append(f'    key = "{key}"')
    for _ in range(1 + int(draw() * 5)):
        word, form = one(_NOUNS), draw()
        if form < 0.3:
            lines.append(f"    {word} = {one(_VERBS)}_{noun}({noun}, {int(draw() * 1000)})")
        elif form < 0.5:
            lines += [
                f"    if {word} is None:",
                f'        raise ValueError("{word}: got None; wanted {kind}")',
            ]
        elif form < 0.7:
            lines += [f"    for {word} in {noun}:", f"        {other} += {one(_VERBS)}_{word}({word})"]
        elif form < 0.9:
            lines.append(f"    {word} = {kind}({noun}[{int(draw() * 10)}]) + {other}")
        else:
            lines.append(
                f"    # {one(_VERBS)} each {word} before the {noun}, as {one(_NOUNS)}s may have changed"
            )
    return "\n".join([*lines, f"    return {one(_NOUNS)}", "", "", ""])
