"""Functions of fp8moe as operators of torch's library, each by one declaration.

A declared function takes tensors, records and plain values and calls the library, or is one of the library's
own. Its signature gives the operator's schema, in which a record is the arguments of `RECORDS`; a dry run of
it on shapes gives its fake implementation. Operators have no gradient of their own, and refuse tensors that
require one: `torch.autograd.Function` calls them (`fp8moe.adapters.torch_operation`), in eager mode the
function itself, without torch's dispatcher.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from fp8moe import PermutationPlan, QuantTensor, RouterConfig, workspace
from fp8moe.activation import Activation
from fp8moe.formats import Block
from fp8moe.interop import dtype_named
from fp8moe.plan import NumOutTokens
from fp8moe.record_trees import SYMBOLIC_TYPES
from fp8moe.records import ArraySpec

SYMBOLIC_TYPES.add(torch.SymInt)

NAMESPACE = "fp8moe"
library = torch.library.Library(NAMESPACE, "DEF")
#: the operators that have been declared, by name
OPERATORS: dict[str, Operator] = {}

#: types of the core's signatures as those of tensors
_OF_TENSORS: dict[Any, Any] = {Any: Tensor, Any | None: Tensor | None, NumOutTokens: int | None}

#: types of arguments in a schema
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
    """A plan as operators take it: its array and its sizes."""
    sizes = [plan.num_tokens, plan.num_experts, plan.max_experts_per_token, int(plan.has_slots)]
    return [plan.data, [*sizes, plan.num_out_tokens, plan.align_size]]


def plan_of(data: Any, sizes: Any) -> PermutationPlan:
    """A plan from what `plan_arguments` made of one, whose fields were checked then."""
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


def _of_codes(q: QuantTensor) -> list[Any]:
    return [q.data, q.scales, q.fmt, *_of_block(q.block), q.layout, q.transposed]


def _codes(data: Any, scales: Any, fmt: str, block: list[int], layout: str, transposed: bool) -> QuantTensor:
    return QuantTensor(data, scales, fmt, _block(block), layout, transposed)


def _of_activation(activation: Activation) -> list[Any]:
    return [activation.kind, activation.clamp, activation.alpha, activation.linear_offset]


def _of_router(config: RouterConfig) -> list[Any]:
    groups = config.num_groups, config.topk_groups
    return [config.topk, config.score_function, *groups, config.renormalize, config.scaling_factor]


def _activation(kind: str, clamp: float | None, alpha: float, linear_offset: float) -> Activation:
    """Of numbers that a compiler may have made symbols."""
    clamp = None if clamp is None else float(clamp)
    return _known_activation(kind, clamp, float(alpha), float(linear_offset))


_known_activation = functools.lru_cache(Activation)  # checks its fields


def _of_block(block: Any) -> list[list[int]]:
    if block is not None and not isinstance(block, tuple):
        raise ValueError(f"block: got {block!r}; wanted a tuple of two ints, or None")
    return [list(block or ())]


def _block(sizes: list[int]) -> Block:
    return tuple(sizes) or None  # type: ignore[return-value]


#: record -> its arguments in a schema ({} is the record's name), to them and from them
RECORDS: dict[Any, tuple[str, Callable[[Any], list[Any]], Callable[..., Any]]] = {
    PermutationPlan: ("Tensor {}, SymInt[] {}_sizes", plan_arguments, plan_of),
    QuantTensor: (
        "Tensor {}, Tensor {}_scales, str {}_fmt, int[] {}_block, str {}_layout, bool {}_transposed",
        _of_codes,
        _codes,
    ),
    Activation: (
        "str {}_kind, float? {}_clamp, float {}_alpha, float {}_linear_offset",
        _of_activation,
        _activation,
    ),
    RouterConfig: (
        "int {}_topk, str {}_score_function, int {}_num_groups, int {}_topk_groups, bool {}_renormalize, "
        "float {}_scaling_factor",
        _of_router,
        functools.lru_cache(RouterConfig),
    ),
    Block: ("int[] {}", _of_block, _block),
}


Fields = TypeVar("Fields", bound=type[tuple[Any, ...]])


def as_arguments(kind: Fields) -> Fields:
    """Declare a NamedTuple of tensors, records and plain values to be arguments, one after the other."""
    types = get_type_hints(kind)
    names, parts, counts = [], [], []
    for name, of in types.items():
        form, flatten, build = RECORDS.get(of) or (f"{_TYPES[of]} {{}}", None, None)
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
            given = values[first : first + count]
            fields.append(given[0] if build is None else build(*given))
            first += count
        return kind(*fields)

    RECORDS[kind] = ", ".join(names), flat, built
    return kind


class Operator:
    """``fp8moe::name``. Called with what its function takes, in the order of ``names``, it returns a tensor,
    a tuple of tensors or, where the declaration says list, those of its results that are not None.

    function: of tensors, records and plain values. types: of its arguments, by name, in order. returned:
    ``Tensor``, ``list`` or a tuple of tensors. results: picks the tensors of what the function returns.
    keywords: how many of the arguments, the last ones, it takes by name. writes: the arguments whose memory,
    of records all their tensors', it changes. fake: of the same arguments, where a dry run of the function
    does not do.
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
            given = form.replace("{}", parameter).split(", ")
            if parameter in writes:
                given = [a.replace("Tensor", f"Tensor(a{position + i}!)", 1) for i, a in enumerate(given)]
            arguments += given
            position += len(given)
        self._written = [n for n, a in enumerate(arguments) if "!" in a]
        many = f"({', '.join(['Tensor'] * len(get_args(returned)))})"
        result = {Tensor: "Tensor", list: "Tensor[]", tuple: many}[self._form]
        tags = (torch.Tag.pt2_compliant_tag,)
        library.define(f"{name}({', '.join(arguments)}) -> {result}", tags=tags)
        library.impl(name, self._run, "CompositeExplicitAutograd")
        of_flat = self._fake if fake is None else lambda *flat: fake(*self.unflatten(flat))
        torch.library.register_fake(f"{NAMESPACE}::{name}", of_flat, lib=library)
        self.op = getattr(getattr(torch.ops, NAMESPACE), name).default
        OPERATORS[name] = self

    def __call__(self, *arguments: Any) -> Any:
        if not torch.compiler.is_compiling():
            return self.run(*arguments)
        return self.op(*self.flatten(arguments))

    def run(self, *arguments: Any) -> Any:
        """The same where no compiler traces this call, as in gradients."""
        first = arguments[0]
        if type(first) is QuantTensor:
            first = first.data
        elif type(first) is list:
            first = first[0]
        if type(first) not in PLAIN:  # fake, or one that stands for others; the rest is of its kind
            return self.op(*self.flatten(arguments))
        n = self._positional
        result = self.function(*arguments[:n], **dict(zip(self._keywords, arguments[n:], strict=True)))
        return self._tensors_of(result)

    def flatten(self, arguments: Iterable[Any]) -> list[Any]:
        """As the schema has them."""
        flat = list(arguments)
        for n, flatten, *_ in reversed(self._records):
            flat[n : n + 1] = flatten(flat[n])
        return flat

    def unflatten(self, flat: Iterable[Any]) -> list[Any]:
        """The reverse of `flatten`."""
        arguments = list(flat)
        for _, _, first, last, build in reversed(self._records):
            arguments[first:last] = [build(*arguments[first:last])]
        return arguments

    def _run(self, *flat: Any) -> Any:
        for n in self._written:
            if flat[n] is not None:
                torch.autograd.graph.increment_version(flat[n])
        arguments = list(flat)  # as `unflatten` does, which would be one call more between user and kernel
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
            following = iter(arrays)
            arguments, n = self.unflatten(_with(a, following) for a in flat), self._positional
            result = self._tensors_of(
                self.function(*arguments[:n], **dict(zip(self._keywords, arguments[n:], strict=True)))
            )
            return tuple(result) if self._form is list else result

        results = workspace.result_specs(run, [spec_of(t) for t in tensors])
        device = tensors[0].device
        if self._form is Tensor:
            return like(results, device)
        return self._form(like(a, device) for a in results)


