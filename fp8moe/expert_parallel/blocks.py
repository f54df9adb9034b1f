"""Fixed-size blocks of tokens exchanged between devices, for compilers that need static shapes.

Every device sends every other device a block of ``capacity`` rows. Three tokens, two devices of two experts
each, ids [[0, 3], [1, 0], [2, -1]], capacity 2:

    device 0 has the experts 0 and 1, and gets tokens 0 and 1      block 0: 0 1
    device 1 has the experts 2 and 3, and gets tokens 0 and 2      block 1: 0 2
    rows of each token in the blocks, 2 where it does not go: [0, 0] [1, 2] [2, 1]
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

from fp8moe.ops.row_maps import place
from fp8moe.records import Array


class Blocks(NamedTuple):
    """Assignment of tokens to blocks.

    tokens: int32 [W, C], the token of each row of the blocks, T for empty rows. places: int32 [T, W], the row
    that a token occupies in each device's block, C for none.
    """

    tokens: Array
    places: Array


def device_blocks(xp: ModuleType, topk_ids: Array, experts: int, devices: int, capacity: int) -> Blocks:
    """Blocks in token order; each token is sent once to every device that has one of its experts.

    xp: module of the arrays, ``numpy`` or ``jax.numpy``. topk_ids: [T, k]; ids below 0 or of no device's
    expert are ignored. experts: per device. capacity: C; tokens beyond it are dropped.
    """
    device = xp.where(topk_ids >= 0, topk_ids // experts, -1)
    # [T, W]: whether the token is sent to the device
    goes = (device[:, :, None] == xp.arange(devices)).any(axis=1)
    row = xp.cumsum(goes, axis=0, dtype=xp.int32) - 1
    places = xp.where(goes & (row < capacity), row, capacity)
    tokens, to = xp.indices(places.shape, dtype=xp.int32)
    blank = xp.full((devices, capacity), len(topk_ids), xp.int32)
    return Blocks(place(blank, (to, places), tokens), places)


def local_ids(xp: ModuleType, topk_ids: Array, experts: int, device: Array | int) -> Array:
    """Global expert ids as local ids of one device, -1 for other devices' experts."""
    ids = topk_ids - device * experts
    return xp.where((ids >= 0) & (ids < experts), ids, -1)
