"""Functions of fp8moe as operators of torch.library, each from one declaration.

A declared function is one of the library's own, or takes tensors, records and plain values and calls the
library. The operator's schema follows from its signature, where a record becomes the arguments listed in
`RECORDS`; a dry run on shapes is its fake implementation. Operators are not differentiable themselves: a
`torch.autograd.Function` calls them (`fp8moe.adapters.torch.operation`). In eager mode the function is called
directly, without torch's dispatcher, unless a dispatch mode is active: selective checkpointing, a counter of
FLOPs and other `TorchDispatchMode` objects see the operators.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fp8moe import PermutationPlan, Permuted, Quantized, QuantTensor, RouterConfig, SortedChunks
from fp8moe.activation import Activation
from fp8moe.formats import Block
from fp8moe.layer.options import LayerOptions
from fp8moe.ops.plan import NumOutTokens
from fp8moe.records import ArraySpec
from fp8moe.runtime import record_trees
from fp8moe.runtime.interop import dtype_named
from fp8moe.runtime.recording import result_specs

if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
    raise ImportError(
        f"fp8moe's adapters for torch need torch 2.11 or later (this is {torch.__version__}): pip install "
        "'torch>=2.11'"
    )

record_trees.SYMBOLIC_TYPES.add(torch.SymInt)
record_trees.prepare(
    *(Tensor, torch.nn.Parameter, torch.dtype, torch.SymInt),
    *(
        QuantTensor,
        Quantized,
        PermutationPlan,
        Permuted,
        SortedChunks,
        RouterConfig,
        Activation,
        LayerOptions,
    ),
)

NAMESPACE = "fp8moe"
library = torch.library.Library(NAMESPACE, "DEF")
#: the declared operators, by name
OPERATORS: dict[str, Operator] = {}

#: types of tensor arguments for types of the core's signatures
_TENSOR_TYPES: dict[Any, Any] = {Any: Tensor, Any | None: Tensor | None, NumOutTokens: int | None}

#: schema types of arguments
_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    list[Tensor]: "Tensor[]",
    int: "SymInt",
    int | None: "SymInt?",
    bool: "bool",
    list[bool]: "bool[]",
    list[int]: "int[]",
    float: "float",
    str: "str",
    str | None: "str?",
    torch.dtype: "ScalarType",
}


def plan_arguments(plan: PermutationPlan) -> list[Any]:
    """A plan as arguments of an operator: its array and its sizes."""
    sizes = [plan.num_tokens, plan.num_experts, plan.max_experts_per_token, int(plan.has_slots)]
    return [plan.data, [*sizes, plan.num_out_tokens, plan.align_size]]


def plan_of(data: Any, sizes: Any) -> PermutationPlan:
    """The plan for the arguments from `plan_arguments`; its fields are not checked again."""
    plan: PermutationPlan = object.__new__(PermutationPlan)
    tokens, experts, width, has_slots, rows, align = sizes
    plan.__dict__.update(
        data=data,
        num_tokens=tokens,
        num_experts=experts,
        max_experts_per_token=width,
        has_slots=bool(has_slots),
        num_out_tokens=rows,
        align_size=align,
    )
    return plan


def _codes_arguments(q: QuantTensor) -> list[Any]:
    return [q.data, q.scales, q.fmt, *_block_arguments(q.block), q.layout, q.transposed]


def _codes(data: Any, scales: Any, fmt: str, block: list[int], layout: str, transposed: bool) -> QuantTensor:
    return QuantTensor(data, scales, fmt, _block(block), layout, transposed)


def _activation_arguments(activation: Activation) -> list[Any]:
    return [activation.kind, activation.clamp, activation.alpha, activation.linear_offset]


def _router_arguments(config: RouterConfig) -> list[Any]:
    groups = config.num_groups, config.topk_groups
    return [config.topk, config.score_function, *groups, config.renormalize, config.scaling_factor]


def _activation(kind: str, clamp: float | None, alpha: float, linear_offset: float) -> Activation:
    """An activation from numbers that may be symbolic in a compiler."""
    clamp = None if clamp is None else float(clamp)
    return _known_activation(kind, clamp, float(alpha), float(linear_offset))


known_config: Any = functools.lru_cache(RouterConfig)
_known_activation = functools.lru_cache(Activation)  # checks its fields


def _layer_arguments(options: LayerOptions) -> list[Any]:
    activation = _activation_arguments(options.activation)
    return [
        *activation,
        options.recipe,
        options.recompute,
        options.save,
        options.backend,
        options.num_sms,
        options.weight_copies,
    ]


def _layer_options(kind: str, clamp: float | None, alpha: float, offset: float, *others: Any) -> LayerOptions:
    return _known_layer_options(_activation(kind, clamp, alpha, offset), *others)


_known_layer_options: Any = functools.lru_cache(LayerOptions)


def _block_arguments(block: Any) -> list[list[int]]:
    if block is not None and not isinstance(block, tuple):
        raise ValueError(f"block: got {block!r}; wanted a tuple of two ints, or None")
    return [list(block or ())]


def _block(sizes: list[int]) -> Block:
    return tuple(sizes) or None  # type: ignore[return-value]


#: record type -> (its schema arguments, {} being the argument's name; function to flatten it; function to
#: build it)
RECORDS: dict[Any, tuple[str, Callable[[Any], list[Any]], Callable[..., Any]]] = {
    PermutationPlan: ("Tensor {}, SymInt[] {}_sizes", plan_arguments, plan_of),
    QuantTensor: (
        "Tensor {}, Tensor {}_scales, str {}_fmt, int[] {}_block, str {}_layout, bool {}_transposed",
        _codes_arguments,
        _codes,
    ),
    Activation: (
        "str {}_kind, float? {}_clamp, float {}_alpha, float {}_linear_offset",
        _activation_arguments,
        _activation,
    ),
    RouterConfig: (
        "int {}_topk, str {}_score_function, int {}_num_groups, int {}_topk_groups, bool {}_renormalize, "
        "float {}_scaling_factor",
        _router_arguments,
        known_config,
    ),
    LayerOptions: (
        "str {}_kind, float? {}_clamp, float {}_alpha, float {}_linear_offset, str {}_recipe, "
        "str? {}_recompute, str {}_save, str? {}_backend, int? {}_num_sms, str {}_weight_copies",
        _layer_arguments,
        _layer_options,
    ),
    Block: ("int[] {}", _block_arguments, _block),
}


Fields = TypeVar("Fields", bound=type[tuple[Any, ...]])


def as_arguments(kind: Fields) -> Fields:
    """Declares a NamedTuple of tensors, records and plain values as a sequence of operator arguments."""
    types = get_type_hints(kind)
    names, parts, counts = [], [], []
    for name, field_type in types.items():
        form, flatten, build = RECORDS.get(field_type) or (f"{_TYPES[field_type]} {{}}", None, None)
        names.append(form.replace("{}", f"{{}}_{name}"))
        parts.append((flatten, build))
        counts.append(form.count(",") + 1)

    def flat(record: Any) -> list[Any]:
        values: list[Any] = []
        for value, (flatten, _) in zip(record, parts, strict=True):
            values += [value] if flatten is None else flatten(value)
        return values

    def built(*values: Any) -> Any:
        fields, first = [], 0
        for (_, build), count in zip(parts, counts, strict=True):
            arguments = values[first : first + count]
            fields.append(arguments[0] if build is None else build(*arguments))
            first += count
        return kind(*fields)

    RECORDS[kind] = ", ".join(names), flat, built
    return kind


class Operator:
    """``fp8moe::name``. It is called with its function's arguments, in the order of ``names``, and returns a
    tensor, a tuple of tensors, or for a list the results that are not None.

    function: takes tensors, records and plain values. types: types of its arguments, by name, in order.
    returned: ``Tensor``, ``list`` or a tuple of tensors. results: extracts the tensors from the function's
    result. keywords: number of arguments, the last ones, that the function takes by keyword. writes: names,
    in the schema, of the tensors whose memory it modifies. Their version counters stay as they are: a
    compiled layer that is checkpointed saves a ``main_grad`` as its input, and reads it again after it was
    written. fake: replaces the dry run of the function, with the same arguments. flops: the number of
    floating-point operations, for `torch.utils.flop_counter`, from the same arguments; None: it multiplies no
    matrices.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        types: dict[str, Any],
        returned: Any,
        *,
        results: Callable[[Any], Any] | None = None,
        keywords: int = 0,
        writes: Collection[str] = (),
        fake: Callable[..., Any] | None = None,
        flops: Callable[..., int] | None = None,
    ):
        self.function, self.results, self.names = function, results, list(types)
        self.tensors = [n for n, kind in types.items() if kind in (Tensor, Tensor | None)]
        self._form = get_origin(returned) or returned
        self._positional, self._keywords = len(types) - keywords, self.names[len(types) - keywords :]
        arguments, self._records, position = [], [], 0
        for n, (parameter, kind) in enumerate(types.items()):
            if kind in RECORDS:
                form, flatten, build = RECORDS[kind]
                self._records.append((n, flatten, position, position + form.count(",") + 1, build))
            else:
                form = f"{_TYPES[kind]} {{}}"
            schema = form.replace("{}", parameter).split(", ")
            arguments += schema
            position += len(schema)
        schema_names = [a.split()[1] for a in arguments]
        for n in map(schema_names.index, writes):
            arguments[n] = arguments[n].replace("Tensor", f"Tensor(a{n}!)", 1)
        many = f"({', '.join(['Tensor'] * len(get_args(returned)))})"
        result = {Tensor: "Tensor", list: "Tensor[]", tuple: many}[self._form]
        tags = (torch.Tag.pt2_compliant_tag,)
        library.define(f"{name}({', '.join(arguments)}) -> {result}", tags=tags)
        library.impl(name, self._run, "CompositeExplicitAutograd")
        of_flat = self._fake if fake is None else lambda *flat: fake(*self.unflatten(flat))
        torch.library.register_fake(f"{NAMESPACE}::{name}", of_flat, lib=library)
        self.op = getattr(getattr(torch.ops, NAMESPACE), name).default
        if flops is not None:
            count = lambda *flat, out_val: flops(*self.unflatten(flat))  # noqa: E731
            register_flop_formula(self.op.overloadpacket, get_raw=True)(count)
        OPERATORS[name] = self

    def __call__(self, *arguments: Any) -> Any:
        if not torch.compiler.is_compiling():
            return self.run(*arguments)
        return self.op(*self.flatten(arguments))

    def run(self, *arguments: Any) -> Any:
        """`__call__` without the check for compilation, as in gradients."""
        first = arguments[0]
        if type(first) is QuantTensor:
            first = first.data
        elif type(first) is list:
            first = first[0]
        if not is_direct(first):  # the other arguments are of the same type
            return self.op(*self.flatten(arguments))
        n = self._positional
        result = self.function(*arguments[:n], **dict(zip(self._keywords, arguments[n:], strict=True)))
        return self._tensors_of(result)

    def flatten(self, arguments: Iterable[Any]) -> list[Any]:
        """Arguments as in the schema."""
        flat = list(arguments)
        for n, flatten, *_ in reversed(self._records):
            flat[n : n + 1] = flatten(flat[n])
        return flat

    def unflatten(self, flat: Iterable[Any]) -> list[Any]:
        """The inverse of `flatten`."""
        arguments = list(flat)
        for _, _, first, last, build in reversed(self._records):
            arguments[first:last] = [build(*arguments[first:last])]
        return arguments

    def _run(self, *flat: Any) -> Any:
        arguments = list(flat)  # as in `unflatten`, inlined to save a call
        for _, _, first, last, build in reversed(self._records):
            arguments[first:last] = [build(*arguments[first:last])]
        n = self._positional
        result = self.function(*arguments[:n], **dict(zip(self._keywords, arguments[n:], strict=True)))
        return self._tensors_of(result)

    def _tensors_of(self, result: Any) -> Any:
        if self.results is not None:
            result = self.results(result)
        return [t for t in result if t is not None] if self._form is list else result

    def _fake(self, *flat: Any) -> Any:
        tensors = [t for a in flat for t in (a if isinstance(a, list) else (a,)) if isinstance(t, Tensor)]

        def run(arrays: list[Any]) -> Any:
            remaining = iter(arrays)
            arguments, n = self.unflatten(_replace_tensors(a, remaining) for a in flat), self._positional
            result = self._tensors_of(
                self.function(*arguments[:n], **dict(zip(self._keywords, arguments[n:], strict=True)))
            )
            return tuple(result) if self._form is list else result

        results = result_specs(run, [spec_of(t) for t in tensors])
        device = tensors[0].device
        if self._form is Tensor:
            return like(results, device)
        return self._form(like(a, device) for a in results)


