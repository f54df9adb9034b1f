"""The bias of the experts' second product, against float64; a torch layer's results are in
test_torch_functional.py."""

import itertools

import numpy as np
import pytest
from backends import over
from cases import BF16, assert_same, generator, poisoned, same_bits, values

from fp8moe.ops.bias import add_biases, add_biases_backward
from fp8moe.reference import bias as reference

RNG = generator()
F16, F32, F64 = (np.dtype(t) for t in (np.float16, np.float32, np.float64))
KINDS = BF16, F16, F32, F64
#: largest relative error of rounding to a dtype, and the smallest number's half, below which it is absolute
UNIT = {BF16: 2.0**-8, F16: 2.0**-11, F32: 2.0**-24, F64: 2.0**-53}
TINY = {BF16: 2.0**-134, F16: 2.0**-25, F32: 2.0**-150, F64: 0.0}
#: (tokens, experts, k, columns, further columns of y): rows of one turn and of two; more experts of a token
#: than a block holds at once; of odd widths; nothing of each
SIZES = [
    (5, 7, 4, 720, 48),
    (2, 5, 6, 4616, 0),
    (3, 70, 67, 264, 0),
    (1, 9, 66, 4616, 0),
    (6, 4, 1, 8, 8),
    (4, 5, 3, 77, 3),
    (1, 3, 2, 1, 0),
    *((0, 3, 2, 8, 0), (3, 0, 2, 8, 0), (3, 4, 0, 8, 0), (3, 4, 2, 0, 5)),
]
LARGE = [(8192, 32, 4, 2880, 192), (1003, 128, 8, 7168, 0), (64, 16, 2, 2881, 0)]
BOTH_PATHS = pytest.mark.parametrize("kind", [BF16, F32], ids=str)


def problem(sizes, kind, bias_kind=None, probs_kind=F32, ids_kind=np.int32):
    """(y, bias, ids, probs). Ids of no expert have a NaN as probability, and the last expert, which has no
    row, a NaN as bias: neither may be read into a sum."""
    tokens, experts, k, width, more = sizes
    y = values(RNG, (tokens, width + more), kind)
    bias = RNG.standard_normal((experts, width)).astype(bias_kind or kind)  # no dot product overflows float16
    bias[-1:] = np.nan
    ids = RNG.integers(-2, max(experts, 2), (tokens, k))
    none = RNG.choice([experts, experts + 1, 2**31 - 1, -(2**31)], ids.shape)
    ids = np.where(ids >= experts - 1, none, ids)
    probs = RNG.standard_normal((tokens, k))
    probs[(ids < 0) | (ids >= experts)] = np.nan
    return y, bias, ids.astype(ids_kind), probs.astype(probs_kind)


def dense(ids, probs, experts):
    """The probabilities as a matrix [T, E], in float64, and their magnitudes."""
    shares, sizes = np.zeros((2, len(ids), experts))
    for t, j in zip(*np.nonzero((ids >= 0) & (ids < experts)), strict=True):
        shares[t, ids[t, j]] += probs[t, j].astype(np.float64)
        sizes[t, ids[t, j]] += abs(probs[t, j].astype(np.float64))
    return shares, sizes


def sums_agree(backend, y, bias, ids, probs):
    """Both backends against a matrix product in float64, and with each other bit for bit."""
    (experts, width), kind, k = bias.shape, y.dtype, ids.shape[1]
    shares, magnitudes = dense(ids, probs, experts)
    b = np.nan_to_num(bias.astype(np.float64))
    exact = y[:, :width].astype(np.float64) + shares @ b
    size = np.abs(y[:, :width].astype(np.float64)) + magnitudes @ np.abs(b)
    # each operand may be rounded (two units), each of k products and k + 1 sums is; in float64 so are the
    # oracle's products and sums, of all experts. Then the result is rounded once.
    unit = UNIT[F64] if kind == F64 else UNIT[F32]
    bound = unit * (2 * k + 4 + (2 * experts if kind == F64 else 0)) * size
    bound += UNIT[kind] * (np.abs(exact) + bound) + TINY[kind]
    results = backend.both(add_biases, y, bias, ids, probs)
    for actual in results:
        assert (actual.dtype, actual.shape) == (kind, exact.shape)
        assert (np.abs(actual.astype(np.float64) - exact) <= bound).all()
    assert_same(*results)


def dots_agree(backend, grad, bias, ids, probs):
    """Both backends against dot products in float64, of all experts."""
    width, named = bias.shape[1], (ids >= 0) & (ids < len(bias))
    g, b = grad.astype(np.float64), np.nan_to_num(bias.astype(np.float64))
    rows, at = np.nonzero(named)
    exact, size = np.zeros((2, *ids.shape))
    exact[named] = (g @ b.T)[rows, ids[rows, at]]
    size[named] = (np.abs(g) @ np.abs(b).T)[rows, ids[rows, at]]
    # 32 sums in float32, of products that are exact there; or float64 of operands rounded to float32; then
    # float64, which adds one product at a time at most, as does the oracle
    bound = (UNIT[F64] * 2 * (width + 2) + (0 if grad.dtype == F64 else 34 * UNIT[F32])) * size
    kind = probs.dtype
    bound += (UNIT[kind] + UNIT[F32]) * (np.abs(exact) + bound) + TINY[kind]
    for actual in backend.both(add_biases_backward, grad, bias, ids, probs):
        assert (actual.dtype, actual.shape) == (kind, exact.shape)
        assert (np.abs(actual.astype(np.float64) - exact) <= bound).all()
        assert not actual[~named].any()


