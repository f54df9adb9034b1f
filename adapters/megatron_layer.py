"""The FP8 flow as Megatron-Core's MoE layer: a subclass of its `MoELayer`, and experts for its dispatchers.

Megatron's router chooses, its shared experts, auxiliary losses and recompute stay as they are; between them
rows travel, are permuted and multiplied by this library. `fp8moe.adapters.megatron` is where users find it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from fp8moe import checks
from fp8moe.activation import Activation
from fp8moe.adapters import torch_ops
from fp8moe.adapters.torch_distributed import ProcessGroup
from fp8moe.grouped_gemm import BACKENDS, check_limit
from fp8moe.moe import RECIPES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron-Core's, of optional packages that are missing
    from megatron.core.activations import quick_gelu
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
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
    from megatron.core.transformer.utils import make_sharded_object_for_checkpoint

__all__ = ["FP8FlowExperts", "FP8FlowMoELayer", "use_fp8_flow"]

#: `TransformerConfig`'s fields that these experts do not implement, each with its values that are accepted
REFUSED = {
    "add_bias_linear": (False,),
    "moe_apply_probs_on_input": (False,),
    "moe_latent_size": (None,),
    "activation_func_fp8_input_store": (False,),
    "use_te_activation_func": (False,),
    "delay_wgrad_compute": (False,),
    "overlap_moe_expert_parallel_comm": (False,),
    "overlap_dispatch_backward_with_experts_wgrad": (False,),
    "moe_mlp_glu_interleave_size": (None, 0, 1),
    "moe_single_grouped_weight": (False,),
    "moe_paged_stash": (False,),
    "moe_ncclep_zero_copy": (False,),
    "transformer_impl": ("local", "transformer_engine"),
}
#: the same for the layer with this library's dispatch
REFUSED_BY_LAYER = {
    "moe_shared_expert_overlap": (False,),
    "moe_pad_expert_input_to_capacity": (False,),
    "moe_router_padding_for_quantization": (False,),
    "moe_router_padding_for_fp8": (False, None),
    "moe_expert_rank_capacity_factor": (None,),
}


def check_config(config: Any, pg_collection: Any, refused: dict[str, tuple[Any, ...]]) -> None:
    """NotImplementedError, by name, for what would otherwise be ignored."""
    for name, plain in refused.items():
        value = getattr(config, name, plain[0])
        if value not in plain:
            wanted = " or ".join(map(repr, plain))
            raise NotImplementedError(f"{name}: got {value!r}; wanted {wanted} for FP8FlowMoELayer's experts")
    if getattr(config, "fine_grained_activation_offloading", False):
        offloaded = {"expert_fc1", "moe_act"} & set(config.offload_modules or ())
        if offloaded:
            raise NotImplementedError(
                f"offload_modules: got {sorted(offloaded)}; wanted neither, whose tensors these experts do "
                "not have"
            )
    tensor_parallel = pg_collection.expt_tp.size()
    if tensor_parallel > 1:
        raise NotImplementedError(
            f"expert_tensor_parallel_size: got {tensor_parallel}; wanted 1, each expert whole on its rank"
        )


def activation_of(config: Any) -> Activation:
    """What the experts compute between their products, of a `TransformerConfig`.

    Raises NotImplementedError for activations other than SwiGLU, GeGLU and the gated quick GELU.
    """
    function = config.activation_func
    options: dict[str, Any] = {
        "clamp": getattr(config, "activation_func_clamp_value", None),
        "linear_offset": getattr(config, "glu_linear_offset", 0.0),
    }
    if config.gated_linear_unit and function is silu:
        return Activation("swiglu", **options)
    if config.gated_linear_unit and function is quick_gelu:
        return Activation("swiglu", alpha=1.702, **options)
    if config.gated_linear_unit and function is gelu:
        return Activation("geglu", **options)
    name = getattr(function, "__name__", repr(function))
    raise NotImplementedError(
        f"activation_func: got {name} with gated_linear_unit={config.gated_linear_unit}; wanted silu, gelu "
        "or quick_gelu with gated_linear_unit=True"
    )


class FP8FlowExperts(MegatronModule):  # type: ignore[misc]
    """Experts in place of Megatron's `SequentialMLP`, `GroupedMLP` or `TEGroupedMLP`.

    They work after any of its dispatchers (allgather, alltoall, DeepEP, HybridEP), whose rows are permuted
    already. Bias, expert tensor parallelism, other activations, and what else these experts do not do, are
    refused by name when the module is made.

    Parameters
    ----------
    num_local_experts : int
        Of this rank.
    config : TransformerConfig
        ``recompute_modules=["moe_act"]`` recomputes the first product with the activation.
    submodules : None
        As Megatron makes experts; these have none.
    pg_collection : ProcessGroupCollection or None
        The model's; None: Megatron's default groups.
    name : str or None
        As Megatron makes experts; not used.
    recipe : "fp8_flow", "fp8_blockwise" or "bf16"
        As of `fp8moe.moe_forward`.
    backend : "wgmma", "mma", "cublas", "plain" or None
        As of `fp8moe.adapters.torch_functional.moe_experts`.
    num_sms : int or None
        As of `fp8moe.adapters.torch_functional.moe_experts`.

    Notes
    -----
    weight1 [E, 2F, H], gates before ups, and weight2 [E, H, F], of this rank's experts, in ``params_dtype``.
    A distributed checkpoint has them under the keys, in the shapes and pieces of `SequentialMLP`, so that
    either loads the other's, into another number of ranks too. They are initialised as that initialises its
    own, in the same order. In the FP8 recipes gradients are added to ``main_grad`` by the products.

    Examples
    --------
    >>> import warnings
    >>> warnings.simplefilter("ignore")
    >>> from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    >>> from fp8moe.adapters import megatron
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
        *,
        recipe: str = "fp8_flow",
        backend: str | None = None,
        num_sms: int | None = None,
    ):
        super().__init__(config=config)
        checks.choice("recipe", recipe, RECIPES)
        self.backend, self.num_sms = checks.choice("backend", backend, BACKENDS), check_limit(num_sms)
        groups = get_default_pg_collection() if pg_collection is None else pg_collection
        check_config(config, groups, REFUSED)
        self.recipe, self.activation = recipe, activation_of(config)
        modules = config.recompute_modules or () if config.recompute_granularity == "selective" else ()
        self.recompute = "moe_expert" if "moe_act" in modules else None
        self.num_local_experts = num_local_experts
        self.ep_group, self.dp_group = groups.ep, groups.expt_dp
        hidden, ffn = config.hidden_size, config.moe_ffn_hidden_size
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        place: dict[str, Any] = {"dtype": config.params_dtype, "device": device}
        self.weight1 = torch.nn.Parameter(torch.empty(num_local_experts, 2 * ffn, hidden, **place))
        self.weight2 = torch.nn.Parameter(torch.empty(num_local_experts, hidden, ffn, **place))
        set_tensor_model_parallel_attributes(self.weight1, True, 1, 2)
        set_tensor_model_parallel_attributes(self.weight2, True, 2, 1)
        shared = self.ep_group.size() == 1 and groups.tp.size() == 1
        for weight in (self.weight1, self.weight2):
            # expert data parallelism averages it, among the ranks that hold the same experts
            weight.allreduce = shared  # type: ignore[attr-defined]
        if config.perform_initialization:
            self._initialize()
        self.register_load_state_dict_pre_hook(_without_extra_state)

    def _initialize(self) -> None:
        pair = (self.weight1, self.config.init_method), (self.weight2, self.config.output_layer_init_method)
        with torch.no_grad():
            for expert in range(self.num_local_experts):
                for weight, init_method in pair:
                    if self.config.use_cpu_initialization:
                        drawn = torch.empty(weight.shape[1:], dtype=torch.float32)
                        init_method(drawn)
                        weight[expert].copy_(drawn)
                    else:
                        with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                            init_method(weight[expert])

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Multiply rows that Megatron's dispatcher has permuted.

        Parameters
        ----------
        permuted_local_hidden_states : Tensor, floating point, [N, H]
            Rows in expert order.
        tokens_per_expert : Tensor, int32 or int64, [E]
            On the CPU they are copied to the rows' device, which does not wait.
        permuted_probs : Tensor, floating point, [N]
            Factor of each row's result.

        Returns
        -------
        rows : Tensor, [N, H]
            The results.
        bias : None
            There is none.

        Raises
        ------
        TypeError, ValueError
            As `fp8moe.adapters.torch_functional.moe_experts_permuted`.
        """
        counts = tokens_per_expert.to(permuted_local_hidden_states.device, non_blocking=True)
        y = torch_ops.moe_experts_permuted(
            permuted_local_hidden_states,
            self.weight1,
            self.weight2,
            counts,
            permuted_probs,
            **self._options(),
        )
        return y, None

    def routed(self, x: Tensor, topk_ids: Tensor, topk_probs: Tensor, comm: Any) -> Tensor:
        """Multiply tokens that are on their own ranks.

        Parameters
        ----------
        x : Tensor, floating point, [T, H]
            Tokens.
        topk_ids : Tensor, int64, [T, k]
            Their experts, of all ranks.
        topk_probs : Tensor, floating point, [T, k]
            Factors of the experts' results.
        comm : Comm or None
            What dispatches and combines; None for one rank.

        Returns
        -------
        Tensor, [T, H]
            In x's dtype.

        Raises
        ------
        TypeError, ValueError
            As `fp8moe.adapters.torch_functional.moe_experts`.
        """
        return torch_ops.moe_experts(  # type: ignore[no-any-return]
            x, *self._weights(), topk_ids, topk_probs, comm=comm, **self._options()
        )

    def _weights(self) -> tuple[Tensor, Tensor]:
        if self.recipe != "bf16":
            return self.weight1, self.weight2
        # without ``main_grad``: torch's grouped product adds to none, and the wrapper's hook does it
        return self.weight1.view_as(self.weight1), self.weight2.view_as(self.weight2)

    def _options(self) -> dict[str, Any]:
        options = {"recipe": self.recipe, "recompute": self.recompute, "activation": self.activation}
        return {**options, "backend": self.backend, "num_sms": self.num_sms}

    def backward_dw(self) -> None:
        """Do nothing: delay_wgrad_compute is refused."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Describe the weights for a distributed checkpoint, as `SequentialMLP` does its own.

        Parameters
        ----------
        prefix : str
            Of the keys.
        sharded_offsets : tuple
            Of the layers around.
        metadata : dict or None
            Megatron's, of the checkpoint's format.

        Returns
        -------
        dict of str to Any
            With keys, global shapes, offsets and replicas of `SequentialMLP`: a piece an expert, two for fc1.

        Raises
        ------
        NotImplementedError
            Where it is saved, for a format of flattened tensors.
        """
        singleton = bool((metadata or {}).get("singleton_local_shards", False))
        rank, ranks = self.ep_group.rank(), self.ep_group.size()
        places = _Places(tuple(sharded_offsets), rank, ranks, self.num_local_experts, singleton)
        replica = (0, 0, self.dp_group.rank())
        state: dict[str, Any] = {}
        for weight, layer, parts in ((self.weight1, "linear_fc1", 2), (self.weight2, "linear_fc2", 1)):
            build = functools.partial(_pieces, places=places, layer=layer, parts=parts)
            merge = functools.partial(_merged, parts=parts)
            name = "weight1" if parts == 2 else "weight2"
            state[prefix + name] = ShardedTensorFactory(
                f"{prefix}experts.{layer}.weight", weight, build, merge, replica
            )
            for expert in range(self.num_local_experts):
                # without content, as every module with a get_extra_state has one in a checkpoint
                key = f"{prefix}experts.{places.number(expert)}{layer}._extra_state"
                state[f"{prefix}expert{places.first + expert}.{layer}._extra_state"] = (
                    make_sharded_object_for_checkpoint(None, key, places.offsets(expert), replica)
                )
        return state


class _Places:
    """Where the local experts stand in a checkpoint."""

    def __init__(self, offsets: tuple[Any, ...], rank: int, ranks: int, experts: int, singleton: bool):
        self.outer, self.singleton = offsets, singleton
        self.first, self.total = rank * experts, ranks * experts

    def number(self, expert: int) -> str:
        """In keys that are an expert's own."""
        return f"{self.first + expert}." if self.singleton else ""

    def offsets(self, expert: int) -> tuple[Any, ...]:
        if self.singleton:
            return self.outer
        return (*self.outer, (len(self.outer), self.first + expert, self.total))


