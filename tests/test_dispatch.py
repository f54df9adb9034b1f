"""Arrays of every framework are used without copies, and results have the caller's framework."""

import os
import subprocess
import sys
from types import SimpleNamespace

import cuda_on_cpu
import numpy as np
import pytest
import torch
from cases import BF16, same_bits, values
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8moe
from fp8moe.runtime import dispatch, interop
from fp8moe.runtime.interop import capsule


def raw(x):
    return dispatch.enter(x=x).args.x


@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "float64", "bfloat16", "int32", "int64", "uint8", "bool"]
)
def test_torch_in_and_out_without_a_copy(dtype):
    x = torch.arange(12).reshape(3, 4).to(getattr(torch, dtype))
    view = raw(x)
    assert view.ctypes.data == x.data_ptr()
    assert view.dtype.name == dtype
    call = dispatch.enter(x=x)
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
    back = dispatch.enter(x=x).leave(view)
    assert isinstance(back, jax.Array)
    assert (back == x).all()


def test_traced_jax_value_raises():
    jax = pytest.importorskip("jax")
    with pytest.raises(TypeError, match=r"x: got .*Tracer.*outside jax\.jit"):
        jax.jit(fp8moe.quantize)(jax.numpy.ones((2, 4)))


def test_every_operation_returns_the_callers_array_type():
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
    """An array of an unknown framework, with the DLPack protocol only."""

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
    assert capsule.read_capsule(x.__dlpack__()).shape == (3,)
    with pytest.raises(TypeError, match="not supported"):
        capsule.read_capsule(np.ones(3, np.complex64).__dlpack__())


class Changed(Exported):
    """An array whose capsule is changed before it is read."""

    def __init__(self, change, array=None, versioned=True):
        super().__init__(np.ones((4, 128), np.float32) if array is None else array, versioned)
        self.change = change

    def __dlpack__(self, **kwargs):
        exported = super().__dlpack__()
        name = b"dltensor_versioned" if self.versioned else b"dltensor"
        pointer = capsule._capsule_pointer(exported, name)
        self.change(capsule._LAYOUTS[name].from_address(pointer))
        return exported


def of_version(major):
    return lambda managed: setattr(managed, "major", major)


def at_null(managed):
    managed.tensor.data = None


def of_sizes(*sizes):
    def change(managed):
        for i, size in enumerate(sizes):
            managed.tensor.shape[i] = size
        managed.tensor.strides = type(managed.tensor.strides)()

    return change


@pytest.mark.parametrize("major", [0, 2, 99])
def test_capsules_of_another_major_version_raise(major):
    with pytest.raises(TypeError, match=rf"x: .*got version {major}\.\d+; wanted 1\.x"):
        raw(Changed(of_version(major)))
    assert raw(Changed(of_version(1))).shape == (4, 128)


@pytest.mark.parametrize("versioned", [True, False])
def test_capsules_without_the_memory_of_their_shape_raise(versioned):
    with pytest.raises(ValueError, match=r"x: .*got shape \[4, 128\] at a null pointer"):
        raw(Changed(at_null, versioned=versioned))
    assert raw(Changed(at_null, np.ones((0, 128)), versioned)).shape == (0, 128)
    for sizes in ((1 << 40, 1 << 40), (-4, 128), (4, -1), (1 << 61, 1)):
        with pytest.raises(ValueError, match=rf"x: .*got shape \[{sizes[0]}, {sizes[1]}\]"):
            raw(Changed(of_sizes(*sizes), versioned=versioned))


@pytest.mark.parametrize("shape", [(1 << 70, 2), (1 << 40, 1 << 40), (-1, 2)])
def test_a_cuda_array_interface_of_impossible_sizes_raises(shape):
    with pytest.raises(ValueError, match=rf"x: got shape \[{shape[0]}, {shape[1]}\]"):
        raw(OnDevice(shape, "<f4"))


def test_c_contiguity_ignores_strides_of_single_elements():
    assert capsule.is_c_contiguous((2, 3), (3, 1))
    assert capsule.is_c_contiguous((1, 3), (77, 1))
    assert not capsule.is_c_contiguous((2, 3), (1, 2))
    assert capsule.is_c_contiguous((0, 3), (1, 2))


