"""The options of an expert layer that every framework's form of it takes, in one record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, TypedDict

from fp8moe.activation import Activation
from fp8moe.layer.recipes import RECIPES, Recipe, RecipeName
from fp8moe.ops.grouped_gemm import BACKENDS, check_limit
from fp8moe.records import Options
from fp8moe.runtime import checks

RECOMPUTE = None, "moe_expert"
SAVE = "bf16", "fp8"
WEIGHT_COPIES = "both", "rowwise"


class CommonArguments(TypedDict, total=False):
    save: str
    backend: str | None
    num_sms: int | None
    weight_copies: str


class ArgumentsBesideRecipe(CommonArguments, total=False):
    """`LayerArguments` for functions that name the recipe themselves."""

    recompute: str | None


class ArgumentsBesideRecompute(CommonArguments, total=False):
    """`LayerArguments` for functions whose model says what is computed again."""

    recipe: RecipeName


class LayerArguments(ArgumentsBesideRecipe, ArgumentsBesideRecompute, total=False):
    """The options as keyword arguments of a public function: ``**options: Unpack[LayerArguments]``. The
    activation is not among them: of some layers the model says it."""


@dataclass(kw_only=True)
class LayerFields:
    """The same as fields of a configuration, which is a dataclass derived from this one."""

    recipe: RecipeName = "fp8_flow"
    """ "fp8_flow", "fp8_blockwise" or "bf16", as in `fp8moe.moe_forward`."""
    recompute: str | None = None
    """None, or "moe_expert": the backward recomputes the first GEMM and the activation."""
    save: str = "bf16"
    """Form in which fc1's output is saved for the backward: "bf16", as it is, or "fp8", half the bytes."""
    backend: str | None = None
    """Kernels of the GEMMs, as in `fp8moe.grouped_gemm`; None: the fastest."""
    num_sms: int | None = None
    """Maximum number of multiprocessors that each GEMM may use; None: all."""
    weight_copies: str = "both"
    """Orientations of the FP8 weights that are kept: "both", or "rowwise", half the memory."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in type(self).__dataclass_fields__:
            raise AttributeError(
                f"{name}: got {value!r}; wanted one of {', '.join(type(self).__dataclass_fields__)}"
            )
        super().__setattr__(name, value)


@dataclass(frozen=True)
class LayerOptions(Options):
    """How a layer computes its experts: the attributes are those of `fp8moe.moe_forward`.

    A public function makes one of its arguments, which checks them, and hands it on whole. Raises TypeError
    or ValueError for other values; limits of a device are checked where the GEMMs run.
    """

    activation: Activation  # Dynamo of torch 2.11 takes no record as the default of a field
    recipe: RecipeName = "fp8_flow"
    recompute: str | None = None
    save: str = "bf16"
    backend: str | None = None
    num_sms: int | None = None
    weight_copies: str = "both"

    def __post_init__(self) -> None:
        checks.choice("recipe", self.recipe, RECIPES)
        checks.choice("recompute", self.recompute, RECOMPUTE)
        checks.choice("save", self.save, SAVE)
        if self.save == "fp8" and not self.precision.codes_h:
            raise ValueError(f"save: got 'fp8' with recipe={self.recipe!r}; wanted it with 'fp8_flow'")
        if self.save == "fp8" and self.recompute is not None:
            raise ValueError(
                f"save: got 'fp8' with recompute={self.recompute!r}, with which fc1's output is not saved; "
                "wanted one of them"
            )
        checks.options("activation", self.activation, Activation)
        checks.choice("backend", self.backend, BACKENDS)
        checks.choice("weight_copies", self.weight_copies, WEIGHT_COPIES)
        object.__setattr__(self, "num_sms", check_limit(self.num_sms, self.backend))

    @property
    def precision(self) -> Recipe:
        """What follows from the recipe's name."""
        return RECIPES[self.recipe]

    @property
    def arguments(self) -> dict[str, Any]:
        """The same as the keyword arguments of a function, in code that Dynamo traces: it has no ``vars`` of
        a frozen record (torch 2.11)."""
        return {name: getattr(self, name) for name in _NAMES}

    @property
    def limits_gemms(self) -> bool:
        """Whether the GEMMs are not free to use any backend and all multiprocessors."""
        return self.backend is not None or self.num_sms is not None

    @property
    def keeps_columnwise(self) -> bool:
        """Whether FP8 weights are made and kept in both orientations; otherwise each backward derives the
        column-wise codes."""
        return self.weight_copies == "both"

    def saved_orientations(self, name: str, has_columnwise: bool) -> tuple[bool, bool]:
        """Whether the row-wise and the column-wise codes of a weight, "w13" or "w2", are saved for the
        backward. dgrad multiplies by column-wise ones; row-wise ones are read by fc1 with recompute, or where
        dgrad's are derived from them."""
        columnwise = has_columnwise and self.keeps_columnwise
        return not columnwise or (name == "w13" and self.recompute is not None), columnwise

    @property
    def gemm(self) -> dict[str, Any]:
        """The arguments of each GEMM."""
        return {"backend": self.backend, "num_sms": self.num_sms}


_made = lru_cache(maxsize=256, typed=True)(LayerOptions)


def layer_options(*values: Any) -> LayerOptions:
    """`LayerOptions` of all fields in their order: one object for the same values, checked once."""
    try:
        return _made(*values)
    except TypeError:  # also of what is not hashable, which the constructor refuses by name
        return LayerOptions(*values)


_NAMES = tuple(field.name for field in fields(LayerOptions))


def options_of(function: str, given: Mapping[str, Any], **known: Any) -> LayerOptions:
    """The options of a function: its ``**options``, and what it knows without them. Raises TypeError, by the
    function's name as Python does, for another name among the former."""
    for name in given:
        if name in known or name not in _NAMES:
            wanted = ", ".join(n for n in _NAMES if n not in known)
            raise TypeError(
                f"{function}() got an unexpected keyword argument {name!r}; its options are {wanted}"
            )
    return LayerOptions(**known, **given)
