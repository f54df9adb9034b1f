"""Adapters merged into the experts' weights: tensors, and codes of block FP8, which keep their scales."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8moe import Quantized
from fp8moe.adapters.torch import ops as torch_ops
from fp8moe.adapters.torch.lora import LoRA
from fp8moe.adapters.torch.operands import padded
from fp8moe.formats import FORMATS
from fp8moe.layer.checks import check_codes_of_forward
from fp8moe.runtime import checks

__all__ = ["MergeReport", "merge_lora"]

E4M3, TILE = torch.float8_e4m3fn, 128
#: the largest value of a code, and the largest that rounds to it
LARGEST, ROUNDS_TO_LARGEST = FORMATS["e4m3"].max, 464.0


@dataclass(frozen=True)
class MergeReport:
    """How well a weight's dtype or codes hold the sum of the weight and its adapter.

    Attributes
    ----------
    rounding : float
        Norm of the error of the result, relative to the norm of the exact sum.
    adapter : float
        Norm of what the adapter adds, relative to the norm of the exact sum.
    kept : float
        How much of it the result has, along its direction: <result - weight, adapter> / <adapter, adapter>,
        1 without an adapter. Changes of less than half a step between codes are lost by rounding to nearest.
    saturated : int
        Number of values beyond the largest code, to which they were rounded; 0 of other dtypes.
    """

    rounding: float
    adapter: float
    kept: float
    saturated: int

    def __str__(self) -> str:
        adapter = f"adapter {self.adapter:.2e}, of which {self.kept:.0%} is kept"
        return f"rounding {self.rounding:.2e}, {adapter}; {self.saturated} values saturated"


class Sums:
    """Sums of squares of a merge, on its device, of which `report` makes the figures."""

    def __init__(self) -> None:
        self._sums: Any = 0

    def add(self, result: Tensor, exact: Tensor, added: Tensor, saturated: Tensor | None = None) -> None:
        """Tensors of float64. saturated: number of values, of results that have a largest one."""
        error = result - exact
        squares = [t.square().sum() for t in (error, exact, added)]
        along = (error * added).sum()
        number = along.new_zeros(()) if saturated is None else saturated.double()
        self._sums = self._sums + torch.stack([*squares, along, number])

    def report(self, name: str) -> MergeReport:
        error, exact, added, along, saturated = self._sums.tolist()
        if not exact + added + error < float("inf"):
            raise ValueError(
                f"{name}: got NaN or infinity in the weight or its adapter, or sums beyond the largest value "
                "of the weight's dtype; wanted finite values"
            )
        exact = exact**0.5 or 1.0
        kept = 1 + along / added if added else 1.0
        return MergeReport(error**0.5 / exact, added**0.5 / exact, kept, int(saturated))


def merge_lora(
    w: Tensor | Quantized,
    lora: LoRA,
    *,
    parts: int | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Any, MergeReport]:
    """The weight plus its adapter: w + scaling * B A, of each expert.

    Parameters
    ----------
    w : Tensor, floating point, or Quantized of block FP8, [E, N, K]
        w13 or w2, as `moe_experts` takes it. It stays as it is.
    lora : LoRA
        Its adapter. The dropout is not looked at.
    parts : int or None
        Number of equal parts of the rows, 2 for gate and up, of a w13 whose codes are padded, where the
        adapter's rows are not; None for all others.
    generator : torch.Generator or None
        On the device of ``w``, of codes: rounds each to one of the two next to the sum, by chance, so that
        the sum is its expectation. A small adapter is kept so, on average, with more noise than by rounding
        to nearest, of about the geometric mean of the adapter and a code's step. None: to nearest.

    Returns
    -------
    merged : Tensor or Quantized
        As ``w``. Of codes, each scale is the given one or, in a tile whose sums go beyond 464 times it, its
        smallest multiple by a power of two that holds them; each code is the sum's, rounded to nearest even
        if there is no generator. Where the scale stays, codes of values that the adapter leaves as they are
        do not change.
    report : MergeReport
        What this rounded.

    Raises
    ------
    TypeError, ValueError
        For wrong kinds and shapes, codes without the row-wise half, sums that are not finite, and a generator
        of another device.

    Examples
    --------
    >>> import torch
    >>> from fp8moe.torch import LoRA, merge_lora, quantize_weights
    >>> w, lora = torch.randn(4, 256, 128), LoRA(torch.randn(4, 8, 128), torch.randn(4, 256, 8))
    >>> merged, report = merge_lora(quantize_weights(w), lora)
    >>> merged.shape, report.rounding < 2**-4
    ((4, 256, 128), True)
    """
    if not isinstance(lora, LoRA):
        raise TypeError(f"lora: got {type(lora).__name__}; wanted fp8moe.torch.LoRA")
    parts = None if parts is None else checks.integer("parts", parts, 1)
    fix = ""
    if isinstance(w, Quantized):
        check_codes_of_forward("w", w)
        checks.shape("w", w.rowwise, ("E", "N", "K"))
        check_generator(generator, w.rowwise.data.device)
        rows, columns = w.shape[1:]
        a, b = lora.a, lora.b
        missing = rows - b.shape[1]
        if parts is not None and 0 < missing < parts * TILE and rows % parts == b.shape[1] % parts == 0:
            b = padded(b, 1, parts, missing // parts)
        elif parts is None and missing > 0:
            fix = "pass parts=2 for gate and up of codes that are filled up with zeros"
        if 0 < columns - a.shape[2] < TILE:
            a = padded(a, 2, 1, columns - a.shape[2])
        lora = LoRA(a, b, lora.scaling)
    elif not isinstance(w, Tensor) or not w.is_floating_point():
        raise TypeError(
            f"w: got {getattr(w, 'dtype', type(w).__name__)}; wanted a floating-point tensor or a Quantized, "
            "of a frozen layer w13.quantized or w2.quantized"
        )
    else:
        checks.shape("w", w, ("E", "N", "K"))
    experts, rows, columns = w.shape
    checks.shape("lora: a", lora.a, (experts, lora.rank, columns))
    checks.shape("lora: b", lora.b, (experts, rows, lora.rank), fix)
    if not isinstance(w, Quantized):
        if generator is not None:
            raise ValueError("generator: got one with a tensor, which is rounded to nearest; wanted None")
        merged = torch.empty_like(w, requires_grad=False)
        return merged, merged_values(
            (matrix.detach().double() for matrix in w), partial(added_by, lora), merged, "w"
        )
    q = w.rowwise
    codes, scales, report = merged_codes(q.data, q.scales, partial(added_by, lora), 1, "w", generator)
    rowwise = q.changed(data=codes.view(torch.uint8), scales=scales)
    return Quantized(rowwise, w.columnwise and torch_ops.transpose_codes(rowwise)), report


def check_generator(generator: Any, device: torch.device) -> None:
    """Checks what rounds codes by chance. device: of the weights."""
    if generator is None:
        return
    if not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator: got {type(generator).__name__}; wanted a torch.Generator or None; pass "
            f"torch.Generator({device.type!r}).manual_seed(0)"
        )
    if generator.device.type != device.type:
        raise TypeError(
            f"generator: got one on {generator.device}; wanted one on the weights' device; pass "
            f"torch.Generator({device.type!r}).manual_seed(0)"
        )


def check_values(name: str, w: Tensor, scales: Tensor | None) -> None:
    """Refuses what no engine could multiply by."""
    if w.dtype == E4M3:
        finite = ((w.view(torch.uint8) & 0x7F) != 0x7F).all()
    else:
        finite = torch.stack(w.aminmax()).isfinite().all() if w.numel() else torch.tensor(True)
    if not finite:
        raise ValueError(f"{name}: got NaN or infinity; wanted finite weights")
    if scales is not None and not ((scales.double() > 0) & scales.double().isfinite()).all():
        raise ValueError(f"{name}_scale_inv: got scales that are not positive and finite; wanted such")


@torch.no_grad()
def added_by(lora: LoRA, expert: int) -> Tensor:
    """What an adapter adds to an expert's matrix, in float64."""
    return (lora.b[expert].double() @ lora.a[expert].double()).mul_(lora.scaling)


