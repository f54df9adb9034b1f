"""`fp8moe.adapters.transformers` in Hugging Face transformers."""

import copy
import importlib
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from cases import FP8_NOISE
from grad_sums import check_added

transformers = pytest.importorskip("transformers", minversion="5.23")
warnings.filterwarnings("ignore", module="transformers")

import fp8moe.torch  # noqa: E402
from fp8moe import Activation  # noqa: E402
from fp8moe.adapters import transformers as adapter  # noqa: E402

E, H, F, T, K = 4, 64, 48, 23, 2  # F is not a multiple of 128
FP8, BF16 = "fp8moe", "fp8moe_bf16"
adapter.enable("fp8_flow", name=FP8)
adapter.enable("bf16", name=BF16)


class Config:
    """A configuration with all names that models use for the sizes of experts."""

    num_experts = num_local_experts = n_routed_experts = moe_num_experts = E
    hidden_size = moe_hidden_size = H
    intermediate_size = moe_intermediate_size = F
    hidden_act, hidden_activation, mlp_hidden_act = "silu", "gelu_pytorch_tanh", "relu2"
    swiglu_limit, swiglu_alpha, post_norm_eps = 6.0, 1.702, 1e-5  # about one gate in a hundred is clamped
    mlp_gate_softcap = mlp_up_softcap = 10.0
    moe_latent_size = None

    def __init__(self, **changed):
        self.__dict__.update(changed)


def expert_classes():
    """(module, class) of all classes with ``experts_implementation`` in the sources of transformers."""
    actual = []
    for file in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        for name in re.findall(
            r"^@use_experts_implementation(?:\([^)]*\))?\s*\nclass (\w+)", file.read_text(), re.MULTILINE
        ):
            actual.append((f"transformers.models.{file.parent.name}.{file.stem}", name))
    return actual


REFUSED = {
    "MuseSparkExperts": "a norm after each expert",
    "Inkling2Experts": "a gate .Inkling2SoftcappedSwiGLU. that",
}


def experts_of(module, name, **changed):
    experts = getattr(importlib.import_module(module), name)(Config(**changed))
    for p in experts.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return experts


def results(experts, implementation, x, ids, probs, dy):
    """y and all gradients."""
    experts.config._experts_implementation = implementation
    inputs = [t.detach().clone().requires_grad_() for t in (x, probs)]
    experts.zero_grad()
    y = experts(inputs[0], ids, inputs[1])
    assert y.dtype == x.dtype
    y.backward(dy)
    return [y.detach(), *(t.grad for t in inputs), *(p.grad.clone() for p in experts.parameters())]


def routed(dtype=torch.float32):
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)])
    return torch.randn(T, H).to(dtype), ids, torch.rand(T, K), torch.randn(T, H).to(dtype)


def validation_error(experts):
    """The error of `activation_of` for the module, "" if it is supported."""
    try:
        adapter.activation_of(experts)
    except NotImplementedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("module", "name"), expert_classes(), ids=lambda v: v.rpartition("_")[2])
def test_every_experts_class_or_error(module, name):
    """The same results as the model's own loop over experts, or a validation error that names the class."""
    experts, arguments = experts_of(module, name), routed()
    if validation_error(experts) or name in REFUSED:  # other classes, of a newer release, are counted below
        reason = REFUSED.get(name, "a gate|experts")
        experts.config._experts_implementation = FP8
        with pytest.raises(NotImplementedError, match=f"{name}: got .*({reason}).*grouped_mm"):
            experts(*arguments[:3])
        return
    wanted = results(experts, "eager", *arguments)
    # successive float32 sums of at most H + F products
    for actual, true in zip(results(experts, BF16, *arguments), wanted, strict=True):
        assert (actual - true).abs().max() <= 4 * (H + F) * 2.0**-24 * true.abs().max()
    if adapter.activation_of(experts).clamp is not None:
        arguments = away_from_the_clamp(experts, *arguments)
        wanted = results(experts, "eager", *arguments)
    for actual, true in zip(results(experts, FP8, *arguments), wanted, strict=True):
        assert (actual - true).norm() <= FP8_NOISE * true.norm()


