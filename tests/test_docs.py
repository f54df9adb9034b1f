"""The documentation: a strict build of the site, complete API reference, runnable programs, figures from
results."""

import ast
import importlib
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

import fp8moe
from benchmarks import roofline, speedup, step, table
from fp8moe import __main__ as command_line
from fp8moe import expert_parallel, info

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
# programs that no test runs have a comment with the reason before them, as have programs that need a GPU
FENCE = re.compile(r"(?:<!-- (not run|gpu): .+? -->\n)?```python\n(.*?)```", re.DOTALL)


# ---------------------------------------------------------------- the site


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="pip install 'fp8moe[docs]'")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def names_in(site):
    """Every name with an anchor in the API reference, with its full path."""
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    return {line.split(" ")[0] for line in zlib.decompress(inventory).decode().splitlines()}


def public_names():
    """Full paths of the public names, those of the doors too."""
    for package in (fp8moe, expert_parallel):
        yield from (f"{package.__name__}.{name}" for name in package.__all__)
    for door in info.DOORS:
        path = ROOT / "fp8moe" / f"{door.replace('.', '/')}.py"
        names = re.search(r"^__all__ = (\[.*?\])", path.read_text(), re.DOTALL | re.MULTILINE)
        names = [name for name in ast.literal_eval(names[1]) if not name.isupper()]  # not a constant
        yield from (f"fp8moe.{door}.{name}" for name in names)


def test_every_public_name_is_in_the_reference(site):
    missing = set(public_names()) - names_in(site) - {"fp8moe.__version__"}
    assert not missing
    assert "`fp8moe.__version__`" in (DOCS / "api/index.md").read_text()


def test_programs_import_public_names_only(site):
    """The pages, the README and the examples import from `fp8moe` and its doors, and what they import is in
    the reference."""
    sources = [code for page in PAGES for _, code in FENCE.findall(page.read_text())]
    sources += [path.read_text() for path in (ROOT / "examples").glob("*.py")]
    used = {
        f"{node.module}.{alias.name}"
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "fp8moe"
        for alias in node.names
    }
    assert len(used) > 10
    modules = {"fp8moe.expert_parallel", "fp8moe.fsdp"} | {f"fp8moe.{door}" for door in info.DOORS}
    commands = ("fp8moe.__main__", "fp8moe.demo", "fp8moe.info")  # which examples call
    used = {name for name in used if not name.startswith(commands) and not name.rpartition(".")[2].isupper()}
    assert used - names_in(site) - modules == set()


@pytest.mark.parametrize("written", ["LoRA", "lora", "PEFT", "accelerate", "DeepSpeed", "deepspeed"])
def test_the_search_finds_the_page_of_a_library(site, written):
    """As the theme's search does: words of the query are beginnings of words of the page."""
    index = json.loads((site / "search" / "search_index.json").read_text())
    separator = re.compile(index["config"]["separator"])

    def words(text):
        return {word.lower() for word in separator.split(re.sub(r"<[^>]+>", " ", text)) if word}

    page = {"peft": "lora"}.get(written.lower(), written.lower())
    texts = [d["title"] + " " + d["text"] for d in index["docs"] if d["location"] == f"how-to/{page}/"]
    found = words(" ".join(texts))
    assert all(any(word.startswith(asked) for word in found) for asked in words(written))
    assert "lo" not in words("LoRA")


def test_every_page_names_the_version_and_its_neighbours(site):
    page = (site / "how-to" / "lora" / "index.html").read_text()
    assert f"fp8moe {fp8moe.__version__}, Apache" in page
    assert re.search(r'rel="next"', page)
    assert re.search(r'rel="prev"', page)


def test_every_link_of_the_readme_is_a_file():
    text = (ROOT / "README.md").read_text()
    for name in re.findall(r"\]\[([a-z-]+)\]", text):
        assert (ROOT / table.LINKS[name]).exists(), name
    # links are in the generated list, which can make them absolute
    assert not re.findall(r"\]\((?!https://)", text)


