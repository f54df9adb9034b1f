"""Expert parallelism: processes as ranks, each of which compares its results with the layer on one rank."""

import datetime
import importlib
import subprocess
import sys
import threading
import types
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cases import BF16, assert_same, generator, layer_inputs, values

import fp8moe
from fp8moe import expert_parallel
from fp8moe.expert_parallel import Pending
from fp8moe.expert_parallel.protocols import with_spare
from fp8moe.runtime.record_trees import arrays_in

torch = pytest.importorskip("torch")
deep_ep = pytest.importorskip("fp8moe.adapters.torch.distributed.deep_ep")
moe_experts = pytest.importorskip("fp8moe.adapters.torch.functional").moe_experts
torch_distributed = pytest.importorskip("fp8moe.adapters.torch.distributed.process_group")
torch_symmetric_memory = pytest.importorskip("fp8moe.adapters.torch.distributed.symmetric_memory")
RANK = Path(__file__).with_name("expert_parallel_rank.py")


def ranks(case, world, tmp_path, device="cpu", limit=300):
    file = tmp_path / uuid.uuid4().hex
    together(world, lambda r: [str(RANK), case, str(r), str(world), str(file), device], limit)


def together(world, arguments, limit):
    """Runs a process per rank; each must report success. `pytest -rP` shows what they print."""
    running = [
        subprocess.Popen(
            [sys.executable, *arguments(r)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(world)
    ]
    try:
        for rank, process in enumerate(running):
            output, _ = process.communicate(timeout=limit)
            print(output)
            assert process.returncode == 0, f"rank {rank}:\n{output[-4000:]}"
            assert "right" in output, f"rank {rank}:\n{output[-4000:]}"
    finally:
        for process in running:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("cases", "world"),
    [
        (
            "layers,bounded,chunks,rows,refusals,same_backward,module,frozen,copied,changed,data_parallel,together,composed",
            2,
        ),
        ("layers,rows,same_backward,composed", 4),
        ("lost", 3),
    ],
)
def test_ranks(cases, world, tmp_path):
    ranks(cases, world, tmp_path)


def test_checkpoints_of_experts_load_into_other_numbers_of_ranks(tmp_path):
    file = tmp_path / "checkpoint"
    for case, world in (("saved", 4), ("loaded", 2)):
        file.unlink(missing_ok=True)
        together(world, lambda r, c=case, w=world: [str(RANK), c, str(r), str(w), str(file), "cpu"], 300)


@pytest.mark.parametrize("world", [pytest.param(n, marks=pytest.mark.multigpu(n)) for n in (2, 4)])
@pytest.mark.parametrize(
    "cases",
    [
        "layers,bounded,chunks,rows,refusals,same_backward,module",
        "layers/peer,chunks/peer,rows/peer,refusals/peer,same_backward/peer,module/peer,in_turn/peer",
        "copied,changed,data_parallel,together,composed",
    ],
)
def test_several_gpus(cases, world, tmp_path):
    ranks(cases, world, tmp_path, "cuda", 120)


@pytest.mark.gpu
@pytest.mark.parametrize("cases", ["captured", "layers,bounded,chunks"])
def test_single_gpu_and_a_training_step_in_a_cuda_graph(cases, tmp_path):
    ranks(cases, 1, tmp_path, "cuda", 200)


class Board(dict):
    """A stub of a process group's store."""

    set = dict.__setitem__

    def check(self, names):
        return all(name in self for name in names)


def test_timeout_names_the_missing_rank(monkeypatch):
    """With NCCL: rank 0 waits for rank 1, which is alive, and for rank 2, which was alive at the fourth
    collective of another layer of the group, but is not at the fourth of this one."""
    module = pytest.importorskip("fp8moe.adapters.torch.distributed.lost_ranks")
    board, queries = Board(), []

    class Never:
        def record_event(self):
            return self

        def query(self):
            queries.append(1)
            if len(queries) == 2:
                board["fp8moe/[0, 1, 2]/8/1"] = "alive"
            return False

    class Group:
        options = property(lambda self: self)
        _timeout = datetime.timedelta(seconds=0.2)

        def _get_backend(self, device):
            return self

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Never())
    monkeypatch.setattr(module.dist, "get_process_group_ranks", lambda group: [0, 1, 2])
    monkeypatch.setattr(module.dist.distributed_c10d, "_get_default_store", lambda: board)
    monkeypatch.setattr(module.dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(module.dist, "get_world_size", lambda group: 3)
    group = Group()
    board["fp8moe/[0, 1, 2]/4/2"] = "alive"
    for watch in (module.LostRankWatch(group), module.LostRankWatch(group)):
        for _ in range(4):
            assert watch.start(lambda: "started", torch.device("cuda")) == "started"
    with pytest.raises(module.RankLost, match="lost rank 2, seen by rank 0") as error:
        watch.wait_for(torch.device("cuda"))
    assert error.value.ranks == [2]
    assert board["fp8moe/[0, 1, 2]/8/0"] == "alive"
    assert len(queries) > 2


def failed_exchange(watch):
    def exchange():
        raise RuntimeError("Connection reset by peer")

    with pytest.raises(RuntimeError, match="Connection reset by peer") as error:
        watch.start(exchange, torch.device("cpu"))
    return error.value


def test_lost_ranks_of_a_group_with_several_backends():
    """A group made without naming one, or as "cpu:gloo,cuda:nccl", exchanges CPU tensors by gloo too."""
    module = pytest.importorskip("fp8moe.adapters.torch.distributed.lost_ranks")
    module.dist.init_process_group(store=module.dist.HashStore(), rank=0, world_size=1)
    try:
        assert isinstance(failed_exchange(module.LostRankWatch(module.dist.group.WORLD)), module.RankLost)
    finally:
        module.dist.destroy_process_group()


@pytest.mark.parametrize(
    ("members", "missing", "words"),
    [
        ([2, 3, 5], [], "lost rank none, but the exchange failed, of the group [2, 3, 5], seen by rank 1"),
        ([4, 0, 5], [1], "lost rank 1, of the group [4, 0, 5], seen by rank 0"),
    ],
)
def test_lost_store_is_that_of_rank_0_of_all_ranks(members, missing, words, monkeypatch):
    """Groups number their ranks anew, as of expert parallelism beside data parallelism."""
    module = pytest.importorskip("fp8moe.adapters.torch.distributed.lost_ranks")

    class Group:
        pass

    def no_store():
        raise RuntimeError("Connection refused")

    rank = 1 if members[0] == 2 else 0
    monkeypatch.setattr(module.dist, "get_process_group_ranks", lambda group: members)
    monkeypatch.setattr(module.dist.distributed_c10d, "_get_default_store", no_store)
    monkeypatch.setattr(module.dist, "get_rank", lambda group: rank)
    monkeypatch.setattr(module.dist, "get_world_size", lambda group: 3)
    monkeypatch.setattr(module.dist, "get_backend_config", lambda group: "cpu:gloo")
    error = failed_exchange(module.LostRankWatch(Group()))
    assert error.ranks == missing
    assert words in str(error)


def test_counts_of_a_gpu_are_read_on_the_host_under_any_default_device():
    """torch.set_default_device("cuda"), with which no memory can be page-locked."""
    comm = torch_distributed.ProcessGroup.__new__(torch_distributed.ProcessGroup)
    comm._gathered = {}
    with torch._subclasses.FakeTensorMode(), torch.device("cuda"):
        messages, on_host = comm._buffers(8, torch.device("cuda"))
    assert (messages.device.type, on_host.device.type) == ("cuda", "cpu")


@pytest.mark.multigpu
@pytest.mark.parametrize("cases", ["lost", "lost/peer"])
def test_lost_gpu_is_named(cases, tmp_path):
    ranks(cases, 2, tmp_path, "cuda", 60)


@pytest.mark.multigpu
def test_cupy_alone_on_two_gpus(tmp_path):
    script, file = str(RANK.with_name("cupy_nccl_rank.py")), str(tmp_path / "uid")
    together(2, lambda r: [script, str(r), "2", file], 90)


class Threads:
    """A transport between threads as ranks."""

    def __init__(self, rank, board, barrier):
        self.rank, self.world_size = rank, len(board)
        self.board, self.barrier = board, barrier

    def all_of(self, own):
        self.board[self.rank] = own
        self.barrier.wait()
        dispatched = list(self.board)
        self.barrier.wait()
        return dispatched

    def counts(self, counts, header):
        received = self.all_of([tuple(c.tolist()) for c in counts])
        return [tuple(rank[i] for rank in received) for i in range(len(counts))]

    def exchange(self, rows, counts, size=None):
        parts = []
        for theirs, sent in zip(self.all_of(rows), counts, strict=True):
            first = sum(sent[: self.rank])
            parts.append(theirs[first : first + sent[self.rank]])
        new = np.concatenate(parts)
        more = np.full((max((size or 0) - len(new), 0), *new.shape[1:]), 0xA5).astype(new.dtype)
        return Pending(lambda: np.concatenate([new, more]))


def alone():
    """A world of one rank."""
    return Threads(0, [None], threading.Barrier(1))


def test_a_capacity_without_its_methods_raises():
    layer, _ = layer_inputs(0)
    comm = alone()
    comm.capacity = expert_parallel.Capacity(10)
    wanted = "comm: got Threads with a capacity and without agree and record_overflow; wanted the methods of"
    for recipe in ("bf16", "fp8_flow"):
        with pytest.raises(TypeError, match=wanted):
            fp8moe.moe_forward(**layer, recipe=recipe, comm=comm)


class ThreadsPeers(Threads):
    """Like `Threads`, with writes to peer memory, in two windows used alternately."""

    room = 1 << 16

    def __init__(self, *world):
        super().__init__(*world)
        self.windows, self.on_their_way = [], []

    def fits(self, counts, row_bytes):
        return max(map(sum, zip(*counts, strict=True))) * row_bytes <= self.room

    def deliver(self, write, counts, row_bytes, async_op):
        assert all(pending.waited for pending in self.on_their_way[:-1]), "a third exchange"
        arriving = sum(row[self.rank] for row in counts)
        own = np.full((arriving, row_bytes), 0xA5, np.uint8)
        self.windows.append(own)
        for before in self.windows[:-2]:  # windows that are overwritten
            before[:] = 0x5A
        windows = []
        for rank, theirs in enumerate(self.all_of(own)):
            first = sum(row[rank] for row in counts[: self.rank])
            windows.append(theirs[first : first + counts[self.rank][rank]])
        write(tuple(windows))
        self.barrier.wait()
        self.on_their_way.append(Pending(lambda: own))
        return self.on_their_way[-1]


@pytest.mark.parametrize(("dtype", "itemsize"), [(BF16, 2), (np.float32, 4)])
def test_windows_have_room_for_every_message(dtype, itemsize):
    rng = generator()
    x, ids, probs = values(rng, (3, 100), dtype), np.zeros((3, 5), np.int32), np.ones((3, 5))
    room = torch_symmetric_memory.window_bytes(4, 1000, 100, 5, itemsize)
    for fmt, parts in ((None, (ids, probs)), ("e4m3", (ids, probs)), (None, (probs,)), (None, ())):
        assert 4 * 1000 * expert_parallel.messages.Message(x, fmt, parts).row_bytes <= room


def in_threads(kind, world, action):
    """Results of action(comm) on each rank."""
    board, barrier = [None] * world, threading.Barrier(world, timeout=60)
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(lambda rank: action(kind(rank, board, barrier)), range(world)))


