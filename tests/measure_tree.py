"""Figures on the structure of a checkout, to compare two of its states.

Only files that git tracks are read, each once: a package that is a link (fp8moe/adapters) is measured where
it lies and named as it is imported.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import io
import json
import os
import re
import subprocess
import sys
import textwrap
import tokenize
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

OWN = "tests/measure_tree.py"  # which names the words that it counts
RECIPES = {"bf16", "fp8_blockwise", "fp8_flow"}
OPTION, ACTIVATION, OPERATION = "num_sms", "quick_gelu", "permute_transpose"
FRAMEWORKS = (
    "transformer_engine",
    "transformers",
    "torchtitan",
    "megatron",
    "torch",
    "jax",
)  # as modules begin
#: checks that consist of other checks, which are counted themselves
COMPOSED_CHECKS = {"require_array", "quant_tensor", "plan", "offsets", "int32_offsets", "expert_ids"}
FUNCTION = ast.FunctionDef, ast.AsyncFunctionDef
SOURCE = "sum of source outside of tests and kernels"


class Tree:
    """The tracked files of a checkout."""

    def __init__(self, root: Path):
        self.root = root.resolve()
        listed = self.git("ls-files", "-z").split("\0")[:-1]
        links = [name for name in listed if (self.root / name).is_symlink()]
        self.files = [n for n in listed if n not in links and (self.root / n).is_file()]
        self.python = [n for n in self.files if n.endswith(".py")]
        settings = tomllib.loads(self.text("pyproject.toml"))["tool"]["setuptools"]
        #: folder -> the package that it is imported as
        self.packages = {folder: name for name, folder in settings.get("package-dir", {}).items()}
        for link in links:
            target = (self.root / link).resolve().relative_to(self.root)
            self.packages.setdefault(target.as_posix(), link.replace("/", "."))

    def git(self, *arguments: str) -> str:
        command = ["git", "-C", str(self.root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    @cache  # noqa: B019 - one tree a process
    def text(self, name: str) -> str:
        return (self.root / name).read_text(errors="replace")

    @cache  # noqa: B019
    def parsed(self, name: str) -> ast.Module:
        return ast.parse(self.text(name))

    @cached_property
    def modules(self) -> dict[str, str]:
        """Name -> file of every module that is imported as fp8moe or from it."""
        modules = {}
        for path in self.python:
            name = path.removesuffix(".py").removesuffix("/__init__")
            for folder, package in self.packages.items():
                if name == folder or name.startswith(folder + "/"):
                    name = package + name[len(folder) :]
            modules[name.replace("/", ".")] = path
        return {name: path for name, path in modules.items() if name.split(".")[0] == "fp8moe"}

    def run(self, function: str) -> Any:
        """The result of a function of this script in a process that imports the tree."""
        environment = {**os.environ, "PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-P", __file__, str(self.root), "--inside", function]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])


@dataclass
class Figures:
    """Rows of the table, each with named numbers, and the places that they count."""

    title: str
    rows: dict[str, dict[str, int]] = field(default_factory=dict)
    places: list[str] = field(default_factory=list)


def part(path: str) -> str:
    """Part of the tree: "library" (fp8moe and adapters), or the top-level folder."""
    top = path.split("/")[0] if "/" in path else "top level"
    return "library" if top in ("fp8moe", "adapters") else top


def by_part(places: Iterable[str]) -> dict[str, int]:
    counted = Counter(map(part, places))
    return {"all": counted.total(), **dict(counted.most_common())}


def name_of(node: ast.AST) -> str:
    """The last name of ``a.b`` and ``b``, the key of ``a["b"]``, the value of a literal."""
    node = node.slice if isinstance(node, ast.Subscript) else node
    return str(getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "value", ""))


# ---------------------------------------------------------------- from the text of the files


def code_lines(tree: Tree, path: str) -> int:
    text = tree.text(path)
    if not path.endswith(".py"):
        return sum(map(bool, map(str.strip, re.sub(r"(?s)//[^\n]*|/\*.*?\*/", "", text).split("\n"))))
    skipped = tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped and token.string:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree.parsed(path)):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTION)) and ast.get_docstring(node) is not None:
            found.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(found)


def lines(tree: Tree) -> Figures:
    """Lines of Python, CUDA and C++ by folder. "code": neither blank nor part of a comment or a docstring.
    The source's sum leaves out tests and kernels_cuda. Pages are Markdown."""
    counted: dict[str, Counter[str]] = {}
    for path in tree.files:
        if path.endswith((".py", ".cu", ".cuh", ".h")):
            numbers = {"code": code_lines(tree, path), "all": len(tree.text(path).splitlines())}
            names = [str(PurePosixPath(path).parent), f"sum of {part(path)}"]
            names += [] if part(path) in ("tests", "kernels_cuda") else [SOURCE]
        elif path.endswith(".md"):
            numbers = {"lines": len(tree.text(path).splitlines()), "words": len(tree.text(path).split())}
            names = ["sum of pages"]
        else:
            continue
        for name in names:
            counted.setdefault(name, Counter()).update(numbers)
    order = sorted(counted, key=lambda name: (name.startswith("sum"), name))
    return Figures("Lines", {name: dict(counted[name]) for name in order})