class OnDevice:
    """An array that reports a CUDA device."""

    def __init__(self, shape, typestr, read_only=False, **more):
        self.shape, self.typestr, self.read_only, self.more = shape, typestr, read_only, more

    @property
    def __cuda_array_interface__(self):
        data = (256, self.read_only)
        return {"shape": self.shape, "typestr": self.typestr, "data": data, "version": 3, **self.more}


class OnlyCapsules:
    """An array with half of the DLPack protocol."""

    def __dlpack__(self, **options):
        return np.ones(3).__dlpack__()


def freed(x):
    return shrunk(x, 0)


def shrunk(x, nbytes=4 * 127):
    x.untyped_storage().resize_(nbytes)
    return x


def fake():
    with FakeTensorMode():
        return torch.ones(4, 128)


def jagged():
    return torch.nested.nested_tensor([torch.ones(2, 128), torch.ones(3, 128)], layout=torch.jagged)


class Named(torch.Tensor):
    """A subclass with ordinary memory."""


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (np.ones((4, 4), np.float32).T, ValueError, r"x: got shape .*numpy.ascontiguousarray\(x\)"),
        (torch.ones(4, 4).T, ValueError, r"x: got shape .*x\.contiguous\(\)"),
        (torch.ones(2, 2, requires_grad=True), TypeError, "fp8moe.torch"),
        ([[1.0]], TypeError, "x: got builtins.list; wanted an array"),
        (3.0, TypeError, "x: got"),
        (np.ones((2, 2), np.complex64), TypeError, "x: dtype complex64"),
        (np.ones((2, 2), ">f4"), TypeError, r"x: got dtype >f4; .*\.astype\('float32'\)"),
        (OnDevice((2, 2), ">i4"), TypeError, r"x: got dtype >i4; .*\.astype\('int32'\)"),
        (OnDevice((2, 2), "<c8"), TypeError, "x: dtype complex64"),
        (torch.ones(2, 2, device="meta"), TypeError, "x: got a tensor on meta"),
        (fake(), TypeError, r"x: got torch\..*FakeTensor, which only wraps other tensors"),
        (jagged(), TypeError, r"x: got torch\..*NestedTensor, which only wraps other tensors"),
        (freed(torch.ones(4, 128)), TypeError, "x: got a tensor whose memory was freed"),
        (
            shrunk(torch.ones(1, 128)),
            ValueError,
            r"x: got shape \[1, 128\], which ends at byte 512 of .* to 508 bytes",
        ),
        (shrunk(torch.ones(2, 128)[1:]), ValueError, r"x: .* ends at byte 1024 of .* to 508 bytes"),
        (
            torch._efficientzerotensor(4, 128),
            TypeError,
            "x: got a tensor whose memory was freed, or that never",
        ),
        (torch._neg_view(torch.ones(4, 128)), ValueError, r"x: got a view .*; pass x\.resolve_neg\(\)"),
        (torch.eye(128).to_sparse(), TypeError, r"x: got a tensor of layout torch\.sparse_coo .*x\.to_dense"),
        (torch.ones(4, 128).to_mkldnn(), TypeError, r"x: got a tensor of layout .*x\.to_dense\(\)"),
        (torch.nn.Linear(2, 2), TypeError, "x: got torch.nn.modules.linear.Linear; wanted an array"),
        (OnlyCapsules(), TypeError, "x: got test_dispatch.OnlyCapsules; wanted an array"),
        (None, TypeError, "x: got None; wanted an array"),
        (((0, 1), (1, 2)), TypeError, "x: got builtins.tuple; wanted an array"),
        (fp8moe.Permuted(1, 2, 3), TypeError, "x: got fp8moe.records.Permuted; wanted an array"),
    ],
)
def test_validation_errors(x, error, words):
    with pytest.raises(error, match=words):
        fp8moe.quantize(x)


