"""Functions of fp8moe for torch tensors: eager, compiled and differentiable, each from one declaration.

In eager mode calls with plain tensors go directly to the core, because torch's dispatcher would cost the host
about 25 us per call. Calls that a compiler traces or a dispatch mode sees use the operator; calls that need
gradients use a `torch.autograd.Function` of operators, which works in both modes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized

from fp8moe import PermutationPlan, Permuted, Quantized, QuantTensor, SortedChunks
from fp8moe.adapters.torch.halves import asked_for
from fp8moe.adapters.torch.library import (
    PLAIN,
    Operator,
    differentiable,
    dispatch_modes,
    once_differentiable,
    operator_of,
    records_operators,
    refuse_export,
)
from fp8moe.records import Options
from fp8moe.runtime import checks
from fp8moe.runtime.docstrings import differentiable_in, docstring_of
from fp8moe.runtime.interop.torch import check_memory, nested
from fp8moe.runtime.record_trees import METADATA_TYPES, arrays_in

Core = TypeVar("Core", bound=Callable[..., Any])
Values = dict[str, Any]  # arguments of a call, by name

#: module of the public functions
MODULE = "fp8moe.torch"
DIFFERENTIABLE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Gradient(NamedTuple):
    """The gradient of an operation, computed by operators.

    of: names of the differentiable arguments, the rows first. saves: returns the names of the arguments that
    ``backward`` reads, from all arguments. backward: takes the arguments, with None for tensors that are not
    saved, and in addition "rows", their number, and "node", autograd's node; and the gradients of the
    results. It returns the gradients of ``of``, which may be None or fewer. codes: called with the function
    and the arguments if the rows are codes, which are not differentiable, and another argument requires a
    gradient; None: such a call raises.
    """

    of: tuple[str, ...]
    saves: Callable[[Values], tuple[str, ...]]
    backward: Callable[..., Any]
    codes: Callable[[Any, Values], Any] | None = None


def operation(
    core: Core,
    returned: Any,
    build: Callable[..., Any] | None = None,
    *,
    results: Callable[[Any], Any] | None = None,
    without: Collection[str] = (),
    gradient: Gradient | None = None,
    prepare: Callable[[Any, Values], Any] | None = None,
    flops: Callable[..., int] | None = None,
    note: str = "",
) -> Core:
    """Declares the core's function for tensors.

    returned, results, without, flops: as in `operator_of`. build: makes the result from the arguments and the
    operator's tensors; by default the result is its one tensor. gradient: if None, the results are not
    differentiable. prepare: called with this function and the arguments of a traced or differentiated call;
    may modify the arguments, or return the result. note: a paragraph of the docstring.
    """
    operator = operator_of(core, returned, results=results, without=without, flops=flops)
    names, defaults = operator.names, {n: p.default for n, p in inspect.signature(core).parameters.items()}
    run, first = operator if gradient is None else _differentiable(operator, gradient), names[0]

    def traced(values: Values) -> Any:
        if prepare is not None:
            result = prepare(call, values)
            if result is not None:
                return result
        if gradient is not None:
            rows = values[first]
            if not isinstance(rows, (Tensor, QuantTensor)):
                raise _not_a_tensor(first, rows)
            if isinstance(rows, QuantTensor) or rows.dtype not in DIFFERENTIABLE:
                result = _of_codes(values, gradient.codes)
                if result is not None:
                    return result
        for name in without:
            if values[name] != defaults[name]:
                values = {n: detached(v) for n, v in values.items()}
                return unrecorded(core, values, f"{name}: got one", f"{defaults[name]}")
        plan = values.get("plan")
        if isinstance(plan, PermutationPlan) and not isinstance(plan.data, Tensor):
            raise TypeError(
                f"plan: got one of {type(plan.data).__module__}.{type(plan.data).__qualname__}; wanted one "
                f"of torch tensors, as {first} is; make it by fp8moe.torch.plan_topk or another of its plans"
            )
        arguments = [values[n] for n in names]
        tensors = run(*map(detached, arguments) if gradient is None else arguments)
        if build is None:
            return tensors
        return build(values, *((tensors,) if isinstance(tensors, Tensor) else tensors))

    def _of_codes(values: Values, codes: Callable[[Any, Values], Any] | None) -> Any:
        """Calls with rows of codes, which are not differentiable while their probabilities may be."""
        rows = values[first]
        if isinstance(rows, Tensor) and rows.requires_grad:
            raise TypeError(
                f"{first}: got {rows.dtype} rows that require grad; wanted bfloat16, float16, float32 or "
                f"float64 rows; pass {first}.detach()"
            )
        requiring = [n for n in names if torch.is_grad_enabled() and _requires_grad(values[n])]
        if requiring and codes is None:
            if not is_recorded(values):
                core(**{n: detached(v) for n, v in values.items()})  # raises if it takes no codes at all
            raise TypeError(
                f"{requiring[0]}: got a tensor that requires grad with {first} as codes; wanted "
                f"floating-point {first}; pass {requiring[0]}.detach()"
            )
        if requiring and codes is not None:
            return codes(call, values)
        if not isinstance(rows, QuantTensor):
            return None
        wanted = f"a tensor of values or codes, such as fp8moe.dequantize({first})"
        return unrecorded(core, values, f"{first}: got a QuantTensor", wanted)

    call = public(core, traced, () if gradient is None else gradient.of, note)
    return call


def public(core: Core, traced: Callable[[Values], Any], differentiable: tuple[str, ...], note: str) -> Core:
    """The core's function for tensors, which calls ``traced`` if a compiler traces it or a gradient is
    needed.

    differentiable: names of the differentiable arguments; if empty, results have no gradient. note: a
    paragraph of the docstring.
    """
    parameters = inspect.signature(core).parameters
    names, required = list(parameters), {n for n, p in parameters.items() if p.default is p.empty}
    defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
    by_position = [n for n, p in parameters.items() if p.kind is not p.KEYWORD_ONLY]
    # arguments that are arrays, or quantised tensors
    arrays = {n for n, p in parameters.items() if "ArrayLike" in p.annotation or n == "q"}

    @documented(core, differentiable, note)
    def call(*arguments: Any, **options: Any) -> Any:
        compiling, needs_grad = torch.compiler.is_dynamo_compiling(), False
        plain = not (compiling or dispatch_modes())
        if not compiling:
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
            if (
                torch._C._are_functorch_transforms_active()
                or torch._C._is_tracing()
                or forward_ad._current_level >= 0
            ):
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
        arguments_by_name = dict(zip(by_position, arguments, strict=False)) | options
        values = defaults | arguments_by_name
        if len(values) != len(names) or len(arguments_by_name) != len(arguments) + len(options):
            raise TypeError(
                f"{core.__name__}: got {len(arguments)} arguments by position and {list(options)} by name; "
                f"wanted {core.__name__}{inspect.signature(core)}"
            )
        return values

    def check_arrays(values: Values) -> None:
        for name, value in values.items():
            for a in arrays_in(value):
                if isinstance(a, Tensor) and a.is_nested:
                    raise nested(name)
        for name in arrays:
            value = values[name]
            if type(value) in PLAIN:
                continue
            if isinstance(value, QuantTensor):
                value = value.data
            if isinstance(value, Tensor):
                check_tensor(name, value)
                continue
            if isinstance(value, (list, tuple)) or (value is None and name not in required):
                continue
            raise _not_a_tensor(name, value)

    return call  # type: ignore[no-any-return]


def is_recorded(values: Values) -> bool:
    """Whether a call becomes part of a graph of operators, or has tensors without memory: in torch.compile,
    make_fx or torch.export, or with fake tensors."""
    if torch.compiler.is_dynamo_compiling() or records_operators():
        return True
    return any(isinstance(a, (FakeTensor, FunctionalTensor)) for a in arrays_in(tuple(values.values())))


def unrecorded(function: Callable[..., Any], values: Values, got: str, wanted: str) -> Any:
    """The result of a call that no operator stands for: a graph break in compiled code.

    got, wanted: the argument for which there is no operator, and the values for which there is one.

    Raises TypeError in make_fx and torch.export, whose graph would have the result as a constant, and with
    fake tensors.
    """
    if not is_recorded(values):
        return function(**values)
    problem = (
        f"{got}, for which there is no operator; wanted {wanted}; call it outside of "
        "torch.compile(fullgraph=True), make_fx, torch.export and fake tensors"
    )
    if not torch.compiler.is_dynamo_compiling():
        raise TypeError(problem)
    torch._dynamo.graph_break(msg=problem)
    return _uncompiled(function, values)


@torch.compiler.disable  # also of the functions that it calls
def _uncompiled(function: Callable[..., Any], values: Values) -> Any:
    return function(**values)


def documented(core: Any, differentiable: tuple[str, ...], note: str) -> Callable[[Any], Any]:
    """Gives a function the core's name and signature, and its docstring for tensors."""

    def declare(call: Any) -> Any:
        functools.update_wrapper(call, core)
        call.__module__, call.__doc__ = MODULE, _docstring(core, differentiable, note)
        return call

    return declare