@torch.no_grad()
def _pieces(
    key: str,
    weights: Tensor,
    replica_id: Any,
    flattened_range: Any,
    *,
    places: _Places,
    layer: str,
    parts: int,
) -> list[ShardedTensor]:
    """Each expert's ``parts`` of a weight, or of the optimizer's state of one. key: as the factory has it,
    but for what Megatron has changed in front since."""
    if flattened_range is not None:
        raise NotImplementedError(
            "flattened_range: got one; wanted None; use a checkpoint format with whole tensors "
            '("fully_reshardable" or "dp_reshardable")'
        )
    suffix = f"{layer}.weight"
    before = key.removesuffix(suffix)
    pieces = []
    for expert, weight in enumerate(weights):
        offsets = places.offsets(expert)
        for part, piece in enumerate(weight.chunk(parts)):
            name, where = before + places.number(expert) + suffix, offsets
            if parts == 2 and places.singleton:
                name += ("_w", "_v")[part]
            elif parts == 2:
                where = (*offsets, (len(offsets), part, 2))
            pieces.append(
                ShardedTensor.from_rank_offsets(
                    name, piece, *where, replica_id=replica_id, prepend_axis_num=len(offsets)
                )
            )
    return pieces


@torch.no_grad()
def _merged(pieces: list[Tensor], *, parts: int) -> Tensor:
    return torch.stack([torch.cat(pieces[i : i + parts]) for i in range(0, len(pieces), parts)])


