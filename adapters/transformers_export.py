"""Models of transformers written as checkpoints: experts as the codes that training multiplies by, or in
bfloat16, with PEFT's adapters merged on the way."""

from __future__ import annotations

import copy
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

import fp8moe
from fp8moe.adapters import transformers as of_transformers
from fp8moe.adapters.torch import ops as torch_ops
from fp8moe.adapters.torch.lora import LoRA
from fp8moe.adapters.torch.merge import (
    MergeReport,
    Sums,
    added_by,
    as_codes,
    by_tile,
    check_generator,
    check_values,
    merged_codes,
    merged_values,
)
from fp8moe.adapters.torch.mxfp4 import MXFP4Weight
from fp8moe.adapters.torch.operands import round_up_to_block
from fp8moe.checkpoints.convert import PARTIAL_TILES, settings_of, unquantized
from fp8moe.checkpoints.shards import Group, Plan, write_checkpoint
from fp8moe.formats import ceil_div
from fp8moe.runtime import checks

__all__ = ["export"]

E4M3 = torch.float8_e4m3fn
DTYPES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.bool: "BOOL",
}
#: what an adapter adds to one matrix of a parameter, in float64, by its number
Added = Callable[[int], Tensor]


def export(
    model: nn.Module,
    folder: str | Path,
    to: str = "block-fp8",
    *,
    max_shard_bytes: int = 5 * 10**9,
    generator: torch.Generator | None = None,
) -> dict[str, MergeReport]:
    """Write a model as a checkpoint for transformers, vLLM and SGLang: experts in block FP8 or bfloat16.

    In block FP8 they are the codes and scales that training multiplied by; active adapters are merged into
    what is written, in either form. The model stays as it is. Tensors are made and written a layer at a
    time; each file is read back and compared, and takes its name then; config.json comes last. Tensors have
    the names of the model type's published checkpoints (``experts.0.gate_proj.weight`` and
    ``weight_scale_inv``).

    Parameters
    ----------
    model : PreTrainedModel or PeftModel
        Whose experts this library computes (``experts_implementation="fp8moe"`` with an FP8 recipe), with
        weights of bfloat16, float16 or float32, or frozen codes of block FP8 (for "bf16" also of MXFP4, as
        `load_mxfp4` makes them); with or without PEFT's LoRA.
        Whole on this rank; other ranks must not call this.
    folder : str or Path
        A folder without a checkpoint. After an error nothing of it is left.
    to : "block-fp8" or "bf16"
        Form of the experts; "bf16" has no FP8 codes at all. Other weights keep their dtype.
    max_shard_bytes : int
        Largest size of a file, if that is no single tensor's.
    generator : torch.Generator or None
        Of adapters in FP8 codes, on the model's device: rounds by chance, so that small ones are kept on
        average (`fp8moe.torch.merge_lora`). None: to nearest.

    Returns
    -------
    dict of str to MergeReport
        By the parameter's name in the model: how well the result holds the sum of the weight and its
        adapter. Empty without adapters, as nothing is rounded that training has not rounded.

    Raises
    ------
    TypeError, ValueError
        For another kind of model, a folder that has a checkpoint, and weights or adapters that are not
        finite.
    NotImplementedError
        For experts that no engine reads in block FP8 (gpt-oss), or that this library does not compute in
        FP8; for sharded and offloaded weights; for adapters other than LoRA; by name.

    Notes
    -----
    Scales of frozen codes stay, or are doubled where the sums need it (`fp8moe.torch.merge_lora`). Weights
    of higher precision are added to their adapter in float64 and quantised once, as training quantises.

    Warns if less than nine tenths of an adapter are kept, and of sizes that are no multiple of 128: vLLM and
    SGLang refuse these, and transformers' dequantisation (``dequantize=True``, and on a CPU) takes their
    tiles for smaller ones.

    Examples
    --------
    >>> import tempfile
    >>> import transformers
    >>> import fp8moe.transformers
    >>> fp8moe.transformers.enable(recipe="fp8_flow")
    >>> sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}
    >>> sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1, "head_dim": 32}
    >>> config = transformers.Qwen3MoeConfig(**sizes, vocab_size=128, intermediate_size=64)
    >>> model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="fp8moe")
    >>> folder = tempfile.mkdtemp()
    >>> fp8moe.transformers.export(model, folder)
    {}
    >>> transformers.AutoConfig.from_pretrained(folder).quantization_config["quant_method"]
    'fp8'
    """
    checks.choice("to", to, ("block-fp8", "bf16"))
    most = checks.integer("max_shard_bytes", max_shard_bytes, 1, 2**62)
    unwrap: Any = getattr(model, "get_base_model", None)  # of PEFT's
    base: Any = model if unwrap is None else unwrap()
    if not isinstance(base, PreTrainedModel):
        raise TypeError(
            f"model: got {type(model).__name__}; wanted a model of transformers, or PEFT's of one"
        )
    if base.is_remote_code():
        raise NotImplementedError(
            "model: got one with code of its own; wanted transformers' own; use save_pretrained, and "
            f"`fp8moe convert --to {to}`, which copies all files"
        )
    _check_adapters(model)
    check_generator(generator, base.device)
    added, (state, tied) = _adapters_of(base), _state_of(base)
    if both := sorted(added.keys() & tied):
        raise NotImplementedError(
            f"{both[0]}: got an adapter of a weight that is tied to another; wanted one that is not"
        )
    reports: dict[str, MergeReport] = {}
    weights = _weights_of(base, state, added, to, reports, generator)
    groups_of: dict[str, list[_Weight]] = {}
    for w in weights:
        layer = re.match(r".*?\.\d+\.", w.name)
        key = w.name if w.is_experts else "" if layer is None else layer[0]
        groups_of.setdefault(key, []).append(w)
    publish = _publisher(base)
    groups = [
        Group(_plan(publish([(w.name, *w.shapes()) for w in of])), partial(_made, publish, of))
        for of in groups_of.values()
    ]
    config = json.loads(base.config.to_json_string())
    config.pop("quantization_config", None)
    config |= {"architectures": [type(base).__name__.removeprefix("FSDP")], "dtype": str(base.dtype)[6:]}
    if to == "block-fp8":
        tensors = [tensor[:3] for group in groups for tensor in group.plan]
        scales = {"scale_fmt": "ue8m0"} if any(dtype == "F8_E8M0" for _, dtype, _ in tensors) else {}
        config["quantization_config"] = settings_of(to, unquantized(tensors), {}) | scales
    texts = {"config.json": json.dumps(config, indent=2, sort_keys=True) + "\n"}
    if base.can_generate():
        texts = {"generation_config.json": base.generation_config.to_json_string(), **texts}
    write_checkpoint(Path(folder), groups, texts, most)
    lost = [name for name, report in reports.items() if report.kept < 0.9]
    if lost:
        warnings.warn(
            f"{len(lost)} of {len(reports)} weights: rounding has lost part of the adapter ({lost[0]}: "
            f"{reports[lost[0]]}); pass generator=torch.Generator(device), which keeps it on average, or "
            "to='bf16', or serve the adapter beside the base",
            stacklevel=2,
        )
    return reports


