"""Fine-tune a block-FP8 checkpoint with LoRA on its experts, and write the result as such a checkpoint: load,
train, save the adapter, merge and export, load again, generate. By default a toy, which this program makes,
in seconds on a CPU. Needs ``pip install 'fp8moe[transformers]' peft``.

    python examples/finetune_fp8_lora.py
    python examples/finetune_fp8_lora.py --checkpoint Qwen/Qwen3-30B-A3B-FP8 --text notes.txt --out tuned
"""

import argparse
import tempfile
from pathlib import Path

import peft
import torch
import transformers

import fp8moe.torch
import fp8moe.transformers
from fp8moe.demo.text import shakespeare

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


class Bytes:
    """The toy's tokenizer."""

    def __call__(self, text):
        return list(text.encode())

    def decode(self, tokens):
        return bytes(tokens).decode(errors="replace")


def make_toy(folder, tokens):
    """A small Qwen3-MoE, trained for some steps in FP8, as a checkpoint with the codes that it multiplied."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 2}
    config = transformers.Qwen3MoeConfig(**sizes, vocab_size=256, experts_implementation="fp8moe")
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config).to(DEVICE, torch.bfloat16)
    train(model, tokens, steps=10, lr=3e-3)
    fp8moe.transformers.export(model, folder)


def load(folder):
    """On a GPU the experts stay codes, multiplied in place; on a CPU transformers dequantises them."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, experts_implementation="fp8moe", dtype=torch.bfloat16, device_map=DEVICE
    )


def batch(tokens, generator, size, length):
    starts = torch.randint(max(1, len(tokens) - length), (size,), generator=generator).tolist()
    return torch.tensor([tokens[i : i + length] for i in starts], device=DEVICE)


def train(model, tokens, steps, lr, size=4, length=64):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        ids = batch(tokens, generator, size, length)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def loss_of(model, tokens, length):
    ids = batch(tokens, torch.Generator().manual_seed(2), 8, length)
    return model(input_ids=ids, labels=ids).loss.item()


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", help="folder or name of a block-FP8 checkpoint (default: a toy)")
    parser.add_argument("--text", type=Path, help="file to train on (default: plays of Shakespeare)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lr", type=float, help="(default: 1e-2 for the toy, else 2e-4)")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=64, help="tokens of a text")
    parser.add_argument("--out", type=Path, help="a new folder for adapter/ and merged/ (default: temporary)")
    given = parser.parse_args(arguments)
    if given.out is not None and given.out.exists() and any(given.out.iterdir()):
        parser.error(f"--out: got {given.out}, which is not empty; wanted a new folder")

    fp8moe.transformers.enable(recipe="fp8_flow")
    with tempfile.TemporaryDirectory() as temporary:
        out, source, text = given.out or Path(temporary), given.checkpoint, bytes(shakespeare()).decode()
        if given.text is not None:
            text = given.text.read_text()
        if source is None:
            source, tokenizer, tokens = Path(temporary) / "toy", Bytes(), list(text.encode())
            make_toy(source, tokens)
        else:
            tokenizer = transformers.AutoTokenizer.from_pretrained(source)
            tokens = tokenizer(text)["input_ids"]

        # the base is frozen: nothing but the adapters has gradients and states of the optimizer
        lora = peft.LoraConfig(r=given.rank, target_modules=[], target_parameters=TARGETS)
        model = peft.get_peft_model(load(source), lora)
        before = loss_of(model, tokens, given.length)
        with fp8moe.torch.weights_unchanged(model):  # of a dequantised base: one set of copies
            lr = given.lr or (2e-4 if given.checkpoint else 1e-2)
            train(model, tokens, given.steps, lr, given.batch, given.length)
        after = loss_of(model, tokens, given.length)
        model.save_pretrained(out / "adapter")
        print(f"loss {before:.3f}, with the adapter {after:.3f}")

        # the adapter as it was saved, beside the base: merged into what is written, the model stays as it is
        model = peft.PeftModel.from_pretrained(load(source), out / "adapter")
        # rounded by chance, so that an adapter that is small beside a code's step is kept on average
        chance = torch.Generator(DEVICE).manual_seed(0)
        for name, report in fp8moe.transformers.export(model, out / "merged", generator=chance).items():
            print(f"{name}: {report}")

        merged = load(out / "merged")
        prompt = tokens[:32]
        if not isinstance(tokenizer, Bytes):
            tokenizer.save_pretrained(out / "merged")
        tuned = loss_of(merged, tokens, given.length)
        print(f"loss of the merged checkpoint {tuned:.3f}, loaded from {out / 'merged'}")
        found = merged.generate(torch.tensor([prompt], device=DEVICE), max_new_tokens=16, do_sample=False)
        print(repr(tokenizer.decode(found[0].tolist())))
    return before, after, tuned


if __name__ == "__main__":
    main()
