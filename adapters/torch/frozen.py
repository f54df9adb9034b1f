"""Weights of experts that exist as FP8 codes and scales alone: one byte a weight, without masters and
gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fp8moe import Quantized, QuantTensor
from fp8moe.adapters.torch.gathered import local
from fp8moe.adapters.torch.library import as_bytes, spec_of
from fp8moe.adapters.torch.operands import FP8_BLOCK, check_codes
from fp8moe.adapters.torch.operation import check_tensor
from fp8moe.formats import ceil_div
from fp8moe.runtime import checks
from fp8moe.runtime.record_trees import map_arrays

_CODES, _SCALES = "weight", "weight_scale_inv"
_FIX = (
    "wanted e4m3 codes and float32 scales; pass fp8moe.from_block_fp8(...), fp8moe.from_mxfp4(...)[0] or "
    "fp8moe.torch.quantize_weights(...)"
)


class FrozenWeight(nn.Module):
    """The weight [E, N, K] of E experts, in two buffers with the names of published checkpoints.

    weight: codes, uint8 [E, N, K]; e4m3 in state dicts. As uint8 they can neither require a gradient nor be
    cast as floating-point buffers are, and they are the arrays that the GEMMs read: nothing else is kept that
    could differ from them. weight_scale_inv: float32, one for each tile of 128 x 128.
    """

    weight: Tensor
    weight_scale_inv: Tensor

    def __init__(self, q: QuantTensor, mesh: DeviceMesh | None = None):
        """q: of `row_codes`. mesh: of the ranks, each of which has a record of its own experts."""
        super().__init__()
        for buffer, t in ((_CODES, q.data), (_SCALES, q.scales)):
            if mesh is not None:
                t = DTensor.from_local(t, mesh, (Shard(0),), run_check=False)
            self.register_buffer(buffer, t)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Codes and scales of this rank."""
        buffers: Any = self._buffers  # as attributes, they would take two calls in each forward
        codes, scales = buffers[_CODES], buffers[_SCALES]
        return (codes._local_tensor, scales._local_tensor) if isinstance(codes, DTensor) else (codes, scales)

    @property
    def quantized(self) -> Quantized:
        """The record that the GEMMs read, of the buffers themselves."""
        return Quantized(QuantTensor(*self.tensors, block=FP8_BLOCK))

    def check(self, name: str, shape: tuple[int, ...], fix: str) -> None:
        """Checks what may have been replaced since. shape: of this rank's experts. fix: for another one."""
        experts, *sizes = shape
        tiles = experts, *(ceil_div(size, FP8_BLOCK[0]) for size in sizes)
        given = (_CODES, torch.uint8, shape), (_SCALES, torch.float32, tiles)
        for (buffer, dtype, wanted), t in zip(given, self.tensors, strict=True):
            whose = f"{name}.{buffer}"
            check_tensor(whose, t)
            if t.dtype != dtype or not t.is_contiguous():
                raise TypeError(
                    f"{whose}: got {t.dtype}, strides {t.stride()}, in a layer of frozen FP8 codes; wanted "
                    f"{dtype}, contiguous; make the layer again by FP8FlowMoE.from_quantized, or load its "
                    "state dict"
                )
            checks.shape(whose, t, wanted, fix)
        check_codes(name, self.quantized)

    def check_values(self, name: str) -> None:
        """Checks that codes and scales have been loaded."""
        if any(t.is_meta for t in self.tensors):
            raise TypeError(
                f"{name}: got codes and scales on meta, without values; wanted them on cpu or cuda; load "
                "them first: load_state_dict(..., assign=True)"
            )

    def checked(self, state: dict[str, Any], prefix: str, shard: Callable[[Any, Tensor], Any]) -> None:
        """Checks a state dict's entries before torch copies them, with a cast, and puts those in the form of
        the buffers in their places. shard: this rank's part of an entry."""
        codes, scales = prefix + _CODES, prefix + _SCALES
        if codes not in state and scales not in state:
            return
        for name, other in ((codes, scales), (scales, codes)):
            if name not in state:
                raise ValueError(
                    f"{name}: got none beside {other}; wanted codes and scales together, without which the "
                    "other has no values"
                )
        for name, dtypes in ((codes, (torch.float8_e4m3fn, torch.uint8)), (scales, (torch.float32,))):
            if state[name].dtype not in dtypes:
                cast = f"{name}.float()" if name == scales else "codes, as fp8moe.to_block_fp8 gives them"
                raise TypeError(
                    f"{name}: got dtype {state[name].dtype} for frozen FP8 codes; wanted {dtypes[0]}; pass "
                    f"{cast}, or load floating-point weights into FP8FlowMoE(...)"
                )
        if state[scales].device.type == "cpu":
            bits = local(state[scales]).contiguous().view(torch.int32)  # comparisons may flush subnormals
            if not bool(((bits > 0) & (bits < 0x7F800000)).all()):
                raise ValueError(f"{scales}: got a scale that is not positive and finite; wanted such scales")
        state[codes] = _in_each(as_bytes, shard(state[codes], self.weight))
        state[scales] = shard(state[scales], self.weight_scale_inv)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        if requires_grad:
            raise TypeError(
                "requires_grad_: got True for frozen FP8 codes, which have no gradient; wanted False; to "
                "train the weights, load them in floating point into FP8FlowMoE(...)"
            )
        return super().requires_grad_(False)

    def extra_repr(self) -> str:
        return f"{' x '.join(map(str, self.weight.shape))}, e4m3, a scale for each 128 x 128"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # as integers, which .to(dtype), .half(), .bfloat16() and others leave as they are
        for name, t in self.named_buffers():
            self._buffers[name] = _in_each(partial(_moved, name, fn), t)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        name = prefix + _CODES
        destination[name] = _in_each(_as_e4m3, destination[name])


