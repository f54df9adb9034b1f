"""The router: its selection compared with torch in float64 and with the published models' code, its gradient
with autograd's, and the CUDA backend with the reference."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from backends import HAS_HARNESS, ON_CPU, only_on_cpu, over
from cases import BF16, generator, poisoned, same_bits
from hypothesis import given
from hypothesis import strategies as st
from router_checks import (
    CONFIGS,
    DEEPSEEK,
    LARGE,
    LARGE_SUMS,
    SIZES,
    SUMS,
    UNIT,
    choice_of,
    losses_of,
    losses_of_lengths,
    padding,
    random_logits,
    router_agrees,
    scores_of,
    sums_agree,
    weights_of,
)

import fp8moe
import fp8moe.torch
from fp8moe import RouterConfig
from fp8moe.adapters.torch import router as torch_router
from fp8moe.adapters.torch.layer import FP8FlowMoE
from fp8moe.adapters.torch.router import Router
from fp8moe.ops.router import add_product
from fp8moe.reference import router as reference

RNG = generator()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_selection_equals_torch_in_float64(config, biased):
    logits, bias = random_logits(RNG, 40, 64, biased)
    actual = fp8moe.route(logits, config, expert_bias=bias)
    logits, bias = torch.tensor(logits).double(), None if bias is None else torch.tensor(bias).double()
    choice, ids = choice_of(logits, config, bias), torch.tensor(actual.topk_ids).long()
    assert all(len(set(row)) == config.topk for row in actual.topk_ids.tolist())
    # a score, a bias and their sum are rounded before they are compared: at most 2 units of values below 2
    ours = choice.gather(1, ids)
    torch.testing.assert_close(ours, choice.topk(config.topk, dim=-1).values, rtol=0, atol=4 * UNIT)
    wanted = weights_of(logits, ids, config).numpy()
    np.testing.assert_allclose(actual.topk_probs, wanted, rtol=UNIT + 1e-12, atol=0)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("sequences", [1, 4])
def test_losses_and_gradients_equal_autograd(config, sequences):
    logits, bias = random_logits(RNG, 40, 64, True)
    actual = fp8moe.route(logits, config, expert_bias=bias, num_sequences=sequences)
    x = torch.tensor(logits).double().requires_grad_()
    ids = torch.tensor(actual.topk_ids).long()
    aux, z = losses_of(x, ids, config, sequences)
    for ours, wanted in ((actual.aux_loss, aux), (actual.z_loss, z)):
        np.testing.assert_allclose(ours, [wanted.item()], rtol=UNIT + 1e-12)
    mask = torch.nn.functional.one_hot(ids, 64).sum(1).unflatten(0, (sequences, -1)).sum(1)
    assert (actual.tokens_per_expert == mask.numpy()).all()
    grads = RNG.standard_normal(actual.topk_probs.shape).astype(np.float32)
    of_losses = RNG.standard_normal((2, 1)).astype(np.float32)
    total = (weights_of(x, ids, config) * torch.tensor(grads).double()).sum()
    total = total + aux * float(of_losses[0, 0]) + z * float(of_losses[1, 0])
    (wanted,) = torch.autograd.grad(total, x)
    losses = {"tokens_per_expert": actual.tokens_per_expert}
    losses |= {"grad_aux_loss": of_losses[0], "grad_z_loss": of_losses[1]}
    ours = fp8moe.route_backward(grads, logits, actual.topk_ids, config, **losses)
    # float64 throughout, rounded once; 1e-12 is 4000 units of float64 rounding of terms up to 1
    np.testing.assert_allclose(ours, wanted.numpy(), rtol=UNIT, atol=1e-12)
    split = fp8moe.route_backward(grads, logits, actual.topk_ids, config, split=True, **losses)
    parts = split.astype(np.float64).reshape(40, 3, 64).sum(axis=1)
    # 8 bits per part: exact unless the third part is subnormal
    np.testing.assert_allclose(parts, ours.astype(np.float64), rtol=0, atol=2.0**-133)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("sequences", [1, 5])
def test_padding_is_as_if_it_were_absent(config, sequences):
    """Selection, losses, counts and gradient are those of the other tokens alone, in sequences of unequal
    lengths, also where the padding's logits are NaN."""
    logits, bias = random_logits(RNG, 60, 64, True)
    mask = padding(RNG, 60, sequences)
    kept, lengths = ~mask, (~mask).reshape(sequences, -1).sum(1).tolist()
    alone = fp8moe.route(logits[kept], config, expert_bias=bias)
    logits[mask] = RNG.choice(np.array([np.nan, np.inf, 1e30], np.float32), (mask.sum(), 1))
    options = {"num_sequences": sequences, "padding_mask": mask}
    actual = fp8moe.route(logits, config, expert_bias=bias, **options)
    assert same_bits(actual.topk_ids[kept], alone.topk_ids)
    assert same_bits(actual.topk_probs[kept], alone.topk_probs)
    assert (actual.topk_ids[mask] == -1).all()
    assert not actual.topk_probs[mask].any()
    x = torch.tensor(logits[kept]).double().requires_grad_()
    ids = torch.tensor(alone.topk_ids).long()
    of_each = [torch.bincount(part.flatten(), minlength=64).tolist() for part in ids.split(lengths)]
    assert actual.tokens_per_expert.tolist() == of_each
    aux, z = losses_of_lengths(x, ids, config, lengths)
    for ours, wanted in ((actual.aux_loss, aux), (actual.z_loss, z)):
        np.testing.assert_allclose(ours, [wanted.item()], rtol=UNIT + 1e-12)
    grads = RNG.standard_normal(actual.topk_probs.shape).astype(np.float32)
    of_losses = RNG.standard_normal((2, 1)).astype(np.float32)
    total = (weights_of(x, ids, config) * torch.tensor(grads[kept]).double()).sum()
    total = total + aux * float(of_losses[0, 0]) + z * float(of_losses[1, 0])
    (wanted,) = torch.autograd.grad(total, x)
    losses = {"tokens_per_expert": actual.tokens_per_expert, "padding_mask": mask}
    losses |= {"grad_aux_loss": of_losses[0], "grad_z_loss": of_losses[1]}
    for split in (False, True):
        ours = fp8moe.route_backward(grads, logits, actual.topk_ids, config, split=split, **losses)
        ours = ours.astype(np.float64).reshape(60, -1, 64).sum(axis=1)
        assert not ours[mask].any()
        # as without padding; a split gradient's third part may be subnormal
        np.testing.assert_allclose(ours[kept], wanted.numpy(), rtol=UNIT * (1 + 2.0**-24), atol=1e-12)


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_padding_only_gives_zeros(function):
    config, logits = RouterConfig(2, function), np.full((6, 8), np.nan, np.float32)
    mask, ones, grads = np.ones(6, bool), np.ones(1, np.float32), np.ones((6, 2), np.float32)

    def run(logits, mask, grads, ones):
        routed = fp8moe.route(logits, config, num_sequences=2, padding_mask=mask)
        losses = {"grad_aux_loss": ones, "grad_z_loss": ones, "padding_mask": mask}
        losses["tokens_per_expert"] = routed.tokens_per_expert
        return routed, fp8moe.route_backward(grads, logits, routed.topk_ids, config, **losses)

    results = [run(logits, mask, grads, ones)]
    if HAS_HARNESS:
        results = ON_CPU.both(run, logits, mask, grads, ones)
    for routed, grad in results:
        assert (routed.topk_ids == -1).all()
        for zeros in (routed.topk_probs, routed.aux_loss, routed.z_loss, routed.tokens_per_expert, grad):
            assert not np.asarray(zeros).any()


