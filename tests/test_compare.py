"""The comparison with other libraries: correct results are timed, wrong ones are not, missing libraries are
listed."""

import functools
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch

from benchmarks import compare, compare_layer, compare_operations, host, sweep
from benchmarks.contender import Contender
from fp8moe.bench.harness import routing

SHAPE = (48, 4, 128, 128, 2)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(compare, "ON_THE_CPU", [SHAPE])


def test_installed_libraries_are_compared(small, tmp_path, capsys):
    out, picture = tmp_path / "rows.jsonl", tmp_path / "pictures" / "layer.svg"
    arguments = ["--device", "cpu", "--out", str(out), "--picture", str(picture)]
    assert compare.command_line(arguments) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    layer = {row["name"] for row in rows if row["part"] == "layer"}
    wanted = {"torch grouped_mm, bf16", "fp8moe, bf16", "fp8moe, fp8_blockwise", "fp8moe, fp8_flow"}
    wanted |= {"fp8moe of arrays, bf16"}
    assert wanted <= layer
    if not compare_layer.LAYER.contenders[2].missing():
        assert "transformers, bf16" in layer
    assert {row["part"] for row in rows} == {"layer", "grouped product", "quantise rows"}
    for row in rows:
        assert row["topic"] == "compare"
        assert row["ms"] > 0
        assert 0 <= row["error"] < 0.125
        assert row["versions"]["torch"] == torch.__version__
    text = capsys.readouterr().out
    for part in compare.PARTS:
        for contender in part.contenders:
            # the installation command, for optional libraries
            assert not contender.needs or contender.install
            if contender.missing():
                assert any(contender.name in line and contender.install in line for line in text.splitlines())
    assert "fp8_flow" in picture.read_text()


@pytest.mark.parametrize("output", range(5), ids=compare_layer.LAYER.outputs)
@pytest.mark.parametrize("value", [1.25, float("nan")])
def test_a_wrong_result_is_not_timed(output, value, small, tmp_path, capsys):
    """One of two contenders returns one output with one wrong row."""

    def wrong(inputs):
        step = compare_layer.by_torch(inputs)

        def changed():
            results = list(step())
            results[output] = results[output].clone()
            results[output][0] *= value
            return tuple(results)

        return changed

    contenders = (
        Contender("right", compare_layer.by_torch, compare_layer.BFLOAT16),
        Contender("wrong", wrong, compare_layer.BFLOAT16),
    )
    out = tmp_path / "rows.jsonl"
    part = replace(compare_layer.LAYER, contenders=contenders)
    assert compare.main("cpu", out=out, parts=[part]) == 1
    assert [json.loads(line)["name"] for line in out.read_text().splitlines()] == ["right"]
    assert "WRONG RESULT, not timed" in capsys.readouterr().out


def test_failures_are_reported_and_the_others_continue(small, capsys):
    def fails(inputs):
        raise RuntimeError("needs another GPU\nand more")

    other = Contender("other", fails, 1.0, ("json",), "pip install other")
    part = replace(
        compare_operations.QUANTIZE, contenders=(other, compare_operations.QUANTIZE.contenders[-1])
    )
    assert compare.main("cpu", parts=[part]) == 0
    assert "does not run here: RuntimeError: needs another GPU\n" in capsys.readouterr().out
    ours = replace(part, contenders=(replace(other, needs=()), part.contenders[-1]))
    assert compare.main("cpu", parts=[ours]) == 1
    text = capsys.readouterr().out
    assert "does not run here: RuntimeError: needs another GPU\n" in text
    assert " ms " in text  # contenders after a failed one are still timed


