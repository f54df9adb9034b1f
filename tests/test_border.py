"""Arrays of every framework come in without a copy and results leave as the caller's kind."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from cases import BF16, same_bits, values

import fp8moe
from fp8moe import border, dlpack


def raw(x):
    return border.enter(x=x).args.x


@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "float64", "bfloat16", "int32", "int64", "uint8", "bool"]
)
def test_torch_in_and_out_without_a_copy(dtype):
    x = torch.arange(12).reshape(3, 4).to(getattr(torch, dtype))
    view = raw(x)
    assert view.ctypes.data == x.data_ptr()
    assert view.dtype.name == dtype
    call = border.enter(x=x)
    out = call.empty(fp8moe.records.ArraySpec((3, 4), view.dtype))
    out[:] = view
    back = call.leave(out)
    assert isinstance(back, torch.Tensor)
    assert back.dtype == x.dtype
    assert back.data_ptr() == out.ctypes.data
    assert torch.equal(back, x)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_torch_float8_is_viewed(dtype):
    x = torch.arange(12, dtype=torch.uint8).view(getattr(torch, dtype)).reshape(3, 4)
    view = raw(x)
    assert view.ctypes.data == x.data_ptr()
    assert view.dtype.name == dtype
    assert view.view(np.uint8).ravel().tolist() == list(range(12))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int32", "uint8"])
def test_jax_in_and_out(dtype):
    jax = pytest.importorskip("jax")
    x = jax.device_put(np.arange(12).reshape(3, 4), jax.devices("cpu")[0]).astype(dtype)
    view = raw(x)
    assert view.ctypes.data == x.unsafe_buffer_pointer()
    assert view.dtype.name == dtype
    back = border.enter(x=x).leave(view)
    assert isinstance(back, jax.Array)
    assert (back == x).all()


def test_a_traced_jax_value_is_refused():
    jax = pytest.importorskip("jax")
    with pytest.raises(TypeError, match=r"x: got .*Tracer.*outside jax\.jit"):
        jax.jit(fp8moe.quantize)(jax.numpy.ones((2, 4)))


def test_every_operation_answers_in_the_callers_kind():
    rng = np.random.default_rng(0)
    x = values(rng, (20, 128), BF16)
    ids = rng.integers(0, 4, (20, 2)).astype(np.int32)
    tx, tids = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16), torch.from_numpy(ids)
    plan, tplan = fp8moe.plan_topk(ids, 4), fp8moe.plan_topk(tids, 4)
    assert isinstance(tplan.row_id_map, torch.Tensor)
    q, tq = fp8moe.quantize(x), fp8moe.quantize(tx)
    assert tq.data.dtype == torch.uint8
    moved, tmoved = fp8moe.permute(q, plan).data, fp8moe.permute(tq, tplan).data
    assert same_bits(moved.data, tmoved.data.numpy())
    back, tback = fp8moe.unpermute(moved, plan), fp8moe.unpermute(tmoved, tplan)
    assert tback.dtype == torch.bfloat16
    assert same_bits(back.view(np.int16), tback.view(torch.int16).numpy())


class Exported:
    """An array of no known framework: only the protocol."""

    def __init__(self, array, versioned=True):
        self.array, self.versioned = array, versioned

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(max_version=(1, 0)) if self.versioned else self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("versioned", [True, False])
def test_any_dlpack_array(versioned):
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    view = raw(Exported(x, versioned))
    assert view.ctypes.data == x.ctypes.data
    assert same_bits(view, x)
    result = fp8moe.quantize(Exported(x, versioned))
    assert isinstance(result.data, np.ndarray)


def test_the_memory_outlives_its_producer():
    view = raw(Exported(np.full((1000, 1000), 7, np.int32)))
    trash = [np.zeros((1000, 1000), np.int32) for _ in range(3)]
    assert (view == 7).all()
    del trash


def test_capsules_that_cannot_be_read():
    x = np.ones(3)
    capsule = x.__dlpack__()
    assert dlpack.read_capsule(capsule).shape == (3,)
    with pytest.raises(TypeError, match="not supported"):
        dlpack.read_capsule(np.ones(3, np.complex64).__dlpack__())


def test_strides():
    assert dlpack.is_c_contiguous((2, 3), (3, 1))
    assert dlpack.is_c_contiguous((1, 3), (77, 1))
    assert not dlpack.is_c_contiguous((2, 3), (1, 2))
    assert dlpack.is_c_contiguous((0, 3), (1, 2))


class OnDevice:
    """Says that it lies on a device."""

    def __init__(self, shape, typestr):
        self.shape, self.typestr = shape, typestr

    @property
    def __cuda_array_interface__(self):
        return {"shape": self.shape, "typestr": self.typestr, "data": (256, False), "version": 3}


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (np.ones((4, 4), np.float32).T, ValueError, r"x: got shape .*numpy.ascontiguousarray\(x\)"),
        (torch.ones(4, 4).T, ValueError, r"x: got shape .*x\.contiguous\(\)"),
        (torch.ones(2, 2, requires_grad=True), TypeError, "torch_ops"),
        ([[1.0]], TypeError, "x: got builtins.list; wanted an array"),
        (3.0, TypeError, "x: got"),
        (np.ones((2, 2), np.complex64), TypeError, "x: dtype complex64"),
        (np.ones((2, 2), ">f4"), TypeError, r"x: got dtype >f4, .* \.astype\('float32'\)"),
        (OnDevice((2, 2), ">i4"), TypeError, r"x: got dtype >i4, .* \.astype\('int32'\)"),
        (OnDevice((2, 2), "<c8"), TypeError, "x: dtype complex64"),
        (torch.ones(2, 2, device="meta"), TypeError, "x: got a tensor on meta"),
    ],
)
def test_refusals(x, error, words):
    with pytest.raises(error, match=words):
        fp8moe.quantize(x)


def test_a_tensor_that_requires_grad_is_fine_without_grad():
    x = torch.ones(2, 128, requires_grad=True)
    with torch.no_grad():
        assert fp8moe.quantize(x).data.shape == (2, 128)


def test_importing_the_package_imports_no_framework():
    code = (
        "import sys, fp8moe, numpy as np\n"
        "q = fp8moe.quantize(np.ones((2, 128), np.float32))\n"
        "found = {'torch', 'jax', 'jaxlib', 'cupy', 'transformer_engine', 'tensorflow'} & set(sys.modules)\n"
        "assert not found, found\n"
        "assert 'numba' in sys.modules  # the reference needs it, the package itself does not\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    bare = "import sys, fp8moe; assert not {'numba', 'torch', 'jax', 'cupy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", bare], check=True)


def test_a_torch_caller_imports_only_torch():
    code = (
        "import sys, torch, fp8moe\n"
        "q = fp8moe.quantize(torch.ones(2, 128))\n"
        "assert type(q.data) is torch.Tensor\n"
        "assert not {'jax', 'cupy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_arrays_on_two_devices_are_refused(monkeypatch):
    """Device 0 is a device like any other, not the absence of one."""

    class Elsewhere(border.Family):
        def view(self, x, name):
            return fp8moe.records.DeviceArray(16, x.shape, x.dtype, x.device, x)

    class Array:
        def __init__(self, device):
            self.shape, self.dtype, self.device = (2, 128), np.dtype(np.float32), device

    family_of = border.family_of
    monkeypatch.setattr(
        border, "family_of", lambda x, name: Elsewhere() if isinstance(x, Array) else family_of(x, name)
    )
    on_cpu = np.ones((2, 128), np.float32)
    for first, second, words in (
        (Array(0), on_cpu, "b: got an array on the CPU; wanted CUDA device 0, where a lies"),
        (on_cpu, Array(0), "b: got an array on CUDA device 0; wanted the CPU, where a lies"),
        (Array(1), Array(0), "b: got an array on CUDA device 0; wanted CUDA device 1"),
    ):
        with pytest.raises(TypeError, match=words):
            border.enter(a=first, b=second)
    assert border.enter(a=Array(0), b=Array(0)).device == 0
