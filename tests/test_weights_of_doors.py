"""`fp8moe.torch.weights_unchanged` and micro-batches, through every form of the experts in torch: functions,
transformers' experts, torchtitan's and Megatron's. `FP8FlowMoE` has tests of its own (test_torch_weights)."""

import copy
import gc
import io
import types
import warnings
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import fp8moe
from fp8moe.adapters.torch import weights as torch_weights
from fp8moe.torch import moe_experts, moe_experts_permuted, weights_unchanged

pytestmark = pytest.mark.filterwarnings("ignore")
T, H, F, E, K = 37, 256, 128, 4, 2


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


def filled(module, device):
    g = torch.Generator().manual_seed(0)
    for p in module.parameters():
        p.data = torch.randn(p.shape, generator=g).to(device) / 16
    return module


def biases(device):
    sizes = {"bias13": (E, 2 * F), "bias2": (E, H)}
    return {n: torch.linspace(-1, 1, s[0] * s[1], device=device).view(s) for n, s in sizes.items()}


class OfFunction(nn.Module):
    """A user's module around a function."""

    def __init__(self, pair=False, permuted=False, **options):
        super().__init__()
        self.pair, self.permuted, self.options = pair, permuted, options
        if pair:
            self.w1, self.w3 = (nn.Parameter(torch.empty(E, F, H)) for _ in range(2))
        else:
            self.w13 = nn.Parameter(torch.empty(E, 2 * F, H))
        self.w2 = nn.Parameter(torch.empty(E, H, F))

    def forward(self, x, ids, probs, **options):
        w13, options = (self.w1, self.w3) if self.pair else self.w13, self.options | options
        if self.pair:
            options |= biases(x.device)
        if not self.permuted:
            return moe_experts(x, w13, self.w2, ids, probs, **options)
        counts = torch.bincount(ids[:, 0], minlength=E)
        return moe_experts_permuted(x, w13, self.w2, counts, probs[:, 0], **options)


def of_transformers(device, **options):
    pytest.importorskip("transformers", minversion="5.23")
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    import fp8moe.transformers

    fp8moe.transformers.enable("fp8_flow", name="fp8moe_shared", **options)
    config = types.SimpleNamespace(
        num_experts=E,
        hidden_size=H,
        moe_intermediate_size=F,
        hidden_act="silu",
        _experts_implementation="fp8moe_shared",
    )
    return filled(Qwen3MoeExperts(config), device)


def of_gpt_oss(device, **options):
    """Gates and ups alternate, the weights are stored transposed, and there are biases."""
    pytest.importorskip("transformers", minversion="5.23")
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    import fp8moe.transformers

    fp8moe.transformers.enable("fp8_flow", name="fp8moe_shared", **options)
    config = types.SimpleNamespace(
        num_local_experts=E,
        hidden_size=H,
        intermediate_size=F,
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
        _experts_implementation="fp8moe_shared",
    )
    return filled(GptOssExperts(config), device)


def of_torchtitan(device, **options):
    pytest.importorskip("torchtitan")
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    from fp8moe.torchtitan import FP8MoEConverter

    config = RoutedExperts.Config(
        inner_experts=GroupedExperts.Config(dim=H, hidden_dim=F, num_experts=E),
        token_dispatcher=LocalTokenDispatcher.Config(num_experts=E, top_k=K),
    )
    return filled(
        FP8MoEConverter.Config(recipe="fp8_flow", **options).build().convert(config).build(), device
    )


def of_megatron(device, **options):
    pytest.importorskip("megatron.core")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.transformer.transformer_config import TransformerConfig

        from fp8moe import megatron
    config = TransformerConfig(
        num_layers=1,
        hidden_size=H,
        num_attention_heads=4,
        num_moe_experts=E,
        moe_ffn_hidden_size=F,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        perform_initialization=False,
    )
    one = types.SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    groups = types.SimpleNamespace(ep=one, expt_tp=one, expt_dp=one, tp=one, tp_ep=one)
    return filled(megatron.FP8FlowExperts(E, config, pg_collection=groups, **options), device)


DOORS = {
    "function": lambda device, **options: filled(OfFunction(**options), device),
    "function of a pair with biases": lambda device, **options: filled(
        OfFunction(pair=True, **options), device
    ),
    "function of permuted rows": lambda device, **options: filled(
        OfFunction(permuted=True, **options), device
    ),
    "transformers": of_transformers,
    "gpt-oss in transformers": of_gpt_oss,
    "torchtitan": of_torchtitan,
    "megatron": of_megatron,
}


