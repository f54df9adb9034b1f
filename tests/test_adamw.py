"""AdamW that writes FP8 codes: the kernel against the formula in float64, its codes against those of
quantize_weights; fp8moe.torch.AdamW against torch.optim.AdamW."""

import copy

import numpy as np
import pytest
import torch
from backends import only_on_cpu, over
from cases import BF16, assert_same, generator, poisoned

import fp8moe
from fp8moe.ops.adamw import adamw
from fp8moe.runtime import dispatch
from fp8moe.runtime.record_trees import map_arrays
from fp8moe.torch import AdamW, FP8FlowMoE, weights_unchanged

RNG = generator()
F32 = np.dtype(np.float32)
UNIT = {BF16: 2.0**-8, F32: 2.0**-24}
#: dtypes of weights and averages; (experts, rows, columns, parts, rows of a part, columns of the codes)
CASES = [
    (BF16, BF16, (2, 128, 128, 1, 128, 128)),
    (F32, F32, (1, 256, 128, 2, 128, 128)),
    (BF16, F32, (2, 2 * 24, 144, 2, 128, 144)),
    (F32, BF16, (1, 77, 150, 1, 77, 256)),
]
LARGE = [(BF16, BF16, (4, 1536, 1024, 2, 768, 1024)), (F32, F32, (2, 2 * 1440, 1440, 2, 1536, 1440))]


def problem(kind, state, sizes):
    """param, gradient, averages as after a few steps, step, settings, in fresh memory."""
    shape = sizes[:3]
    grad = RNG.standard_normal(shape)
    average = RNG.standard_normal(shape)
    return [
        (RNG.standard_normal(shape) / 16).astype(kind),
        (grad / 64).astype(kind),
        (average / 64).astype(state),
        ((average**2 + RNG.random(shape)) / 4096).astype(state),
        RNG.integers(1, 2000, 1).astype(np.float32),
        np.array([10 ** RNG.uniform(-4, -2), RNG.uniform(0.8, 0.95), RNG.uniform(0.9, 0.9995), 1e-8, 0.1]),
    ]


def options_of(sizes):
    return {"parts": sizes[3], "rows": sizes[4], "columns": sizes[5]}


def own(given):
    """Copies for the reference, whose arguments are those of the test; other backends have theirs."""
    return [a.copy() if isinstance(a, np.ndarray) else a for a in given]


def run(backend, arguments, **options):
    """(param, both averages, codes) of each backend: the arguments are updated in place."""

    def stepped(*given, **options):
        given = own(given)
        codes = adamw(*given, **options)
        return given[0], *given[2:4], codes

    results = backend.both(stepped, *arguments, **options)
    return results if results[0] is not results[1] else results[:1]


def formula(param, grad, average, square, step, settings, maximize=False):
    """(value, bound) of param and both averages in float64. The kernel's factors are rounded from float64;
    each of its operations in float32 is rounded once."""
    kind, state = param.dtype, average.dtype
    param, grad, average, square = (a.astype(np.float64) for a in (param, grad, average, square))
    lr, beta1, beta2, eps, weight_decay = settings
    grad = -grad if maximize else grad
    unit = UNIT[F32]
    m = beta1 * average + (1 - beta1) * grad
    # each factor, each product and the sum are rounded: three units of the terms' magnitudes
    m_bound = 3 * unit * (beta1 * np.abs(average) + (1 - beta1) * np.abs(grad)) + 2.0**-148
    v = beta2 * square + (1 - beta2) * grad**2
    v_bound = 4 * unit * v + 2.0**-148  # both terms are positive; the square is one product more
    size, root = lr / (1 - beta1**step), np.sqrt(1 - beta2**step)
    denominator = np.sqrt(v) / root + eps
    # the root halves v's relative error and adds its own, then: factor, product, eps, sum
    relative = (2 + 1 + 4) * unit
    change = size * m / denominator
    # size, product and quotient
    change_bound = np.abs(size / denominator) * m_bound * (1 + relative) + (relative + 3 * unit) * np.abs(
        change
    )
    decayed = (1 - lr * weight_decay) * param
    new = decayed - change
    # decay's factor and product, of a small number, and the two differences
    bound = 2 * unit * lr * weight_decay * np.abs(param) + unit * np.abs(decayed) + change_bound
    bound = (bound + unit * np.abs(new)) * (1 + 2.0**-20)

    def rounded(value, bound, to):
        return value, bound + UNIT[to] * (np.abs(value) + bound) * (to != F32) + 2.0**-133

    return rounded(new, bound, kind), rounded(m, m_bound, state), rounded(v, v_bound, state)


