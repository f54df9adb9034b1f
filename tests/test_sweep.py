"""The sweep on the CPU: its rows, its resumption, and the table and the picture that are made of them."""

import json
import re
from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from benchmarks import speedup, sweep, table


@pytest.fixture
def out(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    return tmp_path / "sweep-h200.jsonl"


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(out, *words):
    code = sweep.main(["--device", "cpu", "--out", str(out), *words])
    table._rows.cache_clear()
    return code


OURS_AND_TORCH = "--only", "torch grouped_mm, bf16", "bf16", "fp8_flow"


def test_a_run_goes_on_where_the_last_one_ended(out, monkeypatch, capsys):
    """A second run measures what the file lacks of this commit, and only that."""
    monkeypatch.setattr(sweep, "commit", lambda: "first")
    assert run(out, "--only", "bf16", "--work", "forward") == 0
    assert [(r["name"], r["work"]) for r in rows(out)] == [("bf16", "forward")]
    assert run(out, *OURS_AND_TORCH) == 0
    wanted = {
        (name, work) for name in ("torch grouped_mm, bf16", "bf16", "fp8_flow") for work in sweep.WORK[:2]
    }
    several = "torch grouped_mm, bf16", "bf16", "fp8_flow, copies each time", sweep.SHARED
    wanted |= {(name, sweep.WORK[2]) for name in several}
    found = [(r["name"], r["work"]) for r in rows(out)]
    assert sorted(found) == sorted(wanted)  # none twice
    for row in rows(out):
        assert row["ms"] > 0
        assert row["error"] < 0.125
        assert row["shape"] == f"tiny, 8 tokens, {row['work']}"
        assert set(sweep.ON_CUDA) <= set(row)
    capsys.readouterr()
    assert run(out, *OURS_AND_TORCH) == 0
    assert "tiny" not in capsys.readouterr().out
    # another commit is measured anew, unless the time is over
    monkeypatch.setattr(sweep, "commit", lambda: "second")
    assert run(out, *OURS_AND_TORCH, "--seconds", "-1") == 1
    assert "goes on with tiny, 8" in capsys.readouterr().out
    assert len(rows(out)) == len(wanted)
    assert run(out, *OURS_AND_TORCH, "--work", "forward") == 0
    assert {r["commit"] for r in table.swept()} == {"second"}


def test_a_contender_that_fails_leaves_the_others(out, monkeypatch, capsys):
    contenders = [c for c in sweep.CONTENDERS if c.name in OURS_AND_TORCH]
    by_torch, results = contenders[0].make, []

    def broken(inputs):
        step = by_torch(inputs)

        def whole():  # not in the check, but when it is run again
            results.append(step.whole())
            assert len(results) < 2, "of its own"
            return results[0]

        return replace(step, whole=whole)

    contenders[0] = replace(contenders[0], make=broken)
    monkeypatch.setattr(sweep, "CONTENDERS", contenders)
    assert run(out, *OURS_AND_TORCH, "--work", "1 a step") == 1  # torch's failures count
    assert "does not run: AssertionError: of its own" in capsys.readouterr().out
    assert [r["name"] for r in rows(out)] == ["bf16", "fp8_flow"]


@pytest.mark.parametrize(
    ("words", "message"),
    [(("--only", "bf17"), "--only: got \\['bf17'\\]"), (("--device", "cuda"), "--device: got cuda")],
)
def test_unusable_arguments_are_named(out, words, message, capsys, monkeypatch):
    monkeypatch.setattr(sweep.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        run(out, *words)
    assert re.search(message, capsys.readouterr().err)


def written(out, times):
    """Rows of {(model, tokens, work): {name: ms}}."""
    origin = {"topic": "sweep", "device": "H200", "versions": {}, "commit": "abc", "command": "sweep"}
    lines = [
        {
            **origin,
            "model": model,
            "tokens": tokens,
            "micro_batches": 8 if work == "8 a step" else 1,
            "shape": f"{model}, {tokens} tokens, {work}",
            "name": name,
            "ms": ms,
            "host_ms": ms / 2,
            "graph_ms": None if name == "SonicMoE, bf16" else ms / 4,
            "saved_bytes": 2**20,
            "peak_bytes": 3 * 2**20,
        }
        for (model, tokens, work), of in times.items()
        for name, ms in of.items()
    ]
    out.write_text("\n".join(map(json.dumps, [{**lines[0], "commit": "older", "ms": 99.0}, *lines])))
    table._rows.cache_clear()


def test_places_where_another_library_is_faster_are_named(out, tmp_path):
    several = {"torch grouped_mm, bf16": 8.0, "SonicMoE, bf16": 3.0, "bf16": 2.0, sweep.SHARED: 4.0}
    one = {"torch grouped_mm, bf16": 6.0, "bf16": 4.0, "bf16 compiled": 1.0, "fp8_flow": 3.0}
    written(out, {("A", 64, "8 a step"): several, ("A", 64, "1 a step"): one, ("A", 512, "1 a step"): one})
    assert speedup.points("8 a step", sweep.SHARED) == {"A": [(64, 0.75, "SonicMoE, bf16", True)]}
    # a compiled form of this library is no other library
    of_one = [(tokens, 2.0, "torch grouped_mm, bf16", False) for tokens in (64, 512)]
    assert speedup.points("1 a step", "fp8_flow") == {"A": of_one}
    assert speedup.places().endswith("here: A, 64 tokens, 8 a step: SonicMoE, bf16 1.33x.")
    assert "| A | 0.50x / 0.75x |" in table.table("gain")
    assert "fastest others: SonicMoE, bf16" in table.table("gain")
    text = table.table("sweep-h200")
    assert "| A | 64 | 8.00 (0.25x) | 3.00 (0.67x) | 2.00 | 4.00 (0.50x) |" in text
    assert "| A | 64 | 4.00 / 2.00 | 1.50 / no | 1.00 / 0.50 | 2.00 / 1.00 |" in text
    assert "1 / 3" in text
    assert "99" not in text  # of an older commit
    drawn = tmp_path / "sweep.svg"
    speedup.draw(drawn, narrow=True)
    assert speedup.digest() in drawn.read_text()
    assert "another library is faster" in drawn.read_text()
