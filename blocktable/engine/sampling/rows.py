"""Sampling parameters of every row, as arrays.

One line of plain NumPy arrays for each row of the block table. A step picks its rows' lines with
one index operation; no request object is touched.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from blocktable.core.types import RowIds
from blocktable.engine.params import SamplingParams
from blocktable.engine.sampling.rng import stream_key

_FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")


class SamplingRows:
    """Arrays of shape [max_num_rows]; ``version`` rises when any of them changes.

    ``bias``, ``allowed`` and ``ends`` hold token ids for the few rows that ask for them.
    """

    def __init__(self, max_num_rows: int) -> None:
        self.temperature = np.zeros(max_num_rows, np.float32)
        self.top_k = np.zeros(max_num_rows, np.int64)
        self.top_p = np.ones(max_num_rows, np.float32)
        self.min_p = np.zeros(max_num_rows, np.float32)
        self.repetition = np.ones(max_num_rows, np.float32)
        self.presence = np.zeros(max_num_rows, np.float32)
        self.frequency = np.zeros(max_num_rows, np.float32)
        self.key = np.zeros(max_num_rows, np.uint64)
        self.num_logprobs = np.full(max_num_rows, -1, np.int32)
        self.first_end = np.zeros(max_num_rows, np.int64)  # first position where an end may stand
        self.random = np.zeros(max_num_rows, bool)
        self.filtered = np.zeros(max_num_rows, bool)
        self.penalised = np.zeros(max_num_rows, bool)
        self.listed = np.zeros(max_num_rows, bool)  # has a bias, a ban or an allowed list
        self.bias: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
        self.allowed: dict[int, NDArray[np.int64]] = {}
        self.ends: dict[int, NDArray[np.int64]] = {}
        self.version = 0

    def set(
        self, row: int, params: SamplingParams, *, prompt_len: int, seed: int, index: int,
        end_token_ids: Sequence[int],
    ) -> None:  # fmt: skip
        """Take a request's parameters into its row. O(its own lists)."""
        self.clear(np.array([row], np.int32))
        self.temperature[row] = params.temperature
        self.top_k[row], self.top_p[row], self.min_p[row] = params.top_k, params.top_p, params.min_p
        self.repetition[row] = params.repetition_penalty
        self.presence[row] = params.presence_penalty
        self.frequency[row] = params.frequency_penalty
        self.key[row] = stream_key(seed, index)
        self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self.random[row] = not params.greedy
        self.filtered[row] = not params.greedy and (params.top_k > 0 or params.top_p < 1.0)
        self.penalised[row] = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )
        self._set_lists(row, params)
        ends = sorted({*end_token_ids, *params.stop_token_ids})
        if params.min_tokens > 0 and ends:
            self.first_end[row] = prompt_len + params.min_tokens
            self.ends[row] = np.array(ends, np.int64)

    def _set_lists(self, row: int, params: SamplingParams) -> None:
        bias: dict[int, float] = dict(params.logit_bias or {})
        bias.update({token: -np.inf for token in params.bad_token_ids})
        if bias:
            ids = np.fromiter(bias.keys(), np.int64, len(bias))
            self.bias[row] = ids, np.fromiter(bias.values(), np.float32, len(bias))
        if params.allowed_token_ids is not None:
            self.allowed[row] = np.unique(np.array(params.allowed_token_ids, np.int64))
        self.listed[row] = row in self.bias or row in self.allowed

    def clear(self, rows: RowIds) -> None:
        """Return rows to greedy, so that nothing of their last request remains."""
        for name in ("temperature", "top_k", "min_p", "presence", "frequency", "first_end"):
            getattr(self, name)[rows] = 0
        self.top_p[rows] = self.repetition[rows] = 1.0
        self.num_logprobs[rows] = -1
        for flags in (self.random, self.filtered, self.penalised, self.listed):
            flags[rows] = False
        for held in (self.bias, self.allowed, self.ends):
            if held:
                for row in rows.tolist():
                    held.pop(row, None)
        self.version += 1

    def floats(self, rows: RowIds) -> NDArray[np.float32]:
        """The float parameters of these rows, [6, n], in the order of ``_FLOATS``."""
        return np.stack([getattr(self, name)[rows] for name in _FLOATS])
