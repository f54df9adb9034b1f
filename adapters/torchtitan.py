"""torchtitan's routed experts with this library: dispatch, experts and combine in one module.

    from fp8moe.torchtitan import FP8MoEConverter
    model_registry("30B-A3B", converters=[FP8MoEConverter.Config(recipe="fp8_flow")])

Parameters keep their names, shapes and dtypes (``inner_experts.w1_EFD``, ``w2_EDF``, ``w3_EFD``; gpt-oss's
``mlp1_weight_EGD`` and so on), so checkpoints, FSDP and optimizers need no changes. Every forward quantises
the current weights; in torchtitan's ``Trainer``, the micro-batches of a step share the codes of weights that
FSDP does not shard (of those that it does, `fp8moe.torch.weights_unchanged` would hold whole copies). For
experts of other classes than torchtitan's gated ones and gpt-oss's the converter raises NotImplementedError.
With torchtitan's expert parallelism, rows are sent by `fp8moe.expert_parallel` over its mesh, and the experts
still compile as one graph; the host reads the row counts, so a dispatcher's options for CUDA graphs raise
NotImplementedError. w1 and w3, and their gradients, are never concatenated; gpt-oss's gates and ups, which
alternate in memory, are copied in every forward.

Tested with torchtitan 0.3 and its backends "partial_dtensor" and "spmd_types".
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from fp8moe.adapters import needs

with needs("torchtitan"):
    import torch
    from torch import Tensor
    from torch.distributed.tensor import DTensor
    from torchtitan.components.quantization import QuantizationConverter
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, ScaleBiasForward

from fp8moe.activation import SWIGLU, Activation
from fp8moe.adapters.torch.distributed.process_group import ProcessGroup
from fp8moe.adapters.torch.fsdp import gather_fp8
from fp8moe.adapters.torch.functional import moe_experts
from fp8moe.adapters.torch.gathered import keep_masters
from fp8moe.adapters.torch.operands import gates_before_ups, gradient_of_gates_before_ups
from fp8moe.adapters.torch.operation import refuse_codes
from fp8moe.adapters.torch.sharding import local_of
from fp8moe.adapters.torch.weights import FP8Weights, Holder, codes_of, in_words, weights_unchanged
from fp8moe.layer.options import LayerFields, LayerOptions
from fp8moe.runtime import checks

__all__ = ["FP8MoEConverter", "FP8RoutedExperts"]

#: fields of `FP8RoutedExperts.Config` and of the converter's config that are passed to `moe_experts`
OPTIONS = tuple(field.name for field in fields(LayerFields))
#: the parameters of each class of experts whose forward `FP8RoutedExperts` computes
PARAMETERS = {
    GroupedExperts: ("w1_EFD", "w3_EFD", "w2_EDF"),
    GptOssGroupedExperts: ("mlp1_weight_EGD", "mlp1_bias_EG", "mlp2_weight_EDF", "mlp2_bias_ED"),
}
_EXPERTS = " or ".join(c.__name__ for c in PARAMETERS)


class FP8RoutedExperts(RoutedExperts):
    """torchtitan's `RoutedExperts`, computed by a recipe of `fp8moe.moe_forward`.

    With expert parallelism, rows are sent over the dispatcher's mesh, in FP8 with "fp8_flow"; otherwise the
    dispatcher is not used.

    Parameters
    ----------
    config : FP8RoutedExperts.Config
        Fields of `RoutedExperts.Config`; ``recipe``, ``recompute``, ``save``, ``backend``, ``num_sms`` and
        ``weight_copies`` as in `fp8moe.torch.moe_experts`; ``gather_fp8``, whether ``fully_shard`` gathers
        the weights as FP8 codes, as by `fp8moe.torch.gather_fp8`.

    Raises
    ------
    NotImplementedError
        For inner experts of another class than `GroupedExperts` and `GptOssGroupedExperts`, as of another
        converter; for a dispatcher that does not synchronise with the host (``cudagraphable``,
        ``non_blocking_capacity_factor``).

    Examples
    --------
    >>> import torch
    >>> from torchtitan.models.common.moe import GroupedExperts
    >>> from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
    >>> from fp8moe.torchtitan import FP8RoutedExperts
    >>> experts = GroupedExperts.Config(dim=64, hidden_dim=48, num_experts=4)
    >>> dispatcher = LocalTokenDispatcher.Config(num_experts=4, top_k=2)
    >>> layer = FP8RoutedExperts.Config(inner_experts=experts, token_dispatcher=dispatcher).build()
    >>> ids, scores = torch.tensor([[[0, 3], [1, 2]]]), torch.ones(1, 2, 2)
    >>> layer(torch.ones(1, 2, 64), scores, ids, torch.ones(4, dtype=torch.int64)).shape
    torch.Size([1, 2, 64])
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config, LayerFields):
        gather_fp8: bool = False
        """Whether ``fully_shard`` gathers the weights as FP8 codes, as by `fp8moe.torch.gather_fp8`."""

    def __init__(self, config: Config):
        _refuse_unsynchronised(config.token_dispatcher)  # an override may have replaced it
        super().__init__(config)
        if type(self.inner_experts) not in PARAMETERS:  # whose forward this class does not call
            raise NotImplementedError(
                f"inner_experts: got {type(self.inner_experts).__name__}; wanted {_EXPERTS}; leave the other "
                "converter or override of the experts out"
            )
        self._names = PARAMETERS[type(self.inner_experts)]  # here: fully_shard makes a class of its own
        self._options = _options_of(config)
        self.inner_experts.register_load_state_dict_pre_hook(refuse_codes)
        self._comm: ProcessGroup | None = None
        self._tensor_parallel_ranks = 1  # that have a part of the width, and whose outputs are added
        self._shapes = self._local_shapes()
        self._fp8_weights = FP8Weights(self, _OfRoutedExperts)
        self._gathers_fp8 = checks.flag("gather_fp8", config.gather_fp8)
        if self._gathers_fp8:
            gather_fp8(self)
        _shares_within_steps()

    def _local_shapes(self) -> dict[str, torch.Size]:
        return {name: local_of(getattr(self.inner_experts, name)).shape for name in self._names}

    def forward(
        self, x: Tensor, topk_scores: Tensor, topk_expert_ids: Tensor, num_local_tokens_per_expert: Tensor
    ) -> Tensor:
        """Dispatch the tokens, compute their experts and combine the outputs.

        Parameters
        ----------
        x : Tensor, floating point, [B, L, D] or [T, D]
            Tokens.
        topk_scores : Tensor, floating point, [B, L, K] or [T, K]
            Factors of the experts' outputs.
        topk_expert_ids : Tensor, int64, [B, L, K] or [T, K]
            Expert ids of each token.
        num_local_tokens_per_expert : Tensor, [E]
            Not used.

        Returns
        -------
        Tensor, [B, L, D] or [T, D]
            The outputs in x's dtype and shape.

        Raises
        ------
        TypeError, ValueError
            As in `fp8moe.torch.moe_experts`.
        RuntimeError
            If this rank does not have the weights of all its experts, as with ``fully_shard`` on
            ``inner_experts`` alone, which are not called.
        """
        del num_local_tokens_per_expert
        experts, name = self.inner_experts, self._names[0]
        tensors = {n: local_of(getattr(experts, n)) for n in self._names}
        first, wanted = tensors[name], self._shapes[name]
        if first.shape != wanted:  # tokens of the missing experts would be taken for those without one
            raise RuntimeError(
                f"{name}: got shape {list(first.shape)} on a rank; wanted {list(wanted)}; use "
                "fully_shard on FP8RoutedExperts or a module around it, not on inner_experts: it gathers "
                "weights for calls of the module that it was given"
            )
        options = self._options.arguments | {"comm": self._comm}
        biases = [t for n, t in tensors.items() if "bias" in n]
        masters = [t for n, t in tensors.items() if "bias" not in n]
        codes = options["fp8_weights"] = codes_of(self, masters, (x, topk_scores, *biases[:1]))
        own = _operands_of(masters, gates_before_ups if codes is None else gradient_of_gates_before_ups)
        if type(experts) is not GptOssGroupedExperts:
            return moe_experts(x, *own, topk_expert_ids, topk_scores, **options)
        bias13, bias2 = biases
        if (ranks := self._tensor_parallel_ranks) > 1:  # they add their outputs, each with the bias
            if isinstance(experts.mlp2_bias_ED, DTensor):  # a replicated one: its gradients are not added
                bias2 = ScaleBiasForward.apply(bias2, ranks, bias2.dtype)
            else:  # in spmd_types a replicated parameter's gradients are added
                bias2 = bias2 / ranks
        options["activation"] = _OfRoutedExperts.activation(self)
        options["bias13"], options["bias2"] = gates_before_ups(bias13), bias2
        return moe_experts(x, *own, topk_expert_ids, topk_scores, **options)

    def _has_whole_weights(self) -> bool:
        masters = _OfRoutedExperts.masters(self)
        return all(_OfRoutedExperts.is_whole(self, name, w) for name, w in masters.items())

    def extra_repr(self) -> str:
        options = ", ".join(f"{n}={getattr(self._options, n)!r}" for n in OPTIONS)
        return f"{options}, {in_words(self)}"

    def parallelize(self, parallel_dims: Any) -> None:
        """Distribute the experts over the ranks of torchtitan's meshes, as `RoutedExperts` does.

        Parameters
        ----------
        parallel_dims : ParallelDims
            torchtitan's meshes.

        Raises
        ------
        ValueError
            For tensor-parallel ranks between which a pair of gate and up of gpt-oss would be divided.
        """
        name = self._names[0]
        width = self._shapes[name][1]
        keep_masters(self.inner_experts)  # which torchtitan distributes
        super().parallelize(parallel_dims)
        self._shapes = self._local_shapes()
        if self._shapes[name][1] != width:
            # kept, because the threads of a GPU's backward, which recompute checkpointed layers, have no mesh
            self._tensor_parallel_ranks = ranks = parallel_dims.tp
            if type(self.inner_experts) is GptOssGroupedExperts and (width // 2) % ranks:
                raise ValueError(
                    f"tp: got {ranks} ranks for experts of hidden_dim {width // 2}; wanted a divisor of it; "
                    "pass another tensor_parallel_degree"
                )
        mesh = parallel_dims.get_optional_mesh("ep")
        self._comm = None if mesh is None else ProcessGroup(mesh.get_group())
        if self._gathers_fp8:
            gather_fp8(self)


def _operands_of(masters: Sequence[Tensor], reorder: Callable[[Tensor], Tensor]) -> tuple[Any, Tensor]:
    """w13, or w1 and w3, and w2 of experts' parameters without biases, in the order of `PARAMETERS`."""
    *first, w2 = masters
    return (tuple(first), w2) if len(first) == 2 else (reorder(first[0]), w2)


def _shares_within_steps() -> None:
    """Lets torchtitan's Trainer, where it is used, declare weights unchanged within its steps."""
    module = sys.modules.get("torchtitan.trainer")  # importing it takes seconds
    if module is None or module.Trainer.train_step.__module__ == __name__:
        return
    step = module.Trainer.train_step

    @functools.wraps(step, assigned=("__name__", "__qualname__", "__doc__"))
    def train_step(trainer: Any, *arguments: Any, **options: Any) -> Any:
        with contextlib.ExitStack() as contexts:
            for experts in (m for part in trainer.model_parts for m in part.modules()):
                if isinstance(experts, FP8RoutedExperts) and experts._has_whole_weights():
                    contexts.enter_context(weights_unchanged(experts, optimizer=trainer.optimizers))
            return step(trainer, *arguments, **options)

    module.Trainer.train_step = train_step


class _OfRoutedExperts(Holder):
    @staticmethod
    def masters(module: FP8RoutedExperts) -> dict[str, Tensor]:
        return {n: getattr(module.inner_experts, n) for n in module._names if "bias" not in n}

    @staticmethod
    def is_whole(module: FP8RoutedExperts, name: str, w: Tensor) -> bool:
        return bool(local_of(w).shape == module._shapes[name])

    @classmethod
    def activation(cls, module: FP8RoutedExperts) -> Activation:
        if type(module.inner_experts) is not GptOssGroupedExperts:
            return SWIGLU
        return Activation("swiglu", module.inner_experts.swiglu_limit, 1.702, 1.0)

    @staticmethod
    def multiplies_masters(module: FP8RoutedExperts) -> bool:
        return type(module.inner_experts) is not GptOssGroupedExperts

    @staticmethod
    def operands(module: FP8RoutedExperts, masters: Sequence[Tensor]) -> tuple[Any, Tensor]:
        return _operands_of([*map(local_of, masters)], gates_before_ups)


# torchtitan looks up the shardings of arguments by their names, which its versions change: x_BLD, x_TD
FP8RoutedExperts.forward.__signature__ = inspect.signature(RoutedExperts.forward)  # type: ignore[attr-defined]


class FP8MoEConverter(QuantizationConverter):
    """Replaces every `RoutedExperts` in a model's configuration by `FP8RoutedExperts`.

    Parameters
    ----------
    config : FP8MoEConverter.Config
        ``recipe``, ``recompute``, ``save``, ``backend``, ``num_sms`` and ``weight_copies`` as in
        `fp8moe.torch.moe_experts`, and ``gather_fp8`` as in `FP8RoutedExperts`.

    Examples
    --------
    >>> from torchtitan.models.qwen3 import model_registry
    >>> from fp8moe.torchtitan import FP8MoEConverter, FP8RoutedExperts
    >>> spec = model_registry("debugmodel_moe", converters=[FP8MoEConverter.Config(recipe="fp8_flow")])
    >>> any(True for _ in spec.model.traverse(FP8RoutedExperts.Config))
    True
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config, LayerFields):
        gather_fp8: bool = False
        """Whether ``fully_shard`` gathers the experts' weights as FP8 codes."""

    def __init__(self, config: Config):
        _options_of(config)
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Replace the experts in a configuration.

        Parameters
        ----------
        model_config : Config
            Configuration of a model, or of its experts.

        Returns
        -------
        Config
            The same configuration, modified in place; for an experts configuration, a new one.

        Raises
        ------
        NotImplementedError
            For experts that are not torchtitan's `GroupedExperts` or `GptOssGroupedExperts`, or a dispatcher
            that does not synchronise with the host.
        ValueError
            For a model without routed experts.
        """
        options = _options_of(self.config)  # which may have changed
        layers = list(model_config.traverse(RoutedExperts.Config))
        if not layers:
            name = type(model_config)._owner.__name__
            raise ValueError(
                f"model_config: got {name} without routed experts; wanted one with them; leave the "
                "converter out of a dense model's"
            )
        for fqn, config, parent, attribute in layers:
            for part, known in ((config, (RoutedExperts,)), (config.inner_experts, (*PARAMETERS,))):
                owner = type(part)._owner
                if owner not in known:
                    names = " or ".join(c.__name__ for c in known)
                    raise NotImplementedError(
                        f"{fqn}: got {owner.__name__}; wanted {names}; leave this converter out"
                    )
            _refuse_unsynchronised(config.token_dispatcher)
            new = FP8RoutedExperts.Config(
                **{f.name: getattr(config, f.name) for f in fields(config)},
                **{n: getattr(options, n) for n in OPTIONS},
                gather_fp8=self.config.gather_fp8,
            )
            if parent is None:
                model_config = new
            elif isinstance(parent, list):
                parent[attribute] = new
            else:
                setattr(parent, attribute, new)
        return model_config


def _options_of(config: Any) -> LayerOptions:
    """A config's options, checked."""
    return LayerOptions(SWIGLU, **{n: getattr(config, n) for n in OPTIONS})  # unless the experts have another


def _refuse_unsynchronised(dispatcher: Any) -> None:
    """Raises for options of a dispatcher's config that promise an exchange without the host."""
    for name, without in (("non_blocking_capacity_factor", None), ("cudagraphable", False)):
        if (value := getattr(dispatcher, name, without)) != without:
            raise NotImplementedError(
                f"{name}: got {value} for {type(dispatcher)._owner.__name__}; wanted {without}, because the "
                'dispatcher is not used and the host reads row counts; pass comm_backend="standard" and set '
                "training.disable_cuda_graphs"
            )
