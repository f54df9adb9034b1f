"""FP8 copies of a module's weights that outlive a forward: whose they are, when they were made, which
forwards and backwards may read them, and what outdates them.

Where there are none, a forward quantises the current weights, autograd holds the codes that its backward
needs, and the others are released. `FP8Weights` is the state of one module; a set of copies is a `Copies`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.parametrize import is_parametrized
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp8moe import Quantized
from fp8moe.activation import Activation
from fp8moe.adapters.torch.operands import quantize_fp8_weights
from fp8moe.adapters.torch.operation import refuse_partitioned
from fp8moe.adapters.torch.sharding import engine_of, is_whole, own_experts
from fp8moe.runtime.record_trees import arrays_in
from fp8moe.runtime.scopes import Opening, Scope

__all__ = ["weights_unchanged"]


class FP8Weights:
    """The FP8 copies of a module's weights, and the contexts in which they are declared unchanged.

    module: has ``_options``, a `LayerOptions`, and the attributes ``names``, the weights that copies are made
        of. It is referred to weakly, because this is its attribute ``_fp8_weights``. mesh: of its ranks.
    kept: copies that stay without a context: of quantize_weights(), of micro-batches, or those that a
        captured CUDA graph reads. declared: the open weights_unchanged() contexts, by number, with theirs.
    """

    def __init__(self, module: nn.Module, names: tuple[str, str], mesh: DeviceMesh | None):
        self.names, self.mesh = names, mesh
        self.kept: Copies | None = None
        self.declared: dict[int, Declared] = {}
        self._module: Callable[[], nn.Module | None] = weakref.ref(module)

    @property
    def module(self) -> Any:
        return self._module()

    def __deepcopy__(self, memo: Any) -> FP8Weights:
        """Of no module and without copies: `weights_of` replaces it."""
        new = object.__new__(FP8Weights)
        new.names, new.mesh, new.kept, new.declared, new._module = self.names, self.mesh, None, {}, _no_module
        return new

    @property
    def copies(self) -> Copies | None:
        """The copies that exist now, of whatever state."""
        if self.kept is not None:
            return self.kept
        for declared in self.declared.values():
            if declared.copies is not None:
                return declared.copies
        return None

    # ---- the copies that a forward reads

    def of_forward(
        self, own: tuple[Tensor, Tensor], activation: Activation, recording: bool, first: bool | None
    ) -> list[Quantized]:
        """In eager mode. own: this rank's experts, of the weights that the forward has read. recording:
        whether a backward follows. first: the forward's ``is_first_microbatch``."""
        copies, capturing = self.copies, is_capturing(own[0])
        usable = copies is not None and copies.current and (capturing or not copies.of_capture)
        if first is None and not self.declared:
            requested = copies if copies is not None and copies.requested else None
            if recording or requested is None or not usable or requested.recorded or requested.changed():
                if recording or requested is not None:  # micro-batches may go on with theirs
                    self.release()
                return _quantized(own, activation)
        elif first or not usable:
            if first is False:
                raise RuntimeError(
                    "is_first_microbatch: got False, and there are no FP8 copies of the weights; wanted True "
                    "for the first forward after the weights have changed"
                )
            copies = self.keep()
        elif (changed := copies.changed()) is not None:  # type: ignore[union-attr]
            raise _changed_error(changed, copies.overwritten, is_parametrized(self.module, changed))  # type: ignore[union-attr]
        assert copies is not None
        if capturing:
            copies.captured, self.kept = True, copies
        copies.recorded |= recording
        return copies.records

    def of_compiled_forward(
        self, own: tuple[Tensor, Tensor], activation: Activation, first: bool | None
    ) -> list[Quantized]:
        """As `of_forward`, in compiled code, which cannot keep new copies."""
        if first is not None:
            raise ValueError(
                f"is_first_microbatch: got {first} in compiled code; wanted None, inside weights_unchanged()"
            )
        copies = self.copies
        if self.declared:
            if copies is not None and copies.overwritten:
                raise _changed_error(", ".join(self.names), copies.overwritten)
            if copies is not None and copies.current and not copies.of_capture:
                return copies.records
        elif copies is not None:
            self.release()
        return list(quantize_fp8_weights(*own, activation=activation))

    # ---- making and dropping them

    def quantize(self) -> None:
        """Makes copies for all forwards without gradients that follow."""
        for name in self.names:
            w = getattr(self.module, name)
            refuse_partitioned(name, w)
            if not is_whole(w, self.mesh):
                raise TypeError(
                    f"{name}: got a DTensor; wanted the whole weights, which fully_shard gathers for a "
                    "forward only; use weights_unchanged() around the forwards"
                )
        self.keep(requested=True)

    @torch.compiler.disable  # as `keep`
    def declare(self, opening: weakref.ref[Opening]) -> None:
        """Declares the weights unchanged as long as a context is open. No interrupt can prevent the end: it
        is a callback in C, ``dict.pop``, which also releases the copies."""
        masters = {name: getattr(self.module, name) for name in self.names}
        first, whole = not self.declared, all(is_whole(w, self.mesh) for w in masters.values())
        if first:
            self.release()
        number = next(_numbers)
        end = weakref.ref(cast(Opening, opening()), partial(self.declared.pop, number))
        self.declared[number] = Declared(end, {} if whole else masters)
        if first and whole:
            self.keep()

    @torch.compiler.disable  # Dynamo makes StorageWeakRefs without attributes, whose __del__ raises
    def keep(self, requested: bool = False) -> Copies:
        """Quantises the weights and keeps the copies, in the memory that a captured graph reads, if any.
        requested: by `quantize`."""
        module, masters = self.module, []
        for name in self.names:
            w = getattr(module, name)
            if is_freed(w):
                raise TypeError(
                    f"{name}: got a weight that FullyShardedDataParallel gathers for its forward only; "
                    "wanted the whole weight; use fully_shard in its place, or leave out "
                    "weights_unchanged() and quantize_weights()"
                )
            if w is not getattr(module, name):
                raise RuntimeError(
                    f"{name}: got a weight that is computed anew on each access (a parametrization), so that "
                    "it cannot be known to be unchanged; wanted the context "
                    "torch.nn.utils.parametrize.cached() around this one"
                )
            masters.append(own_experts(name, w, self.mesh))
        old, target = self.copies, None
        if old is not None and old.captured and old.records[0].rowwise.data.device == masters[0].device:
            target = old.records
        if target is None:
            old = None
            self._drop()  # first, to avoid holding two sets
        else:  # in this order: an interrupt may leave a part of the old ones
            old.valid = False  # type: ignore[union-attr]
            # makes autograd reject a backward that saved the old copies
            torch.autograd.graph.increment_version(old.tensors)  # type: ignore[union-attr]
        _with_copies[id(self)] = self
        codes = _quantized(masters, module._options.activation, target)
        new = Copies(self, codes, requested, captured=target is not None)
        for declared in self.declared.values():
            if not new.captured:
                declared.copies = new
                return new
        self.kept = new
        return new

    def release(self) -> None:
        """Drops the kept copies, or only invalidates them if a captured graph reads them."""
        if self.kept is not None and self.kept.captured:
            self.kept.valid = False
        else:
            self._drop()

    def _drop(self) -> None:
        self.kept = None
        for declared in self.declared.values():
            declared.copies = None


