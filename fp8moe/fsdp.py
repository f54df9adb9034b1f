"""Expert-bucket planning for fully sharded data parallelism.

A bucket is one flat buffer, of which every rank holds an equal shard. A shard boundary must not split a row
of a parameter; therefore parameters start at multiples of a chunk-size factor c, and the bucket is padded to
a multiple of data_parallel_size * c. Megatron-FSDP uses c = lcm of all shape[1:].numel(). For grouped expert
weights [E, N, K] that is at least one whole expert, and padding can double the memory. Megatron-LM PR #4979
puts such weights into separate buckets, which is worse once data_parallel_size exceeds E.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fp8moe.formats import round_up
from fp8moe.runtime import checks

POLICIES = ("merge", "split", "last_dim", "min")


@dataclass(frozen=True)
class Bucket:
    """One flat buffer: ``numel`` parameter elements, ``padded_numel`` elements with all gaps and padding."""

    names: tuple[str, ...]
    is_expert: bool
    factor: int
    numel: int
    padded_numel: int


@dataclass(frozen=True)
class BucketPlan:
    """The buckets of a policy. With policy="min", ``policy`` is the one that was selected."""

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
        """Padded elements divided by parameter elements; 1.0 without padding."""
        return self.padded_numel / self.numel if self.numel else 1.0

    @property
    def padding_share(self) -> float:
        """The fraction of the buffers that is padding, 0 to 1."""
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
        """Elements per index of the first dimension."""
        return math.prod(self.shape[1:])


def plan_buckets(
    params: Iterable[tuple[str, tuple[int, ...], bool]],
    data_parallel_size: int,
    policy: str = "min",
) -> BucketPlan:
    """Group parameters into buckets and compute the padding of each bucket.

    Parameters
    ----------
    params : iterable of (name, shape, is_expert)
        Expert and other parameters never share a bucket.
    data_parallel_size : int
        Ranks that share a bucket.
    policy : {"min", "merge", "split", "last_dim"}
        "merge": one bucket, c = lcm of shape[1:].numel() (Megatron-FSDP; parameters smaller than a chunk do
        not enter the lcm). "split": grouped expert weights (three dimensions or more) with different
        shape[1:].numel() go to separate buckets (Megatron-LM PR #4979). "last_dim": one bucket, c = lcm of
        shape[-1] for experts. "min": of these three, the one with the fewest padded elements, then the fewest
        buckets.

    Returns
    -------
    BucketPlan
        The buckets, and the elements with padding.

    Raises
    ------
    TypeError
        For a parameter of another form, or a size that is not an integer.
    ValueError
        For an invalid size or policy, or a name given twice.
    """
    size = checks.integer("data_parallel_size", data_parallel_size, 1)
    checks.choice("policy", policy, POLICIES)
    if not isinstance(params, Iterable):
        raise TypeError(
            f"params: got {type(params).__name__}; wanted an iterable of (name, shape, is_expert)"
        )
    parameters = [_param(i, p) for i, p in enumerate(params)]
    names = [p.name for p in parameters]
    if len(set(names)) != len(names):
        raise ValueError(f"params: got a name twice in {names}; wanted distinct names")
    if policy == "min":
        plans = [_plan(parameters, size, p) for p in ("merge", "last_dim", "split")]
        return min(plans, key=lambda plan: (plan.padded_numel, len(plan.buckets)))
    return _plan(parameters, size, policy)


def _plan(params: list[_Param], size: int, policy: str) -> BucketPlan:
    groups: dict[Any, list[_Param]] = {}
    for p in params:
        separate = policy == "split" and p.is_expert and len(p.shape) >= 3
        groups.setdefault((p.is_expert, p.row if separate else None), []).append(p)
    buckets = tuple(_bucket(members, size, policy) for members in groups.values())
    return BucketPlan(policy, size, buckets)


def _bucket(params: list[_Param], size: int, policy: str) -> Bucket:
    def factor(p: _Param) -> int:
        by_last = policy == "last_dim" and p.is_expert and p.shape
        return max(p.shape[-1] if by_last else p.row, 1)

    params = sorted(params, key=factor, reverse=True)
    c = factor(params[0])
    for p in params:
        c = math.lcm(c, factor(p)) if p.numel >= c else c  # parameters smaller than a chunk fill gaps
    numel = sum(p.numel for p in params)
    names = tuple(p.name for p in params)
    return Bucket(names, params[0].is_expert, c, numel, round_up(_laid_out(params, c), size * c))


def _laid_out(params: list[_Param], c: int) -> int:
    """Elements from the start of the first parameter to the end of the last, in Megatron-FSDP 0.6's layout.

    A parameter starts or ends at a multiple of c. A partly filled last chunk also takes the remainder of one
    other parameter, if it fits, and parameters smaller than a chunk.
    """
    full_size = [p.numel for p in params if p.numel >= c]
    small = [p.numel for p in params if p.numel < c]
    end = 0
    while full_size:
        numel = full_size.pop(0)
        end += round_up(numel, c)
        if numel % c == 0:
            continue
        space = c - numel % c
        filler = next((n for n in full_size if 0 < n % c <= space), None)
        if filler is not None:
            full_size.remove(filler)
            end += filler - filler % c
            space -= filler % c
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
