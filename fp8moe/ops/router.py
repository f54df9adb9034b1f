"""The router in float32, forward and backward: expert scores, top-k with and without groups, weights,
auxiliary losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from fp8moe.formats import BFLOAT16
from fp8moe.ops.plan import plan_topk
from fp8moe.records import ArrayLike, ArraySpec, Options, Record
from fp8moe.runtime import checks
from fp8moe.runtime.dispatch import enter, operation

ScoreFunction = Literal["softmax", "sigmoid"]
# one warp per token: at most 32 experts per lane, one lane per selected expert
MAX_EXPERTS, MAX_TOPK = 1024, 32


@dataclass(frozen=True)
class RouterConfig(Options):
    """How a token's experts are selected and weighted.

    Attributes
    ----------
    topk : int
        k, the number of experts per token, at most 32.
    score_function : "softmax" or "sigmoid"
        Score of the logits: softmax over all experts, or sigmoid of each logit.
    num_groups : int
        Number of groups of consecutive experts, at most 32; 1: no groups.
    topk_groups : int
        Number of groups from which a token's experts are selected: those with the largest sum of their two
        highest scores.
    renormalize : bool
        Whether the weights of a token are divided by their sum (+ 1e-20).
    scaling_factor : float
        Factor of the weights, applied after ``renormalize``.

    Raises
    ------
    TypeError, ValueError
        For invalid values. `route` also raises if topk exceeds the number of experts of the selected groups.

    Notes
    -----
    Mixtral and Qwen3-MoE: ``RouterConfig(k)``. OLMoE and Qwen2-MoE: the same with ``renormalize=False``.
    gpt-oss: ``RouterConfig(4)``, which equals its softmax over the selected logits. DeepSeek-V3 (arXiv
    2412.19437): ``RouterConfig(8, "sigmoid", num_groups=8, topk_groups=4, scaling_factor=2.5)`` with an
    expert bias.
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
    """Result of `route`.

    Attributes
    ----------
    topk_ids : ArrayLike, int32, [T, k]
        Each token's experts, by descending score; among equal scores, the lower id first. -1 for a padding
        token.
    topk_probs : ArrayLike, float32, [T, k]
        Their weights; 0 for a padding token.
    aux_loss : ArrayLike, float32, [1], or None
        Load balancing loss, without coefficient; it is 1 if all experts are selected equally often.
    z_loss : ArrayLike, float32, [1], or None
        Mean of the squared log-sum-exp of the logits.
    tokens_per_expert : ArrayLike, int32, [S, E], or None
        Number of tokens of each sequence that selected each expert, without padding.
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
    padding_mask: ArrayLike | None = None,
) -> Routed:
    """Select each token's experts and compute their weights.

    Parameters
    ----------
    logits : ArrayLike, float32, [T, E]
        Output of the router's linear layer, E at most 1024. In the selection a NaN ranks after all
        numbers. It makes NaN of the losses and of its token's weights, with sigmoid scores only if its expert
        is selected.
    config : RouterConfig
        Score function, groups and weights.
    expert_bias : ArrayLike, float32, [E], or None
        Added to the scores for the selection, but not for the weights (auxiliary-loss-free balancing, arXiv
        2408.15664).
    num_sequences : int or None
        S: compute the losses, for S consecutive sequences of equal length; 1: over all tokens. None: no
        losses. Sequences of unequal length are padded to the longest one's, with ``padding_mask``.
    padding_mask : ArrayLike, bool, [T], or None
        True where a token is padding (an attention mask of ones and zeros is its opposite: pass
        ``attention_mask == 0``). A padding token has ids -1 and weights 0, is in no loss and no count, and
        its logits, which may be NaN, get a gradient of zeros. None: no token is padding.

    Returns
    -------
    Routed
        With the losses and counts if ``num_sequences`` is given.

    Raises
    ------
    TypeError
        For a wrong dtype.
    ValueError
        For a wrong shape, too many experts or a too large topk, or if T is not a multiple of S.

    Notes
    -----
    Without bias and groups, experts are selected by their logits, which have the same order as the unrounded
    scores.

    aux_loss is the mean over sequences of E / (k L^2) * sum over experts of c[e] * P[e]. L is the sequence's
    number of tokens, c[e] the number of its tokens that selected e, and P[e] the sum over its tokens of e's
    score divided by the sum of all experts' scores. Padding tokens are in none of them, and a sequence of
    padding tokens only is not in the mean: the losses are those of the other tokens alone, and 0 without any.
    This is DeepSeek-V3's sequence-wise loss (arXiv 2412.19437, equations 17 to 20). For S = 1 it is the loss
    of Switch Transformers (arXiv 2101.03961, equation 4) divided by k; Mixtral's loss is k times it. z_loss
    is equation 5 of ST-MoE (arXiv 2202.08906).

    Examples
    --------
    >>> logits = np.log(np.array([[1.0, 2.0, 5.0], [6.0, 1.0, 1.0]], np.float32))
    >>> routed = fp8moe.route(logits, fp8moe.RouterConfig(2), num_sequences=1)
    >>> routed.topk_ids.tolist(), routed.tokens_per_expert.tolist()
    ([[2, 1], [0, 1]], [[1, 2, 1]])
    >>> routed.topk_probs.astype(float).round(3).tolist()
    [[0.714, 0.286], [0.857, 0.143]]
    """
    call = enter(logits=logits, expert_bias=expert_bias, padding_mask=padding_mask)
    a = call.args
    tokens, experts = _check(a.logits, config)
    checks.padding_mask(a.padding_mask, tokens)
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
    call.run("router", "route", a.logits, a.expert_bias, a.padding_mask, config=config, out=out)
    call.foresee(plan_topk, out.topk_ids, experts)
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
    padding_mask: ArrayLike | None = None,
    split: bool = False,
) -> Any:
    """Gradient of `route` with respect to the logits.

    Parameters
    ----------
    grad_probs : ArrayLike, float32, [T, k]
        Gradient of the weights.
    logits : ArrayLike, float32, [T, E]
        The forward's.
    topk_ids : ArrayLike, int32, [T, k]
        The forward's result. An id that is negative or at least E contributes no gradient.
    config : RouterConfig
        The forward's.
    tokens_per_expert : ArrayLike, int32, [S, E], or None
        The forward's result; required with ``grad_aux_loss``, and with ``grad_z_loss`` and ``padding_mask``:
        its sums are the numbers of tokens that are no padding.
    grad_aux_loss : ArrayLike, float32, [1], or None
        Gradient of ``aux_loss``.
    grad_z_loss : ArrayLike, float32, [1], or None
        Gradient of ``z_loss``.
    padding_mask : ArrayLike, bool, [T], or None
        The forward's.
    split : bool
        Return the float32 gradient g as three bfloat16 arrays side by side, [T, 3E]: a = bf16(g), b = bf16(g
        - a), c = bf16(g - a - b). A GEMM of them on bfloat16 tensor cores is as accurate as one in float32.

    Returns
    -------
    ArrayLike, float32, [T, E], or bfloat16, [T, 3E]
        The gradient of the logits; ids and bias have none.

    Raises
    ------
    TypeError
        For a wrong dtype.
    ValueError
        For a wrong shape, or a gradient of a loss without the ``tokens_per_expert`` that it requires.

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
        padding_mask=padding_mask,
    )
    a = call.args
    tokens, experts = _check(a.logits, config)
    checks.padding_mask(a.padding_mask, tokens)
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
                f"tokens_per_expert: got {sequences} sequences for {tokens} tokens; wanted the array that "
                "route returned"
            )
    elif grad_aux_loss is not None or (grad_z_loss is not None and padding_mask is not None):
        with_ = "grad_aux_loss" if grad_aux_loss is not None else "grad_z_loss and padding_mask"
        raise ValueError(f"tokens_per_expert: got None with {with_}; wanted the array that route returned")
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
        a.padding_mask,
        config=config,
        split=split,
        out=out,
    )
    return call.leave(out)


