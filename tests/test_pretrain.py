"""`examples/pretrain_moe.py` at toy size: resumed runs, order and text; `benchmarks.pairs` against SciPy."""

import hashlib
import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers", minversion="5.23")
torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import pairs  # noqa: E402

spec = importlib.util.spec_from_file_location("pretrain_moe", ROOT / "examples/pretrain_moe.py")
pretrain = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pretrain)

TOY = ["--toy", "--layers", "1", "--steps", "4", "--batch", "2", "--micro-batches", "2"]
TOY += ["--evaluate-every", "2", "--evaluate-on", "2", "--checkpoint-every", "2", "--vocabulary", "300"]


def run(folder, *arguments):
    pretrain.main([*TOY, "--out", str(folder), *map(str, arguments)])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run without an interruption in two recipes."""
    folder = tmp_path_factory.mktemp("whole")
    run(folder)
    return folder


def losses(path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        {n: v for n, v in r.items() if n != "seconds"} for r in rows if r["kind"] not in ("run", "resume")
    ]


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[n], b[n]) for n in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def test_a_resumed_run_is_the_uninterrupted_one(whole, tmp_path):
    """Rows, weights, optimizer and generators, bit for bit, also after a stop between checkpoints."""
    of_flow = "--recipes", "fp8_flow", "--data", whole / "data"
    run(tmp_path, *of_flow, "--pause-after", 1)
    run(tmp_path, *of_flow, "--minutes", 0)  # begins nothing
    run(tmp_path, *of_flow, "--pause-after", 2)
    name = "fp8_flow-seed0"
    with open(tmp_path / f"{name}.jsonl", "a") as file:
        file.write('{"kind": "step", "step": 4, "loss": 0.0}\n{"kind": "st')  # then it was killed
    run(tmp_path, *of_flow)
    before = (tmp_path / f"{name}.jsonl").read_text()
    run(tmp_path, *of_flow)  # there is nothing left to do
    assert (tmp_path / f"{name}.jsonl").read_text() == before
    assert [json.loads(line)["step"] for line in before.splitlines() if '"resume"' in line] == [1, 3]
    assert losses(whole / f"{name}.jsonl") == losses(tmp_path / f"{name}.jsonl")
    a, b = (torch.load(f / f"{name}.pt", weights_only=True) for f in (whole, tmp_path))
    assert a["step"] == b["step"] == 4
    for part in ("model", "optimizer", "generator", "settings"):
        assert equal(a[part], b[part]), part
    with pytest.raises(SystemExit, match=r"--lr: got 0\.001, where .* has 0\.0006"):
        run(tmp_path, *of_flow, "--lr", 1e-3)
    with pytest.raises(SystemExit, match="--data: got a folder of another corpus"):
        run(tmp_path, *of_flow, "--corpus", __file__)


def test_recipes_differ_in_rounding_only(whole, capsys):
    bf16, flow = (losses(whole / f"{recipe}-seed0.jsonl") for recipe in ("bf16", "fp8_flow"))
    assert [row["step"] for row in bf16] == [row["step"] for row in flow] == [1, 2, 2, 3, 4, 4]
    for a, b in zip(bf16, flow, strict=True):
        # the logits' share of the experts is rounded by 2^-4 at the worst, of a loss that has moved by less
        assert a["loss"] != b["loss"]
        assert a["loss"] == pytest.approx(b["loss"], rel=2**-4)
    pairs.main([str(whole / f"{recipe}-seed0.jsonl") for recipe in ("bf16", "fp8_flow")])
    printed = capsys.readouterr().out
    assert f"{flow[-1]['loss'] / bf16[-1]['loss'] - 1:+.3%}" in printed
    assert "of one pair: none" in printed
    first = json.loads((whole / "bf16-seed0.jsonl").read_text().splitlines()[0])
    assert first["parameters"] > 0
    assert first["sha256 of text"] == hashlib.sha256(pretrain.shakespeare().tobytes()).hexdigest()


def test_every_epoch_has_every_sequence_once_in_its_own_order():
    rows = np.arange(12)[:, None].repeat(3, 1)
    batches = [pretrain.batch_of(rows, step, 5, 7)[:, 0].tolist() for step in range(12)]  # five epochs
    stream = [row for batch in batches for row in batch]
    epochs = [stream[i : i + 12] for i in range(0, 60, 12)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 5
    backwards = [pretrain.batch_of(rows, step, 5, 7)[:, 0].tolist() for step in reversed(range(12))]
    assert backwards[::-1] == batches
    assert batches != [pretrain.batch_of(rows, step, 5, 8)[:, 0].tolist() for step in range(12)]


def test_the_tokens_are_the_text_and_the_same_again(whole, tmp_path):
    """Each block of text is trained on or held out; a second folder has the same bytes."""
    a = pretrain.arguments([*TOY, "--out", str(tmp_path)])
    train, held_out, hashes = pretrain.tokens_of(a, tmp_path)
    words = pretrain.tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = pretrain.shakespeare().tobytes().decode()
    blocks = [text[i : i + 2**16] for i in range(0, len(text), 2**16)]
    assert words.decode(list(held_out)) == blocks[-1]  # of ten; all ASCII
    assert words.decode(list(train)) == "".join(blocks[:-1])
    again = pretrain.tokens_of(a, whole / "data")
    assert again[2] == hashes
    assert np.array_equal(again[0], train)


def test_sources_of_wheels_are_checked_by_their_hashes(tmp_path):
    links, wheel = tmp_path / "links", tmp_path / "links/tiny_sources-1.0-py3-none-any.whl"
    links.mkdir()
    with zipfile.ZipFile(wheel, "w") as files:
        for name, data in {"b.py": "B = 1", "a.py": "A = 1", "c.py": "A = 1", "d.txt": "no source"}.items():
            files.writestr(f"tiny_sources/{name}", data)
        about = "tiny_sources-1.0.dist-info"
        files.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-sources\nVersion: 1.0\n")
        files.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        files.writestr(f"{about}/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    asked = tmp_path / "wheels.txt"
    asked.write_text(f"--no-index\n--find-links {links}\ntiny-sources==1.0 --hash=sha256:{digest}\n")
    assert pretrain.sources(asked, tmp_path / "kept") == b"A = 1\nB = 1"
    asked.write_text(asked.read_text().replace(digest, digest[::-1]))
    with pytest.raises(subprocess.CalledProcessError):
        pretrain.sources(asked, tmp_path / "other")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--micro-batches", "3"], "--micro-batches: got 3; wanted a divisor of the 2 sequences"),
        (["--recipes", "fp4"], "--recipes: got fp4; wanted bf16"),
        (["--steps", "0"], "--steps: got 0; wanted 1 or more"),
    ],
)
def test_wrong_arguments_are_named(arguments, words, capsys):
    with pytest.raises(SystemExit):
        pretrain.arguments([*TOY, *arguments])
    assert words in capsys.readouterr().err


# ---------------------------------------------------------------- benchmarks.pairs


def rows(path, recipe, seed, values, **settings):
    first = {"kind": "run", "recipe": recipe, "save": "bf16", "seed": seed, "lr": 1e-3, **settings}
    every = [first, *({"kind": "evaluation", "step": i, "loss": v} for i, v in enumerate(values))]
    path.write_text("".join(json.dumps(row) + "\n" for row in every))
    return path


@pytest.mark.parametrize("count", [2, 3, 5, 12])
def test_the_interval_is_students(count):
    stats = pytest.importorskip("scipy.stats")
    differences = np.random.default_rng().normal(1e-3, 2e-3, count)
    mean, half = pairs.interval(differences.tolist())
    expected = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    np.testing.assert_allclose([mean - half, mean + half], [expected.low, expected.high], rtol=1e-9)


def test_runs_are_paired_by_seed(tmp_path, capsys):
    """Seeds differ by far more than recipes do."""
    rng, files = np.random.default_rng(), []
    of_seed, differences = rng.uniform(2, 4, 5), rng.normal(1e-3, 1e-4, 5)
    for seed in rng.permutation(5).tolist():
        base = of_seed[seed]
        files.append(rows(tmp_path / f"a{seed}", "bf16", seed, [9.0, base, 0.0] if seed else [9.0, base]))
        files.append(rows(tmp_path / f"b{seed}", "fp8_flow", seed, [9.0, base * (1 + differences[seed])]))
    pairs.main(list(map(str, files)))
    printed = capsys.readouterr().out
    mean, half = pairs.interval(differences.tolist())
    assert f"{mean:+.3%}" in printed
    assert f"{mean - half:+.3%} to {mean + half:+.3%}" in printed
    assert "at step 1" in printed
    for other, words in (
        ({"lr": 2e-3}, "runs: got different lr; wanted one of each"),
        ({"seed": 0}, "runs: got two of bf16, seed 0; wanted one"),
        ({"recipe": "fp8_flow"}, "--base: got bf16; wanted one of fp8_flow"),
    ):
        given = {"recipe": "bf16", "seed": 9, **other}
        more = rows(tmp_path / "more", given.pop("recipe"), given.pop("seed"), [1.0, 1.0], **given)
        with pytest.raises(SystemExit):
            pairs.main([str(more), *(map(str, files) if "recipe" not in other else ())])
        assert words in capsys.readouterr().err
