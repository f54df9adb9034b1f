"""Waiting for the other ranks of a process group, and telling which of them are gone."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")

GRACE = 5.0  # seconds that the other ranks are given to report that they are alive
# Fractions of the group's timeout, at whose end NCCL's watchdog aborts the process: from the first on a
# waiting rank reports that it is alive, and the time until the second is for the others to report, too.
REPORT_AT, GIVE_UP_AT = 0.5, 0.9
# Lets threads run that want Python's lock, or this processor; time.sleep(0) took 55 us on the H200's host.
_let_others_run: Any = getattr(os, "sched_yield", None) or partial(time.sleep, 0)


class RankLost(RuntimeError):
    """A rank left while the others waited for it.

    Attributes
    ----------
    ranks : list of int
        Ranks of the group that left, as far as they could be told.
    """

    def __init__(self, ranks: list[int], message: str):
        super().__init__(message)
        self.ranks = ranks


class LostRankWatch:
    """Runs a group's collectives; where one fails or never ends, raises a `RankLost` with the missing ranks.

    Every rank counts its collectives. A rank in trouble writes to the default store that it is alive at its
    current one; a rank that does not write the same is missing.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
    """

    def __init__(self, group: Any):
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._collectives = 0
        self._reported = ""  # the collective at which this rank last reported that it is alive

    def start(self, collective: Callable[[], Result]) -> Result:
        """Count a collective and start it.

        Raises
        ------
        RankLost
            Where it fails as it does when a rank is gone.
        """
        self._collectives += 1
        return self.guard(collective)

    def guard(self, action: Callable[[], Result]) -> Result:
        """A part of the collective that was started last, as `start` runs it."""
        try:
            return action()
        except RuntimeError as error:
            if dist.get_backend(self.group) != "gloo" and not isinstance(error, dist.DistError):
                raise
            raise self._lost(str(error), GRACE) from error

    def wait_for(self, device: torch.device) -> None:
        """Wait until the device has done all work of its current stream, which it never does where a rank is
        gone.

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
        """Write to the default store that this rank is alive; returns under which name all ranks do."""
        name = f"fp8moe/{dist.get_process_group_ranks(self.group)}/{self._collectives}"
        if name != self._reported:
            dist.distributed_c10d._get_default_store().set(f"{name}/{self.rank}", "alive")
            self._reported = name
        return name

    def _lost(self, reason: str, grace: float) -> RankLost:
        """The error that names who does not report to be alive within ``grace`` seconds."""
        missing = [r for r in range(self.world_size) if r != self.rank]
        try:
            name, end = self._report(), time.monotonic() + grace
            store = dist.distributed_c10d._get_default_store()
            while True:
                missing = [r for r in missing if not store.check([f"{name}/{r}"])]
                if not missing or time.monotonic() >= end:
                    break
                time.sleep(0.05)
        except RuntimeError:
            missing = [0]  # whose process keeps the store, as torchrun's and init_method's do
        lost = ", ".join(map(str, missing)) or "none, but the exchange failed"
        return RankLost(missing, f"expert parallelism: lost rank {lost}, seen by rank {self.rank} ({reason})")


def _timeout(group: Any, device: torch.device) -> float:
    """Seconds; not every backend has one."""
    options = getattr(group._get_backend(device), "options", None)
    return math.inf if options is None else options._timeout.total_seconds()
