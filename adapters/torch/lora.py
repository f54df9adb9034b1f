"""Low-rank adapters (LoRA) of the experts in torch, with gradients: the halves of `fp8moe.layer.lora`, each a
node of autograd, with the activation between them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8moe import Quantized
from fp8moe.activation import halves_of
from fp8moe.adapters.torch import ops as torch_ops
from fp8moe.adapters.torch.arguments import PLACEHOLDER
from fp8moe.adapters.torch.halves import asked_for
from fp8moe.adapters.torch.library import as_bytes, dispatch_modes, once_differentiable, operator
from fp8moe.adapters.torch.operands import Operands, codes_now, padded, round_up_to_block
from fp8moe.adapters.torch.operation import check_float, is_recorded, on_hopper, plan_with
from fp8moe.layer import lora as core
from fp8moe.layer.moe import read_by_backward
from fp8moe.layer.options import LayerOptions
from fp8moe.records import PermutationPlan
from fp8moe.runtime import checks
from fp8moe.runtime.record_trees import arrays_in, map_arrays

__all__ = ["LoRA"]


@dataclass(frozen=True, eq=False)
class LoRA:
    """A low-rank adapter of a weight of the experts: adds scaling * B[e] @ A[e] @ dropout(row) to its GEMM.

    Attributes
    ----------
    a : Tensor, floating point, [E, r, in]
        Matrix A of each expert: in is H for w13, F for w2. It gets a gradient in its dtype, as ``b`` does.
    b : Tensor, floating point, [E, out, r]
        Matrix B of each expert: out is 2F (gates before ups) for w13, H for w2.
    scaling : float
        alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA. B is multiplied by it before B is rounded to
        the rows' dtype.
    dropout : float
        Probability with which a value of the rows that A reads is zero, the others being divided by 1 -
        dropout; by torch's generator. For w13 the k experts of a token read the same values. Pass 0 to
        evaluate.

    Raises
    ------
    TypeError, ValueError
        For a wrong kind, shape or range, naming the field.

    Examples
    --------
    >>> import torch
    >>> from fp8moe.torch import LoRA
    >>> LoRA(torch.ones(4, 16, 256), torch.zeros(4, 512, 16), scaling=2.0).rank
    16
    """

    a: Tensor
    b: Tensor
    scaling: float = 1.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("a", "b"):
            check_float(name, getattr(self, name))
        checks.shape("a", self.a, ("E", "r", "in"))
        experts, rank, _ = self.a.shape
        checks.shape("b", self.b, (experts, "out", rank))
        if rank == 0:
            raise ValueError(f"a: got shape {list(self.a.shape)}; wanted a rank of at least 1")
        for name in ("scaling", "dropout"):
            if isinstance(value := getattr(self, name), bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name}: got {value!r}; wanted a number")
        if not math.isfinite(self.scaling):
            raise ValueError(f"scaling: got {self.scaling}; wanted a finite number")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout: got {self.dropout}; wanted a number from 0 to below 1")

    @property
    def rank(self) -> int:
        """The number of rows of each A."""
        return int(self.a.shape[1])

    @classmethod
    def from_peft(
        cls, lora_a: Tensor, lora_b: Tensor, num_experts: int, *, scaling: float = 1.0, dropout: float = 0.0
    ) -> LoRA:
        """The adapter that PEFT's ``target_parameters`` stores for the weight of all experts: views of its
        matrices, through which gradients reach them.

        Parameters
        ----------
        lora_a : Tensor, floating point, [E * r, in]
            ``lora_A.weight``: the r rows of expert 0, then of expert 1, and so on.
        lora_b : Tensor, floating point, [out, r * E]
            ``lora_B.weight``: the first columns of all experts, then their second columns, and so on.
        num_experts : int
            E.
        scaling : float
            As in the class; PEFT's ``scaling``.
        dropout : float
            As in the class.

        Returns
        -------
        LoRA
            The adapter.

        Raises
        ------
        TypeError, ValueError
            For wrong shapes, and as the class.

        Examples
        --------
        >>> import torch
        >>> from fp8moe.torch import LoRA
        >>> LoRA.from_peft(torch.ones(4 * 8, 256), torch.zeros(512, 8 * 4), 4).b.shape
        torch.Size([4, 512, 8])
        """
        experts = checks.integer("num_experts", num_experts, 1)
        check_float("lora_a", lora_a, 2)
        check_float("lora_b", lora_b, 2)
        if lora_a.shape[0] % experts or lora_a.shape[0] != lora_b.shape[1]:
            raise ValueError(
                f"lora_a, lora_b: got shapes {list(lora_a.shape)} and {list(lora_b.shape)} for {experts} "
                "experts; wanted [E * r, in] and [out, r * E]"
            )
        a, b = lora_a.unflatten(0, (experts, -1)), lora_b.unflatten(1, (-1, experts)).permute(2, 0, 1)
        return cls(a, b, scaling, dropout)


Pair = tuple[LoRA | None, LoRA | None]


def check_lora(lora: Any, weights: Any, bias13: Any, options: LayerOptions, comm: Any) -> Pair:
    """Checks the adapters of a call's w13 and w2, and what they cannot be combined with. weights: as
    `checked_weights` gives them."""
    if type(lora) is not tuple or len(lora) != 2 or not all(w is None or isinstance(w, LoRA) for w in lora):
        raise TypeError(
            f"lora: got {type(lora).__name__}; wanted a tuple, fp8moe.torch.LoRA or None for w13 and for w2"
        )
    if comm is not None:
        raise NotImplementedError(f"comm: got a {type(comm).__name__} with lora; wanted None")
    if options.save != "bf16":
        raise NotImplementedError(f"save: got {options.save!r} with lora; wanted 'bf16'")
    w13, w2 = weights
    parts = w13 if isinstance(w13, tuple) else (w13,)
    for name, w in (*(("w13", w) for w in parts), ("w2", w2), ("bias13", bias13)):
        if isinstance(w, Tensor) and w.requires_grad:
            raise NotImplementedError(
                f"{name}: got a tensor that requires grad with lora; wanted frozen weights; call "
                f"{name}.requires_grad_(False)"
            )
    experts, rows, hidden = parts[0].shape[0], sum(w.shape[1] for w in parts), parts[0].shape[2]
    ffn, halves = w2.shape[2], halves_of(options.activation.kind)
    first, second = lora
    if isinstance(w13, Quantized) and first is not None:  # whose F may be padded
        width = first.b.shape[1] // halves
        rows = halves * (width if width and round_up_to_block(width) == rows // halves else rows // halves)
    if isinstance(w2, Quantized) and second is not None and round_up_to_block(second.a.shape[2]) == ffn:
        ffn = second.a.shape[2]
    for name, w, width, height in (("w13", first, hidden, rows), ("w2", second, ffn, hidden)):
        if w is not None:
            checks.shape(f"lora of {name}: a", w.a, (experts, w.rank, width))
            checks.shape(f"lora of {name}: b", w.b, (experts, height, w.rank))
    if first is not None and second is not None and rows != halves * ffn:  # of codes, which are padded
        raise ValueError(
            f"lora: got b of w13 {list(first.b.shape)} and a of w2 {list(second.a.shape)}; wanted the same F "
            "in both"
        )
    return lora


def experts_with_lora(
    x: Tensor, weights: Operands, ids: Tensor, probs: Tensor, options: LayerOptions, lora: Pair
) -> Tensor:
    """As `fp8moe.adapters.torch.experts.experts`, with adapters of `check_lora` beside frozen weights."""
    if is_recorded({"x": x}):
        raise NotImplementedError(
            "lora: got a call in make_fx or torch.export, or with fake tensors; wanted one outside, with "
            "values, because no operator stands for it"
        )
    (w13, w2), codes, _, _, bias13 = weights
    if codes is None and options.precision.quantizes:
        codes = codes_now((w13, w2), options)
    w13, w2 = (w.detach() for w in (w13, w2)) if codes is None else map_arrays(as_bytes, tuple(codes))
    first, second = lora
    if probs.dtype != torch.float64:
        probs = probs.float()
    width, halves, ffn = w2.shape[2], halves_of(options.activation.kind), w2.shape[2]
    if second is not None and (missing := width - (ffn := second.a.shape[2])):
        second = LoRA(padded(second.a, 2, 1, missing), second.b, second.scaling, second.dropout)
    if first is not None and (missing := width - (ffn := first.b.shape[1] // halves)):
        first = LoRA(first.a, padded(first.b, 1, halves, missing), first.scaling, first.dropout)
    operands = x, w13, w2, bias13, ids, probs, options, ffn, first, second
    if options.recompute is None or not torch.is_grad_enabled():
        return _halves(*operands)
    calls = itertools.count()
    return recomputed(lambda *given: _halves(*given, again=next(calls) > 0), *operands)


def _halves(
    x: Tensor,
    w13: Any,
    w2: Any,
    bias13: Tensor | None,
    ids: Tensor,
    probs: Tensor,
    options: LayerOptions,
    ffn: int,
    first: LoRA | None,
    second: LoRA | None,
    *,
    again: bool = False,
) -> Tensor:
    """ffn: F without the codes' padding. again: for what the backward reads alone; y is not computed."""
    plans: list[Any] = []
    rows: Any = x, _dropped(x, first), probs, *_matrices(first), ids, w13, w2, bias13, _scaling(first)
    h, row_probs = _First.apply(*rows, options, ffn, plans)
    act = torch_ops.swiglu(h, row_probs, activation=options.activation)
    rows = act, _dropped(act, second), *_matrices(second), w2, _scaling(second)
    return _Second.apply(*rows, options, ffn, *plans, again)  # type: ignore[no-any-return]


