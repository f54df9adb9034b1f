"""The torch operators: opcheck, gradcheck, torch.compile, and the same bits as the library."""

import numpy as np
import pytest
import torch
from cases import same_bits
from torch.autograd import gradcheck
from torch.library import opcheck

import fp8moe
from fp8moe.adapters import torch_ops

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
    assert gradcheck(lambda h, p: torch_ops.swiglu(h, p, alpha=1.7, linear_offset=1.0), (h, doubles(5)))
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
        return torch_ops.moe_layer(x, w13, w2, routing(), probs, recipe="bf16")

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
    y = torch_ops.moe_layer(x, w13, w2, routing(), probs, recipe=recipe, recompute="moe_expert")
    y.backward(dy)
    plain = [t.detach() for t in (x, w13, w2)]
    wanted, saved = fp8moe.moe_forward(*plain, routing(), probs.detach(), recipe=recipe)
    grads = fp8moe.moe_backward(saved, dy.detach())
    assert torch.equal(y, wanted)
    assert torch.equal(x.grad, grads.dx)
    assert torch.equal(probs.grad, grads.dprobs)
    assert torch.equal(w13.grad, grads.dw13.bfloat16())
    assert torch.equal(w2.grad, grads.dw2.bfloat16())


def opcheck_cases():
    plan, by_mask, _ = plans()
    flat, flat_mask = torch_ops._flat(plan), torch_ops._flat(by_mask)
    x, rows = doubles(T, H), doubles(plan.num_out_tokens, H)
    probs, moved_probs = doubles(T, K), doubles(plan.num_out_tokens)
    sizes, order = torch.tensor([2, 5]), torch.tensor([1, 0])
    counts = torch.tensor([3, 4], dtype=torch.int32)
    q = torch_ops.quantize(torch.randn(6, 200))
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32)
    wide = torch_ops.quantize(torch.randn(T, 256))
    h, dy = torch.randn(6, 256), torch.randn(6, 128)
    ops = torch.ops.fp8moe
    mask = torch.ones(T, E, dtype=torch.bool)
    return [
        (ops.plan_topk, (routing(), E, 4, None)),
        (ops.plan_topk, (routing(), E, 4, 9)),
        (ops.plan_routing_map, (mask, 4, 2, None)),
        (ops.permute, (x, *flat, probs, True)),
        (ops.permute, (x, *flat, None, True)),
        (ops.permute, (x, *flat_mask, doubles(T, E), True)),
        (ops.permute_backward, (rows.detach(), *flat, moved_probs.detach())),
        (ops.permute_backward, (rows.detach(), *flat, None)),
        (ops.unpermute, (rows, *flat, probs)),
        (ops.unpermute, (rows, *flat, None)),
        (ops.unpermute_backward, (x.detach(), *flat, rows.detach(), probs.detach())),
        (ops.unpermute_backward, (x.detach(), *flat, None, None)),
        (ops.sort_chunks, (doubles(7, H), sizes, order, doubles(7), 4, 1, None)),
        (ops.sort_chunks, (doubles(7, H), sizes, order, None, 1, 2, None)),
        (ops.sort_chunks_backward, (torch.randn(7, H), sizes, order, None, 1, 1, 7)),
        (ops.pad, (doubles(7, H), counts, 4, 8)),
        (ops.unpad, (doubles(8, H), counts, 4, 7)),
        (ops.swiglu, (doubles(5, 6), doubles(5), None, 1.0, 0.0)),
        (ops.swiglu, (doubles(5, 6), None, 7.0, 1.7, 1.0)),
        (ops.swiglu_backward, (torch.randn(5, 3), torch.randn(5, 6), torch.rand(5), None, 1.0, 0.0)),
        (ops.quantize, (torch.randn(6, 200), "e4m3", [1, 128], True, 0.0, "compact")),
        (ops.quantize, (torch.randn(6, 200), "e5m2", [32, 1], True, 0.0, "compact")),
        (ops.quantize, (torch.randn(6, 200), "e4m3", [1, 128], False, 1e-4, "gemm_ready")),
        (ops.dequantize, (q.data, q.scales, "e4m3", [1, 128], "compact", "bfloat16")),
        (ops.scaling_aware_transpose, (q.data, q.scales, "e4m3", [1, 128], None, "column", 1)),
        (ops.scaling_aware_transpose, (q.data, q.scales, "e4m3", [1, 128], offsets, "tile", 1)),
        (ops.scaling_aware_transpose, (q.data, q.scales, "e4m3", [1, 128], None, "block", 1)),
        (ops.permute_transpose, (wide.data, wide.scales, "e4m3", [1, 128], "tile", *flat)),
        (ops.swiglu_quantize, (h, None, "e4m3", [1, 128], None, 1.0, 0.0, False, None, 1)),
        (ops.swiglu_quantize, (h, torch.rand(6), "e5m2", [1, 32], 7.0, 1.7, 1.0, True, offsets, 1)),
        (ops.swiglu_quantize_backward, (dy, h, None, "e4m3", [1, 128], None, 1.0, 0.0, True, None, 1)),
        (
            ops.swiglu_quantize_backward,
            (dy, h, torch.rand(6), "e4m3", [1, 32], 7.0, 1.0, 0.0, False, offsets, 1),
        ),
    ]


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


def test_exact_sizes():
    plan = torch_ops.plan_topk(routing(), E, align_size=4, num_out_tokens="exact")
    assert plan.num_out_tokens == int(plan.expert_offsets[-1])


def test_fp8_operations_compiled_give_the_same_bits():
    plan, h, dy, x = plans()[0], torch.randn(6, 256), torch.randn(6, 128), torch.randn(T, 256)
    offsets, probs = torch.tensor([0, 2, 6], dtype=torch.int32), torch.rand(6)

    def work(h, dy, x):
        options = {"expert_offsets": offsets, "clamp": 7.0}
        both = torch_ops.swiglu_quantize(h, probs, columnwise=True, **options)
        grad = torch_ops.swiglu_quantize_backward(dy, h, probs, **options)
        bare = torch_ops.swiglu_quantize(h, fmt="e5m2", block=(1, 32))
        turned = torch_ops.permute_transpose(torch_ops.quantize(x), plan)
        blocks = torch_ops.scaling_aware_transpose(torch_ops.quantize(x), target="block")
        assert blocks.block == (128, 128)
        tensors = (both.rowwise, both.columnwise, grad.dh, bare, turned, blocks)
        return [a for q in tensors for a in (q.data, q.scales)] + [grad.dprobs]

    compiled = torch.compile(work, fullgraph=True, backend="aot_eager")(h, dy, x)
    for a, b in zip(work(h, dy, x), compiled, strict=True):
        assert torch.equal(a, b)
