"""Write the tables of README.md and docs/ from the results files: ``python -m benchmarks.table``.

A table is between ``<!-- table NAME -->`` and ``<!-- end -->``. NAME is a results file, ``NAME.jsonl``
(times) or ``NAME.json`` (a demo's report); ``FILE:TOPIC,TOPIC`` selects its rows of these topics; other names
are the keys of `_MADE`. The pictures are redrawn if their
rows have changed, and links become absolute once pyproject.toml contains the repository's address.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from fp8moe import info

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_TABLE = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

#: commands of earlier commits, as they are called now
_MOVED = {"-m fp8moe.benchmarks.": "-m benchmarks.", "-m fp8moe bench compare": "-m benchmarks.compare"}

Rows = list[dict[str, Any]]


def main() -> None:
    for page in [*pages(), ROOT / "CITATION.cff"]:
        text = page.read_text()
        if (updated := render(text) if page.suffix == ".md" else cited(text)) != text:
            page.write_text(updated)
            print(page.relative_to(ROOT))
    from benchmarks import roofline, speedup, step

    roof = roofline.picture("h200")
    for picture in (step, speedup):
        for file, variant in picture.FILES.items():
            if not file.exists() or picture.digest() not in file.read_text():
                picture.draw(file, **variant)
    if roofline.digest("h200") not in roof.read_text():
        roofline.draw("h200", roof)


def pages() -> list[Path]:
    """Every page that may contain tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def render(text: str) -> str:
    """The text with every table regenerated."""
    return _TABLE.sub(lambda m: m.group(1) + table(m.group(2)) + m.group(3), text)


def table(name: str) -> str:
    if name in _MADE:
        return _MADE[name]()
    file, _, topics = name.partition(":")
    if not (RESULTS / f"{file}.jsonl").exists():
        if not (RESULTS / f"{file}.json").exists():
            raise ValueError(f"table: got {name!r}; wanted a results file or one of {', '.join(_MADE)}")
        return _demo(json.loads((RESULTS / f"{file}.json").read_text()))
    rows = rows_of(file)
    if topics:
        rows = [r for r in rows if r["topic"] in topics.split(",")]
    return _TABLES.get(rows[0]["topic"], _times)(rows)


def newest(rows: Rows) -> Rows:
    """The last row of each case; later runs are appended to a file."""
    return list({(r["shape"], r["name"]): r for r in rows}.values())


def rows_of(file: str) -> Rows:
    return _rows(RESULTS / f"{file}.jsonl")


@cache
def _rows(path: Path) -> Rows:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        for old, new in _MOVED.items():  # for those who measure again
            row["command"] = row["command"].replace(old, new)
    return rows


def _origin(row: dict[str, Any]) -> str:
    return f"{row['device']}; {_packages(row)}; commit {row['commit']}: `{row['command']}`"


def _run(row: dict[str, Any]) -> str:
    """`_origin` without the versions, for the README."""
    return f"{row['device']}, commit {row['commit']}: `{row['command']}`"


def _packages(row: dict[str, Any]) -> str:
    return ", ".join(f"{k} {v}" for k, v in row["versions"].items())


def _times(rows: Rows) -> str:
    first = rows[0]
    rates = sorted({r["copy_gb_s"] for r in rows})
    rate = f"{rates[0]:.1f}" if len(rates) == 1 else f"{rates[0]:.0f} to {rates[-1]:.0f}"
    runs = dict.fromkeys((r["commit"], r["command"]) for r in rows)
    lines = [
        f"{first['device']}, copy bandwidth {rate} GB/s; {_packages(first)}; "
        + "; ".join(f"commit {commit}: `{command}`" for commit, command in runs),
        "",
        "| operation | shape | time | share of copy bandwidth, or TFLOP/s | host time |"
        + (" commit |" if len(runs) > 1 else ""),
        "|---|---|---:|---:|---:|" + ("---|" if len(runs) > 1 else ""),
    ]
    for r in rows:
        percent = "" if r["limit_percent"] is None else f"{r['limit_percent']:.0f} %"
        if not percent and r["tflops"] is not None:
            percent = f"{r['tflops']:.0f} TFLOP/s"
            if r.get("single_us"):
                percent += f", {r['tflops'] * r['us'] / r['single_us']:.0f} in a single call"
        host = "" if r.get("host_us") is None else _time(r["host_us"])
        commit = f" {r['commit']} |" if len(runs) > 1 else ""
        lines.append(f"| {r['name']} | {r['shape']} | {_time(r['us'])} | {percent} | {host} |{commit}")
    return "\n".join(lines) + "\n"