def recomputed(function: Callable[..., Tensor], *operands: Any) -> Tensor:
    """``function(*operands)``, which the backward computes again. The operands' tensors are arguments of
    torch's checkpoint, which saves these: one that has changed since is noticed."""
    like = map_arrays(lambda _: PLACEHOLDER, operands)

    def compute(*tensors: Tensor) -> Tensor:
        remaining = iter(tensors)
        return function(*map_arrays(lambda _: next(remaining), like))

    drops = any(isinstance(w, LoRA) and w.dropout for w in operands)
    how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": drops}
    return checkpoint(compute, *arrays_in(operands), **how)  # type: ignore[no-any-return]


def _adds(rows: Tensor, shape_of_w2: Any, options: LayerOptions) -> bool:
    """Whether `fp8moe.ops.grouped_gemm.add_grouped_gemm` has a kernel for both halves."""
    if rows.device.type == "cpu":
        return True
    experts, hidden, ffn = shape_of_w2
    sizes_fit = hidden % 8 == 0 and ffn % 8 == 0 and experts <= 1024 and rows.shape[0] > 0
    kernel = rows.dtype == torch.bfloat16 and options.backend in (None, "wgmma")
    return sizes_fit and kernel and on_hopper(rows)


def _dropped(rows: Tensor, lora: LoRA | None) -> Tensor | None:
    """The rows that an adapter reads, None for the rows themselves."""
    if lora is None or not lora.dropout:
        return None
    return nn.functional.dropout(rows, lora.dropout)


