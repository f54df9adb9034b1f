"""The text that the demo, the examples and the notebooks train on, the same on all machines.

`shakespeare.txt.gz`: plays of William Shakespeare, in the public domain; the first 640,167 characters of the
corpus "tiny Shakespeare" of Andrej Karpathy's char-rnn (data/tinyshakespeare/input.txt), unchanged.
"""

from __future__ import annotations

import gzip
from pathlib import Path

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
