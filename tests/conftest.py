"""Hypothesis settings, seeds, and markers of tests that need GPUs."""

import gc
import importlib.util
import os
import secrets
import shutil
import sys
import tempfile

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "fp8moe", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fp8moe")


# set before `cases` reads it, and inherited by pytest's worker processes
os.environ.setdefault("FP8MOE_TEST_SEED", str(secrets.randbits(32)))

# Compiled code that pytest's worker processes share. Inductor's is of this run only: it caches by operator
# name, and results of an earlier version could have other shapes.
CACHES = tempfile.mkdtemp(prefix="fp8moe-tests-")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(CACHES, "inductor"))
os.environ.setdefault("FP8MOE_TEST_CACHE_DIR", os.path.join(CACHES, "kernels"))


def pytest_unconfigure(config):
    shutil.rmtree(CACHES, ignore_errors=True)  # empty in a worker process


def pytest_report_header():
    return f"FP8MOE_TEST_SEED={os.environ['FP8MOE_TEST_SEED']}"


SCHEDULES = int(os.environ.get("FP8MOE_SCHEDULES", 1))


@pytest.fixture
def schedule(request):
    """For tests of kernels on the CPU: number of the repetition, of FP8MOE_SCHEDULES with other inputs and
    schedules."""
    return request.param


def pytest_generate_tests(metafunc):
    by_backend = "backend" in metafunc.fixturenames
    if SCHEDULES > 1 and (by_backend or "cuda_on_cpu" in vars(metafunc.module)):
        metafunc.fixturenames.append("schedule")
        metafunc.parametrize("schedule", range(SCHEDULES), indirect=True)
    marks = metafunc.definition.iter_markers("parametrize")
    if by_backend and not any("backend" in mark.args[0] for mark in marks):
        import backends

        metafunc.parametrize("backend", backends.EVERYWHERE)


@pytest.fixture(autouse=True)
def backend_started(request):
    callspec = getattr(request.node, "callspec", None)
    start = getattr(callspec and callspec.params.get("backend"), "start", None)
    if start:  # of another test it is the name of a GEMM
        start(request.getfixturevalue("monkeypatch"))


@pytest.fixture
def poisoned_outputs(monkeypatch):
    """For tests of GPUs without ``backend``, which `make sanitize` leaves out."""
    import backends

    backends.GPU.start(monkeypatch)


@pytest.fixture(autouse=True)
def seeded(request):
    """Every test starts with the run's seed, independent of the tests before it."""
    import cases

    callspec = getattr(request.node, "callspec", None)
    number = callspec.params.get("schedule", 0) if callspec else 0
    if "RNG" in vars(request.module):
        request.module.RNG.bit_generator.state = cases.generator(number).bit_generator.state
    if cuda_on_cpu := sys.modules.get("cuda_on_cpu"):
        cuda_on_cpu.seeds.seed(f"{cases.SEED} {number}")
    if torch := sys.modules.get("torch"):
        torch.manual_seed(cases.SEED)


def _devices() -> int:
    if importlib.util.find_spec("cupy") is None:
        return 0
    import cupy

    try:
        return cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


@pytest.fixture(autouse=True)
def no_garbage_collected_during_a_gpu_test(request):
    """Garbage collection of a JAX program or torch graph during stream capture makes that capture fail, and
    all later captures and random number generation of the process: 125 tests of one run failed after garbage
    of an earlier test was collected."""
    if not request.node.get_closest_marker("gpu"):
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.fixture
def frozen_objects():
    """Exempts the objects of earlier tests from the test's garbage collections, of which each took 0.5 s, and
    from `gc.get_objects`."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def pytest_collection_modifyitems(items):
    devices = _devices()
    for item in items:
        several = item.get_closest_marker("multigpu")
        needed = (*several.args, 2)[0] if several else 1 if item.get_closest_marker("gpu") else 0
        if devices < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s)"))


@pytest.fixture
def saved_apart(monkeypatch):
    """Every array that a recorded forward saves is a tensor, as where they are more than `TOGETHER`."""
    from fp8moe.runtime import dispatch, recording

    monkeypatch.setattr(recording, "TOGETHER", 0)
    dispatch.clear_recordings()
    yield
    dispatch.clear_recordings()