@pytest.mark.parametrize("fmt", [None, "e4m3"])
@pytest.mark.parametrize(("world", "k"), [(2, 3), (3, 2), (3, 1)])
@pytest.mark.parametrize("room", [1 << 30, 8 << 10])  # sufficient for all, and for some of the exchanges
def test_peer_memory_equals_the_exchange(world, k, fmt, room, monkeypatch):
    monkeypatch.setattr(ThreadsPeers, "room", room)
    rng = generator()
    tokens = [int(rng.integers(0, 20)) for _ in range(world)]
    xs, dys = ([values(rng, (t, 256), BF16) for t in tokens] for _ in range(2))
    ids = [rng.integers(-1, 2 * world, (t, k)) for t in tokens]
    probs = [rng.random((t, k)).astype(np.float32) for t in tokens]

    def step(comm):
        r = comm.rank
        with fp8moe.trace() as counted:
            dispatched = expert_parallel.dispatch(xs[r], ids[r], probs[r], 2 * world, comm, fmt=fmt)
            x = dispatched.x if fmt is None else fp8moe.dequantize(dispatched.x)
            back = expert_parallel.combine(x.astype(BF16), dispatched.route, comm, fmt=fmt)
            dy = expert_parallel.combine_backward(dys[r], dispatched.route, comm, fmt=fmt)
            dx = expert_parallel.dispatch_backward(x, dispatched.topk_probs, dispatched.route, comm)
            for _ in range(2):  # earlier results must not change
                expert_parallel.combine_backward(-dys[r], dispatched.route, comm, fmt=fmt)
        arrays = (dispatched.x, dispatched.topk_ids, dispatched.topk_probs, back, dy, dx)
        return arrays, (dispatched.num_entries, counted.sent_bytes, counted.casts)

    for ours, theirs in zip(*(in_threads(k, world, step) for k in (Threads, ThreadsPeers)), strict=True):
        assert_same(ours[0], theirs[0])
        assert ours[1] == theirs[1]


