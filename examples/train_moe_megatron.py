"""A small GPT with MoE layers in Megatron-Core, trained with Megatron's own experts and with this library's,
from the same weights and tokens.

    pip install 'megatron-core>=0.16'
    python examples/train_moe_megatron.py                       # one process, small sizes
    torchrun --nproc-per-node 2 examples/train_moe_megatron.py --expert-parallel 2
    python examples/train_moe_megatron.py --width 1024 --ffn 2048 --layers 8 --steps 500

One line replaces Megatron's MoE layers by this library's: ``spec = megatron.use_fp8_flow(spec)``.
"""

import argparse
import contextlib
import os
import warnings

import torch

warnings.filterwarnings("ignore")  # Megatron warns about missing optional packages

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.tensor_parallel import random as megatron_random  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

import fp8moe.megatron as megatron  # noqa: E402

VOCABULARY = 256


def emulate_cuda_on_cpu():
    """Replaces direct uses of CUDA in Megatron-Core, for the CPU; not needed on GPUs."""

    class NoStates:
        def is_initialized(self):
            return True

        def fork(self, name=None):
            return contextlib.nullcontext()

    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    megatron_random._CUDA_RNG_STATE_TRACKER = NoStates()
    megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True


def model_of(a, recipe):
    """recipe None: Megatron's own experts. A seed gives both the same weights."""
    config = TransformerConfig(
        num_layers=a.layers,
        hidden_size=a.width,
        num_attention_heads=a.width // 32,
        num_moe_experts=a.experts,
        moe_router_topk=2,
        moe_ffn_hidden_size=a.ffn,
        ffn_hidden_size=a.ffn,
        moe_aux_loss_coeff=1e-2,
        moe_token_dispatcher_type="allgather",
        expert_model_parallel_size=a.expert_parallel,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
    )
    spec = get_gpt_layer_local_spec(num_experts=a.experts, moe_grouped_gemm=False)
    if recipe is not None:
        spec = megatron.use_fp8_flow(spec, recipe=recipe)
    torch.manual_seed(0)
    model = GPTModel(config, spec, VOCABULARY, a.length, position_embedding_type="rope")
    return model.to(a.device)


def losses_of(model, a):
    """Trains with different tokens on each rank. As in Megatron, gradients are averaged over data-parallel
    ranks, those of experts over the ranks that have the same experts."""
    rank, generator = parallel_state.get_data_parallel_rank(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    # a learnable sequence: every token is five times the previous one plus one
    first_tokens = torch.randint(0, VOCABULARY, (a.steps, 64, a.batch, 1), generator=generator)[:, rank]
    history = []
    for start in first_tokens.to(a.device):
        tokens = start
        for _ in range(a.length):
            tokens = torch.cat((tokens, (5 * tokens[:, -1:] + 1) % VOCABULARY), dim=1)
        positions = torch.arange(a.length, device=a.device).expand(a.batch, a.length)
        mask = torch.ones(1, 1, a.length, a.length, dtype=torch.bool, device=a.device).triu(1)
        loss = model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous()).mean()
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            group = parallel_state.get_data_parallel_group()
            p.grad /= group.size()
            if not getattr(p, "allreduce", True):  # an expert's gradient already includes these ranks' tokens
                group = parallel_state.get_expert_data_parallel_group()
            torch.distributed.all_reduce(p.grad, group=group)
        optimizer.step()
        history.append(loss.item())
    return history


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"layers": 2, "width": 128, "ffn": 128, "experts": 4, "length": 16, "batch": 4, "steps": 8}
    for name, default in (sizes | {"expert_parallel": 1}).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a = parser.parse_args()
    single_process = {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
    backend, device_id = "gloo", None
    if a.device == "cpu":
        emulate_cuda_on_cpu()
    else:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        a.device = torch.device("cuda", torch.cuda.current_device())
        backend, device_id = "nccl", a.device
    torch.distributed.init_process_group(
        backend, **({} if "RANK" in os.environ else single_process), device_id=device_id
    )
    parallel_state.initialize_model_parallel(expert_model_parallel_size=a.expert_parallel)
    if a.device != "cpu":
        megatron_random.model_parallel_cuda_manual_seed(0)
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.16 reads it without Transformer Engine too
    is_first_rank = torch.distributed.get_rank() == 0
    for recipe in (None, "bf16", "fp8_flow"):
        losses = losses_of(model_of(a, recipe), a)
        if is_first_rank:
            name = "Megatron's experts" if recipe is None else recipe
            print(f"{name:20}" + " ".join(f"{x:.5f}" for x in losses[:4]) + f" ... {losses[-1]:.5f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
