"""The architecture: allowed imports, equal signatures of the two backends, complete lists of modules."""

import ast
import importlib
import inspect
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import measure_tree
import pytest

import fp8moe
from fp8moe import info
from fp8moe.layer.options import LayerOptions
from fp8moe.records import Options, Record

ROOT = Path(__file__).parents[1]
FRAMEWORKS = {"torch", "jax", "jaxlib", "cupy", "transformer_engine", "megatron", "tensorflow"}
DOORS = [ROOT / "fp8moe" / f"{name.replace('.', '/')}.py" for name in info.DOORS]
PARTS = tuple(
    f"fp8moe/{name}"
    for name in (
        "bench",
        "checkpoints",
        "demo",
        "expert_parallel",
        "layer",
        "ops",
        "reference",
        "runtime",
        "selftest",
    )
)
ROOMS = ("plan", "permute", "quantize", "layout", "transpose", "swiglu", "grouped_gemm", "router")


def imports_of(path):
    """Top-level names and dotted modules that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def files(folder, pattern="*.py"):
    return sorted((ROOT / folder).glob(pattern))


def below(name, *prefixes):
    return any(name == p or name.startswith(p + ".") for p in prefixes)


@pytest.mark.parametrize(
    "path",
    [
        p
        for folder in ("fp8moe", *PARTS)
        for p in files(folder)
        if p not in DOORS and folder != "fp8moe/bench"
    ],
    ids=lambda p: p.stem,
)
def test_library_imports_no_framework(path):
    roots = {name.partition(".")[0] for name in imports_of(path)}
    assert not roots & FRAMEWORKS


@pytest.mark.parametrize("path", files("fp8moe/reference"), ids=lambda p: p.stem)
def test_reference_imports_only_records(path):
    modules = {n for n in imports_of(path) if below(n, "fp8moe")}
    records = "fp8moe.activation", "fp8moe.records", "fp8moe.formats"
    allowed = ("fp8moe.reference", "fp8moe.runtime.loops", "fp8moe.runtime.workers", *records)
    assert all(below(n, *allowed) for n in modules), modules


@pytest.mark.parametrize("path", sorted((ROOT / "kernels_cuda").rglob("*.py")), ids=lambda p: p.stem)
def test_kernels_import_only_records(path):
    modules = {n for n in imports_of(path) if below(n, "fp8moe")}
    records = "fp8moe.activation", "fp8moe.records", "fp8moe.runtime.record_trees", "fp8moe.formats"
    helpers = tuple(f"fp8moe.runtime.{name}" for name in ("disk_cache", "loops", "tables", "workers"))
    allowed = ("fp8moe.kernels_cuda", *helpers, *records)
    assert all(below(n, *allowed) for n in modules), modules


def test_layers_of_the_launch_code_are_separate():
    """The driver does not import the library, encodings do not import CUDA; only launch.py imports both."""
    imports = {
        name: imports_of(ROOT / "kernels_cuda/runtime" / f"{name}.py") for name in ("driver", "encodings")
    }
    assert not any(below(n, "fp8moe") for n in imports["driver"])
    assert not any(below(n, "cupy", "fp8moe.kernels_cuda") for n in imports["encodings"])


@pytest.mark.parametrize(
    "path",
    [p for folder in ("fp8moe", *PARTS) for p in files(folder) if p not in DOORS],
    ids=lambda p: p.stem,
)
def test_library_does_not_import_adapters(path):
    assert not any(below(n, "fp8moe.adapters") for n in imports_of(path))


def functions_of(path):
    """Name -> parameter names of the functions of a file, without importing it."""
    tree = ast.parse(path.read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {
        f.name: [a.arg for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)] for f in functions
    }


@pytest.mark.parametrize("room", ROOMS)
def test_backends_have_equal_signatures(room):
    """Every public operation of the kernels has the reference's name and parameters."""
    reference = functions_of(ROOT / "fp8moe/reference" / f"{room}.py")
    kernels = functions_of(ROOT / "kernels_cuda" / f"{room}.py")
    operations = [name for name in reference if name in fp8moe.__all__]
    assert operations
    for name in operations:
        assert kernels.get(name) == reference[name], name


def test_every_public_name_has_a_docstring():
    for name in fp8moe.__all__:
        value = getattr(fp8moe, name)
        if inspect.isfunction(value) or inspect.isclass(value):
            assert (value.__doc__ or "").strip(), name
            assert "Array" not in name