def _plain_name(name: str) -> str:
    """Of a module or tensor, without PEFT's wrappers."""
    return ".".join(part for part in name.split(".") if part != "base_layer")


def _state_of(base: Any) -> tuple[dict[str, Tensor], set[str]]:
    """The tensors that a checkpoint has, without those of adapters, and one of tied ones; and the names of
    these."""
    state = {}
    for name, w in base.state_dict().items():
        if not any(part.startswith("lora_") for part in name.split(".")):
            state[_plain_name(name)] = w
    for name, w in state.items():
        kind = type(w).__name__
        if not isinstance(w, Tensor) or isinstance(w, DTensor) or w.device.type == "meta":
            kind = "Tensor on the meta device" if kind == "Tensor" else kind
            raise NotImplementedError(
                f"{name}: got a {kind}; wanted a tensor that is whole, in memory; save the model with "
                "save_pretrained, which gathers it, and use `fp8moe convert`"
            )
        if w.dtype not in DTYPES:
            raise NotImplementedError(f"{name}: got {w.dtype}; wanted a dtype of {[*DTYPES.values()]}")
    for name in base._keys_to_ignore_on_save or ():
        state.pop(name, None)
    packed = {name: w for name, w in state.items() if isinstance(w, MXFP4Weight)}
    state = {name: w for name, w in state.items() if name not in packed}
    names: dict[int, set[str]] = {}
    for name, w in state.items():
        if w.numel():
            names.setdefault(w.data_ptr(), set()).add(name)
    tied = {name for same in names.values() if len(same) > 1 for name in same}
    return remove_tied_weights_from_state_dict(state, base) | packed, tied


