"""`fp8moe convert`: the experts of a checkpoint in another form, file by file, an expert at a time."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import fp8moe
from fp8moe import Quantized
from fp8moe.checkpoints.shards import (
    INDEX,
    Plan,
    Tensor,
    Writer,
    progress,
    read_checkpoint,
    read_header,
    read_object,
    write_text,
)
from fp8moe.formats import ceil_div, swapped

FORMS = ("block-fp8", "bf16", "mxfp8")
PLAIN = ("BF16", "F16", "F32")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".partial")
#: the scales of a weight by its name: of a matrix of one expert, and of the parameter of all
SCALES = ((".weight", ".weight_scale_inv"), ("", "_scale_inv"), ("_blocks", "_scales"))
EXPERT = re.compile(
    r"(?P<module>.+\.experts)\.(?:(?P<expert>\d+)\.(?P<one>\w+)\.weight|(?P<all>\w+_proj)(?:_blocks)?)"
)
#: what models call the number of their experts
COUNTS = "num_experts", "num_local_experts", "n_routed_experts"
QUANTIZATION: dict[str, dict[str, Any]] = {
    "block-fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "mxfp8": {"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"},
}
_E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
#: the two float32 values of every byte of MXFP4, in one element, so that they are looked up together
PAIRS = np.stack([np.tile(_E2M1, 16), np.repeat(_E2M1, 16)], axis=-1).view(np.complex64)[:, 0]
#: what engines call the modules that are not quantised: transformers and SGLang the first, vLLM the second
SKIPPED = ("modules_to_not_convert", "ignored_layers")


#: what a size that is no multiple of a tile's means for those who read block FP8
PARTIAL_TILES = (
    "no multiple of 128, which vLLM and SGLang refuse in block FP8; transformers' dequantisation takes its "
    "tiles for smaller ones"
)


class Matrix(NamedTuple):
    """Codes or values of one expert as they are in the file, with their scales."""

    data: np.ndarray
    scales: np.ndarray | None
    expert: int | None  # in the parameter of all


@dataclass(frozen=True)
class Weight:
    """An expert's matrix, or the parameter of all experts, in one of the forms that are read."""

    module: str
    matrix: str  # such as "down_proj"
    expert: int | None  # of a matrix of one
    form: str  # "plain", "block-fp8" or "mxfp4"
    tensor: Tensor
    scales: Tensor | None

    @property
    def experts(self) -> int | None:
        """How many there are in the parameter; None for a matrix of one."""
        return None if len(self.shape) == 2 else self.shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The matrix's shape, or the matrices'."""
        if self.form != "mxfp4":
            return self.tensor.shape
        experts, rows, blocks, half = self.tensor.shape
        return experts, rows, blocks * half * 2

    def matrices(self) -> Iterator[Matrix]:
        for expert in (None,) if self.experts is None else range(self.experts):
            scales = None if self.scales is None else self.scales.matrix(expert)
            yield Matrix(self.tensor.matrix(expert), scales, expert)

    def record(self, matrix: Matrix) -> tuple[Quantized, int]:
        """Of block FP8 or MXFP4, in block FP8, and how many values that rounded. Refuses NaN, and scales that
        are not positive and finite."""
        given: Any = [matrix.data], [matrix.scales]
        try:
            if self.form == "block-fp8":
                return fp8moe.from_block_fp8(*given, columnwise=False), 0
            w, rounded = fp8moe.from_mxfp4(*given, columnwise=False)
            return w, int(rounded[0])
        except ValueError as error:
            argument, _, text = str(error).partition("[0]:")
            of = self.scales if argument.startswith("scale") else self.tensor
            expert = "" if matrix.expert is None else f"[{matrix.expert}]"
            raise ValueError(f"{of.name}{expert}:{text or error}") from None  # type: ignore[union-attr]

    def values(self, matrix: Matrix) -> np.ndarray:
        """In float32."""
        if self.form == "plain":
            wide = matrix.data.astype(np.float32)
        elif self.form == "block-fp8":
            wide = fp8moe.dequantize(self.record(matrix)[0].rowwise)[0]
        else:
            pairs = matrix.data.reshape(len(matrix.data), -1)
            values = PAIRS.take(pairs).view(np.float32)
            scales = matrix.scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)  # type: ignore[union-attr]
            wide = (values.reshape(*scales.shape, 32) * scales[..., None]).reshape(len(pairs), -1)
        if not np.isfinite(wide).all():
            raise ValueError(f"{self.tensor.name}: got NaN or infinity; wanted finite weights")
        return wide


def convert(source: Path, target: Path, to: str, report: Callable[[str], None] = print) -> None:
    """Convert the experts of the checkpoint in folder ``source`` to form ``to`` in folder ``target``; all
    other tensors and files are copied.

    Raises ValueError for whatever cannot be converted, before anything is written where headers tell.
    """
    if target.resolve() == source.resolve():
        raise ValueError(f"OUT: got {target}, which is IN; wanted another folder")
    given = _read(source, to)
    target.mkdir(parents=True, exist_ok=True)
    with _alone_in(target):
        _write_all(given, source, target, to, report)


class _Given(NamedTuple):
    """A checkpoint: tensors by file and name, the experts' weights, names of their scales, and config.json as
    the result has it."""

    files: dict[str, dict[str, Tensor]]
    weights: dict[str, Weight]
    scales: set[str]
    config: dict[str, Any]


def _read(source: Path, to: str) -> _Given:
    """Refuses what cannot be converted."""
    files, config = read_checkpoint(source), _read_config(source)
    every = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
    weights = _weights(every)
    scales = {weight.scales.name for weight in weights.values() if weight.scales is not None}
    _check_experts(weights, config)
    settings = _quantization(config, every, weights, to)
    config.pop("quantization_config", None)
    if settings is not None:
        config["quantization_config"] = settings
    return _Given(files, weights, scales, config)


def _write_all(given: _Given, source: Path, target: Path, to: str, report: Callable[[str], None]) -> None:
    files, weights, scales, config = given
    strangers = {path.name for path in target.glob("*.safetensors")} - files.keys()
    if strangers:
        raise ValueError(
            f"OUT: got {target} with {min(strangers)}, which IN does not have; wanted a new folder"
        )
    places: dict[str, str] = {}
    total = 0
    plans = {}
    metadata = {"format": "pt", "fp8moe": _identity(source, files, to)}
    for name, tensors in files.items():
        plan = _plan(tensors, weights, scales, to)
        if plan and _is_finished(target / name, plan, metadata):
            report(f"{name}: finished before")
        elif plan:
            plans[name] = plan
        places |= {tensor: name for tensor, *_ in plan}
        total += sum(nbytes for *_, nbytes in plan)
    rounded = 0
    with progress(sum(tensor.nbytes for name in plans for tensor in files[name].values())) as advance:
        for name, plan in plans.items():
            with closing(Writer(target / name, plan, metadata)) as writer:
                for tensor in files[name].values():
                    if tensor.name in weights:
                        rounded += _write(weights[tensor.name], to, writer)
                    elif tensor.name not in scales:
                        for piece in tensor.pieces():
                            writer.write(tensor.name, piece)
                    advance(tensor.nbytes)
                writer.finish()
    for path in source.iterdir():
        if path.is_file() and path.suffix not in WEIGHTS and path.name not in (INDEX, "config.json"):
            partial = target / f".{path.name}.partial"
            shutil.copyfile(path, partial)
            partial.replace(target / path.name)
    if (source / INDEX).exists():
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        write_text(target / INDEX, json.dumps(index, indent=2) + "\n")
    write_text(target / "config.json", json.dumps(config, indent=2) + "\n")  # last: OUT is complete
    matrices = sum(weight.experts or 1 for weight in weights.values())
    report(f"{matrices} matrices of experts in {len(files)} files: {to}, written to {target} and read back")
    if to != "bf16" and any(weight.form == "mxfp4" for weight in weights.values()):
        report(
            "gate and up stay interleaved, as gpt-oss has them; no engine is known that reads FP8 experts so"
        )
    sizes = {size for weight in weights.values() for size in weight.shape[-2:]}
    if to == "block-fp8" and (odd := sorted(size for size in sizes if size % 128)):
        report(f"experts with {odd[0]} rows or columns: {PARTIAL_TILES}")
    if rounded:
        of = "" if len(plans) == len(files) else " in the files that this run wrote"
        report(f"{rounded} values{of} were rounded: MXFP4 scales more than 2^14 apart in one tile")


def _read_config(source: Path) -> dict[str, Any]:
    path = source / "config.json"
    if not path.is_file():
        raise ValueError(f"{path}: got no file; wanted the model's configuration")
    config = read_object(path)
    for name, part in config.items():
        if isinstance(part, dict) and "quantization_config" in part:
            raise ValueError(
                f"{path}: got a quantization_config in {name}; wanted one of the whole model, or none"
            )
    found: dict[str, Any] = config.get("quantization_config") or {}
    method, size = found.get("quant_method"), found.get("weight_block_size")
    if (method, size) not in ((None, None), ("fp8", [128, 128]), ("mxfp4", None)):
        raise ValueError(
            f"{path}: got quantization_config with quant_method {method!r} and weight_block_size {size}; "
            "wanted 'fp8' with [128, 128], 'mxfp4', or none"
        )
    return config


def _weights(every: dict[str, Tensor]) -> dict[str, Weight]:
    """The experts' weights by name."""
    weights = {}
    for name, tensor in every.items():
        if (match := EXPERT.fullmatch(name)) is None:
            continue
        dimensions, wanted = len(tensor.shape), 2 if name.endswith(".weight") else 3
        scales = None
        if name.endswith("_blocks"):
            form, scales = "mxfp4", _scales(every, name, 2)
            known = tensor.dtype == "U8" and dimensions == 4 and tensor.shape[-1] == 16
        elif tensor.dtype == "F8_E4M3":
            form, scales = "block-fp8", _scales(every, name, 0 if wanted == 2 else 1)
            tiles = *tensor.shape[:-2], *(ceil_div(size, 128) for size in tensor.shape[-2:])
            if dimensions == wanted and scales.shape != tiles:
                raise ValueError(
                    f"{scales.name}: got shape {list(scales.shape)}; wanted {list(tiles)}, of tiles"
                )
            known = dimensions == wanted
        else:
            form, known = "plain", tensor.dtype in PLAIN and dimensions == wanted
        if not known:
            raise ValueError(
                f"{name}: got {tensor.dtype} {list(tensor.shape)}, a form that is not known; wanted BF16, "
                "F16 or F32; F8_E4M3 with weight_scale_inv; or MXFP4's _blocks with _scales"
            )
        expert = None if match["expert"] is None else int(match["expert"])
        weights[name] = Weight(match["module"], match["one"] or match["all"], expert, form, tensor, scales)
    if not weights:
        raise ValueError(
            "IN: got no experts; wanted tensors named *.experts.0.down_proj.weight, *.experts.down_proj or "
            "*.experts.down_proj_blocks"
        )
    of_weights = {weight.scales.name for weight in weights.values() if weight.scales is not None}
    for name in every.keys() - weights.keys() - of_weights:
        if ".experts." in name and len(every[name].shape) > 1 and not name.endswith("bias"):
            raise ValueError(
                f"{name}: got {every[name].dtype} {list(every[name].shape)}, in experts; wanted weights of a "
                "form that is known, their scales, and biases"
            )
    return weights


