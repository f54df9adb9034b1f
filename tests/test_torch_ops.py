"""The torch operators: opcheck, gradcheck, torch.compile, and bitwise equality with the library."""

import numpy as np
import pytest
import torch
from cases import same_bits
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch_rows import there_and_back, torch_case

import fp8moe
import fp8moe.torch
from fp8moe import Activation
from fp8moe.adapters.torch import ops as torch_ops
from fp8moe.adapters.torch.library import OPERATORS, plan_arguments

E, K, T, H = 3, 2, 7, 8


def routing(seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-1, E, (T, K), generator=g, dtype=torch.int32)


def plans():
    mask = torch.zeros(T, E, dtype=torch.bool)
    mask.scatter_(1, routing().clamp(min=0).long(), True)
    return [
        torch_ops.plan_topk(routing(), E, align_size=4),
        torch_ops.plan_routing_map(mask, topk=K, align_size=4),
        torch_ops.plan_routing_map(mask),
    ]


def doubles(*shape, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("which", range(3))
def test_gradcheck_permute_and_unpermute(which):
    plan = plans()[which]
    x, probs = doubles(T, H), doubles(T, plan.prob_columns, seed=2)

    def there(x, probs):
        moved = torch_ops.permute(x, plan, probs)
        return moved.data, moved.probs

    assert gradcheck(there, (x, probs))
    rows = doubles(plan.num_out_tokens, H, seed=3)
    assert gradcheck(lambda r, p: torch_ops.unpermute(r, plan, p), (rows, probs))
    assert gradcheck(lambda r: torch_ops.unpermute(r, plan), (rows,))


def test_gradcheck_chunks_padding_and_swiglu():
    sizes, order = torch.tensor([2, 0, 5]), torch.tensor([2, 0, 1])
    x, probs = doubles(7, H), doubles(7, seed=2)

    def sort(x, probs):
        got = torch_ops.sort_chunks(x, sizes, order, probs, align_size=4)
        return got.data, got.probs

    assert gradcheck(sort, (x, probs))
    counts = torch.tensor([3, 0, 4], dtype=torch.int32)
    assert gradcheck(lambda x: torch_ops.pad(x, counts, 4), (x,))
    assert gradcheck(lambda x: torch_ops.unpad(x, counts, 4, num_out_tokens=7), (doubles(8, H),))
    h = doubles(5, 2 * H)
    for activation in (
        Activation(alpha=1.7, linear_offset=1.0),
        Activation("geglu"),
        Activation("geglu_tanh"),
    ):
        assert gradcheck(lambda h, p, a=activation: torch_ops.swiglu(h, p, activation=a), (h, doubles(5)))
    assert gradcheck(lambda h: torch_ops.swiglu(h), (h,))


@pytest.mark.filterwarnings("ignore:Input #")
def test_gradcheck_in_float32():
    plan = plans()[0]
    x = doubles(T, H).detach().float().requires_grad_()
    probs = doubles(T, K, seed=2).detach().float().requires_grad_()
    # central differences in float32: eps 1e-2 leaves 2^-24 / 1e-2 = 6e-6 of values up to 4, sums of 2
    assert gradcheck(
        lambda x, p: torch_ops.unpermute(torch_ops.permute(x, plan).data, plan, p),
        (x, probs),
        eps=1e-2,
        atol=1e-3,
        rtol=1e-3,
    )


def test_gradcheck_of_the_layer():
    def layer(x, w13, w2, probs):
        return fp8moe.torch.moe_experts(x, w13, w2, routing(), probs, recipe="bf16")

    inputs = (doubles(T, 4), doubles(E, 6, 4, seed=2), doubles(E, 4, 3, seed=3), doubles(T, K, seed=4))
    assert gradcheck(layer, inputs)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_blockwise", "fp8_flow"])
def test_the_layer_has_the_librarys_gradients(recipe):
    g = torch.Generator().manual_seed(0)
    x, w13, w2, dy = (
        torch.randn(*shape, generator=g).to(torch.bfloat16).requires_grad_()
        for shape in ((T, 128), (E, 256, 128), (E, 128, 128), (T, 128))
    )
    probs = torch.rand(T, K, generator=g).requires_grad_()
    y = fp8moe.torch.moe_experts(x, w13, w2, routing(), probs, recipe=recipe, recompute="moe_expert")
    y.backward(dy)
    plain = [t.detach() for t in (x, w13, w2)]
    wanted, saved = fp8moe.moe_forward(*plain, routing(), probs.detach(), recipe=recipe)
    grads = fp8moe.moe_backward(saved, dy.detach())
    # "bf16" without a GPU: torch's product here, NumPy's in the library. Both sum in float32, in orders that
    # depend on the processor. dprobs are two nested sums of 128 float32 products: 256 * 2^-24 of the terms'
    # magnitudes, which sum up to 16 times the largest result (128 of random sign: 128 / sqrt(128) = 11).
    # The weights' gradients are rounded to bfloat16 after the sum in every recipe.
    assert torch.equal(y, wanted)
    assert torch.equal(x.grad, grads.dx)
    bound = 2.0**-12 * float(grads.dprobs.abs().max()) if recipe == "bf16" else 0
    torch.testing.assert_close(probs.grad, grads.dprobs, rtol=0, atol=bound)
    for grad, wanted in ((w13.grad, grads.dw13), (w2.grad, grads.dw2)):
        bound = 2.0**-20 * float(wanted.abs().max())
        torch.testing.assert_close(grad, wanted.bfloat16(), rtol=2.0**-7, atol=bound)


def plain(*shape):
    return doubles(*shape).detach()


def opcheck_cases():
    plan, by_mask, _ = plans()
    flat, flat_mask = plan_arguments(plan), plan_arguments(by_mask)
    x, rows = plain(T, H), plain(plan.num_out_tokens, H)
    probs, moved_probs = plain(T, K), plain(plan.num_out_tokens)
    sizes, order = torch.tensor([2, 5]), torch.tensor([1, 0])
    counts = torch.tensor([3, 4], dtype=torch.int32)
    q = torch_ops.quantize(torch.randn(6, 200))
    codes = (q.data, q.scales, "e4m3", [1, 128], "compact", False)
    small = torch_ops.quantize(torch.randn(6, 256), block=(1, 32))
    mx = (small.data, small.scales, "e4m3", [1, 32], "compact", False)
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32)
    wide = torch_ops.quantize(torch.randn(T, 256))
    experts = torch_ops.quantize(torch.randn(E, 3, 256), block=(128, 128))
    gemm_codes = (
        wide.data,
        wide.scales,
        *codes[2:],
        experts.data,
        experts.scales,
        "e4m3",
        [128, 128],
        *codes[4:],
    )
    h, dy = torch.randn(6, 256), torch.randn(6, 128)
    ops = torch.ops.fp8moe
    mask = torch.ones(T, E, dtype=torch.bool)
    w = fp8moe.quantize_weights(torch.randn(2, 130, 200)).columnwise
    return [
        (ops.plan_topk, (routing(), E, 4, None)),
        (ops.plan_topk, (routing(), E, 4, 9)),
        (ops.plan_routing_map, (mask, 4, 2, None)),
        (ops.plan_routing_map, (mask, 4, 0, None)),
        (ops.plan_routing_map, (mask, 1, None, 11)),
        (ops.plan_index_map, (torch.tensor([3, 0, -1, 2], dtype=torch.int32), 2, 4)),
        (ops.plan_row_map, (torch_ops.plan_routing_map(mask).row_id_map.clone(), None, 11)),
        (ops.permute, (x, *flat, probs, True, False, "compact")),
        (ops.permute, (x, *flat, None, True, False, "compact")),
        (ops.permute, (x, *flat_mask, plain(T, E), True, False, "compact")),
        (ops.permute_backward, (rows, *flat, moved_probs)),
        (ops.permute_backward, (rows, *flat, None)),
        (ops.unpermute, (rows, *flat, probs)),
        (ops.unpermute, (rows, *flat, None)),
        (ops.unpermute_backward, (x, *flat, rows, probs)),
        (ops.unpermute_backward, (x, *flat, None, None)),
        (ops.sort_chunks, (plain(7, H), sizes, order, plain(7), 4, 1, None, False)),
        (ops.sort_chunks, (plain(9, H), sizes, order, None, 1, 2, None, True)),
        (ops.sort_chunks_backward, (torch.randn(9, H), sizes, order, None, 1, 1, 9, True)),
        (ops.sort_chunks_backward, (torch.randn(12, H), sizes, order, torch.rand(12), 4, 1, 7, False)),
        (ops.pad, (plain(7, H), counts, 4, 8)),
        (ops.unpad, (plain(8, H), counts, 4, 7)),
        (ops.add_biases, (torch.randn(T, H), torch.randn(E, H), routing(), torch.rand(T, K))),
        (ops.add_biases_backward, (torch.randn(T, H), torch.randn(E, H), routing(), torch.rand(T, K))),
        (ops.swiglu, (plain(5, 6), plain(5), "swiglu", None, 1.0, 0.0)),
        (ops.swiglu, (plain(5, 6), None, "swiglu", 7.0, 1.7, 1.0)),
        (ops.swiglu_backward, (torch.randn(5, 3), torch.randn(5, 6), torch.rand(5), "geglu", None, 1.0, 0.0)),
        (ops.quantize, (torch.randn(6, 200), "e4m3", [1, 128], True, 0.0, "compact", "up")),
        (ops.quantize, (torch.randn(6, 200), "e5m2", [32, 1], True, 0.0, "compact", "up")),
        (ops.quantize, (torch.randn(6, 200), "e4m3", [], True, 0.0, "compact", "up")),
        (ops.quantize, (torch.randn(2, 130, 200), "e4m3", [128, 128], True, 0.0, "compact", "up")),
        (ops.quantize, (torch.randn(6, 200), "e4m3", [1, 32], True, 0.0, "compact", "floor")),
        (ops.quantize, (torch.randn(6, 200), "e4m3", [1, 128], False, 1e-4, "gemm_ready", "up")),
        (ops.quantize_weights, ([torch.randn(2, 130, 200)], "e4m3", 1, None, None, False, True)),
        (ops.quantize_weights, ([torch.randn(2, 130, 200)] * 2, "e5m2", 1, 256, 256, True, False)),
        (ops.dequantize, (*codes, "bfloat16", None)),
        (ops.dequantize, (q.data, torch.ones(1), "e4m3", [], "compact", False, "float32", None)),
        (ops.dequantize, (w.data, w.scales, "e4m3", [128, 128], "compact", True, "float32", None)),
        (ops.transpose_codes, (w.data, w.scales, "e4m3", [128, 128], "compact", True)),
        (ops.scaling_aware_transpose, (*codes, None, "column", 1, "compact")),
        (ops.scaling_aware_transpose, (*codes, offsets, "tile", 1, "compact")),
        (ops.scaling_aware_transpose, (*codes, None, "block", 1, "compact")),
        (ops.permute_transpose, (wide.data, wide.scales, *codes[2:], *flat, "tile", "compact")),
        (ops.permute_gemm, (*gemm_codes, *flat, probs.detach(), None, None)),
        (ops.permute_gemm, (*gemm_codes, *flat, None, None, None)),
        (ops.quantize, (torch.randn(6, 200), "e4m3", [1, 32], True, 0.0, "blocked_128x4", "up")),
        (ops.scaling_aware_transpose, (*mx, offsets, "column", 1, "blocked_128x4")),
        (ops.swiglu_quantize, (h, None, "e4m3", [1, 128], "swiglu", None, 1.0, 0.0, False, None, 1)),
        (ops.swiglu_quantize, (h, torch.rand(6), "e5m2", [1, 32], "swiglu", 7.0, 1.7, 1.0, True, offsets, 1)),
        (
            ops.swiglu_quantize_backward,
            (dy, h, None, "e4m3", [1, 128], "swiglu", None, 1.0, 0.0, True, None, 1),
        ),
        (
            ops.swiglu_quantize_backward,
            (dy, h, torch.rand(6), "e4m3", [1, 32], "geglu_tanh", 7.0, 1.0, 0.0, False, offsets, 1),
        ),
        (ops.grouped_gemm, (plain(6, 5), plain(2, 3, 5), offsets, None, False, None, None)),
        (ops.grouped_gemm, (plain(6, 5), plain(2, 5, 3), offsets, torch.diff(offsets), True, None, None)),
        (
            ops.grouped_gemm_wgrad,
            (torch.randn(6, 3).half(), torch.randn(6, 5).half(), offsets, "float32", None, None, None),
        ),
        (
            ops.grouped_gemm_fp8,
            (*codes, *weight_codes(), offsets, torch.diff(offsets), None, None),
        ),
    ]


