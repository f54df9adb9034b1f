"""The router in torch: its product in float32, and `fp8moe.route` with gradients.

torch multiplies float32 matrices without tensor cores, after a cast of x to twice its size: 0.9 ms of the
layer's 6.2 ms for 16,384 x 2048 rows and 128 experts, forward and backward. A float32 number is the sum of
three bfloat16 numbers (24 bits, 8 each), products of bfloat16 numbers are exact in float32, and tensor cores
accumulate them in float32. So one product of x with the three parts of w, concatenated, has the accuracy of
float32 (Henry, Tang and Heinecke, "Leveraging the bfloat16 artificial intelligence datatype for
higher-precision computations", ARITH 2019); a bfloat16 w has one part. The kernel that computes the gradient
of the logits writes it as three parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

from fp8moe.adapters import needs

with needs("torch"):
    import torch
from torch import Tensor, nn

import fp8moe
from fp8moe import Routed, RouterConfig
from fp8moe.adapters.torch.configs import experts_of_model
from fp8moe.adapters.torch.halves import asked_for
from fp8moe.adapters.torch.library import (
    differentiable,
    known_config,
    once_differentiable,
    operator,
    without_autocast,
)
from fp8moe.adapters.torch.operation import (
    DIFFERENTIABLE,
    check_float,
    check_tensor,
    kinds_of,
    mm_without_autocast,
    on_hopper,
    refuse_codes,
    refuse_transforms,
)
from fp8moe.adapters.torch.sharding import as_replica, local_of, own_part, replica_of
from fp8moe.ops.router import add_product, check_choice
from fp8moe.runtime import checks
from fp8moe.runtime.dispatch import known, remember
from fp8moe.runtime.interop.torch import check_memory

__all__ = ["Router", "route"]


class Router(nn.Module):
    """The router of a layer: a product with ``weight`` [E, H] in float32, and `fp8moe.route`.

    Parameters
    ----------
    hidden : int
        H, number of features.
    num_experts : int
        E, number of experts.
    config : RouterConfig
        Score function, expert groups and probabilities.
    expert_bias : bool
        Whether there is a buffer ``expert_bias`` [E], initially zero and always float32, also if the module
        is cast. It is added to the scores only for the selection of experts. To balance the load with it
        (arXiv 2408.15664), update it from ``tokens_per_expert`` of a forward with ``num_sequences``.
    device : device or None
        Device of the weight.
    dtype : dtype or None
        Dtype of the weight.

    Examples
    --------
    >>> import torch
    >>> from fp8moe import RouterConfig
    >>> from fp8moe.torch import Router
    >>> ids, probs = Router(64, 8, RouterConfig(2))(torch.ones(3, 64))
    >>> ids.shape, probs.dtype
    (torch.Size([3, 2]), torch.float32)
    """

    expert_bias: Tensor | None

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        config: RouterConfig,
        *,
        expert_bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        hidden = checks.integer("hidden", hidden, 1)
        expert_bias = checks.flag("expert_bias", expert_bias)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in DIFFERENTIABLE):
            raise TypeError(f"dtype: got {dtype}; wanted one of {', '.join(map(str, DIFFERENTIABLE))}")
        self._num_experts = checks.integer("num_experts", num_experts, 1)
        self.config = config
        self.weight = nn.Parameter(torch.empty(num_experts, hidden, device=device, dtype=dtype))
        bias = torch.zeros(num_experts, dtype=torch.float32, device=device) if expert_bias else None
        self.register_buffer("expert_bias", bias)
        self.reset_parameters()

    @classmethod
    def from_config(cls, config: Any, *, device: Any = None, dtype: torch.dtype | None = None) -> Self:
        """The router of a published model, by its configuration.

        Parameters
        ----------
        config : object or mapping
            As in `FP8FlowMoE.from_config`.
        device : device or None
            Device of the weight.
        dtype : dtype or None
            Dtype of the weight.

        Returns
        -------
        Router
            With a new weight, and an ``expert_bias`` of zeros where the model has one
            (``e_score_correction_bias`` of DeepSeek-V3 and GLM-4.5).

        Raises
        ------
        NotImplementedError, ValueError
            As `FP8FlowMoE.from_config`.

        Examples
        --------
        >>> from fp8moe.torch import Router
        >>> sizes = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4}
        >>> config = {"model_type": "mixtral", "hidden_act": "silu", "num_experts_per_tok": 2, **sizes}
        >>> Router.from_config(config).config.topk
        2
        """
        experts = experts_of_model(config)
        sizes = experts.hidden, experts.num_experts, experts.router
        return cls(*sizes, expert_bias=experts.expert_bias, device=device, dtype=dtype)

    @property
    def config(self) -> RouterConfig:
        """Score function, expert groups and probabilities; the next forward uses the one set here."""
        return self._config

    @config.setter
    def config(self, value: RouterConfig) -> None:
        checks.options("config", value, RouterConfig)
        check_choice(value, self._num_experts, "num_experts")
        self._config = value

    def reset_parameters(self) -> None:
        """Initialise the weight as `torch.nn.Linear` does, and set the bias to zeros.

        A seed gives the same weight on any number of ranks of ``fully_shard``. All ranks need the same seed.
        """
        w, local = self.weight, local_of(self.weight.detach())
        whole = torch.empty(w.shape, dtype=w.dtype, device=local.device)
        local.copy_(nn.init.kaiming_uniform_(whole, a=math.sqrt(5))[own_part(w)])
        if self.expert_bias is not None:
            self.expert_bias.zero_()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        original = self.expert_bias
        super()._apply(fn, recurse)
        converted = self.expert_bias
        if original is not None and converted is not None and converted.dtype != torch.float32:
            self.expert_bias = original.to(converted.device)  # updates of 1e-3 would be lost in bfloat16
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        refuse_codes(self, state_dict, prefix)
        if (name := prefix + "weight") in state_dict:  # of one process, or of an external router
            state_dict[name] = as_replica(state_dict[name], self.weight)
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        bias = self.expert_bias
        if bias is not None and bias.dtype != torch.float32:  # load_state_dict(assign=True) keeps the dtype
            self.expert_bias = bias.detach().float()

    def forward(
        self,
        x: Tensor,
        num_sequences: int | None = None,
        *,
        padding_mask: Tensor | None = None,
        pass_rows: bool = False,
    ) -> tuple[Tensor, ...]:
        """Select the experts of each row, in float32, also under autocast.

        Parameters
        ----------
        x : Tensor, floating point, [T, H]
            Rows of tokens.
        num_sequences : int or None
            Number of sequences of equal length in the rows, for losses, as in `fp8moe.route`.
        padding_mask : Tensor or None, bool, [T]
            True where a row is padding, as in `fp8moe.route` (of an attention mask of ones and zeros pass
            ``attention_mask == 0``). Such rows have no expert (ids -1, probabilities 0) and are in no loss
            and no count; they are read as zeros, so that NaN in them reaches no gradient.
        pass_rows : bool
            Whether to return x too, for the experts: the product that computes the router's gradient of x
            then adds the experts' gradient in the same pass.

        Returns
        -------
        tuple of Tensor
            x if pass_rows is set, ids [T, k] int32, probabilities [T, k] float32, and with ``num_sequences``
            also aux_loss [1], z_loss [1] and tokens_per_expert [S, E], as in `fp8moe.Routed`.

        Raises
        ------
        TypeError, ValueError
            As in `fp8moe.route`.
        NotImplementedError
            Inside transforms of torch.func and torch.jit.trace.
        """
        refuse_transforms("Router")
        weight: Tensor = self.weight
        if (kinds := kinds_of(x, weight)) is None or known(kinds) is None:
            check_float("x", x, 2)
            weight = replica_of("weight", weight)
            check_float("weight", weight, 2)  # one on meta would select experts by undefined numbers
            if x.ndim != 2 or x.shape[1] != weight.shape[1]:
                hidden = weight.shape[1]
                raise ValueError(
                    f"x: got shape {list(x.shape)}; wanted [T, {hidden}]; pass x.reshape(-1, {hidden})"
                )
            if kinds is not None:
                remember(kinds, True)
        else:
            check_memory("x", x)
            check_memory("weight", weight)
        pass_rows = checks.flag("pass_rows", pass_rows)
        padding = padding_of_rows(padding_mask, x)
        if padding is not None:  # zeros times NaN would be a gradient of the weight
            x = x.masked_fill(padding[:, None], 0)
        return _route_rows(x, weight, self.expert_bias, padding, self.config, num_sequences, pass_rows)

    def extra_repr(self) -> str:
        experts, hidden = getattr(self.weight, "ds_shape", self.weight.shape)  # of DeepSpeed's ZeRO-3
        return f"{hidden}, {experts}, {self.config}, expert_bias={self.expert_bias is not None}"


def route(
    logits: Tensor,
    config: RouterConfig,
    *,
    expert_bias: Tensor | None = None,
    num_sequences: int | None = None,
    padding_mask: Tensor | None = None,
) -> Routed:
    """`fp8moe.route`, with a gradient for logits through the probabilities and the losses.

    Parameters
    ----------
    logits : Tensor, float32, [T, E]
        Logits, with any strides.
    config : RouterConfig
        Score function, expert groups and probabilities.
    expert_bias : Tensor or None, float32, [E]
        Added to the scores only for the selection of experts; it has no gradient.
    num_sequences : int or None
        As in `fp8moe.route`.
    padding_mask : Tensor or None, bool, [T]
        As in `fp8moe.route`: True where a token is padding.

    Returns
    -------
    Routed
        The result of `fp8moe.route`.

    Raises
    ------
    TypeError, ValueError
        As in `fp8moe.route`.
    NotImplementedError
        Inside transforms of torch.func.

    Examples
    --------
    >>> import torch
    >>> from fp8moe import RouterConfig
    >>> import fp8moe.torch
    >>> routed = fp8moe.torch.route(torch.tensor([[0.0, 3.0, 0.0]]), RouterConfig(1))
    >>> routed.topk_ids.item(), routed.topk_probs.item()
    (1, 1.0)
    """
    refuse_transforms("route")
    check_tensor("logits", logits)
    checks.options("config", config, RouterConfig)
    if expert_bias is not None:
        check_tensor("expert_bias", expert_bias)
    bias = None if expert_bias is None else expert_bias.detach()
    padding = padding_of_rows(padding_mask, logits)
    return Routed(*_route_with_grad(logits.contiguous(), bias, padding, _scalars_of(config), num_sequences))


def padding_of_rows(padding_mask: Any, x: Tensor) -> Tensor | None:
    """A mask of x's padding tokens as [T]: it has x's leading dimensions, or one for all tokens."""
    if padding_mask is None:
        return None
    check_tensor("padding_mask", padding_mask)
    if padding_mask.dtype != torch.bool:
        raise TypeError(f"padding_mask: got dtype {padding_mask.dtype}; wanted torch.bool, {checks.PADDING}")
    if padding_mask.device != x.device:
        raise TypeError(
            f"padding_mask: got a tensor on {padding_mask.device}; wanted {x.device}, where the tokens are; "
            f"pass padding_mask.to({str(x.device)!r})"
        )
    leading = x.shape[:-1]
    if padding_mask.shape not in (leading, (math.prod(leading),)):
        raise ValueError(
            f"padding_mask: got shape {list(padding_mask.shape)}; wanted {list(leading)}, one element for "
            f"each token; a mask is not broadcast"
        )
    return padding_mask.reshape(-1).contiguous()


def parts(a: Tensor) -> list[Tensor]:
    """bfloat16 tensors whose sum is ``a``: ``a`` itself, or three parts of a float32 tensor (exact if the
    third is normal)."""
    if a.dtype == torch.bfloat16:
        return [a]
    high = a.bfloat16()
    rest = a - high
    middle = rest.bfloat16()
    return [high, middle, (rest - middle).bfloat16()]


# ---------------------------------------------------------------- the product


def _on_tensor_cores(x: Tensor, w: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.bfloat16 and w.dtype in (torch.bfloat16, torch.float32)


def _product(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and w's parts one below the other, for the backward; w itself if it has one."""
    if w.dtype == torch.bfloat16:
        return torch.mm(x, w.t(), out_dtype=torch.float32), w
    parts_of_w = torch.cat(parts(w))
    logits = torch.mm(x, parts_of_w.t(), out_dtype=torch.float32)
    return logits.view(x.shape[0], 3, len(w)).sum(dim=1), parts_of_w


