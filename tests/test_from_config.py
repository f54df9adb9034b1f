"""Modules made of a published model's configuration, compared with transformers' own modules."""

import importlib
import json

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from fp8moe.adapters.torch.configs import _ROUTERS  # noqa: E402
from fp8moe.torch import FP8FlowMoE, Router  # noqa: E402

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 48,
    "num_experts": 16,
    "num_local_experts": 16,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 64,
}
CONFIGS = [
    *(pytest.param(name, {}, id=name) for name in _ROUTERS),
    pytest.param("qwen3_moe", {"norm_topk_prob": True}, id="qwen3_moe-renormalized"),
    pytest.param(
        "deepseek_v3", {"norm_topk_prob": False, "routed_scaling_factor": 1.5}, id="deepseek_v3-scaled"
    ),
]


def config_of(model_type, **values):
    return transformers.AutoConfig.for_model(model_type, **SIZES, **values)


def transformers_router(config):
    """An instance of the class of the model's router, with random values."""
    name = type(config).__name__.removesuffix("Config")
    module = importlib.import_module(f"transformers.models.{config.model_type}.modeling_{config.model_type}")
    classes = [kind for kind in vars(module).values() if isinstance(kind, type)]
    (router,) = (k for k in classes if k.__name__.lower() in (f"{name}topkrouter".lower(),))
    router = router(config)
    for tensor in (*router.parameters(), *router.buffers()):
        torch.nn.init.normal_(tensor.data, std=0.3)
    return router


def as_rows(ids, probs, experts):
    return torch.zeros(len(ids), experts).scatter(1, ids.long(), probs.float())


@pytest.mark.parametrize(("model_type", "values"), CONFIGS)
def test_a_router_selects_and_weighs_as_transformers(model_type, values):
    config = config_of(model_type, **values)
    theirs, ours = transformers_router(config), Router.from_config(config)
    ours.weight.data.copy_(theirs.weight)
    biases = dict(theirs.named_buffers())
    assert (ours.expert_bias is not None) == bool(biases)
    for bias in biases.values():
        ours.expert_bias.copy_(bias)
    x = torch.randn(200, 64)
    _, probs, ids = theirs(x)
    # scores of float32 in another order: a relative error of 64 * 2^-24 of logits of at most about 10
    torch.testing.assert_close(as_rows(*ours(x), 16), as_rows(ids, probs, 16), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("model_type", [name for name, (_, has_bias) in _ROUTERS.items() if not has_bias])
def test_a_layer_computes_as_transformers(model_type):
    config = config_of(model_type)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    (experts,) = (m for m in model.modules() if hasattr(m, "gate_up_proj"))
    layer = FP8FlowMoE.from_config(config, recipe="bf16", router=False, dtype=torch.bfloat16)
    assert (layer.num_experts, layer.topk, layer.hidden, layer.ffn) == (16, 4, 64, 48)
    experts.bfloat16()
    layer.w13.data.copy_(experts.gate_up_proj)
    layer.w2.data.copy_(experts.down_proj)
    experts.double()
    x = (20 * torch.randn(50, 64)).bfloat16()  # so that gate and up differ in more than their rounding
    ids, probs = Router.from_config(config)(x)
    wanted = experts(x.double(), ids.long(), probs)
    # The layer rounds h, the activation and each row of y to bfloat16, by at most 2^-9 of them (2^-8 with all
    # else, such as sums in float32); silu's derivative is at most 1.1.
    gate, up = (experts.gate_up_proj @ x.double().T).abs().chunk(2, dim=1)  # [E, F, T]
    of_rows = experts.down_proj.abs() @ (3.3 * 2.0**-8 * gate * up)  # [E, H, T]
    weights = torch.zeros(50, 16).scatter(1, ids.long(), probs).double()
    bound = torch.einsum("te,eht->th", weights, of_rows)
    y = layer(x, topk_ids=ids, topk_probs=probs)
    assert ((y - wanted).abs() <= bound + 2.0**-8 * wanted.abs()).all()
    assert FP8FlowMoE.from_config(config).router.config == Router.from_config(config).config


def test_the_contents_of_a_file_are_a_configuration():
    config = config_of("qwen3_moe", norm_topk_prob=True)
    of_file = json.loads(config.to_json_string(use_diff=False))
    assert FP8FlowMoE.from_config(of_file).extra_repr() == FP8FlowMoE.from_config(config).extra_repr()


def test_what_is_not_known_is_refused():
    for model_type in ("deepseek_v3", "glm4_moe"):
        with pytest.raises(NotImplementedError, match=r"router: got True .*bias.*Router.from_config"):
            FP8FlowMoE.from_config(config_of(model_type))
        assert FP8FlowMoE.from_config(config_of(model_type), router=False).router is None
    with pytest.raises(
        NotImplementedError, match="config: got model_type 'gpt_oss'; wanted one of deepseek_v3"
    ):
        Router.from_config(config_of("gpt_oss"))
    with pytest.raises(NotImplementedError, match="config: got hidden_act 'gelu'; wanted 'silu'"):
        FP8FlowMoE.from_config(config_of("mixtral", hidden_act="gelu"))
    with pytest.raises(ValueError, match="config: got dict without model_type"):
        FP8FlowMoE.from_config({})
    with pytest.raises(ValueError, match="config: got dict without hidden_size"):
        FP8FlowMoE.from_config({"model_type": "mixtral", "hidden_act": "silu"})
    with pytest.raises(TypeError, match="router: got int"):
        FP8FlowMoE.from_config(config_of("mixtral"), router=1)