@pytest.mark.parametrize("kind", [Threads, ThreadsPeers])
def test_chunks_are_one_exchange_ahead(kind, monkeypatch):
    """At most two exchanges are pending, which two windows allow; bitwise equal to one chunk."""
    monkeypatch.setattr(ThreadsPeers, "room", 1 << 24)
    world, rng = 2, generator()
    tokens = [37, 5]
    xs, dys = ([values(rng, (t, 128), BF16) for t in tokens] for _ in range(2))
    ids = [rng.integers(-1, 2 * world, (t, 2)) for t in tokens]
    probs = [rng.random((t, 2)).astype(np.float32) for t in tokens]
    w13, w2 = (rng.standard_normal((world, 2, n, 128)).astype(np.float32) for n in (256, 128))

    def step(comm, chunks):
        r, comm.overlap_chunks = comm.rank, chunks
        y, saved = fp8moe.moe_forward(xs[r], w13[r], w2[r], ids[r], probs[r], recipe="fp8_flow", comm=comm)
        assert len(saved.later) == chunks - 1
        g = fp8moe.moe_backward(saved, dys[r], comm=comm)
        return y, g.dx, g.dprobs

    for chunks in (2, 4, 7):
        wanted, dispatched = (in_threads(kind, world, lambda comm, n=n: step(comm, n)) for n in (1, chunks))
        for ours, theirs in zip(dispatched, wanted, strict=True):
            assert_same(ours, theirs)


