"""The records of tensors that one half of the layer saves for another: the forward for the backward, and the
backward of the inputs for that of the weights."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from fp8moe.layer.options import LayerOptions
from fp8moe.layer.permuted_rows import PlacedRows
from fp8moe.layer.recipes import of_h
from fp8moe.records import PermutationPlan, Record
from fp8moe.runtime.record_trees import nbytes


@dataclass(frozen=True)
class Saved(Record):
    """The tensors that `moe_forward` saves for `moe_backward`.

    options: the layer's, also for the backward. x: the input of fc1. fp8_flow: FP8, before the permutation (k
    times smaller); fp8_blockwise: FP8, permuted; bf16: bfloat16, permuted. h, a: fc1's output and the
    activation's output; None with recompute, which computes them again. fp8_flow: a, of which the backward
    needs the transposed codes, is made of h by the pass that makes dh, and saved only if no gradient needs h;
    with save="fp8" h is e4m3 codes with power-of-two scales of 1 x 128 values of each half.
    w13, w2: the weights, as given or quantised. Quantised weights are saved without codes that the backward
    does not read (`LayerOptions.saved_orientations`). bias13: the forward's, if it had one. ``nbytes`` does
    not include the weights. overwritten: how often the codes of w13 and of w2 had been overwritten
    (`quantize_weights` with ``out=``) when the forward read them; None for weights that the forward
    quantised. later: with ``overlap_chunks``, the records of the chunks after the first, without the weights.
    """

    options: LayerOptions
    plan: PermutationPlan | PlacedRows
    probs: Any
    x: Any
    h: Any
    a: Any
    w13: Any
    w2: Any
    bias13: Any = None
    route: Any = None  # of expert parallelism
    overwritten: tuple[int | None, int | None] = (None, None)
    later: tuple[Saved, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes saved for the backward, without the weights."""
        return nbytes(self.plan, self.probs, self.x, self.h, self.a, self.route, self.later)

    @property
    def num_tokens(self) -> int:
        """Number of rows of dy."""
        if self.route is None:
            return self.plan.num_tokens
        return sum(chunk.route.num_tokens for chunk in (self, *self.later))

    def needed_for(self, gradients: Collection[str]) -> Saved:
        """A copy without the tensors that only other gradients need: with frozen weights (LoRA), without x
        and a; with no gradients, only the plan and the route, so that errors can name what is missing."""
        if not gradients:
            return replace(self, probs=None, x=None, h=None, a=None, w13=None, w2=None, bias13=None)
        x = self.x if "dw13" in gradients or self.options.recompute else None
        makes_a = "dw2" in gradients and self.a is None
        h = self.h if of_h(gradients) or makes_a else None
        return replace(self, x=x, h=h, a=self.a if "dw2" in gradients else None)


@dataclass(frozen=True)
class SavedForWeights(Record):
    """The operands of the weight gradients, which `moe_backward_input` saves for `moe_backward_weight`.

    Size in bytes without scales, for P permuted rows, T tokens, and F padded as in the weights: "fp8_flow" T
    H (dy) + P F (a) + T H (x) + 2 P F (dh); "fp8_blockwise" P H + P F + P H + 2 P F; "bf16" twice that of
    "fp8_blockwise". x, and a unless the backward has made it, share the forward's memory, and dy may share
    the caller's: this memory must not be modified before the weight gradients have been computed. The weights
    and h are not included, so the forward's `Saved` may be deleted.

    Attributes
    ----------
    dy, a : arrays or QuantTensor, or None
        Operands of w2's gradient; None if it is not requested. In fp8_flow dy is FP8 and not yet permuted,
        and a column-wise; in the others dy is permuted, and a row-wise.
    dh, x : arrays or QuantTensor, or None
        Operands of w13's gradient; None if it is not requested. dh is column-wise in fp8_flow, in the others
        row-wise; x as in `Saved`.
    dh_sums : array or None
        For bias13's gradient: sums of dh's columns (see `fp8moe.ops.bias.sums_of_chunks`), 8 F bytes per 128
        rows.
    later : tuple of SavedForWeights
        With ``overlap_chunks``, the records of the chunks after the first.
    """

    options: LayerOptions
    plan: PermutationPlan | PlacedRows
    dy: Any
    a: Any
    dh: Any
    x: Any
    dh_sums: Any = None
    later: tuple[SavedForWeights, ...] = ()

    def operands(self) -> dict[str, Any]:
        """The operands by name: what a recipe's ``backward_weight`` takes."""
        return {name: getattr(self, name) for name in ("dy", "a", "dh", "x", "dh_sums")}

    @property
    def nbytes(self) -> int:
        """Total bytes, including memory shared with the forward's `Saved` and with the caller."""
        return nbytes(self.plan, self.dy, self.a, self.dh, self.x, self.dh_sums, self.later)