def test_validation_errors_name_arguments_without_memory():
    x = torch.ones(2, 4, 128)
    with pytest.raises(TypeError, match=r"x: got a tensor of layout .* outside torch\.func"):
        torch.func.vmap(lambda x: fp8moe.quantize(x).data)(x)
    with pytest.raises(TypeError, match="routing_map: got None"):
        fp8moe.plan_routing_map(None)
    with pytest.raises(TypeError, match=r"q\.scales: got None"):
        fp8moe.dequantize(fp8moe.QuantTensor(np.zeros((3, 128), np.uint8), None))
    with pytest.raises(TypeError, match="w: got None"):
        fp8moe.grouped_gemm(x[0], None, torch.zeros(2, dtype=torch.int32))


def test_tensor_subclasses_with_memory_of_their_own_are_accepted():
    x = torch.randn(4, 128)
    assert torch.equal(fp8moe.quantize(x.as_subclass(Named)).data, fp8moe.quantize(x).data)
    assert fp8moe.quantize(torch.nn.Parameter(x, requires_grad=False)).data.shape == (4, 128)


def test_dtensors_raise_with_a_fix():
    from torch.distributed import HashStore, destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        x = DTensor.from_local(torch.ones(4, 128), init_device_mesh("cpu", (1,)), [Replicate()])
        for dtensor in (x, torch.nn.Parameter(x)):
            with torch.no_grad(), pytest.raises(TypeError, match=r"DTensor, .*; pass x\.to_local\(\)"):
                fp8moe.quantize(dtensor)
        assert fp8moe.quantize(x.to_local()).data.shape == (4, 128)
    finally:
        destroy_process_group()


def test_no_results_in_fake_tensor_mode():
    """A fake tensor's address is null, to which a kernel would write."""
    family = interop.FRAMEWORKS["torch"]
    spec = fp8moe.records.ArraySpec((4, 128), np.dtype(np.uint8))
    with FakeTensorMode(), pytest.raises(TypeError, match="a result: torch made a FakeTensor"):
        family.empty(spec, 0)


SUB_INTERPRETER = """
import sys
try:
    import _interpreters as interpreters  # from Python 3.13 on
except ImportError:
    import _xxsubinterpreters as interpreters
code = "import sys; sys.path[:] = PATH\\ntry: import fp8moe\\nexcept ImportError as error: print(error)"
interpreters.run_string(interpreters.create(), code.replace("PATH", repr(sys.path)))
"""