def _product_backward(
    grad: Tensor,
    x: Tensor,
    w: Tensor,
    parts_of_w: Tensor,
    added_to: Tensor | None = None,
    requested: Sequence[bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None]:
    """(dx, dw) for the gradient of the logits, given as three concatenated parts [T, 3 E] in bfloat16.
    parts_of_w: of `_product`. added_to: another gradient of x, to which dx is added. requested: which of the
    two to compute; the other is None."""
    experts, dw = len(w), None
    if requested[1]:
        dw = torch.mm(grad.t(), x, out_dtype=torch.float32).view(3, experts, -1).sum(dim=0).to(w.dtype)
    if not requested[0]:
        return None, dw
    if w.dtype == torch.bfloat16:
        pair = grad, torch.cat([w, w, w])
    else:
        # only significant products of parts (i, j), i + j < 3: each further part is smaller by 2^-8
        high, middle, low = grad.split(experts, dim=1)
        pair = (
            torch.cat([high, high, high, middle, middle, low], dim=1),
            torch.cat([parts_of_w, *(parts_of_w.narrow(0, 0, n * experts) for n in (2, 1))]),
        )
    return torch.mm(*pair) if added_to is None else _sum.run(added_to, *pair), dw


def _same_shape(addend: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return addend.new_empty(addend.shape)


@operator("add_product", fake=_same_shape, flops=lambda addend, a, b: 2 * a.numel() * b.shape[1])
def _sum(addend: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """addend + a @ b, rounded once: by `fp8moe.ops.router.add_product` where it has a kernel, as that does
    not copy addend first. An operator, because Inductor may round addmm's product before it
    adds."""
    if on_hopper(a) and all(_fits_kernel(t) for t in (addend, a, b)):
        return add_product(addend, a, b)  # type: ignore[no-any-return]
    return torch.addmm(addend, a, b)


def _fits_kernel(t: Tensor) -> bool:
    """Whether `fp8moe.ops.router.add_product` takes an operand."""
    return t.is_contiguous() and t.numel() > 0 and t.shape[1] % 8 == 0 and t.data_ptr() % 16 == 0


# ---------------------------------------------------------------- the selection of experts


def _scalars_of(config: RouterConfig) -> tuple[Any, ...]:
    """A configuration as plain values, for functions that a compiler traces."""
    groups = config.num_groups, config.topk_groups
    return config.topk, config.score_function, *groups, config.renormalize, config.scaling_factor


def _config_of(scalars: tuple[Any, ...]) -> RouterConfig:
    """The inverse of `_scalars_of`, for values that may be symbolic in a compiler."""
    topk, function, groups, of_groups, renormalize, factor = scalars
    return known_config(int(topk), function, int(groups), int(of_groups), renormalize, float(factor))


@operator("route")
def _route(
    logits: Tensor,
    expert_bias: Tensor | None,
    padding_mask: Tensor | None,
    config: RouterConfig,
    num_sequences: int | None,
) -> list[Any]:
    options: Any = {"expert_bias": expert_bias, "padding_mask": padding_mask}
    routed = fp8moe.route(logits, config, num_sequences=num_sequences, **options)
    return [routed.topk_ids, routed.topk_probs, routed.aux_loss, routed.z_loss, routed.tokens_per_expert]


@operator("route_backward")
def _route_backward(
    grad_probs: Tensor,
    logits: Tensor,
    topk_ids: Tensor,
    tokens_per_expert: Tensor | None,
    grad_aux_loss: Tensor | None,
    grad_z_loss: Tensor | None,
    padding_mask: Tensor | None,
    config: RouterConfig,
    split: bool,
) -> Tensor:
    losses: Any = {"tokens_per_expert": tokens_per_expert, "grad_aux_loss": grad_aux_loss}
    losses |= {"grad_z_loss": grad_z_loss, "padding_mask": padding_mask}
    return fp8moe.route_backward(grad_probs, logits, topk_ids, config, split=split, **losses)


def _forward(
    ctx: Any, logits: Any, bias: Any, padding: Any, config: Any, num_sequences: Any, *others: Any
) -> Any:
    """Forward of a `torch.autograd.Function`. It saves the tensors for `_gradient` and ``others``, for the
    caller."""
    results = tuple(_route.run(logits, bias, padding, _config_of(config), num_sequences))
    ids, counts = results[0], results[4:]
    ctx.mark_non_differentiable(ids, *counts)
    ctx.save_for_backward(logits, ids, padding, *others, *counts)
    ctx.config = config
    return results


def _gradient(ctx: Any, saved: Any, grads: Any, split: bool) -> Tensor:
    """Gradient of the logits. saved: logits, ids, mask and counts. grads: gradients of the results of
    `_forward`."""
    logits, ids, padding, *counts = saved
    _, dprobs, *loss_grads = grads
    loss_grads = loss_grads[:2] or (None, None)
    counts = counts[0] if counts else None
    config = _config_of(ctx.config)
    losses = counts, *loss_grads, padding
    return _route_backward.run(dprobs.contiguous(), logits, ids, *losses, config, split)  # type: ignore[no-any-return]


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Any, bias: Any, padding: Any, config: Any, num_sequences: Any) -> Any:
        return _forward(ctx, logits, bias, padding, config, num_sequences)

    @staticmethod
    @torch.compiler.disable
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return _gradient(ctx, ctx.saved_tensors, grads, False), None, None, None, None


class _RouteRows(torch.autograd.Function):
    """Product and selection in one function, so that the gradient of the logits is computed as three parts
    directly; the first result is x itself, if pass_rows is set."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, w: Any, bias: Any, padding: Any, config: Any, num_sequences: Any, pass_rows: bool
    ) -> Any:
        ctx.pass_rows = pass_rows
        with without_autocast(x):
            logits, parts_of_w = _product(x, w)
            results = _forward(ctx, logits, bias, padding, config, num_sequences, x, w, parts_of_w)
        return (x.view_as(x), *results) if pass_rows else results

    @staticmethod
    @torch.compiler.disable
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        logits, ids, padding, x, w, parts_of_w, *counts = ctx.saved_tensors
        row_grad, grads = (grads[0], grads[1:]) if ctx.pass_rows else (None, grads)
        grad = _gradient(ctx, (logits, ids, padding, *counts), grads, True)
        with without_autocast(x):
            return *_product_backward(grad, x, w, parts_of_w, row_grad, asked_for(ctx)), *[None] * 5


_route_with_grad = differentiable(_Route)
_route_rows_with_grad = differentiable(_RouteRows)


def _route_rows(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    padding: Tensor | None,
    config: RouterConfig,
    num_sequences: int | None,
    pass_rows: bool,
) -> tuple[Tensor, ...]:
    scalars = _scalars_of(config)
    if _on_tensor_cores(x, w):
        return tuple(_route_rows_with_grad(x, w, bias, padding, scalars, num_sequences, pass_rows))
    logits = mm_without_autocast(x.float(), w.float().t())
    results = _route_with_grad(logits, bias, padding, scalars, num_sequences)
    return (x, *results) if pass_rows else tuple(results)