@pytest.fixture(params=DOORS)
def door(request, device):
    return DOORS[request.param](device)


def inputs(door, seed=None):
    """(x, ids, probs), x in the order of experts where the form takes permuted rows."""
    g = torch.Generator()
    g.seed() if seed is None else g.manual_seed(seed)
    device = next(door.parameters()).device
    x, ids = torch.randn(T, H, generator=g), torch.rand(T, E, generator=g).topk(K).indices
    if getattr(door, "permuted", False):
        ids = ids.sort(dim=0).values
    return [t.to(device) for t in (x.bfloat16(), ids, torch.rand(T, K, generator=g))]


def forward(door, x, ids, probs, **options):
    if type(door).__name__ == "FP8RoutedExperts":
        return door(x[None], probs[None], ids[None], None)[0]
    if type(door).__name__ == "FP8FlowExperts":
        return door(x, None, probs, topk_ids=ids)[0]
    return door(x, ids, probs, **options)


def fresh(door, x, ids, probs):
    """Of other tensors of the same values, which nobody has declared unchanged."""
    w = {n.split(".")[-1]: p.detach().clone() for n, p in door.named_parameters()}
    if "gate_up_proj_bias" in w:
        w13, bias13 = (
            t.transpose(1, 2) if t.ndim == 3 else t for t in (w["gate_up_proj"], w["gate_up_proj_bias"])
        )
        w13, bias13 = (torch.cat((t[:, ::2], t[:, 1::2]), dim=1) for t in (w13, bias13))
        options = {
            "bias13": bias13,
            "bias2": w["down_proj_bias"],
            "activation": fp8moe.Activation("swiglu", 7.0, 1.702, 1.0),
        }
        return moe_experts(x, w13, w["down_proj"].transpose(1, 2), ids, probs, **options)
    w2 = next(v for n, v in w.items() if n in ("w2", "down_proj", "w2_EDF", "weight2"))
    first = [w[n] for n in ("w13", "gate_up_proj", "weight1", "w1", "w1_EFD", "w3", "w3_EFD") if n in w]
    w13 = first[0] if len(first) == 1 else tuple(first)
    if getattr(door, "permuted", False):
        return moe_experts_permuted(x, w13, w2, torch.bincount(ids[:, 0], minlength=E), probs[:, 0])
    added = biases(x.device) if getattr(door, "pair", False) else {}
    return moe_experts(x, w13, w2, ids, probs, **added)


def assert_fresh(door):
    x = inputs(door)
    for guard in (torch.no_grad, torch.enable_grad):
        with guard():
            assert torch.equal(forward(door, *x), fresh(door, *x))


def micro_batch(door, seed=None):
    forward(door, *inputs(door, seed)).float().square().sum().backward()


def casts_of(call):
    with fp8moe.trace() as traced:
        call()
    return traced.weight_casts


def multiply_data(door, optimizer):
    for p in door.parameters():
        p.data.mul_(1.5)


def multiply_in_place(door, optimizer):
    with torch.no_grad():
        torch._foreach_mul_([*door.parameters()], 1.5)


def other_data(door, optimizer):
    for p in door.parameters():
        new = p.detach() * 1.5
        p.data = torch.empty(0, device=p.device)
        p.data = new


def by_another_library(door, optimizer):
    for p in door.parameters():
        w = p.detach()
        array = w.numpy() if w.device.type == "cpu" else pytest.importorskip("cupy").from_dlpack(w)
        array *= np.float32(1.5)


def load(door, optimizer):
    door.load_state_dict(
        {k: v * 1.5 for k, v in door.state_dict().items() if isinstance(v, torch.Tensor)}, strict=False
    )


def step(door, optimizer):
    micro_batch(door)
    optimizer.step()


DETECTED = {"in place": multiply_in_place, "other data": other_data, "load_state_dict": load, "a step": step}
WRITERS = DETECTED | {".data": multiply_data, "another library": by_another_library}


def fused(door):
    return torch.optim.AdamW(door.parameters(), lr=0.05, fused=True)


@pytest.mark.parametrize("write", WRITERS)
def test_weights_written_by_any_means_are_quantised_again(door, write):
    optimizer = fused(door)
    assert_fresh(door)
    with weights_unchanged(nn.Sequential(door)):
        micro_batch(door)
    WRITERS[write](door, optimizer)
    assert_fresh(door)
    with weights_unchanged(door):
        assert_fresh(door)
    WRITERS[write](door, optimizer)
    assert_fresh(door)


