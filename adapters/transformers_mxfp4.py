"""gpt-oss as it is published, in MXFP4, as a model of transformers whose experts train in FP8.

transformers itself computes with MXFP4 by kernels without a backward, or makes bfloat16 of it: 240 GB of
gpt-oss-120b, where the published codes are 61 GB.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fp8moe.adapters import needs

with needs("torch"):
    import torch
from torch import Tensor, nn

with needs("transformers"):
    import transformers
from safetensors import safe_open

from fp8moe.adapters.torch.mxfp4 import MXFP4Weight, codes_of_experts, parameter
from fp8moe.adapters.transformers import enabled_options
from fp8moe.checkpoints.shards import INDEX, SINGLE

__all__ = ["load_mxfp4"]

_log = logging.getLogger(__name__)
_PACKED = "_blocks", "_scales"


def load_mxfp4(
    path: str | os.PathLike[str],
    *,
    device: Any = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    name: str = "fp8moe",
    revision: str | None = None,
    **config: Any,
) -> Any:
    """Load a published gpt-oss checkpoint whose experts stay in MXFP4, frozen, and are multiplied in FP8.

    Parameters
    ----------
    path : str or path
        Folder of the checkpoint, or its name on the hub, which is downloaded.
    device : device
        Device of the model. Tensors go there one by one, so the host holds one at a time.
    dtype : dtype
        Dtype of all parameters but the experts' two weights.
    name : str
        The implementation of the experts, registered by `enable` with an FP8 recipe. With
        ``recompute="moe_expert"``, or gradient checkpointing, no FP8 codes are kept between forward and
        backward; otherwise those of all layers are, one byte a weight.
    revision : str or None
        Of a checkpoint on the hub.
    **config : object
        Fields of the model's configuration to change, such as ``attn_implementation``; not the dtype and the
        experts' implementation, which have arguments of their own.

    Returns
    -------
    PreTrainedModel
        In evaluation mode, as ``from_pretrained`` returns it. ``gate_up_proj`` and ``down_proj`` of the
        experts have the names and shapes of the dequantised model, so adapters of PEFT's
        ``target_parameters`` fit both models. They have no gradient; nothing but this library's experts
        computes with them, and saving the whole model raises: the base is the published checkpoint.

    Raises
    ------
    TypeError
        For a dtype that is none of torch's floating-point dtypes.
    ValueError
        For fields that the configuration does not have, a checkpoint of another model or quantisation,
        missing or additional tensors, other shapes, and an implementation that is not registered or has no
        FP8 recipe.

    Examples
    --------
    ``load_mxfp4("openai/gpt-oss-120b")`` loads the published model. Others are refused:

    >>> import tempfile
    >>> import transformers
    >>> import fp8moe.transformers
    >>> fp8moe.transformers.enable("fp8_flow")
    >>> folder = tempfile.mkdtemp()
    >>> transformers.MixtralConfig().save_pretrained(folder)
    >>> fp8moe.transformers.load_mxfp4(folder)
    Traceback (most recent call last):
    ValueError: path: got a mixtral in no MXFP4; wanted gpt-oss in MXFP4; use from_pretrained for others
    """
    if not enabled_options(name).precision.quantizes:
        raise ValueError(
            f"name: got {name!r} with recipe {enabled_options(name).recipe!r}; wanted an FP8 recipe; call "
            "fp8moe.transformers.enable('fp8_flow')"
        )
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype: got {dtype!r}; wanted a floating-point dtype of torch, as torch.bfloat16")
    folder = _folder(path, revision)
    settings, unknown = transformers.AutoConfig.from_pretrained(folder, return_unused_kwargs=True, **config)
    if unknown := sorted({*unknown, *(config.keys() & {"experts_implementation", "torch_dtype"})}):
        raise ValueError(
            f"config: got {', '.join(unknown)}; wanted fields of {type(settings).__name__}; the experts' "
            "implementation is name=, the parameters' dtype is dtype="
        )
    quantization = getattr(settings, "quantization_config", None) or {}
    if settings.model_type != "gpt_oss" or quantization.get("quant_method") != "mxfp4":
        raise ValueError(
            f"path: got a {settings.model_type} in {quantization.get('quant_method', 'no MXFP4')}; "
            "wanted gpt-oss in MXFP4; use from_pretrained for others"
        )
    del settings.quantization_config
    with torch.device("meta"):
        options: dict[str, Any] = {"experts_implementation": name, "dtype": dtype}
        model: Any = transformers.AutoModelForCausalLM.from_config(settings, **options)
    with torch.no_grad():
        _fill(model, folder, torch.device(device), dtype)
        _make_buffers(model, torch.device(device))
    model.tie_weights()
    model.name_or_path = settings._name_or_path = str(path)
    if (folder / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model.eval()


def _folder(path: Any, revision: str | None) -> Path:
    if Path(path).is_dir():
        return Path(path)
    hub: Any = importlib.import_module("huggingface_hub")
    patterns = ["*.json", "model*.safetensors", "tokenizer*"]
    return Path(hub.snapshot_download(str(path), revision=revision, allow_patterns=patterns))


def _fill(model: Any, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
    """Puts the checkpoint's tensors in the place of the model's, which are on the meta device."""
    wanted = {name: tensor.shape for name, tensor in model.state_dict().items()}
    halves: dict[str, dict[str, Tensor]] = {}
    rounded = 0
    for key, tensor in _tensors(folder):
        half = next((of for of in _PACKED if key.endswith(of)), "")
        name = key.removesuffix(half)
        if half:
            of_weight = halves.setdefault(name, {})
            of_weight[half] = tensor.to(device)
            if len(of_weight) < len(_PACKED):
                continue
            new = parameter(*(of_weight[of] for of in _PACKED))
            del halves[name]
        else:
            new = nn.Parameter(tensor.to(device, dtype))
        shape = wanted.pop(name, None)
        if shape != new.shape:
            of_model = "no such tensor" if shape is None else [*shape]
            raise ValueError(f"{folder}: got {name} {[*new.shape]}; the model of config.json has {of_model}")
        module, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        setattr(module, leaf, new)
        weights: Any = [getattr(module, of, None) for of in ("gate_up_proj", "down_proj")]
        if half and all(isinstance(w, MXFP4Weight) for w in weights):
            _, counts = codes_of_experts((weights[0].packed, weights[1].packed))
            rounded += sum(int(count.sum()) for count in counts)
    for name, of_weight in halves.items():
        (half,) = of_weight
        other = next(of for of in _PACKED if of != half)
        raise ValueError(f"{folder}: got {name}{half} without its {other}; wanted both")
    if wanted:
        raise ValueError(f"{folder}: got no {', '.join([*wanted][:3])}; wanted every tensor of the model")
    if rounded:
        _log.warning("%s: %d of the experts' values are rounded to FP8", folder, rounded)


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint's tensors, mapped from its files, with a bar on a terminal."""
    files = [SINGLE]
    if (folder / INDEX).exists():
        files = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    for file in transformers.utils.logging.tqdm(files, desc="Loading MXFP4", unit="file"):
        with safe_open(folder / file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                yield key, opened.get_tensor(key)


def _make_buffers(model: Any, device: torch.device) -> None:
    """Buffers that no checkpoint has: the rotary embeddings' frequencies."""
    for name, module in [*model.named_modules()]:
        if any(b.device.type == "meta" for b in module.buffers(recurse=False)):
            model.set_submodule(name, type(module)(config=model.config).to(device))
