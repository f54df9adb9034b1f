"""Blocks of static size in which tokens travel between devices, where a compiler must know every shape.

Every device sends every other a block of ``capacity`` rows. Three tokens, two devices of two experts each,
ids [[0, 3], [1, 0], [2, -1]], capacity 2:

    device 0 has the experts 0 and 1, and gets tokens 0 and 1      block 0: 0 1
    device 1 has the experts 2 and 3, and gets tokens 0 and 2      block 1: 0 2
    rows of each token in the blocks, 2 where it does not go: [0, 0] [1, 2] [2, 1]
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

from fp8moe.records import Array
from fp8moe.row_maps import place


class Blocks(NamedTuple):
    """Which tokens go where.

    tokens: int32 [W, C], the token of each row of the blocks to the devices, T where there is none. places:
    int32 [T, W], the row of the block of each device that a token goes to; else C.
    """

    tokens: Array
    places: Array


def device_blocks(xp: ModuleType, topk_ids: Array, experts: int, devices: int, capacity: int) -> Blocks:
    """Blocks in the order of the tokens, each of which goes once to every device that has one of its experts.

    xp: the module of the arrays, ``numpy`` or ``jax.numpy``. topk_ids: [T, k], below 0, or of an expert that
    no device has, for none. experts: of each device. capacity: C; what would come after is left out.
    """
    device = xp.where(topk_ids >= 0, topk_ids // experts, -1)
    goes = (device[:, :, None] == xp.arange(devices)).any(axis=1)  # [T, W]
    row = xp.cumsum(goes, axis=0, dtype=xp.int32) - 1
    places = xp.where(goes & (row < capacity), row, capacity)
    tokens, to = xp.indices(places.shape, dtype=xp.int32)
    blank = xp.full((devices, capacity), len(topk_ids), xp.int32)
    return Blocks(place(blank, (to, places), tokens), places)


def local_ids(xp: ModuleType, topk_ids: Array, experts: int, device: Array | int) -> Array:
    """Ids of all devices' experts as those of one device's own, -1 for the others'."""
    ids = topk_ids - device * experts
    return xp.where((ids >= 0) & (ids < experts), ids, -1)
