"""Low-rank adapters on the experts, against float64 with the weights as they are multiplied."""

import re
from dataclasses import replace

import numpy as np
import pytest
from backends import on_cuda
from cases import BF16, FP8_NOISE, generator, relative

torch = pytest.importorskip("torch")

from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import fp8moe.torch  # noqa: E402
from fp8moe.activation import SWIGLU  # noqa: E402
from fp8moe.adapters.torch import lora as adapter  # noqa: E402
from fp8moe.adapters.torch.library import OPERATORS  # noqa: E402
from fp8moe.layer import lora as core  # noqa: E402
from fp8moe.layer.options import LayerOptions  # noqa: E402
from fp8moe.torch import LoRA, moe_experts  # noqa: E402

EXPERTS, TOKENS, K = 5, 48, 2
#: errors in norm: of float64, sums of at most 256 values; of bfloat16, 2^-8 for each of fewer than eight
#: roundings in a row
FLOAT64, BFLOAT16 = 256 * 2.0**-52, 8 * 2.0**-8


def problem(
    dtype,
    rank,
    hidden=128,
    ffn=128,
):
    """x, w13, w2, ids, probs, and A and B of w13 and w2, random. The last expert has no tokens, and one
    choice is no expert."""

    def normal(*shape, dtype=torch.float64 if dtype == torch.float64 else torch.float32):
        return (torch.randn(*shape) / shape[-1] ** 0.5).to(dtype)

    x = torch.randn(TOKENS, hidden).to(dtype).requires_grad_()
    w13, w2 = normal(EXPERTS, 2 * ffn, hidden, dtype=dtype), normal(EXPERTS, hidden, ffn, dtype=dtype)
    ids = torch.rand(TOKENS, EXPERTS - 1).topk(K).indices
    ids[3, 1] = -1
    probs = torch.rand(TOKENS, K)
    probs = probs.double() if dtype == torch.float64 else probs
    matrices = [normal(EXPERTS, rank, hidden), normal(EXPERTS, 2 * ffn, rank)]
    matrices += [normal(EXPERTS, rank, ffn), normal(EXPERTS, hidden, rank)]
    return x, w13, w2, ids, probs.requires_grad_(), [t.requires_grad_() for t in matrices]


def expected(x, w13, w2, ids, probs, matrices, scaling, masks=None, bias13=None):
    """The layer, an expert at a time. masks: what x, and the rows of each expert, are multiplied by for the
    adapters."""
    (a13, b13, a2, b2), (of_x, of_rows) = matrices, masks or (torch.ones_like(x), None)
    y, ffn, first = torch.zeros_like(x), w2.shape[2], 0
    for e in range(EXPERTS):
        tokens, places = (ids == e).nonzero(as_tuple=True)
        rows = x[tokens]
        h = rows @ w13[e].T + scaling[0] * (rows * of_x[tokens] @ a13[e].T @ b13[e].T)
        h = h if bias13 is None else h + bias13[e]
        act = torch.nn.functional.silu(h[:, :ffn]) * h[:, ffn:] * probs[tokens, places][:, None]
        seen = act if of_rows is None else act * of_rows[first : first + len(tokens)]
        y = y.index_add(0, tokens, act @ w2[e].T + scaling[1] * (seen @ a2[e].T @ b2[e].T))
        first += len(tokens)
    return y


def leaves_of(problem):
    x, _, _, _, probs, matrices = problem
    return [x, probs, *matrices]


def in_float64(problem, codes=None):
    x, w13, w2, ids, probs, matrices = problem
    if codes is not None:
        w13, w2 = (fp8moe.torch.dequantize(q.rowwise) for q in codes)
    double = [t.detach().double().requires_grad_() for t in (x, probs, *matrices)]
    return double[0], w13.double(), w2.double(), ids, double[1], double[2:]


def error(got, wanted):
    assert got.isfinite().all()
    return ((got.double() - wanted).norm() / wanted.norm()).item()


