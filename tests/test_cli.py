"""The command line, as a user calls it."""

import dataclasses
import importlib
import importlib.util
import inspect
import itertools
import json
import pkgutil
import re
import subprocess
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from backends import only_on_cpu

import fp8moe
from fp8moe import info, reference, selftest
from fp8moe.__main__ import main
from fp8moe.bench import harness
from fp8moe.demo import train
from fp8moe.formats import FLOAT8_DTYPES
from fp8moe.runtime import tables


def call(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "fp8moe", *arguments], capture_output=True, text=True, check=False
    )


def test_help_names_every_verb():
    got = call("--help")
    assert got.returncode == 0
    for verb in ("demo", "info", "selftest", "diagnose", "convert", "compile", "bench", "exit codes"):
        assert verb in got.stdout
    assert call().returncode == 2
    assert call("dance").returncode == 2
    assert fp8moe.__version__ in call("--version").stdout


@pytest.fixture(scope="module")
def report():
    """What `info` finds here; it imports every framework, which takes 10 s."""
    return info.state()


def printed(part, of):
    return "\n".join(info._IN_WORDS[part](of))


def test_info_lists_operations_and_what_runs_them(report, capsys, monkeypatch):
    operations = report["operations"]
    names = {name for names in operations["topics"].values() for name in names}
    public = {n for n in fp8moe.__all__ if inspect.isfunction(getattr(fp8moe, n))}
    assert names == public - {"memory", "trace"}
    assert operations["cpu"] == "works"
    monkeypatch.setenv("FP8MOE_CACHE_DIR", "/a/cache")
    monkeypatch.setattr(info, "_interfaces", dict)  # their imports
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    words = ("numpy", "kernel cache +/a/cache\n", "operations +on the CPU by NumPy and Numba")
    for wanted in (*words, *(rf"\b{name}\b" for name in names)):
        assert re.search(wanted, text), wanted
    assert "_cuda" not in text  # names of modules
    assert main(["info", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["operations"]["topics"], told["cache"]) == (operations["topics"], "/a/cache")
    assert main(["info", "--memory", "512", "256", "128", "4", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["bf16"]["saved"] == fp8moe.memory(512, 256, 128, 4, 2, recipe="bf16").saved


def test_info_does_not_say_that_an_absent_transformer_engine_works(report):
    if importlib.util.find_spec("transformer_engine") is not None:
        pytest.skip("it is installed")
    interfaces = report["interfaces"]
    names = [name for name in interfaces if "transformer_engine" in name]
    assert len(names) == 2
    for name in names:
        assert "works" not in interfaces[name]["state"]
        assert "not installed" in interfaces[name]["state"]
    for name in ("torch", "jax"):
        if importlib.util.find_spec(name) is not None:
            assert interfaces[f"fp8moe.{name}"] == {"state": "works"}


def test_info_is_short_on_a_base_install(monkeypatch, capsys):
    """Of what is not installed there is one list, with what to install."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert "CuPy is not installed; pip install 'fp8moe[cuda13]'" in text
    assert "torch, transformer_engine.pytorch (pip install 'fp8moe[torch]')" in text
    assert text.count("not installed") == 2
    assert len(text.splitlines()) < 30
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize(("architecture", "fp8"), [("sm_86", "mma"), ("sm_90a", "wgmma"), ("sm_120a", "mma")])
def test_info_lists_the_backend_of_each_product(monkeypatch, architecture, fp8):
    cupy = pytest.importorskip("cupy")
    from fp8moe.kernels_cuda.runtime import driver

    properties = {"name": b"A GPU", "multiProcessorCount": 7, "totalGlobalMem": 2**31}
    runtime = {"getDeviceCount": lambda: 2, "getDeviceProperties": lambda device: properties}
    versions = {f"{of}GetVersion": lambda: 13020 for of in ("driver", "runtime")}
    monkeypatch.setattr(cupy.cuda, "runtime", SimpleNamespace(**runtime, **versions))
    monkeypatch.setattr(driver, "architecture", lambda device: ("sm_80", architecture)[device])
    monkeypatch.setattr(info, "_interfaces", dict)
    text = "\n".join(info.lines())
    assert f"cuda:1        A GPU, {architecture}, 7 SMs, 2 GiB, driver for CUDA 13.2, runtime 13.2" in text
    assert "on CUDA by kernels" in text
    second = text.partition("grouped GEMMs on cuda:1\n")[2]
    assert "grouped GEMMs on cuda:0\n" in text
    lines = [line.split() for line in second.splitlines()]
    assert ["grouped_gemm", "FP8", fp8] in [line[:3] for line in lines]
    assert ["grouped_gemm_wgrad", "bfloat16", fp8] in [line[:3] for line in lines]
    assert ["grouped_gemm", "float32", "plain"] in [line[:3] for line in lines]


def test_selftest_passes_on_fresh_inputs(capsys):
    assert main(["selftest", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert text.count(" ok ") + text.count(" not checked") == len(selftest.CHECKS) + len(selftest.FRAMEWORKS)
    assert "all checks passed" in text


def test_selftest_as_json(monkeypatch, capsys):
    def broken(_):
        raise ValueError("wrong")

    monkeypatch.setattr(selftest, "CHECKS", {"one": lambda _: None, "two": broken})
    monkeypatch.setattr(selftest, "FRAMEWORKS", {})
    assert main(["selftest", "--device", "cpu", "--seed", "7", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["seed"], told["failed"]) == (7, 1)
    assert [(c["device"], c["name"], c["state"], c["detail"]) for c in told["checks"]] == [
        ("cpu", "one", "ok", ""),
        ("cpu", "two", "FAILED", "ValueError: wrong"),
    ]


def detects(monkeypatch, spoil, verb):
    """Whether a check of the selftest fails if ``spoil`` changes each output of an operation."""
    run, calls = fp8moe.runtime.dispatch.Call.run, []

    def broken(self, room, name, *args, out, **options):
        run(self, room, name, *args, out=out, **options)
        if name == verb:
            calls.append(1)
            for array in fp8moe.runtime.record_trees.arrays_in(out):
                spoil(array.reshape(-1))

    monkeypatch.setattr(fp8moe.runtime.dispatch.Call, "run", broken)
    inputs = selftest.Inputs(int(np.random.default_rng().integers(2**32)))
    for check in selftest.CHECKS.values():
        try:
            check(inputs)
        except (ValueError, TypeError):
            return bool(calls)
    assert calls, "no check runs the operation"
    return False


def one_value(array):
    """Changes the largest of the first values: another code or number, or the sign of a float. Of the first
    token, which has no expert in one run of a hundred, it would be a zero's."""
    sizes = np.abs(array.astype(np.float64))
    at = np.argmax(sizes[:16] if sizes[:16].any() else sizes)
    if array.dtype.kind in "bui":
        array[at] = array[at] // 2 if array.dtype == np.uint8 else array[at] ^ 1
    else:
        array[at] = -array[at]


REFERENCE = [
    importlib.import_module(f"{reference.__name__}.{module.name}")
    for module in pkgutil.iter_modules(reference.__path__)
]
PUBLIC = [n for n in fp8moe.__all__ if n.islower() and any(hasattr(module, n) for module in REFERENCE)]


@pytest.mark.parametrize(
    "verb",
    [
        *PUBLIC,
        *("local_ids", "pack_rows", "quantize_and_pack", "rank_mask", "unpack_rows"),
        *("place_tiles", "place_mxfp4"),
    ],
)
def test_selftest_detects_one_wrong_value(verb, monkeypatch):
    assert detects(monkeypatch, one_value, verb)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_selftest_detects_a_wrong_number_format(name, monkeypatch):
    """Of another build of ml_dtypes, which reference and kernels' tables would follow."""
    wrong = {"float8_e4m3fn": ml_dtypes.float8_e4m3, "float8_e5m2": ml_dtypes.float8_e5m2fnuz}[name]
    fmt = next(f for f, dtype in FLOAT8_DTYPES.items() if dtype == np.dtype(name))
    monkeypatch.setitem(FLOAT8_DTYPES, fmt, np.dtype(wrong))
    with pytest.raises(ValueError, match=f"values of {fmt}"):
        selftest.CHECKS["number formats"](selftest.Inputs(0))


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_selftest_of_frameworks(framework, capsys, monkeypatch):
    pytest.importorskip(framework)
    ops = importlib.import_module(f"fp8moe.{framework}")
    experts = ops.moe_experts
    monkeypatch.setattr(ops, "moe_experts", lambda *args, **options: 2 * experts(*args, **options))
    monkeypatch.setattr(selftest, "CHECKS", {})
    monkeypatch.setattr(selftest, "FRAMEWORKS", {framework: selftest.FRAMEWORKS[framework]})
    assert main(["selftest", "--device", "cpu"]) == 1
    assert "FAILED  ValueError: y: relative error" in capsys.readouterr().out
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["selftest", "--device", "cpu"]) == 0
    assert f"{framework} is not installed" in capsys.readouterr().out


def test_cuda_selftest_without_cuda_names_the_package():
    got = call("selftest", "--device", "cuda")
    if got.returncode != 0:
        assert got.returncode == 2
        assert "pip install" in got.stdout or "no CUDA" in got.stdout
        assert "passed" not in got.stdout


@pytest.mark.parametrize("verb", [("bench", "plan", "--quick"), ("demo", "--steps", "1")])
def test_cuda_without_a_device_is_reported_in_one_line(verb, capsys):
    if info.cuda_is_ready():
        pytest.skip("there is a device")
    assert main([*verb, "--device", "cuda"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"fp8moe {verb[0]}: --device cuda: ")
    assert "pip install" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["selftest", "--device", "cpu", "--seed", "-1"], "argument --seed: got -1; wanted an integer of 0"),
        (["demo", "--seed", "x"], "argument --seed: got x; wanted an integer of 0"),
        (["demo", "--layers", "x"], "argument --layers: got x; wanted an integer of 1"),
    ],
)
def test_invalid_arguments_are_named(arguments, words, capsys):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("architecture", ["hopper", "sm_70", "sm_75", "sm_90", "sm_95"])
def test_compile_refuses_architectures_that_no_kernel_runs_on(architecture, capsys):
    """sm_90 too: devices of compute capability 9.0 run sm_90a, which has more kernels."""
    pytest.importorskip("cupy")
    assert main(["compile", "--arch", "sm_90a", "--arch", architecture]) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(rf"fp8moe compile: --arch: got {architecture}; wanted .*sm_80, .*sm_90a, .*\n", error)