@operation
def add_product(addend: ArrayLike, a: ArrayLike, b: ArrayLike) -> Any:
    """addend + a @ b of bfloat16, accumulated in float32 and rounded once: the router's gradient of its rows,
    added to the experts'.

    On CUDA for compute capability 9.0 only, with K and N multiples of 8 and arrays that begin at a multiple
    of 16 bytes. torch.addmm copies the addend first, as cuBLAS's classic interface adds in place: 96 us for
    16,384 x 2048 rows and 128 experts, a copy alone 34; this takes 61.

    Parameters
    ----------
    addend : ArrayLike, bfloat16, [M, N]
    a : ArrayLike, bfloat16, [M, K]
    b : ArrayLike, bfloat16, [K, N]

    Returns
    -------
    ArrayLike, bfloat16, [M, N]
        A new array.

    Raises
    ------
    TypeError
        For a wrong dtype.
    ValueError
        For shapes that do not fit, or on CUDA for a product that the kernel does not support.
    """
    call = enter(addend=addend, a=a, b=b)
    args = call.args
    for name, array in vars(args).items():
        checks.dtype(name, array, (BFLOAT16,))
    checks.shape("addend", args.addend, ("M", "N"))
    rows, width = args.addend.shape
    checks.shape("a", args.a, (rows, "K"))
    depth = args.a.shape[1]
    if depth == 0:
        raise ValueError(f"a: got shape {args.a.shape}; wanted K of at least 1")
    checks.shape("b", args.b, (depth, width))
    out = call.empty(ArraySpec((rows, width), BFLOAT16))
    call.run("router", "add_product", args.addend, args.a, args.b, out=out)
    return call.leave(out)


def _check(logits: Any, config: Any) -> tuple[int, int]:
    """Check logits and config; returns (tokens, experts)."""
    checks.options("config", config, RouterConfig)
    checks.dtype("logits", logits, (checks.FLOAT32,))
    checks.shape("logits", logits, ("T", "E"))
    tokens, experts = logits.shape
    check_choice(config, experts, "logits")
    return tokens, experts


def check_choice(config: RouterConfig, experts: int, name: str) -> None:
    """Check that the router takes so many experts, of the argument ``name``, and that they have the
    configuration's groups, and enough experts in them."""
    if experts > MAX_EXPERTS:
        raise ValueError(
            f"{name}: got {experts} experts; wanted at most {MAX_EXPERTS} for a router; select the experts "
            "by other means, and pass topk_ids and topk_probs to the layer"
        )
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
