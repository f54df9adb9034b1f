"""Random inputs for all tests: routings, values including special ones, oracles."""

import os
import secrets
from dataclasses import replace

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from fp8moe import Activation, QuantTensor
from fp8moe.runtime.record_trees import arrays_in

#: seed of the run: pytest prints it, and the environment variable repeats the same random values
SEED = int(os.environ.get("FP8MOE_TEST_SEED") or secrets.randbits(32))
BF16 = np.dtype(ml_dtypes.bfloat16)
KINDS = (BF16, np.dtype(np.float16), np.dtype(np.float32))
SIZES = (0, 1, 2, 127, 128, 129, 4096)
EXPERTS = (1, 3, 8, 64, 257)
FLOAT8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
MAX = {"e4m3": 448.0, "e5m2": 57344.0}

# Error of rounding to e4m3: steps of 1/8 to 1/16 of a value, with a standard deviation of 1 / sqrt(12) of a
# step, on average 0.026 of the value. y and each gradient are results of at most five successive products of
# two rounded operands: 0.026 * sqrt(10) = 0.08. Twice that is a safe bound.
FP8_NOISE = 0.16


@st.composite
def routings(draw, sizes=SIZES, experts=EXPERTS):
    """(topk_ids [T, k], num_experts, align_size): dropped ids, duplicates, empty experts, skew."""
    num_experts = draw(st.sampled_from(experts))
    tokens = draw(st.sampled_from(sizes))
    k = draw(st.integers(1, min(8, num_experts)))
    kind = draw(st.sampled_from(("distinct", "duplicates", "one expert", "few experts")))
    dropped = draw(st.sampled_from((0.0, 0.3, 1.0)))
    align = draw(st.sampled_from((1, 4, 16, 128)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if kind == "distinct":
        ids = np.argsort(rng.random((tokens, num_experts)), axis=1)[:, :k]
    elif kind == "duplicates":
        ids = rng.integers(0, num_experts, (tokens, k))
    elif kind == "one expert":
        ids = np.full((tokens, k), rng.integers(0, num_experts))
    else:
        ids = rng.integers(0, max(1, num_experts // 4), (tokens, k))
    none = rng.choice([-1, -7, num_experts, num_experts + 1, 2**31 - 1], ids.shape)
    ids = np.where(rng.random(ids.shape) < dropped, none, ids)
    return ids.astype(draw(st.sampled_from((np.int32, np.int64)))), num_experts, align


def generator(repetition=0):
    """A random generator with different numbers in every run, and in every repetition of a test."""
    return np.random.default_rng((SEED, repetition) if repetition else SEED)


def rows_by_expert(ids, num_experts):
    """For each expert its (token, slot) entries in order: the definition of a plan, by loops."""
    lists = [[] for _ in range(num_experts)]
    for token, row in enumerate(ids.tolist()):
        for slot, expert in enumerate(row):
            if 0 <= expert < num_experts:
                lists[expert].append((token, slot))
    return lists


def layout(ids, num_experts, align):
    """[(row, token, slot, expert)] of every entry in a padded buffer, and the padded expert offsets."""
    entries, start, starts = [], 0, [0]
    for expert, members in enumerate(rows_by_expert(ids, num_experts)):
        entries += [(start + i, t, s, expert) for i, (t, s) in enumerate(members)]
        start += -(-len(members) // align) * align
        starts.append(start)
    return entries, starts


def mask_of(ids, num_experts):
    mask = np.zeros((len(ids), num_experts), bool)
    for token, row in enumerate(ids.tolist()):
        for expert in row:
            if 0 <= expert < num_experts:
                mask[token, expert] = True
    return mask


def unmask(mask):
    """Expert ids of a mask, in ascending order, followed by -1."""
    width = max(int(mask.sum(axis=1).max(initial=0)), 1)
    ids = np.full((len(mask), width), -1)
    for token in range(len(mask)):
        experts = np.nonzero(mask[token])[0]
        ids[token, : len(experts)] = experts
    return ids


def values(rng, shape, dtype=np.float32, awkward=False):
    """Normal values of many magnitudes; ``awkward`` adds 0, -0, NaN, infinities and subnormals."""
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-8, 9, shape))
    if awkward and x.size:
        special = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-40, -1e-40, 3e38, 1e-30])
        where = rng.random(shape) < 0.02
        x = np.where(where, rng.choice(special, shape), x)
        if x.ndim == 2:  # whole rows of zeros, and rows with one tiny value
            x[rng.random(len(x)) < 0.1] = 0
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(dtype)


def poisoned(shape, dtype):
    """An output buffer filled with `poison`, so that elements that are not written are detected."""
    out = np.empty(shape, dtype)
    out.reshape(-1).view(np.uint8)[:] = poison(dtype)
    return out


def poison(dtype):
    """A byte that makes values unlike any result: NaN, because 0xA5 is -3e-16 in float32 and bfloat16, which
    is within an absolute tolerance; of integers a large one, because -1 means that there is none."""
    return 0xA5 if np.issubdtype(dtype, np.integer) else 0xFF


def same_bits(a, b):
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def to_float8(y, fmt):
    """float64 -> codes by ml_dtypes, directly from float64: an encoder independent of the library."""
    codes = np.clip(y, -MAX[fmt], MAX[fmt]).astype(FLOAT8[fmt]).view(np.uint8)
    return np.where(np.isnan(y), np.uint8(0x7F), codes)


def from_float8(codes, fmt):
    return codes.view(FLOAT8[fmt]).astype(np.float64)


def assert_same(expected, actual):
    """Checks that records are bitwise equal; codes may be float8 in one and bytes in the other."""
    for a, b in zip(arrays_in(expected), arrays_in(actual), strict=True):
        assert same_bits(a, b.view(a.dtype)), (a.shape, a.dtype)


def assert_nearly_same(expected, actual):
    """Allows for a float32 sigmoid with relative error 2^-20, which changes about one code in 10^5."""
    for a, b in zip(arrays_in(expected), arrays_in(actual), strict=True):
        assert (a != b).mean() <= 1e-3


def plan_with(plan, **arrays):
    """A plan with some of its arrays replaced."""
    changed = replace(plan, data=plan.data.copy())
    for name, array in arrays.items():
        part = getattr(changed, name)  # a view
        assert part.shape == array.shape
        part[...] = array
    return changed


def offsets_of(counts):
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)


