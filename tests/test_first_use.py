"""The first step of a process: which kernels are compiled, when, by what, and what it says. The compiler is
replaced, except where a process ends or is interrupted while it runs."""

import contextlib
import errno
import functools
import importlib.util
import json
import logging
import operator
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import cuda_on_cpu
import numpy as np
import pytest
from cases import generator

import fp8moe
from fp8moe.activation import SWIGLU
from fp8moe.kernels_cuda.runtime import compiler
from fp8moe.layer.moe import experts_backward, experts_forward, permuted_experts_forward
from fp8moe.layer.options import LayerOptions
from fp8moe.layer.recipes import GRADIENTS
from fp8moe.records import ArraySpec
from fp8moe.runtime import call, disk_cache, dispatch, recording, workers
from fp8moe.runtime.recording import GivenMemory

RNG = generator()
TOKENS, EXPERTS, HIDDEN, FFN, TOPK = 64, 8, 512, 256, 2


class Module:
    """A loaded module, in place of CuPy's."""

    def load(self, code):
        assert code.startswith(b"code of ")

    def get_function(self, name):
        return type("Function", (), {"ptr": id(self)})


class Compiler:
    """In place of NVRTC and of Numba. calls: (source, its definitions) of each compilation. running: how many
    at most at once. together: how many the first ones wait for. seconds: that each takes."""

    def __init__(self, together=1, seconds=0.0):
        self.seconds = seconds
        self.calls, self.begun, self.now, self.running, self.failing = [], 0, 0, 0, ()
        self._lock, self._barrier, self._meeting = threading.Lock(), threading.Barrier(together), together

    def compile_source(self, path, architecture, defines):
        with self._lock:
            self.calls.append((path.stem, defines))
            self.begun, self.now = self.begun + 1, self.now + 1
            self.running = max(self.running, self.now)
            waits = self.begun <= self._meeting
        if waits:
            self._barrier.wait(30)
        time.sleep(self.seconds)
        with self._lock:
            self.now -= 1
        if path.stem in self.failing:
            raise compiler.CompileError(f"kernels_cuda/{path.name}(1): error: no")
        return (
            b"code of " + path.stem.encode(),
            "Compiling entry function 'f'\nUsed 9 registers, 4 bytes smem",
        )

    def compile_numba(self, kernel, kinds, architecture):
        with self._lock:
            self.calls.append((kernel.__name__, kinds))
        return b"code of " + kernel.__name__.encode()


