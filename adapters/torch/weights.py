"""FP8 copies of weights that outlive a forward: whose they are, when they were made, which forwards and
backwards may read them, and what outdates them.

Where there are none, a forward quantises the current weights, autograd holds the codes that its backward
needs, and the others are released. `FP8Weights` is the state of one module, or of the weights that the
functions are given; a set of copies is a `Copies`; a `Holder` says where a kind of module has its weights.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.parametrize import is_parametrized
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from fp8moe import Quantized
from fp8moe.activation import Activation
from fp8moe.adapters.torch.gathered import gathers_of, is_gathered
from fp8moe.adapters.torch.operands import quantize_fp8_weights
from fp8moe.adapters.torch.operation import refuse_partitioned
from fp8moe.adapters.torch.sharding import engine_of, is_whole
from fp8moe.adapters.torch.stats import observer
from fp8moe.layer.options import LayerOptions
from fp8moe.runtime.record_trees import arrays_in
from fp8moe.runtime.scopes import Opening, Scope

__all__ = ["model_report", "weights_unchanged"]

_log = logging.getLogger(__name__)

#: those of weights_unchanged(), None without
Optimizers = tuple[torch.optim.Optimizer, ...] | None


class Holder:
    """Where modules of a kind have the weights that FP8 copies are made of. A class of static methods, which
    an `FP8Weights` refers to by its name.

    renewed: whether a forward whose ``is_first_microbatch`` is False makes new copies after a change, because
    a trainer sets it, and copies are dropped before an optimizer's step.
    form: of what `frozen` returns, in words."""

    renewed, form = False, "FP8 codes"

    @staticmethod
    def masters(module: Any) -> dict[str, Tensor]:
        """The weights by name, as their attributes give them, which may compute them."""
        raise NotImplementedError

    @staticmethod
    def frozen(module: Any) -> Sequence[Tensor]:
        """Codes and scales that a module has in place of masters: no copies are made of them."""
        return ()

    @staticmethod
    def is_whole(module: Any, name: str, w: Tensor) -> bool:
        """Whether this rank has all of a weight that it multiplies, and not a shard of it."""
        return is_whole(w, None)

    @staticmethod
    def options(module: Any) -> LayerOptions:
        """The options of the module's forward, whose activation is `activation`'s."""
        return module._options  # type: ignore[no-any-return]

    @classmethod
    def activation(cls, module: Any) -> Activation:
        """The activation of the module's forward."""
        return cls.options(module).activation

    @staticmethod
    def operands(module: Any, masters: Sequence[Tensor]) -> tuple[Any, Tensor]:
        """w13, or w1 and w3, and w2 of this rank, made of the masters."""
        *first, w2 = masters
        return first[0] if len(first) == 1 else tuple(first), w2

    @staticmethod
    def multiplies_masters(module: Any) -> bool:
        """Whether the operands are the masters themselves, or shards of them, in their order."""
        return True

    @classmethod
    def made(cls, module: Any) -> dict[str, Any]:
        """How the module's copies are made: keyword arguments of `quantize_fp8_weights`."""
        copies = cls.options(module).weight_copies
        return {"activation": cls.activation(module), "weight_copies": copies}

    @staticmethod
    def computes(module: Any) -> bool:
        """Whether this library computes the module's forward now."""
        return True

    @classmethod
    def shares(cls, module: Any) -> bool:
        """Whether forwards share copies within weights_unchanged()."""
        return cls.options(module).precision.quantizes and not cls.frozen(module)