def test_the_site_links_to_the_repository_that_pyproject_names(tmp_path):
    specification = importlib.util.spec_from_file_location("repository", DOCS / "repository.py")
    hook = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(hook)
    config = {"config_file_path": str(tmp_path / "mkdocs.yml"), "repo_url": None}
    for urls, wanted in (("", None), ('Repository = "https://example.com/a/b"', "https://example.com/a/b")):
        (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "fp8moe"\n[project.urls]\n{urls}\n')
        assert hook.on_config(config)["repo_url"] == wanted


# ---------------------------------------------------------------- figures


# without Megatron's, whose import takes 8 s of a core
EXAMPLES = sorted({*(ROOT / "examples").glob("*.py")} - {ROOT / "examples/train_moe_megatron.py"})


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_help_of_an_example_does_not_run_it(path, monkeypatch, capsys):
    if importlib.util.find_spec("torch"):
        monkeypatch.setattr("torch.multiprocessing.spawn", lambda *_, **__: pytest.fail("trains"))
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    try:
        with pytest.raises(SystemExit, match="0"):
            runpy.run_path(str(path), run_name="__main__")
    except ModuleNotFoundError as error:
        if error.name.startswith("fp8moe"):
            raise
        pytest.skip(f"needs {error.name}")
    assert capsys.readouterr().out.startswith(f"usage: {path.name}")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_tables_match_the_results(page):
    text = page.read_text()
    assert table.render(text) == text
    assert text.count("<!-- table ") == text.count("<!-- end -->")


MEASURED = [ROOT / "README.md", *sorted(DOCS.glob("performance/*.md"))]


@pytest.mark.parametrize("page", MEASURED, ids=lambda p: str(p.relative_to(ROOT)))
def test_figures_are_only_in_generated_tables(page):
    """Outside generated tables, the text contains no times, rates, sizes or percentages except the
    paper's."""
    text = re.sub(
        r"<!-- table \S+ -->.*?<!-- end -->|```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL
    )
    lines = [line for line in text.splitlines() if not line.startswith("|")]
    matches = [line for line in lines if re.search(r"\d ?(us|ms|%|TFLOP/s|[GT]B/s|[MG]iB)(?!\w)", line)]
    assert [line for line in matches if not line.startswith("The paper")] == []


def test_every_results_file_has_a_table():
    text = "".join(page.read_text() for page in PAGES)
    named = {name.partition(":")[0] for name in re.findall(r"<!-- table (\S+) -->", text)}
    for path in table.RESULTS.glob("*.jsonl"):
        assert path.stem in named or path.stem.startswith("compare"), path
    topics = {row["topic"] for row in table.rows_of("h200")}
    shown = {topic for name in re.findall(r"<!-- table h200:(\S+) -->", text) for topic in name.split(",")}
    assert shown == topics


def test_commands_of_the_figures_are_those_of_today():
    (verbs,) = (a.choices for a in command_line.parser()._actions if isinstance(a.choices, dict))
    texts = [page.read_text() for page in MEASURED] + [file.read_text() for file in step.FILES]
    commands = re.findall(r"python (-m \S+|\S+\.py)(?: (\w+))?", " ".join(texts))
    for called, word in dict.fromkeys(commands):
        module = called.removeprefix("-m ").rstrip("`,.;")
        if module == "fp8moe":
            assert word in verbs
        elif not called.endswith(".py"):
            assert importlib.util.find_spec(module), called
        else:
            assert (ROOT / called).exists(), called
    assert "benchmarks.sweep" in str(commands)


def test_the_first_picture_says_why_its_times_differ(monkeypatch):
    """From the first table's, which is of another run."""
    picture = table.table("picture")
    assert table.compared()[0]["commit"] != table.newest_layers()[0]["commit"]
    assert "first table" in picture
    same = [{**r, "commit": table.newest_layers()[0]["commit"]} for r in table.compared()]
    monkeypatch.setattr(table, "compared", lambda: same)
    assert "first table" not in table.table("picture")


def test_the_start_page_begins_as_the_readme():
    readme, start = (ROOT / "README.md").read_text(), (DOCS / "index.md").read_text()
    for name in ("intro", "quickstart"):
        text = re.search(rf"<!-- table {name} -->\n(.*?)<!-- end -->", start, re.DOTALL)[1]
        assert len(text) > 300
        assert text.split("-->\n")[-1] in readme


def test_pictures_match_the_results():
    """The pictures contain a digest of their rows; python -m benchmarks.table redraws them."""
    for picture in (step, speedup):
        assert all(picture.digest() in file.read_text() for file in picture.FILES)
    assert roofline.digest("h200") in roofline.picture("h200").read_text()


def test_the_picture_is_drawn(tmp_path):
    drawn = tmp_path / "step.svg"
    for variant in ({}, {"dark": True, "narrow": True}):
        step.draw(drawn, **variant)
        assert step.digest() in drawn.read_text()


def test_picture_shows_the_comparison(tmp_path, monkeypatch):
    (tmp_path / "model-h200.jsonl").write_bytes((table.RESULTS / "model-h200.jsonl").read_bytes())
    (tmp_path / "layer-h200.jsonl").write_bytes((table.RESULTS / "layer-h200.jsonl").read_bytes())
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    assert {row["name"] for row in step.layers()} == {"fp8moe, bf16", "fp8moe, fp8_flow"}
    assert "router" in table.table("picture")
    row = {"part": "layer", "shape": "8 tokens, 4 x 4, 8 experts top-8", "device": "H200", "ms": 2.0}
    row |= {"commit": "abc", "command": "bench compare"}
    names = "SonicMoE, bf16", "torchao, FP8 rows", "torchao compiled, FP8 rows", "fp8moe, fp8_flow", "x"
    rows = [{**row, "name": name} for name in names] + [{**row, "name": "x", "part": "quantise rows"}]
    (tmp_path / "compare-h200.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert [row["name"] for row in step.layers()] == [names[0], *names[2:4]]
    assert "others" in table.table("picture")
    step.draw(tmp_path / "step.svg")
    assert step.digest() in (tmp_path / "step.svg").read_text()


def test_later_rows_replace_earlier_ones():
    rows = [{"shape": s, "name": n, "ms": ms} for s, n, ms in (("a", "x", 3), ("b", "x", 2), ("a", "x", 1))]
    assert [(r["shape"], r["ms"]) for r in table.newest(rows)] == [("a", 1), ("b", 2)]


def test_a_comparison_is_shown(tmp_path, monkeypatch):
    """Rows of benchmarks/compare.py; of two runs, the later one."""
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    assert "Not measured yet" in table.table("compare")
    row = {"part": "layer", "shape": "8 tokens", "device": "H200", "tflops": None, "error": 1e-3}
    row |= {"versions": {"torch": "2.11"}, "commit": "abc", "command": "bench compare"}
    timed = [{**row, "name": name, "ms": ms} for name, ms in (("sonic", 2.0), ("torch", 1.5), ("sonic", 1.0))]
    timed[-1]["versions"] = {"torch": "2.11", "sonic-moe": "0.1"}
    (tmp_path / "compare-h200.jsonl").write_text("\n".join(map(json.dumps, timed)))
    lines = table.table("compare").splitlines()
    assert lines[-2:] == [
        "| sonic | sonic-moe 0.1 | 1.00 ms |  | 1.0e-03 |",
        "| torch |  | 1.50 ms |  | 1.0e-03 |",
    ]
    assert "torch 2.11; commit abc" in lines[0]


# ---------------------------------------------------------------- statements of the pages


def test_every_environment_variable_is_documented():
    used = set()
    for folder in ("fp8moe", "adapters", "kernels_cuda", "benchmarks", "tests"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".cu", ".cuh", ".h") and path != Path(__file__).resolve():
                used |= set(re.findall(r"\bFP8MOE_[A-Z_]+\b", path.read_text()))
    used |= set(re.findall(r"\bFP8MOE_[A-Z_]+\b", (ROOT / "Makefile").read_text()))
    documented = set(re.findall(r"`(FP8MOE_[A-Z_]+)`", (DOCS / "environment.md").read_text()))
    assert documented == used


def test_every_verb_of_the_command_line_is_documented():
    (verbs,) = (a.choices for a in command_line.parser()._actions if isinstance(a.choices, dict))
    assert set(verbs) == set(re.findall(r"^\| `(\w+)`", (DOCS / "how-to/command-line.md").read_text(), re.M))


@pytest.mark.parametrize("page", sorted(DOCS.glob("experiments/*.md")), ids=lambda p: p.name)
def test_an_experiments_page_is_short(page):
    """At most 80 lines of 110 characters, and in the list of pages."""
    lines = page.read_text().splitlines()
    assert len(lines) <= 80
    assert [line for line in lines if len(line) > 110] == []
    assert page.name == "index.md" or f"({page.name})" in (page.parent / "index.md").read_text()


# ---------------------------------------------------------------- programs


@pytest.fixture
def one_rank(monkeypatch):
    """Environment variables of torchrun, for a program with a process group of one rank."""
    torch_distributed = importlib.import_module("torch.distributed")
    store = torch_distributed.TCPStore("127.0.0.1", 0, 1, is_master=True)
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": store.port}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # use the existing store at this port
    yield
    if torch_distributed.is_initialized():
        torch_distributed.destroy_process_group()


def programs_of(page, marked=None):
    """(line, code) of a page's programs with this mark, in order."""
    text = page.read_text()
    for match in FENCE.finditer(text):
        if match[1] == marked:
            yield text.count("\n", 0, match.start(2)) + 1, match[2]


def run(page, line, code, names):
    """Runs a program with its own line numbers. Without a GPU, CuPy's programs run with NumPy."""
    code = code.replace("import cupy as cp", "import numpy as cp")
    exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)


README = list(programs_of(ROOT / "README.md"))


@pytest.mark.parametrize(("line", "code"), README, ids=[f"line-{line}" for line, _ in README])
def test_the_programs_of_the_readme_run(line, code):
    assert len(code.strip().splitlines()) <= 17
    run(ROOT / "README.md", line, code, {"__name__": "__main__"})


WITH_PROGRAMS = [page for page in PAGES[1:] if list(programs_of(page)) and page.name != "jax.md"]


# which PEFT reads
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("page", WITH_PROGRAMS, ids=lambda p: str(p.relative_to(DOCS)))
def test_the_programs_of_the_docs_run(page, one_rank):
    """Programs of a page share variables; those of how-to/jax.md run on four devices in
    tests/test_jax_layer.py."""
    names = {"__name__": "__main__"}
    for line, code in programs_of(page):
        run(page, line, code, names)


def programs_on_cuda(page):
    return [p for p in programs_of(page) if "cp." in p[1]] + list(programs_of(page, "gpu"))


ON_CUDA = [page for page in PAGES if programs_on_cuda(page)]


@pytest.mark.gpu
@pytest.mark.parametrize("page", ON_CUDA, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_programs_on_cuda_run(page):
    names = {"__name__": "__main__"}
    for line, code in programs_on_cuda(page):
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)
