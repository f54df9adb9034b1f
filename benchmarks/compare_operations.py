"""One FP8 grouped product and the quantisation of rows with each library: the operations of `compare`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from benchmarks.compare_layer import experts, torch_product
from benchmarks.contender import Contender, Part, Results, Step

# -- one grouped product


@dataclass(frozen=True)
class Product:
    """rows: FP8 [P, H] with 1 x 128 scales, experts padded to multiples of 128; weights: FP8 [E, 2F, H] with
    128 x 128 scales; offsets: int32 [E + 1]; end: the last offset."""

    rows: Any
    weights: Any
    offsets: Any
    end: int


def product(device: str, *shape: int) -> Product:
    import fp8moe
    import fp8moe.torch

    layer = experts(device, *shape)
    plan = fp8moe.torch.plan_topk(layer.ids, len(layer.w2), align_size=128)
    rows = fp8moe.permute(fp8moe.quantize(layer.x.detach()), plan).data
    weights = fp8moe.quantize_weights(layer.w13.detach()).rowwise
    return Product(rows, weights, plan.expert_offsets, int(plan.expert_offsets[-1]))


def product_in_float64(inputs: Product) -> Results:
    import torch

    import fp8moe

    rows, weights = (fp8moe.dequantize(q) for q in (inputs.rows, inputs.weights))
    out = torch.empty(inputs.end, weights.shape[1], dtype=torch.float64, device=rows.device)
    ends = inputs.offsets.tolist()
    for expert, (start, end) in enumerate(itertools.pairwise(ends)):
        out[start:end] = rows[start:end].double() @ weights[expert].double().T
    return (out,)


def product_by_fp8moe(inputs: Product) -> Step:
    import fp8moe

    return lambda: (fp8moe.grouped_gemm(inputs.rows, inputs.weights, inputs.offsets)[: inputs.end],)


def product_by_deepgemm(inputs: Product) -> Step:
    from fp8moe.torch import deepgemm_grouped_gemm as product

    return lambda: (product(inputs.rows, inputs.weights, inputs.offsets)[: inputs.end],)


def product_by_torch(inputs: Product) -> Step:
    """The product of the same values in bfloat16, which represents FP8 values exactly."""
    import fp8moe

    rows, weights = (fp8moe.dequantize(q, dtype="bfloat16") for q in (inputs.rows, inputs.weights))
    weights, ends = weights.transpose(1, 2), inputs.offsets[1:].contiguous()
    return lambda: (torch_product(rows, weights, ends)[: inputs.end],)


# -- the quantisation of rows


def rows_to_quantize(device: str, *shape: int) -> Any:
    return experts(device, *shape).x.detach()


def quantize_by_fp8moe(x: Any) -> Step:
    import fp8moe

    def step() -> Results:
        q = fp8moe.quantize(x)
        return q.data, q.scales

    return step


def quantize_by_compiled_torch(x: Any) -> Step:
    import torch

    @torch.compile(fullgraph=True)
    def quantize(x: Any) -> Results:
        blocks = x.float().view(len(x), -1, 128)
        scales = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(-1).clamp(min=1e-30) / 448.0)))
        return (blocks / scales[..., None]).to(torch.float8_e4m3fn).view(x.shape), scales

    return lambda: quantize(x)


def quantize_by_tile_kernels(x: Any) -> Step:
    import tile_kernels  # type: ignore[import-not-found, unused-ignore]

    return lambda: tile_kernels.quant.per_token_cast(x, "e4m3", 128, round_sf=True)


def dequantized(results: Results) -> Results:
    """Rows from codes (or their bytes) and the scales of their blocks."""
    import torch

    codes, scales = results
    blocks = codes.view(torch.float8_e4m3fn).float().unflatten(1, (-1, 128))
    return ((blocks * scales[: len(codes)].view(*blocks.shape[:2], 1)).flatten(1),)


PRODUCT = Part(
    "grouped product",
    (
        Contender("torch grouped_mm, bf16", product_by_torch, 2.0**-8),
        Contender(
            "DeepGEMM, FP8",
            product_by_deepgemm,
            2.0**-8,
            ("deep_gemm",),
            "build DeepGEMM from its repository (the index's deep-gemm is another package)",
            cuda_only=True,
        ),
        Contender("fp8moe, FP8", product_by_fp8moe, 2.0**-8),
    ),
    product,
    product_in_float64,
    ("out",),
    lambda tokens, experts, hidden, ffn, topk: 2 * 2 * tokens * topk * hidden * ffn,
)
QUANTIZE = Part(
    "quantise rows",
    (
        Contender(
            "torch compiled",
            quantize_by_compiled_torch,
            2.0**-4,
            cuda_only=True,
            decode=dequantized,
        ),
        Contender(
            "TileKernels",
            quantize_by_tile_kernels,
            2.0**-4,
            ("tile_kernels",),
            "pip install tile-kernels",
            cuda_only=True,
            decode=dequantized,
        ),
        Contender("fp8moe", quantize_by_fp8moe, 2.0**-4, decode=dequantized),
    ),
    rows_to_quantize,
    lambda x: (x.double(),),
    ("rows",),
    lambda *shape: 0,
)
