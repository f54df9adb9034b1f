"""Contexts whose end an interrupt (Ctrl-C) cannot prevent.

Python may raise the KeyboardInterrupt of a signal before the first instruction of any function of its own, so
an ``__exit__`` in Python, and every generator of `contextlib`, may end before it has undone anything. Here
the ``with`` statement leaves by a function of C, the release of a lock, which also drops the last reference
to what the context holds. Whatever depends on a context asks its `Opening`; nothing is counted or restored.
"""

from __future__ import annotations

import copy
import threading
import weakref
from contextlib import ContextDecorator
from functools import partial
from typing import Any


class Opening:
    """One execution of a ``with`` statement. Only the statement holds it: others hold weak references."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # held while the context is open


def is_open(opening: weakref.ref[Opening]) -> bool:
    """Whether the ``with`` statement is being executed."""
    there = opening()
    return there is not None and there.lock.locked()


class _Exit:
    """``__exit__``: Python looks it up before it calls ``__enter__``."""

    def __get__(self, scope: Scope | None, owner: Any) -> Any:
        if scope is None:  # `contextlib.ExitStack` looks it up in the class
            return Scope.close
        opening = Opening()
        scope.made = weakref.ref(opening)
        # the opening is an argument that the function ignores, and keeps alive
        return partial(opening.lock.__exit__, opening)  # type: ignore[arg-type]


class Scope(ContextDecorator):
    """A context manager. A subclass defines `enter`, which prepares what the context means as long as the
    opening is open. Its end is known from `is_open`, or from a weak reference's callback that is a function
    of C too."""

    made: weakref.ref[Opening] | None = None  # by the ``with`` statement that enters next
    held: tuple[Opening, ...] = ()  # of `ExitStack`, which calls `close`

    def enter(self, opening: weakref.ref[Opening]) -> Any:
        """What the context gives. The opening is a weak reference, as tracebacks keep a frame's variables."""
        raise NotImplementedError

    def __enter__(self) -> Any:
        made, self.made = self.made, None
        opening = None if made is None else made()
        if opening is None:
            opening = Opening()
            self.held += (opening,)
        lock = opening.lock
        try:
            result = self.enter(weakref.ref(opening))
            lock.acquire()  # last
        except BaseException:
            self.held = self.held[: self.held.index(opening)] if opening in self.held else self.held
            opening = None  # ends what it means
            if lock.locked():  # an interrupt after acquire()
                lock.release()
            raise
        return result

    def close(self, *_: object) -> None:
        *held, opening = self.held
        self.held = tuple(held)
        opening.lock.release()

    __exit__ = _Exit()

    def _recreate_cm(self) -> Any:  # of `ContextDecorator`: each call of the decorated function enters anew
        return copy.copy(self)
