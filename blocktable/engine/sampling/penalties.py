"""Repetition, presence and frequency penalties from token counts kept on the device.

Counts are updated by the sampler with the token it drew, so a step neither reads the sequence
again nor waits for the host. Only rows that ask for a penalty have counts: they share a store that
grows with the number of such rows (``5 * vocab_size`` bytes each and 8 for each token).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_FIRST_LINES = 4
_FIRST_TOKENS = 64


class TokenCounts:
    """For each penalised row a line: ``prompt`` [lines, V] bool, ``output`` [lines, V] int32, and
    ``seen`` [lines, tokens] int64, every token of the row, filled up with its first: only their
    logits change, so a step touches O(tokens of the row), not O(V)."""

    def __init__(self, max_num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._line_of_row = np.full(max_num_rows, -1, np.int64)
        self._free: list[int] = []
        self._lengths = np.zeros(0, np.int64)  # of each line, on the host
        self.prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self.output = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self.seen = torch.zeros((0, _FIRST_TOKENS), dtype=torch.int64, device=device)

    def take(self, row: int, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Count a request's tokens into the line of its row. O(V + its tokens)."""
        if self._line_of_row[row] < 0:
            if not self._free:
                self._grow()
            self._line_of_row[row] = self._free.pop()
        line = int(self._line_of_row[row])
        self.prompt[line] = False
        self.output[line] = 0
        prompt = torch.as_tensor(prompt_ids, dtype=torch.int64, device=self._device)
        output = torch.as_tensor(output_ids, dtype=torch.int64, device=self._device)
        self.prompt[line, prompt] = True
        self.output[line].scatter_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        count = len(prompt_ids) + len(output_ids)
        self._widen(count)
        self.seen[line] = prompt[0]
        self.seen[line, :count] = torch.cat([prompt, output])
        self._lengths[line] = count

    def release(self, rows: np.ndarray) -> None:
        """Give back the lines of these rows; rows without one are skipped."""
        lines = self._line_of_row[rows]
        self._free.extend(lines[lines >= 0].tolist())
        self._line_of_row[rows] = -1

    def lines(self, rows: np.ndarray) -> np.ndarray:
        """Line of each row, int64 [n]; -1 for a row without one."""
        return self._line_of_row[rows]

    def longest(self, lines: np.ndarray) -> int:
        """Tokens of the longest of these lines, so that ``seen[lines, :longest]`` has all."""
        return int(self._lengths[lines].max())

    def add(self, lines: np.ndarray, on_device: Tensor, tokens: Tensor) -> None:
        """Count one drawn token for each line. ``lines`` [p] on the host and ``on_device``."""
        one = torch.ones(1, dtype=torch.int32, device=self._device).expand(len(lines))
        self.output.index_put_((on_device, tokens), one, accumulate=True)
        places = self._lengths[lines] + _repeats(lines)
        self._widen(int(places.max()) + 1)
        at = torch.from_numpy(places).to(self._device, non_blocking=True)
        self.seen[on_device, at] = tokens
        np.add.at(self._lengths, lines, 1)

    def _widen(self, count: int) -> None:
        """Room for ``count`` tokens in every line."""
        old = self.seen.shape[1]
        if count > old:
            more = max(2 * old, count) - old
            self.seen = torch.cat([self.seen, self.seen[:, :1].expand(-1, more)], dim=1)

    def _grow(self) -> None:
        old = self.prompt.shape[0]
        more = max(_FIRST_LINES, old)
        for name in ("prompt", "output", "seen"):
            before = getattr(self, name)
            setattr(self, name, torch.cat([before, before.new_zeros((more, before.shape[1]))]))
        self._lengths = np.concatenate([self._lengths, np.zeros(more, np.int64)])
        self._free.extend(range(old + more - 1, old - 1, -1))


def _repeats(lines: np.ndarray) -> np.ndarray:
    """How often each entry stood in the array before, int64 [p]."""
    order = np.argsort(lines, kind="stable")
    first = np.searchsorted(lines[order], lines[order])
    out = np.empty(len(lines), np.int64)
    out[order] = np.arange(len(lines)) - first
    return out


def apply_penalties(
    logits: Tensor, prompt: Tensor, output: Tensor,
    repetition: Tensor, presence: Tensor, frequency: Tensor,
) -> Tensor:  # fmt: skip
    """Penalised logits, [p, k] float32, of k tokens of each row.

    Args:
        logits: [p, k] float32; overwritten.
        prompt: [p, k] bool, the token is in the prompt.
        output: [p, k] int32, how often the token was generated.
        repetition, presence, frequency: [p] float32.
    """
    generated = output > 0
    divisor = torch.where(prompt | generated, repetition.unsqueeze(-1), 1.0)
    logits = torch.where(logits > 0, logits / divisor, logits * divisor)
    logits -= frequency.unsqueeze(-1) * output
    return logits.sub_(torch.where(generated, presence.unsqueeze(-1), 0.0))
