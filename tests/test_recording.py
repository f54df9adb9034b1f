"""Launch plans: replayed with other arrays of the same shapes they compute what the first call did; records
follow their tensors, and calls with options of different types have different plans."""

import ctypes
import functools
import importlib
import itertools
import sys
import types
import weakref
from concurrent.futures import ThreadPoolExecutor

import cuda_on_cpu
import ml_dtypes
import numpy as np
import pytest
import torch
import torch_on_device
from backends import only_on_cpu
from cases import BF16, assert_same, generator, same_bits, values

import fp8moe
from benchmarks.calls import Counter
from fp8moe.adapters.torch import functional, grouped
from fp8moe.adapters.torch import ops as torch_ops
from fp8moe.ops.quantize import times_overwritten
from fp8moe.runtime import dispatch, interop, recording
from fp8moe.runtime.record_trees import arrays_in, map_arrays
from fp8moe.runtime.recording import Recording

RNG = generator()
A_PLAN = fp8moe.plan_topk(RNG.integers(0, 3, (6, 2)).astype(np.int32), 3, align_size=4)


@pytest.fixture
def on_device(monkeypatch):
    if not cuda_on_cpu.available:
        pytest.skip("needs g++")
    torch_on_device.install(monkeypatch)


def tensor(x):
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype == BF16 else torch.tensor(x)


def on_cpu(record):
    """The same record with NumPy arrays, without cached state."""
    arrays = {n: getattr(record, n) for n in ("data", "scales")}
    return fp8moe.QuantTensor(
        *(a.clone().numpy() for a in arrays.values()), record.fmt, record.block, record.layout
    )


def set_data(q, to):
    q.data.data = to.data.clone()


def set_scales(q, to):
    q.scales.set_(to.scales.clone())


def resized(q, to):
    freed_and_back(q.data)
    q.data.copy_(to.data)


def freed_and_back(x):
    """As FSDP does between uses of a parameter: the memory is freed and allocated at another address."""
    storage = x.untyped_storage()
    size, before = storage.nbytes(), storage.data_ptr()
    storage.resize_(0)
    held = []
    while not held or (held[-1].data_ptr() != before and len(held) < 10_000):
        held.append(torch.empty(size, dtype=torch.uint8))
    storage.resize_(size)
    assert storage.data_ptr() != before


def replaced(q, to):
    object.__setattr__(q, "data", to.data.clone())


def transposed(q, to):
    q.data.t_()
    q.data.data = to.data.clone()


CHANGES = [set_data, set_scales, resized, replaced, transposed]


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("seen", [False, True])
def test_records_follow_their_tensors(change, seen):
    inputs = [tensor(values(RNG, (128, 128), BF16)) for _ in range(6)]
    *_, other = records = [fp8moe.quantize(x) for x in inputs]
    assert len(dispatch.cached_recordings()) == 1
    for q in records[:5]:
        if seen:
            assert same_bits(fp8moe.dequantize(q).numpy(), fp8moe.dequantize(on_cpu(q)))
        change(q, other)
        assert same_bits(fp8moe.dequantize(q).numpy(), fp8moe.dequantize(on_cpu(q)))


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("change", CHANGES[:-1])  # t_ does not transpose three dimensions
def test_records_inside_of_records_follow_their_tensors(change):
    weights = [tensor(values(RNG, (2, 128, 128), BF16)) for _ in range(4)]
    *_, other = [fp8moe.quantize_weights(w) for w in weights]
    for w in weights[:3]:
        q = fp8moe.quantize_weights(w)
        for side in ("rowwise", "columnwise"):
            change(getattr(q, side), getattr(other, side))
            again = dispatch.enter(q=q).args.q
            for now, array in zip(arrays_in(again), arrays_in(q), strict=True):
                assert now.ptr == array.data_ptr()


@pytest.mark.usefixtures("on_device")
def test_tensors_with_freed_memory_raise():
    records = [fp8moe.quantize(tensor(values(RNG, (5, 128), BF16))) for _ in range(4)]
    for q in records:
        q.data.untyped_storage().resize_(0)
        with pytest.raises(TypeError, match=r"q\.data: got a tensor whose memory was freed"):
            fp8moe.dequantize(q)