def _check_experts(weights: dict[str, Weight], config: dict[str, Any]) -> None:
    """Refuses experts of which some are missing, or whose matrices differ in shape."""
    text = config.get("text_config")
    parts = [part for part in (config, text) if isinstance(part, dict)]
    said = {key: part[key] for part in parts for key in COUNTS if isinstance(part.get(key), int)}
    modules: dict[str, dict[str, dict[int | None, Weight]]] = {}
    for name, weight in weights.items():
        matrices = modules.setdefault(weight.module, {}).setdefault(weight.matrix, {})
        first = next(iter(matrices.values()), weight)
        if weight.shape != first.shape:
            raise ValueError(
                f"{name}: got {list(weight.shape)}; wanted {list(first.shape)}, as of expert {first.expert}"
            )
        matrices[weight.expert] = weight
    for module, of in modules.items():
        numbers = {matrix: _number(module, matrix, found) for matrix, found in of.items()}
        most = max(numbers, key=numbers.__getitem__)
        for matrix, number in numbers.items():
            if number != numbers[most]:
                raise ValueError(
                    f"{module}: got {number} experts of {matrix}; wanted {numbers[most]}, as of {most}"
                )
        for key, wanted in said.items():
            if numbers[most] != wanted:
                raise ValueError(
                    f"{module}: got {numbers[most]} experts; wanted {wanted}, as config.json says ({key})"
                )


