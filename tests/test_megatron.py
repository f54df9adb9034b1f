"""The adapter inside megatron-core: the permutation, ``fused=True`` compared with ``fused=False``, and the
MoE layer compared with Megatron's own experts."""

import contextlib
import importlib
import inspect
import os
import re
import signal
import socket
import subprocess
import sys
import types
import warnings
from pathlib import Path

import numpy as np
import pytest

import fp8moe

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.activations import fast_gelu, quick_gelu, squared_relu
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.utils import erf_gelu, openai_gelu

megatron = pytest.importorskip("fp8moe.megatron")
from grad_sums import check_added  # noqa: E402

from fp8moe.adapters.torch import eager, grouped  # noqa: E402
from fp8moe.adapters.torch.accumulation import no_entries  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore")]
T, H, E = 30, 24, 5
PADS = "align_size" in inspect.signature(moe_utils.permute).parameters
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def inputs(device, seed=0):
    torch.manual_seed(seed)
    mask = torch.rand(T, E) < 0.4
    mask[3] = False  # a token without an expert
    mask[:, 2] = False  # an expert without tokens
    probs = torch.rand(T, E) * mask
    return [t.to(device) for t in (torch.randn(T, H), mask, probs)]


def run(fused, device, with_probs, dtype):
    """Permutes and unpermutes rows by Megatron's functions; returns results and gradients."""
    x, mask, probs = inputs(device)
    x, probs = x.to(dtype).requires_grad_(), probs.requires_grad_()
    arguments = probs if with_probs else None
    rows, moved, indices, *_ = moe_utils.permute(
        x, mask, probs=arguments, num_out_tokens=mask.sum(), fused=fused
    )
    merging = None if with_probs else probs
    back = moe_utils.unpermute(rows * 2, indices, x.shape, probs=merging, routing_map=mask, fused=fused)
    loss = (back * torch.arange(H, device=device)).sum()
    if moved is not None:
        loss = loss + (moved * torch.arange(len(moved), device=device)).sum()
    loss.backward()
    return rows, moved, back, x.grad, probs.grad


