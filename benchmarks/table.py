"""Write the README's tables from the results files: ``python -m fp8moe.benchmarks.table``.

A table stands between ``<!-- table NAME -->`` and ``<!-- end -->``, made from ``results/NAME.jsonl`` (times)
or ``results/NAME.json`` (a demo's report).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
README = Path(__file__).resolve().parents[1] / "README.md"
HEADLINE = "headline"  # the layer whose weights change every step, from layer-h200.jsonl
_TABLE = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    README.write_text(render(README.read_text()))


def render(text: str) -> str:
    """The text with every table made anew."""
    return _TABLE.sub(lambda m: m.group(1) + table(m.group(2)) + m.group(3), text)


def table(name: str) -> str:
    if name == HEADLINE:
        return _headline(
            [json.loads(line) for line in (RESULTS / "layer-h200.jsonl").read_text().splitlines()]
        )
    times = RESULTS / f"{name}.jsonl"
    if times.exists():
        rows = [json.loads(line) for line in times.read_text().splitlines()]
        return _TABLES.get(rows[0]["topic"], _times)(rows)
    return _demo(json.loads((RESULTS / f"{name}.json").read_text()))


def _origin(row: dict[str, Any]) -> str:
    return f"{row['device']}; {_packages(row)}; commit {row['commit']}: `{row['command']}`"


def _packages(row: dict[str, Any]) -> str:
    return ", ".join(f"{k} {v}" for k, v in row["versions"].items())


def _times(rows: list[dict[str, Any]]) -> str:
    first = rows[0]
    rates = sorted({r["copy_gb_s"] for r in rows})
    rate = f"{rates[0]:.1f}" if len(rates) == 1 else f"{rates[0]:.0f} to {rates[-1]:.0f}"
    runs = dict.fromkeys((r["commit"], r["command"]) for r in rows)
    lines = [
        f"{first['device']}, copy bandwidth {rate} GB/s; {_packages(first)}; "
        + "; ".join(f"commit {commit}: `{command}`" for commit, command in runs),
        "",
        "| operation | shape | time | of copy bandwidth | host time |"
        + (" commit |" if len(runs) > 1 else ""),
        "|---|---|---:|---:|---:|" + ("---|" if len(runs) > 1 else ""),
    ]
    for r in rows:
        percent = "" if r["limit_percent"] is None else f"{r['limit_percent']:.0f} %"
        if not percent and r["tflops"] is not None:
            percent = f"{r['tflops']:.0f} TFLOP/s"
            if r.get("single_us"):
                percent += f", {r['tflops'] * r['us'] / r['single_us']:.0f} in one call"
        host = "" if r.get("host_us") is None else _time(r["host_us"])
        commit = f" {r['commit']} |" if len(runs) > 1 else ""
        lines.append(f"| {r['name']} | {r['shape']} | {_time(r['us'])} | {percent} | {host} |{commit}")
    return "\n".join(lines) + "\n"


def _headline(rows: list[dict[str, Any]]) -> str:
    rows = [r for r in rows if r["commit"] == rows[0]["commit"]]  # of the last run
    known = {(r["shape"], r["name"]): r for r in rows}
    lines = [
        "| layer | bf16 | fp8_flow | | of that the FP8 copies add | saved for backward |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for shape in dict.fromkeys(r["shape"] for r in rows):
        plain, flow = known[shape, "bf16"], known[shape, "fp8_flow"]
        lines.append(
            f"| {shape} | {plain['ms']:.2f} ms | {flow['ms']:.2f} ms | {plain['ms'] / flow['ms']:.2f}x | "
            f"{flow['copies_percent']:.1f} % | {100 * flow['kept_bytes'] / plain['kept_bytes']:.0f} % |"
        )
    return "\n".join(lines) + "\n"


def _layers(rows: list[dict[str, Any]]) -> str:
    base = {r["shape"]: r for r in rows if r["name"] == "bf16"}
    lines = [
        _origin(rows[0]),
        "",
        "| layer | recipe | forward + backward | against bf16 | FP8 copies add | non-GEMM time "
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


def _demo(report: dict[str, Any]) -> str:
    config, runs = report["config"], report["runs"]
    base = runs["bf16"]["final"]
    lines = [
        f"{config['steps']} steps of {config['tokens']} bytes, {config['experts']} experts, "
        f"top-{config['topk']}, seed {config['seed']}, on {report['device']}; commit {report['commit']}; "
        f"`{report['command']}`",
        "",
        "| recipe | loss, last tenth | against bf16 | casts a step | saved for backward | time a step |",
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


BY = {"nccl": "NCCL", "peer": "peers' memory"}


def _exchange(rows: list[dict[str, Any]]) -> str:
    """Each FP8 row beside bfloat16's."""
    known = {(r["name"], r["shape"], r.get("by", "nccl")): r for r in rows}
    lines = [
        _origin(rows[0]),
        "",
        "| rows, or layer | by | what | bf16 | FP8 | | the device alone | | bytes sent |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        what, fmt = r["name"].split(", ")
        if fmt == "bf16":
            continue
        by = r.get("by", "nccl")
        base = known[f"{what}, bf16", r["shape"], by]
        sent = f"{r['sent_bytes'] / base['sent_bytes']:.2f}x" if r.get("sent_bytes") else ""
        named = what if fmt == "fp8" else f"{what}, {fmt}"
        times = f"{_time(base['us'])} | {_time(r['us'])} | {base['us'] / r['us']:.2f}x"
        alone = " | "
        if "graph_us" in r:
            both = base["graph_us"], r["graph_us"]
            alone = f"{both[0]:.0f} / {both[1]:.0f} us | {both[0] / both[1]:.2f}x"
        lines.append(f"| {r['shape']} | {BY[by]} | {named} | {times} | {alone} | {sent} |")
    return "\n".join(lines) + "\n"


def _inside(rows: list[dict[str, Any]]) -> str:
    lines = [
        _origin(rows[0]),
        "",
        "| operation | shape | kernels alone | inside jit | more |",
        "|---|---|---:|---:|---:|",
    ]
    for r in rows:
        more = f"{r['inside_us'] - r['us']:.1f} us, {100 * r['inside_us'] / r['us'] - 100:.0f} %"
        lines.append(f"| {r['name']} | {r['shape']} | {_time(r['us'])} | {_time(r['inside_us'])} | {more} |")
    return "\n".join(lines) + "\n"


def _host(rows: list[dict[str, Any]]) -> str:
    lines = [
        _origin(rows[0]),
        "",
        "| call | shape | sustained | alone |",
        "|---|---|---:|---:|",
    ]
    for r in rows:
        lines.append(f"| {r['name']} | {r['shape']} | {_time(r['host_us'])} | {_time(r['first_us'])} |")
    return "\n".join(lines) + "\n"


_TABLES = {"layer": _layers, "exchange": _exchange, "jax": _inside, "host": _host}


if __name__ == "__main__":
    main()
