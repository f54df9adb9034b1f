"""Which device, thread and framework's memory a call uses."""

import threading

import numpy as np
import pytest
from backends import GPU, only_on_cpu
from cases import BF16, generator, poison, same_bits, values
from torch_rows import there_and_back, torch_case

import fp8moe

RNG = generator()


@only_on_cpu
def test_new_thread_sets_the_devices_context(backend, monkeypatch):
    """Autograd's threads have no CUDA context, and the driver rejects launches without one."""
    runtime = backend.start(monkeypatch)
    x = backend.upload(values(RNG, (3, 128), BF16))

    def call():
        fp8moe.quantize(x)
        fp8moe.quantize(x)

    thread = threading.Thread(target=call)
    thread.start()
    name = thread.ident
    thread.join()
    assert runtime.bound_threads.count(name) == 1


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.sanitize
def test_a_new_thread_launches():
    """As in autograd's threads: a new thread has no current CUDA context."""
    torch = pytest.importorskip("torch")
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    wanted = fp8moe.quantize(x).data
    actual = []
    thread = threading.Thread(target=lambda: actual.append(fp8moe.quantize(x).data))
    thread.start()
    thread.join()
    assert torch.equal(actual[0], wanted)


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("framework", [pytest.param("cupy", marks=pytest.mark.sanitize), "torch"])
def test_outputs_are_poisoned(framework):
    module = pytest.importorskip(framework)
    array = module.zeros(4) if framework == "cupy" else module.zeros(4, device="cuda")
    call = fp8moe.runtime.dispatch.enter(x=array)
    for dtype in (np.dtype(np.uint8), np.dtype(np.float32)):
        raw = call.empty(fp8moe.records.ArraySpec((7,), dtype))
        assert (call.to_host(raw).view(np.uint8) == poison(dtype)).all()


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.sanitize
def test_arrays_on_cpu_and_cuda_raise():
    x, ids = np.ones((4, 128), np.float32), np.zeros((4, 1), np.int32)
    plan = fp8moe.plan_topk(ids, 2)
    with pytest.raises(TypeError, match="got an array on the CPU; wanted CUDA device 0"):
        fp8moe.permute(GPU.upload(x), plan)
    with pytest.raises(TypeError, match="got an array on CUDA device 0; wanted the CPU"):
        fp8moe.permute(x, GPU.upload(plan))


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_outputs")
def test_arrays_of_jax_and_numba():
    jax = pytest.importorskip("jax")
    x = np.random.default_rng(9).standard_normal((16, 256)).astype(np.float32)
    wanted = fp8moe.quantize(x)
    q = fp8moe.quantize(jax.device_put(x, jax.devices()[0]))
    assert same_bits(np.asarray(q.data), wanted.data)
    from numba import cuda

    q = fp8moe.quantize(cuda.to_device(x))
    assert same_bits(q.data.copy_to_host(), wanted.data)


@pytest.fixture
def first_device():
    """Restores the current device: JAX's initialisation leaves the last device current in its thread."""
    runtime = pytest.importorskip("cupy").cuda.runtime
    before = runtime.getDevice()
    runtime.setDevice(0)
    yield
    runtime.setDevice(before)


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.multigpu
@pytest.mark.usefixtures("first_device")
def test_torch_on_the_second_device():
    torch = pytest.importorskip("torch")
    _, ids, x, probs = torch_case(False)
    assert x.get_device() == 0
    inputs_on_second = [t.to("cuda:1") for t in (ids, x, probs)]
    for _ in range(4):  # recordings are cached by device
        assert torch.equal(there_and_back(*inputs_on_second).cpu(), there_and_back(ids, x, probs).cpu())
        assert torch.cuda.current_device() == 0
        expected, actual = (fp8moe.quantize(t.detach(), columnwise=True) for t in (x, inputs_on_second[1]))
        assert actual.rowwise.data.device == inputs_on_second[1].device
        transposed = [fp8moe.scaling_aware_transpose(q.rowwise).data.cpu() for q in (expected, actual)]
        assert torch.equal(*transposed)
    with torch.cuda.device(1):
        assert torch.equal(fp8moe.quantize(x.detach()).data, expected.rowwise.data)
        assert torch.cuda.current_device() == 1


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.multigpu
@pytest.mark.usefixtures("first_device")
def test_cupy_on_the_second_device():
    cupy = pytest.importorskip("cupy")
    x = values(np.random.default_rng(0), (64, 256), np.float32)
    ids = np.random.default_rng(1).integers(0, 4, (64, 2)).astype(np.int32)
    wanted = fp8moe.permute(x, fp8moe.plan_topk(ids, 4, align_size=16)).data
    for _ in range(4):
        for device in (0, 1):
            with cupy.cuda.Device(device):
                on = cupy.asarray(x), cupy.asarray(ids)
            got = fp8moe.permute(on[0], fp8moe.plan_topk(on[1], 4, align_size=16)).data
            assert got.device.id == device
            with cupy.cuda.Device(device):
                assert same_bits(cupy.asnumpy(got), wanted)
    assert cupy.cuda.runtime.getDevice() == 0