def away_from_the_clamp(experts, x, *rest):
    """Numbers for which rounding to FP8 moves no gate or up value across the clamp, where the gradient is
    discontinuous: each is the sum of twice the clamp, minus that, or zero, and a number with a standard
    deviation of 0.1 * sqrt(H - 1) = 0.8 (and 0.3 of a bias), so the clamp is seven standard deviations away.
    The first term consists of exact codes, 12 and 1; FP8 rounding changes the second by 4 %."""
    x[:, 0] = torch.randint(0, 2, (T,)) * 2.0 - 1
    with torch.no_grad():
        w13 = experts.gate_up_proj.mT if experts.is_transposed else experts.gate_up_proj
        w13 /= 3
        w13[:, :, 0] = 2 * Config.swiglu_limit * torch.randint(-1, 2, w13.shape[:2])
    return x, *rest


def test_at_least_63_classes_are_supported():
    classes = {name: module for module, name in expert_classes()}
    assert set(REFUSED) <= set(classes)
    supported = [n for n, module in classes.items() if not validation_error(experts_of(module, n))]
    assert len(supported) >= 63, sorted(set(classes) - set(supported))


QWEN = "transformers.models.qwen3_moe.modeling_qwen3_moe", "Qwen3MoeExperts"


@pytest.mark.parametrize("width", [128, 48])
def test_the_gemms_add_weight_gradients_to_grad(width):
    """Also of a gate_up_proj whose codes are padded to a multiple of 128."""
    experts = experts_of(*QWEN, moe_intermediate_size=width).bfloat16()
    x, ids, probs, dy = routed(torch.bfloat16)
    experts.config._experts_implementation = FP8
    check_added([*experts.parameters()], lambda: experts(x, ids, probs).backward(dy))


@pytest.mark.parametrize(
    "act", ["gelu", "gelu_pytorch_tanh", "gelu_python", "gelu_new", "silu", "swish", "quick_gelu"]
)
def test_activation_is_the_configured_one(act):
    experts, arguments = experts_of(*QWEN, hidden_act=act), routed()
    for actual, true in zip(*(results(experts, i, *arguments) for i in (BF16, "eager")), strict=True):
        assert (actual - true).abs().max() <= 4 * (H + F) * 2.0**-24 * true.abs().max()


@pytest.mark.parametrize("act", ["gelu_10", "mish", "relu6", "hardswish", "linear", "tanh"])
def test_unsupported_activations_are_named(act):
    experts = experts_of(*QWEN, hidden_act=act, _experts_implementation=FP8)
    with pytest.raises(
        NotImplementedError, match=r"Qwen3MoeExperts: got a gate \(\w+\) that matches no Activation"
    ):
        experts(*routed()[:3])


NEMOTRON = "transformers.models.nemotron_h.modeling_nemotron_h", "NemotronHExperts"


@pytest.mark.parametrize(
    ("act", "kind"),
    [("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh"), ("silu", "silu"), ("quick_gelu", "quick_gelu")],
)
def test_experts_without_a_gate(act, kind):
    experts, arguments = experts_of(*NEMOTRON, mlp_hidden_act=act), routed()
    assert adapter.activation_of(experts) == Activation(kind)
    for actual, true in zip(*(results(experts, i, *arguments) for i in (BF16, "eager")), strict=True):
        assert (actual - true).abs().max() <= 4 * (H + F) * 2.0**-24 * true.abs().max()


def test_experts_without_a_gate_of_another_activation():
    experts = experts_of(*NEMOTRON, mlp_hidden_act="mish", _experts_implementation=FP8)
    with pytest.raises(NotImplementedError, match=r"NemotronHExperts: got experts without a gate \(Mish"):
        experts(*routed()[:3])


def with_new_function(experts):
    experts.act_fn = torch.nn.GELU()


def with_new_setting(experts):
    experts.act_fn.approximate = "tanh"


def with_new_clamp(experts):
    experts.limit = 0.25


def with_gate_of_its_own(experts):
    experts._apply_gate = lambda h: torch.nn.functional.gelu(h.chunk(2, dim=-1)[0]) * h.chunk(2, dim=-1)[1]


def with_new_inner_function(experts):
    experts.act_fn[0] = torch.nn.GELU()


def with_new_inner_setting(experts):
    experts.act_fn[0].approximate = "tanh"


def with_new_attribute(experts):
    experts.act_fn.act = torch.nn.functional.gelu


def with_new_forward(experts):
    experts.act_fn.forward = torch.nn.functional.gelu


