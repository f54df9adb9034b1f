"""The experts of Hugging Face transformers models: ``experts_implementation="fp8moe"``.

    import fp8moe.transformers
    fp8moe.transformers.enable(recipe="fp8_flow")
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="fp8moe")

Parameters keep their names, shapes and dtypes, so checkpoints, optimizers, PEFT and FSDP need no changes.
Every forward quantises the current weights, so no copy can become outdated; micro-batches share copies within
`fp8moe.torch.weights_unchanged`, which `FP8WeightsCallback` enters for the ``Trainer``.

The activation of an experts class is identified numerically: its own gate function (without a gate, its
activation function) is evaluated on sample values and compared with every `fp8moe.Activation` that has its
constants. If none matches, or if the experts have a norm of their own, NotImplementedError names the class.

Tested with transformers 5.23.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Unpack, get_args

import numpy as np

from fp8moe.adapters import needs

with needs("torch"):
    import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.utils.parametrize import is_parametrized

try:
    from transformers import PreTrainedModel, TrainerCallback
    from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
except ImportError as error:
    raise ImportError(
        f"fp8moe.transformers needs transformers 5.23 or later ({error}): pip install 'transformers>=5.23'"
    ) from error

import fp8moe
from fp8moe import Activation, Quantized
from fp8moe.activation import GATED, SWIGLU, Kind
from fp8moe.adapters.torch.distributed.process_group import ProcessGroup
from fp8moe.adapters.torch.functional import moe_experts
from fp8moe.adapters.torch.lora import LoRA, recomputed
from fp8moe.adapters.torch.mxfp4 import MXFP4Weight, codes_of_experts
from fp8moe.adapters.torch.operands import (
    gates_before_ups,
    gradient_of_gates_before_ups,
    padded,
    round_up_to_block,
)
from fp8moe.adapters.torch.operation import refuse_codes
from fp8moe.adapters.torch.weights import Holder, codes_of, holders_of_others, steps_all, weights_unchanged
from fp8moe.layer.options import ArgumentsBesideRecipe, LayerOptions, options_of
from fp8moe.layer.recipes import RecipeName

__all__ = ["FP8WeightsCallback", "activation_of", "enable"]


def enable(
    recipe: RecipeName = "fp8_flow",
    *,
    name: str = "fp8moe",
    **options: Unpack[ArgumentsBesideRecipe],
) -> None:
    """Register the experts implementation and its expert parallelism with transformers.

    From then on a model warns when it is made with the implementation, or set to it, if its experts do not
    have transformers' interface for implementations: they compute as without it.

    Parameters
    ----------
    recipe : "fp8_flow", "fp8_blockwise" or "bf16"
        As in `fp8moe.torch.moe_experts`.
    name : str
        Name for ``experts_implementation``, and for ``DistributedConfig(ep_implementation=...)``, the expert
        parallelism, which sends rows in FP8. Use a different name for each recipe in a process; registering a
        name again replaces its implementation.
    **options : recompute, save, backend, num_sms, weight_copies
        As in `fp8moe.torch.moe_experts`.

    Raises
    ------
    ValueError
        For an invalid recipe, recompute, save, backend, num_sms or weight_copies, or a name of another
        implementation.

    Examples
    --------
    >>> import torch
    >>> import transformers
    >>> import fp8moe.transformers
    >>> fp8moe.transformers.enable(recipe="fp8_flow")
    >>> sizes = {"hidden_size": 64, "moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}
    >>> sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1, "head_dim": 32}
    >>> config = transformers.Qwen3MoeConfig(**sizes, vocab_size=128, intermediate_size=64)
    >>> model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="fp8moe")
    >>> model(torch.zeros(1, 5, dtype=torch.int64)).logits.shape
    torch.Size([1, 5, 128])
    """
    # the activation is each module's
    how = options_of("enable", options, activation=SWIGLU, recipe=recipe)
    registered = *ALL_EXPERTS_FUNCTIONS.items(), *EPImplementationInterface().items()
    if name in {"eager", *(key for key, value in registered if value.__module__ != __name__)}:
        raise ValueError(
            f"name: got {name!r}, an implementation of transformers, which every model that selects it would "
            "lose; wanted another name"
        )

    _options[name] = how

    def experts_forward(
        self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        return _multiply(self, hidden_states, top_k_index, top_k_weights, name)

    class ExpertParallel(EPImplementation):
        """Expert parallelism by `fp8moe.expert_parallel`."""

        def __init__(self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any):
            super().__init__(experts, ep_mesh, tp_mesh)
            self._experts = experts
            vars(experts)["_fp8moe_implementation"] = name
            self._comm = ProcessGroup(ep_mesh.get_group())

        def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            x, ids, probs = hidden_states, top_k_index, top_k_weights
            # the ranks of the mesh hold the same batch: each computes its part of the tokens
            if self.tp_mesh.size() > 1:
                x, ids, probs = (_local_tokens(t, self.tp_mesh) for t in (x, ids, probs))
            y = _multiply(self._experts, x, ids, probs, name, self._comm)
            return _all_tokens(y, self.tp_mesh, hidden_states.shape) if self.tp_mesh.size() > 1 else y

    ALL_EXPERTS_FUNCTIONS.register(name, experts_forward)
    ALL_FP8_EXPERTS_FUNCTIONS.register(name, experts_forward)
    EPImplementationInterface.register(name, ExpertParallel)
    for method in ("post_init", "set_experts_implementation"):  # the last steps of making and of setting
        _warn_after(method)
    _serve_peft()


class FP8WeightsCallback(TrainerCallback):  # type: ignore[misc]
    """Lets the micro-batches of an optimizer step share one set of FP8 weights, in transformers' ``Trainer``.

    From the first micro-batch of a step (``gradient_accumulation_steps``) until the optimizer's step, the
    model is in `fp8moe.torch.weights_unchanged`. The losses are, bit for bit, those without it. Copies, of
    two bytes a weight, are held meanwhile; weights that FSDP gathers are among them, whole. Experts whose
    weights PEFT computes anew in each forward (``docs/how-to/lora.md`` says which) make copies in each.

    Examples
    --------
    >>> from fp8moe.transformers import FP8WeightsCallback
    >>> callback = FP8WeightsCallback()  # transformers.Trainer(..., callbacks=[callback])
    >>> callback.is_open
    False
    """

    def __init__(self) -> None:
        self._open: contextlib.ExitStack | None = None

    @property
    def is_open(self) -> bool:
        """Whether the weights are declared unchanged now."""
        return self._open is not None

    def on_step_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        self._close()
        self._open = contextlib.ExitStack()
        # with the optimizer, as nothing ends it after an interrupt of the training
        steps = isinstance(optimizer, torch.optim.Optimizer) and steps_all(optimizer, model)
        self._open.enter_context(weights_unchanged(model, optimizer=optimizer if steps else None))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._close()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._close()  # DeepSpeed's engine steps by itself

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._close()

    def _close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


def _multiply_codes(
    experts: Any, x: Tensor, ids: Tensor, probs: Tensor, options: LayerOptions, comm: Any
) -> Tensor:
    """The forward of `FP8Experts`, whose parameters are a checkpoint's codes and scales, and are frozen."""
    if not options.precision.quantizes:
        raise _unsupported_codes(experts, f"recipe {options.recipe!r}")
    if is_parametrized(experts):  # PEFT would add to codes, whatever their scales are
        raise NotImplementedError(
            f"{type(experts).__name__}: got PEFT's adapters of FP8 weights with several active adapters, "
            "expert parallelism or save; wanted one active adapter, and none of the others"
        )
    w13, w2 = _records_of(experts)
    ids = _without_other_ranks(experts, ids, experts.num_experts, comm)
    arguments = {**options.arguments, "activation": activation_of(experts)}
    return moe_experts(x, w13, w2, ids, probs, **arguments, comm=comm, lora=_lora_of(experts))