def test_device_without_the_instructions_of_the_kernels(monkeypatch):
    cupy = pytest.importorskip("cupy")
    from fp8moe.kernels_cuda.runtime import driver

    monkeypatch.setattr(cupy.cuda, "Device", lambda device: SimpleNamespace(compute_capability="75"))
    monkeypatch.setattr(driver, "runtime", SimpleNamespace(getDeviceCount=lambda: 1))
    monkeypatch.setattr(driver, "architecture", driver.architecture.__wrapped__)  # without its cache
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 1)
    words = "CUDA device 0 has compute capability 7.5; wanted 8.0 or newer"
    with pytest.raises(RuntimeError, match=words):
        driver.architecture(0)
    assert words in info.missing_for_cuda()
    assert words in printed("cuda", {"missing": info.missing_for_cuda(), "devices": []})


def test_bench_writes_json_lines(tmp_path, capsys):
    out = tmp_path / "results" / "cpu.jsonl"
    command = ["bench", "quantize", "permute", "--device", "cpu", "--quick", "--out", str(out), "--json"]
    assert main(command) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["rows"] == [json.loads(line) for line in out.read_text().splitlines()]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {line["topic"] for line in lines} == {"quantize", "permute"}
    for line in lines:
        assert line["us"] > 0
        assert line["versions"]["numpy"]
        assert line["command"]
    assert main(["bench", "--list"]) == 0
    assert "grouped_gemm" in capsys.readouterr().out
    assert main(["bench", "knitting"]) == 2
    assert "knitting" in capsys.readouterr().err