def weight_codes():
    w = torch_ops.quantize(torch.randn(2, 130, 200), block=(128, 128))
    return w.data, w.scales, w.fmt, [128, 128], w.layout, w.transposed


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("call", ["eager", "compiled"])
def test_grouped_gemm(transpose_w, call):
    """Compared with a loop over experts in float64; rows without an expert give zeros and get no gradient."""
    offsets = torch.tensor([1, 3, 3, 6], dtype=torch.int32)
    x, w = doubles(7, 5), doubles(3, 5, 4) if transpose_w else doubles(3, 4, 5)
    product = torch_ops.grouped_gemm
    if call == "compiled":
        product = torch.compile(product, backend="aot_eager", fullgraph=True)
    y = product(x, w, offsets, transpose_w=transpose_w)
    dy = torch.randn_like(y)
    actual = [y, *torch.autograd.grad(y, (x, w), dy)]
    per_expert = w if transpose_w else w.transpose(1, 2)
    parts = [x[lo:hi] @ m for lo, hi, m in zip(offsets, offsets[1:], per_expert, strict=False)]
    wanted = torch.cat([x.new_zeros(1, 4), *parts, x.new_zeros(1, 4)])
    for one, true in zip(actual, [wanted, *torch.autograd.grad(wanted, (x, w), dy)], strict=True):
        torch.testing.assert_close(one, true, rtol=1e-12, atol=1e-12)


