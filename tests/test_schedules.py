"""`cuda_on_cpu`: barrier, copy and alignment bugs that it must detect."""

import collections
import ctypes

import cuda_on_cpu
import numpy as np
import pytest

from fp8moe.kernels_cuda.runtime import compiler

pytest.importorskip("cupy")
pytestmark = pytest.mark.skipif(not cuda_on_cpu.available, reason="needs g++")

BROKEN = {
    "lapped": (
        "lapped: waits for phase",
        """
  // warp 1 waits in every turn, but does not arrive
  if (t == 0) barrier_init(barrier, 32);
  __syncthreads();
  for (u32 turn = 0; turn < 3; ++turn) {
    if (t < 32) barrier_arrive_here(barrier);
    barrier_wait(barrier, turn % 2);
  }""",
    ),
    "deadlock": (
        "deadlock; threads 0-63 of block (0, 0), at broken.cu:",
        """
  if (t == 0) barrier_init(barrier, 65);
  __syncthreads();
  barrier_arrive_here(barrier);
  barrier_wait(barrier, 0);""",
    ),
    "barrier_in_a_branch": (
        "deadlock",
        """
  if (t == 0) barrier_init(barrier, 33);
  __syncthreads();
  if (t < 32)
    barrier_wait(barrier, 0);
  else
    barrier_arrive_here(barrier), __syncthreads();""",
    ),
    "more_arrivals": (
        "more arrivals than the count",
        """
  if (t == 0) barrier_init(barrier, 2), barrier_expect(barrier, 16);
  __syncthreads();
  if (t == 0) barrier_arrive_here(barrier), barrier_arrive_here(barrier);
  if (t == 0) bulk_load(memory, in, 16, barrier);
  barrier_wait(barrier, 0);""",
    ),
    "fewer_bytes": (
        "(0 phases complete, 0 of 1 arrivals and 16 bytes missing)",
        """
  if (t == 0) barrier_init(barrier), barrier_expect(barrier, 32), bulk_load(memory, in, 16, barrier);
  __syncthreads();
  barrier_wait(barrier, 0);""",
    ),
    "not_waited_for": (
        "signals a block that has ended",
        """
  if (t == 0) barrier_init(barrier), barrier_expect(barrier, 16), bulk_load(memory, in, 16, barrier);
  __syncthreads();""",
    ),
    "not_initialised": ("no mbarrier was initialised here", "\n  barrier_wait(barrier, 0);"),
    "written_past_the_end": (
        "something was written 8 bytes past the end of dynamic shared memory",
        "\n  if (t == 0) ((u64*)memory)[1025] = 1;",
    ),
    "misaligned": ("misaligned address", "\n  ((uint2*)(out + 4))[t % 4] = make_uint2(0, 0);"),
    "misaligned_copy": (
        "an address that is no multiple of the size",
        "\n  copy_async8(memory + 8 * t, in + 4, true), copy_async_commit(), copy_async_wait<0>();",
    ),
    "copies_at_the_end": (
        "a thread ends before its copies to shared memory have been waited for",
        "\n  copy_async16(memory + 16 * t, in, true);",
    ),
}
READ_TOO_EARLY = {
    "bulk": """
  // read by threads that did not wait
  if (t == 0) barrier_init(barrier), barrier_expect(barrier, 64), bulk_load(memory, in, 64, barrier);
  __syncthreads();
  if (t == 0) barrier_wait(barrier, 0);
  out[t] = memory[t];
  __syncthreads();""",
    "cp_async": """
  copy_async4(memory + 4 * (t % 16), in + 4 * (t % 16), true);
  copy_async_commit();
  __syncthreads();
  out[t] = memory[t];
  copy_async_wait<0>();""",
    "no_fence": """
  if (t < 16) ((u32*)memory)[t] = 0x01010101u;
  __syncthreads();
  if (t == 0) bulk_store(out, memory, 64), bulk_finish();""",
    "uninitialised": "\n  out[t] = memory[t];",
}
KERNEL = """
extern "C" __global__ void %s(const u8* in, u8* out) {
  pdl_wait();
  DYNAMIC_SHARED(memory);
  const u32 t = threadIdx.x;
  u64* barrier = (u64*)(memory + 8000);%s
}
"""


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    """Launch functions by kernel name, with one block of 64 threads and 8192 bytes of shared memory."""
    folder = tmp_path_factory.mktemp("broken")
    for header in compiler.headers():
        (folder / header.name).write_text(header.read_text())
    bodies = {name: body for name, (_, body) in BROKEN.items()} | READ_TOO_EARLY
    source = '#include "wgmma.cuh"\n' + "".join(KERNEL % named for named in bodies.items())
    (folder / "broken.cu").write_text(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "files", lambda: {path.name: path for path in folder.iterdir()})
        patch.setattr(cuda_on_cpu, "ALIGNMENT_CHECKED", 1)
        library = cuda_on_cpu.library("broken", ())

    def launch_of(name):
        kernel = cuda_on_cpu.Kernel(name, getattr(library, f"run_{name}"))

        def launch():
            data, out = np.arange(1, 65, dtype=np.uint8), np.zeros(64, np.uint8)
            kernel(1, 1, 64, 8192, *(ctypes.c_int64(a.ctypes.data) for a in (data, out)))
            return out

        return launch

    return {name: launch_of(name) for name in bodies}


def fails(launch, text, schedules=40):
    with pytest.raises(cuda_on_cpu.LaunchFailure) as failure:
        collections.deque(launch() for _ in range(schedules))
    assert text in str(failure.value)
    return str(failure.value)


@pytest.mark.parametrize("name", BROKEN)
def test_broken_kernels_are_detected(launches, name):
    fails(launches[name], BROKEN[name][0])


def test_seed_repeats_a_failure(launches, monkeypatch):
    message = fails(launches["lapped"], "lapped")
    monkeypatch.setenv("FP8MOE_SCHEDULE", message.split("FP8MOE_SCHEDULE=")[1].split()[0])
    for _ in range(3):
        assert fails(launches["lapped"], "lapped", schedules=1) == message


@pytest.mark.parametrize("name", READ_TOO_EARLY)
def test_unfinished_copies_are_poisoned(launches, name):
    assert any(np.isin(launches[name](), (0x7F, 0xFF)).any() for _ in range(40))