def _matrices(lora: LoRA | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if lora is None else (lora.a, lora.b)


def _scaling(lora: LoRA | None) -> float:
    return 1.0 if lora is None else float(lora.scaling)


def _read_by_gemms(a: Tensor, b: Tensor, scaling: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """a and scaling * b in the rows' dtype, with a rank that the GEMMs accept."""
    missing = -a.shape[1] % core.RANK_MULTIPLE
    a, b = padded(a.to(dtype), 1, 1, missing), padded((b * scaling).to(dtype), 2, 1, missing)
    a, b = a.contiguous(), b.contiguous()  # b is a copy
    return a.clone() if a.data_ptr() % 16 else a, b  # as a part of a flat buffer may begin anywhere


def _gradients(da: Any, db: Any, ctx: Any) -> tuple[Tensor | None, Tensor | None]:
    """Of the matrices that the caller has, of gradients of those that the GEMMs have read."""
    rank, (of_a, of_b) = ctx.rank, ctx.dtypes
    da = None if da is None else da[:, :rank].to(of_a)
    return da, None if db is None else (db[:, :, :rank] * ctx.scaling).to(of_b)


def _save(
    ctx: Any,
    inputs: dict[str, Any],
    w: Any,
    scaling: float,
    options: LayerOptions,
    plan: PermutationPlan,
    tensors: tuple[Tensor | None, ...],
) -> None:
    """inputs: the function's tensors by the names of their gradients, in the order of its arguments. w: as
    given. tensors: the rows that the adapter reads, `u`, and its matrices as the GEMMs have read them."""
    if options.precision.quantizes:
        w = read_by_backward("w13" if "dx" in inputs else "w2", w, options)
    a, b = inputs["da"], inputs["db"]
    ctx.names = tuple([name for name, t in inputs.items() if t is not None])
    ctx.w, ctx.plan = map_arrays(lambda _: PLACEHOLDER, w), vars(plan) | {"data": None}
    ctx.save_for_backward(*tensors, plan.data, *arrays_in(w))
    ctx.scaling, ctx.options = scaling, options
    ctx.rank, ctx.dtypes = (0, (None, None)) if a is None else (a.shape[1], (a.dtype, b.dtype))


def _saved(ctx: Any) -> tuple[Any, ...]:
    """z, u, w, a, b, plan and options of the forward, as the core's backward takes them."""
    z, u, a, b, data, *arrays = ctx.saved_tensors
    remaining = iter(arrays)
    w = map_arrays(lambda _: next(remaining), ctx.w)
    return z, u, w, a, b, plan_with(ctx.plan, data), ctx.options


def _with_adapters(ctx: Any, of_rows: Any, dz: Any) -> tuple[Any, Any]:
    """The gradients of the rows and of those after dropout; without it the adapter has read the rows."""
    if "dz" in ctx.names or dz is None:
        return of_rows, dz
    return of_rows.add_(dz), None


def _requested(ctx: Any, names: tuple[str, ...], of_rows: Any) -> tuple[str, ...]:
    """The gradients to compute. names: of the tensors among the function's arguments, in their order.
    of_rows: the name of the gradient of the rows, which the adapter reads as well if there is no dropout."""
    found = [name for name, asked in zip(names, asked_for(ctx), strict=False) if asked]
    if "dz" not in names and "da" in names and of_rows in found:
        found.append("dz")
    return tuple(found)


@operator("lora_gemms", flops=lambda rows, products: 2 * products)
def _gemms(rows: Tensor, products: int) -> list[Any]:
    """What dispatch modes see of a half's GEMMs, which no operator makes: their number of multiplications."""
    return []


def _count(plan: PermutationPlan, sizes: tuple[int, int, int], requested: tuple[str, ...]) -> None:
    """Tells counters of FLOPs the GEMMs of a backward, which for the gradient of the rows are as large as the
    forward's, or that of u. sizes: columns and rows of w, and the rank."""
    if not dispatch_modes():
        return
    columns, rows, rank = sizes
    products = columns * rows * (not {"dx", "dprobs", "dact"}.isdisjoint(requested))
    products += rows * rank * (("db" in requested) + ("dz" in requested or "da" in requested))
    products += columns * rank * (("dz" in requested) + ("da" in requested) + ("u" in requested))
    _gemms.run(plan.data, plan.num_tokens * plan.max_experts_per_token * products)


class _First(torch.autograd.Function):
    """plans: gets the plan."""

    @staticmethod
    def forward(ctx, x, z, probs, a, b, ids, w13, w2, bias13, scaling, options, ffn, plans):  # type: ignore[no-untyped-def]
        read: Any = (None, None) if a is None else _read_by_gemms(a, b, scaling, x.dtype)
        ctx.adds = _adds(x, w2.shape, options)
        rows = x, z, w13, w2, bias13, ids, probs, *read, options, ctx.adds
        plan, h, low, row_probs, u = core.first_forward(*rows)
        plans.append(plan)
        if low is not None:
            h.add_(low)
        inputs = {"dx": x, "dz": z, "dprobs": probs, "da": a, "db": b}
        # what the adapter reads is needed by it alone
        read_by_adapter = None if a is None else x if z is None else z
        _save(ctx, inputs, w13, scaling, options, plan, (read_by_adapter, u, *read))
        ctx.dtype_of_probs = probs.dtype
        ctx.sizes = x.shape[1], options.activation.columns(ffn), ctx.rank
        _count(plan, ctx.sizes, ("dx", "dz"))
        return h, row_probs

    @staticmethod
    @torch.compiler.disable  # compiled autograd runs it as it is
    @partial(once_differentiable, saves_inputs=False)
    def backward(ctx, dh, dprobs):  # type: ignore[no-untyped-def]
        requested, joined = _requested(ctx, ctx.names, "dx"), ctx.adds and "dz" not in ctx.names
        saved = _saved(ctx)
        given: Any = dh.contiguous(), dprobs.contiguous(), *saved, requested, joined
        dx, dprobs, dz, da, db = core.first_backward(*given)
        _count(saved[-2], ctx.sizes, requested)
        dx, dz = _with_adapters(ctx, dx, dz)
        dprobs = None if dprobs is None else dprobs.to(ctx.dtype_of_probs)
        return dx, dz, dprobs, *_gradients(da, db, ctx), *[None] * 8


class _Second(torch.autograd.Function):
    @staticmethod
    def forward(ctx, act, z, a, b, w2, scaling, options, ffn, plan, again):  # type: ignore[no-untyped-def]
        read: Any = (None, None) if a is None else _read_by_gemms(a, b, scaling, act.dtype)
        rows: Any = None if a is None else act if z is None else z
        ctx.adds = _adds(act, w2.shape, options)
        given: Any = None if again else act, rows, w2, *read, plan, options, ctx.adds
        y, low, u = core.second_forward(*given)
        if again:
            y = act.new_empty(plan.num_tokens, w2.shape[1])
        if low is not None:
            y.add_(low)
        inputs = {"dact": act, "dz": z, "da": a, "db": b}
        _save(ctx, inputs, w2, scaling, options, plan, (rows, u, *read))
        ctx.sizes = ffn, y.shape[1], ctx.rank
        _count(plan, ctx.sizes, ("u",) if again else ("dact", "dz"))
        return y

    @staticmethod
    @torch.compiler.disable
    @partial(once_differentiable, saves_inputs=False)
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        requested, joined = _requested(ctx, ctx.names, "dact"), ctx.adds and "dz" not in ctx.names
        saved = _saved(ctx)
        given: Any = dy.contiguous(), *saved, requested, joined
        dact, dz, da, db = core.second_backward(*given)
        _count(saved[-2], ctx.sizes, requested)
        dact, dz = _with_adapters(ctx, dact, dz)
        return dact, dz, *_gradients(da, db, ctx), *[None] * 6
