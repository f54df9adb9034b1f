"""torch.compile of checkpointed layers and operations as the first thing a process does: each function below
runs in a child of a process that has imported other packages only. tests/test_dispatch_modes.py starts it."""

import os
import sys
import warnings

import torch
import torch._dynamo.convert_frame  # what torch.compile imports, once for all children
import torch._functorch.aot_autograd
from torch.utils.checkpoint import checkpoint

T, H, F, E, K = 40, 128, 128, 8, 2
torch.manual_seed(int(sys.argv[1]))
ROWS, PROBS = torch.randn(T, H, requires_grad=True), torch.rand(T, K, requires_grad=True)
IDS, DY = torch.randint(0, E, (T, K)), torch.randn(T, H)


def held_to_eager(function, backend, weights=()):
    """Compiled, results and gradients are those of eager mode, which runs after it."""

    def results(call):
        y = call(ROWS, PROBS)
        return [y, *torch.autograd.grad(y, (ROWS, PROBS, *weights), DY)]

    def checkpointed(*tensors):
        return checkpoint(function, *tensors, use_reentrant=False)

    torch.compiler.reset()
    actual = results(torch.compile(checkpointed, backend=backend, fullgraph=True))
    for a, wanted in zip(actual, results(function), strict=True):
        assert torch.equal(a, wanted)


def layer():
    from fp8moe import RouterConfig
    from fp8moe.adapters.torch.layer import FP8FlowMoE
    from fp8moe.adapters.torch.router import Router

    experts = FP8FlowMoE(H, F, E, K)
    held_to_eager(lambda x, probs: experts(x) * probs.mean(), "eager", list(experts.parameters()))
    # with its backward in eager mode, a second one reads the layer's handle and main_grad again
    w13, w2 = experts.w13, experts.w2
    for w in (w13, w2):
        w.main_grad = torch.zeros_like(w)
    torch.compiler.reset()
    run = torch.compile(lambda x: checkpoint(experts, x, use_reentrant=False), backend="eager")
    for _ in range(2):
        run(ROWS).backward(DY)
    twice = [w.main_grad for w in (w13, w2)]
    del w13.main_grad, w2.main_grad
    experts(ROWS).backward(DY)
    for total, w in zip(twice, (w13, w2), strict=True):
        assert torch.equal(total, w.grad + w.grad)
    router = Router(H, E, RouterConfig(K, "sigmoid"), expert_bias=True)
    held_to_eager(lambda x, probs: x * (router(x, 1)[1] * probs).sum(), "eager", list(router.parameters()))


def operations():
    """Operations, the experts and the router, by the names of `fp8moe.torch`."""
    from fp8moe import RouterConfig
    from fp8moe import torch as torch_ops

    w13, w2 = (torch.randn(E, n, H, requires_grad=True) for n in (2 * F, H))

    def step(x, probs):
        y = torch_ops.moe_experts(x, w13, w2, IDS, probs)
        plan = torch_ops.plan_topk(IDS, E, align_size=128)
        moved = torch_ops.permute(x, plan, probs)
        q = torch_ops.quantize(moved.data)
        columns, codes = torch_ops.scaling_aware_transpose(q), torch_ops.quantize_weights(w13)
        a = torch_ops.swiglu_quantize(torch_ops.grouped_gemm(q, codes.rowwise, plan.expert_offsets))
        h = torch_ops.grouped_gemm(moved.data, w13, plan.expert_offsets)
        rows = torch_ops.unpermute(torch_ops.swiglu(h, moved.probs), plan)
        used = torch_ops.dequantize(columns).sum() + torch_ops.dequantize(a).sum()
        routed = torch_ops.route(x[:, :E].contiguous(), RouterConfig(K), num_sequences=1)
        return y + rows + used.detach() * 1e-6 + routed.aux_loss + routed.topk_probs.sum()

    held_to_eager(step, "aot_eager", (w13, w2))


def transformers():
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    from fp8moe.adapters import transformers as fp8moe_transformers

    fp8moe_transformers.enable("fp8_flow")
    config = Qwen3MoeConfig(hidden_size=H, moe_intermediate_size=F, num_experts=E)
    config._experts_implementation = "fp8moe"
    experts = Qwen3MoeExperts(config)
    for p in experts.parameters():
        torch.nn.init.normal_(p)
    held_to_eager(lambda x, probs: experts(x, IDS, probs), "eager", list(experts.parameters()))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for case in (layer, operations, transformers):
        child = os.fork()
        if not child:
            case()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0, case.__name__
