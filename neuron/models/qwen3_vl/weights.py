"""Reading a Hugging Face checkpoint slice by slice: a rank reads only the bytes that it keeps."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from neuron.models.interface import CheckpointError


class Checkpoint:
    """The tensors of a folder, from `model.safetensors` or the files of `model.safetensors.index.json`.

    A context manager. Everything is cast to `dtype`. Methods that split take part `index` of `count` equal ones.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.folder = folder
        self.dtype = dtype
        self._files: dict[str, str] = {}
        index = folder / "model.safetensors.index.json"
        single = folder / "model.safetensors"
        if index.exists():
            self._files = json.loads(index.read_text())["weight_map"]
        elif not single.exists():
            raise CheckpointError(f"{folder}: expected model.safetensors or model.safetensors.index.json")
        self._open_files: dict[str, Any] = {}
        self._stack = ExitStack()
        if not self._files:
            self._files = dict.fromkeys(self._open(single.name).keys(), single.name)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def whole(self, name: str) -> Tensor:
        return self._slice(name)[:].to(self.dtype)

    def rows(self, name: str, index: int, count: int) -> Tensor:
        """Part of the first dimension."""
        part = self._slice(name)
        start, stop = _part(name, part.get_shape()[0], index, count)
        return part[start:stop].to(self.dtype)

    def columns(self, name: str, index: int, count: int) -> Tensor:
        """Part of the second dimension."""
        part = self._slice(name)
        start, stop = _part(name, part.get_shape()[1], index, count)
        return part[:, start:stop].to(self.dtype).contiguous()

    def row_range(self, name: str, start: int, stop: int) -> Tensor:
        return self._slice(name)[start:stop].to(self.dtype)

    def padded_rows(self, name: str, index: int, count: int) -> Tensor:
        """Part of the first dimension, which is filled up with zero rows to a multiple of `count`."""
        part = self._slice(name)
        total = part.get_shape()[0]
        size = -(-total // count)
        start, stop = min(index * size, total), min((index + 1) * size, total)
        rows = torch.zeros((size, *part.get_shape()[1:]), dtype=self.dtype)
        if stop > start:
            rows[: stop - start] = part[start:stop].to(self.dtype)
        return rows

    def _slice(self, name: str) -> Any:
        if name not in self._files:
            raise CheckpointError(f"{self.folder}: the weights have no tensor {name}")
        try:
            return self._open(self._files[name]).get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self.folder / self._files[name]}: {name}: {error}") from None

    def _open(self, file: str) -> Any:
        if file not in self._open_files:
            try:
                self._open_files[file] = self._stack.enter_context(safe_open(self.folder / file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{self.folder / file}: {error}") from None
        return self._open_files[file]


def _part(name: str, total: int, index: int, count: int) -> tuple[int, int]:
    if total % count:
        raise CheckpointError(f"{name}: {total} rows or columns do not split into {count} equal parts")
    size = total // count
    return index * size, (index + 1) * size
