"""The Transformer Engine functions compared with their documented behaviour, implemented in plain torch."""

import tracemalloc
from dataclasses import replace

import pytest
import torch
from cases import SEED
from torch.library import opcheck

import fp8moe
from benchmarks import transformer_engine as benchmark
from fp8moe.adapters.transformer_engine import pytorch as te

T, E, H = 37, 5, 16


def mask_case(seed=0, density=0.4):
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(T, E, generator=g) < density
    probs = torch.rand(T, E, generator=g) * mask
    x = torch.randn(T, H, generator=g)
    return x.requires_grad_(), probs.requires_grad_(), mask.int()


def entries(mask):
    """(token, expert) of every row, expert by expert: the order that callers rely on."""
    expert, token = mask.t().nonzero(as_tuple=True)
    return token, expert


def test_mask_permute_and_unpermute_with_gradients():
    x, _, mask = mask_case()
    token, _ = entries(mask)
    rows, row_map = te.moe_permute(x, mask, num_out_tokens=len(token))
    assert torch.equal(rows, x[token])
    assert row_map.shape == (T, 2 * E + 1)
    assert row_map.dtype == torch.int32
    back = te.moe_unpermute(rows, row_map, restore_shape=x.shape)
    torch.testing.assert_close(back, x * mask.sum(1, keepdim=True))
    (grad,) = torch.autograd.grad(rows.sum(), x)
    assert torch.equal(grad, mask.sum(1, keepdim=True).expand(T, H).float())
    counted, _ = te.moe_permute(x, mask)
    assert torch.equal(counted, rows)


def test_layout_of_the_row_map():
    mask = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 1], [1, 1, 0], [0, 1, 0]])
    _, row_map = te.moe_permute(torch.randn(5, 4), mask, num_out_tokens=9)
    assert row_map.tolist() == [
        [3, 0, -1, 1, 0, -1, 2],
        [7, 4, -1, 2, 1, -1, 2],
        [8, 1, -1, 2, 0, -1, 2],
        [5, 2, -1, 1, 0, -1, 2],
        [6, -1, -1, 1, -1, -1, 1],
    ]


