"""Thin adapters to frameworks: array views, allocation, streams and autograd. They contain no maths.

Each module imports its framework. `fp8moe` itself imports none of these modules.
"""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """For an import of a framework: where that is missing, the error names the extra that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"fp8moe's adapters for {extra} need {error.name}: pip install 'fp8moe[{extra}]'", name=error.name
        ) from error