def _check_adapters(model: Any) -> None:
    """Refuses PEFT's adapters that are no layers within the model, such as prompts."""
    for name in model.active_adapters if hasattr(model, "get_base_model") else ():
        config = model.peft_config[name]
        if config.peft_type not in ("LORA", "ADALORA"):
            raise NotImplementedError(
                f"model: got an adapter of PEFT's {type(config).__name__}; wanted LoRA, which can be merged; "
                "save it with save_pretrained, and export model.get_base_model()"
            )


def _adapters_of(base: nn.Module) -> dict[str, Added]:
    """What active adapters add to parameters, by their names. Those that PEFT has merged are in them."""
    added: dict[str, Added] = {}
    if "peft" not in sys.modules:
        return added
    from peft.tuners.lora.layer import LoraLayer, ParamWrapper
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    for name, module in base.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            raise NotImplementedError(
                f"{name}: got PEFT's {type(module).__name__}; wanted LoRA alone, without modules_to_save and "
                "trainable tokens"
            )
        if not isinstance(module, BaseTunerLayer):
            continue
        if not isinstance(module, LoraLayer):
            raise NotImplementedError(f"{name}: got PEFT's {type(module).__name__}; wanted LoRA")
        known: Any = module
        has = known.lora_A.keys() | known.lora_embedding_A.keys()
        names = [a for a in known.active_adapters if a in has]
        if not names or known.disable_adapters or known.merged:
            continue
        if any(a in known.lora_variant or known.lora_bias.get(a) for a in names):
            raise NotImplementedError(f"{name}: got a variant of LoRA or a bias; wanted LoRA without them")
        own = known.parameter_name if isinstance(known, ParamWrapper) else "weight"
        of_experts = isinstance(known, ParamWrapper) and known.get_param().ndim == 3
        added[f"{_plain_name(name)}.{own}"] = partial(_of_experts if of_experts else _of_linear, known, names)
    return added


def _of_linear(layer: Any, names: list[str], matrix: int) -> Tensor:
    whole = torch.stack([layer.get_delta_weight(a).double() for a in names]).sum(0)
    return whole[matrix] if whole.dim() == 3 else whole  # of a convolution


def _of_experts(wrapper: Any, names: list[str], expert: int) -> Tensor:
    found: Any = 0
    for a in names:
        matrices = wrapper.lora_A[a].weight, wrapper.lora_B[a].weight
        found += added_by(LoRA.from_peft(*matrices, wrapper.num_experts, scaling=wrapper.scaling[a]), expert)
    return found if wrapper._did_swap_in_out_features else found.T  # type: ignore[no-any-return]


def _nothing(_: int) -> Tensor:
    return torch.zeros((), dtype=torch.float64)


def _check_experts(name: str, experts: Any, to: str) -> None:
    """Refuses experts that the form does not describe, or whose codes training did not multiply by."""
    if "_fp8moe_implementation" in vars(experts) or getattr(experts, "_is_expert_parallel", False):
        raise NotImplementedError(
            f"{name}: got experts of one rank of several; wanted all experts; save the model with "
            "save_pretrained, which gathers them, and use `fp8moe convert`"
        )
    if of_transformers.has_codes(experts):
        of_transformers.check_codes(experts)
        return
    if to == "bf16":
        return
    kind = type(experts).__name__
    if experts.has_bias or experts.is_transposed or (experts.has_gate and not experts.is_concatenated):
        raise NotImplementedError(
            f"{name}: got {kind}, with biases, stored [E, in, out], or with gate and up in turn, which no "
            "engine reads in block FP8; wanted other experts; pass to='bf16'"
        )
    if not of_transformers.multiplies_codes(experts):
        raise NotImplementedError(
            f"{name}: got experts that fp8moe does not compute in FP8, so there are no codes that training "
            "multiplied by; wanted an implementation of fp8moe.transformers.enable with an FP8 recipe; call "
            "model.set_experts_implementation, or pass to='bf16'"
        )
    hidden, ffn = experts.down_proj.shape[1:]
    if hidden % 128 or ffn % 128:
        warnings.warn(
            f"{name}: got experts with {ffn if ffn % 128 else hidden} rows or columns: {PARTIAL_TILES}",
            stacklevel=3,
        )