def test_bench_does_not_time_wrong_results(monkeypatch, capsys):
    from dataclasses import replace

    from fp8moe.bench import quantize

    cases = [replace(c, check=lambda *_: False) for c in quantize.cases("quick")]
    monkeypatch.setattr(quantize, "cases", lambda size: cases)
    assert main(["bench", "quantize", "--device", "cpu", "--quick"]) == 1
    assert "WRONG RESULT" in capsys.readouterr().out
    assert main(["bench", "quantize", "--device", "cpu", "--quick", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["rows"], [c["name"] for c in told["wrong"]]) == ([], [c.name for c in cases])


def test_benchmark_uses_more_memory_than_the_cache():
    class Machine(harness.Cpu):
        max_sets = 32

        def seconds(self, calls, repeats):
            self.inputs = [call.args[0] for call in calls]
            return 1.0

    x = np.zeros(4_000_000, np.uint8)  # with its result 16 MB; 25 of them are the 400 MB of a cycle
    case = harness.Case("copy", "", (x,), lambda a: np.empty(12_000_000, np.uint8), lambda *_: True)
    machine = Machine()
    assert harness.measure("copy", case, machine, 1e9, 1) is not None
    assert len({a.ctypes.data for a in machine.inputs}) == len(machine.inputs) == 25


def test_benchmark_keeps_results_alive_for_one_round():
    alive, alive_counts = set(), []

    class Buffer:
        def __init__(self, number):
            self.number = number
            alive.add(number)
            alive_counts.append(set(alive))

        def __del__(self):
            alive.discard(self.number)

    numbers = itertools.count()
    harness.make_in_turn([lambda: Buffer(next(numbers))] * 3, 4)
    assert alive_counts[2:] == [set(range(max(0, n - 3), n + 1)) for n in range(2, 12)]
    assert not alive


def test_allocator_option_requires_cuda(capsys):
    assert main(["bench", "plan", "--quick", "--device", "cpu", "--allocator", "torch"]) == 2
    assert "--allocator: got" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [[], ["--ranks", "99"]])