def test_deepseek_v3_equals_transformers():
    """Compared with the model's code in transformers, whose scores are float32."""
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    from transformers import DeepseekV3Config

    settings = DeepseekV3Config(hidden_size=64, n_routed_experts=64, n_group=8, topk_group=4)
    settings.num_experts_per_tok, settings.routed_scaling_factor, settings.norm_topk_prob = 8, 2.5, True
    router = modeling.DeepseekV3TopkRouter(settings)
    logits, bias = random_logits(RNG, 50, 64, True)
    with torch.no_grad():
        router.weight.copy_(torch.eye(64))  # the identity, so that logits equal the rows
        router.e_score_correction_bias.copy_(torch.tensor(bias))
        _, weights, ids = router(torch.tensor(logits))
    actual = fp8moe.route(logits, DEEPSEEK, expert_bias=bias)
    order, theirs = np.argsort(actual.topk_ids, axis=1), np.argsort(ids.numpy(), axis=1)
    assert (np.take_along_axis(actual.topk_ids, order, 1) == np.take_along_axis(ids.numpy(), theirs, 1)).all()
    # error of transformers: a sigmoid within 2 units, a sum of 8, a quotient and a product, each rounded
    ours, wanted = (
        np.take_along_axis(w, o, 1) for w, o in ((actual.topk_probs, order), (weights.numpy(), theirs))
    )
    np.testing.assert_allclose(ours, wanted, rtol=(4 + 7 + 2) * UNIT)


