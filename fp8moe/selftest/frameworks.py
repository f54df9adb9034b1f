"""Checks of the experts in torch and JAX, against NumPy's."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

import fp8moe
from fp8moe.runtime.interop import load_module
from fp8moe.selftest.inputs import BF16, Inputs, equal, near

LAYER = "x", "w13", "w2", "ids", "probs", "dy"


class NotChecked(Exception):
    """A check that this machine cannot run."""


def check_torch(device: str, inputs: Sequence[Inputs]) -> None:
    """The experts of torch's tensors with their gradients; on CUDA on a stream of its own, and in a CUDA
    graph that is replayed with each of the other inputs."""
    torch, ops = framework("torch"), load_module("fp8moe.torch")
    if device == "cuda" and not torch.cuda.is_available():
        raise NotChecked("torch finds no CUDA device")

    def tensor(a: np.ndarray) -> Any:
        if a.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(a.view(np.int16)).view(torch.bfloat16).to(device)
        return torch.from_numpy(a).to(device)

    x, w13, w2, ids, probs, dy = (tensor(getattr(inputs[0], name)).clone() for name in LAYER)
    leaves = [t.requires_grad_() for t in (x, probs, w13, w2)]

    def step() -> Any:
        for leaf in leaves:
            leaf.grad = None
        y = ops.moe_experts(x, w13, w2, ids, probs, recipe="fp8_flow")
        y.backward(dy)
        return y

    def compare(i: Inputs, y: Any) -> None:
        compare_layer(device, i, [t.detach().float().cpu().numpy() for t in (y, *(a.grad for a in leaves))])

    equal(ops.quantize(x.detach()).data.cpu().numpy(), fp8moe.quantize(inputs[0].x).data, "codes")
    if device == "cpu":
        compare(inputs[0], step())
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            y = step()
    torch.cuda.current_stream().wait_stream(stream)
    compare(inputs[0], y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = step()
    for i in inputs:
        with torch.no_grad():
            for t, name in zip((x, w13, w2, ids, probs, dy), LAYER, strict=True):
                t.copy_(tensor(getattr(i, name)))
        graph.replay()
        compare(i, y)


def check_jax(device: str, inputs: Sequence[Inputs]) -> None:
    """The experts of JAX's arrays with their gradients, in a compiled program."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # others need memory too
    jax, ops = framework("jax"), load_module("fp8moe.jax")
    try:
        place = jax.devices(device)[0]
    except RuntimeError as error:
        raise NotChecked(f"jax finds no {device} device") from error

    def loss(x: Any, probs: Any, w13: Any, w2: Any, ids: Any, dy: Any) -> Any:
        y = ops.moe_experts(x, w13, w2, ids, probs, recipe="fp8_flow")
        return (y.astype("float32") * dy.astype("float32")).sum(), y

    program = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
    for i in inputs:
        x, w13, w2, ids, probs, dy = (jax.device_put(getattr(i, name), place) for name in LAYER)
        equal(np.asarray(ops.quantize(x).data), fp8moe.quantize(i.x).data, "codes")
        grads, y = program(x, probs, w13, w2, ids, dy)
        compare_layer(device, i, [np.asarray(a).astype(np.float32) for a in (y, *grads)])


def framework(name: str) -> Any:
    if importlib.util.find_spec(name) is None:
        raise NotChecked(f"{name} is not installed")
    return load_module(name)


def compare_layer(device: str, i: Inputs, got: list[np.ndarray]) -> None:
    """Compare y, dx, dprobs, dw13 and dw2 of a framework with NumPy's."""
    wanted, saved = fp8moe.moe_forward(i.x, i.w13, i.w2, i.ids, i.probs, recipe="fp8_flow")
    g = fp8moe.moe_backward(saved, i.dy)
    for label, a, b in zip(
        ("y", "dx", "dprobs", "dw13", "dw2"), got, (wanted, g.dx, g.dprobs, g.dw13, g.dw2), strict=True
    ):
        if device == "cpu":
            near(a, b, BF16, label)
        else:  # other summation orders change last bits, and with them the rounding of some codes
            near(a, b, 2e-2, label, math.inf)


FRAMEWORKS = {"torch": check_torch, "jax": check_jax}