@pytest.mark.usefixtures("on_device")
def test_results_that_share_memory_with_an_argument_follow_it():
    """The one scale of a tensor is returned without a copy, in a new record."""
    for _ in range(4):
        plan = map_arrays(lambda a: torch.from_numpy(a), A_PLAN)
        x = torch.tensor(RNG.integers(0, 120, (6, 64)).astype(np.uint8))
        q = fp8moe.QuantTensor(x, torch.tensor([0.5]), "e4m3", None)
        moved = fp8moe.permute(q, plan).data
        before = fp8moe.unpermute(moved, plan)
        q.scales.set_(torch.tensor([[2.0], [4.0]])[1])
        assert same_bits(
            fp8moe.unpermute(moved, plan).view(torch.int16).numpy(), (8 * before).view(torch.int16).numpy()
        )


def test_records_on_the_cpu_follow_their_tensors():
    q = fp8moe.quantize(torch.randn(4, 128))
    q.data.data = torch.zeros_like(q.data)
    assert not fp8moe.dequantize(q).any()
    q.scales.resize_(1, 1)
    with pytest.raises(ValueError, match=r"q\.scales: got shape"):
        fp8moe.dequantize(q)


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("part", [object(), [1.0], np.float32(1)])
def test_invalid_fields_of_records_are_named(part):
    q = fp8moe.QuantTensor(torch.zeros(4, 128, dtype=torch.uint8), part)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"q\.scales: got .*; wanted an array"):
            fp8moe.dequantize(q)


# ---------------------------------------------------------------- options


@pytest.mark.skipif(not cuda_on_cpu.available, reason="needs g++")
@pytest.mark.parametrize("align_size", [4, 4.0, np.float64(4), True, np.True_, "4", None])
def test_later_calls_raise_the_errors_of_first_calls(monkeypatch, align_size):
    cuda_on_cpu.install(monkeypatch)
    x, counts = (
        cuda_on_cpu.upload(np.ones((3, 8), np.float32)),
        cuda_on_cpu.upload(np.array([1, 2], np.int32)),
    )

    def outcome():
        try:
            return fp8moe.pad(x, counts, align_size).host.shape
        except Exception as error:
            return type(error), str(error)

    first = outcome()
    for align in (4, 1):
        for _ in range(4):
            fp8moe.pad(x, counts, align)
    assert len(dispatch.cached_recordings()) == 2
    assert [outcome() for _ in range(4)] == [first] * 4


@pytest.mark.skipif(not cuda_on_cpu.available, reason="needs g++")
def test_planned_calls_reject_read_only_outputs(monkeypatch):
    """Also if the plan was made with a writable array; frameworks with both kinds of arrays have no plans."""
    cuda_on_cpu.install(monkeypatch)
    dy, x, offsets = (
        cuda_on_cpu.upload(a)
        for a in (np.ones((3, 8), np.float32), np.ones((3, 16), np.float32), np.array([0, 3], np.int32))
    )

    class ReadOnly(cuda_on_cpu.Array):
        pass

    class Family(cuda_on_cpu.Device):
        always_writable = False

        def is_read_only(self, x):
            return True

    family, others = Family(), interop.framework_of_type
    monkeypatch.setattr(
        interop, "framework_of_type", lambda kind: family if kind is ReadOnly else others(kind)
    )
    out = np.zeros((1, 8, 16), np.float32)
    for n in range(1, 5):
        fp8moe.grouped_gemm_wgrad(dy, x, offsets, cuda_on_cpu.Array(out))
        assert (out == 3 * n).all()
    assert len(dispatch.cached_recordings()) == 1
    for arguments in ((ReadOnly(out),), ()):
        with pytest.raises(ValueError, match=r"out: got .*ReadOnly, which is read-only"):
            fp8moe.grouped_gemm_wgrad(
                dy, x, offsets, *arguments, **({} if arguments else {"out": ReadOnly(out)})
            )
    assert (out == 12).all()