#: types of arguments whose arrays are not checked here; a plan is on the device of its rows
_NO_ARRAYS = frozenset((*METADATA_TYPES, PermutationPlan, tuple, list, *Options.__subclasses__()))


def detached(value: Any) -> Any:
    """A tensor detached from its graph; other values unchanged."""
    return value.detach() if isinstance(value, Tensor) and value.requires_grad else value


def _requires_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _not_a_tensor(name: str, x: Any) -> TypeError:
    fix = f"; pass {name}.data" if isinstance(x, (Permuted, SortedChunks)) else _as_tensor(name, x)
    fix = f"; pass {name}.rowwise or {name}.columnwise" if isinstance(x, Quantized) else fix
    return TypeError(f"{name}: got {type(x).__module__}.{type(x).__qualname__}; wanted a torch tensor{fix}")


def _as_tensor(name: str, x: Any) -> str:
    """The end of a message: how x becomes a tensor, an array of another library without a copy."""
    if hasattr(x, "__dlpack__"):
        return f"; pass torch.from_dlpack({name})"
    return f"; pass torch.tensor({name})" if isinstance(x, list) else ""


def check_tensor(name: str, x: Any, *, may_be_sharded: bool = False) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}; wanted a tensor{_as_tensor(name, x)}")
    if isinstance(x, DTensor) and not may_be_sharded:
        raise TypeError(
            f"{name}: got a DTensor of placements {x.placements}, which stands for the tensors of several "
            f"ranks; wanted a plain tensor; pass {name}.to_local()"
        )
    if x.is_nested:
        raise nested(name)
    if torch.compiler.is_dynamo_compiling():
        return  # Dynamo itself refuses sparse tensors, and in a backward any look at a layout
    if x.layout is not torch.strided:
        raise TypeError(f"{name}: got layout {x.layout}; wanted a strided tensor; pass {name}.to_dense()")
    if type(x) not in _PLAIN and hasattr(x, "fsdp_pre_all_gather"):  # of gather_fp8: without memory
        raise TypeError(
            f"{name}: got a {type(x).__name__}, a weight for fully_shard to shard and to gather; wanted the "
            "gathered one; call fully_shard on the layer or a module around it, or leave out gather_fp8"
        )
    if type(x) in _PLAIN and not x.is_meta and not torch.compiler.is_compiling():
        try:
            check_memory(name, x)  # before torch converts or copies it
        except RuntimeError:  # nested tensors, and tensors of torch.func, have no storage
            return


