"""PEFT's adapters of experts in transformers models: served beside the frozen weights, or as PEFT does it."""

import warnings

import pytest
import torch
from cases import FP8_NOISE

transformers = pytest.importorskip("transformers", minversion="5.23")
peft = pytest.importorskip("peft")
warnings.filterwarnings("ignore", module="transformers")
warnings.filterwarnings("ignore", module="peft")

from peft.tuners.lora.layer import ParamWrapper  # noqa: E402

import fp8moe.torch  # noqa: E402
from fp8moe.adapters import transformers as adapter  # noqa: E402
from fp8moe.adapters.torch import operands  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # PEFT's own
FP8, BF16, RECOMPUTED, SAVED = "fp8moe", "fp8moe_bf16", "fp8moe_recomputed", "fp8moe_saved"
adapter.enable("fp8_flow", name=FP8)
adapter.enable("bf16", name=BF16)
adapter.enable("fp8_flow", name=RECOMPUTED, recompute="moe_expert")
adapter.enable("fp8_flow", name=SAVED, save="fp8")
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts_per_tok": 2,
}
MODELS = {
    "qwen3_moe": (transformers.Qwen3MoeConfig, {"num_experts": 4, "moe_intermediate_size": 48}),
    # [E, in, out], gates and ups interleaved, biases
    "gpt_oss": (transformers.GptOssConfig, {"num_local_experts": 4, "intermediate_size": 48}),
}


def tiny_model(kind, implementation):
    make, sizes = MODELS[kind]
    torch.manual_seed(0)
    config = make(**SIZES, **sizes)
    return transformers.AutoModelForCausalLM.from_config(
        config, experts_implementation=implementation, attn_implementation="eager"
    )


def adapted(kind, implementation, **changed):
    """With random matrices, so that every gradient is that of a matrix beside one that is not zero."""
    options = {"r": 6, "lora_alpha": 5, "use_rslora": True, "target_modules": []}
    config = peft.LoraConfig(**options | {"target_parameters": TARGETS} | changed)
    model = peft.get_peft_model(tiny_model(kind, implementation), config)
    torch.manual_seed(1)
    for p in model.parameters():
        if p.requires_grad:
            torch.nn.init.normal_(p, std=0.2)
    return model


def losses(model):
    """Logits, and gradients by name."""
    ids = (torch.arange(32) * 7 % 64).reshape(2, 16)
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    return out.logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


@pytest.fixture
def calls(monkeypatch):
    """Whether each call of the experts got adapters."""
    found, original = [], adapter.moe_experts

    def counted(*arguments, lora=None, **options):
        found.append(lora is not None)
        return original(*arguments, lora=lora, **options)

    monkeypatch.setattr(adapter, "moe_experts", counted)
    return found


@pytest.fixture
def never_summed(monkeypatch):
    """PEFT computes no weight."""

    def refuse(*_, **__):
        raise AssertionError("the sum of the weight and the adapters was formed")

    for name in ("get_delta_weight", "get_delta_factors"):
        monkeypatch.setattr(ParamWrapper, name, refuse, raising=False)


def assert_same(found, wanted, tolerance):
    (logits, grads), (right, right_grads) = found, wanted
    assert (logits - right).norm() <= tolerance * right.norm()
    assert grads.keys() == right_grads.keys()
    assert len(grads) == 4
    for name, grad in grads.items():
        assert (grad - right_grads[name]).norm() <= tolerance * right_grads[name].norm(), name


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("implementation", [BF16, FP8])
def test_adapters_of_experts_are_served(kind, implementation, calls, never_summed, monkeypatch):
    model = adapted(kind, implementation)
    base = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    found = losses(model)
    assert calls == [True]
    for name, p in model.named_parameters():
        if name in base:
            assert p.grad is None
            assert torch.equal(p, base[name])
    monkeypatch.undo()
    # of float32: sums of a few hundred values through some ten GEMMs
    assert_same(found, losses(adapted(kind, "eager")), 1e-5 if implementation == BF16 else FP8_NOISE)


@pytest.mark.parametrize("target", TARGETS)
def test_one_weight_is_adapted(target, calls):
    """Beside an adapter of attention."""
    changed = {"target_parameters": [target], "target_modules": ["q_proj"]}
    found, wanted = (losses(adapted("qwen3_moe", name, **changed)) for name in (BF16, "eager"))
    assert calls == [True]
    assert_same(found, wanted, 1e-5)


def test_compiled(calls):
    """With graph breaks."""
    experts = next(m for m in adapted("qwen3_moe", FP8).modules() if isinstance(m, ParamWrapper))
    rows = torch.randn(9, 64), torch.rand(9, 4).topk(2).indices, torch.rand(9, 2)
    with torch.no_grad():
        assert torch.equal(torch.compile(experts, backend="eager")(*rows), experts(*rows))
    assert calls == [True, True]


