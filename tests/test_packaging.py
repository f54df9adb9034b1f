"""The wheel and the source archive contain every file of the tree, with or without symbolic links, and work
when installed."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

import fp8moe
from benchmarks import step, table
from fp8moe.kernels_cuda.runtime.compiler import ARCHITECTURES

ROOT = Path(__file__).parents[1]
LINKS = ("adapters", "kernels_cuda")
FILES = ("pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "CITATION.cff", "LICENSE", "Makefile")
FOLDERS = ("fp8moe", "tests", "docs", "examples", "benchmarks", "packaging", *LINKS)
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())


def copy_of_the_tree(target, links):
    """The files of a release; links: "kept", "gone", or "text" as some archive tools write them."""
    target.mkdir()
    for name in FILES:
        shutil.copy2(ROOT / name, target)
    for name in FOLDERS:
        shutil.copytree(
            ROOT / name, target / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in LINKS:
        link = target / "fp8moe" / name
        if links != "kept":
            link.unlink()
        if links == "text":
            link.write_text(f"../{name}")
    return target


def build(kind, tree, target):
    """Calls the build backend as a build front end does, without isolation, which would need a package
    index."""
    call = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(target)!r}))"
    done = subprocess.run([sys.executable, "-c", call], cwd=tree, capture_output=True, text=True, check=True)
    return target / done.stdout.splitlines()[-1]


def real_files(folder):
    """Names of the folder's files, without those behind links."""
    walk = os.walk(folder)
    return sorted(
        str((Path(address) / name).relative_to(folder)) for address, _, names in walk for name in names
    )


def named_in_the_wheel():
    """Name in the wheel -> path in the tree, for every file that the package needs."""
    kinds = (".py", ".cu", ".cuh", ".gz", ".typed")
    paths = [ROOT / folder / name for folder in ("fp8moe", *LINKS) for name in real_files(ROOT / folder)]
    packages = {path.relative_to(ROOT): path for path in paths if path.suffix in kinds}
    return {
        str(name if name.parts[0] == "fp8moe" else "fp8moe" / name): path for name, path in packages.items()
    }


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        infos = archive.infolist()
        return {i.filename: archive.read(i) for i in infos if ".dist-info/" not in i.filename}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    return build("wheel", copy_of_the_tree(folder / "tree", "kept"), folder)


def test_wheel_contains_the_tree(wheel):
    wanted = {name: path.read_bytes() for name, path in named_in_the_wheel().items()}
    assert len([name for name in wanted if name.endswith(".cu")]) > 10
    assert contents(wheel) == wanted


@pytest.mark.parametrize("links", ["gone", "text"])
def test_a_tree_without_links_builds_the_same_wheel(links, wheel, tmp_path):
    """As in a Windows checkout without links, or a zip archive unpacked without them."""
    again = build("wheel", copy_of_the_tree(tmp_path / "tree", links), tmp_path)
    assert contents(again) == contents(wheel)


def test_source_archive_contains_each_file_once_and_builds_the_same_wheel(wheel, tmp_path):
    tree = copy_of_the_tree(tmp_path / "tree", "kept")
    before = real_files(tree)
    archive = build("sdist", tree, tmp_path)
    with tarfile.open(archive) as packed:
        members = packed.getmembers()
        assert all(member.isfile() or member.isdir() for member in members)  # no links
        packed.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    names = [member.name.partition("/")[2] for member in members if member.isfile()]
    render = re.compile(r"PKG-INFO|setup\.cfg|fp8moe\.egg-info/.*")
    assert sorted(name for name in names if not render.fullmatch(name)) == before
    assert contents(build("wheel", unpacked, tmp_path)) == contents(wheel)


def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return archive.read(name).decode()


def test_repository_setting_makes_links_absolute(tmp_path, monkeypatch):
    """The repository's address is only in pyproject.toml; with it, all links are absolute."""
    tree, address = copy_of_the_tree(tmp_path / "tree", "kept"), "https://example.com/owner/fp8moe"
    settings = tree / "pyproject.toml"
    settings.write_text(
        settings.read_text().replace("[project.urls]\n", f'[project.urls]\nRepository = "{address}"\n')
    )
    monkeypatch.setattr(table, "ROOT", tree)
    for name, render in (("README.md", table.render), ("CITATION.cff", table.cited)):
        text = render((tree / name).read_text())
        assert render(text) == text  # a second run changes nothing
        (tree / name).write_text(text)
    assert f'\nrepository-code: "{address}"\n' in (tree / "CITATION.cff").read_text()
    described = metadata(build("wheel", tree, tmp_path))
    assert f"\nProject-URL: Repository, {address}\n" in described
    links = re.findall(r"^\[([\w-]+)\]: (.*)$", described, re.MULTILINE)
    assert {name for name, _ in links} == set(table.LINKS)
    for _, link in links:
        form, branch, path = link.removeprefix(f"{address}/").split("/", 2)
        assert (form, branch) == ("blob", "main")
        assert path in (*FILES, "CONTRIBUTING.md") or (tree / path).exists()
    pictures = re.findall(r'src(?:set)?="(.*?)"', described)
    assert len(pictures) == len(step.FILES)
    for link in pictures:
        assert (ROOT / link.removeprefix(f"{address}/raw/main/")) in step.FILES