def test_grouped_gemm_in_half_precision_and_strided():
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.randn(5, 6, dtype=dtype).t().requires_grad_()
        w = torch.randn(2, 5, 3, dtype=dtype).transpose(1, 2).requires_grad_()
        y = torch_ops.grouped_gemm(x, w, offsets)
        y.sum().backward()
        assert (y.dtype, x.grad.dtype, w.grad.dtype) == (dtype,) * 3
        wanted = torch.cat([x[:2].double() @ w[0].double().t(), x[2:].double() @ w[1].double().t()])
        # one rounding to 8 bits
        torch.testing.assert_close(y.double(), wanted, rtol=2.0**-8, atol=2.0**-8)


@pytest.mark.parametrize("call", ["eager", "compiled"])
def test_grouped_gemm_of_codes(call):
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32)
    q, w = (
        torch_ops.quantize(torch.randn(6, 200)),
        torch_ops.quantize(torch.randn(2, 130, 200), block=(128, 128)),
    )
    product = torch_ops.grouped_gemm
    if call == "compiled":
        product = torch.compile(product, backend="aot_eager", fullgraph=True)
    y = product(q, w, offsets)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, fp8moe.grouped_gemm(q, w, offsets))
    with pytest.raises(TypeError, match="w: got a Tensor; wanted a QuantTensor, as x is"):
        torch_ops.grouped_gemm(q, torch.randn(2, 130, 200, requires_grad=True), offsets)
    with pytest.raises((ValueError, torch._dynamo.exc.Unsupported), match="transpose_w: got True"):
        product(q, w, offsets, transpose_w=True)


