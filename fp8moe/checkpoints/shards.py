"""Files of safetensors, read and written in pieces.

A reader of its own: safetensors' NumPy functions know neither float8 nor E8M0, and write a file only from
tensors that are all in memory. The format: eight bytes, the length of a JSON header with each tensor's dtype,
shape and place; the header; the tensors.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "U8": np.dtype(np.uint8),
}
PIECE = 64 * 2**20  # bytes that are copied or compared at a time
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MOST_HEADER = 100 * 2**20  # safetensors' own limit


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file: its dtype by safetensors' name, its shape, and its bytes from ``start`` on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    nbytes: int

    def bytes_of(self, start: int, nbytes: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.start + start)
            found = file.read(nbytes)
        if len(found) != nbytes:
            raise ValueError(f"{self.path}: got {len(found)} bytes of {self.name}; wanted {nbytes}")
        return found

    def pieces(self) -> Iterator[bytes]:
        for start in range(0, self.nbytes, PIECE):
            yield self.bytes_of(start, min(PIECE, self.nbytes - start))

    def matrix(self, expert: int | None = None) -> np.ndarray:
        """All of it, or one expert's part."""
        shape, count = (self.shape, 1) if expert is None else (self.shape[1:], self.shape[0])
        nbytes = self.nbytes // max(count, 1)
        found = self.bytes_of((expert or 0) * nbytes, nbytes)
        return np.frombuffer(found, DTYPES[self.dtype]).reshape(shape)


