"""A weight's ``grad`` as the accumulator of its gradient's GEMM.

From the second micro-batch on autograd adds a weight's gradient to its ``grad``: the GEMM writes the gradient
and another kernel reads both and writes the sum, 8 bytes a bfloat16 weight. Where nothing can observe the
separate gradient, the GEMM adds to ``grad`` itself, 4 bytes. Autograd then gets a sparse gradient without
entries, and accumulates it as any other: `AccumulateGrad` runs on a stream that waits for the GEMM's,
increments the version of ``grad``, and calls what waits for ``grad``, such as the reducer of
DistributedDataParallel.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterable
from typing import Any

from fp8moe.adapters import needs

with needs("torch"):
    import torch
    import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from fp8moe.adapters.torch.library import PLAIN
from fp8moe.runtime import checks

__all__ = ["set_fuse_wgrad_accumulation"]

_enabled = True

#: dtypes of grad and weight for which the fastest kernels add; they differ by the weight's ``grad_dtype``
_DTYPES = {
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
}
#: bytes to which the fastest kernels require an accumulator to be aligned
_ALIGNMENT = 16


def set_fuse_wgrad_accumulation(enabled: bool) -> None:
    """Set whether the weight gradient's GEMM (wgrad) adds to an existing ``grad`` of its weight.

    It does by default, from the second micro-batch of an optimizer step on, or from the first after
    ``zero_grad(set_to_none=False)``: one read and one write of ``grad``, half of the memory traffic of a
    gradient of its own that autograd adds, and no memory for that. The sum of ``grad`` and the gradient is
    computed in float32 and rounded once; autograd rounds a bfloat16 gradient before it adds it, and the sum
    again. The setting is that of the process, for every layer and function of this library, and is read in
    the backward.

    Parameters
    ----------
    enabled : bool
        False: every gradient is a tensor of its own, which autograd adds.

    Raises
    ------
    TypeError
        For anything else than a bool.

    Notes
    -----
    Only a backward that accumulates in leaf tensors adds in the GEMM (not `torch.autograd.grad`), in eager
    mode, where the GEMM's result is the gradient of the weight itself, not of a cast, padded, transposed or
    concatenated copy, and where the weight has a ``grad`` of its own shape and device, in bfloat16 or float32
    (of a bfloat16 or float16 weight by its ``grad_dtype``), contiguous and aligned to 16 bytes. The gradient
    stays separate if it can be observed: by a hook on the weight (`Tensor.register_hook`,
    ``register_post_accumulate_grad_hook``) or on its node in autograd's graph, with ``create_graph=True`` and
    in anomaly mode. It does also in compiled autograd, with ``overlap_chunks``, whose sum is rounded once,
    and where layers of one backward are on several CUDA streams, in all but the first. A ``main_grad`` takes
    precedence. The recipe "bf16" adds where its GEMMs are this library's: on Hopper, for other dtypes than
    bfloat16, or for a ``backend`` or ``num_sms``.

    After a backward that raised, the ``grad`` of any weight may or may not contain its gradient, as always
    with autograd: set them to None or zeros. Threads that run backwards of the same weights at the same time
    must set False.

    Examples
    --------
    >>> import torch
    >>> import fp8moe.torch
    >>> x, offsets = torch.ones(1, 1), torch.tensor([0, 1], dtype=torch.int32)
    >>> w = torch.ones(1, 1, 1, requires_grad=True)
    >>> for enabled in (True, False):
    ...     fp8moe.torch.set_fuse_wgrad_accumulation(enabled)
    ...     for _ in range(2):  # micro-batches
    ...         fp8moe.torch.grouped_gemm(x, w, offsets).backward()
    >>> fp8moe.torch.set_fuse_wgrad_accumulation(True)
    >>> w.grad.item()
    4.0
    """
    global _enabled
    _enabled = checks.flag("enabled", enabled)


def accumulators_of(node: Any, following: Iterable[Any]) -> list[Tensor | None]:
    """The ``grad`` that each gradient of the running node is added to, None to return the gradient.

    node: autograd's node that runs. following: the nodes that get the gradients, None without one.
    """
    grads = [_grad_after(n) if _enabled else None for n in following]
    if all(g is None for g in grads):
        return grads
    observed = (
        torch.is_grad_enabled()
        or getattr(node, "creates_graph", False)
        or torch.is_anomaly_enabled()
        or torch._C._current_autograd_node() is not node  # type: ignore[attr-defined]  # compiled autograd
        or _is_hooked(node.register_hook)
    )
    return [None] * len(grads) if observed or not _on_one_stream(grads) or _overlap(grads) else grads


def no_entries(grad: Tensor) -> Tensor:
    """What autograd accumulates after the GEMM has added to ``grad``."""
    return _no_entries(grad.shape, grad.dtype, grad.device)


@functools.lru_cache(maxsize=1024)
def _no_entries(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    with _disable_current_modes():  # which may make tensors of their own types
        # not by sparse_coo_tensor, with which torch 2.11 warns of memory errors
        return torch.empty(shape, dtype=dtype, device=device, layout=torch.sparse_coo)


class LocalPart(torch.autograd.Function):
    """This rank's part of a DTensor: DTensor's own operations take the host 17 us in a forward, this takes 6;
    and the gradient may be one without entries. sums: whether the gradient becomes the sum over the ranks of
    the mesh."""

    @staticmethod
    def forward(ctx, w, sums):  # type: ignore[no-untyped-def]
        ctx.spec, ctx.sums = w._spec, sums
        ctx.set_materialize_grads(False)
        return w._local_tensor.view_as(w._local_tensor)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        if grad is None:
            return None, None
        if grad.layout is not torch.strided:  # of which from_local cannot make a view
            return DTensor(grad, copy.copy(ctx.spec), requires_grad=False), None
        if ctx.sums:
            grad = grad.clone(memory_format=torch.contiguous_format)
            for group in ctx.spec.mesh.get_all_groups():
                dist.all_reduce(grad, group=group)
        return DTensor.from_local(grad, ctx.spec.mesh, ctx.spec.placements, run_check=False), None


def _grad_after(node: Any) -> Tensor | None:
    """The ``grad`` of the leaf tensor whose gradient is the one that ``node`` gets."""
    is_part = isinstance(node, LocalPart._backward_cls)  # type: ignore[attr-defined]
    if is_part:
        ((node, _),) = node.next_functions
    if not isinstance(node, torch._C._functions.AccumulateGrad):  # type: ignore[attr-defined]
        return None
    w = node.variable
    if (grad := w.grad) is None or not w.requires_grad or w._backward_hooks or w._post_accumulate_grad_hooks:
        return None
    if is_part:
        if not isinstance(grad, DTensor) or grad._spec != w._spec:
            return None
        w, grad = w._local_tensor, grad._local_tensor
    if not (type(w) in PLAIN or getattr(w, "has_plain_grad", False)) or type(grad) not in PLAIN:
        return None
    if not _is_accumulator(grad, w):
        return None
    try:
        accumulates = torch._C._will_engine_execute_node(node)
    except RuntimeError:  # outside of autograd's engine, or torch.autograd.grad
        return None
    # a hook before the node gets the gradient, one after it the gradient again
    if not accumulates or _is_hooked(node.register_prehook) or _is_hooked(node.register_hook):
        return None
    return grad


def _is_accumulator(grad: Tensor, w: Tensor) -> bool:
    return (
        (grad.dtype, w.dtype) in _DTYPES
        and grad.shape == w.shape
        and grad.device == w.device
        and grad.layout is torch.strided
        and grad.is_contiguous()
        and not grad.requires_grad
        and not grad.is_neg()
        and grad.data_ptr() % _ALIGNMENT == 0
    )


def _is_hooked(register: Any) -> bool:
    """Whether a node of autograd's graph has hooks of Python. register: its method that adds one, without
    which the hooks cannot be seen."""
    handle = register(_no_hook)
    hooks: Any = handle.hooks_dict_ref()
    del hooks[handle.id]  # as handle.remove(), which takes a microsecond more
    return bool(hooks)


def _no_hook(*_: Any) -> None:
    pass


#: (running backward, device) -> stream on which its GEMMs add, of the last backwards
_streams: dict[tuple[int, int], int] = {}


def _on_one_stream(grads: list[Tensor | None]) -> bool:
    """Whether GEMMs of the running backward have added on this stream only. Autograd orders the streams of
    the gradients that it adds, but not those of two GEMMs that add to one ``grad``."""
    device = next(g for g in grads if g is not None).get_device()
    if device < 0:
        return True
    key = torch._C._current_graph_task_id(), device
    stream = torch._C._cuda_getCurrentRawStream(device)  # type: ignore[attr-defined]
    if key not in _streams and len(_streams) > 64:
        del _streams[next(iter(_streams))]
    return _streams.setdefault(key, stream) == stream


def _overlap(grads: list[Tensor | None]) -> bool:
    """Whether two of them share memory, as for a weight that is given twice."""
    ranges = sorted((g.data_ptr(), g.data_ptr() + g.nbytes) for g in grads if g is not None)
    return any(end > start for (_, end), (start, _) in itertools.pairwise(ranges))