def same(ours, theirs, dtype):
    # sums of at most five rows, in float32 or in the rows' dtype: half a unit in the last place for each
    eps = 5 * torch.finfo(dtype).eps
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            scale = b.detach().float().abs().max().item()
            torch.testing.assert_close(a.float(), b.float(), rtol=eps, atol=eps * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_probs", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_permute_and_unpermute(device, with_probs, dtype):
    theirs = run(False, device, with_probs, dtype)
    with megatron.enable():
        ours = run(True, device, with_probs, dtype)
    for moved in (0, 1):  # permuted values are bitwise equal
        assert theirs[moved] is ours[moved] is None or torch.equal(ours[moved], theirs[moved])
    same(ours, theirs, dtype)


@pytest.mark.parametrize("with_probs", [True, False])
@pytest.mark.parametrize("device", DEVICES)
def test_chunk_sort(device, with_probs):
    sizes, order = torch.tensor([4, 0, 11, 15]), torch.tensor([2, 0, 3, 1])
    actual = []
    for fused in (False, True):
        x, _, probs = inputs(device)
        x, probs = x.requires_grad_(), probs[:, 0].clone().requires_grad_()
        with megatron.enable():
            rows, moved = moe_utils.sort_chunks_by_idxs(
                x, sizes.to(device), order.to(device), probs=probs if with_probs else None, fused=fused
            )
        loss = (rows * torch.arange(rows.numel(), device=device).view_as(rows)).sum()
        (loss if moved is None else loss + (moved**2).sum()).backward()
        actual.append((rows, moved, x.grad, probs.grad))
    for a, b in zip(*actual, strict=True):
        assert a is b is None or torch.equal(a, b)


def test_strided_arguments():
    x, mask, probs = inputs("cpu")
    strided = [torch.stack([a, a], -1)[..., 0] for a in (x, probs, mask)]
    count = int(mask.sum())
    for a, b in zip(
        megatron.permute_with_probs(*strided, count),
        megatron.permute_with_probs(x, probs, mask, count),
        strict=True,
    ):
        assert torch.equal(a, b)
    assert torch.equal(megatron.permute(*strided[::2], count)[0], megatron.permute(x, mask, count)[0])
    got = megatron.permute_and_pad_with_probs(*strided, mask.sum(0), 16)
    wanted = megatron.permute_and_pad_with_probs(x, probs, mask, mask.sum(0), 16)
    assert torch.equal(got[0], wanted[0])
    assert torch.equal(got[1], wanted[1])


@pytest.mark.parametrize("counts_on_cpu", [True, False])
@pytest.mark.parametrize("align", [1, 16])
@pytest.mark.parametrize("device", DEVICES)
def test_padded(device, align, counts_on_cpu):
    """Called by versions from 0.17 on: unpadded rows with zeros after each expert's rows, and the inverse."""
    x, mask, probs = inputs(device)
    counts = mask.sum(0)
    rows, moved, *_ = moe_utils.permute(x, mask, probs=probs, num_out_tokens=counts.sum())
    arguments = counts.cpu() if counts_on_cpu else counts
    with megatron.enable():
        if PADS:
            options = {"tokens_per_expert": arguments, "align_size": align, "num_out_tokens": counts.sum()}
            actual = moe_utils.permute(x, mask, probs=probs, fused=True, **options)
        else:
            actual = moe_utils.fused_permute_and_pad_with_probs(x, probs, mask, arguments, align)
        padded, padded_probs, row_map, pads, sizes = actual
        assert sizes.tolist() == [-(-c // align) * align for c in counts.tolist()]
        assert sizes.device == arguments.device
        start = at = 0
        for count, size in zip(counts.tolist(), sizes.tolist(), strict=True):
            assert torch.equal(padded[at : at + count], rows[start : start + count])
            assert torch.equal(padded_probs[at : at + count], moved[start : start + count])
            assert not padded[at + count : at + size].any()
            start, at = start + count, at + size
        assert at == len(padded)
        if PADS:
            back = moe_utils.unpermute(padded, row_map, x.shape, probs=probs, fused=True, pad_offsets=pads)
        else:
            back = moe_utils.fused_unpermute(
                padded, row_map, merging_probs=probs, restore_shape=x.shape, pad_offsets=pads
            )
    torch.testing.assert_close(back, x * probs.sum(1, keepdim=True))


def test_disable_restores_megatron():
    before = dict(vars(moe_utils))
    enabled = megatron.enable()
    assert moe_utils.fused_permute is megatron.permute
    assert moe_utils.te_general_gemm is None or "te_general_gemm" in before
    with pytest.raises(RuntimeError, match="while the first is in force"):
        megatron.enable()
    enabled.disable()
    assert vars(moe_utils) == before
    with pytest.raises((ValueError, ImportError)):
        config(moe_permute_fusion=True)
    with megatron.enable():
        config(moe_permute_fusion=True)


def config(**options):
    plain = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "num_moe_experts": 4}
    return TransformerConfig(**plain, **options)


def test_alignment_of_the_recipes():
    fused = {"use_transformer_engine_op_fuser": False, "moe_use_grouped_tensor": False}
    plain = {"fp8": None, "fp8_recipe": "delayed", "fp4": None, "fp4_recipe": "nvfp4", **fused}

    def recipe(**options):
        return types.SimpleNamespace(**{**plain, **options})

    assert megatron.align_size(recipe()) == 0
    assert megatron.align_size(config()) == 0
    for name, wanted in (("delayed", 16), ("tensorwise", 16), ("blockwise", 16), ("mxfp8", 32)):
        assert megatron.align_size(recipe(fp8="e4m3", fp8_recipe=name)) == wanted
    blockwise = recipe(fp8="e4m3", fp8_recipe="blockwise")
    assert megatron.align_size(blockwise, grouped_blockwise=True) == 128
    assert megatron.align_size(recipe(fp4="e2m1")) == 128
    original = moe_utils.get_align_size_for_quantization
    for name in fused:  # Megatron pads these to 256 with any recipe
        assert megatron.align_size(recipe(**{name: True})) == 256
        assert megatron.align_size(recipe(fp8="e4m3", fp8_recipe="blockwise", **{name: True})) == 256
    with megatron.enable(grouped_blockwise=True):
        for module in (moe_utils, token_dispatcher):
            assert module.get_align_size_for_quantization(blockwise) == 128
            for fp8 in (blockwise, recipe(fp4="e2m1")):
                fp8.use_transformer_engine_op_fuser = True
                assert module.get_align_size_for_quantization(fp8) == 256
                fp8.use_transformer_engine_op_fuser = False
            assert module.get_align_size_for_quantization(recipe()) == original(recipe())
    assert token_dispatcher.get_align_size_for_quantization is original


LAYER = """
import sys, warnings
warnings.filterwarnings("ignore")
import torch
device, dispatcher, port = sys.argv[1:]
if device == "cpu":  # the router asks for it by name
    torch.cuda.current_device = lambda: "cpu"
torch.distributed.init_process_group("gloo", rank=0, world_size=1, init_method=f"tcp://127.0.0.1:{port}")
from megatron.core import parallel_state
parallel_state.initialize_model_parallel()
from fp8moe import megatron
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

def run(fused):
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=1, hidden_size=64, ffn_hidden_size=96, moe_ffn_hidden_size=96, num_attention_heads=4,
        num_moe_experts=8, moe_router_topk=2, moe_token_dispatcher_type=dispatcher,
        moe_permute_fusion=fused, moe_router_load_balancing_type="none", moe_router_dtype="fp32",
        use_cpu_initialization=True, add_bias_linear=False, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
    )
    mlp = get_gpt_layer_local_spec(num_experts=8, moe_grouped_gemm=False).submodules.mlp
    parts = mlp.submodules if hasattr(mlp, "submodules") else mlp.keywords["submodules"]
    layer = MoELayer(config, parts).to(device)
    torch.manual_seed(1)
    x = torch.randn(10, 3, 64).to(device).requires_grad_()
    y, _ = layer(x)
    (y * torch.randn(y.shape).to(device)).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]

with megatron.enable():
    calls = []
    from megatron.core.transformer.moe import moe_utils
    for name in ("fused_permute", "fused_permute_with_probs", "fused_unpermute"):
        def counted(*a, function=getattr(moe_utils, name), name=name, **k):
            calls.append(name)
            return function(*a, **k)
        setattr(moe_utils, name, counted)
    theirs = run(False)
    assert not calls
    ours = run(True)
    assert len(calls) == 2, calls
for a, b in zip(ours, theirs, strict=True):
    assert (a is None) == (b is None)
    if a is not None:
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
assert ours[1].abs().max() > 0
print("the layer is the same")
"""


@pytest.mark.parametrize(
    ("device", "dispatcher"),
    [
        ("cpu", "allgather"),
        pytest.param("cuda", "allgather", marks=pytest.mark.gpu),
        pytest.param("cuda", "alltoall", marks=pytest.mark.gpu),
    ],
)
def test_moe_layer_with_fused_permutation(device, dispatcher):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    done = subprocess.run(
        [sys.executable, "-c", LAYER, device, dispatcher, port], capture_output=True, text=True
    )
    assert "the layer is the same" in done.stdout, done.stderr[-3000:]


DDP = """
import sys, types, warnings
warnings.filterwarnings("ignore")
import torch
rank, port = int(sys.argv[1]), sys.argv[2]
torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.current_stream = lambda *_: types.SimpleNamespace(wait_stream=lambda other: None)
torch.distributed.init_process_group("gloo", rank=rank, world_size=2, init_method=f"tcp://127.0.0.1:{port}")
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from fp8moe.adapters.torch.layer import FP8FlowMoE
parallel_state.initialize_model_parallel()

def layer():
    torch.manual_seed(0)
    return FP8FlowMoE(256, 128, 4, 2)

def batches():
    g = torch.Generator().manual_seed(1)
    return [[torch.randn(40, 256, generator=g).bfloat16() for _ in range(2)] for _ in range(2)]  # by rank

plain = layer()
wanted = {}
for xs in batches():
    plain.zero_grad()
    for x in xs:
        plain(x).float().square().mean().backward()
    for name, p in plain.named_parameters():
        wanted[name] = wanted.get(name, 0) + p.grad / 2

config = TransformerConfig(num_layers=1, hidden_size=256, num_attention_heads=4)
for overlap, compiled in ((True, False), (True, True), (False, False)):
    options = DistributedDataParallelConfig(
        overlap_grad_reduce=overlap, grad_reduce_in_fp32=True, bucket_size=1
    )
    ddp = DistributedDataParallel(config, options, layer())
    forward = torch.compile(ddp.module, backend="aot_eager", fullgraph=True) if compiled else ddp.module
    for step in range(2):
        ddp.zero_grad_buffer()
        first, last = batches()[rank]
        with ddp.no_sync():
            forward(first).float().square().mean().backward()
        forward(last).float().square().mean().backward()
        ddp.finish_grad_sync()
        for name, p in ddp.module.named_parameters():
            assert p.grad is None, name
            # four float32 numbers in another order: three sums of 2^-24 each, of what may cancel
            error = (p.main_grad - wanted[name]).abs().max()
            assert error <= 3 * 2.0**-24 * 4 * wanted[name].abs().max(), (name, error)
        assert ddp.module.w13.grad_added_to_main_grad and not ddp.module.router.weight.grad_added_to_main_grad
print("right")
"""


def test_the_gradients_of_distributed_data_parallel():
    """FP8FlowMoE, also compiled, in Megatron's wrapper, which reduces ``main_grad`` at the end or as soon as
    a parameter's gradient is complete: the mean over two ranks of two micro-batches equals that of one
    process without ``main_grad``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    running = [
        subprocess.Popen(
            [sys.executable, "-c", DDP, str(rank), port],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in running:
            output, _ = process.communicate(timeout=120)
            assert "right" in output, output[-3000:]
    finally:
        for process in running:
            process.kill()


def test_layer_matches_megatrons_own_experts(tmp_path):
    """Losses, gradients, checkpoints and the distributed optimizer, with one and two expert-parallel ranks,
    and with experts split over expert-tensor-parallel ranks."""
    ports = []
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            free = stack.enter_context(socket.socket())
            free.bind(("127.0.0.1", 0))
            ports.append(str(free.getsockname()[1]))
    folder = Path(__file__).parent
    code = "import sys, megatron_rank; megatron_rank.start(*sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), *ports],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(folder), str(folder.parent), *sys.path]),
            "PYTHONWARNINGS": "ignore",
        },
        start_new_session=True,
    )
    try:
        process.wait(timeout=400)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for output in (tmp_path / f"{rank}.txt" for rank in range(4)):
        assert output.read_text().rstrip().endswith("right"), output.read_text()[-4000:]


def groups(**sizes):
    """Process groups of these sizes, with rank 0."""
    names = {"ep": 1, "tp": 1, "expt_tp": 1, "expt_dp": 1, **sizes}
    parts = {n: types.SimpleNamespace(size=lambda s=s: s, rank=lambda: 0) for n, s in names.items()}
    return types.SimpleNamespace(**parts)


def moe_config(**options):
    plain = {
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "use_cpu_initialization": True,
        "ffn_hidden_size": 128,
        "bias_activation_fusion": False,
    }
    return config(**plain | options)


class Product(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return x @ self.weight.T, None


@pytest.mark.parametrize(
    ("options", "activation"),
    [
        ({}, fp8moe.Activation()),
        ({"activation_func_clamp_value": 7.0}, fp8moe.Activation(clamp=7.0)),
        ({"activation_func": torch.nn.functional.gelu}, fp8moe.Activation("geglu")),
        (
            {"activation_func": quick_gelu, "glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0},
            fp8moe.Activation(alpha=1.702, clamp=7.0, linear_offset=1.0),
        ),
        ({"activation_func": fast_gelu}, fp8moe.Activation("geglu_tanh")),
        *(
            ({"activation_func": function, "gated_linear_unit": False}, fp8moe.Activation(kind))
            for function, kind in (
                (torch.nn.functional.gelu, "gelu"),  # Megatron's default
                (erf_gelu, "gelu"),
                (fast_gelu, "gelu_tanh"),
                (openai_gelu, "gelu_tanh"),
                (torch.nn.functional.silu, "silu"),
                (quick_gelu, "quick_gelu"),
                (squared_relu, "relu2"),
            )
        ),
    ],
)
def test_activations(options, activation):
    """The config's activations equal those of Megatron's own MLP."""
    given_config = moe_config(moe_ffn_hidden_size=128, **options)
    experts = megatron.FP8FlowExperts(2, given_config, pg_collection=groups(), recipe="bf16")
    assert experts.activation == activation
    counts, probs = torch.tensor([5, 3]), torch.rand(8)
    x = torch.randn(8, 64)
    y, bias = experts(x, counts, probs)
    assert bias is None
    start, wanted = 0, []
    for e, count in enumerate(counts.tolist()):
        rows = slice(start, start + count)
        stand_in = types.SimpleNamespace(
            config=given_config,
            activation_func=given_config.activation_func,
            linear_fc1=Product(experts.weight1[e]),
            linear_fc2=Product(experts.weight2[e]),
        )
        with torch.compiler.set_stance("force_eager"):  # Megatron compiles some of the functions
            wanted.append(MLP.forward(stand_in, x[rows], per_token_scale=probs[rows])[0])
        start += count
    # products of 64 and 128 terms in float32
    torch.testing.assert_close(y, torch.cat(wanted), rtol=2e-5, atol=2e-6)


def test_diagnose():
    """It does not count as a step's first micro-batch."""
    experts = megatron.FP8FlowExperts(2, moe_config(moe_ffn_hidden_size=128), pg_collection=groups())
    experts.train().is_first_microbatch = True
    rows = torch.randn(8, 64), torch.tensor([5, 3]), torch.rand(8)
    (layer,) = fp8moe.torch.diagnose(experts, rows, loss=lambda result: result[0].square().sum()).layers
    assert (layer.kind, layer.recipe, layer.rerouted) == ("FP8FlowExperts", "fp8_flow", None)
    assert all(g.error < g.limit for g in layer.gradients.values())
    assert experts.is_first_microbatch is True
    assert all(p.grad is None for p in experts.parameters())


@pytest.mark.parametrize(
    ("name", "options", "sizes"),
    [
        ("add_bias_linear", {"add_bias_linear": True}, {}),
        ("activation_func", {"activation_func": torch.nn.functional.relu}, {}),
        ("activation_func", {"activation_func": squared_relu}, {}),  # with a gate
        (
            "activation_func_clamp_value",
            {"gated_linear_unit": False, "activation_func_clamp_value": 7.0},
            {},
        ),
        ("glu_linear_offset", {"gated_linear_unit": False, "glu_linear_offset": 1.0}, {}),
        ("moe_ffn_hidden_size", {}, {"expt_tp": 3}),
        ("moe_apply_probs_on_input", {"then": {"moe_apply_probs_on_input": True}}, {}),
        ("delay_wgrad_compute", {"then": {"delay_wgrad_compute": True}}, {}),
        ("overlap_moe_expert_parallel_comm", {"then": {"overlap_moe_expert_parallel_comm": True}}, {}),
        ("moe_latent_size", {"then": {"moe_latent_size": 32}}, {}),
        (
            "offload_modules",
            {"then": {"fine_grained_activation_offloading": True, "offload_modules": ["moe_act"]}},
            {},
        ),
        (
            "offload_modules",
            {"then": {"fine_grained_activation_offloading": True, "offload_modules": ["fused_group_mlp"]}},
            {},
        ),
        ("moe_mlp_glu_interleave_size", {"then": {"moe_mlp_glu_interleave_size": 1}}, {}),
        ("moe_dispatch_fwd_dtype", {"then": {"moe_dispatch_fwd_dtype": "mxfp8"}}, {}),
        ("moe_combine_bwd_dtype", {"then": {"moe_combine_bwd_dtype": "mxfp8"}}, {}),
        ("expert_gtp_weight_remat_size", {"then": {"expert_gtp_weight_remat_size": 2}}, {}),
        ("batch_invariant_mode", {"then": {"batch_invariant_mode": True}}, {}),
        ("quant_recipe", {"then": {"quant_recipe": object()}}, {}),
        ("fp8_wgrad", {"then": {"fp8_wgrad": False}}, {}),
        (
            "cuda_graph_impl",
            {"then": {"moe_shared_expert_overlap": True, "cuda_graph_impl": "local"}},
            {},
        ),
        ("moe_pad_expert_input_to_capacity", {"then": {"moe_pad_expert_input_to_capacity": True}}, {}),
        ("moe_router_padding_for", {"then": {"moe_router_padding_for_quantization": True}}, {}),
        ("recipe", {"own": {"recipe": "fp8"}}, {}),
        ("backend", {"own": {"backend": "cutlass"}}, {}),
        ("num_sms", {"own": {"num_sms": 3}}, {}),
    ],
)
def test_unsupported_options_raise_in_the_constructor(name, options, sizes):
    then, own = options.get("then", {}), options.get("own", {})
    given_config = moe_config(**{n: v for n, v in options.items() if n not in ("then", "own")})
    for field, value in then.items():  # whose other requirements do not matter here
        setattr(given_config, field, value)
    with pytest.raises((NotImplementedError, ValueError), match=f"^{name}[a-z_0-9]*: got"):
        megatron.FP8FlowMoELayer(given_config, pg_collection=groups(**sizes), **own)


def test_parts_of_experts_are_next_to_each_other(monkeypatch):
    """In the group of expert and expert tensor parallelism together, whose ranks number the parts."""
    layer = importlib.import_module("fp8moe.adapters.megatron.layer")
    own = groups(ep=2, expt_tp=2, tp_ep=4)
    ranks = {id(own.ep): [4, 6], id(own.tp_ep): [4, 5, 6, 7]}
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: ranks[id(group)])
    assert layer._group_of_parts(own) is own.tp_ep
    ranks[id(own.ep)] = [4, 5]
    with pytest.raises(NotImplementedError, match=r"pg_collection: got the ranks \[4, 5\] as ep"):
        layer._group_of_parts(own)
    assert layer._group_of_parts(groups(ep=2)).size() == 2


def test_the_guide_lists_what_is_refused():
    """The table in docs/how-to/megatron.md: "refused" by both forms, or by the layer alone."""
    guide = (Path(__file__).parents[1] / "docs/how-to/megatron.md").read_text()
    cells = [line.strip("|").split(" | ") for line in guide.splitlines() if line.startswith("| `")]
    refused = [set(), set()]
    for settings, *forms in cells:
        for form, (names, verdict) in enumerate((settings, f) for f in forms):
            if "refused" in (forms[0] if verdict.strip() == "the same" else verdict):
                refused[form] |= set(re.findall(r"`(\w+)", names))
    layer = importlib.import_module("fp8moe.adapters.megatron.layer")
    modules = {"offload_modules", "expert_fc1", "moe_act", "fused_group_mlp"}
    of_both = {*layer.REFUSED, *layer.REFUSED_IN_FP8, *modules}
    assert refused == [of_both | set(layer.REFUSED_BY_LAYER), of_both | {"first_last_layers_bf16"}]


def test_first_and_last_layers_in_bf16(monkeypatch):
    """``first_last_layers_bf16`` selects layers by their number, which experts of Megatron's own layer do
    not know."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")  # the router asks for it by name
    given_config = moe_config(moe_ffn_hidden_size=128)
    given_config.num_layers, given_config.first_last_layers_bf16 = 6, True
    given_config.num_layers_at_start_in_bf16, given_config.num_layers_at_end_in_bf16 = 2, 1
    given = {"config": given_config, "pg_collection": groups(tp_ep=1, tp_cp=1, tp_dp_cp=1, cp=1)}
    recipes = ["bf16", "bf16", "fp8_flow", "fp8_flow", "fp8_flow", "bf16"]
    assert [megatron.FP8FlowMoELayer(layer_number=n, **given).experts.recipe for n in range(1, 7)] == recipes
    layer = megatron.FP8FlowMoELayer(**given, save="fp8")
    assert (layer.experts.recipe, layer.experts.save) == ("fp8_flow", "fp8")
    for number, recipe in enumerate(recipes, 1):
        layer.set_layer_number(number)
        assert (layer.experts.recipe, layer.experts.save) == (recipe, recipe.removesuffix("_flow"))
    given_config.fp8_wgrad = False  # has no meaning in bf16
    megatron.FP8FlowExperts(2, **given, recipe="bf16")
    given_config.fp8_wgrad = True
    with pytest.raises(NotImplementedError, match="first_last_layers_bf16: got True"):
        megatron.FP8FlowExperts(2, **given)


@pytest.mark.parametrize(("option", "value"), [("backend", "mma"), ("num_sms", 4)])
@pytest.mark.parametrize("recipe", ["fp8_flow", "bf16"])
def test_backend_and_limit_reach_the_products(recipe, option, value):
    options = {"recipe": recipe, option: value}
    experts = megatron.FP8FlowExperts(2, moe_config(), pg_collection=groups(), **options)
    counts, probs = torch.tensor([5, 3]), torch.rand(8)
    with pytest.raises(ValueError, match=f"{option}: got {value!r} for arrays on the CPU"):
        experts(torch.randn(8, 64), counts, probs)
    with pytest.raises(ValueError, match=f"{option}: got {value!r} for arrays on the CPU"):
        experts(torch.randn(8, 64), None, probs[:, None], topk_ids=torch.zeros(8, 1, dtype=torch.int64))


def test_arguments_that_the_config_says_are_refused_by_name():
    """And misspelt ones, by the name of the function that was called."""
    spec, config = get_gpt_layer_local_spec(num_experts=4), moe_config()
    wrong = {"recompute": "moe_expert", "activation": fp8moe.Activation("relu2"), "recipee": "bf16"}
    for name, value in wrong.items():
        for function, call in (
            ("use_fp8_flow", lambda options: megatron.use_fp8_flow(spec, **options)),
            ("FP8FlowExperts", lambda o: megatron.FP8FlowExperts(2, config, pg_collection=groups(), **o)),
            ("FP8FlowMoELayer", lambda o: megatron.FP8FlowMoELayer(config, pg_collection=groups(), **o)),
        ):
            with pytest.raises(TypeError, match=rf"^{function}\(\) got .* argument '{name}'; .* num_sms"):
                call({name: value})


def test_options_of_the_experts_are_fixed():
    experts = megatron.FP8FlowExperts(2, moe_config(), pg_collection=groups(), recipe="bf16", num_sms=4)
    before = repr(experts)
    for shown in ("recipe='bf16'", "recompute=None", "backend=None", "num_sms=4", "kind='swiglu'"):
        assert shown in before
    for name in ("recipe", "recompute", "save", "activation", "backend", "num_sms", "num_local_experts"):
        with pytest.raises(AttributeError, match=name):
            setattr(experts, name, getattr(experts, name))


def test_codes_without_scales_are_not_loaded():
    experts = megatron.FP8FlowExperts(2, moe_config(), pg_collection=groups())
    state = experts.state_dict()
    for name in state:
        codes = {**state, name: torch.ones(state[name].shape, dtype=torch.int8)}
        with pytest.raises(TypeError, match=f"^{name}: got dtype torch.int8, codes without scales; wanted"):
            experts.load_state_dict(codes)


@pytest.mark.parametrize("recipe", ["fp8_flow", "bf16"])
def test_products_of_the_fp8_recipes_add_to_main_grad(recipe):
    """For permuted rows and for tokens; those of the bf16 recipe return a ``grad``."""
    torch.manual_seed(0)
    experts = megatron.FP8FlowExperts(2, moe_config(), pg_collection=groups(), recipe=recipe)
    x, probs, counts = torch.randn(8, 64), torch.rand(8), torch.tensor([5, 3])
    ids = torch.arange(2).repeat_interleave(counts)
    weights, gradients = (experts.weight1, experts.weight2), []
    for arguments, options in (
        ((x, counts, probs), {}),
        ((x, None, probs[:, None]), {"topk_ids": ids[:, None]}),
    ):
        for w in weights:
            w.grad, w.main_grad, w.grad_added_to_main_grad = None, torch.zeros_like(w), False
        experts(*arguments, **options)[0].sum().backward()
        for w in weights:
            assert w.grad_added_to_main_grad == (recipe != "bf16")
            assert bool(w.main_grad.any()) == (recipe != "bf16")
        gradients.append([w.main_grad + w.grad for w in weights])
    for a, b in zip(*gradients, strict=True):
        assert a.any()
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("ranks", [1, 2])
def test_shards_of_several_ranks_with_equal_keys_raise(ranks, tmp_path):
    """Megatron-FSDP's, whose keys do not tell the expert-parallel ranks apart."""
    experts = megatron.FP8FlowExperts(2, moe_config(), pg_collection=groups(ep=ranks))
    assert set(experts.state_dict()) == {"weight1", "weight2"}
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        for name in ("weight1", "weight2"):
            shard = torch.distributed.tensor.distribute_tensor(getattr(experts, name).detach(), mesh)
            setattr(experts, name, torch.nn.Parameter(shard))
        layers = torch.nn.Sequential(experts)
        if ranks == 1:
            assert set(layers.state_dict()) == {"0.weight1", "0.weight2"}
        else:
            with pytest.raises(NotImplementedError, match="weight1: got a DTensor with expert_model_par"):
                layers.state_dict()
    finally:
        torch.distributed.destroy_process_group()


def test_layer_specs():
    """Replaces every MoE layer in a spec of any kind; shared experts, router and everything else are kept."""
    spec = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False)
    for dispatcher in ("fp8moe", "megatron"):
        options = {"recipe": "fp8_blockwise", "backend": "wgmma", "num_sms": 8}
        new = megatron.use_fp8_flow(spec, **options, dispatcher=dispatcher)
        assert new is not spec
        before, after = spec.submodules.mlp, new.submodules.mlp
        kind, params, submodules = parts_of(after)
        assert parts_of(before)[0] is MoELayer
        assert submodules.shared_experts is parts_of(before)[2].shared_experts
        if dispatcher == "fp8moe":
            assert kind is megatron.FP8FlowMoELayer
            assert params.items() >= options.items()
        else:
            assert kind is MoELayer
            assert submodules.experts.module is megatron.FP8FlowExperts
            assert submodules.experts.params == options
        assert new.submodules.self_attention.module is spec.submodules.self_attention.module
    own = groups()
    assert parts_of(megatron.use_fp8_flow(spec, pg_collection=own).submodules.mlp)[1]["pg_collection"] is own
    several = megatron.use_fp8_flow([spec, spec])
    assert [parts_of(s.submodules.mlp)[0] for s in several] == [megatron.FP8FlowMoELayer] * 2
    with pytest.raises(ValueError, match="spec: got one without a MoELayer"):
        megatron.use_fp8_flow(get_gpt_layer_local_spec())
    with pytest.raises(ValueError, match="dispatcher"):
        megatron.use_fp8_flow(spec, dispatcher="alltoall")


