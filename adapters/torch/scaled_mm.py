"""MXFP8 operands for torch's own matrix products on Blackwell's tensor cores.

    x = fp8moe.quantize(rows, block=(1, 32), layout="blocked_128x4")
    w = fp8moe.quantize(weights.view(E * N, K), block=(1, 32), layout="blocked_128x4")
    y = fp8moe.torch.scaled_grouped_mm(x, w, plan.expert_offsets)

``torch.nn.functional.scaled_mm`` and ``scaled_grouped_mm`` multiply codes with 1x32 scales in the 128x4
blocked layout on devices of compute capability 10.0 and later; on other devices these functions raise. **Not
tested on such a device**: written against torch's signatures and its shape checks, and tested with stubs of
both.
"""

from __future__ import annotations

from typing import Any

from fp8moe.adapters import needs

with needs("torch"):
    import torch
from torch import Tensor

from fp8moe import QuantTensor
from fp8moe.formats import BLOCKED_128X4
from fp8moe.runtime import checks
from fp8moe.runtime.dispatch import enter

__all__ = ["scaled_grouped_mm", "scaled_grouped_mm_wgrad", "scaled_mm"]

_ROW, _COLUMN = (1, 32), (32, 1)
functional: Any = torch.nn.functional  # torch's type stubs lack the grouped product


def scaled_mm(x: QuantTensor, w: QuantTensor) -> Tensor:
    """x @ w.T by `torch.nn.functional.scaled_mm`.

    Not tested on a device that supports it.

    Parameters
    ----------
    x : QuantTensor, [M, K]
        MXFP8, row-wise, in layout "blocked_128x4".
    w : QuantTensor, [N, K]
        As ``x``.

    Returns
    -------
    Tensor, bfloat16, [M, N]

    Raises
    ------
    TypeError
        For operands of other formats, or on a device of compute capability below 10.0.
    ValueError
        For inconsistent shapes.
    """
    _check(_ROW, x=x, w=w)
    if x.shape[1] != w.shape[1]:
        raise ValueError(f"w: got {list(w.shape)}; wanted [N, {x.shape[1]}], as x is {list(x.shape)}")
    _require_blackwell(x, "scaled_mm")
    scales = _e8m0(x.scales).flatten(), _e8m0(w.scales).flatten()
    y: Tensor = functional.scaled_mm(_e4m3(x), _e4m3(w).t(), *_with_recipes(*scales))
    return y


