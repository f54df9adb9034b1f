"""A call in given memory: its allocations are known in advance, and it accesses no other memory."""

import importlib
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import cuda_on_cpu
import numpy as np
import pytest
from cases import BF16, assert_same, generator, values

import fp8moe
from fp8moe.records import ArraySpec
from fp8moe.runtime import interop
from fp8moe.runtime.record_trees import arrays_in, map_arrays
from fp8moe.runtime.recording import GivenMemory

RNG = generator()
GUARD = 512  # bytes around every piece of memory, poisoned too


def specs(arrays):
    return [ArraySpec(a.shape, a.dtype) for a in arrays]


def chain(x, offsets):
    """Results, temporaries of different lifetimes, and an argument that is returned unchanged."""
    q = fp8moe.quantize(x)
    transposed = fp8moe.scaling_aware_transpose(q, offsets, align_size=8)
    back = fp8moe.dequantize(q, dtype="bfloat16")
    again = fp8moe.quantize(back, fmt="e5m2")
    ready = fp8moe.to_layout(again, "gemm_ready")
    return ready, transposed.scales, offsets


def test_results_are_outputs_and_temporaries_share_one_workspace():
    x, offsets = values(RNG, (32, 256), BF16), np.array([0, 8, 32], np.int32)
    memory = GivenMemory(lambda a: chain(*a), specs((x, offsets)))
    wanted = arrays_in(chain(x, offsets))
    assert [memory.outputs[n].shape for n in memory.leaves[:-1]] == [a.shape for a in wanted[:-1]]
    assert memory.leaves[-1] == ~1  # offsets, returned unchanged
    assert memory.aliases == {}
    (workspace,) = memory.outputs[len(set(memory.leaves)) - 1 :]
    # at most q (8192 + 512 bytes), the transposed codes (8192), back (16384) and again's compact scales (512)
    assert 16384 + 8192 + 512 <= workspace.nbytes <= 16384 + 8192 + 8192 + 2 * 512
    names = memory.result(["x", "offsets"], [f"output {i}" for i in range(3)])
    assert (names[0].data, names[0].scales, names[1], names[2]) == (
        *("output 0", "output 1", "output 2"),
        "offsets",
    )


def test_a_call_that_returns_its_arguments_has_no_outputs():
    q = fp8moe.quantize(values(RNG, (4, 128), BF16))
    memory = GivenMemory(lambda a: fp8moe.to_layout(fp8moe.QuantTensor(*a), "compact"), specs(arrays_in(q)))
    assert (memory.outputs, memory.leaves) == ([], [~0, ~1])


def test_given_memory_raises_the_calls_validation_errors():
    with pytest.raises(ValueError, match="x: got shape"):
        GivenMemory(lambda a: fp8moe.quantize(*a), specs([np.ones(3, np.float32)]))
    with pytest.raises(TypeError, match=r'num_out_tokens: got "exact".*wanted a number'):
        GivenMemory(
            lambda a: fp8moe.pad(*a, 4, num_out_tokens="exact"), specs([np.ones((3, 8)), np.ones(2, int)])
        )


class Memory:
    """Poisoned pieces of memory between guard regions."""

    def __init__(self, arrays=()):
        self.pieces = []
        for a in arrays:
            piece = np.full(a.nbytes + 2 * GUARD + 16, 0xA5, np.uint8)
            start = GUARD + -(piece.ctypes.data + GUARD) % 16
            if isinstance(a, np.ndarray):
                piece[start : start + a.nbytes] = a.reshape(-1).view(np.uint8)
            self.pieces.append((piece, start, a))

    @property
    def addresses(self):
        return [piece.ctypes.data + start for piece, start, _ in self.pieces]

    @property
    def arrays(self):
        return [p[s : s + a.nbytes].view(a.dtype).reshape(a.shape) for p, s, a in self.pieces]

    def untouched_around(self):
        return all((p[:s] == 0xA5).all() and (p[s + a.nbytes :] == 0xA5).all() for p, s, a in self.pieces)


@pytest.fixture
def on_cpu(monkeypatch):
    pytest.importorskip("cupy")
    if not cuda_on_cpu.available:
        pytest.skip("needs g++")
    cuda_on_cpu.install(monkeypatch)
    monkeypatch.setattr(
        "fp8moe.runtime.recording.allocate_scratch",
        lambda size, *_: cuda_on_cpu.raw(np.full(size, 0xA5, np.uint8)),
    )


def run(memory, arrays):
    """Runs in new memory; returns results in the form of `function`."""
    arguments = Memory(arrays)
    made = Memory(memory.outputs)
    addresses, outputs = arguments.addresses, made.addresses
    for i, output in memory.aliases.items():
        made.arrays[output][...] = arrays[i]
        addresses[i] = 0  # never accessed
    memory.run(addresses, outputs, int, 0, 0)
    assert made.untouched_around()
    assert arguments.untouched_around()
    for a, b in zip(arguments.arrays, arrays, strict=True):
        np.testing.assert_array_equal(a, b)
    return memory.result(arrays, made.arrays)


PLAN = fp8moe.plan_topk(RNG.integers(-1, 5, (21, 3)).astype(np.int32), 5, align_size=4)


def of_plan(function):
    """The plan's arrays among the arguments."""

    def call(arrays):
        following = iter(arrays)
        plan = map_arrays(lambda a: next(following), PLAN)
        return function(plan, *following)

    return call, tuple(arrays_in(PLAN))


