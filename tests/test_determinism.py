"""A hundred repetitions of an operation and of a layer on a GPU give the same bits."""

import numpy as np
import pytest
from backends import GPU
from cases import BF16, assert_same, layer_inputs, same_bits

import fp8moe

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_outputs")]


def test_a_hundred_repeats_of_each_fp8_operation():
    rng = np.random.default_rng(3)
    h = GPU.upload((rng.standard_normal((300, 512)) * 4).astype(BF16))
    grad = GPU.upload(rng.standard_normal((300, 256)).astype(BF16))
    probs = GPU.upload(rng.random(300).astype(np.float32))
    offsets = GPU.upload(np.array([0, 48, 48, 208, 288], np.int32))
    plan = GPU.upload(fp8moe.plan_topk(rng.integers(0, 4, (300, 2)).astype(np.int32), 4, align_size=16))
    q = fp8moe.quantize(h)

    def run():
        ways = fp8moe.quantize(h, columnwise=True)
        transposed = fp8moe.scaling_aware_transpose(q, offsets, align_size=16)
        gathered = fp8moe.permute_transpose(q, plan)
        blocks = fp8moe.scaling_aware_transpose(q, target="block")
        options = {"expert_offsets": offsets, "align_size": 16}
        y = fp8moe.swiglu_quantize(h, probs, columnwise=True, **options)
        g = fp8moe.swiglu_quantize_backward(grad, h, probs, expert_offsets=offsets)
        return GPU.download((ways, transposed.data[:, :288], gathered.scales, blocks, y.rowwise, g))

    first = run()
    for _ in range(100):
        assert_same(run(), first)


def test_a_hundred_repeats_of_a_layer():
    inputs, dy = layer_inputs(9)
    inputs, dy = {k: GPU.upload(v) for k, v in inputs.items()}, GPU.upload(dy)

    def run():
        y, saved = fp8moe.moe_forward(**inputs, recipe="fp8_flow")
        g = fp8moe.moe_backward(saved, dy)
        return GPU.download((y, g.dx, g.dprobs, g.dw13, g.dw2))

    first = run()
    for _ in range(100):
        for a, b in zip(run(), first, strict=True):
            assert same_bits(a, b)