class Wrapper(torch.nn.Module):
    """An activation that calls a function that is its attribute."""

    def __init__(self, act):
        super().__init__()
        self.act = act

    def forward(self, x):
        return self.act(x)


ACTIVATIONS = {
    with_new_setting: torch.nn.GELU,
    with_new_inner_function: lambda: torch.nn.Sequential(torch.nn.SiLU()),
    with_new_inner_setting: lambda: torch.nn.Sequential(torch.nn.GELU()),
    with_new_attribute: lambda: Wrapper(torch.nn.functional.silu),
}

DEEPSEEK = "transformers.models.deepseek_v4.modeling_deepseek_v4", "DeepseekV4Experts"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize(
    ("experts_class", "change"),
    [
        (QWEN, with_new_function),
        (QWEN, with_new_setting),
        (DEEPSEEK, with_new_clamp),
        (QWEN, with_gate_of_its_own),
        (QWEN, with_new_inner_function),
        (QWEN, with_new_inner_setting),
        (QWEN, with_new_attribute),
        (QWEN, with_new_forward),
    ],
)
def test_changed_activation_is_detected(experts_class, change, mode):
    if (
        change in (with_gate_of_its_own, with_new_forward)
        and mode == "compiled"
        and torch.__version__ < "2.13"
    ):
        pytest.skip("Dynamo of torch 2.11 has no guard on the absence of an attribute")
    torch.compiler.reset()
    experts, arguments = experts_of(*experts_class), routed()
    if change in ACTIVATIONS:
        experts.act_fn = ACTIVATIONS[change]()
    if change in (with_new_setting, with_new_inner_setting):
        arguments[0].mul_(0.25)  # GELU and its approximation differ by at most 5e-4, where they are about 1
    if mode == "compiled":
        experts.compile(backend="aot_eager", fullgraph=True)
    before = results(experts, BF16, *arguments)[0]
    change(experts)
    actual = results(experts, BF16, *arguments)[0]
    experts._compiled_call_impl = None
    # Qwen3MoeExperts's own loop does not call its gate function
    oracle = "grouped_mm" if change is with_gate_of_its_own else "eager"
    true = results(experts, oracle, *arguments)[0]
    tolerance = 4 * (H + F) * 2.0**-24 * true.abs().max()
    assert (true - before).abs().max() > 2 * tolerance
    assert (actual - true).abs().max() <= tolerance


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("act", ["gelu_pytorch_tanh", "gelu_python", "quick_gelu"])
def test_compiled_activations_with_functions_as_attributes(act):
    torch.compiler.reset()
    experts, arguments = experts_of(*QWEN, hidden_act=act), routed()
    wanted = results(experts, FP8, *arguments)
    adapter._activations.clear()
    experts.compile(backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, results(experts, FP8, *arguments), wanted))


def test_activations_of_two_layers_are_told_apart():
    """Also if they are modules of one class, which call other modules or functions."""
    arguments = routed()
    for acts in (
        [torch.nn.Sequential(a()) for a in (torch.nn.SiLU, torch.nn.GELU)],
        [Wrapper(a) for a in (torch.nn.functional.silu, torch.nn.functional.gelu)],
        [Wrapper(a) for a in (torch.nn.SiLU(), torch.nn.GELU())],
    ):
        for act in acts:
            experts = experts_of(*QWEN)
            experts.act_fn = act
            actual, true = (results(experts, i, *arguments)[0] for i in (BF16, "eager"))
            assert (actual - true).abs().max() <= 4 * (H + F) * 2.0**-24 * true.abs().max()


def test_activation_with_parameters_is_refused():
    """Its gradients would be lost."""
    experts = experts_of(*QWEN, _experts_implementation=FP8)
    experts.act_fn = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.PReLU(init=1.0))
    with pytest.raises(
        NotImplementedError, match=r"got an activation \(Sequential\) with parameters or buffers"
    ):
        experts(*routed()[:3])


