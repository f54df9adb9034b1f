"""LoRA training steps of published 100 B models on one GPU: ``python -m benchmarks.finetune [--out FILE]
[--model gpt-oss-120b|glm-4.5-air|tiny-gpt-oss|tiny-glm] [--layers N] [--tokens N] [--rank N] [--profile]``.

gpt-oss-120b: 36 layers, 128 experts of 2880 x 2880, top-4, in MXFP4; GLM-4.5-Air: 46 layers, 128 experts of
4096 x 1408, top-8, in block FP8. transformers' models with random weights and PEFT's adapters on the experts,
gradient checkpointing, fused AdamW; a step is forward, backward, optimizer step and zero_grad of a sequence.
``--load FOLDER`` instead writes a checkpoint of ``--layers`` layers of gpt-oss there, and times `load_mxfp4`
beside plain reads of the same files.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

import fp8moe.transformers as adapter
from fp8moe.adapters.torch.mxfp4 import parameter
from fp8moe.bench.harness import append
from fp8moe.info import commit, versions

WARM, STEPS = 2, 5
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
GPT_OSS = {"num_hidden_layers": 36}  # the other defaults are those of gpt-oss-120b
GLM = {
    "num_hidden_layers": 46,
    "vocab_size": 151_552,
    "hidden_size": 4096,
    "intermediate_size": 10_944,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "attention_bias": True,
    "pad_token_id": 0,
}
TINY = {
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts_per_tok": 2,
}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt-oss-120b": (transformers.GptOssConfig, GPT_OSS),
    "glm-4.5-air": (transformers.Glm4MoeConfig, GLM),
    "tiny-gpt-oss": (transformers.GptOssConfig, TINY | {"num_local_experts": 4}),
    "tiny-glm": (
        transformers.Glm4MoeConfig,
        GLM | TINY | {"n_routed_experts": 4, "moe_intermediate_size": 128},
    ),
}
#: part of a step: words of its kernels' names; the first that fits counts
PARTS = {
    "FP8 GEMMs of experts": ("grouped_gemm_tiles_fp8", "grouped_gemm_fp8", "grouped_gemm_tiles("),
    "adapters' GEMMs": ("tiles_16",),
    "codes of weights": ("place_mxfp4", "place_tiles", "transpose_codes"),
    "rows": ("permute", "quantize", "swiglu", "plan", "scatter", "gather_rows"),
    "attention": ("flash", "fmha", "attention", "softmax"),
    "other GEMMs": ("gemm", "cutlass", "nvjet", "xmma"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", choices=MODELS, default="gpt-oss-120b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--load", type=Path)
    arguments = parser.parse_args()
    adapter.enable("fp8_flow")
    make, sizes = MODELS[arguments.model]
    config = make(**sizes | ({"num_hidden_layers": arguments.layers} if arguments.layers else {}))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    row = {"topic": "finetune", "name": arguments.model, "layers": config.num_hidden_layers}
    if arguments.load:
        row |= loading(config, arguments.load, device)
    else:
        row |= training(config, device, arguments.tokens, arguments.rank, arguments.profile)
    row["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    row["versions"] = {**versions(), "torch": torch.__version__, "transformers": transformers.__version__}
    row |= {"commit": commit(), "command": f"python -m benchmarks.finetune --model {arguments.model}"}
    for key, value in row.items():
        if isinstance(value, (int, float, dict)) and key != "versions":
            print(f"{key:16} {value}", flush=True)
    append(arguments.out, row)


def training(config: Any, device: torch.device, tokens: int, rank: int, profiled: bool) -> dict[str, Any]:
    model = random_model(config, device)
    weights = sum(_nbytes(p) for p in model.parameters())
    lora = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=[], target_parameters=TARGETS)
    model = peft.get_peft_model(model, lora)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=device.type == "cuda")
    batches = torch.randint(config.vocab_size, (WARM + STEPS, 1, tokens), device=device)

    def step(ids: torch.Tensor) -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for ids in batches[:WARM]:
        step(ids)
    _synchronize(device)
    ends = [time.perf_counter()]
    for ids in batches[WARM:]:
        step(ids)
        _synchronize(device)
        ends.append(time.perf_counter())
    seconds = statistics.median(end - start for start, end in itertools.pairwise(ends))
    row: dict[str, Any] = {
        "tokens": tokens,
        "rank": rank,
        "ms": 1e3 * seconds,
        "tokens_per_s": tokens / seconds,
        "weight_bytes": weights,
        "adapter_parameters": sum(p.numel() for p in trained),
        "expert_tflop": 1e-12 * expert_flops(config, tokens),
    }
    if device.type == "cuda":
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
    if profiled:
        row["parts_ms"] = parts_of(lambda: step(batches[0]), device)
    return row


def expert_flops(config: Any, tokens: int) -> int:
    """Of the experts' GEMMs of a step, adapters left out: forward, the same again, and the gradient of the
    rows."""
    ffn = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    layers = config.num_hidden_layers - getattr(config, "first_k_dense_replace", 0)
    return 3 * 2 * tokens * config.num_experts_per_tok * 3 * config.hidden_size * ffn * layers


def random_model(config: Any, device: torch.device) -> Any:
    """A model whose experts are in MXFP4 (gpt-oss) or block FP8, and the rest in bfloat16, without a copy in
    another form."""
    with torch.device("meta"):
        options: dict[str, Any] = {"experts_implementation": "fp8moe", "dtype": torch.bfloat16}
        model: Any = transformers.AutoModelForCausalLM.from_config(config, **options)
    if config.model_type != "gpt_oss":
        kept = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        settings = transformers.FineGrainedFP8Config(modules_to_not_convert=kept)
        model = replace_with_fp8_linear(model, kept, settings, pre_quantized=True)
    for name, p in [*model.named_parameters()]:
        module = model.get_submodule(name.rpartition(".")[0])
        setattr(module, name.rpartition(".")[2], _random(name, p, device))
    for name, module in [*model.named_modules()]:
        if any(b.device.type == "meta" for b in module.buffers(recurse=False)):
            if "rotary" in name:
                model.set_submodule(name, type(module)(config=config).to(device))
            else:
                module.to_empty(device=device, recurse=False)
                for buffer in module.buffers(recurse=False):
                    buffer.zero_()
    return model


def _random(name: str, p: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Weights with a standard deviation of about 0.02."""
    if p.dtype == torch.float8_e4m3fn:  # any code but NaN: about 90
        codes = torch.randint(0, 127, p.shape, dtype=torch.uint8, device=device)
        codes |= torch.randint(0, 2, p.shape, dtype=torch.uint8, device=device) << 7
        return nn.Parameter(codes.view(p.dtype), requires_grad=False)
    if name.endswith("_scale_inv"):
        return nn.Parameter(torch.full(p.shape, 2.0**-12, device=device), requires_grad=False)
    if p.dim() == 3:  # any code of e2m1: about 3
        experts, depth, width = p.shape
        blocks = torch.randint(0, 256, (experts, width, depth // 32, 16), dtype=torch.uint8, device=device)
        scales = torch.randint(118, 121, blocks.shape[:3], dtype=torch.uint8, device=device)
        return parameter(blocks, scales)
    new = torch.empty(p.shape, dtype=p.dtype, device=device)
    return nn.Parameter(new.fill_(1) if "norm" in name else new.normal_(0, 0.02))


def parts_of(call: Any, device: torch.device) -> dict[str, float]:
    """Milliseconds of kernels, by `PARTS`."""
    activities = [torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else None
    with torch.profiler.profile(activities=activities) as profile:
        call()
        _synchronize(device)
    total: Counter[str] = Counter()
    for event in profile.key_averages():
        of = (part for part, words in PARTS.items() if any(word in event.key.lower() for word in words))
        total[next(of, "others")] += event.self_device_time_total
    return {part: microseconds / 1e3 for part, microseconds in total.most_common()}


def loading(config: Any, folder: Path, device: torch.device) -> dict[str, Any]:
    """Bytes per second of `load_mxfp4`, of reading the same files, and of copies to the device."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, p in random_model(config, device).named_parameters():
        if hasattr(p, "blocks"):
            tensors |= {f"{name}_blocks": p.blocks.cpu(), f"{name}_scales": p.scales.cpu()}
        else:
            tensors[name] = p.detach().cpu()
    save_file(tensors, folder / "model.safetensors")
    settings = config.to_dict() | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(settings))
    nbytes = (folder / "model.safetensors").stat().st_size
    row: dict[str, Any] = {"nbytes": nbytes}
    for name, call in (
        ("load", lambda: adapter.load_mxfp4(folder, device=device)),
        ("read", lambda: (folder / "model.safetensors").read_bytes()),
        ("copy", lambda: [t.to(device) for t in tensors.values()]),
    ):
        start = time.perf_counter()
        kept = call()
        _synchronize(device)
        row[f"{name}_gb_per_s"] = nbytes / (time.perf_counter() - start) / 1e9
        del kept
    return row


def _nbytes(p: Any) -> int:
    parts = [p.blocks, p.scales] if hasattr(p, "blocks") else [p]
    return sum(t.numel() * t.element_size() for t in parts)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