def test_micro_batches_share_copies(door):
    """Four micro-batches make one set of copies, and the gradients of four."""
    other = copy.deepcopy(door)
    with weights_unchanged(other):
        pass
    for _ in range(2):
        with weights_unchanged(nn.ModuleDict({"a": door})):
            assert casts_of(lambda: [micro_batch(door, i) for i in range(4)]) <= 2
        assert casts_of(lambda: [micro_batch(other, i) for i in range(4)]) == 8
        for p, q in zip(door.parameters(), other.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
            assert p.grad.abs().sum() > 0
        for d in (door, other):
            fused(d).step()
            d.zero_grad()
    assert_fresh(door)


@pytest.mark.parametrize("write", DETECTED)
def test_detected_changes_in_a_context_raise(door, write):
    with weights_unchanged(door):
        micro_batch(door)
        DETECTED[write](door, fused(door))
        for guard in (torch.enable_grad, torch.no_grad):
            with (
                guard(),
                pytest.raises(RuntimeError, match="got changed weights although they were declared"),
            ):
                forward(door, *inputs(door))
    assert_fresh(door)


def test_a_context_around_a_training_loop(door):
    """With the optimizer in it, copies are dropped before each step and made in the first forward after."""
    optimizer = fused(door)
    with weights_unchanged(door, optimizer=optimizer):
        for _ in range(3):
            casts = casts_of(lambda: [micro_batch(door) for _ in range(3)])
            assert casts <= 2
            optimizer.step()
            assert not any(w.copies for w in torch_weights._with_copies.values() if w.module is not None)
            x = inputs(door)
            with torch.no_grad():
                assert torch.equal(forward(door, *x), fresh(door, *x))
        multiply_in_place(door, optimizer)
        assert_fresh(door)
    assert_fresh(door)


def test_averages_and_closures_within_a_training_loop(door):
    """An average that is swapped in through ``.data`` is evaluated, and not trained with; a closure's
    forwards are of the step's weights."""
    optimizer, average = fused(door), [torch.randn_like(p) / 16 for p in door.parameters()]
    with weights_unchanged(door, optimizer=optimizer):
        for _ in range(2):
            micro_batch(door)
            optimizer.step()
            kept = [p.detach().clone() for p in door.parameters()]
            for values, training in ((average, False), (kept, True)):
                for p, value in zip(door.parameters(), values, strict=True):
                    p.data.copy_(value)
                door.train(training)
                x = inputs(door)
                with torch.set_grad_enabled(training):
                    assert torch.equal(forward(door, *x), fresh(door, *x))
        with_closure = torch.optim.Adam(door.parameters(), lr=0.05)

        def closure():
            door.zero_grad()
            x = inputs(door)
            y = forward(door, *x)
            assert torch.equal(y, fresh(door, *x))
            y.float().square().sum().backward()
            return y.float().square().sum()

        for _ in range(2):
            with_closure.step(closure)
            assert_fresh(door)


def test_weights_that_become_parametrized_within_a_context(device):
    """As PEFT's target_parameters do in a model's forward: they are quantised in each forward."""
    door = of_transformers(device)
    with weights_unchanged(door):
        micro_batch(door)
        parametrize.register_parametrization(door, "gate_up_proj", nn.Softplus(), unsafe=True)
        x = inputs(door)
        w13, w2 = (w.detach().clone() for w in (door.gate_up_proj, door.down_proj))
        for _ in range(2):
            assert torch.equal(forward(door, *x), moe_experts(x[0], w13, w2, *x[1:]))
        parametrize.remove_parametrizations(door, "gate_up_proj", leave_parametrized=False)
    with weights_unchanged(door):
        pass
    door.config._experts_implementation = "eager"
    assert fp8moe.torch.model_report(door) == "no experts of this library"


def test_adamw_makes_the_copies_of_the_next_forward(door):
    """But not of weights that are multiplied in another order: gpt-oss's gates and ups alternate."""
    steps_make_copies(door, made=2 if type(door).__name__ == "GptOssExperts" else 0)


def test_adamw_leaves_weights_that_are_not_contiguous_to_torch(device):
    door = DOORS["function"](device)
    for p in door.parameters():
        p.data = p.data.mT.contiguous().mT
    steps_make_copies(door, made=2)


def steps_make_copies(door, made):
    """made: casts of weights in the forwards after a step of `fp8moe.torch.AdamW`."""
    optimizer = fp8moe.torch.AdamW(door.parameters(), lr=0.05)
    with weights_unchanged(nn.Sequential(door), optimizer=optimizer):
        micro_batch(door)
        for _ in range(2):
            optimizer.step()
            optimizer.zero_grad()
            assert casts_of(lambda: [micro_batch(door) for _ in range(2)]) == made
            assert_fresh(door)
        optimizer.step()
        if not made:
            multiply_in_place(door, optimizer)
            assert_fresh(door)
    assert_fresh(door)


def test_an_optimizer_of_other_weights_is_refused(door):
    other = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=1.0)
    message = "optimizer: got SGD without the weight"
    with pytest.raises(ValueError, match=message), weights_unchanged(door, optimizer=other):
        forward(door, *inputs(door))
    with pytest.raises(TypeError, match=r"optimizer: got str; wanted a torch\.optim\.Optimizer"):
        weights_unchanged(door, optimizer="AdamW")
    first, *rest = door.parameters()
    optimizers = [torch.optim.SGD([first], lr=1.0), torch.optim.SGD(rest, lr=1.0)]
    with weights_unchanged(door, optimizer=optimizers):
        micro_batch(door)
        optimizers[1].step()
        assert torch.equal(forward(door, *(x := inputs(door))), fresh(door, *x))