def test_hybrid_layer_specs():
    try:
        hybrid = importlib.import_module("megatron.core.models.hybrid.hybrid_layer_specs").hybrid_stack_spec
    except ImportError:
        hybrid = importlib.import_module("megatron.core.models.mamba.mamba_layer_specs").mamba_stack_spec
    new = megatron.use_fp8_flow(hybrid)
    kind, params, _ = parts_of(new.submodules.moe_layer.submodules.mlp)
    assert (kind, params["recipe"]) == (megatron.FP8FlowMoELayer, "fp8_flow")
    assert parts_of(hybrid.submodules.moe_layer.submodules.mlp)[0] is MoELayer
    assert new.submodules.mamba_layer.module is hybrid.submodules.mamba_layer.module


def parts_of(spec):
    """(class, parameters, submodules) of a spec or a builder."""
    if hasattr(spec, "submodules"):
        return spec.module, spec.params, spec.submodules
    return spec.func, spec.keywords, spec.keywords["submodules"]


def test_without_megatron():
    code = """
import sys
sys.modules["megatron.core"] = None
from fp8moe.adapters.megatron import permutation
def door():
    import fp8moe.megatron
for call in (permutation.enable, door):
    try:
        call()
    except ImportError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    for extra in ("megatron-core>=0.16", "fp8moe[megatron]"):
        assert f"pip install '{extra}'" in done.stdout, done.stderr


def test_permute_accepts_any_form_of_num_out_tokens():
    """num_out_tokens as a tensor of one number, and as None."""
    x, mask, _ = inputs("cpu")
    wanted = fp8moe.permute(x.numpy(), fp8moe.plan_routing_map(mask.numpy())).data[: int(mask.sum())]
    for rows in (None, int(mask.sum()), mask.sum()):
        np.testing.assert_array_equal(megatron.permute(x, mask, rows)[0].numpy(), wanted)


def test_the_gemms_add_weight_gradients_to_grad(monkeypatch):
    """Without a ``main_grad``; those of the bf16 recipe only where they are this library's, as on Hopper."""
    options = {"pg_collection": groups(), "recipe": "fp8_flow"}
    experts = megatron.FP8FlowExperts(2, moe_config(params_dtype=torch.bfloat16), **options)
    x, probs, counts = torch.randn(8, 64).bfloat16(), torch.rand(8), torch.tensor([5, 3])
    ids = torch.arange(2).repeat_interleave(counts)
    weights, dy = [experts.weight1, experts.weight2], torch.randn(8, 64).bfloat16()
    check_added(weights, lambda: experts(x, counts, probs)[0].backward(dy))
    check_added(weights, lambda: experts(x, None, probs[:, None], topk_ids=ids[:, None])[0].backward(dy))
    monkeypatch.setattr(grouped, "on_hopper", lambda x: True)
    options["recipe"] = "bf16"
    experts = megatron.FP8FlowExperts(2, moe_config(params_dtype=torch.bfloat16), **options)
    added = []
    monkeypatch.setattr(eager, "no_entries", lambda grad: added.append(grad) or no_entries(grad))
    for _ in range(2):
        experts(x, counts, probs)[0].backward(dy)
    assert {g.data_ptr() for g in added} == {w.grad.data_ptr() for w in (experts.weight1, experts.weight2)}
