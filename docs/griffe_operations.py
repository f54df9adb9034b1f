"""For the API reference: docstrings that names have only when the program runs.

``permute = operation(fp8moe.permute, ...)`` is an assignment, and decorators such as ``documented`` copy the
core's docstring; griffe reads the source and sees neither. Each gets a docstring with a link to the core's.
"""

from typing import Any

import griffe

DECLARE = {"operation", "operator_of", "public", "traceable"}  # make a function of their first argument


class DeclaredOperations(griffe.Extension):
    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        core, *arguments = _arguments(attr.value, DECLARE) or [""]
        if not core.startswith("fp8moe.") or attr.name.startswith("_"):
            return
        once = any(argument.startswith("gradient=") for argument in arguments)
        text = _as_the_core(core) + (" Differentiable, once." if once else "")
        attr.docstring = griffe.Docstring(text, parent=attr)
        attr.value = attr.annotation = None

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        for decorator in func.decorators if func.docstring is None else []:
            if arguments := _arguments(decorator.value, {"documented"}):
                names = [name for name in (a.strip("'\"") for a in arguments[1:]) if name.isidentifier()]
                once = f" Differentiable in {' and '.join(names)}, once." if names else ""
                func.docstring = griffe.Docstring(_as_the_core(arguments[0]) + once, parent=func)
            elif decorator.callable_path == "functools.wraps":
                func.docstring = griffe.Docstring(_as_the_core(f"fp8moe.{func.name}"), parent=func)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """``x : ArrayLike, float32, [T, H]`` is text, not a tuple, which would be written in parentheses."""
        for section in obj.docstring.parsed if obj.docstring else []:
            for item in section.value if isinstance(section.value, list) else []:
                if isinstance(getattr(item, "annotation", None), griffe.ExprTuple):
                    item.annotation.implicit = True


def _arguments(value: Any, functions: set[str]) -> list[str]:
    """Arguments, as text, if a value is a call of one of these functions."""
    if isinstance(value, griffe.ExprCall) and str(value.function) in functions:
        return [str(argument) for argument in value.arguments]
    return []


def _as_the_core(path: str) -> str:
    return f"As [`{path}`][{path}], with its arguments and results."
