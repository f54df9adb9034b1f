"""`diagnose`: a model's experts in FP8 beside the same in bfloat16, cast by cast.

While it runs, `_Run` computes the experts in place of `fp8moe.adapters.torch.experts`: no gradient reaches
the experts' weights, and what there is to measure of a layer is measured in its backward, when nothing of the
other layers is held but what autograd holds anyway.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from fp8moe.adapters import needs

with needs("torch"):
    import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fp8moe
from fp8moe import Quantized, QuantTensor
from fp8moe.activation import halves_of
from fp8moe.adapters.torch.diagnosis import (
    HALF_OF_SMALLEST,
    ROUNDING,
    Diagnosis,
    GradientDiagnosis,
    LayerDiagnosis,
    TensorDiagnosis,
    limit_of,
)
from fp8moe.adapters.torch.operands import Operands, codes_now, joined_weights, padded, round_up_to_block
from fp8moe.adapters.torch.stats import FORMAT, observers
from fp8moe.formats import FLOAT8_DTYPES, FORMATS
from fp8moe.layer.casts import UPSTREAM, casts_of, layer_in_bf16, rounded
from fp8moe.layer.options import LayerOptions
from fp8moe.layer.recipes import RecipeName
from fp8moe.runtime import checks, counters

__all__ = ["diagnose"]

#: e4m3's code of 1.0: a tensor of it, with the scales of another, is the scale of each value
_ONE = int(np.ones((), FLOAT8_DTYPES[FORMAT]).view(np.uint8))
#: largest e4m3 number that is subnormal, of the scale
_NORMAL = 2**-6
_CODES = torch.uint8, torch.float8_e4m3fn


def diagnose(
    model: nn.Module,
    batch: Tensor | tuple[Any, ...] | Mapping[str, Any] | Callable[[], Tensor],
    *,
    loss: Callable[[Any], Tensor] | None = None,
    recipe: RecipeName | None = None,
    save: str | None = None,
) -> Diagnosis:
    """Find which cast of which layer costs what, by one forward and backward in FP8 and one in bfloat16.

    Every layer that computes experts by this library is looked at: `FP8FlowMoE`, transformers' experts with
    ``experts_implementation="fp8moe"``, those of the other adapters, and calls of `moe_experts`. Tensors and
    gradients of a layer are compared with those of the same layer in bfloat16 from the same x, routing and
    dy, so that no error of another layer is among them; losses and the routers' gradients are those of the
    two runs of the model. The model is as before afterwards, also after an exception: gradients,
    ``main_grad``, buffers, modes, FP8 copies and the generators of random numbers.

    Parameters
    ----------
    model : Module
        A model in one process, in training or evaluation mode. Compiled modules run eagerly.
    batch : Tensor, tuple, mapping or callable
        Argument or arguments of the model; or a function without arguments that returns the loss.
    loss : callable or None
        Maps the model's output to the loss, a scalar; None: the output itself if it is one, or its ``loss``.
    recipe : "fp8_flow", "fp8_blockwise" or None
        Recipe to diagnose; None: each layer's own, and "fp8_flow" for one in "bf16".
    save : "bf16", "fp8" or None
        As in `moe_experts`; None: each layer's own, "bf16" with another recipe.

    Returns
    -------
    Diagnosis
        ``print`` of it is a table, ``findings`` what is beyond the limits.

    Raises
    ------
    TypeError, ValueError
        For another kind of batch or loss, and for a model whose backward meets no experts of this library.
    NotImplementedError
        For sharded parameters, DistributedDataParallel, expert parallelism and adapters (LoRA) of experts.

    Notes
    -----
    Needs memory for a layer's tensors in float32, several times; of the model in FP8, x, h and codes of each
    layer are held between forward and backward, also under checkpointing.

    Examples
    --------
    >>> import torch
    >>> from fp8moe.torch import FP8FlowMoE, diagnose
    >>> layer = FP8FlowMoE(hidden=64, ffn=96, num_experts=4, topk=2)
    >>> found = diagnose(layer, torch.randn(32, 64), loss=lambda y: y.square().sum())
    >>> found.findings, found.layers[0].tensors["x"].error < 2**-4
    ([], True)
    """
    _check_model(model)
    if recipe is not None:
        checks.choice("recipe", recipe, ("fp8_flow", "fp8_blockwise"))
    if save is not None:
        checks.choice("save", save, ("bf16", "fp8"))
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    compute = _loss_of(model, batch, loss)
    base = _Run(model)
    expected, grads_of_base = base(compute, parameters)
    run = _Run(model, recipe, save, base)
    value, grads = run(compute, parameters)
    if not run.layers:
        if run.calls:
            raise ValueError(
                f"model: got one in which no gradient reaches its experts ({', '.join(run.calls)}); wanted a "
                "loss that depends on them, and checkpointing with use_reentrant=False"
            )
        raise ValueError(
            "model: got one whose forward met no experts of this library; wanted FP8FlowMoE layers or "
            'transformers experts with experts_implementation="fp8moe"; fp8moe.torch.model_report(model) '
            "lists them"
        )
    layers, routers = [], set()
    for number, layer in sorted(run.layers.items()):
        names = [n for n in run.routers.get(number, ()) if grads.get(n) is not None]
        routers.update(names)
        if names:
            of_router = _compared([grads[n] for n in names], [grads_of_base[n] for n in names])
            layer = replace(layer, gradients={**layer.gradients, "router": of_router})
        layers.append(layer)
    others = [n for n, g in grads.items() if g is not None and n not in routers]
    rest = _compared([grads[n] for n in others], [grads_of_base[n] for n in others]) if others else None
    not_reached = tuple([name for name in run.calls if name not in run.reached])
    return Diagnosis(tuple(layers), value, expected, rest, not_reached)


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}; wanted a Module")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise NotImplementedError(
            "model: got a DistributedDataParallel; wanted its module; pass model.module"
        )
    if any(isinstance(p, DTensor) or hasattr(p, "_fsdp_flattened") for p in model.parameters()):
        raise NotImplementedError(
            "model: got sharded parameters; wanted whole ones in one process; load the checkpoint without "
            "fully_shard and expert parallelism"
        )


def _loss_of(model: nn.Module, batch: Any, loss: Any) -> Callable[[], Tensor]:
    """The loss as a function without arguments, checked."""
    if loss is not None and not callable(loss):
        raise TypeError(f"loss: got {type(loss).__name__}; wanted a function of the model's output, or None")
    is_function = callable(batch) and not isinstance(batch, (Tensor, Mapping))
    if is_function and loss is not None:
        raise TypeError("loss: got a function with a batch that computes the loss; wanted None")

    def compute() -> Tensor:
        if is_function:
            output: Any = batch()
        elif isinstance(batch, Mapping):
            output = model(**batch)
        elif isinstance(batch, (tuple, list)):
            output = model(*batch)
        else:
            output = model(batch)
        if loss is not None:
            output = loss(output)
        elif not isinstance(output, Tensor):
            output = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
        if not isinstance(output, Tensor) or output.numel() != 1 or not output.requires_grad:
            got = f"shape {list(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
            got += ", without a gradient" if isinstance(output, Tensor) and not output.requires_grad else ""
            raise ValueError(
                f"loss: got {got}; wanted a scalar with a gradient; pass loss=, a function of the model's "
                "output, or labels with the batch"
            )
        return output

    if not is_function and not isinstance(batch, (Tensor, Mapping, tuple, list)):
        raise TypeError(
            f"batch: got {type(batch).__name__}; wanted a tensor, a tuple, a mapping, or a function that "
            "returns the loss"
        )
    return compute


@contextlib.contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Restores what a forward and backward change."""
    # modes and counters, and what says that a micro-batch was the first
    attributes = [(m, dict(vars(m))) for m in model.modules()]
    # not codes of frozen weights, of which no forward writes any
    buffers = [(m, n, b) for m in model.modules() for n, b in m._buffers.items() if b is not None]
    values = [None if b.dtype in _CODES else b.clone() for *_, b in buffers]
    # of parameters whose gradient other kernels add to a main_grad: in host memory, as there may be many
    mains = [(p, p.main_grad, p.main_grad._version, p.main_grad.cpu()) for p in _with_main_grad(model)]
    parameters: list[Any] = [*model.parameters()]
    grads = [(p, p.grad, getattr(p, "grad_added_to_main_grad", None)) for p in parameters]
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - others' generator
    traces = counters.active.set(())
    devices = [*range(torch.cuda.device_count())] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        counters.active.reset(traces)
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002
        for p, grad, added in grads:
            p.grad = grad
            if added is not None:
                p.grad_added_to_main_grad = added
            elif hasattr(p, "grad_added_to_main_grad"):
                del p.grad_added_to_main_grad
        with torch.no_grad():
            for p, main, version, was in mains:
                p.main_grad = main
                if main._version != version:
                    main.copy_(was)
            for (module, name, buffer), was in zip(buffers, values, strict=True):
                module._buffers[name] = buffer
                if was is not None and not torch.equal(buffer, was):
                    buffer.copy_(was)
        for module, of_module in attributes:
            now = vars(module)
            for name in [name for name in now if name not in of_module]:
                del now[name]
            now.update(of_module)