@pytest.mark.filterwarnings("ignore")
def test_layers_share_compiled_code():
    """As with transformers' own implementations; the first layer of an activation has its own."""
    if torch.__version__ < "2.13":
        pytest.skip("Dynamo of torch 2.11 guards each module's identity")
    torch.compiler.reset()
    layers, arguments = [experts_of(*DEEPSEEK, swiglu_limit=5.125) for _ in range(5)], routed()
    with torch._dynamo.config.patch(error_on_recompile=False):
        torch._dynamo.utils.counters.clear()
        for experts in layers:
            wanted = results(experts, FP8, *arguments)
            experts.compile(backend="aot_eager", fullgraph=True)
            assert all(map(torch.equal, results(experts, FP8, *arguments), wanted))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        layers = [experts_of(*DEEPSEEK, swiglu_limit=4.875) for _ in range(5)]
        for experts in layers:
            experts.compile(backend="aot_eager", fullgraph=True)
            actual = results(experts, FP8, *arguments)
            experts._compiled_call_impl = None
            assert all(map(torch.equal, actual, results(experts, FP8, *arguments)))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3


@pytest.mark.parametrize("name", ["eager", "grouped_mm", "all_to_all"])
def test_names_of_other_implementations_are_refused(name):
    for _ in range(2):
        adapter.enable("bf16", name="again")
    with pytest.raises(ValueError, match=f"name: got '{name}', an implementation of transformers"):
        adapter.enable(name=name)


def types_without_the_interface():
    """Model types in the sources of transformers with a class of experts, none with the decorator."""
    experts = re.compile(r"^class \w*(Experts?|ExpertGLU|MoE|Moe)\(nn", re.MULTILINE)
    files = sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"))
    texts = {file.parent.name: file.read_text() for file in files}
    found = [n for n, text in texts.items() if experts.search(text) and DECORATOR not in text]
    assert {"dbrx", "llama4"} <= {*found}
    return found


DECORATOR = "@use_experts_implementation"
SMALL = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **{"is_moe": True, "encoder_sparse_step": 1, "decoder_sparse_step": 1, "part_features": 8},
}


def model_of(name, implementation):
    known = {key.replace("-", "_"): key for key in transformers.CONFIG_MAPPING}
    config = transformers.AutoConfig.for_model(known[name])
    parts = [getattr(config, part, None) for part in ("text_config", "ffn_config", "attn_config")]
    for part in (config, *filter(None, parts)):
        for key, value in SMALL.items():
            if hasattr(part, key) and (name, key) != (
                "step3p7",
                "num_hidden_layers",
            ):  # 0 to 2 have no experts
                setattr(part, key, value)
    if name == "dbrx":
        config.attn_config.rope_theta = 1e4  # read, and missing in transformers 5.24
    auto = next(
        t for t in (transformers.AutoModel, transformers.AutoBackbone) if type(config) in t._model_mapping
    )
    with torch.device("meta"):
        return auto.from_config(config, experts_implementation=implementation)


