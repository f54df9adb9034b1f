"""The arithmetic of serving engines' block-FP8 experts, step by step in NumPy, without the library; and the
table of `docs/concepts/serving.md`, which ``python tests/serving.py`` prints.

Written from what vLLM and SGLang do on Hopper: rows are quantised by 1 x 128, a GEMM's float32 sums of 128
products are added to float32 totals, times the product of both scales, in one fused multiply-add, and its
result is rounded to bfloat16. Here the sums of 128 are computed in float64 and rounded once.
"""

from dataclasses import dataclass, replace

import numpy as np
from cases import BF16, from_float8, to_float8

BLOCK = 128


@dataclass(frozen=True)
class Arithmetic:
    """Where experts differ. The defaults are those of "fp8_flow".

    scales: of the rows of x and of the activation: "ue8m0", powers of two; "float", amax / 448, by which rows
    are divided; or "reciprocal", the same scale, by whose reciprocal rows are multiplied.
    activation: SiLU(gate) * up before it is quantised: "float32"; "bfloat16", rounded once; or "bfloat16
    twice", where SiLU(gate) is rounded, too.
    weights: what the router's weights multiply: the "activation" in float32, fc2's float32 "sums" before
    these are rounded to bfloat16, or the rounded "rows".
    order: of a token's experts in the sum of their rows: by descending "expert", or by "slot".
    total: dtype of this sum, and of the weights where they multiply rows.
    """

    scales: str = "ue8m0"
    activation: str = "float32"
    weights: str = "activation"
    order: str = "expert"
    total: str = "float32"


OURS = {"fp8_flow": Arithmetic(), "fp8_blockwise": Arithmetic(activation="bfloat16")}
ENGINES = {
    "vLLM, DeepGEMM": Arithmetic("ue8m0", "bfloat16 twice", "rows", "slot"),
    "vLLM, Triton": Arithmetic("float", "bfloat16 twice", "sums", "slot"),
    "SGLang, Triton": Arithmetic("float", "bfloat16", "sums", "slot"),
    "SGLang, DeepGEMM": Arithmetic("float", "bfloat16", "rows", "slot"),
}


def rounded(values):
    """float32 values that bfloat16 has."""
    return values.astype(BF16).astype(np.float32)


def quantised(rows, scales):
    """(codes as float32 [M, K], scales [M, K / 128]) of float32 rows."""
    blocks = rows.reshape(len(rows), -1, BLOCK)
    amax = np.maximum(np.abs(blocks).max(axis=2), np.float32(1e-10))
    by = amax / np.float32(448)
    if scales == "ue8m0":
        by = np.exp2(np.ceil(np.log2(by.astype(np.float64)))).astype(np.float32)
    each = by[:, :, None]
    scaled = blocks * (np.float32(1) / each) if scales == "reciprocal" else blocks / each
    codes = from_float8(to_float8(scaled.astype(np.float64), "e4m3"), "e4m3")
    return codes.reshape(rows.shape), by


def product(codes, scales, w, w_scales):
    """float32 totals [M, N] of codes [M, K] and w's codes [N, K], with scales of 1 x 128 and 128 x 128."""
    totals = np.zeros((len(codes), len(w)), np.float32)
    for block, start in enumerate(range(0, codes.shape[1], BLOCK)):
        sums = (codes[:, start : start + BLOCK] @ w[:, start : start + BLOCK].T).astype(np.float32)
        by = scales[:, block, None] * np.repeat(w_scales[:, block], BLOCK)[: len(w)]
        totals = (totals + sums.astype(np.float64) * by).astype(np.float32)
    return totals


def activated(h, weights, how):
    """float32 [M, F] of bfloat16-valued h [M, 2F]; weights: float32 [M], or None."""
    gate, up = np.split(h, 2, axis=1)
    silu = gate * (1 / (1 + np.exp(-gate.astype(np.float64)))).astype(np.float32)
    if how == "bfloat16 twice":
        silu = rounded(silu)
    result = silu * up
    if weights is not None:
        result = result * weights[:, None]
    return result if how == "float32" else rounded(result)


def serve(x, w13, w2, ids, probs, how):
    """y, bfloat16 [T, H]. x: bfloat16 [T, H]. w13, w2: (codes as bytes [E, N, K], float32 scales [E, N / 128,
    K / 128]). ids, probs: [T, k]."""
    codes, scales = quantised(x.astype(np.float32), how.scales)
    rows = np.zeros((*ids.shape, x.shape[1]), np.float32)
    for expert in range(len(w13[0])):
        token, slot = np.nonzero(ids == expert)
        share = probs[token, slot]
        of_w13, of_w2 = ((from_float8(c[expert], "e4m3"), s[expert]) for c, s in (w13, w2))
        h = rounded(product(codes[token], scales[token], *of_w13))
        a = activated(h, share if how.weights == "activation" else None, how.activation)
        sums = product(*quantised(a, how.scales), *of_w2)
        rows[token, slot] = rounded(sums * share[:, None] if how.weights == "sums" else sums)
    y = np.zeros(x.shape, np.float32)
    order = (
        np.argsort(-ids, axis=1, kind="stable") if how.order == "expert" else np.arange(ids.shape[1])[None]
    )
    narrow = rounded if how.total == "bfloat16" else np.float32
    for slot in np.broadcast_to(order, ids.shape).T:
        has = np.take_along_axis(ids, slot[:, None], 1) >= 0
        values = rows[np.arange(len(x)), slot]
        if how.weights == "rows":
            values = narrow(values * narrow(np.take_along_axis(probs, slot[:, None], 1)))
        y = np.where(has, narrow(y + values), y)
    return y.astype(BF16)


