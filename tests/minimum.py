"""Prints the minimum versions of pyproject.toml, for pip: ``python tests/minimum.py EXTRA``."""

import re
import sys
import tomllib
from pathlib import Path

SETTINGS = Path(__file__).parents[1] / "pyproject.toml"


def requirements(names: list[str]) -> list[str]:
    """Requirements of the package and of these extras, including extras that they refer to."""
    project = tomllib.loads(SETTINGS.read_text())["project"]
    lines = list(project["dependencies"])
    for name in names:
        for line in project["optional-dependencies"][name]:
            inner = re.match(r"fp8moe\[(.*?)\]", line)
            lines += requirements(inner[1].split(",")) if inner else [line]
    return list(dict.fromkeys(lines))


def lowest(line: str) -> str | None:
    """``name==version`` for a requirement with a lower bound."""
    requirement = re.match(r"([\w.-]+)(?:\[.*?\])?\s*>=\s*([\w.]+)", line)
    return f"{requirement[1]}=={requirement[2]}" if requirement else None


if __name__ == "__main__":
    print("\n".join(filter(None, map(lowest, requirements(sys.argv[1:])))))
