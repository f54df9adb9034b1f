"""The activation function that the experts compute between their two GEMMs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from fp8moe.records import Options
from fp8moe.runtime import checks

Kind = Literal[
    "swiglu", "geglu", "geglu_tanh", "quick_geglu", "silu", "gelu", "gelu_tanh", "quick_gelu", "relu2"
]
#: the kinds with a gate, and the kind without one that computes the same function
GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "quick_geglu": "quick_gelu"}


def halves_of(kind: str) -> int:
    """How many halves h has: 2 (gate and up projection), or 1 for an activation without a gate. A function
    and not a method, because torch.compile cannot call methods of a record that it treats as a constant."""
    return 2 if kind in GATED else 1


@dataclass(frozen=True)
class Activation(Options):
    """The activation between the experts' two GEMMs: y = act(a) * (b + linear_offset), for h = (a | b).

    Without a gate, y = act(h): h is [P, F] and w13 is [E, F, H].

    Attributes
    ----------
    kind : "swiglu", "geglu", "geglu_tanh", "quick_geglu", "silu", "gelu", "gelu_tanh", "quick_gelu", "relu2"
        "swiglu", and without a gate "silu": act(a) = a * sigmoid(alpha * a), which is SiLU for alpha = 1 and
        quick GELU for alpha = 1.702. "geglu", "gelu": GELU, a * Phi(a), where Phi is the normal distribution
        function. "geglu_tanh", "gelu_tanh": GELU's tanh approximation, as torch's
        ``gelu(approximate="tanh")``. "quick_geglu", "quick_gelu": stored as "swiglu" and "silu" with alpha =
        1.702. "relu2": max(h, 0)^2, without a gate.
    clamp : float or None
        First clamps a to at most clamp, and b to [-clamp, clamp]. None: no clamping. For gated kinds only.
    alpha : float
        Slope of the sigmoid, for "swiglu" and "silu" only.
    linear_offset : float
        Added to b, for gated kinds only. "swiglu" with alpha 1.702, clamp 7 and linear_offset 1 is gpt-oss's
        activation.

    Raises
    ------
    TypeError, ValueError
        For an unknown kind, or a value that is not a finite float32 number or does not apply to the kind.

    Notes
    -----
    Sources: the GLU variants are from Shazeer (arXiv 2002.05202), GELU and its approximation from Hendrycks
    and Gimpel (arXiv 1606.08415), the squared ReLU from Primer (arXiv 2109.08668).
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
            # -0.0 becomes 0.0: ranks compare representations
            object.__setattr__(self, name, value if value is None else value + 0.0)
        if self.kind not in ("swiglu", "silu") and self.alpha != 1.0:
            raise ValueError(
                f'alpha: got {self.alpha} with kind={self.kind!r}; wanted it with "swiglu" and "silu" only'
            )
        if self.function == "quick_gelu":
            object.__setattr__(self, "kind", "swiglu" if self.gated else "silu")
            object.__setattr__(self, "alpha", 1.702)
        for name, value in (("clamp", clamp), ("linear_offset", self.linear_offset or None)):
            if not self.gated and value is not None:
                raise ValueError(f"{name}: got {value} with kind={self.kind!r}; wanted a gated kind")

    @property
    def gated(self) -> bool:
        """Whether h consists of two halves (a | b)."""
        return self.kind in GATED

    @property
    def function(self) -> str:
        """The kind that computes act without a gate: "silu", "gelu", "gelu_tanh" or "relu2"."""
        return GATED.get(self.kind, self.kind)

    def width(self, columns: int) -> int:
        """F, the number of columns of y, given the number of columns of h."""
        return columns // 2 if self.kind in GATED else columns

    def columns(self, width: int) -> int:
        """The number of columns of h, given F (``width``)."""
        return 2 * width if self.gated else width


SWIGLU = Activation()
