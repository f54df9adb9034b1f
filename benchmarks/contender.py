"""The records of `compare`: a part's work, and each library's implementation of it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Results = tuple[Any, ...]
Step = Callable[[], Results]


@dataclass(frozen=True)
class TrainingStep:
    """A `Step` of which the forward can be made alone, as in a training run, with what a backward needs.

    leaves, dy: for a backward that adds to ``grad``; without autograd there are none.
    """

    forward: Callable[[], Any]
    whole: Step
    leaves: Results = ()
    dy: Any = None

    def __call__(self) -> Results:
        return self.whole()


@dataclass(frozen=True)
class Contender:
    """One library's implementation of a part's work.

    make: called with the part's inputs; returns the step to time, whose results are like the oracle's. Raises
        if this machine cannot run it.
    needs: modules that it imports. install: command that installs them.
    bound: largest relative error (of norms) of a correct result. decode: converts the results of a step to
        the oracle's form, with None for one that it does not have; not timed.
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
    """Work that several libraries implement. inputs: creates the inputs for a device and a shape. oracle:
    computes the results in float64. flops: operations for a shape."""

    name: str
    contenders: tuple[Contender, ...]
    inputs: Callable[..., Any]
    oracle: Callable[[Any], Results]
    outputs: tuple[str, ...]
    flops: Callable[..., int]
