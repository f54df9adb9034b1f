"""For the API reference: adapters' operations that are made from the core's by one declaration.

``permute = operation(fp8moe.permute, ...)`` is an assignment, of which a reader of the source alone knows no
docstring. Here it gets one, with a link to the core's.
"""

import re
from typing import Any

import griffe

_DECLARED = re.compile(r"(?:operation|operator_of|public|traceable)\(\s*fp8moe\.(\w+)")
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
        """``@functools.wraps(_product) def grouped_gemm(...)``, which takes its docstring when it runs."""
        if func.docstring is None and any("functools.wraps" in str(d.value) for d in func.decorators):
            func.docstring = griffe.Docstring(_as_the_core(func.name), parent=func)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """``x : ArrayLike, float32, [T, H]`` is text, not a tuple, which would be written in parentheses."""
        for section in obj.docstring.parsed if obj.docstring else []:
            for item in section.value if isinstance(section.value, list) else []:
                if isinstance(getattr(item, "annotation", None), griffe.ExprTuple):
                    item.annotation.implicit = True


def _as_the_core(name: str) -> str:
    target = f"fp8moe.{name}.{name}" if name in COLLISIONS else f"fp8moe.{name}"
    return f"As [`fp8moe.{name}`][{target}], with its arguments and results."
