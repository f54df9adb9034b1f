"""FP8 mixture-of-experts kernels on raw device arrays, behind a framework-neutral API.

Operations take and return whatever kind of array the caller has: NumPy, CuPy, torch, JAX, or anything
with DLPack. Importing this package imports no framework and no GPU library.
"""

import fp8moe.runtime.main_interpreter  # noqa: F401 - raises in others, before NumPy is imported
from fp8moe import fsdp
from fp8moe._version import __version__
from fp8moe.activation import Activation
from fp8moe.layer.memory import LayerMemory, memory
from fp8moe.layer.moe import (
    moe_backward,
    moe_backward_input,
    moe_backward_weight,
    moe_forward,
    moe_forward_permuted,
    quantize_weights,
)
from fp8moe.ops.forms import from_block_fp8, from_mxfp4, to_block_fp8
from fp8moe.ops.grouped_gemm import grouped_gemm, grouped_gemm_wgrad, permute_gemm
from fp8moe.ops.layout import to_layout
from fp8moe.ops.permute import (
    pad,
    permute,
    permute_and_pad,
    permute_backward,
    sort_chunks,
    sort_chunks_backward,
    unpad,
    unpermute,
    unpermute_backward,
)
from fp8moe.ops.plan import plan_index_map, plan_routing_map, plan_row_map, plan_topk
from fp8moe.ops.quantize import dequantize, quantize, transpose_codes
from fp8moe.ops.router import Routed, RouterConfig, route, route_backward
from fp8moe.ops.swiglu import swiglu, swiglu_backward, swiglu_quantize, swiglu_quantize_backward
from fp8moe.ops.transpose import permute_transpose, scaling_aware_transpose
from fp8moe.records import (
    MoEGrads,
    PermutationPlan,
    Permuted,
    Quantized,
    QuantTensor,
    SortedChunks,
    SwigluGrad,
)
from fp8moe.runtime.counters import Trace, trace
from fp8moe.runtime.interop import BackendUnavailable

__all__ = [
    "Activation",
    "BackendUnavailable",
    "LayerMemory",
    "MoEGrads",
    "PermutationPlan",
    "Permuted",
    "QuantTensor",
    "Quantized",
    "Routed",
    "RouterConfig",
    "SortedChunks",
    "SwigluGrad",
    "Trace",
    "__version__",
    "dequantize",
    "from_block_fp8",
    "from_mxfp4",
    "fsdp",
    "grouped_gemm",
    "grouped_gemm_wgrad",
    "memory",
    "moe_backward",
    "moe_backward_input",
    "moe_backward_weight",
    "moe_forward",
    "moe_forward_permuted",
    "pad",
    "permute",
    "permute_and_pad",
    "permute_backward",
    "permute_gemm",
    "permute_transpose",
    "plan_index_map",
    "plan_routing_map",
    "plan_row_map",
    "plan_topk",
    "quantize",
    "quantize_weights",
    "route",
    "route_backward",
    "scaling_aware_transpose",
    "sort_chunks",
    "sort_chunks_backward",
    "swiglu",
    "swiglu_backward",
    "swiglu_quantize",
    "swiglu_quantize_backward",
    "to_block_fp8",
    "to_layout",
    "trace",
    "transpose_codes",
    "unpad",
    "unpermute",
    "unpermute_backward",
]


def __dir__() -> list[str]:
    """For tab completion: the public names, without the modules behind them."""
    return [*__all__, "__doc__", "__file__", "__name__", "__path__"]
