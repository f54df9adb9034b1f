"""gpt-oss in MXFP4 as a model of transformers: as the dequantised model, whose FP8 codes have its values."""

import copy
import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

import fp8moe.torch  # noqa: E402
import fp8moe.transformers  # noqa: E402
from fp8moe.adapters.torch.mxfp4 import MXFP4Weight  # noqa: E402

mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # PEFT's own
H, F, E = 160, 96, 4  # a block of H and of F is no whole one
IMPLEMENTATIONS = {"mxfp4_flow": {}, "mxfp4_recomputed": {"recompute": "moe_expert"}}
for implementation, options in IMPLEMENTATIONS.items():
    fp8moe.transformers.enable("fp8_flow", name=implementation, **options)
fp8moe.transformers.enable("bf16", name="mxfp4_bf16")
SIZES = {"vocab_size": 64, "hidden_size": H, "intermediate_size": F, "num_hidden_layers": 2, "head_dim": 32}
SIZES |= {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_local_experts": E,
    "num_experts_per_tok": 2,
}
TOKENS = (torch.arange(48) * 7 % 64).reshape(2, 24)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder as gpt-oss is published, and the dequantised weights by transformers' own function."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    config = transformers.GptOssConfig(**SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tensors, dense = {}, {}
    for name, t in model.state_dict().items():
        t = torch.randn_like(t) / 8 if t.ndim < 3 else t
        if t.ndim == 3:
            experts, k, n = t.shape
            tensors[f"{name}_blocks"] = torch.randint(256, (experts, n, k // 32, 16)).to(torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(118, 124, (experts, n, k // 32)).to(torch.uint8)
            parts = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
            dense[name] = mxfp4.convert_moe_packed_tensors(*parts)
        else:
            tensors[name] = dense[name] = t
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, of_file in files.items():
        save_file({n: tensors[n].contiguous() for n in of_file}, folder / file)
    index = {"metadata": {}, "weight_map": {n: file for file, of_file in files.items() for n in of_file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    settings = config.to_dict() | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder, dense


def loaded(published, name="mxfp4_flow"):
    return fp8moe.transformers.load_mxfp4(published[0], device="cpu", name=name, attn_implementation="eager")


def dequantized(published, name="mxfp4_flow"):
    config = transformers.GptOssConfig(**SIZES)
    how = {"experts_implementation": name, "attn_implementation": "eager", "dtype": torch.bfloat16}
    model = transformers.AutoModelForCausalLM.from_config(config, **how)
    model.load_state_dict(published[1])
    return model.eval()


def results(model):
    out = model(input_ids=TOKENS, labels=TOKENS)
    out.loss.backward()
    return out.logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same_bits(found, wanted):
    (logits, grads), (right, right_grads) = found, wanted
    assert torch.equal(logits, right)
    assert grads.keys() == right_grads.keys()
    for name, grad in grads.items():
        assert torch.equal(grad, right_grads[name]), name


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_as_the_dequantized_model(published, name):
    """Values of MXFP4 are exact in FP8, so both models multiply by the same numbers."""
    model, dense = loaded(published, name), dequantized(published)
    for n, p in dense.named_parameters():
        p.requires_grad_(not n.endswith(("gate_up_proj", "down_proj")))
    assert [*model.state_dict()] == [*dense.state_dict()]
    packed = {n: p for n, p in model.named_parameters() if isinstance(p.data, MXFP4Weight)}
    assert len(packed) == 4
    for n, p in packed.items():
        assert p.shape == published[1][n].shape
        assert torch.equal(p.data.dequantize(), published[1][n])
    assert_same_bits(results(model), results(dense))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_adapters_of_peft(published, name, tmp_path):
    peft = pytest.importorskip("peft")
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

    def adapted(model):
        config = peft.LoraConfig(r=6, lora_alpha=5, target_modules=[], target_parameters=targets)
        model = peft.get_peft_model(model, config)
        torch.manual_seed(1)
        for p in model.parameters():
            if p.requires_grad:
                torch.nn.init.normal_(p, std=0.2)
        return model

    model = adapted(loaded(published, name))
    found, wanted = results(model), results(adapted(dequantized(published)))
    assert len(found[1]) == 8
    assert_same_bits(found, wanted)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(dequantized(published), tmp_path)
    with torch.no_grad():
        assert torch.equal(again(input_ids=TOKENS).logits, found[0])


@pytest.mark.parametrize("how", ["nothing", "recompute", "checkpointing"])
def test_codes_between_forward_and_backward(published, how):
    model = loaded(published, "mxfp4_recomputed" if how == "recompute" else "mxfp4_flow")
    if how == "checkpointing":
        model.train()
        model.gradient_checkpointing_enable()
    shapes = {(E, 256, H), (E, H, 128)}
    saved = set()

    def pack(t):
        saved.add(tuple(t.shape))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
    assert shapes & saved == (shapes if how == "nothing" else set())
    loss.backward()


def test_report_and_scopes(published):
    model = loaded(published)
    nbytes = sum(t.nbytes for p in model.model.layers[0].parameters() for t in vars(p.data).values())
    lines = fp8moe.torch.model_report(model).splitlines()
    assert len(lines) == 2
    assert lines[0].endswith(f"experts: GptOssExperts, fp8_flow, frozen MXFP4, {nbytes} bytes")
    with torch.no_grad():
        right = model(input_ids=TOKENS).logits
        with fp8moe.torch.weights_unchanged(model):
            for _ in range(2):
                assert torch.equal(model(input_ids=TOKENS).logits, right)


def test_compiled_and_exported(published, tmp_path):
    model = loaded(published)
    layer, x = model.model.layers[0].mlp, torch.randn(2, 8, H, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, backend="eager")(x)[0], layer(x)[0])
    fp8moe.transformers.export(model, tmp_path / "bf16", to="bf16")
    written = {n: t for file in (tmp_path / "bf16").glob("*.safetensors") for n, t in load_file(file).items()}
    assert written.keys() == published[1].keys()
    assert all(torch.equal(written[name], t) for name, t in published[1].items())


@pytest.mark.parametrize("changed", ["lora_A", "lora_B", "gate_up_proj_bias", "blocks"])
def test_what_is_read_again_has_not_changed(published, changed):
    peft = pytest.importorskip("peft")
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = peft.LoraConfig(r=6, lora_alpha=5, target_modules=[], target_parameters=targets)
    model = peft.get_peft_model(loaded(published, "mxfp4_recomputed"), lora)
    loss = model(input_ids=TOKENS, labels=TOKENS).loss
    with torch.no_grad():
        for name, p in model.named_parameters():
            if changed == "blocks" and isinstance(p.data, MXFP4Weight):
                p.data.blocks.bitwise_xor_(1)
            elif changed in name:
                p.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_state_dicts(published, tmp_path):
    model, other = loaded(published), loaded(published)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt")
    w = other.model.layers[1].mlp.experts.gate_up_proj
    w.data.blocks.zero_()
    for assign in (False, True):
        other.load_state_dict(state, assign=assign)
        w = other.model.layers[1].mlp.experts.gate_up_proj
        assert torch.equal(w.data.dequantize(), published[1]["model.layers.1.mlp.experts.gate_up_proj"])
    with pytest.raises(RuntimeError, match=r"in MXFP4, .* to be written or shared as bfloat16; wanted the"):
        model.save_pretrained(tmp_path / "folder")
    w = model.model.layers[0].mlp.experts.down_proj
    for access in (w.storage, w.__dlpack__, model.share_memory):
        with pytest.raises(RuntimeError, match=r"in MXFP4, .* to be written or shared as bfloat16"):
            access()  # share_memory would end the process


def test_only_experts_in_fp8_compute_with_the_weights(published):
    model = loaded(published)
    w = model.model.layers[0].mlp.experts.down_proj
    before = w.data.blocks.clone()
    for operation in (lambda: w + 1, lambda: w.float(), lambda: w.data.mul_(2), lambda: w[0], model.float):
        with pytest.raises(NotImplementedError, match=r"in MXFP4, \[4, 96, 160\]|in MXFP4, \[4, 160, 192\]"):
            operation()
    assert torch.equal(w.data.blocks, before)
    assert torch.equal(copy.deepcopy(w).data.blocks, before)
    model.set_experts_implementation("eager")
    with pytest.raises(NotImplementedError, match="in MXFP4"):
        model(input_ids=TOKENS)
    model.set_experts_implementation("mxfp4_bf16")
    with pytest.raises(NotImplementedError, match="GptOssExperts: got experts in MXFP4 with recipe 'bf16'"):
        model(input_ids=TOKENS)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_weights_that_are_to_be_trained_are_refused(published, name):
    model = loaded(published, name).requires_grad_(True)
    message = r"gate_up_proj: got requires_grad=True of a weight in MXFP4.*gate_up_proj.requires_grad_\(False"
    with pytest.raises(NotImplementedError, match=message):
        model(input_ids=TOKENS)
    with torch.no_grad():
        assert model(input_ids=TOKENS).logits.isfinite().all()


def test_under_ddp(published):
    """Of adapters in a process group of one, as without it."""
    peft, dist = pytest.importorskip("peft"), torch.distributed
    lora = peft.LoraConfig(r=4, target_modules=[], target_parameters=["mlp.experts.down_proj"])
    model = peft.get_peft_model(loaded(published), lora)
    for p in model.parameters():
        if p.requires_grad:
            torch.nn.init.normal_(p)
    wanted = results(model)
    model.zero_grad()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ddp = torch.nn.parallel.DistributedDataParallel
        with pytest.raises(NotImplementedError, match=r"in MXFP4.*exclude_from_ddp\(model\) before"):
            ddp(model)
        found = results(ddp(fp8moe.torch.exclude_from_ddp(model)))
    finally:
        dist.destroy_process_group()
    assert_same_bits((found[0], {n.removeprefix("module."): g for n, g in found[1].items()}), wanted)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"dtype": "bfloat16"}, TypeError, "dtype: got 'bfloat16'; wanted a floating-point dtype of torch"),
        ({"dtype": torch.int8}, TypeError, r"dtype: got torch.int8; wanted"),
        (
            {"atn_implementation": "eager"},
            ValueError,
            "config: got atn_implementation; wanted fields of Gpt",
        ),
        ({"experts_implementation": "eager"}, ValueError, "config: got experts_implementation; wanted"),
        ({"torch_dtype": torch.float32}, ValueError, "config: got torch_dtype; wanted"),
    ],
)
def test_arguments_are_refused(published, given, error, message):
    with pytest.raises(error, match=message):
        fp8moe.transformers.load_mxfp4(published[0], device="cpu", name="mxfp4_flow", **given)