def _no_module() -> None:
    return None


def weights_of(module: Any) -> FP8Weights:
    """The state of a module that has one. Where the module is a copy that has taken over the attributes of
    another one, as those of nn.DataParallel and of subclasses with a ``__deepcopy__`` of their own do, it
    gets a state of its own: that of the other one has the other's weights."""
    weights: FP8Weights = vars(module)["_fp8_weights"]
    if not torch.compiler.is_compiling() and weights.module is not module:
        weights = module._fp8_weights = FP8Weights(module, weights.names, weights.mesh)
    return weights


def _quantized(own: Any, activation: Activation, target: list[Quantized] | None = None) -> list[Quantized]:
    # not inference tensors, because a backward could not use them
    with torch.inference_mode(False), torch.no_grad():
        out = None if target is None else (target[0], target[1])
        return list(quantize_fp8_weights(*own, activation=activation, out=out))


class Copies:
    """One set of FP8 copies that outlives a forward. No forward but those that its fields allow reads it; the
    backward of a forward reads what the forward read, which autograd has saved.

    requested: by quantize_weights(), for all forwards without gradients, and not for micro-batches only:
        outside of a context, writes to the shards of ``fully_shard`` would not be detected.
    valid: whether nothing has outdated them. overwritten: what has written the weights since without a
        trace, an optimizer or load_state_dict(), or "". recorded: a forward with gradients has used them, so
        an optimizer step may have followed undetected.
    captured: a CUDA graph reads them at their addresses. of_capture: made during capture, so they are valid
        only after a replay.
    """

    def __init__(self, weights: FP8Weights, records: list[Quantized], requested: bool, captured: bool):
        self.records, self.tensors, self.requested = records, arrays_in(tuple(records)), requested
        self.valid, self.overwritten, self.recorded, self.captured = True, "", False, captured
        self.of_capture = is_capturing(getattr(weights.module, weights.names[0]))
        self._module, self._names = weights._module, weights.names
        self._declared, self._number = weights.declared, next(iter(weights.declared), None)
        self._shards = {} if self._number is None else weights.declared[self._number].shards
        self._states = [(_storage(w), _view(w), _version(w)) for _, w in self.masters()]

    @property
    def current(self) -> bool:
        """Whether they may be used: no longer than the context that they were made in is open."""
        return self.valid and (self._number is None or self._number in self._declared)

    def masters(self) -> list[tuple[str, Tensor]]:
        """The current weights, and the shards that ``fully_shard`` gathers them from without a trace."""
        module = self._module()
        return [*((name, getattr(module, name)) for name in self._names), *self._shards.items()]

    def changed(self) -> str | None:
        """Name of a weight that has detectably changed, or None."""
        for (name, w), (storage, view, version) in zip(self.masters(), self._states, strict=True):
            if self.overwritten or (view, version) != (_view(w), _version(w)):
                return name
            if storage.expired() or storage != _storage(w):
                return name
        return None


