"""Ctrl-C at any moment of a call leaves nothing behind that changes what follows."""

import copy
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from cases import BF16, generator
from interrupts import at_moments

import fp8moe
from fp8moe.adapters.torch.layer import FP8FlowMoE
from fp8moe.adapters.torch.operands import quantize_fp8_weights
from fp8moe.adapters.torch.weights import weights_unchanged
from fp8moe.ops.quantize import times_overwritten
from fp8moe.runtime import call, counters, scopes
from fp8moe.runtime.workers import Workers

RNG = generator()


def in_time(function, seconds=30):
    """The result of a function, which must not hang."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert results, "a call hangs"
    return results[0]


def flushes():
    return float(np.float32(1e-40) * np.float32(1)) == 0


def state():
    """What a call may have left behind in this thread."""
    return np.geterr(), flushes(), call.current.call, counters.counting()


@pytest.fixture
def modes():
    """The caller's own floating-point mode, and NumPy's."""
    flushing = torch.set_flush_denormal(True)
    with np.errstate(all="raise", under="ignore"):
        yield
    if flushing:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("rows", [2, 512])  # in this thread, and in several
@pytest.mark.usefixtures("modes")
def test_an_operation_leaves_no_state(rows):
    x, z = (RNG.standard_normal((rows, 256)).astype(np.float32) for _ in range(2))
    out = fp8moe.quantize(z)
    turns = [x, z]

    def work():
        turns.reverse()
        fp8moe.quantize(turns[0], out=out)

    work()
    before, data, count = state(), out.data.copy(), times_overwritten(out)
    moments = 0
    for _ in at_moments(work):
        moments += 1
        assert state() == before
        changed, data = not np.array_equal(out.data, data), out.data.copy()
        assert not changed or times_overwritten(out) > count  # a backward that has saved them is told
        count = times_overwritten(out)
    assert moments > 50
    wanted = fp8moe.quantize(x)
    assert np.array_equal(in_time(lambda: fp8moe.quantize(x)).data, wanted.data)


@pytest.mark.usefixtures("modes")
def test_the_experts_leave_no_state():
    x = RNG.standard_normal((5, 128)).astype(BF16)
    w13, w2 = (RNG.standard_normal(shape).astype(BF16) for shape in ((2, 256, 128), (2, 128, 128)))
    ids, probs = RNG.integers(0, 2, (5, 1)).astype(np.int32), np.ones((5, 1), np.float32)

    def work():
        y, saved = fp8moe.moe_forward(x, w13, w2, ids, probs, recipe="fp8_flow")
        return y, fp8moe.moe_backward(saved, y).dx

    wanted, before = work(), state()
    for _ in at_moments(work, most=60):
        assert state() == before
    for a, b in zip(work(), wanted, strict=True):
        assert np.array_equal(a, b)


def test_threads_stay_usable_and_are_waited_for():
    """After an interrupt no thread writes any more: the memory may be given to another call."""
    workers, written = Workers(), []

    def slow(number):
        time.sleep(0.001)
        written.append(number)

    for _ in at_moments(lambda: workers.run(slow, [(i,) for i in range(4)]), most=200):
        count = len(written)
        time.sleep(0.002)
        assert len(written) == count
        written.clear()
        in_time(lambda: workers.run(slow, [(i,) for i in range(4)]) or True)
        assert sorted(written) == [0, 1, 2, 3]
        written.clear()


def test_the_error_of_a_thread_is_raised():
    with pytest.raises(ZeroDivisionError):
        Workers().run(lambda x: 1 / x, [(1,), (0,), (2,)])


# ---------------------------------------------------------------- contexts


class Noted(scopes.Scope):
    """A context that notes its openings."""

    def __init__(self, noted):
        self.noted = noted

    def enter(self, opening):
        self.noted.append(opening)
        return "entered"


def test_a_context_is_open_until_its_block_ends():
    noted = []
    scope = Noted(noted)
    with scope as entered, scope:
        assert entered == "entered"
        assert [*map(scopes.is_open, noted)] == [True, True]
    assert [*map(scopes.is_open, noted)] == [False, False]
    assert noted[0]() is noted[1]() is None  # nothing keeps what it holds

    with pytest.raises(ZeroDivisionError), scope:
        1 / 0  # noqa: B018
    assert not scopes.is_open(noted[-1])

    with ExitStack() as stack:
        stack.enter_context(scope)
        assert scopes.is_open(noted[-1])
        stack.enter_context(scope)
        assert [*map(scopes.is_open, noted[-2:])] == [True, True]
    assert [*map(scopes.is_open, noted[-2:])] == [False, False]

    @scope
    def decorated(depth):
        assert scopes.is_open(noted[-1])
        if depth:
            decorated(depth - 1)

    decorated(2)
    assert not any(map(scopes.is_open, noted))


def test_an_interrupt_does_not_leave_a_context_open():
    noted, errors = [], []

    def work():
        try:
            with Noted(noted):
                len(noted)
        except KeyboardInterrupt as error:
            errors.append(error)  # whose traceback keeps every frame alive
            raise

    for _ in at_moments(work):
        assert not any(map(scopes.is_open, noted))
    assert len(errors) > 5


def test_a_trace_ends_with_its_block():
    x, traces = np.ones((1, 128), np.float32), []

    def work():
        with fp8moe.trace() as counts:
            traces.append(counts)
            fp8moe.quantize(x)

    for _ in at_moments(work, most=100):
        before = [counts.casts for counts in traces]
        fp8moe.quantize(x)
        assert [counts.casts for counts in traces] == before
        assert counters.counting() == ()
    with fp8moe.trace() as outer:
        fp8moe.quantize(x)
        with fp8moe.trace() as inner:
            fp8moe.quantize(x)
        fp8moe.quantize(x)
    assert (outer.casts, inner.casts) == (3, 1)


# ---------------------------------------------------------------- signals

STORM = """
import faulthandler, os, signal
import numpy as np, fp8moe
from fp8moe.runtime import call, counters
small, large = (np.random.default_rng().standard_normal((n, 512)).astype(np.float32) for n in (3, 160))
wanted = [fp8moe.quantize(x) for x in (small, large)]
np.seterr(all="raise")
faulthandler.dump_traceback_later(100, exit=True)
signals = interrupts = calls = 0
inside = False

