"""Expert-parallel weights as DTensors.

Each rank holds the weights of its own experts. Plain tensors with the same name would be treated as replicas
of one tensor, for example by `torch.distributed.checkpoint`, which would save only one rank's. The weights
are therefore `DTensor`s, sharded along the experts over the ranks' mesh: checkpoints, optimizer states and
norms cover all experts, and ``fully_shard`` over another dimension of the same mesh shards each rank's
weights further.

    layer = FP8FlowMoE(..., process_group=mesh["ep"])
    fully_shard(layer, mesh=mesh["dp"])
    layer.set_gradient_divide_factor(mesh.size())

The router's weight is a `DTensor` of the same mesh, replicated: torch's optimizers, `torch.nn.utils` and
`GradScaler` do not accept plain tensors and DTensors in one list. The gradients of all of the layer's
parameters are sums over the ranks of "ep" when ``backward()`` returns: those of w13 and w2 because a rank's
experts receive all ranks' tokens, the router's because the layer's backward sums it (`replica_of`). In the
above, without the last line, they would be divided only by the ranks of "dp". For models that contain plain
tensors or DTensors of other meshes too, use `param_groups` and `clip_grad_norm_`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from functools import partial
from typing import Any

from fp8moe.adapters import needs

with needs("torch"):
    import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fp8moe.adapters.torch.accumulation import LocalPart
from fp8moe.adapters.torch.distributed.process_group import ProcessGroup, of_other_ranks
from fp8moe.adapters.torch.frozen import FrozenWeight
from fp8moe.adapters.torch.library import differentiable
from fp8moe.adapters.torch.mxfp4 import MXFP4Weight
from fp8moe.adapters.torch.operation import DIFFERENTIABLE, check_values, is_partitioned
from fp8moe.expert_parallel import Capacity, Engine, Transport
from fp8moe.expert_parallel.protocols import chunks_of

__all__ = ["LoadPlanner", "clip_grad_norm_", "exclude_from_ddp", "param_groups"]

EXPERTS = (Shard(0),)  # placement of weights [E, N, K]
REPLICA = (Replicate(),)  # placement of the router's weight


class Ranks:
    """The ranks that hold the experts: their communicator, and their mesh, None for a single rank.

    group: a process group, a one-dimensional DeviceMesh, or a `fp8moe.expert_parallel.Transport` or `Engine`
        with its process group as the attribute ``group``; None for one rank.
    """

    def __init__(self, group: Any, device: torch.device, overlap_chunks: int = 1):
        self.comm: Any = group
        self.mesh: DeviceMesh | None = None
        self.size, self.rank = 1, 0
        if group is None:
            if overlap_chunks != 1:
                raise ValueError(f"overlap_chunks: got {overlap_chunks} without a process_group; wanted one")
            return
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(
                    f"process_group: got a DeviceMesh of {group.ndim} dimensions; wanted one dimension, as "
                    "in mesh['ep']"
                )
            if group.get_coordinate() is None:
                raise of_other_ranks("process_group")
            self.mesh, group = group, group.get_group()
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise of_other_ranks("process_group")
        if isinstance(group, dist.ProcessGroup):
            self.comm = ProcessGroup(group, overlap_chunks=overlap_chunks)
        elif not isinstance(group, Transport | Engine):
            raise TypeError(
                f"process_group: got {type(group).__qualname__}; wanted a torch.distributed.ProcessGroup, a "
                "one-dimensional DeviceMesh, or a fp8moe.expert_parallel.Transport or Engine"
            )
        elif overlap_chunks != 1:
            raise ValueError(
                f"overlap_chunks: got {overlap_chunks} with a {type(group).__qualname__}; wanted a process "
                "group, or the transport's own attribute, as in ProcessGroup(group, overlap_chunks=2)"
            )
        self.size, self.rank = self.comm.world_size, self.comm.rank
        if self.size == 1:
            self.mesh = None
        elif self.mesh is None:
            group = getattr(self.comm, "group", None)
            if group is None:
                raise TypeError(
                    f"process_group: got {type(self.comm).__qualname__} without an attribute `group`; wanted "
                    "its torch.distributed.ProcessGroup there, by which checkpoints identify the experts"
                )
            device_type = device.type
            if device_type == "meta":
                device_type = dist.distributed_c10d._get_pg_default_device(group).type
            self.mesh = DeviceMesh.from_group(group, device_type)

    def __repr__(self) -> str:
        if self.comm is None:
            return "process_group=None"
        kind = type(self.comm).__name__
        return (
            f"process_group={kind} (rank {self.rank} of {self.size}), overlap_chunks={chunks_of(self.comm)}"
        )

    def __deepcopy__(self, memo: Any) -> Ranks:
        return self  # copies of a layer communicate with the same ranks

    def __reduce__(self) -> Any:
        if self.comm is None:
            return Ranks, (None, torch.device("cpu"))
        if type(self.comm) is not ProcessGroup:
            raise TypeError(
                f"process_group: got {type(self.comm).__qualname__}, which cannot be pickled; wanted a "
                "torch.distributed.ProcessGroup, which is pickled by its name; or save the state_dict()"
            )
        return _unpickled_ranks, (
            self.comm.group.group_name,
            self.mesh,
            self.comm.capacity,
            self.comm.overlap_chunks,
        )


def _unpickled_ranks(
    name: str, mesh: DeviceMesh | None, capacity: Capacity | None, overlap_chunks: int
) -> Ranks:
    try:
        group = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    except Exception as error:
        raise RuntimeError(
            f"process_group: got a layer of the process group {name!r}, which does not exist in this process "
            f"({error}); wanted torch.distributed initialized as when the layer was pickled; or load a "
            "state_dict()"
        ) from error
    device = torch.device("cpu" if mesh is None else mesh.device_type)
    ranks = Ranks(ProcessGroup(group, capacity, overlap_chunks), device)
    if mesh is not None:  # of the weights: a mesh made from the group has no dimension names
        ranks.mesh = mesh
    return ranks


def shard_of(local: Tensor, mesh: DeviceMesh) -> nn.Parameter:
    """This rank's experts as a sharded parameter."""
    return nn.Parameter(DTensor.from_local(local, mesh, EXPERTS, run_check=False))