def test_an_import_in_a_sub_interpreter_raises():
    done = subprocess.run([sys.executable, "-c", SUB_INTERPRETER], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("fp8moe: got an import in a sub-interpreter; wanted the main"), done.stderr


# ---------------------------------------------------------------- arrays that are written to


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


def written_to():
    jnp = pytest.importorskip("jax.numpy")
    out = np.zeros((1, 8, 128), np.float32)
    return {
        "numpy": read_only(out),
        "dlpack": Exported(read_only(out)),
        "jax": jnp.zeros(out.shape),
        "cuda_array_interface": OnDevice(out.shape, "<f4", read_only=True),
    }


@pytest.mark.parametrize("kind", ["numpy", "dlpack", "jax", "cuda_array_interface"])
def test_read_only_outputs_raise(kind, request):
    out, x, dy = written_to()[kind], np.ones((3, 128), np.float32), np.ones((3, 8), np.float32)
    offsets = np.array([0, 3], np.int32)
    if kind == "cuda_array_interface":
        request.getfixturevalue("runtime")
        dy, x, offsets = (OnDevice(a.shape, a.dtype.str) for a in (dy, x, offsets))
    for _ in range(4):
        with pytest.raises(ValueError, match=r"out: got .*, which is read-only"):
            fp8moe.grouped_gemm_wgrad(dy, x, offsets, out)


def test_read_only_outputs_in_records_raise():
    x = np.ones((3, 128), np.float32)
    q = fp8moe.quantize(x)
    q = fp8moe.QuantTensor(q.data, read_only(q.scales))
    with pytest.raises(ValueError, match=r"out\.scales: got numpy\.ndarray, which is read-only"):
        fp8moe.quantize(x, out=q)
    writable = fp8moe.quantize(x)
    assert fp8moe.quantize(x, out=writable) is writable
    assert fp8moe.quantize(Exported(read_only(x))).data.any()  # read-only arrays may be read


# ---------------------------------------------------------------- streams


@pytest.fixture
def runtime(monkeypatch):
    """A stub of CUDA's runtime, for streams."""
    driver = pytest.importorskip("fp8moe.kernels_cuda.runtime.driver")

    runtime = cuda_on_cpu.Runtime()
    runtime.pointerGetAttributes = lambda ptr: SimpleNamespace(type=2, device=0)
    runtime.CUDARuntimeError = RuntimeError
    monkeypatch.setattr(driver, "runtime", runtime)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(interop.dlpack, "require_cupy", lambda purpose: cupy)
    return runtime


@pytest.mark.parametrize(
    ("stream", "waits"), [({}, []), ({"stream": None}, []), ({"stream": 1}, []), ({"stream": 77}, [(0, 77)])]
)
def test_the_stream_of_a_cuda_array_interface_is_waited_for(runtime, stream, waits):
    assert dispatch.enter(x=OnDevice((2, 2), "<i4", **stream)).args.x.ptr == 256
    assert runtime.waits == waits


def test_stream_zero_raises(runtime):
    with pytest.raises(ValueError, match="x: got stream 0"):
        dispatch.enter(x=OnDevice((2, 2), "<i4", stream=0))


def test_arrays_on_two_streams_are_ordered(runtime, monkeypatch):
    """The call runs on the first array's stream and waits for the other; a captured stream cannot wait for an
    uncaptured one."""

    class OnStream(interop.Framework):
        def __init__(self, number):
            self.number = number

        def view(self, x, name):
            return fp8moe.records.DeviceArray(16, (2, 128), np.dtype(np.float32), 0, x)

        def stream(self, device):
            return self.number

    families = {A: OnStream(n) for n, A in ((5, type("A", (), {})), (6, type("B", (), {})))}
    others = interop.framework_of_type
    monkeypatch.setattr(interop, "framework_of_type", lambda kind: families.get(kind) or others(kind))
    a, b = (kind() for kind in families)
    dispatch.enter(x=a, y=a)
    assert runtime.waits == []
    dispatch.enter(x=a, y=b)
    assert runtime.waits == [(5, 6)]
    dispatch.enter(x=b, y=OnDevice((2, 2), "<i4", stream=77))
    assert runtime.waits[1:] == [(0, 77), (6, 0)]
    runtime.streamIsCapturing = lambda stream: True
    dispatch.enter(x=a, y=b)
    assert len(runtime.waits) == 3


def test_cupys_stream_is_that_of_the_arrays_device(monkeypatch):
    streams = {-1: 100, 0: 100, 1: 101}
    current = lambda device=-1: SimpleNamespace(ptr=streams[device])  # noqa: E731
    cupy = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=current))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert [interop.FRAMEWORKS["cupy"].stream(d) for d in (0, 1)] == [100, 101]


# ---------------------------------------------------------------- JAX


def in_jax(code, **environment):
    """Runs code in a process with several CPU devices, which must be set before JAX starts."""
    pytest.importorskip("jax")
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    code = "import jax, jax.numpy as jnp, numpy as np, fp8moe\n" + code
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, **flags, **environment})


def test_jax_results_are_on_the_inputs_device_without_compilation():
    in_jax(
        "from jax._src import monitoring\n"
        "import re\n"
        "here, there = jax.devices()\n"
        "compiled = []\n"
        "listen = lambda name, *_, **__: compiled.append(name) if 'compile' in name else None\n"
        "monitoring.register_event_duration_secs_listener(listen)\n"
        "jax.jit(lambda x: x * 3)(np.ones(7))\n"
        "assert compiled\n"
        "for device in (here, there):\n"
        "    for committed in (True, False):\n"
        "        with jax.default_device(device):\n"
        "            put = lambda x: jax.device_put(x, device if committed else None)\n"
        "            xs = [put(np.random.rand(n, 128).astype(np.float32)) for n in range(1, 9)]\n"
        "            compiled.clear()\n"
        "        for x in xs:\n"
        "            q = fp8moe.quantize(x)\n"
        "            for a in (q.data, q.scales, fp8moe.dequantize(q)):\n"
        "                assert a.devices() == {device} and a.committed == committed, (a.devices(), device)\n"
        "            wanted = fp8moe.quantize(np.asarray(x))\n"
        "            assert (np.asarray(q.data) == wanted.data).all()\n"
        "        assert not compiled, compiled\n"
    )


