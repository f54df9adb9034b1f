"""What a published model's configuration says of its experts and their router."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fp8moe.ops.router import RouterConfig

Get = Callable[..., Any]


def _softmax(get: Get) -> RouterConfig:
    return RouterConfig(get("num_experts_per_tok"), renormalize=get("norm_topk_prob"))


def _renormalized(get: Get) -> RouterConfig:
    return RouterConfig(get("num_experts_per_tok"))


def _of_groups(get: Get) -> RouterConfig:
    """DeepSeek-V3's (arXiv 2412.19437): sigmoids, and groups of experts."""
    groups = {"num_groups": get("n_group"), "topk_groups": get("topk_group")}
    weights = {"renormalize": get("norm_topk_prob"), "scaling_factor": get("routed_scaling_factor")}
    return RouterConfig(get("num_experts_per_tok"), "sigmoid", **groups, **weights)


#: model_type: (its router, whether a bias of its own is added to the scores for the selection). What a router
#: does is not in a configuration, but in the model's code: a test compares each with transformers' module.
_ROUTERS: dict[str, tuple[Callable[[Get], RouterConfig], bool]] = {
    "deepseek_v3": (_of_groups, True),
    "glm4_moe": (_of_groups, True),
    "mixtral": (_renormalized, False),
    "olmoe": (_softmax, False),
    "qwen2_moe": (_softmax, False),
    "qwen3_moe": (_softmax, False),
}
#: names of one size, the first that a configuration has
_FFN = "moe_intermediate_size", "intermediate_size"
_NUM_EXPERTS = "num_experts", "num_local_experts", "n_routed_experts"


@dataclass(frozen=True)
class ExpertsOfModel:
    """Sizes of a model's experts, its router, and whether that has a bias for the selection."""

    hidden: int
    ffn: int
    num_experts: int
    router: RouterConfig
    expert_bias: bool


def experts_of_model(config: Any) -> ExpertsOfModel:
    """What ``from_config`` makes its module of; config: an object with attributes, or a mapping."""

    def get(*names: str) -> Any:
        read = config.get if isinstance(config, Mapping) else lambda name: getattr(config, name, None)
        for name in names:
            if (value := read(name)) is not None:
                return value
        raise ValueError(
            f"config: got {type(config).__name__} without {' or '.join(names)}; wanted a "
            "configuration with all values that its modules are made of; load it by transformers.AutoConfig, "
            "which adds defaults"
        )

    model_type = get("model_type")
    if model_type not in _ROUTERS:
        raise NotImplementedError(
            f"config: got model_type {model_type!r}; wanted one of {', '.join(_ROUTERS)}, whose routers are "
            "known; make the module by its sizes and a RouterConfig"
        )
    if (activation := get("hidden_act")) not in ("silu", "swish"):
        raise NotImplementedError(
            f"config: got hidden_act {activation!r}; wanted 'silu'; make the module by its sizes and an "
            "Activation"
        )
    make_router, has_bias = _ROUTERS[model_type]
    sizes = get("hidden_size"), get(*_FFN), get(*_NUM_EXPERTS)
    return ExpertsOfModel(*sizes, make_router(get), has_bias)
