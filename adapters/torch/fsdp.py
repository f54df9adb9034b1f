"""For PyTorch's ``fully_shard``: shard each parameter along a dimension that needs no padding, and gather
experts' weights as FP8 codes.

FSDP shards a parameter along one dimension, by default the first, and pads that to a multiple of the number
of ranks. Grouped expert weights [E, N, K] have a small first dimension: 8 experts on 64 ranks are padded to
64. Along any other dimension ``fully_shard`` requires even shards.

    fully_shard(gather_fp8(layer), mesh=mesh, shard_placement_fn=shard_placement(mesh))
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from fp8moe.adapters import needs

with needs("torch"):
    import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fp8moe.activation import halves_of
from fp8moe.adapters.torch.gathered import BLOCK, Padding, SentAsFP8, send_as_fp8
from fp8moe.adapters.torch.operands import padding_of
from fp8moe.adapters.torch.sharding import local_of
from fp8moe.adapters.torch.weights import FP8Weights, state_of
from fp8moe.runtime import checks

__all__ = ["gather_fp8", "padded_elements", "shard_placement"]

_log = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)


def gather_fp8(model: Model) -> Model:
    """Let ``fully_shard`` gather experts' weights as FP8 codes and scales, before it is called.

    Every gather, in forward and backward, quantises this rank's shard and sends one byte a weight in place of
    2 or 4. The forward multiplies the gathered codes, which are those of gathered masters bit for bit, as are
    losses and gradients: the shard is rounded to the ``param_dtype`` of a ``mp_policy`` first, as masters
    are. Optimizers, gradients, checkpoints and weights before and after are the masters, as without it.

    It holds for `FP8FlowMoE`, transformers' experts with this library's implementation and torchtitan's
    experts with this library's layers, in an FP8 recipe, whose weights are stored as the GEMMs read them (not
    transposed or interleaved, as gpt-oss's). Shards need to be of whole experts, or, for an expert width that
    is a multiple of 128, multiples of 128 rows or columns. Masters are gathered of others: a log line and the
    layer's ``extra_repr`` say so.

    Parameters
    ----------
    model : Module
        A layer, or a module that contains experts, with the parameters that ``fully_shard`` will be given:
        it replaces them, as ``fully_shard`` does, so make optimizers after both.

    Returns
    -------
    Module
        The model.

    Raises
    ------
    TypeError
        For a model that is no module, or weights that are sharded already.
    ValueError
        For a model without experts whose weights can be gathered so, or with weights that modules share.

    Notes
    -----
    The layer runs between ``fully_shard``'s gathers only: weights that no ``fully_shard`` shards are refused
    by the forward. Other readers of gathered weights raise an error that names the weight. Within
    `weights_unchanged`, gathered codes serve as long as ``fully_shard`` keeps them, and no copies are made.

    Examples
    --------
    >>> import torch
    >>> from fp8moe.torch import FP8FlowMoE, gather_fp8
    >>> layer = gather_fp8(FP8FlowMoE(hidden=256, ffn=128, num_experts=4, topk=2))
    >>> layer.state_dict()["w13"].shape
    torch.Size([4, 256, 256])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}; wanted a Module, such as a layer of experts")
    owners: dict[int, tuple[nn.Module, str]] = {}
    for m in model.modules():
        for name, p in m.named_parameters(recurse=False):
            if id(p) in owners and state_of(m) is not None:
                raise ValueError(
                    f"{name}: got a parameter that two modules have ({type(m).__name__}), which would become "
                    "two; wanted one module to each weight; leave out gather_fp8, or give one a copy"
                )
            owners[id(p)] = m, name
    found = 0
    for module in model.modules():
        weights = state_of(module)
        if weights is None or not _suits(weights, owners):
            continue
        found += 1
        for w, padding in _paddings(weights):
            send_as_fp8(*owners[id(w)], padding)
    if not found:
        raise ValueError(
            f"model: got {type(model).__name__}, without experts in an FP8 recipe whose weights are stored "
            "as the GEMMs read them; wanted one with them; leave out gather_fp8"
        )
    return model


def _suits(weights: FP8Weights, owners: Mapping[int, Any]) -> bool:
    """Whether the GEMMs read codes of a module's weights as these are stored."""
    module, holder, masters = weights.module, weights.holder, weights.masters()
    for name, w in masters.items():
        if not holder.is_whole(module, name, w):
            raise TypeError(
                f"{name}: got a weight that is sharded already, {type(w).__name__}; wanted the whole weights "
                "of this rank's experts; call gather_fp8 before fully_shard"
            )
    with torch.no_grad():
        first, second = holder.operands(module, [*masters.values()])
    operands = *(first if isinstance(first, tuple) else (first,)), second
    suits = len(operands) == len(masters) and all(
        id(w) in owners and w.is_contiguous() and _is_view_of(w, operand)
        for w, operand in zip(masters.values(), operands, strict=True)
    )
    if not suits:
        _log.warning(
            "gather_fp8: fully_shard gathers the masters of %s: %s are not stored as the GEMMs read them",
            type(module).__name__,
            " and ".join(masters),
        )
    return suits


def _is_view_of(w: Tensor, operand: Tensor) -> bool:
    w = local_of(w)
    if isinstance(w, SentAsFP8):
        return isinstance(operand, SentAsFP8) and operand.shape == w.shape
    same = operand.untyped_storage()._cdata == w.untyped_storage()._cdata  # also of the meta device
    return same and (operand.shape, operand.stride()) == (w.shape, w.stride())


def _paddings(weights: FP8Weights) -> Iterator[tuple[Tensor, Padding]]:
    """A module's weights, and how `quantize_fp8_weights` pads their codes."""
    masters = weights.masters()
    *first, second = masters
    halves = halves_of(weights.holder.activation(weights.module).kind)
    ffn = masters[second].shape[2]
    of_first, of_second = padding_of(len(first), ffn, halves) if ffn % BLOCK else ({}, {})
    for name in first:
        yield masters[name], Padding(name, **of_first)
    yield masters[second], Padding(second, **of_second)


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