def replicated(w: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """A parameter that all ranks have, as a DTensor."""
    local = DTensor.from_local(w.detach(), mesh, REPLICA, run_check=False)
    return nn.Parameter(local, requires_grad=w.requires_grad)


def local_of(w: Tensor) -> Tensor:
    """This rank's part of a weight, differentiable; plain tensors are returned unchanged."""
    if not isinstance(w, DTensor):
        return w
    equal = all(type(p) is Shard and w.shape[p.dim] % w.device_mesh.size() == 0 for p in w.placements)
    if torch.compiler.is_compiling() or not equal:
        return w.to_local()  # type: ignore[no-any-return]
    return LocalPart.apply(w, False)  # type: ignore[no-any-return]


def own_experts(name: str, w: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """The weights of this rank's experts, with their gradient; None remains None, as ``to_local`` of torch
    2.11 does not: a ``main_grad`` has taken it. mesh: of the ranks.

    Raises TypeError as `check_own_experts`.
    """
    check_own_experts(name, w, mesh)
    if not isinstance(w, DTensor):
        return w
    return (_local_in_graph if torch.compiler.is_compiling() else LocalPart.apply)(w, False)  # type: ignore[no-any-return]


def check_own_experts(name: str, w: Tensor, mesh: DeviceMesh | None) -> None:
    """Raises TypeError for a DTensor of which this rank has less than its experts. mesh: of the ranks."""
    if not isinstance(w, DTensor) or _is_replicated(w):
        return
    if w.placements != EXPERTS or w.device_mesh != mesh:
        fix = "pass process_group= for expert parallelism, or use fully_shard"
        raise _of_a_part(name, w, "weights of its experts", fix)


def replica_of(name: str, w: Tensor) -> Tensor:
    """A weight that all ranks have, as a plain tensor of this rank. Its gradient, which each rank computes
    from its own tokens, becomes the sum over the ranks of the weight's mesh, in the backward.

    Raises TypeError for a DTensor of which this rank has a part.
    """
    if not isinstance(w, DTensor):
        return w
    if not _is_replicated(w):
        raise _of_a_part(name, w, "weight", "use fully_shard")
    if torch.compiler.is_compiling():
        whole = w.redistribute(placements=w.placements)  # its backward sums
        return whole.to_local(grad_placements=[Partial()] * w.device_mesh.ndim)  # type: ignore[no-any-return]
    return LocalPart.apply(w, True)  # type: ignore[no-any-return]


_local_in_graph = differentiable(LocalPart)


def checksum(tensors: Iterable[Tensor], start: Any, mesh: DeviceMesh) -> int:
    """31 bits, never zero, of values that every rank of a mesh should have, and of ``start``'s repr. DTensors
    of which this rank has a part, as of ``fully_shard``, are left out. Synchronises."""
    value = zlib.crc32(repr(start).encode())
    for t in tensors:
        if isinstance(t, DTensor):
            if t.device_mesh != mesh or not _is_replicated(t):
                continue
            t = t._local_tensor
        # a copy, because numpy() makes a storage one that fully_shard cannot free
        data = t.detach().to("cpu", copy=True).contiguous().reshape(-1).view(torch.uint8)
        value = zlib.crc32(data.numpy().data, value)
    return value >> 1 or 1


def _is_replicated(w: DTensor) -> bool:
    return all(p == Replicate() for p in w.placements)


def _of_a_part(name: str, w: DTensor, what: str, fix: str) -> TypeError:
    return TypeError(
        f"{name}: got a DTensor of placements {w.placements}, of which this rank has a part; wanted the "
        f"{what} whole; {fix}, which gathers weights for the call of the module that it was given"
    )


def own_part(w: Tensor) -> tuple[slice, ...]:
    """Where this rank's part of a weight is in the whole weight."""
    shape, offset = tuple(w.shape), (0,) * w.ndim
    if isinstance(w, DTensor):
        with torch.device("cpu"):  # it computes with tensors of the default device, which may be "meta"
            shape, offset = compute_local_shape_and_global_offset(w.shape, w.device_mesh, w.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def is_whole(w: Tensor, mesh: DeviceMesh | None) -> bool:
    """Whether this rank's experts are complete, and not sharded further, as ``fully_shard`` and DeepSpeed's
    ZeRO-3 do outside the forward. mesh: mesh of the ranks."""
    if isinstance(w, DTensor):
        return mesh is not None and w.device_mesh == mesh
    return not is_partitioned(w)


def engine_of(w: Tensor) -> str:
    """The name of the engine that steps a weight by tensors of its own, as far as it can be told."""
    marks = "ds_id", "_hp_mapping"  # of ZeRO-3; of ZeRO-1, ZeRO-2 and DeepSpeed's BF16_Optimizer
    known = any(hasattr(w, mark) for mark in marks)
    return "DeepSpeed" if known else "an engine such as DeepSpeed, Megatron-LM or Apex"


def as_replica(value: Any, w: Tensor) -> Any:
    """A state dict's plain tensor as a DTensor, if the weight is one that all ranks have."""
    if not isinstance(w, DTensor) or type(value) not in (Tensor, nn.Parameter) or not _is_replicated(w):
        return value
    local = value.detach().to(value.device if w.device.type == "meta" else w.device)
    return DTensor.from_local(local, w.device_mesh, w.placements, run_check=False)


def as_shard(value: Any, w: Tensor, mesh: DeviceMesh | None) -> Any:
    """A state dict's value, with all experts or this rank's as a plain tensor, sharded like the weight."""
    if not isinstance(w, DTensor) or type(value) not in (Tensor, nn.Parameter) or not is_whole(w, mesh):
        return value
    device = value.device if w.device.type == "meta" else w.device
    if value.shape == w.shape:  # with assign=True, a view would keep all experts in memory
        local = value.detach()[own_part(w)].to(device, copy=True)
    elif value.shape == w.to_local().shape:
        local = value.to(device)
    else:
        return value
    return DTensor.from_local(local, w.device_mesh, EXPERTS, run_check=False)


class LoadPlanner(DefaultLoadPlanner):
    """A planner for `torch.distributed.checkpoint.load` that refuses codes without scales.

    ``load`` copies into a model's tensors by itself, with a cast: FP8 or integer codes of a quantised
    checkpoint become values, and no module can notice. This planner compares the checkpoint's dtypes first.
    Not for readers that dequantise, such as ``QuantizedHuggingFaceStorageReader``.

    Parameters
    ----------
    flatten_state_dict : bool
        As in ``DefaultLoadPlanner``.
    flatten_sharded_tensors : bool
        As in ``DefaultLoadPlanner``.
    allow_partial_load : bool
        As in ``DefaultLoadPlanner``.

    Examples
    --------
    >>> import tempfile
    >>> import torch
    >>> import torch.distributed as dist
    >>> import torch.distributed.checkpoint as dcp
    >>> from fp8moe.torch import LoadPlanner
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> state = {"w": torch.zeros(3, dtype=torch.bfloat16)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = dcp.save({"w": torch.ones(3)}, checkpoint_id=folder)
    ...     dcp.load(state, checkpoint_id=folder, planner=LoadPlanner())
    >>> dist.destroy_process_group()
    >>> state["w"].tolist()
    [1.0, 1.0, 1.0]
    """

    def create_local_plan(self) -> LoadPlan:
        """Plan what this rank reads.

        Returns
        -------
        LoadPlan
            The plan of ``DefaultLoadPlanner``.

        Raises
        ------
        TypeError
            For codes in the checkpoint where the model has floating-point values; ``load`` raises a
            ``CheckpointException`` that contains it.
        """
        saved = {} if self.metadata is None else self.metadata.state_dict_metadata
        for name, tensor in self.state_dict.items():
            given = saved.get(name)
            if not isinstance(given, TensorStorageMetadata) or not isinstance(tensor, Tensor):
                continue
            dtype = given.properties.dtype
            if tensor.dtype.itemsize == 1 and tensor.is_floating_point() and dtype != tensor.dtype:
                raise TypeError(
                    f"{name}: got dtype {dtype} for codes; wanted {tensor.dtype}; load into a layer with "
                    "such weights, FP8FlowMoE(...)"
                )
            if tensor.dtype in DIFFERENTIABLE:
                check_values(name, dtype)
        return super().create_local_plan()


def param_groups(parameters: Iterable[Tensor], **options: Any) -> list[dict[str, Any]]:
    """Make parameter groups for a torch optimizer: one for plain tensors, one for each mesh's DTensors.

    Parameters
    ----------
    parameters : iterable of Tensor
        Parameters, such as ``model.parameters()``.
    **options : Any
        Options of every group.

    Returns
    -------
    list of dict
        Argument for an optimizer in place of the parameters.

    Examples
    --------
    >>> import torch
    >>> from fp8moe.torch import param_groups
    >>> groups = param_groups(torch.nn.Linear(2, 3).parameters(), lr=0.1)
    >>> [(len(group["params"]), group["lr"]) for group in groups]
    [(2, 0.1)]
    """
    return [{"params": group, **options} for group in _by_mesh(parameters)]


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clip gradients of plain tensors and DTensors together, like `torch.nn.utils.clip_grad_norm_`.

    Parameters
    ----------
    parameters : Tensor or iterable of Tensor
        Parameters whose gradients are clipped, in place.
    max_norm : float
        Maximum norm.
    norm_type : float
        Order of the norm, positive or infinite.

    Returns
    -------
    Tensor, scalar
        The norm before clipping, over all ranks' experts and this rank's plain tensors, which are equal on
        all ranks.

    Raises
    ------
    ValueError
        For another order.

    Examples
    --------
    >>> import torch
    >>> from fp8moe.torch import clip_grad_norm_
    >>> w = torch.nn.Parameter(torch.zeros(2))
    >>> w.grad = torch.tensor([3.0, 4.0])
    >>> clip_grad_norm_(w, 1.0).item(), w.grad.norm() <= 1
    (5.0, tensor(True))
    """
    if not norm_type > 0:  # a norm of norms of order 0 would count meshes
        raise ValueError(f"norm_type: got {norm_type}; wanted a positive number")
    parameter_list = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    groups = _by_mesh([p for p in parameter_list if p.grad is not None])
    norms = []
    for group in groups:
        norm = nn.utils.get_total_norm([p.grad for p in group], norm_type)  # type: ignore[misc]
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def exclude_from_ddp(model: nn.Module, process_group: Any = None) -> nn.Module:
    """Prepare a model with expert-parallel or frozen layers for `torch.nn.parallel.DistributedDataParallel`.

    DDP averages gradients over its ranks, and cannot do so with DTensors. The layers sum theirs over the same
    ranks themselves: DDP is told to ignore these parameters, and their gradients are divided by the number of
    ranks, so that the gradients of all of the model's parameters are means over the ranks. DDP sends buffers
    from rank 0 to all in each forward: it is told to ignore the codes and scales of frozen experts
    (`FP8FlowMoE.from_quantized`), which do not change, and weights in MXFP4
    (`fp8moe.transformers.load_mxfp4`), which it cannot send. Call it before `DistributedDataParallel` (or
    accelerate's ``prepare``), and again for a copy of the model.

    Parameters
    ----------
    model : Module
        The module that DDP will wrap. Modified in place: its attribute with names for DDP to ignore, and a
        hook of each DTensor parameter.
    process_group : ProcessGroup or None
        DDP's process group; None: the default group.

    Returns
    -------
    Module
        The model.

    Raises
    ------
    ValueError
        For a DTensor parameter over other ranks than those of the group: DDP would leave the copies of its
        other ranks different.

    Examples
    --------
    >>> import torch
    >>> import torch.distributed as dist
    >>> from fp8moe.torch import FP8FlowMoE
    >>> from fp8moe.torch import exclude_from_ddp
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> experts = FP8FlowMoE(64, 128, num_experts=4, topk=2, recipe="bf16", process_group=dist.group.WORLD)
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), experts)
    >>> exclude_from_ddp(model) is model
    True
    >>> dist.destroy_process_group()

    After this ``torch.nn.parallel.DistributedDataParallel(model)`` averages the other gradients.
    """
    ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    for name, p in model.named_parameters():
        if isinstance(p, MXFP4Weight):
            ignored.add(name)
        if not isinstance(p, DTensor):
            continue
        ranks = dist.get_process_group_ranks(process_group)
        own = p.device_mesh.mesh.flatten().tolist()
        if sorted(own) != sorted(ranks):
            raise ValueError(
                f"process_group: got ranks {ranks}; wanted {own}, which hold {name}; where the experts have "
                "copies on further ranks, use fully_shard over another dimension of their mesh"
            )
        ignored |= {name, f".{name}"}  # for the model's own parameters DDP uses both forms
        hooks = (p._backward_hooks or {}).values()
        if p.requires_grad and not any(getattr(hook, "func", None) is _mean for hook in hooks):
            p.register_hook(partial(_mean, ranks=len(own)))
    for prefix, module in model.named_modules():
        if isinstance(module, FrozenWeight):
            ignored |= {f"{prefix}.{name}".removeprefix(".") for name, _ in module.named_buffers()}
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sorted(ignored))
    return model


def _mean(grad: Tensor, *, ranks: int) -> Tensor:
    return grad / ranks


def _by_mesh(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    groups: dict[DeviceMesh | None, list[Tensor]] = {}
    for p in parameters:
        groups.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
    return list(groups.values())