def _number(module: str, matrix: str, found: dict[int | None, Weight]) -> int:
    """How many experts there are, of which one may be missing."""
    if None in found:
        return found[None].shape[0]
    numbers = {e for e in found if e is not None}
    last = max(numbers)
    if missing := sorted({*range(last)} - numbers):
        raise ValueError(f"{module}: got no expert {missing[0]} of {matrix}; wanted all from 0 to {last}")
    return last + 1


def _scales(every: dict[str, Tensor], name: str, kind: int) -> Tensor:
    scales = name.removesuffix(SCALES[kind][0]) + SCALES[kind][1]
    if scales not in every:
        raise ValueError(f"{name}: got no {scales}; wanted the scales without which the codes have no values")
    wanted = ("U8", "F8_E8M0") if kind == 2 else ("F32", "BF16", "F8_E8M0", "U8")
    if every[scales].dtype not in wanted:
        raise ValueError(f"{scales}: got {every[scales].dtype}; wanted {' or '.join(wanted)}")
    return every[scales]


def _quantization(
    config: dict[str, Any], every: dict[str, Tensor], weights: dict[str, Weight], to: str
) -> dict[str, Any] | None:
    """``quantization_config`` of the result. Refuses what no such record describes."""
    for weight in weights.values():
        if to == "mxfp8" and (
            weight.shape[-1] % 32 or (weight.form == "plain" and weight.experts is not None)
        ):
            name, shape = weight.tensor.name, list(weight.shape)
            raise ValueError(
                f"{name}: got {shape}; wanted, for MXFP8, rows of a multiple of 32 values, and a matrix an "
                "expert: of one parameter of all experts it is not known along which dimension blocks lie"
            )
        if to == "block-fp8" and config.get("model_type") == "gpt_oss" and weight.form == "plain":
            raise ValueError(
                f"{weight.tensor.name}: got gpt-oss' bfloat16 form, [E, in, out]; wanted its MXFP4 form: "
                "FP8 experts are read as [E, out, in], and w2 is square"
            )
    modules = sorted({weight.module for weight in weights.values()})
    codes = [name for name, x in every.items() if x.dtype == "F8_E4M3" and name not in weights]
    found = config.get("quantization_config") or {}
    skipped = [*(found.get(SKIPPED[0]) or found.get(SKIPPED[1]) or ())]
    if to == "bf16":
        skipped += [module for module in modules if module not in skipped]
        return {**found, **dict.fromkeys(SKIPPED, skipped)} if codes else None
    if to == "mxfp8" and codes:
        raise ValueError(
            f"{min(codes)}: got FP8 codes of a module that is not converted; wanted none beside MXFP8, as a "
            "checkpoint has one quantization_config; convert to block-fp8 or bf16"
        )
    for key in [*skipped]:
        if any(_skips(key, module) for module in modules):
            if "experts" not in key:
                raise ValueError(
                    f"config.json: got {key!r} in {SKIPPED[0]}, which skips experts to be converted; "
                    "wanted a list without them"
                )
            skipped.remove(key)
    others = unquantized((n, x.dtype, x.shape) for n, x in every.items() if n not in weights)
    return settings_of(to, [*skipped, *(name for name in others if name not in skipped)], found)


