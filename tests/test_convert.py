"""`fp8moe convert`: checkpoints that torch's safetensors wrote, and reads back; values in float64."""

import json
import os
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from cases import generator

import fp8moe
from fp8moe.__main__ import main
from fp8moe.checkpoints import convert as conversion
from fp8moe.checkpoints import shards

torch = pytest.importorskip("torch")
files = pytest.importorskip("safetensors.torch")

import fp8moe.torch  # noqa: E402

E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
HIDDEN, FFN, EXPERTS = 160, 96, 3
PREFIX = "model.layers.0.mlp.experts"
BLOCK_FP8 = {
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
}
DTYPES = {"uint8": torch.uint8, "e4m3": torch.float8_e4m3fn}


def tensor(x, dtype=None):
    return torch.from_numpy(x) if dtype is None else torch.from_numpy(x).view(dtype)


def bits(x):
    return x.contiguous().view(torch.uint8).numpy()


def others(rng):
    """What is not to be changed."""
    return {
        "model.embed_tokens.weight": tensor(rng.standard_normal((7, HIDDEN), np.float32)).bfloat16(),
        "model.layers.0.mlp.gate.weight": tensor(rng.standard_normal((EXPERTS, HIDDEN), np.float32)),
        "model.layers.0.mlp.shared_experts.up_proj.weight": tensor(
            rng.standard_normal((8, HIDDEN), np.float32)
        ),
        "model.layers.0.input_layernorm.weight": tensor(rng.standard_normal(HIDDEN, np.float32)).half(),
        "model.layers.0.some.ids": tensor(rng.integers(0, 9, 5)),
    }


def plain(rng):
    shapes = {"gate_proj": (FFN, HIDDEN), "up_proj": (FFN, HIDDEN), "down_proj": (HIDDEN, FFN)}
    return {
        f"{PREFIX}.{e}.{name}.weight": tensor(rng.standard_normal(shape, np.float32)).bfloat16()
        for e in range(EXPERTS)
        for name, shape in shapes.items()
    }


