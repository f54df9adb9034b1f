"""What the experts compute between their two products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from fp8moe import checks
from fp8moe.records import Options

Kind = Literal["swiglu", "geglu", "geglu_tanh", "quick_geglu", "relu2"]


def halves_of(kind: str) -> int:
    """Of h: gates and ups, or without a gate one. A function, as torch's compiler calls no methods of a
    record that it takes for a constant."""
    return 1 if kind == "relu2" else 2


@dataclass(frozen=True)
class Activation(Options):
    """What the experts compute between their products: y = act(a) * (b + linear_offset), for h = (a | b).

    Without a gate y = act(h).

    Attributes
    ----------
    kind : "swiglu", "geglu", "geglu_tanh", "quick_geglu" or "relu2"
        "swiglu": act(a) = a * sigmoid(alpha * a), with alpha = 1 SiLU, with 1.702 the quick GELU; "geglu":
        GELU, a * Phi(a) with the normal distribution's Phi; "geglu_tanh": its approximation by tanh, as
        torch's ``gelu(approximate="tanh")``; "quick_geglu": "swiglu" with alpha = 1.702, which it becomes.
        "relu2": max(h, 0)^2, without a gate: h is [P, F] and w13 [E, F, H], and the others do not apply.
    clamp : float or None
        a <= clamp and -clamp <= b <= clamp first; None: neither.
    alpha : float
        Of "swiglu" only.
    linear_offset : float
        With alpha 1.702, clamp 7 and linear_offset 1 "swiglu" is gpt-oss's activation.

    Raises
    ------
    TypeError, ValueError
        For what is no such number.

    Notes
    -----
    The GLU variants are those of Shazeer (arXiv 2002.05202), GELU and its approximation those of Hendrycks
    and Gimpel (arXiv 1606.08415), the squared ReLU that of Primer (arXiv 2109.08668).
    """

    kind: Kind = "swiglu"
    clamp: float | None = None
    alpha: float = 1.0
    linear_offset: float = 0.0

    def __post_init__(self) -> None:
        checks.choice("kind", self.kind, get_args(Kind))
        clamp = None if self.clamp is None else checks.number("clamp", self.clamp, 0.0)
        for name, value in (
            ("clamp", clamp),
            ("alpha", checks.number("alpha", self.alpha, 0.0)),
            ("linear_offset", checks.number("linear_offset", self.linear_offset, -np.inf)),
        ):
            object.__setattr__(self, name, value)
        if self.kind != "swiglu" and self.alpha != 1.0:
            raise ValueError(f'alpha: got {self.alpha} with kind={self.kind!r}; wanted it with "swiglu" only')
        if self.kind == "quick_geglu":
            object.__setattr__(self, "kind", "swiglu")
            object.__setattr__(self, "alpha", 1.702)
        for name, value in (("clamp", clamp), ("linear_offset", self.linear_offset or None)):
            if not self.gated and value is not None:
                raise ValueError(f"{name}: got {value} with kind={self.kind!r}; wanted a gated kind")

    @property
    def gated(self) -> bool:
        """Whether h is (a | b)."""
        return halves_of(self.kind) == 2

    def width(self, columns: int) -> int:
        """F, of h's columns."""
        return columns // 2 if self.gated else columns

    def columns(self, width: int) -> int:
        """Columns of h, of F."""
        return 2 * width if self.gated else width


SWIGLU = Activation()
