"""The FP8 flow as Megatron-Core's MoE layer: a subclass of its `MoELayer`, and experts for Megatron's
dispatchers.

Megatron's router, shared experts, auxiliary losses and recompute are used unchanged; this library sends,
permutes and multiplies the rows. Users import it as `fp8moe.megatron`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, Unpack

from fp8moe.adapters import needs

with needs("torch"):
    import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import gelu, silu

from fp8moe.activation import GATED, SWIGLU, Activation
from fp8moe.adapters.torch.distributed.process_group import ProcessGroup
from fp8moe.adapters.torch.functional import moe_experts, moe_experts_permuted
from fp8moe.adapters.torch.operation import refuse_codes
from fp8moe.adapters.torch.weights import FP8Weights, Holder, codes_of, in_words
from fp8moe.layer.options import ArgumentsBesideRecompute, options_of
from fp8moe.layer.recipes import Recipe
from fp8moe.runtime import checks

with warnings.catch_warnings(), needs("megatron"):
    warnings.simplefilter("ignore")  # Megatron-Core warns about missing optional packages
    from megatron.core.activations import fast_gelu, quick_gelu, squared_relu
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
    from megatron.core.fp8_utils import is_first_last_bf16_layer
    from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
    from megatron.core.tensor_parallel.random import (
        get_cuda_rng_tracker,
        get_expert_parallel_rng_tracker_name,
    )
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.utils import (
        erf_gelu,
        make_sharded_object_for_checkpoint,
        openai_gelu,
    )

__all__ = ["FP8FlowExperts", "FP8FlowMoELayer", "use_fp8_flow"]

#: fields of `TransformerConfig` that these experts do not implement, with the accepted values
REFUSED = {
    "add_bias_linear": (False,),
    "moe_apply_probs_on_input": (False,),
    "moe_latent_size": (None,),
    "activation_func_fp8_input_store": (False,),
    "use_te_activation_func": (False,),
    "delay_wgrad_compute": (False,),
    "overlap_moe_expert_parallel_comm": (False,),
    "overlap_dispatch_backward_with_experts_wgrad": (False,),
    "moe_mlp_glu_interleave_size": (None,),
    "moe_single_grouped_weight": (False,),
    "moe_paged_stash": (False,),
    "moe_ncclep_zero_copy": (False,),
    "moe_dispatch_fwd_dtype": ("bf16",),
    "moe_combine_bwd_dtype": ("bf16",),
    "expert_gtp_weight_remat_size": (1,),
    "batch_invariant_mode": (False,),
    "quant_recipe": (None,),
    "transformer_impl": ("local", "transformer_engine"),
}
#: the same with an FP8 recipe
REFUSED_IN_FP8 = {"fp8_wgrad": (True,)}
#: the same for `FP8FlowMoELayer`
REFUSED_BY_LAYER = {
    "moe_pad_expert_input_to_capacity": (False,),
    "moe_router_padding_for_quantization": (False,),
    "moe_router_padding_for_fp8": (False, None),
    "moe_expert_rank_capacity_factor": (None,),
}


def refused_with(recipe: Recipe) -> dict[str, tuple[Any, ...]]:
    """Fields that experts with a recipe would ignore, and the values that need nothing of them."""
    return REFUSED | REFUSED_IN_FP8 if recipe.quantizes else REFUSED


#: what Megatron's config says, until it is read
OF_CONFIG: dict[str, Any] = {"activation": SWIGLU, "recompute": None}


def check_config(config: Any, pg_collection: Any, refused: dict[str, tuple[Any, ...]]) -> None:
    """Raises NotImplementedError for fields of a config that would otherwise be ignored, and ValueError for
    experts that cannot be split over the expert-tensor-parallel ranks."""
    for name, accepted in refused.items():
        value = getattr(config, name, accepted[0])
        if value not in accepted:
            values = " or ".join(map(repr, accepted))
            raise NotImplementedError(f"{name}: got {value!r}; wanted {values} for FP8FlowMoELayer's experts")
    if getattr(config, "fine_grained_activation_offloading", False):
        offloaded = {"expert_fc1", "moe_act", "fused_group_mlp"} & set(config.offload_modules or ())
        if offloaded:
            raise NotImplementedError(
                f"offload_modules: got {sorted(offloaded)}; wanted none of them, because these experts do "
                "not have the tensors"
            )
    ranks = pg_collection.expt_tp.size()
    if config.moe_ffn_hidden_size % ranks:
        raise ValueError(
            f"moe_ffn_hidden_size: got {config.moe_ffn_hidden_size}; wanted a multiple of {ranks}, the "
            "expert_tensor_parallel_size"
        )


#: values of `TransformerConfig`'s ``activation_func`` and their kinds without a gate, by name
ACTIVATIONS: dict[str, tuple[Any, str]] = {
    "silu": (silu, "silu"),
    "gelu": (gelu, "gelu"),
    "erf_gelu": (erf_gelu, "gelu"),
    "fast_gelu": (fast_gelu, "gelu_tanh"),
    "openai_gelu": (openai_gelu, "gelu_tanh"),
    "quick_gelu": (quick_gelu, "quick_gelu"),
    "squared_relu": (squared_relu, "relu2"),
}


def activation_of(config: Any) -> Activation:
    """Activation of the experts for a `TransformerConfig`.

    Raises NotImplementedError for a function that no `Activation` has, and, without a gate, for fields that
    then have no effect in Megatron.
    """
    function, gated = config.activation_func, config.gated_linear_unit
    kinds: dict[str, Any] = {act: act for _, act in ACTIVATIONS.values()}
    if gated:
        kinds = {act: kind for kind, act in GATED.items()}
    kind = next((kinds.get(act) for known, act in ACTIVATIONS.values() if function is known), None)
    if kind is None:
        name = getattr(function, "__name__", repr(function))
        names = [name for name, (_, act) in ACTIVATIONS.items() if act in kinds]
        raise NotImplementedError(
            f"activation_func: got {name} with gated_linear_unit={gated}; wanted one of {', '.join(names)}"
        )
    clamp = getattr(config, "activation_func_clamp_value", None)
    offset = getattr(config, "glu_linear_offset", 0.0)
    if not gated:
        ignored = {"activation_func_clamp_value": (clamp, None), "glu_linear_offset": (offset, 0.0)}
        for field, (value, wanted) in ignored.items():
            if value != wanted:
                raise NotImplementedError(
                    f"{field}: got {value} with gated_linear_unit=False; wanted {wanted}, or a gate"
                )
    return Activation(kind, clamp=clamp, linear_offset=offset)


class FP8FlowExperts(MegatronModule):  # type: ignore[misc]
    """Experts that replace Megatron's `SequentialMLP`, `GroupedMLP` or `TEGroupedMLP`.

    They work with any of Megatron's dispatchers (allgather, alltoall, DeepEP, HybridEP), which permute the
    rows, and with expert tensor parallelism sum the ranks' partial results. Bias, activations of no
    `Activation` and other unsupported options raise NotImplementedError when the module is created.

    Parameters
    ----------
    num_local_experts : int
        Number of experts on this rank.
    config : TransformerConfig
        With ``recompute_modules=["moe_act"]`` the backward recomputes the first product and the activation.
    submodules : None
        Part of Megatron's constructor signature; not used.
    pg_collection : ProcessGroupCollection or None
        Process groups of the model; None: Megatron's default groups.
    name : str or None
        Part of Megatron's constructor signature; not used.
    **options : recipe, save, backend, num_sms, weight_copies
        As in `fp8moe.torch.moe_experts`.

    Notes
    -----
    weight1 [E, 2F, H], gates before ups ([E, F, H] without a gate), and weight2 [E, H, F] are the weights of
    this rank's experts, in ``params_dtype``, where F is ``moe_ffn_hidden_size`` divided by the number of
    expert-tensor-parallel ranks, each of which has a part of every expert. In a distributed checkpoint they
    have the keys, shapes and sharding of `SequentialMLP`, so either module loads the other's checkpoint, with
    another number of ranks too. They are initialised like `SequentialMLP`'s weights, in the same order. With
    the FP8 recipes the products add the weight gradients to ``main_grad``. ``state_dict`` of weights sharded
    by Megatron-FSDP raises if there are several expert-parallel or expert-tensor-parallel ranks. Megatron's
    Muon optimizer, which is for matrices, leaves these weights with three dimensions to the optimizer of the
    other parameters.

    Examples
    --------
    >>> import warnings
    >>> warnings.simplefilter("ignore")
    >>> from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    >>> from fp8moe import megatron
    >>> spec = megatron.use_fp8_flow(get_gpt_layer_local_spec(num_experts=4), dispatcher="megatron")
    >>> mlp = spec.submodules.mlp  # a builder, or in older releases a spec
    >>> experts = getattr(mlp, "submodules", None) or mlp.keywords["submodules"]
    >>> experts.experts.module is megatron.FP8FlowExperts
    True
    """

    def __init__(
        self,
        num_local_experts: int,
        config: Any,
        submodules: Any = None,
        pg_collection: Any = None,
        name: str | None = None,
        **options: Unpack[ArgumentsBesideRecompute],
    ):
        super().__init__(config=config)
        modules = config.recompute_modules or () if config.recompute_granularity == "selective" else ()
        recompute = "moe_expert" if "moe_act" in modules else None
        self._options = options_of("FP8FlowExperts", options, **OF_CONFIG | {"recompute": recompute})
        groups = get_default_pg_collection() if pg_collection is None else pg_collection
        recipe = self._options.precision
        check_config(config, groups, refused_with(recipe))
        if recipe.quantizes and config.first_last_layers_bf16:
            raise NotImplementedError(
                "first_last_layers_bf16: got True for experts that do not know their layer's number; wanted "
                "use_fp8_flow(dispatcher='fp8moe'), or recipe='bf16'"
            )
        self._options = dataclasses.replace(self._options, activation=activation_of(config))
        self._num_local_experts = num_local_experts
        self.ep_group, self.tp_group, self.dp_group = groups.ep, groups.expt_tp, groups.expt_dp
        hidden, ffn = config.hidden_size, config.moe_ffn_hidden_size // self.tp_group.size()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        place: dict[str, Any] = {"dtype": config.params_dtype, "device": device}
        rows = self.activation.columns(ffn)
        self.weight1 = torch.nn.Parameter(torch.empty(num_local_experts, rows, hidden, **place))
        self.weight2 = torch.nn.Parameter(torch.empty(num_local_experts, hidden, ffn, **place))
        set_tensor_model_parallel_attributes(self.weight1, True, 1, rows // ffn)
        set_tensor_model_parallel_attributes(self.weight2, True, 2, 1)
        shared = self.ep_group.size() == 1 and groups.tp.size() == self.tp_group.size()
        for weight in (self.weight1, self.weight2):
            # expert data parallelism averages its gradient over the ranks that hold the same experts
            weight.allreduce = shared  # type: ignore[attr-defined]
        if config.perform_initialization:
            self._initialize()
        self._fp8_weights = FP8Weights(self, _OfExperts)
        # Megatron sets it to True before the first micro-batch of a step, as in Transformer Engine's modules
        self.is_first_microbatch: bool | None = None
        self.register_load_state_dict_pre_hook(_without_extra_state)
        self.register_load_state_dict_pre_hook(refuse_codes)
        self.register_state_dict_post_hook(_refuse_equal_keys)

    def _initialize(self) -> None:
        first, second = self.config.init_method, self.config.output_layer_init_method
        rank, ranks = self.tp_group.rank(), self.tp_group.size()
        with torch.no_grad():
            for expert in range(self.num_local_experts):
                for weight, init_method, dim in ((self.weight1, first, 0), (self.weight2, second, 1)):
                    if self.config.use_cpu_initialization:
                        shape = list(weight.shape[1:])
                        halves: int = weight.partition_stride  # type: ignore[attr-defined]
                        shape[dim] *= ranks
                        whole = torch.empty(shape, dtype=torch.float32)
                        init_method(whole)
                        parts = whole.unflatten(dim, (halves, ranks, -1))
                        weight[expert].copy_(parts.select(dim + 1, rank).flatten(dim, dim + 1))
                    else:
                        with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                            init_method(weight[expert])

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor | None,
        permuted_probs: Tensor,
        *,
        topk_ids: Tensor | None = None,
        comm: Any = None,
    ) -> tuple[Tensor, None]:
        """Compute the experts for rows that Megatron's dispatcher has permuted, or with topk_ids for tokens.

        Parameters
        ----------
        permuted_local_hidden_states : Tensor, floating point, [N, H]
            Rows in expert order; with topk_ids the tokens [T, H] on their own ranks.
        tokens_per_expert : Tensor, int32 or int64, [E], or None
            Number of rows of each expert. Counts on the CPU are copied to the rows' device without
            synchronising. None with topk_ids.
        permuted_probs : Tensor, floating point, [N] or [T, k]
            Factor of each row's output, or of each expert's output for a token.
        topk_ids : Tensor, int64, [T, k], or None
            Global expert ids of tokens. With expert tensor parallelism each rank's part of an expert has an
            id of its own, and permuted_probs repeats the expert's factor for each.
        comm : Comm or None
            With topk_ids: communicator for dispatch and combine; None for one rank.

        Returns
        -------
        rows : Tensor, [N, H]
            The outputs; with expert tensor parallelism and no topk_ids, this rank's summand of them.
        bias : None
            Always None.

        Raises
        ------
        TypeError, ValueError
            As in `fp8moe.torch.moe_experts_permuted`, or with topk_ids as in
            `fp8moe.torch.moe_experts`.
        """
        weights = self._weights()
        rows = permuted_local_hidden_states, *weights
        # calls in evaluation mode may be outside of a schedule, which says nothing about them
        first = self.is_first_microbatch if self.training else None
        codes = codes_of(self, weights, (rows[0], permuted_probs), first)
        if first:
            self.is_first_microbatch = False
        options = self._options.arguments | {"fp8_weights": codes}
        if topk_ids is not None:
            return moe_experts(*rows, topk_ids, permuted_probs, comm=comm, **options), None
        device = permuted_local_hidden_states.device
        counts = tokens_per_expert.to(device, non_blocking=True)  # type: ignore[union-attr]
        return moe_experts_permuted(*rows, counts, permuted_probs, **options), None

    @property
    def num_local_experts(self) -> int:
        """Number of experts on this rank."""
        return self._num_local_experts

    @property
    def recipe(self) -> str:
        """The recipe of the experts; with `FP8FlowMoELayer`, that of the layer's number."""
        return self._options.recipe

    @property
    def recompute(self) -> str | None:
        """What the backward recomputes, by the config's ``recompute_modules``."""
        return self._options.recompute

    @property
    def save(self) -> str:
        """Form in which the first product's result is saved, as in the constructor."""
        return self._options.save

    @property
    def activation(self) -> Activation:
        """The activation, by the config."""
        return self._options.activation

    @property
    def backend(self) -> str | None:
        """Kernels of the products, as in the constructor."""
        return self._options.backend

    @property
    def num_sms(self) -> int | None:
        """Maximum number of SMs of a product, as in the constructor."""
        return self._options.num_sms

    @property
    def weight_copies(self) -> str:
        """Orientations of the FP8 weights that are kept, as in the constructor."""
        return self._options.weight_copies

    def extra_repr(self) -> str:
        options = ", ".join(f"{n}={v!r}" for n, v in vars(self._options).items())
        return f"{options}, {in_words(self)}"

    def _weights(self) -> tuple[Tensor, Tensor]:
        weights = self.weight1, self.weight2
        if self._options.precision.quantizes or all(getattr(w, "main_grad", None) is None for w in weights):
            return weights
        # views have no ``main_grad``: torch's grouped product does not add to it; the data parallel wrapper's
        # hook does
        return self.weight1.view_as(self.weight1), self.weight2.view_as(self.weight2)

    def backward_dw(self) -> None:
        """Do nothing: delay_wgrad_compute is not supported."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Describe the weights for a distributed checkpoint, as `SequentialMLP` does.

        Parameters
        ----------
        prefix : str
            Prefix of the keys.
        sharded_offsets : tuple
            Sharding offsets of the enclosing layers.
        metadata : dict or None
            Megatron's metadata of the checkpoint format.

        Returns
        -------
        dict of str to Any
            Keys, global shapes, offsets and replica ids of `SequentialMLP`: one piece per expert, two for
            fc1 with a gate.

        Raises
        ------
        NotImplementedError
            When saving in a format with flattened tensors.
        """
        singleton = bool((metadata or {}).get("singleton_local_shards", False))
        places = _Places(
            tuple(sharded_offsets), self.ep_group, self.tp_group, self.num_local_experts, singleton
        )
        replica, extra = ((0, rank, self.dp_group.rank()) for rank in (0, self.tp_group.rank()))
        state: dict[str, Any] = {}
        for dim, (name, layer) in enumerate((("weight1", "linear_fc1"), ("weight2", "linear_fc2"))):
            weight = getattr(self, name)
            parts = weight.partition_stride
            build = functools.partial(_pieces, places=places, layer=layer, dim=dim, parts=parts)
            merge = functools.partial(_merged, parts=parts)
            state[prefix + name] = ShardedTensorFactory(
                f"{prefix}experts.{layer}.weight", weight, build, merge, replica
            )
            for expert in range(self.num_local_experts):
                # empty entries, because every module with a get_extra_state has one in a checkpoint
                key = f"{prefix}experts.{places.number(expert)}{layer}._extra_state"
                state[f"{prefix}expert{places.first + expert}.{layer}._extra_state"] = (
                    make_sharded_object_for_checkpoint(None, key, places.offsets(expert), extra)
                )
        return state


