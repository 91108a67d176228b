"""De-quantising GGUF tensors to float32, bit-identical to gguf-py.

The three types that most files use (Q4_0, Q4_1, Q8_0) and the plain float types have their own
code, which works in chunks that stay in the L2 cache; all others go through gguf-py's block
functions with the same chunking. Everything here is NumPy and releases the GIL for most of its
time, so that threads share the work.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blocktable.core.errors import LoadError
from blocktable.engine.loader.gguf_file import TensorInfo

_CHUNK_BLOCKS = 2048
"""Quantised blocks a pass: 2048 x 32 float32 values are 256 KiB. Measured over 106M
Q4_1 values: 2048 0.30 s, 4096 0.9 s and more (temporaries then come from fresh pages)."""

_LITTLE_ENDIAN = sys.byteorder == "little"

_PLAIN = {"F32": np.float32, "F16": np.float16, "F64": np.float64,
          "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64}  # fmt: skip


def dequantize(tensor: TensorInfo, *, to_bfloat16: bool = False) -> NDArray[np.generic]:
    """The tensor's values, float32 [*shape], writable, a copy. LoadError for an unknown type.

    With ``to_bfloat16`` a quantised tensor comes as the bit patterns of its values rounded to
    bfloat16 (uint16), ties to even as torch does it; tensors of plain types stay float32.
    """
    name, data = tensor.type_name, tensor.data
    if name in _PLAIN:
        plain = np.frombuffer(data, dtype=_PLAIN[name]).reshape(tensor.shape)
        return plain.astype(np.float32)
    if name == "BF16":
        wide = np.frombuffer(data, dtype=np.uint16).astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32).reshape(tensor.shape)
    return _quantized(tensor, to_bfloat16)


def _quantized(tensor: TensorInfo, to_bfloat16: bool) -> NDArray[np.generic]:
    from gguf import quants
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    per_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[tensor.type_name]]
    blocks = tensor.data.reshape(-1, block_bytes)
    own = _OWN.get(tensor.type_name)
    theirs: Any = getattr(quants, tensor.type_name, None)
    if own is None and theirs is None:
        raise LoadError(f"tensor {tensor.name} has type {tensor.type_name}: gguf cannot read it")
    if own is None:
        theirs.init_grid()
    count = blocks.shape[0]
    out = np.empty((count, per_block), np.uint16 if to_bfloat16 else np.float32)
    scratch = np.empty((min(count, _CHUNK_BLOCKS), per_block), np.float32)
    for start in range(0, count, _CHUNK_BLOCKS):
        part = slice(start, min(start + _CHUNK_BLOCKS, count))
        values: Any = scratch[: part.stop - start] if to_bfloat16 else out[part]
        if own is not None:
            own(blocks[part], values)
        else:
            values[:] = theirs.dequantize_blocks(np.ascontiguousarray(blocks[part]))
        if to_bfloat16:
            out[part] = _rounded(values)
    return out.reshape(tensor.shape)


def _rounded(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bit patterns of finite values rounded to bfloat16; overwrites ``values``."""
    bits = values.view(np.uint32)
    odd = bits >> np.uint32(16)
    odd &= np.uint32(1)
    odd += np.uint32(0x7FFF)
    bits += odd
    return bits.view(np.uint16)[:, 1::2] if _LITTLE_ENDIAN else (bits >> 16).astype(np.uint16)


def _half(blocks: NDArray[np.uint8], at: int) -> NDArray[np.float32]:
    """The float16 field at byte ``at`` of every block, as float32 [n, 1]."""
    raw = np.ascontiguousarray(blocks[:, at : at + 2])
    return raw.view(np.float16).astype(np.float32)


def _nibbles(packed: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
    """Low nibbles to the first half of each block of ``out``, high ones to the second."""
    half = packed.shape[1]
    out[:, :half] = packed & np.uint8(15)
    out[:, half:] = packed >> np.uint8(4)


def _q4_0(blocks: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
    _nibbles(blocks[:, 2:], out)
    out -= np.float32(8)
    out *= _half(blocks, 0)


def _q4_1(blocks: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
    _nibbles(blocks[:, 4:], out)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _q8_0(blocks: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
    out[:] = blocks[:, 2:].view(np.int8)
    out *= _half(blocks, 0)


_OWN = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}