@over("kind, state, sizes", reference=CASES, on_cpu=CASES, on_gpu=CASES + LARGE)
def test_a_step_against_float64(backend, kind, state, sizes):
    arguments = problem(kind, state, sizes)
    maximize, columnwise = bool(RNG.integers(2)), bool(RNG.integers(2))
    wanted = formula(*arguments, maximize)
    options = {"maximize": maximize, "columnwise": columnwise, **options_of(sizes)}
    for *updated, codes in run(backend, arguments, **options):
        for new, (value, bound), dtype in zip(updated, wanted, (kind, state, state), strict=True):
            assert new.dtype == dtype
            assert (np.abs(new.astype(np.float64) - value) <= bound).all()
        both = fp8moe.quantize_weights(updated[0], **options_of(sizes))
        assert (codes.columnwise is not None) == columnwise
        assert_same(codes, both if columnwise else both.rowwise)


SPECIAL = [CASES[0], CASES[2]]


@over("kind, state, sizes", reference=SPECIAL, on_cpu=SPECIAL, on_gpu=SPECIAL)
def test_gradients_that_are_not_finite_and_weights_of_zero(backend, kind, state, sizes):
    """A NaN stays in its element; a block of zeros with gradients of zero has the scale of an empty one."""
    arguments = problem(kind, state, sizes)
    param, grad, average, square, *_ = arguments
    for a in (param, grad, average, square):
        a[0, :, :128] = 0
    grad[-1, 3, 125:128] = np.nan, np.inf, -np.inf
    for *updated, codes in run(backend, arguments, **options_of(sizes)):
        assert not updated[0][0, :, :128].any()
        finite = [np.isfinite(a.astype(np.float32)) for a in updated]
        for a in finite:
            a[-1, 3, 125:128] = True
            assert a.all()
        assert np.isnan(updated[0][-1, 3, 125:128].astype(np.float32)).all()  # infinity / infinity
        assert_same(codes, fp8moe.quantize_weights(updated[0], **options_of(sizes)))
        assert codes.rowwise.scales[0, 0, 0] == 1


PAIR = [(BF16, BF16, (2, 128, 128)), (BF16, F32, (1, 40, 72))]


@over("kind, state, shape", reference=PAIR, on_cpu=PAIR, on_gpu=PAIR)
def test_two_tensors_write_their_parts_of_one_record(backend, kind, state, shape):
    """w1 and w3 in two calls: each leaves the other's part alone."""
    pair = [problem(kind, state, shape) for _ in range(2)]
    rows = shape[1] + -shape[1] % 128
    empty = fp8moe.quantize_weights(np.zeros((shape[0], 2 * rows, shape[2]), np.float32))
    empty = map_arrays(lambda a: poisoned(a.shape, a.dtype), empty)

    def steps(*given):
        *given, out = own(given)
        first, second = given[:6], given[6:]
        for number, arguments in ((1, second), (0, first)):
            assert adamw(*arguments, rows=rows, first=number, of=2, out=out) is out
        return first[0], second[0], out

    _, (w1, w3, codes) = backend.both(steps, *pair[0], *pair[1], empty)
    assert_same(codes, fp8moe.quantize_weights((w1, w3), rows=rows))


