"""Cost of expert parallelism, measured, and estimated beyond four GPUs: two tables for
`benchmarks.table`, from the measured layer and exchange."""

from __future__ import annotations

import json
import math
from typing import Any

from benchmarks.table import RESULTS

EXPERTS, TOPK, HIDDEN, TOKENS = 256, 8, 7168, 16_384  # DeepSeek-V3's layer; tokens per rank
NODE = 8  # GPUs connected by NVLink
NETWORK = 400e9 / 8 * 0.9  # bytes per second and GPU: 400 Gb/s at 90 % utilisation
TAIL = 16 * math.ceil(4 * TOPK / 16)  # bytes of a row's ids, or of its probabilities
FP8_ROW, BF16_ROW = HIDDEN + 16 * math.ceil(HIDDEN / 128 * 4 / 16), 2 * HIDDEN


RECIPES = ("bf16", "fp8_blockwise", "fp8_flow")
# runs on several GPUs that made the FP8 copies of the weights once; all other runs made them in every step
WEIGHTS_KEPT = {"e3e3fd1", "db090c1"}


def measured() -> str:
    """Tokens per second and GPU through the layer, with eight experts per GPU."""
    lines = [
        "| GPUs | tokens per GPU | tokens/s per GPU, bf16 | fp8_blockwise | fp8_flow "
        "| speedup of fp8_flow over bf16 | scaling efficiency, bf16 / fp8_flow |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    several = [(world, *_on_several(world)) for world in (2, 4)]
    for tokens in (4096, TOKENS):
        for kept in (False, True):
            runs = [(w, rates.get(tokens, {})) for w, rates, is_kept in several if is_kept == kept]
            runs = [(world, speeds) for world, speeds in runs if {*RECIPES} <= {*speeds}]
            if not runs:
                continue
            alone = _on_one(tokens, kept)
            for world, speeds in [(1, alone), *runs]:
                columns = (f"{speeds[r] / 1e3:.0f} k" for r in RECIPES)
                share = " / ".join(f"{100 * speeds[r] / alone[r]:.0f} %" for r in ("bf16", "fp8_flow"))
                gain = speeds["fp8_flow"] / speeds["bf16"]
                gpus = f"{world}, weights unchanged" if kept else f"{world}"
                lines.append(f"| {gpus} | {tokens} | {' | '.join(columns)} | {gain:.2f}x | {share} |")
    return "\n".join(lines) + "\n"


def _on_one(tokens: int, kept: bool) -> dict[str, float]:
    """Tokens per second by recipe, on one GPU; kept: fp8_flow without making copies of the weights."""
    rows = [r for r in _rows("layer-h200") if r["shape"].startswith(f"{tokens} tokens")]
    speeds = {r["name"]: tokens / r["ms"] * 1e3 for r in rows if ", 8 experts" in r["shape"]}
    return {**speeds, "fp8_flow": speeds["fp8_flow, weights unchanged" if kept else "fp8_flow"]}


def _on_several(world: int) -> tuple[dict[int, dict[str, float]], bool]:
    """The last run's `_on_one` by tokens, per GPU of several with NCCL, and whether it kept the copies of the
    weights."""
    rows = [r for r in _rows(f"exchange-h200-x{world}") if r.get("by", "nccl") == "nccl"]
    last = [r for r in rows if r["commit"] == rows[-1]["commit"] and r["name"].startswith("layer, ")]
    speeds: dict[int, dict[str, float]] = {}
    for r in last:
        rates = speeds.setdefault(int(r["shape"].split()[0]), {})
        rates[r["name"].removeprefix("layer, ")] = r["tokens_per_s"]
    return speeds, rows[-1]["commit"] in WEIGHTS_KEPT


def table() -> str:
    computed = measured_layer()
    nvlink = measured_nvlink()
    lines = [
        f"NVLink {nvlink / 1e9:.0f} GB/s as measured, network {NETWORK / 1e9:.0f} GB/s; compute of {TOKENS} "
        f"tokens per rank: {computed['bf16'] * 1e3:.1f} ms in bf16, {computed['fp8_flow'] * 1e3:.1f} ms in "
        "fp8_flow.",
        "",
        "| ranks | rows sent per token, of which to other nodes | MB sent per layer, bf16 / FP8 "
        "| exchange (ms), bf16 / FP8 | speedup of FP8, no overlap | speedup, exchange fully overlapped |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for world in (2, 4, 8, 16, 32, 64, 128, 256):
        local_rows, remote_rows = rows_sent(world)
        rows = TOKENS * (local_rows + remote_rows)
        sent, spent = {}, {}
        for recipe, forward, backward in (
            ("bf16", BF16_ROW, BF16_ROW),
            ("fp8_flow", FP8_ROW, FP8_ROW),
        ):
            # dispatch and the combine of its backward include ids and probabilities; combine sends bfloat16
            ways = (forward + 2 * TAIL, BF16_ROW, backward, BF16_ROW + TAIL)
            sent[recipe] = rows * sum(ways)
            spent[recipe] = TOKENS * sum(ways) * (local_rows / nvlink + remote_rows / NETWORK)
        both = (computed["bf16"] + spent["bf16"]) / (computed["fp8_flow"] + spent["fp8_flow"])
        hidden = max(computed["bf16"], spent["bf16"]) / max(computed["fp8_flow"], spent["fp8_flow"])
        megabytes = f"{sent['bf16'] / 1e6:.0f} / {sent['fp8_flow'] / 1e6:.0f}"
        milliseconds = f"{spent['bf16'] * 1e3:.1f} / {spent['fp8_flow'] * 1e3:.1f}"
        gains = f"{both:.2f}x | {hidden:.2f}x"
        sent_rows = f"{local_rows + remote_rows:.2f}, {remote_rows:.2f}"
        lines.append(f"| {world} | {sent_rows} | {megabytes} | {milliseconds} | {gains} |")
    return "\n".join(lines) + "\n"


def rows_sent(world: int) -> tuple[float, float]:
    """Rows per token to other ranks of its node, and to other nodes, with experts selected uniformly."""
    experts_per_rank = EXPERTS // world
    # probability that a rank has one of the token's experts
    needed = 1 - math.comb(EXPERTS - experts_per_rank, TOPK) / math.comb(EXPERTS, TOPK)
    local_rows = min(world, NODE) - 1
    return local_rows * needed, (world - 1 - local_rows) * needed


def measured_layer() -> dict[str, float]:
    """Seconds of the layer's forward and backward for TOKENS tokens, by recipe."""
    speeds = {}
    for r in _rows("layer-h200"):
        if r["shape"].startswith(f"{TOKENS} tokens") and "32 experts" in r["shape"]:
            speeds[r["name"]] = r["ms"] / 1e3
    return speeds


def measured_nvlink() -> float:
    """Bytes per second that a rank sent in the largest measured exchange."""
    rows = [r for r in _rows("exchange-h200-x4") if r["name"] == "exchange, fp8"]
    return max(r["sent_bytes"] / r["us"] * 1e6 for r in rows)


def _rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]