def test_micro_batches_share_the_copies_of_the_base(monkeypatch):
    model = adapted("qwen3_moe", FP8)
    alone, made, original = losses(model)[0], [], operands.quantized_by

    def counted(*arguments, **options):
        made.append(None)
        return original(*arguments, **options)

    monkeypatch.setattr(operands, "quantized_by", counted)
    with fp8moe.torch.weights_unchanged(model):
        assert all(torch.equal(losses(model)[0], alone) for _ in range(2))
    assert len(made) == 1


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("implementation", [FP8, RECOMPUTED])
def test_gradient_checkpointing(implementation, reentrant, calls):
    wanted = losses(adapted("qwen3_moe", FP8))
    model = adapted("qwen3_moe", implementation).train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    logits, grads = losses(model)
    assert calls == [True] * 3
    assert torch.equal(logits, wanted[0])
    assert all(torch.equal(grad, wanted[1][name]) for name, grad in grads.items())


@pytest.mark.parametrize("implementation", [FP8, RECOMPUTED])
def test_fully_shard(implementation, calls):
    """Around what reads the weights: a decoder layer, or PEFT's wrapper of the experts."""
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    wanted = losses(adapted("qwen3_moe", implementation))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for of_layer in (True, False):
            model = adapted("qwen3_moe", implementation)
            (layer,) = model.base_model.model.model.layers
            fully_shard(layer if of_layer else layer.mlp.experts, mesh=mesh)
            logits, grads = losses(fully_shard(model, mesh=mesh))
            assert torch.equal(logits, wanted[0])
            for name, grad in grads.items():
                assert torch.equal(grad.full_tensor(), wanted[1][name])
    finally:
        dist.destroy_process_group()
    assert calls == [True] * 3


def test_saved_adapters_are_loaded(tmp_path, calls):
    model = adapted("gpt_oss", FP8)
    logits, _ = losses(model)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(tiny_model("gpt_oss", FP8), tmp_path, is_trainable=True)
    assert torch.equal(losses(again)[0], logits)
    assert calls == [True, True]


def test_merged_into_the_weights_and_out_of_them(calls):
    model = adapted("qwen3_moe", BF16)
    logits, _ = losses(model)
    model.merge_adapter()
    merged = model(input_ids=(torch.arange(32) * 7 % 64).reshape(2, 16)).logits
    model.unmerge_adapter()
    again, _ = losses(model)
    assert calls == [True, False, True]
    assert (merged - logits).norm() <= 1e-5 * logits.norm()
    assert (again - logits).norm() <= 1e-5 * logits.norm()


@pytest.mark.parametrize("reason", ["base", "save", "two", "inner", "bias", "disabled"])
def test_what_peft_computes_itself(reason, calls):
    """Of the wrappers of one module all or none: "inner" has two adapters of one weight, and "bias" one of a
    vector, beside adapters of weights that alone would be served."""
    kind, changed = "qwen3_moe", {}
    if reason == "bias":
        kind, changed = "gpt_oss", {"target_parameters": [*TARGETS, "mlp.experts.gate_up_proj_bias"]}
    implementation = SAVED if reason == "save" else FP8
    model, plain = (adapted(kind, name, **changed) for name in (implementation, "eager"))
    ids = (torch.arange(32) * 7 % 64).reshape(2, 16)
    for m in (model, plain):
        if reason == "base":
            for name, p in m.named_parameters():
                p.requires_grad_("experts" in name)
        elif reason in ("two", "inner"):
            wrappers = [w for w in m.modules() if isinstance(w, ParamWrapper)]
            for w in wrappers:
                w.update_layer("second", 6, 5, m.peft_config["default"])
            for w in wrappers if reason == "two" else wrappers[-1:]:
                w.set_adapter(["default", "second"])
        elif reason == "disabled":
            m.base_model.disable_adapter_layers()
    logits, right = (m(input_ids=ids).logits for m in (model, plain))
    assert calls == [False]
    assert (logits - right).norm() <= FP8_NOISE * right.norm()


@pytest.mark.parametrize("change", ["merge_adapter", "unmerge_adapter"])
def test_merges_within_weights_unchanged_are_noticed(change):
    """PEFT writes through ``.data``, which no counter of a tensor's versions sees."""
    model = adapted("qwen3_moe", FP8)
    ids = (torch.arange(32) * 7 % 64).reshape(2, 16)
    if change == "unmerge_adapter":
        model.merge_adapter()
    with torch.no_grad(), fp8moe.torch.weights_unchanged(model):
        model(input_ids=ids)
        getattr(model, change)()
        with pytest.raises(RuntimeError, match="got changed weights although they were declared unchanged"):
            model(input_ids=ids)
    with torch.no_grad():
        assert model(input_ids=ids).logits.isfinite().all()