# ---------------------------------------------------------------- the table


def case(rng, tokens=64, hidden=256, ffn=256, experts=16, topk=8):
    """x bfloat16 [T, H], w13 and w2 float32, ids int32 [T, k], probs float32 [T, k] with sums of 1."""
    x = rng.standard_normal((tokens, hidden)).astype(BF16)
    w13 = (rng.standard_normal((experts, 2 * ffn, hidden)) / hidden**0.5).astype(np.float32)
    w2 = (rng.standard_normal((experts, hidden, ffn)) / ffn**0.5).astype(np.float32)
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :topk].astype(np.int32)
    probs = rng.random(ids.shape).astype(np.float32)
    return x, w13, w2, ids, probs / probs.sum(axis=1, keepdims=True)


def weights_of(w, pow2=True):
    """(codes, scales) of [E, N, K], with powers of two for scales, or amax / 448."""
    experts, rows, columns = w.shape
    blocks = w.reshape(experts, rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scales = np.abs(blocks).max(axis=(2, 4)).astype(np.float64) / 448
    scales = np.exp2(np.ceil(np.log2(scales))) if pow2 else scales.astype(np.float32)
    codes = to_float8(blocks / scales[:, :, None, :, None].astype(np.float64), "e4m3").reshape(w.shape)
    return codes, scales.astype(np.float32)


def values_of(codes, scales):
    return from_float8(codes, "e4m3") * np.repeat(np.repeat(scales, BLOCK, axis=1), BLOCK, axis=2)


def exact(x, w13, w2, ids, probs):
    """y in float64, of the weights before they are quantised."""
    wide, y = x.astype(np.float64), np.zeros(x.shape)
    for expert in range(len(w13)):
        token, slot = np.nonzero(ids == expert)
        gate, up = np.split(wide[token] @ w13[expert].T, 2, axis=1)
        y[token] += probs[token, slot, None] * (gate / (1 + np.exp(-gate)) * up @ w2[expert].T)
    return y


def distance(y, other):
    """Norm of the difference over the norm of the second."""
    y, other = y.astype(np.float64), other.astype(np.float64)
    return np.linalg.norm(y - other) / np.linalg.norm(other)


def difference(y, other):
    """(share of values with other bits, `distance`) of bfloat16 arrays."""
    return (y.view(np.uint16) != other.view(np.uint16)).mean(), distance(y, other)


STEPS = {
    "float scales": {"scales": "float"},
    "activation rounded to bfloat16": {"activation": "bfloat16"},
    "SiLU(gate) and activation rounded to bfloat16": {"activation": "bfloat16 twice"},
    "router's weights on fc2's float32 sums": {"weights": "sums"},
    "router's weights on fc2's bfloat16 rows": {"weights": "rows"},
    "experts summed by slot": {"order": "slot"},
    "summed in bfloat16": {"total": "bfloat16"},
}


def table():
    """Markdown lines: what one step alone changes in y of "fp8_flow", each engine's distance from ours, and
    that of the page's program from the engine that it computes."""
    x, w13, w2, ids, probs = case(np.random.default_rng(0))
    inputs = x, weights_of(w13), weights_of(w2), ids, probs
    ours = {recipe: serve(*inputs, how) for recipe, how in OURS.items()}

    def cell(y, other):
        bits, norm = difference(y, other)
        return f"{100 * bits:.0f} %, {100 * norm:.1f} %"

    lines = ["| one step changed | y of fp8_flow: other bits, norm |", "|---|---:|"]
    for name, fields in STEPS.items():
        changed = serve(*inputs, replace(OURS["fp8_flow"], **fields))
        lines.append(f"| {name} | {cell(changed, ours['fp8_flow'])} |")
    floats = replace(OURS["fp8_flow"], scales="float")
    after = cell(serve(*inputs, replace(floats, weights="rows")), serve(*inputs, floats))
    lines.append(f"| router's weights on fc2's bfloat16 rows, where both have float scales | {after} |")
    published = [weights_of(w, pow2=False) for w in (w13, w2)]
    again = [weights_of(values_of(*w)) for w in published]
    loaded = (serve(x, *weights, ids, probs, OURS["fp8_flow"]) for weights in (again, published))
    lines.append(
        f"| experts' weights with float scales quantised again, to powers of two | {cell(*loaded)} |"
    )
    lines += ["", "| experts | from fp8_flow: other bits, norm | from fp8_blockwise | from float64 |"]
    lines.append("|---|---:|---:|---:|")
    for name, how in {**OURS, **ENGINES}.items():
        y = serve(*inputs, how)
        cells = [cell(y, ours[recipe]) for recipe in OURS]
        cells.append(f"{100 * distance(y, exact(x, w13, w2, ids, probs)):.1f} %")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "| the program | from SGLang, DeepGEMM, with the same scales |", "|---|---:|"]
    for pow2, theirs, program in ((True, "ue8m0", "ue8m0"), (False, "float", "reciprocal")):
        y, wanted = (
            serve(*inputs, replace(ENGINES["SGLang, DeepGEMM"], scales=s)) for s in (program, theirs)
        )
        lines.append(f"| `pow2={pow2}` | {cell(y, wanted)} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
