"""Waiting for the other ranks of a process group with detection of lost ranks."""

from __future__ import annotations

import itertools
import math
import os
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")

GRACE = 5.0  # seconds in which the other ranks must report that they are alive
# Fractions of the group's timeout, after which NCCL's watchdog aborts the process. After the first a waiting
# rank reports that it is alive; the time until the second is for the other ranks to report.
REPORT_AT, GIVE_UP_AT = 0.5, 0.9
# Yields to threads that wait for the GIL or this processor; time.sleep(0) took 55 us on the H200's host.
_let_others_run: Any = getattr(os, "sched_yield", None) or partial(time.sleep, 0)
# the count of each group's collectives
_collectives: weakref.WeakKeyDictionary[Any, Iterator[int]] = weakref.WeakKeyDictionary()


class RankLost(RuntimeError):
    """A rank exited while other ranks waited for it.

    Attributes
    ----------
    ranks : list of int
        Ranks of the group, by their numbers in it, that exited, as far as they could be identified.
    """

    def __init__(self, ranks: list[int], message: str):
        super().__init__(message)
        self.ranks = ranks


class LostRankWatch:
    """Runs a group's collectives and raises `RankLost` with the missing ranks if one fails or does not
    finish.

    Every rank counts the group's collectives, of all its watches. A rank that detects a failure writes to the
    default store that it is alive at its current collective; ranks that do not write the same are missing.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
    """

    def __init__(self, group: Any):
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        # with one count per watch, a rank's report in another layer would pass for one in this layer
        self._collectives = _collectives.setdefault(group, itertools.count(1))
        self._current = 0
        self._reported = ""  # the last collective at which this rank reported that it is alive

    def start(self, collective: Callable[[], Result], device: torch.device) -> Result:
        """Count a collective of a device's tensors and start it.

        Raises
        ------
        RankLost
            If it fails in the way it does when a rank is gone.
        """
        self._current = next(self._collectives)
        return self.guard(collective, device)

    def guard(self, action: Callable[[], Result], device: torch.device) -> Result:
        """Runs a part of the most recent collective, with the errors of `start`."""
        try:
            return action()
        except RuntimeError as error:
            # a group may have one backend per device, such as "cpu:gloo,cuda:nccl"
            by_gloo = f"{device.type}:gloo" in dist.get_backend_config(self.group).split(",")
            if not by_gloo and not isinstance(error, dist.DistError):
                raise
            raise self._lost(str(error), GRACE) from error

    def wait_for(self, device: torch.device) -> None:
        """Wait until the device has finished the work of its current stream, which does not happen if a rank
        is gone.

        Raises
        ------
        RankLost
            After nine tenths of the group's timeout.
        """
        done = torch.cuda.current_stream(device).record_event()
        start, timeout = time.monotonic(), _timeout(self.group, device)
        while not done.query():
            waited = (time.monotonic() - start) / timeout
            if waited > GIVE_UP_AT:
                raise self._lost(f"{waited * timeout:.0f} s without it", 0.0)
            if waited > REPORT_AT:
                self._report()
            _let_others_run()

    def _report(self) -> str:
        """Writes to the default store that this rank is alive; returns the common prefix of all ranks'
        keys."""
        name = f"fp8moe/{dist.get_process_group_ranks(self.group)}/{self._current}"
        if name != self._reported:
            dist.distributed_c10d._get_default_store().set(f"{name}/{self.rank}", "alive")
            self._reported = name
        return name

    def _lost(self, reason: str, grace: float) -> RankLost:
        """The error that names the ranks that do not report within ``grace`` seconds."""
        missing = [r for r in range(self.world_size) if r != self.rank]
        members = dist.get_process_group_ranks(self.group)
        try:
            name, end = self._report(), time.monotonic() + grace
            store = dist.distributed_c10d._get_default_store()
            while True:
                missing = [r for r in missing if not store.check([f"{name}/{r}"])]
                if not missing or time.monotonic() >= end:
                    break
                time.sleep(0.05)
        except RuntimeError:
            # rank 0 of all ranks hosts the store, with torchrun and init_method. If it has reported, it left
            # after the loss of the others
            hosts = [r for r in missing if members[r] == 0]
            missing = hosts or (missing if 0 in members else [])
        lost = ", ".join(map(str, missing)) or "none, but the exchange failed"
        if members != list(range(self.world_size)):  # its ranks have other numbers than in the world
            lost = f"{lost}, of the group {members}"
        return RankLost(missing, f"expert parallelism: lost rank {lost}, seen by rank {self.rank} ({reason})")


def _timeout(group: Any, device: torch.device) -> float:
    """Timeout in seconds; infinite for backends without one."""
    options = getattr(group._get_backend(device), "options", None)
    return math.inf if options is None else options._timeout.total_seconds()