def test_every_operator_is_among_the_cases():
    """Operators declared by other modules are tested with those modules."""
    names = "compiled", "compiled_over_ranks", "eager", "lora", "router"
    elsewhere = *(f"fp8moe.adapters.torch.{name}" for name in names), "fp8moe.ops.row_maps"
    tested = [o for o in OPERATORS.values() if o.function.__module__ not in elsewhere]
    declared = {o.op.overloadpacket for o in tested}
    assert declared == {o for o, _ in opcheck_cases()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("which", range(len(opcheck_cases())))
def test_opcheck(which):
    operator, arguments = opcheck_cases()[which]
    result = opcheck(operator.default, arguments)
    assert set(result.values()) == {"SUCCESS"}


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_forward_and_backward_is_one_graph():
    def step(x, ids, probs):
        plan = torch_ops.plan_topk(ids, E, align_size=4)
        moved = torch_ops.permute(x, plan, probs)
        q = torch_ops.quantize(moved.data)
        rows = torch_ops.dequantize(q) + moved.data
        return torch_ops.unpermute(rows * moved.probs[:, None], plan)

    x = torch.randn(T, H, requires_grad=True)
    probs = torch.rand(T, K, requires_grad=True)
    eager = step(x, routing(), probs)
    grads = torch.autograd.grad(eager.sum(), (x, probs))
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)(x, routing(), probs)
    assert torch.equal(compiled, eager)
    for a, b in zip(torch.autograd.grad(compiled.sum(), (x, probs)), grads, strict=True):
        assert torch.equal(a, b)


def test_quantised_rows_pass_through():
    x = torch.randn(T, 128)
    plan = plans()[0]
    q = torch_ops.quantize(x)
    moved = torch_ops.permute(q, plan).data
    assert same_bits(moved.data.numpy(), fp8moe.permute(fp8moe.quantize(x), plan).data.data.numpy())
    assert torch.equal(torch_ops.unpermute(moved, plan), fp8moe.unpermute(moved, plan))
    viewed = torch_ops.as_float8(q)
    assert viewed.data.dtype == torch.float8_e4m3fn
    assert viewed.data.data_ptr() == q.data.data_ptr()
    assert np.array_equal(torch_ops.dequantize(q).numpy(), fp8moe.dequantize(viewed).numpy())


def test_plan_with_the_exact_row_count():
    plan = torch_ops.plan_topk(routing(), E, align_size=4, num_out_tokens="exact")
    assert plan.num_out_tokens == int(plan.expert_offsets[-1])


def test_fp8_operations_compiled_give_the_same_bits():
    plan, h, dy, x = plans()[0], torch.randn(6, 256), torch.randn(6, 128), torch.randn(T, 256)
    offsets, probs = torch.tensor([0, 2, 6], dtype=torch.int32), torch.rand(6)
    x[1, 5] = torch.nan

    def work(h, dy, x):
        options = {"expert_offsets": offsets, "activation": Activation(clamp=7.0)}
        both = torch_ops.swiglu_quantize(h, probs, columnwise=True, **options)
        grad = torch_ops.swiglu_quantize_backward(dy, h, probs, **options)
        bare = torch_ops.swiglu_quantize(h, fmt="e5m2", block=(1, 32))
        transposed = torch_ops.permute_transpose(torch_ops.quantize(x), plan)
        blocks = torch_ops.scaling_aware_transpose(torch_ops.quantize(x), target="block")
        assert blocks.block == (128, 128)
        floor = torch_ops.quantize(x, block=(1, 32), scale_rounding="floor")
        spoilt = torch_ops.scaling_aware_transpose(torch_ops.quantize(x, block=(1, 32)))
        tensors = (both.rowwise, both.columnwise, grad.dh, bare, transposed, blocks, floor, spoilt)
        return [a for q in tensors for a in (q.data, q.scales)] + [grad.dprobs]

    compiled = torch.compile(work, fullgraph=True, backend="aot_eager")(h, dy, x)
    *_, of_floor, _, of_columns, _ = compiled  # scales, codes of another record, scales, dprobs
    assert (of_floor == 255).nonzero().tolist() == [[1, 0]]
    assert (of_columns == 255).nonzero().tolist() == [[0, column] for column in range(32)]
    for a, b in zip(work(h, dy, x), compiled, strict=True):
        assert torch.equal(a, b)


# ---------------------------------------------------------------- compiled


def compiled(function, **options):
    return torch.compile(function, backend="aot_eager", fullgraph=True, **options)


def work_of(tokens, experts):
    """A step that calls every compiled function, as a function of the sizes; all inputs are lists of
    tensors."""
    g = torch.Generator().manual_seed(100 * tokens + experts)
    ids = torch.randint(-1, experts, (tokens, K), generator=g, dtype=torch.int32)
    mask = torch.rand(tokens, experts, generator=g) < 0.5
    x, probs = torch.randn(tokens, 256, generator=g), torch.rand(tokens, experts, generator=g)
    sizes = torch.tensor([tokens, 0], dtype=torch.int32)
    return ids, mask, x, probs, sizes, torch.tensor([1, 0])


