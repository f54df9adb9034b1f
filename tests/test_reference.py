"""Results of the CPU backend are independent of the caller's floating-point mode and of threads."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from cases import assert_same, generator

import fp8moe
from fp8moe.reference import numerics


def in_a_thread(function):
    """Runs a function in a new thread, whose floating-point mode affects no other."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def flushes():
    return float(np.float32(1e-40) * np.float32(1)) == 0


def flushing(function):
    """The result of a function called with flush-to-zero enabled, and whether it is still enabled
    afterwards."""

    def run():
        if not torch.set_flush_denormal(True) or not flushes():
            pytest.skip("this machine does not flush subnormals")
        return function(), flushes()

    return in_a_thread(run)


@pytest.fixture
def new_threads():
    """Restarts the thread pool: its threads inherit the floating-point mode of the thread that starts
    them."""
    numerics._workers.restart()
    yield
    numerics._workers.restart()


@pytest.mark.parametrize("rows", [3, 1024])  # in the caller's thread, and in the pool's threads
@pytest.mark.usefixtures("new_threads")
def test_subnormals_survive_the_callers_flush_to_zero(rows):
    rng = generator()
    tiny = (rng.standard_normal((rows, 256)) * 1e-36).astype(np.float32)
    small = (rng.standard_normal((rows, 256)) * 1e-40).astype(np.float32)  # subnormal values
    h = np.concatenate([small, np.ones_like(small)], axis=1)
    wide, offsets = small.astype(np.float64), np.array([0, rows], np.int32)
    wide_h = np.concatenate([wide * 1e-270, np.ones_like(wide)], axis=1)
    weights = np.ones((1, 8, 256), np.float32)

    def work():
        q = fp8moe.quantize(tiny, block=(1, 32), fmt="e5m2")
        plain = fp8moe.swiglu(h), fp8moe.swiglu(wide_h)
        return q, fp8moe.dequantize(q), plain, fp8moe.grouped_gemm(small, weights, offsets)

    theirs, still = flushing(work)
    assert still  # the caller's mode is restored
    assert_same(theirs, in_a_thread(work))
    _, decoded, plain, product = theirs
    # the scale 2^-127 is subnormal; e5m2 has two mantissa bits, and codes below 2^-14 have steps of 2^-16
    assert (np.abs(decoded - tiny) <= np.maximum(np.abs(tiny) / 8, 2.0 ** -(127 + 17))).all()
    assert np.abs(plain[0] - wide / 2).max() <= 2.0**-149  # sigmoid(0) * 1 is a half
    assert np.count_nonzero(plain[1])
    wanted = wide.sum(axis=1)
    assert (product == wanted[:, None]).all()  # sums of subnormals are exact


def test_numpy_errstate_raise_does_not_affect_calls():
    rng = generator()
    x = (rng.standard_normal((6, 256)) * 1e-30).astype(np.float32)
    large = np.full((6, 256), 3e38, np.float32)
    plan = fp8moe.plan_topk(np.array([[0, 1], [1, 2], [0, 2]], np.int32), 3)
    wide, probs = x.astype(np.float64), np.full((3, 2), 1e-320)

    def work():
        q = fp8moe.quantize(large, columnwise=True)
        return (
            fp8moe.unpermute(wide, plan, probs),
            fp8moe.swiglu(wide, np.full(6, 1e-300)),
            fp8moe.swiglu_backward(x[:, :128].copy(), x, np.full(6, 1e-30, np.float32)),
            fp8moe.grouped_gemm(large, large[None], np.array([0, 6], np.int32)),
            q,
            fp8moe.dequantize(q.rowwise, dtype="bfloat16"),
            fp8moe.scaling_aware_transpose(q.rowwise),
        )

    wanted = work()
    with np.errstate(all="raise"):
        assert_same(work(), wanted)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_forked_child_has_its_own_threads():
    code = (
        "import os, numpy as np, fp8moe\n"
        "x = np.random.default_rng().standard_normal((1024, 256)).astype(np.float32)\n"
        "here = fp8moe.quantize(x)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    there = fp8moe.quantize(x)\n"
        "    os._exit(7 if (there.data == here.data).all() else 8)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
    )
    # in a new session, so that a hanging child process is terminated with it
    process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], start_new_session=True)
    try:
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
