"""Functions of fp8moe for torch tensors: eager, compiled, differentiated; each by one declaration.

Plain tensors in eager mode go straight to the core, where torch's dispatcher would cost the host some 25 us a
call. What a compiler traces goes to the operator, what needs a gradient to a `torch.autograd.Function` of
operators, which serves both.
"""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fp8moe import PermutationPlan, QuantTensor
from fp8moe.adapters.torch_library import PLAIN, Operator, operator_of
from fp8moe.records import METADATA_TYPES, Options

Core = TypeVar("Core", bound=Callable[..., Any])
Values = dict[str, Any]  # the arguments of a call, by name

#: where the public functions stand
MODULE = "fp8moe.adapters.torch_ops"
DIFFERENTIABLE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Gradient(NamedTuple):
    """A gradient, of operators.

    of: the arguments that have one, the rows first. saves: those that ``backward`` reads, from all of them.
    backward: from the arguments, of which tensors that are not saved are their shapes, and the gradients of
    the results, to those of ``of``; None, or fewer, where there are none.
    """

    of: tuple[str, ...]
    saves: Callable[[Values], tuple[str, ...]]
    backward: Callable[..., Any]


def operation(
    core: Core,
    returned: Any,
    build: Callable[..., Any] | None = None,
    *,
    results: Callable[[Any], Any] | None = None,
    without: Collection[str] = (),
    gradient: Gradient | None = None,
    prepare: Callable[[Any, Values], Any] | None = None,
    note: str = "",
) -> Core:
    """The core's function for tensors.

    returned, results, without: of its operator (`operator_of`). build: the result, of the arguments and the
    operator's tensors; by default its one tensor. gradient: without one, nothing comes back through the
    results. prepare: takes this function and the arguments of a call that is traced or differentiated; may
    change them, or return the result itself. note: a paragraph of the docstring.
    """
    operator = operator_of(core, returned, results=results, without=without)
    names, defaults = operator.names, {n: p.default for n, p in inspect.signature(core).parameters.items()}
    run = operator if gradient is None else _differentiable(operator, gradient)

    def traced(values: Values) -> Any:
        result = None if prepare is None else prepare(call, values)
        if result is not None:
            return result
        if gradient is not None:
            rows = values[gradient.of[0]]
            if isinstance(rows, QuantTensor):
                return core(**values)
            _check_differentiable(gradient.of[0], rows)
        for name in without:
            if values[name] != defaults[name]:
                raise TypeError(
                    f"{name}: got {values[name]!r} in compiled code or with fake tensors; wanted "
                    f"{defaults[name]!r}"
                )
        tensors = run(*(values[n] if gradient else detached(values[n]) for n in names))
        if build is None:
            return tensors
        return build(values, *((tensors,) if isinstance(tensors, Tensor) else tensors))

    call = public(core, traced, () if gradient is None else gradient.of, note)
    return call


def public(core: Core, traced: Callable[[Values], Any], differentiable: tuple[str, ...], note: str) -> Core:
    """The core's function for tensors, ``traced`` where a compiler traces the call or a gradient is wanted.

    differentiable: the arguments that have a gradient; where there are none, nobody wants one. note: a
    paragraph of the docstring.
    """
    parameters = inspect.signature(core).parameters
    names, required = list(parameters), {n for n, p in parameters.items() if p.default is p.empty}
    defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
    # what the core takes as an array, or as the codes that it is made of
    arrays = {n for n, p in parameters.items() if "ArrayLike" in p.annotation or n == "q"}

    @functools.wraps(core)
    def call(*arguments: Any, **options: Any) -> Any:
        if not torch.compiler.is_compiling():
            plain, needs_grad = True, False
            for value in (*arguments, *options.values()):
                kind = type(value)
                if kind is QuantTensor:
                    value = value.data
                    kind = type(value)
                if kind in PLAIN:
                    needs_grad = needs_grad or value.requires_grad
                elif kind not in _NO_ARRAYS:
                    check_arrays(values_of(arguments, options))
                    plain = plain and not isinstance(value, Tensor)
            if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
                _refuse_transforms(values_of(arguments, options))
            if plain:
                if not needs_grad or not torch.is_grad_enabled():
                    return core(*arguments, **options)
                if not differentiable:
                    return core(*map(detached, arguments), **{n: detached(v) for n, v in options.items()})
        values = values_of(arguments, options)
        check_arrays(values)
        return traced(values)

    def values_of(arguments: tuple[Any, ...], options: Values) -> Values:
        values = {**defaults, **dict(zip(names, arguments, strict=False)), **options}
        if len(values) != len(names) or len(arguments) > len(names):
            wrong = [n for n in names if n not in values] or sorted(set(values) - set(names))
            raise TypeError(f"{core.__name__}: got arguments {list(values)}; wanted {names}: {wrong}")
        return {n: values[n] for n in names}

    def check_arrays(values: Values) -> None:
        for name in arrays:
            value = values[name]
            if isinstance(value, QuantTensor):
                value = value.data
            if isinstance(value, (Tensor, list, tuple)) or (value is None and name not in required):
                continue
            raise TypeError(
                f"{name}: got {type(value).__module__}.{type(value).__qualname__}; wanted a torch tensor"
            )

    call.__module__ = MODULE
    call.__doc__ = _documented(core, differentiable, note)
    return call  # type: ignore[return-value]


#: types of arguments that hold no array that is looked at here; a plan's lies where its rows do
_NO_ARRAYS = frozenset((*METADATA_TYPES, PermutationPlan, tuple, list, *Options.__subclasses__()))


def detached(value: Any) -> Any:
    """A tensor that requires a gradient without it; what else there is as it is."""
    return value.detach() if isinstance(value, Tensor) and value.requires_grad else value


