"""Expert-bucket planning for fully sharded data parallelism.

A bucket is one flat buffer that every rank holds an equal shard of. So that a shard boundary never cuts a
row of a parameter, parameters lie at multiples of a chunk-size factor c, and the bucket is padded to a
multiple of data_parallel_size * c. Megatron-FSDP takes c = lcm of all shape[1:].numel(), which for grouped
expert weights [E, N, K] is a whole expert and pads up to twice the memory; Megatron-LM PR #4979 splits such
weights into buckets of their own, which is worse once data_parallel_size exceeds E.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fp8moe import checks
from fp8moe.formats import round_up

POLICIES = ("merge", "split", "last_dim", "min")


@dataclass(frozen=True)
class Bucket:
    """One flat buffer: ``numel`` elements of parameters, padded to ``padded_numel``, gaps between them
    included."""

    names: tuple[str, ...]
    is_expert: bool
    factor: int
    numel: int
    padded_numel: int


@dataclass(frozen=True)
class BucketPlan:
    """What a policy comes to. ``policy`` names the one that "min" chose."""

    policy: str
    data_parallel_size: int
    buckets: tuple[Bucket, ...]

    @property
    def numel(self) -> int:
        return sum(b.numel for b in self.buckets)

    @property
    def padded_numel(self) -> int:
        return sum(b.padded_numel for b in self.buckets)

    @property
    def ratio(self) -> float:
        """Padded over real elements, 1.0 without padding."""
        return self.padded_numel / self.numel if self.numel else 1.0

    @property
    def padding_share(self) -> float:
        """The part of the buffers that is padding, 0 to 1."""
        return 1 - self.numel / self.padded_numel if self.padded_numel else 0.0


@dataclass(frozen=True)
class _Param:
    name: str
    shape: tuple[int, ...]
    is_expert: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def row(self) -> int:
        """Elements of one index of the first dimension."""
        return math.prod(self.shape[1:])


def plan_buckets(
    params: Iterable[tuple[str, tuple[int, ...], bool]],
    data_parallel_size: int,
    policy: str = "min",
) -> BucketPlan:
    """Group parameters into buckets and say what padding each needs.

    params: (name, shape, is_expert); experts and the rest never share a bucket.
    data_parallel_size: ranks that share a bucket.
    policy: "merge": one bucket, c = lcm of shape[1:].numel() (Megatron-FSDP, which leaves out parameters
        smaller than a chunk). "split": grouped expert
        weights (three dimensions or more) with different shape[1:].numel() go to separate buckets
        (Megatron-LM PR #4979). "last_dim": one bucket, c = lcm of shape[-1] for experts. "min": the one
        of these with the least padded elements, the fewest buckets among equals; never worse than any.

    Raises TypeError or ValueError for a parameter or size that is none.
    """
    size = checks.integer("data_parallel_size", data_parallel_size, 1)
    checks.choice("policy", policy, POLICIES)
    if not isinstance(params, Iterable):
        raise TypeError(
            f"params: got {type(params).__name__}; wanted (name, shape, is_expert) of each parameter"
        )
    known = [_param(i, p) for i, p in enumerate(params)]
    names = [p.name for p in known]
    if len(set(names)) != len(names):
        raise ValueError(f"params: got a name twice among {names}; wanted each once")
    if policy == "min":
        plans = [_plan(known, size, p) for p in ("merge", "last_dim", "split")]
        return min(plans, key=lambda plan: (plan.padded_numel, len(plan.buckets)))
    return _plan(known, size, policy)


def _plan(params: list[_Param], size: int, policy: str) -> BucketPlan:
    groups: dict[Any, list[_Param]] = {}
    for p in params:
        alone = policy == "split" and p.is_expert and len(p.shape) >= 3
        groups.setdefault((p.is_expert, p.row if alone else None), []).append(p)
    buckets = tuple(_bucket(members, size, policy) for members in groups.values())
    return BucketPlan(policy, size, buckets)


def _bucket(params: list[_Param], size: int, policy: str) -> Bucket:
    def factor(p: _Param) -> int:
        by_last = policy == "last_dim" and p.is_expert and p.shape
        return max(p.shape[-1] if by_last else p.row, 1)

    params = sorted(params, key=factor, reverse=True)
    c = factor(params[0])
    for p in params:
        c = math.lcm(c, factor(p)) if p.numel >= c else c  # what is smaller than a chunk fills gaps
    numel = sum(p.numel for p in params)
    names = tuple(p.name for p in params)
    return Bucket(names, params[0].is_expert, c, numel, round_up(_laid_out(params, c), size * c))


def _laid_out(params: list[_Param], c: int) -> int:
    """Elements from the first parameter's start to the last one's end, as Megatron-FSDP 0.6 lays them out.

    A parameter starts, or ends, at a multiple of c. A last chunk that is not full takes the rest of one more
    parameter, where it fits, and those smaller than a chunk.
    """
    whole = [p.numel for p in params if p.numel >= c]
    small = [p.numel for p in params if p.numel < c]
    end = 0
    while whole:
        numel = whole.pop(0)
        end += round_up(numel, c)
        if numel % c == 0:
            continue
        space = c - numel % c
        other = next((n for n in whole if 0 < n % c <= space), None)
        if other is not None:
            whole.remove(other)
            end += other - other % c
            space -= other % c
        for n in small[:]:
            if n <= space:
                small.remove(n)
                space -= n
    return end + sum(small)


def _param(index: int, value: Any) -> _Param:
    try:
        name, shape, is_expert = value
    except (TypeError, ValueError):
        raise TypeError(f"params[{index}]: got {value!r}; wanted (name, shape, is_expert)") from None
    if not isinstance(name, str) or not isinstance(is_expert, bool) or not isinstance(shape, Iterable):
        raise TypeError(f"params[{index}]: got {value!r}; wanted (str, shape, bool)")
    dims = tuple(checks.integer(f"params[{index}].shape", d, 0, 2**62) for d in shape)
    return _Param(name, dims, is_expert)