def test_losses_equal_mixtrals_and_megatrons():
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    logits, _ = random_logits(RNG, 64, 16, False)
    actual = fp8moe.route(logits, RouterConfig(4), num_sequences=1)
    x = torch.tensor(logits)
    wanted = mixtral.load_balancing_loss_func((x,), 16, 4)
    # error of the other implementation: means of 64 rounded values and a sum of 64 products, in float32
    bound = (64 + 64 + 4) * UNIT
    np.testing.assert_allclose(4 * actual.aux_loss, wanted.numpy(), rtol=bound)
    counts = torch.tensor(actual.tokens_per_expert[0])
    wanted = utils.switch_load_balancing_loss_func(torch.softmax(x, -1), counts, 64, 4, 16, 1.0)
    np.testing.assert_allclose(actual.aux_loss, wanted.numpy(), rtol=bound)
    np.testing.assert_allclose(actual.z_loss, utils.z_loss_func(x, 1.0).numpy(), rtol=bound)


def test_ties_select_the_lower_expert_and_nan_is_selected_last():
    logits = np.zeros((3, 6), np.float32)
    logits[1] = [-0.0, 0.0, 1.0, -np.inf, 0.0, -0.0]
    logits[2, :5] = np.nan
    actual = fp8moe.route(logits, RouterConfig(4))
    assert actual.topk_ids[:2].tolist() == [[0, 1, 2, 3], [2, 0, 1, 4]]
    assert actual.topk_ids[2, 0] == 5
    assert actual.topk_ids[2, 1:].tolist() == [0, 1, 2]
    assert np.isnan(actual.topk_probs[2]).all()
    assert not np.isnan(actual.topk_probs[:2]).any()
    # a NaN of a selected group comes before the numbers of the others
    groups = RouterConfig(3, "sigmoid", num_groups=2)
    logits = np.array([[1, np.nan, 2, 0, 0, 0], [9, 9, np.nan, 9, 9, 8]], np.float32)
    assert fp8moe.route(logits, groups).topk_ids.tolist() == [[2, 0, 1], [0, 1, 2]]