class _OfExperts(Holder):
    renewed = True

    @staticmethod
    def masters(module: FP8FlowExperts) -> dict[str, Tensor]:
        return {"weight1": module.weight1, "weight2": module.weight2}


def _set_is_first_microbatch(model: Any) -> None:
    """Megatron's own, which its schedules call before the first micro-batch of a step, leaves it out unless
    the whole model is in FP8."""
    _set_in_fp8(model)
    for module in model.modules():
        if isinstance(module, FP8FlowExperts):
            module.is_first_microbatch = True


_set_in_fp8 = MegatronModule.set_is_first_microbatch
MegatronModule.set_is_first_microbatch = _set_is_first_microbatch


class _Places:
    """Positions of the local experts in a checkpoint."""

    def __init__(self, offsets: tuple[Any, ...], ep_group: Any, tp_group: Any, experts: int, singleton: bool):
        self.outer, self.singleton = offsets, singleton
        self.first, self.total = ep_group.rank() * experts, ep_group.size() * experts
        self.tp_rank, self.tp_ranks = tp_group.rank(), tp_group.size()

    def number(self, expert: int) -> str:
        """Expert number for keys of a single expert."""
        return f"{self.first + expert}." if self.singleton else ""

    def offsets(self, expert: int) -> tuple[Any, ...]:
        if self.singleton:
            return self.outer
        return (*self.outer, (len(self.outer), self.first + expert, self.total))

    def part(self, axis: int, part: int, parts: int) -> tuple[int, int, int]:
        """This rank's piece of a dimension that consists of ``parts``, each split over the ranks."""
        if self.singleton:  # a key per part
            return axis, self.tp_rank, self.tp_ranks
        return axis, part * self.tp_ranks + self.tp_rank, parts * self.tp_ranks


