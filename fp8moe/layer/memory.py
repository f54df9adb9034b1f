"""What a layer holds in memory, by part, from sizes alone: a dry run of its forward and backward."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np

from fp8moe.activation import SWIGLU, Activation
from fp8moe.formats import BFLOAT16, ceil_div
from fp8moe.layer.checks import check_gradients, with_bias
from fp8moe.layer.moe import experts_backward, experts_forward
from fp8moe.layer.options import LayerArguments, options_of
from fp8moe.layer.recipes import GRADIENTS
from fp8moe.ops.quantize import parts_spec
from fp8moe.records import ArraySpec
from fp8moe.runtime import checks
from fp8moe.runtime.dispatch import NOWHERE
from fp8moe.runtime.interop import NUMPY
from fp8moe.runtime.record_trees import arrays_in, map_arrays, nbytes
from fp8moe.runtime.recording import DryRun

DTYPES = {"bfloat16": BFLOAT16} | {n: np.dtype(n) for n in ("float16", "float32", "float64")}


@dataclass(frozen=True)
class LayerMemory:
    """Bytes that a layer holds, without its inputs and its master weights: the result of `memory`.

    Attributes
    ----------
    saved : int
        What is held between forward and backward, without the copies of weights: x, h, a, probs and routing.
    x : int
        The input of fc1.
    h : int
        The output of fc1.
    a : int
        The activation's output.
    probs : int
        The permuted probabilities.
    routing : int
        The plan of the permutation.
    copies : int
        FP8 copies of the weights that a forward makes, 0 for "bf16".
    copies_saved : int
        Those of them that the backward reads.
    results : int
        dx, dprobs and the gradients of the weights and of bias13, new arrays.
    forward : int
        The most that is held during the forward, with y and what it saves.
    backward : int
        The most that is held during the backward, with what the forward saved and all results, without y.
    workspace : int or None
        The most of the kernels' temporary memory at once; None without a device, where it is not known and
        not part of forward and backward.
    """

    saved: int
    x: int
    h: int
    a: int
    probs: int
    routing: int
    copies: int
    copies_saved: int
    results: int
    forward: int
    backward: int
    workspace: int | None

    @property
    def peak(self) -> int:
        """The larger of forward with copies, and of backward with copies_saved."""
        return max(self.forward + self.copies, self.backward + self.copies_saved)


def memory(
    tokens: int,
    hidden: int,
    ffn: int,
    num_experts: int,
    topk: int,
    *,
    activation: Activation = SWIGLU,
    dtype: str = "bfloat16",
    bias13: bool = False,
    gradients: Collection[str] = GRADIENTS,
    grad_dtype: str = "float32",
    device: int | None = None,
    **options: Unpack[LayerArguments],
) -> LayerMemory:
    """Predict, from sizes alone, the bytes that a layer's forward and backward hold.

    The numbers are those of a dry run of `moe_forward` and `moe_backward`: nothing is allocated or computed.
    What a framework's allocator takes beyond what it is asked for is not included. With expert parallelism
    ``tokens`` and ``num_experts`` are those of one rank.

    Parameters
    ----------
    tokens : int
        T, rows of x.
    hidden : int
        H.
    ffn : int
        F; the FP8 recipes pad it with zeros to a multiple of 128.
    num_experts : int
        E.
    topk : int
        k, experts per token.
    activation : Activation
        As for `moe_forward`.
    dtype : "bfloat16", "float16", "float32" or "float64"
        Dtype of x; for "bf16" also of the weights.
    bias13 : bool
        Whether the layer has a bias13.
    gradients : collection of str
        As for `moe_forward`.
    grad_dtype : "float32", "bfloat16" or "float64"
        Dtype of the weights' gradients.
    device : int or None
        Number of a CUDA device, whose kernels' temporary memory is then included.
    **options : recipe, recompute, save, backend, num_sms, weight_copies
        As for `moe_forward`.

    Returns
    -------
    LayerMemory
        Bytes, by part.

    Raises
    ------
    TypeError, ValueError
        As for `moe_forward`.

    Examples
    --------
    >>> m = fp8moe.memory(16384, 2048, 768, 128, 8)
    >>> half = fp8moe.memory(16384, 2048, 768, 128, 8, save="fp8")
    >>> m.a, round(half.h / m.h, 3), m.copies_saved / m.copies
    (0, 0.516, 0.5)
    """
    how = options_of("memory", options, activation=activation)
    recipe = how.precision
    sizes = {"tokens": tokens, "hidden": hidden, "ffn": ffn, "num_experts": num_experts, "topk": topk}
    for name, size in sizes.items():
        checks.integer(name, size, 0 if name == "tokens" else 1)
    checks.choice("dtype", dtype, DTYPES)
    checks.choice("grad_dtype", grad_dtype, ("float32", "bfloat16", "float64"))
    checks.flag("bias13", bias13)
    check_gradients(gradients)
    kind = DTYPES[dtype]
    ffn = ceil_div(ffn, recipe.ffn_multiple) * recipe.ffn_multiple
    columns = activation.columns(ffn)
    shapes = (num_experts, columns, hidden), (num_experts, hidden, ffn)
    weights: list[Any] = [ArraySpec(shape, kind) for shape in shapes]
    if recipe.quantizes:
        weights = [parts_spec(w, "e4m3", how.keeps_columnwise) for w in weights]
    bias_kind = kind if kind == np.float64 else checks.FLOAT32
    layer: list[Any] = [
        ArraySpec((tokens, hidden), kind),
        *weights,
        ArraySpec((tokens, topk), checks.INT32),
        ArraySpec((tokens, topk), bias_kind),
        ArraySpec((num_experts, columns), bias_kind) if bias13 else None,
    ]
    wanted = with_bias(tuple(gradients), layer[-1])
    if device is not None:
        checks.integer("device", device, 0)
    where = NOWHERE if device is None else device
    call = DryRun([(a.shape, a.dtype, 0) for a in arrays_in(tuple(layer))], where, NUMPY)
    inputs = iter(call.inputs)
    x, w13, w2, ids, probs, bias = map_arrays(lambda _: next(inputs), tuple(layer))
    y, saved = call.perform(experts_forward, x, w13, w2, ids, probs, how, wanted, None, bias)
    forward, held = _most(call), saved.nbytes
    copies_saved = nbytes(saved.w13, saved.w2) if recipe.quantizes else 0
    del y
    begin, results, backward = len(call.steps), 0, held
    if wanted:
        dy = call.array(x.shape, x.dtype)
        begin = len(call.steps)  # dy is an input
        grads = call.perform(experts_backward, saved, dy, None, None, grad_dtype, wanted)
        results, backward = nbytes(grads), held + _most(call, begin)
    return LayerMemory(
        saved=held,
        x=nbytes(saved.x),
        h=nbytes(saved.h),
        a=nbytes(saved.a),
        probs=nbytes(saved.probs),
        routing=nbytes(saved.plan),
        copies=sum(a.nbytes for a in arrays_in(tuple(weights))) if recipe.quantizes else 0,
        copies_saved=copies_saved,
        results=results,
        forward=forward,
        backward=backward,
        workspace=None if device is None else _most(call, scratch=True),
    )


def _most(call: DryRun, begin: int = 0, *, scratch: bool = False) -> int:
    """The most bytes that the steps of a dry run from ``begin`` on have allocated at once, beyond those that
    were allocated before. scratch: of the kernels' memory alone."""
    allocated = most = 0
    for step in call.steps[begin:]:
        if type(step) is not int or (scratch and max(step, ~step) not in call.scratch_buffers):
            continue
        size = ArraySpec(*call.buffers[max(step, ~step)]).nbytes
        allocated += size if step >= 0 else -size
        most = max(most, allocated)
    return most
