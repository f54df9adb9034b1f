"""Where a test runs an operation: its argument ``backend``.

The reference takes NumPy arrays; `cuda_on_cpu` runs the CUDA sources on the CPU, within the limits that it
documents; a GPU takes CuPy arrays. A test that asks for ``backend`` runs on all three; `on_cuda`,
`only_on_cpu`, `only_on_gpu` and `over`, which has other sizes for each, limit it. ``both`` returns the
results of the reference and of a backend.
"""

import functools
import importlib.util
import math

import cuda_on_cpu
import pytest
from cases import poison

import fp8moe
from fp8moe.records import DeviceArray
from fp8moe.runtime import dispatch
from fp8moe.runtime.interop.cupy import Cupy
from fp8moe.runtime.record_trees import map_arrays


class Reference:
    __name__ = "reference"  # pytest names a test's parameters by it

    def start(self, monkeypatch): ...

    def upload(self, value):
        return value

    download = upload

    def skip_without(self, gemm): ...

    def both(self, function, *arguments, **options):
        """The result twice, for checks that compare it with an oracle too."""
        result = function(*arguments, **options)
        return result, result


class OnCpu:
    __name__ = "cuda_on_cpu"
    upload, download = staticmethod(cuda_on_cpu.upload), staticmethod(cuda_on_cpu.download)

    def start(self, monkeypatch, **device):
        """Until the end of the test there is a device; ``device``: see `cuda_on_cpu.install`."""
        return cuda_on_cpu.install(monkeypatch, **device)

    def skip_without(self, gemm): ...

    def launched(self, monkeypatch):
        """A list of the kernels of all launches from now on, by name."""
        from fp8moe.kernels_cuda.runtime import launch

        names, load = [], launch.load_kernel
        monkeypatch.setattr(launch, "load_kernel", lambda *a: names.append(a[1]) or load(*a))
        return names

    def both(self, function, *arguments, architecture="sm_90a", multiprocessors=2, **options):
        """(the reference's result, the CUDA backend's result) on a device without recordings."""
        expected = function(*arguments, **{k: v for k, v in options.items() if k != "backend"})
        with pytest.MonkeyPatch.context() as patch:
            self.start(patch, architecture=architecture, multiprocessors=multiprocessors)
            actual = function(*map(self.upload, arguments), **{k: self.upload(v) for k, v in options.items()})
            return expected, self.download(actual)


class Gpu:
    __name__ = "gpu"

    def start(self, monkeypatch):
        """All device memory that the library allocates for outputs is poisoned."""
        cupy = pytest.importorskip("cupy")

        def fill(framework, address, dtype, nbytes, device):
            if nbytes:
                with cupy.cuda.Device(device):
                    stream = framework.stream(device)
                    cupy.cuda.runtime.memsetAsync(address, poison(dtype), nbytes, stream)

        def poisoned_array(framework, make, device, shape, dtype):
            array = make()
            nbytes = math.prod(shape) * dtype.itemsize
            fill(framework, framework.address(array), dtype, nbytes, device)
            return array

        dispatch.clear_recordings()  # which allocate as before
        for kind in {type(f) for f in fp8moe.runtime.interop.FRAMEWORKS.values()}:
            if "empty" not in vars(kind):
                continue
            if kind is Cupy:  # whose recordings allocate without ``empty``

                def prepare(self, device, arrays, prepare=kind.prepare):
                    arrays = [*arrays]
                    stream, makers = prepare(self, device, arrays)
                    return stream, [
                        functools.partial(poisoned_array, self, make, device, shape, dtype)
                        for make, (shape, dtype, _) in zip(makers, arrays, strict=True)
                    ]

                monkeypatch.setattr(kind, "prepare", prepare)

            def poisoned(self, spec, device, empty=kind.empty):
                raw = empty(self, spec, device)
                on_device = isinstance(raw, DeviceArray) and device != dispatch.NOWHERE
                if on_device:
                    fill(self, raw.ptr, raw.dtype, raw.nbytes, device)
                return raw

            monkeypatch.setattr(kind, "empty", poisoned)

    def skip_without(self, gemm):
        """Skips the test on a device that does not have this kind of GEMM."""
        import cupy

        if gemm == "wgmma" and cupy.cuda.Device().compute_capability != "90":
            pytest.skip("needs compute capability 9.0")

    def upload(self, value):
        import cupy

        return map_arrays(lambda a: cupy.asarray(a), value)

    def download(self, value):
        import cupy

        return map_arrays(lambda a: cupy.asnumpy(a), value)

    def both(self, function, *arguments, **options):
        """(the reference's result, the CUDA backend's result)."""
        expected = function(*arguments, **{k: v for k, v in options.items() if k != "backend"})
        actual = function(*map(self.upload, arguments), **{k: self.upload(v) for k, v in options.items()})
        return expected, self.download(actual)


HAS_HARNESS = cuda_on_cpu.available and importlib.util.find_spec("cupy") is not None
needs_harness = pytest.mark.skipif(not HAS_HARNESS, reason="needs g++ and CuPy")
REFERENCE, ON_CPU, GPU = Reference(), OnCpu(), Gpu()
MARKS = {REFERENCE: (), ON_CPU: needs_harness, GPU: (pytest.mark.gpu, pytest.mark.sanitize)}
NOTHING = ((),)


def cases(backend, arguments=NOTHING):
    return [pytest.param(backend, *a, marks=MARKS[backend]) for a in arguments]


def over(names, *, reference=(), on_cpu=(), on_gpu=()):
    """Parametrises ``backend`` and ``names``, a comma-separated string, with each backend's tuples."""
    every = [*cases(REFERENCE, reference), *cases(ON_CPU, on_cpu), *cases(GPU, on_gpu)]
    return pytest.mark.parametrize(("backend", *names.split(", ")), every)


EVERYWHERE = [*cases(REFERENCE), *cases(ON_CPU), *cases(GPU)]
on_cuda = pytest.mark.parametrize("backend", [*cases(ON_CPU), *cases(GPU)])
only_on_cpu = pytest.mark.parametrize("backend", cases(ON_CPU))
only_on_gpu = pytest.mark.parametrize("backend", cases(GPU))