@dataclass(frozen=True)
class _Weight:
    """A tensor of the model, and what is written of it.

    scales: of a tensor of codes, for each tile of each of so many parts of the rows. added: by an adapter.
    dtype: of the result, E4M3 for codes.
    """

    name: str
    tensor: Tensor
    scales: Tensor | None
    added: Added | None
    parts: int
    is_experts: bool
    dtype: torch.dtype
    reports: dict[str, MergeReport]
    generator: torch.Generator | None

    def shapes(self) -> tuple[Tensor, Tensor | None]:
        """The tensor and its scales, without values."""
        result = torch.empty_like(self.tensor, dtype=self.dtype, device="meta")
        if self.dtype != E4M3:
            return result, None
        if self.scales is not None:
            return result, torch.empty_like(self.scales, device="meta")
        return result, torch.empty(_tiles(self.tensor.shape, self.parts), device="meta")

    @torch.no_grad()
    def make(self) -> tuple[Tensor, Tensor | None]:
        """As `shapes`, with values."""
        w, scales, added = self.tensor, self.scales, self.added
        packed = isinstance(w, MXFP4Weight)
        if self.is_experts and not packed:
            check_values(self.name, w, scales)
        if (
            added is None
            and not packed
            and (w.dtype == self.dtype or (scales is None and self.dtype != E4M3))
        ):
            return w.to(self.dtype), scales
        matrices = w if w.dim() == 3 else w[None]
        factors = scales if scales is None or w.dim() == 3 else scales[None]
        report = None
        if self.dtype != E4M3:
            result, factors_of = torch.empty(matrices.shape, dtype=self.dtype, device=w.device), None
            values = self._values(matrices, factors)
            report = merged_values(values, added or _nothing, result, self.name)
        elif factors is not None and added is not None:
            result, factors_of, report = merged_codes(
                matrices, factors, added, self.parts, self.name, self.generator
            )
        elif added is not None:
            result, factors_of, report = self._sums(matrices, added)
        else:
            result, factors_of = self._quantized(matrices)
        if added is not None and report is not None:
            self.reports[self.name] = report
        return result.view(w.shape), factors_of if factors_of is None or w.dim() == 3 else factors_of[0]

    def _sums(self, w: Tensor, added: Added) -> tuple[Tensor, Tensor, MergeReport]:
        """Codes of a weight of higher precision plus its adapter."""
        sums, made = Sums(), []
        for e, matrix in enumerate(w):
            more = added(e)
            exact = matrix.double() + more
            codes, scales = self._quantized(exact.float()[None])
            if self.generator is not None:
                codes = as_codes(exact / self._factors(exact, scales[0]), self.generator)[None]
            made.append((codes, scales))
            (values,) = self._values(codes, scales)
            sums.add(values, exact, more)
        all_codes, all_scales = zip(*made, strict=True)
        return torch.cat(all_codes), torch.cat(all_scales), sums.report(self.name)

    def _quantized(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """As training quantises it."""
        rows = w.shape[1] // self.parts
        width = round_up_to_block(rows) if self.parts > 1 else None
        q = torch_ops.quantize_weights(w, parts=self.parts, rows=width, columnwise=False).rowwise
        if width in (None, rows):
            return q.data.view(E4M3), q.scales
        codes, scales = fp8moe.to_block_fp8(q, parts=self.parts, rows=rows)
        return torch.cat(codes, 1).view(E4M3), torch.cat(scales, 1)

    def _values(self, matrices: Tensor, scales: Tensor | None) -> Iterator[Tensor]:
        """Of each matrix, in float64."""
        if isinstance(matrices, MXFP4Weight):
            for e in range(len(matrices.blocks)):
                yield (
                    MXFP4Weight(matrices.blocks[e : e + 1], matrices.scales[e : e + 1])
                    .dequantize()[0]
                    .double()
                )
            return
        if scales is None:
            yield from (matrix.double() for matrix in matrices)
            return
        for matrix, factors in zip(matrices, scales, strict=True):
            yield matrix.double() * self._factors(matrix, factors)

    def _factors(self, matrix: Tensor, scales: Tensor) -> Tensor:
        """The scale of each value, in float64."""
        rows, columns = matrix.shape
        parts = scales.tensor_split(self.parts)
        return torch.cat([by_tile(of, (rows // self.parts, columns)) for of in parts])


def _weights_of(
    base: Any,
    state: dict[str, Tensor],
    added: dict[str, Added],
    to: str,
    reports: dict[str, MergeReport],
    generator: torch.Generator | None,
) -> list[_Weight]:
    """All that is written. Refuses experts that the form does not describe, or whose codes training did not
    multiply by."""
    parts: dict[str, int] = {}
    for module_name, m in base.named_modules():
        if of_transformers.has_interface(m):
            name, first = _plain_name(module_name), of_transformers.first_of(m)
            _check_experts(name, m, to)
            parts |= {f"{name}.{first}": 1 + bool(m.has_gate), f"{name}.down_proj": 1}
    if not parts:
        raise ValueError("model: got no experts of transformers' interface; wanted a mixture of experts")
    weights = []
    for name, w in state.items():
        if name.endswith("activation_scale"):
            raise NotImplementedError(f"{name}: got static scales of activations; wanted dynamic ones")
        if name.removesuffix("_scale_inv") in state.keys() - {name}:
            continue  # with its codes
        scales = state.get(f"{name}_scale_inv")
        is_experts = name in parts
        if w.dtype == E4M3:
            tiles = _tiles(w.shape, parts.get(name, 1))
            if scales is None or scales.shape != tiles:
                got = "no scales" if scales is None else f"scales of shape {list(scales.shape)}"
                raise NotImplementedError(f"{name}: got codes with {got}; wanted {list(tiles)}, of tiles")
        dtype = w.dtype
        if is_experts or dtype == E4M3:
            dtype = E4M3 if to == "block-fp8" else torch.bfloat16
        weights.append(
            _Weight(
                name, w, scales, added.get(name), parts.get(name, 1), is_experts, dtype, reports, generator
            )
        )
    return weights


def _publisher(base: Any) -> Callable[..., dict[str, Tensor]]:
    """A function that gives tensors, as (name, weight, scales or None), the names that transformers writes,
    which takes experts apart: scales as their weights."""
    conversions = get_model_conversion_mapping(base, add_legacy=False)
    model = copy.copy(base)  # of which the conversions alone are other ones: quantisers add theirs
    model._weight_conversions = [c for c in conversions if not isinstance(c, PrefixChange)]

    def publish(tensors: list[tuple[str, Tensor, Tensor | None]]) -> dict[str, Tensor]:
        weights = revert_weight_conversion(model, {name: w for name, w, _ in tensors})
        with_scales = {name: scales for name, _, scales in tensors if scales is not None}
        scales = revert_weight_conversion(model, with_scales)
        result = {}
        for name, w in weights.items():
            result[name] = w
            if (factors := scales.pop(name, None)) is not None:
                result[f"{name}_scale_inv"] = factors
        for name in [*scales, *(name for name, w in result.items() if w.dtype == E4M3)]:
            w, factors = result.get(name), result.get(f"{name}_scale_inv")
            if w is None or factors is None or w.dim() != 2 or factors.shape != _tiles(w.shape):
                raise NotImplementedError(
                    f"{name}: got a {type(base).__name__}, whose checkpoints have experts in another form "
                    "than a matrix of each, which no engine is known to read in block FP8; wanted a matrix "
                    "of each expert; pass to='bf16'"
                )
        return result

    return publish


def _tiles(shape: Any, parts: int = 1) -> tuple[int, ...]:
    """The shape of scales of matrices whose rows have so many parts, of which each has tiles of its own."""
    *lead, rows, columns = shape
    return *lead, parts * ceil_div(rows // parts, 128), ceil_div(columns, 128)


def _plan(tensors: dict[str, Tensor]) -> Plan:
    return [(name, DTYPES[t.dtype], tuple(t.shape), t.nbytes) for name, t in tensors.items()]


def _made(publish: Callable[..., dict[str, Tensor]], weights: list[_Weight]) -> Iterator[Any]:
    """Names and bytes. One copy of a parameter from its device, not one of each expert's matrix."""
    made = [(w.name, *(t if t is None else t.detach().cpu() for t in w.make())) for w in weights]
    for name, t in publish(made).items():
        yield name, t.contiguous().reshape(-1).view(torch.uint8).numpy()
