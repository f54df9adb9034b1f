"""The caches on disk: what one gives becomes code, so it must be this user's own and undamaged, and a folder
that cannot be used costs a compilation and one warning."""

import contextlib
import hashlib
import importlib.util
import os
import pickle
import resource
import stat
import sys

import numba
import pytest
from cases import generator

from fp8moe.kernels_cuda.runtime import compiler
from fp8moe.runtime import loops
from fp8moe.runtime.disk_cache import make_folder, read_entry

RNG = generator()
OTHER_USER = 54321

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="this system has no owners of files")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The cache folder of both caches, not made yet."""
    folder = tmp_path / "above" / "cache"
    monkeypatch.setenv("FP8MOE_CACHE_DIR", str(folder))
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(folder))
    monkeypatch.setattr(compiler, "_warned", False)
    monkeypatch.setattr(loops, "_warned_of_cache", False)
    monkeypatch.setattr(loops, "_passed_over", {})
    return folder


@contextlib.contextmanager
def full_disk():
    """No file may become longer than 100 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def kernel(code=b"compiled here" * 20):
    """What the cache of kernels gives for one that compiles to ``code``."""
    return compiler.cached("kernel", "sm_90a", "key", lambda: code)


def one_entry(folder):
    (entry,) = folder.rglob("*-*")
    return entry


def planted(folder):
    """The entry, with somebody else's code in it and a right checksum."""
    kernel()
    entry = one_entry(folder)
    entry.write_bytes(hashlib.sha256(b"planted").digest() + b"planted")
    assert kernel() == b"planted"  # this test would notice it
    return entry


def test_folders_and_entries_are_made_for_this_user_alone(folder):
    kernel()
    modes = [stat.S_IMODE(p.stat().st_mode) for p in (folder.parent, folder, one_entry(folder))]
    assert modes == [0o700, 0o700, 0o600]


def of_another_user(place):
    if os.geteuid():
        pytest.skip("only root can give a file away")
    os.chown(place, OTHER_USER, OTHER_USER, follow_symlinks=False)


def by_a_link_of_another_user(place):
    """The folder is this user's, but somebody else decides which one it is."""
    place.rename(place.with_name("elsewhere"))
    place.symlink_to("elsewhere")
    of_another_user(place)


CHANGES = {
    "its group may write to it": lambda folder, entry: folder.chmod(0o770),
    "everybody may, with a sticky bit": lambda folder, entry: folder.chmod(0o1777),
    "it is another user's": lambda folder, entry: of_another_user(folder),
    "it is reached by another user's link": lambda folder, entry: by_a_link_of_another_user(folder),
    "everybody may rename it": lambda folder, entry: folder.parent.chmod(0o777),
    "what it lies in is another user's": lambda folder, entry: of_another_user(folder.parent),
    "everybody may write to the entry": lambda folder, entry: entry.chmod(0o666),
    "the entry is another user's": lambda folder, entry: of_another_user(entry),
}


@pytest.mark.parametrize("variable", ["FP8MOE_CACHE_DIR", "HOME"])
@pytest.mark.parametrize("change", CHANGES)
def test_no_kernel_is_loaded_that_another_user_can_have_written(folder, monkeypatch, change, variable):
    if variable == "HOME":
        monkeypatch.delenv("FP8MOE_CACHE_DIR")
        monkeypatch.setenv("HOME", str(folder.parent))
        folder = folder.parent / ".cache" / "fp8moe"
    entry = planted(folder)
    CHANGES[change](folder, entry)
    with pytest.warns(RuntimeWarning, match="FP8MOE_CACHE_DIR: .*above") as caught:
        assert kernel() == kernel(b"compiled here" * 20) == b"compiled here" * 20
    assert len(caught) == 1


def test_a_folder_below_a_sticky_one_is_private(folder):
    folder.parent.mkdir()
    folder.parent.chmod(0o1777)  # as /tmp
    kernel()
    assert kernel(b"another") == b"compiled here" * 20


def as_a_link(entry):
    entry.rename(entry.with_name("elsewhere"))
    entry.symlink_to("elsewhere")


def as_a_fifo(entry):
    entry.unlink()
    os.mkfifo(entry)


def as_a_folder(entry):
    entry.unlink()
    entry.mkdir()


@pytest.mark.parametrize("change", [as_a_link, as_a_fifo, as_a_folder])
def test_an_entry_is_a_regular_file(folder, change):
    change(planted(folder))
    with pytest.warns(RuntimeWarning, match="FP8MOE_CACHE_DIR: .*kernel-sm_90a"):
        assert kernel() == b"compiled here" * 20
    kept = change is not as_a_folder  # the others are replaced
    assert kernel(b"another") == (b"compiled here" * 20 if kept else b"another")
    assert {p.name for p in folder.iterdir()} <= {one.name for one in folder.glob("*-*")} | {"elsewhere"}


