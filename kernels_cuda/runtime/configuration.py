"""Launch configurations as values that can be printed and tested without a GPU. Each launcher's module
computes its kernels' configurations by pure functions of shapes and of the device's SMs and shared memory."""

from __future__ import annotations

from typing import NamedTuple


class Configuration(NamedTuple):
    blocks: int | tuple[int, int]
    threads: int  # per block
    shared: int = 0  # bytes of dynamic shared memory per block

    @property
    def grid(self) -> tuple[int | tuple[int, int], int]:
        return self.blocks, self.threads
