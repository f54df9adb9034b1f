"""Functions of fp8moe for torch tensors: eager, compiled, differentiated; each by one declaration.

Plain tensors in eager mode go straight to the core, where torch's dispatcher would cost the host some 25 us a
call. What a compiler traces goes to the operator, what needs a gradient to a `torch.autograd.Function` of
operators, which serves both.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fp8moe import PermutationPlan, Quantized, QuantTensor
from fp8moe.adapters.torch_library import PLAIN, Operator, once_differentiable, operator_of, refuse_export
from fp8moe.docstrings import differentiable_in, docstring_of
from fp8moe.record_trees import METADATA_TYPES
from fp8moe.records import Options

Core = TypeVar("Core", bound=Callable[..., Any])
Values = dict[str, Any]  # the arguments of a call, by name

#: where the public functions stand
MODULE = "fp8moe.adapters.torch_ops"
DIFFERENTIABLE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Gradient(NamedTuple):
    """A gradient, of operators.

    of: the arguments that have one, the rows first. saves: those that ``backward`` reads, from all of them.
    backward: from the arguments, of which tensors that are not saved are None, with how many "rows" there
    were and the "node" of autograd's graph, and from the gradients of the results, to those of ``of``; None,
    or fewer, where there are none.
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
    codes: Callable[[Any, Values], Any] | None = None,
    note: str = "",
) -> Core:
    """The core's function for tensors.

    returned, results, without: of its operator (`operator_of`). build: the result, of the arguments and the
    operator's tensors; by default its one tensor. gradient: without one, nothing comes back through the
    results. prepare: takes this function and the arguments of a call that is traced or differentiated; may
    change them, or return the result itself. codes: the same where the rows are codes, which have no
    gradient, and something beside them requires one. note: a paragraph of the docstring.
    """
    operator = operator_of(core, returned, results=results, without=without)
    names, defaults = operator.names, {n: p.default for n, p in inspect.signature(core).parameters.items()}
    run, first = operator if gradient is None else _differentiable(operator, gradient), names[0]

    def traced(values: Values) -> Any:
        if prepare is not None:
            result = prepare(call, values)
            if result is not None:
                return result
        if gradient is not None:
            rows = values[first]
            if rows is None:
                raise _no_tensor(first, rows)
            if type(rows) is QuantTensor or rows.dtype not in DIFFERENTIABLE:
                result = _of_codes(values)
                if result is not None:
                    return result
        for name in without:
            if values[name] != defaults[name]:
                raise TypeError(
                    f"{name}: got one in compiled code or with fake tensors; wanted {defaults[name]}, "
                    "which is all that the operator does; call it outside of torch.compile"
                )
        arguments = [values[n] for n in names]
        tensors = run(*map(detached, arguments) if gradient is None else arguments)
        if build is None:
            return tensors
        return build(values, *((tensors,) if isinstance(tensors, Tensor) else tensors))

    def _of_codes(values: Values) -> Any:
        """Codes have no gradient; what is computed beside them may have one."""
        rows = values[first]
        if isinstance(rows, Tensor) and rows.requires_grad:
            raise TypeError(
                f"{first}: got {rows.dtype} rows that require grad; wanted bfloat16, float16, float32 or "
                f"float64 ones; pass {first}.detach()"
            )
        if codes is not None and torch.is_grad_enabled() and any(map(_requires_grad, values.values())):
            return codes(call, values)
        return core(**values) if isinstance(rows, QuantTensor) else None

    call = public(core, traced, () if gradient is None else gradient.of, note)
    return call


def public(core: Core, traced: Callable[[Values], Any], differentiable: tuple[str, ...], note: str) -> Core:
    """The core's function for tensors, ``traced`` where a compiler traces the call or a gradient is wanted.

    differentiable: the arguments that have a gradient; where there are none, results have none. note: a
    paragraph of the docstring.
    """
    parameters = inspect.signature(core).parameters
    names, required = list(parameters), {n for n, p in parameters.items() if p.default is p.empty}
    defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
    by_position = [n for n, p in parameters.items() if p.kind is not p.KEYWORD_ONLY]
    # what the core takes as an array, or as the codes that it is made of
    arrays = {n for n, p in parameters.items() if "ArrayLike" in p.annotation or n == "q"}

    @documented(core, differentiable, note)
    def call(*arguments: Any, **options: Any) -> Any:
        plain, needs_grad = not torch.compiler.is_dynamo_compiling(), False
        if plain:
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
                _refuse_transforms(names, values_of(arguments, options))
            if plain:
                if not needs_grad or not torch.is_grad_enabled():
                    return core(*arguments, **options)
                if not differentiable:
                    return core(*map(detached, arguments), **{n: detached(v) for n, v in options.items()})
        values = values_of(arguments, options)
        if not plain:
            check_arrays(values)
        return traced(values)

    def values_of(arguments: tuple[Any, ...], options: Values) -> Values:
        given = dict(zip(by_position, arguments, strict=False)) | options
        values = defaults | given
        if len(values) != len(names) or len(given) != len(arguments) + len(options):
            raise TypeError(
                f"{core.__name__}: got {len(arguments)} arguments by position and {list(options)} by name; "
                f"wanted {core.__name__}{inspect.signature(core)}"
            )
        return values

    def check_arrays(values: Values) -> None:
        for name in arrays:
            value = values[name]
            if type(value) in PLAIN:
                continue
            if isinstance(value, QuantTensor):
                value = value.data
            if isinstance(value, (Tensor, list, tuple)) or (value is None and name not in required):
                continue
            raise _no_tensor(name, value)

    return call  # type: ignore[no-any-return]


