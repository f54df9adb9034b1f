"""Draw the results against the copy bandwidth: ``python -m benchmarks.roofline [NAME]``.

From ``results/NAME.jsonl`` (h200 by default) to ``docs/images/roofline-NAME.svg``: one point per case, with
the minimum bytes that it moves and the rate. The copy bandwidth is the roof; on the slope below it, calls
move so few bytes that the fixed time of any kernel dominates.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.table import RESULTS

PICTURES = RESULTS.parents[1] / "docs" / "images"
MARKS = "os^vD<>Pp*"
FIXED_US = 3.0  # of an empty kernel between others in a graph


def picture(name: str) -> Path:
    return PICTURES / f"roofline-{name}.svg"


def _rows(name: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]
    return [r for r in rows if r.get("nbytes") and not r["tflops"]]


def digest(name: str) -> str:
    """Digest of the rows in the picture, which also contains it: a test compares the two."""
    return hashlib.sha256(json.dumps(_rows(name)).encode()).hexdigest()


def draw(name: str, out: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "fp8moe"  # equal results give the same picture
    from matplotlib import pyplot

    rows = _rows(name)
    roof = max(r["copy_gb_s"] for r in rows) / 1e3
    figure, axes = pyplot.subplots(figsize=(9, 5.5))
    sizes = [10 ** (6 + i / 20) for i in range(61)]
    axes.plot([s / 1e6 for s in sizes], [roof] * len(sizes), "k-", lw=1, label=f"copy, {roof:.2f} TB/s")
    slope = [s / (s / roof / 1e12 + FIXED_US * 1e-6) / 1e12 for s in sizes]
    axes.plot([s / 1e6 for s in sizes], slope, "k:", lw=1, label=f"copy + {FIXED_US:.0f} us")
    for i, topic in enumerate(sorted({r["topic"] for r in rows})):
        of_topic = [r for r in rows if r["topic"] == topic]
        x = [r["nbytes"] / 1e6 for r in of_topic]
        y = [r["nbytes"] / r["us"] / 1e6 for r in of_topic]
        axes.plot(x, y, MARKS[i % len(MARKS)], label=topic)
    axes.set(xscale="log", ylim=(0, roof * 1.08), xlabel="minimum bytes moved (MB)", ylabel="TB/s")
    commits = ", ".join(dict.fromkeys(r["commit"] for r in rows))
    axes.set_title(f"{rows[0]['device']}, commit {commits}", fontsize=9)
    axes.legend(fontsize=8, loc="lower right")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None, "Description": digest(name)})
    pyplot.close(figure)


if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else "h200"
    draw(name, picture(name))
