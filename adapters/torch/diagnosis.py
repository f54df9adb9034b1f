"""What `fp8moe.torch.diagnose` has found: records of numbers, the table, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fp8moe.layer.casts import UPSTREAM
from fp8moe.runtime.tables import table

__all__ = ["Diagnosis", "GradientDiagnosis", "LayerDiagnosis", "TensorDiagnosis"]

#: largest relative error of a value that e4m3 rounds to three bits after the point, and 2^-8 for the rounding
#: to bfloat16 of the values that are compared
ROUNDING = 2**-4 + 2**-8
#: of a scale: half of the smallest code's value, below which a value becomes zero
HALF_OF_SMALLEST = 2**-10
#: Share of the rows or columns that may be lost before it is reported. What is lost is at least 2^17.8 below
#: the largest of its block, which its norm does not show, but AdamW divides every gradient by its own size.
LOST = 0.01
#: `fp8moe.grouped_gemm` multiplies the scales of its two operands: below this exponent bits are lost
LEAST_PRODUCT = -126
OPERANDS = ("x", "w13"), ("a", "w2"), ("dy", "w2"), ("dh", "w13"), ("dy^T", "a^T"), ("dh^T", "x^T")


@dataclass(frozen=True)
class TensorDiagnosis:
    """A tensor of a layer, and what its cast has made of it.

    Errors are relative: the norm of the difference by that of the exact values.

    Attributes
    ----------
    error : float or None
        Of this cast alone; None for a tensor that is not quantised (y, and h unless ``save="fp8"``). Values
        that are not finite do not count.
    limit : float or None
        Largest error without saturation: each value is rounded by at most 2^-4 of itself, or 2^-10 of its
        scale. For the column-wise form "^T" of codes only the latter, of values below the format's normal
        ones: all others are moved exactly.
    deviation : float or None
        Error against the layer in bfloat16, from the same x and dy: of all casts until here. None where that
        is ``error``.
    saturated : float or None
        Share of the nonzero values that are larger than their code.
    flushed : float or None
        Share of the nonzero values that have the code of zero.
    lost : float or None
        Share of the nonzero columns, or of a weight's rows if that is larger, with an error above 2^-4, which
        rounding cannot cause: their values are flushed or saturated. They are rows and columns of the weight
        gradients, and of a weight its inputs and outputs.
    nonfinite : int or None
        Number of values that are infinite or NaN, before the cast.
    nonfinite_rows : int or None
        Number of rows with such a value.
    exponents : tuple of two int, or None
        Smallest and largest exponent of the scales of blocks that are not all zero.
    """

    error: float | None = None
    limit: float | None = None
    deviation: float | None = None
    saturated: float | None = None
    flushed: float | None = None
    lost: float | None = None
    nonfinite: int | None = None
    nonfinite_rows: int | None = None
    exponents: tuple[int, int] | None = None


@dataclass(frozen=True)
class GradientDiagnosis:
    """A gradient beside that of bfloat16.

    Attributes
    ----------
    cosine : float
        Of the angle between the two.
    norm_ratio : float
        Its norm by that of bfloat16.
    error : float
        Norm of their difference by that of bfloat16.
    limit : float or None
        2^-4 times the square root of the number of casts before it: the error if each cast rounded every
        value as far as it can, independently of the others. None where the layer's input differs between the
        two (router).
    of_casts : dict of str to float
        Error with one cast alone, all else in bfloat16; with its column-wise form.
    """

    cosine: float
    norm_ratio: float
    error: float
    limit: float | None
    of_casts: Mapping[str, float]


@dataclass(frozen=True)
class LayerDiagnosis:
    """A layer, in one of its forwards that had a backward.

    Attributes
    ----------
    name : str
        Of the module that computes the experts, in the model, with "[1]" and so on for its further calls.
    kind : str
        Name of the module's class.
    recipe : str
        The layer's, or that which was asked for.
    save : str
        As ``recipe``.
    tokens : int
        Rows of x.
    rerouted : int or None
        Tokens that the router of the bfloat16 run sent to other experts, because its input differed; the
        tensors and gradients of this layer are compared with the same routing. None for rows that a
        dispatcher had permuted.
    tensors : dict of str to TensorDiagnosis
        x, w13, h, a, w2, y, dy, dh, and "x^T", "a^T", "dy^T", "dh^T", as the weight gradients multiply them.
    gradients : dict of str to GradientDiagnosis
        dx, dprobs, dw13, dw2 from the same x and dy; "router", if the layer has one, from the two runs of the
        model.
    """

    name: str
    kind: str
    recipe: str
    save: str
    tokens: int
    rerouted: int | None
    tensors: Mapping[str, TensorDiagnosis]
    gradients: Mapping[str, GradientDiagnosis]

    def findings(self) -> Iterator[str]:
        """What is beyond the limits, and what to change."""
        for name, t in self.tensors.items():
            if t.nonfinite:
                where = "before this layer" if name == "x" else "after this layer" if name == "dy" else "here"
                yield (
                    f"{name}: {t.nonfinite} values in {t.nonfinite_rows} rows are infinite or NaN before the "
                    f'cast; they arise {where}, with recipe="bf16" too: lower the learning rate, clip '
                    "gradients, or look at the batch"
                )
            elif t.saturated:
                yield (
                    f"{name}: {t.saturated:.2%} of the values are larger than their code; wanted none: "
                    "fp8moe.quantize them again"
                )
            if t.lost is not None and t.lost > LOST and not t.nonfinite:
                change = 'recipe="fp8_blockwise", which has a scale for each column of 128 rows'
                if name[-2:] != "^T" or self.recipe == "fp8_blockwise":
                    change = 'recipe="bf16" for this layer, or smaller outliers'
                yield (
                    f"{name}: {t.lost:.1%} of its rows or columns are lost, 2^18 below the largest value "
                    f"of their blocks: {change}"
                )
        for names in OPERANDS:
            scales = [self.tensors[name].exponents for name in names]
            least = sum(e[0] for e in scales if e is not None)
            if None not in scales and least < LEAST_PRODUCT:
                change = "multiply the loss" if names[0][0] == "d" else f"multiply {names[0]}"
                yield (
                    f"{names[0]}: its smallest scale times that of {names[1]} is 2^{least}, where float32 "
                    f"loses bits: {change} by 2^{LEAST_PRODUCT - least}"
                )
        for name, g in self.gradients.items():
            if g.limit is not None and not g.error <= g.limit:  # NaN too
                text = (
                    f"{name}: error {_percent(g.error)}, above {_percent(g.limit)}, all casts at their worst"
                )
                if costs := sorted(g.of_casts, key=lambda cast: -_order(g.of_casts[cast])):
                    change = 'save="bf16"' if costs[0] == "h" else 'recipe="bf16" for this layer'
                    text += f"; most from the cast of {costs[0]} ({_percent(g.of_casts[costs[0]])}): {change}"
                yield text


@dataclass(frozen=True)
class Diagnosis:
    """Result of `diagnose`; ``str`` of it is a table.

    Attributes
    ----------
    layers : tuple of LayerDiagnosis
        In the order of their forwards.
    loss : float
        Of the run in FP8.
    loss_in_bf16 : float
        Of the run in bfloat16.
    rest : GradientDiagnosis or None
        Gradients of all other parameters of the model, together, from the two runs; None if there are none.
    not_reached : tuple of str
        Layers that ran in the forward and that no gradient has reached, of which nothing is known.
    """

    layers: tuple[LayerDiagnosis, ...]
    loss: float
    loss_in_bf16: float
    rest: GradientDiagnosis | None
    not_reached: tuple[str, ...]

    @property
    def findings(self) -> list[str]:
        """What is beyond the limits, by layer and tensor, and what to change; empty if nothing is."""
        return [f"{layer.name}: {text}" for layer in self.layers for text in layer.findings()]

    @property
    def costs(self) -> dict[str, float]:
        """Error of a gradient that each cast causes alone, the most costly first: the root of the mean square
        over layers and gradients."""
        errors: dict[str, list[float]] = {}
        for g in (g for layer in self.layers for g in layer.gradients.values()):
            for cast, error in g.of_casts.items():
                errors.setdefault(cast, []).append(error)
        means = {cast: math.hypot(*of) / math.sqrt(len(of)) for cast, of in errors.items()}
        return dict(sorted(means.items(), key=lambda item: -_order(item[1])))

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; None for numbers that are not finite.

        Returns
        -------
        dict
            The attributes, by name.
        """
        plain: dict[str, Any] = _plain(self)
        return plain | {"costs": _plain(self.costs), "findings": self.findings}

    def __str__(self) -> str:
        lines = []
        for layer in self.layers:
            routed = (
                "rows permuted before"
                if layer.rerouted is None
                else f"{layer.rerouted} routed otherwise in bf16"
            )
            about = f'{layer.kind}, {layer.recipe}, save="{layer.save}", {layer.tokens} tokens, {routed}'
            lines += [f"{layer.name}: {about}", "", *_table_of_tensors(layer.tensors), ""]
            lines += [*_table_of_gradients(layer.gradients), ""]
        costs = ", ".join(f"{cast} {_percent(error)}" for cast, error in self.costs.items())
        lines.append(f"error of a gradient by one cast alone, over all layers: {costs}")
        lines.append(f"loss {self.loss:.6g}, in bf16 {self.loss_in_bf16:.6g}")
        if self.rest is not None:
            lines.append(
                f"gradients of all other parameters: cosine {self.rest.cosine:.6f}, norm "
                f"{self.rest.norm_ratio:.4f} of bf16's"
            )
        if self.not_reached:
            lines.append(f"not diagnosed, as no gradient reached them: {', '.join(self.not_reached)}")
        return "\n".join(
            [*lines, "", *(self.findings or ["Every error is within the limits of the format."])]
        )