def _with_main_grad(model: nn.Module) -> list[Any]:
    """Of experts none is: what computes them here adds nothing to it."""
    return [p for p in model.parameters() if isinstance(getattr(p, "main_grad", None), Tensor) and p.ndim < 3]


class _Run:
    """A forward and backward of a model, in bfloat16, or, beside the run ``base`` in bfloat16, in FP8."""

    def __init__(
        self, model: nn.Module, recipe: str | None = None, save: str | None = None, base: _Run | None = None
    ):
        self.model, self.recipe, self.save, self.base = model, recipe, save, base
        names = {id(m): name for name, m in model.named_modules()}
        self.names = {key: name.replace("_orig_mod.", "") for key, name in names.items()}
        self.parents = {id(child): m for m in model.modules() for child in m.children()}
        self.inside: list[nn.Module] = []
        self.calls: Counter[str] = Counter()
        self.ids: dict[str, Tensor] = {}
        self.layers: dict[int, LayerDiagnosis] = {}  # by the number of the call
        self.reached: set[str] = set()
        self.routers: dict[int, list[str]] = {}

    def __call__(
        self, compute: Callable[[], Tensor], parameters: Mapping[str, nn.Parameter]
    ) -> tuple[float, dict[str, Tensor | None]]:
        """The loss, and the gradients of the parameters that are no experts' weights."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_as_it_was(self.model))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            for module in self.model.modules():
                push = module.register_forward_pre_hook(lambda m, _: self.inside.append(m))
                pop = module.register_forward_hook(lambda *_: self._leave(), always_call=True)
                stack.callback(push.remove)
                stack.callback(pop.remove)
            thread = threading.get_ident()
            if thread in observers:
                raise RuntimeError("diagnose: got a call within another one; wanted one after the other")
            observers[thread] = self.experts
            stack.callback(observers.pop, thread)
            self.anchor = torch.zeros((), requires_grad=True)
            loss = compute()
            loss.register_hook(partial(self._observe_backward, stack))
            inputs = [self.anchor, *parameters.values()]
            _, *grads = torch.autograd.grad(loss, inputs, allow_unused=True)
            return loss.item(), dict(zip(parameters, grads, strict=True))

    def _observe_backward(self, stack: contextlib.ExitStack, _: Tensor) -> None:
        """Before any other node of it."""
        task = ~torch._C._current_graph_task_id()
        observers[task] = self.experts
        stack.callback(observers.pop, task)

    def _leave(self) -> None:
        self.inside.pop()

    def experts(
        self,
        x: Tensor,
        weights: Operands,
        ids: Tensor,
        probs: Tensor,
        options: LayerOptions,
        align_size: int,
        comm: Any,
        lora: Any,
    ) -> Tensor:
        """In place of `fp8moe.adapters.torch.experts.experts`."""
        module = self.inside[-1] if self.inside else self.model
        name = self.names.get(id(module), "") or "(model)"
        for what, given in (("expert parallelism", comm), ("adapters (LoRA)", lora)):
            if given is not None:
                raise NotImplementedError(
                    f"{name}: got experts with {what}; wanted them without; load the model in one process, "
                    "and merge adapters before"
                )
        own_name, number = name, self.calls[name]
        self.calls[name] += 1
        name += f"[{number}]" * bool(number)
        permuted = align_size > 0
        if permuted:
            ids, probs = _as_tokens(ids, align_size, len(x)), probs[:, None]
        self.ids[name] = ids
        call: _Call
        if self.base is None:
            call = _Call(weights, ids, options)
        else:
            call = _Measured(weights, ids, _to_diagnose(options, self.recipe, self.save))
            order = sum(self.calls.values())
            rerouted = None if permuted else _rerouted(ids, self.base.ids.get(name))
            names = self._routers_of(module, call.w2.shape[0])

            def report(tensors: Any, gradients: Any) -> None:
                self.reached.add(own_name)
                o = call.options
                about = name, type(module).__name__, o.recipe, o.save, len(x), rerouted
                self.layers[order], self.routers[order] = LayerDiagnosis(*about, tensors, gradients), names

            call.report = report
        y: Tensor = _Experts.apply(x.to(torch.bfloat16), probs, call.bias13, self.anchor, call)
        return y.to(x.dtype)

    def _routers_of(self, module: nn.Module, experts: int) -> list[str]:
        """Names of the router's weights [E, H]: the layer's own, or those beside it. Biases [E, H] are
        beside weights of three dimensions."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        for of in (module, self.parents.get(id(module))):
            own = []
            for m in of.modules() if of is not None else ():
                beside = [*m.parameters(recurse=False)]
                if all(p.ndim < 3 for p in beside):
                    own += [names[id(p)] for p in beside if p.ndim == 2 and len(p) == experts]
            if own:
                return own
        return []