def relative(got, wanted):
    norm = np.linalg.norm(wanted)
    return np.linalg.norm(got.astype(np.float64) - wanted) / norm if norm else np.abs(got).max(initial=0)


def assert_close(pair, bound):
    """Of (the reference's result, the backend's), by the norm of their difference."""
    a, b = (v.astype(np.float64) for v in pair)
    assert np.linalg.norm(b - a) <= bound * max(np.linalg.norm(a), 1e-30)


def layer_inputs(seed, tokens=96, hidden=128, ffn=128, experts=4, k=2, dtype=BF16, dropped=0.0):
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :k].astype(np.int32)
    ids = np.where(rng.random(ids.shape) < dropped, -1, ids).astype(np.int32)
    return {
        "x": rng.standard_normal((tokens, hidden)).astype(dtype),
        "w13": (rng.standard_normal((experts, 2 * ffn, hidden)) / hidden**0.5).astype(dtype),
        "w2": (rng.standard_normal((experts, hidden, ffn)) / ffn**0.5).astype(dtype),
        "topk_ids": ids,
        "topk_probs": rng.random(ids.shape).astype(np.float32 if dtype == BF16 else dtype),
    }, rng.standard_normal((tokens, hidden)).astype(dtype)


GPT_OSS = Activation(clamp=7.0, alpha=1.702, linear_offset=1.0)

#: offsets with experts at multiples of 128, or no experts
TILE_OFFSETS = (None, np.array([0, 256, 256, 384], np.int32), np.array([128, 256, 512], np.int32))
ACTIVATIONS = (
    Activation(),
    GPT_OSS,
    Activation(clamp=0.5),
    Activation("geglu"),
    Activation("geglu_tanh"),
    Activation("geglu", clamp=0.5, linear_offset=1.0),
    Activation("relu2"),
    Activation("gelu"),
    Activation("gelu_tanh"),
    Activation("silu", alpha=1.702),
)


def random_rowwise(rng, rows, cols, fmt, width, spread):
    """Random codes, including NaN and infinities, with random power-of-two scales."""
    codes = rng.integers(0, 256, (rows, cols), np.uint8)
    if rng.random() < 0.7:  # NaN, which sets its block's scale to 1, only in 30 % of the cases
        codes[~np.isfinite(from_float8(codes, fmt))] = 0x80
    codes[rng.random(rows) < 0.15] = 0
    codes[:, rng.random(cols) < 0.1] = rng.choice([0x00, 0x80])
    shape = (rows, -(-cols // width))
    exponents = rng.integers(-spread, spread + 1, shape)
    if width == 32:
        return QuantTensor(codes, (exponents + 127).astype(np.uint8), fmt, (1, 32))
    scales = np.exp2(exponents).astype(np.float32)
    scales[rng.random(shape) < 0.05] = 0
    return QuantTensor(codes, scales, fmt)