@pytest.mark.skipif(not cuda_on_cpu.available, reason="needs g++")
def test_recordings_depend_on_option_types(monkeypatch):
    cuda_on_cpu.install(monkeypatch)

    @dispatch.operation
    def option_of(x, option):
        dispatch.enter(x=x)
        return option

    x = cuda_on_cpu.upload(np.ones(3, np.float32))
    options = [1, True, 1.0, np.float64(1), "1", (1, 128), (True, 128), (1.0, 128), (1, (128,)), None, ()]
    for _ in range(2):
        for option in options:
            got = option_of(x, option)
            assert (type(got), got) == (type(option), option)
            if isinstance(option, tuple):
                assert list(map(type, got)) == list(map(type, option))
    assert len(dispatch.cached_recordings()) == len(options)

    @dispatch.operation
    def options_of(x, first, second):
        dispatch.enter(x=x)
        return first, second

    for pair in ((1, (7,)), ((1,), 7), ((1, 7), None), (("an array",), x), ((x,), "an array")):
        assert options_of(x, *pair) == pair


# ---------------------------------------------------------------- memory


class Counted(cuda_on_cpu.Device):
    """Counts the bytes that its arrays hold, and their maximum."""

    now = most = made = 0

    def empty(self, spec, device):
        raw = super().empty(spec, device)
        self.now, self.made = self.now + spec.nbytes, self.made + 1
        self.most = max(self.most, self.now)
        weakref.finalize(raw.owner, self.freed, spec.nbytes)
        return raw

    def freed(self, nbytes):
        self.now -= nbytes


@dispatch.operation
def several(x, offsets):
    """Several operations as one, with temporaries of different lifetimes."""
    q = fp8moe.quantize(x)
    transposed = fp8moe.scaling_aware_transpose(q, offsets, align_size=8)
    back = fp8moe.dequantize(q, dtype="bfloat16")
    del q
    again = fp8moe.quantize(back, fmt="e5m2")
    del back
    return fp8moe.to_layout(again, "gemm_ready"), transposed.scales, offsets


@dispatch.operation
def discarding(x, offsets):
    """Each result is released before the next one is allocated."""
    q = fp8moe.quantize(x)
    fp8moe.dequantize(q)
    return fp8moe.dequantize(q), offsets


@pytest.mark.skipif(not cuda_on_cpu.available, reason="needs g++")
@pytest.mark.parametrize("function", [several, discarding])
@pytest.mark.parametrize("together", [0, recording.TOGETHER])
def test_recording_frees_temporaries_like_a_direct_call(monkeypatch, function, together):
    """Peak memory and remaining memory equal those of a call without a plan: temporaries are allocated only
    when they are needed. Small ones are one allocation, made with those of the results."""
    x, offsets = values(RNG, (32, 256), BF16), np.array([0, 8, 32], np.int32)
    cuda_on_cpu.install(monkeypatch)
    monkeypatch.setattr(recording, "TOGETHER", together)
    counted, others = Counted(), interop.framework_of_type
    monkeypatch.setattr(
        interop, "framework_of_type", lambda kind: counted if kind is cuda_on_cpu.Array else others(kind)
    )
    x, offsets = cuda_on_cpu.upload(x), cuda_on_cpu.upload(offsets)

    def measured(look):
        monkeypatch.setenv("FP8MOE_CHECK", str(int(look)))
        counted.now = counted.most = counted.made = 0
        *result, same = function(x, offsets)
        assert same is offsets
        return counted.made, counted.most, counted.now, cuda_on_cpu.download(tuple(result))

    *wanted, arrays = measured(True)  # without a plan
    for _ in range(3):
        *got, again = measured(False)
        assert_same(arrays, again)
        if not together:
            assert got == wanted
            continue
        made, most, now = got
        assert made == len(arrays_in(again)) + 1
        assert now == wanted[2]
        assert wanted[1] <= most <= wanted[1] + now + 256 * made
    assert len(dispatch.cached_recordings()) == 1