def step(ids, mask, x, probs, sizes, order):
    by_ids = torch_ops.plan_topk(ids, mask.shape[1], align_size=4)
    plans = [by_ids] + [torch_ops.plan_routing_map(mask, topk=k, align_size=4) for k in (0, 1, K)]
    plans.append(torch_ops.plan_routing_map(mask, num_out_tokens=5))
    results = []
    for plan in plans:
        columns = (
            probs[:, : plan.prob_columns].contiguous() if plan is not by_ids else probs[:, :1].repeat(1, K)
        )
        moved = torch_ops.permute(x, plan, columns)
        results += [plan.row_id_map, plan.expert_offsets, moved.data, moved.probs]
        results.append(torch_ops.unpermute(moved.data, plan, columns))
    chunks = torch_ops.sort_chunks(x, sizes, order, x[:, 0].contiguous(), align_size=4)
    results += [chunks.data, chunks.probs, chunks.group_offsets]
    padded = torch_ops.pad(x, sizes, 4)
    results += [padded, torch_ops.unpad(padded, sizes, 4, num_out_tokens=x.shape[0])]
    for block in ((1, 128), (128, 1), None):
        q = torch_ops.quantize(x, block=block)
        results += [q.data, q.scales, torch_ops.dequantize(q)]
    q = torch_ops.quantize(x)
    for t in (torch_ops.scaling_aware_transpose(q), torch_ops.permute_transpose(q, by_ids)):
        results += [t.data, t.scales]
    results.append(torch_ops.swiglu(x, x[:, 0].contiguous()))
    return results


def test_compiled_with_any_sizes():
    """The compiler treats sizes 0 and 1 as special cases; other sizes remain symbolic."""
    torch._dynamo.reset()
    run = compiled(step, dynamic=True)
    for sizes in ((5, 3), (1, 3), (1, 4), (6, 1), (0, 3), (7, 8)):
        for a, b in zip(run(*work_of(*sizes)), step(*work_of(*sizes)), strict=True):
            assert torch.equal(a, b), sizes


def test_row_counts_computed_from_sizes_compile_once():
    def rows(x, ids):
        n = ids.shape[0]
        index_map = torch.arange(2 * n, dtype=torch.int32)
        row_map = torch.stack([index_map[:n], 0 * index_map[:n], 0 * index_map[:n] + 1], 1)
        plans = [
            torch_ops.plan_topk(ids, E, num_out_tokens=2 * n),
            torch_ops.plan_routing_map(ids > 0, num_out_tokens=2 * n),
            torch_ops.plan_index_map(index_map, 2, num_out_tokens=2 * n),
            torch_ops.plan_row_map(row_map, num_out_tokens=n),
        ]
        moved = torch_ops.permute_and_pad(x, ids, align_size=1, num_experts=E, num_out_tokens=2 * n).data
        return [moved] + [torch_ops.permute(x, plan).data for plan in plans]

    torch._dynamo.reset()
    backend = CompileCounter()
    run = torch.compile(rows, backend=backend, fullgraph=True, dynamic=True)
    for tokens in (9, 10, 12):
        x, ids = torch.randn(tokens, H), torch.randint(0, E, (tokens, K), dtype=torch.int32)
        for a, b in zip(run(x, ids), rows(x, ids), strict=True):
            assert torch.equal(a, b)
    assert backend.frame_count == 1


SIZES, ORDER = torch.tensor([1, 3]), torch.tensor([1, 0])
WITHOUT_OPERATOR = {  # functions of x [4, 256], and the argument that has no operator
    "permute": (lambda x: torch_ops.permute(torch_ops.quantize(x), plan_of(x)).data.data, "x"),
    "unpermute": (lambda x: torch_ops.unpermute(torch_ops.quantize(x), plan_of(x)), "x"),
    "sort_chunks": (lambda x: torch_ops.sort_chunks(torch_ops.quantize(x), SIZES, ORDER).data.data, "x"),
    "pad": (lambda x: torch_ops.pad(torch_ops.quantize(x), SIZES, 4).data, "x"),
    "pad by a list": (lambda x: torch_ops.pad(torch_ops.quantize(x), [1, 3], 4).data, "x"),
    "exact topk": (lambda x: plan_of(x, "exact").data, "num_out_tokens"),
    "exact mask": (lambda x: torch_ops.plan_routing_map(x[:, :2] > 0).data, "num_out_tokens"),
    "exact rows": (
        lambda x: torch_ops.permute_and_pad(x, x[:, :2] > 0, align_size=1).data,
        "num_out_tokens",
    ),
    "exact pad": (lambda x: torch_ops.pad(x, SIZES, 4, num_out_tokens="exact"), "num_out_tokens"),
    "out": (
        lambda x: (
            torch_ops.quantize_weights(x[None], out=torch_ops.quantize_weights(0 * x[None])).rowwise.data
        ),
        "out",
    ),
    "columnwise": (lambda x: torch_ops.quantize(x, columnwise=True).columnwise.data, "columnwise"),
    "transposed": (lambda x: torch_ops.swiglu_quantize(x, transposed=True).columnwise.data, "transposed"),
}


def plan_of(x, rows=4):
    return torch_ops.plan_topk((x[:, :1] > 0).int(), 2, num_out_tokens=rows)


