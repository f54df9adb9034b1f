"""The layer with expert parallelism: one process per GPU of this machine, or two processes on the CPU."""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

from fp8moe.torch import MOST_RANKS, FP8FlowMoE, SymmetricMemory, window_bytes

TOKENS, HIDDEN, FFN, EXPERTS, TOPK = 256, 256, 128, 8, 2  # tokens and experts per rank


def train(rank: int, world: int, gpus: bool, store: str) -> None:
    device = torch.device("cuda", rank) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    backend, device_id = ("nccl", device) if gpus else ("gloo", None)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world, device_id=device_id
    )
    ranks = dist.group.WORLD
    if gpus and world <= MOST_RANKS:
        # ranks write directly to each other's memory over NVLink; x and its gradient are float32 here
        ranks = SymmetricMemory(None, window_bytes(world, TOKENS, HIDDEN, TOPK, itemsize=4))
    torch.manual_seed(0)  # the same router on all ranks
    layer = FP8FlowMoE(HIDDEN, FFN, EXPERTS * world, TOPK, process_group=ranks, device=device)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, device=device)
    for step in range(4):
        loss = (layer(x) - x.roll(1, dims=1)).float().square().mean()
        (loss / world).backward()  # the layer's gradients are sums over all ranks
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach() / world)
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f} over {world} {device.type} ranks", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    gpus = torch.cuda.device_count()
    world = gpus if gpus > 1 else 2
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        torch.multiprocessing.spawn(train, (world, gpus > 1, store), nprocs=world)