@pytest.mark.skipif(not cuda_on_cpu.available, reason="needs g++")
def test_temporaries_without_elements_have_an_address(monkeypatch):
    """A launch that gets one needs it, also where the call allocates nothing else."""
    cuda_on_cpu.install(monkeypatch)
    replay = importlib.import_module("fp8moe.kernels_cuda.runtime.replay")
    monkeypatch.setattr(replay.LOOP, "run", replay.loop)  # the compiled one would read past the addresses

    @dispatch.operation
    def of_no_rows(x, offsets, out):
        y = fp8moe.dequantize(fp8moe.quantize(x))
        return fp8moe.grouped_gemm_wgrad(y, y, offsets, out)

    x, offsets = np.ones((0, 128), np.float32), np.zeros(2, np.int32)
    before = RNG.standard_normal((1, 128, 128)).astype(np.float32)
    for _ in range(2):
        out = cuda_on_cpu.Array(before.copy())
        of_no_rows(*map(cuda_on_cpu.upload, (x, offsets)), out)
        assert same_bits(out.host, before)
    assert [type(plan) for _, plan in dispatch.cached_recordings()] == [Recording]


def cupy_array(shape, dtype, device=0, **options):
    """A CuPy array of memory on the CPU, that is not read."""
    cupy = pytest.importorskip("cupy")
    memory = np.zeros(1 << 12, np.uint8)
    start = RNG.integers(0, 64)
    owned = cupy.cuda.UnownedMemory(memory.ctypes.data, memory.nbytes, memory, device)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(owned, start), **options)


def test_cupys_arrays_are_described_as_any_framework_describes_its_own():
    """By a method of its own, which makes no object of an array."""
    cupy = pytest.importorskip("cupy")
    family, both = interop.FRAMEWORKS["cupy"], set()
    kinds = [np.dtype(n) for n in ("float32", "uint8", "int64", "bool", "complex64", ">f4")] + [BF16]
    subclass = type("Subclass", (cupy.ndarray,), {})
    for _ in range(300):
        arrays = []
        for _ in range(RNG.integers(0, 4)):
            shape, dtype = tuple(RNG.integers(0, 4, RNG.integers(0, 4)).tolist()), RNG.choice(kinds)
            x = cupy_array(shape, np.dtype(dtype), device=int(RNG.random() < 0.1))
            if RNG.random() < 0.1:
                x = x.T
            arrays.append(x.view(subclass) if RNG.random() < 0.1 else x)
        wanted = interop.Framework.describe(family, arrays)
        assert family.describe(arrays) == wanted
        both.add(wanted is None)
    assert both == {True, False}


def test_cupys_results_are_its_own_arrays(monkeypatch):
    """Temporary memory is kept by a graph that is being captured."""
    cupy = pytest.importorskip("cupy")
    driver, kept = importlib.import_module("fp8moe.kernels_cuda.runtime.driver"), []
    stream = types.SimpleNamespace(ptr=7, is_capturing=lambda: True)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda device: stream)
    monkeypatch.setattr(driver, "kept_by_graph", lambda *arguments: kept.append(arguments))
    wanted = [
        ((2, 3), BF16, False),
        ((5,), np.dtype(ml_dtypes.float8_e5m2), True),
        ((), np.dtype(bool), False),
    ]
    family = interop.FRAMEWORKS["cupy"]
    current, makers = family.prepare(0, wanted)
    assert current() == 7
    with cupy.cuda.using_allocator(lambda size: cupy_array((size,), np.uint8).data):
        made = [make() for make in makers]
    assert [(type(x), x.shape, x.dtype) for x in made] == [
        (cupy.ndarray, (2, 3), BF16),
        (cupy.ndarray, (5,), np.uint8),
        (cupy.ndarray, (), np.bool_),
    ]
    assert [family.address(x) for x in made] == [x.data.ptr for x in made]
    ((of, memory),) = kept
    assert of == 7
    assert memory is made[1]


@pytest.mark.skipif(not cuda_on_cpu.available, reason="needs g++")
def test_number_of_recordings_is_limited(monkeypatch):
    cuda_on_cpu.install(monkeypatch)
    monkeypatch.setattr(dispatch, "RECORDINGS_KEPT", 4)
    for rows in range(1, 10):
        fp8moe.quantize(cuda_on_cpu.upload(np.ones((rows, 128), np.float32)))
        assert len(dispatch.cached_recordings()) == min(rows, 4)
    assert dispatch.cached_recordings()[-1][1] is not None