@pytest.fixture
def first(tmp_path, monkeypatch):
    """first(...): a process in which nothing is compiled yet, with a device but without a GPU; returns its
    `Compiler`. The cache on disk stays."""
    cupy = pytest.importorskip("cupy")
    numba_cuda = pytest.importorskip("fp8moe.kernels_cuda.runtime.numba_cuda")
    from fp8moe.kernels_cuda.runtime import driver, launch

    load_kernel = launch.load_kernel.__wrapped__
    monkeypatch.setenv("FP8MOE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cupy.cuda.function, "Module", Module)
    monkeypatch.setattr(driver, "runtime", cuda_on_cpu.Runtime())
    monkeypatch.setattr(driver, "while_capturing", operator.call)
    for name, value in (
        ("architecture", "sm_90a"),
        ("has_dependent_launch", True),
        ("multiprocessors", 132),
        ("shared_limit", 227 << 10),
        ("allow_shared", None),
    ):
        monkeypatch.setattr(driver, name, lambda *_, value=value: value)

    def start(threads=4, **options):
        dispatch.clear_recordings()
        compiled = Compiler(**options)
        monkeypatch.setattr(launch, "load_kernel", functools.cache(load_kernel))
        monkeypatch.setattr(numba_cuda, "_loaded", {})
        monkeypatch.setattr(compiler, "nvrtc_threads", compiler.Threads(threads))
        monkeypatch.setattr(compiler, "numba_threads", compiler.Threads(1))
        monkeypatch.setattr(compiler, "compile_source", compiled.compile_source)
        monkeypatch.setattr(numba_cuda, "_compile", compiled.compile_numba)
        return compiled

    yield start
    settle()


def settle():
    """Return when nothing is compiled any more."""
    for threads in (compiler.nvrtc_threads, compiler.numba_threads):
        deadline = time.monotonic() + 30
        while threads._waiting and time.monotonic() < deadline:
            time.sleep(0.005)
        threads.wait()


def specs(*shapes_and_dtypes):
    return [ArraySpec(shape, np.dtype(dtype)) for shape, dtype in shapes_and_dtypes]


def layer(recipe, ids="int32", activation=SWIGLU, bias=False, dtype=fp8moe.formats.BFLOAT16):
    """Forward, and forward with backward, of the experts, each as a call that is recorded on a device."""
    halves = 2 if activation.gated else 1
    arguments = specs(
        *(((TOKENS, HIDDEN), dtype), ((EXPERTS, halves * FFN, HIDDEN), dtype)),
        *(((EXPERTS, HIDDEN, FFN), dtype), ((TOKENS, TOPK), ids), ((TOKENS, TOPK), "float32")),
        *([((EXPERTS, halves * FFN), "float32")] if bias else []),
    )
    options = LayerOptions(recipe=recipe, activation=activation)
    gradients = tuple(name for name in GRADIENTS if bias or name != "dbias13")

    def forward(a):
        return experts_forward(*a[:5], options, gradients, None, *a[5:])

    def step(a):
        y, saved = forward(a)
        return experts_backward(saved, y, None, None, "float32", gradients)

    return GivenMemory(forward, arguments), GivenMemory(step, arguments)


RECIPES = pytest.mark.parametrize("recipe", ["bf16", "fp8_blockwise", "fp8_flow"])


def permuted_layer(recipe):
    """The same of rows that are permuted already."""
    bfloat16 = fp8moe.formats.BFLOAT16
    arguments = specs(
        *(((TOKENS, HIDDEN), bfloat16), ((EXPERTS, 2 * FFN, HIDDEN), bfloat16)),
        *(((EXPERTS, HIDDEN, FFN), bfloat16), ((EXPERTS,), "int32"), ((TOKENS,), "float32")),
    )
    options, gradients = LayerOptions(recipe=recipe, activation=SWIGLU), ("dx", "dprobs", "dw13", "dw2")

    def forward(a):
        return permuted_experts_forward(*a, options, gradients, 1)

    def step(a):
        y, saved = forward(a)
        return experts_backward(saved, y, None, None, "float32", gradients)

    return GivenMemory(forward, arguments), GivenMemory(step, arguments)


@pytest.mark.parametrize("layer", [layer, permuted_layer])
@RECIPES
def test_a_call_has_all_of_its_kernels_compiled_at_once_and_its_backwards(first, recipe, layer):
    compiled = first(together=4)
    forward, step = layer(recipe)
    forward._record(0)  # its first compilations wait until four run
    assert compiled.running == 4
    settle()
    assert len(set(compiled.calls)) == len(compiled.calls)  # each once
    compiled.calls.clear()
    step._record(0)
    assert compiled.calls == []


def test_the_router_foresees_the_plan(first):
    compiled, config = first(), fp8moe.RouterConfig(TOPK)
    GivenMemory(lambda a: fp8moe.route(*a, config), specs(((TOKENS, EXPERTS), "float32")))._record(0)
    settle()
    assert {name for name, _ in compiled.calls} >= {"router", "_count_entries", "_place_entries"}
    compiled.calls.clear()
    GivenMemory(lambda a: fp8moe.plan_topk(*a, EXPERTS), specs(((TOKENS, TOPK), "int32")))._record(0)
    assert compiled.calls == []


def test_an_error_is_raised_by_the_call_that_needs_the_kernel(first):
    compiled = first()
    compiled.failing = ("grouped_gemm_wgrad_wgmma",)
    forward, step = layer("fp8_flow")
    forward._record(0)  # which foresees a backward that fails
    for _ in range(2):
        with pytest.raises(compiler.CompileError, match=r"kernels_cuda/grouped_gemm_wgrad_wgmma\.cu\(1\)"):
            step._record(0)


def test_threads_that_need_the_same_kernels_compile_them_once(first):
    compiled, forward = first(), [layer("fp8_flow")[0] for _ in range(4)]
    threads = [threading.Thread(target=f._record, args=(0,)) for f in forward]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    settle()
    assert len(set(compiled.calls)) == len(compiled.calls) > 10


def test_a_first_step_is_not_silent(first, caplog, tmp_path, monkeypatch):
    first(seconds=0.05)
    monkeypatch.setattr(compiler, "_announce", functools.cache(compiler._announce.__wrapped__))
    with caplog.at_level(logging.INFO, "fp8moe"):
        layer("fp8_flow")[0]._record(0)
    messages = [r.getMessage() for r in caplog.records if r.name.startswith("fp8moe.")]
    folder = str(tmp_path / "cache")
    assert messages.count(f"CUDA kernels for sm_90a, cache of compiled kernels {folder}") == 1
    (begun,) = [m for m in messages if m.startswith("compiling ")]
    assert begun.split()[1].isdigit()
    assert begun.endswith(f"kernels for sm_90a, cache {folder}")
    (ended,) = [m for m in messages if m.startswith("compiled ")]
    assert ended.startswith(begun.replace("compiling", "compiled").partition(",")[0] + " in ")
    caplog.clear()
    with caplog.at_level(logging.INFO, "fp8moe"):
        layer("fp8_flow")[0]._record(0)  # everything is compiled
    assert [r for r in caplog.records if "compil" in r.getMessage()] == []

    pytest.importorskip("tqdm")
    assert isinstance(compiler.progress(3, "", 2), compiler.NoBar)  # no terminal
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with compiler.progress(3, "text", 2) as bar:
        assert (bar.total, bar.delay, bar.leave) == (3, 2, False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert isinstance(compiler.progress(3, "", 2), compiler.NoBar)


def test_the_choice_of_a_backend_is_logged_with_its_reasons(first, caplog, monkeypatch):
    from fp8moe.kernels_cuda import grouped_gemm

    first()
    monkeypatch.setattr(grouped_gemm, "_log_choice", functools.cache(grouped_gemm._log_choice.__wrapped__))
    monkeypatch.setattr(call, "_logged", set())
    monkeypatch.setattr(call, "load_backend", functools.cache(call.load_backend.__wrapped__))
    operands = specs(((300, 100), "float32"), ((3, 40, 100), "float32"), ((4,), "int32"))
    with caplog.at_level(logging.INFO, "fp8moe"):
        for _ in range(2):
            GivenMemory(lambda a: fp8moe.grouped_gemm(*a), operands)._record(0)
    backend, gemm = [r.getMessage() for r in caplog.records if "backend " in r.getMessage()]
    assert backend == "backend fp8moe.kernels_cuda, as the first array lies on CUDA device 0"
    assert gemm.startswith("grouped_gemm of float32 and float32 on sm_90a: backend plain (wgmma: ")


def test_the_command_fills_the_cache_that_a_first_step_reads(first, monkeypatch, capsys):
    from fp8moe.kernels_cuda import compile_all, plan
    from fp8moe.kernels_cuda.runtime import replay

    compiled = first()
    done = compiler.Task(int, ())
    done.run()
    monkeypatch.setattr(replay.LOOP, "compile", lambda: done)
    for number in range(len(plan.kernels())):  # the command's processes, which have Numba, find these
        assert compile_all._compiled_plan(number, "sm_90a").error == ""
    assert fp8moe_main("compile", "--arch", "sm_90a", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    variants = {(p.name, tuple(d)) for p in compiler.sources("sm_90a") for d in compiler.variants(p)}
    assert (told["failed"], told["spilling"], told["kernels"]) == (0, 0, len(variants))
    kernel = {"name": "f", "registers": 9, "spill_bytes": 0, "shared_bytes": 4}
    assert [row["kernels"] for row in told["rows"]].count([kernel]) == len(variants)
    assert told["cache"] == os.environ["FP8MOE_CACHE_DIR"]
    rows = {(row["source"], tuple(row["defines"])) for row in told["rows"]}
    assert variants < rows
    assert {source for source, _ in rows - variants} >= {"plan._place_entries", "plan._count_mask_words"}
    assert all(row["architecture"] == "sm_90a" and row["seconds"] >= 0 for row in told["rows"])

    compiled = first()  # another process
    activations = [SWIGLU, *(fp8moe.Activation(kind) for kind in ("gelu_tanh", "relu2"))]
    for recipe in ("bf16", "fp8_blockwise", "fp8_flow"):
        for ids in ("int32", "int64"):
            layer(recipe, ids)[1]._record(0)
        for activation in activations:
            layer(recipe, activation=activation, bias=True)[1]._record(0)
    for experts, topk in ((8, 2), (64, 4), (256, 8)):
        config = fp8moe.RouterConfig(topk)
        GivenMemory(
            lambda a, config=config: fp8moe.route(*a, config), specs(((TOKENS, experts), "float32"))
        )._record(0)
    settle()
    assert compiled.calls == []


def fp8moe_main(*arguments):
    from fp8moe.__main__ import main

    return main([*arguments])


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"FP8MOE_CACHE_DIR": "/a/b", "XDG_CACHE_HOME": "/c"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/fp8moe"),
        ({"FP8MOE_CACHE_DIR": "", "XDG_CACHE_HOME": "/c"}, "/c/fp8moe"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/fp8moe"),  # which XDG's specification ignores
        ({"XDG_CACHE_HOME": ""}, "/home/me/.cache/fp8moe"),
        ({}, "/home/me/.cache/fp8moe"),
    ],
)
def test_where_the_cache_is(monkeypatch, variables, folder):
    for name in ("FP8MOE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**variables, "HOME": "/home/me"}.items():
        monkeypatch.setenv(name, value)
    assert compiler._cache_folder() == Path(folder)


# ---------------------------------------------------------------- threads and processes


def test_what_is_needed_now_comes_before_what_may_be_needed_later():
    threads, order, begun, go = compiler.Threads(1), [], threading.Event(), threading.Event()
    threads.start(compiler.NEEDED, "first", lambda: (begun.set(), go.wait(30)))
    assert begun.wait(30)
    tasks = {
        name: threads.start(urgency, name, order.append, name)
        for name, urgency in (("a", compiler.LATER), ("b", compiler.LATER + 1), ("c", compiler.LATER))
    }
    assert threads.start(compiler.NEEDED, "b", order.append, "never") is tasks["b"]  # more urgent now
    assert threads.start(compiler.LATER, "a", order.append, "never") is tasks["a"]
    go.set()
    for task in tasks.values():
        task.wait()
    assert order == ["b", "a", "c"]


def test_what_waits_can_be_dropped_and_started_again():
    threads, done, begun, go = compiler.Threads(1), [], threading.Event(), threading.Event()
    running = threads.start(compiler.NEEDED, "first", lambda: (begun.set(), go.wait(30)))
    assert begun.wait(30)
    threads.start(compiler.LATER, "second", done.append, 1)
    threads.drop()
    go.set()
    threads.wait()
    assert running.has_ended()
    assert done == []
    threads.start(compiler.NEEDED, "second", done.append, 2).wait()
    assert done == [2]


def test_what_failed_is_compiled_again_by_the_next_call(first):
    """Such as a prefetch that found no memory. The call that waits for it still gets the error."""
    compiled = first()
    path = compiler.files()["permute.cu"]
    compiled.failing = ("permute",)
    code = compiler.requested(path, "sm_90a")
    other = compiler.requested(path, "sm_90a")  # of another kernel of this source
    with pytest.raises(compiler.CompileError):
        code.result()
    settle()
    compiled.failing = ()
    assert compiler.requested(path, "sm_90a").result() == b"code of permute"
    assert code.result() == b"code of permute"
    with contextlib.suppress(compiler.CompileError):  # it may have failed with the first
        other.result()
    assert other.result() == b"code of permute"
    assert compiled.calls.count(("permute", compiler.variants(path)[0])) <= 3

    threads, tries = compiler.Threads(1), []
    threads.start(compiler.LATER, "k", lambda: 1 / 0).wait()
    assert threads.start(compiler.LATER, "k", tries.append, 1).has_failed()  # each prefetch would try again
    assert threads.start(compiler.NEEDED, "k", lambda: tries.append(1) or 5).result() == 5
    assert threads.start(compiler.NEEDED, "k", lambda: tries.append(1) or 6).result() == 5
    assert tries == [1]


@pytest.mark.parametrize("limit", [0, 2])
def test_a_limit_on_threads_is_no_error(monkeypatch, limit):
    started, start = [], workers._thread.start_new_thread

    def limited(*arguments):
        if len(started) == limit:
            raise RuntimeError("can't start new thread")
        started.append(1)
        return start(*arguments)

    instead = SimpleNamespace(start_new_thread=limited, allocate_lock=workers._thread.allocate_lock)
    monkeypatch.setattr(workers, "_thread", instead)
    threads = compiler.Threads(128)
    assert threads.start(compiler.NEEDED, "a", lambda: 1).result() == 1
    assert len(started) == min(limit, 1)  # and not 128
    later = threads.start(compiler.LATER, "b", lambda: 2)
    assert later.given <= (limit > 0)  # the caller makes nothing that it does not need
    needed = [threads.start(compiler.NEEDED, str(n), lambda n=n: n) for n in range(4)]
    assert [task.result() for task in needed] == [0, 1, 2, 3]
    assert threads.start(compiler.NEEDED, "b", lambda: 3).result() == 2
    assert len(started) == limit
    numbers = []
    workers.Workers().run(numbers.append, [(n,) for n in range(3)])  # which can start none any more
    assert sorted(numbers) == [0, 1, 2]


def test_what_is_needed_after_the_process_began_to_end_is_compiled_by_the_caller():
    """By a handler that was registered with atexit before; the kernels it needs may have waited."""
    threads, begun, dropped, ran = compiler.Threads(1), threading.Event(), threading.Event(), []
    wait, threads.wait = threads.wait, lambda: (dropped.set(), wait())
    threads.start(compiler.NEEDED, "first", lambda: (begun.set(), dropped.wait(30)))
    assert begun.wait(30)
    code = compiler.Code(
        "k", "sm_90a", functools.partial(threads.start, compiler.NEEDED, "k", threading.get_ident)
    )
    threads.end()
    threads.start(compiler.LATER, "later", ran.append, 1)
    result = []
    caller = threading.Thread(target=lambda: result.append((code.result(), threading.get_ident())))
    caller.daemon = True
    caller.start()
    caller.join(10)
    assert len(result) == 1, "it waits for ever"
    assert result[0][0] == result[0][1]
    assert ran == []


def test_an_unlock_that_fails_leaves_the_kernel(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setenv("FP8MOE_CACHE_DIR", str(tmp_path / "cache"))
    flock, close, failed = fcntl.flock, os.close, []

    def failing_flock(descriptor, how):
        if how == fcntl.LOCK_UN:
            failed.append("flock")
            raise OSError(errno.ESTALE, "Stale file handle")
        return flock(descriptor, how)

    def failing_close(descriptor):
        close(descriptor)
        failed.append("close")
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", failing_flock)
    monkeypatch.setattr(disk_cache.os, "close", failing_close)
    try:
        with disk_cache.locked_entry(tmp_path / "cache", "kernel"):
            pass
    finally:
        monkeypatch.undo()
    assert failed == ["flock", "close"]


def test_a_kernel_that_another_thread_loads_meanwhile_is_left(first, monkeypatch):
    """Its code becomes None between two reads."""
    first()
    from fp8moe.kernels_cuda.runtime import launch

    class Loaded(launch.Kernel):
        reads = 0

        @property
        def code(self):
            self.reads += 1
            return compiler.Code("k", "sm_90a", b"code of k") if self.reads == self.last else None

        code = code.setter(lambda self, code: None)

        def load(self):
            pass

    kernel = Loaded(compiler.Code("k", "sm_90a", b"code of k"), "k", 0)
    kernel.last = 1  # the first of `_load_compiled`
    launch._load_compiled([kernel])
    kernel.reads = 0  # and of `unloaded`
    monkeypatch.setattr(launch, "Kernel", Loaded)
    step = launch.Step(kernel, (1, 1), 1, 0, b"")
    run = recording.DryRun([], 0, recording.NUMPY)
    run.steps.append(step)
    run.load_kernels()
    assert kernel.reads > 1


def test_of_two_processes_one_compiles(tmp_path, monkeypatch):
    """Two threads stand for them: of a lock's two files each has its own."""
    monkeypatch.setenv("FP8MOE_CACHE_DIR", str(tmp_path / "cache"))
    begun, go, results, calls = threading.Event(), threading.Event(), [], []

    def compile():
        calls.append(1)
        begun.set()
        assert go.wait(30)
        return b"code"

    def process():
        results.append(compiler.cached("kernel", "sm_90a", "key", compile))

    threads = [threading.Thread(target=process) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert begun.wait(30)
    time.sleep(0.05)  # the others come to the lock
    go.set()
    for thread in threads:
        thread.join(30)
    assert (results, len(calls)) == ([b"code"] * 3, 1)
    assert len([*(tmp_path / "cache").iterdir()]) == 1  # and no lock


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_that_is_forked_while_threads_compile_can_compile(monkeypatch):
    threads, begun, ended = compiler.Threads(1), threading.Event(), []
    monkeypatch.setattr(compiler, "nvrtc_threads", threads)
    threads.start(compiler.NEEDED, "running", lambda: (begun.set(), time.sleep(0.3), ended.append(1)))
    threads.start(compiler.LATER, "waiting", time.sleep, 0.01)
    # of a kernel that the parent has requested and not yet loaded
    code = compiler.Code(
        "k", "sm_90a", functools.partial(threads.start, compiler.NEEDED, "k", operator.index, 7)
    )
    assert begun.wait(30)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are threads
        child = os.fork()
    if not child:
        signal.alarm(20)  # ends a child that waits for ever
        result = threads.start(compiler.NEEDED, "waiting", lambda: 5).result() if ended == [1] else 0
        os._exit(result if code.result() == 7 else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    assert threads.start(compiler.NEEDED, "waiting", int).result() is None  # the parent goes on


PROGRAM = """
import os, signal, threading, time
from pathlib import Path
from fp8moe.kernels_cuda.runtime import compiler
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
compiler.nvrtc_threads = compiler.Threads(2)
codes = [compiler.requested(compiler.files()[name], "sm_90a") for name in ("quantize.cu", "swiglu.cu")]
folder = Path(os.environ["FP8MOE_CACHE_DIR"])
while not (folder.exists() and [*folder.iterdir()]):  # until a thread has begun, and holds an entry's lock
    time.sleep(0.01)
try:
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    compiler.finish(codes)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_a_process_that_is_interrupted_ends_while_threads_compile(tmp_path):
    pytest.importorskip("cupy")
    folder = tmp_path / "cache"
    given = {"env": {**os.environ, "FP8MOE_CACHE_DIR": str(folder)}, "capture_output": True, "text": True}
    ran = subprocess.run([sys.executable, "-c", PROGRAM], timeout=120, **given)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "interrupted\n", "")
    entries = [*folder.iterdir()]
    # what had begun is complete, and what waited was not begun
    assert 0 < len(entries) < len(compiler.sources("sm_90a"))
    assert all(compiler.read_entry(folder, entry.name) is not None for entry in entries)


FIRST_STEP = """
import time, torch
from fp8moe.torch import FP8FlowMoE
torch.manual_seed(0)
layer = FP8FlowMoE(512, 256, 8, 2, recipe="fp8_flow", device="cuda", dtype=torch.bfloat16)
x, dy = (torch.randn(64, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
leaves = [x.requires_grad_(), *layer.parameters()]
results = []
for step in ("first step, nothing compiled", "second step"):
    torch.cuda.synchronize()
    start = time.perf_counter()
    y = layer(x)
    results.append([y.detach(), *torch.autograd.grad(y, leaves, dy)])
    torch.cuda.synchronize()
    print(f"{step}: {time.perf_counter() - start:.2f} s")
assert all(map(torch.equal, *results))
"""


@pytest.mark.gpu
def test_a_first_step_on_a_gpu(tmp_path):
    """Prints how long it takes; wanted are 5 s at most on 16 cores. A second process finds everything in the
    cache."""
    pytest.importorskip("torch")
    given = {"env": {**os.environ, "FP8MOE_CACHE_DIR": str(tmp_path / "cache")}}
    for _ in range(2):
        command = [sys.executable, "-c", FIRST_STEP]
        ran = subprocess.run(command, timeout=120, capture_output=True, text=True, **given)
        assert ran.returncode == 0, ran.stderr
        assert "Traceback" not in ran.stderr  # of a thread, or at the end
        print(ran.stdout)
