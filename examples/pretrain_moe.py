"""Pretrain a Qwen3-MoE of Hugging Face transformers whose experts are this library's, in one precision recipe
or several, from one seed or several.

    python examples/pretrain_moe.py --out runs --recipes bf16 fp8_flow --seeds 0 1 2 3 4
    python -m benchmarks.pairs runs/*.jsonl                     # the recipes' differences, paired by seed

By default 1.27 B parameters on a GPU, and a toy (``--toy``) on a CPU. Weights are float32, with autocast to
bfloat16; AdamW. The text is the same on all machines: plays of Shakespeare that the package has, or the
sources in wheels that are pinned by their hashes (``--wheels examples/corpus_wheels.txt``). Every 20th block
of 64 KiB is held out. A tokenizer is trained on the rest, and kept in DATA with the tokens. A seed decides on
the initial weights and on the order of the sequences, which are the same in every recipe.

OUT/NAME.jsonl has a row for the settings, one for each step and one for each evaluation. A run that was
stopped, or that ``--pause-after`` or ``--minutes`` ends, continues from its last checkpoint, bit for bit: the
same command again. Without ``--out`` nothing is kept. Needs ``pip install 'fp8moe[transformers]'``.
"""

import argparse
import contextlib
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers

import fp8moe.transformers
from fp8moe.demo.text import shakespeare
from fp8moe.info import commit, versions
from fp8moe.torch import weights_unchanged

BLOCK, HELD_OUT = 2**16, 20  # bytes of a block of text; every so many blocks one is held out
SIZES = (  # name, at size, as a toy, meaning
    ("layers", 12, 2, "layers"),
    ("hidden", 1024, 64, "hidden size"),
    ("ffn", 512, 48, "width of an expert"),
    ("experts", 64, 4, "experts of a layer"),
    ("topk", 8, 2, "experts of a token"),
    ("heads", 16, 4, "attention heads"),
    ("kv-heads", 4, 2, "heads of keys and values"),
    ("vocabulary", 16_384, 384, "pieces of the tokenizer"),
    ("length", 1024, 32, "tokens of a sequence"),
    ("batch", 16, 4, "sequences of a step"),
    ("micro-batches", 1, 1, "parts of a step"),
    ("steps", 6000, 6, "optimizer steps of a run"),
    ("warmup", 200, 2, "steps in which the learning rate rises"),
    ("evaluate-every", 250, 3, "steps between evaluations"),
    ("evaluate-on", 256, 4, "sequences of an evaluation"),
    ("checkpoint-every", 250, 3, "steps between checkpoints"),
)
#: settings that say where and for how long, not what is computed
ELSEWHERE = (
    *("out", "data", "corpus", "wheels", "toy"),  # hashes say which text it is
    *("recipes", "seeds", "pause_after", "minutes", "deadline", "checkpoint_every"),
)