_PLAIN = Tensor, nn.Parameter  # types of tensors that have a storage of their own


def kinds_of(x: Any, *weights: Any) -> tuple[Any, ...] | None:
    """What decides whether checks of these tensors pass, but for their memory: of x but its last dimension
    only the number of dimensions. None in compiled code, and for tensors of other types."""
    if torch.compiler.is_dynamo_compiling():
        return None
    kinds: list[Any] = []
    for t in (x, *weights):
        if type(t) not in _PLAIN or t.layout is not torch.strided or t.is_nested:
            return None
        kinds += (t.shape, t.dtype, t.device)
    kinds[0] = x.ndim, x.shape[-1:]
    return tuple(kinds)


def check_float(name: str, x: Any, dimensions: int = 1, *, may_be_sharded: bool = False) -> None:
    """Checks for a tensor of values, not of codes, in memory, of at least this many dimensions; quantised
    weights are not checked. may_be_sharded: whether a DTensor is accepted."""
    if isinstance(x, Quantized):
        return
    check_tensor(name, x, may_be_sharded=may_be_sharded)
    check_values(name, x.dtype)
    if x.device.type == "meta":
        raise TypeError(
            f"{name}: got a tensor on meta, without values; wanted one on cpu or cuda; load it first"
        )
    if x.ndim < dimensions:
        refuse_partitioned(name, x)
        raise ValueError(f"{name}: got shape {list(x.shape)}; wanted at least {dimensions} dimensions")