def read_header(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors of a file by name, in the order of their bytes, and its metadata. Refuses files that are
    shorter or longer than their header says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, MOST_HEADER):
            raise ValueError(
                f"{path}: got {size} bytes, with a header of {length}; wanted a file of safetensors"
            )
        try:
            header = json.loads(file.read(length))
            metadata = header.pop("__metadata__", {})
            tensors = [
                Tensor(name, x["dtype"], tuple(x["shape"]), path, 8 + length + first, last - first)
                for name, x in header.items()
                for first, last in [x["data_offsets"]]
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: got a header that is not safetensors' ({error!r})") from None
    tensors.sort(key=lambda tensor: tensor.start)
    wanted = 8 + length
    for tensor in tensors:
        nbytes = tensor.nbytes
        if tensor.dtype in DTYPES:
            nbytes = prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
        if tensor.start != wanted or tensor.nbytes != nbytes:
            raise ValueError(
                f"{path}: got {tensor.nbytes} bytes of {tensor.name}; wanted {nbytes} at {wanted}"
            )
        wanted += tensor.nbytes
    if size != wanted:
        raise ValueError(f"{path}: got {size} bytes; wanted {wanted}, as its header says: a truncated file?")
    return {tensor.name: tensor for tensor in tensors}, metadata


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object."""
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: got what is no JSON ({error}); wanted an object") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: got a {type(found).__name__}; wanted an object")
    return found


def read_checkpoint(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Tensors by name, of each file by its name."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: got no folder; wanted one with {INDEX} or {SINGLE}")
    if (folder / INDEX).exists():
        places = read_object(folder / INDEX).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise ValueError(f"{folder / INDEX}: got no weight_map; wanted the file of each tensor")
    elif (folder / SINGLE).exists():
        return {SINGLE: read_header(folder / SINGLE)[0]}
    else:
        raise ValueError(f"{folder}: got no {INDEX}, and no {SINGLE}; wanted one of them")
    found = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name or not (folder / name).is_file():
            raise ValueError(f"{folder / INDEX}: got {name!r}, which is no file beside it")
        found[name] = read_header(folder / name)[0]
    listed = set(places.items())
    there = {(tensor, name) for name, tensors in found.items() for tensor in tensors}
    if listed != there:
        tensor, name = sorted(listed ^ there)[0]
        where = "that file has no such tensor" if (tensor, name) in listed else "the index does not"
        raise ValueError(f"{folder / INDEX}: {tensor} of {name}: {where}; wanted an index of all tensors")
    return found


#: name, dtype, shape and size in bytes of each tensor of a file
Plan = list[tuple[str, str, tuple[int, ...], int]]


class Writer:
    """A file that is written under a temporary name, tensor by tensor or in parts of several at a time, and
    takes its name once all bytes on the disk are those that were written."""

    def __init__(self, path: Path, tensors: Plan, metadata: dict[str, str]):
        self.path, self.partial = path, path.with_name(f".{path.name}.partial")
        header: dict[str, Any] = {"__metadata__": metadata}
        self._left: dict[str, int] = {}
        start = 0
        for name, dtype, shape, nbytes in tensors:
            header[name] = {"dtype": dtype, "shape": [*shape], "data_offsets": [start, start + nbytes]}
            self._left[name] = nbytes
            start += nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # tensors start at multiples of eight bytes
        self._file = self.partial.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._ends = {
            name: 8 + len(text) + place["data_offsets"][1]
            for name, place in header.items()
            if name != "__metadata__"
        }
        self._sums = dict.fromkeys(self._left, 0)

    def write(self, name: str, data: bytes | np.ndarray) -> None:
        """The next bytes of a tensor."""
        data = data if isinstance(data, bytes) else np.ascontiguousarray(data).tobytes()
        self._file.seek(self._ends[name] - self._left[name])
        self._file.write(data)
        self._left[name] -= len(data)
        self._sums[name] = zlib.crc32(data, self._sums[name])

    def finish(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()
        if unwritten := [name for name, left in self._left.items() if left]:
            raise ValueError(f"{self.partial}: {unwritten[0]} is not complete")
        tensors, _ = read_header(self.partial)
        for name, wanted in self._sums.items():
            got = 0
            for piece in tensors[name].pieces():
                got = zlib.crc32(piece, got)
            if got != wanted:
                raise ValueError(
                    f"{self.partial}: got other bytes of {name} than were written: is the disk full?"
                )
        self.partial.replace(self.path)

    def close(self) -> None:
        self._file.close()


def write_text(path: Path, text: str) -> None:
    """Write a small file under a temporary name, and rename it."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)


class progress:
    """Bytes that are done: a bar on a terminal, if tqdm is installed."""

    def __init__(self, total: int):
        self._bar: Any = None
        if sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None:
            tqdm = importlib.import_module("tqdm").tqdm
            self._bar = tqdm(total=total, unit="B", unit_scale=True, dynamic_ncols=True)

    def __enter__(self) -> Callable[[int], object]:
        return (lambda nbytes: None) if self._bar is None else self._bar.update

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


class Group(NamedTuple):
    """Tensors of a checkpoint that are made together, by a function that gives them in their order."""

    plan: Plan
    make: Callable[[], Iterable[tuple[str, np.ndarray]]]


def write_checkpoint(folder: Path, groups: list[Group], texts: dict[str, str], most: int) -> None:
    """Write a checkpoint, a group at a time, in files of at most ``most`` bytes, or of one tensor, and then
    the other files, in their order. After an error nothing of it is left.

    Raises ValueError for a folder that has a checkpoint.
    """
    folder.mkdir(parents=True, exist_ok=True)
    there = [path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".partial")]
    there += [name for name in (INDEX, *texts) if (folder / name).exists()]
    if there:
        raise ValueError(f"folder: got {folder} with {min(there)}; wanted a new folder")
    plan = [tensor for group in groups for tensor in group.plan]
    files: list[Plan] = [[]]
    size = 0
    for tensor in plan:
        if files[-1] and size + tensor[3] > most:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += tensor[3]
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    names = [SINGLE] if len(files) == 1 else names
    places = {tensor[0]: i for i, tensors in enumerate(files) for tensor in tensors}
    if len(places) != len(plan):
        names = sorted(tensor[0] for tensor in plan)
        twice = next(name for name, after in pairwise(names) if name == after)
        raise ValueError(f"{twice}: got two tensors of this name; wanted one")
    writer, current = None, -1
    try:
        with progress(sum(tensor[3] for tensor in plan)) as advance:
            for group in groups:
                for (name, *_, nbytes), (given, data) in zip(group.plan, group.make(), strict=True):
                    if places[name] != current:
                        if writer is not None:
                            writer.finish()
                        current = places[name]
                        writer = Writer(folder / names[current], files[current], {"format": "pt"})
                    writer.write(given, data)  # type: ignore[union-attr]
                    advance(nbytes)
        if writer is not None:
            writer.finish()
        if len(files) > 1:
            index = {
                "metadata": {"total_size": sum(tensor[3] for tensor in plan)},
                "weight_map": {name: names[i] for name, i in sorted(places.items())},
            }
            write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")
        for name, text in texts.items():
            write_text(folder / name, text)
    except BaseException:
        if writer is not None:
            writer.close()
        for name in (*names, INDEX, *texts):
            for path in (folder / name, folder / f".{name}.partial"):
                path.unlink(missing_ok=True)
        raise