def test_host_time_is_measured_through_every_framework(tmp_path):
    out = tmp_path / "rows.jsonl"
    assert host.main(["--device", "cpu", "--quick", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    names = {row["name"] for row in rows}
    assert len(names) == len(rows)
    forms = [c for c in host.PART["contenders"] if not (c.cuda_only or c.missing())]
    for form in forms:
        assert {f"{form.name}: forward", f"{form.name}: forward and backward"} <= names
    assert {form.name for form in forms} >= {"torch grouped_mm, bf16", "fp8moe, fp8_flow"}
    assert {"quantize 1x128", "permute+pad bf16, forward and backward", "grouped_gemm fp8"} <= names
    for row in rows:
        assert row["topic"] == "host"
        assert min(row["host_us"], row["first_us"]) > 0
        assert row["graph_us"] is None  # there is no device
    assert {c.name for c in host.PART["contenders"]} >= {*host.PEERS}  # as `compare` names them


def held_to_float64(contender, part, shape=SHAPE):
    inputs = part.inputs("cpu", *shape)
    results = contender.decode(contender.make(inputs)())
    for result, wanted in zip(results, part.oracle(inputs), strict=True):
        assert compare.relative_error(result, wanted) <= contender.bound


@pytest.mark.parametrize("tokens", [3, 48])
def test_padded_rows_give_the_same_layer(tokens):
    """Padding for the FP8 products of torchao and Transformer Engine; with 3 tokens, some experts have no
    rows."""
    layer = compare_layer.around(compare_layer.experts_by(compare_layer.torch_product), align=16)
    padded = Contender("padded", lambda i: compare_layer.step_of(i, layer), compare_layer.BFLOAT16)
    held_to_float64(padded, compare_layer.LAYER, (tokens, 8, 128, 128, 2))


@pytest.mark.parametrize(
    "shape", [*compare.SHAPES, *compare.QUICK, *compare.ON_THE_CPU], ids=compare.described
)
def test_every_timed_shape_can_be_routed(shape):
    """Includes shapes where every expert is selected, as with 8 experts and top-8."""
    _, count, _, _, topk = shape
    ids = routing(64, count, topk)
    assert ids.shape == (64, topk)
    assert all(len(set(row)) == topk and set(row) <= set(range(count)) for row in ids.tolist())


@pytest.mark.parametrize("part", compare.PARTS, ids=lambda part: part.name)
def test_every_expert_selected(part):
    for contender in part.contenders:
        if not contender.cuda_only and not contender.missing():
            held_to_float64(contender, part, (24, 4, 128, 128, 4))


def named(part, name):
    return next(c for c in part.contenders if c.name == name)


def test_compiled_contenders_are_one_graph(monkeypatch):
    """Traced by Dynamo and differentiated as on a GPU, with torch's operations in place of Inductor's."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    held_to_float64(named(compare_layer.LAYER, "torch grouped_mm compiled, bf16"), compare_layer.LAYER)
    held_to_float64(named(compare_operations.QUANTIZE, "torch compiled"), compare_operations.QUANTIZE)
    of_sweep = replace(compare_layer.LAYER, contenders=sweep.CONTENDERS)
    held_to_float64(named(of_sweep, "fp8_flow compiled"), of_sweep)


def test_the_call_of_transformer_engine(monkeypatch):
    """With a stub that has the documented signatures."""

    class GroupedLinear(torch.nn.Module):
        def __init__(self, num_gemms, in_features, out_features, bias, params_dtype):
            super().__init__()
            for n in range(num_gemms):
                weight = torch.nn.Parameter(torch.full((out_features, in_features), 3.0, dtype=params_dtype))
                self.register_parameter(f"weight{n}", weight)

        def forward(self, inp, m_splits):
            assert all(type(m) is int for m in m_splits)
            rows = inp.split(m_splits)
            return torch.cat([r @ w.T for r, w in zip(rows, self.parameters(), strict=True)])

    entered = []

    class autocast:
        def __init__(self, enabled, recipe):
            entered.append((enabled, recipe))

        __enter__ = __exit__ = lambda self, *_: None

    pytorch = SimpleNamespace(GroupedLinear=GroupedLinear, autocast=autocast)
    recipes = SimpleNamespace(Float8BlockScaling=lambda: "blocks")
    engine = SimpleNamespace(pytorch=pytorch)
    for name, module in (
        ("transformer_engine", engine),
        ("transformer_engine.pytorch", pytorch),
        ("transformer_engine.common", SimpleNamespace(recipe=recipes)),
        ("transformer_engine.common.recipe", recipes),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    held_to_float64(named(compare_layer.LAYER, "Transformer Engine, bf16"), compare_layer.LAYER)
    assert set(entered) == {(False, None)}
    held_to_float64(named(compare_layer.LAYER, "Transformer Engine, FP8 blocks"), compare_layer.LAYER)
    assert (True, "blocks") in entered


def test_the_call_of_torchao(monkeypatch):
    prototype = ModuleType("torchao.prototype")

    def product(A, B_t, offs, pad_token_groups_for_grouped_mm=True):
        assert not pad_token_groups_for_grouped_mm  # not implemented in 0.18
        # reading values would break the graph, which the library avoids
        if not torch.compiler.is_compiling():
            assert not (torch.diff(offs, prepend=offs.new_zeros(1)) % 16).any()
        return compare_layer.torch_product(A, B_t, offs)

    prototype.moe_training = SimpleNamespace(_to_fp8_rowwise_then_scaled_grouped_mm=product)
    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace(prototype=prototype))
    monkeypatch.setitem(sys.modules, "torchao.prototype", prototype)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    for name in ("torchao, FP8 rows", "torchao compiled, FP8 rows"):
        held_to_float64(named(compare_layer.LAYER, name), compare_layer.LAYER)
    page = (Path(__file__).parents[1] / "docs/migration/torchao.md").read_text()
    assert all(f"`{name}(" in page for name in vars(prototype.moe_training))


def test_the_call_of_sonicmoe(monkeypatch):
    def moe_general_routing_inputs(
        x, scores, token, expert, w1, b1, w2, b2, E, stream_id, activation_type, **options
    ):
        assert options == {"is_inference_mode_enabled": False, "concat_layout": True}
        assert token.dtype == expert.dtype == torch.int32
        assert (torch.diff(token) >= 0).all()
        assert w1.shape[2] == E
        ids, probs = (a.view(len(x), -1) for a in (expert, scores))
        layer = compare_layer.around(compare_layer.experts_by(compare_layer.torch_product))
        return layer(x, w1.permute(2, 0, 1), w2.permute(2, 0, 1), ids, probs), None

    functional = SimpleNamespace(moe_general_routing_inputs=moe_general_routing_inputs)
    enums = SimpleNamespace(ActivationType=SimpleNamespace(SWIGLU="swiglu"))
    monkeypatch.setitem(sys.modules, "sonicmoe", SimpleNamespace(functional=functional, enums=enums))
    monkeypatch.setitem(sys.modules, "sonicmoe.functional", functional)
    monkeypatch.setitem(sys.modules, "sonicmoe.enums", enums)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    held_to_float64(named(compare_layer.LAYER, "SonicMoE, bf16"), compare_layer.LAYER)


def test_the_call_of_tile_kernels(monkeypatch):
    def per_token_cast(x, fmt, num_per_channels, round_sf):
        assert (fmt, num_per_channels, round_sf) == ("e4m3", 128, True)
        blocks = x.float().unflatten(1, (-1, 128))
        scales = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(-1) / 448)))
        return (blocks / scales[..., None]).flatten(1).to(torch.float8_e4m3fn), scales

    kernels = SimpleNamespace(quant=SimpleNamespace(per_token_cast=per_token_cast))
    monkeypatch.setitem(sys.modules, "tile_kernels", kernels)
    held_to_float64(named(compare_operations.QUANTIZE, "TileKernels"), compare_operations.QUANTIZE)


def test_draw_requires_layer_rows_of_one_device(tmp_path):
    row = {
        "part": "layer",
        "name": "a",
        "shape": "s",
        "device": "d",
        "ms": 1.0,
        "commit": "c",
        "command": "m",
    }
    with pytest.raises(ValueError, match="no layer"):
        compare.draw([{**row, "part": "quantise rows"}], tmp_path / "p.svg")
    with pytest.raises(ValueError, match="one device"):
        compare.draw([row, {**row, "device": "e"}], tmp_path / "p.svg")
    compare.draw([row], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["layer", "layer.xyz", "layer.svg.txt"])
def test_a_picture_of_another_kind_is_refused_before_anything_runs(name, small, tmp_path, capsys):
    arguments = ["--device", "cpu", "--picture", str(tmp_path / name)]
    assert compare.command_line(arguments) == 2
    read = capsys.readouterr()
    assert f"--picture: got {tmp_path / name}; wanted a name that ends in .svg or .png" in read.err
    assert not read.out


def test_one_part_alone(small, tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    arguments = ["--device", "cpu", "--out", str(out), "--part"]
    assert compare.command_line([*arguments, "quantise rows"]) == 0
    assert {json.loads(line)["part"] for line in out.read_text().splitlines()} == {"quantise rows"}
    rows = len(out.read_text().splitlines())
    assert compare.command_line([*arguments, "layers"]) == 2
    assert "--part: got 'layers'; wanted one of 'layer', 'grouped product'" in capsys.readouterr().err
    assert compare.command_line([*arguments, "quantise rows", "--picture", str(tmp_path / "p.svg")]) == 2
    assert "--picture: got it with the parts 'quantise rows'; wanted 'layer'" in capsys.readouterr().err
    assert len(out.read_text().splitlines()) == rows  # nothing was timed


def test_version_falls_back_to_the_modules_attribute(monkeypatch):
    monkeypatch.setitem(sys.modules, "built_here", SimpleNamespace(__version__="2.6.1"))
    contender = Contender("other", lambda inputs: None, 1.0, ("built_here", "not_here"))
    versions = compare.packages(contender)
    assert (versions["built_here"], versions["not_here"]) == ("2.6.1", "unknown")


def test_missing_torch_names_the_extra(monkeypatch, capsys):
    monkeypatch.setattr(compare.importlib.util, "find_spec", lambda name: None)
    assert compare.command_line(["--device", "cpu"]) == 2
    assert "torch, which is missing: pip install 'fp8moe[bench,torch]'\n" in capsys.readouterr().err


@pytest.mark.gpu
def test_the_layer_on_a_gpu(monkeypatch, tmp_path):
    """One small shape, with every installed contender."""
    monkeypatch.setattr(compare, "WARM", 0.01)
    monkeypatch.setattr(compare, "TIMED", 0.01)
    out = tmp_path / "rows.jsonl"
    assert compare.main("cuda", quick=True, out=out) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {"torch grouped_mm compiled, bf16", "fp8moe, fp8_flow", "fp8moe, FP8"} <= {r["name"] for r in rows}