@pytest.mark.usefixtures("on_device")
def test_result_without_memory_raises(monkeypatch):
    x = torch.randn(3, 128)
    fp8moe.quantize(x)
    monkeypatch.setattr(torch_on_device.TorchOnDevice, "address", staticmethod(lambda made: 0))
    dispatch.clear_recordings()
    with pytest.raises(TypeError, match="a result: got a Tensor without memory"):
        fp8moe.quantize(x)


@pytest.mark.usefixtures("on_device")
def test_calls_of_python_functions_between_user_and_kernel():
    """Without loading of kernels; this machine's stubs for CUDA make the same number of calls as the
    originals."""
    plan, probs = map_arrays(lambda a: torch.tensor(a), A_PLAN), torch.ones(6, 2)
    counted = []
    for width in (128, 256, 256):
        x = torch.tensor(values(RNG, (6, width), np.float32))
        counter = Counter()
        sys.setprofile(counter)
        try:
            moved = torch_ops.permute(x, plan, probs)
        finally:
            sys.setprofile(None)
        assert same_bits(moved.data.numpy(), fp8moe.permute(x.numpy(), A_PLAN).data)
        counted.append(counter)
    loading, first, later = counted
    print(*(c.cells() for c in counted), sep="\n")
    assert loading.loading_calls > 0 == first.loading_calls
    # two of them read FP8MOE_CHECK, by dispatch and by the check of the plan; 80, and some more after
    # tests that have filled caches with other entries
    assert 0 < len(first.names[: first.last]) <= 86
    assert 0 < len(later.names[: later.last]) <= 12


EXPERTS = ("fp8_flow", None, True), ("fp8_flow", "moe_expert", False), ("bf16", None, False)


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize(("recipe", "recompute", "pair"), EXPERTS)
def test_experts_like_earlier_ones_compute_what_the_core_does(monkeypatch, recipe, recompute, pair):
    """Whole backwards, halves of them, and gradients that are added to others: bit for bit, and only the
    first call is checked."""
    checked, check = [], functional._checked
    monkeypatch.setattr(functional, "_checked", lambda *a, **o: checked.append(a) or check(*a, **o))
    monkeypatch.setattr(grouped, "on_hopper", lambda x: True)
    options = {"recipe": recipe, "recompute": recompute}
    counts = torch.tensor([3, 2], dtype=torch.int32)
    for _ in range(2):  # in memory of torch, which is aligned
        x, dy = (tensor(values(RNG, (5, 128), BF16)).clone() for _ in range(2))
        w13, w2 = (tensor(values(RNG, (2, rows, 128), BF16)).clone() for rows in (256, 128))
        w13 = (w13[:, :128].contiguous(), w13[:, 128:].contiguous()) if pair else w13
        probs = torch.tensor(RNG.random(5, np.float32))
        of_core = fp8moe.quantize_weights(w13) if pair else w13
        wanted, saved = fp8moe.moe_forward_permuted(x, of_core, w2, counts, probs, **options)
        backward = functools.partial(fp8moe.moe_backward, saved, dy, dtype="bfloat16")
        g = backward(dw13=(None, None) if pair else None)
        grads = [g.dx, g.dprobs, *(g.dw13 if pair else [g.dw13]), g.dw2]
        weights = [*w13, w2] if pair else [w13, w2]
        leaves = [t.requires_grad_() for t in (x, probs, *weights)]
        given = x, w13, w2, counts, probs
        if recompute is not None:
            options["fp8_weights"] = fp8moe.torch.quantize_fp8_weights(w13, w2)
        y = fp8moe.torch.moe_experts_permuted(*given, **options)
        options.pop("fp8_weights", None)
        assert torch.equal(y, wanted)
        some = [torch.autograd.grad(y, part, dy, retain_graph=True) for part in (leaves[:2], leaves[2:])]
        assert all(map(torch.equal, itertools.chain(*some), grads))
        for again in (True, False):
            y.backward(dy, retain_graph=again)
            if again:
                assert all(torch.equal(t.grad, grad) for t, grad in zip(leaves, grads, strict=True))
        added = backward(dw13=tuple(grads[2:4]) if pair else grads[2], dw2=grads[-1])
        for t, grad in zip(weights, [*(added.dw13 if pair else [added.dw13]), added.dw2], strict=True):
            assert torch.equal(t.grad, grad)
        assert len(checked) == 1