def _replace_tensors(value: Any, arrays: Iterator[Any]) -> Any:
    """An argument with its tensors replaced by the next arrays."""
    if isinstance(value, list):
        return [_replace_tensors(v, arrays) for v in value]
    return next(arrays) if isinstance(value, Tensor) else value


#: make_fx's mode while it records the operators that are called with real tensors, otherwise None; its graph
#: would lack the library's direct calls. A partial, as every call of an operation asks for it.
records_operators = functools.partial(torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.PROXY)


#: number of active dispatch modes, make_fx's included: they see calls of operators only. Asking takes less
#: than half of the time of the above
dispatch_modes = torch._C._len_torch_dispatch_stack


#: tensor types without overridden behaviour
PLAIN = frozenset((Tensor, torch.nn.Parameter))


def is_direct(x: Any) -> bool:
    """Whether an operator's function may be called with tensors like this one in place of the operator, in
    code that is not compiled: it is no fake tensor or subclass, and no dispatch mode sees the call."""
    return type(x) in PLAIN and not dispatch_modes()


def operator(name: str, **options: Any) -> Callable[[Callable[..., Any]], Operator]:
    """Declares a function with positional arguments as ``fp8moe::name``. options: of `Operator`."""

    def declare(function: Callable[..., Any]) -> Operator:
        types = get_type_hints(function)
        returned = types.pop("return")
        return Operator(name, function, types, returned, **options)

    return declare