def unquantized(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> list[str]:
    """The modules with a matrix in a plain dtype, of tensors by name, dtype and shape."""
    plain = (name for name, dtype, shape in tensors if len(shape) == 2 and dtype in PLAIN)
    return sorted(name.removesuffix(".weight") for name in plain if name.endswith(".weight"))


def settings_of(to: str, skipped: list[str], found: dict[str, Any]) -> dict[str, Any]:
    """``quantization_config`` of experts in a form, and of all modules but those skipped; found: of the
    weights before."""
    settings = {"activation_scheme": "dynamic", "fmt": "e4m3", **QUANTIZATION[to]}
    if found.get("quant_method") == QUANTIZATION[to]["quant_method"]:
        settings = found
    return {**settings, **dict.fromkeys(SKIPPED, skipped)}


def _skips(key: str, module: str) -> bool:
    """Whether a module's name has this prefix, which may be a regular expression, or suffix."""
    return module.endswith(key) or re.match(rf"(?:{key})(?:(?<=\.)|(?=\.|$))", module) is not None


def _is_kept(weight: Weight, to: str) -> bool:
    return weight.form == to or (weight.form, to, weight.tensor.dtype) == ("plain", "bf16", "BF16")


def _names(weight: Weight) -> tuple[str, str]:
    """Names of the result's codes or values, and of its scales."""
    name = weight.tensor.name.removesuffix("_blocks")
    kind = 0 if weight.experts is None else 1
    return name, name.removesuffix(SCALES[kind][0]) + SCALES[kind][1]


def _plan(tensors: dict[str, Tensor], weights: dict[str, Weight], scales: set[str], to: str) -> Plan:
    """Name, dtype, shape and size of each tensor of a file of the result."""
    plan: Plan = []
    for name, tensor in tensors.items():
        if name in scales:
            continue
        weight = weights.get(name)
        if weight is None or _is_kept(weight, to):
            plan.append((name, tensor.dtype, tensor.shape, tensor.nbytes))
            if weight is not None and weight.scales is not None:
                kept = weight.scales
                plan.append((kept.name, kept.dtype, kept.shape, kept.nbytes))
            continue
        (values, factors), shape = _names(weight), weight.shape
        count = int(np.prod(shape, dtype=np.int64))
        if to == "bf16":
            # gpt-oss' own form of bfloat16, and transformers': [E, in, out]
            plan.append((values, "BF16", swapped(shape) if weight.form == "mxfp4" else shape, 2 * count))
            continue
        plan.append((values, "F8_E4M3", shape, count))
        *lead, rows, columns = shape
        blocks = (rows, columns // 32) if to == "mxfp8" else (ceil_div(rows, 128), ceil_div(columns, 128))
        number = int(np.prod((*lead, *blocks), dtype=np.int64))
        kind, size = ("U8", 1) if to == "mxfp8" else ("F32", 4)
        plan.append((factors, kind, (*lead, *blocks), size * number))
    return plan


def _write(weight: Weight, to: str, writer: Writer) -> int:
    """Write a weight in another form, an expert at a time; returns the number of MXFP4 values rounded."""
    if _is_kept(weight, to):
        for matrix in weight.matrices():
            if weight.scales is None:
                weight.values(matrix)
            else:
                weight.record(matrix)
                writer.write(weight.scales.name, matrix.scales)  # type: ignore[arg-type]
            writer.write(weight.tensor.name, matrix.data)
        return 0
    (values, scales), rounded = _names(weight), 0
    for matrix in weight.matrices():
        if to == "bf16":
            wide = weight.values(matrix).astype(ml_dtypes.bfloat16)
            writer.write(values, wide.T if weight.form == "mxfp4" else wide)
            continue
        if to == "block-fp8" and weight.form == "mxfp4":
            w, count = weight.record(matrix)
            q, rounded = w.rowwise, rounded + count
        else:
            block = (1, 32) if to == "mxfp8" else (128, 128)
            q = fp8moe.quantize(weight.values(matrix), block=block)
        writer.write(values, q.data)
        writer.write(scales, q.scales)
    return rounded


#: how many samples of a file tell it from others of its name and size, and their bytes
SAMPLES, SAMPLE = 64, 4096


def _identity(source: Path, names: Collection[str], to: str) -> str:
    """What a result was made of, by which a later run knows its files: of all files, as the scales of a
    file's codes may be in another one, and with samples of what they hold, as those of another model may have
    the same names, sizes and times."""
    digest = hashlib.sha256(json.dumps([to, fp8moe.__version__]).encode())
    for name in sorted(names):
        stat = (source / name).stat()
        digest.update(json.dumps([name, stat.st_size, stat.st_mtime_ns]).encode())
        with (source / name).open("rb") as file:
            for number in range(SAMPLES):
                file.seek(max(stat.st_size - SAMPLE, 0) * number // (SAMPLES - 1))
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()


@contextmanager
def _alone_in(target: Path) -> Iterator[None]:
    """Refuses a folder that another process writes to. The system releases the lock of one that is killed;
    where there are no locks, nothing is refused."""
    try:
        import fcntl
    except ImportError:  # on Windows
        yield
        return
    folder = os.open(target, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"OUT: got {target}, which another conversion writes to; wanted another folder"
            ) from None
        except OSError:
            pass
        yield
    finally:
        os.close(folder)


def _is_finished(path: Path, plan: Plan, metadata: dict[str, str]) -> bool:
    """Whether an earlier run has finished a file. Refuses one that is not this conversion's."""
    if not path.exists():
        return False
    tensors, found = read_header(path)
    got = {(x.name, x.dtype, x.shape, x.nbytes) for x in tensors.values()}
    if found != metadata or got != {*plan}:
        raise ValueError(
            f"{path}: got a file of another conversion, or of another state of IN; wanted a new folder, or "
            "this file removed"
        )
    return True