MOVE, ARRAYS = of_plan(lambda plan, x, probs: fp8moe.permute(fp8moe.quantize(x), plan, probs))
BACK, _ = of_plan(lambda plan, x, rows, probs: fp8moe.unpermute_backward(x, plan, rows, probs))
CASES = {
    "chain": (lambda a: chain(*a), lambda: (values(RNG, (32, 256), BF16), np.array([0, 8, 32], np.int32))),
    "permute": (MOVE, lambda: (*ARRAYS, values(RNG, (21, 256), BF16), RNG.random((21, 3), np.float32))),
    "swiglu": (
        lambda a: fp8moe.swiglu_quantize(*a, columnwise=True),
        lambda: (values(RNG, (16, 256), BF16), RNG.random(16, np.float32)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_results_at_given_addresses_equal_the_calls(name, on_cpu):
    function, arguments = CASES[name]
    memory = GivenMemory(function, specs(arguments()))
    for _ in range(3):  # checked and recorded once, then only launched
        arrays = arguments()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(interop, "framework_of", lambda x, name: interop.NUMPY)
            wanted = function(list(arrays))
        assert_same(wanted, run(memory, arrays))
        assert list(memory.devices) == [0]


def test_accumulated_argument(on_cpu):
    def function(a):
        return fp8moe.grouped_gemm_wgrad(*a)

    a, b = (RNG.standard_normal((64, 32)).astype(np.float32) for _ in range(2))
    into, offsets = RNG.standard_normal((2, 32, 32)).astype(np.float32), np.array([0, 40, 64], np.int32)
    memory = GivenMemory(function, specs((a, b, offsets, into)), in_place=[3])
    assert (memory.aliases, memory.leaves) == ({3: 0}, [0])
    for _ in range(3):
        result = run(memory, (a, b, offsets, into))
        for e, rows in enumerate((slice(0, 40), slice(40, 64))):
            np.testing.assert_allclose(result[e], into[e] + a[rows].T @ b[rows], atol=1e-4)


def test_aliased_arguments(on_cpu):
    """The dry run uses distinct addresses."""
    function = GivenMemory(
        lambda a: fp8moe.grouped_gemm_wgrad(*a),
        specs([np.ones((8, 8), np.float32)] * 2 + [np.ones(2, np.int32)]),
    )
    square, offsets = Memory([np.eye(8, dtype=np.float32)]), Memory([np.array([0, 8], np.int32)])
    for _ in range(2):
        made = Memory(function.outputs)
        function.run([*square.addresses * 2, *offsets.addresses], made.addresses, int, 0, 0)
        np.testing.assert_array_equal(made.arrays[0][0], np.eye(8))


def test_unaligned_addresses_are_served_by_other_kernels(on_cpu):
    """Unaligned addresses need the checked path, with other kernels."""
    x = values(RNG, (4, 128), BF16)
    memory = GivenMemory(lambda a: fp8moe.quantize(*a), specs([x]))
    room = np.empty(x.nbytes + 32, np.uint8)
    start = -room.ctypes.data % 16 + 2
    room[start : start + x.nbytes] = x.reshape(-1).view(np.uint8)
    for _ in range(2):
        made = Memory(memory.outputs)
        memory.run([room.ctypes.data + start], made.addresses, int, 0, 0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(interop, "framework_of", lambda x, name: interop.NUMPY)
            wanted = fp8moe.quantize(x)
        assert_same(wanted, memory.result([x], made.arrays))


def test_a_call_that_reads_or_writes_from_the_host(on_cpu, monkeypatch):
    counts = [3, 5]
    memory = GivenMemory(
        lambda a: fp8moe.pad(*a, counts, 4, num_out_tokens=16), specs([np.ones((8, 16), np.float32)])
    )
    assert not memory.only_launches
    for _ in range(2):
        x = RNG.standard_normal((8, 16)).astype(np.float32)
        result = run(memory, [x])
        np.testing.assert_array_equal(result[:3], x[:3])
        np.testing.assert_array_equal(result[4:9], x[3:])
        assert memory.devices[0].plan is None
    assert GivenMemory(lambda a: fp8moe.quantize(*a), specs([np.ones((8, 128), np.float32)])).only_launches
    monkeypatch.setenv("FP8MOE_CHECK", "1")
    assert not GivenMemory(
        lambda a: fp8moe.quantize(*a), specs([np.ones((8, 128), np.float32)])
    ).only_launches


def test_threads_that_make_a_plan_at_once_use_the_same(monkeypatch):
    """A graph that was captured with one goes on using its scratch memory."""
    pytest.importorskip("cupy")
    cuda_on_cpu.install(monkeypatch)
    launch, used = importlib.import_module("fp8moe.kernels_cuda.runtime.launch"), []
    kernel = SimpleNamespace(shared=1 << 20, parameters=None, ptr=1, name="")
    monkeypatch.setattr(launch, "load_kernel", lambda *arguments: kernel)
    monkeypatch.setattr(launch.Plan, "run", lambda plan, *arguments: used.append(plan))
    both, make_plan = threading.Barrier(2, timeout=30), GivenMemory._record

    def make_at_once(self, device):
        plan = make_plan(self, device)
        both.wait()
        return plan

    monkeypatch.setattr(GivenMemory, "_record", make_at_once)
    x = values(RNG, (32, 256), BF16)
    memory = GivenMemory(lambda a: fp8moe.quantize(*a), specs([x]))

    def run(_):
        arguments, outputs = Memory([x]), Memory(memory.outputs)
        memory.run(arguments.addresses, outputs.addresses, int, 0, 0)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(run, range(2)))
    assert used == [memory.devices[0].plan] * 2
