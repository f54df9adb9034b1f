"""The router's choice: scores of the experts, top-k with and without groups, weights, auxiliary losses, and
the backward of all of it, in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from fp8moe import checks
from fp8moe.dispatch import enter, operation
from fp8moe.formats import BFLOAT16
from fp8moe.records import ArrayLike, ArraySpec, Options, Record

ScoreFunction = Literal["softmax", "sigmoid"]
MAX_EXPERTS, MAX_TOPK = 1024, 32  # a warp has a token: 32 experts a lane, and a lane for each choice


@dataclass(frozen=True)
class RouterConfig(Options):
    """How a token's experts are chosen and weighted.

    Attributes
    ----------
    topk : int
        k, experts of a token, at most 32.
    score_function : "softmax" or "sigmoid"
        Of the logits: over all experts, or of each alone.
    num_groups : int
        Groups of consecutive experts, at most 32; 1: none.
    topk_groups : int
        Groups that a token may choose from: those with the largest sum of their two best scores.
    renormalize : bool
        Whether the weights of a token are divided by their sum (+ 1e-20).
    scaling_factor : float
        What they are multiplied by then.

    Raises
    ------
    TypeError, ValueError
        For what is no such number, and for top-k of more than the groups hold, in `route`.

    Notes
    -----
    Mixtral and Qwen3-MoE: ``RouterConfig(k)``; OLMoE and Qwen2-MoE without ``renormalize``; gpt-oss, whose
    softmax is over the chosen logits: ``RouterConfig(4)``, which is the same; DeepSeek-V3 (arXiv 2412.19437):
    ``RouterConfig(8, "sigmoid", num_groups=8, topk_groups=4, scaling_factor=2.5)`` with an expert bias.
    """

    topk: int
    score_function: ScoreFunction = "softmax"
    num_groups: int = 1
    topk_groups: int = 1
    renormalize: bool = True
    scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        checks.choice("score_function", self.score_function, get_args(ScoreFunction))
        groups = checks.integer("num_groups", self.num_groups, 1, 32)
        for name, value in (
            ("topk", checks.integer("topk", self.topk, 1, MAX_TOPK)),
            ("num_groups", groups),
            ("topk_groups", checks.integer("topk_groups", self.topk_groups, 1, groups)),
            ("renormalize", checks.flag("renormalize", self.renormalize)),
            ("scaling_factor", checks.number("scaling_factor", self.scaling_factor, -np.inf)),
        ):
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class Routed(Record):
    """What `route` chose.

    Attributes
    ----------
    topk_ids : ArrayLike, int32, [T, k]
        A token's experts, the largest score first; of equal scores the lower expert first.
    topk_probs : ArrayLike, float32, [T, k]
        Their weights.
    aux_loss : ArrayLike, float32, [1], or None
        Load balancing loss, 1 where all experts are chosen alike; to be multiplied by a coefficient.
    z_loss : ArrayLike, float32, [1], or None
        Mean of the squared log-sum-exp of the logits.
    tokens_per_expert : ArrayLike, int32, [S, E], or None
        Of each sequence, how many tokens chose each expert.
    """

    topk_ids: Any
    topk_probs: Any
    aux_loss: Any = None
    z_loss: Any = None
    tokens_per_expert: Any = None


@operation
def route(
    logits: ArrayLike,
    config: RouterConfig,
    *,
    expert_bias: ArrayLike | None = None,
    num_sequences: int | None = None,
) -> Routed:
    """Choose each token's experts and weight them.

    Parameters
    ----------
    logits : ArrayLike, float32, [T, E]
        The router's product, E at most 1024. A NaN makes all weights of its token NaN; it is chosen after
        every number.
    config : RouterConfig
        Scores, groups, weights.
    expert_bias : ArrayLike, float32, [E], or None
        Added to the scores for the choice only, not for the weights (the auxiliary-loss-free balancing of
        arXiv 2408.15664).
    num_sequences : int or None
        S: compute the losses, the tokens being S sequences of equal length, one after the other; 1: over all
        tokens. None: no losses.

    Returns
    -------
    Routed
        With the losses, where they are asked for.

    Raises
    ------
    TypeError
        For a wrong dtype.
    ValueError
        For a wrong shape, more experts or choices than there may be, or tokens that are not S sequences.

    Notes
    -----
    Without a bias and groups the largest logits are chosen, which are the largest scores before rounding.

    aux_loss is the mean over sequences of E / (k L^2) * sum over experts of c[e] * P[e], for c[e] of the
    sequence's L tokens that chose e and P[e] the sum over its tokens of the scores, divided by their sum over
    experts: DeepSeek-V3's sequence-wise loss (arXiv 2412.19437, equations 17 to 20), and for S = 1 the loss
    of Switch Transformers (arXiv 2101.03961, equation 4) divided by k; Mixtral's is k times it. z_loss is
    equation 5 of ST-MoE (arXiv 2202.08906).

    Examples
    --------
    >>> logits = np.log(np.array([[1.0, 2.0, 5.0], [6.0, 1.0, 1.0]], np.float32))
    >>> routed = fp8moe.route(logits, fp8moe.RouterConfig(2), num_sequences=1)
    >>> routed.topk_ids.tolist(), routed.tokens_per_expert.tolist()
    ([[2, 1], [0, 1]], [[1, 2, 1]])
    >>> routed.topk_probs.astype(float).round(3).tolist()
    [[0.714, 0.286], [0.857, 0.143]]
    """
    call = enter(logits=logits, expert_bias=expert_bias)
    a = call.args
    tokens, experts = _check(a.logits, config)
    if a.expert_bias is not None:
        checks.dtype("expert_bias", a.expert_bias, (checks.FLOAT32,))
        checks.shape("expert_bias", a.expert_bias, (experts,))
    float32, int32 = checks.FLOAT32, checks.INT32
    loss = sequences = None
    if num_sequences is not None:
        sequences = checks.integer("num_sequences", num_sequences, 1)
        if tokens % sequences:
            raise ValueError(f"num_sequences: got {sequences} for {tokens} tokens; wanted a divisor of them")
        loss = ArraySpec((1,), float32)
    out = call.empty(
        Routed(
            ArraySpec((tokens, config.topk), int32),
            ArraySpec((tokens, config.topk), float32),
            loss,
            loss,
            None if sequences is None else ArraySpec((sequences, experts), int32),
        )
    )
    call.run("router", "route", a.logits, a.expert_bias, config=config, out=out)
    return call.leave(out)  # type: ignore[no-any-return]


@operation
def route_backward(
    grad_probs: ArrayLike,
    logits: ArrayLike,
    topk_ids: ArrayLike,
    config: RouterConfig,
    *,
    tokens_per_expert: ArrayLike | None = None,
    grad_aux_loss: ArrayLike | None = None,
    grad_z_loss: ArrayLike | None = None,
    split: bool = False,
) -> Any:
    """The gradient of `route` for the logits.

    Parameters
    ----------
    grad_probs : ArrayLike, float32, [T, k]
        The gradient of the weights.
    logits : ArrayLike, float32, [T, E]
        The forward's.
    topk_ids : ArrayLike, int32, [T, k]
        What the forward chose. An id that is no expert's, negative or E and more, has no gradient.
    config : RouterConfig
        The forward's.
    tokens_per_expert : ArrayLike, int32, [S, E], or None
        The forward's, where there is a gradient of ``aux_loss``.
    grad_aux_loss : ArrayLike, float32, [1], or None
        The gradient of ``aux_loss``.
    grad_z_loss : ArrayLike, float32, [1], or None
        The gradient of ``z_loss``.
    split : bool
        Return three bfloat16 numbers in place of each float32: [T, 3E], the roundings of the gradient, of
        what that leaves and of what is left then, side by side, for products on tensor cores that are as
        accurate as float32's.

    Returns
    -------
    ArrayLike, float32, [T, E], or bfloat16, [T, 3E]
        Ids and the bias have no gradient.

    Raises
    ------
    TypeError
        For a wrong dtype.
    ValueError
        For a wrong shape, or a gradient of ``aux_loss`` without ``tokens_per_expert``.

    Examples
    --------
    >>> logits, ids = np.zeros((1, 2), np.float32), np.array([[1]], np.int32)
    >>> config = fp8moe.RouterConfig(1, renormalize=False)
    >>> fp8moe.route_backward(np.ones((1, 1), np.float32), logits, ids, config).tolist()
    [[-0.25, 0.25]]
    """
    call = enter(
        grad_probs=grad_probs,
        logits=logits,
        topk_ids=topk_ids,
        tokens_per_expert=tokens_per_expert,
        grad_aux_loss=grad_aux_loss,
        grad_z_loss=grad_z_loss,
    )
    a = call.args
    tokens, experts = _check(a.logits, config)
    checks.dtype("grad_probs", a.grad_probs, (checks.FLOAT32,))
    checks.shape("grad_probs", a.grad_probs, (tokens, config.topk))
    checks.dtype("topk_ids", a.topk_ids, (checks.INT32,))
    checks.shape("topk_ids", a.topk_ids, (tokens, config.topk))
    checks.expert_ids(call, "topk_ids", a.topk_ids, experts)
    if a.tokens_per_expert is not None:
        checks.dtype("tokens_per_expert", a.tokens_per_expert, (checks.INT32,))
        checks.shape("tokens_per_expert", a.tokens_per_expert, ("S", experts))
        sequences = a.tokens_per_expert.shape[0]
        if sequences == 0 or tokens % sequences:
            raise ValueError(
                f"tokens_per_expert: got {sequences} sequences for {tokens} tokens; wanted the forward's"
            )
    elif grad_aux_loss is not None:
        raise ValueError("tokens_per_expert: got None with grad_aux_loss; wanted what route returned")
    for name, grad in (("grad_aux_loss", a.grad_aux_loss), ("grad_z_loss", a.grad_z_loss)):
        if grad is not None:
            checks.dtype(name, grad, (checks.FLOAT32,))
            checks.shape(name, grad, (1,))
    split = checks.flag("split", split)
    out = call.empty(
        ArraySpec((tokens, 3 * experts), BFLOAT16) if split else ArraySpec((tokens, experts), checks.FLOAT32)
    )
    call.run(
        "router",
        "route_backward",
        a.grad_probs,
        a.logits,
        a.topk_ids,
        a.tokens_per_expert,
        a.grad_aux_loss,
        a.grad_z_loss,
        config=config,
        split=split,
        out=out,
    )
    return call.leave(out)


def _check(logits: Any, config: Any) -> tuple[int, int]:
    """(tokens, experts)."""
    checks.options("config", config, RouterConfig)
    checks.dtype("logits", logits, (checks.FLOAT32,))
    checks.shape("logits", logits, ("T", "E"))
    tokens, experts = logits.shape
    if experts > MAX_EXPERTS:
        raise ValueError(f"logits: got {experts} experts; wanted at most {MAX_EXPERTS}")
    if experts % config.num_groups:
        raise ValueError(
            f"config.num_groups: got {config.num_groups} for {experts} experts; wanted a divisor of them"
        )
    eligible = experts // config.num_groups * config.topk_groups
    if config.topk > eligible:
        raise ValueError(
            f"config.topk: got {config.topk}; wanted at most {eligible}, the experts of "
            f"{config.topk_groups} of {config.num_groups} groups"
        )
    return tokens, experts