def test_deleted_jax_arrays_and_keys_raise():
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    deleted = jnp.ones((4, 128))
    deleted.delete()
    with pytest.raises(ValueError, match="x: got an array that was deleted or donated"):
        fp8moe.quantize(deleted)
    with pytest.raises(TypeError, match=r"x: got dtype key<.*; for keys pass jax\.random\.key_data"):
        fp8moe.quantize(jax.random.key(0))
    with pytest.raises(TypeError, match=r"x: got .* whose __dlpack__ gives no readable array"):
        fp8moe.quantize(jnp.ones((3, 8), jnp.int4))
    with pytest.raises(TypeError, match=r"x: got jax.*; wanted an array"):
        fp8moe.quantize(jax.ShapeDtypeStruct((2, 128), jnp.float32))
    x = jnp.ones((3, 128))
    with pytest.raises(TypeError, match="dtype: got float64, which JAX would truncate to 32 bits"):
        fp8moe.grouped_gemm_wgrad(x, x, jnp.array([0, 3], jnp.int32), dtype="float64")


def test_jax_arrays_on_several_devices_raise():
    in_jax(
        "from jax.sharding import PartitionSpec as P\n"
        "mesh = jax.make_mesh((2,), ('x',))\n"
        "x = jax.device_put(jnp.ones((4, 128)), jax.NamedSharding(mesh, P('x')))\n"
        "try:\n"
        "    fp8moe.quantize(x)\n"
        "except TypeError as error:\n"
        "    assert str(error).startswith('x: got an array on 2 devices'), error\n"
        "else:\n"
        "    raise AssertionError('nothing was raised')\n"
    )


def test_tensors_that_require_grad_are_accepted_under_no_grad():
    x = torch.ones(2, 128, requires_grad=True)
    with torch.no_grad():
        assert fp8moe.quantize(x).data.shape == (2, 128)


def test_importing_the_package_imports_no_framework():
    code = (
        "import sys, fp8moe, numpy as np\n"
        "q = fp8moe.quantize(np.ones((2, 128), np.float32))\n"
        "names = {'torch', 'jax', 'jaxlib', 'cupy', 'transformer_engine', 'tensorflow'} & set(sys.modules)\n"
        "assert not names, names\n"
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


def test_arrays_on_two_devices_raise(monkeypatch):
    """Device 0 is an ordinary device, not the absence of one."""

    class Elsewhere(interop.Framework):
        def view(self, x, name):
            return fp8moe.records.DeviceArray(16, x.shape, x.dtype, x.device, x)

    class Array:
        def __init__(self, device):
            self.shape, self.dtype, self.device = (2, 128), np.dtype(np.float32), device

    others = interop.framework_of_type
    monkeypatch.setattr(
        interop, "framework_of_type", lambda kind: Elsewhere() if kind is Array else others(kind)
    )
    on_cpu = np.ones((2, 128), np.float32)
    for first, second, words in (
        (Array(0), on_cpu, "b: got an array on the CPU; wanted CUDA device 0, where a lies"),
        (on_cpu, Array(0), "b: got an array on CUDA device 0; wanted the CPU, where a lies"),
        (Array(1), Array(0), "b: got an array on CUDA device 0; wanted CUDA device 1"),
    ):
        with pytest.raises(TypeError, match=words):
            dispatch.enter(a=first, b=second)
    assert dispatch.enter(a=Array(0), b=Array(0)).device == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tensors_storage_can_be_freed_after_a_call(dtype):
    """As FSDP frees gathered parameters."""
    x = torch.randn(4, 128).to(dtype)
    wanted = fp8moe.quantize(x.clone())
    q = fp8moe.quantize(x)
    x.untyped_storage().resize_(0)
    assert torch.equal(q.data, wanted.data)
    x.untyped_storage().resize_(4 * 128 * x.itemsize)