def block_fp8(rng, scales=torch.float32):
    """Scales that are no powers of two, or only such as their dtype has."""
    found = {}
    for name, values in plain(rng).items():
        codes = rng.integers(0, 254, values.shape, np.uint8)
        tiles = [-(-size // 128) for size in values.shape]
        found[name] = tensor(codes + (codes >= 0x7F), torch.float8_e4m3fn)
        found[name.replace(".weight", ".weight_scale_inv")] = tensor(
            rng.lognormal(-4, 1, tiles).astype(np.float32)
        ).to(scales)
    return found


def mxfp4(rng):
    found = {}
    for name, rows, width in (("gate_up_proj", 2 * FFN, HIDDEN), ("down_proj", HIDDEN, FFN)):
        found[f"{PREFIX}.{name}_blocks"] = tensor(
            rng.integers(0, 256, (EXPERTS, rows, width // 32, 16), np.uint8)
        )
        found[f"{PREFIX}.{name}_scales"] = tensor(
            rng.integers(110, 124, (EXPERTS, rows, width // 32), np.uint8)
        )
        found[f"{PREFIX}.{name}_bias"] = tensor(rng.standard_normal((EXPERTS, rows), np.float32)).bfloat16()
    return found


def save(folder, tensors, config=None, shards=2):
    """A checkpoint of several files, a weight's scales in another file than the weight, or of one."""
    folder.mkdir()
    names = [*tensors]
    (folder / "config.json").write_text(
        json.dumps({"model_type": "x", **({} if config is None else {"quantization_config": config})})
    )
    (folder / "tokenizer.json").write_text("{}")
    if shards == 1:
        files.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    places = {}
    for i in range(shards):
        name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {n: tensors[n] for n in names[i::shards]}
        files.save_file(part, folder / name, {"format": "pt"})
        places |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def load(folder):
    """All tensors, by torch; the index lists them, and there is no other file of tensors."""
    paths = sorted(folder.glob("*.safetensors"))
    found = {path.name: files.load_file(path) for path in paths}
    every = {name: x for tensors in found.values() for name, x in tensors.items()}
    index = folder / "model.safetensors.index.json"
    if index.exists():
        listed = json.loads(index.read_text())
        assert listed["weight_map"] == {n: name for name, tensors in found.items() for n in tensors}
        assert listed["metadata"]["total_size"] == sum(x.nbytes for x in every.values())
    assert not [*folder.glob(".*")]
    return every, json.loads((folder / "config.json").read_text()).get("quantization_config")


def converted(tmp_path, tensors, to, config=None, shards=2):
    source = save(tmp_path / "in", {**others(generator()), **tensors}, config, shards)
    assert main(["convert", str(source), str(tmp_path / "out"), "--to", to]) == 0
    found, settings = load(tmp_path / "out")
    assert (tmp_path / "out/tokenizer.json").exists()
    for name, x in others(generator()).items():
        np.testing.assert_array_equal(bits(found.pop(name)), bits(x))
    return found, settings


def tile_values(codes, scales, block=(128, 128)):
    factors = np.repeat(np.repeat(scales, block[0], axis=-2), block[1], axis=-1)
    return E4M3[bits(codes)] * factors[..., : codes.shape[-2], : codes.shape[-1]]


@pytest.mark.parametrize("count", [1, 2])
def test_bfloat16_to_block_fp8(tmp_path, count):
    """The codes that training multiplies, under the names that engines read."""
    given = plain(generator())
    found, settings = converted(tmp_path, given, "block-fp8", shards=count)
    assert len(found) == 2 * len(given)
    for name, x in given.items():
        scales = found[name.replace(".weight", ".weight_scale_inv")]
        assert (found[name].dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
        w = fp8moe.quantize_weights(x[None])
        np.testing.assert_array_equal(bits(found[name]), w.rowwise.data[0].numpy())
        wide, factors = x.double().numpy(), scales.double().numpy()
        # a code is off by at most half a unit in the last of four bits, or half the smallest subnormal
        bound = np.maximum(np.abs(wide) * 2**-4, 2**-10 * factors.max())
        assert (np.abs(tile_values(found[name], factors) - wide) <= bound).all()
    check_settings(settings, "fp8", [128, 128])


def check_settings(settings, method, block):
    """transformers parses them; it converts the experts and no other module."""
    assert settings["quant_method"] == method
    assert settings["modules_to_not_convert"] == settings["ignored_layers"]
    auto = pytest.importorskip("transformers.quantizers.auto")
    utils = pytest.importorskip("transformers.quantizers.quantizers_utils")
    parsed = auto.AutoQuantizationConfig.from_dict(dict(settings))
    assert (list(parsed.weight_block_size), parsed.activation_scheme) == (block, "dynamic")
    assert utils.should_convert_module(PREFIX, parsed.modules_to_not_convert)
    for name in (
        "model.layers.0.mlp.gate",
        "model.layers.0.mlp.shared_experts.up_proj",
        "model.embed_tokens",
    ):
        assert not utils.should_convert_module(name, parsed.modules_to_not_convert)


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_block_fp8_to_bfloat16(tmp_path, scales):
    given = block_fp8(generator(), scales)
    found, settings = converted(tmp_path, given, "bf16", BLOCK_FP8)
    assert settings is None
    assert {*found} == {n for n in given if n.endswith(".weight")}
    for name, x in found.items():
        factors = given[name.replace(".weight", ".weight_scale_inv")].float().numpy()
        values = tile_values(given[name], factors.astype(np.float64)).astype(np.float32)
        np.testing.assert_array_equal(bits(x), values.astype(ml_dtypes.bfloat16).view(np.uint8))


def test_what_is_in_the_form_already_is_copied(tmp_path):
    given = block_fp8(generator())
    found, settings = converted(tmp_path, given, "block-fp8", BLOCK_FP8)
    assert {n: bits(x).tobytes() for n, x in found.items()} == {
        n: bits(x).tobytes() for n, x in given.items()
    }
    check_settings(settings, "fp8", [128, 128])


def test_experts_alone_of_a_checkpoint_in_block_fp8(tmp_path, capsys):
    """Attention stays in FP8, so the settings stay, and skip the experts; MXFP8 has no such settings."""
    given = block_fp8(generator())
    attention = {
        n.replace("mlp.experts.0.", "self_attn."): x.clone() for n, x in given.items() if ".0.gate" in n
    }
    found, settings = converted(
        tmp_path, {**given, **attention}, "bf16", {**BLOCK_FP8, "modules_to_not_convert": ["lm_head"]}
    )
    for name, x in attention.items():
        np.testing.assert_array_equal(bits(found[name]), bits(x))
    skipped = ["lm_head", PREFIX]
    assert settings == {**BLOCK_FP8, "modules_to_not_convert": skipped, "ignored_layers": skipped}
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "mx"), "--to", "mxfp8"]) == 2
    assert "self_attn.gate_proj.weight: got FP8 codes" in capsys.readouterr().err
    assert not (tmp_path / "mx").exists()


def dequantised(given, dtype):
    """What transformers makes of gpt-oss' tensors, [E, in, out]."""
    integration = pytest.importorskip("transformers.integrations.mxfp4")
    return {
        name.removesuffix("_blocks"): integration.convert_moe_packed_tensors(
            x, given[name.replace("_blocks", "_scales")], dtype=dtype
        )
        for name, x in given.items()
        if name.endswith("_blocks")
    }


@pytest.mark.parametrize("to", ["bf16", "block-fp8", "mxfp8"])
def test_mxfp4(tmp_path, to):
    """Exact in every form, its scales being within 2^14."""
    given = mxfp4(generator())
    found, settings = converted(tmp_path, given, to, {"quant_method": "mxfp4"})
    for name, wanted in dequantised(given, torch.bfloat16 if to == "bf16" else torch.float32).items():
        assert torch.equal(found[f"{name}_bias"], given[f"{name}_bias"])
        if to == "bf16":
            assert torch.equal(found[name], wanted)
            assert settings is None
            continue
        scales = found[f"{name}_scale_inv"].numpy()
        block = (128, 128) if to == "block-fp8" else (1, 32)
        factors = 2.0 ** (scales.astype(np.float64) - 127) if to == "mxfp8" else scales.astype(np.float64)
        values = tile_values(found[name], factors, block)
        np.testing.assert_array_equal(values, wanted.transpose(1, 2).numpy())
        check_settings(settings, "mxfp8" if to == "mxfp8" else "fp8", [*block])


def test_bfloat16_to_mxfp8(tmp_path):
    given = plain(generator())
    found, settings = converted(tmp_path, given, "mxfp8")
    for name, x in given.items():
        scales = found[name.replace(".weight", ".weight_scale_inv")]
        assert scales.dtype == torch.uint8
        factors = 2.0 ** (scales.numpy().astype(np.float64) - 127)
        wide = x.double().numpy()
        bound = np.maximum(np.abs(wide) * 2**-4, 2**-10 * np.repeat(factors, 32, axis=1))
        assert (np.abs(tile_values(found[name], factors, (1, 32)) - wide) <= bound).all()
    check_settings(settings, "mxfp8", [1, 32])


@pytest.mark.parametrize("to", ["block-fp8", "mxfp8"])
def test_transformers_loads_the_values_of_the_codes(tmp_path, to):
    """A model that transformers saved, expert by expert, and loads with its experts' values rounded, all
    others as they were. The codes are those that training multiplies by."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 16}
    experts = {"num_experts": 3, "num_experts_per_tok": 1}
    config = transformers.Qwen3MoeConfig(**sizes, **heads, **experts, dtype=torch.bfloat16)
    model = transformers.AutoModelForCausalLM.from_config(config).bfloat16()
    model.save_pretrained(tmp_path / "in")
    conversion.convert(tmp_path / "in", tmp_path / "out", to, report=lambda text: None)
    settings = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    names = "weight_block_size", "modules_to_not_convert", "scale_fmt"
    found = {name: settings[name] for name in names if name in settings}
    dequantize = transformers.FineGrainedFP8Config(dequantize=True, **found)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", quantization_config=dequantize, dtype=torch.bfloat16
    ).state_dict()
    state = model.state_dict()
    if to == "block-fp8":
        first, second = (state[f"{PREFIX}.{name}"] for name in ("gate_up_proj", "down_proj"))
        w13, w2 = fp8moe.torch.quantize_fp8_weights(first, second)  # what the forward makes
        (gate, up), scales = fp8moe.to_block_fp8(w13, parts=2, rows=128)
        down, scales2 = fp8moe.to_block_fp8(w2, columns=128)
        written = load(tmp_path / "out")[0]
        for e in range(3):
            for name, codes, factors in (
                ("gate", gate, scales[0]),
                ("up", up, scales[1]),
                ("down", down, scales2),
            ):
                weight = written[f"{PREFIX}.{e}.{name}_proj.weight"]
                np.testing.assert_array_equal(bits(weight), codes[e].numpy())
                assert torch.equal(written[f"{PREFIX}.{e}.{name}_proj.weight_scale_inv"], factors[e])
    for name, wanted in state.items():
        if ".experts." in name:
            wide = wanted.float().numpy()
            if to == "block-fp8":
                q = fp8moe.quantize(wide, block=(128, 128))
            else:
                q = fp8moe.quantize(wide.reshape(-1, wide.shape[-1]), block=(1, 32))
            scales = q.scales if to == "block-fp8" else 2.0 ** (q.scales.astype(np.float32) - 127)
            values = tile_values(torch.from_numpy(q.data), scales, q.block).reshape(wanted.shape)
            wanted = torch.from_numpy(values).bfloat16()
        assert torch.equal(loaded[name], wanted), name


@pytest.mark.gpu
def test_a_loaded_model_multiplies_by_the_codes_in_place(tmp_path):
    """On a GPU transformers makes FP8Experts: losses and gradients are those of dequantised weights, whose
    codes have the same values."""
    transformers = pytest.importorskip("transformers")
    adapter = pytest.importorskip("fp8moe.transformers")
    adapter.enable("fp8_flow")
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 64,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 2,
    }
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 64}
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    config = transformers.Qwen3MoeConfig(**sizes, **heads, **experts, dtype=torch.bfloat16)
    transformers.AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(tmp_path / "in")
    conversion.convert(tmp_path / "in", tmp_path / "out", "block-fp8", report=lambda text: None)
    settings = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    skipped = {"modules_to_not_convert": settings["modules_to_not_convert"]}
    dequantize = transformers.FineGrainedFP8Config(dequantize=True, **skipped)
    ids, found = torch.randint(0, 64, (2, 50), device="cuda"), []
    for options in ({}, {"quantization_config": dequantize}):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", experts_implementation="fp8moe", dtype=torch.bfloat16, **options
        ).cuda()
        kinds = {type(m).__name__ for m in model.modules()}
        assert ("FP8Experts" in kinds) == (not options)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        found.append((loss.detach(), model.model.embed_tokens.weight.grad.float()))
    for actual, wanted in zip(*found, strict=True):
        assert (actual - wanted).norm() <= 2**-7 * wanted.norm()  # of sums in bfloat16, in torch's order


def test_an_interrupted_conversion_is_resumed(tmp_path, monkeypatch, capsys):
    """Finished files are kept, one that is not has another name, and nothing says that OUT is complete."""
    source, target = save(tmp_path / "in", plain(generator()), shards=3), tmp_path / "out"
    finish, finished = shards.Writer.finish, []

    def fail_at_the_second(writer):
        if finished:
            raise OSError("no space left")
        finished.append(writer.path)
        finish(writer)

    command = ["convert", str(source), str(target), "--to", "block-fp8"]
    monkeypatch.setattr(shards.Writer, "finish", fail_at_the_second)
    assert main(command) == 2
    assert [path.name for path in target.iterdir() if path.suffix != ".partial"] == [finished[0].name]
    monkeypatch.setattr(shards.Writer, "finish", finish)
    made = finished[0].stat().st_mtime_ns
    capsys.readouterr()
    assert main(command) == 0
    assert f"{finished[0].name}: finished before" in capsys.readouterr().out
    assert finished[0].stat().st_mtime_ns == made
    assert len(load(target)[0]) == 2 * len(plain(generator()))
    assert main([*command[:-1], "mxfp8"]) == 2
    assert "got a file of another conversion" in capsys.readouterr().err


def test_bytes_that_the_disk_changes_are_found(tmp_path, monkeypatch, capsys):
    source, read = save(tmp_path / "in", plain(generator())), shards.read_header

    def spoilt(path):
        if path.suffix == ".partial":
            with path.open("r+b") as file:
                file.seek(-1, 2)
                last = file.read()
                file.seek(-1, 2)
                file.write(bytes([last[0] ^ 1]))
        return read(path)

    monkeypatch.setattr(shards, "read_header", spoilt)
    assert main(["convert", str(source), str(tmp_path / "out"), "--to", "bf16"]) == 2
    assert "got other bytes of" in capsys.readouterr().err
    assert not [*(tmp_path / "out").glob("model*.safetensors")]


def test_memory_is_that_of_an_expert(tmp_path, monkeypatch):
    """Of 64 experts in one parameter; files are copied and read back in pieces."""
    monkeypatch.setattr(shards, "PIECE", 2**16)
    values = torch.from_numpy(generator().standard_normal((64, 128, 256), np.float32))
    source = save(tmp_path / "in", {f"{PREFIX}.down_proj": values}, shards=1)
    conversion.convert(source, tmp_path / "first", "bf16", report=lambda text: None)  # imports and compiles
    tracemalloc.start()
    try:
        conversion.convert(source, tmp_path / "out", "block-fp8", report=lambda text: None)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < values.nbytes / 4
    found = load(tmp_path / "out")[0]
    w = fp8moe.quantize_weights(values)
    np.testing.assert_array_equal(bits(found[f"{PREFIX}.down_proj"]), w.rowwise.data.numpy())
    assert torch.equal(found[f"{PREFIX}.down_proj_scale_inv"], w.rowwise.scales)


def without(tensors, text):
    return {name: x for name, x in tensors.items() if text not in name}


def with_nan(rng):
    tensors = plain(rng)
    next(iter(tensors.values()))[0, 0] = float("nan")
    return tensors


REFUSED = {
    "no experts": (lambda rng: others(rng), None, "bf16", "IN: got no experts"),
    "no scales": (
        lambda rng: without(block_fp8(rng), "1.up_proj.weight_scale"),
        BLOCK_FP8,
        "bf16",
        "1.up_proj.weight: got no",
    ),
    "scales of rows": (
        lambda rng: {n: x[:, :1].contiguous() if "scale" in n else x for n, x in block_fp8(rng).items()},
        BLOCK_FP8,
        "bf16",
        r"wanted \[1, 2\], of tiles",
    ),
    "int8": (
        lambda rng: {n: x.to(torch.int8) for n, x in plain(rng).items()},
        None,
        "bf16",
        "got I8 .* not known",
    ),
    "a form that is not known beside others": (
        lambda rng: {**plain(rng), f"{PREFIX}.0.down_proj.weight_packed": torch.ones(4, 4)},
        None,
        "bf16",
        r"weight_packed: got F32 \[4, 4\], in experts",
    ),
    "another method": (plain, {"quant_method": "gptq"}, "bf16", "quant_method 'gptq'"),
    "other blocks": (plain, {**BLOCK_FP8, "weight_block_size": [64, 64]}, "bf16", r"\[64, 64\]; wanted"),
    "skipped": (
        plain,
        {**BLOCK_FP8, "modules_to_not_convert": ["model.layers.0"]},
        "block-fp8",
        "'model.layers.0' in",
    ),
    "one parameter to mxfp8": (
        lambda rng: {f"{PREFIX}.up_proj": torch.ones(2, 64, 64)},
        None,
        "mxfp8",
        "not known along which dimension",
    ),
    "odd rows to mxfp8": (
        lambda rng: {f"{PREFIX}.0.up_proj.weight": torch.ones(64, 40)},
        None,
        "mxfp8",
        "multiple of 32",
    ),
    "NaN": (with_nan, None, "block-fp8", "gate_proj.weight: got NaN or infinity"),
    # what is in the form already is looked at, too, where it is copied
    "NaN in bfloat16": (with_nan, None, "bf16", "gate_proj.weight: got NaN or infinity"),
    "NaN in codes": (
        lambda rng: changed(block_fp8(rng), "2.up_proj.weight", 0xFF),
        BLOCK_FP8,
        "block-fp8",
        r"2\.up_proj\.weight: got NaN, byte 255, at \[95, 159\]; wanted finite codes",
    ),
    **{
        f"{kind} scales of {value}": (
            lambda rng, kind=kind, value=value: changed(
                block_fp8(rng, kind), "1.down_proj.weight_scale_inv", value
            ),
            BLOCK_FP8,
            "block-fp8",
            r"1\.down_proj\.weight_scale_inv: got .*; wanted positive, finite scales",
        )
        for kind, value in [
            (torch.float32, 0.0),
            (torch.float32, float("nan")),
            (torch.bfloat16, -1.0),
            (torch.bfloat16, float("inf")),
            (torch.float8_e8m0fnu, 0xFF),
        ]
    },
    "no expert 1": (
        lambda rng: without(plain(rng), ".experts.1."),
        None,
        "block-fp8",
        r"experts: got no expert 1 of \w+_proj; wanted all from 0 to 2",
    ),
    "no up of expert 2": (
        lambda rng: without(plain(rng), "2.up_proj"),
        None,
        "bf16",
        r"experts: got 2 experts of up_proj; wanted 3, as of \w+_proj",
    ),
    "another expert's shape": (
        lambda rng: {**plain(rng), f"{PREFIX}.1.up_proj.weight": torch.ones(HIDDEN, FFN)},
        None,
        "bf16",
        r"\.up_proj\.weight: got .*; wanted .*, as of expert \d",
    ),
    "another number of experts": (
        lambda rng: {
            f"{PREFIX}.down_proj": torch.ones(2, 64, 64),
            f"{PREFIX}.gate_up_proj": torch.ones(3, 64, 64),
        },
        None,
        "bf16",
        "experts: got 2 experts of down_proj; wanted 3, as of gate_up_proj",
    ),
}


BAD_CODES = {
    "codes": ("2.up_proj.weight", 0x7F, r"2\.up_proj\.weight: got NaN, byte 127, at"),
    "scales": ("0.up_proj.weight_scale_inv", -2.0, r"0\.up_proj\.weight_scale_inv: got -2\.0 at"),
}
REFUSED |= {
    f"{name}, to {to}": (
        lambda rng, of=of, value=value: changed(block_fp8(rng), of, value),
        BLOCK_FP8,
        to,
        message,
    )
    for name, (of, value, message) in BAD_CODES.items()
    for to in ("bf16", "mxfp8")
}
REFUSED["MXFP4 scales"] = (
    lambda rng: changed(mxfp4(rng), ".gate_up_proj_scales", 255),
    {"quant_method": "mxfp4"},
    "block-fp8",
    r"experts\.gate_up_proj_scales\[2\]: got NaN, byte 255, at \[191, 4\]",
)


def changed(tensors, name, value):
    """With one value, or byte, that is another: the last."""
    flat = next(x for n, x in tensors.items() if n.endswith(name)).view(-1)
    if isinstance(value, int):
        flat = flat.view(torch.uint8)
    flat[-1] = value
    return tensors


def test_experts_that_the_configuration_does_not_have(tmp_path, capsys):
    """The last is missing, by which no gap is left."""
    source = save(tmp_path / "in", without(plain(generator()), ".experts.2."))
    (source / "config.json").write_text('{"num_local_experts": 3}')
    command = ["convert", str(source), str(tmp_path / "out"), "--to", "bf16"]
    assert main(command) == 2
    assert (
        "experts: got 2 experts; wanted 3, as config.json says (num_local_experts)" in capsys.readouterr().err
    )
    (source / "config.json").write_text('{"num_local_experts": 2}')
    assert main(command) == 0


def test_sizes_that_engines_refuse_are_named(tmp_path, capsys):
    source = save(tmp_path / "in", plain(generator()))
    assert main(["convert", str(source), str(tmp_path / "out"), "--to", "block-fp8"]) == 0
    assert (
        "experts with 96 rows or columns: no multiple of 128, which vLLM and SGLang refuse"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(tmp_path, capsys, case):
    make, config, to, message = REFUSED[case]
    source = save(tmp_path / "in", make(generator()), config)
    assert main(["convert", str(source), str(tmp_path / "out"), "--to", to]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fp8moe convert: ")
    with pytest.raises(ValueError, match=message):
        raise ValueError(error)
    assert not [*(tmp_path / "out").glob("[!.]*")]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder, path: path.write_bytes(path.read_bytes()[:-1]), "a truncated file?"),
        (lambda folder, path: path.write_bytes(path.read_bytes()[:5]), "wanted a file of safetensors"),
        (lambda folder, path: path.write_bytes(b"\xff" * 64), "wanted a file of safetensors"),
        (lambda folder, path: path.write_bytes((8).to_bytes(8, "little") + b"{" * 8), "not safetensors'"),
        (lambda folder, path: path.unlink(), "which is no file beside it"),
        (
            lambda folder, path: path.write_bytes(next(folder.glob("*2-of*")).read_bytes()),
            "wanted an index of all",
        ),
        (lambda folder, path: (folder / "config.json").unlink(), "wanted the model's configuration"),
        (lambda folder, path: (folder / "config.json").write_text("{"), "config.json: got what is no JSON"),
        (lambda folder, path: (folder / "config.json").write_text("[]"), "config.json: got a list"),
        (lambda folder, path: (folder / shards.INDEX).write_text("{}"), "got no weight_map"),
        (lambda folder, path: (folder / "model.safetensors.index.json").unlink(), "wanted one of them"),
    ],
)
def test_damaged_checkpoints(tmp_path, capsys, spoil, message):
    source = save(tmp_path / "in", plain(generator()))
    spoil(source, next(source.glob("*1-of*")))
    assert main(["convert", str(source), str(tmp_path / "out"), "--to", "bf16"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_folders(tmp_path, capsys):
    source = save(tmp_path / "in", plain(generator()))
    for target, message in ((source, "which is IN"), (tmp_path / "used", "which IN does not have")):
        if target != source:
            target.mkdir()
            (target / "a.safetensors").write_text("")
        assert main(["convert", str(source), str(target), "--to", "bf16"]) == 2
        assert message in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "none"), str(tmp_path / "out"), "--to", "bf16"]) == 2
    assert "got no folder" in capsys.readouterr().err


@pytest.mark.parametrize("changed", ["a file that others' scales lie in", "content alone"])
def test_a_conversion_of_another_checkpoint_is_not_resumed(tmp_path, monkeypatch, changed):
    """Also if the files that were finished have the same names, sizes and times: their scales may lie in
    another file, or they are another model's."""
    source, target = tmp_path / "in", tmp_path / "out"
    weights = dict(sorted(block_fp8(generator()).items(), key=lambda item: item[0].endswith("_inv")))
    codes = {name: w for name, w in weights.items() if not name.endswith("_inv")}
    scales = {name: w for name, w in weights.items() if name.endswith("_inv")}
    source.mkdir()
    for name, tensors in (("a.safetensors", codes), ("b.safetensors", scales)):
        files.save_file(tensors, source / name)
        os.utime(source / name, (0, 0))
    places = {name: "a.safetensors" if name in codes else "b.safetensors" for name in weights}
    (source / shards.INDEX).write_text(json.dumps({"weight_map": places}))
    (source / "config.json").write_text(json.dumps({"quantization_config": BLOCK_FP8}))
    with monkeypatch.context() as patch:  # before the last file, of other files, is copied
        patch.setattr(conversion.shutil, "copyfile", lambda *_: pytest.fail("it has no other files"))
        patch.setattr(conversion, "write_text", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            conversion.convert(source, target, "bf16", report=lambda text: None)
    if changed == "content alone":
        first = next(iter(codes))
        codes[first] = codes[first].view(torch.uint8).flip(0).view(torch.float8_e4m3fn)
        files.save_file(codes, source / "a.safetensors")
        os.utime(source / "a.safetensors", (0, 0))
    else:
        files.save_file({name: 2 * w for name, w in scales.items()}, source / "b.safetensors")
        os.utime(source / "b.safetensors", (0, 0))
    with pytest.raises(ValueError, match=r"a.safetensors: got a file of another conversion, or of another"):
        conversion.convert(source, target, "bf16", report=lambda text: None)


def test_a_folder_that_another_conversion_writes_to_is_refused(tmp_path, monkeypatch):
    pytest.importorskip("fcntl")
    source, target = save(tmp_path / "in", plain(generator())), tmp_path / "out"
    write = conversion._write
    refused = []

    def another(*arguments):
        with pytest.raises(ValueError, match=r"OUT: got .*, which another conversion writes to"):
            conversion.convert(source, target, "mxfp8", report=lambda text: None)
        refused.append(True)
        return write(*arguments)

    monkeypatch.setattr(conversion, "_write", another)
    conversion.convert(source, target, "block-fp8", report=lambda text: None)
    assert refused


def test_gpt_oss_own_forms_are_not_taken_for_others(tmp_path, capsys):
    """Its bfloat16 parameters are [E, in, out], and w2 is square; gate and up stay interleaved."""
    source = save(tmp_path / "mxfp4", mxfp4(generator()))
    assert main(["convert", str(source), str(tmp_path / "out"), "--to", "block-fp8"]) == 0
    assert "gate and up stay interleaved" in capsys.readouterr().out
    fused = {f"{PREFIX}.down_proj": torch.randn(EXPERTS, HIDDEN, HIDDEN).bfloat16()}
    source = save(tmp_path / "bf16", fused, shards=1)
    command = ["convert", str(source), str(tmp_path / "of_bf16"), "--to", "block-fp8"]
    (source / "config.json").write_text('{"model_type": "gpt_oss"}')
    assert main(command) == 2
    assert "got gpt-oss' bfloat16 form, [E, in, out]; wanted its MXFP4" in capsys.readouterr().err
    (source / "config.json").write_text('{"model_type": "qwen3_moe"}')
    assert main(command) == 0
