"""AdamW that makes the FP8 copies of the weights that it updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from fp8moe.adapters import needs

with needs("torch"):
    import torch
from torch import Tensor, nn

from fp8moe.activation import halves_of
from fp8moe.adapters.torch.operands import padding_of
from fp8moe.adapters.torch.weights import FP8Weights, is_capturing, states_written_by
from fp8moe.ops.adamw import adamw
from fp8moe.records import Quantized

__all__ = ["AdamW"]

_DTYPES = torch.bfloat16, torch.float32


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW with ``fused=True`` that makes the FP8 copies of experts' weights as it updates them.

    Within `weights_unchanged` with ``optimizer=`` this optimizer, one kernel updates an expert weight and
    writes the FP8 codes and scales that the next forward multiplies: the weights are not read again to make
    them. The copies equal those that a forward makes of the updated weights, bit for bit. All other
    parameters get torch's fused step, and outside of such a context every parameter does. States, parameter
    groups, ``state_dict()``, schedulers, hooks and closures are those of torch.optim.AdamW; each of the two
    loads the other's state.

    Parameters
    ----------
    params : iterable of Parameter, of dicts, or of named parameters
        As in torch.optim.AdamW, as are the other arguments.
    lr : float or Tensor
        Learning rate.
    betas : tuple of two floats
        Coefficients of the running averages of the gradient and its square.
    eps : float
        Added to the denominator.
    weight_decay : float
        Decoupled weight decay.
    maximize : bool
        Step along the gradient.

    Raises
    ------
    TypeError
        For options of torch.optim.AdamW that the kernel does not have: ``amsgrad``, ``capturable``,
        ``differentiable``, ``foreach`` and ``fused``.
    ValueError, RuntimeError
        As in torch.optim.AdamW.

    Notes
    -----
    The kernel steps an expert module's weights if all of them are in this optimizer, have a gradient, and
    are whole, plain, contiguous parameters in bfloat16 or float32, in the layout that the GEMMs read. Others
    get torch's step, and copies in the first forward after it: shards and DTensors of ``fully_shard``,
    weights stored transposed or with gates and ups interleaved (transformers' and torchtitan's gpt-oss),
    weights of which one is frozen or skipped, steps of a GradScaler or while a CUDA graph is captured. A
    wrapper of this optimizer, such as accelerate's or a ZeroRedundancyOptimizer, is another optimizer: pass
    this one to `weights_unchanged`.

    Nobody but the optimizer may write the weights within the context, also not between a step and the
    next forward: a write that can be detected raises in the next forward; one through ``.data`` or by a
    collective such as ``broadcast`` cannot be, and the forward would multiply the weights before it.

    float32 arithmetic, each result rounded once; torch's kernel computes some of it in float64, so results
    may differ in the last bit.

    Examples
    --------
    >>> import torch
    >>> from fp8moe.torch import AdamW, FP8FlowMoE, weights_unchanged
    >>> layer = FP8FlowMoE(128, 128, num_experts=2, topk=1)
    >>> optimizer = AdamW(layer.parameters(), lr=1e-3)
    >>> with weights_unchanged(layer, optimizer=optimizer):
    ...     for x in torch.ones(2, 3, 128):
    ...         layer(x).square().sum().backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...     layer.fp8_weight_nbytes > 0  # made in the step, for the next forward
    True
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
    ):
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, fused=True)

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state, which may be one of torch.optim.AdamW with another implementation.

        Parameters
        ----------
        state_dict : dict
            What ``state_dict()`` has returned.

        Raises
        ------
        ValueError
            As in torch.optim.AdamW.
        """
        groups = [{**g, "fused": True, "foreach": None} for g in state_dict["param_groups"]]
        super().load_state_dict({**state_dict, "param_groups": groups})

    def _init_group(self, group: Any, *lists: Any) -> Any:
        """torch calls it in each step for each group, to list the group's parameters with their gradients and
        states; what is not in the lists it does not step."""
        result = super()._init_group(group, *lists)
        if group is self.param_groups[0]:
            self._jobs = self._jobs_of_step()  # by the id of the weight
        if self._jobs:
            self._step_experts(group, *lists)
        return result

    def _jobs_of_step(self) -> dict[int, _Job]:
        scaled = any(getattr(self, name, None) is not None for name in ("grad_scale", "found_inf"))
        states = [] if scaled or torch.is_inference_mode_enabled() else states_written_by(self)
        if not states:
            return {}
        groups = {id(p): group for group in self.param_groups for p in group["params"]}
        jobs: dict[int, _Job] = {}
        for state in states:
            of_state = _jobs_of(state)
            if not jobs.keys().isdisjoint(of_state):
                continue  # modules that share weights: one of them has copies
            if all(self._can_step(job.weight, groups.get(key)) for key, job in of_state.items()):
                jobs |= of_state
        return jobs

    def _can_step(self, w: Tensor, group: Any) -> bool:
        if group is None or group["amsgrad"] or group["differentiable"] or not group["fused"]:
            return False
        state, grad = self.state.get(w, {}), w.grad
        averages = [state[name] for name in ("exp_avg", "exp_avg_sq") if name in state]
        return (
            all(type(t) is Tensor and _is_dense(t, w) for t in (grad, *averages))
            and type(w) is nn.Parameter
            and _is_dense(w, w)
            and grad.dtype == w.dtype  # type: ignore[union-attr]
            and len({t.dtype for t in averages}) < 2
            and not (is_capturing(w) or w.is_inference())
        )

    def _step_experts(
        self,
        group: Any,
        params: list[Tensor],
        grads: list[Tensor],
        averages: list[Tensor],
        squares: list[Tensor],
        max_squares: list[Tensor],
        steps: list[Tensor],
    ) -> None:
        """Steps those of the listed parameters that have a job, and takes them off the lists."""
        taken = [i for i, p in enumerate(params) if id(p) in self._jobs]
        if not taken:
            return
        torch._foreach_add_([steps[i] for i in taken], 1)
        settings: dict[torch.device, Tensor] = {}
        for i in taken:
            job, device = self._jobs.pop(id(params[i])), params[i].device
            if device not in settings:
                settings[device] = _settings(group, device)
            arrays = params[i], grads[i], averages[i], squares[i], steps[i].view(1), settings[device]
            codes = job.codes[job.record]
            job.codes[job.record] = adamw(*arrays, **job.options, maximize=group["maximize"], out=codes)
            job.left.discard(id(params[i]))
            if not job.left:
                job.state.take(job.codes, self)
        for of_group in (params, grads, averages, squares, steps):
            of_group[:] = [t for i, t in enumerate(of_group) if i not in taken]


