"""fp8moe for PyTorch: operations with autograd and ``torch.compile``, the expert layer, and its transports.

Needs ``pip install 'fp8moe[torch]'``. DeepGEMM, DeepEP and symmetric memory are imported when they are used.
"""

from fp8moe.adapters.torch.accumulation import set_fuse_wgrad_accumulation
from fp8moe.adapters.torch.adamw import AdamW
from fp8moe.adapters.torch.deepgemm import deepgemm_grouped_gemm
from fp8moe.adapters.torch.diagnose import diagnose
from fp8moe.adapters.torch.diagnosis import Diagnosis, GradientDiagnosis, LayerDiagnosis, TensorDiagnosis
from fp8moe.adapters.torch.distributed.deep_ep import DeepEPEngine, DeepEPRoute
from fp8moe.adapters.torch.distributed.process_group import ProcessGroup, RankLost
from fp8moe.adapters.torch.distributed.symmetric_memory import MOST_RANKS, SymmetricMemory, window_bytes
from fp8moe.adapters.torch.fsdp import gather_fp8, padded_elements, shard_placement
from fp8moe.adapters.torch.functional import moe_experts, moe_experts_permuted
from fp8moe.adapters.torch.layer import FP8FlowMoE
from fp8moe.adapters.torch.lora import LoRA
from fp8moe.adapters.torch.memory import memory
from fp8moe.adapters.torch.merge import MergeReport, merge_lora
from fp8moe.adapters.torch.operands import quantize_fp8_weights
from fp8moe.adapters.torch.ops import (
    as_float8,
    dequantize,
    grouped_gemm,
    pad,
    permute,
    permute_and_pad,
    permute_gemm,
    permute_transpose,
    plan_index_map,
    plan_routing_map,
    plan_row_map,
    plan_topk,
    quantize,
    quantize_weights,
    scaling_aware_transpose,
    sort_chunks,
    swiglu,
    swiglu_quantize,
    swiglu_quantize_backward,
    transpose_codes,
    unpad,
    unpermute,
)
from fp8moe.adapters.torch.published import published_experts
from fp8moe.adapters.torch.router import Router, route
from fp8moe.adapters.torch.scaled_mm import scaled_grouped_mm, scaled_grouped_mm_wgrad, scaled_mm
from fp8moe.adapters.torch.sharding import LoadPlanner, clip_grad_norm_, exclude_from_ddp, param_groups
from fp8moe.adapters.torch.stats import LayerStats, TensorStats, tensor_stats
from fp8moe.adapters.torch.weights import model_report, weights_unchanged

__all__ = [
    "MOST_RANKS",
    "AdamW",
    "DeepEPEngine",
    "DeepEPRoute",
    "Diagnosis",
    "FP8FlowMoE",
    "GradientDiagnosis",
    "LayerDiagnosis",
    "LayerStats",
    "LoRA",
    "LoadPlanner",
    "MergeReport",
    "ProcessGroup",
    "RankLost",
    "Router",
    "SymmetricMemory",
    "TensorDiagnosis",
    "TensorStats",
    "as_float8",
    "clip_grad_norm_",
    "deepgemm_grouped_gemm",
    "dequantize",
    "diagnose",
    "exclude_from_ddp",
    "gather_fp8",
    "grouped_gemm",
    "memory",
    "merge_lora",
    "model_report",
    "moe_experts",
    "moe_experts_permuted",
    "pad",
    "padded_elements",
    "param_groups",
    "permute",
    "permute_and_pad",
    "permute_gemm",
    "permute_transpose",
    "plan_index_map",
    "plan_routing_map",
    "plan_row_map",
    "plan_topk",
    "published_experts",
    "quantize",
    "quantize_fp8_weights",
    "quantize_weights",
    "route",
    "scaled_grouped_mm",
    "scaled_grouped_mm_wgrad",
    "scaled_mm",
    "scaling_aware_transpose",
    "set_fuse_wgrad_accumulation",
    "shard_placement",
    "sort_chunks",
    "swiglu",
    "swiglu_quantize",
    "swiglu_quantize_backward",
    "tensor_stats",
    "transpose_codes",
    "unpad",
    "unpermute",
    "weights_unchanged",
    "window_bytes",
]