def test_merging_probs_and_their_gradient():
    x, _, mask = mask_case(1)
    token, expert = entries(mask)
    rows, row_map = te.moe_permute(x.detach(), mask, num_out_tokens=len(token))
    rows = rows.double().requires_grad_()
    merging = torch.rand(T, E, dtype=torch.float64).requires_grad_()
    got = te.moe_unpermute(rows, row_map, merging_probs=merging, restore_shape=(T, H))
    wanted = torch.zeros(T, H, dtype=torch.float64).index_add(
        0, token, rows * merging[token, expert].unsqueeze(1)
    )
    torch.testing.assert_close(got, wanted)
    dy = torch.randn(T, H, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad(got, (rows, merging), dy),
        torch.autograd.grad(wanted, (rows, merging), dy),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    with pytest.warns(DeprecationWarning, match="probs is deprecated"):
        old = te.moe_unpermute(rows, row_map, probs=merging, restore_shape=(T, H))
    assert torch.equal(old, got)


@pytest.mark.parametrize("zeros", [False, True])
def test_permute_with_probs_and_zero_rows(zeros):
    x, probs, mask = mask_case(2)
    if zeros:
        with torch.no_grad():
            probs[torch.rand(T, E) < 0.3] = 0
    token, expert = entries(mask)
    rows, moved, _ = te.moe_permute_with_probs(x, probs, mask, num_out_tokens=len(token))
    wanted = x[token] * (probs[token, expert] != 0).unsqueeze(1)
    assert torch.equal(rows, wanted)
    assert torch.equal(moved, probs[token, expert])
    assert zeros == bool((rows == 0).all(1).any())
    weight = torch.randn(len(token))
    grad_x, grad_p = torch.autograd.grad(rows.sum() + (moved * weight).sum(), (x, probs))
    assert torch.equal(grad_x, mask.sum(1, keepdim=True).expand(T, H).float())
    full = torch.zeros(T, E)
    full[token, expert] = weight
    assert torch.equal(grad_p, full)
    # only in that function: without probabilities no row is zeroed
    assert torch.equal(te.moe_permute(x, mask, len(token))[0], x[token])


@pytest.mark.parametrize("align", [1, 4, 16])
def test_permute_and_pad(align):
    x, probs, mask = mask_case(3)
    counts = mask.sum(0)
    rows, moved, row_map, pad_offsets, padded = te.moe_permute_and_pad_with_probs(
        x, probs, mask, counts, align
    )
    token, expert = entries(mask)
    target = (counts + align - 1) // align * align
    assert torch.equal(padded, target)
    assert padded.dtype == torch.int64
    if align == 1:
        assert pad_offsets is None
    else:
        assert torch.equal(
            pad_offsets, (target - counts).cumsum(0).roll(1).index_fill(0, torch.tensor(0), 0).int()
        )
    at = torch.arange(len(token))
    if pad_offsets is not None:
        at = at + pad_offsets[expert]
    wanted = torch.zeros(int(target.sum()), H).index_put((at,), x[token])
    assert torch.equal(rows, wanted)
    assert torch.equal(moved, torch.zeros(int(target.sum())).index_put((at,), probs[token, expert]))
    back = te.moe_unpermute(rows, row_map, restore_shape=(T, H), pad_offsets=pad_offsets)
    torch.testing.assert_close(back, x * mask.sum(1, keepdim=True))
    grads = torch.autograd.grad(back.sum() + moved.sum(), (x, probs))
    assert torch.equal(grads[0], mask.sum(1, keepdim=True).expand(T, H).float())
    assert torch.equal(grads[1], mask.float())


def test_pad_offsets_is_none_when_everything_is_aligned():
    mask = torch.zeros(8, 2, dtype=torch.int32)
    mask[:4, 0] = mask[4:, 1] = 1
    got = te.moe_permute_and_pad_with_probs(torch.randn(8, H), mask.float(), mask, mask.sum(0), 4)
    assert got[3] is None


@pytest.mark.parametrize("dropped", [False, True])
def test_index_map(dropped):
    g = torch.Generator().manual_seed(4)
    k = 3
    indices = torch.rand(T, E, generator=g).argsort(1)[:, :k].int()
    x = torch.randn(T, H, generator=g, dtype=torch.float64).requires_grad_()
    order = indices.reshape(-1).sort(stable=True).indices  # (t * k + j), expert by expert
    keep = T * k - 20 if dropped else T * k
    rows, row_map = te.moe_permute(x, indices, keep if dropped else 0, map_type="index")
    assert torch.equal(rows, x[order[:keep] // k])
    wanted = torch.full((k * T,), -1, dtype=torch.int32)
    wanted[order[:keep] % k * T + order[:keep] // k] = torch.arange(keep, dtype=torch.int32)
    assert torch.equal(row_map, wanted)
    probs = torch.rand(T, k).requires_grad_()
    got = te.moe_unpermute(rows, row_map, merging_probs=probs, map_type="index")
    weight = torch.zeros(T * k, dtype=torch.bool).index_fill(0, order[:keep], True).view(T, k)
    expected = x * (probs.double() * weight).sum(1, keepdim=True)
    torch.testing.assert_close(got, expected)
    dy = torch.randn(T, H, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad(got, (x, probs), dy),
        torch.autograd.grad(expected, (x, probs), dy),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_results_of_the_benchmark_are_correct():
    for case in benchmark.cases(benchmark.inputs(benchmark.QUICK, SEED, "cpu")):
        assert case.check(case.run()), case.name


def test_index_map_of_one_expert_a_token_without_probs():
    indices = torch.randint(0, E, (T, 1), dtype=torch.int32)
    x = torch.randn(T, H)
    rows, row_map = te.moe_permute(x, indices, map_type="index")
    assert torch.equal(te.moe_unpermute(rows, row_map, map_type="index"), x)


def test_quantised_rows():
    _, probs, mask = mask_case(5)
    q = fp8moe.quantize(torch.randn(T, 256))
    token, expert = entries(mask)
    rows, _ = te.moe_permute(q, mask, len(token))
    assert torch.equal(rows.data, q.data[token])
    assert torch.equal(rows.scales, q.scales[token])
    with torch.no_grad():
        probs[token[0], expert[0]] = 0
        rows, moved, _ = te.moe_permute_with_probs(q, probs.detach(), mask, len(token))
    assert not rows.data[0].any()
    assert moved[0] == 0


def test_sort_chunks():
    sizes, order = torch.tensor([3, 0, 5, 2]), torch.tensor([2, 0, 3, 1])
    x, probs = torch.randn(10, H).requires_grad_(), torch.rand(10).requires_grad_()
    chunks, parts = x.split(sizes.tolist()), probs.split(sizes.tolist())
    wanted, wanted_probs = torch.cat([chunks[i] for i in order]), torch.cat([parts[i] for i in order])
    assert torch.equal(te.moe_sort_chunks_by_index(x, sizes, order), wanted)
    got, moved = te.moe_sort_chunks_by_index_with_probs(x, probs, sizes, order)
    assert torch.equal(got, wanted)
    assert torch.equal(moved, wanted_probs)
    weights = torch.randn(10, H), torch.randn(10)
    ours = torch.autograd.grad((got * weights[0]).sum() + (moved * weights[1]).sum(), (x, probs))
    theirs = torch.autograd.grad((wanted * weights[0]).sum() + (wanted_probs * weights[1]).sum(), (x, probs))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_padding_modules():
    splits = [3, 0, 16, 5]
    x = torch.randn(24, H).requires_grad_()
    padded, sizes = te.Fp8Padding(4)(x, splits)
    assert sizes == [16, 0, 16, 16]
    wanted = torch.cat(
        [
            torch.nn.functional.pad(p, (0, 0, 0, s - len(p)))
            for p, s in zip(x.split(splits), sizes, strict=True)
        ]
    )
    assert torch.equal(padded, wanted)
    back = te.Fp8Unpadding(4)(padded, splits)
    assert torch.equal(back, x)
    (grad,) = torch.autograd.grad(back.sum() + padded.sum(), x)
    assert torch.equal(grad, torch.full_like(x, 2))
    same, sizes = te.Fp8Padding(2, align_size=4)(x, [8, 16])
    assert same is x
    assert sizes == [8, 16]
    assert te.Fp8Unpadding(2, align_size=4)(x, [8, 16]) is x


def test_validation_errors():
    x, probs, mask = mask_case(6)
    with pytest.raises(ValueError, match="map_type: got 'sparse'"):
        te.moe_permute(x, mask, map_type="sparse")
    with pytest.raises(ValueError, match="align_size: got 0"):
        te.moe_permute_and_pad_with_probs(x, probs, mask, mask.sum(0), 0)
    with pytest.raises(ValueError, match="tokens_per_expert: got None"):
        te.moe_permute_and_pad_with_probs(x, probs, mask, None, 16)
    rows, row_map = te.moe_permute(x, mask)
    with pytest.raises(ValueError, match="restore_shape"):
        te.moe_unpermute(rows, row_map)
    with pytest.raises(ValueError, match="wanted one of them"):
        te.moe_unpermute(rows, row_map, probs, (T, H), probs=probs)
    with pytest.raises(ValueError, match="m_splits: got 1 sizes"):
        te.Fp8Padding(2)(x, [T])


def wider(x):
    """The same values as every other column of a buffer."""
    buffer = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
    buffer[..., ::2] = x.detach()
    return buffer[..., ::2]


def transposed(x):
    return x.detach().t().contiguous().t()


@pytest.mark.parametrize("strided", [wider, transposed])
def test_strided_arguments(strided):
    """Every other column of a wider buffer and transposed views, as the original accepts."""
    x, probs, mask = mask_case(7)
    x, probs, count, counts = x.detach(), probs.detach(), int(mask.sum()), mask.sum(0)
    xs, ps, ms = strided(x), strided(probs), strided(mask)
    assert not any(a.is_contiguous() for a in (xs, ps, ms))

    def same(got, wanted):
        for a, b in zip(got, wanted, strict=True):
            assert torch.equal(a, b)

    same(te.moe_permute(xs, ms, count), te.moe_permute(x, mask, count))
    same(te.moe_permute_with_probs(xs, ps, ms, count), te.moe_permute_with_probs(x, probs, mask, count))
    wanted = te.moe_permute_and_pad_with_probs(x, probs, mask, counts, 8)
    same(te.moe_permute_and_pad_with_probs(xs, ps, ms, wider(counts), 8), wanted)
    rows, _, row_map, pads, _ = wanted
    again = te.moe_unpermute(
        strided(rows), strided(row_map), merging_probs=ps, restore_shape=(T, H), pad_offsets=wider(pads)
    )
    same([again], [te.moe_unpermute(rows, row_map, probs, (T, H), pad_offsets=pads)])
    ids = torch.rand(T, E).argsort(1)[:, :3].int()
    by_index = te.moe_permute(x, ids, T * 3, map_type="index")
    same(te.moe_permute(xs, strided(ids), T * 3, map_type="index"), by_index)
    merging = torch.rand(T, 3)
    again = te.moe_unpermute(strided(by_index[0]), wider(by_index[1]), strided(merging), map_type="index")
    same([again], [te.moe_unpermute(*by_index, merging, map_type="index")])
    sizes, order = torch.tensor([30, 0, 7]), torch.tensor([2, 0, 1])
    same(
        te.moe_sort_chunks_by_index_with_probs(xs, ps[:, 1], wider(sizes), wider(order)),
        te.moe_sort_chunks_by_index_with_probs(x, probs[:, 1].contiguous(), sizes, order),
    )
    plain = te.moe_sort_chunks_by_index(x, sizes, order)
    same([te.moe_sort_chunks_by_index(xs, wider(sizes), order)], [plain])
    same([te.Fp8Padding(3)(xs, [30, 0, 7])[0]], [te.Fp8Padding(3)(x, [30, 0, 7])[0]])
    q = fp8moe.quantize(torch.randn(T, 256))
    cut = replace(q, data=strided(q.data), scales=strided(q.scales))
    same([te.moe_permute(cut, ms, count)[0].scales], [te.moe_permute(q, mask, count)[0].scales])


def test_strided_arguments_have_gradients():
    x, probs, mask = mask_case(8)
    count, weight = int(mask.sum()), torch.randn(int(mask.sum()), H)
    wide = torch.cat([x, x], 1).detach().requires_grad_()
    both = torch.cat([probs, probs], 1).detach().requires_grad_()
    rows, moved, _ = te.moe_permute_with_probs(wide[:, :H], both[:, E:], mask, count)
    got = torch.autograd.grad((rows * weight).sum() + moved.square().sum(), (wide, both))
    rows, moved, _ = te.moe_permute_with_probs(x, probs, mask, count)
    wanted = torch.autograd.grad((rows * weight).sum() + moved.square().sum(), (x, probs))
    assert torch.equal(got[0], torch.cat([wanted[0], torch.zeros_like(wanted[0])], 1))
    assert torch.equal(got[1], torch.cat([torch.zeros_like(wanted[1]), wanted[1]], 1))


def test_memory_does_not_grow_with_ids():
    """Only the order of ids matters. Negative ids have no expert and no row."""
    large, largest = 100_000_000, 2**31 - 1
    ids = torch.tensor([[5, large], [largest, 5], [-7, 5], [large, largest]], dtype=torch.int32)
    x = torch.randn(4, H, requires_grad=True)
    tracemalloc.start()
    rows, row_map = te.moe_permute(x, ids, 8, map_type="index")
    # an array indexed by id would be NumPy's, and at least 400 MB
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()
    order = [(0, 0), (1, 1), (2, 1), (0, 1), (3, 0), (1, 0), (3, 1)]  # by id, then by token
    assert torch.equal(rows, torch.cat([x[[t for t, _ in order]], torch.zeros(1, H)]))
    wanted = torch.full((2, 4), -1, dtype=torch.int32)
    for row, (t, j) in enumerate(order):
        wanted[j, t] = row
    assert torch.equal(row_map, wanted.reshape(-1))
    (grad,) = torch.autograd.grad(rows.sum(), x)
    assert torch.equal(grad, torch.tensor([2.0, 2, 1, 2]).unsqueeze(1).expand(4, H))
    few, few_map = te.moe_permute(x, ids, 3, map_type="index")
    assert torch.equal(few, rows[:3])
    assert torch.equal(few_map, torch.where(row_map < 3, row_map, -1))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("keep", [0, T * 3 - 20])
def test_index_map_compiled(keep, dynamic):
    """One graph, because no value is read."""
    ids = torch.rand(T, E).argsort(1)[:, :3].int()
    x, probs = torch.randn(T, H).requires_grad_(), torch.rand(T, 3).requires_grad_()

    def there_and_back(x, ids, probs):
        rows, row_map = te.moe_permute(x, ids, keep, map_type="index")
        return rows, row_map, te.moe_unpermute(rows * 2, row_map, probs, map_type="index")

    compiled = torch.compile(there_and_back, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    both = [f(x, ids, probs) for f in (there_and_back, compiled)]
    dy, dr = torch.randn(T, H), torch.randn_like(both[0][0])
    grads = [torch.autograd.grad((r * dr).sum() + (y * dy).sum(), (x, probs)) for r, _, y in both]
    for a, b in zip((*both[0], *grads[0]), (*both[1], *grads[1]), strict=True):
        assert torch.equal(a, b)


def test_the_index_maps_operator():
    arguments = torch.tensor([1, 0, 3, 2]), torch.tensor([[2, 0], [-1, 2]]), 2
    assert set(opcheck(torch.ops.fp8moe.index_map.default, arguments).values()) == {"SUCCESS"}


def test_num_out_tokens_is_required_with_probs():
    x, probs, mask = mask_case(9)
    with pytest.raises(TypeError, match="num_out_tokens"):
        te.moe_permute_with_probs(x, probs, mask)


def test_ids_of_another_dtype_or_shape_raise():
    x = torch.randn(4, H)
    with pytest.raises(TypeError, match=r"routing_map: got dtype torch\.float32; wanted int32 or int64"):
        te.moe_permute(x, torch.zeros(4, 2), 8, map_type="index")
    with pytest.raises(ValueError, match=r"routing_map: got shape \[4\]; wanted \[T, k\]"):
        te.moe_permute(x, torch.zeros(4, dtype=torch.int32), 4, map_type="index")


def test_lists_of_chunks_raise():
    with pytest.raises(TypeError, match=r"split_sizes: got builtins\.list; wanted an array"):
        te.moe_sort_chunks_by_index(torch.ones(3, 4), [1, 2], [1, 0])


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_outputs")
def test_names_on_cuda():
    from fp8moe.adapters.transformer_engine import pytorch as te

    g = torch.Generator().manual_seed(0)
    mask = (torch.rand(37, 5, generator=g) < 0.4).int()
    probs, x = torch.rand(37, 5, generator=g) * mask, torch.randn(37, 16, generator=g)
    ids = torch.rand(37, 5, generator=g).argsort(1)[:, :2].int()
    sizes, order = torch.tensor([30, 0, 7]), torch.tensor([2, 0, 1])

    def run(device):
        m, p, i, s, o = (t.to(device) for t in (mask, probs, ids, sizes, order))
        xd = x.to(device).requires_grad_()
        rows, moved, row_map, pad_offsets, padded = te.moe_permute_and_pad_with_probs(xd, p, m, m.sum(0), 16)
        back = te.moe_unpermute(
            rows, row_map, merging_probs=p, restore_shape=xd.shape, pad_offsets=pad_offsets
        )
        by_index, index_map = te.moe_permute(xd, i, map_type="index")
        again = te.moe_unpermute(
            by_index, index_map, torch.rand(37, 2).to(device) * 0 + 0.5, map_type="index"
        )
        chunks, chunk_probs = te.moe_sort_chunks_by_index_with_probs(xd, p[:, 0].contiguous(), s, o)
        (grad,) = torch.autograd.grad(back.sum() + again.sum() + chunks.sum(), xd)
        first = [rows, moved, row_map, pad_offsets, padded, back]
        return [*first, by_index, index_map, again, chunks, chunk_probs, grad]

    for a, b in zip(run("cpu"), run("cuda"), strict=True):
        assert b.is_cuda
        torch.testing.assert_close(a, b.cpu(), rtol=0, atol=0)
