"""The gradients of a call's weights: which are added to a ``main_grad``, in which dtype and parts they are
computed. accumulation.py says which are added to a ``grad``."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fp8moe.adapters.torch.arguments import Options

OF_WEIGHTS = ("dw13", "dw13", "dw2")  # gradient names of w13 (or w1), w3 and w2


def main_grad_of(w: Tensor | None) -> Tensor | None:
    """The ``main_grad`` to which a parameter's gradient is added (Megatron's convention), or None.

    Megatron-FSDP's is a communication buffer with other contents, as ``overwrite_main_grad`` says; it copies
    the ``grad`` into it.
    """
    if w is None or getattr(w, "overwrite_main_grad", False) or hasattr(w, "__fsdp_param__"):
        return None
    main = getattr(w, "main_grad", None)
    if main is None:
        return None
    main, wanted = (t.to_local() if isinstance(t, DTensor) else t for t in (main, w))
    if main.shape != wanted.shape:
        raise ValueError(
            f"main_grad: got shape {list(main.shape)}; wanted {list(wanted.shape)}, its parameter's"
        )
    if not main.is_contiguous():
        raise ValueError(f"main_grad: got strides {main.stride()}; wanted C-contiguous memory")
    return main


def main_grads_of(weights: Any, gradients: Collection[str]) -> list[Tensor | None]:
    """The ``main_grad`` of each weight that gets a gradient, None for the others."""
    pairs = zip(OF_WEIGHTS, weights, strict=True)
    return [
        main_grad_of(w) if n in gradients and w is not None and w.requires_grad else None for n, w in pairs
    ]


_SET_HERE = "_fp8moe_set_grad_added_to_main_grad"


def wants_zeros(w: Tensor | None) -> bool:
    """Whether ``grad_added_to_main_grad`` was set by the code that set ``main_grad``, as Megatron does: it
    asserts that a ``grad`` exists after the backward, and discards it."""
    return hasattr(w, "grad_added_to_main_grad") and not hasattr(w, _SET_HERE)


def set_added(w: Tensor) -> None:
    if not hasattr(w, "grad_added_to_main_grad"):
        setattr(w, _SET_HERE, True)
    w.grad_added_to_main_grad = True  # type: ignore[attr-defined]


_zeros: dict[Any, Tensor] = {}


def shared_zeros(main: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros that reuse the same memory as long as nobody holds or has modified it. Autograd uses a tensor
    without other references as ``grad`` without a copy."""
    key = tuple(main.shape), dtype, main.device
    cached = _zeros.get(key)
    # a detached tensor shares the version counter of its base
    if cached is None or cached._version or torch._C._storage_Use_Count(cached.untyped_storage()._cdata) > 1:
        cached = _zeros[key] = torch.zeros_like(main, dtype=dtype)
    return cached.detach()


def weight_gradients(backward: Any, targets: Any, dtypes: Any, is_sum: bool, options: Options) -> list[Any]:
    """dx, dprobs, dw13 (or dw1), dw3, dw2 and dbias13; one with an entry in ``targets``, a ``main_grad`` or a
    ``grad``, is added to it. backward: `fp8moe.moe_backward` of a record, or one of its halves. is_sum:
    whether the gradients are sums over chunks."""
    target13, target3, target2 = targets
    # bfloat16 directly if all weights are; float32 for other dtypes and for sums over chunks
    all_bfloat16 = {*dtypes} <= {None, torch.bfloat16} and not is_sum
    g = backward(
        dw13=(target13, target3) if options.w13_is_pair else target13,
        dw2=target2,
        dtype="bfloat16" if all_bfloat16 else "float32",
        ffn=options.ffn,
    )
    of_w13 = g.dw13 if isinstance(g.dw13, tuple) else (g.dw13, None)
    return [g.dx, g.dprobs, *of_w13, g.dw2, g.dbias13]
