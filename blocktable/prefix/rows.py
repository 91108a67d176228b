"""Keys of the running requests' blocks, in arrays by row."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from blocktable.core.types import Counts, RowIds, TokenIds
from blocktable.prefix.keys import KeyHasher, KeySource, MediaItem, hash_blocks
from blocktable.prefix.sequence import TokenSequence


class RowKeys:
    """Keys of the complete blocks of each row, hashed when they are first needed.

    ``keys`` uint8 [max_rows, max_blocks, key_bytes] (memory the system hands out when touched),
    ``num_hashed`` int32 [max_rows]: leading blocks whose key is there. ``tokens`` int32
    [max_rows, max_model_len] is the manager's. ``block_size`` is the hash granularity, the
    greatest common divisor of the groups' block sizes.
    """

    def __init__(self, tokens: NDArray[np.int32], keying: KeyHasher, block_size: int) -> None:
        max_rows, max_len = tokens.shape
        self.tokens, self.keying, self.block_size = tokens, keying, block_size
        self.max_blocks = max(1, max_len // block_size)
        self.keys = np.zeros((max_rows, self.max_blocks, keying.key_bytes), np.uint8)
        self.flat = self.keys.reshape(-1, keying.key_bytes)
        self.num_hashed = np.zeros(max_rows, np.int32)
        self.roots: list[bytes] = [b""] * max_rows
        self.media: list[tuple[MediaItem, ...]] = [()] * max_rows
        self.sources: list[KeySource | None] = [None] * max_rows
        self.hashers: list[Any] = [None] * max_rows
        self._has_media = np.zeros(max_rows, np.bool_)
        self.num_media = 0  # rows with media: their keys need Python
        whole = tokens[:, : max_len // block_size * block_size]
        self._chunks = whole.view(f"V{4 * block_size}")  # [max_rows, max_blocks], the same memory

    def load(self, row: int, sequence: TokenSequence) -> None:
        """The row's request is this one: take over what was hashed."""
        keys = sequence.keys()
        self.keys[row, : len(keys)] = keys
        self.num_hashed[row] = len(keys)
        self.roots[row], self.media[row] = sequence.root, sequence.media
        self.sources[row] = sequence.source
        if sequence.media:
            self._has_media[row] = True
            self.num_media = int(np.count_nonzero(self._has_media))
        self.hashers[row] = sequence.hasher_after(len(keys))

    def clear(self, rows: RowIds) -> None:
        """The rows are empty."""
        self.num_hashed[rows] = 0
        if self.num_media:
            self._has_media[rows] = False
            self.num_media = int(np.count_nonzero(self._has_media))

    def hash_upto(self, rows: RowIds, num_blocks: Counts) -> None:
        """Make sure that the first num_blocks[i] keys of rows[i] are there. One update and one
        digest for each block that is new, and nothing else in Python."""
        start = self.num_hashed[rows]
        behind = num_blocks - start
        late = (behind > 0).nonzero()[0]
        if len(late) == 0:
            return
        if len(late) < len(rows):
            rows, start, behind, num_blocks = (
                rows[late],
                start[late],
                behind[late],
                num_blocks[late],
            )
        if behind.max() == 1 and not (self.num_media and self._has_media[rows].any()):
            self._hash_next(rows, start)
            return
        for row, first, last in zip(
            rows.tolist(), start.tolist(), num_blocks.tolist(), strict=True
        ):
            self._hash_row(row, first, last)

    def hash_row_upto(self, row: int, num_blocks: int) -> bool:
        """`hash_upto` for one row that lacks one key at most; False: it lacks more or has media."""
        start = int(self.num_hashed[row])
        if num_blocks <= start:
            return True
        if num_blocks - start > 1 or self._has_media[row]:
            return False
        hasher = self.hashers[row]
        hasher.update(self._chunks[row, start].tobytes())
        self.keys[row, start] = np.frombuffer(hasher.digest(), np.uint8)
        self.num_hashed[row] = num_blocks
        return True

    def _hash_next(self, rows: RowIds, start: Counts) -> None:
        """One more block of each row."""
        joined = b"".join(self._digests(rows, self._chunks[rows, start].tolist()))
        keys = np.frombuffer(joined, np.uint8).reshape(len(rows), -1)
        self.flat[rows.astype(np.int64) * self.max_blocks + start] = keys
        self.num_hashed[rows] = start + 1

    def _digests(self, rows: RowIds, chunks: list[bytes]) -> list[bytes]:
        hashers, out = self.hashers, []
        for row, chunk in zip(rows.tolist(), chunks, strict=True):
            hasher = hashers[row]
            hasher.update(chunk)
            out.append(hasher.digest())
        return out

    def _hash_row(self, row: int, first: int, last: int) -> None:
        size = self.block_size
        tokens = self.tokens[row, first * size : last * size]
        joined = hash_blocks(self.hashers[row], tokens, size, first * size, self.media[row])
        self.keys[row, first:last] = np.frombuffer(joined, np.uint8).reshape(last - first, -1)
        self.num_hashed[row] = last

    def truncate(self, row: int, num_tokens: int) -> None:
        """The row's tokens from ``num_tokens`` on change: forget keys of blocks they are in."""
        keep = num_tokens // self.block_size
        if keep >= self.num_hashed[row]:
            return
        self.num_hashed[row] = keep
        hasher = self.keying.start(self.roots[row])
        tokens: TokenIds = self.tokens[row, : keep * self.block_size]
        hash_blocks(hasher, tokens, self.block_size, 0, self.media[row])
        self.hashers[row] = hasher

    def copy(self, src: int, dst: RowIds) -> None:
        """The rows ``dst`` become copies of ``src``."""
        n = int(self.num_hashed[src])
        self.keys[dst, :n] = self.keys[src, :n]
        self.num_hashed[dst] = n
        self._has_media[dst] = self._has_media[src]
        self.num_media = int(np.count_nonzero(self._has_media))
        for row in dst.tolist():
            self.roots[row], self.media[row] = self.roots[src], self.media[src]
            self.sources[row] = self.sources[src]
            self.hashers[row] = self.hashers[src].copy()

    def move(self, src: RowIds, dst: RowIds) -> None:
        """Rows move; all sources are read before any is written."""
        n = int(self.num_hashed[src].max(initial=0))
        self.keys[dst, :n] = self.keys[src, :n]
        self.num_hashed[dst] = self.num_hashed[src]
        self._has_media[dst] = self._has_media[src]
        gone = np.setdiff1d(src, dst)
        self.num_hashed[gone] = 0
        self._has_media[gone] = False
        for held in (self.roots, self.media, self.sources, self.hashers):
            moved = [held[row] for row in src.tolist()]
            for row, value in zip(dst.tolist(), moved, strict=True):
                held[row] = value