class FP8Weights:
    """The FP8 copies of a module's weights, and the contexts in which they are declared unchanged.

    module: referred to weakly, because this is its attribute ``_fp8_weights``; or a `_Given`.
    kept: copies that stay without a context: of quantize_weights(), of micro-batches, or those that a
        captured CUDA graph reads. declared: the open weights_unchanged() contexts, by number, with theirs.
    """

    def __init__(self, module: Any, holder: type[Holder]):
        self.holder = holder
        self.kept: Copies | None = None
        self.declared: dict[int, Declared] = {}
        self.is_logged = False
        self._module: Callable[[], Any] = weakref.ref(module)

    @property
    def module(self) -> Any:
        return self._module()

    def masters(self) -> dict[str, Tensor]:
        """The current weights by name."""
        return self.holder.masters(self.module)

    def _is_parametrized(self, name: str) -> bool:
        return isinstance(self.module, nn.Module) and is_parametrized(self.module, name)

    def __deepcopy__(self, memo: Any) -> FP8Weights:
        """Of no module and without copies: `weights_of` replaces it."""
        return _without_module(self.holder)

    def __reduce__(self) -> Any:
        return _without_module, (self.holder,)

    @property
    def renewed(self) -> bool:
        """Whether every open context, of at least one, allows steps, so that changes renew the copies."""
        # Dynamo of torch 2.11 traces len(), but not bool(), of a dictionary
        return len(self.declared) > 0 and all(d.renewed for d in self.declared.values())

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
        self, masters: Sequence[Tensor], recording: bool, first: bool | None
    ) -> list[Quantized] | None:
        """In eager mode; None: the forward makes its own. masters: the weights that the forward has read.
        recording: whether a backward follows. first: the forward's ``is_first_microbatch``."""
        if self.renewed and not recording and not getattr(self.module, "training", False):
            return self._quantized(masters)  # an average of the weights may be evaluated, by ``.data``
        copies, capturing = self.copies, is_capturing(masters[-1])
        usable = copies is not None and copies.current and (capturing or not copies.of_capture)
        if first is None and not self.declared:
            requested = copies if copies is not None and copies.requested else None
            if recording or requested is None or not usable or requested.recorded or requested.changed():
                if recording or requested is not None:  # micro-batches may go on with theirs
                    self.release()
                return None if self.holder.multiplies_masters(self.module) else self._quantized(masters)
        elif first or not usable:
            if first is False:
                raise RuntimeError(
                    "is_first_microbatch: got False, and there are no FP8 copies of the weights; wanted True "
                    "for the first forward after the weights have changed"
                )
            copies = self.keep()
        elif (changed := copies.changed()) is not None:  # type: ignore[union-attr]
            if not self.renewed:
                raise _changed_error(changed, copies.overwritten, self._is_parametrized(changed))  # type: ignore[union-attr]
            copies = self.keep()
        assert copies is not None
        if capturing:
            copies.captured, self.kept = True, copies
        copies.recorded |= recording
        return copies.records

    def of_compiled_forward(self, masters: Sequence[Tensor], first: bool | None) -> list[Quantized]:
        """As `of_forward`, in compiled code, which cannot keep new copies."""
        if first is not None:
            raise ValueError(
                f"is_first_microbatch: got {first} in compiled code; wanted None, inside weights_unchanged()"
            )
        copies = self.copies
        if self.declared:
            overwritten = copies is not None and copies.overwritten
            if overwritten and not self.renewed:
                raise _changed_error(", ".join(self.masters()), overwritten)
            if not overwritten and copies is not None and copies.current and not copies.of_capture:
                return copies.records
        elif copies is not None:
            self.release()
        module = self.module
        return list(quantize_fp8_weights(*self.holder.operands(module, masters), **self.holder.made(module)))

    # ---- making and dropping them

    def quantize(self) -> None:
        """Makes copies for all forwards without gradients that follow."""
        for name, w in self.masters().items():
            refuse_partitioned(name, w)
            if not self.holder.is_whole(self.module, name, w):
                raise TypeError(
                    f"{name}: got a DTensor; wanted the whole weights, which fully_shard gathers for a "
                    "forward only; use weights_unchanged() around the forwards"
                )
            if is_gathered(w):
                raise TypeError(
                    f"{name}: got FP8 codes that fully_shard has gathered, which forwards read as they are; "
                    "wanted the whole weights; leave out quantize_weights()"
                )
        self.keep(requested=True)

    @torch.compiler.disable  # as `keep`
    def declare(self, opening: weakref.ref[Opening], number: int, optimizers: Optimizers) -> None:
        """Declares the weights unchanged as long as a context is open. No interrupt can prevent the end: it
        is a callback in C, ``dict.pop``, which also releases the copies. optimizers: whose steps are
        allowed; the copies are dropped before them."""
        masters, first = self.masters(), not self.declared
        if optimizers is not None:
            _check_steps(optimizers, masters)
        whole = all(
            self.holder.is_whole(self.module, name, w) and not is_gathered(w) for name, w in masters.items()
        )
        if first:
            self.release()
        end = weakref.ref(cast(Opening, opening()), partial(self.declared.pop, number))
        self.declared[number] = Declared(end, {} if whole else masters, optimizers)
        if first and whole:
            self.keep()

    @torch.compiler.disable  # Dynamo makes StorageWeakRefs without attributes, whose __del__ raises
    def keep(self, requested: bool = False) -> Copies:
        """Quantises the weights and keeps the copies, in the memory that a captured graph reads, if any.
        requested: by `quantize`."""
        masters, again = self.masters(), self.masters()
        for name, w in masters.items():
            if is_freed(w):
                raise TypeError(
                    f"{name}: got a weight that FullyShardedDataParallel gathers for its forward only; "
                    "wanted the whole weight; use fully_shard in its place, or leave out "
                    "weights_unchanged() and quantize_weights()"
                )
            if w is not again[name]:
                raise RuntimeError(
                    f"{name}: got a weight that is computed anew on each access (a parametrization), so that "
                    "it cannot be known to be unchanged; wanted the context "
                    "torch.nn.utils.parametrize.cached() around this one"
                )
        old, target = self.copies, None
        device = _kept_tensor_of(next(iter(masters.values()))).device
        if old is not None and old.captured and old.records[0].rowwise.data.device == device:
            target = old.records
        if target is None:
            old = None
            self._drop()  # first, to avoid holding two sets
        else:  # in this order: an interrupt may leave a part of the old ones
            old.valid = False  # type: ignore[union-attr]
            # makes autograd reject a backward that saved the old copies
            torch.autograd.graph.increment_version(old.tensors)  # type: ignore[union-attr]
        _with_copies[id(self)] = self
        codes = self._quantized([*masters.values()], target)
        return self._hold(Copies(self, codes, requested, captured=target is not None))

    def take(self, records: list[Quantized], optimizer: torch.optim.Optimizer) -> None:
        """Takes the copies that a step of an optimizer has made of the weights that it has written."""
        self._drop()  # those of a forward in the step's closure
        _with_copies[id(self)] = self
        self._hold(Copies(self, records, requested=False, captured=False)).made_in = optimizer

    def _hold(self, new: Copies) -> Copies:
        if not self.is_logged:  # once for each module, not in each step
            self.is_logged = True
            whose = "a function's weights" if isinstance(self.module, _Given) else type(self.module).__name__
            _log.info("FP8 copies are kept of %s, %d bytes", whose, new.nbytes)
        for declared in self.declared.values():
            if not new.captured:
                declared.copies = new
                return new
        self.kept = new
        return new

    def _quantized(self, masters: Sequence[Tensor], target: list[Quantized] | None = None) -> list[Quantized]:
        module = self.module
        how = self.holder.made(module)
        if target is not None:  # a captured graph reads the orientations that it has
            copies = "both" if target[0].columnwise is not None else "rowwise"
            how |= {"weight_copies": copies, "out": (target[0], target[1])}
        # not inference tensors, because a backward could not use them
        with torch.inference_mode(False), torch.no_grad():
            return list(quantize_fp8_weights(*self.holder.operands(module, masters), **how))

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