def test_saturated_scores_are_ordered_by_their_logits():
    logits = np.array([[90.0, 95.0, 91.0, 0.0], [-200.0, -150.0, -170.0, 60.0]], np.float32)
    for function in ("softmax", "sigmoid"):
        actual = fp8moe.route(logits, RouterConfig(3, function))
        assert actual.topk_ids.tolist() == [[1, 2, 0], [3, 1, 2]]


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("largest", [-60.0, -95.0, -120.0, -5000.0])
def test_losses_of_logits_far_below_zero(function, largest):
    """The shares of an expert are quotients of scores, which may be subnormal numbers or zeros."""
    config = RouterConfig(2, function)
    logits = (largest - np.abs(RNG.standard_normal((6, 8)) * 3)).astype(np.float32)
    logits[RNG.integers(6)] = RNG.standard_normal(8)  # a token with usual logits
    grads = np.zeros((6, 2), np.float32), np.ones(1, np.float32)

    def route(logits, grad_probs, grad_aux_loss):
        routed = fp8moe.route(logits, config, num_sequences=1)
        losses = {"tokens_per_expert": routed.tokens_per_expert, "grad_aux_loss": grad_aux_loss}
        return routed, fp8moe.route_backward(grad_probs, logits, routed.topk_ids, config, **losses)

    x = torch.tensor(logits).double().requires_grad_()
    results = [route(logits, *grads)]
    if HAS_HARNESS:
        results.append(ON_CPU.both(route, logits, *grads)[1])
    for (routed, gradient), bound in zip(results, (2 * UNIT, 200 * UNIT), strict=False):
        # float64; or 8 scores with errors of 2 units and of the spread of their arguments, and their sums
        aux, _ = losses_of(x, torch.tensor(routed.topk_ids).long(), config, 1)
        (wanted,) = torch.autograd.grad(aux, x)
        np.testing.assert_allclose(routed.aux_loss, [aux.item()], rtol=bound)
        np.testing.assert_allclose(gradient, wanted.numpy(), rtol=0, atol=bound * wanted.abs().max().item())


@only_on_cpu
@pytest.mark.parametrize("experts", [6, 40, 300])
@pytest.mark.parametrize("config", [RouterConfig(4), RouterConfig(4, "sigmoid"), DEEPSEEK], ids=str)
def test_ties_and_nan_in_the_kernels(backend, experts, config):
    """Zeros of both signs are equal, the lower expert is the first, a NaN the last."""
    experts += -experts % config.num_groups
    special = np.array([np.nan, -np.inf, 0.0, -0.0, 1.0, 1.0, 2.0], np.float32)
    logits = RNG.choice(special, (40, experts), p=[0.05, 0.05, 0.3, 0.3, 0.1, 0.1, 0.1])
    config = dataclasses.replace(config, topk=min(config.topk, experts // config.num_groups))
    expected, actual = backend.both(lambda x: fp8moe.route(x, config), logits)
    assert same_bits(expected.topk_ids, actual.topk_ids)


def variants(sequences):
    """(biased, sequences, padded)."""
    return (
        *((False, None, False), (True, 1, False), (False, sequences, False)),
        *((True, None, True), (False, sequences, True)),
    )


@over(
    "tokens, experts, config, biased, sequences, padded",
    on_cpu=[(*sizes, *variant) for sizes in SIZES for variant in variants(3)],
    on_gpu=[(*sizes, *variant) for sizes in (*SIZES, *LARGE) for variant in variants(4)],
)
def test_kernels_agree(backend, tokens, experts, config, biased, sequences, padded):
    tokens = tokens - tokens % (sequences or 1)
    router_agrees(RNG, backend.both, tokens, experts, config, biased, sequences, padded)


@over(
    "sizes, device",
    # with 10 multiprocessors the last tiles are computed in halves
    on_cpu=[(sizes, {"multiprocessors": count}) for sizes in SUMS for count in (2, 10)],
    on_gpu=[(sizes, {}) for sizes in (*SUMS, *LARGE_SUMS)],
)
def test_add_product(backend, sizes, device):
    backend.skip_without("wgmma")
    sums_agree(functools.partial(backend.both, **device), RNG, *sizes)


@only_on_cpu
def test_add_product_needs_its_kernel(backend):
    a = np.ones((16, 16), BF16)
    with pytest.raises(ValueError, match=r"addend, a, b: got a sum that no kernel takes \(.*sm_89"):
        backend.both(add_product, a, a, a, architecture="sm_89")
    with pytest.raises(ValueError, match="K is 4, no multiple of 8"):
        backend.both(add_product, a, a[:, :4].copy(), a[:4])
    with pytest.raises(ValueError, match=r"a: got shape \(16, 0\); wanted K of at least 1"):
        add_product(a, a[:, :0].copy(), a[:0])
    assert backend.both(add_product, a[:0], a[:0], a)[1].shape == (0, 16)


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True])
def test_ids_without_an_expert_have_no_gradient(function, renormalize):
    config = RouterConfig(4, function, renormalize=renormalize)
    ids = np.array([[3, -1, 3, 9], [-(2**31), 2**31 - 1, 0, 8]], np.int32)  # 8 experts; 3 is selected twice
    logits = RNG.standard_normal((2, 8)).astype(np.float32)
    grads = RNG.standard_normal((2, 4)).astype(np.float32)
    x = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    exists = torch.tensor((ids >= 0) & (ids < 8))
    chosen = scores_of(x, config).gather(1, torch.tensor(ids).long().where(exists, 0)) * exists
    if renormalize:
        chosen = chosen / (chosen.sum(1, keepdim=True) + 1e-20)
    (chosen * torch.tensor(grads)).sum().backward()
    wanted = x.grad.numpy()
    actual = fp8moe.route_backward(grads, logits, ids, config)
    np.testing.assert_allclose(actual, wanted, rtol=2 * UNIT, atol=1e-15)  # float64 sums of terms below 10
    if HAS_HARNESS:
        by_kernel = ON_CPU.both(lambda *a: fp8moe.route_backward(*a, config), grads, logits, ids)[1]
        # about 30 roundings of terms of at most the gradients' sum over the sum of the selected scores
        size = 4 * np.abs(grads).sum() / scores_of(x, config).detach().numpy()[[0, 1], [3, 0]].min()
        np.testing.assert_allclose(by_kernel, wanted, rtol=0, atol=30 * UNIT * size)