def _headline() -> str:
    """The layer, with weights that change in every step."""
    rows = newest_layers()
    row_of = {(r["shape"], r["name"]): r for r in rows}
    lines = [
        "| layer, forward and backward | bf16 | fp8_flow | speedup | weight quantisation, relative to the "
        "other kernels | saved for backward, with FP8 weights, relative to bf16 |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for shape in dict.fromkeys(r["shape"] for r in rows):
        plain, flow = row_of[shape, "bf16"], row_of[shape, "fp8_flow"]
        lines.append(
            f"| {shape} | {plain['ms']:.2f} ms | {flow['ms']:.2f} ms | {plain['ms'] / flow['ms']:.2f}x | "
            f"{flow['copies_percent']:.1f} % | {100 * flow['kept_bytes'] / plain['kept_bytes']:.0f} % |"
        )
    return "\n".join(lines) + "\n"


def newest_layers() -> Rows:
    """The layer's rows of the last run."""
    rows = newest(rows_of("layer-h200"))
    return [r for r in rows if r["commit"] == rows[0]["commit"]]


def _layers(rows: Rows) -> str:
    rows = newest(rows)
    base = {r["shape"]: r for r in rows if r["name"] == "bf16"}
    lines = [
        _origin(rows[0]),
        "",
        "| layer | recipe | forward + backward | speedup over bf16 | weight quantisation | non-GEMM time "
        "| saved for backward |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        plain = base[r["shape"]]
        other = "" if r["commit"] == rows[0]["commit"] else f" (commit {r['commit']})"
        lines.append(
            f"| {r['shape']}{other} | {r['name']} | {r['ms']:.2f} ms | {plain['ms'] / r['ms']:.2f}x | "
            f"{r['copies_percent']:.1f} % | {r['outside_percent']:.0f} % | {r['kept_bytes'] / 2**20:.0f} MiB "
            f"({100 * r['kept_bytes'] / plain['kept_bytes']:.0f} %) |"
        )
    return "\n".join(lines) + "\n"


def _layer_kernels(rows: Rows) -> str:
    """Kernels of a step of fp8_flow, for the largest experts and for the smallest."""
    rows = [r for r in newest(rows) if r["name"] == "fp8_flow"]
    first = rows[0]
    last = next(r for r in reversed(rows) if "128 experts" in r["shape"])
    lines = [
        _origin(first),
        "",
        f"| kernel | {last['shape']} | | {first['shape']} | |",
        "|---|---:|---:|---:|---:|",
    ]

    def line(title: str, *both: float) -> str:
        cells = (
            f"{us:.0f} us | {us / 10 / r['kernel_ms']:.1f} %"
            for us, r in zip(both, (last, first), strict=True)
        )
        return f"| {title} | {' | '.join(cells)} |"

    rest = [0.0, 0.0]
    for name in dict.fromkeys([*last["kernels_us"], *first["kernels_us"]]):
        both = [r["kernels_us"].get(name, 0.0) for r in (last, first)]
        if max(both[0] / last["kernel_ms"], both[1] / first["kernel_ms"]) < 5:  # half a percent
            rest = [a + b for a, b in zip(rest, both, strict=True)]
        else:
            lines.append(line(f"`{name}`", *both))
    return "\n".join([*lines, line("others", *rest)]) + "\n"


def _demo(report: dict[str, Any]) -> str:
    config, runs = report["config"], report["runs"]
    base = runs["bf16"]["final"]
    lines = [
        f"{config['steps']} steps of {config['tokens']} pieces, {config['experts']} experts, "
        f"top-{config['topk']}, seed {config['seed']}, on {report['device']}; commit {report['commit']}; "
        f"`{report['command']}`",
        "",
        "| recipe | mean loss, last 10 % of steps | relative to bf16 | casts per step | saved for backward "
        "| step time |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, run in runs.items():
        milliseconds = sorted(run["seconds"])[len(run["seconds"]) // 2] * 1e3
        lines.append(
            f"| {name} | {run['final']:.4f} | {run['final'] / base - 1:+.3%} | {run['casts']} | "
            f"{run['saved_bytes'] / 2**20:.2f} MiB | {milliseconds:.0f} ms |"
        )
    return "\n".join(lines) + "\n"


def _time(us: float) -> str:
    return f"{us / 1e3:.2f} ms" if us >= 1e3 else f"{us:.1f} us"


BY = {"nccl": "NCCL", "peer": "peer memory"}


def _exchange(rows: Rows) -> str:
    """Each FP8 row with the corresponding bfloat16 row, from each transport's last run."""
    last = {r.get("by", "nccl"): r["commit"] for r in rows}
    rows = [r for r in rows if r["commit"] == last[r.get("by", "nccl")]]
    row_of = {(r["name"], r["shape"], r.get("by", "nccl")): r for r in rows}
    names = {name for name, *_ in row_of}
    commits = " and ".join(f"{commit} ({BY[by]})" for by, commit in last.items())
    lines = [
        f"{rows[0]['device']}; {_packages(rows[0])}; commit {commits}: `{rows[0]['command']}`",
        "",
        "| shape | transport | operation | bf16 | FP8 | speedup | CUDA graph, bf16 / FP8 | speedup "
        "| bytes sent |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for r in row_of.values():
        verb, fmt, *suffix = r["name"].split(", ")
        if fmt == "bf16" and (verb == "layer" or ", ".join([verb, "fp8", *suffix]) in names):
            continue
        by = r.get("by", "nccl")
        base = row_of.get((", ".join([verb, "bf16", *suffix]), r["shape"], by))
        base = base or row_of[f"{verb}, bf16", r["shape"], by]
        sent = f"{r['sent_bytes'] / base['sent_bytes']:.2f}x" if r.get("sent_bytes") else ""
        label = ", ".join([verb, *([] if fmt in ("fp8", "bf16") else [fmt]), *suffix])
        times = f"{_time(base['us'])} | {_time(r['us'])} | {base['us'] / r['us']:.2f}x"
        alone = " | "
        if "graph_us" in base:
            both = base["graph_us"], r["graph_us"]
            alone = f"{both[0]:.0f} / {both[1]:.0f} us | {both[0] / both[1]:.2f}x"
        elif "graph_us" in r:
            alone = f"{_time(r['graph_us'])} | "
        if fmt == "bf16":  # there is no FP8 row
            times = f"{_time(r['us'])} | | "
            alone = f"{r['graph_us']:.0f} us | " if "graph_us" in r else " | "
        lines.append(f"| {r['shape']} | {BY[by]} | {label} | {times} | {alone} | {sent} |")
    return "\n".join(lines) + "\n"


def _inside(rows: Rows) -> str:
    lines = [
        _origin(rows[0]),
        "",
        "| operation | shape | kernels alone | inside jit | overhead |",
        "|---|---|---:|---:|---:|",
    ]
    for r in rows:
        overhead = f"{r['inside_us'] - r['us']:.1f} us, {100 * r['inside_us'] / r['us'] - 100:.0f} %"
        times = f"{_time(r['us'])} | {_time(r['inside_us'])}"
        lines.append(f"| {r['name']} | {r['shape']} | {times} | {overhead} |")
    return "\n".join(lines) + "\n"


def _host(rows: Rows) -> str:
    on_device = any(r.get("graph_us") for r in rows)  # not of earlier commits
    lines = [
        _origin(rows[0]),
        "",
        "| call | shape | sustained | single call |" + " device, in a CUDA graph |" * on_device,
        "|---|---|---:|---:|" + "---:|" * on_device,
    ]
    for r in rows:
        device = f" {_time(r['graph_us']) if r.get('graph_us') else ''} |" * on_device
        lines.append(
            f"| {r['name']} | {r['shape']} | {_time(r['host_us'])} | {_time(r['first_us'])} |{device}"
        )
    return "\n".join(lines) + "\n"


def _model(rows: Rows) -> str:
    rows = newest(rows)
    lines = [
        _origin(rows[0]),
        "",
        "| model | experts | step time | tokens/s | peak memory |",
        "|---|---|---:|---:|---:|",
    ]
    for r in rows:
        memory = f"{r['peak_bytes'] / 2**30:.1f} GiB"
        lines.append(
            f"| {r['shape']} | {r['name']} | {r['ms']:.1f} ms | {r['tokens_per_s']:,.0f} | {memory} |"
        )
    return "\n".join(lines) + "\n"


def _memory() -> str:
    """Memory that a layer saves for backward, without the master weights."""
    rows = newest_layers()
    recipes = list(dict.fromkeys(r["name"] for r in rows))
    kept = {(r["shape"], r["name"]): r["kept_bytes"] for r in rows}
    lines = [
        _origin(rows[0]),
        "",
        "| layer | " + " | ".join(recipes) + " |",
        "|---|" + "---:|" * len(recipes),
    ]
    for shape in dict.fromkeys(r["shape"] for r in rows):
        plain = kept[shape, "bf16"]
        sizes = (kept[shape, recipe] for recipe in recipes)
        cells = " | ".join(f"{n / 2**20:.0f} MiB ({100 * n / plain:.0f} %)" for n in sizes)
        lines.append(f"| {shape} | {cells} |")
    return "\n".join(lines) + "\n"


#: of the layer in the table of computed bytes: tokens, hidden, ffn, experts, top-k
SIZES = 16_384, 2048, 768, 128, 8


def _computed() -> str:
    """What `fp8moe.memory` predicts, and what the leanest layers in bfloat16 save."""
    tokens, hidden, ffn, experts, topk = SIZES
    bf16 = 2 * tokens * hidden + 4 * topk * tokens * ffn
    columns = info.MEMORY_COLUMNS
    lines = [
        f"Computed by `python -m fp8moe info --memory {' '.join(map(str, SIZES))}`, in MiB. {tokens:,} "
        f"tokens, {hidden} x {ffn}, {experts} experts top-{topk}; 2 T H + 4 k T F is {bf16 / 2**20:.0f} MiB.",
        "",
        "| layer | " + " | ".join(name.replace("_", " ") for name in columns) + " |",
        "|---|" + "---:|" * len(columns),
    ]
    for name, of in info.memory_rows(SIZES).items():
        lines.append(f"| {name} | " + " | ".join(f"{getattr(of, c) / 2**20:.0f}" for c in columns) + " |")
    return "\n".join(lines) + "\n"


def _training() -> str:
    """Final losses of `examples/train_moe_torch.py`, by seed."""
    reports = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("train-moe-h200-seed*.json"))]
    recipes, settings = list(reports[0]["runs"]), reports[0]["settings"]
    lines = [
        f"{settings['steps']} steps of {settings['batch'] * settings['length']:,} bytes of "
        f"{reports[0]['text']}; {reports[0]['device']}; {_packages(reports[0])}; "
        f"`python examples/train_moe_torch.py`",
        "",
        "| seed | commit | " + " | ".join(recipes) + " |",
        "|---|---|" + "---:|" * len(recipes),
    ]
    for seed, report in enumerate(reports):
        final = {recipe: run["final"] for recipe, run in report["runs"].items()}
        cells = [_loss(final[r], final["bf16"]) if r in final else "" for r in recipes]
        lines.append(f"| {seed} | {report['commit']} | " + " | ".join(cells) + " |")
    every = [r for r in recipes if all(r in report["runs"] for report in reports)]
    finals = {r: [report["runs"][r]["final"] for report in reports] for r in every}
    means = {r: sum(losses) / len(losses) for r, losses in finals.items()}
    ranges = {r: max(losses) - min(losses) for r, losses in finals.items()}
    cells = [_loss(means[r], means["bf16"]) if r in means else "" for r in recipes]
    lines.append("| mean over seeds | | " + " | ".join(cells) + " |")
    cells = [f"{ranges[r]:.4f} ({ranges[r] / means[r]:.1%})" if r in means else "" for r in recipes]
    lines.append("| range (max - min) | | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _loss(loss: float, plain: float) -> str:
    return f"{loss:.4f}" if loss == plain else f"{loss:.4f} ({loss / plain - 1:+.2%})"


def _padding() -> str:
    """Padding of `fully_shard`, along the first dimension and along the selected dimension."""
    import torch

    from fp8moe.torch import padded_elements, shard_placement

    weights = {
        "w13 of DeepSeek-V3, 32 experts on a rank": (32, 4096, 7168),
        "w2 of DeepSeek-V3, 32 experts on a rank": (32, 7168, 2048),
        "w13 of Qwen3-30B-A3B, 16 experts on a rank": (16, 1536, 2048),
    }
    lines = [
        "| weight | ranks | padding along dimension 0 | dimension selected | padding along it |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, shape in weights.items():
        for ranks in (8, 24, 64, 128):
            parameter = torch.nn.Parameter(torch.empty(shape, device="meta"))
            placement = shard_placement(ranks)(parameter)
            dimension = placement.dim if placement else 0
            first, selected = (padded_elements(shape, ranks, d) / parameter.numel() for d in (0, dimension))
            size = " x ".join(map(str, shape))
            lines.append(f"| {name}, {size} | {ranks} | {first:.0%} | {dimension} | {selected:.0%} |")
    return "\n".join(lines) + "\n"


def _compare() -> str:
    """A table for each part and shape that `python -m benchmarks.compare` timed."""
    files = sorted(RESULTS.glob("compare*.jsonl"))
    if not files:
        out = "--out benchmarks/results/compare-h200.jsonl"
        return f"Not measured yet: `python -m benchmarks.compare --device cuda {out}`.\n"
    tables = []
    for rows in (rows_of(path.stem) for path in files):
        cases = {(r["part"], r["shape"], r["name"]): r for r in rows}  # later rows replace earlier ones
        for part, shape in dict.fromkeys((part, shape) for part, shape, _ in cases):
            panel = [r for (p, s, _), r in cases.items() if (p, s) == (part, shape)]
            panel.sort(key=lambda r: r["ms"])
            shared = dict(set.intersection(*({*r["versions"].items()} for r in panel)))
            first = {**panel[0], "versions": {k: v for k, v in panel[0]["versions"].items() if k in shared}}
            lines = [
                f"**{part}, {shape}.** {_origin(first)}",
                "",
                "| library | version | time | TFLOP/s | error against float64 |",
                "|---|---|---:|---:|---:|",
            ]
            for r in panel:
                speed = f"{r['tflops']:.0f}" if r["tflops"] else ""
                version = ", ".join(f"{k} {v}" for k, v in r["versions"].items() if k not in shared)
                time = _time(1e3 * r["ms"])
                lines.append(f"| {r['name']} | {version} | {time} | {speed} | {r['error']:.1e} |")
            tables.append("\n".join(lines) + "\n")
    return "\n".join(tables)


def compared() -> Rows:
    """The layer's rows of the last comparison with other libraries on an H200; empty if there is none."""
    if not (RESULTS / "compare-h200.jsonl").exists():
        return []
    return newest([r for r in rows_of("compare-h200") if r["part"] == "layer"])


def _variants(name: str, text: str) -> str:
    """A picture, for a page that does not choose between its variants itself."""
    address = _address(f"docs/images/{name}{{}}.svg")
    dark, narrow = "(prefers-color-scheme: dark)", "(max-width: 600px)"
    sources = (f"{dark} and {narrow}", "-dark-narrow"), (narrow, "-narrow"), (dark, "-dark")
    lines = [f'  <source media="{media}" srcset="{address.format(end)}">' for media, end in sources]
    image = f'  <img alt="{text}" src="{address.format("")}">'
    return "\n".join(["<picture>", *lines, image, "</picture>", ""])


def _picture() -> str:
    """`step`'s picture and its caption."""
    caption = _caption()
    if compared() and compared()[0]["commit"] != newest_layers()[0]["commit"]:
        caption += (
            "It is of another commit than the first table, whose layer has its router too: times differ.\n"
        )
    return _variants("step-h200", "One training step, in bf16 and in fp8_flow") + "\n" + caption


def _places() -> str:
    from benchmarks import speedup

    return (
        f"{speedup.places()} Hollow points: this library's own bf16 is faster than fp8_flow. "
        "Crosses: another library is.\n"
    )


def _intro() -> str:
    """The README's, before its figures."""
    text = (ROOT / "README.md").read_text()
    return text[text.index("\n\n") + 2 : text.index("\n**What")]


def _quickstart() -> str:
    """The README's program for torch."""
    section = (ROOT / "README.md").read_text().split("## In torch\n\n")[1]
    return "<!-- not run: the README's, which the tests run -->\n" + section[: section.index("\n\n##")] + "\n"


def _caption() -> str:
    left = "including the router and the quantisation of the weights,\nwhich change in every step"
    if compared():
        left = (
            "with this library and with others, for given routing,\n"
            "including the quantisation of the weights in every step"
        )
    return f"""One NVIDIA H200. Left: forward and backward of an expert layer, {left}.
Right: a training step of Qwen3-MoE in transformers, with its own experts and with this library's.
"""


def _casts() -> str:
    """What the casts cost: the layer by the number of casts to a step, from wide experts to narrow ones."""
    rows = newest_layers()
    row_of = {(r["shape"], r["name"]): r for r in rows}
    shapes = list(dict.fromkeys(r["shape"] for r in rows))
    lines = ["| layer | bf16 | FP8, 12 casts | FP8, 2 casts |", "|---|---:|---:|---:|"]
    for shape in (shapes[0], *shapes[-2:]):
        cells = []
        for name in ("bf16", "fp8_blockwise", "fp8_flow"):
            r = row_of[shape, name]
            cells.append(f"{r['ms']:.1f} ms ({r['outside_percent']:.0f} %)")
        lines.append(f"| {shape} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", _run(rows[0])]) + "\n"


def swept() -> Rows:
    """The sweep's rows of its last commit, of which several runs may have measured a part each."""
    rows = rows_of("sweep-h200")
    return newest([r for r in rows if r["commit"] == rows[-1]["commit"]])


def is_ours(name: str) -> bool:
    """Whether a row of the sweep is of this library, eager or compiled."""
    return re.match(r"(bf16|fp8_flow)\b", name) is not None


def fastest_other(ms: dict[str, float]) -> str | None:
    """Of the times by name of one shape, the name of the fastest that is not this library's."""
    return min((name for name in ms if not is_ours(name)), key=lambda name: ms[name], default=None)


def _gain() -> str:
    """The sweep's speed-ups of eight micro-batches to a step, without its times."""
    rows = swept()
    times: dict[tuple[str, int], dict[str, float]] = {}
    for r in rows:
        if r["micro_batches"] == 8:
            times.setdefault((r["model"], r["tokens"]), {})[r["name"]] = r["ms"]
    tokens = sorted({tokens for _, tokens in times})
    others = sorted({name for ms in times.values() if (name := fastest_other(ms)) is not None})
    lines = [
        "| experts of | " + " | ".join(f"{t} tokens" for t in tokens) + " |",
        "|---|" + "---:|" * len(tokens),
    ]
    for model in dict.fromkeys(model for model, _ in times):
        cells = []
        for t in tokens:
            ms = times.get((model, t), {})
            flow = ms.get("fp8_flow, copies shared")
            over = [ms[name] / flow for name in ("bf16", fastest_other(ms)) if name in ms] if flow else []
            cells.append(" / ".join(f"{ratio:.2f}x" for ratio in over))
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"{_run(rows[0])}; fastest others: {'; '.join(others)}"]) + "\n"


def _scaling_measured() -> str:
    from benchmarks import scaling

    return scaling.measured()


def _scaling_paper() -> str:
    from benchmarks import scaling

    return scaling.table()


LINKS = {
    "performance": "docs/performance/index.md",
    "micro-batches": "docs/performance/micro-batches.md",
    "compatibility": "docs/compatibility.md",
    "docs": "docs/index.md",
    "torch": "docs/how-to/torch.md",
    "transformers": "docs/how-to/transformers.md",
    "megatron": "docs/how-to/megatron.md",
    "jax": "docs/how-to/jax.md",
    "cupy": "docs/how-to/cupy-numba.md",
    "ep": "docs/how-to/expert-parallelism.md",
    "api": "docs/api/index.md",
    "transpose": "docs/concepts/transpose.md",
    "architecture": "docs/architecture.md",
    "experiments": "docs/experiments/index.md",
    "migration": "docs/migration/transformer-engine.md",
    "contributing": "CONTRIBUTING.md",
    "changes": "CHANGELOG.md",
}


def repository() -> str:
    """Address of the repository, a project URL of pyproject.toml; empty if there is none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return str(project.get("urls", {}).get("Repository", "")).rstrip("/")


def _links() -> str:
    """The README's links. Pages of a package index need absolute ones."""
    return "".join(f"[{name}]: {_address(path)}\n" for name, path in LINKS.items())


def _address(path: str) -> str:
    """Of a file, as the README links to it."""
    form = "raw" if path.endswith(".svg") else "blob"
    return f"{where}/{form}/main/{path}" if (where := repository()) else path


def cited(text: str) -> str:
    """CITATION.cff with the authors of pyproject.toml, and with the repository, if its address is known."""
    authors = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["authors"]
    names = "".join(f'  - name: "{author["name"]}"\n' for author in authors)
    text = re.sub(r"^authors:\n(  - .*\n)+", f"authors:\n{names}", text, count=1, flags=re.MULTILINE)
    text = re.sub(r"^repository-code:.*\n", "", text, flags=re.MULTILINE)
    address = repository()
    return text.replace("license:", f'repository-code: "{address}"\nlicense:', 1) if address else text


_MADE: dict[str, Callable[[], str]] = {
    "compare": _compare,
    "headline": _headline,
    "intro": _intro,
    "links": _links,
    "memory": _memory,
    "memory-computed": _computed,
    "picture": _picture,
    "picture-caption": _caption,
    "quickstart": _quickstart,
    "casts": _casts,
    "gain": _gain,
    "speedup-places": _places,
    "training": _training,
    "fsdp-padding": _padding,
    "scaling-measured": _scaling_measured,
    "scaling-paper": _scaling_paper,
}


def _beside(rows: Rows) -> str:
    """GEMMs concurrent with a kernel that occupies multiprocessors: the time, the slowdown, and the slowdown
    expected from the number of free multiprocessors."""
    lines = [
        _origin(rows[0]),
        "",
        "| GEMM | SMs occupied | time | slowdown | expected slowdown | throughput |",
        "|---|---|---:|---:|---:|---:|",
    ]
    alone = {r["name"]: r["us"] for r in rows if not r["held"]}
    for r in rows:
        occupied = f"{r['held']}, in clusters of {r['cluster']}" if r["cluster"] > 1 else str(r["held"])
        slowdown, expected = (f"{100 * us / alone[r['name']] - 100:.0f} %" for us in (r["us"], r["limit_us"]))
        if not r["held"]:
            occupied, slowdown, expected = "none", "", ""
        lines.append(
            f"| {r['name']} | {occupied} | {_time(r['us'])} | {slowdown} | {expected} "
            f"| {r['tflops']:.0f} TFLOP/s |"
        )
    return "\n".join(lines) + "\n"


def _sweep(rows: Rows) -> str:
    """Experts of several models by micro-batch: times, with the speed-up over this library's bf16 of the same
    run, then what else the rows have."""
    rows = swept()
    lines = [_origin(rows[0])]
    for work in dict.fromkeys(r["shape"].rpartition(", ")[2] for r in rows):
        of_work = [r for r in rows if r["shape"].endswith(f", {work}")]
        lines += _by_contender(
            f"{work}, milliseconds a micro-batch (speed-up over bf16)", of_work, _times_bf16
        )
        if any(r.get("saved_bytes") is not None for r in of_work):
            title = f"{work}, milliseconds of the host / of the device in a CUDA graph"
            lines += _by_contender(title, of_work, _host_and_graph)
            lines += _by_contender(f"{work}, MiB saved for the backward / at the peak", of_work, _memory_of)
    return "\n".join(lines) + "\n"


def _by_contender(title: str, rows: Rows, cell: Callable[[dict[str, Any], dict[str, Any]], str]) -> list[str]:
    """A table of ``cell(row, row of bf16)``, with a line for each model and number of tokens."""
    names = list(dict.fromkeys(r["name"] for r in rows))
    of = {(r["model"], r["tokens"], r["name"]): r for r in rows}
    lines = ["", f"{title}:", "", "| experts | tokens | " + " | ".join(names) + " |"]
    lines.append("|---|---:|" + "---:|" * len(names))
    for model, tokens in dict.fromkeys((r["model"], r["tokens"]) for r in rows):
        base = of.get((model, tokens, "bf16"), {})
        cells = [cell(of[key], base) if (key := (model, tokens, name)) in of else "" for name in names]
        lines.append(f"| {model} | {tokens} | " + " | ".join(cells) + " |")
    return lines


def _times_bf16(row: dict[str, Any], base: dict[str, Any]) -> str:
    ratio = "" if row is base or not base else f" ({base['ms'] / row['ms']:.2f}x)"
    return f"{row['ms']:.2f}{ratio}"


def _host_and_graph(row: dict[str, Any], _: dict[str, Any]) -> str:
    graph = row["graph_ms"]
    return f"{row['host_ms']:.2f} / " + ("no" if graph is None else f"{graph:.2f}")


def _memory_of(row: dict[str, Any], _: dict[str, Any]) -> str:
    return f"{row['saved_bytes'] / 2**20:.0f} / {row['peak_bytes'] / 2**20:.0f}"


_TABLES = {
    "sweep": _sweep,
    "layer": _layers,
    "layer_kernels": _layer_kernels,
    "exchange": _exchange,
    "jax": _inside,
    "host": _host,
    "model": _model,
    "beside": _beside,
}


if __name__ == "__main__":
    main()
