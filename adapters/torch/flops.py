"""The multiplications in the GEMMs of the experts, for counters of FLOPs."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import Tensor

from fp8moe.activation import Activation
from fp8moe.adapters.torch.arguments import Options, names_of, saved_weights, weights_of
from fp8moe.layer.saved import Saved, SavedForWeights


def _multiplications(
    products: Iterable[str], rows: int, hidden: int, ffn: int, activation: Activation
) -> int:
    """The number of multiplications in products of a layer. rows: (token, expert) pairs."""
    width = {name: activation.columns(ffn) for name in ("h", "dx", "dw13")}
    return rows * hidden * sum(width.get(name, ffn) for name in products)


def _products_of_backward(gradients: Collection[str], recompute: str | None) -> list[str]:
    """As the recipes compute them."""
    of_inputs = "dx" in gradients or "dprobs" in gradients
    products = ["h"] if recompute and gradients else []
    products += ["da"] if of_inputs or "dw13" in gradients or "dbias13" in gradients else []
    products += ["dx"] if of_inputs else []
    return products + [name for name in ("dw13", "dw2") if name in gradients]


def _num_rows(x: Tensor, ids: Tensor, options: Options) -> int:
    """The number of rows routed to experts, or of permuted rows, padding included: the device alone knows how
    many rows belong to an expert. Over ranks those of this rank's tokens, as many as an average rank has."""
    return x.shape[0] if options.align_size else ids.numel()


def forward_flops(x: Tensor, gemm_weights: list[Tensor], ids: Tensor, options: Options) -> int:
    _, w2, *_ = weights_of(options, gemm_weights)  # [E, H, F]
    sizes = _num_rows(x, ids, options), x.shape[1], options.ffn or w2.shape[2]
    return 2 * _multiplications(("h", "y"), *sizes, options.layer.activation)


def backward_flops(dy: Tensor, backward_weights: list[Tensor], ids: Tensor, options: Options) -> int:
    _, w2, *_ = saved_weights(options, backward_weights)
    ffn = options.ffn or w2.shape[2]
    products = _products_of_backward(names_of(options.gradients), options.layer.recompute)
    return 2 * _multiplications(
        products, _num_rows(dy, ids, options), dy.shape[1], ffn, options.layer.activation
    )


def multiplications_of(
    source: Saved | SavedForWeights, rows: int, hidden: int, requested: Collection[str], options: Options
) -> int:
    """Of a backward in eager mode, or of its second half."""
    halves = options.layer.activation.columns(1)
    if isinstance(source, Saved):
        ffn, products = source.w2.shape[2], _products_of_backward(requested, options.layer.recompute)
    else:
        products = [name for name in requested if name != "dbias13"]
        if not products:
            return 0
        ffn = source.dh.shape[1] // halves if source.a is None else source.a.shape[1]
    return _multiplications(products, rows, hidden, options.ffn or ffn, options.layer.activation)
