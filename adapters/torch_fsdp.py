"""For PyTorch's ``fully_shard``: shard every parameter along the dimension that wastes least.

FSDP cuts a parameter along one dimension, by default the first, and pads that to a multiple of the number of
ranks. Grouped expert weights [E, N, K] have few rows there: 8 experts on 64 ranks become 64. Along another
dimension ``fully_shard`` takes even cuts only.

    fully_shard(layer, mesh=mesh, shard_placement_fn=shard_placement(mesh.size()))
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.distributed.tensor import Shard


def shard_placement(ranks: int) -> Callable[[nn.Parameter], Shard | None]:
    """``shard_placement_fn`` for so many ranks: the first dimension that needs no padding; None, which means
    dimension 0, where there is none."""
    if ranks < 1:
        raise ValueError(f"ranks: got {ranks}; wanted 1 or more")

    def place(parameter: nn.Parameter) -> Shard | None:
        even = [d for d, size in enumerate(parameter.shape) if size % ranks == 0]
        return Shard(even[0]) if even else None

    return place


def padded_elements(shape: tuple[int, ...], ranks: int, dimension: int = 0) -> int:
    """Elements that ``fully_shard`` adds to a parameter of this shape when it cuts it along ``dimension``."""
    size = shape[dimension]
    others = 1
    for d, n in enumerate(shape):
        others *= n if d != dimension else 1
    return (-size % ranks) * others
