"""The expert layer as a torch module: router, experts, and when the weights are quantised."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp8moe import Quantized, RouterConfig, checks
from fp8moe.activation import SWIGLU, Activation
from fp8moe.adapters.torch_experts import FP8_BLOCK, check_backend, experts, handle_of, main_grad_of
from fp8moe.adapters.torch_functional import quantize_fp8_weights
from fp8moe.adapters.torch_grouped import by_grouped_mm
from fp8moe.adapters.torch_operation import check_float, refuse_transforms
from fp8moe.adapters.torch_router import Router
from fp8moe.adapters.torch_sharding import Ranks, as_shard, is_whole, local_of, own_experts, shard_of
from fp8moe.adapters.torch_stats import Collector, LayerStats
from fp8moe.grouped_gemm import BACKENDS, check_limit
from fp8moe.moe import GRADIENTS, RECIPES, Recipe
from fp8moe.record_trees import arrays_in

__all__ = ["FP8FlowMoE", "weights_unchanged"]


class FP8FlowMoE(nn.Module):
    """Top-k routed experts as a module: router, experts, and when the weights are quantised.

    y[t] = sum of prob * w2[e] @ (silu(gate) * up) over t's experts e, with [gate, up] = w13[e] @ x[t].

    Parameters
    ----------
    hidden : int
        H: any for "fp8_flow" and "bf16". Multiples of 128 are fastest.
    ffn : int
        F: any for "fp8_flow" and "bf16", a multiple of 128 for "fp8_blockwise". Where it is no multiple of
        128, FP8 copies are filled up with zeros to the next one.
    num_experts : int
        E, of all ranks.
    topk : int
        Experts of a token.
    recipe : "fp8_flow", "fp8_blockwise" or "bf16"
        "fp8_flow": two casts (arXiv 2511.02302). "fp8_blockwise": the baseline that requantises. "bf16": by
        this library's products on Hopper, by torch's grouped matrix product elsewhere.
    recompute : None or "moe_expert"
        "moe_expert" keeps only the input of the first product for the backward.
    normalize_probs : bool
        Whether the chosen experts' probabilities are made to sum to one again.
    activation : Activation
        Between the two products; w13 is [E, F, H] for one without a gate.
    backend : "wgmma", "mma", "cublas", "plain" or None
        By which kernels all products are made, of the backward, too, as `fp8moe.grouped_gemm` describes them
        ("cublas" synchronises); None: the fastest. For "bf16" None also takes torch's grouped product, where
        that is faster, and a name means this library's kernels. One that does not make these products on x's
        device is refused by the forward before any work.
    num_sms : int or None
        How many of the GPU's multiprocessors the products may use at most, of the backward, too, as
        `fp8moe.moe_forward` takes it: for what runs beside the layer on another stream. Refused by the
        forward where a product cannot keep to it; for "bf16" a number means this library's kernels.
    process_group : ProcessGroup, DeviceMesh, Transport or None
        The ranks of expert parallelism: a process group, a one-dimensional DeviceMesh, or what moves rows
        between them, a `fp8moe.expert_parallel.Transport`, as `fp8moe.adapters.torch_symmetric_memory` has
        one. Of num_experts each rank holds an equal share: w13 and w2 are DTensors sharded along the experts,
        so that torch.distributed.checkpoint saves all of them, loads into another number of ranks, and
        ``fully_shard`` over another dimension of the mesh composes (see `fp8moe.adapters.torch_sharding`,
        which has optimizer groups and gradient clipping for models with plain tensors, too). A state dict
        with plain tensors, of all experts or of this rank's, loads. Rows travel in FP8 for "fp8_flow". The
        counts of rows are looked at once a forward, so that no CUDA graph can hold it, but for a
        `fp8moe.adapters.torch_distributed.ProcessGroup` with a ``capacity``. The router is every rank's own:
        sum its gradient over the ranks as any other parameter's. Those of w13 and w2 are such sums already:
        divide them by the number of ranks where the others are averaged.
    overlap_chunks : int
        Chunks of the tokens, with a process_group: rows of one travel beside the products of another, forward
        and backward. y and x's gradient have the same bits; the weights' gradients are sums over chunks in
        float32, and FP8 transposes have tiles of each chunk's own rows. Not in compiled code.
    router : bool or RouterConfig
        A `fp8moe.RouterConfig` with this topk for other scores, groups or weights than a softmax over all
        experts and its k largest. False leaves the router out, with its parameters: forwards are then given
        topk_ids and topk_probs. Losses, and a bias for balancing, are a
        `fp8moe.adapters.torch_router.Router`'s of the model's own, beside such a layer.
    device : device or None
        Of the parameters.
    dtype : dtype
        Of the master weights w13 [E, 2F, H] and w2 [E, H, F] and of the router's. The state dict holds these
        and nothing else.

    Notes
    -----
    FP8 copies of the weights (both orientations, 2 bytes a weight). Every forward makes them from the weights
    as they are then, whoever wrote those and by whatever means: no version counter is trusted. The backward
    multiplies by these very codes, also where the weights have changed since: the transposed half (1 byte a
    weight; with recompute also w13's other half) is kept for it; the rest, and without gradients all, ends
    with the forward. A CUDA graph contains the making of the copies, so a replay sees the weights as they
    are. Where weights stay the same for several forwards, say so, and one set of copies serves them all::

        for batch in batches:                                    # gradient accumulation
            with weights_unchanged(model):                       # all FP8FlowMoE layers of a model
                for micro_batch in batch.chunk(4):
                    loss(model(micro_batch)).backward()
            optimizer.step(), optimizer.zero_grad()

    `weights_unchanged` of one layer does the same for that layer, and ``layer(x, is_first_microbatch=...)``
    (Transformer Engine's convention) where a loop has no place for a context. Copies are then held from
    entering to leaving: 2 bytes a weight for all layers at once, of unsharded weights under `fully_shard`.
    Inside, a changed weight is refused where that can be seen; what writes through other memory must not run
    inside. `quantize_weights` makes copies for forwards without gradients, and anew for a CUDA graph that
    reads kept ones.

    A parameter with a tensor ``main_grad`` (float32 or bfloat16, Megatron's convention) gets its gradient
    added to that, by the matrix product itself, and ``grad_added_to_main_grad`` set; its ``grad`` stays None.

    ``collect_stats`` may be set at any time; while it is true, in eager mode, `stats` tells of the last
    forward and backward what was lost by quantising and how full the experts are.

    `torch.compile` takes all of it as one graph (``fullgraph=True``), in which the FP8 copies of the weights
    are one operator each, the experts another and their gradient another, for each number of tokens anew;
    with a process_group, too, which must be no Engine.

    Examples
    --------
    >>> import torch
    >>> from fp8moe.adapters.torch_moe import FP8FlowMoE
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
        recipe: Recipe = "fp8_flow",
        recompute: str | None = None,
        normalize_probs: bool = True,
        activation: Activation = SWIGLU,
        backend: str | None = None,
        num_sms: int | None = None,
        process_group: Any = None,
        overlap_chunks: int = 1,
        router: bool | RouterConfig = True,
        device: Any = None,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        checks.choice("recipe", recipe, RECIPES)
        checks.choice("recompute", recompute, (None, "moe_expert"))
        hidden, ffn = checks.integer("hidden", hidden, 1), checks.integer("ffn", ffn, 1)
        if recipe == "fp8_blockwise" and ffn % FP8_BLOCK[1]:
            raise ValueError(
                f"ffn: got {ffn}; wanted a multiple of 128 for {recipe!r}; "
                'pass recipe="fp8_flow", which fills up with zeros'
            )
        if not 0 < topk <= num_experts:
            raise ValueError(f"topk: got {topk}; wanted 1 to num_experts = {num_experts}")
        self.hidden, self.ffn, self.num_experts, self.topk = hidden, ffn, num_experts, topk
        self.recipe, self.recompute = recipe, recompute
        self.backend = checks.choice("backend", backend, BACKENDS)
        self.num_sms = check_limit(num_sms)
        checks.options("activation", activation, Activation)
        self.activation = activation
        place = {"device": device, "dtype": dtype}
        if router is True:
            router = RouterConfig(topk, renormalize=normalize_probs)
        elif router and (router.topk != topk or not normalize_probs):
            raise ValueError(
                f"router: got topk={router.topk} with topk={topk}, normalize_probs={normalize_probs}; wanted "
                "the same topk, and the RouterConfig's renormalize in place of normalize_probs"
            )
        self.router = Router(hidden, num_experts, router, **place) if router else None
        self._ranks = ranks = Ranks(
            process_group,
            torch.empty(0, device=device).device,
            checks.integer("overlap_chunks", overlap_chunks, 1),
        )
        if num_experts % ranks.size:
            raise ValueError(
                f"num_experts: got {num_experts}; wanted a multiple of {ranks.size}, the group's ranks"
            )
        self.w13 = self._weight(num_experts, activation.columns(ffn), hidden, **place)
        self.w2 = self._weight(num_experts, hidden, ffn, **place)
        self.register_load_state_dict_pre_hook(_shards_given)
        self._copies: _Copies | None = None  # those that outlive a forward
        self._scopes = 0  # how many weights_unchanged() are open
        self._handle = handle_of(self)
        self.collect_stats = False
        self._collector = Collector()
        self.reset_parameters()

    def _weight(self, experts: int, *shape: int, **place: Any) -> nn.Parameter:
        local = torch.empty(experts // self._ranks.size, *shape, **place)
        return nn.Parameter(local) if self._ranks.mesh is None else shard_of(local, self._ranks.mesh)

    def reset_parameters(self) -> None:
        """Draw all weights from the normal distribution of variance 1 / fan-in.

        Expert by expert, so that a seed gives the same weights on any number of ranks.
        """
        if self.router is not None:
            self.router.reset_parameters()
        for name in ("w13", "w2"):
            w = getattr(self, name)
            std = 1 / math.sqrt(w.shape[-1])
            if not is_whole(w, self._ranks.mesh):
                nn.init.normal_(w, std=std)
                continue
            with torch.no_grad():
                local = local_of(w)
                first = self._ranks.rank * len(local)
                for expert in range(self.num_experts):
                    drawn = torch.empty_like(local[0]).normal_(std=std)
                    if first <= expert < first + len(local):
                        local[expert - first].copy_(drawn)

    def forward(
        self,
        x: Tensor,
        topk_ids: Tensor | None = None,
        topk_probs: Tensor | None = None,
        *,
        is_first_microbatch: bool | None = None,
    ) -> Tensor:
        """Multiply tokens by their experts.

        Parameters
        ----------
        x : Tensor, any floating-point dtype, [..., H]
            Tokens; multiplied as bfloat16.
        topk_ids : Tensor or None, int32 or int64, [T, k]
            With ``topk_probs`` another router's choice instead of this one's.
        topk_probs : Tensor or None, floating point, [T, k]
            See ``topk_ids``.
        is_first_microbatch : bool or None
            True makes the FP8 copies of the weights and keeps them, False says that the weights are those of
            the last forward with True and uses its copies; None makes them for this forward alone, unless it
            runs inside `weights_unchanged`. Compiled code takes None only.

        Returns
        -------
        Tensor, [..., H]
            In x's dtype and shape.

        Raises
        ------
        TypeError, ValueError
            For a wrong dtype or shape, and for a backend that does not make these products on x's device, or
            a num_sms that they cannot keep to.
        RuntimeError
            For False where there are no copies, or weights that have visibly changed.
        NotImplementedError
            Inside transforms of torch.func.
        """
        if (topk_ids is None) != (topk_probs is None):
            raise ValueError("topk_ids, topk_probs: got one of them; wanted both, or neither")
        refuse_transforms("FP8FlowMoE")
        check_float("x", x)
        if x.shape[-1:] != (self.hidden,):
            raise ValueError(
                f"x: got shape {list(x.shape)}; wanted [..., {self.hidden}], of the layer's hidden"
            )
        if self._by_name() and not torch.compiler.is_compiling():
            self._check_backend(x)
        tokens = x.reshape(-1, self.hidden)
        if topk_ids is None or topk_probs is None:
            routed = self.route(tokens)
            if len(routed) != 3:
                raise ValueError(
                    f"route: got {len(routed)} results; wanted (rows, ids, probabilities); return the tokens "
                    "before the other two"
                )
            tokens, topk_ids, topk_probs = routed
        y = self._experts(tokens.bfloat16(), topk_ids, topk_probs, is_first_microbatch)
        # not as a view: an in-place operation on one would take hooks off that fully_shard puts on y
        return torch.ops.aten._unsafe_view.default(y.to(x.dtype), x.shape)  # type: ignore[no-any-return]

    def route(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Choose the experts of tokens: the forward's choice, which a subclass may make otherwise.

        Parameters
        ----------
        tokens : Tensor, floating point, [T, H]
            The forward's input, flattened.

        Returns
        -------
        tuple of three Tensor
            Rows [T, H] for the experts, ids [T, k] and probabilities [T, k], by `fp8moe.route` in float32,
            under autocast, too. The rows are the tokens, whose gradient then comes in one piece with the
            router's (see `fp8moe.adapters.torch_router.Router`).

        Raises
        ------
        ValueError
            In a layer without a router.
        """
        if self.router is None:
            raise ValueError(
                "topk_ids, topk_probs: got neither in a layer made with router=False; wanted both"
            )
        return self.router(tokens, pass_rows=True)  # type: ignore[no-any-return]

    def quantize_weights(self) -> None:
        """Make FP8 copies of the weights now and keep them.

        Forwards without gradients use them until one with gradients comes or the weights have visibly
        changed, by an optimizer's step, too; weights written through other memory since then, or by the
        replay of a CUDA graph that holds an optimizer's step, need another call. Inside `weights_unchanged`
        they replace its copies. A CUDA graph that was captured with kept copies reads these: they are written
        where it finds them, and a backward that still needs the old ones refuses.

        Raises
        ------
        TypeError
            For weights that are sharded further.
        """
        if self.recipe == "bf16":
            return
        for name in ("w13", "w2"):
            if not is_whole(getattr(self, name), self._ranks.mesh):
                raise TypeError(
                    f"{name}: got a DTensor; wanted the whole weights, which fully_shard gathers for a "
                    "forward only; use weights_unchanged() around the forwards"
                )
        self._keep()

    @property
    def fp8_weight_nbytes(self) -> int:
        """Bytes of FP8 copies of the weights that the layer keeps between forwards, 0 where it keeps none."""
        return 0 if self._copies is None else sum(t.nbytes for t in self._copies.tensors)

    def stats(self) -> LayerStats:
        """Tell of the last forward, and the last backward, since ``collect_stats`` was set.

        Returns
        -------
        LayerStats
            See `fp8moe.adapters.torch_stats`. Tensors on the layer's device: reading them synchronises,
            nothing else does.

        Raises
        ------
        RuntimeError
            Where there was none.
        """
        if self._collector.stats is None:
            raise RuntimeError(
                "stats: nothing was collected; set layer.collect_stats = True before the forward, in an FP8 "
                "recipe and outside of torch.compile"
            )
        return self._collector.stats

    def weights_unchanged(self) -> Any:
        """Say that the weights stay as they are, by a context: `weights_unchanged` of this layer alone.

        Returns
        -------
        context manager
            As `weights_unchanged` gives one.
        """
        return weights_unchanged(self)

    def extra_repr(self) -> str:
        return (
            f"{self.hidden} x {self.ffn}, {self.num_experts} experts, top-{self.topk}, "
            f"recipe={self.recipe!r}, recompute={self.recompute!r}"
        )

    def __getstate__(self) -> dict[str, Any]:
        # no copy of the layer shares them
        return {**super().__getstate__(), "_copies": None, "_scopes": 0, "_collector": Collector()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._handle = handle_of(self)

    def _experts(self, x: Tensor, ids: Tensor, probs: Tensor, first: bool | None) -> Tensor:
        if not torch.compiler.is_compiling():
            return self._eagerly(x, ids, probs, first)
        if self.recipe == "bf16":
            return self._in_bf16(x, ids, probs)
        if self.collect_stats:
            raise RuntimeError("collect_stats: got True in compiled code; wanted False, or eager mode")
        return self._multiply(x, ids, probs, self._compiled_copies(first))

    def _by_name(self) -> bool:
        """Whether the products are told how they are made."""
        return self.backend is not None or self.num_sms is not None

    def _check_backend(self, x: Tensor) -> None:
        check_backend(
            x,
            self.backend,
            self.num_sms,
            recipe=self.recipe,
            activation=self.activation,
            dtype="bfloat16",
            experts=self.num_experts // self._ranks.size,
            hidden=self.hidden,
            ffn=self.ffn,
            gradients=GRADIENTS if torch.is_grad_enabled() else (),
        )

    # Where Dynamo has given up a frame around this, it would go on in here, and in the library.
    @torch.compiler.disable
    def _eagerly(self, x: Tensor, ids: Tensor, probs: Tensor, first: bool | None) -> Tensor:
        if self.recipe == "bf16":
            return self._in_bf16(x, ids, probs)
        weights = self.w13, self.w2
        recording = torch.is_grad_enabled() and any(t.requires_grad for t in (x, probs, *weights))
        return self._multiply(x, ids, probs, self._copies_of_forward(recording, first))

    def _multiply(self, x: Tensor, ids: Tensor, probs: Tensor, copies: list[Quantized]) -> Tensor:
        return experts(
            x.contiguous(),
            *self._own_experts(),
            ids.contiguous(),
            probs.contiguous(),
            copies,
            recipe=self.recipe,
            recompute=self.recompute,
            activation=self.activation,
            backend=self.backend,
            num_sms=self.num_sms,
            comm=self._ranks.comm,
            ffn=self.ffn if self.ffn % FP8_BLOCK[1] else None,
            parameters=(self.w13, self.w2),
            handle=self._handle,
            collector=self._collector if self.collect_stats else None,
        )

    def _own_experts(self) -> tuple[Tensor, Tensor]:
        mesh = self._ranks.mesh
        return own_experts("w13", self.w13, mesh), own_experts("w2", self.w2, mesh)

    # ---- which FP8 copies a forward multiplies by

    def _copies_of_forward(self, recording: bool, first: bool | None) -> list[Quantized]:
        kept, capturing = self._copies, _capturing(self.w13)
        usable = kept is not None and kept.current and (capturing or not kept.of_capture)
        if first is None and not self._scopes:
            if recording or kept is None or not usable or kept.recorded or kept.changed(self):
                self._release()
                return self._make()
        elif first or not usable:
            if first is False:
                raise RuntimeError(
                    "is_first_microbatch: got False, and there are no FP8 copies of the weights; wanted True "
                    "for the first forward after the weights have changed"
                )
            kept = self._keep()
        elif (changed := kept.changed(self)) is not None:  # type: ignore[union-attr]
            raise _changed(changed)
        assert kept is not None
        kept.captured |= capturing
        kept.recorded |= recording
        return kept.records

    def _compiled_copies(self, first: bool | None) -> list[Quantized]:
        if first is not None:
            raise ValueError(
                f"is_first_microbatch: got {first} in compiled code; wanted None, inside weights_unchanged()"
            )
        kept = self._copies
        if self._scopes:
            if kept is not None and kept.stepped:
                raise _changed("w13, w2")
            if kept is not None and kept.current and not kept.of_capture:
                return kept.records
        elif kept is not None:
            self._release()
        weights = self._own_experts()
        return list(quantize_fp8_weights(*weights, activation=self.activation))

    def _keep(self) -> _Copies:
        """Make copies and keep them, in the memory of those that a captured graph reads, if there are any."""
        old, into = self._copies, None
        if old is not None and old.captured and old.records[0].rowwise.data.device == self.w13.device:
            into = old.records
        if into is None:
            self._copies = old = None  # two sets at a time would be twice the memory
        new = _Copies(self, self._make(into), captured=into is not None)
        if into is not None:  # so that autograd refuses a backward that saved what was here
            torch.autograd.graph.increment_version(new.tensors)
        self._copies = new
        with _keeping_lock:
            _keeping.add(self)
        return new

    def _make(self, into: list[Quantized] | None = None) -> list[Quantized]:
        # not as inference tensors, which no backward may read
        with torch.inference_mode(False), torch.no_grad():
            out = None if into is None else (into[0], into[1])
            weights = self._own_experts()
            return list(quantize_fp8_weights(*weights, activation=self.activation, out=out))

    def _release(self) -> None:
        """Kept copies are of no more use, but for a captured graph that reads them."""
        if self._copies is not None and self._copies.captured:
            self._copies.current = False
        else:
            self._copies = None

    def _in_bf16(self, x: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
        weights = self._own_experts()
        options: dict[str, Any] = {"recompute": self.recompute, "activation": self.activation}
        options["comm"] = self._ranks.comm
        compiling = self._ranks.comm is not None and torch.compiler.is_compiling()
        added = any(main_grad_of(w) is not None for w in (self.w13, self.w2))
        if not self._by_name() and self.hidden % 8 == self.ffn % 8 == 0 and not (compiling or added):
            return by_grouped_mm(x, weights[0].bfloat16(), weights[1].bfloat16(), ids, probs, **options)
        options |= {"recipe": "bf16", "backend": self.backend, "num_sms": self.num_sms}
        options |= {"handle": self._handle, "parameters": (self.w13, self.w2)}
        x, ids, probs = x.contiguous(), ids.contiguous(), probs.contiguous()
        return experts(x, *weights, ids, probs, [w.detach().bfloat16() for w in weights], **options)


def _shards_given(layer: FP8FlowMoE, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in ("w13", "w2"):
        if prefix + name in state:
            given = as_shard(state[prefix + name], getattr(layer, name), layer._ranks.mesh)
            state[prefix + name] = given


@contextmanager
def weights_unchanged(model: nn.Module) -> Iterator[None]:
    """Say that the weights of a model's `FP8FlowMoE` layers stay as they are inside this context.

    One set of FP8 copies then serves all forwards: the micro-batches of one optimizer step, or inference.
    Copies are made on entering (of weights that are sharded: in the first forward inside, and not in compiled
    code) and end on leaving, but for those that backwards still need or a CUDA graph was captured with; the
    latter are made anew, in place, by ``quantize_weights()`` and by entering again. Contexts nest.

    Parameters
    ----------
    model : Module
        A layer, or what holds some.

    Raises
    ------
    RuntimeError
        In a forward of a layer whose weights have visibly changed inside: by a step of a torch optimizer over
        them, an in-place operation, or other storage in their place; in compiled code by the first of these
        only.

    Examples
    --------
    >>> import torch
    >>> from fp8moe.adapters.torch_moe import FP8FlowMoE, weights_unchanged
    >>> layer = FP8FlowMoE(64, 128, num_experts=4, topk=2)
    >>> with weights_unchanged(layer):
    ...     for _ in range(2):
    ...         layer(torch.ones(3, 64)).sum().backward()
    ...     held = layer.fp8_weight_nbytes
    >>> held > 0, layer.fp8_weight_nbytes
    (True, 0)
    """
    layers = [m for m in model.modules() if isinstance(m, FP8FlowMoE) and m.recipe != "bf16"]
    entered = []
    try:
        for layer in layers:
            entered.append(layer)
            layer._scopes += 1
            if layer._scopes == 1:
                layer._release()
                if all(is_whole(w, layer._ranks.mesh) for w in (layer.w13, layer.w2)):
                    layer._keep()
        yield
    finally:
        for layer in entered:
            layer._scopes -= 1
            if not layer._scopes:
                layer._release()


#: layers that have kept copies, as long as they live
_keeping: weakref.WeakSet[FP8FlowMoE] = weakref.WeakSet()
_keeping_lock = threading.Lock()  # a set must not grow while another thread goes through it


def _stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """A fused step counts no version."""
    with _keeping_lock:
        layers = list(_keeping)
    kept = [(layer, copies) for layer in layers if (copies := layer._copies) is not None]
    if not kept:
        return
    written = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for layer, copies in kept:
        if not written.isdisjoint((id(layer.w13), id(layer.w2))):
            copies.stepped = True


register_optimizer_step_post_hook(_stepped)


class _Copies:
    """FP8 copies of a layer's weights that outlive a forward.

    current: whether they may be used. stepped: an optimizer has changed the weights since. recorded: a
        forward with gradients has used them, so that one may have, unseen.
    captured: a CUDA graph reads them where they lie. of_capture: made while one was captured, so that they
        hold something only when it is replayed.
    """

    def __init__(self, layer: FP8FlowMoE, records: list[Quantized], captured: bool):
        self.records, self.tensors = records, arrays_in(tuple(records))
        self.current, self.stepped, self.recorded, self.captured = True, False, False, captured
        self.of_capture = _capturing(layer.w13)
        weights = {"w13": layer.w13, "w2": layer.w2}
        self._made_of = {name: (_storage(w), _view(w), _version(w)) for name, w in weights.items()}

    def changed(self, layer: FP8FlowMoE) -> str | None:
        """The name of a weight that has visibly changed."""
        for name, (storage, view, version) in self._made_of.items():
            w = getattr(layer, name)
            if self.stepped or (view, version) != (_view(w), _version(w)):
                return name
            if storage.expired() or storage != _storage(w):
                return name
        return None


def _storage(w: Tensor) -> StorageWeakRef:
    """fully_shard gathers weights into the same storage, at another address."""
    return StorageWeakRef(_memory(w).untyped_storage())


def _view(w: Tensor) -> Any:
    """Where in its storage: several sets of weights may lie in one buffer."""
    w = _memory(w)
    return w.storage_offset(), w.stride()


def _version(w: Tensor) -> int | None:
    w = _memory(w)
    return None if w.is_inference() else w._version


def _memory(w: Tensor) -> Tensor:
    return w._local_tensor if isinstance(w, DTensor) else w


def _changed(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name}: changed while the layer was told that it does not; leave weights_unchanged() before the "
        "optimizer's step, or pass is_first_microbatch=True after it"
    )


def _capturing(w: Tensor) -> bool:
    return w.is_cuda and torch.cuda.is_current_stream_capturing()