@pytest.mark.parametrize("name", types_without_the_interface())
def test_models_that_ignore_the_implementation_warn(name):
    message = "experts_implementation: got 'fp8moe' for a model whose experts .*(Expert|MoE|Moe)"
    with pytest.warns(UserWarning, match=message):
        model_of(name, FP8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = model_of(name, "eager")
    with pytest.warns(UserWarning, match=message):
        model.set_experts_implementation(FP8)


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3_vl_moe", "gpt_oss", "nemotron_h", "clip"])
def test_models_that_use_the_implementation_or_have_no_experts_do_not_warn(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model_of(name, FP8).set_experts_implementation(BF16)


def test_codes_without_scales_are_not_loaded_into_experts():
    """By any of a model's doors; a model's other weights are transformers'."""
    config = transformers.Qwen3MoeConfig(
        hidden_size=32, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, vocab_size=32, intermediate_size=16,
    )  # fmt: skip
    made = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=FP8)
    changed = transformers.AutoModelForCausalLM.from_config(config)
    changed.set_experts_implementation(FP8)
    for model in (made, changed, copy.deepcopy(made)):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        names = [name for name in before if "experts" in name]
        assert len(names) == 2
        for name, dtype in zip(names, (torch.float8_e4m3fn, torch.int8), strict=True):
            with pytest.raises(TypeError, match=f"^{name}: got dtype {dtype}, codes without scales; wanted"):
                model.load_state_dict({**before, name: before[name].to(dtype)})
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name
        model.load_state_dict({name: value.half() for name, value in before.items()})
        hooks = [m._load_state_dict_pre_hooks for m in model.modules() if hasattr(m, "is_transposed")]
        assert [len(h) for h in hooks] == [1]


def test_the_how_to_names_all_models_that_ignore_it():
    page = (Path(__file__).parent.parent / "docs/how-to/transformers.md").read_text()
    (listed,) = re.findall(r"does not have\s+its interface, which are those of ([^.]*)\.", page)
    assert re.findall(r"`(\w+)`", listed) == types_without_the_interface()


def test_experts_of_an_fp8_checkpoint_are_refused_by_name_in_bf16():
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    config = transformers.FineGrainedFP8Config()
    for name, default in (("scale_fmt", "float"), ("expert_dtype", "fp8")):  # which the loader sets
        setattr(config, name, getattr(config, name, default))
    model = model_of("mixtral", BF16)
    replace_with_fp8_linear(model, ["lm_head"], config, True)
    experts = next(m for m in model.modules() if type(m).__name__ == "FP8Experts")
    message = r"FP8Experts: .* recipe 'bf16'; .*FineGrainedFP8Config\(dequantize=True\)"
    with pytest.raises(NotImplementedError, match=message):
        experts(torch.randn(T, 4096), torch.zeros(T, K, dtype=torch.int64), torch.ones(T, K))


@pytest.mark.parametrize(("option", "value", "wrong"), [("backend", "mma", "cutlass"), ("num_sms", 4, 3)])
def test_backend_and_limit_reach_the_products(option, value, wrong):
    adapter.enable("fp8_flow", **{option: value}, name=f"fp8moe_{value}")
    experts = experts_of(*QWEN, _experts_implementation=f"fp8moe_{value}")
    with pytest.raises(ValueError, match=f"{option}: got {value!r} for arrays on the CPU"):
        experts(*routed()[:3])
    with pytest.raises(ValueError, match=f"{option}: got {wrong!r}; wanted"):
        adapter.enable(**{option: wrong})
    with pytest.raises(TypeError, match=rf"^enable\(\) got an unexpected .* '{option}s'; .* {option}"):
        adapter.enable(**{f"{option}s": value})


def test_dropped_experts():
    """Transformers uses expert id E for experts of other ranks."""
    experts = experts_of(*QWEN)
    x, ids, probs, dy = routed()
    is_local = torch.rand(T, K) < 0.6
    for none in (E, -1):
        actual = results(experts, BF16, x, torch.where(is_local, ids, none), probs, dy)
        wanted = results(experts, BF16, x, ids, torch.where(is_local, probs, 0), dy)
        wanted[2] = torch.where(is_local, wanted[2], 0)
        for a, b in zip(actual, wanted, strict=True):
            assert (a - b).abs().max() <= 4 * (H + F) * 2.0**-24 * b.abs().max()


@pytest.mark.parametrize("implementation", [FP8, BF16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_interleaved_weights_of_another_16_bit_dtype_than_autocast(dtype, implementation):
    """The same results as without autocast, for rows of autocast's dtype: the products' operands are
    equal."""
    experts = experts_of("transformers.models.gpt_oss.modeling_gpt_oss", "GptOssExperts").to(dtype)
    other = torch.bfloat16 if dtype == torch.float16 else torch.float16
    arguments = routed(other)
    wanted = results(experts, implementation, *arguments)
    experts.forward = torch.autocast("cpu", other)(experts.forward)
    actual = results(experts, implementation, *arguments)
    assert all(torch.equal(a, b) for a, b in zip(actual, wanted, strict=True))


@pytest.mark.parametrize("implementation", [FP8, BF16])
def test_removed_experts_to_which_the_router_still_sends_tokens_raise(implementation):
    experts, arguments = experts_of(*QWEN, _experts_implementation=implementation), routed()
    for name in ("gate_up_proj", "down_proj"):
        setattr(experts, name, torch.nn.Parameter(getattr(experts, name)[: E - 1].detach()))
    with pytest.raises(
        ValueError, match=f"gate_up_proj: got {E - 1} experts; wanted {E}, the module's num_ex"
    ):
        experts(*arguments[:3])
    experts.num_experts = E - 1
    x, ids, probs, dy = arguments
    ids = ids.clamp(max=E - 2)
    actual, true = (results(experts, i, x, ids, probs, dy)[0] for i in (implementation, "eager"))
    assert (actual - true).norm() <= FP8_NOISE * true.norm()


@pytest.mark.filterwarnings("ignore")
def test_compiled_for_other_numbers_of_tokens():
    torch.compiler.reset()
    experts = experts_of(*QWEN, _experts_implementation=FP8)
    run = torch.compile(experts, backend="aot_eager", fullgraph=True)
    x, ids, probs, dy = (t.repeat(4, 1) for t in routed(torch.bfloat16))
    with torch._dynamo.config.patch(error_on_recompile=False):
        torch._dynamo.utils.counters.clear()
        for tokens in range(3, 43, 2):
            arguments = x[:tokens].clone().requires_grad_()
            run(arguments, ids[:tokens], probs[:tokens]).backward(dy[:tokens])
            compiled = arguments.grad
            arguments = x[:tokens].clone().requires_grad_()
            experts(arguments, ids[:tokens], probs[:tokens]).backward(dy[:tokens])
            assert torch.equal(compiled, arguments.grad)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


# ---------------------------------------------------------------- whole models


def tiny_model(implementation, **changed):
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        intermediate_size=64,
        experts_implementation=implementation,
        **changed,
    )
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(config)


class Text(torch.utils.data.Dataset):
    """Sequences that count up from a random start, which are learnt in a few steps."""

    def __len__(self):
        return 256

    def __getitem__(self, i):
        ids = (torch.arange(24) + i * 7) % 64
        return {"input_ids": ids, "labels": ids}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("adapted", [False, True])
def test_trainer_with_its_defaults(tmp_path, adapted):
    """Fused AdamW, bf16 with float32 weights, gradient checkpointing, accumulation; with PEFT's LoRA on
    attention, the experts are frozen."""
    losses = {}
    for implementation in ("eager", FP8):
        model = tiny_model(implementation)
        if adapted:
            peft = pytest.importorskip("peft")
            model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=12,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=5e-3,
            bf16=True,
            gradient_checkpointing=True,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            seed=1,
        )
        assert arguments.optim == "adamw_torch_fused"
        trainer = transformers.Trainer(model, arguments, train_dataset=Text())
        trainer.train()
        losses[implementation] = [e["loss"] for e in trainer.state.log_history if "loss" in e]
        grads = [p.grad for n, p in model.named_parameters() if "experts" in n]
        assert not (adapted and any(g is not None for g in grads))
    plain, ours = (torch.tensor(losses[i]) for i in ("eager", FP8))
    assert len(ours) == 12
    if not adapted:
        assert ours[-1] < 0.8 * ours[0]
    # different seeds change the last losses of this run by 5 %; before the first step there is only FP8
    # rounding
    assert abs(ours[0] - plain[0]) < 0.01 * plain[0]
    assert ((ours - plain).abs() < 0.08 * plain).all()


@pytest.mark.filterwarnings("ignore")
def test_saved_and_loaded(tmp_path):
    """Names, shapes and dtypes of parameters are the model's own."""
    model = tiny_model(FP8)
    before = model.state_dict()
    assert {n: p.shape for n, p in before.items()} == {
        n: p.shape for n, p in tiny_model("eager").state_dict().items()
    }
    model.save_pretrained(tmp_path)
    ids = Text()[3]["input_ids"][None]
    wanted = model(ids).logits
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation=FP8)
    assert loaded.get_experts_implementation()[""] == FP8
    assert torch.equal(loaded(ids).logits, wanted)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not torch.equal(plain(ids).logits, wanted)
    plain.set_experts_implementation(FP8)
    assert torch.equal(plain(ids).logits, wanted)


