"""Public docstrings follow one template (numpydoc's) and agree with the signatures, and their examples run.

Public objects are those in ``__all__`` of the modules of `MODULES`: functions, records, and classes with
their methods.
"""

import dataclasses
import doctest
import importlib
import inspect
import re

import numpy as np
import pytest

import fp8moe
from fp8moe import expert_parallel, info

#: modules to test; those whose framework is not installed are skipped
MODULES = ["fp8moe", *(f"fp8moe.{door}" for door in info.DOORS if door != "cupy")]  # which needs NCCL
#: whose docstrings are sentences without sections
SHORT = ("fp8moe.adapters.jax.stats", "fp8moe.adapters.torch.deepgemm", "fp8moe.adapters.torch.scaled_mm")
SECTIONS = ["Parameters", "Attributes", "Returns", "Raises", "Notes", "Examples"]
ERRORS = {"TypeError", "ValueError", "RuntimeError", "NotImplementedError", "ImportError"}
STARS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
#: modules of operations on arrays, which validate all arguments
OPERATIONS = ("fp8moe", "fp8moe.torch")


def _public():
    """(module, name, object) of all public objects."""
    for module in MODULES:
        try:
            namespace = importlib.import_module(module)
        except ImportError as error:
            if error.name is not None and error.name.startswith("fp8moe"):
                raise
            continue
        for name in namespace.__all__:
            public = getattr(namespace, name)
            if getattr(public, "__module__", None) not in SHORT:
                yield module, name, public


PUBLIC = list(_public())


def _methods(module, name, public):
    """Documented methods of a class; overrides without a docstring are documented by the base class."""
    for attribute, value in vars(public).items():
        value = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        inherited = any(hasattr(base, attribute) for base in public.__mro__[1:])
        if inspect.isfunction(value) and attribute[0] != "_" and (value.__doc__ or not inherited):
            yield module, f"{name}.{attribute}", value


FUNCTIONS = [item for item in PUBLIC if inspect.isfunction(item[2])]
RECORDS = [item for item in PUBLIC if dataclasses.is_dataclass(item[2])]
CLASSES = [
    item
    for item in PUBLIC
    if inspect.isclass(item[2]) and item not in RECORDS and not issubclass(item[2], Exception)
]
STEPS = [
    ("fp8moe.expert_parallel", step.__name__, step)
    for step in (
        *(expert_parallel.dispatch, expert_parallel.combine),
        *(expert_parallel.combine_backward, expert_parallel.dispatch_backward),
    )
]
METHODS = [method for item in CLASSES for method in _methods(*item)]


def parametrize(items):
    return pytest.mark.parametrize(
        ("module", "public"), [(m, p) for m, _, p in items], ids=[f"{m}.{n}" for m, n, _ in items]
    )


def sections_of(public):
    """Section -> its lines, in order; "" is the summary and the paragraphs after it."""
    sections, current = {"": []}, ""
    lines = inspect.getdoc(public).split("\n")
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if following and set(following) == {"-"}:
            assert len(following) == len(line), line
            current = line
            sections[current] = []
        elif not line or set(line) != {"-"}:
            sections[current].append(line)
    return sections


def items_of(lines):
    """(name, type) of each entry of a section, ("", type) for unnamed entries; every entry must have a
    description."""
    entries = [(n, line) for n, line in enumerate(lines) if line and not line.startswith(" ")]
    for n, line in entries:
        assert lines[n + 1].startswith("    "), line
    parts = [line.partition(" : ") for _, line in entries]
    return [(name, kind) if colon else ("", name) for name, colon, kind in parts]


def has_array(annotation):
    return re.search(r"\b(ArrayLike|Tensor|Array)\b", str(annotation)) is not None


def check_summary(sections):
    assert [s for s in sections if s] == [s for s in SECTIONS if s in sections]
    summary = sections[""]
    assert summary[0].endswith(".")
    assert not any(summary[1:2])  # one line


def check_parameters(public, sections):
    parameters = dict(inspect.signature(public).parameters)
    parameters.pop("self", None)
    parameters.pop("cls", None)
    if not parameters:
        assert "Parameters" not in sections
        return parameters
    described = items_of(sections["Parameters"])
    if "__signature__" in vars(public):  # another library's names, which its versions change
        assert len(described) == len(parameters)
    else:
        assert [name for name, _ in described] == [STARS.get(p.kind, "") + n for n, p in parameters.items()]
    for (name, kind), parameter in zip(described, parameters.values(), strict=True):
        if parameter.annotation is not parameter.empty and "Any" not in str(parameter.annotation):
            assert has_array(kind) == has_array(parameter.annotation), name
    return parameters


@parametrize([*FUNCTIONS, *STEPS, *METHODS])
def test_sections(module, public):
    sections = sections_of(public)
    check_summary(sections)
    if inspect.signature(public).return_annotation not in ("None", None, "Iterator[None]"):
        assert items_of(sections["Returns"])
    parameters = check_parameters(public, sections)
    errors = set(", ".join(kind for _, kind in items_of(sections.get("Raises", []))).split(", ")) - {""}
    assert errors <= ERRORS
    if parameters and module in OPERATIONS and public.__qualname__ in fp8moe.__all__:
        assert {"TypeError", "ValueError"} <= errors


@parametrize(CLASSES)
def test_classes(module, public):
    sections = sections_of(public)
    check_summary(sections)
    check_parameters(public, sections)


@parametrize([*FUNCTIONS, *CLASSES])
def test_examples(module, public):
    (example,) = doctest.DocTestFinder(recurse=False).find(
        public, public.__name__, globs={"np": np, "fp8moe": fp8moe}
    )
    assert any(e.want for e in example.examples), "an example shows a value"
    for package in re.findall(r"^(?:import|from) (\w+)", "".join(e.source for e in example.examples), re.M):
        pytest.importorskip(package)
    assert doctest.DocTestRunner().run(example).failed == 0


@parametrize(RECORDS)
def test_attributes(module, public):
    sections = sections_of(public)
    assert sections[""][0].endswith(".")
    described = [name for name, _ in items_of(sections["Attributes"])]
    assert described == [field.name for field in dataclasses.fields(public)]


def test_lines_fit_the_page():
    """An escaped end joins two lines; the site's code has room for 114 columns at 1280 pixels."""
    entries = {f"{module}.{name}": public for module, name, public in [*PUBLIC, *METHODS]}
    lines = [(name, line) for name, e in entries.items() for line in (inspect.getdoc(e) or "").splitlines()]
    assert [(name, line) for name, line in lines if len(line) > 110] == []


def test_no_shape_is_a_number():
    """The API pages parse types as Python: they print [T, 20.0] for [T, 2E+1]."""
    types = re.compile(r"^ *\w+ : .*\b\d+[eE][+-]?\d", re.MULTILINE)
    found = [f"{module}.{name}" for module, name, public in PUBLIC if types.search(public.__doc__ or "")]
    assert not found