def arguments(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--toy", action="store_true", help="small sizes: seconds on a CPU")
    parser.add_argument("--recipes", nargs="+", default=["bf16", "fp8_flow"], metavar="RECIPE")
    parser.add_argument("--save", choices=("bf16", "fp8"), default="bf16", help="of fp8_flow: fc1's output")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="SEED")
    parser.add_argument(
        "--corpus", default="plays", metavar="TEXT", help="plays (default), or a file of text"
    )
    parser.add_argument("--wheels", type=Path, help="requirements with hashes: the sources in these wheels")
    parser.add_argument("--lr", type=float, default=6e-4, help="largest learning rate (default: 6e-4)")
    parser.add_argument("--out", type=Path, help="folder of rows and checkpoints")
    parser.add_argument("--data", type=Path, help="folder of tokenizer and tokens (default: OUT/data)")
    parser.add_argument("--pause-after", type=int, metavar="STEPS", help="of each run, to continue later")
    parser.add_argument("--minutes", type=float, help="pause when the command has taken them")
    for name, at_size, as_toy, meaning in SIZES:
        parser.add_argument(f"--{name}", type=int, help=f"{meaning} (default: {at_size}, toy: {as_toy})")
    a = parser.parse_args(argv)
    a.toy = a.toy or not torch.cuda.is_available()
    for name, at_size, as_toy, _ in SIZES:
        name = name.replace("-", "_")
        if getattr(a, name) is None:
            setattr(a, name, as_toy if a.toy else at_size)
        if getattr(a, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: got {getattr(a, name)}; wanted 1 or more")
    if a.batch % a.micro_batches:
        parser.error(f"--micro-batches: got {a.micro_batches}; wanted a divisor of the {a.batch} sequences")
    a.deadline = math.inf if a.minutes is None else time.monotonic() + 60 * a.minutes
    for recipe in a.recipes:
        if recipe not in ("bf16", "fp8_flow", "fp8_blockwise"):
            parser.error(f"--recipes: got {recipe}; wanted bf16, fp8_flow or fp8_blockwise")
    return a


# ---------------------------------------------------------------- the text


def text_of(a, folder):
    """The bytes of the corpus."""
    if a.wheels is not None:
        return sources(a.wheels, folder / "wheels")
    if a.corpus == "plays":
        return shakespeare().tobytes()
    return Path(a.corpus).read_bytes()


def sources(requirements, folder):
    """The Python sources in wheels, which pip checks by their hashes, by wheel and path."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--require-hashes", "--no-deps"]
    only = ["--only-binary", ":all:", "--platform", "any", "--implementation", "py", "--abi", "none"]
    where = ["--python-version", "3.11", "--dest", str(folder), "--requirement", str(requirements)]
    subprocess.run([*pip, *only, *where], check=True)
    wanted = requirements.read_text()
    parts = []
    for wheel in sorted(folder.glob("*.whl")):
        if hashlib.sha256(wheel.read_bytes()).hexdigest() not in wanted:
            continue  # of other requirements
        with zipfile.ZipFile(wheel) as files:
            names = sorted(name for name in files.namelist() if name.endswith(".py"))
            parts += [files.read(name) for name in names]
    return b"\n".join(dict.fromkeys(parts))  # no file twice, as licences are


def tokens_of(a, folder):
    """(training tokens, held-out tokens, sha256 of text and tokenizer), made once for a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    known = folder / "data.json"
    asked = {"corpus": a.corpus, "wheels": a.wheels and a.wheels.read_text()}
    asked["vocabulary"] = a.vocabulary
    if not known.exists():
        text = text_of(a, folder)
        blocks = [text[i : i + BLOCK] for i in range(0, len(text), BLOCK)]
        last = min(HELD_OUT, len(blocks)) - 1
        parts = {"held_out": blocks[last::HELD_OUT]}
        parts["train"] = [block for i, block in enumerate(blocks) if i % HELD_OUT != last]
        words = tokenizers.Tokenizer(tokenizers.models.BPE())
        words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        words.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=a.vocabulary,
            show_progress=False,
            initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        )
        decoded = {name: [b.decode("utf-8", "replace") for b in part] for name, part in parts.items()}
        words.train_from_iterator(decoded["train"][:: max(1, len(blocks) // 400)], trainer)  # 25 MB
        words.save(str(folder / "tokenizer.json"))
        kind = np.uint16 if a.vocabulary <= 2**16 else np.int32
        for name, part in decoded.items():
            ids = []
            for i in range(0, len(part), 64):  # an encoding has more than its ids
                ids += [np.array(e.ids, kind) for e in words.encode_batch(part[i : i + 64])]
            np.save(folder / f"{name}.npy", np.concatenate(ids))
        files = {"text": text, "tokenizer": (folder / "tokenizer.json").read_bytes()}
        made = asked | {f"sha256 of {name}": hashlib.sha256(data).hexdigest() for name, data in files.items()}
        write(known, json.dumps(made).encode())
    made = json.loads(known.read_text())
    if changed := [name for name, value in asked.items() if made[name] != value]:
        raise SystemExit(
            f"--data: got a folder of another {changed[0]}, {folder}; wanted it, or a new folder"
        )
    train, held_out = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("train", "held_out"))
    return train, held_out, {name: value for name, value in made.items() if name.startswith("sha256")}


def sequences(tokens, length):
    """The tokens as [N, length]."""
    count = len(tokens) // length
    if count < 1:
        raise SystemExit(f"--length: got {length}; wanted at most the {len(tokens)} tokens of the text")
    return tokens[: count * length].reshape(count, length)


def batch_of(all_sequences, step, size, seed):
    """The sequences of a step, from its number alone: each epoch has them in another order."""
    count = len(all_sequences)
    rows = []
    for place in range(step * size, (step + 1) * size):
        epoch, at = divmod(place, count)
        rows.append(_order(seed, epoch, count)[at])
    return torch.from_numpy(np.stack([all_sequences[row] for row in rows]).astype(np.int64))


_orders = {}


def _order(seed, epoch, count):
    if (seed, epoch, count) not in _orders:
        _orders.clear()
        _orders[seed, epoch, count] = np.random.default_rng([seed, epoch]).permutation(count)
    return _orders[seed, epoch, count]


# ---------------------------------------------------------------- a run


def model_of(a, recipe, seed, device):
    name = f"fp8moe_{recipe}_{a.save}"
    fp8moe.transformers.enable(recipe, name=name, save=a.save if recipe == "fp8_flow" else "bf16")
    config = transformers.Qwen3MoeConfig(
        vocab_size=a.vocabulary,
        hidden_size=a.hidden,
        intermediate_size=a.ffn,
        moe_intermediate_size=a.ffn,
        num_hidden_layers=a.layers,
        num_attention_heads=a.heads,
        num_key_value_heads=a.kv_heads,
        head_dim=max(16, a.hidden // a.heads),
        num_experts=a.experts,
        num_experts_per_tok=a.topk,
        norm_topk_prob=True,
        output_router_logits=True,  # the balancing loss
        max_position_embeddings=a.length,
        use_cache=False,
        experts_implementation=name,
    )
    torch.manual_seed(seed)
    return transformers.Qwen3MoeForCausalLM(config).to(device)


def loss_of(model, ids, device):
    """(loss to minimise, mean cross-entropy in nats per token)."""
    ids = ids.to(device)
    with torch.autocast(device, torch.bfloat16):
        result = model(input_ids=ids, labels=ids)
    entropy = result.loss
    if result.aux_loss is not None:
        entropy = entropy - model.config.router_aux_loss_coef * result.aux_loss.to(entropy.device)
    return result.loss, entropy.detach()


def evaluation(model, held_out, a, device):
    model.eval()
    with torch.no_grad():
        rows = held_out[:: max(1, len(held_out) // a.evaluate_on)][: a.evaluate_on]  # of all the text
        parts = [rows[i : i + a.batch] for i in range(0, len(rows), a.batch)]
        batches = [torch.from_numpy(part.astype(np.int64)) for part in parts]
        losses = [loss_of(model, batch, device)[1].item() * len(batch) for batch in batches]
    model.train()
    return sum(losses) / len(rows)


def learning_rate(a, step):
    progress = step / a.steps
    return a.lr * min(1.0, (step + 1) / a.warmup) * (0.55 + 0.45 * math.cos(math.pi * progress))


def write(path, data):
    """Never a part of it, whenever the process is stopped."""
    new = path.with_name(path.name + ".new")
    new.write_bytes(data)
    os.replace(new, path)


def train(a, recipe, seed, data, folder, device):
    """One run, from its last checkpoint if it has one."""
    tokens, held_out, hashes = data
    tokens, held_out = sequences(tokens, a.length), sequences(held_out, a.length)
    name = f"{recipe}{'-save-fp8' if recipe == 'fp8_flow' and a.save == 'fp8' else ''}-seed{seed}"
    rows_of, kept = folder / f"{name}.jsonl", folder / f"{name}.pt"
    settings = {n: v if v is None or isinstance(v, (int, float)) else str(v) for n, v in vars(a).items()}
    settings = {n: v for n, v in settings.items() if n not in ELSEWHERE} | hashes
    settings |= {"recipe": recipe, "save": a.save if recipe == "fp8_flow" else "bf16", "seed": seed}
    model = model_of(a, recipe, seed, device)
    model.train()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=a.lr, betas=(0.9, 0.95), fused=True)
    begin = 0
    if kept.exists():
        state = torch.load(kept, map_location=device, weights_only=True)
        was = state["settings"]
        if changed := [n for n in {*settings, *was} if settings.get(n) != was.get(n)]:
            raise SystemExit(
                f"--{changed[0].replace('_', '-')}: got {settings.get(changed[0])}, where {kept} has "
                f"{was.get(changed[0])}; wanted the same, or another --out"
            )
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["generator"].cpu())
        if device == "cuda":
            torch.cuda.set_rng_state(state["generator of cuda"].cpu())
        begin = state["step"]
        with open(rows_of, "r+b") as file:  # rows after the checkpoint come again
            file.truncate(state["bytes"])
        del state
    else:
        rows_of.write_text("")
    of_machine = {"device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "commit": commit()}
    packages = {"torch": torch.__version__, "transformers": transformers.__version__}
    of_machine |= {"versions": {**versions(), **packages}, "command": " ".join(sys.argv)}
    text = {"corpus": a.corpus if a.wheels is None else str(a.wheels)}
    of_run = {**settings, **text, "parameters": sum(p.numel() for p in model.parameters())}
    end = a.steps if a.pause_after is None else min(a.steps, begin + a.pause_after)
    with open(rows_of, "a") as file:

        def row(**values):
            file.write(json.dumps(values) + "\n")
            file.flush()

        if begin < end:
            row(kind="resume" if begin else "run", step=begin, **({} if begin else of_run), **of_machine)
        for step in range(begin, end):
            start = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(a, step)
            batch = batch_of(tokens, step, a.batch, seed)
            losses = []
            # one set of FP8 copies for all micro-batches
            with weights_unchanged(model) if a.micro_batches > 1 else contextlib.nullcontext():
                for part in batch.chunk(a.micro_batches):
                    loss, entropy = loss_of(model, part, device)
                    (loss / a.micro_batches).backward()
                    losses.append(entropy)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            done = step + 1
            values = {"loss": torch.stack(losses).mean().item(), "gradient_norm": norm.item()}
            row(kind="step", step=done, **values, seconds=round(time.perf_counter() - start, 4))
            last = done == end or time.monotonic() > a.deadline
            if done % a.evaluate_every == 0 or done == a.steps:
                value = evaluation(model, held_out, a, device)
                row(kind="evaluation", step=done, tokens=done * a.batch * a.length, loss=value)
                print(f"{name:24} step {done:6} loss {values['loss']:.4f} held out {value:.4f}", flush=True)
            if done % a.checkpoint_every == 0 or last:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
                state |= {"settings": settings, "bytes": file.tell(), "generator": torch.get_rng_state()}
                if device == "cuda":
                    state["generator of cuda"] = torch.cuda.get_rng_state()
                new = kept.with_suffix(".new")
                torch.save(state, new)
                os.replace(new, kept)
            if last:
                break
        if begin < end and done < a.steps:
            print(f"{name:24} paused after step {done}; the same command continues")


def main(argv=None):
    a = arguments(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if a.out is None else a.out
        folder.mkdir(parents=True, exist_ok=True)
        data = tokens_of(a, folder / "data" if a.data is None else a.data)
        print(f"{len(data[0]):,} tokens to train on, {len(data[1]):,} held out; {a.steps} steps of ", end="")
        print(f"{a.batch * a.length:,} are {a.steps * a.batch * a.length / len(data[0]):.2f} epochs")
        for seed in a.seeds:
            for recipe in a.recipes:
                if time.monotonic() > a.deadline:
                    return
                train(a, recipe, seed, data, folder, device)


if __name__ == "__main__":
    main()