def _with(value: Any, arrays: Iterator[Any]) -> Any:
    """An argument with the next arrays in place of its tensors."""
    if isinstance(value, list):
        return [_with(v, arrays) for v in value]
    return next(arrays) if isinstance(value, Tensor) else value


#: types of tensors that are what they seem
PLAIN = frozenset((Tensor, torch.nn.Parameter))


def operator(
    name: str, writes: Collection[str] = (), fake: Callable[..., Any] | None = None
) -> Callable[[Callable[..., Any]], Operator]:
    """Declare a function, whose arguments are all given by position, as ``fp8moe::name``."""

    def declare(function: Callable[..., Any]) -> Operator:
        types = get_type_hints(function)
        returned = types.pop("return")
        return Operator(name, function, types, returned, writes=writes, fake=fake)

    return declare


def operator_of(
    function: Callable[..., Any],
    returned: Any,
    *,
    name: str = "",
    results: Callable[[Any], Any] | None = None,
    without: Collection[str] = (),
    types: dict[str, Any] | None = None,
) -> Operator:
    """Declare a public function of the core, by default under its own name. without: arguments that the
    operator does not have. types: of arguments that are not a tensor where the core says ArrayLike."""
    hints = get_type_hints(function)
    parameters = inspect.signature(function).parameters
    kept = [n for n in parameters if n not in without]
    by_position = 0
    for n, parameter in parameters.items():
        if n in without or parameter.kind is parameter.KEYWORD_ONLY:
            break
        by_position += 1
    return Operator(
        name or function.__name__,
        function,
        {n: _OF_TENSORS.get(hints[n], hints[n]) for n in kept} | (types or {}),
        returned,
        results=results,
        keywords=len(kept) - by_position,
    )


