"""Host time of a call in eager torch: sustained, as in a training step's sequence of calls, and alone, after
the device has finished all earlier work. ``python -m benchmarks.host [--out FILE]``, on CUDA."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import fp8moe
import fp8moe.torch
from fp8moe.bench.harness import append
from fp8moe.info import commit, versions

ROUNDS, SUSTAINED_CALLS = 21, 50  # rounds of the median; number of calls that do not fill the launch queue
TOKENS, EXPERTS, HIDDEN, TOPK = 4096, 256, 7168, 8

Case = tuple[str, Callable[[], Any], Callable[[Any], Any]]  # (name, function that makes the argument, call)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    for row in measure():
        times = f"{row['host_us']:8.1f} us sustained, {row['first_us']:8.1f} us alone"
        print(f"{row['name']:44} {row['shape']:16} {times}", flush=True)
        append(arguments.out, row)


def cases() -> Iterator[Case]:
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    differentiable = x.clone().requires_grad_()
    probs = torch.rand(TOKENS, TOPK, device="cuda")
    ids = torch.rand(TOKENS, EXPERTS, device="cuda").topk(TOPK).indices.int()
    rows = TOKENS * TOPK + EXPERTS * 16
    offsets = torch.arange(0, TOKENS + 1, TOKENS // 8, device="cuda", dtype=torch.int32)

    def permute(x: torch.Tensor) -> Any:
        return fp8moe.torch.permute_and_pad(
            x, ids, probs, num_experts=EXPERTS, align_size=16, num_out_tokens=rows
        )

    def transpose(q: fp8moe.QuantTensor) -> Any:
        return fp8moe.torch.scaling_aware_transpose(q, offsets)

    yield "permute+pad bf16, plan and rows", lambda: x, permute
    yield "permute+pad bf16, plan and rows, for autograd", lambda: differentiable, permute
    yield "quantize 1x128", lambda: x, fp8moe.torch.quantize
    yield "quantize 1x128, out=", lambda: fp8moe.quantize(x), lambda q: fp8moe.quantize(x, out=q)
    yield "dequantize", lambda: fp8moe.quantize(x), lambda q: fp8moe.dequantize(q, dtype="bfloat16")
    yield "scaling_aware_transpose", lambda: fp8moe.torch.quantize(x), transpose

    w13, w2 = (
        fp8moe.quantize_weights(torch.randn(8, *shape, device="cuda").bfloat16())
        for shape in ((512, 256), (256, 256))
    )
    small_x, ids8 = (t[:256].contiguous() for t in (x[:, :256], ids % 8))
    few_offsets = torch.arange(0, 257, 32, device="cuda", dtype=torch.int32)

    def product(q: fp8moe.QuantTensor) -> Any:
        return fp8moe.grouped_gemm(q, w13.rowwise, few_offsets)

    def forward(rows: torch.Tensor) -> Any:
        return fp8moe.moe_forward(rows, w13, w2, ids8, probs[:256], recipe="fp8_flow")

    yield "grouped_gemm fp8", lambda: fp8moe.quantize(small_x), product
    y, saved = forward(small_x)
    yield "moe_forward fp8_flow", lambda: small_x, forward
    yield "moe_backward fp8_flow", lambda: y, lambda dy: fp8moe.moe_backward(saved, dy)


def measure() -> Iterator[dict[str, Any]]:
    for name, make_argument, call in cases():
        alone, sustained = [], []
        for _ in range(ROUNDS):
            alone.append(seconds(call, [make_argument()]))
            sustained.append(
                seconds(call, [make_argument() for _ in range(SUSTAINED_CALLS)]) / SUSTAINED_CALLS
            )
        yield {
            "topic": "host",
            "name": name,
            "shape": _shape(name),
            "device": torch.cuda.get_device_name(),
            "host_us": statistics.median(sustained) * 1e6,
            "first_us": statistics.median(alone) * 1e6,
            "versions": {**versions(), "torch": torch.__version__},
            "commit": commit(),
            "command": "python -m benchmarks.host",
        }


def _shape(name: str) -> str:
    if name.startswith("grouped_gemm"):
        return "256 x 512 x 256, 8 experts"
    if name.startswith("moe"):
        return "256 x 256, 8 experts, top-8"
    return f"{TOKENS},{EXPERTS},{HIDDEN},{TOPK}" if "permute" in name else f"{TOKENS} x {HIDDEN}"


def seconds(call: Callable[[Any], Any], arguments: list[Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for argument in arguments:
        call(argument)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