def test_the_kernels_write_every_element_of_poisoned_outputs():
    logits, _ = random_logits(RNG, 8, 16, False)
    out = fp8moe.Routed(
        poisoned((8, 2), np.int32), poisoned((8, 2), np.float32), *(poisoned((1,), np.float32) for _ in "ab"),
        poisoned((2, 16), np.int32),
    )  # fmt: skip
    mask = RNG.random(8) < 0.5
    reference.route(logits, None, mask, config=RouterConfig(2), out=out)
    again = fp8moe.route(logits, RouterConfig(2), num_sequences=2, padding_mask=mask)
    assert all(same_bits(getattr(out, name), getattr(again, name)) for name in vars(out))


def test_no_tokens():
    actual = fp8moe.route(np.zeros((0, 4), np.float32), RouterConfig(2), num_sequences=1)
    assert actual.topk_ids.shape == (0, 2)
    assert [actual.aux_loss.item(), actual.z_loss.item(), actual.tokens_per_expert.sum()] == [0, 0, 0]


@given(st.integers(1, 32), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_ids_are_distinct_experts_for_all_logits(topk, experts, seed):
    rng = np.random.default_rng(seed)
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e38, -1e38, 1e-45, 1.0], np.float32)
    logits = rng.choice(special, (5, max(topk, experts)))
    with np.errstate(all="ignore"):
        ids = fp8moe.route(logits, RouterConfig(topk, rng.choice(["softmax", "sigmoid"]))).topk_ids
    assert ids.min() >= 0
    assert ids.max() < logits.shape[1]
    assert all(len(set(row)) == topk for row in ids.tolist())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": np.zeros((2, 8))}, TypeError, "logits: got dtype float64; wanted float32"),
        ({"logits": np.zeros((2, 1025), np.float32)}, ValueError, "logits: got 1025 experts; wanted at most"),
        ({"config": RouterConfig(9)}, ValueError, "topk: got 9; wanted at most 8"),
        ({"config": RouterConfig(2, num_groups=3)}, ValueError, "num_groups: got 3 for 8 experts"),
        ({"config": RouterConfig(5, num_groups=4, topk_groups=2)}, ValueError, "at most 4, the experts of 2"),
        ({"config": 2}, TypeError, "config: got int"),
        ({"expert_bias": np.zeros(7, np.float32)}, ValueError, "expert_bias: got shape"),
        ({"num_sequences": 3}, ValueError, "num_sequences: got 3 for 2 tokens"),
        (
            {"padding_mask": np.ones(2, np.int64)},  # an attention mask, whose ones are tokens
            TypeError,
            "padding_mask: got dtype int64; wanted bool; True where a token is padding; pass attention_mask",
        ),
        ({"padding_mask": np.ones(3, bool)}, ValueError, r"padding_mask: got shape \[3\]; wanted \[2\]"),
        ({"padding_mask": np.ones((1, 2), bool)}, ValueError, r"padding_mask: got shape \[1, 2\]; wanted"),
    ],
)  # fmt: skip
def test_validation_errors(change, error, message):
    arguments = {"logits": np.zeros((2, 8), np.float32), "config": RouterConfig(2), **change}
    with pytest.raises(error, match=message):
        fp8moe.route(**arguments)