def row_codes(name: str, w: Any) -> QuantTensor:
    """The codes of a weight that a layer may have without masters."""
    if not isinstance(w, Quantized):
        raise TypeError(f"{name}: got {type(w).__name__}; {_FIX}")
    check_codes(name, w)
    q, of = w.rowwise, f"{name}.rowwise"
    for part in ("data", "scales"):
        check_tensor(f"{of}.{part}", getattr(q, part))
    q = q.changed(data=as_bytes(q.data.detach()), scales=q.scales.detach())
    checks.quant_tensor(of, map_arrays(spec_of, q), (FP8_BLOCK,))
    checks.shape(of, q, ("E", "N", "K"))
    if q.fmt != "e4m3" or q.transposed:
        raise TypeError(f"{of}: got {'transposed codes' if q.transposed else f'fmt {q.fmt!r}'}; {_FIX}")
    for t in (q.data, q.scales):
        if not t.is_contiguous():
            raise ValueError(f"{of}: got strides {t.stride()}; wanted contiguous codes and scales")
    return q


def tensors_of(*weights: Any) -> list[Tensor]:
    """The tensors of a layer's weights."""
    return [t for w in weights for t in (w.tensors if isinstance(w, FrozenWeight) else (w,))]


def refuse_broadcast(*weights: FrozenWeight) -> None:
    """Raises within a DistributedDataParallel that sends a layer's codes from rank 0 in each forward."""
    ddp: Any = nn.parallel.DistributedDataParallel._active_ddp_module
    if ddp is None or not ddp.broadcast_buffers:
        return
    sent = {id(t) for t in ddp.modules_buffers}
    if any(id(t) in sent for w in weights for t in w.buffers()):
        raise ValueError(
            "broadcast_buffers: got True of DistributedDataParallel, which sends all frozen FP8 codes to all "
            "ranks in each forward; wanted them left out; call fp8moe.torch.exclude_from_ddp(model) before "
            "DistributedDataParallel(model)"
        )


def _as_e4m3(t: Tensor) -> Tensor:
    return t.view(torch.float8_e4m3fn)


def _moved(name: str, fn: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    bits = t.view(torch.int32 if t.dtype.itemsize == 4 else torch.uint8)
    moved = fn(bits)
    if moved.dtype != bits.dtype:
        raise TypeError(
            f"{name}: got a conversion of frozen FP8 codes or scales to {moved.dtype}; wanted them as they "
            "are; leave out .type(...), or dequantise: fp8moe.torch.dequantize(w.quantized.rowwise)"
        )
    return t if moved is bits else moved.view(t.dtype)


def _in_each(function: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    """A function of this rank's tensor, also where it is a part of a DTensor."""
    if not isinstance(t, DTensor):
        return function(t)
    local = t._local_tensor
    new = function(local)
    return t if new is local else DTensor.from_local(new, t.device_mesh, t.placements, run_check=False)