def _without_module(holder: type[Holder]) -> FP8Weights:
    new = object.__new__(FP8Weights)
    new.holder, new.kept, new.declared, new._module = holder, None, {}, _no_module
    return new


def weights_of(module: Any) -> FP8Weights:
    """The state of a module that has one. Where the module is a copy that has taken over the attributes of
    another one, as those of nn.DataParallel and of subclasses with a ``__deepcopy__`` of their own do, it
    gets a state of its own: that of the other one has the other's weights."""
    weights: FP8Weights = vars(module)["_fp8_weights"]
    if not torch.compiler.is_compiling() and weights.module is not module:
        weights = module._fp8_weights = FP8Weights(module, weights.holder)
    return weights


def codes_of(
    module: Any, masters: Sequence[Tensor], rows: tuple[Tensor, ...], first: bool | None = None
) -> Any:
    """The FP8 codes that a forward of a module with a state multiplies; None for a recipe without, and where
    the forward makes them of its weights.

    masters: the weights that the forward has read. rows: x, probabilities and a bias of the
    first GEMM. first: the forward's ``is_first_microbatch``."""
    weights = weights_of(module)
    holder, renewed = weights.holder, weights.holder.renewed
    if not holder.options(module).precision.quantizes or observer() is not None:
        return None
    if torch.compiler.is_compiling():
        return weights.of_compiled_forward(masters, None if renewed else first)
    if not holder.shares(module):  # such as weights that PEFT computes anew, in its forward only
        return weights._quantized(masters)
    if renewed and first is False:
        copies = weights.copies
        first = copies is None or not copies.current or copies.changed() is not None
    if any(map(is_gathered, masters)):  # each gather brings the current codes
        return weights._quantized(masters)
    recording = torch.is_grad_enabled() and any(t.requires_grad for t in (*rows, *masters))
    return weights.of_forward(masters, recording, first)


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
    made_in: the optimizer whose step has made them, until that step has ended.
    """

    def __init__(self, weights: FP8Weights, records: list[Quantized], requested: bool, captured: bool):
        self.records, self.tensors, self.requested = records, arrays_in(tuple(records)), requested
        self.valid, self.overwritten, self.recorded, self.captured = True, "", False, captured
        self.made_in: torch.optim.Optimizer | None = None
        self._module, self._holder = weights._module, weights.holder
        self.of_capture = is_capturing(records[0].rowwise.data)
        self._declared, self._number = weights.declared, next(iter(weights.declared), None)
        self._shards = {} if self._number is None else weights.declared[self._number].shards
        self._states = [(_storage(w), _view(w), _version(w)) for _, w in self.masters()]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    @property
    def current(self) -> bool:
        """Whether they may be used: no longer than the context that they were made in is open."""
        return self.valid and (self._number is None or self._number in self._declared)

    def masters(self) -> list[tuple[str, Tensor]]:
        """The current weights, and the shards that ``fully_shard`` gathers them from without a trace."""
        return [*self._holder.masters(self._module()).items(), *self._shards.items()]

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
    replaces in the context's forwards. optimizers: whose steps are allowed."""

    end: Any
    shards: dict[str, Tensor]
    optimizers: Optimizers
    copies: Copies | None = None

    @property
    def renewed(self) -> bool:
        """Whether copies are dropped before a step, and made again after it."""
        return self.optimizers is not None