def recipes(tree: Tree) -> Figures:
    """Comparisons (==, !=, in, not in, a case of match) with the name of a recipe as a literal, or of
    something called recipe with any string, outside of tests and kernels. Apart from them: tables that are
    asked by a recipe (``TABLE[recipe]``), and places that check that a recipe is known (``choice("recipe",
    ...)``, ``in RECIPES``)."""
    found: dict[str, list[str]] = {"comparisons": [], "tables asked": [], "places that check it": []}
    for path in tree.python:
        if part(path) in ("tests", "kernels_cuda"):
            continue
        for node in ast.walk(tree.parsed(path)):
            kind = ""
            if isinstance(node, ast.Compare):
                sides = [side for s in (node.left, *node.comparators) for side in getattr(s, "elts", [s])]
                literals = {
                    s.value for s in sides if isinstance(s, ast.Constant) and isinstance(s.value, str)
                }
                if literals & RECIPES or (literals and any(name_of(s) == "recipe" for s in sides)):
                    kind = "comparisons"
                elif any("RECIPES" in name_of(side) for side in node.comparators):
                    kind = "places that check it"
            elif isinstance(node, ast.MatchValue) and name_of(node.value) in RECIPES:
                kind = "comparisons"
            elif isinstance(node, ast.Subscript) and name_of(node.value).isupper():
                kind = "tables asked" if name_of(node.slice) == "recipe" else ""
            elif isinstance(node, ast.Call) and name_of(node.func) == "choice":
                kind = "places that check it" if name_of(node.args[0]) == "recipe" else ""
            if kind:
                line: int = node.lineno
                found[kind].append(f"{path}:{line}: {tree.text(path).splitlines()[line - 1].strip()}")
    rows = {name: by_part(places) for name, places in found.items()}
    return Figures("Names of recipes", rows, [f"{k}: {p}" for k, places in found.items() for p in places])