def test_other_checkpoints_are_refused(published, tmp_path):
    folder = published[0]
    load = fp8moe.transformers.load_mxfp4
    with pytest.raises(ValueError, match="name: got 'absent', which is not registered"):
        load(folder, device="cpu", name="absent")
    with pytest.raises(ValueError, match="name: got 'mxfp4_bf16' with recipe 'bf16'; wanted an FP8 recipe"):
        load(folder, device="cpu", name="mxfp4_bf16")
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    first = next(tmp_path.glob("model-00001*"))
    tensors = load_file(first)
    gone = min(n for n in tensors if n.endswith(("_blocks", "_scales")))
    plain = min(n for n in tensors if not n.endswith(("_blocks", "_scales")))
    kept = {n: t for n, t in tensors.items() if n != gone}
    config = (tmp_path / "config.json").read_text()
    half = gone[-7:]
    alone = re.escape(gone.removesuffix(half) + {"_blocks": "_scales", "_scales": "_blocks"}[half])
    for of_file, settings, message in (
        (kept, config, f"got {alone} without its {half}"),
        (tensors | {"extra_scales": torch.ones(2)}, config, "got extra_scales without its _blocks"),
        (
            {n: t for n, t in tensors.items() if n != plain},
            config,
            f"got no {re.escape(plain)}; wanted",
        ),
        (
            tensors | {"extra": torch.ones(2)},
            config,
            r"got extra \[2\]; the model of config.json has no such",
        ),
        (
            tensors,
            config.replace(f'"intermediate_size": {F}', '"intermediate_size": 64'),
            r"config.json has \[",
        ),
        (tensors, config.replace("mxfp4", "fp8"), "a gpt_oss in fp8; wanted gpt-oss in MXFP4"),
    ):
        save_file(of_file, first)
        (tmp_path / "config.json").write_text(settings)
        with pytest.raises(ValueError, match=message):
            load(tmp_path, device="cpu", name="mxfp4_flow")


@pytest.mark.parametrize("model", ["tiny-gpt-oss", "tiny-glm"])
def test_benchmark_of_fine_tuning(monkeypatch, tmp_path, model):
    pytest.importorskip("peft")
    finetune = pytest.importorskip("benchmarks.finetune")
    monkeypatch.setattr("sys.argv", ["", "--model", model, "--tokens", "32", "--out", f"{tmp_path}/rows"])
    finetune.main()
    row = json.loads((tmp_path / "rows").read_text())
    assert (row["name"], row["tokens"], row["layers"]) == (model, 32, 2)
    assert row["tokens_per_s"] > 0