def _table_of_tensors(tensors: Mapping[str, TensorDiagnosis]) -> list[str]:
    rows = [["tensor", "error", "limit", "vs bf16", "saturated", "flushed", "lost", "not finite", "scales"]]
    for name, t in tensors.items():
        scales = "" if t.exponents is None else f"2^{t.exponents[0]} to 2^{t.exponents[1]}"
        shares = (t.error, t.limit, t.deviation, t.saturated, t.flushed, t.lost)
        not_finite = "" if t.nonfinite is None else str(t.nonfinite)
        rows.append([name, *map(_percent, shares), not_finite, scales])
    return table(rows)


def _table_of_gradients(gradients: Mapping[str, GradientDiagnosis]) -> list[str]:
    casts = list(dict.fromkeys(cast for g in gradients.values() for cast in g.of_casts))
    rows = [["gradient", "cosine", "norm", "error", "limit", *(f"of {cast}" for cast in casts)]]
    for name, g in gradients.items():
        of_casts = (_percent(g.of_casts.get(cast)) for cast in casts)
        rows.append(
            [name, f"{g.cosine:.5f}", f"{g.norm_ratio:.4f}", _percent(g.error), _percent(g.limit), *of_casts]
        )
    return table(rows)


def _percent(share: float | None) -> str:
    return "" if share is None else "0" if share == 0 else f"{share:.2%}" if share > 5e-5 else f"{share:.0e}"


def _order(error: float) -> float:
    return error if error == error else math.inf


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {name: _plain(v) for name, v in value.items()}
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def limit_of(gradient: str, casts: tuple[str, ...]) -> float:
    """`GradientDiagnosis.limit` of a layer with these casts."""
    return float(2**-4 * math.sqrt(len(set(UPSTREAM[gradient]) & set(casts))))