def imports_of(tree: Tree, module: str) -> Iterator[tuple[str, bool]]:
    """Modules of the tree that a module imports, and whether inside a function."""
    parsed = tree.parsed(tree.modules[module])
    remaining: list[tuple[ast.AST, bool]] = [(parsed, False)]
    while remaining:
        node, deferred = remaining.pop()
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: None if tree.modules[module].endswith("/__init__.py") else -1]
            above = above[: len(above) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = [n if (n := f"{base}.{alias.name}") in tree.modules else base for alias in node.names]
        elif isinstance(node, ast.Call) and name_of(node.func) in ("import_module", "load_module"):
            names = [name_of(argument) for argument in node.args[:1]]
            if node.args and isinstance(
                node.args[0], ast.JoinedStr
            ):  # its beginning, and any string as its end
                strings = [n.value for n in ast.walk(parsed) if isinstance(n, ast.Constant)]
                names = [f"{name_of(node.args[0].values[0])}{string}" for string in strings]
        yield from ((name, deferred) for name in names if name in tree.modules and name != module)
        if isinstance(node, ast.If) and name_of(node.test) == "TYPE_CHECKING":
            children: Iterable[ast.AST] = node.orelse
        else:
            children = () if isinstance(node, (ast.Import, ast.ImportFrom)) else ast.iter_child_nodes(node)
        deferred = deferred or isinstance(node, (*FUNCTION, ast.Lambda))
        remaining += [(child, deferred) for child in children]


def circles_of(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of several modules: those that reach each other."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen, remaining = set[str](), [start]
        while remaining:
            new = graph[remaining.pop()] - seen
            seen |= new
            remaining += new
        reached[start] = seen
    found = {frozenset(m for m in reached[n] if n in reached[m]) for n in graph if n in reached[n]}
    return sorted(map(sorted, found))


def circles(tree: Tree) -> Figures:
    """Circles of imports over all modules of fp8moe, links resolved: sets of modules that import each other,
    directly or by others: first by what runs at import; then by imports inside functions too, also
    importlib's. Imports under TYPE_CHECKING do not count, nor that an import runs the packages above its
    module."""
    graphs: list[dict[str, set[str]]] = [{name: set() for name in tree.modules} for _ in range(2)]
    for module in tree.modules:
        for name, deferred in imports_of(tree, module):
            for graph in graphs[deferred:]:
                graph[module].add(name)
    figures = Figures("Circles of imports")
    for kind, found in zip(("at import", "with functions"), map(circles_of, graphs), strict=True):
        figures.rows[kind] = {"circles": len(found), "modules in them": sum(map(len, found))}
        figures.places += [f"{kind}: {', '.join(circle)}" for circle in found]
    return figures


def programs(tree: Tree) -> Iterator[str]:
    """Python blocks of README and docs, examples, and cells of notebooks."""
    for path in tree.files:
        if path.endswith(".md") and part(path) in ("docs", "examples", "top level"):
            yield from map(textwrap.dedent, re.findall(r"(?s)```python\n(.*?)```", tree.text(path)))
        elif path.endswith(".py") and part(path) == "examples":
            yield tree.text(path)
        elif path.endswith(".ipynb"):
            cells = json.loads(tree.text(path))["cells"]
            code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
            yield from (re.sub(r"(?m)^[%!].*", "", cell) for cell in code)


def roots(tree: Tree) -> Figures:
    """Import roots by framework: modules of fp8moe that programs in README, docs and examples import. An
    imported name counts as itself if it is a module, otherwise as the module that it comes from."""
    found: dict[str, set[str]] = {name: set() for name in (*FRAMEWORKS, "no framework")}
    for node in (node for code in programs(tree) for node in ast.walk(ast.parse(code))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in tree.modules else node.module for name in whole]
        for name in names:
            if name.split(".")[0] == "fp8moe":
                own = name.removeprefix("fp8moe.").removeprefix("adapters.")
                found[next((f for f in FRAMEWORKS if own.startswith(f)), "no framework")].add(name)
    places = [f"{f}: {', '.join(sorted(names))}" for f, names in found.items()]
    return Figures("Import roots", {f: {"modules": len(names)} for f, names in found.items()}, places)


def mentions(tree: Tree) -> Figures:
    """What an option, an activation and an operation touch: parameters and annotated fields called num_sms;
    files that mention num_sms, quick_gelu and permute_transpose as a whole word."""
    figures = Figures("What an option, an activation and an operation touch")
    for path in tree.python:
        for node in ast.walk(tree.parsed(path)):
            is_field = isinstance(node, ast.AnnAssign) and name_of(node.target) == OPTION
            if is_field or (isinstance(node, ast.arg) and node.arg == OPTION):
                figures.places.append(f"{path}:{node.lineno}: {OPTION}")
    figures.rows[f"signatures and fields that hold {OPTION}"] = by_part(figures.places)
    for word in (OPTION, ACTIVATION, OPERATION):
        files = [p for p in tree.files if p != OWN and re.search(rf"\b{word}\b", tree.text(p))]
        figures.rows[f"files that mention {word}"] = by_part(files)
        figures.places += [f"{path}: mentions {word}" for path in files]
    return figures


def shadowed(tree: Tree) -> Figures:
    """Names that a package's __init__.py imports, defines or assigns as something else than its module of
    this name."""
    found = []
    for package, path in tree.modules.items():
        bound: dict[str, str] = {}
        for node in tree.parsed(path).body if path.endswith("/__init__.py") else ():
            if isinstance(node, ast.ImportFrom):
                bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, (ast.ClassDef, *FUNCTION)):
                bound[node.name] = ""
            elif isinstance(node, ast.Assign):
                bound |= {name_of(target): "" for target in node.targets}
        found += [n for own, what in bound.items() if (n := f"{package}.{own}") in tree.modules and what != n]
    return Figures("Names that are a module and something else", {"names": {"all": len(found)}}, found)


def weight(tree: Tree) -> Figures:
    """Bytes of tracked files: benchmark rows (.json, .jsonl), and the others by folder. Lines and words of
    docs/experiments, and its pages of more than 80 lines."""
    counted: Counter[str] = Counter()
    for path in tree.files:
        rows = path.endswith((".json", ".jsonl"))
        counted["benchmark rows" if rows else part(path)] += (tree.root / path).stat().st_size
    pages = {p: tree.text(p) for p in tree.files if p.startswith("docs/") and p.endswith(".md")}
    experiments = [path for path in pages if path.startswith("docs/experiments/")]
    lengths = [len(pages[path].splitlines()) for path in experiments]
    of_pages = {"pages": len(lengths), "above 80 lines": sum(n > 80 for n in lengths), "lines": sum(lengths)}
    of_pages["words"] = sum(len(pages[path].split()) for path in experiments)
    of_pages["words of all docs"] = sum(len(text.split()) for text in pages.values())
    figures = Figures("Weight", {"bytes": {"all": counted.total(), **dict(counted.most_common())}})
    figures.rows["docs/experiments"] = of_pages
    figures.places = [f"{path}: {n} lines" for path, n in zip(experiments, lengths, strict=True)]
    return figures


def subjects(tree: Tree, since: str) -> Figures:
    """Commits since a revision (--since) whose subject is longer than 100 characters."""
    log = tree.git("log", "--format=%h %s", f"{since}..HEAD").splitlines()
    long = [line for line in log if len(line.partition(" ")[2]) > 100]
    return Figures(f"Commits since {since}", {"subjects": {"all": len(log), "too long": len(long)}}, long)


# ---------------------------------------------------------------- in a process that imports the tree


def calls(tree: Tree) -> Figures:
    """Python calls of the third fp8moe.moe_forward and moe_backward ("fp8_flow", NumPy, 8 tokens, 4 experts
    of 128 x 128, top 2): call events (sys.setprofile) of functions in the tree's files, and how often the
    file differs from that of the event before. "checks": calls of public functions in modules named *checks,
    without those that consist of other checks (check_..., COMPOSED_CHECKS); "in checks modules": calls of
    any function in them; "from outside": calls of their public functions by other modules."""
    return Figures("Python calls of a layer", *tree.run("calls_inside"))


def launch(tree: Tree) -> Figures:
    """Files from torch's FP8FlowMoE on the CPU (in fp8moe.torch, if it exists, otherwise where it is
    defined) to the reference's first grouped GEMM, in the second forward: on the stack at that call, and
    entered before it; the first and the last file included."""
    return Figures("Files from FP8FlowMoE to its first GEMM", *tree.run("launch_inside"))


def record(
    tree: Tree, function: Callable[[], Any], each: Callable[[Any, list[Any]], None] | None = None
) -> Any:
    """The function's result, and its calls of the tree's functions: (file, function, file of the caller)."""
    events: list[tuple[str, str, str]] = []

    def event(frame: Any, event: str, _: Any) -> None:
        if event == "call" and (file := file_of(tree, frame)):
            events.append((file, frame.f_code.co_name, file_of(tree, frame.f_back)))
            if each is not None:
                each(frame, events)

    sys.setprofile(event)
    try:
        return function(), events
    finally:
        sys.setprofile(None)


def file_of(tree: Tree, frame: Any) -> str:
    """The tree's file of a frame, empty for others, for this script, and for None (below a compiled loop)."""
    return _file(tree, frame.f_code.co_filename) if frame else ""


@cache
def _file(tree: Tree, name: str) -> str:
    path = Path(name).resolve()
    inside = path.is_relative_to(tree.root) and path != Path(__file__).resolve()
    own = path.relative_to(tree.root).as_posix() if inside else ""
    return own if own in tree.files else ""  # generated code and an environment in the checkout are not


def calls_inside(tree: Tree) -> Any:
    import ml_dtypes
    import numpy as np

    import fp8moe

    tokens, experts, width = 8, 4, 128
    shapes = (tokens, width), (experts, 2 * width, width), (experts, width, width)
    arrays = [np.random.default_rng().standard_normal(s).astype(ml_dtypes.bfloat16) for s in shapes]
    ids = (np.arange(tokens)[:, None] + np.arange(2)).astype(np.int32) % experts
    arguments = *arrays, ids, np.full(ids.shape, 0.5, np.float32)
    rows, places = {}, []
    for _ in range(3):
        (y, saved), forward = record(tree, lambda: fp8moe.moe_forward(*arguments, recipe="fp8_flow"))
        _, backward = record(tree, lambda y=y, saved=saved: fp8moe.moe_backward(saved, y))
    for name, events in (("moe_forward", forward), ("moe_backward", backward)):
        inside = [event for event in events if event[0].endswith("checks.py")]
        public = [event for event in inside if event[1][0] not in "_<"]
        single = [e for e in public if e[1] not in COMPOSED_CHECKS and not e[1].startswith("check_")]
        row = {"Python calls": len(events), "changes of file": sum(a[0] != b[0] for a, b in pairwise(events))}
        row |= {"checks": len(single), "in checks modules": len(inside)}
        rows[name] = row | {"from outside": sum(not e[2].endswith("checks.py") for e in public)}
        most = Counter(f"{file} {function}" for file, function, _ in events).most_common()
        places += [f"{name}: {n} {place}" for place, n in most]
    return rows, places


def launch_inside(tree: Tree) -> Any:
    import torch

    defined = (name for name, path in tree.modules.items() if "\nclass FP8FlowMoE(" in tree.text(path))
    door = "fp8moe.torch" if "fp8moe.torch" in tree.modules else next(defined)
    layer = importlib.import_module(door).FP8FlowMoE(128, 128, 4, 2, recipe="fp8_flow")
    x = torch.randn(8, 128)
    layer(x).sum().backward()
    found: dict[str, list[str]] = {}

    def each(frame: Any, events: list[Any]) -> None:
        file, function, _ = events[-1]
        if not found and file.endswith("reference/grouped_gemm.py") and function[0] not in "_<":
            stack = []
            while frame is not None:
                stack.insert(0, file_of(tree, frame))
                frame = frame.f_back
            found.update({"on the stack": stack, "entered": [event[0] for event in events]})

    record(tree, lambda: layer(x), each)
    if not found:
        raise SystemExit(
            "launch: no call of fp8moe/reference/grouped_gemm.py; name the file of the first GEMM"
        )
    files = {kind: list(dict.fromkeys(filter(None, [tree.modules[door], *f]))) for kind, f in found.items()}
    places = [f"{kind}: {path}" for kind in files for path in files[kind]]
    return {"files": {kind: len(paths) for kind, paths in files.items()}}, places


MEASURES = lines, recipes, circles, calls, roots, launch, mentions, shadowed, weight


def main() -> None:
    how = "\n\n".join(textwrap.fill(inspect.getdoc(m) or "", 100) for m in (*MEASURES, subjects))
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=how, formatter_class=layout)
    here = Path(__file__).parents[1]
    parser.add_argument("tree", nargs="?", type=Path, default=here, help="root of a checkout (this one)")
    parser.add_argument("--places", action="store_true", help="also print the places that are counted")
    parser.add_argument("--json", action="store_true", help="print JSON, with all places")
    parser.add_argument("--since", metavar="REV", help="also look at the subjects of commits since REV")
    parser.add_argument("--inside", choices=("calls_inside", "launch_inside"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    tree = Tree(arguments.tree)
    if arguments.inside:
        return print(json.dumps(globals()[arguments.inside](tree)))
    measured = [measure(tree) for measure in MEASURES]
    measured += [subjects(tree, arguments.since)] if arguments.since else []
    if arguments.json:
        return print(json.dumps([asdict(figures) for figures in measured], indent=1))
    for figures in measured:
        print(figures.title)
        for name, numbers in figures.rows.items():
            print(f"  {name:44} " + ", ".join(f"{n:,} {label}" for label, n in numbers.items()))
        if arguments.places:
            print(textwrap.indent("\n".join(figures.places), "    "))


if __name__ == "__main__":
    main()