def test_the_exchange_needs_a_gpu_for_each_rank(ranks, monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    from benchmarks import exchange

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["exchange", *ranks])
    with pytest.raises(SystemExit):
        exchange.main()
    assert "wanted 1 to all of them, or --device cpu" in capsys.readouterr().err


@pytest.mark.gpu
def test_bench_with_torchs_allocator(capsys):
    torch = pytest.importorskip("torch")
    before = torch.cuda.memory_stats().get("allocation.all.allocated", 0)
    assert main(["bench", "quantize", "--device", "cuda", "--quick", "--allocator", "torch"]) == 0
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before > 100


@pytest.mark.parametrize("topic", ["plan", "transpose", "swiglu", "router", "grouped_gemm", "moe"])
def test_every_benchmark_case_is_correct(topic):
    assert main(["bench", topic, "--device", "cpu", "--quick"]) == 0


def test_a_short_demo(tmp_path, capsys, monkeypatch):
    arguments = [
        "demo",
        "--device",
        "cpu",
        "--steps",
        "15",
        "--tokens",
        "256",
        "--layers",
        "1",
        "--seeds",
        "2",
    ]
    arguments += ["--out", str(tmp_path)]
    assert main(arguments) == 1  # 15 steps are too few for the loss to fall by a third
    report = json.loads((tmp_path / "results.json").read_text())
    casts = {"bf16": 0, "fp8_blockwise": 12, "fp8_flow": 2, "bf16, seed 1": 0}
    assert {name: run["casts"] for name, run in report["runs"].items()} == casts
    for run in report["runs"].values():
        assert len(run["losses"]) == 15
        assert run["losses"][-1] < 0.9 * run["losses"][0]  # the loss decreases from the first steps on
    flow, bf16 = (report["runs"][r] for r in ("fp8_flow", "bf16"))
    assert abs(flow["final"] / bf16["final"] - 1) < 0.01
    assert flow["saved_bytes"] < report["runs"]["fp8_blockwise"]["saved_bytes"]
    assert report["runs"]["bf16, seed 1"]["losses"][0] != bf16["losses"][0]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    text = capsys.readouterr().out
    assert "sample of fp8_flow" in text
    assert "vs bf16" in text
    assert "spread of the seeds of bf16" in text
    assert "First Citizen" in text
    assert [c for c in text if not (c.isprintable() or c == "\n")] == []
    assert "FAILED  every recipe's loss fell" in text
    monkeypatch.setattr(train, "train", lambda *_: (runs_of(report), {"fp8_flow": None}))
    monkeypatch.setattr(train, "sample", lambda *_: "")
    assert main([*arguments, "--no-check"]) == 0


def runs_of(report):
    fields = {field.name for field in dataclasses.fields(train.Run)}
    return {
        n: train.Run(**{k: v for k, v in run.items() if k in fields}) for n, run in report["runs"].items()
    }


def test_the_spread_of_seeds_is_that_of_bf16():
    finals = {"bf16": 2.0, "fp8_blockwise": 9.0, "fp8_flow": 1.0, "bf16, seed 1": 2.1, "bf16, seed 2": 1.8}
    runs = {name: train.Run(losses=[loss], seconds=[1.0]) for name, loss in finals.items()}
    assert train.spread(runs) == pytest.approx(0.15)
    assert "between seeds" in train.verdicts(runs)[1][1]
    for name in ("bf16, seed 1", "bf16, seed 2"):
        del runs[name]
    assert "between seeds" not in train.verdicts(runs)[1][1]
    assert "spread" not in train.table(runs)