def operator_of(
    function: Callable[..., Any],
    returned: Any,
    *,
    name: str = "",
    results: Callable[[Any], Any] | None = None,
    without: Collection[str] = (),
    types: dict[str, Any] | None = None,
    flops: Callable[..., int] | None = None,
) -> Operator:
    """Declares a public function of the core, by default under its own name. without: arguments that the
    operator omits. types: types of arguments that are not a tensor although the core says ArrayLike. flops:
    as in `Operator`."""
    hints = get_type_hints(function)
    parameters = inspect.signature(function).parameters
    arguments = [n for n in parameters if n not in without]
    by_position = 0
    for n, parameter in parameters.items():
        if n in without or parameter.kind is parameter.KEYWORD_ONLY:
            break
        by_position += 1
    return Operator(
        name or function.__name__,
        function,
        {n: _TENSOR_TYPES.get(hints[n], hints[n]) for n in arguments} | (types or {}),
        returned,
        results=results,
        keywords=len(arguments) - by_position,
        flops=flops,
    )


def spec_of(x: Tensor) -> ArraySpec:
    return ArraySpec(tuple(x.shape), dtype_named(str(x.dtype).removeprefix("torch."), "x"))


def as_bytes(t: Tensor) -> Tensor:
    """Codes of torch's float8 dtypes in the dtype of records; a view, which has the same version."""
    return t.view(torch.uint8) if t.dtype.itemsize == 1 else t