@pytest.mark.parametrize("given", ["grad_aux_loss", "grad_z_loss"])
def test_the_backward_of_losses_with_padding_needs_the_counts(given):
    arrays = np.zeros((2, 2), np.float32), np.zeros((2, 8), np.float32), np.zeros((2, 2), np.int32)
    options = {given: np.ones(1, np.float32), "padding_mask": np.zeros(2, bool)}
    with pytest.raises(ValueError, match=f"tokens_per_expert: got None with {given}"):
        fp8moe.route_backward(*arrays, RouterConfig(2), **options)
    with pytest.raises(TypeError, match="padding_mask: got dtype uint8; wanted bool"):
        fp8moe.route_backward(*arrays, RouterConfig(2), padding_mask=np.zeros(2, np.uint8))


def test_invalid_configurations_raise():
    for options in ({"topk": 0}, {"topk": 33}, {"topk": 2, "num_groups": 2, "topk_groups": 3}):
        with pytest.raises(ValueError, match="got"):
            RouterConfig(**options)
    with pytest.raises(ValueError, match="score_function: got 'relu'"):
        RouterConfig(2, "relu")
    for config, message in (
        (RouterConfig(9), "config.topk: got 9; wanted at most 8"),
        (RouterConfig(2, num_groups=3), "config.num_groups: got 3 for 8 experts"),
        (RouterConfig(4, num_groups=4), "config.topk: got 4; wanted at most 2, the experts of 1 of 4 groups"),
    ):
        with pytest.raises(ValueError, match=message):
            Router(64, 8, config)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mask", [None, padding(RNG, 12, 2)], ids=["whole", "padded"])
def test_the_torch_function_has_the_librarys_gradients(compiled, mask):
    logits, bias = random_logits(RNG, 12, 16, True)
    config = RouterConfig(4, "sigmoid", num_groups=4, topk_groups=2)
    x, options = torch.tensor(logits).requires_grad_(), {"num_sequences": 2, "padding_mask": mask}
    given = options | {"padding_mask": None if mask is None else torch.tensor(mask)}

    def loss(x, bias):
        actual = fp8moe.torch.route(x, config, expert_bias=bias, **given)
        weights = torch.arange(48.0).reshape(12, 4)
        return (actual.topk_probs * weights).sum() + 3 * actual.aux_loss.sum() + 5 * actual.z_loss.sum()

    run = torch.compile(loss, backend="aot_eager", fullgraph=True) if compiled else loss
    run(x, torch.tensor(bias)).backward()
    actual = fp8moe.route(logits, config, expert_bias=bias, **options)
    wanted = fp8moe.route_backward(
        np.arange(48, dtype=np.float32).reshape(12, 4),
        logits,
        actual.topk_ids,
        config,
        tokens_per_expert=actual.tokens_per_expert,
        grad_aux_loss=np.full(1, 3, np.float32),
        grad_z_loss=np.full(1, 5, np.float32),
        padding_mask=mask,
    )
    assert same_bits(x.grad.numpy(), wanted)


def test_the_torch_function_takes_tensors():
    with pytest.raises(
        TypeError, match=r"logits: got ndarray; wanted a tensor; pass torch\.from_dlpack\(logits\)"
    ):
        fp8moe.torch.route(np.ones((3, 4), np.float32), RouterConfig(2))


