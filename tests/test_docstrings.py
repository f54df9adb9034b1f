"""Public docstrings follow one template (numpydoc's), agree with the signatures, and their examples run."""

import dataclasses
import doctest
import inspect

import numpy as np
import pytest

import fp8moe

FUNCTIONS = [name for name in fp8moe.__all__ if inspect.isfunction(getattr(fp8moe, name))]
SECTIONS = ["Parameters", "Returns", "Raises", "Notes", "Examples"]


def sections_of(function):
    """Section -> its lines, in order; "" is the summary and what follows it."""
    found, current = {"": []}, ""
    lines = inspect.getdoc(function).split("\n")
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if following and set(following) == {"-"}:
            assert len(following) == len(line), line
            current = line
            found[current] = []
        elif not line or set(line) != {"-"}:
            found[current].append(line)
    return found


def items_of(lines):
    """(name, type) of each entry of a section, ("", type) where it has no name; every one is described."""
    entries = [(n, line) for n, line in enumerate(lines) if line and not line.startswith(" ")]
    for n, line in entries:
        assert lines[n + 1].startswith("    "), line
    parts = [line.partition(" : ") for _, line in entries]
    return [(name, kind) if colon else ("", name) for name, colon, kind in parts]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_sections(name):
    function = getattr(fp8moe, name)
    found = sections_of(function)
    assert [s for s in found if s] == [s for s in SECTIONS if s in found]
    summary = found[""][0]
    assert summary.endswith(".")
    assert not found[""][1]  # one line
    assert items_of(found["Returns"])
    parameters = inspect.signature(function).parameters
    if not parameters:
        return
    described = items_of(found["Parameters"])
    assert [name for name, _ in described] == list(parameters)
    for name, kind in described:
        assert ("ArrayLike" in kind) == ("ArrayLike" in str(parameters[name].annotation)), name
    errors = ", ".join(kind for _, kind in items_of(found["Raises"])).split(", ")
    assert {"TypeError", "ValueError"} <= set(errors) <= {"TypeError", "ValueError", "RuntimeError"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_examples(name):
    (example,) = doctest.DocTestFinder(recurse=False).find(
        getattr(fp8moe, name), name, globs={"np": np, "fp8moe": fp8moe}
    )
    assert any(e.want for e in example.examples), "an example shows a value"
    assert doctest.DocTestRunner().run(example).failed == 0


RECORDS = [name for name in fp8moe.__all__ if dataclasses.is_dataclass(getattr(fp8moe, name))]


@pytest.mark.parametrize("name", RECORDS)
def test_attributes(name):
    record = getattr(fp8moe, name)
    found = sections_of(record)
    assert found[""][0].endswith(".")
    assert [name for name, _ in items_of(found["Attributes"])] == [f.name for f in dataclasses.fields(record)]