@pytest.mark.parametrize("save", ["bf16", "fp8"])
@pytest.mark.parametrize("wanted", [["dw2"], ["dw13"], ["dw13", "dw2"]])
def test_chunks_with_padded_weights_of_which_one_is_frozen(wanted, save):
    """Equal to one chunk, apart from the order of sums and the scales of the chunks' own tiles."""
    inputs, dy = layer_inputs(1, ffn=48)
    inputs["w13"] = fp8moe.quantize_weights(inputs["w13"].astype(np.float32), parts=2, rows=128)
    inputs["w2"] = fp8moe.quantize_weights(inputs["w2"].astype(np.float32), columns=128)
    results = []
    for chunks in (1, 3):
        comm = alone()
        comm.overlap_chunks = chunks
        _, saved = fp8moe.moe_forward(**inputs, save=save, gradients=wanted, comm=comm)
        halves = {"dw13": (None, None), "ffn": 48}  # without the padding
        whole = fp8moe.moe_backward(saved, dy, **halves, gradients=wanted, comm=comm)
        _, operands = fp8moe.moe_backward_input(saved, dy, gradients=wanted, comm=comm)
        half = fp8moe.moe_backward_weight(operands, **halves)
        for name in ("dw13", "dw2"):
            assert (getattr(whole, name) is not None) == (getattr(half, name) is not None) == (name in wanted)
        assert_same(tuple(arrays_in(whole)), tuple(arrays_in(half)))
        results.append(arrays_in(whole))
    for a, b in zip(*results, strict=True):
        assert a.any()
        # values below 2^-15 of their tile's largest change by 2^-19 of it
        assert np.linalg.norm(a - b) <= 2.0**-14 * np.linalg.norm(a)