def _as_tokens(counts: Tensor, align_size: int, rows: int) -> Tensor:
    """Expert ids [N, 1] of rows that are permuted, which then are tokens with one expert each."""
    padded_counts = (counts.long() + align_size - 1) // align_size * align_size
    ends = padded_counts.cumsum(0)
    row = torch.arange(rows, device=counts.device)
    expert = torch.searchsorted(ends, row, right=True).clamp(max=len(counts) - 1)
    real = row < (ends - padded_counts + counts)[expert]
    return torch.where(real, expert, -1)[:, None].contiguous()


def _rerouted(ids: Tensor, of_base: Tensor | None) -> int | None:
    if of_base is None or of_base.shape != ids.shape:
        return None
    return int((ids.sort(-1).values != of_base.sort(-1).values).any(-1).sum())


def _to_diagnose(options: LayerOptions, recipe: str | None, save: str | None) -> LayerOptions:
    recipe = recipe or (options.recipe if options.precision.quantizes else "fp8_flow")
    if save is None:
        save = options.save if recipe == options.recipe else "bf16"
    recompute = None if save == "fp8" else options.recompute
    backend = options.backend if options.precision.quantizes else None
    given: dict[str, Any] = {"recipe": recipe, "save": save, "recompute": recompute, "backend": backend}
    return replace(options, **given)