def _is_packed(experts: Any) -> bool:
    """Whether the parameters are in MXFP4, as `load_mxfp4` makes them."""
    return isinstance(getattr(experts, "down_proj", None), MXFP4Weight)


def _multiply_packed(
    experts: Any, x: Tensor, ids: Tensor, probs: Tensor, options: LayerOptions, comm: Any
) -> Tensor:
    """The forward of experts in MXFP4. Their FP8 codes are made for this call; the backward needs them, too,
    and makes them anew if activations are computed again."""
    if not options.precision.quantizes:
        raise NotImplementedError(
            f"{type(experts).__name__}: got experts in MXFP4 with recipe {options.recipe!r}; wanted an FP8 "
            "recipe; load the model with quantization_config=Mxfp4Config(dequantize=True)"
        )
    ids = _without_other_ranks(experts, ids, experts.num_experts, comm)
    again = options.recompute is not None and torch.is_grad_enabled()
    arguments = {**options.arguments, "activation": activation_of(experts), "comm": comm}
    if again:
        arguments["recompute"] = None

    def multiply(
        x: Tensor, ids: Tensor, probs: Tensor, packed: Any, bias13: Tensor, bias2: Tensor, *lora: Any
    ) -> Tensor:
        w13, w2 = _codes_of_packed(packed)
        missing = w2.rowwise.shape[2] - bias13.shape[1] // 2  # type: ignore[union-attr]
        given: dict[str, Any] = {"bias13": padded(gates_before_ups(bias13), 1, 2, missing), "bias2": bias2}
        return moe_experts(x, w13, w2, ids, probs, **arguments, **given, lora=lora or None)

    biases = experts.gate_up_proj_bias, experts.down_proj_bias
    operands = x, ids, probs, _packed_of(experts), *biases, *(_lora_of(experts) or ())
    return recomputed(multiply, *operands) if again else multiply(*operands)