@pytest.mark.parametrize("backward", [fp8moe.moe_backward, fp8moe.moe_backward_input])
@pytest.mark.parametrize("recompute", [None, "moe_expert"])
def test_altered_saved_tensors_are_named_before_anything_is_sent(recompute, backward, monkeypatch):
    """In the record of the first chunk and of a later one."""
    inputs, dy = layer_inputs(1)
    comm = alone()
    comm.overlap_chunks = 3
    _, saved = fp8moe.moe_forward(**inputs, recipe="fp8_flow", recompute=recompute, comm=comm)
    monkeypatch.setattr(Threads, "exchange", lambda *_: pytest.fail("something was sent"))
    for name in ("probs", "x") if recompute else ("probs", "x", "h"):
        for value in (None, fp8moe.quantize(np.ones((3, 128), np.float32)) if name == "x" else dy[:3]):
            for n in (0, 1, 2):
                chunks = [replace(saved, later=()), *saved.later]
                chunks[n] = replace(chunks[n], **{name: value})
                altered = replace(chunks[0], later=tuple(chunks[1:]))
                where = "saved" if n == 0 else f"saved\\.later\\[{n - 1}\\]"
                with pytest.raises((TypeError, ValueError), match=rf"{where}\.{name}\b"):
                    backward(altered, dy, comm=comm)


def test_altered_operands_of_a_chunk_are_named_before_anything_is_added():
    inputs, dy = layer_inputs(1)
    comm = alone()
    comm.overlap_chunks = 2
    _, saved = fp8moe.moe_forward(**inputs, recipe="bf16", comm=comm)
    _, operands = fp8moe.moe_backward_input(saved, dy, comm=comm)
    dw2 = np.zeros(inputs["w2"].shape, np.float32)
    for changed, words in (
        ({"a": dy[:3]}, r"operands\.later\[0\]\.a: got shape"),
        ({"a": None}, r"operands\.later\[0\]\.a: got None"),
        ({"a": None, "dy": None}, r"operands\.later\[0\]\.dy: got one in some chunks only"),
    ):
        altered = replace(operands, later=(replace(operands.later[0], **changed),))
        with pytest.raises((TypeError, ValueError), match=words):
            fp8moe.moe_backward_weight(altered, dw2=dw2)
        assert not dw2.any()


def test_exchange_of_a_chunk_overlaps_products_of_another(monkeypatch):
    """The order of starts, computations and waits, forward and then backward."""
    log, products = [], importlib.import_module("fp8moe.reference.grouped_gemm")
    for verb, word in (("grouped_gemm", "product"), ("grouped_gemm_wgrad", "weights")):
        real = getattr(products, verb)
        monkeypatch.setattr(products, verb, lambda *a, r=real, w=word, **o: (log.append(w), r(*a, **o)))

    class Logged(Threads):
        overlap_chunks = 2

        def exchange(self, *arguments):
            log.append("send")
            pending = super().exchange(*arguments)
            return Pending(lambda: (log.append("wait"), pending.wait())[1])

    comm = Logged(0, [None], threading.Barrier(1))
    inputs, dy = layer_inputs(1)
    _, saved = fp8moe.moe_forward(**inputs, recipe="fp8_flow", comm=comm)
    two = ["product"] * 2
    assert log == ["send", "wait", "send", *two, "send", "wait", *two, "wait", "send", "wait"]
    log.clear()
    comm.overlap_chunks = 1
    fp8moe.moe_backward(fp8moe.moe_forward(**inputs, recipe="fp8_flow", comm=comm)[1], dy, comm=comm)
    forward = ["send", "wait", *two, "send", "wait"]
    # the rows' gradients are sent while the weight gradients are computed
    assert log == [*forward, "send", "wait", *two, "send", "weights", "weights", "wait"]
    log.clear()
    fp8moe.moe_backward(saved, dy, comm=comm)
    first = ["send", "wait", "send", *two, "send", "weights", "weights"]
    assert log == [*first, "wait", *two, "wait", "send", "weights", "weights", "wait"]


def test_number_of_spare_rows_is_small():
    rows = np.arange(1 << 17)
    spare_rows = np.array([with_spare(int(n)) for n in rows])
    assert spare_rows[0] == 0
    assert ((spare_rows >= rows) & (spare_rows % 16 == 0)).all()
    assert ((spare_rows - rows <= 15) | (spare_rows - rows <= rows / 32)).all()