_numbers = itertools.count()  # of declarations

#: those with copies whose module exists, by their id
_with_copies: weakref.WeakValueDictionary[int, FP8Weights] = weakref.WeakValueDictionary()


def weights_unchanged(model: nn.Module, *, optimizer: Any = None) -> AbstractContextManager[None]:
    """Declare the weights of a model's experts constant within a context, or between an optimizer's steps.

    One set of FP8 copies then serves all forwards inside: the micro-batches of one optimizer step, or
    inference. It holds for every form of the experts: `FP8FlowMoE`, transformers' experts with this library's
    implementation, torchtitan's and Megatron-Core's with this library's layers, and `moe_experts` and
    `moe_experts_permuted` (in eager mode) where w13 and w2 are parameters of the model themselves.

    The copies are made on entry (for sharded weights and those of functions: in the first forward inside,
    except in compiled code) and released on exit, except those that backwards still need or that a CUDA graph
    was captured with; the latter are updated in place by ``quantize_weights()`` and by entering the context
    again. Contexts may be nested.

    Parameters
    ----------
    model : Module
        A layer, or a module that contains experts.
    optimizer : torch.optim.Optimizer, list of them, or None
        The optimizer of these weights, for a context around a whole training loop: the copies are dropped
        before each of its steps, and made in the first forward after it, or by the step of `AdamW`, and in
        the first forward after another change that is detected. Forwards without gradients of modules in
        evaluation mode, and of functions, make copies of their own, so averages of the weights may be
        evaluated in between. Compiled forwards after another optimizer's step make copies each time, until
        the context is entered again.
        None: a step inside raises in the next forward.

    Returns
    -------
    context manager
        The context; it can be entered several times.

    Raises
    ------
    TypeError
        For a model that is no module, or an optimizer that is not torch's, whose steps cannot be noticed.
    ValueError
        On entry, for an optimizer that does not step weights that require a gradient.
    RuntimeError
        In a forward of a layer if a change of its weights inside the context is detected: a step of a torch
        optimizer that steps them or, as those of DeepSpeed and Megatron-LM do, tensors that are no
        parameters; ``load_state_dict``, an in-place operation, or replacement of their storage. Compiled code
        detects only the first two. Not detected are writes through ``.data`` or other views of the memory, as
        NumPy's; steps of an optimizer whose ``step`` an instance has replaced; collectives such as
        ``torch.distributed.broadcast``; of DTensors operations of ``torch._foreach`` and
        ``torch.distributed.checkpoint.load``; and in-place operations on weights made under
        ``torch.inference_mode``.

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
    several = isinstance(optimizer, (list, tuple))
    optimizers = None if optimizer is None else tuple(optimizer) if several else (optimizer,)
    for given in optimizers or ():
        if not isinstance(given, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer: got {type(given).__name__}; wanted a torch.optim.Optimizer, whose steps can be "
                "noticed, or a list of them; pass the torch optimizer inside of it"
            )
    return _Unchanged(model, optimizers)


class _Unchanged(Scope):
    def __init__(self, model: nn.Module, optimizers: Optimizers):
        self.model, self.optimizers = model, optimizers

    @torch.compiler.disable  # of a block in compiled code, which breaks the graph
    def __enter__(self) -> None:
        super().__enter__()

    def enter(self, opening: weakref.ref[Opening]) -> None:
        number, states = next(_numbers), weakref.WeakSet[FP8Weights]()
        for module in self.model.modules():
            if (weights := state_of(module)) is not None:
                weights.declare(opening, number, self.optimizers)
                states.add(weights)
        parameters = {id(p): p for p in self.model.parameters()}
        end = weakref.ref(cast(Opening, opening()), partial(_models.pop, number))
        _models[number] = _Model(opening, end, parameters, self.optimizers, states)


def state_of(module: nn.Module) -> FP8Weights | None:
    """The state of a module whose forwards read FP8 copies of its weights, None of others."""
    if "_fp8_weights" not in vars(module):  # not getattr: wrappers hand on attributes
        holder = next(filter(None, (find(module) for find in holders_of_others)), None)
        if holder is None:
            return None
        module._fp8_weights = FP8Weights(module, holder)  # type: ignore[assignment]
    weights = weights_of(module)
    return weights if weights.holder.shares(module) else None


#: functions that give the Holder of a module of another library, or None for one that is not known
holders_of_others: list[Callable[[nn.Module], type[Holder] | None]] = []


def model_report(model: nn.Module) -> str:
    """Describe the experts of a model: recipe, and how their FP8 weights are made and held now.

    Parameters
    ----------
    model : Module
        A model with experts in any form that `weights_unchanged` knows but functions.

    Returns
    -------
    str
        A line per module of experts: its name and class, recipe, whether FP8 copies of the weights are made
        in each forward or shared and until when, in one orientation or both, and the bytes of the copies that
        are held, or what ``fully_shard`` gathers (`gather_fp8`).

    Examples
    --------
    >>> from fp8moe.torch import FP8FlowMoE, model_report, weights_unchanged
    >>> layer = FP8FlowMoE(128, 128, num_experts=2, topk=1)
    >>> model_report(layer)
    '(model): FP8FlowMoE, fp8_flow, FP8 copies made in each forward, 0 bytes held'
    >>> with weights_unchanged(layer):
    ...     model_report(layer)
    '(model): FP8FlowMoE, fp8_flow, FP8 copies shared in weights_unchanged(), 196656 bytes held'
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}; wanted a Module")
    lines = []
    for name, module in model.named_modules():
        state_of(module)  # makes those of other libraries' modules
        if "_fp8_weights" in vars(module) and (holder := weights_of(module).holder).computes(module):
            recipe = holder.options(module).recipe
            lines.append(f"{name or '(model)'}: {type(module).__name__}, {recipe}, {in_words(module)}")
    return "\n".join(lines) or "no experts of this library"