def test_a_router_module_balances_by_its_bias():
    """With the update of arXiv 2408.15664 the most selected expert is selected less often."""
    torch.manual_seed(0)
    router, x = Router(32, 8, RouterConfig(2, "sigmoid"), expert_bias=True), torch.randn(256, 32) + 0.5
    assert [n for n, _ in router.named_buffers()] == ["expert_bias"]
    spreads = []
    for _ in range(40):
        *_, counts = router(x, num_sequences=1)
        spreads.append(counts.max().item())
        router.expert_bias += 0.02 * torch.sign(counts[0].float().mean() - counts[0])
    assert min(spreads[-5:]) < 0.75 * spreads[0]
    before = router.expert_bias.clone()
    assert torch.equal(router.bfloat16().expert_bias, before)
    assert router.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(("jitted", "padded"), [(False, False), (True, False), (True, True)])
def test_the_jax_function_has_the_librarys_gradients(jitted, padded):
    jax = pytest.importorskip("jax")
    from fp8moe.adapters.jax import ops as jax_ops

    logits, bias = random_logits(RNG, 12, 16, True)
    config = RouterConfig(4, "sigmoid", num_groups=4, topk_groups=2)
    weights, mask = np.arange(48, dtype=np.float32).reshape(12, 4), padding(RNG, 12, 2) if padded else None

    def loss(x, bias):
        actual = jax_ops.route(x, config, expert_bias=bias, num_sequences=2, padding_mask=mask)
        return (actual.topk_probs * weights).sum() + 3 * actual.aux_loss.sum() + 5 * actual.z_loss.sum()

    gradient = jax.grad(loss, argnums=(0, 1))
    actual, of_bias = (jax.jit(gradient) if jitted else gradient)(logits, bias)
    routed = fp8moe.route(logits, config, expert_bias=bias, num_sequences=2, padding_mask=mask)
    wanted = fp8moe.route_backward(
        weights,
        logits,
        routed.topk_ids,
        config,
        tokens_per_expert=routed.tokens_per_expert,
        grad_aux_loss=np.full(1, 3, np.float32),
        grad_z_loss=np.full(1, 5, np.float32),
        padding_mask=mask,
    )
    assert same_bits(np.asarray(actual), wanted)
    assert not np.asarray(of_bias).any()
    if padded:  # traced too; and its errors are the library's
        jax.jit(jax.grad(lambda x, m: jax_ops.route(x, config, padding_mask=m).topk_probs.sum()))(
            logits, mask
        )
        with pytest.raises(TypeError, match="padding_mask: got dtype int32; wanted bool; True where a token"):
            jax_ops.route(logits, config, padding_mask=mask.astype(np.int32))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("sequences", [1, 4])
