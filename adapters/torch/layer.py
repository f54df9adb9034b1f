"""The expert layer as a torch module: a router, the weights of its experts, and their call."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

from fp8moe.adapters import needs

with needs("torch"):
    import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fp8moe import Quantized, QuantTensor, RouterConfig
from fp8moe.activation import SWIGLU, Activation
from fp8moe.adapters.torch.arguments import check_backend, handle_of
from fp8moe.adapters.torch.configs import experts_of_model
from fp8moe.adapters.torch.experts import like_of
from fp8moe.adapters.torch.frozen import FrozenWeight, refuse_broadcast, row_codes, tensors_of
from fp8moe.adapters.torch.functional import apply_experts
from fp8moe.adapters.torch.lora import check_lora
from fp8moe.adapters.torch.low_rank import LowRank, pair_of
from fp8moe.adapters.torch.operands import FP8_BLOCK, Operands, round_up_to_block
from fp8moe.adapters.torch.operation import (
    check_float,
    check_tensor,
    kinds_of,
    refuse_codes,
    refuse_partitioned,
    refuse_transforms,
)
from fp8moe.adapters.torch.router import Router, padding_of_rows
from fp8moe.adapters.torch.sharding import (
    Ranks,
    as_shard,
    check_own_experts,
    checksum,
    is_whole,
    local_of,
    own_experts,
    own_part,
    replicated,
    shard_of,
)
from fp8moe.adapters.torch.stats import Collector, LayerStats
from fp8moe.adapters.torch.weights import (
    FP8Weights,
    Holder,
    codes_of,
    in_words,
    is_capturing,
    is_freed,
    weights_of,
    weights_unchanged,
)
from fp8moe.expert_parallel.protocols import capacity_of
from fp8moe.layer.options import LayerOptions
from fp8moe.layer.recipes import GRADIENTS, Recipe, RecipeName
from fp8moe.runtime import checks
from fp8moe.runtime.dispatch import known, remember

__all__ = ["FP8FlowMoE"]

_DTYPES = torch.bfloat16, torch.float16, torch.float32  # of weights


def _option(name: str) -> Any:
    """A property of a layer: one of its `LayerOptions`, checked when it is set."""

    def read(layer: FP8FlowMoE) -> Any:
        return getattr(layer._options, name)

    def write(layer: FP8FlowMoE, value: Any) -> None:
        layer._set_option(name, value)

    return property(read, write, doc=f"As in the constructor; the next forward uses the ``{name}`` set here.")


def _fixed(name: str, doc: str) -> Any:
    """A property of a layer that only its constructor sets."""

    def read(layer: FP8FlowMoE) -> Any:
        return getattr(layer, name)

    def write(layer: FP8FlowMoE, value: Any) -> None:
        raise AttributeError(
            f"{name[1:]}: got {value}; wanted {getattr(layer, name)}, the weights' size, which the "
            "constructor sets; make a layer of the other size"
        )

    return property(read, write, doc=doc)


def _without_own_state(attributes: dict[str, Any]) -> dict[str, Any]:
    """A layer's attributes but those of `FP8FlowMoE._own_state`."""
    own = ("_handle", "_collector", "_fp8_weights")
    return {name: value for name, value in attributes.items() if name not in own}


def _row_codes(frozen: Any) -> tuple[QuantTensor, ...]:
    if type(frozen) not in (tuple, list) or len(frozen) != 2:
        raise TypeError(f"frozen: got {type(frozen).__name__}; wanted two Quantized, of w13 and of w2")
    return tuple([row_codes(name, w) for name, w in zip(("w13", "w2"), frozen, strict=True)])


def _check_width(recipe: Recipe, ffn: int) -> None:
    if recipe.quantizes and not recipe.gradient_in_parts and ffn % FP8_BLOCK[1]:
        raise ValueError(
            f"ffn: got {ffn}; wanted a multiple of 128 for {recipe.name!r}; "
            'pass recipe="fp8_flow", which pads with zeros'
        )


