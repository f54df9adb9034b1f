"""Plans of launches: what the driver is given, by the loop in Python and by the compiled one."""

import ctypes
import itertools
import os
import random
import struct
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from cases import SEED

pytest.importorskip("cupy")

from fp8moe.kernels_cuda.runtime import driver, replay
from fp8moe.kernels_cuda.runtime.replay import Plan, Step
from fp8moe.runtime.loops import RUNS, Loop

DRAW = random.Random(SEED)
ARRAYS = 5
LOOPS = pytest.mark.parametrize("loop", [replay.loop, replay.LOOP.compiled], ids=["interpreted", "compiled"])
I64, I32, P = ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p


class Driver:
    """Notes what it is given, by thread. fails: the number of the call that returns an error."""

    def __init__(self, kernels, fails=None):
        self.kernels, self.fails, self.noted = kernels, fails, {}
        functions = (self.launch, [P] * 4), (self.fill, [P, ctypes.c_ubyte, ctypes.c_size_t, P])
        functions = *functions, (self.encode, [P, I32, ctypes.c_uint32, *[P] * 5, *[I32] * 4])
        self._held = [ctypes.CFUNCTYPE(I32, *kinds)(function) for function, kinds in functions]
        self.functions = tuple(ctypes.cast(f, P).value for f in self._held)

    def _note(self, *event):
        noted = self.noted.setdefault(threading.get_ident(), [])
        noted.append(event)
        return 700 if len(noted) - 1 == self.fails else 0

    def launch(self, config, kernel, parameters, extra):
        sizes = self.kernels[kernel]
        pointers = (ctypes.c_uint64 * len(sizes)).from_address(parameters)
        assert extra is None
        assert all(at % 64 == 0 for at, size in zip(pointers, sizes, strict=True) if size == 128)
        attributes, count = struct.unpack("QI", ctypes.string_at(config + 40, 12))
        given = [ctypes.string_at(*of) for of in zip(pointers, sizes, strict=True)]
        return self._note(
            *(
                "launch",
                kernel,
                ctypes.string_at(config, 28),
                struct.unpack("Q", ctypes.string_at(config + 32, 8)),
            ),
            *(ctypes.string_at(attributes, 72 * count), given),
        )

    def fill(self, address, value, size, stream):
        return self._note("fill", address, value, size, stream)

    def encode(self, to, kind, rank, address, dimensions, strides, box, steps, *rest):
        words = ctypes.string_at(dimensions, 16), ctypes.string_at(strides, 8)
        given = kind, rank, address, *words, ctypes.string_at(box, 8), ctypes.string_at(steps, 8), *rest
        ctypes.memmove(to, encoded(*given), 128)
        return self._note("encode", *given)


def encoded(*given):
    """What this driver makes of the arguments of a tensor map."""
    return random.Random(repr(given)).randbytes(128)


def map_arguments(address, rows, columns, box):
    shapes = struct.pack("2Q", columns, rows), struct.pack("Q", columns), struct.pack("2I", 128, box)
    return 0, 2, address, *shapes, struct.pack("2I", 1, 1), 0, 3, 3, 0


def random_steps():
    """(steps, sizes of each kernel's parameters)."""
    steps, kernels = [], {}
    for _ in range(DRAW.randrange(1, 12)):
        words = [DRAW.randbytes(8) for _ in range(DRAW.randrange(1, 20))]
        maps = [
            (DRAW.getrandbits(40), *(DRAW.randrange(1, 1 << 20) for _ in range(2)), DRAW.choice((64, 128)))
        ]
        maps *= DRAW.choice((0, 0, 1, 2))
        kernel = SimpleNamespace(ptr=DRAW.getrandbits(47), name=f"kernel{len(steps)}")
        if is_memset := DRAW.random() < 0.2:
            kernel, maps = None, []
            words = [struct.pack("q", DRAW.getrandbits(b)) for b in (47, 8, 30)]
        else:
            kernels[kernel.ptr] = [128] * len(maps) + [8] * len(words)
        count = len(maps) + len(words)
        at = [0] if is_memset else sorted(DRAW.sample(range(count), DRAW.randrange(0, count)))
        places = [(i, DRAW.randrange(ARRAYS), DRAW.getrandbits(20)) for i in at]
        grid, block, shared = (
            (DRAW.randrange(1, 1 << 16), DRAW.randrange(1, 99)),
            256,
            DRAW.randrange(1 << 17),
        )
        steps.append(Step(kernel, grid, block, shared, b"".join(words), maps, places))
    return steps, kernels


