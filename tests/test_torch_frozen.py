"""Experts that exist as FP8 codes and scales only: `FP8FlowMoE.from_quantized`."""

import copy
import io
import pickle

import numpy as np
import pytest
from cases import FP8_NOISE, generator

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import fp8moe  # noqa: E402
import fp8moe.torch  # noqa: E402
from fp8moe.runtime.record_trees import map_arrays  # noqa: E402
from fp8moe.torch import FP8FlowMoE, moe_experts, quantize_fp8_weights, weights_unchanged  # noqa: E402

H, F, E, K, T = 160, 192, 4, 2, 37  # partial tiles of both
KEYS = ["w13.weight", "w13.weight_scale_inv", "w2.weight", "w2.weight_scale_inv"]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


def published(device="cpu"):
    """Codes and scales of a checkpoint, gate, up and down, with scales that are no powers of two."""
    rng = generator()

    def one(n, k):
        codes = rng.integers(0, 255, (E, n, k), np.uint8)
        codes[(codes & 0x7F) == 0x7F] = 0x30  # NaN
        scales = rng.uniform(1, 2, (E, -(-n // 128), -(-k // 128))) / 2**12
        codes, scales = torch.from_numpy(codes).to(device), torch.from_numpy(scales).float().to(device)
        return codes.view(torch.float8_e4m3fn), scales

    return one(F, H), one(F, H), one(H, F)


def values(codes, scales):
    """In float64, by torch's own cast."""
    each = scales.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
    return codes.double() * each[:, : codes.shape[1], : codes.shape[2]]


def records_of(gate, up, down):
    (g, gs), (u, us), (d, ds) = gate, up, down
    w13 = fp8moe.from_block_fp8((g, u), (gs, us), rows=256, columnwise=False)
    return w13, fp8moe.from_block_fp8(d, ds, columns=256, columnwise=False)


def layer_of(projections=None, device="cpu", **options):
    records = records_of(*(projections or published(device)))
    return FP8FlowMoE.from_quantized(*records, K, ffn=F, **options)


def tokens(device="cpu"):
    return torch.randn(T, H, dtype=torch.bfloat16, device=device).requires_grad_()


def bytes_of(layer):
    return [t.clone() for t in layer.buffers()]


def in_float64(projections, *rows):
    return in_float64_of([values(*p) for p in projections], *rows)


def in_float64_of(weights, x, ids, probs):
    """y of float64 x and probs, an expert at a time."""
    gate, up, down = weights
    y = torch.zeros_like(x)
    for e in range(E):
        at, place = (ids == e).nonzero(as_tuple=True)
        act = nn.functional.silu(x[at] @ gate[e].T) * (x[at] @ up[e].T)
        y = y.index_add(0, at, probs[at, place][:, None] * (act @ down[e].T))
    return y


def near(got, wanted):
    assert got.isfinite().all()
    assert (got.double() - wanted).norm() < FP8_NOISE * wanted.norm()


@pytest.mark.parametrize("recompute", [None, "moe_expert"])
@pytest.mark.parametrize("recipe", ["fp8_flow", "fp8_blockwise"])
def test_gradients_against_float64(device, recipe, recompute):
    """Of x and the probabilities, and by them of a router; the codes keep their bytes."""
    projections = published(device)
    records = records_of(*projections)  # "fp8_blockwise" takes the zeros that fill F up for columns of w2
    ffn = F if recipe == "fp8_flow" else None
    layer = FP8FlowMoE.from_quantized(*records, K, ffn=ffn, recipe=recipe, recompute=recompute)
    before, x = bytes_of(layer), tokens(device)
    _, ids, probs = layer.route(x.detach())
    probs = probs.detach().requires_grad_()
    y = layer(x, ids, probs)
    dy = torch.randn_like(y)
    y.backward(dy)
    other = x.detach().double().requires_grad_(), probs.detach().double().requires_grad_()
    wanted = in_float64(projections, other[0], ids, other[1])
    wanted.backward(dy.double())
    near(y, wanted)
    near(x.grad, other[0].grad)
    near(probs.grad, other[1].grad)
    assert all(map(torch.equal, bytes_of(layer), before))


def test_what_is_trained_and_what_is_held(device):
    """Optimizers and clipping see the router alone; thirty steps leave the codes' bytes, of one a weight."""
    layer = layer_of(device=device)
    assert [name for name, _ in layer.named_parameters()] == ["router.weight"]
    assert [name for name, _ in layer.named_buffers()] == KEYS
    assert not any(t.requires_grad for t in layer.buffers())
    assert sum(t.nbytes for t in layer.buffers()) == E * (3 * 256 * H + 4 * 3 * 2 * 2)
    before, first = bytes_of(layer), layer.router.weight.detach().clone()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, weight_decay=0.5)
    layer.requires_grad_(True)  # of the parameters
    with weights_unchanged(layer, optimizer=optimizer):
        for step in range(30):
            x = tokens(device)
            layer(x, is_first_microbatch=step % 3 == 0).square().mean().backward()
            nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    layer.quantize_weights()
    layer.reset_parameters()
    assert layer.fp8_weight_nbytes == 0
    assert not torch.equal(layer.router.weight, first)
    assert all(map(torch.equal, bytes_of(layer), before))


def test_it_is_the_function_of_the_same_records(device):
    """Bit for bit, in every way that a layer runs; each backward derives two orientations."""
    layer, x = layer_of(device=device), tokens(device)
    _, ids, probs = layer.route(x)
    codes = layer.w13.quantized, layer.w2.quantized
    results = []

    def run(call, *arguments):
        leaf, p = x.detach().clone().requires_grad_(), probs.detach().clone().requires_grad_()
        y = call(leaf, ids, p, *arguments)
        with fp8moe.trace() as traced:
            y.backward(torch.ones_like(y))
        assert traced.launches["transpose_codes"] == 2
        results.append((y, leaf.grad, p.grad))

    run(lambda x, i, p: moe_experts(x, *codes, i, p, weight_copies="rowwise"))
    for _ in range(3):  # the later ones by recordings
        run(layer)
    run(lambda *a: checkpoint(layer, *a, use_reentrant=False))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        run(other)
    layer.collect_stats = True
    run(layer)
    assert layer.stats().a.elements == (ids >= 0).sum() * F  # without the zeros that fill F up
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


@pytest.mark.parametrize("recompute", [None, "moe_expert"])
def test_a_backward_holds_the_buffers_and_no_copy(device, recompute):
    """In a first forward and in one by a recording."""
    layer, x = layer_of(device=device, recompute=recompute), tokens(device)
    for _ in range(2):
        node = layer(
            x, torch.zeros(T, K, dtype=torch.int64, device=device), torch.rand(T, K, device=device)
        ).grad_fn
        while not hasattr(node, "saved_tensors"):  # of a view
            ((node, _),) = node.next_functions
        saved = {t.data_ptr(): t.nbytes for t in node.saved_tensors}
        codes = {t.data_ptr(): t.nbytes for t in layer.buffers()}
        assert codes.items() <= saved.items()
        rest = sum(n for at, n in saved.items() if at not in codes)
        # arrays in one tensor begin at multiples of 256 bytes at most
        assert rest <= fp8moe.torch.memory(layer, T)[""].saved + 16 * 256


def test_published_forms_and_configurations():
    """MXFP4, whose values e4m3 has: their products are those of the same values in float64."""
    rng, shapes = generator(), ((E, 2 * 128, H), (E, H, 128))
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    records, dense = [], []
    for experts, n, k in shapes:
        blocks = rng.integers(0, 256, (experts, n, k // 32, 16), np.uint8)
        exponents = rng.integers(118, 124, (experts, n, k // 32), np.uint8)
        codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(experts, n, k // 32, 32)
        dense.append((table[codes] * 2.0 ** (exponents.astype(int) - 127)[..., None]).reshape(experts, n, k))
        q, rounded = fp8moe.from_mxfp4(
            torch.from_numpy(blocks), torch.from_numpy(exponents), parts=2 if n == 256 else 1
        )
        assert not rounded.any()
        records.append(q)
    sizes = {"hidden_size": H, "moe_intermediate_size": 128, "num_experts": E}
    config = {
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "num_experts_per_tok": K,
        **sizes,
        "norm_topk_prob": True,
    }
    layer = FP8FlowMoE.from_config(config, frozen=tuple(records), weight_copies="rowwise")
    x = tokens()
    _, ids, probs = layer.route(x)
    w13, w2 = map(torch.from_numpy, dense)
    near(layer(x), in_float64_of([w13[:, :128], w13[:, 128:], w2], x.double(), ids, probs.double()))


def test_compiled(device):
    layer, x = layer_of(device=device), tokens(device)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    results = []
    for call in (layer, compiled):
        x.grad = layer.router.weight.grad = None
        y = call(x)
        y.sum().backward()
        results.append([y, x.grad, layer.router.weight.grad])
    assert all(map(torch.equal, *results))


def test_conversions_leave_codes_and_scales():
    layer, x = layer_of(), tokens().detach()
    before, y = bytes_of(layer), layer(x)
    for convert in ("bfloat16", "half", "double", "float"):
        getattr(layer, convert)()
        assert layer.router.weight.dtype == getattr(torch, convert)
        assert [t.dtype for t in layer.buffers()] == [torch.uint8, torch.float32] * 2
    layer.to("cpu", torch.bfloat16).to(torch.float32)
    assert all(map(torch.equal, bytes_of(layer), before))
    with pytest.raises(TypeError, match=r"weight: got a conversion .* to torch.bfloat16; .*dequantize"):
        layer.type(torch.bfloat16)
    assert all(map(torch.equal, bytes_of(layer), before))
    assert layer(x).shape == y.shape
    empty = copy.deepcopy(layer).to("meta")
    with pytest.raises(TypeError, match=r"w13: got codes and scales on meta, .*assign=True"):
        empty(x, torch.zeros(T, K, dtype=torch.int64), torch.ones(T, K))
    empty.load_state_dict(layer.state_dict(), assign=True)
    assert torch.equal(empty(x), layer(x))
    assert empty.w13.weight.data_ptr() == layer.w13.weight.data_ptr()


def test_state_dicts(tmp_path):
    """By the published names and dtypes, through torch's, safetensors' and torch.distributed's files."""
    safetensors = pytest.importorskip("safetensors.torch")
    layer, x = layer_of(), tokens().detach()
    state = layer.state_dict()
    assert [*state] == ["router.weight", *KEYS]
    assert [state[k].dtype for k in KEYS] == [torch.float8_e4m3fn, torch.float32] * 2
    w13 = fp8moe.from_block_fp8(state[KEYS[0]], state[KEYS[1]], parts=2)  # as a checkpoint's
    assert torch.equal(w13.rowwise.data, layer.w13.weight)
    files = io.BytesIO()
    torch.save(state, files)
    files.seek(0)
    (tmp_path / "layer.pt").write_bytes(files.getvalue())
    safetensors.save_file(state, tmp_path / "layer.safetensors")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.checkpoint.save(state, checkpoint_id=tmp_path / "dcp")
        of_dcp = layer_of()
        dist.checkpoint.load(
            of_dcp.state_dict(), checkpoint_id=tmp_path / "dcp", planner=fp8moe.torch.LoadPlanner()
        )
        other = {"w13.weight": torch.randn(E, 512, H).bfloat16()}
        dist.checkpoint.save(other, checkpoint_id=tmp_path / "other")
        into, how = {"w13.weight": state["w13.weight"]}, {"planner": fp8moe.torch.LoadPlanner()}
        with pytest.raises(dist.checkpoint.CheckpointException, match=r"w13\.weight: got dtype torch\.bf"):
            dist.checkpoint.load(into, checkpoint_id=tmp_path / "other", **how)
    finally:
        dist.destroy_process_group()
    others = [of_dcp]
    for given in (torch.load(files), safetensors.load_file(tmp_path / "layer.safetensors"), state):
        others.append(layer_of())
        others[-1].load_state_dict(given)
    on_meta = [map_arrays(lambda t: t.to("meta"), w.quantized) for w in (layer.w13, layer.w2)]
    others.append(FP8FlowMoE.from_quantized(*on_meta, K, ffn=F))
    others[-1].load_state_dict(torch.load(tmp_path / "layer.pt", mmap=True), assign=True)
    for other in others:
        assert all(map(torch.equal, bytes_of(other), bytes_of(layer)))
        assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize("strict", [True, False])
def test_states_of_other_layers_are_refused(strict):
    """By name, whatever ``strict`` is, and with nothing of the layer loaded."""
    layer = layer_of()
    plain = FP8FlowMoE(H, F, E, K)
    state, before = layer.state_dict(), bytes_of(layer)
    other = layer_of().state_dict()

    def without(name):
        return {k: v for k, v in other.items() if k != name}

    for given, error, words in (
        (plain.state_dict(), TypeError, r"^w13: got weights of torch.float32 in a layer of frozen"),
        (without(KEYS[3]), ValueError, r"w2.weight_scale_inv: got none beside w2.weight; wanted codes and"),
        (without(KEYS[2]), ValueError, r"w2.weight: got none beside w2.weight_scale_inv"),
        (
            other | {KEYS[2]: other[KEYS[2]].bfloat16()},
            TypeError,
            r"w2.weight: got dtype torch.bfloat16 .*float",
        ),
        (other | {KEYS[3]: other[KEYS[3]].bfloat16()}, TypeError, r"w2.weight_scale_inv: .*\.float\(\)"),
        (other | {KEYS[3]: -other[KEYS[3]]}, ValueError, r"w2.weight_scale_inv: got a scale that is not pos"),
        (other | {KEYS[1]: other[KEYS[1]] * np.nan}, ValueError, r"w13.weight_scale_inv: got a scale that"),
    ):
        with pytest.raises(error, match=words):
            layer.load_state_dict(given, strict=strict)
        assert all(map(torch.equal, bytes_of(layer), before)), words
    with pytest.raises(RuntimeError, match=r"size mismatch for w2.weight"):
        layer.load_state_dict(state | {KEYS[2]: other[KEYS[2]][:, :-1]}, strict=strict)
    with pytest.raises(TypeError, match=r"w13.weight: got frozen FP8 codes in a .*from_quantized"):
        plain.load_state_dict(state, strict=strict)
    layer.load_state_dict({"router.weight": state["router.weight"]}, strict=False)  # trained alone


def test_weights_of_another_kind_are_refused():
    layer, x = layer_of(), tokens()
    with pytest.raises(TypeError, match=r"requires_grad_: got True for frozen FP8 codes"):
        layer.w13.requires_grad_()
    layer.w2.requires_grad_(False)
    with pytest.raises(RuntimeError, match="floating point"):
        layer.w13.weight.requires_grad_()

    def replaced(name, value):
        other = copy.deepcopy(layer)
        if "." in name:
            setattr(other.w13, name[4:], value)
        else:
            setattr(other, name, value)
        return other

    for other, words in (
        (
            replaced("w13", nn.Parameter(torch.randn(E, 2 * F, H))),
            r"w13: got weights of torch.float32 in a la",
        ),
        (replaced("w13.weight", torch.randn(E, 512, H)), r"w13.weight: got torch.float32.*from_quantized"),
        (
            replaced("w13.weight_scale_inv", layer.w13.weight_scale_inv.bfloat16()),
            r"w13.weight_scale_inv: got torch.bfloat16",
        ),
    ):
        for _ in range(2):
            with pytest.raises(TypeError, match=words):
                other(x)
    for adapters in (False, True):  # after forwards that were right
        other = layer_of()
        other = other.add_lora(4) if adapters else other
        other(x), other(x)
        other.w2.weight_scale_inv.requires_grad_()
        with pytest.raises(TypeError, match=r"w2: got codes or scales that require grad, .*requires_grad_"):
            other(x)
    codes, (_, *rest) = (layer.w13.quantized, layer.w2.quantized), layer.route(x.detach())
    for _ in range(2):
        moe_experts(x, *codes, *rest)
    in_numpy = fp8moe.quantize_weights(np.ones((E, H, 256), np.float32))
    with pytest.raises(TypeError, match=r"w2: got a Quantized of numpy.ndarray; wanted one of torch"):
        moe_experts(x, codes[0], in_numpy, *rest)
    codes[1].rowwise.scales.requires_grad_()
    for given, options in (
        (codes, {}),
        (map(torch.randn, ((E, 512, H), (E, H, 256))), {"fp8_weights": codes}),
    ):
        with pytest.raises(TypeError, match=r"w2: got codes or scales that require grad"):
            moe_experts(x, *given, *rest, **options)
    with pytest.raises(ValueError, match=r"w13.weight: got shape \[3, 512, 160\]; wanted \[4, 512, 160\]"):
        replaced("w13.weight", layer.w13.weight[:3].clone())(x)
    for name, value, words in (
        ("recipe", "bf16", r"recipe: got 'bf16' for frozen FP8 codes"),
        ("weight_copies", "both", r"weight_copies: got 'both' for frozen FP8 codes"),
    ):
        with pytest.raises(ValueError, match=words):
            setattr(layer, name, value)
        with pytest.raises(ValueError, match=words):
            layer_of(**{name: value})


def test_records_are_checked():
    w13, w2 = records_of(*published())
    half = quantize_fp8_weights(torch.randn(E, 512, H), torch.randn(E, H, 256))[0]
    e5m2 = fp8moe.torch.quantize_weights(torch.randn(E, 512, H), fmt="e5m2")
    in_numpy = fp8moe.quantize_weights(np.ones((E, 512, H), np.float32))
    for given, error, words in (
        ((half.rowwise, w2), TypeError, r"w13: got QuantTensor; wanted .*from_block_fp8"),
        ((torch.randn(E, 512, H), w2), TypeError, r"w13: got Tensor; .*quantize_weights"),
        ((e5m2, w2), TypeError, r"w13.rowwise: got fmt 'e5m2'"),
        ((fp8moe.Quantized(None, half.columnwise), w2), TypeError, r"w13.rowwise: got None"),
        ((fp8moe.Quantized(half.columnwise), w2), TypeError, r"w13.rowwise: got transposed codes"),
        ((in_numpy, w2), TypeError, r"w13: got a Quantized of numpy.ndarray; wanted one of"),
        ((w13, w13), ValueError, r"w13.weight: got shape \[4, 512, 160\]; wanted \[4, 512, 512\]"),
    ):
        with pytest.raises(error, match=words):
            FP8FlowMoE.from_quantized(*given, K)
    with pytest.raises(ValueError, match=r"w13.weight: got shape"):
        FP8FlowMoE.from_quantized(w13, w2, K, ffn=128)
    with pytest.raises(TypeError, match="frozen: got Quantized; wanted two"):
        FP8FlowMoE(H, F, E, K, frozen=w13, weight_copies="rowwise")


def test_reports():
    layer = layer_of()
    nbytes = sum(t.nbytes for t in layer.buffers())
    assert f"frozen FP8 codes, {nbytes} bytes" in repr(layer)
    assert fp8moe.torch.model_report(layer).endswith(f"fp8_flow, frozen FP8 codes, {nbytes} bytes")
    held = fp8moe.torch.memory(layer, 64)[""]
    assert (held.copies, held.copies_saved) == (0, 0)
    both = fp8moe.memory(64, H, F, E, K, gradients=("dx", "dprobs"), weight_copies="rowwise")
    assert (held.forward, held.backward, held.results) == (both.forward, both.backward, both.results)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_distributed_wrappers():
    """`fully_shard` leaves the buffers whole, and DistributedDataParallel does not send them."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model, x = nn.Sequential(nn.Linear(H, H), layer_of()).bfloat16(), tokens()
    model(x).sum().backward()
    wanted = x.grad, model[1].router.weight.grad
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x.grad = None
        ddp = DistributedDataParallel(copy.deepcopy(model))
        with pytest.raises(ValueError, match=r"broadcast_buffers: got True .*exclude_from_ddp"):
            ddp(x)
        DistributedDataParallel(copy.deepcopy(model), broadcast_buffers=False)(x)
        ddp = DistributedDataParallel(fp8moe.torch.exclude_from_ddp(copy.deepcopy(model)))
        assert ddp.modules_buffers == []
        ddp(x).sum().backward()
        assert torch.equal(x.grad, wanted[0])
        sharded = fully_shard(copy.deepcopy(model))
        x.grad = None
        sharded(x).sum().backward()
        assert torch.equal(x.grad, wanted[0])
        assert torch.equal(sharded[1].router.weight.grad.full_tensor(), wanted[1])
        state = get_model_state_dict(sharded)
        other = fully_shard(nn.Sequential(nn.Linear(H, H), layer_of()).bfloat16())
        set_model_state_dict(other, state)
        assert all(map(torch.equal, bytes_of(other[1]), bytes_of(model[1])))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("recompute", [None, "moe_expert"])
def test_adapters_of_a_layer(device, recompute):
    """Gradients against float64 with the sums that the layer never forms; then training, of the adapters
    alone, after which the codes have their bytes."""
    projections, rank, alpha = published(device), 5, 8.0
    layer = layer_of(projections, recompute=recompute).add_lora(rank, alpha=alpha)
    layer.router.requires_grad_(False)
    adapters = [p for p in layer.parameters() if p.requires_grad]
    names = [f"lora.{w}.lora_{m}" for w in ("w13", "w2") for m in "AB"]
    assert [n for n, p in layer.named_parameters() if p.requires_grad] == names
    assert [tuple(p.shape) for p in adapters] == [(E, rank, H), (E, 2 * F, rank), (E, rank, F), (E, H, rank)]
    before, x = bytes_of(layer), tokens(device)
    _, ids, probs = layer.route(x.detach())
    assert torch.equal(layer(x, ids, probs), layer(x, ids, probs))
    near(layer(x, ids, probs), in_float64(projections, x.double(), ids, probs.double()))  # B is zero
    with torch.no_grad():
        for p in adapters[1::2]:
            p.normal_(std=0.02)
    probs = probs.detach().requires_grad_()
    y = layer(x, ids, probs)
    dy = torch.randn_like(y)
    y.backward(dy)
    leaves = x, probs, *adapters
    wide = [t.detach().double().requires_grad_() for t in leaves]
    of13, of2 = (alpha / rank * b @ a for a, b in (wide[2:4], wide[4:6]))
    sums = [values(*p) for p in projections]
    wanted = in_float64_of(
        [sums[0] + of13[:, :F], sums[1] + of13[:, F:], sums[2] + of2], wide[0], ids, wide[1]
    )
    wanted.backward(dy.double())
    near(y, wanted)
    for leaf, right in zip(leaves, wide, strict=True):
        near(leaf.grad, right.grad)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    target = torch.randn(T, H, device=device) * y.detach().float().std()
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        losses.append((layer(x.detach(), ids, probs.detach()).float() - target).square().mean())
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    layer.reset_parameters()
    assert all(p.any() == (i % 2 == 0) for i, p in enumerate(adapters))  # B is zero again
    assert all(map(torch.equal, bytes_of(layer), before))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's, at a graph break
def test_adapters_are_saved_alone_and_refused_by_name():
    layer, x = layer_of().add_lora(4, alpha=2, use_rslora=True, dropout=0.5, targets=["w2"]), tokens()
    assert layer.lora["w2"].scaling == 1.0  # alpha / sqrt(r)
    with torch.no_grad():
        layer.lora["w2"].lora_B.normal_()
    assert not torch.equal(layer(x), layer(x))  # dropout
    layer.eval()
    saved = {n: t for n, t in layer.state_dict().items() if ".lora_" in n}
    other = layer_of().add_lora(4, alpha=2, use_rslora=True, targets=["w2"]).eval()
    other.load_state_dict(layer.state_dict() | {n: torch.zeros_like(t) for n, t in saved.items()})
    assert not torch.equal(other(x), layer(x))
    other.load_state_dict(saved, strict=False)
    for same in (other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(same(x), layer(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(x), other(x))
    assert torch.equal(torch.compile(layer, backend="aot_eager")(x), layer(x))
    with pytest.raises(ValueError, match="add_lora: got a layer with adapters"):
        layer.add_lora(4)
    for given, error, words in (
        ({"rank": 0}, ValueError, "rank: got 0"),
        ({"rank": 4, "targets": ["w1"]}, ValueError, "targets: got 'w1'"),
        ({"rank": 4, "targets": []}, ValueError, "targets: got none"),
        ({"rank": 4, "targets": "w13"}, TypeError, "targets: got 'w13'; wanted a sequence of names"),
        ({"rank": 4, "dropout": 1.0}, ValueError, "dropout: got 1.0"),
        ({"rank": 4, "dtype": torch.uint8}, TypeError, "dtype: got torch.uint8"),
    ):
        bare = layer_of()
        with pytest.raises(error, match=words):
            bare.add_lora(**given)
        assert bare.lora is None
    evaluated = layer_of().eval().add_lora(4, dropout=0.5)
    with torch.no_grad():
        evaluated.lora["w13"].lora_B.normal_()
    assert torch.equal(evaluated(x), evaluated(x))  # without dropout
    with pytest.raises(NotImplementedError, match="save: got 'fp8' with lora"):
        layer_of(save="fp8").add_lora(4)
    with pytest.raises(
        NotImplementedError, match=r"add_lora: got a layer of floating-point .*from_quantized"
    ):
        FP8FlowMoE(H, F, E, K).add_lora(4)
    with pytest.raises(NotImplementedError, match=r"model: got a layer with adapters"):
        fp8moe.torch.memory(layer, 64)
    layer.collect_stats = True
    with pytest.raises(NotImplementedError, match="collect_stats: got True with adapters"):
        layer(x)


@pytest.mark.gpu
def test_in_a_cuda_graph():
    """A forward and a backward, replayed with other rows."""
    layer, x, dy = (
        layer_of(device="cuda"),
        tokens("cuda"),
        torch.randn(T, H, dtype=torch.bfloat16, device="cuda"),
    )
    ids, probs = torch.randint(E, (T, K), device="cuda"), torch.rand(T, K, device="cuda")

    def step():
        y = layer(x, ids, probs)
        return y, *torch.autograd.grad(y, x, dy)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    assert all(map(torch.equal, captured, step()))
