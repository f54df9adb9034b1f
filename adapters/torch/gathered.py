"""Weights that ``fully_shard`` gathers as FP8 codes, one byte each, by its extension points for tensors.

`SentAsFP8` is the sharded parameter: the masters, which optimizers step and checkpoints hold. Every gather
quantises this rank's shard and sends codes and scales; a (128, 128) block has one scale, so shards of whole
blocks have the codes of the whole weight. `GatheredFP8` is the gathered parameter: it has the masters' shape
and dtype for autograd, and the codes in memory that ``fully_shard`` frees and fills again.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._prims_common import make_contiguous_strides_for
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fp8moe import Quantized, QuantTensor
from fp8moe.adapters.torch import ops as torch_ops

BLOCK = 128  # rows and columns with one scale
_aten = torch.ops.aten
#: operations of ``fully_shard`` and of torch.nn.Module whose results are masters, too. Results of others are
#: plain tensors, such as the states of optimizers.
_KEEP = {
    getattr(_aten, name).default
    for name in ("alias", "as_strided", "clone", "detach", "empty_like", "new_zeros", "view")
} | {_aten.slice.Tensor, _aten.split.Tensor, _aten._to_copy.default, _aten._pin_memory.default}


@dataclass
class Padding:
    """How a weight's codes are padded: what `quantize_weights` is called with, and what gathers have sent.

    parts, rows, columns: as there; (1, None, None) for codes without padding. masters_because: why the last
    gather sent the masters, "" if it sent codes, None before the first one.
    """

    name: str
    parts: int = 1
    rows: int | None = None
    columns: int | None = None
    masters_because: str | None = None

    @property
    def pads(self) -> bool:
        return (self.rows, self.columns) != (None, None)

    def __str__(self) -> str:
        because = self.masters_because
        sent = f"masters, for {because}" if because else "FP8 codes"
        return f"{self.name}: {sent}{', if shards are of whole blocks' if because is None else ''}"


class SentAsFP8(Tensor):
    """Master weights [E, N, K], of which gathers of ``fully_shard`` send FP8 codes. A wrapper without memory
    of its own: operations are those of ``masters``."""

    masters: Tensor
    padding: Padding

    @staticmethod
    def __new__(cls, masters: Tensor, padding: Padding) -> SentAsFP8:
        return _wrapper(cls, masters)  # type: ignore[no-any-return]

    def __init__(self, masters: Tensor, padding: Padding):
        self.masters, self.padding = masters, padding

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        padding: Any = None

        def masters_of(t: SentAsFP8) -> Tensor:
            nonlocal padding
            padding = padding or t.padding
            return t.masters

        inner_args, inner_kwargs = tree_map_only(cls, masters_of, (args, kwargs or {}))
        result = func(*inner_args, **inner_kwargs)
        if func._schema.is_mutable and not isinstance(result, (tuple, list)):
            return args[0] if isinstance(args[0], cls) else result  # of in-place operations
        if func not in _KEEP:
            return result
        return tree_map_only(Tensor, lambda t: cls(t, padding), result)

    # readers of the memory, which torch would not tell that there is none: those of NumPy, JAX and pickle

    def __dlpack__(self, **options: Any) -> Any:
        return self.masters.detach().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.masters.__dlpack_device__()

    def numpy(self, **options: Any) -> Any:
        return self.masters.numpy(**options)

    def share_memory_(self) -> SentAsFP8:
        self.masters.share_memory_()
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        if isinstance(self, nn.Parameter):
            return super().__reduce_ex__(protocol)
        return self.masters.__reduce_ex__(protocol)

    def __tensor_flatten__(self) -> tuple[list[str], Padding]:
        return ["masters"], self.padding

    @staticmethod
    def __tensor_unflatten__(inner: Any, padding: Padding, size: Any, stride: Any) -> SentAsFP8:
        return SentAsFP8(inner["masters"], padding)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SentAsFP8({self.masters!r}, {self.padding})"

    # ---- the extension points of ``fully_shard``

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Sent]:
        """What this rank sends. outer_size: of the gathered weight."""
        ranks, padding, shard = mesh.size(), self.padding, self.masters
        dimension, because = sharded_dimension(shard.shape, outer_size, ranks, padding)
        if padding.masters_because != because:
            padding.masters_because = because
            if because:
                _log.warning("gather_fp8: fully_shard gathers %s", padding)
        if mp_policy.param_dtype is not None:  # in which masters would be gathered
            shard = shard.to(mp_policy.param_dtype)
        if because:
            missing = -(-outer_size[0] // ranks) - len(shard) if dimension == 0 else 0
            if missing:  # along the first dimension ``fully_shard`` pads shards
                shard = torch.cat((shard, shard.new_zeros(missing, *shard.shape[1:])))
            return (shard,), Sent(outer_size)
        if padding.pads:
            sizes: Any = {"parts": padding.parts, "rows": padding.rows, "columns": padding.columns}
            q = torch_ops.quantize_weights(shard, **sizes, columnwise=False).rowwise
        else:
            q = torch_ops.quantize(shard, block=(BLOCK, BLOCK))
        codes = [*q.data.shape]  # of the whole weight, with padding
        codes[dimension] = outer_size[dimension]
        if dimension == 0 and ranks > 1:
            return (q.data, q.scales), Sent(outer_size, codes)
        # ``fully_shard`` gives all inputs of another dimension the shard's shape, and drops the second one of
        # a single rank
        return (q.data,), Sent(outer_size, codes, _gathered(q.scales, dimension, ranks, mesh))

    def fsdp_post_all_gather(
        self, received: Sequence[Tensor], sent: Sent, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """The gathered weight, and tensors that are freed with it; with ``out``, the weight to fill again,
        whose codes ``fully_shard`` has filled itself."""
        first, *rest = received
        if sent.codes is None:
            return (first, ()) if out is None else None
        if sent.scales is not None and sent.scales.is_cuda:  # they are of the stream that copies inputs
            sent.scales.record_stream(torch.cuda.current_stream())
        if out is None:
            own = [] if sent.scales is None else [sent.scales.clone()]
            scales = own[0] if own else rest[0]
            return GatheredFP8(first.view(sent.codes), scales, self.padding, sent.size, param_dtype), own
        if sent.scales is not None:
            scales = local(out).scales
            keeps_version = torch.autograd._unsafe_preserve_version_counter(scales)  # as of the codes
            with contextlib.nullcontext() if scales.is_inference() else keeps_version:
                scales.copy_(sent.scales)
        return None


class Sent(NamedTuple):
    """What a gather knows beside what it receives. size: of the weight. codes: shape of its codes; None:
    masters are sent. scales: of the whole weight, if they have been gathered already."""

    size: torch.Size
    codes: list[int] | None = None
    scales: Tensor | None = None


class GatheredFP8(Tensor):
    """A gathered weight [E, N, K]: shape and dtype of the masters, row-wise codes [E, N', K'] and their
    scales. It has no values: an operation that would read them raises."""

    codes: Tensor
    scales: Tensor
    padding: Padding
    has_plain_grad = True  # to which a GEMM may add

    @staticmethod
    def __new__(
        cls, codes: Tensor, scales: Tensor, padding: Padding, size: torch.Size, dtype: torch.dtype
    ) -> GatheredFP8:
        strides = make_contiguous_strides_for(size)
        return Tensor._make_wrapper_subclass(cls, size, strides=strides, dtype=dtype, device=codes.device)

    def __init__(self, codes: Tensor, scales: Tensor, padding: Padding, size: torch.Size, dtype: torch.dtype):
        self.codes, self.scales, self.padding = codes, scales, padding

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        w, rest = args[0], args[1:]
        if isinstance(w, cls):
            if func in _SAME and (not rest or tuple(rest[0]) == w.shape):
                return cls(w.codes, w.scales, w.padding, w.shape, w.dtype)
            if func in _LIKE:
                like = torch.empty((), dtype=w.dtype, device=w.device).expand(w.shape)
                return func(like, *rest, **(kwargs or {}))
        raise RuntimeError(  # Python's operators would take a TypeError for one of their own
            f"{next((t.padding.name for t in tree_leaves((args, kwargs)) if isinstance(t, cls)), 'w')}: got "
            f"{func} of a weight that fully_shard has gathered as FP8 codes, which has no values; wanted an "
            "expert layer in an FP8 recipe; leave out gather_fp8, or read the shards, as in "
            "module.reshard() and parameter.full_tensor()"
        )

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scales"], (self.padding, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: Any, rest: Any, size: Any, stride: Any) -> GatheredFP8:
        padding, dtype = rest
        return GatheredFP8(inner["codes"], inner["scales"], padding, size, dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GatheredFP8({[*self.shape]}, {self.dtype}, {self.padding})"


#: operations that return the gathered weight itself, and those that read shape and dtype only
_SAME = {_aten.alias.default, _aten.detach.default, _aten.view.default, _aten.as_strided.default}
_LIKE = {getattr(_aten, name).default for name in ("empty_like", "new_empty", "new_zeros", "zeros_like")}


def send_as_fp8(module: nn.Module, name: str, padding: Padding) -> None:
    """Replaces a parameter of a module, and lets its state dicts have the masters as before."""
    old = getattr(module, name)
    if isinstance(local(old), SentAsFP8):
        return
    new = nn.Parameter(_sent(old.detach(), padding), requires_grad=old.requires_grad)
    vars(new).update({key: value for key, value in vars(old).items() if key not in vars(new)})
    setattr(module, name, new)
    if (gathers := vars(module).get("_fp8_gathers")) is not None:
        gathers[name] = padding
    else:
        module._fp8_gathers = {name: padding}  # type: ignore[assignment]
        module.register_state_dict_post_hook(_put_masters)
        module.register_load_state_dict_pre_hook(_send_assigned)


def keep_masters(module: nn.Module) -> None:
    """The parameters of a module before `send_as_fp8`, of the same memory."""
    for name in vars(module).get("_fp8_gathers", ()):
        old = getattr(module, name)
        setattr(module, name, nn.Parameter(_masters_of(old.detach()), requires_grad=old.requires_grad))


def _masters_of(w: Tensor) -> Tensor:
    if isinstance(w, DTensor):
        return DTensor(_masters_of(w._local_tensor), w._spec, requires_grad=False)
    return w.masters if isinstance(w, SentAsFP8) else w


def _sent(w: Tensor, padding: Padding) -> Tensor:
    if isinstance(w, DTensor):
        return DTensor(SentAsFP8(w._local_tensor, padding), w._spec, requires_grad=False)
    return SentAsFP8(w, padding)


def _put_masters(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in module._fp8_gathers:  # type: ignore[union-attr]
        value = state.get(prefix + name)
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):  # as with keep_vars=True
            state[prefix + name] = _masters_of(value)


def _send_assigned(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    """With ``assign=True`` a state dict's tensors take the parameters' places."""
    if not metadata.get("assign_to_params_buffers", False):
        return
    for name, padding in module._fp8_gathers.items():  # type: ignore[union-attr, operator]
        value = state.get(prefix + name)
        if isinstance(value, Tensor) and not isinstance(local(value), SentAsFP8):
            state[prefix + name] = _sent(value.detach(), padding)


def gathers_of(module: nn.Module) -> list[Padding]:
    """What gathers of the weights of a module and its parts send, "" for one without `gather_fp8`."""
    return [padding for part in module.modules() for padding in vars(part).get("_fp8_gathers", {}).values()]


def local(w: Tensor) -> Any:
    """The tensor of this rank, without autograd."""
    return w._local_tensor if isinstance(w, DTensor) else w


def sharded_dimension(shard: torch.Size, size: torch.Size, ranks: int, padding: Padding) -> tuple[int, str]:
    """The dimension along which a weight is sharded, and why its gathers cannot send codes, or "". The same
    on all ranks, of which some may have less than others."""
    if ranks == 1:
        return 0, ""
    dimension = next((d for d in range(len(size)) if shard[d] != size[d]), 0)
    if size[dimension] % ranks:
        return dimension, f"{size[dimension]} experts on {ranks} ranks"
    if dimension and (width := size[dimension] // ranks) % BLOCK:
        return dimension, f"shards of {width} {'rows' if dimension == 1 else 'columns'}, no multiple of 128"
    if dimension and padding.pads:  # copies of codes are padded to whole blocks of an expert's width
        return dimension, "an expert width that is no multiple of 128, in shards of parts of experts"
    return dimension, ""


def is_gathered(w: Any) -> bool:
    """Whether weights are those that ``fully_shard`` has gathered as codes; also of a pair of them."""
    if isinstance(w, tuple):
        return all(map(is_gathered, w))
    return isinstance(local(w), GatheredFP8)


def quantized_of(w: Any, columnwise: bool) -> Quantized:
    """The codes of a gathered weight, or of a pair of them, as the GEMMs read them. columnwise: whether to
    make those of dgrad, too."""
    if isinstance(w, tuple):
        codes, scales = (
            torch.cat([getattr(part, name) for part in w], dim=1) for name in ("codes", "scales")
        )
    else:
        codes, scales = w.codes, w.scales
    rowwise = QuantTensor(codes, scales, "e4m3", (BLOCK, BLOCK))
    return Quantized(rowwise, torch_ops.transpose_codes(rowwise)) if columnwise else Quantized(rowwise)


def _gathered(scales: Tensor, dimension: int, ranks: int, mesh: Any) -> Tensor:
    """The scales of the whole weight."""
    if ranks == 1:
        return scales
    parts = [torch.empty_like(scales) for _ in range(ranks)]
    dist.all_gather(parts, scales, group=mesh.get_group())
    return torch.cat(parts, dim=dimension)


def _wrapper(cls: type, like: Tensor) -> Any:
    return Tensor._make_wrapper_subclass(
        cls,
        like.size(),
        strides=like.stride(),
        storage_offset=like.storage_offset(),
        dtype=like.dtype,
        layout=like.layout,
        device=like.device,
        pin_memory=like.is_pinned(),
    )


_log = logging.getLogger(__name__)