def expected(steps, place_of, addresses, stream, dependent):
    """What the driver is to be given: first all tensor maps, then each step in its turn."""
    encodes, launches = [], []
    for step in steps:
        at = {
            i: addresses[place_of[array][0]] + place_of[array][1] + offset for i, array, offset in step.places
        }
        maps = [map_arguments(at.get(i, address), *shape) for i, (address, *shape) in enumerate(step.maps)]
        encodes += [("encode", *arguments) for arguments in maps]
        words = [step.parameters[i : i + 8] for i in range(0, len(step.parameters), 8)]
        for i, address in at.items():
            if i >= len(maps):
                words[i - len(maps)] = struct.pack("q", address)
        if step.kernel is None:
            launches.append(("fill", *(int.from_bytes(w, "little") for w in words), stream))
            continue
        config = struct.pack("7I", *step.grid, 1, step.block, 1, 1, step.shared)
        attribute = struct.pack("2I64s", 6, 0, struct.pack("i", 1)) if dependent else b""
        given = [*(encoded(*m) for m in maps), *words]
        launches.append(("launch", step.kernel.ptr, config, (stream,), attribute, given))
    return encodes + launches


def random_call():
    """(stream, addresses)."""
    return DRAW.getrandbits(47), [DRAW.getrandbits(47) for _ in range(ARRAYS)]


@pytest.fixture(autouse=True)
def drawn():
    DRAW.seed(SEED)


@pytest.fixture
def run_by(monkeypatch):
    """Has plans run by a loop, with a driver."""

    def run_by(loop, fake, dependent=True):
        monkeypatch.setattr(replay.LOOP, "run", loop)
        monkeypatch.setattr(driver, "functions", lambda: fake.functions)
        monkeypatch.setattr(driver, "has_dependent_launch", lambda device: dependent)

    return run_by


@LOOPS
def test_the_driver_is_given_every_byte(run_by, loop):
    for _ in range(30):
        steps, kernels = random_steps()
        dependent, place_of = (
            DRAW.random() < 0.5,
            [(DRAW.randrange(ARRAYS), DRAW.randrange(99)) for _ in range(ARRAYS)],
        )
        fake = Driver(kernels)
        run_by(loop, fake, dependent)
        plan = Plan(steps, 0, place_of.__getitem__)
        for _ in range(2):  # the second call finds nothing of the first
            fake.noted.clear()
            stream, addresses = random_call()
            plan.run(addresses, stream)
            (noted,) = fake.noted.values()
            assert noted == expected(steps, place_of, addresses, stream, dependent)


@LOOPS
def test_an_error_of_the_driver_names_the_launch(run_by, loop):
    seen = set()
    for _ in range(20):
        steps, kernels = random_steps()
        maps = [m for step in steps for m in step.maps]
        fails = DRAW.randrange(len(maps) + len(steps))
        fake = Driver(kernels, fails)
        run_by(loop, fake)
        with pytest.raises(RuntimeError) as failure:
            Plan(steps, 0).run(*random_call()[::-1])
        (noted,) = fake.noted.values()
        assert len(noted) == fails + 1  # nothing is launched after it
        kind = noted[-1][0]
        seen.add(kind)
        if kind == "encode":
            _, rows, columns, _ = maps[fails]
            assert str(failure.value) == f"cuTensorMapEncodeTiled({rows} x {columns}): error 700"
        elif kind == "fill":
            assert str(failure.value) == "cuMemsetD8Async: error 700 (memset)"
        else:
            name = steps[fails - len(maps)].kernel.name
            assert str(failure.value) == f"cuLaunchKernelEx: error 700 ({name})"
    assert "launch" in seen


