"""Expert parallelism: ranks as processes, each of which compares itself with the layer on one."""

import subprocess
import sys
import uuid
from pathlib import Path

import numpy as np
import pytest

import fp8moe
from fp8moe import expert_parallel
from fp8moe.expert_parallel import Pending

pytest.importorskip("torch")
RANK = Path(__file__).with_name("expert_parallel_rank.py")


def ranks(case, world, tmp_path, device="cpu", limit=300):
    file = tmp_path / uuid.uuid4().hex
    running = [
        subprocess.Popen(
            [sys.executable, str(RANK), case, str(r), str(world), str(file), device],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(world)
    ]
    try:
        for rank, process in enumerate(running):
            said, _ = process.communicate(timeout=limit)
            assert process.returncode == 0, f"rank {rank}:\n{said[-4000:]}"
            assert "right" in said, f"rank {rank}:\n{said[-4000:]}"
    finally:
        for process in running:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("case", "world"),
    [("layers", 2), ("layers", 4), ("rows", 2), ("rows", 4), ("refusals", 2), ("module", 2), ("lost", 3)],
)
def test_ranks(case, world, tmp_path):
    ranks(case, world, tmp_path)


@pytest.mark.multigpu
@pytest.mark.parametrize("case", ["layers", "rows", "refusals", "module"])
def test_two_gpus(case, tmp_path):
    ranks(case, 2, tmp_path, "cuda", 90)


class Alone:
    """A world of one."""

    rank, world_size = 0, 1

    def counts(self, counts, header):
        return [(c.tolist(), c.tolist()) for c in counts]

    def exchange(self, rows, sent, received, size=None):
        new = np.full_like(rows, 0xA5, shape=(size or sum(sent), *rows.shape[1:]))
        new[: sum(sent)] = rows[: sum(sent)]
        return Pending(lambda: new)


def test_a_world_of_one_is_the_layer():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((20, 128)).astype(np.float32)
    ids, probs = rng.integers(-1, 3, (20, 2)), rng.random((20, 2)).astype(np.float32)
    arrived = expert_parallel.dispatch(x, ids, probs, 3, Alone())
    routed = (ids >= 0).any(axis=1)
    np.testing.assert_array_equal(arrived.x, x[routed])
    np.testing.assert_array_equal(arrived.topk_ids, ids[routed])
    back = expert_parallel.combine(arrived.x, arrived.route, Alone())
    np.testing.assert_array_equal(back, np.where(routed[:, None], x, 0))


def test_what_is_refused():
    x, ids, probs = np.ones((4, 128), np.float32), np.zeros((4, 2), np.int32), np.ones((4, 2), np.float32)
    with pytest.raises(ValueError, match="topk_ids: got 7; wanted less than 3"):
        expert_parallel.dispatch(x, ids + 7, probs, 3, Alone())
    with pytest.raises(ValueError, match=r"topk_probs: got shape \[3, 2\]"):
        expert_parallel.dispatch(x, ids, probs[:3], 3, Alone())
    with pytest.raises(ValueError, match="compact"):
        expert_parallel.dispatch(fp8moe.quantize(x, layout="gemm_ready"), ids, probs, 3, Alone())
    w13, w2 = np.ones((3, 256, 128), np.float32), np.ones((3, 128, 128), np.float32)
    _, saved = fp8moe.moe_forward(x, w13, w2, ids, probs, recipe="bf16", comm=Alone())
    with pytest.raises(ValueError, match="comm: got None; wanted the forward's, which had one"):
        fp8moe.moe_backward(saved, x)