@pytest.mark.parametrize("name", WITHOUT_OPERATOR)
def test_calls_without_an_operator(name):
    """A graph break in compiled code; an error where a graph would have the result as a constant."""
    function, argument = WITHOUT_OPERATOR[name]
    module = torch.nn.Module()
    module.forward = function
    wanted = "an int, or topk= with None for the static bound" if "mask" in name else ""
    words = f"{argument}: got .* no operator; wanted {wanted}"
    refused = pytest.raises(TypeError, match=f"{words}.*; call it outside")
    with refused:
        make_fx(function)(torch.randn(4, 256))
    with refused, FakeTensorMode(allow_non_fake_inputs=True):
        function(torch.randn(4, 256))
    with refused:
        torch.export.export(module, (torch.randn(4, 256),), strict=False)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=words):
        compiled(function)(torch.randn(4, 256))
    run = torch.compile(function, backend="aot_eager")
    for _ in range(2):
        x = torch.randn(4, 256)
        assert torch.equal(run(x), function(x))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of any graph break after which gradients flow
@pytest.mark.parametrize("grad", [False, True])
def test_exact_padding_compiled(grad):
    x = torch.randn(4, H, requires_grad=grad)
    torch._dynamo.reset()
    padded = torch.compile(torch_ops.pad, backend="aot_eager")(x, SIZES, 4, num_out_tokens="exact")
    assert torch.equal(padded, torch_ops.pad(x, SIZES, 4, num_out_tokens="exact"))
    assert padded.requires_grad == grad


def test_a_mask_of_no_experts_a_token_compiled():
    mask = torch.ones(4, E, dtype=torch.bool)

    def rows(mask):
        return torch_ops.permute(torch.ones(4, H), torch_ops.plan_routing_map(mask, topk=0)).data

    assert compiled(rows)(mask).shape == rows(mask).shape == (0, H)


# ---------------------------------------------------------------- differentiable and non-differentiable
# arguments


@pytest.mark.parametrize("compile_it", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_probabilities_of_codes_have_a_gradient(dtype, compile_it):
    plan, sizes, order = plans()[0], torch.tensor([2, 0, 5]), torch.tensor([2, 0, 1])
    codes = torch.randint(0, 2, (T, H)).to(dtype)
    probs, weights = torch.rand(T, K), torch.randn(plan.num_out_tokens)
    chunk_probs, chunk_weights = torch.rand(T), torch.randn(T)

    def move(x, probs, chunk_probs):
        moved, chunks = torch_ops.permute(x, plan, probs), torch_ops.sort_chunks(x, sizes, order, chunk_probs)
        return moved.data, moved.probs, chunks.data, chunks.probs

    def grads(x):
        arguments = probs.clone().requires_grad_(), chunk_probs.clone().requires_grad_()
        data, moved, chunks, moved_chunks = (compiled(move) if compile_it else move)(x, *arguments)
        assert not data.requires_grad or data.dtype.is_floating_point
        loss = (moved * weights).sum() + (moved_chunks * chunk_weights).sum()
        return data, chunks, *torch.autograd.grad(loss, arguments)

    actual, wanted = grads(codes), grads(codes.float())
    for a, b in zip(actual[:2], wanted[:2], strict=True):
        assert torch.equal(a.float(), b)
    for a, b in zip(actual[2:], wanted[2:], strict=True):
        assert torch.equal(a, b)


def test_probabilities_of_quantised_rows_have_a_gradient():
    plan = plans()[0]
    q, probs, weights = torch_ops.quantize(torch.randn(T, 256)), torch.rand(T, K), torch.randn(100)
    actual = []
    for x in (q, torch.zeros(T, 256)):
        p = probs.clone().requires_grad_()
        moved = torch_ops.permute(x, plan, p)
        actual.append(torch.autograd.grad((moved.probs * weights[: plan.num_out_tokens]).sum(), p)[0])
    assert torch.equal(*actual)
    assert torch.equal(torch_ops.permute(q, plan, p).data.data, fp8moe.permute(q, plan).data.data)
    with pytest.raises(TypeError, match="merging_probs: got a tensor that requires grad with a QuantTensor"):
        torch_ops.unpermute(torch_ops.permute(q, plan).data, plan, probs.requires_grad_())


@pytest.mark.parametrize("compile_it", [False, True])
def test_probabilities_of_permute_gemm_have_a_gradient(compile_it):
    """The gradient of the probabilities is that of `permute`; results are those without a gradient."""
    plan = plans()[0]
    x = torch_ops.quantize(torch.randn(T, 256))
    w = torch_ops.quantize(torch.randn(E, 3, 256), block=(128, 128))
    probs, weights = torch.rand(T, K), torch.randn(plan.num_out_tokens)

    def multiply(probs):
        moved = torch_ops.permute_gemm(x, w, plan, probs)
        return moved.data, moved.probs

    actual, wanted = probs.clone().requires_grad_(), probs.clone().requires_grad_()
    data, moved = (compiled(multiply) if compile_it else multiply)(actual)
    (moved * weights).sum().backward()
    (torch_ops.permute(torch.zeros(T, 256), plan, wanted).probs * weights).sum().backward()
    assert torch.equal(actual.grad, wanted.grad)
    assert actual.grad.any()
    assert not data.requires_grad
    core = fp8moe.permute_gemm(x, w, plan, probs)
    assert torch.equal(data, core.data)
    assert torch.equal(moved, core.probs)


def test_float8_rows_that_require_grad_raise():
    x = torch.ones(T, H).to(torch.float8_e4m3fn).requires_grad_()
    with pytest.raises(
        TypeError, match=r"x: got torch\.float8_e4m3fn rows that require grad; wanted bfloat16"
    ):
        torch_ops.permute(x, plans()[0])
    with pytest.raises(TypeError, match=r"pass x\.detach"):
        torch_ops.sort_chunks(x, torch.tensor([T]), torch.tensor([0]))


def differentiable():
    plan, sizes, order = plans()[0], torch.tensor([2, 0, 5]), torch.tensor([2, 0, 1])
    counts = torch.tensor([3, 0, 4], dtype=torch.int32)
    rows = doubles(plan.num_out_tokens, H, seed=3)
    return {
        "permute": (lambda x, p: torch_ops.permute(x, plan, p).data, (doubles(T, H), doubles(T, K))),
        "unpermute": (lambda x, p: torch_ops.unpermute(x, plan, p), (rows, doubles(T, K))),
        "sort_chunks": (lambda x: torch_ops.sort_chunks(x, sizes, order).data, (doubles(T, H),)),
        "pad": (lambda x: torch_ops.pad(x, counts, 4), (doubles(T, H),)),
        "unpad": (lambda x: torch_ops.unpad(x, counts, 4, num_out_tokens=7), (doubles(8, H),)),
        "swiglu": (torch_ops.swiglu, (doubles(5, 2 * H), doubles(5, seed=4))),
    }


@pytest.mark.parametrize("name", differentiable())
def test_second_derivatives_raise(name):
    function, inputs = differentiable()[name]
    with pytest.raises(RuntimeError, match="not twice differentiable"):
        gradgradcheck(function, inputs)
    with pytest.raises(RuntimeError, match="not twice differentiable"):
        torch.autograd.functional.hessian(lambda *x: function(*x).square().sum(), inputs)
    # create_graph is no error as long as no second derivative is computed
    grads = torch.autograd.grad(function(*inputs).sum(), inputs, create_graph=True)
    for a, b in zip(grads, torch.autograd.grad(function(*inputs).sum(), inputs), strict=True):
        assert torch.equal(a, b)


def test_operators_reject_tensors_that_require_grad():
    """The functions detach arguments for the operators, and define the gradients."""
    with pytest.raises(
        TypeError, match=r"h: got a tensor that requires grad.*fp8moe\.torch, pass h\.detach\(\)"
    ):
        torch.ops.fp8moe.swiglu(doubles(5, 2 * H), None, "swiglu", None, 1.0, 0.0)


@pytest.mark.parametrize("name", differentiable())
def test_transforms_raise(name):
    function, inputs = differentiable()[name]
    plain = [x.detach() for x in inputs]
    batched = [torch.stack([x, x]) for x in plain]
    tangents = tuple(torch.ones_like(x) for x in plain)
    for transformed in (
        lambda: torch.func.vmap(function)(*batched),
        lambda: torch.func.grad(lambda *x: function(*x).sum())(*plain),
        lambda: torch.func.vjp(function, *plain),
        lambda: torch.func.jacrev(function)(*plain),
        lambda: torch.func.jvp(function, tuple(plain), tangents),
    ):
        with pytest.raises(NotImplementedError, match=r"(x|h): got a call inside a transform of torch\.func"):
            transformed()
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match=r"(x|h): got a tensor with a tangent"),
    ):
        function(*(forward_ad.make_dual(x, t) for x, t in zip(plain, tangents, strict=True)))