def assert_near(y, problem, y_wanted, wanted, bound):
    """Norm-wise, for y and for each gradient."""
    dy = torch.randn_like(y)
    y.backward(dy)
    y_wanted.backward(dy.double())
    assert error(y, y_wanted) < bound
    for got, right in zip(leaves_of(problem), leaves_of(wanted), strict=True):
        assert got.grad.dtype == got.dtype
        assert error(got.grad, right.grad) < bound
    for matrix in problem[5]:  # of the expert without tokens
        assert not matrix.grad[-1].any()


def adapters(matrices, scaling, **options):
    return LoRA(*matrices[:2], scaling[0], **options), LoRA(*matrices[2:], scaling[1], **options)


@pytest.mark.parametrize("rank", [4, 16, 24])
@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [
        ("bf16", torch.float64),
        ("bf16", torch.bfloat16),
        ("fp8_flow", torch.bfloat16),
        ("fp8_blockwise", torch.bfloat16),
    ],
)
def test_gradients(recipe, dtype, rank):
    given, scaling = problem(dtype, rank), (0.75, 1.25)
    x, w13, w2, ids, probs, matrices = given
    codes = None if recipe == "bf16" else fp8moe.torch.quantize_fp8_weights(w13, w2)
    before = [t.clone() for t in (w13, w2)]
    held = [] if codes is None else [q.clone() for c in codes for q in (c.rowwise.data, c.columnwise.data)]
    y = moe_experts(
        x, w13, w2, ids, probs, recipe=recipe, fp8_weights=codes, lora=adapters(matrices, scaling)
    )
    wanted = in_float64(given, codes)
    bound = FLOAT64 if dtype == torch.float64 else BFLOAT16 if codes is None else FP8_NOISE
    assert_near(y, given, expected(*wanted, scaling), wanted, bound)
    assert all(torch.equal(a, b) for a, b in zip((w13, w2), before, strict=True))
    assert w13.grad is None
    assert w2.grad is None
    if codes is not None:
        now = [q for c in codes for q in (c.rowwise.data, c.columnwise.data)]
        assert all(torch.equal(a, b) for a, b in zip(now, held, strict=True))


@pytest.mark.parametrize("form", ["padded", "bias", "codes", "rowwise", "pair"])
def test_forms_of_the_weights(form):
    """F that is padded to 128 columns, the first GEMM's bias, weights that are codes alone, copies of one
    orientation, and (w1, w3)."""
    ffn = 72 if form in ("padded", "pair", "codes") else 128
    given, scaling = problem(torch.bfloat16, 8, ffn=ffn), (0.5, 0.5)
    x, w13, w2, ids, probs, matrices = given
    codes, bias13 = fp8moe.torch.quantize_fp8_weights(w13, w2), None
    options, wanted = {}, in_float64(given)
    dequantized = [fp8moe.torch.dequantize(q.rowwise).double() for q in codes]
    width = dequantized[0].shape[1] // 2
    wanted = list(wanted)
    wanted[1] = torch.cat([dequantized[0][:, :ffn], dequantized[0][:, width : width + ffn]], dim=1)
    wanted[2] = dequantized[1][:, :, :ffn]
    weights = (w13, w2)
    if form == "bias":
        bias13 = torch.randn(EXPERTS, 2 * ffn)
        options["bias13"] = bias13
    elif form == "codes":
        weights = codes
    elif form == "rowwise":
        options["weight_copies"] = "rowwise"
    elif form == "pair":
        weights = ((w13[:, :ffn].contiguous(), w13[:, ffn:].contiguous()), w2)
    y = moe_experts(x, *weights, ids, probs, lora=adapters(matrices, scaling), **options)
    right = expected(*wanted, scaling, bias13=None if bias13 is None else bias13.double())
    assert_near(y, given, right, wanted, FP8_NOISE)