@pytest.mark.parametrize("recipe", ["fp8_flow", "fp8_blockwise", "bf16"])
@pytest.mark.parametrize("kind", [Threads, ThreadsPeers])
def test_steps_with_nearly_as_many_rows_have_the_same_shapes(kind, recipe, monkeypatch):
    """Their launches are planned once; results equal the layer on one process."""
    monkeypatch.setattr(ThreadsPeers, "room", 1 << 24)
    rng, tokens = generator(), 60
    x, dy = (values(rng, (tokens, 128), BF16) for _ in range(2))
    w13, w2 = (rng.standard_normal((2, n, 128)).astype(BF16) for n in (256, 128))
    probs, shapes = rng.random((tokens, 2)).astype(np.float32), []
    for routed in (57, 59, 60):
        ids = np.tile([1, 0], (tokens, 1))
        ids[routed:] = -1
        ids = ids[rng.permutation(tokens)]
        comm = kind(0, [None], threading.Barrier(1))
        y, saved = fp8moe.moe_forward(x, w13, w2, ids, probs, recipe=recipe, comm=comm)
        grads = fp8moe.moe_backward(saved, dy, comm=comm)
        wanted, kept = fp8moe.moe_forward(x, w13, w2, ids, probs, recipe=recipe)
        assert_same((y, *arrays_in(grads)), (wanted, *arrays_in(fp8moe.moe_backward(kept, dy))))
        assert saved.plan.num_tokens == saved.route.rows == 64
        shapes.append([a.shape for a in arrays_in(saved)])
    assert shapes[0] == shapes[1] == shapes[2]


def test_single_rank_equals_the_layer():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((20, 128)).astype(np.float32)
    # 3 and 4 are no experts
    ids, probs = rng.integers(-1, 5, (20, 2)), rng.random((20, 2)).astype(np.float32)
    arrived = expert_parallel.dispatch(x, ids, probs, 3, alone())
    routed = ((ids >= 0) & (ids < 3)).any(axis=1)
    np.testing.assert_array_equal(arrived.x, x[routed])
    np.testing.assert_array_equal(arrived.topk_ids, np.where(ids < 3, ids, -1)[routed])
    back = expert_parallel.combine(arrived.x, arrived.route, alone())
    np.testing.assert_array_equal(back, np.where(routed[:, None], x, 0))


def test_validation_errors():
    x, ids, probs = np.ones((4, 128), np.float32), np.zeros((4, 2), np.int32), np.ones((4, 2), np.float32)
    with pytest.raises(ValueError, match=r"topk_probs: got shape \[3, 2\]"):
        expert_parallel.dispatch(x, ids, probs[:3], 3, alone())
    with pytest.raises(ValueError, match="compact"):
        expert_parallel.dispatch(fp8moe.quantize(x, layout="gemm_ready"), ids, probs, 3, alone())
    arrived = expert_parallel.dispatch(x, ids, probs, 3, alone())
    route, combine = arrived.route, expert_parallel.combine
    for wrong in (None, arrived, route.plan):
        with pytest.raises(TypeError, match=f"route: got {type(wrong).__name__}; wanted a Route"):
            combine(x, wrong, alone())
    for step, arrays, name in (  # other numbers of rows than were received
        (combine, (x[:3],), "y"),
        (expert_parallel.combine_backward, (x[:3],), "dy"),
        (expert_parallel.dispatch_backward, (x[:3], probs), "dx"),
        (expert_parallel.dispatch_backward, (x, probs[:3]), "dprobs"),
    ):
        with pytest.raises(ValueError, match=rf"{name}: got shape \[3, .*; wanted \[4, "):
            step(*arrays, route, alone())
    for comm in (None, "world"):
        with pytest.raises(TypeError, match=r"comm: got .*; wanted a Transport or an Engine"):
            expert_parallel.dispatch(x, ids, probs, 3, comm)
    w13, w2 = np.ones((3, 256, 128), np.float32), np.ones((3, 128, 128), np.float32)
    _, saved = fp8moe.moe_forward(x, w13, w2, ids, probs, recipe="bf16", comm=alone())
    with pytest.raises(ValueError, match="comm: got None; wanted a transport, as in the forward"):
        fp8moe.moe_backward(saved, x)