def test_expert_parallelism_of_two_ranks(tmp_path):
    """With transformers' own configuration: logits and gradients as on one rank."""
    tiny_model("eager").save_pretrained(tmp_path / "model")
    script, port = Path(__file__).with_name("transformers_rank.py"), str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-Wignore", script, str(r), tmp_path / "file", tmp_path / "model", port],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(2)
    ]
    try:
        for rank in ranks:
            output, _ = rank.communicate(timeout=240)
            assert rank.returncode == 0, output[-3000:]
    finally:
        for rank in ranks:
            rank.kill()


def free_port():
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# ---------------------------------------------------------------- experts in FP8, as checkpoints store them


def fp8_experts(ffn, scale_fmt="float", **changed):
    """transformers' FP8Experts as `from_pretrained` makes them on a GPU, and experts with their values."""
    from transformers.integrations import finegrained_fp8 as fp8
    from transformers.integrations.moe import use_experts_implementation

    kind = use_experts_implementation(
        experts_class=type("FP8Experts", (fp8.FP8Experts,), {}),
        experts_interface=fp8.ALL_FP8_EXPERTS_FUNCTIONS,
    )
    config = Config(moe_intermediate_size=ffn, swiglu_limit=None, swiglu_alpha=None, hidden_act="silu")
    config.hidden_activation, config.mlp_gate_softcap = "silu", None
    config._experts_implementation = FP8
    experts = kind(config, **{"block_size": (128, 128), "scale_fmt": scale_fmt, **changed})
    values = experts_of(*QWEN, moe_intermediate_size=ffn).bfloat16()
    tiles = -(-ffn // 128)
    for name, halves in (("gate_up_proj", 2), ("down_proj", 1)):
        codes = torch.randn(getattr(experts, name).shape).to(torch.float8_e4m3fn)
        rows = (halves, tiles) if halves == 2 else (1, -(-H // 128))
        scales = torch.rand(E, *rows, 1 if halves == 2 else tiles) + 0.2
        if scale_fmt == "ue8m0":
            scales = scales.to(torch.float8_e8m0fnu)
        wide = codes.float().unflatten(1, (halves, -1))
        factors = scales.float().repeat_interleave(128, 2)[:, :, : wide.shape[2]]
        factors = factors.repeat_interleave(128, 3)[..., : wide.shape[3]]
        getattr(values, name).data = (wide * factors).flatten(1, 2)
        getattr(experts, name).data = codes
        getattr(experts, f"{name}_scale_inv").data = scales.flatten(1, 2)
    return experts, values


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
@pytest.mark.parametrize("ffn", [128, 96])
def test_experts_in_fp8_are_multiplied_as_they_are(ffn, scale_fmt):
    """Gradients of x and of the probabilities, as those of dequantised weights; the weights are frozen."""
    experts, values = fp8_experts(ffn, scale_fmt)
    x, ids, probs, dy = routed(torch.bfloat16)
    found = []
    for module, name in ((experts, FP8), (values.float(), BF16)):
        module.config._experts_implementation = name
        rows = x.clone().to(torch.float32 if name == BF16 else x.dtype).requires_grad_()
        weights = probs.clone().requires_grad_()
        y = module(rows, ids, weights)
        y.backward(dy.to(y.dtype))
        found.append((y.detach(), rows.grad, weights.grad))
    for actual, wanted in zip(*found, strict=True):
        assert (actual - wanted).norm() <= FP8_NOISE * wanted.norm()
    assert [p.grad for p in experts.parameters()] == [None] * 4
    with fp8moe.torch.weights_unchanged(experts):
        assert torch.equal(experts(x, ids, probs), found[0][0])
    nbytes = sum(p.nbytes for p in experts.parameters())
    assert fp8moe.torch.model_report(experts).endswith(f"fp8_flow, frozen FP8 codes, {nbytes} bytes")


def test_experts_in_fp8_have_no_copies():
    """The GEMMs read the parameters' memory, also that of other codes, loaded into it or put in its place."""
    experts, _ = fp8_experts(128)
    x, ids, probs, _ = routed(torch.bfloat16)
    before = experts(x, ids, probs)
    for w13, w2 in [adapter._records_of(experts)] * 2:
        assert w13.rowwise.data.data_ptr() == experts.gate_up_proj.data_ptr()
        assert w2.rowwise.scales.data_ptr() == experts.down_proj_scale_inv.data_ptr()
        assert w13.columnwise is None
    assert adapter._records_of(experts)[0] is w13
    other, _ = fp8_experts(128)
    wanted = other(x, ids, probs)
    assert not torch.equal(before, wanted)
    experts.load_state_dict(other.state_dict())
    assert torch.equal(experts(x, ids, probs), wanted)
    experts.down_proj = torch.nn.Parameter(-other.down_proj.float(), requires_grad=False)
    experts.down_proj.data = experts.down_proj.data.to(torch.float8_e4m3fn)
    assert torch.equal(experts(x, ids, probs), -wanted)


def test_experts_in_fp8_over_ranks():
    """Over one rank; and ids that transformers' expert parallelism gives to experts of other ranks."""
    from torch import distributed as dist

    experts, _ = fp8_experts(128)
    x, ids, probs, _ = routed(torch.bfloat16)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        comm = fp8moe.torch.ProcessGroup(dist.group.WORLD)
        assert torch.equal(adapter._multiply(experts, x, ids, probs, FP8, comm), experts(x, ids, probs))
    finally:
        dist.destroy_process_group()
    elsewhere = torch.rand(ids.shape) < 0.3
    wanted = experts(x, torch.where(elsewhere, -1, ids), probs)
    experts._is_expert_parallel = True
    assert torch.equal(experts(x, torch.where(elsewhere, E, ids), probs), wanted)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"block_size": (64, 64)}, r"block_size \(64, 64\)"),
        ({"block_size": None}, "block_size None"),
        ({"activation_scheme": "static"}, "activation_scheme 'static'"),
        ({"expert_dtype": "fp4"}, "weights of torch.int8 in a Tensor"),
    ],
)
def test_other_experts_in_fp8_are_refused(changed, message):
    from transformers.integrations import finegrained_fp8 as fp8

    experts, _ = fp8_experts(128)
    x, ids, probs, _ = routed(torch.bfloat16)
    own = type(experts)
    other = own(experts.config, **{"block_size": (128, 128), **changed})
    assert isinstance(other, fp8.FP8Experts)
    with pytest.raises(
        NotImplementedError, match=rf"FP8Experts: got experts in FP8 with {message}; .*dequantize"
    ):
        other(x, ids, probs)