@dataclass
class Declared:
    """What `FP8Weights` holds while a weights_unchanged() context is open. shards: weights that fully_shard
    replaces in the context's forwards."""

    end: Any
    shards: dict[str, Tensor]
    copies: Copies | None = None


_numbers = itertools.count()  # of declarations

#: those with copies whose module exists, by their id
_with_copies: weakref.WeakValueDictionary[int, FP8Weights] = weakref.WeakValueDictionary()


def weights_unchanged(model: nn.Module) -> AbstractContextManager[None]:
    """Declare the weights of a model's `FP8FlowMoE` layers constant within a context.

    One set of FP8 copies then serves all forwards inside: the micro-batches of one optimizer step, or
    inference. The copies are made on entry (for sharded weights: in the first forward inside, except in
    compiled code) and released on exit, except those that backwards still need or that a CUDA graph was
    captured with; the latter are updated in place by ``quantize_weights()`` and by entering the context
    again. Contexts may be nested.

    Parameters
    ----------
    model : Module
        A layer, or a module that contains layers. Nothing else is affected: `moe_experts`, and transformers'
        experts with this library's implementation, quantise plain weights in every forward.

    Returns
    -------
    context manager
        The context; it can be entered several times.

    Raises
    ------
    TypeError
        For anything else than a module.
    RuntimeError
        In a forward of a layer if a change of its weights inside the context is detected: a step of a torch
        optimizer that steps them or, as those of DeepSpeed and Megatron-LM do, tensors that are no
        parameters; ``load_state_dict``, an in-place operation, or replacement of their storage. Compiled code
        detects only the first two. Not detected are collectives such as ``torch.distributed.broadcast``; of
        DTensors operations of ``torch._foreach`` and ``torch.distributed.checkpoint.load``; and in-place
        operations on weights made under ``torch.inference_mode``.

    Examples
    --------
    >>> import torch
    >>> from fp8moe.torch import FP8FlowMoE, weights_unchanged
    >>> layer = FP8FlowMoE(64, 128, num_experts=4, topk=2)
    >>> with weights_unchanged(layer):
    ...     for _ in range(2):
    ...         layer(torch.ones(3, 64)).sum().backward()
    ...     nbytes = layer.fp8_weight_nbytes
    >>> nbytes > 0, layer.fp8_weight_nbytes
    (True, 0)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}; wanted a Module, such as a ModuleList of layers")
    return _Unchanged(model)


class _Unchanged(Scope):
    def __init__(self, model: nn.Module):
        self.model = model

    @torch.compiler.disable  # of a block in compiled code, which breaks the graph
    def __enter__(self) -> None:
        super().__enter__()

    def enter(self, opening: weakref.ref[Opening]) -> None:
        for module in self.model.modules():
            if "_fp8_weights" not in vars(module):  # not getattr: wrappers hand on attributes
                continue
            if module._options.precision.quantizes:  # type: ignore[union-attr]
                weights_of(module).declare(opening)


def _mark_outdated(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Marks copies as outdated after an optimizer step: fused optimizers do not increment version counters.

    DeepSpeed, Megatron-LM and Apex step tensors of their own, in float32 or flattened, which are no
    parameters, and write the weights from them through ``.data``. Such a step outdates the copies of all
    weights that require a gradient."""
    # a list of its own, as other threads may add some; with the modules, so that these stay
    states = [(w, w.module) for w in (ref() for ref in _with_copies.valuerefs()) if w is not None]
    sets = [copies for w, module in states if module is not None and (copies := w.copies) is not None]
    if not sets:
        return
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    written = {id(p) for p in stepped if _may_be_stepped(p)}
    of_an_engine = not all(isinstance(p, nn.Parameter) for p in stepped)
    name = type(optimizer).__name__
    for copies in sets:
        weights = [w for _, w in copies.masters()]
        if not written.isdisjoint(map(id, weights)):
            copies.overwritten = f"a step of {name}"
        elif of_an_engine and any(map(_may_be_stepped, weights)):
            copies.overwritten = (
                f"{engine_of(weights[0])}, where {name} has stepped tensors that are no module's parameters; "
                "weights that it leaves alone need requires_grad_(False)"
            )