@torch.no_grad()
def merged_values(
    matrices: Iterable[Tensor], added: Callable[[int], Tensor], out: Tensor, name: str
) -> MergeReport:
    """Each matrix, of float64, plus ``added``, rounded once to the dtype of out [E, N, K]."""
    sums = Sums()
    for e, matrix in enumerate(matrices):
        more = added(e)
        exact = matrix + more
        out[e] = exact
        sums.add(out[e].double(), exact, more)
    return sums.report(name)


@torch.no_grad()
def merged_codes(
    codes: Tensor,
    scales: Tensor,
    added: Callable[[int], Tensor],
    parts: int,
    name: str,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor, MergeReport]:
    """Codes [E, N, K] and scales, of each of ``parts`` equal parts of the rows in tiles of its own, after
    ``added`` is added to their values. generator: as of `merge_lora`."""
    codes = codes.view(E4M3)
    merged, merged_scales, sums = torch.empty_like(codes), torch.empty_like(scales), Sums()
    for e in range(len(codes)):
        more = added(e).tensor_split(parts)
        given = zip(codes[e].tensor_split(parts), scales[e].tensor_split(parts), strict=True)
        out = zip(merged[e].tensor_split(parts), merged_scales[e].tensor_split(parts), strict=True)
        for (matrix, factors), delta, (to_codes, to_scales) in zip(given, more, out, strict=True):
            wide = matrix.double() * by_tile(factors, matrix.shape)
            exact = torch.where(delta == 0, wide, wide + delta)  # -0 + 0 would be another code
            held = ROUNDS_TO_LARGEST * factors.double()
            mantissa, exponent = torch.frexp(largest_of_tiles(exact) / held)
            doublings = exponent - (mantissa == 0.5).int()  # of 2^k exactly, the exponent is k + 1
            to_scales.copy_(factors.double() * doublings.clamp(min=0).double().exp2())
            factor = by_tile(to_scales, matrix.shape)
            quotient = exact / factor
            to_codes.copy_(as_codes(quotient, generator))
            sums.add(to_codes.double() * factor, exact, delta, (quotient.abs() > LARGEST).sum())
    return merged, merged_scales, sums.report(name)


