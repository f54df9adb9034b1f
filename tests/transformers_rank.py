"""One rank of test_transformers.py: ``python transformers_rank.py RANK FILE MODEL PORT``."""

import os
import sys

import torch
import torch.distributed as dist
import transformers
from transformers.distributed import DistributedConfig

from fp8moe.adapters import transformers as adapter

RANK, MODEL, WORLD = int(sys.argv[1]), sys.argv[3], 2
NAME = "fp8moe_bf16"
LAYOUTS = {
    "a batch for each rank": {"fsdp_size": 2, "ep_size": 2},
    "one batch": {"tp_size": 2, "ep_size": 2, "tp_plan": {"lm_head": "colwise"}},
}

os.environ.update(RANK=str(RANK), WORLD_SIZE=str(WORLD), LOCAL_RANK=str(RANK))
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[4])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=RANK, world_size=WORLD)
adapter.enable("bf16", name=NAME)
load = transformers.AutoModelForCausalLM.from_pretrained
for layout, sizes in LAYOUTS.items():
    apart = layout.startswith("a batch")
    config = DistributedConfig(**sizes, ep_implementation=NAME)
    model = load(MODEL, distributed_config=config, experts_implementation=NAME)
    plain = load(MODEL, experts_implementation=NAME)
    ids = (torch.arange(24)[None] + 5 * RANK * apart) % 64
    actual, wanted = model(ids).logits, plain(ids).logits
    if not apart:
        wanted = wanted[..., 32 * RANK : 32 * RANK + 32]
    # float32 sums of at most 64 + 48 products, in two layers
    torch.testing.assert_close(actual, wanted, rtol=0, atol=2 * 112 * 2.0**-24)
    dy = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(RANK))
    actual.backward(dy)
    wanted.backward(dy)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        if "experts" not in name:
            continue
        assert p.to_local().shape[0] == q.shape[0] // WORLD
        dist.all_reduce(q.grad)
        # FSDP's mean over batches, or the sum over the halves of the head
        true = q.grad / (WORLD if apart else 1)
        whole = p.grad.full_tensor()
        assert (whole - true).norm() <= 2.0**-16 * true.norm(), (layout, name)
dist.destroy_process_group()
print("right", flush=True)
os._exit(0)  # gloo's threads are not always joined at Python's exit
