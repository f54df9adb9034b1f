"""Models of transformers as checkpoints: read by transformers' own loader, and by safetensors."""

import importlib.util
import json
import re
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from cases import FP8_NOISE

transformers = pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("accelerate")
files = pytest.importorskip("safetensors.torch")
warnings.filterwarnings("ignore", module="transformers")

import fp8moe.torch  # noqa: E402
from fp8moe.adapters import transformers as adapter  # noqa: E402
from fp8moe.adapters.torch import operands  # noqa: E402
from fp8moe.adapters.torch.mxfp4 import parameter  # noqa: E402
from fp8moe.checkpoints import shards  # noqa: E402
from fp8moe.transformers import export  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
adapter.enable("fp8_flow", name="fp8moe")
adapter.enable("bf16", name="fp8moe_bf16")
E, H, F, R = 4, 384, 128, 6
IDS = (torch.arange(32) * 7 % 64).reshape(2, 16)
SIZES = {
    "vocab_size": 64,
    "hidden_size": H,
    "intermediate_size": F,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts_per_tok": 2,
}
QWEN = {"num_experts": E, "moe_intermediate_size": F}


def model_of(kind="Qwen3Moe", implementation="fp8moe", dtype=torch.bfloat16, **changed):
    torch.manual_seed(0)
    sizes = SIZES | (QWEN if kind == "Qwen3Moe" else {}) | changed
    config = getattr(transformers, f"{kind}Config")(**sizes)
    how = {"experts_implementation": implementation, "attn_implementation": "eager", "dtype": dtype}
    return transformers.AutoModelForCausalLM.from_config(config, **how)


def read(folder):
    """All tensors, by safetensors; the index lists them all, and nothing else is there."""
    paths = sorted(folder.glob("*.safetensors"))
    found = {path.name: files.load_file(path) for path in paths}
    every = {name: x for tensors in found.values() for name, x in tensors.items()}
    others = {"config.json", "generation_config.json"}
    if len(paths) > 1:
        others.add(shards.INDEX)
        listed = json.loads((folder / shards.INDEX).read_text())
        assert listed["weight_map"] == {n: name for name, tensors in found.items() for n in tensors}
        assert listed["metadata"]["total_size"] == sum(x.nbytes for x in every.values())
    assert {path.name for path in folder.iterdir()} == others | found.keys()
    return every


def experts_of(every, layer, name, of="weight"):
    return torch.stack([every[f"model.layers.{layer}.mlp.experts.{e}.{name}_proj.{of}"] for e in range(E)])


def bits(x):
    return x.contiguous().view(torch.uint8)


@pytest.fixture
def in_codes(monkeypatch):
    """transformers keeps codes on the CPU too, as it does on a GPU."""
    from transformers.quantizers import quantizer_finegrained_fp8 as quantizer

    monkeypatch.setattr(quantizer, "is_torch_xpu_available", lambda: True)

    def load(folder):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, experts_implementation="fp8moe", attn_implementation="eager", dtype=torch.bfloat16
        )
        assert {type(m).__name__ for m in model.modules()} >= {"FP8Experts"}
        return model

    return load