def as_codes(quotient: Tensor, generator: torch.Generator | None) -> Tensor:
    """Values of float64 as e4m3, to nearest or, with a generator, to one of both neighbours by chance."""
    quotient = quotient.clamp(-LARGEST, LARGEST)
    if generator is not None:
        exponent = torch.frexp(quotient).exponent
        steps = (exponent - 4).clamp(min=-9).double().exp2()  # three bits after the first; subnormals 2^-9
        lower = (quotient / steps).floor()
        above = quotient / steps - lower
        chance = torch.rand(quotient.shape, generator=generator, dtype=torch.float64, device=quotient.device)
        quotient = torch.where(above == 0, quotient, (lower + (chance < above)) * steps)
    return quotient.to(E4M3)


def by_tile(scales: Tensor, shape: Any) -> Tensor:
    """Scales of tiles in float64, one for each value of a matrix."""
    rows, columns = shape
    return scales.double().repeat_interleave(TILE, 0)[:rows].repeat_interleave(TILE, 1)[:, :columns]


def largest_of_tiles(matrix: Tensor) -> Tensor:
    rows, columns = matrix.shape
    filled = torch.nn.functional.pad(matrix.abs(), (0, -columns % TILE, 0, -rows % TILE))
    return filled.unflatten(1, (-1, TILE)).unflatten(0, (-1, TILE)).amax((1, 3))