def test_links_are_relative_without_the_setting(wheel):
    assert "Project-URL" not in metadata(wheel) or table.repository()
    assert table.cited((ROOT / "CITATION.cff").read_text()) == (ROOT / "CITATION.cff").read_text()


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder with the installed wheel and its command; dependencies come from this environment."""
    target = tmp_path_factory.mktemp("site-packages")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*pip, "--target", str(target), str(wheel)], check=True)
    return target


def call(installed, *words):
    """Runs the command outside the checkout, with the installed package first on the path."""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    return subprocess.run(words, cwd=installed, env=environment, capture_output=True, text=True, check=False)


def test_the_installed_command_works(installed):
    command = str(installed / "bin" / "fp8moe")
    result = call(installed, command, "--version")
    assert result.stdout == f"fp8moe {fp8moe.__version__}\n"
    address = "import fp8moe; from fp8moe.info import commit; print(fp8moe.__file__, commit())"
    assert call(installed, sys.executable, "-c", address).stdout.split() == [
        str(installed / "fp8moe" / "__init__.py"),
        "unknown",
    ]
    usage = call(installed, command, "--help").stdout
    assert usage.startswith("usage: fp8moe ")
    tested = call(installed, command, "selftest", "--device", "cpu")
    assert tested.returncode == 0, tested.stderr
    assert "all checks passed" in tested.stdout


def test_an_installed_package_is_not_the_checkout_around_it(installed, tmp_path):
    """A virtual environment is often inside another project's repository, whose commit must not be
    reported."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run([*git, "init", "--quiet", str(tmp_path)], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "-m", "theirs"], cwd=tmp_path, check=True)
    shutil.copytree(installed / "fp8moe", tmp_path / "environment" / "fp8moe")
    program = "from fp8moe.info import commit; print(commit())"
    assert call(tmp_path / "environment", sys.executable, "-c", program).stdout == "unknown\n"


def requirements(extra):
    """Requirements of an extra, including the extras that it refers to, without markers."""
    for text in SETTINGS["project"]["optional-dependencies"][extra]:
        requirement = Requirement(text)
        if requirement.name == "fp8moe":
            for name in requirement.extras:
                yield from requirements(name)
        else:
            yield requirement


def test_extras_install_what_their_adapters_import():
    from fp8moe.info import DOORS

    distribution = {"megatron": "megatron-core", "cupy": "cupy-cuda13x"}
    for door, (module, fix) in DOORS.items():
        if named := re.search(r"fp8moe\[(\w+)\]", fix):
            wanted = distribution.get(module, module)
            assert wanted in {r.name for r in requirements(named.group(1))}, door


def test_installed_versions_satisfy_the_extras():
    """If this environment violated a version bound, the suite would not test the declared versions."""
    for extra in ("torch", "jax", "transformers", "megatron", "torchtitan", "bench", "test"):
        for requirement in requirements(extra):
            try:
                version = importlib.metadata.version(requirement.name)
            except importlib.metadata.PackageNotFoundError:
                continue  # an environment without that extra
            assert requirement.specifier.contains(version, prereleases=True), requirement


@pytest.mark.parametrize(
    ("adapter", "package", "stand_ins"),
    [
        ("torch/library", "torch", {"torch": SimpleNamespace(__version__="2.9.1", Tensor=None)}),
        ("transformers", "transformers", {"transformers.distributed.expert_parallel": None}),
    ],
)
def test_older_versions_are_refused_with_the_bound(adapter, package, stand_ins, monkeypatch):
    pytest.importorskip(package)
    importlib.import_module(f"fp8moe.adapters.{adapter.replace('/', '.')}")
    for name, module in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, module)
    (bound,) = (r.specifier for r in requirements(package) if r.name == package)
    wanted = str(bound).removeprefix(">=")
    specification = importlib.util.spec_from_file_location("other", ROOT / "adapters" / f"{adapter}.py")
    message = rf"{package} {wanted} or later .*pip install '{package}>={wanted}'"
    with pytest.raises(ImportError, match=message):
        specification.loader.exec_module(importlib.util.module_from_spec(specification))