def test_threads_share_a_plan(run_by):
    steps, kernels = random_steps()
    fake, place_of = Driver(kernels), [(n, 0) for n in range(ARRAYS)]
    run_by(replay.LOOP.compiled, fake)
    plan, together = Plan(steps, 0), threading.Barrier(4)
    calls = [[random_call() for _ in range(25)] for _ in range(4)]

    def work(calls):
        together.wait()
        for stream, addresses in calls:
            plan.run(addresses, stream)
        return threading.get_ident()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            identities = list(threads.map(work, calls))
    finally:
        sys.setswitchinterval(interval)
    for identity, of_thread in zip(identities, calls, strict=True):
        wanted = [expected(steps, place_of, addresses, stream, True) for stream, addresses in of_thread]
        assert fake.noted[identity] == [*itertools.chain(*wanted)]


@LOOPS
def test_no_python_runs_between_two_launches(run_by, loop):
    """But what stands for the driver here."""

    def launch():
        return 0

    def fill():
        return 0

    def encode():
        return 0

    held = [ctypes.CFUNCTYPE(I32)(function) for function in (launch, fill, encode)]
    run_by(loop, SimpleNamespace(functions=tuple(ctypes.cast(f, P).value for f in held)))
    kernel = SimpleNamespace(ptr=1, name="kernel")
    step = Step(kernel, (1, 1), 32, 0, bytes(8 * 9), [(4096, 8, 128, 64)], [(0, 1, 0), (4, 2, 8)])
    memset = Step(None, (0, 0), 0, 0, bytes(3 * 8))
    plan, called = Plan([step, step, memset, step], 0), []
    plan.run([0, 64, 128], 5)
    sys.setprofile(lambda frame, event, _: event == "call" and called.append(frame.f_code.co_name))
    try:
        plan.run([0, 64, 128], 5)
    finally:
        sys.setprofile(None)
    first, last = called.index("encode"), len(called) - called[::-1].index("launch")
    between, driver_calls = called[first:last], ["encode"] * 3 + ["launch", "launch", "fill", "launch"]
    assert (between == driver_calls) == (loop is replay.LOOP.compiled)


@pytest.mark.skipif(os.name != "posix", reason="needs usleep")
def test_the_loop_releases_the_gil(run_by, monkeypatch):
    usleep = ctypes.cast(ctypes.CDLL(None).usleep, P).value
    run_by(replay.LOOP.compiled, SimpleNamespace(functions=(usleep,) * 3))
    plan = Plan([Step(None, (0, 0), 0, 0, struct.pack("3q", 300_000, 0, 0))], 0)
    thread, turns = threading.Thread(target=plan.run, args=((), 0)), 0
    thread.start()
    while thread.is_alive():
        time.sleep(0.01)
        turns += 1
    assert turns > 3


def test_a_loop_is_interpreted_until_it_is_compiled():
    def twice(x):
        return 2 * x

    loop = Loop(twice, 1)
    assert [loop.run(n) for n in range(RUNS - 1)] == [2 * n for n in range(RUNS - 1)]
    assert loop.task is None  # a process's first step has Numba to itself
    interpreted = loop.run
    assert interpreted(5) == 10
    task = loop.task
    assert interpreted(6) == 12
    assert loop.task is task  # once
    if hasattr(os, "fork"):  # a process is forked when no thread compiles any more
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there are threads
            child = os.fork()
        if not child:
            os._exit(0 if loop.run is loop.compiled and loop.run(21) == 42 else 1)
        assert os.waitpid(child, 0)[1] == 0
    task.wait()
    assert loop.run is loop.compiled
    assert loop.run(np.int64(3)) == 6


def compile_now(loop):
    for _ in range(RUNS):
        loop.run(1)
    loop.task.wait()


def test_a_loop_that_is_not_compiled_stays_interpreted():
    def refused(x):
        return x and open  # what it returns has no type of Numba's

    loop = Loop(refused, 1)
    with pytest.warns(RuntimeWarning, match="Numba does not compile refused"):
        compile_now(loop)
    assert loop.run is refused
