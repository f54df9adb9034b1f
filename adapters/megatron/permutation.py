"""Megatron-Core adapter: this library's MoE layer, or its permutation only. Tested with megatron-core 0.16.1
and 0.19.2.

The whole MoE layer, through a layer spec of a GPT or hybrid model:

    from fp8moe.adapters import megatron
    spec = megatron.use_fp8_flow(get_gpt_layer_local_spec(num_experts=8), recipe="fp8_flow")
    model = GPTModel(config, spec, ...)     # its MoE layers are megatron.FP8FlowMoELayer

Checkpoints are interchangeable with those of Megatron's own experts. examples/train_moe_megatron.py is a
complete training script.

The permutation only, in place of Transformer Engine's, while Megatron computes the products:

    megatron.enable()                       # before creating a TransformerConfig(moe_permute_fusion=True)

``moe_permute_fusion`` then works without Transformer Engine and uses this library's kernels, which also pad
each expert in the same pass if Megatron asks for it (Megatron-LM PR #2763). Outputs and gradients equal those
of Megatron's own ``fused=False``.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from fp8moe.adapters import needs

with needs("torch"):
    from torch import Tensor

import fp8moe
from fp8moe.adapters.torch import ops as torch_ops
from fp8moe.adapters.transformer_engine import pytorch as te

__all__ = [
    "Enabled",
    "align_size",
    "enable",
    "permute",
    "permute_and_pad_with_probs",
    "permute_with_probs",
]

NEEDED = "fp8moe.megatron needs megatron-core 0.16 or later ({}): pip install 'megatron-core>=0.16'"
MODULES = ("megatron.core.transformer.moe.moe_utils", "megatron.core.extensions.transformer_engine")
# names that moe_utils imports from Transformer Engine and compares with None if HAVE_TE is true
OTHERS = (
    "fused_compute_score_for_moe_aux_loss",
    "fused_moe_aux_loss",
    "fused_topk_with_score_function",
    "te_general_gemm",
)
SINCE = "2.12.0"  # first Transformer Engine with padding; Megatron checks it by ``is_te_min_version``
ALIGNED = "get_align_size_for_quantization"
GROUPED_TENSORS = ("use_transformer_engine_op_fuser", "moe_use_grouped_tensor")  # Megatron aligns them to 256


def permute(tokens: Tensor, routing_map: Tensor, num_out_tokens: Any = None) -> tuple[Tensor, Tensor]:
    """Permute tokens into expert order, like Megatron's ``fused_permute``.

    Parameters
    ----------
    tokens : Tensor, floating point, [T, H]
        Tokens.
    routing_map : Tensor, bool, [T, E]
        Whether a token is routed to an expert.
    num_out_tokens : int, Tensor of one number, or None
        Number of rows of the result; None: counted, which **synchronises once** on CUDA.

    Returns
    -------
    rows : Tensor, [num_out_tokens, H]
        Rows in expert order, differentiable.
    row_id_map : Tensor, int32
        Row map: the row of each (token, expert) pair.

    Raises
    ------
    TypeError, ValueError
        As `fp8moe.plan_routing_map` and `fp8moe.permute`.

    Examples
    --------
    >>> import torch
    >>> from fp8moe import megatron
    >>> mask = torch.tensor([[False, True], [True, True]])
    >>> megatron.permute(torch.tensor([[1.0], [2.0]]), mask)[0].ravel().tolist()
    [2.0, 1.0, 2.0]
    """
    plan = _plan(routing_map, num_out_tokens)
    return torch_ops.permute(te.contiguous(tokens), plan).data, plan.row_id_map


def permute_with_probs(
    tokens: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: Any = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Permute tokens and their probabilities, like Megatron's ``fused_permute_with_probs``.

    Parameters
    ----------
    tokens : Tensor, floating point, [T, H]
        Tokens.
    probs : Tensor, floating point, [T, E]
        Routing probabilities.
    routing_map : Tensor, bool, [T, E]
        Whether a token is routed to an expert.
    num_out_tokens : int, Tensor of one number, or None
        As in `permute`.

    Returns
    -------
    rows : Tensor, [num_out_tokens, H]
        Rows in expert order, differentiable.
    probs : Tensor, [num_out_tokens]
        Probabilities of the rows, differentiable.
    row_id_map : Tensor, int32
        Row map: the row of each (token, expert) pair.

    Raises
    ------
    TypeError, ValueError
        As `permute`.

    Examples
    --------
    >>> import torch
    >>> from fp8moe import megatron
    >>> mask, probs = torch.tensor([[False, True], [True, True]]), torch.tensor([[0.0, 1.0], [0.25, 0.75]])
    >>> megatron.permute_with_probs(torch.tensor([[1.0], [2.0]]), probs, mask)[1].tolist()
    [0.25, 1.0, 0.75]
    """
    plan = _plan(routing_map, num_out_tokens)
    moved = torch_ops.permute(te.contiguous(tokens), plan, te.contiguous(probs))
    return moved.data, moved.probs, plan.row_id_map


