"""Repetition, presence and frequency penalties from token counts kept on the device.

Counts are updated by the sampler with the token it drew, so a step neither reads the sequence
again nor waits for the host. Only rows that ask for a penalty have counts: they share a store that
grows with the number of such rows (``5 * vocab_size`` bytes each).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_FIRST_LINES = 4


class TokenCounts:
    """For each penalised row a line: ``prompt`` [lines, V] bool, ``output`` [lines, V] int32."""

    def __init__(self, max_num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._line_of_row = np.full(max_num_rows, -1, np.int64)
        self._free: list[int] = []
        self.prompt = torch.empty((0, vocab_size), dtype=torch.bool, device=device)
        self.output = torch.empty((0, vocab_size), dtype=torch.int32, device=device)

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

    def release(self, rows: np.ndarray) -> None:
        """Give back the lines of these rows; rows without one are skipped."""
        lines = self._line_of_row[rows]
        self._free.extend(lines[lines >= 0].tolist())
        self._line_of_row[rows] = -1

    def lines(self, rows: np.ndarray) -> np.ndarray:
        """Line of each row, int64 [n]; -1 for a row without one."""
        return self._line_of_row[rows]

    def add(self, lines: Tensor, tokens: Tensor) -> None:
        """Count one drawn token for each line. [p] int64, [p] int64."""
        one = torch.ones(1, dtype=torch.int32, device=self._device).expand(lines.shape[0])
        self.output.index_put_((lines, tokens), one, accumulate=True)

    def _grow(self) -> None:
        old = self.prompt.shape[0]
        new = max(_FIRST_LINES, 2 * old)
        for name in ("prompt", "output"):
            before = getattr(self, name)
            after = torch.zeros((new, self._vocab_size), dtype=before.dtype, device=before.device)
            after[:old] = before
            setattr(self, name, after)
        self._free.extend(range(new - 1, old - 1, -1))


def apply_penalties(
    logits: Tensor, prompt: Tensor, output: Tensor,
    repetition: Tensor, presence: Tensor, frequency: Tensor,
) -> Tensor:  # fmt: skip
    """Penalised logits, [p, V] float32.

    Args:
        logits: [p, V] float32; overwritten.
        prompt: [p, V] bool, the token is in the prompt.
        output: [p, V] int32, how often the token was generated.
        repetition, presence, frequency: [p] float32.
    """
    generated = output > 0
    divisor = torch.where(prompt | generated, repetition.unsqueeze(-1), 1.0)
    logits = torch.where(logits > 0, logits / divisor, logits * divisor)
    logits -= frequency.unsqueeze(-1) * output
    return logits.sub_(torch.where(generated, presence.unsqueeze(-1), 0.0))