def documented(core: Any, differentiable: tuple[str, ...], note: str) -> Callable[[Any], Any]:
    """A function with the core's name, signature and docstring, of tensors."""

    def declare(call: Any) -> Any:
        functools.update_wrapper(call, core)
        call.__module__, call.__doc__ = MODULE, _documented(core, differentiable, note)
        return call

    return declare


#: types of arguments whose arrays are not checked here; a plan's lies where its rows do
_NO_ARRAYS = frozenset((*METADATA_TYPES, PermutationPlan, tuple, list, *Options.__subclasses__()))


def detached(value: Any) -> Any:
    """A tensor that requires a gradient without it; what else there is as it is."""
    return value.detach() if isinstance(value, Tensor) and value.requires_grad else value


def _requires_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _no_tensor(name: str, x: Any) -> TypeError:
    return TypeError(f"{name}: got {type(x).__module__}.{type(x).__qualname__}; wanted a torch tensor")


def check_float(name: str, x: Any, dimensions: int = 1) -> None:
    """A floating-point tensor of at least so many dimensions; of quantised weights nothing is asked here."""
    if isinstance(x, Quantized):
        return
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}; wanted a tensor")
    if not x.is_floating_point():
        raise TypeError(f"{name}: got dtype {x.dtype}; wanted a floating-point dtype; pass {name}.float()")
    if x.ndim < dimensions:
        raise ValueError(f"{name}: got shape {list(x.shape)}; wanted at least {dimensions} dimensions")


def refuse_transforms(name: str) -> None:
    if torch._C._are_functorch_transforms_active():  # where tensors of the outside have no address either
        raise NotImplementedError(
            f"{name}: got under a transform of torch.func (vmap, grad, vjp, jvp or jacrev); wanted outside "
            "of any, there are no rules for them here; differentiate with torch.autograd.grad or backward(), "
            "and in place of vmap put the batch into the rows or loop over it"
        )


def _refuse_transforms(names: list[str], values: Values) -> None:
    refuse_transforms(names[0])
    for name in names:
        value = values[name]
        if isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None:
            raise NotImplementedError(
                f"{name}: got a tensor with a tangent of forward-mode differentiation; wanted a plain one; "
                "differentiate with torch.autograd.grad or backward()"
            )


def _documented(core: Callable[..., Any], differentiable: tuple[str, ...], note: str) -> str:
    """The core's docstring, of tensors, and what has a gradient among its notes."""
    if differentiable:
        gradients = f"{differentiable_in(differentiable)}, once."
    else:
        gradients = "Results have no gradient: tensors that require one are taken as by ``detach()``."
    return docstring_of(core, "Tensor", f"{gradients} {note}")


# ---------------------------------------------------------------- gradients


def _differentiable(operator: Operator, gradient: Gradient) -> Callable[..., Any]:
    """The operator with its gradient, the same in eager mode and in compiled code."""
    names, run = operator.names, operator.run
    places, nothing = [names.index(n) for n in gradient.of], dict.fromkeys(operator.tensors)

    def forward(ctx: Any, *arguments: Any) -> Any:
        results = run(*arguments)
        values = dict(zip(names, arguments, strict=True))
        kept, saved = gradient.saves(values), []
        for name in kept:
            value = values[name]
            if type(value) is PermutationPlan:
                values[name] = value.__dict__ | {"data": None}
                value = value.data
            saved.append(value)
        values.update(nothing, rows=arguments[0].shape[0])
        ctx.save_for_backward(*saved)
        ctx.kept, ctx.values = kept, values
        if type(results) is not list:
            return results
        return tuple(results) if len(results) > 1 else results[0]

    def backward(ctx: Any, *grads: Any) -> Any:
        values = dict(ctx.values)
        for name, tensor in zip(ctx.kept, ctx.saved_tensors, strict=True):
            fields = values[name]
            values[name] = _plan_with(fields, tensor) if type(fields) is dict else tensor
        values["node"] = ctx
        given = gradient.backward(values, *(None if g is None else g.contiguous() for g in grads))
        returned: list[Any] = [None] * len(names)
        for place, grad in zip(places, given, strict=False):
            returned[place] = grad
        return tuple(returned)

    # compiled autograd runs it as it is, in place of tracing the library
    once = torch.compiler.disable(once_differentiable(backward))
    methods = {"forward": staticmethod(forward), "backward": staticmethod(once)}
    title = operator.op.overloadpacket.__name__.title().replace("_", "")
    function: Any = type(title, (torch.autograd.Function,), methods)

    # as `fp8moe.adapters.torch_library.differentiable`, of arguments as Dynamo's graph has them
    @torch.compiler.allow_in_graph
    def apply_flat(*flat: Any) -> Any:
        return function.apply(*operator.unflatten(flat))

    # what `torch.autograd.Function.apply` looks for beside, transforms and their leftovers, is refused before
    apply_eager = super(torch.autograd.Function, function).apply

    def apply(*arguments: Any) -> Any:
        refuse_export(*arguments)
        if torch.compiler.is_dynamo_compiling():
            return apply_flat(*operator.flatten(arguments))
        return apply_eager(*arguments)

    return apply


def _plan_with(fields: dict[str, Any], data: Tensor) -> PermutationPlan:
    """A plan that was in a forward, from its fields, which were checked then, and its saved array."""
    plan: PermutationPlan = object.__new__(PermutationPlan)
    plan.__dict__.update(fields, data=data)
    return plan