@pytest.mark.parametrize(("dtype", "ffn"), [(torch.bfloat16, F), (torch.float32, 192)])
def test_the_codes_are_those_that_training_multiplied_by(tmp_path, monkeypatch, dtype, ffn):
    """Of the forward after a step of an optimizer, in several files."""
    model = model_of(dtype=dtype, moe_intermediate_size=ffn)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    multiplied, original = [], operands.quantized_by

    def kept(*arguments, **options):
        multiplied.append(original(*arguments, **options))
        return multiplied[-1]

    monkeypatch.setattr(operands, "quantized_by", kept)
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
        with fp8moe.torch.weights_unchanged(model):  # whose copies are kept outside the forward
            assert torch.equal(model(input_ids=IDS).logits, logits)
    assert len(multiplied) == 2
    before = {name: w.clone() for name, w in model.state_dict().items()}
    assert export(model, tmp_path / "out", max_shard_bytes=2**19) == {}
    assert len(multiplied) == 2
    every = read(tmp_path / "out")
    assert len([*(tmp_path / "out").glob("model-*-of-*.safetensors")]) > 2
    for layer, (w13, w2) in enumerate(multiplied):
        (gate, up), scales = fp8moe.to_block_fp8(w13, parts=2, rows=ffn)
        down, of_down = fp8moe.to_block_fp8(w2, columns=ffn)
        wanted = {"gate": (gate, scales[0]), "up": (up, scales[1]), "down": (down, of_down)}
        for name, (codes, factors) in wanted.items():
            assert torch.equal(bits(experts_of(every, layer, name)), codes)
            assert torch.equal(experts_of(every, layer, name, "weight_scale_inv"), factors)
    for name, w in before.items():
        assert torch.equal(model.state_dict()[name], w)
        if ".experts." not in name:
            assert torch.equal(every.pop(name), w)
    assert len(every) == 2 * E * 3 * 2


