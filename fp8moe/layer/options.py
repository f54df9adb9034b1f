"""The options of an expert layer that every framework's form of it takes, checked in one place."""

from __future__ import annotations

from dataclasses import dataclass

from fp8moe.activation import SWIGLU, Activation
from fp8moe.layer.recipes import RECIPES, RECOMPUTE, Recipe
from fp8moe.ops.grouped_gemm import BACKENDS, check_limit
from fp8moe.records import Options
from fp8moe.runtime import checks


@dataclass(frozen=True)
class LayerOptions(Options):
    """How a layer computes its experts: the attributes are those of `fp8moe.moe_forward`. Raises TypeError or
    ValueError for other values; limits of a device are checked where the products run."""

    recipe: Recipe = "fp8_flow"
    recompute: str | None = None
    activation: Activation = SWIGLU
    backend: str | None = None
    num_sms: int | None = None

    def __post_init__(self) -> None:
        checks.choice("recipe", self.recipe, RECIPES)
        checks.choice("recompute", self.recompute, RECOMPUTE)
        checks.options("activation", self.activation, Activation)
        checks.choice("backend", self.backend, BACKENDS)
        object.__setattr__(self, "num_sms", check_limit(self.num_sms, self.backend))
