"""The router's selection and probabilities by torch in float64, and a check of a backend against the
reference."""

import numpy as np
import torch
from cases import BF16, same_bits

import fp8moe
from fp8moe import RouterConfig
from fp8moe.ops.router import add_product
from fp8moe.reference import router as reference

DEEPSEEK = RouterConfig(8, "sigmoid", num_groups=8, topk_groups=4, scaling_factor=2.5)
CONFIGS = [
    RouterConfig(2),
    RouterConfig(8, renormalize=False),
    RouterConfig(1, "sigmoid", renormalize=False),
    RouterConfig(3, "softmax", num_groups=4, topk_groups=2, scaling_factor=1.5),
    DEEPSEEK,
]
SIZES = [
    (21, 5, RouterConfig(2)),
    (9, 64, DEEPSEEK),
    (5, 256, DEEPSEEK),
    (6, 200, RouterConfig(10, "sigmoid")),
    (5, 1000, RouterConfig(32)),
    (33, 96, CONFIGS[3]),
    (7, 128, CONFIGS[1]),
]
LARGE = [(4096, 256, DEEPSEEK), (5000, 128, CONFIGS[1]), (16_384, 128, RouterConfig(8))]
# (M, N, K) of add_product: 1, 3 and 6 K-steps, tiles and pairs of tiles, and parts of them
SUMS = [(1, 8, 8), (200, 264, 136), (130, 520, 24), (300, 72, 384)]
LARGE_SUMS = [(16_384, 2048, 384), (4096, 7168, 24), (8199, 4096, 104)]
UNIT = 2.0**-24  # the largest relative error of rounding to float32


def random_logits(rng, tokens, experts, biased):
    logits = rng.standard_normal((tokens, experts)).astype(np.float32) * 2
    bias = (rng.standard_normal(experts) * 0.1).astype(np.float32) if biased else None
    return logits, bias


def scores_of(logits, config):
    return torch.sigmoid(logits) if config.score_function == "sigmoid" else torch.softmax(logits, dim=-1)


def sums_of_groups(logits, config, bias):
    """Scores by which experts are selected [T, groups, experts of a group], and the sums of each group's best
    two."""
    choice = scores_of(logits, config)
    choice = choice if bias is None else choice + bias
    groups = choice.unflatten(1, (config.num_groups, -1))
    return groups, groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)


def choice_of(logits, config, bias):
    """Scores by which experts are selected, in float64, with minus infinity for experts of other groups."""
    groups, sums = sums_of_groups(logits, config, bias)
    allowed = torch.zeros_like(sums).scatter(1, sums.topk(config.topk_groups, dim=-1).indices, 1.0)
    return groups.masked_fill(allowed[..., None] == 0, -torch.inf).flatten(1)


def weights_of(logits, ids, config):
    chosen = scores_of(logits, config).gather(1, ids)
    return config.scaling_factor * (chosen / chosen.sum(1, keepdim=True) if config.renormalize else chosen)


def losses_of_lengths(logits, ids, config, lengths):
    """(aux_loss, z_loss) of sequences of unequal lengths, one after the other without padding: the mean over
    the sequences that have tokens, and that over all tokens."""
    parts = [
        losses_of(x, i, config, 1)[0]
        for x, i in zip(logits.split(lengths), ids.split(lengths), strict=True)
        if len(x)
    ]
    z = torch.logsumexp(logits, dim=-1).square()
    return (torch.stack(parts).mean(), z.mean()) if parts else (logits.sum(), logits.sum())


def losses_of(logits, ids, config, sequences):
    """(aux_loss, z_loss), by one-hot masks."""
    tokens, experts = logits.shape
    by_sigmoid = config.score_function == "sigmoid"  # then not as a quotient: the sum may be zero
    shares = torch.softmax(torch.nn.functional.logsigmoid(logits) if by_sigmoid else logits, dim=1)
    mask = torch.nn.functional.one_hot(ids, experts).sum(1).double()
    length = tokens // sequences
    fraction = mask.unflatten(0, (sequences, length)).mean(1) * experts / config.topk
    aux = (fraction * shares.unflatten(0, (sequences, length)).mean(1)).sum(1).mean()
    return aux, torch.logsumexp(logits, dim=-1).square().mean()