def test_keys_shapes_and_settings_that_engines_read(tmp_path):
    """vLLM's and SGLang's Fp8Config and fused experts: quant_method, blocks, dynamic activations; e4m3
    weights [out, in] of each expert, with float32 weight_scale_inv of whole tiles; modules by name that stay
    as they are: all of q, k and v, which they fuse, and the router."""
    export(model_of(), tmp_path / "out")
    every = read(tmp_path / "out")
    shapes = {"gate": (F, H), "up": (F, H), "down": (H, F)}
    for layer in range(2):
        for e in range(E):
            for name, (rows, columns) in shapes.items():
                key = f"model.layers.{layer}.mlp.experts.{e}.{name}_proj.weight"
                w, scales = every.pop(key), every.pop(f"{key}_scale_inv")
                assert (w.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
                assert (w.shape, scales.shape) == ((rows, columns), (rows // 128, columns // 128))
    assert {x.dtype for x in every.values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert (config["model_type"], config["dtype"]) == ("qwen3_moe", "bfloat16")
    settings = config["quantization_config"]
    skipped = {name.removesuffix(".weight") for name, x in every.items() if x.dim() == 2}
    assert {f"model.layers.1.{n}" for n in ("mlp.gate", "self_attn.q_proj", "self_attn.k_proj")} <= skipped
    for name in ("modules_to_not_convert", "ignored_layers"):
        assert {*settings.pop(name)} == skipped
    assert settings == {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
    }


def test_transformers_loads_the_values_of_the_codes(tmp_path):
    model = model_of()
    export(model, tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    state, count = loaded.state_dict(), 0
    for name, w in model.state_dict().items():
        if ".experts." in name:
            q = fp8moe.quantize_weights(w).rowwise
            w, count = fp8moe.dequantize(q, dtype="bfloat16"), count + 1  # scales are powers of two: exact
        assert torch.equal(state[name], w), name
    assert count == 4
    assert loaded.generation_config.to_dict() == model.generation_config.to_dict()


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_frozen_codes_go_out_and_in_bit_for_bit(tmp_path, in_codes, scale_fmt):
    """Written by transformers' own layout, with scales that are no powers of two; loaded as codes; exported;
    and loaded again: the logits are the same, and so is every byte."""
    export(model_of(), tmp_path / "made")
    every = read(tmp_path / "made")
    for name, scales in every.items():
        if name.endswith("_scale_inv"):
            other = torch.rand(scales.shape) * 0.01 + 1e-3
            every[name] = (
                other if scale_fmt == "float" else other.log2().floor().exp2().to(torch.float8_e8m0fnu)
            )
    files.save_file(every, tmp_path / "made/model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "made/config.json").read_text())
    if scale_fmt == "ue8m0":
        config["quantization_config"]["scale_fmt"] = scale_fmt
    (tmp_path / "made/config.json").write_text(json.dumps(config))
    model = in_codes(tmp_path / "made")
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
    assert export(model, tmp_path / "out") == {}
    again = read(tmp_path / "out")
    assert {n: (x.dtype, x.shape) for n, x in again.items()} == {
        n: (x.dtype, x.shape) for n, x in every.items()
    }
    for name, x in every.items():
        assert torch.equal(bits(again[name]), bits(x)), name
    settings = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert settings == config["quantization_config"]
    with torch.no_grad():
        assert torch.equal(in_codes(tmp_path / "out")(input_ids=IDS).logits, logits)


def adapted(model, **changed):
    """With random matrices, of the experts and of attention."""
    peft = pytest.importorskip("peft")
    options = {"r": R, "lora_alpha": 9, "target_modules": ["q_proj"]}
    options["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = peft.get_peft_model(model, peft.LoraConfig(**options | changed))
    torch.manual_seed(1)
    for name, p in model.named_parameters():
        if p.requires_grad:
            torch.nn.init.normal_(p, std=0.05 if "lora_A" in name else 0.02)
    return model


def matrices_of(model, layer, width, height):
    """A [E, R, in] and B [out, R, E] in float64, of PEFT's layout."""
    sizes = {"lora_A": (1, width), "lora_B": (0, height)}
    a, b = (
        next(
            p.detach().double()
            for n, p in model.named_parameters()
            if f"layers.{layer}.mlp.experts" in n and side in n and p.shape[axis] == size
        )
        for side, (axis, size) in sizes.items()
    )
    return a.reshape(E, R, -1), b.reshape(-1, R, E)


def added_by(model, layer, name):
    a, b = matrices_of(model, layer, *{"gate_up": (H, 2 * F), "down": (F, H)}[name])
    return 1.5 * torch.einsum("ore,eri->eoi", b, a)


def tiles(scales, shape):
    return scales.double().repeat_interleave(128, 1).repeat_interleave(128, 2)[:, : shape[1], : shape[2]]


def test_adapters_are_merged_into_frozen_codes(tmp_path, in_codes):
    """Each code is that of the exact sum under the scale of the base, or a multiple of it; the model stays as
    it is, and the loaded one computes what it computed."""
    export(model_of(), tmp_path / "base")
    base = read(tmp_path / "base")
    model = adapted(in_codes(tmp_path / "base"))
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
    before = {name: w.clone() for name, w in model.state_dict().items()}
    reports = export(model, tmp_path / "out")
    for name, w in model.state_dict().items():
        assert torch.equal(bits(w), bits(before[name]))
    every = read(tmp_path / "out")
    for layer in range(2):
        for name, projections in (("gate_up", ("gate", "up")), ("down", ("down",))):
            both = [[experts_of(of, layer, n) for n in projections] for of in (base, every)]
            factors = [
                [experts_of(of, layer, n, "weight_scale_inv") for n in projections] for of in (base, every)
            ]
            (old, new), (old_scales, new_scales) = (
                [torch.cat(x, 1) for x in both],
                [torch.cat(x, 1) for x in factors],
            )
            exact = old.double() * tiles(old_scales, old.shape) + added_by(model, layer, name)
            assert (torch.log2(new_scales / old_scales) >= 0).all()
            quotient = (exact / tiles(new_scales, new.shape)).clamp(-448, 448).numpy()
            wanted = quotient.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
            # the sum of B A in another order may decide a tie
            assert (bits(new).numpy() != wanted).mean() < 1e-5
            report = reports[f"model.layers.{layer}.mlp.experts.{name}_proj"]
            error = (new.double() * tiles(new_scales, new.shape) - exact).norm() / exact.norm()
            assert report.rounding == pytest.approx(error.item(), rel=1e-6)
            assert 0 < report.rounding < 2**-4
    q = "model.layers.0.self_attn.q_proj.weight"
    assert reports.keys() >= {q}
    assert len(reports) == 6
    loaded = in_codes(tmp_path / "out")
    with torch.no_grad():
        assert (loaded(input_ids=IDS).logits - logits).norm() <= FP8_NOISE * logits.norm()


@pytest.mark.parametrize("to", ["block-fp8", "bf16"])
def test_adapters_are_merged_into_weights(tmp_path, to):
    """Of bfloat16 and of attention: the exact sum, rounded once, or quantised as training quantises."""
    model = adapted(model_of())
    base = {n.replace(".base_layer", ""): w for n, w in model.get_base_model().state_dict().items()}
    reports = export(model, tmp_path / "out", to)
    every = read(tmp_path / "out")
    settings = json.loads((tmp_path / "out/config.json").read_text()).get("quantization_config")
    assert (settings is None) == (to == "bf16")
    for layer in range(2):
        for name, projections in (("gate_up", ("gate", "up")), ("down", ("down",))):
            key = f"model.layers.{layer}.mlp.experts.{name}_proj"
            exact = base[key].double() + added_by(model, layer, name)
            found = torch.cat([experts_of(every, layer, n) for n in projections], 1)
            if to == "bf16":
                wrong = found != exact.bfloat16()
            else:
                q = fp8moe.quantize_weights(exact.float()).rowwise
                wrong = bits(found) != q.data
            assert wrong.double().mean() < 1e-5
            assert reports[key].saturated == 0
    q = "model.layers.1.self_attn.q_proj"
    matrices = [
        model.state_dict()[f"base_model.model.{q}.lora_{side}.default.weight"].double() for side in "BA"
    ]
    exact = base[f"{q}.weight"].double() + 1.5 * matrices[0] @ matrices[1]
    assert torch.equal(every[f"{q}.weight"], exact.bfloat16())
    assert torch.equal(every["lm_head.weight"], base["lm_head.weight"])


def test_frozen_codes_in_bfloat16(tmp_path, in_codes):
    export(model_of(), tmp_path / "base")
    base = read(tmp_path / "base")
    model = in_codes(tmp_path / "base")
    assert export(model, tmp_path / "out", "bf16") == {}
    every = read(tmp_path / "out")
    assert len(every) == len(base) - 2 * E * 3
    for name, x in every.items():
        wanted = base[name]
        if wanted.dtype == torch.float8_e4m3fn:
            factors = tiles(base[f"{name}_scale_inv"][None], (1, *wanted.shape))[0]
            wanted = (wanted.double() * factors).bfloat16()
        assert torch.equal(x, wanted), name
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not hasattr(plain.config, "quantization_config")


@pytest.mark.parametrize("with_adapters", [False, True])
def test_mxfp4_in_bfloat16(tmp_path, with_adapters):
    """gpt-oss as `load_mxfp4` makes it: what transformers dequantises, [E, in, out], plus the adapters."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    model, values = model_of("GptOss", num_local_experts=E, intermediate_size=96), {}
    for i, layer in enumerate(model.model.layers):
        for name, (rows, columns) in {"gate_up_proj": (192, H), "down_proj": (H, 96)}.items():
            blocks = torch.randint(256, (E, rows, columns // 32, 16)).to(torch.uint8)
            scales = torch.randint(110, 118, (E, rows, columns // 32)).to(torch.uint8)
            setattr(layer.mlp.experts, name, parameter(blocks, scales))
            values[f"model.layers.{i}.mlp.experts.{name}"] = mxfp4.convert_moe_packed_tensors(blocks, scales)
    if with_adapters:
        model = adapted(model)
    reports = export(model, tmp_path / "out", "bf16")
    every = read(tmp_path / "out")
    for name, w in values.items():
        if with_adapters:
            layer, (_, width, height) = int(name.split(".")[2]), w.shape
            a, b = matrices_of(model, layer, width, height)
            exact = w.double() + 1.5 * torch.einsum("ore,eri->eio", b, a)
            assert (every[name] != exact.bfloat16()).double().mean() < 1e-5
            assert 0 < reports[name].rounding < 2**-8
        else:
            assert torch.equal(every[name], w)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    if with_adapters:
        with pytest.raises(
            NotImplementedError, match=r"experts\.down_proj: got adapters to merge into MXFP4"
        ):
            model.merge_and_unload()


@pytest.mark.parametrize("codes", [True, False])
def test_small_adapters(tmp_path, in_codes, codes):
    """Lost by rounding to nearest, which warns; kept on average by chance."""
    export(model_of(), tmp_path / "base")
    model = in_codes(tmp_path / "base") if codes else model_of()
    if not codes:  # but their values
        for layer in model.model.layers:
            for w in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
                w.data = fp8moe.dequantize(fp8moe.quantize_weights(w.data).rowwise, dtype="bfloat16")
    model = adapted(model, target_modules=[])
    for n, p in model.named_parameters():
        if "lora_B" in n:
            p.data *= 1e-2
    with pytest.warns(UserWarning, match="4 of 4 weights: rounding has lost part of the adapter"):
        lost = export(model, tmp_path / "nearest")
    assert all(report.kept < 0.5 for report in lost.values())
    kept = export(model, tmp_path / "by_chance", generator=torch.Generator().manual_seed(3))
    # errors are independent: those of n values have a part along the adapter of about error / sqrt(n), or
    # twice that, as larger values have larger errors; six deviations
    n = E * H * F
    for report in kept.values():
        assert abs(report.kept - 1) < 12 * report.rounding / report.adapter / n**0.5


KINDS = {
    "Mixtral": (
        {"num_local_experts": E, "intermediate_size": F},
        r"model\.layers\.0\.block_sparse_moe\.experts\.0\.w2",
    ),
    "DeepseekV3": (
        {
            "n_routed_experts": E,
            "moe_intermediate_size": F,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 32,
        },
        r"model\.layers\.1\.mlp\.experts\.0\.down_proj",
    ),
    "Glm4Moe": (
        {
            "n_routed_experts": E,
            "moe_intermediate_size": F,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        r"model\.layers\.1\.mlp\.experts\.0\.down_proj",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_those_of_the_model_types_checkpoints(tmp_path, kind):
    """Those that save_pretrained gives, which the engines' loaders know; and it is loaded."""
    sizes, name = KINDS[kind]
    model = model_of(kind, **sizes)
    export(model, tmp_path / "out")
    every = read(tmp_path / "out")
    model.save_pretrained(tmp_path / "own")
    own = files.load_file(tmp_path / "own/model.safetensors")
    assert {n for n in every if not n.endswith("_scale_inv")} == own.keys()
    assert any(re.fullmatch(rf"{name}\.weight_scale_inv", n) for n in every)
    assert {n: x.shape for n, x in every.items() if n in own} == {n: x.shape for n, x in own.items()}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    for n, w in model.state_dict().items():
        got = loaded.state_dict()[n]
        assert torch.equal(got, w) or (".experts." in n and (got - w).norm() <= 2**-4 * w.norm()), n


def test_tied_weights_are_written_once(tmp_path):
    model = model_of(tie_word_embeddings=True)
    export(model, tmp_path / "out")
    assert "lm_head.weight" not in read(tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def spoilt(model):
    model.model.layers[1].mlp.experts.down_proj.data[2, 5, 7] = float("inf")
    return model


def of_one_rank(model):
    model.model.layers[1].mlp.experts._is_expert_parallel = True
    return model


def with_adapters(**changed):
    return lambda: adapted(model_of(), **changed)


def broken_adapter():
    model = adapted(model_of())
    next(p for n, p in model.named_parameters() if "lora_B" in n and "layers.1" in n).data[0, 0] = float(
        "nan"
    )
    return model


def with_a_prompt():
    peft = pytest.importorskip("peft")
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    return peft.get_peft_model(model_of(), prompt)


REFUSED = {
    "no model": (
        lambda: torch.nn.Linear(2, 2),
        TypeError,
        "model: got Linear; wanted a model of transformers",
    ),
    "no experts": (lambda: model_of("Qwen3"), ValueError, "model: got no experts"),
    "gpt-oss": (
        lambda: model_of("GptOss", num_local_experts=E, intermediate_size=F),
        NotImplementedError,
        r"model.layers.0.mlp.experts: got GptOssExperts, .* pass to='bf16'",
    ),
    "one parameter of all experts": (
        lambda: model_of("GraniteMoe", num_local_experts=E),
        NotImplementedError,
        r"block_sparse_moe\.input_linear\.weight: got a GraniteMoeForCausalLM, .*; pass to='bf16'",
    ),
    "eager": (lambda: model_of(implementation="eager"), NotImplementedError, "does not compute in FP8"),
    "bf16": (lambda: model_of(implementation="fp8moe_bf16"), NotImplementedError, "does not compute in FP8"),
    "meta": (
        lambda: model_of().to("meta"),
        NotImplementedError,
        r"got a Tensor on the meta device; wanted a tensor that is whole.*`fp8moe convert`",
    ),
    "expert parallelism": (
        lambda: of_one_rank(model_of()),
        NotImplementedError,
        "model.layers.1.mlp.experts: got experts of one rank of several",
    ),
    "infinity": (
        lambda: spoilt(model_of()),
        ValueError,
        "model.layers.1.mlp.experts.down_proj: got NaN or infinity",
    ),
    "NaN of an adapter": (broken_adapter, ValueError, "got NaN or infinity in the weight or its adapter"),
    "modules_to_save": (
        with_adapters(modules_to_save=["lm_head"]),
        NotImplementedError,
        "lm_head: got PEFT's ModulesToSaveWrapper; wanted LoRA alone",
    ),
    "bias": (
        with_adapters(lora_bias=True, target_parameters=None),
        NotImplementedError,
        "q_proj: got a variant of LoRA or a bias",
    ),
    "prompt": (
        with_a_prompt,
        NotImplementedError,
        "model: got an adapter of PEFT's PromptTuningConfig; wanted LoRA",
    ),
    "dora": (
        with_adapters(use_dora=True, target_parameters=None),
        NotImplementedError,
        "q_proj: got a variant of LoRA or a bias",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(tmp_path, case):
    """By name, with nothing left, also of files that were finished before."""
    make, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        export(make(), tmp_path / "out", max_shard_bytes=2**18)
    assert not (tmp_path / "out").exists() or not [*(tmp_path / "out").iterdir()]


def test_tied_weights_with_an_adapter_are_refused(tmp_path):
    model = adapted(model_of(tie_word_embeddings=True), target_modules=["lm_head"], target_parameters=None)
    with pytest.raises(
        NotImplementedError, match=r"lm_head\.weight: got an adapter of a weight that is tied"
    ):
        export(model, tmp_path / "out")


def test_a_folder_with_a_checkpoint_is_refused(tmp_path):
    model = model_of()
    (tmp_path / "tokenizer.json").write_text("{}")
    export(model, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=r"folder: got .* with config\.json; wanted a new folder"):
        export(model, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_bytes_that_the_disk_changes_are_found(tmp_path, monkeypatch):
    original = shards.read_header

    def changed(path):
        with path.open("r+b") as file:
            file.seek(-1, 2)
            last = file.read()
            file.seek(-1, 2)
            file.write(bytes([last[0] ^ 1]))
        return original(path)

    monkeypatch.setattr(shards, "read_header", changed)
    with pytest.raises(ValueError, match="got other bytes of"):
        export(model_of(), tmp_path / "out")
    assert not [*(tmp_path / "out").iterdir()]


def test_sizes_that_engines_refuse_are_named(tmp_path):
    with pytest.warns(
        UserWarning, match="experts: got experts with 192 rows or columns: no multiple of 128, which vLLM"
    ):
        export(model_of(moe_intermediate_size=192), tmp_path / "out")


@pytest.mark.parametrize(
    ("target", "how", "options"),
    [
        ("experts", "merge_adapter", {}),
        ("experts", "merge_and_unload", {"safe_merge": True}),
        ("FP8Linear", "merge_and_unload", {}),
    ],
)
def test_peft_does_not_merge_into_codes(tmp_path, in_codes, how, options, target):
    """It would add to codes, whatever their scales are. Refused before other layers are merged."""
    export(model_of(), tmp_path / "base")
    model = in_codes(tmp_path / "base")
    name = "model.layers.0.mlp.experts.down_proj"
    if target == "FP8Linear":
        from transformers.integrations.finegrained_fp8 import FP8Linear

        name = "model.layers.1.self_attn.v_proj.weight"
        linear = FP8Linear(H, 64, block_size=(128, 128))
        linear.weight.data = torch.randn(64, H).to(torch.float8_e4m3fn)
        linear.weight_scale_inv.data = torch.rand(1, 3) + 0.1
        model.set_submodule("model.layers.1.self_attn.v_proj", linear)
        model = adapted(model, target_modules=["q_proj", "v_proj"], target_parameters=None)
    else:
        model = adapted(model)
    before = {n: bits(w).clone() for n, w in model.state_dict().items()}
    with pytest.raises(NotImplementedError, match=rf"{name}: got adapters .* fp8moe\.transformers\.export\("):
        getattr(model, how)(**options)
    assert all(torch.equal(bits(w), before[n]) for n, w in model.state_dict().items())
    assert export(model, tmp_path / "out")
    if target == "FP8Linear":  # a matrix of its own, with tiles
        every = read(tmp_path / "out")
        matrices = [
            model.state_dict()[f"base_model.model.{name[:-7]}.lora_{s}.default.weight"].double() for s in "BA"
        ]
        w, scales = (every[f"{name}{of}"] for of in ("", "_scale_inv"))
        old = linear.weight.double() * tiles(linear.weight_scale_inv[None], (1, 64, H))[0]
        exact = old + 1.5 * matrices[0] @ matrices[1]
        factors = tiles(scales[None], (1, 64, H))[0]
        wanted = (exact / factors).clamp(-448, 448).float().numpy().astype(ml_dtypes.float8_e4m3fn)
        assert (bits(w).numpy() != wanted.view(np.uint8)).mean() < 1e-4
        settings = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
        assert name[:-7] not in settings["ignored_layers"]


def test_the_example_trains_merges_and_exports(tmp_path, capsys):
    """At toy size: the merged checkpoint keeps the larger part of what training has gained."""
    path = Path(__file__).parent.parent / "examples/finetune_fp8_lora.py"
    spec = importlib.util.spec_from_file_location("finetune_fp8_lora", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    before, after, tuned = example.main(["--steps", "12", "--out", str(tmp_path / "out")])
    assert after < before - 0.05
    assert abs(tuned - after) < (before - after) / 2
    assert (tmp_path / "out/adapter/adapter_model.safetensors").exists()
    assert len(read(tmp_path / "out/merged")) > 2 * 8 * 3 * 2
    output = capsys.readouterr().out
    assert output.count("% is kept; 0 values saturated") == 4


@pytest.mark.gpu
@pytest.mark.parametrize("to", ["block-fp8", "bf16"])
def test_on_a_gpu(tmp_path, to):
    """Codes as transformers loads them there, trained with adapters, and exported: the bytes are those of the
    same model on the CPU, and the loaded model computes what it computed."""
    peft = pytest.importorskip("peft")
    export(model_of().cuda(), tmp_path / "base")
    export(model_of(), tmp_path / "on_cpu")
    assert all(
        torch.equal(bits(x), bits(read(tmp_path / "on_cpu")[n])) for n, x in read(tmp_path / "base").items()
    )

    def load(folder):
        how = {"experts_implementation": "fp8moe", "dtype": torch.bfloat16, "device_map": "cuda"}
        return transformers.AutoModelForCausalLM.from_pretrained(folder, **how)

    model = adapted(load(tmp_path / "base"))
    assert {type(m).__name__ for m in model.modules()} >= {"FP8Experts"}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    ids = IDS.cuda()
    for _ in range(3):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    again = peft.PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "adapter")
    reports = export(again, tmp_path / "out", to)
    assert len(reports) == 6
    with torch.no_grad():
        assert (load(tmp_path / "out")(input_ids=ids).logits - logits).norm() <= FP8_NOISE * logits.norm()
    export(again.cpu(), tmp_path / "of_cpu", to)
    found, wanted = read(tmp_path / "out"), read(tmp_path / "of_cpu")
    for name, x in wanted.items():
        # sums of B A in another order may decide a tie
        assert (bits(found[name]) != bits(x)).double().mean() < 1e-3, name
