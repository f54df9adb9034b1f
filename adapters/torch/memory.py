"""What the layers of a model hold in memory, from their sizes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

import fp8moe
from fp8moe.adapters.torch.layer import FP8FlowMoE
from fp8moe.layer.memory import LayerMemory

__all__ = ["memory"]


def memory(model: nn.Module, tokens: int) -> dict[str, LayerMemory]:
    """Predict the bytes that each `FP8FlowMoE` of a model holds, by `fp8moe.memory`.

    Parameters
    ----------
    model : Module
        A layer, or a model with layers.
    tokens : int
        Rows of each layer's input.

    Returns
    -------
    dict of str to LayerMemory
        By the layer's name in the model, "" for the model itself. Gradients are those of the weights that
        require them, with those of the input and of the probabilities. Frozen FP8 codes are weights, and no
        copies of any: ``copies`` and ``copies_saved`` are 0.

    Raises
    ------
    TypeError, ValueError
        For something else than a module, one without such a layer, or invalid tokens.
    NotImplementedError
        For a layer over several ranks, whose rows depend on the routing, and for recipe "bf16", where the
        products may be torch's, of which autograd keeps more than this library's record.

    Examples
    --------
    >>> import torch
    >>> from fp8moe.torch import FP8FlowMoE, memory
    >>> half, whole = (memory(FP8FlowMoE(256, 128, 8, 2, save=s), 64)[""] for s in ("fp8", "bf16"))
    >>> half.h / whole.h  # one byte, and a float32 for every 128 values
    0.515625
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}; wanted a Module")
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, FP8FlowMoE)}
    if not layers:
        raise ValueError(
            "model: got one without an FP8FlowMoE; wanted a layer; or pass sizes to fp8moe.memory"
        )
    return {name: _of_layer(layer, tokens) for name, layer in layers.items()}


def _of_layer(layer: FP8FlowMoE, tokens: int) -> LayerMemory:
    options, fix = layer._options, "pass sizes to fp8moe.memory"
    if layer._ranks.size > 1:
        raise NotImplementedError(
            f"model: got a layer over {layer._ranks.size} ranks, whose rows depend on the routing; {fix}"
        )
    if not options.precision.quantizes:
        raise NotImplementedError(
            "model: got a layer with recipe='bf16', whose products may be torch's, of which autograd keeps "
            f"more; wanted an FP8 recipe; {fix}"
        )
    if layer.lora is not None:
        raise NotImplementedError(
            f"model: got a layer with adapters (LoRA), which save rows of their own; {fix}"
        )
    weights = {} if layer._is_frozen else {"dw13": layer.w13, "dw2": layer.w2}
    held = fp8moe.memory(
        tokens,
        layer.hidden,
        layer.ffn,
        layer.num_experts,
        layer.topk,
        gradients=("dx", "dprobs", *(name for name, w in weights.items() if w.requires_grad)),
        grad_dtype="bfloat16" if any(w.dtype == torch.bfloat16 for w in weights.values()) else "float32",
        **options.arguments,
    )
    return replace(held, copies=0, copies_saved=0) if layer._is_frozen else held