def _without_extra_state(_: Any, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    for key in [k for k in state_dict if k.startswith(prefix) and k.endswith("._extra_state")]:
        del state_dict[key]


class _Dispatcher(MoETokenDispatcher):  # type: ignore[misc]
    """Of tokens that stay where they are until the experts' product takes them."""

    def __init__(self, config: Any, pg_collection: Any):
        super().__init__(config=config, pg_collection=pg_collection)
        self.topk_ids: Tensor | None = None
        self._shape = torch.Size()
        # outputs of a CUDA graph of the router alone
        self.cudagraph_attrs = ["topk_ids"]

    def dispatch_preprocess(
        self, tokens: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        self._shape = tokens.shape
        self.topk_ids, topk_probs = chosen(routing_map, probs, self.config.moe_router_topk)
        return tokens.reshape(-1, tokens.shape[-1]), topk_probs

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        return hidden_states, probs

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Any, Tensor]:
        return hidden_states, self.topk_ids, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        self.topk_ids = None
        return hidden_states.view(self._shape)


def chosen(routing_map: Tensor, probs: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """(ids [T, topk], probabilities) of a mask and probabilities [T, E], at most ``topk`` a token; id -1 with
    probability 0 where there are fewer, as for dropped tokens."""
    there = torch.where(routing_map.bool(), probs, -1)  # a probability of 0 is a choice
    topk_probs, ids = there.topk(topk, dim=1, sorted=False)
    none = topk_probs < 0
    return torch.where(none, -1, ids), torch.where(none, 0, topk_probs)


class FP8FlowMoELayer(MoELayer):  # type: ignore[misc]
    """Megatron's `MoELayer`, whose dispatch, permutation, experts and combine are this library's.

    With "fp8_flow" rows travel in FP8, and two casts are all there are.

    Parameters
    ----------
    config : TransformerConfig
        The model's.
    submodules : MoESubmodules or None
        As of `MoELayer`; their experts are replaced.
    layer_number : int or None
        As of `MoELayer`.
    pg_collection : ProcessGroupCollection or None
        The model's; None: Megatron's default groups.
    recipe : "fp8_flow", "fp8_blockwise" or "bf16"
        As of `fp8moe.moe_forward`.
    backend : "wgmma", "mma", "cublas", "plain" or None
        As of `fp8moe.adapters.torch_functional.moe_experts`.
    num_sms : int or None
        As of `fp8moe.adapters.torch_functional.moe_experts`.
    **options : Any
        Of `MoELayer`.

    Notes
    -----
    It is made as `MoELayer` is, by a layer spec (`use_fp8_flow` puts it there), or directly. config's
    ``moe_token_dispatcher_type`` does not matter. Router, shared experts, auxiliary losses, capacity
    (dropped tokens), ``recompute_modules`` and expert parallelism are those of the config; the experts are
    `FP8FlowExperts`, whose page states how they are saved and what is refused. The layer also refuses
    ``moe_shared_expert_overlap``, padding of the router's choice, and CUDA graphs around the experts where
    expert_model_parallel_size > 1, since each forward reads counts of rows then.

    Examples
    --------
    >>> import warnings
    >>> warnings.simplefilter("ignore")
    >>> from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    >>> from fp8moe.adapters import megatron
    >>> mlp = megatron.use_fp8_flow(get_gpt_layer_local_spec(num_experts=4)).submodules.mlp
    >>> getattr(mlp, "module", None) or mlp.func  # a spec, or a builder
    <class 'fp8moe.adapters.megatron_layer.FP8FlowMoELayer'>
    """

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        *,
        recipe: str = "fp8_flow",
        backend: str | None = None,
        num_sms: int | None = None,
        **options: Any,
    ):
        groups = get_default_pg_collection() if pg_collection is None else pg_collection
        check_config(config, groups, REFUSED | REFUSED_BY_LAYER)
        checks.choice("recipe", recipe, RECIPES)
        checks.choice("backend", backend, BACKENDS)
        num_sms = check_limit(num_sms)
        activation_of(config)
        if submodules is None:
            submodules = MoESubmodules(experts=FP8FlowExperts)
        submodules = dataclasses.replace(submodules, experts=FP8FlowExperts)
        # `MoELayer` makes a dispatcher of this type; the simplest needs neither streams nor DeepEP
        before, config.moe_token_dispatcher_type = config.moe_token_dispatcher_type, "allgather"
        try:
            super().__init__(config, submodules, layer_number, groups, **options)
        finally:
            config.moe_token_dispatcher_type = before
        self.experts.recipe, self.experts.backend, self.experts.num_sms = recipe, backend, num_sms
        self.token_dispatcher = _Dispatcher(config, groups)
        self._comm = ProcessGroup(self.ep_group) if self.ep_group.size() > 1 else None
        if self._comm is not None:
            _refuse_captured_experts(config)

    def routed_experts_compute(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Dispatch, multiply and combine.

        Parameters
        ----------
        hidden_states : Tensor, floating point, [T, H]
            Tokens.
        probs : Tensor, floating point, [T, k]
            Factors of the experts' results.

        Returns
        -------
        rows : Tensor, [T, H]
            The results.
        bias : None
            There is none.
        """
        rows, ids, probs = self.token_dispatcher.dispatch_postprocess(hidden_states, probs)
        return self.experts.routed(rows, ids, probs, self._comm), None


def _refuse_captured_experts(config: Any) -> None:
    implementation = getattr(config, "cuda_graph_impl", "none")
    scope = getattr(config, "cuda_graph_modules", None) or getattr(config, "cuda_graph_scope", None) or ()
    names = {scope} if isinstance(scope, str) else {getattr(s, "name", str(s)) for s in scope}
    if implementation != "none" and (not names or names & {"full", "moe", "full_iteration"}):
        raise NotImplementedError(
            f"cuda_graph_impl: got {implementation!r} around the experts with "
            f"expert_model_parallel_size={config.expert_model_parallel_size}; wanted 'none', or a scope "
            "without them, as moe_router"
        )


# ---------------------------------------------------------------- layer specs


def use_fp8_flow(
    spec: Any,
    *,
    recipe: str = "fp8_flow",
    backend: str | None = None,
    num_sms: int | None = None,
    dispatcher: str = "fp8moe",
    pg_collection: Any = None,
) -> Any:
    """Copy a layer spec, with every `MoELayer` replaced by this library's.

    Parameters
    ----------
    spec : ModuleSpec, dataclass of submodules, functools.partial, or list or tuple of them
        What `get_gpt_layer_local_spec`, `get_gpt_decoder_block_spec` and their like return, or
        `hybrid_stack_spec` (`mamba_stack_spec` before 0.17).
    recipe : "fp8_flow", "fp8_blockwise" or "bf16"
        As of `fp8moe.moe_forward`.
    backend : "wgmma", "mma", "cublas", "plain" or None
        As of `fp8moe.adapters.torch_functional.moe_experts`.
    num_sms : int or None
        As of `fp8moe.adapters.torch_functional.moe_experts`.
    dispatcher : "fp8moe" or "megatron"
        "fp8moe": `FP8FlowMoELayer`, whose rows travel in FP8. "megatron": Megatron's own layer and dispatcher
        (``moe_token_dispatcher_type``), with `FP8FlowExperts` after it.
    pg_collection : ProcessGroupCollection or None
        The model's, where it has one of its own. Megatron-Core 0.16 hands that to MoE layers of its own
        classes only, so `FP8FlowMoELayer` would use the default groups; later ones need none here.

    Returns
    -------
    ModuleSpec, or what ``spec`` is
        The copy.

    Raises
    ------
    ValueError
        For a spec without a `MoELayer`, and for a recipe, backend, num_sms or dispatcher that there is not.

    Examples
    --------
    >>> import warnings
    >>> warnings.simplefilter("ignore")
    >>> from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    >>> from fp8moe.adapters import megatron
    >>> spec = get_gpt_layer_local_spec(num_experts=4)
    >>> megatron.use_fp8_flow([spec, spec], recipe="fp8_flow")[0] is spec
    False
    """
    checks.choice("recipe", recipe, RECIPES)
    checks.choice("backend", backend, BACKENDS)
    checks.choice("dispatcher", dispatcher, ("fp8moe", "megatron"))
    options = {"recipe": recipe, "backend": backend, "num_sms": check_limit(num_sms)}
    replaced = []

    def layer(submodules: Any, build: Callable[[Any, dict[str, Any]], Any]) -> Any:
        """``build`` makes the spec of a class and its submodules."""
        replaced.append(1)
        if dispatcher == "fp8moe":
            groups = {} if pg_collection is None else {"pg_collection": pg_collection}
            return build(FP8FlowMoELayer, {"submodules": submodules, **options, **groups})
        experts = ModuleSpec(module=FP8FlowExperts, params=dict(options))
        return build(MoELayer, {"submodules": dataclasses.replace(submodules, experts=experts)})

    def changed(part: Any) -> Any:
        if isinstance(part, ModuleSpec):
            if part.module is MoELayer:

                def spec_of(module: Any, given: dict[str, Any]) -> ModuleSpec:
                    submodules = given.pop("submodules")
                    params = {**part.params, **given}
                    return dataclasses.replace(part, module=module, params=params, submodules=submodules)

                return layer(part.submodules, spec_of)
            return dataclasses.replace(part, submodules=changed(part.submodules))
        if isinstance(part, functools.partial):
            if part.func is MoELayer:
                given = {k: v for k, v in part.keywords.items() if k != "submodules"}
                return layer(
                    part.keywords["submodules"],
                    lambda module, new: functools.partial(module, *part.args, **given, **new),
                )
            keywords = {name: changed(value) for name, value in part.keywords.items()}
            return functools.partial(part.func, *map(changed, part.args), **keywords)
        if isinstance(part, (list, tuple)) and type(part) in (list, tuple):
            return type(part)(map(changed, part))
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            new = copy.copy(part)
            for field in dataclasses.fields(part):
                setattr(new, field.name, changed(getattr(part, field.name)))
            return new
        return part

    copied = changed(spec)
    if not replaced:
        raise ValueError("spec: got one without a MoELayer; wanted a layer spec made with num_experts")
    return copied