def test_transforms_of_non_differentiable_operations_raise():
    with pytest.raises(NotImplementedError, match="x: got a call inside a transform"):
        torch.func.vmap(torch_ops.quantize)(torch.randn(2, T, 128))
    with pytest.raises(NotImplementedError, match="topk_ids: got a call inside a transform"):
        torch.func.vmap(lambda i: torch_ops.plan_topk(i, E).row_id_map)(torch.stack([routing()] * 2))


# ---------------------------------------------------------------- validation errors


def test_validation_errors_name_the_argument():
    x = torch.ones(4, 8)
    for grad in (False, True):
        x.requires_grad_(grad)
        for verb in (torch_ops.pad, torch_ops.unpad):
            with pytest.raises(ValueError, match="align_size: got 0"):
                verb(x, torch.tensor([2, 2]), 0)
            with pytest.raises(TypeError, match="tokens_per_expert: got str"):
                verb(x, ["2"], 4)
            with pytest.raises(ValueError, match=r"tokens_per_expert: got shape \[\]"):
                verb(x, torch.tensor(2), 4)
            with pytest.raises(TypeError, match=r"tokens_per_expert: got builtins\.int"):
                verb(x, 2, 4)
    with pytest.raises(TypeError, match="x: got None; wanted an array"):
        torch_ops.quantize(None)
    with pytest.raises(
        TypeError, match=r"got numpy\.ndarray; wanted a torch tensor; pass torch\.from_dlpack\(x\)$"
    ):
        torch_ops.permute(np.ones((T, H)), plans()[0])
    x, plan = torch.ones(T, H, requires_grad=True), plans()[0]
    with pytest.raises(TypeError, match=r"x: got .*Permuted; wanted a torch tensor; pass x\.data$"):
        torch_ops.unpermute(torch_ops.permute(x, plan), plan)
    both = fp8moe.quantize(x.detach(), columnwise=True)
    with pytest.raises(TypeError, match=r"x: got .*Quantized; .*; pass x\.rowwise or x\.columnwise$"):
        torch_ops.permute(both, plan)
    with pytest.raises(TypeError, match=r"x: got .*PermutationPlan; wanted a torch tensor"):
        torch_ops.permute(plan, x)  # in the wrong order
    of_numpy = fp8moe.plan_topk(routing().numpy(), E)
    assert torch_ops.permute(torch.ones(T, H), of_numpy).data.shape == (of_numpy.num_out_tokens, H)
    with pytest.raises(TypeError, match=r"plan: got one of numpy\.ndarray; wanted one of torch tensors"):
        torch_ops.permute(torch.ones(T, H, requires_grad=True), of_numpy)
    with pytest.raises(TypeError, match="x: got a QuantTensor; wanted a plain array"):
        torch_ops.quantize(fp8moe.quantize(torch.ones(4, 128)))
    with pytest.raises(TypeError, match="h: got None; wanted an array"):
        torch_ops.swiglu_quantize(None)


