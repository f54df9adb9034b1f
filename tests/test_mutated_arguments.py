"""Each argument of every public function, and each field of its records, is replaced by something of another
kind: the call works, or its error names that argument or field."""

import importlib.util
import inspect
import random
import re
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from calls import CALLS, IDS, E
from cases import SEED

import fp8moe
import fp8moe.torch
from fp8moe import RouterConfig
from fp8moe.adapters.torch import ops as torch_ops
from fp8moe.adapters.torch.layer import FP8FlowMoE
from fp8moe.adapters.torch.operands import quantize_fp8_weights
from fp8moe.adapters.torch.router import Router
from fp8moe.formats import BFLOAT16
from fp8moe.records import Record
from fp8moe.runtime.record_trees import map_arrays

#: of another kind than any argument has
OTHERS = {
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 128), torch.ones(3, 128)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)], layout=torch.jagged),
    "empty tuple": tuple,
    "empty list": list,
    "text": lambda: "text",
    "NaN": lambda: float("nan"),
    "huge": lambda: 2**70,
    "object": object,
    "type": lambda: int,
    "dict": dict,
    "list": lambda: [1, 128],
    "tuple of None": lambda: (None,),
    "integers": lambda: np.array([1, 128]),
    "names": lambda: np.array(["e4m3", "e5m2"]),
    "complex": lambda: torch.ones(3, 3, dtype=torch.complex64),
    "sparse": lambda: torch.eye(3).to_sparse(),
}
#: what JAX differentiates; other functions of its door are the library's own
JAX_NAMES = "permute", "permute_and_pad", "unpermute", "sort_chunks", "pad", "unpad", "swiglu", "route"
REFUSALS = TypeError, ValueError, NotImplementedError
#: torch reads the one itself; the others are other libraries' objects
NOT_OURS = {"device", "comm", "process_group"}


def tensors(call):
    def tensor(a):
        if a.dtype.name == "bfloat16":
            return torch.from_numpy(a.astype(np.float32)).bfloat16()
        return torch.from_numpy(a.copy())

    return {name: map_arrays(tensor, value) for name, value in call.items()}


def doors():
    for name, call in CALLS.items():
        yield f"fp8moe.{name}", getattr(fp8moe, name), call
        if name in torch_ops.__all__:
            yield f"torch_ops.{name}", getattr(torch_ops, name), tensors(call)
    weights = {"w13": torch.randn(E, 256, 128), "w2": torch.randn(E, 128, 128)}
    ids = {"topk_ids": torch.from_numpy(IDS).long(), "topk_probs": torch.rand(6, 2)}
    x, biases = {"x": torch.randn(6, 128)}, {"bias13": torch.randn(E, 256), "bias2": torch.randn(E, 128)}
    counts = {"tokens_per_expert": torch.tensor([2, 0, 4]), "probs": torch.rand(6)}
    for recipe in ("fp8_flow", "fp8_blockwise", "bf16"):
        given = x | weights | biases | {"recipe": recipe}
        yield f"moe_experts, {recipe}", fp8moe.torch.moe_experts, given | ids
        yield f"moe_experts_permuted, {recipe}", fp8moe.torch.moe_experts_permuted, given | counts
    yield "quantize_fp8_weights", quantize_fp8_weights, weights
    if importlib.util.find_spec("jax") is not None:
        jnp, jax_door = map(importlib.import_module, ("jax.numpy", "fp8moe.jax"))
        for name in JAX_NAMES:
            call = {n: map_arrays(jnp.asarray, a) for n, a in CALLS[name].items()}
            yield f"jax.{name}", getattr(jax_door, name), call
    layer = FP8FlowMoE(128, 128, E, 2)
    yield "FP8FlowMoE.forward", layer.forward, x | ids
    yield "Router.forward", layer.router.forward, x | {"num_sequences": 1}
    sizes = {"hidden": 128, "num_experts": 4}
    yield "FP8FlowMoE", FP8FlowMoE, sizes | {"ffn": 128, "topk": 2}
    yield "Router", Router, sizes | {"config": RouterConfig(2)}


DOORS = {name: (function, call) for name, function, call in doors()}


def mutated(call):
    """(argument, field or None, how, value) for each argument, each field of records, and each other kind."""
    for name in call.keys() - NOT_OURS:
        value = call[name]
        names = [f.name for f in fields(value)] if isinstance(value, Record) else []
        for field in (None, *names):
            for how, make in OTHERS.items():
                yield name, field, how, make() if field is None else replace(value, **{field: make()})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("door", DOORS)
def test_errors_name_the_argument_that_was_changed(door):
    function, given = DOORS[door]
    parameters = inspect.signature(function).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    call = defaults | given
    function(**call)
    every = sorted(mutated(call), key=lambda m: [str(part) for part in m[:3]])
    wrong = []
    for name, field, how, value in random.Random(f"{SEED} {door}").sample(every, min(60, len(every))):
        try:
            function(**call | {name: value})
        except REFUSALS as error:
            if not re.search(rf"\b({name}|{field or name})\b", str(error)):
                wrong.append((name, field, how, error))
        except Exception as error:
            wrong.append((name, field, how, error))
    assert wrong == []


@pytest.mark.parametrize("name", ["w2", "probs"])
def test_missing_arrays_of_a_backward_are_named(name):
    call = CALLS["moe_backward"]
    with pytest.raises(TypeError, match=rf"saved\.{name}: got None"):
        fp8moe.moe_backward(**call | {"saved": replace(call["saved"], **{name: None})})


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_flow"])
def test_altered_sums_of_a_bias_are_refused(recipe, later):
    """Kernels take the kind and the width of the sums from the record."""
    rng, shapes = np.random.default_rng(0), ((40, 128), (3, 256, 128), (3, 128, 128))
    x, w13, w2 = (rng.standard_normal(shape).astype(BFLOAT16) for shape in shapes)
    ids, probs = rng.integers(0, 3, (40, 1)), np.ones((40, 1), np.float32)
    bias = np.ones((3, 256), np.float32)
    _, saved = fp8moe.moe_forward(x, w13, w2, ids, probs, recipe=recipe, bias13=bias)
    _, operands = fp8moe.moe_backward_input(saved, x)
    sums = operands.dh_sums
    widths = sums[:, :10].copy(), np.hstack([sums, sums])
    for changed in (sums.astype(np.float64), sums.astype(np.float16), *widths):
        altered = replace(operands, dh_sums=changed)
        if later:
            altered = replace(operands, later=(replace(altered, dy=None, a=None, dh=None, x=None),))
            altered = replace(altered, dy=None, a=None, dh=None, x=None)
        with pytest.raises((TypeError, ValueError), match=r"operands(\.later\[0\])?\.dh_sums: got"):
            fp8moe.moe_backward_weight(altered)