def check_values(name: str, dtype: torch.dtype) -> None:
    """Checks for a dtype of values, not of codes."""
    if dtype not in DIFFERENTIABLE:
        raise checks.not_values(name, dtype, f"{name}.float()")


def refuse_codes(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Checks a state dict's entries for a module's own parameters and buffers, before torch casts them:
    ``copy_`` takes codes for values without their scales. For `torch.nn.Module`'s hooks before loading."""
    own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    if is_parametrized(module):
        own |= module.get_submodule("parametrizations").named_parameters("parametrizations")
    for name, old in own.items():
        new = state.get(prefix + name)
        if isinstance(new, Tensor) and old.dtype in DIFFERENTIABLE:  # no codes themselves
            check_values(prefix + name, new.dtype)


def is_partitioned(w: Any) -> bool:
    """Whether DeepSpeed's ZeRO-3 has replaced the weight's data by an empty tensor, as between forwards."""
    return hasattr(w, "ds_id") and w.numel() == 0


def refuse_partitioned(name: str, w: Any) -> None:
    """Raises for a weight that DeepSpeed's ZeRO-3 has partitioned, whose own shape is [0]."""
    if is_partitioned(w):
        raise TypeError(
            f"{name}: got a weight that DeepSpeed's ZeRO-3 has partitioned; wanted the whole weight, "
            f"{list(w.ds_shape)}; call the engine that deepspeed.initialize returned, not its module, or "
            "work inside deepspeed.zero.GatheredParameters([...])"
        )


def on_hopper(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.get_device_capability(x.device) == (9, 0)


def refuse_transforms(name: str) -> None:
    """Raises in what cannot see the library's computation: transforms of torch.func, and torch.jit.trace."""
    if torch._C._get_tracing_state() is not None:
        raise NotImplementedError(
            f"{name}: got a call inside torch.jit.trace, as of SummaryWriter.add_graph or the old ONNX "
            "exporter; wanted one outside, because a trace has no operators for it; use torch.compile, or "
            "torch.export.export under torch.no_grad()"
        )
    if torch._C._are_functorch_transforms_active():  # under which outer tensors have no address either
        raise NotImplementedError(
            f"{name}: got a call inside a transform of torch.func (vmap, grad, vjp, jvp or jacrev); "
            "wanted one outside, because it has no rules for transforms; differentiate with "
            "torch.autograd.grad or backward(), and in place of vmap put the batch into rows or loop over it"
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


def _docstring(core: Callable[..., Any], differentiable: tuple[str, ...], note: str) -> str:
    """The core's docstring for tensors, with a note on its gradients."""
    if differentiable:
        gradients = f"{differentiable_in(differentiable)}, once."
    else:
        gradients = "The results have no gradient: inputs that require one are detached."
    return docstring_of(core, "Tensor", f"{gradients} {note}")


# ---------------------------------------------------------------- gradients


def _differentiable(operator: Operator, gradient: Gradient) -> Callable[..., Any]:
    """The operator with its gradient, for eager mode and compiled code."""
    names, run = operator.names, operator.run
    positions, no_tensors = [names.index(n) for n in gradient.of], dict.fromkeys(operator.tensors)

    def forward(ctx: Any, *arguments: Any) -> Any:
        results = run(*arguments)
        values = dict(zip(names, arguments, strict=True))
        saved_names, saved = gradient.saves(values), []
        for name in saved_names:
            value = values[name]
            if type(value) is PermutationPlan:
                values[name] = value.__dict__ | {"data": None}
                value = value.data
            saved.append(value)
        values.update(no_tensors, rows=arguments[0].shape[0])
        ctx.save_for_backward(*saved)
        ctx.kept, ctx.values = saved_names, values
        if type(results) is not list:
            return results
        return tuple(results) if len(results) > 1 else results[0]

    def backward(ctx: Any, *grads: Any) -> Any:
        values = dict(ctx.values)
        for name, tensor in zip(ctx.kept, ctx.saved_tensors, strict=True):
            fields = values[name]
            values[name] = plan_with(fields, tensor) if type(fields) is dict else tensor
        values["node"] = ctx
        grads_by_argument = gradient.backward(values, *(None if g is None else g.contiguous() for g in grads))
        returned: list[Any] = [None] * len(names)
        for position, grad in zip(positions, grads_by_argument, strict=False):
            returned[position] = grad
        return tuple(returned)

    # compiled autograd runs it as it is, in place of tracing the library
    once = torch.compiler.disable(once_differentiable(backward))
    methods = {"forward": staticmethod(forward), "backward": staticmethod(once)}
    title = operator.op.overloadpacket.__name__.title().replace("_", "")
    function: Any = type(title, (torch.autograd.Function,), methods)

    # as `fp8moe.adapters.torch.library.differentiable`, with flat arguments as in Dynamo's graph
    @torch.compiler.allow_in_graph
    def apply_flat(*flat: Any) -> Any:
        return function.apply(*operator.unflatten(flat))

    # without the checks of `torch.autograd.Function.apply` for torch.func transforms, which are rejected
    # earlier
    apply_eager = super(torch.autograd.Function, function).apply

    def apply(*arguments: Any) -> Any:
        refuse_export(*arguments)
        if torch.compiler.is_dynamo_compiling():
            return apply_flat(*operator.flatten(arguments))
        return apply_eager(*arguments)

    return apply


def plan_with(fields: dict[str, Any], data: Tensor) -> PermutationPlan:
    """The plan of a forward, from its fields, which are not checked again, and its saved array."""
    plan: PermutationPlan = object.__new__(PermutationPlan)
    plan.__dict__.update(fields, data=data)
    return plan


class _MM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Any, b: Any) -> Any:
        ctx.save_for_backward(a, b)
        with torch.autocast(a.device.type, enabled=False):
            return a @ b

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        a, b = ctx.saved_tensors
        needs_a, needs_b = asked_for(ctx)
        with torch.autocast(a.device.type, enabled=False):
            return grad @ b.t() if needs_a else None, a.t() @ grad if needs_b else None


#: a @ b of two matrices in their dtype, also in the backward, whatever autocast says. The backward of torch's
#: product runs in the autocast of the backward call: in compiled code in that of the forward call.
mm_without_autocast = differentiable(_MM)