def spec_of(x: Tensor) -> ArraySpec:
    return ArraySpec(tuple(x.shape), dtype_named(str(x.dtype).removeprefix("torch."), "x"))


def like(spec: ArraySpec, device: torch.device) -> Tensor:
    """An empty tensor of a spec: what a fake returns."""
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype.name), device=device)


# ---------------------------------------------------------------- gradients

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


def once_differentiable(backward: Callable[..., Any], *, saves_inputs: bool = True) -> Callable[..., Any]:
    """`torch.autograd.function.once_differentiable`, which lets results pass for constants where the incoming
    gradient is one, and where `torch.autograd.grad` is asked for a gradient of something before them.

    saves_inputs: whether the inputs that the gradient depends on are among the saved tensors, or their codes,
    which have no gradient.
    """

    def run(ctx: Any, *grads: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        inputs = ctx.saved_tensors if saves_inputs else (torch.zeros((), requires_grad=True),)
        return _Once.apply(backward, ctx, len(grads), *grads, *inputs)

    return run


def refuse_export(*inputs: Any) -> None:
    """NotImplementedError where torch.export traces a call that needs a gradient: the program would be of
    operators alone, whose results have none."""
    if not torch.compiler.is_exporting() or not torch.is_grad_enabled():
        return
    if any(isinstance(t, Tensor) and t.requires_grad for t in inputs):
        raise NotImplementedError(
            "torch.export: got tensors that require grad, whose gradients the exported program would leave "
            "out; wanted none; export under torch.no_grad(), and run the program so"
        )


def differentiable(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply``, which Dynamo takes into its graph as it is and AOTAutograd traces: Dynamo itself
    loses symbolic sizes that a forward keeps for its backward (torch 2.13)."""

    @torch.compiler.allow_in_graph
    def apply(*arguments: Any) -> Any:
        refuse_export(*arguments)
        return function.apply(*arguments)

    return apply