def handler(*_):
    global signals, interrupts, inside
    signals += 1
    if inside:
        inside = False
        interrupts += 1
        raise KeyboardInterrupt

signal.signal(signal.SIGINT, handler)
print("ready", flush=True)
while interrupts < 2000:
    calls += 1
    try:
        inside = True
        with fp8moe.trace() as counts:
            fp8moe.quantize(large if calls % 3 else small)
        inside = False
    except KeyboardInterrupt:
        pass
assert set(np.geterr().values()) == {"raise"}, np.geterr()
assert call.current.call is None
for x, q in zip((small, large), wanted):
    again = fp8moe.quantize(x)
    assert (again.data == q.data).all() and (again.scales == q.scales).all()
assert counters.counting() == () and counts.casts <= 1
print("right", flush=True)
os._exit(0)  # signals still arrive
"""


def test_signals_at_random_moments():
    """As a user who presses Ctrl-C two thousand times."""
    with subprocess.Popen([sys.executable, "-c", STORM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        end = time.monotonic() + 90
        while process.poll() is None and time.monotonic() < end:
            process.send_signal(signal.SIGINT)
            time.sleep(float(RNG.uniform(0, 1e-3)))
        if process.poll() is None:
            process.kill()
        assert (process.wait(), process.stdout.read()) == (0, "right\n")


# ---------------------------------------------------------------- weights_unchanged


# an interrupted constructor of torch's StorageWeakRef leaves one whose __del__ raises
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_does_not_leave_weights_unchanged_in_force():
    layers = torch.nn.ModuleList(FP8FlowMoE(128, 128, 2, 1) for _ in range(3))
    x, errors = torch.randn(3, 128), []

    def work():
        try:
            with weights_unchanged(layers), layers[0].weights_unchanged():
                layers[1](x)
        except KeyboardInterrupt as error:
            errors.append(error)  # whose traceback keeps every frame alive
            raise

    for moment in at_moments(work, most=60):
        assert not any(layer._fp8_weights.declared for layer in layers)
        if moment % 10 == 0:
            with torch.no_grad():
                layers[0].w13.data.mul_(-1)  # not seen inside
                assert torch.equal(layers[0](x), copy.deepcopy(layers[0])(x))
    del errors[:]
    assert not any(layer.fp8_weight_nbytes for layer in layers)


# an interrupted constructor of torch's StorageWeakRef leaves one whose __del__ raises
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupted_copies_are_not_used():
    """Copies that a CUDA graph reads are written in place."""
    layer, x, whole = FP8FlowMoE(128, 128, 2, 1), torch.randn(3, 128), 0
    with torch.no_grad():
        layer.quantize_weights()
        layer._fp8_weights.kept.captured = True

        def work():
            layer.w13.data.mul_(-1)  # not seen
            layer.quantize_weights()

        for _ in at_moments(work, most=60):
            if layer._fp8_weights.kept.current:
                whole += 1
                codes = [q.rowwise.data for q in layer._fp8_weights.kept.records]
                fresh = [q.rowwise.data for q in quantize_fp8_weights(layer.w13, layer.w2)]
                flipped = [q.rowwise.data for q in quantize_fp8_weights(-layer.w13, layer.w2)]
                assert any(all(map(torch.equal, codes, those)) for those in (fresh, flipped))
            else:
                assert torch.equal(layer(x), copy.deepcopy(layer)(x))
            layer.quantize_weights()
    assert 0 < whole < 60
