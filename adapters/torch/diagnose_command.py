"""``fp8moe diagnose``: a model of transformers on a text, or what a function of the user's returns."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from fp8moe.adapters import needs

with needs("torch"):
    import torch

from fp8moe.adapters.torch.diagnose import diagnose
from fp8moe.demo.text import shakespeare

LENGTH = 512  # tokens of a sequence


def main(
    target: str,
    device: str,
    recipe: str | None,
    save: str | None,
    text: Path | None,
    tokens: int,
    as_json: bool,
) -> int:
    """Print the diagnosis, and return the exit code: 1 if there are findings."""
    if target.endswith(".py"):
        raise ValueError(f"TARGET: got {target}; wanted one of its functions, as in {target}:model_and_batch")
    given = _of_function(target) if ":" in target else _of_transformers(target, device, text, tokens)
    model, batch, *loss = given
    options: Any = {"recipe": recipe, "save": save, "loss": loss[0] if loss else None}
    found = diagnose(model, batch, **options)
    print(json.dumps(found.as_dict(), allow_nan=False) if as_json else found)
    return 1 if found.findings else 0


def _of_function(target: str) -> tuple[Any, ...]:
    """What FILE.py:FUNCTION or MODULE:FUNCTION returns."""
    name, _, function = target.rpartition(":")
    if name.endswith(".py"):
        path = Path(name).resolve()
        if not path.is_file():
            raise ValueError(f"TARGET: got {name}; wanted a file that exists")
        sys.path.insert(0, str(path.parent))  # as for a script
        spec: Any = importlib.util.spec_from_file_location(path.stem, path)
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, "")
        module = importlib.import_module(name)
    make = getattr(module, function, None)
    if not callable(make):
        raise ValueError(f"TARGET: got {function!r}, which {name} does not define; wanted a function of it")
    given = make()
    if not isinstance(given, tuple) or len(given) not in (2, 3):
        raise ValueError(
            f"TARGET: got a {type(given).__name__} from {function}(); wanted (model, batch) or (model, "
            "batch, loss), the arguments of fp8moe.torch.diagnose"
        )
    return given


def _of_transformers(target: str, device: str, text: Path | None, tokens: int) -> tuple[Any, ...]:
    """A model of transformers, in training mode, and a batch of the text with its labels."""
    from fp8moe.adapters.transformers import enable  # isort: skip - names what is missing
    from transformers import AutoModelForCausalLM, AutoTokenizer

    data = shakespeare() if text is None else np.fromfile(text, np.uint8)
    tokenizer = AutoTokenizer.from_pretrained(target)
    # a token has a byte or more, and at most 16 here
    ids = tokenizer(data[: 16 * tokens].tobytes().decode("utf-8", "replace"))["input_ids"][:tokens]
    length = min(LENGTH, len(ids))
    if length < 2:
        raise ValueError(f"--text: got {len(ids)} tokens; wanted 2 or more")
    enable()
    model: Any = AutoModelForCausalLM.from_pretrained(target, experts_implementation="fp8moe", dtype="auto")
    batch = torch.tensor(ids[: len(ids) // length * length], device=device).view(-1, length)
    return model.to(device).train(), {"input_ids": batch, "labels": batch, "use_cache": False}