def in_words(module: Any) -> str:
    """How the FP8 copies of a module's weights are made and held."""
    weights = weights_of(module)
    options = weights.holder.options(module)
    if not options.precision.quantizes:
        return "no FP8 copies"
    if frozen := weights.holder.frozen(module):
        return f"frozen {weights.holder.form}, {sum(t.nbytes for t in frozen)} bytes"
    gathers = gathers_of(module)
    gathered = f"fully_shard gathers {'; '.join(map(str, gathers))}" if gathers else ""
    if gathers and not any(padding.masters_because for padding in gathers):
        return gathered
    copies = weights.copies
    nbytes = 0 if copies is None else copies.nbytes
    how = "made in each forward"
    if not weights.holder.shares(module):
        how = "made in each forward, of weights that are computed anew at each access"
    elif weights.declared:
        how = "shared in weights_unchanged()" + (" until the optimizer's step" if weights.renewed else "")
    elif copies is not None and copies.current:
        how = "of quantize_weights()" if copies.requested else "shared by micro-batches"
    what = "FP8 copies" if options.keeps_columnwise else "row-wise FP8 copies"
    return f"{gathered}{gathered and ', '}{what} {how}, {nbytes} bytes held"


def _not_stepped(optimizers: tuple[torch.optim.Optimizer, ...], masters: dict[str, Tensor]) -> str | None:
    """Name of a weight that requires a gradient and that the optimizers do not step, or None."""
    stepped = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    if not all(isinstance(p, nn.Parameter) for p in stepped):
        return None  # an engine's, which writes the weights from them
    known = set(map(id, stepped))
    return next(
        (name for name, w in masters.items() if w.requires_grad and w.is_leaf and id(w) not in known), None
    )