@pytest.mark.parametrize(("recipe", "dtype"), [("bf16", torch.float64), ("fp8_flow", torch.bfloat16)])
def test_without_a_kernel_that_adds(recipe, dtype, monkeypatch):
    """As on GPUs other than Hopper."""
    given = problem(dtype, 8)
    x, w13, w2, ids, probs, matrices = given
    codes = None if recipe == "bf16" else fp8moe.torch.quantize_fp8_weights(w13, w2)
    monkeypatch.setattr(adapter, "_adds", lambda *_: False)
    lora = adapters(matrices, (1.0, 1.0))
    y = moe_experts(x, w13, w2, ids, probs, recipe=recipe, fp8_weights=codes, lora=lora)
    wanted = in_float64(given, codes)
    assert_near(y, given, expected(*wanted, (1.0, 1.0)), wanted, FLOAT64 if codes is None else FP8_NOISE)


@pytest.mark.parametrize("place", [0, 1])
def test_one_adapter_alone(place):
    given = problem(torch.float64, 4)
    x, w13, w2, ids, probs, matrices = given
    lora = list(adapters(matrices, (1.0, 1.0)))
    lora[1 - place] = None
    y = moe_experts(x, w13, w2, ids, probs, recipe="bf16", lora=tuple(lora))
    wanted, scaling = in_float64(given), [0.0, 0.0]
    scaling[place] = 1.0
    right = expected(*wanted, scaling)
    dy = torch.randn_like(y)
    y.backward(dy)
    right.backward(dy)
    assert error(y, right) < FLOAT64
    for i, (got, of_it) in enumerate(zip(leaves_of(given), leaves_of(wanted), strict=True)):
        if i in (2 + 2 * (1 - place), 3 + 2 * (1 - place)):
            assert got.grad is None
        else:
            assert error(got.grad, of_it.grad) < FLOAT64


def test_dropout_is_torchs():
    """Of x before the permutation, then of the rows of all experts."""
    given, p = problem(torch.float64, 8), 0.4
    x, w13, w2, ids, probs, matrices = given
    ids[3, 1] = (ids[3, 0] + 1) % (EXPERTS - 1)  # as many rows as choices
    lora = adapters(matrices, (1.0, 1.0), dropout=p)
    torch.manual_seed(17)
    y = moe_experts(x, w13, w2, ids, probs, recipe="bf16", lora=lora)
    torch.manual_seed(17)
    ones = torch.ones(TOKENS, 128, dtype=x.dtype), torch.ones(TOKENS * K, 128, dtype=x.dtype)
    masks = [torch.nn.functional.dropout(t, p) for t in ones]
    wanted = in_float64(given)
    assert_near(y, given, expected(*wanted, (1.0, 1.0), masks), wanted, FLOAT64)
    torch.manual_seed(18)
    assert not torch.equal(moe_experts(x, w13, w2, ids, probs, recipe="bf16", lora=lora), y)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputed(dropout):
    """Bitwise the same, without saved rows but x; what has changed since the forward is noticed."""
    given = problem(torch.bfloat16, 8)
    x, w13, w2, ids, probs, matrices = given
    codes, found, held = fp8moe.torch.quantize_fp8_weights(w13, w2), [], []
    dy = torch.randn(x.shape).bfloat16()
    for recompute in (None, "moe_expert"):
        rows = []

        def pack(t, rows=rows):
            rows.append(t.shape[0] if t.dtype == torch.bfloat16 and t.ndim == 2 else 0)
            return t

        torch.manual_seed(3)
        options = {"recompute": recompute, "lora": adapters(matrices, (1.0, 1.0), dropout=dropout)}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = moe_experts(x, w13, w2, ids, probs, fp8_weights=codes, **options)
        found.append([y, *torch.autograd.grad(y, leaves_of(given), dy)])
        held.append(max(rows))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert held[0] > TOKENS  # permuted rows
    assert held[1] == TOKENS
    y = moe_experts(x, w13, w2, ids, probs, fp8_weights=codes, **options)
    with torch.no_grad():
        matrices[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)
    y = moe_experts(x, w13, w2, ids, probs, fp8_weights=codes, **options)
    fp8moe.torch.quantize_fp8_weights(2 * w13, w2, out=codes)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


