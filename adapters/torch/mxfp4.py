"""Weights of experts that exist only as a published checkpoint's MXFP4: half a byte a weight, a scale for 32.

A parameter of this kind has the shape and the name that the weight has in the dequantised model, so that
adapters are made for it and saved as for that model. FP8 codes are made of it for one forward at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import fp8moe
from fp8moe import Quantized
from fp8moe.adapters.torch.operands import round_up_to_block
from fp8moe.runtime import checks

_aten = torch.ops.aten


class MXFP4Weight(Tensor):
    """A frozen weight [E, in, out], in bfloat16 by its dtype, that is stored as MXFP4.

    No operation computes with its values, which would need four times its memory: all but copies and moves
    between devices raise NotImplementedError; `dequantize` gives the values.

    Attributes
    ----------
    blocks : Tensor, uint8, [E, out, in / 32, 16]
        e2m1 codes, two to a byte, the first in the lower bits: ``*_blocks`` of gpt-oss.
    scales : Tensor, uint8, [E, out, in / 32]
        E8M0 scale of each block: ``*_scales``.

    Raises
    ------
    TypeError, ValueError
        For another dtype, or shapes that do not fit each other.
    """

    blocks: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, blocks: Tensor, scales: Tensor) -> MXFP4Weight:
        for name, t in (("blocks", blocks), ("scales", scales)):
            if t.dtype != torch.uint8:
                raise TypeError(f"{name}: got dtype {t.dtype}; wanted torch.uint8")
        checks.shape("blocks", blocks, ("E", "out", "in/32", 16))
        checks.shape("scales", scales, tuple(blocks.shape[:3]))
        experts, out, count, _ = blocks.shape
        size, strides = (experts, 32 * count, out), (32 * count * out, 1, 32 * count)
        options: Any = {"strides": strides, "dtype": torch.bfloat16, "device": blocks.device}
        return Tensor._make_wrapper_subclass(cls, size, **options)  # type: ignore[no-any-return]

    def __init__(self, blocks: Tensor, scales: Tensor):
        self.blocks, self.scales = blocks, scales

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        w, options = args[0], kwargs or {}
        if isinstance(w, cls):
            if func in (_aten.detach.default, _aten.alias.default):
                return cls(w.blocks, w.scales)
            if func is _aten.clone.default:
                return cls(w.blocks.clone(), w.scales.clone())
            if func is _aten._to_copy.default and options.get("dtype", w.dtype) == w.dtype:
                options = {n: v for n, v in options.items() if n in ("device", "non_blocking")}
                return cls(*(_aten._to_copy(t, **options) for t in (w.blocks, w.scales)))
            if func is _aten.copy_.default and isinstance(args[1], cls):
                for to, of in ((w.blocks, args[1].blocks), (w.scales, args[1].scales)):
                    to.copy_(of)
                return w
            if func in _LIKE:
                like = torch.empty((), dtype=w.dtype, device=w.device).expand(w.shape)
                return func(like, *args[1:], **options)
        raise NotImplementedError(
            f"{func}: got a weight in MXFP4, {[*_first(cls, args, options).shape]}, which is frozen, and "
            "which only experts_implementation='fp8moe' in an FP8 recipe multiplies; wanted one adapter of "
            "PEFT for it, its values, as in parameter.dequantize(), or fp8moe.torch.exclude_from_ddp(model) "
            "before DistributedDataParallel"
        )

    @property
    def packed(self) -> tuple[Tensor, Tensor]:
        """Blocks and scales."""
        return self.blocks, self.scales

    def dequantize(self) -> Tensor:  # type: ignore[override]
        """The values.

        Returns
        -------
        Tensor, bfloat16, [E, in, out]
            With the strides of its transpose, as the blocks lie along ``in``. Exact.
        """
        low, high = self.blocks & 15, self.blocks >> 4
        table = torch.tensor(_E2M1, dtype=torch.bfloat16, device=self.device)
        values = table[torch.stack([low, high], dim=-1).long()].flatten(-2)  # [E, out, in / 32, 32]
        exponents = self.scales.to(torch.int32)[..., None] - 127
        return torch.ldexp(values.float(), exponents).to(torch.bfloat16).flatten(2).mT

    def storage(self) -> Any:
        """Raises RuntimeError: there is none, and what writes or shares memory would read address 0."""
        raise RuntimeError(
            f"got a weight in MXFP4, {[*self.shape]}, to be written or shared as bfloat16; wanted the "
            "adapters alone, as PEFT's save_pretrained writes them beside the published checkpoint, or a "
            "state dict by torch.save"
        )

    __dlpack__ = storage  # type: ignore[assignment]
    _typed_storage = storage  # of share_memory_

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["blocks", "scales"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, rest: Any, size: Any, stride: Any) -> MXFP4Weight:
        return MXFP4Weight(inner["blocks"], inner["scales"])

    def __repr__(self) -> str:  # type: ignore[override]
        return f"MXFP4Weight({[*self.shape]}, device={str(self.device)!r})"


#: operations that read shape and dtype only
_LIKE = {getattr(_aten, name).default for name in ("empty_like", "new_empty", "new_zeros", "zeros_like")}
_MAGNITUDES = 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0
_E2M1 = (*_MAGNITUDES, *(-m for m in _MAGNITUDES))


# for torch.load of a state dict, which refuses other classes
torch.serialization.add_safe_globals([MXFP4Weight])


def _first(kind: type, args: Any, kwargs: Any) -> Any:
    return next(t for t in tree_leaves((args, kwargs)) if isinstance(t, kind))


def parameter(blocks: Tensor, scales: Tensor) -> nn.Parameter:
    """A frozen parameter in MXFP4."""
    return nn.Parameter(MXFP4Weight(blocks, scales), requires_grad=False)


Packed = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]


def codes_of_experts(packed: Packed) -> tuple[tuple[Quantized, Quantized], tuple[Tensor, Tensor]]:
    """Row-wise FP8 codes of both weights of experts whose gates and ups take turns, with F filled up to whole
    blocks, and how many values of each expert were rounded in each (`fp8moe.from_mxfp4`). packed: blocks and
    scales of both."""
    gate_up, down = packed
    width = round_up_to_block(32 * down[0].shape[2])
    first: dict[str, Any] = {"parts": 2, "interleaved": True, "rows": width, "columnwise": False}
    w13, of_w13 = fp8moe.from_mxfp4(*gate_up, **first)
    w2, of_w2 = fp8moe.from_mxfp4(*down, columns=width, columnwise=False)
    return (w13, w2), (of_w13, of_w2)
