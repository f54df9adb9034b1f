"""A launch configuration: what a launcher decides before it launches, as a value that can be printed and
tested without a GPU. Each launcher's file has the pure functions that make its kernels' configurations, from
shapes and from the device's multiprocessors and shared memory."""

from __future__ import annotations

from typing import NamedTuple


class Configuration(NamedTuple):
    blocks: int | tuple[int, int]
    threads: int  # of a block
    shared: int = 0  # bytes of dynamic shared memory of a block

    @property
    def grid(self) -> tuple[int | tuple[int, int], int]:
        return self.blocks, self.threads