def test_a_router_module_with_padding(sequences, device):
    """Its results and gradients are those of the other rows alone, whatever the padding's values; on CUDA
    with the product by tensor cores."""
    torch.manual_seed(int(RNG.integers(2**31)))
    router = Router(32, 8, RouterConfig(2, "sigmoid", renormalize=False), device=device)
    mask = torch.tensor(padding(RNG, 24, sequences), device=device)
    x = torch.randn(24, 32, device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    x[mask] = torch.nan
    rows, alone = x.requires_grad_(), x.detach()[~mask].requires_grad_()
    lengths = (~mask).unflatten(0, (sequences, -1)).sum(1).tolist()
    dprobs = torch.randn(24, 2, device=device)

    def gradients(rows, dprobs, ids, probs, aux, z):
        router.zero_grad()
        ((probs * dprobs).sum() + 3 * aux.sum() + 5 * z.sum()).backward()
        return ids, probs.detach(), aux.detach(), z.detach(), rows.grad, router.weight.grad.clone()

    ids, probs, aux, z, counts = router(rows, num_sequences=sequences, padding_mask=mask)
    ours = gradients(rows, dprobs, ids, probs, aux, z)
    ids, probs = router(alone)
    logits = alone.double() @ router.weight.double().t()
    aux, z = losses_of_lengths(logits, ids.long(), router.config, lengths)
    wanted = gradients(alone, dprobs[~mask], ids, probs, aux, z)
    assert counts.sum(1).tolist() == [2 * length for length in lengths]
    for place in (0, 1, 4):
        assert not (ours[place][mask] + (place == 0)).any()  # ids -1, probabilities and gradients 0
        ours = (*ours[:place], ours[place][~mask], *ours[place + 1 :])
    for a, b in zip(ours, wanted, strict=True):
        # float32 sums of up to 32 products and 24 rows of numbers below 64, where the other has float64; in
        # bfloat16 the other's gradient is a sum of two that were rounded
        unit = UNIT if a.dtype != torch.bfloat16 else 2.0**-8 / 64
        torch.testing.assert_close(
            a,
            b.to(a.dtype).reshape(a.shape),
            rtol=64 * unit,
            atol=64 * 64 * UNIT if a.dtype != torch.bfloat16 else 2.0**-6,
        )
    with torch.no_grad():  # of padding only
        _, probs, *losses = router(x, num_sequences=sequences, padding_mask=torch.ones_like(mask))
    assert not any(t.any() for t in (probs, *losses))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_bfloat16_parts(monkeypatch, dtype):
    """The tensor cores' way, with CPU products in float64, beside the float32 product."""
    monkeypatch.setattr(
        torch_router.torch,
        "mm",
        lambda a, b, out_dtype=None: (a.double() @ b.double()).to(out_dtype or a.dtype),
    )
    router = Router(96, 12, RouterConfig(3), dtype=dtype)
    x = torch.randn(40, 96, dtype=torch.bfloat16, requires_grad=True)
    dprobs, found = torch.randn(40, 3), []
    for parts in (True, False):
        monkeypatch.setattr(torch_router, "_on_tensor_cores", lambda *_, parts=parts: parts)
        ids, probs = router(x)
        grads = torch.autograd.grad(probs, (x, router.weight), dprobs)
        found.append((ids, probs.detach(), *(grad.double() for grad in grads)))
    (ids, probs, dx, dw), (right_ids, right, right_dx, right_dw) = found
    assert torch.equal(ids, right_ids)
    # float32 sums of 96 products of numbers whose parts have 24 bits; dx, and dw of a bfloat16 weight, are
    # rounded to 8 bits by both
    torch.testing.assert_close(probs, right, rtol=0, atol=96 * UNIT)
    assert (dx - right_dx).norm() <= 2.0**-8 * right_dx.norm()
    assert (dw - right_dw).norm() <= (2.0**-8 if dtype == torch.bfloat16 else 2.0**-18) * right_dw.norm()


@pytest.mark.parametrize("take", ["function", "module", "layer"])
@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (
            torch.ones(6, dtype=torch.int64),
            TypeError,
            "got dtype torch.int64; wanted torch.bool, True where a",
        ),
        (torch.ones(5, dtype=torch.bool), ValueError, r"got shape \[5\]; wanted \[6\]"),
        (torch.ones(1, 6, dtype=torch.bool), ValueError, r"got shape \[1, 6\]; wanted \[6\]"),
        (torch.ones(6, dtype=torch.bool, device="meta"), TypeError, "got a tensor on meta; wanted cpu"),
        (np.ones(6, bool), TypeError, "got ndarray; wanted a tensor"),
    ],
)
def test_masks_that_torch_refuses(take, mask, error, message):
    config = RouterConfig(2)
    call = {
        "function": lambda: fp8moe.torch.route(torch.ones(6, 8), config, padding_mask=mask),
        "module": lambda: Router(8, 8, config)(torch.ones(6, 8), padding_mask=mask),
        "layer": lambda: FP8FlowMoE(8, 8, 8, 2)(torch.ones(6, 8), padding_mask=mask),
    }[take]
    with pytest.raises(error, match=f"padding_mask: {message}"):
        call()


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.ones(3, 31), ValueError, r"x: got shape \[3, 31\]; wanted \[T, 32\]"),
        (torch.ones(2, 3, 32), ValueError, r"x: got shape \[2, 3, 32\]; wanted \[T, 32\]; pass x.reshape"),
        (torch.ones(3, 32).int(), TypeError, "x: got dtype torch.int32"),
        (torch.ones(3, 32, device="meta"), TypeError, "x: got a tensor on meta"),
    ],
)
def test_rows_that_a_module_cannot_route(x, error, message):
    with pytest.raises(error, match=message):
        Router(32, 8, RouterConfig(2))(x)