@pytest.mark.parametrize(
    ("topic", "wanted"),
    [
        ("adamw", "adamw"),
        ("bias", "add_biases add_biases_backward chunk_sums expert_sums"),
        ("forms", "place_mxfp4 place_tiles"),
        ("expert_parallel", "limit_rows local_ids pack_rows quantize_and_pack rank_mask unpack_rows"),
    ],
)
def test_backends_have_equal_signatures_of_internal_operations(topic, wanted):
    """These functions are not public, so all functions of the reference are compared."""
    reference = functions_of(ROOT / "fp8moe/reference" / f"{topic}.py")
    kernels = functions_of(ROOT / "kernels_cuda" / f"{topic}.py")
    operations = {name for name in reference if not name.startswith("_")}
    assert operations == {*wanted.split()}
    for name in operations:
        assert kernels.get(name) == reference[name], name


def test_modules_of_expert_parallelism():
    stems = {path.stem for path in files("fp8moe/expert_parallel")}
    assert stems == {"__init__", "protocols", "messages", "exchange", "overlap", "blocks"}


def test_no_record_is_the_default_of_a_field():
    """Dynamo of torch 2.11, which traces the constructors of frozen records, cannot wrap such a default."""
    kinds = [*Options.__subclasses__(), *Record.__subclasses__()]
    assert LayerOptions in kinds
    for kind in kinds:
        assert not [f.name for f in fields(kind) if isinstance(f.default, (Options, Record))], kind


def test_every_package_is_in_the_wheel():
    """All folders with Python files are in ``packages`` of pyproject.toml."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = settings["tool"]["setuptools"]["packages"]
    folders = [ROOT / "fp8moe", ROOT / "adapters", ROOT / "kernels_cuda"]
    packages = {p.parent.relative_to(ROOT) for folder in folders for p in folder.rglob("__init__.py")}
    names = {".".join(package.parts) for package in packages}
    assert set(listed) == {name if name.startswith("fp8moe") else f"fp8moe.{name}" for name in names}


def test_every_topic_has_its_modules():
    for room in ROOMS:
        assert (ROOT / "fp8moe/ops" / f"{room}.py").exists()
        assert (ROOT / "fp8moe/reference" / f"{room}.py").exists()
        assert (ROOT / "tests" / f"test_{room}.py").exists()


@pytest.mark.parametrize("link", ["kernels_cuda", "adapters"])
def test_the_links_are_relative(link):
    path = ROOT / "fp8moe" / link
    assert path.is_symlink()
    assert path.readlink() == Path("..") / link
    module = importlib.import_module(f"fp8moe.{link}")
    assert Path(module.__file__).resolve().parent == ROOT / link


@pytest.mark.parametrize("folder", ["fp8moe", *PARTS, "adapters", "examples"])
def test_nothing_imports_the_repositorys_benchmarks(folder):
    for path in (ROOT / folder).rglob("*.py"):
        assert not any(below(name, "benchmarks") for name in imports_of(path)), path


def test_every_door_is_reported():
    doors = {
        p
        for p in files("fp8moe") + files("fp8moe/transformer_engine")
        if "from fp8moe.adapters" in p.read_text()
    }
    assert doors == {*DOORS}


def test_doors_have_the_names_of_their_adapters():
    """A door hands on every public name of the modules that it imports, and nothing else."""
    for door in DOORS:
        modules = [
            node.module for node in ast.parse(door.read_text()).body if isinstance(node, ast.ImportFrom)
        ]
        paths = [ROOT / f"{module.removeprefix('fp8moe.').replace('.', '/')}.py" for module in modules]
        wanted = sorted(name for path in paths for name in public_names(path))
        assert sorted(public_names(door)) == wanted, door


def public_names(path):
    assignments = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Assign)]
    (names,) = (ast.literal_eval(a.value) for a in assignments if ast.unparse(a.targets[0]) == "__all__")
    return names


def test_every_kernel_waits_for_the_previous_launch():
    """A kernel may start before the previous one is complete (launch.launch_loaded), so it must call pdl_wait
    first."""
    kernel = re.compile(r'extern "C" __global__ void(?:\s+__\w+__\(.*\))*\s+(\w+)\([^{]*?\) \{\n(.*)')
    later = {  # the second of two launches: their first statements may overlap with the first launch
        "sort_chunks_rows": "  DYNAMIC_SHARED(shared);",
        "quantize_tiles": "  if (!taken) pdl_wait();",
        "swiglu_quantize_tiles": "  if (!taken) pdl_wait();",
    }
    sources = [path.read_text() for path in (ROOT / "kernels_cuda").rglob("*.cu")]
    kernels = [match for source in sources for match in kernel.findall(source)]
    assert len(kernels) == sum(source.count('extern "C"') for source in sources) > 30
    for name, first in kernels:
        assert first == later.get(name, "  pdl_wait();"), name


@pytest.mark.parametrize("path", files("tests"), ids=lambda p: p.stem)
def test_tests_do_not_import_each_other(path):
    assert not any(name.startswith("test_") for name in imports_of(path))


WITHOUT_FRAMEWORKS = """
import importlib, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "jax"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
for name in sys.argv[1:]:
    try:
        importlib.import_module("fp8moe." + name)
    except ImportError as error:
        print(name, error)