def test_threads_share_recordings(monkeypatch):
    """With more shapes than are cached, plans are made, used and dropped concurrently; all results are
    correct."""
    if not cuda_on_cpu.available:
        pytest.skip("needs g++")
    inputs = [values(RNG, (rows, 128), np.float32) for rows in range(1, 9)]
    wanted = [fp8moe.quantize(x) for x in inputs]
    cuda_on_cpu.install(monkeypatch)
    monkeypatch.setattr(dispatch, "RECORDINGS_KEPT", 5)
    uploaded = [cuda_on_cpu.upload(x) for x in inputs]
    fp8moe.quantize(uploaded[0])  # loads the kernel

    def work(seed):
        for i in np.random.default_rng(seed).integers(0, len(inputs), 40):
            q = cuda_on_cpu.download(fp8moe.quantize(uploaded[i]))
            assert same_bits(q.data, wanted[i].data)
            assert same_bits(q.scales, wanted[i].scales)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(work, range(4)))
    finally:
        sys.setswitchinterval(interval)
    assert len(dispatch.cached_recordings()) == 5


def test_tile_counters_of_a_recording_are_zeroed_before_its_first_launch(monkeypatch):
    """By as few memsets as hold them, and each product has a counter of its own."""
    if not cuda_on_cpu.available:
        pytest.skip("needs g++")
    w = fp8moe.quantize_weights(values(RNG, (2, 128, 128), BF16)).rowwise
    x, offsets = fp8moe.quantize(values(RNG, (40, 128), BF16)), np.array([0, 16, 40], np.int32)

    def three_products(x, w, offsets):
        for _ in range(3):
            y = fp8moe.grouped_gemm(x, w, offsets)
            x = fp8moe.quantize(y)
        return y

    cuda_on_cpu.install(monkeypatch)
    given = [cuda_on_cpu.upload(a) for a in (x, w, offsets)]
    expected = cuda_on_cpu.download(three_products(*given))  # each with a plan of its own
    launch = importlib.import_module("fp8moe.kernels_cuda.runtime.launch")
    monkeypatch.setattr(launch, "COUNTERS", 2)
    events, counters = [], []

    def watch(name, x, values):
        events.append(name)
        if name.startswith("grouped_gemm"):
            counters.append(values[-1].value)
            assert ctypes.c_int32.from_address(counters[-1]).value == 0

    monkeypatch.setattr(cuda_on_cpu, "watch", watch)
    as_one = dispatch.operation(three_products)
    for _ in range(2):
        events.clear()
        counters.clear()
        assert same_bits(cuda_on_cpu.download(as_one(*given)), expected)
        assert events == ["memset"] * 2 + ["grouped_gemm_tiles", "quantize_rows"] * 3
        assert len(set(counters)) == 3


def test_row_sources_are_made_once_per_plan_of_rows(monkeypatch):
    """Within a recording; other rows have others."""
    if not cuda_on_cpu.available:
        pytest.skip("needs g++")
    q = fp8moe.quantize(values(RNG, (40, 128), BF16))
    plans = [
        fp8moe.plan_topk(RNG.integers(0, 3, (40, 2)).astype(np.int32), 3, align_size=128, num_out_tokens=512)
        for _ in range(2)
    ]

    def four_transposes(q, one, other):
        plans = one, other, one, other
        return tuple(fp8moe.permute_transpose(q, plan).data for plan in plans)

    cuda_on_cpu.install(monkeypatch)
    given = [cuda_on_cpu.upload(a) for a in (q, *plans)]
    expected = cuda_on_cpu.download(four_transposes(*given))  # each with a recording of its own
    permute = importlib.import_module("fp8moe.kernels_cuda.permute")
    launched, run = [], permute.launch
    monkeypatch.setattr(permute, "launch", lambda *a, **options: launched.append(a[1]) or run(*a, **options))
    as_one = dispatch.operation(four_transposes)
    for _ in range(2):
        assert_same(expected, cuda_on_cpu.download(as_one(*given)))
        assert launched == ["row_sources"] * 2