def test_adapters_beside_experts_in_fp8():
    """PEFT's target_parameters, against float64 with the values of the codes. A weight that PEFT computes
    would be codes plus B A, without their scales."""
    peft = pytest.importorskip("peft")
    from peft.tuners.tuners_utils import cast_adapter_dtype

    experts, values = fp8_experts(96)
    before = [p.detach().clone() for p in experts.parameters()]
    names = ["experts.gate_up_proj", "experts.down_proj"]
    config = peft.LoraConfig(r=6, lora_alpha=12, target_modules=[], target_parameters=names)
    model = torch.nn.ModuleDict({"experts": experts})
    model = peft.inject_adapter_in_model(config, model)
    cast_adapter_dtype(model, "default")  # as get_peft_model does
    wrappers = {m.parameter_name: m for m in model.modules() if hasattr(m, "parameter_name")}
    matrices = [getattr(wrappers[n], m)["default"].weight for n in wrappers for m in ("lora_A", "lora_B")]
    for p in matrices:
        torch.nn.init.normal_(p, std=0.2)
    x, ids, probs, dy = routed(torch.bfloat16)
    rows, weights = x.clone().requires_grad_(), probs.clone().requires_grad_()
    model["experts"](rows, ids, weights).backward(dy)

    values = values.double()
    wide = [t.detach().double().requires_grad_() for t in (x, probs, *matrices)]
    summed = {}
    for name, (a, b) in zip(wrappers, (wide[2:4], wide[4:6]), strict=True):
        a, b = a.reshape(E, 6, -1), b.reshape(-1, 6, E)
        summed[name] = getattr(values, name).detach() + 2 * torch.einsum("ore,eri->eoi", b, a)
    y = torch.zeros(T, H, dtype=torch.float64)
    for e in range(E):
        tokens, places = (ids == e).nonzero(as_tuple=True)
        gate, up = (wide[0][tokens] @ summed["gate_up_proj"][e].T).chunk(2, -1)
        out = torch.nn.functional.silu(gate) * up @ summed["down_proj"][e].T
        y = y.index_add(0, tokens, out * wide[1][tokens, places][:, None])
    y.backward(dy.double())
    for got, wanted in zip((rows, weights, *matrices), wide, strict=True):
        assert (got.grad.double() - wanted.grad).norm() <= FP8_NOISE * wanted.grad.norm()
    kept = [p for n, p in model.named_parameters() if "lora" not in n]
    for p, old in zip(kept, before, strict=True):
        assert torch.equal(p.view(torch.uint8), old.view(torch.uint8))
    with pytest.raises(RuntimeError, match="Float8"):  # torch's; models refuse it by name
        wrappers["down_proj"].merge()
    for wrapper in wrappers.values():
        wrapper.update_layer("second", 6, 12, config)
        wrapper.set_adapter(["default", "second"])
    cast_adapter_dtype(model, "second")
    with pytest.raises(
        NotImplementedError, match="FP8Experts: got PEFT's adapters of FP8 weights with several"
    ):
        model["experts"](rows, ids, weights)