def _may_be_stepped(p: Tensor) -> bool:
    """Optimizers skip parameters without a gradient; of one that requires it, the gradient may be
    elsewhere."""
    return p.requires_grad or p.grad is not None


register_optimizer_step_post_hook(_mark_outdated)


def _storage(w: Tensor) -> StorageWeakRef:
    """Reference to the storage: fully_shard gathers weights into the same storage at another address."""
    return StorageWeakRef(_kept_tensor_of(w).untyped_storage())


def _view(w: Tensor) -> Any:
    """Position in the storage: several sets of weights may share one buffer."""
    w = _kept_tensor_of(w)
    return w.storage_offset(), w.stride()


def is_freed(w: Tensor) -> bool:
    """Whether it is a weight of FullyShardedDataParallel outside of its forward: without memory, whose
    address must not be read, or with use_orig_params a part of a vector."""
    freed = _kept_tensor_of(w).untyped_storage().nbytes() == 0
    return freed or (w.ndim == 1 and hasattr(w, "_fsdp_flattened"))


def _version(w: Tensor) -> Any:
    """An in-place operation on a DTensor increments its own version, one on its local tensor that one's."""
    return [None if t.is_inference() else t._version for t in (w, _kept_tensor_of(w))]


def _kept_tensor_of(w: Tensor) -> Tensor:
    """The tensor whose memory holds the values between forwards: of a DTensor the local one, of a weight of
    ZeRO-3, which has other memory in every forward, this rank's part."""
    return w._local_tensor if isinstance(w, DTensor) else getattr(w, "ds_tensor", w)


def _changed_error(name: str, by: str, parametrized: bool = False) -> RuntimeError:
    if parametrized:
        return RuntimeError(
            f"{name}: got a weight that a parametrization has computed anew, as PEFT's target_parameters do "
            "in each forward, although it was declared unchanged; wanted the same weight; leave "
            "weights_unchanged(), or merge the adapter into the weights before it"
        )
    return RuntimeError(
        f"{name}: got changed weights although they were declared unchanged{by and f' (by {by})'}; wanted "
        "the same weights; leave weights_unchanged() before the optimizer's step, or pass "
        "is_first_microbatch=True after it"
    )


def is_capturing(w: Tensor) -> bool:
    return w.is_cuda and torch.cuda.is_current_stream_capturing()