"""


def test_doors_without_their_framework_say_what_to_install():
    doors = [name for name in info.DOORS if name != "cupy"]
    command = [sys.executable, "-c", WITHOUT_FRAMEWORKS, *doors]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[0] for line in lines] == doors
    assert [line for line in lines if "pip install '" not in line] == []


needs_git = pytest.mark.skipif(
    not (ROOT / ".git").exists() or shutil.which("git") is None,
    reason="needs git and a checkout, not an archive",
)


@needs_git
def test_imports_have_no_circles():
    """None at import. Imports inside functions hide some: they may not become more."""
    tree = measure_tree.Tree(ROOT)
    assert {*tree.modules} >= {"fp8moe", "fp8moe.adapters", "fp8moe.kernels_cuda", "fp8moe.reference"}
    figures = measure_tree.circles(tree)
    assert figures.rows["at import"]["circles"] == 0, figures.places
    assert figures.rows["with functions"]["modules in them"] <= 20, figures.places
    assert measure_tree.shadowed(tree).places == []


SMALL_TREE = {
    "pyproject.toml": "[tool.setuptools]",
    "fp8moe/__init__.py": "from fp8moe.a import a\nfrom fp8moe import b",
    "fp8moe/a.py": "from fp8moe import b\na = recipe in ('bf16', 'x') or names['recipe'] != 'y' or z == 'a'",
    "fp8moe/b.py": "import fp8moe.adapters.c",
    "fp8moe/d.py": "import typing\nif typing.TYPE_CHECKING:\n    import fp8moe.e\nx = T[self.recipe]",
    "fp8moe/e.py": "import importlib, fp8moe.d\nE = 'f'\nf = lambda: importlib.import_module(f'fp8moe.{E}')",
    "fp8moe/f.py": f"def g({measure_tree.OPTION}):\n    from fp8moe import e",
    "adapters/__init__.py": "",
    "adapters/c.py": "import fp8moe.a\n\n'not a docstring'\n# a comment\n",
    "docs/page.md": "```python\nfrom fp8moe import b\nfrom fp8moe.adapters.c import x\n```",
}


@needs_git
def test_measures_of_a_small_tree(tmp_path):
    """A circle at import through a link, a circle through functions, and one of each of the other figures."""
    for name, text in SMALL_TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "fp8moe/adapters").symlink_to("../adapters")
    for arguments in (["init", "--quiet"], ["add", "."]):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    tree = measure_tree.Tree(tmp_path)
    assert tree.modules["fp8moe.adapters.c"] == "adapters/c.py"
    assert measure_tree.circles(tree).places == [
        "at import: fp8moe.a, fp8moe.adapters.c, fp8moe.b",
        "with functions: fp8moe.a, fp8moe.adapters.c, fp8moe.b",
        "with functions: fp8moe.e, fp8moe.f",
    ]
    assert measure_tree.shadowed(tree).places == ["fp8moe.a"]
    counted = {name: row["all"] for name, row in measure_tree.recipes(tree).rows.items()}
    assert counted == {"comparisons": 2, "tables asked": 1, "places that check it": 0}
    assert measure_tree.roots(tree).places[-1] == "no framework: fp8moe.adapters.c, fp8moe.b"
    touched = [*measure_tree.mentions(tree).rows.values()]
    assert touched == [{"all": 1, "library": 1}, {"all": 1, "library": 1}, {"all": 0}, {"all": 0}]
    assert measure_tree.lines(tree).rows["adapters"] == {"code": 2, "all": 4}