def scaled_grouped_mm(x: QuantTensor, w: QuantTensor, expert_offsets: Tensor) -> Tensor:
    """out[rows of e] = x[rows of e] @ w[e].T by `torch.nn.functional.scaled_grouped_mm`.

    Not tested on a device that supports it.

    Parameters
    ----------
    x : QuantTensor, [P, K]
        MXFP8, row-wise, in layout "blocked_128x4" with tiles that follow the experts: written by `quantize`
        and `permute` if the offsets are multiples of 128, otherwise by ``to_layout(q, "blocked_128x4",
        expert_offsets)``.
    w : QuantTensor, [E * N, K]
        Weights of all experts, concatenated along the rows, as `quantize` of ``weights.view(E * N, K)``
        writes them in that layout; N a multiple of 128.
    expert_offsets : Tensor, int32, [E+1]
        The first is 0. The values are not checked.

    Returns
    -------
    Tensor, bfloat16, [P, N]
        Rows after the last expert's are undefined.

    Raises
    ------
    TypeError
        For operands of other formats, or on a device of another compute capability than 10.x, which torch
        requires.
    ValueError
        For inconsistent shapes.
    """
    _check(_ROW, x=x, w=w)
    experts, rows = _experts(expert_offsets), w.shape[0]
    if x.shape[1] != w.shape[1] or not experts or rows % (128 * experts):
        raise ValueError(
            f"w: got {list(w.shape)} with x {list(x.shape)} and {experts} experts; wanted "
            f"[E * N, {x.shape[1]}] with N a multiple of 128"
        )
    _require_blackwell(x, "scaled_grouped_mm", grouped=True)
    weights = _e4m3(w).view(experts, rows // experts, -1)
    scales = _e8m0(x.scales), _e8m0(w.scales).view(experts, -1)
    y: Tensor = functional.scaled_grouped_mm(
        _e4m3(x), weights.transpose(1, 2), *_with_recipes(*scales), offs=expert_offsets[1:]
    )
    return y


def scaled_grouped_mm_wgrad(dy: QuantTensor, x: QuantTensor, expert_offsets: Tensor) -> Tensor:
    """out[e] = dy[rows of e].T @ x[rows of e] by `torch.nn.functional.scaled_grouped_mm`.

    Not tested on a device that supports it.

    Parameters
    ----------
    dy : QuantTensor, [P, N]
        MXFP8, column-wise, in layout "blocked_128x4" with tiles that follow the experts, as
        `scaling_aware_transpose` and `permute_transpose` write it.
    x : QuantTensor, [P, K]
        As ``dy``.
    expert_offsets : Tensor, int32, [E+1]
        The first is 0; multiples of 32. The values are not checked.

    Returns
    -------
    Tensor, bfloat16, [E, N, K]

    Raises
    ------
    TypeError, ValueError
        As in `scaled_grouped_mm`.
    """
    _check(_COLUMN, dy=dy, x=x)
    _experts(expert_offsets)
    if dy.shape[0] != x.shape[0]:
        raise ValueError(f"x: got {list(x.shape)}; wanted [{dy.shape[0]}, K], as dy is {list(dy.shape)}")
    _require_blackwell(dy, "scaled_grouped_mm", grouped=True)
    scales = _e8m0(dy.scales), _e8m0(x.scales)
    dw: Tensor = functional.scaled_grouped_mm(
        _e4m3(dy), _e4m3(x).t(), *_with_recipes(*scales), offs=expert_offsets[1:]
    )
    return dw


def _check(block: tuple[int, int], **operands: QuantTensor) -> None:
    for name, q in vars(enter(**operands).args).items():
        checks.quant_tensor(name, q, (block,), (BLOCKED_128X4,))
        if q.fmt != "e4m3":
            raise TypeError(f"{name}.fmt: got {q.fmt!r}; wanted 'e4m3', the only format of torch's MXFP8")


def _experts(expert_offsets: Tensor) -> int:
    call = enter(expert_offsets=expert_offsets)
    checks.offsets(call, "expert_offsets", call.args.expert_offsets)
    return expert_offsets.shape[0] - 1


def _require_blackwell(q: QuantTensor, function: str, *, grouped: bool = False) -> None:
    """torch's grouped product requires capability 10.x, the other one 10.0 or later."""
    capability = _capability(q.data.device)
    if capability is None or capability < (10, 0) or (grouped and capability[0] != 10):
        have = str(q.data.device) if capability is None else "compute capability {}.{}".format(*capability)
        wanted = "10.x" if grouped else "10.0 or later"
        raise TypeError(
            f"torch's {function}: got MXFP8 operands on {have}; wanted compute capability {wanted}, whose "
            "tensor cores multiply them; fp8moe.grouped_gemm multiplies (1, 128) blocks on any CUDA device"
        )


def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _with_recipes(a: Tensor, b: Tensor) -> tuple[object, ...]:
    """Scales, scaling types and scale layouts in the order of torch's parameters."""
    recipe, swizzle = functional.ScalingType.BlockWise1x32, functional.SwizzleType.SWIZZLE_32_4_4
    return a, recipe, b, recipe, swizzle, swizzle


def _e4m3(q: QuantTensor) -> Tensor:
    codes: Tensor = q.data.view(torch.float8_e4m3fn)
    return codes


def _e8m0(scales: Tensor) -> Tensor:
    return scales.view(torch.float8_e8m0fnu)