def both_agree(backend, y, *rest):
    sums_agree(backend, y, *rest)
    dots_agree(backend, np.ascontiguousarray(y[:, : rest[0].shape[1]]), *rest)


@BOTH_PATHS
@over(
    "sizes",
    reference=[(s,) for s in SIZES],
    on_cpu=[(s,) for s in SIZES],
    on_gpu=[(s,) for s in (*SIZES, *LARGE)],
)
def test_sums_and_dots_equal_float64s(backend, sizes, kind):
    both_agree(backend, *problem(sizes, kind))


def test_every_dtype(backend):
    """Of y and of the biases, with and without whole vectors, and of ids and probabilities."""
    others = itertools.cycle(itertools.product((np.int32, np.int64), KINDS))
    for kind, bias_kind, width in itertools.product(KINDS, KINDS, (136, 21)):
        ids_kind, probs_kind = next(others)
        both_agree(backend, *problem((3, 5, 3, width, 0), kind, bias_kind, probs_kind, ids_kind))


@BOTH_PATHS
@over(
    "sizes",
    reference=[((90, 6, 4, 328, 8),)],
    on_cpu=[((9, 6, 4, 328, 8),), ((9, 6, 4, 77, 0),)],
    on_gpu=[((4096, 32, 4, 2880, 192),), ((500, 9, 3, 77, 0),)],
)
def test_a_row_depends_on_itself_alone(backend, sizes, kind):
    """Bit for bit: alone, among others, and in another order."""
    y, bias, ids, probs = problem(sizes, kind)
    grad, order = np.ascontiguousarray(y[:, : sizes[3]]), RNG.permutation(len(y))
    for function, of_rows in ((add_biases, y), (add_biases_backward, grad)):
        whole = backend.both(function, of_rows, bias, ids, probs)
        for rows in (order, order[:3], order[:1]):
            some = backend.both(function, of_rows[rows], bias, ids[rows], probs[rows])
            assert all(same_bits(a, b[rows]) for a, b in zip(some, whole, strict=True))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_reference_writes_every_element(kind):
    """Of more elements than one thread computes."""
    y, *rest = problem((70, 8, 3, 400, 7), kind)
    grad = np.ascontiguousarray(y[:, :400])
    for function, rows in ((add_biases, y), (add_biases_backward, grad)):
        wanted = function(rows, *rest)
        out = poisoned(wanted.shape, wanted.dtype)
        getattr(reference, function.__name__)(rows, *rest, out=out)
        assert same_bits(out, wanted)


def test_sums_are_fused_multiply_adds_in_the_order_of_ids():
    """Of probabilities whose products with biases float32 cannot hold. A sum of a product of 48 bits and a
    float32 is rounded to a long double first, with 64 bits where that is wider than a double."""
    y, bias = values(RNG, (40, 33)), values(RNG, (6, 33))
    ids = RNG.integers(0, 6, (40, 5)).astype(np.int32)
    probs = RNG.random((40, 5)).astype(np.float32)
    total = np.zeros(y.shape, np.float32)
    twice = total.copy()
    for j in range(5):
        of_row, weight = bias[ids[:, j]], probs[:, j, None]
        total = (of_row.astype(np.longdouble) * weight + total).astype(np.float32)
        twice += of_row * weight
    assert same_bits(add_biases(y, bias, ids, probs), total + y)
    assert (total + y != twice + y).any()


def test_refusals():
    y, bias = np.ones((3, 8), np.float32), np.ones((4, 8), np.float32)
    ids, probs = np.zeros((3, 2), np.int32), np.ones((3, 2), np.float32)
    with pytest.raises(ValueError, match=r"y: got shape \[3, 7\]; wanted at least the 8 columns of bias"):
        add_biases(y[:, :7].copy(), bias, ids, probs)
    with pytest.raises(ValueError, match=r"topk_ids: got shape \[2, 2\]; wanted \[3, k\]"):
        add_biases(y, bias, ids[:2], probs)
    with pytest.raises(ValueError, match=r"topk_probs: got shape \[3, 1\]; wanted \[3, 2\]"):
        add_biases(y, bias, ids, probs[:, :1].copy())
    with pytest.raises(TypeError, match="topk_ids: got dtype int16; wanted int32, int64"):
        add_biases(y, bias, ids.astype(np.int16), probs)
    with pytest.raises(ValueError, match=r"grad: got shape \[3, 8\]; wanted \[T, 7\]"):
        add_biases_backward(y, bias[:, :7].copy(), ids, probs)