def test_a_full_disk_leaves_no_file(folder):
    kernel()
    one_entry(folder).unlink()
    with full_disk(), pytest.warns(RuntimeWarning, match="FP8MOE_CACHE_DIR"):
        kernel()
    assert [*folder.iterdir()] == []


def test_an_interrupted_write_leaves_no_file(folder, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kernel()
    assert [*folder.iterdir()] == []


# ---------------------------------------------------------------- Numba's


@pytest.fixture
def twice(tmp_path, monkeypatch):
    """Compiles a loop of a module that lies in a folder of its own, and calls it with two types."""
    path = tmp_path / "module" / "twice.py"
    path.parent.mkdir()
    path.write_text("def twice(x):\n    return 2 * x\n")
    spec = importlib.util.spec_from_file_location("twice", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "twice", module)  # Numba looks it up where it loads a loop
    spec.loader.exec_module(module)

    def compile():
        loop = loops.compiled(module.twice)
        assert (loop(3), loop(1.5)) == (6, 3.0)
        return sum(loop.stats.cache_hits.values())

    return compile


def test_loops_are_loaded_from_their_cache(folder, twice):
    assert [twice(), twice()] == [0, 2]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_no_bit_of_a_stored_loop_can_be_wrong(folder, twice):
    twice()
    entries = [*folder.rglob("*.nbc")]
    assert len(entries) == 2
    whole = [entry.read_bytes() for entry in entries]
    for _ in range(200):
        for entry, content in zip(entries, whole, strict=True):
            at, bit = int(RNG.integers(len(content))), 1 << int(RNG.integers(8))
            entry.write_bytes(content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :])
            assert read_entry(entry.parent, entry.name) is None
    assert [twice(), twice()] == [0, 2]  # compiled and stored again
    for entry, content in zip(entries, whole, strict=True):
        entry.write_bytes(content[: int(RNG.integers(len(content)))])
    assert [twice(), twice()] == [0, 2]


def test_loops_run_without_a_cache(folder, twice, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    beside = tmp_path / "module" / "__pycache__"
    if beside.exists():
        beside.rename(tmp_path / "old")
    beside.touch()  # neither there
    with pytest.warns(RuntimeWarning, match=r"NUMBA_CACHE_DIR: .*__pycache__.*file") as caught:
        assert [twice(), twice()] == [0, 0]
    assert len(caught) == 1


def test_a_full_disk_costs_compilations(folder, twice):
    make_folder(folder)
    with full_disk(), pytest.warns(RuntimeWarning, match="NUMBA_CACHE_DIR") as caught:
        assert [twice(), twice()] == [0, 0]
    assert len(caught) == 1
    assert not [p for p in folder.rglob("*") if p.is_file()]


class Code:
    """Runs where it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (self.marker,)


@pytest.mark.parametrize("where", ["NUMBA_CACHE_DIR", "__pycache__", "user-wide"])
@pytest.mark.parametrize("change", ["the folder", "above it", "the entry"])
def test_no_loop_is_unpickled_that_another_user_can_have_written(
    folder, twice, tmp_path, monkeypatch, where, change
):
    marker = tmp_path / "ran"
    if where != "NUMBA_CACHE_DIR":
        monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder if where == "user-wide" else tmp_path / "nowhere"))
    if where == "user-wide":
        only = [c for c in loops._Implementation._locator_classes if "UserWide" in c.__name__]
        monkeypatch.setattr(loops._Implementation, "_locator_classes", only)
    assert twice() == 0
    entries = [*tmp_path.rglob("*.nbc")]
    for entry in entries:
        content = pickle.dumps(Code(str(marker)))
        entry.write_bytes(hashlib.sha256(content).digest() + content)
    with pytest.warns(RuntimeWarning, match="NUMBA_CACHE_DIR"):  # the result is no compiled loop
        twice()
    assert marker.exists()  # this test would notice it
    marker.rmdir()
    for entry in entries:
        content = pickle.dumps(Code(str(marker)))
        entry.write_bytes(hashlib.sha256(content).digest() + content)
    monkeypatch.setattr(loops, "_warned_of_cache", False)
    place = {"the folder": entries[0].parent, "above it": entries[0].parent.parent}.get(change)
    for changed in [place] if place else entries:
        changed.chmod(0o777)
    # beside the source it is passed over, where another one can be used
    silent = where == "__pycache__" and place is not None
    with contextlib.nullcontext() if silent else pytest.warns(RuntimeWarning, match="NUMBA_CACHE_DIR"):
        assert twice() == 0
    assert not marker.exists()