def test_the_citation_names_papers_that_the_code_names():
    text = (ROOT / "CITATION.cff").read_text()
    assert f"version: {fp8moe.__version__}\n" in text
    for author in SETTINGS["project"]["authors"]:
        assert f'\n  - name: "{author["name"]}"\n' in text.partition("\nreferences:")[0]
    papers = re.findall(r"arxiv\.org/abs/([\d.]+)", text)
    assert len(papers) == len(set(papers)) >= 5
    code = "".join(path.read_text() for path in (ROOT / "fp8moe").rglob("*.py"))
    for paper in papers:
        assert paper in code, paper


def test_the_conda_recipe_has_the_versions_of_pyproject():
    yaml = pytest.importorskip("yaml")
    recipe = yaml.safe_load((ROOT / "packaging" / "recipe.yaml").read_text())
    project, context = SETTINGS["project"], recipe["context"]
    assert context["version"] == fp8moe.__version__
    assert project["requires-python"] == f">={context['python_min']}"
    needs = recipe["requirements"]
    pip = {Requirement(text) for text in project["dependencies"]}
    wanted = {f"{r.name} {r.specifier}" for r in pip} | {"python >=${{ python_min }}"}
    assert set(needs["run"]) == wanted
    assert set(SETTINGS["build-system"]["requires"]) <= {text.replace(" ", "") for text in needs["host"]}
    conda = {"torch": "pytorch", "cupy-cuda13x": "cupy"}
    bounds = {Requirement(text.replace(" ", "", 1)) for text in needs["run_constraints"]}
    of_extras = {r for extra in ("torch", "jax", "transformers", "cuda13") for r in requirements(extra)}
    of_pip = {conda.get(r.name, r.name): r.specifier for r in of_extras}
    for bound in bounds:
        if bound.name == "cuda-nvrtc":  # the older of the two extras
            (toolkit,) = (r for r in requirements("cuda12") if r.name == "cuda-toolkit")
            assert str(bound.specifier) == str(toolkit.specifier).split(",")[-1]
        else:
            assert bound.specifier == of_pip[bound.name], bound.name
    (command,) = recipe["build"]["python"]["entry_points"]
    assert command == " = ".join(*project["scripts"].items())
    assert recipe["about"]["summary"] == project["description"]
    assert recipe["about"]["license"] == project["license"]
    if address := table.repository():
        assert recipe["about"]["repository"] == address


def test_the_image_installs_what_the_extras_and_the_compiler_know():
    text = (ROOT / "packaging" / "Dockerfile").read_text()
    (python,) = re.findall(r"^FROM python:(3\.\d+)-slim$", text, re.MULTILINE)
    assert f"Programming Language :: Python :: {python}" in SETTINGS["project"]["classifiers"]
    (extras,) = re.findall(r"/source\[([\w,]+)\]", text)
    assert set(extras.split(",")) <= set(SETTINGS["project"]["optional-dependencies"])
    (architectures,) = re.findall(r'^ARG ARCHITECTURES="(.*)"$', text, re.MULTILINE)
    assert set(architectures.split()) <= set(ARCHITECTURES)
    (folder,) = re.findall(r"FP8MOE_CACHE_DIR=(\S+)", text)
    assert folder.startswith("/")


def test_the_support_matrix_has_the_bounds_of_the_extras():
    text = (ROOT / "docs" / "versions.md").read_text()
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    bounds = {row[0]: row[2] for row in rows}
    assert f">={bounds['Python']}" == SETTINGS["project"]["requires-python"]
    numpy, dtypes, numba = bounds["NumPy, ml_dtypes, Numba"].split(", ")
    wanted = {f"numpy>={numpy}", f"ml_dtypes>={dtypes}", f"numba>={numba}"}
    assert {text.replace(" ", "") for text in SETTINGS["project"]["dependencies"]} == wanted
    names = {"torch": "torch", "JAX": "jax", "transformers": "transformers"}
    names |= {"Megatron-Core": "megatron", "torchtitan": "torchtitan"}
    for label, extra in names.items():
        first = next(r for r in requirements(extra) if r.name in (extra, f"{extra}-core"))
        assert str(first.specifier) == f">={bounds[label].partition(',')[0]}", label


def test_the_workflow_runs_every_python_that_is_claimed():
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    claimed = re.findall(r"Python :: (3\.\d+)", "\n".join(SETTINGS["project"]["classifiers"]))
    assert jobs["tests"]["strategy"]["matrix"]["python"] == claimed
    steps = "\n".join(step.get("run", "") for job in jobs.values() for step in job["steps"])
    for command in ("make test", "make test-minimum", "make docs", "python -m build", "fp8moe compile"):
        assert command in steps.splitlines()


def test_constraints_are_the_minimum_versions():
    command = [sys.executable, str(ROOT / "tests" / "minimum.py"), "torch"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    wanted = [*SETTINGS["project"]["dependencies"], *SETTINGS["project"]["optional-dependencies"]["torch"]]
    assert lines == [requirement.replace(">=", "==") for requirement in wanted]
