"""Tiles that blocks take when they are free, and kernels without tiles where those do not fit."""

import numpy as np
from backends import only_on_cpu, over
from cases import BF16, assert_nearly_same, assert_same, generator, offsets_of, random_rowwise, values

import fp8moe

RNG = generator()


@over(
    "counts, columns",
    on_cpu=[
        ([144, 0, 176, 16, 33], 256),
        ([16, *[0] * 290, 5, 20], 256),  # more experts than a block examines at a time
    ],
    on_gpu=[(RNG.integers(0, 400, 40).tolist(), 18 * 128)],  # about 70 rows of tiles
)
def test_tiles_are_taken_when_free(backend, monkeypatch, counts, columns):
    """With many tiles per block, blocks take tiles dynamically; all results must be equal."""
    from fp8moe.kernels_cuda import quantize

    monkeypatch.setattr(quantize, "MANY_TURNS", 0)
    offsets = offsets_of(counts)
    rows = int(offsets[-1])
    x = values(RNG, (rows, columns), BF16)
    h, probs = values(RNG, (rows, 2 * columns), BF16), RNG.random(rows).astype(np.float32)
    for width in (128, 32):
        q = random_rowwise(RNG, rows, columns, "e4m3", width, 5)
        block = {"block": (1, width), "columnwise": True}
        # one tile per block, however many there are
        assert_same(*backend.both(fp8moe.scaling_aware_transpose, q, offsets))
        assert_same(*backend.both(fp8moe.quantize, x, **block))
        assert_nearly_same(*backend.both(fp8moe.swiglu_quantize, h, probs, **block))
        assert_nearly_same(*backend.both(fp8moe.swiglu_quantize, h, probs, **block, expert_offsets=offsets))


@only_on_cpu
def test_tiles_that_do_not_fit_use_the_plain_kernel(backend, monkeypatch):
    """Float32 SwiGLU tiles need 144 KB of shared memory; on devices with less, the plain kernel gives the
    same results."""
    h, q = values(RNG, (40, 256), np.float32), fp8moe.quantize(values(RNG, (40, 128), BF16))
    expected = (
        fp8moe.quantize(h, columnwise=True),
        fp8moe.scaling_aware_transpose(q),
        fp8moe.swiglu_quantize(h, columnwise=True),
    )
    backend.start(monkeypatch, shared_limit=40 << 10)
    launched = backend.launched(monkeypatch)
    h, q = backend.upload(h), backend.upload(q)
    actual = (
        fp8moe.quantize(h, columnwise=True),
        fp8moe.scaling_aware_transpose(q),
        fp8moe.swiglu_quantize(h, columnwise=True),
    )
    for a, b in zip(expected, actual, strict=True):
        assert_same(a, backend.download(b))
    assert "scaling_aware_transpose" in launched  # with smaller tiles
    assert not {"quantize_tiles", "swiglu_quantize_tiles"}.intersection(launched)