def test_every_call_that_writes_to_out_is_counted(monkeypatch):
    """Also where a recording makes it, and for the arrays that it has written to alone."""
    if not cuda_on_cpu.available:
        pytest.skip("needs g++")
    cuda_on_cpu.install(monkeypatch)
    told = []
    x = cuda_on_cpu.upload(values(RNG, (128, 128), np.float32))
    w = cuda_on_cpu.upload(values(RNG, (2, 128, 128), np.float32))
    for make, source in ((fp8moe.quantize, x), (fp8moe.quantize_weights, w)):
        monkeypatch.setattr(interop.Framework, "overwritten", lambda _, x: told.append(x))
        first, second = make(source), make(source)
        before = times_overwritten(first), times_overwritten(second)
        parts = [first] if isinstance(first, fp8moe.QuantTensor) else [first.rowwise, first.columnwise]
        each = len(parts)  # orientations, of which the count is the sum
        for n in range(1, 4):
            told.clear()
            make(source, out=first)
            assert times_overwritten(first) == before[0] + n * each
            assert {id(x) for x in told} == {id(q.data) for q in parts}  # the framework's own arrays
        monkeypatch.setenv("FP8MOE_CHECK", "1")  # without a plan
        make(source, out=second)
        monkeypatch.undo()
        cuda_on_cpu.install(monkeypatch)
        assert times_overwritten(second) == before[1] + each
        assert times_overwritten(first) == before[0] + 3 * each


def test_a_recording_counts_writes_inside_of_its_operation(monkeypatch):
    """Where the caller's memory, or the part of it that was written to, lies in that call."""
    if not cuda_on_cpu.available:
        pytest.skip("needs g++")
    cuda_on_cpu.install(monkeypatch)

    @dispatch.operation
    def quantize_second_half(x, out):
        call = dispatch.enter(x=x, out=out)
        q = call.args.out
        codes, scales = q.data.part(64 * 128, (64, 128)), q.scales.part(64, (64, 1))
        fp8moe.quantize(call.args.x, out=fp8moe.QuantTensor(codes, scales))
        return out

    x = values(RNG, (64, 128), np.float32)
    for _ in range(3):  # each time other memory
        q = cuda_on_cpu.upload(fp8moe.quantize(values(RNG, (128, 128), np.float32)))
        half = cuda_on_cpu.map_arrays(lambda a: a[64:], q)
        before = times_overwritten(q), times_overwritten(half)
        quantize_second_half(cuda_on_cpu.upload(x), q)
        assert same_bits(q.data.host[64:], fp8moe.quantize(x).data)
        assert (times_overwritten(q), times_overwritten(half)) == (before[0], before[1] + 1)
    assert [type(plan).__name__ for _, plan in dispatch.cached_recordings()] == ["Recording"]


# ---------------------------------------------------------------- with kernels on the CPU


def a_plan(tokens, experts, k, align):
    ids = RNG.integers(-1, experts, (tokens, k)).astype(np.int32)
    return fp8moe.plan_topk(ids, experts, align_size=align)


@only_on_cpu
def test_calls_on_results_of_recordings(backend):
    """Several calls share one recording."""
    transpose = fp8moe.scaling_aware_transpose
    inputs = [values(RNG, (40, 256), BF16) for _ in range(5)]
    wanted = [transpose(fp8moe.quantize(x)) for x in inputs]
    dispatch.clear_recordings()
    for x, transposed in zip(inputs, wanted, strict=True):
        q = fp8moe.quantize(backend.upload(x))
        assert_same(transposed, backend.download(transpose(q)))
    assert len(dispatch.cached_recordings()) == 2