@torch.no_grad()
def _pieces(
    key: str,
    weights: Tensor,
    replica_id: Any,
    flattened_range: Any,
    *,
    places: _Places,
    layer: str,
    dim: int,
    parts: int,
) -> list[ShardedTensor]:
    """Splits a weight, or the optimizer state of one, into each expert's ``parts``. dim: of an expert, that
    is split over the expert-tensor-parallel ranks. key: the factory's key, with the prefixes that Megatron
    has added since."""
    if flattened_range is not None:
        raise NotImplementedError(
            "flattened_range: got one; wanted None; use a checkpoint format with whole tensors "
            '("fully_reshardable" or "dp_reshardable")'
        )
    suffix = f"{layer}.weight"
    prefix = key.removesuffix(suffix)
    pieces = []
    for expert, weight in enumerate(weights):
        offsets = places.offsets(expert)
        for part, piece in enumerate(weight.chunk(parts)):
            name = prefix + places.number(expert) + suffix
            if parts == 2 and places.singleton:
                name += ("_w", "_v")[part]
            piece_offsets = *offsets, places.part(len(offsets) + dim, part, parts)
            pieces.append(
                ShardedTensor.from_rank_offsets(
                    name, piece, *piece_offsets, replica_id=replica_id, prepend_axis_num=len(offsets)
                )
            )
    return pieces


