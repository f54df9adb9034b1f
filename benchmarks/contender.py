"""What `compare` compares: a part's work, and each library's way to do it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Results = tuple[Any, ...]
Step = Callable[[], Results]


@dataclass(frozen=True)
class Contender:
    """One library's way to do a part's work.

    make: called with the part's inputs; returns the step that is timed, which returns what the part's oracle
        returns, or raises if this machine cannot run it.
    needs: modules that it imports; install: the command that brings them.
    bound: the largest relative error (of norms) of a right result. decode: what the oracle returns, from what
        a step returned; it is not timed.
    """

    name: str
    make: Callable[[Any], Step]
    bound: float
    needs: tuple[str, ...] = ()
    install: str = ""
    cuda_only: bool = False
    decode: Callable[[Results], Results] = tuple

    def missing(self) -> bool:
        return any(importlib.util.find_spec(name) is None for name in self.needs)


@dataclass(frozen=True)
class Part:
    """Work that several libraries do. inputs: made for a device and a shape; oracle: the results in float64;
    flops: of a shape."""

    name: str
    contenders: tuple[Contender, ...]
    inputs: Callable[..., Any]
    oracle: Callable[[Any], Results]
    outputs: tuple[str, ...]
    flops: Callable[..., int]