def needs_grad(*values: Any) -> bool:
    """Whether autograd is to follow one of these; a QuantTensor has no gradient."""
    return torch.is_grad_enabled() and any(isinstance(v, Tensor) and v.requires_grad for v in values)


def has_gradient(x: Any) -> bool:
    """Whether rows are of a kind that has a gradient; codes are not."""
    return isinstance(x, Tensor) and x.dtype in DIFFERENTIABLE


def _check_differentiable(name: str, x: Any) -> None:
    if x.dtype not in DIFFERENTIABLE and x.requires_grad:
        raise TypeError(
            f"{name}: got {x.dtype} rows that require grad; wanted bfloat16, float16, float32 or float64 "
            f"ones; pass {name}.detach()"
        )


def _refuse_transforms(values: Values) -> None:
    if torch._C._are_functorch_transforms_active():  # where tensors of the outside have no address either
        first = next(iter(values))
        raise TypeError(
            f"{first}: got under a transform of torch.func (vmap, grad, vjp, jvp or jacrev); wanted "
            "outside of any, there are no rules for them here; differentiate with torch.autograd.grad or "
            "backward(), and in place of vmap put the batch into the rows or loop over it"
        )
    for name, v in values.items():
        if isinstance(v, Tensor) and forward_ad.unpack_dual(v).tangent is not None:
            raise TypeError(
                f"{name}: got a tensor with a tangent of forward-mode differentiation; wanted a plain one; "
                "differentiate with torch.autograd.grad or backward()"
            )


def _documented(core: Callable[..., Any], differentiable: tuple[str, ...], note: str) -> str:
    """The core's docstring, of tensors, and what has a gradient among its notes."""
    if differentiable:
        gradients = f"Differentiable in {' and '.join(f'``{n}``' for n in differentiable)}, once."
    else:
        gradients = "Results have no gradient: tensors that require one are taken as by ``detach()``."
    text = inspect.getdoc(core) or ""
    text = text.replace("ArrayLike", "Tensor")
    before, heading, examples = text.partition("Examples\n--------\n")
    paragraph = f"{textwrap.fill(f'{gradients} {note}'.strip(), 106)}\n\n"
    if "Notes\n-----\n" in before:
        paragraph = f"\n{paragraph}"
        before = before.rstrip("\n") + "\n"
    else:
        paragraph = f"Notes\n-----\n{paragraph}"
    return f"{before}{paragraph}{heading}{examples}"


# ---------------------------------------------------------------- gradients


def _differentiable(operator: Operator, gradient: Gradient) -> Callable[..., Any]:
    """The operator with its gradient, the same in eager mode and in compiled code."""
    names = operator.names
    places = [names.index(n) for n in gradient.of]

    def forward(ctx: Any, *arguments: Any) -> Any:
        results = operator.run(*arguments)
        values = dict(zip(names, arguments, strict=True))
        kept = gradient.saves(values)
        saved = []
        for name, value in values.items():
            if isinstance(value, Tensor):
                values[name] = value.shape
            if name in kept:
                plan = type(value) is PermutationPlan
                saved.append(value.data if plan else value)
                if plan:
                    values[name] = _with_data(value, None)
        ctx.save_for_backward(*saved)
        ctx.kept, ctx.values = [n for n in names if n in kept], values
        if isinstance(results, Tensor):
            return results
        integers = [t for t in results if not t.is_floating_point()]
        if integers:
            ctx.mark_non_differentiable(*integers)
        return tuple(results) if len(results) > 1 else results[0]

    def backward(ctx: Any, *grads: Any) -> Any:
        values = dict(ctx.values)
        for name, tensor in zip(ctx.kept, ctx.saved_tensors, strict=True):
            value = values[name]
            values[name] = _with_data(value, tensor) if type(value) is PermutationPlan else tensor
        values["needs_input_grad"] = [ctx.needs_input_grad[n] for n in places]
        found = gradient.backward(values, *(None if g is None else g.contiguous() for g in grads))
        returned: list[Any] = [None] * len(names)
        for place, grad in zip(places, found, strict=False):
            returned[place] = grad
        return tuple(returned)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(_once_differentiable(backward))}
    title = operator.op.overloadpacket.__name__.title().replace("_", "")
    function: Any = type(title, (torch.autograd.Function,), methods)

    # Dynamo takes this into its graph as it is and AOTAutograd traces it: Dynamo itself loses symbolic sizes
    # that a forward keeps for its backward (torch 2.13).
    @torch.compiler.allow_in_graph
    def apply_flat(*flat: Any) -> Any:
        return function.apply(*operator.unflatten(flat))

    def apply(*arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            return apply_flat(*operator.flatten(arguments))
        return function.apply(*arguments)

    return apply


def _with_data(plan: PermutationPlan, data: Any) -> PermutationPlan:
    """The plan with another array of its own kind, or none."""
    new: PermutationPlan = object.__new__(PermutationPlan)
    new.__dict__.update(plan.__dict__, data=data)
    return new


_TWICE = (
    "the gradient of a function of fp8moe.adapters.torch_ops is differentiated, which is not twice "
    "differentiable; leave out create_graph=True, or detach() its results"
)


class _Once(torch.autograd.Function):
    """A backward as a function of the incoming gradients and of what was saved, which has no gradient."""

    @staticmethod
    def forward(ctx: Any, backward: Any, saved: Any, count: int, *tensors: Any) -> Any:
        return backward(saved, *tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(_TWICE)


def _once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.autograd.function.once_differentiable`, which lets results pass for constants where the incoming
    gradient is one, and where `torch.autograd.grad` is asked for a gradient of something before them."""

    def run(ctx: Any, *grads: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        return _Once.apply(backward, ctx, len(grads), *grads, *ctx.saved_tensors)

    return run