@torch.no_grad()
def _merged(pieces: list[Tensor], *, parts: int) -> Tensor:
    return torch.stack([torch.cat(pieces[i : i + parts]) for i in range(0, len(pieces), parts)])


def _without_extra_state(_: Any, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    for key in [k for k in state_dict if k.startswith(prefix) and k.endswith("._extra_state")]:
        del state_dict[key]


def _refuse_equal_keys(experts: Any, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """Shards of `fully_shard` or Megatron-FSDP have the same keys on all expert-parallel and
    expert-tensor-parallel ranks, of which a distributed checkpoint would keep one rank's."""
    if not isinstance(state_dict.get(prefix + "weight1"), DTensor):
        return
    for kind, group in (("model", experts.ep_group), ("tensor", experts.tp_group)):
        if group.size() > 1:
            raise NotImplementedError(
                f"{prefix}weight1: got a DTensor with expert_{kind}_parallel_size={group.size()}, whose "
                "checkpoint would hold one rank's experts; wanted Megatron's DistributedDataParallel, whose "
                f"checkpoints sharded_state_dict describes, or expert_{kind}_parallel_size=1"
            )


class _Dispatcher(MoETokenDispatcher):  # type: ignore[misc]
    """Dispatcher that leaves tokens in place; the experts' operation dispatches them itself.

    With expert tensor parallelism that operation takes each rank's part of an expert for an expert of its
    own, so that rows travel once, in its own format, and the parts' outputs are summed with those of the
    token's other experts, in float32.
    """

    def __init__(self, config: Any, pg_collection: Any):
        super().__init__(config=config, pg_collection=pg_collection)
        self.topk_ids: Tensor | None = None
        self._shape = torch.Size()
        # [E + 1, parts]: the parts' numbers by expert, rank by rank; -1 for the id -1
        parts, experts = self.tp_size, config.num_moe_experts // self.ep_size
        numbers = torch.arange(config.num_moe_experts * parts).view(self.ep_size, parts, experts)
        numbers = numbers.transpose(1, 2).reshape(-1, parts)
        self._parts = torch.cat((numbers, torch.full((1, parts), -1)))
        # outputs of a CUDA graph that contains the router only
        self.cudagraph_attrs = ["topk_ids"]

    def dispatch_preprocess(
        self, tokens: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        self._shape = tokens.shape
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(tokens)
        self.topk_ids, topk_probs = chosen(routing_map, probs, self.config.moe_router_topk)
        if self.tp_size > 1:
            self._parts = self._parts.to(probs.device)  # once
            self.topk_ids = self._parts[self.topk_ids].flatten(1)
            topk_probs = topk_probs.repeat_interleave(self.tp_size, dim=1)
        return tokens.reshape(-1, tokens.shape[-1]), topk_probs

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        if self.shared_experts is not None:
            # all of it before the experts, in whose dispatch the host waits for row counts
            self.shared_experts.linear_fc1_forward_and_act()
            self.shared_experts.linear_fc2_forward()
            self.shared_experts.post_forward_comm()
        return hidden_states, probs

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Any, Tensor]:
        return hidden_states, self.topk_ids, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        self.topk_ids = None
        output = hidden_states.view(self._shape)
        return output if self.shared_experts is None else output + self.shared_experts.get_output()


def chosen(routing_map: Tensor, probs: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """(ids [T, topk], probabilities) of a mask and probabilities [T, E], at most ``topk`` per token. If a
    token has fewer experts, as dropped tokens do, the remaining ids are -1 with probability 0."""
    masked = torch.where(routing_map.bool(), probs, -1)  # a selected expert may have probability 0
    topk_probs, ids = masked.topk(topk, dim=1, sorted=False)
    missing = topk_probs < 0
    return torch.where(missing, -1, ids), torch.where(missing, 0, topk_probs)


class FP8FlowMoELayer(MoELayer):  # type: ignore[misc]
    """Megatron's `MoELayer` with dispatch, permutation, experts and combine of this library.

    With "fp8_flow", rows are sent in FP8, and the layer has two casts in total.

    Parameters
    ----------
    config : TransformerConfig
        Config of the model.
    submodules : MoESubmodules or None
        As in `MoELayer`; the experts in it are replaced.
    layer_number : int or None
        As in `MoELayer`.
    pg_collection : ProcessGroupCollection or None
        Process groups of the model; None: Megatron's default groups.
    **options : recipe, save, backend, num_sms, weight_copies
        As in `fp8moe.torch.moe_experts`; and further options of `MoELayer`.

    Notes
    -----
    Create it like `MoELayer`, by a layer spec (see `use_fp8_flow`) or directly. ``moe_token_dispatcher_type``
    of the config has no effect. Router, shared experts, auxiliary losses, capacity (dropped tokens),
    ``recompute_modules``, expert parallelism and expert tensor parallelism follow the config, and so do the
    layers that ``first_last_layers_bf16`` selects, which use the bf16 recipe; the experts are
    `FP8FlowExperts`, which documents their checkpoints and unsupported options. With
    ``moe_shared_expert_overlap`` the shared experts run on a stream of their own beside dispatch, experts and
    combine. The layer does not support padding of the routing, or CUDA graphs that contain the experts on
    several expert-parallel or expert-tensor-parallel ranks, because each forward then reads row counts on the
    host, or any CUDA graphs with ``moe_shared_expert_overlap``.

    Examples
    --------
    >>> import warnings
    >>> warnings.simplefilter("ignore")
    >>> from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    >>> from fp8moe import megatron
    >>> mlp = megatron.use_fp8_flow(get_gpt_layer_local_spec(num_experts=4)).submodules.mlp
    >>> getattr(mlp, "module", None) or mlp.func  # a spec, or a builder
    <class 'fp8moe.adapters.megatron.layer.FP8FlowMoELayer'>
    """

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        **options: Any,
    ):
        groups = get_default_pg_collection() if pg_collection is None else pg_collection
        of_megatron = inspect.signature(MoELayer.__init__).parameters
        given = {n: options.pop(n) for n in [*options] if n not in of_megatron}
        how = options_of("FP8FlowMoELayer", given, **OF_CONFIG)
        check_config(config, groups, refused_with(how.precision) | REFUSED_BY_LAYER)
        activation_of(config)
        if config.moe_shared_expert_overlap and getattr(config, "cuda_graph_impl", "none") != "none":
            raise NotImplementedError(
                f"cuda_graph_impl: got {config.cuda_graph_impl!r} with moe_shared_expert_overlap; wanted "
                "'none', or moe_shared_expert_overlap=False"
            )
        # `_set_recipe` sets the recipe, which depends on the layer's number
        experts = ModuleSpec(module=FP8FlowExperts, params={**given, "recipe": "bf16", "save": "bf16"})
        if submodules is None:
            submodules = MoESubmodules(experts=experts)
        submodules = dataclasses.replace(submodules, experts=experts)
        # `MoELayer` creates a dispatcher of this type; allgather needs neither streams nor DeepEP
        dispatcher_type, config.moe_token_dispatcher_type = config.moe_token_dispatcher_type, "allgather"
        try:
            super().__init__(config, submodules, layer_number, groups, **options)
        finally:
            config.moe_token_dispatcher_type = dispatcher_type
        self._how = how
        self._set_recipe()
        self.token_dispatcher = _Dispatcher(config, groups)
        if self.shared_experts is not None and config.moe_shared_expert_overlap:
            self.token_dispatcher.set_shared_experts(self.shared_experts)
        group = _group_of_parts(groups)
        self._comm = ProcessGroup(group) if group.size() > 1 else None
        if self._comm is not None:
            _refuse_captured_experts(config)

    def set_layer_number(self, layer_number: int) -> None:
        """Set the number of the layer, by which ``first_last_layers_bf16`` selects the bf16 recipe.

        Parameters
        ----------
        layer_number : int
            Number of the layer in the model, from 1.
        """
        super().set_layer_number(layer_number)
        self._set_recipe()

    def _set_recipe(self) -> None:
        number = 0 if self.layer_number is None or getattr(self, "is_mtp_layer", False) else self.layer_number
        bf16 = is_first_last_bf16_layer(self.config, number - 1)  # never for a number of 0
        recipe, save = ("bf16", "bf16") if bf16 else (self._how.recipe, self._how.save)
        self.experts._options = dataclasses.replace(self.experts._options, recipe=recipe, save=save)

    def routed_experts_compute(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Dispatch the tokens, compute their experts and combine the outputs.

        Parameters
        ----------
        hidden_states : Tensor, floating point, [T, H]
            Tokens.
        probs : Tensor, floating point, [T, k]
            Factors of the experts' outputs.

        Returns
        -------
        rows : Tensor, [T, H]
            The outputs.
        bias : None
            Always None.
        """
        rows, ids, probs = self.token_dispatcher.dispatch_postprocess(hidden_states, probs)
        # a call of the module, whose hooks wait for weights that ranks gather (overlap_param_gather)
        return self.experts(rows, None, probs, topk_ids=ids, comm=self._comm)  # type: ignore[no-any-return]


def _group_of_parts(groups: Any) -> Any:
    """The group over whose ranks, in their order, the experts' parts are distributed."""
    ranks = groups.expt_tp.size()
    if ranks == 1:
        return groups.ep
    of_ep, of_both = (torch.distributed.get_process_group_ranks(g) for g in (groups.ep, groups.tp_ep))
    if of_ep != of_both[groups.expt_tp.rank() :: ranks]:
        raise NotImplementedError(
            f"pg_collection: got the ranks {of_ep} as ep and {of_both} as tp_ep; wanted the "
            'expert-tensor-parallel ranks next to each other in tp_ep, as with order="tp-cp-ep-dp-pp"'
        )
    return groups.tp_ep


def _refuse_captured_experts(config: Any) -> None:
    implementation = getattr(config, "cuda_graph_impl", "none")
    scope = getattr(config, "cuda_graph_modules", None) or getattr(config, "cuda_graph_scope", None) or ()
    names = {scope} if isinstance(scope, str) else {getattr(s, "name", str(s)) for s in scope}
    if implementation != "none" and (not names or names & {"full", "moe", "full_iteration"}):
        raise NotImplementedError(
            f"cuda_graph_impl: got {implementation!r} around the experts with "
            f"expert_model_parallel_size={config.expert_model_parallel_size} and "
            f"expert_tensor_parallel_size={config.expert_tensor_parallel_size}; wanted 'none', or a scope "
            "without the experts, such as moe_router"
        )


# ---------------------------------------------------------------- layer specs


def use_fp8_flow(
    spec: Any,
    *,
    dispatcher: str = "fp8moe",
    pg_collection: Any = None,
    **options: Unpack[ArgumentsBesideRecompute],
) -> Any:
    """Copy a layer spec, with every `MoELayer` replaced by this library's layer.

    Parameters
    ----------
    spec : ModuleSpec, dataclass of submodules, functools.partial, or list or tuple of them
        Result of `get_gpt_layer_local_spec`, `get_gpt_decoder_block_spec` and similar functions, or
        `hybrid_stack_spec` (`mamba_stack_spec` before 0.17).
    dispatcher : "fp8moe" or "megatron"
        "fp8moe": `FP8FlowMoELayer`, which sends rows in FP8. "megatron": Megatron's own layer and dispatcher
        (``moe_token_dispatcher_type``), with `FP8FlowExperts`.
    pg_collection : ProcessGroupCollection or None
        Process groups of the model, if it does not use the default ones. Megatron-Core 0.16 passes them only
        to MoE layers of its own classes, so `FP8FlowMoELayer` would use the default groups; with later
        versions this argument is not needed.
    **options : recipe, save, backend, num_sms, weight_copies
        As in `fp8moe.torch.moe_experts`.

    Returns
    -------
    ModuleSpec, or the type of ``spec``
        The copy.

    Raises
    ------
    ValueError
        For a spec without a `MoELayer`, or an invalid recipe, backend, num_sms, weight_copies or dispatcher.

    Examples
    --------
    >>> import warnings
    >>> warnings.simplefilter("ignore")
    >>> from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    >>> from fp8moe import megatron
    >>> spec = get_gpt_layer_local_spec(num_experts=4)
    >>> megatron.use_fp8_flow([spec, spec], recipe="fp8_flow")[0] is spec
    False
    """
    options = {"recipe": options_of("use_fp8_flow", options, **OF_CONFIG).recipe, **options}
    checks.choice("dispatcher", dispatcher, ("fp8moe", "megatron"))
    replaced = []

    def layer(submodules: Any, build: Callable[[Any, dict[str, Any]], Any]) -> Any:
        """``build`` creates the spec of a class with the given submodules and options."""
        replaced.append(1)
        if dispatcher == "fp8moe":
            groups = {} if pg_collection is None else {"pg_collection": pg_collection}
            return build(FP8FlowMoELayer, {"submodules": submodules, **options, **groups})
        experts = ModuleSpec(module=FP8FlowExperts, params=dict(options))
        return build(MoELayer, {"submodules": dataclasses.replace(submodules, experts=experts)})

    def replace_layers(part: Any) -> Any:
        if isinstance(part, ModuleSpec):
            if part.module is MoELayer:

                def spec_of(module: Any, keywords: dict[str, Any]) -> ModuleSpec:
                    submodules = keywords.pop("submodules")
                    params = {**part.params, **keywords}
                    return dataclasses.replace(part, module=module, params=params, submodules=submodules)

                return layer(part.submodules, spec_of)
            return dataclasses.replace(part, submodules=replace_layers(part.submodules))
        if isinstance(part, functools.partial):
            if part.func is MoELayer:
                other_keywords = {k: v for k, v in part.keywords.items() if k != "submodules"}
                return layer(
                    part.keywords["submodules"],
                    lambda module, new: functools.partial(module, *part.args, **other_keywords, **new),
                )
            keywords = {name: replace_layers(value) for name, value in part.keywords.items()}
            return functools.partial(part.func, *map(replace_layers, part.args), **keywords)
        if isinstance(part, (list, tuple)) and type(part) in (list, tuple):
            return type(part)(map(replace_layers, part))
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            new = copy.copy(part)
            for field in dataclasses.fields(part):
                setattr(new, field.name, replace_layers(getattr(part, field.name)))
            return new
        return part

    copied = replace_layers(spec)
    if not replaced:
        raise ValueError("spec: got one without a MoELayer; wanted a layer spec made with num_experts")
    return copied
