"""Reading a GGUF file: one walk over the header, tensors as views of a memory map.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)::

    "GGUF" version tensors entries | entry ... | tensor info ... | padding | tensor data ...

Nothing but the header is read here; tensor bytes are read when somebody touches the views. Parsing
the 48,900 merges and 49,152 tokens of SmolLM2 takes 0.05 s; gguf-py's reader, which makes an object
of every string, takes 1.7 s.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blocktable.core.errors import LoadError

_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MAX_ENTRIES = 1 << 24


class TensorInfo(NamedTuple):
    """One tensor of the file. ``shape`` is in row-major order (ggml stores it reversed)."""

    name: str
    shape: tuple[int, ...]
    type_name: str  # "F32", "Q4_1", ...
    data: NDArray[np.uint8]  # the raw bytes, a read-only view of the map


class GGUFFile:
    """The metadata and tensor views of one GGUF file.

    Raises LoadError, naming the file and what is wrong with it, for anything that is not a whole,
    little-endian GGUF of version 2 or 3. The views stay valid as long as they are referenced.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise LoadError(f"cannot open {self.path}: {error}") from error
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            self._parse()
        except (struct.error, UnicodeDecodeError, IndexError, OverflowError) as error:
            raise LoadError(f"{self.path} is a corrupt GGUF file: {error}") from error

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture; LoadError where the file does not say it."""
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise LoadError(f"{self.path} does not name its architecture")
        return name

    def read_ahead(self) -> None:
        """Have the system read the tensors into memory in the background, where it can."""
        if hasattr(mmap, "MADV_WILLNEED"):
            self._map.madvise(mmap.MADV_WILLNEED)

    def _parse(self) -> None:
        magic, version = struct.unpack_from("<4sI", self._map, 0)
        if magic != b"GGUF":
            raise LoadError(f"{self.path} is not a GGUF file: it begins with {magic!r}")
        if version not in (2, 3):
            raise LoadError(f"{self.path} is GGUF version {version}; versions 2 and 3 are read")
        num_tensors, num_entries = struct.unpack_from("<QQ", self._map, 8)
        if max(num_tensors, num_entries) > _MAX_ENTRIES:
            raise LoadError(f"{self.path} is a corrupt GGUF file: {num_tensors} tensors declared")
        pos = 24
        for _ in range(num_entries):
            key, pos = self._string(pos)
            (kind,) = struct.unpack_from("<I", self._map, pos)
            self.metadata[key], pos = self._value(pos + 4, kind)
        self._parse_tensors(num_tensors, pos)

    def _parse_tensors(self, num_tensors: int, pos: int) -> None:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        infos = []
        for _ in range(num_tensors):
            name, pos = self._string(pos)
            (num_dims,) = struct.unpack_from("<I", self._map, pos)
            if num_dims > 8:
                raise LoadError(f"{self.path} is corrupt: tensor {name} has {num_dims} dimensions")
            dims = struct.unpack_from(f"<{num_dims}Q", self._map, pos + 4)
            kind, offset = struct.unpack_from("<IQ", self._map, pos + 4 + 8 * num_dims)
            pos += 16 + 8 * num_dims
            infos.append((name, tuple(reversed(dims)), kind, offset))
        align = int(self.metadata.get("general.alignment", 32)) or 32
        start = -(-pos // align) * align
        whole = np.frombuffer(self._map, dtype=np.uint8)
        for name, shape, kind, offset in infos:
            try:
                quant = GGMLQuantizationType(kind)
            except ValueError:
                raise LoadError(f"{self.path}: tensor {name} has unknown type {kind}") from None
            per_block, block_bytes = GGML_QUANT_SIZES[quant]
            count = int(np.prod(shape, dtype=np.float64)) if shape else 1
            end = start + offset + count // per_block * block_bytes
            if end > len(self._map):
                raise LoadError(
                    f"{self.path} is truncated: tensor {name} ends at byte {end}, "
                    f"the file has {len(self._map)}"
                )
            self.tensors[name] = TensorInfo(name, shape, quant.name, whole[start + offset : end])

    def _string(self, pos: int) -> tuple[str, int]:
        (length,) = struct.unpack_from("<Q", self._map, pos)
        end = pos + 8 + length
        if end > len(self._map):
            raise LoadError(f"{self.path} is truncated: a string at byte {pos} ends at {end}")
        return self._map[pos + 8 : end].decode("utf-8"), end

    def _value(self, pos: int, kind: int) -> tuple[Any, int]:
        if kind == _STRING:
            return self._string(pos)
        if kind == _ARRAY:
            item, count = struct.unpack_from("<IQ", self._map, pos)
            return self._array(pos + 12, item, count)
        if kind not in _SCALARS:
            raise LoadError(f"{self.path} is a corrupt GGUF file: value type {kind} at byte {pos}")
        code = "<" + _SCALARS[kind]
        return struct.unpack_from(code, self._map, pos)[0], pos + struct.calcsize(code)

    def _array(self, pos: int, item: int, count: int) -> tuple[Any, int]:
        if count > len(self._map):
            raise LoadError(f"{self.path} is a corrupt GGUF file: an array of {count} at {pos}")
        if item == _STRING:
            return self._strings(pos, count)
        if item in _SCALARS:
            code = f"<{count}{_SCALARS[item]}"
            return list(struct.unpack_from(code, self._map, pos)), pos + struct.calcsize(code)
        values = []
        for _ in range(count):
            value, pos = self._value(pos, item)
            values.append(value)
        return values, pos

    def _strings(self, pos: int, count: int) -> tuple[list[str], int]:
        """The hot loop of the header: no function call but the two that do the work."""
        unpack, data, values = struct.Struct("<Q").unpack_from, self._map, []
        for _ in range(count):
            start = pos + 8
            pos = start + unpack(data, pos)[0]
            values.append(data[start:pos].decode("utf-8", errors="surrogateescape"))
        if pos > len(data):
            raise LoadError(f"{self.path} is truncated: a string array ends at byte {pos}")
        return values, pos