@only_on_cpu
def test_repeated_calls_replay_their_recording(backend):
    """From the third call on with the same shapes: other arrays, other results, no shared memory."""
    plans = [a_plan(21, 5, 3, 4) for _ in range(4)]
    inputs = [(values(RNG, (21, 256), BF16), plan, RNG.random((21, 3)).astype(np.float32)) for plan in plans]

    def work(x, plan, probs):
        moved = fp8moe.permute(x, plan, probs)
        both_orientations = fp8moe.quantize(x, columnwise=True)
        codes = fp8moe.permute(both_orientations.rowwise, plan, fill_padding=True).data
        back = fp8moe.unpermute(moved.data, plan, probs)
        transposed = fp8moe.scaling_aware_transpose(codes, plan.expert_offsets, align_size=4)
        grads = fp8moe.permute_backward(moved.data, plan, moved.probs)
        return moved.data, moved.probs, codes, back, both_orientations, transposed.scales, grads

    wanted = [work(*i) for i in inputs]
    # results are kept alive, so none may share memory
    got = [work(*map(backend.upload, i)) for i in inputs]
    assert [type(plan) for _, plan in dispatch.cached_recordings()] == [Recording] * 6
    for a, b in zip(wanted, got, strict=True):
        assert_same(a, backend.download(b))


@only_on_cpu
@pytest.mark.parametrize("elsewhere", ["x", "probs"])
def test_recording_rejects_arrays_on_two_devices(backend, elsewhere):
    arrays = {"x": values(RNG, (9, 64), BF16), "probs": RNG.random((9, 2)).astype(np.float32)}
    plan = a_plan(9, 4, 2, 4)
    arrays, plan = {n: backend.upload(a) for n, a in arrays.items()}, backend.upload(plan)
    for _ in range(3):
        fp8moe.permute(arrays["x"], plan, arrays["probs"])
    assert len(dispatch.cached_recordings()) == 1
    arrays[elsewhere].device = 1
    with pytest.raises(TypeError, match=r"got an array on CUDA device \d; wanted CUDA device \d"):
        fp8moe.permute(arrays["x"], plan, arrays["probs"])


@only_on_cpu
def test_calls_whose_recordings_are_not_cached(backend):
    plan = a_plan(9, 4, 2, 4)
    plan, x = backend.upload(plan), backend.upload(values(RNG, (9, 64), np.float32))
    for _ in range(4):  # errors are raised in every call
        with pytest.raises(ValueError, match="probs: got shape"):
            fp8moe.permute(x, plan, backend.upload(np.ones((9, 3), np.float32)))
    for align in (1, 1, 1, True):  # True equals 1 but is not a valid alignment
        if align is True:
            with pytest.raises(TypeError, match="bool"):
                fp8moe.pad(x, backend.upload(np.array([4, 5])), align)
        else:
            fp8moe.pad(x, backend.upload(np.array([4, 5])), align)
    for _ in range(4):  # its number of rows depends on values
        counts = RNG.multinomial(9, [0.5, 0.5])
        padded = fp8moe.pad(x, backend.upload(counts), 4, num_out_tokens="exact")
        assert len(padded.host) == sum(-(-c // 4) * 4 for c in counts)
    square = backend.upload(np.eye(64, dtype=np.float32))
    for _ in range(3):  # two arguments in the same memory
        fp8moe.grouped_gemm_wgrad(square, square, backend.upload(np.array([0, 64], np.int32)))
    planned = [name for name, plan in dispatch.cached_recordings() if plan is not None]
    assert planned == ["pad", "grouped_gemm_wgrad"]


@only_on_cpu
def test_recordings_take_other_arguments_of_the_same_shape(backend):
    """Aliased arguments after calls with separate ones, keyword options, and an argument as output."""
    x, y = (RNG.standard_normal((64, 64)).astype(np.float32) for _ in range(2))
    offsets = np.array([0, 40, 64], np.int32)
    for a, b in ((x, y), (y, x), (x, y), (x, x), (y, y)):
        a_up, other = backend.upload(a), backend.upload(b)
        rows = a_up, a_up if a is b else other, backend.upload(offsets)
        result = fp8moe.grouped_gemm_wgrad(*rows, dtype="float32")
        np.testing.assert_allclose(result.host[0], a[:40].T @ b[:40], atol=1e-4)
        into = backend.upload(np.ones((2, 64, 64), np.float32))
        again = fp8moe.grouped_gemm_wgrad(a_up, other, backend.upload(offsets), out=into)
        assert again is into
        np.testing.assert_allclose(into.host[1], 1 + a[40:].T @ b[40:], atol=1e-4)
    assert [type(plan) for _, plan in dispatch.cached_recordings()] == [Recording] * 2
