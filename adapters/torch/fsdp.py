"""For PyTorch's ``fully_shard``: shard each parameter along a dimension that needs no padding.

FSDP shards a parameter along one dimension, by default the first, and pads that to a multiple of the number
of ranks. Grouped expert weights [E, N, K] have a small first dimension: 8 experts on 64 ranks are padded to
64. Along any other dimension ``fully_shard`` requires even shards.

    fully_shard(layer, mesh=mesh, shard_placement_fn=shard_placement(mesh))
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fp8moe.adapters import needs

with needs("torch"):
    from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fp8moe.runtime import checks

__all__ = ["padded_elements", "shard_placement"]


def shard_placement(ranks: int | DeviceMesh) -> Callable[[nn.Parameter], Shard | None]:
    """Create the ``shard_placement_fn`` of ``fully_shard`` that selects the first dimension without padding.

    Parameters
    ----------
    ranks : int or DeviceMesh
        The mesh of ``fully_shard``, or the number of ranks over which it shards parameters (the last
        dimension of a mesh of two).

    Returns
    -------
    function
        Maps a parameter to its placement, or to None (dimension 0) if every dimension needs padding. Given a
        mesh, it raises ValueError for a DTensor that is already distributed over some of the mesh's ranks, as
        the parameters of expert parallelism over the same ranks are, or over a mesh without names, as those
        of a layer made with a process group; torch's own errors name no parameter.

    Raises
    ------
    TypeError, ValueError
        For anything else than a mesh or an integer of at least 1.

    Examples
    --------
    >>> import torch
    >>> from fp8moe.torch import shard_placement
    >>> shard_placement(64)(torch.nn.Parameter(torch.empty(8, 256, 100)))
    Shard(dim=1)
    """
    mesh = ranks if isinstance(ranks, DeviceMesh) else None
    number = mesh.size(mesh.ndim - 1) if mesh is not None else checks.integer("ranks", ranks, 1)

    def place(parameter: nn.Parameter) -> Shard | None:
        shape = parameter.shape
        if isinstance(parameter, DTensor):
            if mesh is not None:
                _check_mesh(parameter, mesh)
            # of a DTensor, such as expert-parallel weights, fully_shard divides this rank's part
            shape = parameter.to_local().shape
        even = [d for d, size in enumerate(shape) if size % number == 0]
        return Shard(even[0]) if even else None

    return place


def _check_mesh(parameter: DTensor, mesh: DeviceMesh) -> None:
    own, theirs = (m.mesh.flatten().tolist() for m in (parameter.device_mesh, mesh))
    if len(set(own) & set(theirs)) > 1:  # this rank is in both
        raise ValueError(
            f"mesh: got ranks {theirs} for a parameter of shape {list(parameter.shape)}, which ranks {own} "
            "already share by expert parallelism; wanted ranks that hold the same experts; pass another "
            'dimension of one mesh, as in fully_shard(layer, mesh=mesh["dp"]) for process_group=mesh["ep"]'
        )
    if parameter.device_mesh.mesh_dim_names is None or mesh.mesh_dim_names is None:
        raise ValueError(
            f"mesh: got {mesh} for a parameter of shape {list(parameter.shape)} on {parameter.device_mesh}, "
            "of which one has no names, as that of a process group; wanted two dimensions of one mesh; pass "
            'process_group=mesh["ep"] to the layer, and mesh=mesh["dp"] to fully_shard'
        )


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
    >>> from fp8moe.torch import padded_elements
    >>> padded_elements((8, 256, 100), 64), padded_elements((8, 256, 100), 64, 1)
    (1433600, 0)
    """
    others, ranks = list(shape), checks.integer("ranks", ranks, 1)
    if not others:
        raise ValueError("shape: got a scalar's; wanted a dimension to shard")
    dimension = checks.integer("dimension", dimension, -len(others), len(others) - 1)
    size = others.pop(dimension)
    return (-size % ranks) * math.prod(others)
