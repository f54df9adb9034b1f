"""Threads for calls that release the GIL, which an interrupt (Ctrl-C) of the main thread leaves usable.

The locks inside `concurrent.futures` are used by functions of Python, which the KeyboardInterrupt of a signal
can end anywhere: one that is held then stays held, and every later call hangs. Here the main thread calls a
queue and locks of C only, between which nothing has to be undone.
"""

from __future__ import annotations

import _thread
import os
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Any


class Task:
    """A call in another thread."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]):
        self._call: Any = function, arguments
        self._result: Any = None
        self._error: BaseException | None = None
        self._unfinished = _thread.allocate_lock()  # held until the call has ended
        self._unfinished.acquire()
        self.given = False  # to a thread

    def run(self) -> None:
        function, arguments = self._call
        self._call = None  # the arguments' memory is released with the task's caller
        try:
            self._result = function(*arguments)
        except BaseException as error:
            self._error = error
        finally:
            self._unfinished.release()

    def wait(self) -> None:
        """Return when the call has ended."""
        with self._unfinished:
            pass

    def has_ended(self) -> bool:
        return not self._unfinished.locked()

    def has_failed(self) -> bool:
        return self._error is not None

    def result(self) -> Any:
        """What the call returns, or raises, when it has ended."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._result


class Workers:
    """Threads that are started when first needed; the interpreter does not wait for them at its end. Where
    the system allows fewer, those that there are do all calls, and the caller does them where it allows none.
    """

    def __init__(self, prepare: Callable[[], Any] = lambda: None):
        """prepare: called by each thread first."""
        self._prepare = prepare
        self.restart()
        if hasattr(os, "register_at_fork"):  # a forked child has none of its parent's threads
            os.register_at_fork(after_in_child=self.restart)

    def restart(self) -> None:
        """Use new threads from now on."""
        self._tasks, self._started = SimpleQueue[Task](), 0

    def submit(self, threads: int, function: Callable[..., Any], *arguments: Any) -> Task:
        """Have one of at most ``threads`` threads make a call."""
        task = Task(function, arguments)
        if not self.give(task, threads):
            task.run()
        return task

    def give(self, task: Task, threads: int) -> bool:
        """Give a task to one of at most ``threads`` threads; False where there can be none."""
        # one more: a process that needs one kernel must not start a thread for each of 128 cores
        if can := self._start(min(threads, self._started + 1)):
            self._tasks.put(task)
        return can

    def run(self, function: Callable[..., Any], calls: Iterable[tuple[Any, ...]]) -> None:
        """Call a function with each of these arguments, each in a thread, and return when all have ended. An
        interrupt waits for them, too: they may write to the caller's arrays."""
        tasks = [Task(function, arguments) for arguments in calls]
        put = self._tasks.put if self._start(len(tasks)) else Task.run
        try:
            for task in tasks:
                task.given = True  # no signal is handled between an assignment and a call of C
                put(task)
            for task in tasks:
                task.result()
        except BaseException:
            for task in tasks:
                if task.given:
                    task.wait()
            raise

    def _start(self, threads: int) -> bool:
        """Have so many threads, or as many as the system allows; whether there is one."""
        try:
            while self._started < threads:
                _thread.start_new_thread(_work, (self._tasks, self._prepare))
                self._started += 1
        except RuntimeError:  # a limit on threads; from Python 3.12 on, a process that ends
            pass
        return self._started > 0


def _work(tasks: SimpleQueue[Task], prepare: Callable[[], Any]) -> None:
    prepare()
    while True:
        tasks.get().run()