@pytest.mark.parametrize("recipe", ["fp8_flow", "fp8_blockwise", "bf16"])
def test_process_group_as_comm_is_named(recipe):
    """A torch process group, which is no transport, with every recipe."""
    x, w13, w2 = torch.ones(2, 128), torch.ones(1, 256, 128), torch.ones(1, 128, 128)
    ids, probs = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1)
    group = torch.distributed.ProcessGroup(0, 1)
    with pytest.raises(TypeError, match=r"comm: got ProcessGroup; wanted a Transport or an Engine"):
        moe_experts(x.bfloat16(), w13, w2, ids, probs, recipe=recipe, comm=group)


class ElasticBuffer:
    """DeepEP V2's buffer for one rank, by loops. The signatures of `dispatch` and `combine` are those of
    deep_ep/buffers/elastic.py at commit dd758caf (36 after v1.2.1)."""

    allow_multiple_reduction, group, rank_idx, num_ranks = True, "group", 0, 1

    def dispatch(
        self,
        x,
        topk_idx=None,
        topk_weights=None,
        cumulative_local_expert_recv_stats=None,
        num_experts=None,
        num_max_tokens_per_rank=None,
        expert_alignment=None,
        num_sms=0,
        num_qps=0,
        previous_event=None,
        previous_event_before_epilogue=None,
        async_with_compute_stream=False,
        allocate_on_comm_stream=False,
        handle=None,
        do_handle_copy=True,
        do_cpu_sync=None,
        do_expand=False,
        do_zero_padding=False,
        use_tma_aligned_col_major_sf=False,
    ):
        assert do_expand
        assert do_zero_padding
        if handle is None:
            assert topk_idx.dtype == torch.int64
            assert topk_weights.dtype == torch.float32
            slots = [(topk_idx == e).nonzero() for e in range(num_experts)]
            sizes = [-(-len(s) // expert_alignment) * expert_alignment for s in slots]
            source = torch.full((sum(sizes), 2), -1)
            start = 0
            for there, size in zip(slots, sizes, strict=True):
                source[start : start + len(there)] = there
                start += size
            handle = types.SimpleNamespace(
                source=source,
                topk_idx=topk_idx.clone(),
                num_unaligned_recv_tokens_per_expert=torch.tensor([len(s) for s in slots], dtype=torch.int32),
            )
        else:
            assert topk_idx is topk_weights is num_experts is expert_alignment is None
        if isinstance(x, tuple):
            assert x[0].dtype == torch.float8_e4m3fn
            assert x[1].shape == (len(x[0]), x[0].shape[1] // 128)
        token, slot = handle.source.unbind(1)

        def moved(a):
            rows = a.view(torch.uint8) if a.dtype == torch.float8_e4m3fn else a
            rows = torch.where((token >= 0)[:, None], rows[token], torch.zeros((), dtype=rows.dtype))
            return rows.view(a.dtype)

        rows = tuple(map(moved, x)) if isinstance(x, tuple) else moved(x)
        weights = None if topk_weights is None else torch.where(token >= 0, topk_weights[token, slot], 0)
        return rows, None, weights, handle, "event"

    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        bias=None,
        num_sms=0,
        num_qps=0,
        previous_event=None,
        previous_event_before_epilogue=None,
        async_with_compute_stream=False,
        allocate_on_comm_stream=False,
    ):
        assert x.dtype == torch.bfloat16
        there = handle.source[:, 0] >= 0
        token, slot = handle.source[there].unbind(1)
        tokens = len(handle.topk_idx)
        out = torch.zeros(tokens, x.shape[1]).index_add(0, token, x[there].float()).bfloat16()
        probs = None
        if topk_weights is not None:
            assert topk_weights.dtype == torch.float32
            assert topk_weights.dim() == 1
            probs = torch.full(handle.topk_idx.shape, torch.nan)  # undefined for ids of -1
            probs[token, slot] = topk_weights[there]
        return out, probs, "event"


@pytest.mark.parametrize("recipe", ["fp8_flow", "fp8_blockwise", "bf16"])
def test_layer_with_deep_ep(recipe):
    """The layer with the stub equals the layer without; fp8_flow sends rows in FP8."""
    comm = deep_ep.DeepEPEngine(ElasticBuffer())
    x, dy = torch.randn(2, 20, 128).bfloat16()
    ids, probs = torch.randint(-1, 4, (20, 2)), torch.rand(20, 2)  # 3 is no expert either
    w13, w2 = torch.randn(3, 256, 128), torch.randn(3, 128, 128)
    if recipe == "bf16":
        w13, w2 = w13.bfloat16(), w2.bfloat16()
    y, saved = fp8moe.moe_forward(x, w13, w2, ids, probs, recipe=recipe, comm=comm)
    grads = fp8moe.moe_backward(saved, dy, comm=comm)
    wanted_y, kept = fp8moe.moe_forward(x, w13, w2, ids, probs, recipe=recipe)
    wanted = fp8moe.moe_backward(kept, dy)
    pairs = list(zip((y, *arrays_in(grads)), (wanted_y, *arrays_in(wanted)), strict=True))
    for a, b in pairs:
        if recipe == "bf16":  # a BLAS sums in another order if zeros follow
            assert (a.float() - b.float()).abs().max() <= 2.0**-6 * b.abs().max()
        else:
            assert torch.equal(a, b)
    with pytest.raises(ValueError, match="bfloat16 only"):
        expert_parallel.combine(y, saved.route, comm, fmt="e4m3")
    with pytest.raises(ValueError, match="fmt: got 'e5m2'; wanted 'e4m3'"):
        expert_parallel.dispatch(x, ids, probs, 3, comm, fmt="e5m2")


@pytest.mark.parametrize("recipe", ["fp8_flow", "bf16"])
def test_torch_layer_with_deep_ep(recipe):
    x, dy = torch.randn(2, 20, 128).bfloat16()
    ids, probs = torch.randint(-1, 3, (20, 2)), torch.rand(20, 2)
    weights = torch.randn(3, 256, 128).bfloat16(), torch.randn(3, 128, 128).bfloat16()
    results = []
    for comm in (deep_ep.DeepEPEngine(ElasticBuffer()), None):
        leaves = [t.clone().requires_grad_() for t in (x, *weights, probs)]
        y = moe_experts(*leaves[:3], ids, leaves[3], recipe=recipe, comm=comm)
        results.append([y.detach(), *torch.autograd.grad(y, leaves, dy)])
    for a, b in zip(*results, strict=True):
        if recipe == "bf16":
            assert (a.float() - b.float()).abs().max() <= 2.0**-6 * b.abs().max()
        else:
            assert torch.equal(a, b)


def test_other_deep_ep_buffers_raise():
    with pytest.raises(TypeError, match=r"buffer: got SimpleNamespace; wanted DeepEP V2's"):
        deep_ep.DeepEPEngine(types.SimpleNamespace(group="group"))
    buffer = ElasticBuffer()
    buffer.allow_multiple_reduction = False
    with pytest.raises(ValueError, match="allow_multiple_reduction=False"):
        deep_ep.DeepEPEngine(buffer)


def test_attributes_of_transports_are_checked_or_fixed():
    torch_distributed = pytest.importorskip("fp8moe.adapters.torch.distributed.process_group")
    dist = torch_distributed.dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        comm = torch_distributed.ProcessGroup()
        comm.overlap_chunks, comm.capacity = 2, expert_parallel.Capacity(10)
        assert (comm.overlap_chunks, comm.capacity.rows) == (2, 10)
        for name, value, error, words in (
            ("overlap_chunks", 0, ValueError, "overlap_chunks: got 0; wanted an integer from 1"),
            ("overlap_chunks", True, TypeError, "overlap_chunks: got a bool; wanted"),
            ("capacity", 10, TypeError, "capacity: got int; wanted an fp8moe.expert_parallel.Capacity"),
        ):
            before = getattr(comm, name)
            with pytest.raises(error, match=words):
                setattr(comm, name, value)
            assert getattr(comm, name) == before
        for transport in (comm, deep_ep.DeepEPEngine(ElasticBuffer())):
            for name in ("rank", "world_size", "group"):
                with pytest.raises(AttributeError, match=name):
                    setattr(transport, name, 1)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("norm_type", [0, -1.0, float("nan")])
def test_orders_of_norms_that_do_not_add_up_over_meshes_raise(norm_type):
    torch_sharding = pytest.importorskip("fp8moe.adapters.torch.sharding")
    with pytest.raises(ValueError, match="norm_type: got"):
        torch_sharding.clip_grad_norm_([], 1.0, norm_type)