@pytest.mark.parametrize("grad", [False, True])
def test_wrong_arguments(grad):
    """The same TypeErrors as Python's, in every mode of a call."""
    x, plan = torch.ones(T, H, requires_grad=grad), plans()[0]
    for call in (
        lambda: torch_ops.permute(x),
        lambda: torch_ops.permute(x, plan, None, True),
        lambda: torch_ops.permute(x, plan, plan=plan),
        lambda: torch_ops.permute(x, plan, fill=True),
        lambda: torch_ops.permute(x, plan, None, True, True),
    ):
        with pytest.raises(TypeError, match="permute"):
            call()


@pytest.mark.parametrize("name", ["columnwise", "out"])
def test_options_without_an_operator_raise_in_compiled_code(name):
    x = torch.randn(128, 128)
    options = {"columnwise": True} if name == "columnwise" else {"out": torch_ops.quantize(x)}
    with pytest.raises((TypeError, torch._dynamo.exc.Unsupported), match=f"{name}: got "):
        compiled(lambda x: torch_ops.quantize(x, **options))(x)
    q = torch_ops.quantize(x, **options)
    assert torch.equal((q.rowwise if name == "columnwise" else q).data, fp8moe.quantize(x).data)


@pytest.mark.parametrize("grad", [False, True])
def test_padding_by_a_list(grad):
    counts, x = [3, 0, 4], torch.randn(7, H, requires_grad=grad)
    padded = torch_ops.pad(x, counts, 4)
    assert torch.equal(padded, fp8moe.pad(x.detach(), counts, 4))
    assert padded.requires_grad == grad
    assert torch.equal(torch_ops.unpad(padded, counts, 4), x)
    assert torch.equal(compiled(lambda x: torch_ops.unpad(torch_ops.pad(x, counts, 4), counts, 4))(x), x)
    q = fp8moe.quantize(torch.randn(7, 128))
    assert torch.equal(torch_ops.pad(q, counts, 4).data, fp8moe.pad(q, counts, 4).data)


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_outputs")
def test_compiled_on_cuda_gives_the_same_gradients():
    torch, ids, x, probs = torch_case()
    there_and_back(ids, x, probs).backward()
    eager = x.grad.clone(), probs.grad.clone()
    x.grad = probs.grad = None
    torch.compile(there_and_back, fullgraph=True, backend="aot_eager")(ids, x, probs).backward()
    assert torch.equal(x.grad, eager[0])
    assert torch.equal(probs.grad, eager[1])


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_outputs")
def test_an_eager_plan_in_a_compiled_function_on_cuda():
    from fp8moe.adapters.torch import ops as torch_ops

    torch, ids, x, probs = torch_case()
    plan = torch_ops.plan_topk(ids, 8, align_size=16)

    def permute_and_unpermute(x, probs):
        moved = torch_ops.permute(x, plan, probs)
        return torch_ops.unpermute(moved.data, plan, probs) + moved.probs.sum()

    got = torch.compile(permute_and_unpermute, fullgraph=True, backend="aot_eager")(x, probs)
    assert torch.equal(got, permute_and_unpermute(x, probs))


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.sanitize
def test_float8_dtypes_are_views_on_cuda():
    from fp8moe.adapters.torch import ops as torch_ops

    torch, _, x, _ = torch_case(False)
    q = torch_ops.quantize(x)
    viewed = torch_ops.as_float8(q)
    assert viewed.data.dtype == torch.float8_e4m3fn
    assert viewed.data.data_ptr() == q.data.data_ptr()
    expected, actual = (fp8moe.scaling_aware_transpose(a) for a in (q, viewed))
    assert torch.equal(expected.data, actual.data)
    assert torch.equal(fp8moe.dequantize(viewed), fp8moe.dequantize(q))


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_outputs")
def test_a_plan_on_cuda_survives_copies_and_pickles():
    import copy
    import pickle

    torch, ids, x, _ = torch_case(False)
    plan = fp8moe.plan_topk(ids, 8, align_size=16)
    wanted = fp8moe.permute(x, plan).data
    twins = [copy.deepcopy(plan), pickle.loads(pickle.dumps(plan)), copy.copy(plan)]
    assert all("_raw" not in twin.__dict__ for twin in twins)
    del plan
    garbage = [torch.full((20_000,), -1, dtype=torch.int32, device="cuda") for _ in range(10)]
    for twin in twins:
        assert torch.equal(fp8moe.permute(x, twin).data, wanted)
    del garbage
    q = fp8moe.quantize(x)
    assert torch.equal(fp8moe.dequantize(copy.deepcopy(q)), fp8moe.dequantize(q))
