"""The texts that the demo, the examples and the notebooks train on, the same on all machines.

`shakespeare.txt.gz`: plays of William Shakespeare, in the public domain; the first 640,167 characters of the
corpus "tiny Shakespeare" of Andrej Karpathy's char-rnn (data/tinyshakespeare/input.txt), unchanged.

`generated_text`: source code that is drawn at random, as much as a longer training needs. The standard
library's source would differ by machine: 10 to 31 MB, by version and distribution.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np


def shakespeare() -> np.ndarray:
    """The corpus of plays, as uint8."""
    packed = (Path(__file__).parent / "shakespeare.txt.gz").read_bytes()
    return np.frombuffer(gzip.decompress(packed), np.uint8)


def split_in_pieces(text: np.ndarray, count: int) -> tuple[np.ndarray, list[bytes]]:
    """(pieces of the text, as int32; their bytes): the bytes that the text has, and the pairs that are most
    frequent, one after the other (byte pair encoding, arXiv 1508.07909), until there are ``count``.

    Only letters form pairs, with a space before them at most, so that a piece is a part of one word.
    """
    values = np.unique(text)
    vocabulary = [bytes([v]) for v in values]
    pieces = np.searchsorted(values, text).astype(np.int32)
    while len(vocabulary) < count:
        starts = np.array([piece.isalpha() for piece in vocabulary], bool)
        words = np.array([piece == b" " or piece.lstrip(b" ").isalpha() for piece in vocabulary], bool)
        is_pair = words[pieces[:-1]] & starts[pieces[1:]]
        pairs = pieces[:-1] * count + pieces[1:]
        counts = np.bincount(pairs[is_pair])
        if not counts.size or counts[best := int(counts.argmax())] < 2:
            break  # a short text has no more
        at = np.flatnonzero(is_pair & (pairs == best))
        if best // count == best % count:  # of "aaa" the first two
            run = np.cumsum(np.r_[True, np.diff(at) > 1])
            first_of_run = at[np.searchsorted(run, run)]
            at = at[(at - first_of_run) % 2 == 0]
        pieces[at] = len(vocabulary)
        pieces = np.delete(pieces, at + 1)
        vocabulary.append(vocabulary[best // count] + vocabulary[best % count])
    return pieces, vocabulary


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
