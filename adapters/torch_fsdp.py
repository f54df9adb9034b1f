"""For PyTorch's ``fully_shard``: shard each parameter along a dimension that needs no padding.

FSDP shards a parameter along one dimension, by default the first, and pads that to a multiple of the number
of ranks. Grouped expert weights [E, N, K] have a small first dimension: 8 experts on 64 ranks are padded to
64. Along any other dimension ``fully_shard`` requires even shards.

    fully_shard(layer, mesh=mesh, shard_placement_fn=shard_placement(mesh.size()))
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fp8moe import checks

__all__ = ["padded_elements", "shard_placement"]


def shard_placement(ranks: int) -> Callable[[nn.Parameter], Shard | None]:
    """Create the ``shard_placement_fn`` of ``fully_shard`` that selects the first dimension without padding.

    Parameters
    ----------
    ranks : int
        Number of ranks over which parameters are sharded.

    Returns
    -------
    function
        Maps a parameter to its placement, or to None (dimension 0) if every dimension needs padding.

    Raises
    ------
    TypeError, ValueError
        For anything else than an integer of at least 1.

    Examples
    --------
    >>> import torch
    >>> from fp8moe.adapters.torch_fsdp import shard_placement
    >>> shard_placement(64)(torch.nn.Parameter(torch.empty(8, 256, 100)))
    Shard(dim=1)
    """
    ranks = checks.integer("ranks", ranks, 1)

    def place(parameter: nn.Parameter) -> Shard | None:
        # of a DTensor, such as expert-parallel weights, fully_shard divides this rank's part
        shape = parameter.to_local().shape if isinstance(parameter, DTensor) else parameter.shape
        even = [d for d, size in enumerate(shape) if size % ranks == 0]
        return Shard(even[0]) if even else None

    return place


def padded_elements(shape: tuple[int, ...], ranks: int, dimension: int = 0) -> int:
    """Return the number of padding elements that ``fully_shard`` adds to a parameter.

    Parameters
    ----------
    shape : tuple of int
        Shape of the parameter.
    ranks : int
        Number of ranks over which it is sharded.
    dimension : int
        Sharded dimension; negative ones count from the last.

    Returns
    -------
    int
        Number of elements.

    Raises
    ------
    TypeError, ValueError
        For a scalar, a number of ranks below 1, or a dimension that the shape does not have.

    Examples
    --------
    >>> from fp8moe.adapters.torch_fsdp import padded_elements
    >>> padded_elements((8, 256, 100), 64), padded_elements((8, 256, 100), 64, 1)
    (1433600, 0)
    """
    others, ranks = list(shape), checks.integer("ranks", ranks, 1)
    if not others:
        raise ValueError("shape: got a scalar's; wanted a dimension to shard")
    dimension = checks.integer("dimension", dimension, -len(others), len(others) - 1)
    size = others.pop(dimension)
    return (-size % ranks) * math.prod(others)