def padding(rng, tokens, sequences):
    """A mask of padding anywhere in sequences of unequal length, of which the second has no tokens."""
    mask = rng.random((sequences, tokens // sequences)) < 0.4
    mask[1:2] = True
    return mask.reshape(-1)


def router_agrees(rng, both, tokens, experts, config, biased, sequences, padded=False):
    """The CUDA backend's selection, probabilities, losses and gradient, within the bounds of float32
    arithmetic; of padding, whose logits are NaN, exactly the reference's."""
    logits, bias = random_logits(rng, tokens, experts, biased)
    options = {"expert_bias": bias, "num_sequences": sequences}
    mask = None
    if padded:
        mask = options["padding_mask"] = padding(rng, tokens, sequences or 1)
    kept = np.ones(tokens, bool) if mask is None else ~mask
    logits[~kept] = np.nan
    expected, actual = both(lambda x, **o: fp8moe.route(x, config, **o), logits, **options)
    for routed in (expected, actual):
        assert (routed.topk_ids[~kept] == -1).all()
        assert not routed.topk_probs[~kept].any()
    finite = np.where(kept[:, None], logits, 0)
    spread = np.ptp(finite, axis=1).max(initial=0)
    # expf has an error of 2 units, and its argument is rounded; then a sum of a lane's experts and of 32
    # lanes, a reciprocal (approximate: 2 units) and a product. Twice that for scores divided by their sum (at
    # most 8 and 32 more terms) and the last product.
    score_units = 2 * (2 + spread) + experts / 32 + 5 + 5
    bound = (2 * score_units + 5 + 3) * UNIT
    if biased or config.num_groups > 1:  # values up to 2 are rounded differently
        x, wide_bias = torch.tensor(finite).double(), None if bias is None else torch.tensor(bias).double()
        choice = choice_of(x, config, wide_bias)
        chosen = choice.gather(1, torch.tensor(actual.topk_ids).long().clamp(min=0))
        wanted = choice.topk(config.topk, dim=-1).values
        clear = torch.tensor(kept)  # tokens whose groups' sums are far enough apart
        if config.topk_groups < config.num_groups:
            sums = sums_of_groups(x, config, wide_bias)[1].sort(dim=1, descending=True).values
            apart = sums[:, config.topk_groups - 1] - sums[:, config.topk_groups] > 4 * bound
            assert (~apart[clear]).sum() <= max(1, 0.1 * clear.sum())  # a tenth of five tokens is none
            clear &= apart
        torch.testing.assert_close(chosen[clear], wanted[clear], rtol=0, atol=2 * bound)
        same = (expected.topk_ids == actual.topk_ids).all(axis=1)
        assert same.mean() > 0.9
    else:
        assert same_bits(expected.topk_ids, actual.topk_ids)
        same = np.ones(tokens, bool)
    np.testing.assert_allclose(actual.topk_probs[same], expected.topk_probs[same], rtol=bound)
    losses = {}
    if sequences is not None:
        if same.all():
            assert same_bits(expected.tokens_per_expert, actual.tokens_per_expert)
            # and the sum of a warp's tokens, of 8 warps, and 2 more roundings
            more = (tokens / sequences + 8 + 3) * UNIT
            np.testing.assert_allclose(actual.aux_loss, expected.aux_loss, rtol=bound + more)
            np.testing.assert_allclose(actual.z_loss, expected.z_loss, rtol=bound + more)
        losses = {"tokens_per_expert": expected.tokens_per_expert, "padding_mask": mask}
        losses["grad_aux_loss"] = rng.standard_normal(1).astype(np.float32)
        losses["grad_z_loss"] = rng.standard_normal(1).astype(np.float32)
    elif padded:
        losses = {"padding_mask": mask}
    grads = rng.standard_normal(expected.topk_probs.shape).astype(np.float32)
    arguments = grads, logits, expected.topk_ids
    expected, actual = both(
        lambda g, x, i, **o: fp8moe.route_backward(g, x, i, config, **o), *arguments, **losses
    )
    # bounded by the terms' magnitudes, because differences may cancel
    wide = torch.from_numpy(finite.astype(np.float64))
    scores = scores_of(wide, config).numpy()
    chosen = np.take_along_axis(scores, arguments[2].astype(np.int64), 1)
    sizes = np.abs(grads) * config.scaling_factor
    if config.renormalize:
        total = chosen.sum(axis=1, keepdims=True)
        sizes = (sizes + (sizes * chosen / total).sum(axis=1, keepdims=True)) / total
    of_scores = np.zeros_like(scores)
    np.put_along_axis(of_scores, arguments[2].astype(np.int64), sizes, 1)
    size = scores * (of_scores + (of_scores * scores).sum(axis=1, keepdims=True))
    if sequences is not None:
        coefficients = reference.aux_coefficients(kept.reshape(sequences, -1).sum(1), experts, config.topk)
        coefficients = coefficients[:, None] * abs(losses["grad_aux_loss"][0])
        counts = np.repeat(losses["tokens_per_expert"] * coefficients, tokens // sequences, axis=0)
        shares = scores / scores.sum(axis=1, keepdims=True)
        size = size + shares * (counts + (counts * shares).sum(axis=1, keepdims=True))
        z = (wide.logsumexp(1, keepdim=True).abs() * wide.softmax(1)).numpy()
        size = size + z * abs(losses["grad_z_loss"][0]) * 2 / max(kept.sum(), 1)
    assert (np.abs(actual - expected) <= np.where(kept[:, None], 4 * bound * size + 1e-38, 0)).all()
    assert not actual[~kept].any()
    split, parts = both(
        lambda g, *a, **o: fp8moe.route_backward(g, *a, config, split=True, **o), *arguments, **losses
    )
    assert parts.dtype == split.dtype
    parts = parts.astype(np.float64).reshape(tokens, 3, experts).sum(axis=1)
    assert not parts[~kept].any()
    np.testing.assert_allclose(parts, actual.astype(np.float64), rtol=0, atol=2.0**-133)


def sums_agree(both, rng, rows, width, depth):
    """addend + a @ b against float64; a NaN or an infinity of the addend stays in its place."""
    shapes = (rows, width), (rows, depth), (depth, width)
    addend, a, b = (rng.standard_normal(shape).astype(BF16) for shape in shapes)
    wide_addend, wide_a, wide_b = (v.astype(np.float64) for v in (addend, a, b))
    # depth + 1 roundings to float32 of sums of at most the terms' magnitudes (tensor cores truncate: twice
    # the unit), and one to bfloat16
    bound = 2 * UNIT * (depth + 1) * (np.abs(wide_addend) + np.abs(wide_a) @ np.abs(wide_b))
    exact = wide_addend + wide_a @ wide_b
    odd = rng.random(addend.shape) < 0.01
    addend[odd] = np.inf
    addend[odd & (rng.random(addend.shape) < 0.5)] = np.nan
    for actual in both(add_product, addend, a, b):
        actual = actual.astype(np.float64)
        np.testing.assert_array_equal(actual[odd], addend[odd].astype(np.float64))
        error = np.abs(actual - exact)
        assert (error <= 2.0**-8 * np.abs(exact) + bound)[~odd].all()