def test_gradients_of_the_demo_by_differences(monkeypatch):
    """In float64, without experts, whose gradients have tests of their own."""
    from fp8moe.demo.model import Config, Model

    rng = np.random.default_rng()
    config = Config(vocabulary=20, context=6, hidden=16, heads=2, layers=2)
    model = Model(config, "bf16", seed=int(rng.integers(2**31)))
    model.params = {name: p.astype(np.float64) for name, p in model.params.items()}
    monkeypatch.setattr(model, "_experts", lambda layer, x: (np.tanh(x), x))
    derivative = lambda layer, dy, x, grads: dy / np.cosh(x) ** 2  # noqa: E731
    monkeypatch.setattr(model, "_experts_backward", derivative)
    pieces, step = rng.integers(0, 20, (3, 7)), 1e-5
    _, grads = model.loss(pieces)
    assert len(grads) == 3 + 2 * 2
    for name, gradient in grads.items():
        p, direction = model.params[name], rng.standard_normal(gradient.shape)
        losses = []
        for side in (1, -1):
            model.params[name] = p + side * step * direction
            losses.append(model.loss(pieces)[0])
        model.params[name] = p
        # differences are exact to step**2 and to 2**-52 / step
        wanted, got = (losses[0] - losses[1]) / (2 * step), float((gradient * direction).sum())
        assert got == pytest.approx(wanted, rel=1e-5, abs=1e-8), name


def test_demo_validation_errors(tmp_path, capsys, monkeypatch):
    short = tmp_path / "short.txt"
    short.write_text("tiny")
    assert main(["demo", "--device", "cpu", "--text", str(short), "--steps", "1"]) == 2
    assert "wanted more than the context" in capsys.readouterr().err
    assert main(["demo", "--device", "cpu", "--tokens", "100"]) == 2
    assert "--tokens: got 100; wanted a multiple of" in capsys.readouterr().err
    assert main(["demo", "--device", "cpu", "--text", str(tmp_path / "none")]) == 2
    assert main(["demo", "--device", "cpu", "--experts", "1"]) == 2
    assert "--experts: got 1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["demo", "--steps", "0"])
    monkeypatch.setattr(train, "train", None)  # what is missing is reported before it
    assert main(["demo", "--device", "cpu", "--out", str(short)]) == 2
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["demo", "--device", "cpu", "--out", str(tmp_path)]) == 2
    assert "matplotlib" in (error := capsys.readouterr().err)
    assert "pip install 'fp8moe[bench]'" in error


def test_compile_without_cupy_names_the_extra_that_has_it():
    program = "import sys; sys.modules['cupy'] = None; from fp8moe.__main__ import main; main(['compile'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)
    assert done.stderr.startswith("fp8moe compile: ")
    assert "pip install 'fp8moe[cuda13]'" in done.stderr
    assert "fp8moe[bench]" not in done.stderr


def test_cupy_without_its_cuda_toolkit_is_said(monkeypatch, capsys):
    """cuda-pathfinder raises RuntimeError with a list of the folders, in CuPy's first call."""

    def not_found():
        raise RuntimeError('Failure finding "libnvrtc.so.13": No such file\n  listdir("/a"):')

    pytest.importorskip("cupy")
    importlib.import_module("fp8moe.kernels_cuda.compile_all")
    library = SimpleNamespace(getVersion=not_found)
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs.nvrtc", library)
    assert main(["compile", "--arch", "sm_90a"]) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"fp8moe compile: .*libnvrtc.*pip install 'fp8moe\[cuda13\]'.*\n", error)


def test_the_texts_are_the_same_on_all_machines():
    """The digest of the generated one was the same with Python 3.11, 3.12 and 3.13: losses of other machines
    can be compared."""
    from hashlib import sha256

    from fp8moe.demo import text

    generated = bytes(text.generated_text())
    assert len(generated) == 4_000_000
    assert generated.startswith(bytes(text.generated_text(1000)))
    digest = "5abfb5002878276d9fbd22f0423263a26e002ce9c9640d3fc1c79dcad020ae93"
    assert sha256(generated).hexdigest() == digest

    plays = bytes(text.shakespeare())
    assert plays.startswith(b"First Citizen:\nBefore we proceed any further, hear me speak.")
    assert f"the first {len(plays):,} characters" in text.__doc__
    assert plays.isascii()


