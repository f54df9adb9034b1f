"""A layer's experts as the tensors of a published checkpoint in block FP8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fp8moe
from fp8moe.activation import halves_of
from fp8moe.adapters.torch.layer import FP8FlowMoE
from fp8moe.adapters.torch.low_rank import pair_of
from fp8moe.adapters.torch.merge import MergeReport, check_values, merge_lora
from fp8moe.adapters.torch.operands import quantize_fp8_weights
from fp8moe.adapters.torch.sharding import is_whole, own_experts

__all__ = ["published_experts"]


@torch.no_grad()
def published_experts(
    layer: FP8FlowMoE, prefix: str = "experts.", *, generator: torch.Generator | None = None
) -> tuple[dict[str, Tensor], dict[str, MergeReport]]:
    """The experts of a layer under the names of published FP8 checkpoints, adapters merged.

    Parameters
    ----------
    layer : FP8FlowMoE
        With an FP8 recipe: trained, or of frozen codes, with adapters or without. It stays as it is.
    prefix : str
        What the names begin with, such as ``model.layers.3.mlp.experts.``, with the dot.
    generator : torch.Generator or None
        Of adapters, as of `merge_lora`.

    Returns
    -------
    tensors : dict of str to Tensor
        Of each of this rank's experts e, by its number among those of all ranks, ``{e}.gate_proj.weight``
        [F, H], ``{e}.up_proj.weight`` [F, H] and ``{e}.down_proj.weight`` [H, F], e4m3, each with its
        ``weight_scale_inv``, float32, a scale for each 128 x 128 tile: bit for bit what the forward
        multiplies by, if there are no adapters. Without a gate there is no gate_proj. Views where possible.
    reports : dict of str to MergeReport
        Of "w13" and "w2" with adapters, as `merge_lora` gives it.

    Raises
    ------
    TypeError, ValueError
        For something else than a layer, recipe "bf16", weights or adapters that are not finite, and frozen
        codes that are not zero beyond the layer's ffn.
    NotImplementedError
        For weights of which this rank has a shard.

    Examples
    --------
    >>> from fp8moe.torch import FP8FlowMoE, published_experts
    >>> tensors, _ = published_experts(FP8FlowMoE(256, 128, num_experts=4, topk=2))
    >>> len(tensors), tensors["experts.3.down_proj.weight"].shape
    (24, torch.Size([256, 128]))
    """
    if not isinstance(layer, FP8FlowMoE):
        raise TypeError(f"layer: got {type(layer).__name__}; wanted FP8FlowMoE")
    if not isinstance(prefix, str) or not f".{prefix}".endswith("."):
        raise ValueError(f"prefix: got {prefix!r}; wanted a name with a dot at its end, or none: ''")
    options = layer._options
    if not options.precision.quantizes:
        raise ValueError(
            f"layer: got recipe {options.recipe!r}, which multiplies by no FP8 codes; wanted an FP8 recipe"
        )
    weights: list[Any] = [layer.w13, layer.w2]
    if layer._is_frozen:
        for name, w in zip(("w13", "w2"), weights, strict=True):
            codes, scales = w.tensors
            check_values(f"{name}.weight", codes.view(torch.float8_e4m3fn), scales)
        w13, w2 = (w.quantized for w in weights)
    else:
        for name, w in zip(("w13", "w2"), weights, strict=True):
            if not is_whole(w, layer._ranks.mesh):
                raise NotImplementedError(
                    f"{name}: got a shard of this rank's experts; wanted all of them; call "
                    "layer.unshard(), or gather a state dict into a layer of its own"
                )
        own = [own_experts(n, w, layer._ranks.mesh) for n, w in zip(("w13", "w2"), weights, strict=True)]
        for name, w in zip(("w13", "w2"), own, strict=True):
            check_values(name, w, None)
        w13, w2 = quantize_fp8_weights(*own, activation=options.activation, weight_copies="rowwise")
    halves, ffn, reports = halves_of(options.activation.kind), layer._ffn, {}
    if layer._is_frozen:
        _check_padding(w13, w2, halves, ffn)
    first, second = (None, None) if layer.lora is None else pair_of(layer.lora)
    if first is not None:
        w13, reports["w13"] = merge_lora(w13, first, parts=halves, generator=generator)
    if second is not None:
        w2, reports["w2"] = merge_lora(w2, second, generator=generator)
    codes, scales = fp8moe.to_block_fp8(w13, parts=halves, rows=ffn)
    of_w13 = zip(codes, scales, strict=True) if halves > 1 else [(codes, scales)]
    matrices = [*of_w13, fp8moe.to_block_fp8(w2, columns=ffn)]
    tensors = {}
    start = layer._ranks.rank * len(w2.rowwise.data)
    for e in range(len(w2.rowwise.data)):
        for name, (codes, scales) in zip(("gate", "up", "down")[-len(matrices) :], matrices, strict=True):
            key = f"{prefix}{start + e}.{name}_proj.weight"
            tensors[key], tensors[f"{key}_scale_inv"] = codes[e].view(torch.float8_e4m3fn), scales[e]
    return tensors, reports


def _check_padding(w13: Any, w2: Any, halves: int, ffn: int) -> None:
    """Refuses codes other than zeros where the result is cut, which the forward multiplies by."""
    of_w13 = w13.rowwise.data.unflatten(1, (halves, -1))[:, :, ffn:]
    for name, codes in (("w13", of_w13), ("w2", w2.rowwise.data[:, :, ffn:])):
        if bool((codes & 0x7F).any()):
            raise ValueError(
                f"{name}: got values other than zero beyond the layer's ffn = {ffn}; wanted zeros; make the "
                f"layer with ffn={w2.shape[2]}"
            )
