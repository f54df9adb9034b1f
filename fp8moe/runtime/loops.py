"""Loops that Numba compiles, with a cache on disk that nobody but this user can have written."""

from __future__ import annotations

import atexit
import hashlib
import os
import pickle
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numba
from numba.core.caching import FunctionCache
from numba.core.serialize import dumps

from fp8moe.runtime.disk_cache import make_folder, read_entry, write_entry
from fp8moe.runtime.workers import Task, Workers


class _PrivateFolder:
    """Added to one of Numba's locators: it is passed over where others could write to its folder."""

    def ensure_cache_path(self) -> None:
        folder = self.get_cache_path()  # type: ignore[attr-defined]
        try:
            make_folder(Path(folder))
            super().ensure_cache_path()  # type: ignore[misc]
        except OSError as error:
            _passed_over[folder] = str(error)
            given = numba.config.CACHE_DIR  # type: ignore[attr-defined]
            if given and Path(folder).is_relative_to(given):  # the others do without a word, as in Numba
                _warn_of_cache(error)
            raise


_passed_over: dict[str, str] = {}  # why, by folder


class _Implementation(FunctionCache._impl_class):  # type: ignore[misc, valid-type]
    _locator_classes: ClassVar[list[Any]] = [
        type(locator.__name__, (_PrivateFolder, locator), {})
        for locator in FunctionCache._impl_class._locator_classes
    ]


class _Entries:
    """What Numba stores in an index and files without checksums, and would unpickle whoever wrote it."""

    def __init__(self, folder: str, name: str, stamp: Any):
        self._folder, self._name = Path(folder), name
        self._made_from = numba.__version__, stamp  # as Numba's index

    def _entry(self, key: Any) -> str:
        digest = hashlib.sha256(repr((self._made_from, key)).encode()).hexdigest()
        return f"{self._name}-{digest[:24]}.nbc"

    def load(self, key: Any) -> Any:
        data = read_entry(self._folder, self._entry(key))
        return None if data is None else pickle.loads(data)

    def save(self, key: Any, data: Any) -> None:
        write_entry(self._folder, self._entry(key), dumps(data))


class _Cache(FunctionCache):
    """Numba's cache in a folder of this user alone (`fp8moe.runtime.disk_cache`), with a checksum for each
    entry. A missing folder, full disk or damaged file only costs a compilation."""

    _impl_class = _Implementation

    def __init__(self, function: Callable[..., Any]):
        super().__init__(function)
        stamp, name = self._impl.locator.get_source_stamp(), self._impl.filename_base
        self._cache_file = _Entries(self._cache_path, name, stamp)  # type: ignore[assignment]

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:
            _warn_of_cache(error)
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except Exception as error:
            _warn_of_cache(error)
            self.disable()


_warned_of_cache = False


def _warn_of_cache(error: Exception) -> None:
    """Warns once per process: all loops fail for the same reason."""
    global _warned_of_cache
    if not _warned_of_cache:
        _warned_of_cache = True
        why = str(error) if isinstance(error, OSError) else "; ".join(_passed_over.values())
        warnings.warn(
            f"NUMBA_CACHE_DIR: a cache of compiled loops is not used ({why or repr(error)}); where there is "
            "no other, every process compiles them again; set NUMBA_CACHE_DIR to a folder that belongs to "
            "this user and that nobody else may write to",
            RuntimeWarning,
            stacklevel=3,
        )


def compiled(function: Callable[..., Any]) -> Any:
    """Compiles a loop that releases the GIL; uses Numba's cache where possible."""
    dispatcher: Any = numba.njit(nogil=True, error_model="numpy")(function)
    try:
        dispatcher._cache = _Cache(function)  # as cache=True does with Numba's own cache
    except Exception as error:
        _warn_of_cache(error)
    return dispatcher


RUNS = 32  # of a loop until a thread begins to compile it


class Loop:
    """A loop that Python runs until a thread has compiled it, or has loaded it from the cache.

    The thread begins at the loop's run number `RUNS`: in a process's first step it would hold Numba's lock
    for 3 s, which the kernels that this step needs have to wait for.

    run: the loop as it can be called now.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any):
        """arguments: such as the compiled loop takes; a call with them must do nothing."""
        self.compiled = compiled(function)
        self.run: Callable[..., Any] = self._interpret
        self.task: Task | None = None
        self._function, self._arguments, self._runs = function, arguments, 0
        self._starting = threading.Lock()

    def _interpret(self, *arguments: Any) -> Any:
        self._runs += 1
        if self._runs >= RUNS and self.task is None:
            self.compile()
        return self._function(*arguments)

    def compile(self) -> Task:
        """Have a thread compile the loop, once."""
        with self._starting:
            if self.task is None:
                self.task = Workers().submit(1, self._compile)
                # a process that ends, or is copied, must not leave Numba's lock held by a thread that is gone
                atexit.register(self.task.wait)
                if hasattr(os, "register_at_fork"):
                    os.register_at_fork(before=self.task.wait)
            return self.task

    def _compile(self) -> None:
        try:
            self.compiled(*self._arguments)
            self.run = self.compiled
        except Exception as error:
            self.run = self._function
            warnings.warn(
                f"fp8moe: Numba does not compile {self._function.__name__} ({error}); Python runs it, which "
                "takes more of the host's time",
                RuntimeWarning,
                stacklevel=1,
            )