def like(spec: ArraySpec, device: torch.device) -> Tensor:
    """An empty tensor of a spec, for fake implementations."""
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype.name), device=device)


# ---------------------------------------------------------------- gradients

_SECOND_DERIVATIVE = (
    "create_graph: got the gradient of a gradient; functions of fp8moe.torch are not twice "
    "differentiable; leave out create_graph=True, or detach() the results"
)
_CREATE_GRAPH = (
    "create_graph: got True in a backward of the experts, which are not twice differentiable; wanted False; "
    "leave it out, or detach() the experts' results"
)


class _NotDifferentiable(torch.autograd.Function):
    """A backward as a non-differentiable function of the incoming gradients and the saved tensors."""

    @staticmethod
    def forward(ctx: Any, backward: Any, saved: Any, count: int, *tensors: Any) -> Any:
        return backward(saved, *tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(_SECOND_DERIVATIVE)


_is_batched = torch._C._functorch.is_legacy_batchedtensor  # of torch.autograd.grad(is_grads_batched=True)


def once_differentiable(backward: Callable[..., Any], *, saves_inputs: bool = True) -> Callable[..., Any]:
    """Like `torch.autograd.function.once_differentiable`, but all second derivatives raise. torch's silently
    treats the results as constants if the incoming gradient is a constant, or if `torch.autograd.grad` is
    called for the gradient of an earlier tensor.

    saves_inputs: whether the saved tensors include the inputs that the gradient depends on. If not,
    create_graph=True raises in the first backward: nothing leads from the gradients back to the inputs, so
    autograd would omit the second derivative of these inputs without an error.
    """

    def run(ctx: Any, *grads: Any) -> Any:
        if not torch.compiler.is_compiling() and any(isinstance(g, Tensor) and _is_batched(g) for g in grads):
            raise NotImplementedError(
                "backward: got batched gradients (is_grads_batched=True); wanted one at a time: call "
                "torch.autograd.grad or backward() in a loop"
            )
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        if not saves_inputs:
            raise RuntimeError(_CREATE_GRAPH)
        ctx.creates_graph = True  # the grad mode is off in the function below
        return _NotDifferentiable.apply(backward, ctx, len(grads), *grads, *ctx.saved_tensors)

    return run


@torch.compiler.assume_constant_result
def _is_exporting() -> bool:
    """`torch.compiler.is_exporting`. Dynamo of torch 2.11 replaces a direct call by True, also under
    torch.compile."""
    return torch.compiler.is_exporting()


def refuse_export(*inputs: Any) -> None:
    """NotImplementedError where torch.export traces a call that needs a gradient: the program would be of
    operators alone, whose results have none."""
    if not torch.is_grad_enabled():
        return
    for t in inputs:  # the flag is read last, and once: it takes two Python calls
        if isinstance(t, Tensor) and t.requires_grad:
            if not _is_exporting():
                return
            raise NotImplementedError(
                "torch.export: got tensors that require grad, whose gradients the exported program would "
                "leave out; wanted none; export under torch.no_grad(), and run the program so"
            )


def differentiable(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` as a single call in Dynamo's graph, which AOTAutograd traces. Dynamo itself loses
    symbolic sizes that a forward saves for backward (torch 2.13)."""

    direct = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    @torch.compiler.allow_in_graph
    def apply(*arguments: Any) -> Any:
        refuse_export(*arguments)
        if torch._C._are_functorch_transforms_active():
            return function.apply(*arguments)
        return direct(*arguments)

    return apply


def without_autocast(x: Tensor) -> AbstractContextManager[None]:
    """A context without autocast on x's device; where there is none, nothing, which takes 7 us less."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _NOTHING


_NOTHING = nullcontext()