def permute_and_pad_with_probs(
    tokens: Tensor, probs: Tensor, routing_map: Tensor, tokens_per_expert: Tensor, align_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Permute tokens and pad each expert with zeros, like Megatron's ``fused_permute_and_pad_with_probs``.

    Parameters
    ----------
    tokens : Tensor, floating point, [T, H]
        Tokens.
    probs : Tensor, floating point, [T, E]
        Routing probabilities.
    routing_map : Tensor, bool, [T, E]
        Whether a token is routed to an expert.
    tokens_per_expert : Tensor, int32 or int64, [E]
        Token counts; if they are on the CPU, nothing synchronises.
    align_size : int
        Each expert's rows are padded to a multiple of this number.

    Returns
    -------
    rows : Tensor, [P, H]
        Rows in expert order, differentiable.
    probs : Tensor, [P]
        Probabilities of the rows, differentiable.
    row_id_map : Tensor, int32
        Row map: the row of each (token, expert) pair.
    pad_offsets : Tensor, int32, [E]
        Number of padding rows before each expert's first row.
    padded : Tensor, int64, [E]
        Number of rows of each expert, padding included, on tokens_per_expert's device.

    Raises
    ------
    TypeError, ValueError
        As `permute`.

    Examples
    --------
    >>> import torch
    >>> from fp8moe import megatron
    >>> mask, counts = torch.tensor([[False, True], [True, True]]), torch.tensor([1, 2])
    >>> tokens = torch.tensor([[1.0], [2.0]])
    >>> rows, *_, padded = megatron.permute_and_pad_with_probs(tokens, torch.ones(2, 2), mask, counts, 2)
    >>> rows.ravel().tolist(), padded.tolist()
    ([2.0, 0.0, 1.0, 2.0], [2, 2])
    """
    num_rows: Any = "exact"
    if tokens_per_expert.device.type == "cpu":
        num_rows = int((-(-tokens_per_expert // align_size) * align_size).sum())
    plan = torch_ops.plan_routing_map(
        te.contiguous(routing_map), align_size=align_size, num_out_tokens=num_rows
    )
    moved = torch_ops.permute(te.contiguous(tokens), plan, te.contiguous(probs))
    padded = plan.padded_tokens_per_expert.to(tokens_per_expert.device).long()
    return moved.data, moved.probs, plan.row_id_map, plan.pad_offsets, padded


def _plan(routing_map: Tensor, num_out_tokens: Any) -> fp8moe.PermutationPlan:
    num_rows: Any = "exact" if num_out_tokens is None else int(num_out_tokens)
    return torch_ops.plan_routing_map(te.contiguous(routing_map), num_out_tokens=num_rows)


FUSED = {
    "fused_permute": permute,
    "fused_permute_with_probs": permute_with_probs,
    "fused_permute_and_pad_with_probs": permute_and_pad_with_probs,
    "fused_unpermute": te.moe_unpermute,
    "fused_sort_chunks_by_index": te.moe_sort_chunks_by_index,
    "fused_sort_chunks_by_index_with_probs": te.moe_sort_chunks_by_index_with_probs,
}


def align_size(config: Any, *, grouped_blockwise: bool = False) -> int:
    """Return the multiple that each expert's row count must have for a `TransformerConfig`'s recipe.

    Parameters
    ----------
    config : TransformerConfig
        Its fields ``fp8``, ``fp8_recipe``, ``fp4``, ``use_transformer_engine_op_fuser`` and
        ``moe_use_grouped_tensor``.
    grouped_blockwise : bool
        Whether the blockwise products are grouped products of this library or of DeepGEMM, whose blocks of
        128 rows must not span experts.

    Returns
    -------
    int
        0 (any count) for bfloat16; FP8: 16 (per-tensor and blockwise), 32 (MXFP8), 128 (blockwise with
        ``grouped_blockwise``); NVFP4: 128. In every recipe 256 with Transformer Engine's fused or grouped
        tensors.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> from fp8moe import megatron
    >>> config = SimpleNamespace(fp8="e4m3", fp8_recipe="blockwise")
    >>> megatron.align_size(config), megatron.align_size(config, grouped_blockwise=True)
    (16, 128)
    """
    if any(getattr(config, name, False) for name in GROUPED_TENSORS):
        return 256
    if getattr(config, "fp8", None):
        recipe = str(getattr(config.fp8_recipe, "value", config.fp8_recipe))
        if recipe == "mxfp8":
            return 32
        return 128 if recipe == "blockwise" and grouped_blockwise else 16
    return 128 if getattr(config, "fp4", None) else 0


class Enabled:
    """Record of the attributes that `enable` replaced; also a context manager that restores them on exit.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> from fp8moe.megatron import Enabled
    >>> module, enabled = SimpleNamespace(name=1), Enabled()
    >>> enabled.put(module, "name", 2)
    >>> enabled.disable()
    >>> module.name
    1
    """

    def __init__(self) -> None:
        self._before: list[tuple[ModuleType, str, Any]] = []

    def put(self, module: ModuleType, name: str, value: Any) -> None:
        """Replace an attribute of a module until `disable`.

        Parameters
        ----------
        module : module
            Module to change.
        name : str
            Name of the attribute.
        value : Any
            New value.
        """
        self._before.append((module, name, getattr(module, name, _ABSENT)))
        setattr(module, name, value)

    def disable(self) -> None:
        """Restore all replaced attributes."""
        global _enabled
        for module, name, value in reversed(self._before):
            if value is _ABSENT:
                delattr(module, name)
            else:
                setattr(module, name, value)
        self._before.clear()
        if _enabled is self:
            _enabled = None

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *_: object) -> None:
        self.disable()


_ABSENT = object()
_enabled: Enabled | None = None


def enable(*, grouped_blockwise: bool = False) -> Enabled:
    """Make Megatron-Core use this library's permutation in place of Transformer Engine's fused one.

    Other parts of Megatron are not changed; for FP8 experts use `use_fp8_flow`.

    Parameters
    ----------
    grouped_blockwise : bool
        Whether Megatron pads experts to multiples of 128 with the blockwise FP8 recipe.

    Returns
    -------
    Enabled
        Restores Megatron: ``enabled.disable()``, or ``with enable():``.

    Raises
    ------
    RuntimeError
        If it is already enabled.
    ImportError
        If megatron-core is not installed.

    Examples
    --------
    >>> import megatron.core
    >>> from megatron.core.transformer.moe import moe_utils
    >>> from fp8moe import megatron
    >>> with megatron.enable():
    ...     moe_utils.fused_permute is megatron.permute
    True
    """
    global _enabled
    if _enabled is not None:
        raise RuntimeError(
            "enable: got a second call while the first is in force; call disable() on its result first"
        )
    try:
        modules = [importlib.import_module(name) for name in MODULES]
    except ImportError as error:
        raise ImportError(NEEDED.format(error)) from error
    enabled = Enabled()
    for module in modules:
        for name, function in FUSED.items():
            enabled.put(module, name, function)
    utils = modules[0]
    if not utils.HAVE_TE:
        enabled.put(utils, "HAVE_TE", True)
        for name in OTHERS:
            if not hasattr(utils, name):
                enabled.put(utils, name, None)
    if hasattr(utils, "is_te_min_version"):
        version_is = utils.is_te_min_version

        def is_te_min_version(version: str, *rest: Any, **options: Any) -> bool:
            return version == SINCE or version_is(version, *rest, **options)

        enabled.put(utils, "is_te_min_version", is_te_min_version)
    if grouped_blockwise:
        original = getattr(utils, ALIGNED)

        def aligned(config: Any) -> int:
            return max(align_size(config, grouped_blockwise=True), original(config))

        importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
        for name, module in list(sys.modules.items()):
            if name.startswith("megatron.core.") and getattr(module, ALIGNED, None) is original:
                enabled.put(module, ALIGNED, aligned)
    _enabled = enabled
    return enabled