@torch.compiler.disable
def _packed_of(experts: Any) -> Any:
    """Blocks and scales of w13 and of w2."""
    for name in ("gate_up_proj", "down_proj"):
        if torch.is_grad_enabled() and getattr(experts, name).requires_grad:
            raise NotImplementedError(
                f"{name}: got requires_grad=True of a weight in MXFP4, which gets no gradient; wanted it "
                f"frozen; call {name}.requires_grad_(False), and train adapters of PEFT"
            )
    return experts.gate_up_proj.packed, experts.down_proj.packed


@torch.compiler.disable
def _codes_of_packed(packed: Any) -> tuple[Quantized, Quantized]:
    with torch.no_grad():
        return codes_of_experts(packed)[0]


def _without_other_ranks(experts: Any, ids: Tensor, number: int, comm: Any) -> Tensor:
    """ids with -1 for the experts of other ranks, which transformers' own expert parallelism calls
    ``number``."""
    if comm is None and getattr(experts, "_is_expert_parallel", False):
        return torch.where(ids == number, -1, ids)
    return ids


def has_interface(module: nn.Module) -> bool:
    """Whether transformers' decorator of experts has set the attributes that describe their weights."""
    return hasattr(module, "has_gate") and hasattr(module, "is_transposed")


def multiplies_codes(experts: Any) -> bool:
    """Whether the experts compute by an implementation of `enable` whose recipe quantises."""
    options = _options.get(_implementation_of(experts))
    return options is not None and options.precision.quantizes


def has_codes(experts: Any) -> bool:
    """Whether the parameters are a checkpoint's codes and scales, as `FP8Experts` has them."""
    return hasattr(experts, "down_proj_scale_inv")


