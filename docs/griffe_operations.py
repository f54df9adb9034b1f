"""For the API reference: what a reader of the source alone would not find in it, or would show badly.

``permute = operation(fp8moe.permute, ...)`` is an assignment: it gets a docstring with a link to the core's.
Arguments that a docstring describes by lines such as ``rows: [T, H], ...`` become a list.
"""

import re
from typing import Any

import griffe

_DECLARED = re.compile(r"(?:operation|operator_of|public|traceable)\(\s*fp8moe\.(\w+)")
_DOCUMENTED = re.compile(r"documented\(fp8moe\.(\w+)(.*)\)")
_ELEMENT = re.compile(r"(?<=\w)\[([^]]+)\]\[([^]]+)\]")
_ENTRY = re.compile(r"(\w+(?:, \w+)*): ")
COLLISIONS = {"grouped_gemm", "permute", "quantize", "swiglu"}  # names of a function and of its module


class DeclaredOperations(griffe.Extension):
    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        declared = _DECLARED.match(str(attr.value))
        if declared is None or attr.name.startswith("_"):
            return
        gradient = " Differentiable, once." if "gradient=" in str(attr.value) else ""
        attr.docstring = griffe.Docstring(_as_the_core(declared[1]) + gradient, parent=attr)
        attr.value = attr.annotation = None

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        """Functions that take the core's docstring from a decorator, when they run."""
        for decorator in func.decorators if func.docstring is None else []:
            if declared := _DOCUMENTED.match(str(decorator.value)):
                names = re.findall(r"['\"](\w+)['\"]", declared[2])
                text = _as_the_core(declared[1]) + f" Differentiable in {' and '.join(names)}, once."
                func.docstring = griffe.Docstring(text, parent=func)
            elif str(decorator.value).startswith("functools.wraps"):
                func.docstring = griffe.Docstring(_as_the_core(func.name), parent=func)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """``x : ArrayLike, float32, [T, H]`` is text, not a tuple, which would be written in parentheses."""
        if obj.docstring:
            lines = obj.docstring.value.splitlines()
            obj.docstring.value = "\n".join(map(_no_links, lines))
        if isinstance(obj, griffe.Function | griffe.Class):
            _list_arguments(obj)
        for section in obj.docstring.parsed if obj.docstring else []:
            for item in section.value if isinstance(section.value, list) else []:
                if isinstance(getattr(item, "annotation", None), griffe.ExprTuple):
                    item.annotation.implicit = True


def _no_links(line: str) -> str:
    """``counts[a][b]`` in a sentence is an element, where Markdown sees a link to b."""
    return line if "`" in line or ">>>" in line else _ELEMENT.sub(r"\\[\1\\]\\[\2\\]", line)


def _list_arguments(obj: griffe.Function | griffe.Class) -> None:
    if obj.docstring is None or "\n---" in obj.docstring.value:  # which has numpydoc's sections
        return
    called = obj.members.get("__init__") if isinstance(obj, griffe.Class) else obj
    names = {p.name for p in called.parameters} if isinstance(called, griffe.Function) else set()
    names |= set(obj.attributes)
    lines: list[str] = []
    in_list = False
    for line in obj.docstring.value.splitlines():
        entry = _ENTRY.match(line)
        if entry and set(entry[1].split(", ")) <= names:
            lines += [""] if not in_list and lines and lines[-1] else []
            line, in_list = f"- **{entry[1]}**:{line[entry.end(1) + 1 :]}", True
        elif in_list and not line.startswith(" "):
            lines += [""] if line else []
            in_list = False
        lines.append(line)
    obj.docstring.value = "\n".join(lines)


def _as_the_core(name: str) -> str:
    target = f"fp8moe.{name}.{name}" if name in COLLISIONS else f"fp8moe.{name}"
    return f"As [`fp8moe.{name}`][{target}], with its arguments and results."