def test_copies_of_a_door_are_its_own(door):
    """deepcopy and pickle within a context; neither takes the original's codes."""
    with weights_unchanged(door):
        micro_batch(door)
        copied = copy.deepcopy(door)
        others = [copied]
        if not type(door).__module__.startswith(("megatron", "fp8moe.adapters.megatron")):  # groups
            file = io.BytesIO()
            torch.save(door, file)
            file.seek(0)
            others.append(torch.load(file, weights_only=False))
        for other in others:
            with torch.no_grad():
                for p in other.parameters():
                    p.mul_(1.5)
            assert_fresh(other)
            with weights_unchanged(other):
                assert_fresh(other)
        assert_fresh(door)


def test_copies_are_released_with_the_context(door):
    with weights_unchanged(door):
        micro_batch(door)
        copies = [w.copies for w in torch_weights._with_copies.values() if w.copies is not None]
        alive = weakref.ref(copies[-1])
        del copies
    gc.collect()
    assert alive() is None
    assert not torch_weights._models


@pytest.mark.parametrize("kind", ["function", "function of a pair with biases", "function of permuted rows"])
def test_is_first_microbatch_of_functions(device, kind):
    door = DOORS[kind](device)
    x = inputs(door)
    with pytest.raises(RuntimeError, match="is_first_microbatch: got False, and there are no FP8 copies"):
        forward(door, *x, is_first_microbatch=False)

    def backward(door, first):
        forward(door, *x, is_first_microbatch=first).sum().backward()

    for _ in range(2):
        assert casts_of(partial(backward, door, True)) == 2
        assert casts_of(partial(backward, door, False)) == 0
        assert torch.equal(forward(door, *x, is_first_microbatch=False), fresh(door, *x))
        fused(door).step()
        with pytest.raises(RuntimeError, match="got changed weights"):
            forward(door, *x, is_first_microbatch=False)
        multiply_data(door, None)
    for options, other in (({"recipe": "bf16"}, "recipe 'bf16'"), ({"fp8_weights": 0}, "fp8_weights")):
        with pytest.raises(ValueError, match=f"is_first_microbatch: got True with {other}"):
            forward(door, *x, is_first_microbatch=True, **options)
    states = len(torch_weights._of_functions)
    del door
    gc.collect()
    assert len(torch_weights._of_functions) == states - 1


def test_megatrons_schedules(device):
    """Its schedules set is_first_microbatch; steps and writes in between are noticed."""
    door = of_megatron(device)
    parts = [door]
    model = types.SimpleNamespace(config=door.config, modules=lambda: parts)
    set_first = type(door).set_is_first_microbatch
    optimizer = fused(door)
    assert casts_of(lambda: [micro_batch(door) for _ in range(2)]) == 4
    for _ in range(2):
        set_first(model)
        assert casts_of(lambda: [micro_batch(door) for _ in range(3)]) == 2
        multiply_data(door, optimizer)
        set_first(model)
        assert_fresh(door)
        optimizer.step()
        assert_fresh(door)
        assert casts_of(lambda: micro_batch(door)) == 0
        multiply_in_place(door, optimizer)
        assert_fresh(door)
        door.eval()  # a call outside of a schedule, which would say nothing of an average swapped in
        multiply_data(door, optimizer)
        assert_fresh(door)
        door.train()
    parts.append(of_megatron(device))
    set_first(model)
    assert parts[1].is_first_microbatch is True