@pytest.mark.parametrize("text", [b"aaaaaaa aaa", b"the cat\nthe theatre, the cats;\n" * 9, b"", b"a", None])
def test_pieces_are_the_text(text):
    from fp8moe.demo.text import split_in_pieces

    count = 40
    if text is None:
        text = bytes(np.random.default_rng().choice([*b"ab \n"], 300).astype(np.uint8))
    pieces, vocabulary = split_in_pieces(np.frombuffer(text, np.uint8), count)
    assert b"".join(vocabulary[piece] for piece in pieces) == text
    assert len(vocabulary) <= count
    assert len(set(vocabulary)) == len(vocabulary)
    for piece in vocabulary:
        assert len(piece) == 1 or re.fullmatch(rb" ?[a-zA-Z]+", piece)
    if len(set(text)) > 4:
        assert b" the" in vocabulary


def test_the_sample_of_the_demo_has_no_control_characters():
    from fp8moe.demo.train import printable

    assert printable("a\n\x1b[2Jb\x07\x9b\u0627") == "a\n\\x1b[2Jb\\x07\\x9b\u0627"


@pytest.mark.parametrize(("verb", "code"), [("info", 0), ("selftest", 141)])
def test_a_pipe_gets_lines_at_once_and_may_be_closed(verb, code):
    """A self-test that nobody reads to the end has not passed; `info` has done its work."""
    program = (
        "import sys; from fp8moe import __main__ as m, info; "
        "lines = lambda: [print('x' * 99) for _ in range(9999)]; "
        f"m._{verb} = lambda _: (print('first'), sys.stdin.read(1), lines(), 0)[-1]; "
        f"sys.exit(m.main(['{verb}']))"
    )
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", program], **streams, text=True) as process:
        assert process.stdout.readline() == "first\n"  # while the command waits for us
        process.stdout.close()
        process.stdin.write("go")
        process.stdin.close()
        assert (process.stderr.read(), process.wait()) == ("", code)


def test_benchmarks_make_the_arrays_of_one_shape_at_a_time(monkeypatch):
    """And on a terminal without tqdm print plain lines."""
    from fp8moe.bench import swiglu

    made = []
    monkeypatch.setattr(swiglu, "one_shape", lambda *shape: made.append(shape) or [shape])
    cases = swiglu.cases("cuda")
    assert made == []
    assert (next(cases), made) == (swiglu.SHAPES[0], swiglu.SHAPES[:1])
    assert max(rows * width for rows, width in swiglu.cases("cpu")) * 20 < 2**29  # bytes of one shape
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert isinstance(harness.progress(), harness.Silent)


def test_a_table_aligns_its_columns():
    rows = [["recipe", "bytes"], ["bf16", 12345678], ["fp8", 1]]
    assert tables.table(rows) == ["recipe     bytes", "bf16    12345678", "fp8            1"]
    assert tables.line(("a", 12, "longer than that"), (-3, 4, -2)) == "a     12 longer than that"
    assert tables.line(("a long", "b", 12, "c"), (-3, -6, 4, -2)) == "a long b     12 c"
    assert tables.line(("a", "b", 12, "c"), (-3, -6, 4, -2)) == "a   b        12 c"


def test_the_roofline_is_drawn(tmp_path):
    from benchmarks import roofline

    roofline.draw("h200", tmp_path / "picture.svg")
    assert "copy" in (tmp_path / "picture.svg").read_text()


@only_on_cpu
@pytest.mark.parametrize("wrong", [None, "wgmma", "mma", "plain"])
def test_cuda_selftest_of_products_detects_a_wrong_backend(backend, monkeypatch, wrong):
    from fp8moe.kernels_cuda import grouped_gemm

    monkeypatch.setattr(selftest.cuda, "PRODUCT_ROWS", 144)
    make = grouped_gemm.grouped_gemm_wgrad

    def broken(dy, x, *arguments, backend, **options):
        operands = (x, dy) if backend == wrong else (dy, x)  # the gradient's transpose
        make(*operands, *arguments, backend=backend, **options)

    monkeypatch.setattr(grouped_gemm, "grouped_gemm_wgrad", broken)
    arrays = SimpleNamespace(asarray=backend.upload, asnumpy=backend.download)  # in place of CuPy
    check = selftest.cuda.CudaCheck(arrays, [selftest.Inputs(int(np.random.default_rng().integers(2**32)))])
    if wrong is None:
        check.checks()["grouped products"]()
    else:
        with pytest.raises(ValueError, match=f"wgrad of .* by '{wrong}'.*relative error"):
            check.checks()["grouped products"]()