def steps_all(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    """Whether an optimizer steps all of a model's experts that require a gradient."""
    states = (state_of(module) for module in model.modules())
    return all(w is None or _not_stepped((optimizer,), w.masters()) is None for w in states)


def _check_steps(optimizers: tuple[torch.optim.Optimizer, ...], masters: dict[str, Tensor]) -> None:
    if (name := _not_stepped(optimizers, masters)) is not None:
        names = " and ".join(type(o).__name__ for o in optimizers) or "none"
        raise ValueError(
            f"optimizer: got {names} without the weight {name} {list(masters[name].shape)}, which requires a "
            "gradient; wanted all optimizers that step the model's experts, in a list"
        )


# ---- weights that the functions are given


class _Given:
    """The weights of a function's call, in the place of a module's. It refers to them weakly."""

    def __init__(self, weights: dict[str, Tensor], options: LayerOptions, dropped: Callable[..., Any]):
        self.weights = {name: weakref.ref(w, dropped) for name, w in weights.items()}
        self._options = options


class _OfFunction(Holder):
    @staticmethod
    def masters(module: _Given) -> dict[str, Tensor]:
        return {name: cast(Tensor, w()) for name, w in module.weights.items()}


class _Model(NamedTuple):
    """An open weights_unchanged() context. parameters: by id, for functions whose weights they are. states:
    those of the model's modules, and of such functions."""

    opening: weakref.ref[Opening]
    end: Any
    parameters: Mapping[int, Tensor]
    optimizers: Optimizers
    states: weakref.WeakSet[FP8Weights]


_models: dict[int, _Model] = {}  # by number

#: w2 -> {(w13's, activation, weight_copies): (weights, their state)} of functions' calls
_of_functions = WeakIdKeyDictionary()


def share_copies() -> bool:
    """Whether calls of functions may share copies of their weights."""
    return bool(_models or _of_functions)


def copies_of_function(
    w13: Any, w2: Any, options: LayerOptions, recording: bool, first: bool | None
) -> tuple[Quantized, Quantized] | None:
    """The copies that an eager call of a function reads, where an open context or ``first``, its
    ``is_first_microbatch``, says how long its weights are unchanged; None: it makes its own."""
    if (first is None and not share_copies()) or observer() is not None:
        return None
    if is_gathered(w13) or is_gathered(w2):  # as in `codes_of`
        return None
    parts = w13 if isinstance(w13, tuple) else (w13,)
    weights = dict(zip(("w13",) if len(parts) == 1 else ("w1", "w3"), parts, strict=True)) | {"w2": w2}
    if any(isinstance(w, Quantized) for w in weights.values()):
        if first is None:
            return None
        raise ValueError(f"is_first_microbatch: got {first} with quantised weights; wanted None")
    covering = [
        (number, model)
        for number, model in [*_models.items()]
        if all(id(w) in model.parameters for w in weights.values())
    ]
    states = _of_functions.get(w2)
    if states is None:
        if first is None and not covering:
            return None
        states = _of_functions[w2] = {}
    key = (*map(id, parts), options.activation, options.weight_copies)
    if key not in states:
        given = _Given(weights, options, partial(states.pop, key))
        states[key] = given, FP8Weights(given, _OfFunction)
    _, state = states[key]
    for number, model in covering:
        if number not in state.declared and model.opening() is not None:
            state.declare(model.opening, number, model.optimizers)
            model.states.add(state)
    if first is None and not state.declared and state.copies is None:
        return None
    codes = state.of_forward([*weights.values()], recording, first)
    return None if codes is None else (codes[0], codes[1])


def states_written_by(optimizer: torch.optim.Optimizer) -> list[FP8Weights]:
    """The states of whose whole weights every open context says that this optimizer writes them."""
    models = [m for m in [*_models.values()] if any(o is optimizer for o in m.optimizers or ())]
    states = dict.fromkeys(state for model in models for state in [*model.states])
    return [
        state
        for state in states
        if state.declared
        and all(
            any(o is optimizer for o in d.optimizers or ()) and not d.shards for d in state.declared.values()
        )
    ]


def _affected(optimizer: torch.optim.Optimizer) -> Iterator[tuple[FP8Weights, str]]:
    """The states whose weights an optimizer's step writes, and the step in words.

    DeepSpeed, Megatron-LM and Apex step tensors of their own, in float32 or flattened, which are no
    parameters, and write the weights from them through ``.data``. Such a step outdates the copies of all
    weights that require a gradient."""
    # a list of its own, as other threads may add some; with the modules, so that these stay
    states = [(w, w.module) for w in (ref() for ref in _with_copies.valuerefs()) if w is not None]
    states = [(w, module) for w, module in states if module is not None and w.copies is not None]
    if not states:
        return
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    written = {id(p) for p in stepped if _may_be_stepped(p)}
    of_an_engine = not all(isinstance(p, nn.Parameter) for p in stepped)
    name = type(optimizer).__name__
    for state, _ in states:
        if (copies := state.copies) is None:
            continue
        weights = [w for _, w in copies.masters()]
        if not written.isdisjoint(map(id, weights)):
            yield state, f"a step of {name}"
        elif of_an_engine and any(map(_may_be_stepped, weights)):
            yield (
                state,
                f"{engine_of(weights[0])}, where {name} has stepped tensors that are no module's parameters; "
                "weights that it leaves alone need requires_grad_(False)",
            )


def _drop_renewed(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Drops copies before a step that the open contexts allow."""
    for state, _by in _affected(optimizer):
        if state.renewed if state.declared else state.holder.renewed:
            state.release()
        elif (copies := state.copies) is not None:  # of a step that has not ended
            copies.made_in = None


def _mark_outdated(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Marks copies as outdated after a step, but not those that the step has made: fused optimizers do not
    increment version counters."""
    for state, by in _affected(optimizer):
        if (copies := state.copies) is not None and copies.made_in is not optimizer:
            copies.overwritten = by
        elif copies is not None:
            copies.made_in = None


def _may_be_stepped(p: Tensor) -> bool:
    """Optimizers skip parameters without a gradient; of one that requires it, the gradient may be
    elsewhere."""
    return p.requires_grad or p.grad is not None


register_optimizer_step_pre_hook(_drop_renewed)
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