@only_on_cpu
def test_steps_with_other_settings_replay_one_recording(backend):
    """Step, lr, betas, eps and weight decay are arrays: a schedule records nothing anew."""
    kind, state, sizes = CASES[2]
    dispatch.clear_recordings()
    for _ in range(3):
        arguments = problem(kind, state, sizes)
        uploaded = [*map(backend.upload, map(np.copy, arguments))]
        codes = backend.download(adamw(*uploaded, **options_of(sizes)))
        updated = backend.download(tuple(uploaded[i] for i in (0, 2, 3)))
        for new, (value, bound) in zip(updated, formula(*arguments), strict=True):
            assert (np.abs(new.astype(np.float64) - value) <= bound).all()
        assert_same(codes, fp8moe.quantize_weights(updated[0], **options_of(sizes)))
    assert [name for name, recorded in dispatch.cached_recordings() if recorded] == ["adamw"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grad": lambda a: a.astype(np.float32)}, "grad: got dtype float32; wanted bfloat16"),
        ({"exp_avg": lambda a: a.astype(np.float16)}, "exp_avg: got dtype float16"),
        ({"exp_avg_sq": lambda a: a.astype(np.float32)}, "exp_avg_sq: got dtype float32; wanted bfloat16"),
        ({"step": lambda a: a.astype(np.int64)}, "step: got dtype int64"),
        ({"settings": lambda a: a[:4]}, r"settings: got shape \[4\]; wanted \[5\]"),
        ({"param": lambda a: a[:, :64]}, r"grad: got shape"),
        ({"parts": 3}, "param: got 128 rows; wanted a multiple of parts = 3"),
        ({"parts": 2}, "rows: got 64 of each of 2 parts; wanted a multiple of 128"),
        ({"of": 2, "first": 2}, "first: got 2; wanted an integer from 0 to 1"),
        ({"out": "another"}, "out: got"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    names = "param", "grad", "exp_avg", "exp_avg_sq", "step", "settings"
    given = dict(zip(names, problem(BF16, BF16, (1, 128, 128)), strict=True))
    if change == {"out": "another"}:
        change = {"out": fp8moe.quantize_weights(np.ones((1, 256, 128), np.float32))}
    for name, value in change.items():
        given[name] = np.ascontiguousarray(value(given[name])) if callable(value) else value
    before = given["param"].copy()
    with pytest.raises((TypeError, ValueError), match=message):
        adamw(**given)
    assert_same(given["param"], before)


def test_averages_that_overlap_are_refused():
    given = problem(F32, F32, (1, 128, 128))
    given[3] = given[2]
    with pytest.raises(ValueError, match="param: got memory that overlaps"):
        adamw(*given)


# ---------------------------------------------------------------- fp8moe.torch.AdamW


def layer_of(dtype=torch.float32, device="cpu", **options):
    torch.manual_seed(int(RNG.integers(2**31)))
    return FP8FlowMoE(128, 100, 4, topk=2, dtype=dtype, device=device, **options)


def micro_batch(layer):
    w = layer.w13
    layer(torch.randn(9, 128, dtype=w.dtype, device=w.device)).float().square().sum().backward()


def casts_of(call):
    with fp8moe.trace() as traced:
        call()
    return traced.weight_casts


def assert_fresh(layer):
    """The next forwards equal those of a layer that has no copies."""
    x = torch.randn(9, 128, dtype=layer.w13.dtype, device=layer.w13.device)
    fresh = copy.deepcopy(layer)
    for guard in (torch.no_grad, torch.enable_grad):
        with guard():
            assert torch.equal(layer(x), fresh(x))


def groups_of(layer):
    rest = {"params": [*layer.router.parameters(), layer.w2], "lr": 3e-3, "weight_decay": 0.3}
    return [{"params": [layer.w13]}, rest]


devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_equal_torchs_and_the_next_forward_reads_their_copies(dtype, device):
    """Two groups, a schedule of lr and beta1, two micro-batches to a step; both optimizers load each other's
    states, so that each step is compared for itself."""
    layer = layer_of(dtype, device, weight_copies="both" if dtype == torch.float32 else "rowwise")
    other = copy.deepcopy(layer)
    mine = AdamW(groups_of(layer), lr=1e-2, maximize=True)
    torchs = torch.optim.AdamW(groups_of(other), lr=1e-2, maximize=True)  # step on the host, for the CPU
    schedule = torch.optim.lr_scheduler.OneCycleLR(mine, [1e-2, 2e-2], total_steps=6)
    with weights_unchanged(layer, optimizer=mine):
        for number in range(4):
            made = casts_of(lambda: [micro_batch(layer) for _ in range(2)])
            assert made == 0  # the first ones on entry
            for p, q in zip(layer.parameters(), other.parameters(), strict=True):
                q.data.copy_(p.data)
                q.grad = p.grad.clone()
            before = {
                n: [t.detach().cpu().clone() for t in (p, p.grad, *averages_of(mine, p))]
                for n, p in layer.named_parameters()
            }
            torchs.load_state_dict(copy.deepcopy(mine.state_dict()))  # it shares tensors
            assert [g["lr"] for g in torchs.param_groups] == [g["lr"] for g in mine.param_groups]
            mine.step()
            torchs.step()
            for group in mine.param_groups:
                for p in group["params"]:
                    assert mine.state[p]["step"].item() == number + 1
            for n in ("w13", "w2"):
                p, q = getattr(layer, n), getattr(other, n)
                (group,) = [g for g in mine.param_groups if any(p is given for given in g["params"])]
                lr, (beta1, beta2) = group["lr"], group["betas"]
                settings = lr, beta1, beta2, group["eps"], group["weight_decay"]
                arrays = [as_numpy(t) for t in before[n]]
                wanted = formula(*arrays, number + 1, settings, maximize=True)
                results = [(w, *averages_of(o, w)) for o, w in ((mine, p), (torchs, q))]
                # torch's for the CPU multiplies the weights by 1 - lr * weight_decay, rounded; CUDA's has
                # 1 - beta of a rounded beta, an error of 2^-24: of the averages' new terms, and relative to
                # 1 - beta2 of the change, in which a gradient is at most sqrt(steps) times its denominator
                param, grad = (np.abs(a.astype(np.float64)) for a in arrays[:2])
                decayed = arrays[0].astype(np.float64) * (1 - lr * group["weight_decay"])
                change = np.abs(wanted[0][0] - decayed) / (1 - beta2) + 4 * lr / (1 - beta1 ** (number + 1))
                more = UNIT[F32] * (param + change), UNIT[F32] * grad, UNIT[F32] * grad**2
                for (value, bound), extra, of_mine, of_torch in zip(wanted, more, *results, strict=True):
                    assert (np.abs(as_numpy(of_mine).astype(np.float64) - value) <= bound).all(), n
                    assert (np.abs(as_numpy(of_torch).astype(np.float64) - value) <= bound + extra).all(), n
            assert torch.equal(layer.router.weight, other.router.weight) or device != "cpu"
            assert_fresh(layer)
            mine.load_state_dict(copy.deepcopy(torchs.state_dict()))
            assert all(g["fused"] for g in mine.param_groups)
            mine.zero_grad()
            schedule.step()
    assert_fresh(layer)


def as_numpy(t):
    t = t.detach().cpu()
    return t.view(torch.int16).numpy().view(BF16) if t.dtype == torch.bfloat16 else t.numpy()


def averages_of(optimizer, p):
    state = optimizer.state.get(p, {})
    return [state.get(name, torch.zeros_like(p)) for name in ("exp_avg", "exp_avg_sq")]


def without_gradient(layer, optimizer):
    layer.w2.grad = None
    optimizer.step()


def with_amsgrad(layer, optimizer):
    state = torch.optim.AdamW(layer.parameters(), amsgrad=True).state_dict()
    optimizer.load_state_dict(state)
    optimizer.step()


def scaled(layer, optimizer):
    scaler = torch.amp.GradScaler(layer.w13.device.type, init_scale=8.0)
    scaler.scale(layer.w13.sum()).backward()
    scaler.step(optimizer)
    scaler.update()


def strided_average(layer, optimizer):
    optimizer.step()
    average = optimizer.state[layer.w13]["exp_avg"]
    optimizer.state[layer.w13]["exp_avg"] = average.mT.contiguous().mT
    micro_batch(layer)
    optimizer.step()


PLAIN_STEPS = {
    "a weight without a gradient": without_gradient,
    "amsgrad": with_amsgrad,
    "a scaler": scaled,
    "a strided average": strided_average,
}


@pytest.mark.parametrize("step", PLAIN_STEPS)
def test_what_the_kernel_does_not_step_gets_torchs_step(step):
    layer = layer_of()
    optimizer = AdamW(layer.parameters(), lr=1e-2)
    with weights_unchanged(layer, optimizer=optimizer):
        micro_batch(layer)
        before = layer.w13.detach().clone()
        PLAIN_STEPS[step](layer, optimizer)
        assert not torch.equal(before, layer.w13)
        assert layer.fp8_weight_nbytes == 0
        assert_fresh(layer)
        assert layer.fp8_weight_nbytes > 0


def test_outside_of_a_context_steps_are_torchs():
    layer = layer_of()
    other = copy.deepcopy(layer)
    optimizers = AdamW(layer.parameters()), torch.optim.AdamW(other.parameters(), fused=True)
    optimizers = (*optimizers, copy.deepcopy(optimizers[0]))  # which steps parameters of its own
    for _ in range(2):
        micro_batch(layer)
        for p, q in zip(layer.parameters(), other.parameters(), strict=True):
            q.grad = p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        assert all(map(torch.equal, layer.parameters(), other.parameters()))
        assert_fresh(layer)


def test_writes_after_a_step_renew_the_copies_and_steps_that_no_context_allows_raise():
    layer = layer_of()
    optimizer = AdamW(layer.parameters(), lr=1e-2)
    changed = pytest.raises(RuntimeError, match="got changed weights although they were declared unchanged")

    def write():
        with torch.no_grad():
            layer.w13.mul_(1.5)

    with weights_unchanged(layer, optimizer=optimizer):
        for spoil in (
            write,
            lambda: layer.load_state_dict(layer.state_dict()),
        ):
            micro_batch(layer)
            optimizer.step()
            spoil()
            assert casts_of(lambda: micro_batch(layer)) == 2
            assert_fresh(layer)
            optimizer.step()  # which makes copies of the weights as they are now
            assert_fresh(layer)
        micro_batch(layer)
        with weights_unchanged(layer):
            optimizer.step()
            with changed:
                micro_batch(layer)
    assert_fresh(layer)


def test_a_closure_and_a_hook_see_the_weights_of_their_time():
    layer = layer_of()
    optimizer = AdamW(layer.parameters(), lr=1e-2)
    with weights_unchanged(layer, optimizer=optimizer):
        optimizer.step(torch.enable_grad()(lambda: micro_batch(layer)))
        assert casts_of(lambda: micro_batch(layer)) == 0
        assert_fresh(layer)
        optimizer.register_step_post_hook(lambda *_: assert_fresh(layer))
        optimizer.step()
        assert_fresh(layer)


def test_a_step_leaves_the_copies_alone_that_a_backward_has_saved():
    layer = layer_of()
    optimizer = AdamW(layer.parameters(), lr=1e-2)
    with weights_unchanged(layer, optimizer=optimizer):
        micro_batch(layer)
        saved = layer._fp8_weights.copies.tensors
        before = [t.clone() for t in saved]
        optimizer.step()
        assert all(map(torch.equal, saved, before))
        assert not torch.equal(saved[0], layer._fp8_weights.copies.tensors[0])


def test_options_that_the_kernel_does_not_have_are_refused():
    for option in ("amsgrad", "capturable", "differentiable", "foreach", "fused"):
        with pytest.raises(TypeError, match=option):
            AdamW([torch.nn.Parameter(torch.ones(2))], **{option: True})