def test_a_part_of_the_gradients():
    """Zero-bubble schedules ask for the inputs' gradients first, then for the weights'."""
    given = problem(torch.bfloat16, 8)
    x, w13, w2, ids, probs, matrices = given
    y, leaves = moe_experts(x, w13, w2, ids, probs, lora=adapters(matrices, (1.0, 1.0))), leaves_of(given)
    dy = torch.randn_like(y)
    whole = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    parts = torch.autograd.grad(y, leaves[:2], dy, retain_graph=True)
    parts += torch.autograd.grad(y, leaves[2:], dy, retain_graph=True)
    parts += torch.autograd.grad(y, leaves[5:], dy, retain_graph=True)
    for part, right in zip(parts, (*whole, whole[5]), strict=True):
        assert torch.equal(part, right)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(y, leaves, dy, create_graph=True)


def test_the_layout_of_peft():
    experts, rank, hidden, out = 3, 4, 6, 10
    lora_a, lora_b = torch.randn(rank * experts, hidden), torch.randn(out, rank * experts)
    lora = LoRA.from_peft(lora_a, lora_b, experts)
    # get_delta_weight of peft.tuners.lora.layer.ParamWrapper
    a, b = lora_a.reshape(experts, -1, hidden), lora_b.reshape(out, -1, experts)
    torch.testing.assert_close(lora.b @ lora.a, torch.einsum("o r e, e r i -> e o i", b, a))


def test_saved_codes_that_were_overwritten_are_noticed():
    x, w13, w2, ids, probs, matrices = problem(torch.bfloat16, 8)
    codes = fp8moe.torch.quantize_fp8_weights(w13, w2)
    y = moe_experts(x, w13, w2, ids, probs, fp8_weights=codes, lora=adapters(matrices, (1.0, 1.0)))
    fp8moe.torch.quantize_fp8_weights(2 * w13, w2, out=codes)
    with pytest.raises(RuntimeError, match="inplace"):
        y.sum().backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # by Dynamo at a break
def test_a_compiled_model_has_a_graph_break_and_the_same_result():
    x, w13, w2, ids, probs, matrices = problem(torch.float64, 4)
    lora = adapters(matrices, (1.0, 1.0))

    def layer(x):
        return moe_experts(x * 2, w13, w2, ids, probs, recipe="bf16", lora=lora) * 3

    torch.testing.assert_close(torch.compile(layer, backend="eager")(x), layer(x))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch reads it
def test_compiled_autograd_runs_the_backward_as_it_is():
    given = problem(torch.float64, 4)
    x, w13, w2, ids, probs, matrices = given
    y = moe_experts(x, w13, w2, ids, probs, recipe="bf16", lora=adapters(matrices, (1.0, 1.0)))
    dy = torch.randn_like(x)
    wanted = torch.autograd.grad(y, leaves_of(given), dy, retain_graph=True)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        y.backward(dy)
    for leaf, grad in zip(leaves_of(given), wanted, strict=True):
        assert torch.equal(leaf.grad, grad)


def test_recorded_calls_are_refused():
    """A graph of make_fx would have the results as constants."""
    x, w13, w2, ids, probs, matrices = problem(torch.float64, 4)

    def layer(x):
        lora = adapters([t.detach() for t in matrices], (1.0, 1.0))
        return moe_experts(x, w13, w2, ids, probs.detach(), recipe="bf16", lora=lora)

    for mode in ("real", "fake"):
        with pytest.raises(NotImplementedError, match="lora: got a call in make_fx"):
            make_fx(layer, tracing_mode=mode, _allow_non_fake_inputs=True)(x.detach())