class _Job(NamedTuple):
    """One weight to step. record: number of the codes that it writes, or a part of them, in ``codes``, which
    the weights of ``state`` share, as they do ``left``: those that are not stepped yet, by id."""

    state: FP8Weights
    weight: Tensor
    options: dict[str, Any]
    record: int
    codes: list[Any]
    left: set[int]


def _jobs_of(state: FP8Weights) -> dict[int, _Job]:
    """The jobs of a module's weights; none for weights that its GEMMs do not read as they are, or whose kept
    copies a captured CUDA graph reads."""
    module, holder = state.module, state.holder
    if module is None or state.kept is not None or not holder.multiplies_masters(module):
        return {}
    masters: Sequence[Tensor] = [*state.masters().values()]
    first, w2 = holder.operands(module, masters)
    firsts = first if isinstance(first, tuple) else (first,)
    if [*map(id, (*firsts, w2))] != [*map(id, masters)]:  # a DTensor's own part
        return {}
    made = holder.made(module)
    halves, both = halves_of(made["activation"].kind), made["weight_copies"] == "both"
    of_firsts, of_w2 = padding_of(len(firsts), w2.shape[2], halves)
    codes: list[Quantized | None] = [None, None]
    left = {*map(id, masters)}
    jobs = {}
    for number, w in enumerate(firsts):
        options = {**of_firsts, "columnwise": both, "first": number, "of": halves}
        jobs[id(w)] = _Job(state, w, options, 0, codes, left)
    return jobs | {id(w2): _Job(state, w2, {**of_w2, "columnwise": both}, 1, codes, left)}


def _is_dense(t: Tensor, w: Tensor) -> bool:
    return (
        t.dtype in _DTYPES
        and t.layout == torch.strided
        and t.is_contiguous()
        and (t.shape, t.device) == (w.shape, w.device)
    )


def _settings(group: Any, device: torch.device) -> Tensor:
    """lr, betas, eps and weight decay, in memory that the kernel reads, because schedulers change them;
    copied without waiting for the device."""
    lr, (beta1, beta2) = group["lr"], group["betas"]
    on_device = isinstance(lr, Tensor) and lr.device.type != "cpu"
    values = [0.0 if on_device else float(lr), beta1, beta2, group["eps"], group["weight_decay"]]
    pinned = device.type == "cuda"
    settings = torch.tensor(values, dtype=torch.float64, device="cpu", pin_memory=pinned)
    settings = settings.to(device, non_blocking=True)
    if on_device:
        settings[:1].copy_(lr.detach().reshape(1))
    return settings
