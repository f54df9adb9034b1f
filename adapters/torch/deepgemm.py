"""Grouped products by DeepGEMM, if it is installed, with this library's operands.

    out = fp8moe.torch.deepgemm_grouped_gemm(rows, weights.rowwise, plan.expert_offsets)

``deep_gemm.m_grouped_fp8_gemm_nt_contiguous`` (DeepGEMM 2) takes 1x128 scales of rows and 128x128 scales of
weights, the formats that this library produces. It computes the forward, and dgrad with transposed weights;
`fp8moe.grouped_gemm_wgrad` computes the weight gradient. Written against DeepGEMM's documented API and tested
with a stub of it.
"""

from __future__ import annotations

import importlib

from fp8moe.adapters import needs

with needs("torch"):
    import torch
from torch import Tensor

from fp8moe import QuantTensor
from fp8moe.formats import FLOAT8_DTYPES
from fp8moe.runtime import checks
from fp8moe.runtime.dispatch import enter

__all__ = ["deepgemm_grouped_gemm"]

ALIGNMENT = 128  # of the experts' rows


def deepgemm_grouped_gemm(
    x: QuantTensor, w: QuantTensor, expert_offsets: Tensor, out: Tensor | None = None
) -> Tensor:
    """out[rows of e] = x[rows of e] @ w[e].T, bfloat16 [P, N], as in `fp8moe.grouped_gemm`.

    Parameters
    ----------
    x : QuantTensor, e4m3, [P, K]
        Row-wise, block (1, 128), either layout of the scales.
    w : QuantTensor, e4m3, [E, N, K]
        Block (128, 128): ``rowwise`` weights for the forward, ``columnwise`` for dgrad.
    expert_offsets : Tensor, int32, [E + 1]
        Multiples of 128 (a plan with ``align_size=128``). Values are not checked.
    out : Tensor, bfloat16, [P, N], optional
        Rows after the last expert's are not written.

    Returns
    -------
    Tensor, bfloat16, [P, N]
        ``out``, or a new tensor.

    Raises
    ------
    ImportError
        Without DeepGEMM.
    TypeError
        For operands of other dtypes, blocks or layouts.
    ValueError
        For other shapes, or if other code in the process has set an alignment in DeepGEMM that 128 is no
        multiple of.
    """
    raw = enter(x=x, w=w).args
    checks.quant_tensor("x", raw.x, ((1, 128),), ("compact", "gemm_ready"))
    checks.quant_tensor("w", raw.w, ((128, 128),))
    if x.fmt != "e4m3" or w.fmt != "e4m3":
        raise TypeError(f"x, w: got {x.fmt}, {w.fmt}; wanted e4m3, the only format DeepGEMM multiplies")
    experts, n, k = w.data.shape
    if tuple(expert_offsets.shape) != (experts + 1,) or x.shape[1] != k:
        raise ValueError(
            f"x, w, expert_offsets: got {list(x.shape)}, codes {list(w.data.shape)}, "
            f"{list(expert_offsets.shape)}; wanted [P, K], [E, N, K], [E + 1]"
        )
    try:
        deep_gemm = importlib.import_module("deep_gemm")
    except ImportError as error:
        raise ImportError(
            f"fp8moe.torch needs DeepGEMM ({error}), which is built from its repository; PyPI's "
            "deep-gemm is another package. fp8moe.grouped_gemm needs none"
        ) from error
    alignment = getattr(deep_gemm, "get_mk_alignment_for_contiguous_layout", lambda: ALIGNMENT)()
    if ALIGNMENT % alignment:  # its blocks of rows would span two experts
        raise ValueError(
            f"deep_gemm: got blocks of {alignment} rows; wanted a divisor of {ALIGNMENT}, the alignment of "
            f"expert_offsets; call deep_gemm.set_mk_alignment_for_contiguous_layout({ALIGNMENT})"
        )
    if out is None:
        out = torch.empty(x.shape[0], n, dtype=torch.bfloat16, device=x.data.device)
    rows = torch.arange(x.shape[0], dtype=torch.int32, device=x.data.device)
    expert = torch.bucketize(rows, expert_offsets[1:], right=True, out_int32=True)
    expert = torch.where(expert < experts, expert, -1)
    # gemm_ready scales have DeepGEMM's own layout: column-major, padded to 16 bytes
    scales = x.scales.t()[: x.shape[0]] if x.layout == "gemm_ready" else x.scales
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((_codes(x), scales), (_codes(w), w.scales), out, expert)
    return out


def _codes(q: QuantTensor) -> Tensor:
    return q.data.view(getattr(torch, FLOAT8_DTYPES[q.fmt].name))