@pytest.mark.parametrize("recompute", [None, "moe_expert"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_flow"])
def test_flops_are_counted(recipe, recompute):
    """Of F without padding, and of ranks without theirs."""
    hidden, ffn, rank, rows = 128, 72, 5, TOKENS * K
    given = problem(torch.bfloat16, rank, hidden, ffn)
    x, w13, w2, ids, probs, matrices = given
    of_w, of_a, of_b = 3 * hidden * ffn, rank * (hidden + ffn), rank * (2 * ffn + hidden)
    counts = []
    for parts in (leaves_of(given), [matrices[3]], [x]):
        with FlopCounterMode(display=False) as counter:
            lora = adapters(matrices, (1.0, 1.0))
            y = moe_experts(x, w13, w2, ids, probs, recipe=recipe, recompute=recompute, lora=lora)
            counts.append(counter.get_total_flops())
            torch.autograd.grad(y, parts, torch.randn_like(y))
            counts.append(counter.get_total_flops() - counts[-1])
    forward = of_w + of_a + of_b
    # the first half, and z @ a.T of the second
    again = 2 * hidden * ffn + rank * (hidden + 2 * ffn + ffn) if recompute else 0
    backward = of_w + 2 * of_a + 2 * of_b, hidden * rank, of_w + of_a + of_b
    wanted = [n for of_it in backward for n in (forward, of_it + again)]
    assert counts == [2 * rows * n for n in wanted]


def test_the_operator_for_counters():
    torch.library.opcheck(OPERATORS["lora_gemms"].op, (torch.zeros(3), 5))


def test_matrices_that_begin_anywhere():
    """In a flat buffer of all parameters: the kernels read multiples of 16 bytes."""
    flat = torch.randn(1 + 4 * 16 * 8).bfloat16()
    a = flat[1:].view(4, 16, 8)
    read = adapter._read_by_gemms(a, torch.randn(4, 8, 16), 1.0, torch.bfloat16)
    assert torch.equal(read[0], a)
    assert all(t.data_ptr() % 16 == 0 for t in read)


@pytest.mark.parametrize(
    ("change", "error_type", "message"),
    [
        ({"lora": LoRA(torch.ones(5, 4, 8), torch.ones(5, 8, 4))}, TypeError, "lora: got LoRA; wanted a"),
        ({"save": "fp8"}, NotImplementedError, "save: got 'fp8' with lora"),
        ({"comm": object()}, NotImplementedError, "comm: got a object with lora"),
        ({"w13": True}, NotImplementedError, "w13: got a tensor that requires grad with lora"),
        ({"place": 0}, ValueError, "lora of w13: a: got shape [5, 4, 64]; wanted [5, 4, 128]"),
        ({"place": 3}, ValueError, "lora of w2: b: got shape [5, 64, 4]; wanted [5, 128, 4]"),
        ({"codes": True, "place": 2}, ValueError, "lora: got b of w13 [5, 256, 4] and a of w2 [5, 4, 64]"),
    ],
)
def test_refusals(change, error_type, message):
    x, w13, w2, ids, probs, matrices = problem(torch.bfloat16, 4)
    if "place" in change:
        place = change.pop("place")
        matrix = matrices[place].detach()
        matrices[place] = matrix[..., :64] if place in (0, 2) else matrix[:, :64]
    w13.requires_grad_(bool(change.pop("w13", False)))
    if change.pop("codes", False):  # whose F may be any that is padded to theirs
        w13, w2 = fp8moe.torch.quantize_fp8_weights(w13, w2)
    options = {"lora": adapters(matrices, (1.0, 1.0)), **change}
    with pytest.raises(error_type, match=re.escape(message)):
        moe_experts(x, w13, w2, ids, probs, **options)


@pytest.mark.parametrize(
    ("change", "error_type", "message"),
    [
        ({"b": torch.ones(2, 6, 4)}, ValueError, "b: got shape [2, 6, 4]; wanted [2, out, 3]"),
        ({"a": torch.ones(2, 0, 4), "b": torch.ones(2, 6, 0)}, ValueError, "a: got shape [2, 0, 4]"),
        ({"a": torch.ones(2, 3, 4, dtype=torch.int64)}, TypeError, "a: got"),
        ({"dropout": 1.0}, ValueError, "dropout: got 1.0"),
        ({"scaling": "2"}, TypeError, "scaling: got '2'"),
        ({"scaling": float("nan")}, ValueError, "scaling: got nan; wanted a finite number"),
    ],
)
def test_refused_adapters(change, error_type, message):
    with pytest.raises(error_type, match=re.escape(message)):
        replace(LoRA(torch.ones(2, 3, 4), torch.ones(2, 6, 3)), **change)


@on_cuda
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_flow"])
def test_kernels_agree_with_the_reference(backend, recipe, adds):
    """Both halves, each called twice: recorded and replayed. The plan, which is no kernel in C++, and the
    first half's forward are the reference's."""
    backend.skip_without("wgmma")
    rng, experts, tokens, width, rank = generator(), 3, 20, 128, 16
    options = LayerOptions(SWIGLU, recipe)

    def normal(*shape):
        return (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(BF16)

    x, dy = normal(tokens, width), normal(tokens, width)
    a, b, b2 = normal(experts, rank, width), normal(experts, 2 * width, rank), normal(experts, width, rank)
    w13, w2 = normal(experts, 2 * width, width), normal(experts, width, width)
    if recipe != "bf16":
        w13, w2 = (fp8moe.quantize_weights(w) for w in (w13, w2))
    ids = np.argsort(rng.random((tokens, experts)))[:, :2].astype(np.int32)
    probs = rng.random((tokens, 2)).astype(np.float32)
    plan, h, _, row_probs, u = core.first_forward(x, None, w13, w2, None, ids, probs, a, b, options, adds)
    act, dh = fp8moe.swiglu(h, row_probs), normal(*h.shape)

    def steps(x, w13, w2, a, b, b2, dy, plan, row_probs, u, act, dh):
        y, low, u2 = core.second_forward(act, act, w2, a, b2, plan, options, adds)
        wanted = "dact", "dx", "dprobs", "dz", "da", "db"
        second = core.second_backward(dy, act, u2, w2, a, b2, plan, options, wanted, adds)
        first = core.first_backward(dh, row_probs, x, u, w13, a, b, plan, options, wanted, adds)
        return y, low, *second, *first

    arguments = x, w13, w2, a, b, b2, dy, plan, row_probs, u, act, dh
    results = steps(*arguments)
    on_device = [backend.upload(t) for t in arguments]
    for _ in range(2):
        for actual, wanted in zip(backend.download(steps(*on_device)), results, strict=True):
            assert (actual is None) == (wanted is None)
            if wanted is not None:
                assert relative(actual, wanted.astype(np.float64)) <= BFLOAT16


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["bf16", "fp8_flow"])
@pytest.mark.parametrize("rank", [4, 16, 24, 256])
def test_gradients_on_a_gpu(recipe, rank):
    given, scaling = problem(torch.bfloat16, rank, hidden=256, ffn=256), (0.75, 1.25)
    x, w13, w2, ids, probs, matrices = given
    codes = None if recipe == "bf16" else fp8moe.torch.quantize_fp8_weights(w13, w2)
    wanted = in_float64(given, codes)
    cuda = [t.detach().cuda().requires_grad_(t.requires_grad) for t in (x, w13, w2, ids, probs)]
    on_gpu = [t.detach().cuda().requires_grad_() for t in matrices]
    y = moe_experts(*cuda, recipe=recipe, lora=adapters(on_gpu, scaling))
    dy = torch.randn_like(y)
    y.backward(dy)
    right = expected(*wanted, scaling)
    right.backward(dy.cpu().double())
    bound = BFLOAT16 if codes is None else FP8_NOISE
    assert error(y.cpu(), right) < bound
    for got, of_it in zip([cuda[0], cuda[4], *on_gpu], leaves_of(wanted), strict=True):
        assert error(got.grad.cpu(), of_it.grad) < bound