def test_a_callback_of_transformers_trainer():
    """Losses and weights of a Trainer with accumulation are those with copies made each time."""
    transformers = pytest.importorskip("transformers", minversion="5.23")
    import fp8moe.transformers

    fp8moe.transformers.enable("fp8_flow", name="fp8moe_shared")
    sizes = {"hidden_size": 64, "moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}
    sizes |= {"num_attention_heads": 2, "num_hidden_layers": 2, "head_dim": 32, "num_key_value_heads": 2}
    config = transformers.Qwen3MoeConfig(**sizes, vocab_size=64, intermediate_size=64)
    torch.manual_seed(0)
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 64, (24, 8))]

    def train(callbacks, folder):
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="fp8moe_shared")
        options = {"max_steps": 3, "gradient_accumulation_steps": 4, "per_device_train_batch_size": 2}
        options |= {"logging_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True, "seed": 3}
        arguments = transformers.TrainingArguments(folder, save_strategy="no", **options)
        trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
        with fp8moe.trace() as traced:
            trainer.train()
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        return losses, traced.weight_casts, model.state_dict()

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        shared = train([fp8moe.transformers.FP8WeightsCallback()], folder)
        alone = train([], folder)
    assert shared[0] == alone[0]
    assert len(shared[0]) == 3
    assert (shared[1], alone[1]) == (3 * 2 * 2, 3 * 4 * 2 * 2)
    assert all(torch.equal(w, alone[2][n]) for n, w in shared[2].items())
    assert not torch_weights._models


def test_torchtitans_steps(device):
    """In its Trainer the micro-batches of a step share copies."""
    door = of_torchtitan(device)
    trainer_module = pytest.importorskip("torchtitan.trainer")
    from fp8moe.adapters import torchtitan as adapter

    original = trainer_module.Trainer.train_step
    try:
        adapter._shares_within_steps()
        optimizer = fused(door)
        step_alone, calls = trainer_module.Trainer.train_step.__wrapped__, []
        assert step_alone is original or step_alone.__module__.startswith("torchtitan")

        def accumulate(trainer, batches):
            calls.append(casts_of(lambda: [micro_batch(door) for _ in range(batches)]))
            optimizer.step()
            assert_fresh(door)

        trainer_module.Trainer.train_step = accumulate
        adapter._shares_within_steps()
        trainer = types.SimpleNamespace(model_parts=[nn.Sequential(door)], optimizers=optimizer)
        for _ in range(2):
            trainer_module.Trainer.train_step(trainer, 3)
            assert_fresh(door)
        assert calls == [0, 0]  # made on entry
    finally:
        trainer_module.Trainer.train_step = original


def test_a_report_of_a_model(device):
    doors = {name: DOORS[name](device) for name in ("transformers", "torchtitan", "megatron")}
    bf16 = fp8moe.torch.FP8FlowMoE(H, F, E, K, recipe="bf16", device=device)
    model = nn.ModuleDict(doors | {"bf16": bf16})
    names = {
        "transformers": "Qwen3MoeExperts",
        "torchtitan": "FP8RoutedExperts",
        "megatron": "FP8FlowExperts",
    }
    nbytes = 2 * E * 3 * F * H + 2 * 4 * E * 3 * F * H // 128**2  # codes and float32 scales, two orientations

    def report(how, held):
        lines = [f"{n}: {c}, fp8_flow, FP8 copies {how}, {held} bytes held" for n, c in names.items()]
        return "\n".join([*lines, "bf16: FP8FlowMoE, bf16, no FP8 copies"])

    report_of = fp8moe.torch.model_report
    assert report_of(model) == report("made in each forward", 0)
    optimizer = fused(model)
    for options, until in (({}, ""), ({"optimizer": optimizer}, " until the optimizer's step")):
        with weights_unchanged(model, **options):
            assert report_of(model) == report(f"shared in weights_unchanged(){until}", nbytes)
            assert f"{nbytes} bytes held" in repr(doors["torchtitan"])
        assert report_of(model) == report("made in each forward", 0)
    assert fp8moe.torch.model_report(nn.Linear(2, 2)) == "no experts of this library"


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(door, reentrant):
    """A recomputed forward reads the copies of the first, and makes none."""
    x, ids, probs = inputs(door)
    x.requires_grad_()

    def backward(checkpointed):
        call = partial(forward, door)
        y = checkpoint(call, x, ids, probs, use_reentrant=reentrant) if checkpointed else call(x, ids, probs)
        y.float().square().sum().backward()
        gradients = [x.grad, *(p.grad for p in door.parameters())]
        x.grad = None
        door.zero_grad()
        return gradients

    wanted = backward(False)
    with weights_unchanged(door):
        for _ in range(2):
            assert casts_of(lambda: backward(True)) <= 2
        assert casts_of(lambda: backward(True)) == 0
        for a, b in zip(backward(True), wanted, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["transformers", "torchtitan", "function"])
def test_compiled(device, kind):
    """Compiled code reads the copies that were made on entry; functions make theirs, always current."""
    torch.compiler.reset()
    door = DOORS[kind](device)
    compiled = torch.compile(partial(forward, door), backend="aot_eager", fullgraph=True)
    x = inputs(door)
    for _ in range(2):
        assert torch.equal(compiled(*x), fresh(door, *x))
        multiply_data(door, None)
        assert torch.equal(compiled(*x), fresh(door, *x))
        with weights_unchanged(door):
            wanted = fresh(door, *x)
            with fp8moe.trace() as traced:
                assert torch.equal(compiled(*x), wanted)
                compiled(*x).sum().backward()
            assert traced.weight_casts == (4 if kind == "function" else 0)
            fused(door).step()
            if kind != "function":
                with pytest.raises(Exception, match="got changed weights although"):
                    compiled(*x)


class Routed(nn.Module):
    """A door between given ids and probabilities, as a module that fully_shard gathers weights for."""

    def __init__(self, door):
        super().__init__()
        self.experts = door

    def forward(self, *arguments):
        return forward(self.experts, *arguments)


@pytest.mark.parametrize(
    ("door", "weights"), [("transformers", 2), ("torchtitan", 3), ("megatron", 2)], indirect=["door"]
)
def test_codes_that_fully_shard_gathers(door, weights, tmp_path):
    """Output and gradients equal those of gathered masters; torchtitan's w1 and w3 are gathered apart."""
    if next(door.parameters()).is_cuda:
        pytest.skip("gloo")
    from torch.distributed.fsdp import fully_shard

    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh, results, x = dist.device_mesh.init_device_mesh("cpu", (1,)), [], inputs(door)
        for model in (Routed(copy.deepcopy(door)), fp8moe.torch.gather_fp8(Routed(door))):
            fully_shard(model, mesh=mesh)
            y = model(*x)
            y.float().square().sum().backward()
            results.append([y, *(p.grad.full_tensor() for p in model.parameters())])
        assert all(map(torch.equal, *results))
        assert fp8moe.torch.model_report(model).count("FP8 codes") == weights
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", DOORS)
def test_one_orientation_is_saved_where_one_is_kept(name, device):
    """``weight_copies="rowwise"``: the same bits, and all that autograd saves of weights are the codes that
    the forward reads."""
    results, rows = [], None
    for options in ({}, {"weight_copies": "rowwise"}):
        door = DOORS[name](device, **options)
        rows = inputs(door) if rows is None else rows
        with weights_unchanged(door):
            for _ in range(2):
                x, *rest = (t.clone() for t in rows)
                x.requires_grad_()
                door.zero_grad()
                codes = {}
                hooks = (lambda t, codes=codes: codes.setdefault(t.data_ptr(), t)), (lambda t: t)
                with torch.autograd.graph.saved_tensors_hooks(*hooks):
                    y = forward(door, x, *rest)
                y.float().square().sum().backward()
                results.append([y.detach(), x.grad, *(p.grad.clone() for p in door.parameters())])
                codes = [t for t in codes.values() if t.ndim == 3]
                wanted = {(E, 2 * F, H), (E, H, F)} if options else {(E, H, 2 * F), (E, F, H)}
                assert {tuple(t.shape) for t in codes if t.dtype == torch.uint8} == wanted
                assert sum(t.nbytes for t in codes) == E * 3 * F * H * (1 + 4 / 128**2)
                assert ("row-wise" in fp8moe.torch.model_report(door)) == (
                    bool(options) and "function" not in name
                )
    for others in results[1:]:
        assert all(map(torch.equal, results[0], others))