@torch.compiler.disable
def _records_of(experts: Any) -> tuple[Quantized, Quantized]:
    """Codes and scales of an `FP8Experts`, in its own memory wherever that has the form of the GEMMs; kept
    then, as the records hold this memory, so that its addresses tell whether it is still the module's."""

    def are_of_module(records: tuple[Quantized, Quantized]) -> bool:
        arrays: Any = [a for q in records for a in (q.rowwise.data, q.rowwise.scales)]  # type: ignore[union-attr]
        return [t.data_ptr() for t in arrays] == [t.data_ptr() for t in given]

    given = _codes_of(experts)
    kept = vars(experts).get("_fp8moe_records")
    if kept is not None and are_of_module(kept):
        return kept  # type: ignore[no-any-return]
    check_codes(experts)
    w13, scales13, w2, scales2 = (t.detach() for t in given)
    halves, ffn = 1 + experts.has_gate, w2.shape[2]
    width = round_up_to_block(ffn)
    if ffn != width and halves > 1:  # each projection has tiles of its own
        if scales13.shape[1] != 2 * (width // 128):
            raise _unsupported_codes(experts, f"scales {list(scales13.shape)} of gate and up of {ffn} rows")
        scales13 = scales13.unflatten(1, (halves, -1))
    memory: dict[str, Any] = {"columnwise": False, "share": True}
    records = (
        fp8moe.from_block_fp8(w13.view(torch.uint8), scales13, parts=halves, rows=width, **memory),
        fp8moe.from_block_fp8(w2.view(torch.uint8), scales2, columns=width, **memory),
    )
    if are_of_module(records):
        vars(experts)["_fp8moe_records"] = records
    return records


def check_codes(experts: Any) -> None:
    """Refuses experts in FP8 that are not in tiles of 128 x 128, or not whole."""
    given = _codes_of(experts)
    if experts.activation_scheme != "dynamic":
        raise _unsupported_codes(experts, f"activation_scheme {experts.activation_scheme!r}")
    if experts.block_size is None or tuple(experts.block_size) != (128, 128):
        raise _unsupported_codes(experts, f"block_size {experts.block_size}")
    if given[0].dtype != torch.float8_e4m3fn or any(isinstance(t, DTensor) for t in given):
        raise _unsupported_codes(experts, f"weights of {given[0].dtype} in a {type(given[0].data).__name__}")


def _codes_of(experts: Any) -> list[Tensor]:
    """The parameters of an `FP8Experts`: codes and scales of w13, then of w2."""
    names = first_of(experts), "down_proj"
    return [getattr(experts, n + of) for n in names for of in ("", "_scale_inv")]


def _unsupported_codes(experts: nn.Module, what: str) -> NotImplementedError:
    return NotImplementedError(
        f"{type(experts).__name__}: got experts in FP8 with {what}; wanted e4m3 codes with a scale for each "
        "128 x 128 tile, an FP8 recipe, and scales of activations that are made in the forward; load the "
        "model with quantization_config=FineGrainedFP8Config(dequantize=True)"
    )


#: names of the classes of experts in transformers, such as DbrxExpertGLU, NllbMoeExperts and DogeCDMoE
_NAMES_OF_EXPERTS = re.compile("Expert|(MoE|Moe)$")


def _warn_after(method: str) -> None:
    """Lets a method of all models warn if the model ignores the implementation that it was asked for."""
    original = vars(PreTrainedModel)[method]
    if original.__module__ == __name__:
        return

    @functools.wraps(original, assigned=("__name__", "__qualname__", "__doc__"))
    def method_that_warns(model: Any, *arguments: Any, **options: Any) -> Any:
        result = original(model, *arguments, **options)
        asked = (*arguments, *options.values(), model.config._experts_implementation)[0]
        for name in asked.values() if isinstance(asked, dict) else [asked]:
            if getattr(ALL_EXPERTS_FUNCTIONS.get(name), "__module__", None) == __name__:
                _check_model(model, name)
        return result

    setattr(PreTrainedModel, method, method_that_warns)


def _check_model(model: nn.Module, name: str) -> None:
    """Warns if the model ignores the implementation; otherwise its experts' state dicts are checked."""
    modules = list(model.modules())
    if experts := [m for m in modules if has_interface(m)]:
        for m in experts:  # these are set by the interface
            hooks = m._load_state_dict_pre_hooks.values()
            if refuse_codes not in [getattr(hook, "hook", None) for hook in hooks]:
                m.register_load_state_dict_pre_hook(refuse_codes)
        return
    if names := sorted({type(m).__name__ for m in modules if _NAMES_OF_EXPERTS.search(type(m).__name__)}):
        warnings.warn(
            f"experts_implementation: got {name!r} for a model whose experts ({', '.join(names)}) do not "
            "have transformers' interface for implementations, and compute as without it; wanted experts of "
            'a class with @use_experts_implementation; leave it out, or pass "eager"',
            stacklevel=4,
        )


def _local_tokens(t: Tensor, mesh: Any) -> Tensor:
    return (
        DTensor.from_local(t, mesh, [Replicate()], run_check=False).redistribute(mesh, [Shard(0)]).to_local()
    )


def _all_tokens(t: Tensor, mesh: Any, shape: Any) -> Tensor:
    strides = shape[1], 1
    return DTensor.from_local(t.contiguous(), mesh, [Shard(0)], shape=shape, stride=strides).full_tensor()


#: options of each implementation that `enable` has registered, by name
_options: dict[str, LayerOptions] = {}


def enabled_options(name: str) -> LayerOptions:
    """The options of a registered implementation."""
    if name not in _options:
        raise ValueError(
            f"name: got {name!r}, which is not registered; call fp8moe.transformers.enable(name={name!r})"
        )
    return _options[name]


def _multiply(experts: Any, x: Tensor, ids: Tensor, probs: Tensor, name: str, comm: Any = None) -> Tensor:
    if has_codes(experts):
        return _multiply_codes(experts, x, ids, probs, _options[name], comm)
    if _is_packed(experts):
        return _multiply_packed(experts, x, ids, probs, _options[name], comm)
    options = {**_options[name].arguments, "activation": activation_of(experts)}
    masters = _OfExperts.masters(experts)
    first, number = next((name, len(w)) for name, w in masters.items())
    if number != getattr(experts, "num_experts", number):  # ids beyond w13 would mean no expert
        raise ValueError(
            f"{first}: got {number} experts; wanted {experts.num_experts}, the module's num_experts; set "
            "that where experts are removed, and remove them from the router as well"
        )
    bias13, bias2, codes = None, None, None
    if experts.has_bias:
        bias13, bias2 = getattr(experts, f"{first}_bias"), experts.down_proj_bias
        bias13 = gates_before_ups(bias13) if _is_interleaved(experts) else bias13
    ids, lora = _without_other_ranks(experts, ids, number, comm), _lora_of(experts)
    if hasattr(experts, "_fp8_weights"):
        rows: Any = (x, probs) if bias13 is None else (x, probs, bias13)
        rows += () if lora is None else tuple([t for w in lora if w is not None for t in (w.a, w.b)])
        codes = options["fp8_weights"] = codes_of(experts, [*masters.values()], rows)
    reorder = gates_before_ups if codes is None else gradient_of_gates_before_ups
    w13, w2 = _as_operands(experts, [*masters.values()], reorder)
    options |= {"bias13": bias13, "bias2": bias2, "lora": lora}
    return moe_experts(x, w13, w2, ids, probs, **options, comm=comm)


def _as_operands(
    experts: Any, masters: Sequence[Tensor], reorder: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """w13 [E, 2F, H] and w2 [E, H, F] of an experts module's weights."""
    w13, w2 = masters
    if experts.is_transposed:
        w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
    return reorder(w13) if _is_interleaved(experts) else w13, w2


def first_of(experts: Any) -> str:
    """The name of the parameter that is w13."""
    return "gate_up_proj" if experts.has_gate else "up_proj"


def _is_interleaved(experts: Any) -> bool:
    return bool(experts.has_gate and not experts.is_concatenated)


class _OfExperts(Holder):
    """Experts of a class that transformers decorates with ``use_experts_implementation``."""

    @staticmethod
    def masters(module: Any) -> dict[str, Tensor]:
        first = first_of(module)
        return {first: getattr(module, first), "down_proj": module.down_proj}

    @staticmethod
    def options(module: Any) -> LayerOptions:
        return _options[_implementation_of(module)]

    @classmethod
    def activation(cls, module: Any) -> Activation:
        return activation_of(module)

    @staticmethod
    def operands(module: Any, masters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return _as_operands(module, masters, gates_before_ups)

    @staticmethod
    def multiplies_masters(module: Any) -> bool:
        return not (module.is_transposed or _is_interleaved(module))

    @staticmethod
    def computes(module: Any) -> bool:
        return _implementation_of(module) in _options

    @classmethod
    def shares(cls, module: Any) -> bool:
        # PEFT's target_parameters compute a weight anew at each access
        return cls.computes(module) and super().shares(module) and not is_parametrized(module)


class _OfCodes(_OfExperts):
    """`FP8Experts`, of whose weights no copies are made."""

    @staticmethod
    def frozen(module: Any) -> Sequence[Tensor]:
        return _codes_of(module)


class _OfPacked(_OfExperts):
    """Experts in MXFP4, of whose weights codes are made for each forward."""

    form = "MXFP4"

    @staticmethod
    def frozen(module: Any) -> Sequence[Tensor]:
        return [*module.gate_up_proj.packed, *module.down_proj.packed]


def _implementation_of(experts: Any) -> str:
    own = getattr(experts, "_fp8moe_implementation", None)  # of its expert parallelism
    return getattr(experts.config, "_experts_implementation", "") if own is None else own


def _holder_of(module: nn.Module) -> type[Holder] | None:
    if not has_interface(module) or _implementation_of(module) not in _options:
        return None
    return _OfPacked if _is_packed(module) else _OfCodes if has_codes(module) else _OfExperts


holders_of_others.append(_holder_of)


# ---------------------------------------------------------------- PEFT's adapters of the experts


def _serve_peft() -> None:
    """Lets PEFT's ``target_parameters`` hand its matrices to the experts that this library computes. PEFT
    parametrises the weight for a forward, which computes W + B A at once; here it stays as it is. PEFT is
    imported by transformers, where it is installed."""
    wrapper: Any = getattr(sys.modules.get("peft.tuners.lora.layer"), "ParamWrapper", None)
    original = getattr(wrapper, "_activate_lora", None)
    if original is None or original.__module__ == __name__:
        return

    @contextlib.contextmanager
    @functools.wraps(original, assigned=("__name__", "__qualname__", "__doc__"))
    def activate(self: Any, active_adapters: Any) -> Iterator[None]:
        experts = self.get_base_layer()
        adapter = _served_with_those_inside(self, experts, active_adapters)
        if adapter is None:
            with original(self, active_adapters):
                yield
            return
        before = vars(experts).get("_fp8moe_lora", {})
        # another dictionary: replicas of nn.DataParallel have the attributes of their module
        vars(experts)["_fp8moe_lora"] = {**before, self.parameter_name: (self, adapter)}
        try:
            yield
        finally:
            vars(experts)["_fp8moe_lora"] = before

    activate.__module__ = __name__
    wrapper._activate_lora = activate
    wrapper.merge, wrapper.unmerge = _counted(wrapper.merge), _counted(wrapper.unmerge)
    _refuse_merges_into_codes()


def _counted(change: Callable[..., None]) -> Callable[..., None]:
    """A change of a parameter's ``.data`` by PEFT that FP8 copies, and autograd, notice."""

    @functools.wraps(change)
    def counted(self: Any, *arguments: Any, **options: Any) -> None:
        change(self, *arguments, **options)
        if not (w := self.get_param()).is_inference():
            torch.autograd.graph.increment_version(w)

    return counted


def _refuse_merges_into_codes() -> None:
    """Lets PEFT refuse to merge into FP8 codes before it has merged into other layers."""
    tuner: Any = getattr(sys.modules.get("peft.tuners.tuners_utils"), "BaseTuner", None)
    original = getattr(tuner, "_check_merge_allowed", None)
    if original is None:
        return

    @functools.wraps(original)
    def check(self: Any) -> None:
        for name, layer in self.model.named_modules():
            if not (hasattr(layer, "base_layer") and hasattr(layer, "merged_adapters")):
                continue
            own = getattr(layer, "parameter_name", "weight")
            w = getattr(layer.get_base_layer(), own, None)
            if isinstance(w, MXFP4Weight) or (
                isinstance(w, Tensor) and w.dtype.is_floating_point and w.dtype.itemsize == 1
            ):
                form = "MXFP4" if isinstance(w, MXFP4Weight) else w.dtype
                place = ".".join([part for part in name.split(".") if part != "base_layer"] + [own])
                raise NotImplementedError(
                    f"{place}: got adapters to merge into {form}, codes whose scales PEFT does not know; "
                    "wanted weights; call fp8moe.transformers.export(model, folder), which merges them into "
                    "the checkpoint that it writes, or load the model dequantised"
                )
        original(self)

    tuner._check_merge_allowed = check


def _served_with_those_inside(wrapper: Any, experts: nn.Module, active_adapters: Any) -> str | None:
    """`_served_adapter`, None also if PEFT has to compute a weight of a wrapper inside this one. PEFT nests
    those of a module's parameters, and the experts take all of their adapters or none."""
    adapter, inside = _served_adapter(wrapper, experts, active_adapters), wrapper.base_layer
    while adapter is not None and isinstance(inside, type(wrapper)):
        adapters = [name for name in inside.active_adapters if name in inside.lora_A]
        if adapters and not (inside.disable_adapters or inside.merged):
            adapter = adapter if _served_adapter(inside, experts, adapters) else None
        inside = inside.base_layer
    return adapter


def _served_adapter(wrapper: Any, experts: nn.Module, active_adapters: Any) -> str | None:
    """The adapter of a parameter that `moe_experts` multiplies by itself; None where PEFT has to compute the
    weight: for several adapters, a base that is trained, and options that ``lora`` is refused with."""
    if not hasattr(wrapper, "_did_swap_in_out_features"):  # of another version
        return None
    adapters = [name for name in active_adapters if name in wrapper.lora_A]
    name = _implementation_of(experts) if hasattr(experts, "has_gate") else ""
    if len(adapters) != 1 or name not in _options or is_parametrized(experts):
        return None
    options, number = _options[name], getattr(wrapper, "num_experts", 1)
    first = first_of(experts)
    weights = [getattr(experts, n) for n in (first, "down_proj")]
    of_experts = wrapper.parameter_name in (first, "down_proj") and {number} == {len(w) for w in weights}
    biases = [getattr(experts, f"{first}_bias")] if getattr(experts, "has_bias", False) else []
    trained = any(w.requires_grad for w in (*weights, *biases))
    refused = options.save != "bf16"
    over_ranks = hasattr(experts, "_fp8moe_implementation") or any(isinstance(w, DTensor) for w in weights)
    return adapters[0] if of_experts and not (trained or refused or over_ranks) else None


def _lora_of(experts: Any) -> tuple[LoRA | None, LoRA | None] | None:
    """The adapters of a forward that PEFT's wrappers have begun, None without any."""
    if not (served := vars(experts).get("_fp8moe_lora")):
        return None
    return _adapter_of(experts, served, 0), _adapter_of(experts, served, 1)


def _adapter_of(experts: Any, served: dict[str, Any], place: int) -> LoRA | None:
    """The adapter of w13 or of w2."""
    name = "down_proj" if place else first_of(experts)
    if name not in served:
        return None
    wrapper, adapter = served[name]
    matrices = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
    lora = LoRA.from_peft(*matrices, wrapper.num_experts, scaling=wrapper.scaling[adapter])
    a, b = lora.a, lora.b
    # what PEFT takes for the inputs of a parameter may be its outputs: W + (B A)^T then
    if wrapper._did_swap_in_out_features == experts.is_transposed:
        a, b = b.mT, a.mT
    b = gates_before_ups(b) if place == 0 and _is_interleaved(experts) else b
    return LoRA(a, b, lora.scaling)


# ---------------------------------------------------------------- the activation between the two products


def activation_of(experts: Any) -> Activation:
    """Determine the activation that an experts module applies to its gate and up projections.

    Parameters
    ----------
    experts : Module
        Instance of a class that transformers decorates with ``use_experts_implementation``.

    Returns
    -------
    Activation
        The activation that equals the module's on all sample values.

    Raises
    ------
    NotImplementedError
        For an activation that `fp8moe.Activation` cannot describe; the message names the class.

    Examples
    --------
    >>> import transformers
    >>> from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
    >>> from fp8moe.transformers import activation_of
    >>> sizes = {"hidden_size": 64, "moe_intermediate_size": 48, "num_experts": 4}
    >>> activation_of(Qwen3MoeExperts(transformers.Qwen3MoeConfig(**sizes))).kind
    'swiglu'
    """
    # A compiler traces this and guards the key's values: it compiles again for a changed activation, and
    # layers of the same key share compiled code, except that in which the key was new: its guard is the
    # module's identity.
    key = _key_of(experts)
    activation = _known(key)
    return _determined(id(experts), key) if activation is None else activation


#: result of `_key_of` -> activation, and the compilation that determined it, or None
_activations: dict[Any, tuple[Activation, Any]] = {}


def _key_of(experts: Any) -> Any:
    """All that a gate function may depend on. Not the class, of which parametrizations make new ones."""
    act, gates = (
        getattr(experts, "act_fn", None),
        (type(experts)._apply_gate, vars(experts).get("_apply_gate")),
    )
    if isinstance(act, nn.Module):
        of_act = ((type(m), _settings(m), _functions(m)) for m in act.modules())
        return gates, _settings(experts), *of_act
    return gates, _settings(experts), act


def _settings(module: nn.Module) -> tuple[Any, ...]:
    """Names and values of the module's plain attributes, except whether it is in training."""
    # the sets make a compiler treat floats as constants
    values = _values(module)
    return tuple((n, *{v}) for n, v in values if isinstance(v, (int, float, str)) and n != "training")


def _functions(module: nn.Module) -> tuple[Any, ...]:
    """Names of the module's attributes that are functions, and what identifies these: not a bound method's
    module, nor which of several equal partial objects it is."""
    functions: list[Any] = []
    for name, v in _values(module):
        if isinstance(v, functools.partial):
            functions.append((name, v.func, tuple(v.args), *v.keywords.items()))
        elif isinstance(v, MethodType):
            functions.append((name, v.__func__))
        elif isinstance(v, (FunctionType, BuiltinFunctionType)):
            functions.append((name, v))
    return tuple(functions)


def _values(module: nn.Module) -> Any:
    """Names and values of the module's attributes."""
    if _OLD_DYNAMO and torch.compiler.is_compiling():
        return [(n, getattr(module, n)) for n in _attributes(id(module))]
    return vars(module).items()


#: Dynamo of torch 2.11 can neither list a module's attributes nor pass one to a function with a constant
#: result. Its ``id`` can be passed, which is guarded, so that layers do not share compiled code.
_OLD_DYNAMO = torch.__version__ < "2.13"


@torch.compiler.assume_constant_result
def _attributes(address: int) -> tuple[str, ...]:
    """The names of the attributes of the module with this ``id``."""
    return tuple(vars(ctypes.cast(address, ctypes.py_object).value))


@torch.compiler.assume_constant_result
def _known(key: Any) -> Activation | None:
    activation, compilation = _activations.get(key, (None, None))
    # a compiler that starts again must find the same answer
    return None if compilation is not None and compilation == _compilation() else activation


@torch.compiler.assume_constant_result
def _determined(address: int, key: Any) -> Activation:
    """Of the module with this ``id``."""
    experts: Any = ctypes.cast(address, ctypes.py_object).value
    constants, name = _constants(experts), type(experts).__name__
    if getattr(experts, "has_post_expert_norm", False):
        raise _unsupported(name, "experts with a norm after each expert")
    gated = bool(experts.has_gate)
    act = getattr(experts, "act_fn", None)
    if isinstance(act, nn.Module) and any(m._parameters or m._buffers for m in act.modules()):
        raise _unsupported(name, f"an activation ({type(act).__name__}) with parameters or buffers")
    activated = _activated(experts, _probe(constants), gated)
    activation = _matching(activated.tobytes(), constants, gated)
    if activation is None:
        kind = "a gate" if gated else "experts without a gate"
        raise _unsupported(
            name, f"{kind} ({getattr(act, '__name__', type(act).__name__)}) that matches no Activation"
        )
    _activations[key] = activation, _compilation()
    return activation


def _compilation() -> Any:
    """An identifier of the compilation that traces the caller, None in eager mode."""
    return torch._guards.CompileContext.current_compile_id()


def _unsupported(name: str, computation: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name}: got {computation}; wanted experts of one of {', '.join(get_args(Kind))}; pass "
        'experts_implementation="grouped_mm"'
    )


def _constants(experts: Any) -> tuple[float, ...]:
    """Attributes of the module that its gate function may use to clamp or scale."""
    candidates = ((n, v) for n, v in vars(experts).items() if isinstance(v, (int, float)) and v > 0)
    return tuple(sorted({float(v) for n, v in candidates if any(word in n for word in _WORDS)}))


_WORDS = ("limit", "clamp", "alpha")


def _probe(constants: tuple[float, ...]) -> np.ndarray:
    """Sample rows (gate, up) [N, 2]: all pairs of numbers inside and outside the range of each constant."""
    values = {*np.linspace(-6, 6, 25), -30.0, 30.0}
    for c in constants:
        values |= {0.9 * c, -0.9 * c, 1.5 * c, -1.5 * c}
    grid = np.array(sorted(values))
    return np.stack(np.meshgrid(grid, grid), axis=-1).reshape(-1, 2)


def _activated(experts: Any, probe: np.ndarray, gated: bool) -> np.ndarray:
    # for one gate and one up column, interleaved and concatenated layouts are the same
    with (
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        torch.utils._python_dispatch._disable_current_modes(),
    ):
        if not gated:
            return experts.act_fn(torch.from_numpy(probe[:, 0].copy())).numpy()
        return experts._apply_gate(torch.from_numpy(probe)).numpy()[:, 0]


_SIGMOIDS = ("swiglu", "quick_geglu", "silu", "quick_gelu")


@functools.lru_cache(maxsize=256)
def _matching(activated: bytes, constants: tuple[float, ...], gated: bool) -> Activation | None:
    probe, expected = _probe(constants), np.frombuffer(activated, np.float64)
    sigmoids = [("swiglu" if gated else "silu", alpha) for alpha in (1.0, 1.702, *constants)]
    others = [(kind, 1.0) for kind in get_args(Kind) if (kind in GATED) == gated and kind not in _SIGMOIDS]
    candidates: Any = itertools.product([*sigmoids, *others], (None, *constants), (0.0, 1.0))
    if not gated:  # without a gate there is no clamp and no offset
        candidates, probe = ((kind, None, 0.0) for kind in (*sigmoids, *others)), probe[:, :1].copy()
    for (kind, alpha), clamp, offset in candidates:
        activation = Activation(kind, clamp, alpha, offset)
        values = fp8moe.swiglu(probe, activation=activation)[:, 0]
        # some gates compute in float32, with errors of a few 2^-24; the next activation differs by 4e-4
        if np.allclose(values, expected, rtol=1e-5, atol=1e-6):
            return activation
    return None