class _Experts(torch.autograd.Function):
    """Experts whose weights get no gradient. The anchor has autograd call every backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, probs: Tensor, bias13: Tensor | None, anchor: Tensor, call: _Call
    ) -> Tensor:
        ctx.call, ctx.dtype = call, probs.dtype
        return call.forward(x, probs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        dx, dprobs, dbias13 = ctx.call.backward(dy.contiguous())
        return dx, dprobs.to(ctx.dtype), dbias13, None, None


class _Call:
    """The experts of one forward in bfloat16.

    masters: w13 [E, 2F, H] and w2 [E, H, F], with F padded to blocks; None for weights that are codes, which
    are then what they stand for."""

    def __init__(self, weights: Operands, ids: Tensor, options: LayerOptions):
        self.ids, self.options = ids, options
        halves, codes = halves_of(options.activation.kind), weights.codes
        given: list[Any] = [*weights.masters]
        if any(w is None for w in given):
            given = [fp8moe.dequantize(w.rowwise, dtype="bfloat16") for w in codes]  # type: ignore[union-attr]
        given = [tuple(t.detach() for t in w) if isinstance(w, tuple) else w.detach() for w in given]
        missing = round_up_to_block(given[1].shape[2]) - given[1].shape[2]
        self.masters = [
            w.float() if w.dtype == torch.float64 else w for w in joined_weights(given, halves, missing)
        ]
        self.codes = codes
        self.w13, self.w2 = (w.to(torch.bfloat16) for w in self.masters)
        self.bias13 = weights.bias13
        if self.bias13 is not None:
            width = self.bias13.shape[1] // halves
            self.bias13 = padded(self.bias13.float(), 1, halves, self.w2.shape[2] - width).contiguous()

    @property
    def bias(self) -> Tensor | None:
        return None if self.bias13 is None else self.bias13.detach()

    def forward(self, x: Tensor, probs: Tensor) -> Tensor:
        how: dict[str, Any] = {"recipe": "bf16", "activation": self.options.activation, "bias13": self.bias}
        y, self.saved = fp8moe.moe_forward(x, self.w13, self.w2, self.ids, probs.detach(), **how)
        return y

    def backward(self, dy: Tensor) -> tuple[Any, Any, Any]:
        gradients = ("dx", "dprobs", *(() if self.bias is None else ("dbias13",)))
        grads = fp8moe.moe_backward(self.saved, dy, gradients=gradients)
        del self.saved
        return grads.dx, grads.dprobs, grads.dbias13


class _Measured(_Call):
    """The experts of one forward in FP8, which are measured in their backward."""

    report: Callable[[Any, Any], None]

    def forward(self, x: Tensor, probs: Tensor) -> Tensor:
        self.x, self.probs = x.detach(), probs.detach()
        if self.codes is None or not all(isinstance(w, Quantized) for w in self.codes):
            self.codes = codes_now(self.masters, self.options)
        arguments = {**self.options.arguments, "bias13": self.bias}
        w13, w2 = self.codes
        y, self.saved = fp8moe.moe_forward(self.x, w13, w2, self.ids, self.probs, **arguments)
        self.y = y.detach()
        return y

    def backward(self, dy: Tensor) -> tuple[Any, Any, Any]:
        grads, operands = fp8moe.moe_backward_input(self.saved, dy)
        of_weights = fp8moe.moe_backward_weight(operands)
        options, plan = self.options, self.saved.plan
        casts = casts_of(options)
        how: Any = self.x, dy, self.w13, self.w2, self.bias, self.probs, plan, options
        compute: Any = layer_in_bf16
        base = compute(*how)
        gradients = {"dx": grads.dx, "dprobs": grads.dprobs, "dw13": of_weights.dw13, "dw2": of_weights.dw2}
        compared = {n: _compared([g], [getattr(base, n)], limit_of(n, casts)) for n, g in gradients.items()}
        of_casts: dict[str, dict[str, float]] = {name: {} for name in gradients}
        for cast in casts:
            alone = compute(*how, (cast,))
            for name, costs in of_casts.items():
                if cast in UPSTREAM[name]:
                    costs[cast] = _compared([getattr(alone, name)], [getattr(base, name)]).error
        compared = {name: replace(g, of_casts=of_casts[name]) for name, g in compared.items()}
        self.report(self._tensors(dy, operands, base, casts), compared)
        dbias13 = None if self.bias is None else of_weights.dbias13
        del self.saved, self.x, self.y, self.codes
        return grads.dx, grads.dprobs, dbias13

    def _tensors(
        self, dy: Tensor, operands: Any, base: Any, casts: tuple[str, ...]
    ) -> dict[str, TensorDiagnosis]:
        w13, w2 = self.codes  # type: ignore[misc]
        rows = int(self.saved.plan.expert_offsets[-1])
        found: dict[str, TensorDiagnosis] = {}
        for name in ("x", "w13", "h", "a", "w2", "y", "dy", "dh", "x^T", "a^T", "dy^T", "dh^T"):
            kind, exact = name.removesuffix("^T"), name.endswith("^T")
            if name in ("w13", "w2"):
                master, codes = (self.masters[0], w13) if name == "w13" else (self.masters[1], w2)
                found[name] = _measured(master, codes.rowwise)
            elif name == "y":
                found[name] = TensorDiagnosis(deviation=_error(self.y, base.y))
            elif kind in casts:
                r = rounded(self.x, dy, w13, w2, self.saved, operands, name)
                own = (
                    kind in ("x", "dy") and not exact and self.options.precision.scaling_aware
                )  # not permuted yet
                number = len(r.before) if own else rows
                against = getattr(base, kind)[:rows] if kind in ("h", "a", "dh") else None
                found[name] = _measured(r.before[:number], r.codes, number, against, exact)
            else:
                h = rounded(self.x, dy, w13, w2, self.saved, operands, "h").before
                found[name] = TensorDiagnosis(deviation=_error(h[:rows], base.h[:rows]))
        return found


def _measured(
    before: Tensor,
    codes: QuantTensor,
    rows: int | None = None,
    against: Tensor | None = None,
    exact: bool = False,
) -> TensorDiagnosis:
    """rows: of the codes that count. against: the tensor in bfloat16. exact: ``before`` is of codes, which
    only values below the normal ones lose bits of."""
    values = before.float()
    scales = fp8moe.dequantize(replace(codes, data=torch.full_like(codes.data, _ONE)))[:rows]
    after = fp8moe.dequantize(codes)[:rows]
    finite, magnitudes = values.isfinite(), values.abs()
    nonzero, bad = values != 0, ~finite
    number = int(nonzero.sum())
    saturated = (magnitudes > scales * FORMATS[FORMAT].max).sum()
    flushed = (finite & nonzero & (after == 0)).sum()
    if exact:
        bound = torch.where(magnitudes < scales * _NORMAL, scales * HALF_OF_SMALLEST, 0.0)
    else:
        bound = torch.maximum(magnitudes * ROUNDING, scales * HALF_OF_SMALLEST)
    bound = torch.where(finite & nonzero, bound, 0.0)
    values = torch.where(finite, values, 0.0)
    size, difference = _norm(values), torch.where(finite, after - values, 0.0)
    exponents = None
    if number:
        used = scales[nonzero].log2()
        exponents = int(used.min()), int(used.max())
    return TensorDiagnosis(
        error=_ratio(_norm(difference), size),
        limit=_ratio(_norm(bound), size),
        deviation=None if against is None else _error(after, against),
        saturated=int(saturated) / max(number, 1),
        flushed=int(flushed) / max(number, 1),
        lost=max(_lost(difference, values, dim) for dim in ((-1, -2) if values.ndim == 3 else (-2,))),
        nonfinite=int(bad.sum()),
        nonfinite_rows=int(bad.flatten(0, -2).any(-1).sum()),
        exponents=exponents,
    )


def _lost(difference: Tensor, values: Tensor, dim: int) -> float:
    """`TensorDiagnosis.lost` of the vectors along a dimension."""
    if not values.numel():
        return 0.0
    size = values.abs().amax(dim, keepdim=True)
    unit = torch.where(size == 0, 1.0, size)  # squares of values that are small would be zero
    norms, errors = ((t / unit).square().sum(dim) for t in (values, difference))
    present = norms > 0
    return float((present & (errors > norms * ROUNDING**2)).sum() / present.sum().clamp(min=1))


def _norm(t: Tensor) -> float:
    """In float64; of values whose squares float32 cannot hold, too."""
    largest = float(t.abs().max()) if t.numel() else 0.0
    if largest == 0 or largest != largest or largest == float("inf"):
        return largest
    return largest * float((t / largest).square().sum(dtype=torch.float64).sqrt())


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0 if a == 0 else float("inf")


def _error(t: Tensor, expected: Tensor) -> float:
    wide = expected.float()
    return _ratio(_norm(t.float() - wide), _norm(wide))


def _compared(given: list[Any], expected: list[Any], limit: float | None = None) -> GradientDiagnosis:
    """Gradients beside those of bfloat16, as one vector; in float64, tensor by tensor."""
    dot = own = of_base = difference = 0.0
    for g, e in zip(given, expected, strict=True):
        a, b = (_dense(t).double() for t in (g, e))
        dot, own, of_base = (
            dot + float((a * b).sum()),
            own + float(a.square().sum()),
            of_base + float(b.square().sum()),
        )
        difference += float((a - b).square().sum())
    norms = own**0.5, of_base**0.5
    cosine = dot / (norms[0] * norms[1]) if norms[0] * norms[1] else 1.0 if norms == (0, 0) else 0.0
    return GradientDiagnosis(cosine, _ratio(*norms), _ratio(difference**0.5, norms[1]), limit, {})


def _dense(t: Tensor) -> Tensor:
    return t.to_dense() if t.is_sparse else t