class FP8FlowMoE(nn.Module):
    """Top-k routed experts as a module, with router and quantised weights.

    y[t] = sum of prob * w2[e] @ (silu(gate) * up) over t's experts e, with [gate, up] = w13[e] @ x[t].

    Parameters
    ----------
    hidden : int
        H, any size for "fp8_flow" and "bf16". Multiples of 128 are fastest.
    ffn : int
        F, any size for "fp8_flow" and "bf16", a multiple of 128 for "fp8_blockwise". Otherwise the FP8 copies
        of the weights are padded with zeros to the next multiple of 128.
    num_experts : int
        E, over all ranks.
    topk : int
        Number of experts per token.
    recipe : "fp8_flow", "fp8_blockwise" or "bf16"
        "fp8_flow": two casts (arXiv 2511.02302). "fp8_blockwise": a baseline that requantises. "bf16": this
        library's products on Hopper, torch's grouped matrix product on other architectures.
    recompute : None or "moe_expert"
        "moe_expert" saves only the input of the first product for the backward.
    save : "bf16" or "fp8"
        "fp8" saves the first product's result for the backward as FP8 codes, as in `fp8moe.moe_forward`.
    normalize_probs : bool
        Whether the selected experts' probabilities are renormalised to sum to one.
    activation : Activation
        Activation between the two products; w13 is [E, F, H] for one without a gate.
    backend : "wgmma", "mma", "cublas", "plain" or None
        Kernels of all products, the backward's included, as described in `fp8moe.grouped_gemm` ("cublas"
        synchronises); None: the fastest. With "bf16", None may also select torch's grouped product where that
        is faster, and a name selects this library's kernels. If the backend does not support these products
        on x's device, the forward raises before any work.
    num_sms : int or None
        Maximum number of SMs that each product may use, the backward's included, as in `fp8moe.moe_forward`,
        to leave the others to work on another stream. If a product cannot respect it, the forward raises.
        With "bf16" a number selects this library's kernels.
    weight_copies : "both" or "rowwise"
        Orientations of the FP8 weights that are made, kept and saved, as in `fp8moe.moe_forward`: "rowwise"
        takes one byte a weight in place of two, and each backward derives the other orientation.
    process_group : ProcessGroup, DeviceMesh, Transport or None
        The ranks of expert parallelism: a process group, a one-dimensional DeviceMesh, or a
        `fp8moe.expert_parallel.Transport` such as `fp8moe.torch` provides. Each
        rank has an equal share of the num_experts experts. The parameters are DTensors over these ranks: w13
        and w2 sharded along the experts, the router's weight replicated. So torch.distributed.checkpoint
        saves all experts and can load them on another number of ranks, torch's optimizers and
        ``clip_grad_norm_`` take all of them together, and ``fully_shard`` over another dimension of the mesh
        can be combined with it (see `fp8moe.torch`, which also has optimizer groups and
        gradient clipping for models that contain plain tensors too). State dicts with plain tensors, of all
        experts or of this rank's, can be loaded. With "fp8_flow" rows are sent in FP8. The host reads the row
        counts in every forward, so the forward cannot be captured in a CUDA graph, unless it is given a
        `fp8moe.torch.ProcessGroup` with a ``capacity``. The gradients of all parameters
        are sums over the ranks: those of w13 and w2 by themselves, the router's by an all-reduce in the
        layer's backward. Divide them by the number of ranks where those of the rest of the model are
        averaged. All ranks must run the backward, and x must require a gradient on all of them or on none,
        because the backward exchanges rows too; the forward raises if their gradients differ, except with a
        ``capacity`` or an Engine.
    overlap_chunks : int
        Number of chunks into which the tokens are divided, with a process_group: the exchange of one chunk
        overlaps the products of another, in forward and backward. y and x's gradient are bitwise equal to
        those without chunks; the weight gradients are sums over chunks in float32, and each chunk has FP8
        transpose tiles of its own. Not supported in compiled code.
    router : bool or RouterConfig
        Configuration of the router; True: a softmax over all experts and its k largest values. A
        `fp8moe.RouterConfig` with this topk selects other scores, groups or weights. False creates no router
        and no router parameters: the forward then requires topk_ids and topk_probs. For auxiliary losses or a
        balancing bias, use a `fp8moe.torch.Router` in the model with router=False here.
    device : device or None
        Device of the parameters.
    dtype : dtype or None
        Dtype of the master weights w13 [E, 2F, H] and w2 [E, H, F] and of the router's weight: bfloat16,
        float16 or float32, in the bf16 recipe also float64; None: torch's default dtype. The state dict
        contains only these.
    frozen : tuple of two Quantized, or None
        Codes and scales of w13 and w2 of this rank's experts, which the layer has in place of master weights,
        in this memory; `from_quantized` describes such a layer, and takes the sizes from them. Requires
        weight_copies="rowwise".

    Notes
    -----
    The FP8 copies of the weights (both orientations, 2 bytes per weight) are made in every forward from the
    current weights, however those were written; version counters are not relied on. The backward uses the
    codes of its forward, even if the weights have changed since: the transposed half (1 byte per weight; with
    recompute also w13's other half) is saved for backward, and the rest is released after the forward, as are
    all copies of a forward without gradients. A CUDA graph captures the quantisation, so a replay uses the
    current weights. If the weights do not change between several forwards, one set of copies can serve them
    all:

        for batch in batches:                                    # gradient accumulation
            with weights_unchanged(model):                       # all FP8FlowMoE layers of a model
                for micro_batch in batch.chunk(4):
                    loss(model(micro_batch)).backward()
            optimizer.step(), optimizer.zero_grad()

    `weights_unchanged` accepts a single layer too, and ``layer(x, is_first_microbatch=...)`` (Transformer
    Engine's convention) is an alternative for loops that cannot use a context manager. The copies then exist
    for the whole duration of the context: 2 bytes per weight for all layers at once, of the unsharded weights
    under `fully_shard`. Inside the context, a forward raises if it detects that a weight has changed; writes
    through ``.data`` or other memory cannot be detected and must not occur. `quantize_weights` makes copies
    for forwards without gradients, and updates the copies that a CUDA graph reads.

    If a parameter has a tensor ``main_grad`` (its shape, any floating-point dtype; Megatron's convention),
    the matrix product adds its gradient to that and sets ``grad_added_to_main_grad``; its ``grad`` remains
    None. A ``main_grad`` of the shards of `fully_shard` is not used: the forward reads other parameters,
    without the attribute. Without a ``main_grad`` the product adds to an existing ``grad``, as
    `set_fuse_wgrad_accumulation` says.

    ``collect_stats`` may be set at any time; while it is true, in eager mode, `stats` returns the
    quantisation losses and expert loads of the last forward and backward.

    `torch.compile` compiles the layer into one graph (``fullgraph=True``), also with a process_group that is
    not an Engine. The FP8 copies of each weight, the experts and their gradient are one operator each. The
    first number of tokens is compiled with static sizes and the second one with dynamic sizes; of further
    numbers only 0 and 1 recompile, because torch specialises them.

    Examples
    --------
    >>> import torch
    >>> from fp8moe.torch import FP8FlowMoE
    >>> layer = FP8FlowMoE(hidden=64, ffn=96, num_experts=4, topk=2)
    >>> x = torch.randn(2, 10, 64, requires_grad=True)
    >>> layer(x).sum().backward()
    >>> layer.w13.grad.shape, layer.w2.grad.shape
    (torch.Size([4, 192, 64]), torch.Size([4, 64, 96]))
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        num_experts: int,
        topk: int,
        *,
        recipe: RecipeName = "fp8_flow",
        recompute: str | None = None,
        save: str = "bf16",
        normalize_probs: bool = True,
        activation: Activation = SWIGLU,
        backend: str | None = None,
        num_sms: int | None = None,
        weight_copies: str = "both",
        process_group: Any = None,
        overlap_chunks: int = 1,
        router: bool | RouterConfig = True,
        device: Any = None,
        dtype: torch.dtype | None = torch.float32,
        frozen: tuple[Quantized, Quantized] | None = None,
    ):
        super().__init__()
        self._options = LayerOptions(activation, recipe, recompute, save, backend, num_sms, weight_copies)
        hidden, ffn = checks.integer("hidden", hidden, 1), checks.integer("ffn", ffn, 1)
        self._is_frozen = frozen is not None
        self._check_options(self._options, ffn)
        num_experts = checks.integer("num_experts", num_experts, 1, checks.MAX_EXPERTS)
        topk = checks.integer("topk", topk, 1)
        if topk > num_experts:
            raise ValueError(f"topk: got {topk}; wanted 1 to num_experts = {num_experts}")
        self._hidden, self._ffn, self._num_experts, self._topk = hidden, ffn, num_experts, topk
        normalize_probs = checks.flag("normalize_probs", normalize_probs)
        codes = () if frozen is None else _row_codes(frozen)
        if codes and device is None:
            device = codes[0].data.device
        options = {"device": device, "dtype": dtype}
        accepted = (*_DTYPES, torch.float64) if not self._options.precision.quantizes else _DTYPES
        given = torch.get_default_dtype() if dtype is None else dtype
        if not isinstance(given, torch.dtype) or given not in accepted:
            fix = '; pass recipe="bf16"' if given is torch.float64 else ""
            raise TypeError(f"dtype: got {dtype}; wanted one of {', '.join(map(str, accepted))}{fix}")
        if router is True:
            router = RouterConfig(topk, renormalize=normalize_probs)
        elif router is not False:
            checks.options("router", router, RouterConfig)
            if router.topk != topk or not normalize_probs:
                raise ValueError(
                    f"router: got topk={router.topk} with topk={topk}, normalize_probs={normalize_probs}; "
                    "wanted the same topk, and the RouterConfig's renormalize in place of normalize_probs"
                )
        self.router = Router(hidden, num_experts, router, **options) if router else None
        self._ranks = ranks = Ranks(
            process_group,
            torch.empty(0, device=device).device,
            checks.integer("overlap_chunks", overlap_chunks, 1),
        )
        if num_experts % ranks.size:
            raise ValueError(
                f"num_experts: got {num_experts}; wanted a multiple of {ranks.size}, the group's ranks"
            )
        if self.router is not None and ranks.mesh is not None:
            self.router.weight = replicated(self.router.weight, ranks.mesh)
        self.w13: Any  # parameters, or two FrozenWeights
        self.w2: Any
        if not codes:
            self.w13 = self._weight(num_experts, activation.columns(ffn), hidden, **options)
            self.w2 = self._weight(num_experts, hidden, ffn, **options)
        else:
            self.w13, self.w2 = (FrozenWeight(q, ranks.mesh).to(device) for q in codes)
            self._check_weights(self.w13, self.w2)
        self.lora: nn.ModuleDict | None = None
        self.register_load_state_dict_pre_hook(_shards_given)
        self._own_state()
        self._checksum: tuple[Any, int] | None = None  # the router's configuration and checksum
        self._collect_stats = False
        if type(self).reset_parameters is FP8FlowMoE.reset_parameters:
            self._reset_experts()  # the router has drawn its numbers, as there before those of the experts
        else:
            self.reset_parameters()

    @classmethod
    def from_config(cls, config: Any, *, router: bool = True, **options: Any) -> Self:
        """The routed experts of a published model, by its configuration.

        Parameters
        ----------
        config : object or mapping
            A configuration of transformers, or the contents of a ``config.json``, of model_type "mixtral",
            "olmoe", "qwen2_moe", "qwen3_moe", "deepseek_v3" or "glm4_moe". Read are the sizes
            (``hidden_size``, ``moe_intermediate_size`` or ``intermediate_size``, and ``num_experts`` or its
            other names) and what the model's router needs.
        router : bool
            False for a layer without a router. The routers of "deepseek_v3" and "glm4_moe" add a bias to the
            scores, so they are modules of their own: `Router.from_config`.
        **options : Any
            As in the constructor: ``recipe``, ``recompute``, ``backend``, ``num_sms``, ``weight_copies``,
            ``process_group``, ``overlap_chunks``, ``device``, ``dtype``.

        Returns
        -------
        FP8FlowMoE
            With new weights. Shared experts, such as those of Qwen2-MoE and DeepSeek-V3, are not part of it.

        Raises
        ------
        NotImplementedError
            For another model_type, an activation other than SiLU, or a router with a bias.
        ValueError
            For a configuration that lacks a value, or invalid options.

        Examples
        --------
        >>> from fp8moe.torch import FP8FlowMoE
        >>> sizes = {"hidden_size": 64, "moe_intermediate_size": 48, "num_experts": 4}
        >>> router = {"num_experts_per_tok": 2, "norm_topk_prob": True}
        >>> config = {"model_type": "qwen3_moe", "hidden_act": "silu", **sizes, **router}
        >>> layer = FP8FlowMoE.from_config(config)
        >>> layer.w13.shape, layer.topk
        (torch.Size([4, 96, 64]), 2)
        """
        experts = experts_of_model(config)
        if checks.flag("router", router) and experts.expert_bias:
            raise NotImplementedError(
                "router: got True for a model whose router adds a bias to the scores; wanted False; route by "
                "fp8moe.torch.Router.from_config(config), and pass its ids and probs"
            )
        sizes = experts.hidden, experts.ffn, experts.num_experts, experts.router.topk
        return cls(*sizes, router=router and experts.router, **options)

    @classmethod
    def from_quantized(
        cls,
        w13: Quantized,
        w2: Quantized,
        topk: int,
        *,
        ffn: int | None = None,
        num_experts: int | None = None,
        **options: Any,
    ) -> Self:
        """Experts that are frozen and exist as FP8 codes and scales only, one byte a weight.

        Gradients flow through them to x, the probabilities and the router. Codes and scales are buffers, in
        the memory of the records: ``w13.weight``, ``w13.weight_scale_inv`` and those of w2, which are also
        their names in state dicts, there as float8_e4m3fn and float32. ``to(dtype)``, ``bfloat16()`` and
        others change the router alone. Each backward derives the orientation that it multiplies by, for one
        weight after the other. `weights_unchanged`, `quantize_weights` and ``is_first_microbatch`` have
        nothing to do, and are accepted.

        Parameters
        ----------
        w13 : Quantized, e4m3, [E, 2F, H]
            Of `fp8moe.from_block_fp8`, `fp8moe.from_mxfp4` or `fp8moe.quantize_weights`, as torch's tensors;
            only the row-wise codes are used. [E, F, H] for an activation without a gate.
        w2 : Quantized, e4m3, [E, H, F]
            As ``w13``.
        topk : int
            Number of experts per token.
        ffn : int or None
            F, if the records fill it up with zeros to the next multiple of 128; None: that of the records.
        num_experts : int or None
            With a ``process_group``: E over all ranks, where the records are of this rank's experts. None:
            the records have all experts, of which none are on other ranks.
        **options : Any
            As in the constructor: ``recipe``, an FP8 one, ``recompute``, ``save``, ``activation``,
            ``backend``, ``num_sms``, ``process_group``, ``overlap_chunks``, ``router``, ``normalize_probs``,
            ``device`` (None: that of the records), and ``dtype``, of the router's weight.

        Returns
        -------
        FP8FlowMoE
            The layer, with a new router.

        Raises
        ------
        TypeError
            For other records or dtypes; in the forward for weights that have been replaced by others.
        ValueError
            For sizes that do not fit, recipe "bf16" and weight_copies "both".

        Examples
        --------
        >>> import torch
        >>> from fp8moe.torch import FP8FlowMoE, quantize_fp8_weights
        >>> w13, w2 = quantize_fp8_weights(torch.randn(4, 256, 64), torch.randn(4, 64, 128))
        >>> layer = FP8FlowMoE.from_quantized(w13, w2, topk=2)
        >>> x = torch.randn(10, 64, requires_grad=True)
        >>> layer(x).sum().backward()
        >>> x.grad.shape
        torch.Size([10, 64])
        >>> [*layer.state_dict()][1:]  # after the router's
        ['w13.weight', 'w13.weight_scale_inv', 'w2.weight', 'w2.weight_scale_inv']
        """
        row_codes("w13", w13)
        experts, hidden, width = row_codes("w2", w2).shape
        sizes = hidden, width if ffn is None else ffn, experts if num_experts is None else num_experts, topk
        return cls(*sizes, frozen=(w13, w2), **{"weight_copies": "rowwise"} | options)

    hidden = _fixed("_hidden", "H, the number of features.")
    ffn = _fixed("_ffn", "F, the width of an expert.")
    num_experts = _fixed("_num_experts", "E, over all ranks.")
    recipe = _option("recipe")
    recompute = _option("recompute")
    save = _option("save")
    activation = _option("activation")
    backend = _option("backend")
    num_sms = _option("num_sms")
    weight_copies = _option("weight_copies")

    @property
    def topk(self) -> int:
        """Number of experts per token, the router's."""
        return self.router.config.topk if isinstance(self.router, Router) else self._topk

    @topk.setter
    def topk(self, value: int) -> None:
        if not isinstance(self.router, Router):
            raise AttributeError(
                f"topk: got {value} in a layer without a `Router`; wanted {self._topk}, as it was made; make "
                "a layer with another topk"
            )
        self.router.config = replace(self.router.config, topk=value)

    @property
    def collect_stats(self) -> bool:
        """Whether forwards and backwards in eager mode collect the statistics that `stats` returns."""
        return self._collect_stats

    @collect_stats.setter
    def collect_stats(self, value: bool) -> None:
        self._collect_stats = checks.flag("collect_stats", value)

    def _set_option(self, name: str, value: Any) -> None:
        options = replace(self._options, **{name: value})
        self._check_options(options, self._ffn)
        if options.activation.gated != (gated := self._options.activation.gated):
            raise ValueError(
                f"activation: got {value}; wanted one {'with' if gated else 'without'} a gate, by w13's "
                "shape; make a layer with this activation"
            )
        old = self._options
        if (options.recipe, options.weight_copies) != (old.recipe, old.weight_copies):
            weights_of(self).release()
        self._options = options

    def _check_options(self, options: LayerOptions, ffn: int) -> None:
        _check_width(options.precision, ffn)
        if not self._is_frozen:
            return
        if not options.precision.quantizes:
            raise ValueError(
                f"recipe: got {options.recipe!r} for frozen FP8 codes; wanted an FP8 recipe; for another one "
                "load fp8moe.torch.dequantize(w13.rowwise) and w2's into FP8FlowMoE(...)"
            )
        if options.keeps_columnwise:
            raise ValueError(
                f"weight_copies: got {options.weight_copies!r} for frozen FP8 codes, of which the layer has "
                "one orientation; wanted 'rowwise'"
            )

    def _weight(self, experts: int, *shape: int, **options: Any) -> nn.Parameter:
        local = torch.empty(experts // self._ranks.size, *shape, **options)
        return nn.Parameter(local) if self._ranks.mesh is None else shard_of(local, self._ranks.mesh)

    def reset_parameters(self) -> None:
        """Initialise all weights from the normal distribution with variance 1 / fan-in.

        Random numbers are drawn expert by expert, so a seed gives the same weights on any number of ranks,
        whether of expert parallelism or of ``fully_shard``, and those that the constructor gives. All ranks
        need the same seed. Frozen FP8 codes stay as they are.
        """
        if self.router is not None:
            self.router.reset_parameters()
        self._checksum = None
        self._reset_experts()
        adapters: Any = () if self.lora is None else self.lora.values()
        for adapter in adapters:
            adapter.reset_parameters()

    def _reset_experts(self) -> None:
        for name in () if self._is_frozen else ("w13", "w2"):
            w = getattr(self, name)
            std, (own, rows, columns) = 1 / math.sqrt(w.shape[-1]), own_part(w)
            with torch.no_grad():
                local = local_of(w)
                for expert in range(self.num_experts):
                    weight = torch.empty(w.shape[1:], dtype=w.dtype, device=local.device).normal_(std=std)
                    if own.start <= expert < own.stop:
                        local[expert - own.start].copy_(weight[rows, columns])

    def forward(
        self,
        x: Tensor,
        topk_ids: Tensor | None = None,
        topk_probs: Tensor | None = None,
        *,
        padding_mask: Tensor | None = None,
        is_first_microbatch: bool | None = None,
    ) -> Tensor:
        """Compute the experts of tokens.

        Parameters
        ----------
        x : Tensor, any floating-point dtype, [..., H]
            Tokens, multiplied as bfloat16.
        topk_ids : Tensor or None, int32 or int64, [T, k]
            With ``topk_probs``: expert ids of another router, used instead of this layer's.
        topk_probs : Tensor or None, floating point, [T, k]
            With ``topk_ids``: their probabilities.
        padding_mask : Tensor or None, bool, [T] or x's leading dimensions
            True where a token is padding, as in `fp8moe.route` (of an attention mask of ones and zeros pass
            ``attention_mask == 0``). Such tokens go to no expert: their outputs and gradients are zeros, and
            no weight gets a gradient from them, whatever their values and ids.
        is_first_microbatch : bool or None
            True quantises the weights and keeps the copies; False uses the copies of the last forward with
            True, whose weights must be unchanged; None quantises the weights for this forward only, or uses
            the copies of `weights_unchanged` inside it. A forward with gradients and None releases the copies
            that True kept. Compiled code accepts None only.

        Returns
        -------
        Tensor, [..., H]
            The outputs in x's dtype and shape.

        Raises
        ------
        TypeError, ValueError
            For a wrong dtype or shape; for a backend that does not support these products on x's device, or a
            num_sms that it cannot respect.
        RuntimeError
            For False if there are no copies, or if a change of the weights is detected.
        NotImplementedError
            Inside transforms of torch.func.
        """
        if (topk_ids is None) != (topk_probs is None):
            raise ValueError("topk_ids, topk_probs: got one of them; wanted both, or neither")
        refuse_transforms("FP8FlowMoE")
        if is_first_microbatch is not None:
            is_first_microbatch = checks.flag("is_first_microbatch", is_first_microbatch)
        weights = self.w13, self.w2  # read once: a parametrization may compute other values at each access
        if (how := self._how(x, *weights)) is None or known(how) is None:
            self._check(x, *weights)
            if how is not None:
                remember(how, True)
        tokens, announced = x if x.ndim == 2 else x.reshape(-1, self._hidden), None
        padding = padding_of_rows(padding_mask, x)
        if topk_ids is None or topk_probs is None:
            self._check_router()
            announced = self._announced()
            routed = self.route(tokens) if padding is None else self.route(tokens, padding_mask=padding)
            if len(routed) != 3:
                raise ValueError(
                    f"route: got {len(routed)} results; wanted (rows, ids, probabilities); return the tokens "
                    "before the other two"
                )
            tokens, topk_ids, topk_probs = routed
        if padding is not None:
            check_tensor("topk_ids", topk_ids)
            if topk_ids.shape[:-1] == padding.shape:  # the experts refuse other shapes
                topk_ids = topk_ids.masked_fill(padding[:, None], -1)
        traced = torch.compiler.is_compiling() and self.lora is None
        compute = self._compute if traced else self._compute_eagerly
        y = compute(tokens, topk_ids, topk_probs, weights, is_first_microbatch, announced, how)
        if y.dtype == x.dtype and y.shape == x.shape:
            return y
        # not a view: an in-place operation on a view would remove the hooks that fully_shard registers on y
        return torch.ops.aten._unsafe_view.default(y.to(x.dtype), x.shape)  # type: ignore[no-any-return]

    def _how(self, x: Any, w13: Any, w2: Any) -> tuple[Any, ...] | None:
        """What decides whether `_check` passes, but for the tensors' memory; None where it has to look."""
        if self._ranks.comm is not None or (kinds := kinds_of(x, *tensors_of(w13, w2))) is None:
            return None
        topk = self._topk if self.router is None else None
        sizes = self._hidden, self._ffn, self._num_experts, topk, self._is_frozen
        return self._options, torch.is_grad_enabled(), *sizes, *kinds

    def _check(self, x: Tensor, w13: Any, w2: Any) -> None:
        check_float("x", x)
        if x.shape[-1:] != (self.hidden,):
            raise ValueError(
                f"x: got shape {list(x.shape)}; wanted [..., {self.hidden}], the layer's hidden size"
            )
        self._check_weights(w13, w2)
        if self._is_frozen:
            w13.check_values("w13"), w2.check_values("w2")
        if self._options.limits_gemms and not torch.compiler.is_compiling():
            self._check_backend(x)

    def add_lora(
        self,
        rank: int,
        *,
        alpha: float | None = None,
        dropout: float = 0.0,
        use_rslora: bool = False,
        targets: Sequence[str] = ("w13", "w2"),
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """Add low-rank adapters (LoRA) to a layer of frozen FP8 codes, to be trained in their place.

        y of every forward is then that of w + scaling * B @ A, which is never formed, as with ``lora`` of
        `fp8moe.torch.moe_experts`. The parameters are ``lora.w13.lora_A`` [E, r, H], ``lora.w13.lora_B``
        [E, 2F, r], ``lora.w2.lora_A`` [E, r, F] and ``lora.w2.lora_B`` [E, H, r]; A is random and B zeros, as
        PEFT's. In compiled code the layer has a graph break.

        Parameters
        ----------
        rank : int
            r.
        alpha : float or None
            scaling = alpha / r, or alpha / sqrt(r) with ``use_rslora``; None: r, so that scaling is 1 without
            it.
        dropout : float
            As in `fp8moe.torch.LoRA`; 0 in evaluation mode.
        use_rslora : bool
            Rank-stabilised scaling.
        targets : sequence of "w13" and "w2"
            The weights that get an adapter.
        dtype : dtype
            Of the parameters; the GEMMs multiply in bfloat16.

        Returns
        -------
        FP8FlowMoE
            The layer.

        Raises
        ------
        TypeError, ValueError
            For a wrong value, or a layer that has adapters.
        NotImplementedError
            For a layer of floating-point weights, with a process_group, or with save="fp8".

        Examples
        --------
        >>> import torch
        >>> from fp8moe.torch import FP8FlowMoE, quantize_fp8_weights
        >>> w13, w2 = quantize_fp8_weights(torch.randn(4, 256, 64), torch.randn(4, 64, 128))
        >>> layer = FP8FlowMoE.from_quantized(w13, w2, topk=2).add_lora(8, alpha=16)
        >>> layer(torch.randn(10, 64)).sum().backward()
        >>> layer.lora["w2"].lora_B.grad.shape
        torch.Size([4, 64, 8])
        """
        if not self._is_frozen:
            raise NotImplementedError(
                "add_lora: got a layer of floating-point weights; wanted one of frozen FP8 codes, "
                "FP8FlowMoE.from_quantized(*quantize_fp8_weights(w13, w2), topk); or pass "
                "fp8moe.torch.moe_experts(..., lora=)"
            )
        if self.lora is not None:
            raise ValueError("add_lora: got a layer with adapters; wanted one without; set layer.lora = None")
        rank, rslora = checks.integer("rank", rank, 1), checks.flag("use_rslora", use_rslora)
        if isinstance(targets, str) or not isinstance(targets, Sequence):
            raise TypeError(f"targets: got {targets!r}; wanted a sequence of names; pass ['w13', 'w2']")
        names = [checks.choice("targets", name, ("w13", "w2")) for name in targets]
        if not names:
            raise ValueError("targets: got none; wanted 'w13', 'w2' or both")
        if not isinstance(dtype, torch.dtype) or dtype not in _DTYPES:
            raise TypeError(f"dtype: got {dtype}; wanted one of {', '.join(map(str, _DTYPES))}")
        scaling = 1.0 if alpha is None else checks.number("alpha", alpha, 0) / rank
        if rslora:
            scaling *= math.sqrt(rank)
        experts, rows = self._num_experts, self._options.activation.columns(self._ffn)
        shapes = {"w13": (experts, rows, self._hidden), "w2": (experts, self._hidden, self._ffn)}
        options = {"device": self.w13.weight.device, "dtype": dtype}
        adapters = nn.ModuleDict({n: LowRank(shapes[n], rank, scaling, dropout, **options) for n in names})
        self._checked_lora(adapters, [self.w13.quantized, self.w2.quantized])
        self.lora = adapters.train(self.training)  # new modules train, also in a layer that evaluates
        return self

    def _checked_lora(self, adapters: Any, codes: Any) -> Any:
        """The adapters of a forward, with the options that this one has."""
        given: Any = adapters if isinstance(adapters, nn.ModuleDict) else {}
        known = {n for n, a in given.items() if n in ("w13", "w2") and isinstance(a, LowRank)}
        if not self._is_frozen or not known or len(known) != len(given):
            raise TypeError(
                f"lora: got a {type(adapters).__name__}{' of others' * bool(given)}; wanted None, or what "
                "add_lora makes for a layer of frozen FP8 codes"
            )
        if self._collect_stats:
            raise NotImplementedError("collect_stats: got True with adapters (LoRA); wanted False")
        return check_lora(pair_of(adapters), codes, None, self._options, self._ranks.comm)

    def route(self, tokens: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, ...]:
        """Select the experts of tokens, in the forward; subclasses may override it.

        Parameters
        ----------
        tokens : Tensor, floating point, [T, H]
            Input of the forward, flattened.
        padding_mask : Tensor or None, bool, [T]
            The forward's, flattened; a forward without one does not pass it.

        Returns
        -------
        tuple of three Tensor
            Rows [T, H] for the experts, ids [T, k] and probabilities [T, k]. `fp8moe.route` computes them in
            float32, also under autocast. The rows are the tokens; their gradient is computed together with
            the router's (see `fp8moe.torch.Router`).

        Raises
        ------
        ValueError
            For a layer without a router.
        """
        if self.router is None:
            raise ValueError(
                "topk_ids, topk_probs: got neither in a layer made with router=False; wanted both"
            )
        return self.router(tokens, padding_mask=padding_mask, pass_rows=True)  # type: ignore[no-any-return]

    def quantize_weights(self) -> None:
        """Quantise the weights now and keep the FP8 copies.

        Forwards without gradients use the copies until a forward with gradients or a compiled forward runs,
        which releases them, or until a change of the weights is detected, including optimizer steps. Not
        detected, and to be followed by another call, are writes through ``.data`` (also by PEFT's merging) or
        other memory; writes to weights made under ``torch.inference_mode``; collectives such as
        ``torch.distributed.broadcast``; replays of a CUDA graph that contains an optimizer step; writes to
        the shards of ``fully_shard`` other than an optimizer's or ``load_state_dict``'s; with
        ``process_group=`` operations of ``torch._foreach`` and ``torch.distributed.checkpoint.load``. Inside
        `weights_unchanged` the new copies replace the context's. A CUDA graph that was captured with kept
        copies reads the new ones: they are written to the same memory, and a backward that still needs the
        old ones raises.

        Raises
        ------
        TypeError
            For sharded weights (fully_shard).
        """
        if self._options.precision.quantizes and not self._is_frozen:
            weights_of(self).quantize()

    @property
    def fp8_weight_nbytes(self) -> int:
        """Bytes of the FP8 weight copies that the layer keeps between forwards; 0 if it keeps none. Frozen
        codes are the weights, and no copies."""
        copies = weights_of(self).copies
        return 0 if copies is None else copies.nbytes

    def stats(self) -> LayerStats:
        """Return statistics of the last forward and backward since ``collect_stats`` was set.

        Returns
        -------
        LayerStats
            See `fp8moe.torch`. The tensors are on the layer's device; only reading them
            synchronises.

        Raises
        ------
        RuntimeError
            If no statistics were collected.
        """
        if self._collector.stats is None:
            raise RuntimeError(
                "stats: got no forward with statistics; wanted one; set layer.collect_stats = True before "
                "it, with an FP8 recipe and outside of torch.compile"
            )
        return self._collector.stats

    def router_checksum(self, again: bool = False) -> int:
        """Return a checksum of the router, by which ranks of expert parallelism detect different ones.

        It is computed in the first forward over several ranks, which it synchronises, and in the first one
        after `load_state_dict` or with another configuration; all forwards send it with the row counts.

        Parameters
        ----------
        again : bool
            Whether to compute it, instead of returning that of an earlier call.

        Returns
        -------
        int
            31 bits, of the router's configuration and of those of its parameters that this rank has whole; 0
            without a router, and for one rank.
        """
        router, mesh, known = self.router, self._ranks.mesh, self._checksum
        if router is None or mesh is None:
            return 0
        config = router.config if isinstance(router, Router) else None
        if known is not None and known[0] is config and not again:
            return known[1]
        weights = [w for w in router.parameters() if not is_freed(w)]
        # a transport with a capacity then asks for a forward before the capture
        if any(map(is_capturing, weights)):
            return 0
        value = checksum(weights, config, mesh)
        self._checksum = config, value
        return value

    def weights_unchanged(self) -> Any:
        """Declare the weights constant within a context, as the function `weights_unchanged` for this layer.

        Returns
        -------
        context manager
            The context of `weights_unchanged`.
        """
        return weights_unchanged(self)

    def extra_repr(self) -> str:
        sizes = f"{self._hidden} x {self._ffn}, {self._num_experts} experts, top-{self.topk}"
        options = ", ".join(f"{n}={v!r}" for n, v in vars(self._options).items())
        return f"{sizes}, {options}, {self._ranks}, {in_words(self)}"

    def __getstate__(self) -> dict[str, Any]:
        return _without_own_state(super().__getstate__())

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._own_state()

    def __deepcopy__(self, memo: dict[int, Any]) -> FP8FlowMoE:
        # parametrized modules refuse __getstate__, and torch's own way to copy them takes over all attributes
        new = memo[id(self)] = self.__new__(type(self))
        vars(new).update(copy.deepcopy(_without_own_state(vars(self)), memo))
        new._own_state()
        return new

    def _own_state(self) -> None:
        """What a copy of the layer makes anew: its number, FP8 weights and statistics."""
        self._handle, self._collector = handle_of(self), Collector()
        self._fp8_weights = FP8Weights(self, _OfLayer)

    def _announced(self) -> dict[str, Any] | None:
        """What ranks tell each other about the router, as fields of `Settings`."""
        if self.router is None or self._ranks.mesh is None:
            return None
        w = getattr(self.router, "weight", None)
        sums = torch.is_grad_enabled() and isinstance(w, DTensor) and w.requires_grad
        return {"router": self.router_checksum, "sums_router": sums}

    def _compute(
        self,
        x: Tensor,
        ids: Tensor,
        probs: Tensor,
        weights: tuple[Any, Any],
        first: bool | None,
        announced: dict[str, Any] | None,
        how: tuple[Any, ...] | None,
    ) -> Tensor:
        """The experts' y. first: the forward's ``is_first_microbatch``. announced: from `_announced`. how:
        from `_how`."""
        codes, like, lora, state, masters = None, None, None, weights_of(self), weights
        if self._is_frozen:
            codes, masters = tuple([w.quantized for w in weights]), (None, None)
            if not torch.compiler.is_compiling():
                refuse_broadcast(*weights)
        elif how is None or first is not None or state.declared or state.copies is not None:
            codes = codes_of(self, weights, (x, probs), first)
        if self.lora is not None:
            lora = self._checked_lora(self.lora, codes)
        if how is not None and not self._collect_stats and lora is None:
            like = like_of(how, x, (masters[0], None, masters[1], None), ids, probs, codes)
            if like is not None and like.known is not None:
                return like.run()
        if how is not None:  # of tensors whose kinds are known, whether they have memory
            self._check(x, *weights)
        check_tensor("topk_ids", ids)
        check_float("topk_probs", probs)
        if self.router is None and ids.shape[-1:] != (self._topk,):
            raise ValueError(
                f"topk_ids: got shape {list(ids.shape)}; wanted [T, {self._topk}], by the layer's topk; "
                "make the layer with the other router's topk"
            )
        options, ranks = self._options, self._ranks
        own = masters if self._is_frozen else _OfLayer.operands(self, weights)
        collector, ffn = None, None
        if options.precision.quantizes:
            if self._collect_stats and torch.compiler.is_compiling():
                raise RuntimeError("collect_stats: got True in compiled code; wanted False, or eager mode")
            collector = self._collector if self._collect_stats else None
            ffn = self._ffn if self._ffn % FP8_BLOCK[1] else None
        operands = Operands(own, codes, ffn, masters)
        to_ranks = {"comm": ranks.comm, "announced": announced, "handle": self._handle}
        of_call: dict[str, Any] = {"collector": collector, "like": like, "lora": lora, **to_ranks}
        return apply_experts(x, operands, ids, probs, torch.bfloat16, options, **of_call)

    # If Dynamo has skipped a calling frame, it would still compile this function and the library's.
    _compute_eagerly = torch.compiler.disable(_compute)

    def _check_weights(self, w13: Any, w2: Any) -> None:
        """Checks the weights, which may have been replaced since the layer was made: ids beyond w13's experts
        would mean no expert, and torch's grouped product reads weights on the meta device as if they had
        values."""
        hidden, ffn = self._hidden, round_up_to_block(self._ffn) if self._is_frozen else self._ffn
        shapes = (self._options.activation.columns(ffn), hidden), (hidden, ffn)
        for name, w, shape in zip(("w13", "w2"), (w13, w2), shapes, strict=True):
            if isinstance(w, FrozenWeight) != self._is_frozen:
                raise TypeError(_other_kind(name, w))
            if self._is_frozen:
                fix = "pass records of this rank's experts, and num_experts= of all ranks"
                size = self._ranks.size
                w.check(name, (self.num_experts // size, *shape), fix if size > 1 else "")
                continue
            check_float(name, w, may_be_sharded=True)
            if self._options.precision.quantizes and w.dtype not in _DTYPES:
                raise TypeError(
                    f"{name}: got dtype {w.dtype}; wanted {', '.join(map(str, _DTYPES))}; cast the layer "
                    'to one of them, or make it with recipe="bf16"'
                )
            check_own_experts(name, w, self._ranks.mesh)  # before the router's, as one check for both
            experts = self.num_experts if isinstance(w, DTensor) else self.num_experts // self._ranks.size
            if w.shape != (experts, *shape):
                refuse_partitioned(name, w)
                raise ValueError(
                    f"{name}: got shape {list(w.shape)}; wanted {[experts, *shape]}, by the layer's "
                    "num_experts, hidden and ffn; make a layer of the weights' sizes and load them"
                )

    def _check_router(self) -> None:
        """Checks the router's weight, as `_check_weights`: ids beyond the layer's experts would mean no
        expert."""
        wanted = self.num_experts, self.hidden
        if isinstance(self.router, Router) and self.router.weight.shape != wanted:
            refuse_partitioned("router.weight", self.router.weight)
            raise ValueError(
                f"router.weight: got shape {list(self.router.weight.shape)}; wanted {list(wanted)}, by the "
                "layer's num_experts and hidden"
            )

    def _check_backend(self, x: Tensor) -> None:
        check_backend(
            x,
            self._options,
            dtype="bfloat16",
            experts=self._num_experts // self._ranks.size,
            hidden=self._hidden,
            ffn=self._ffn,
            gradients=GRADIENTS if torch.is_grad_enabled() else (),
        )


class _OfLayer(Holder):
    @staticmethod
    def masters(module: FP8FlowMoE) -> dict[str, Tensor]:
        return {"w13": module.w13, "w2": module.w2}

    @staticmethod
    def frozen(module: FP8FlowMoE) -> Sequence[Tensor]:
        return tensors_of(module.w13, module.w2) if module._is_frozen else ()

    @staticmethod
    def is_whole(module: FP8FlowMoE, name: str, w: Tensor) -> bool:
        return is_whole(w, module._ranks.mesh)

    @staticmethod
    def operands(module: FP8FlowMoE, masters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        w13, w2 = masters
        return own_experts("w13", w13, module._ranks.mesh), own_experts("w2", w2, module._ranks.mesh)


def _other_kind(name: str, w: Any) -> str:
    """The error for floating-point weights in the place of frozen codes, or the other way round."""
    kind = getattr(w, "dtype", type(w).__name__)
    if isinstance(w, FrozenWeight) or kind in (torch.float8_e4m3fn, torch.uint8):
        return (
            f"{name}: got frozen FP8 codes in a layer of floating-point weights; wanted a layer made by "
            "FP8FlowMoE.from_quantized(w13, w2, topk), or the values: codes times scales"
        )
    return (
        f"{name}: got weights of {kind} in a layer of frozen FP8 codes; wanted a layer of such weights, "
        "FP8FlowMoE(...), or codes: FP8FlowMoE.from_quantized(*quantize_fp8_weights(w13, w2), topk)"
    )


def _shards_given(layer: FP8FlowMoE, state: dict[str, Any], prefix: str, *_: Any) -> None:
    # with a capacity, a rank that loads a state dict alone would be alone in comparing headers, too
    if layer._checksum is not None and capacity_of(layer._ranks.comm) is None:
        layer._checksum = None
    refuse_codes(layer, state, prefix)
    for name in ("w13", "w2"):
        w, of = getattr(layer, name), prefix + name
        if layer._is_frozen:
            if of in state:
                raise TypeError(_other_kind(of, state[of]))
            w.checked(state, f"{of}.", partial(as_shard, mesh=layer._ranks.mesh))
        elif f"{of}.weight" in state:
            raise TypeError(_other_kind(f"{of}.weight", state[f"{of}.weight"]))
        elif of in state:
            shard = as_shard(state[of], w, layer._ranks.mesh)
            state[of] = shard
            if (copies := weights_of(layer).copies) is not None:  # fully_shard gathers them without a trace
                copies.overwritten = "load_state_dict()"
