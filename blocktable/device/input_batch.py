"""The running requests of an engine as columns of arrays, one row a request.

::

    row   request   num_tokens  num_computed  temperature ...   block tables (every group)
     0    "a"           37          37           0.7             3 7 9 . .
     1    "b"          512         256           1.0             1 2 4 5 .
     2    (free)                                                 . . . . .

Rows of all columns and of all groups' block tables move together. Every operation takes arrays of
rows. Token ids are long, so they do not move: a row points to its line of ``token_ids``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from blocktable.core.errors import RowError
from blocktable.core.table import whole_numbers
from blocktable.core.types import RowIds, TokenIds
from blocktable.device.block_table import MultiGroupBlockTable
from blocktable.device.group_table import exchange

REAL_COLUMNS = (
    ("temperature", 1.0), ("top_p", 1.0), ("min_p", 0.0), ("frequency_penalty", 0.0),
    ("presence_penalty", 0.0), ("repetition_penalty", 1.0),
)  # fmt: skip
"""Sampling columns, float32, and the value of a request that does not say."""
WHOLE_COLUMNS = (
    ("num_tokens", 0), ("num_prompt_tokens", 0), ("num_computed_tokens", 0), ("max_tokens", -1),
    ("min_tokens", 0), ("top_k", 0), ("seed", -1), ("adapter", -1), ("token_line", 0),
)  # fmt: skip
"""Integer columns, int64, and their empty value; -1 is none or no limit."""
_INT32_MAX = 2**31 - 1
_SAMPLING_INTS = ("max_tokens", "min_tokens", "top_k", "seed")


@dataclass(frozen=True)
class BatchRequest:
    """A request to put into a batch. ``block_ids`` has one list of manager block ids a group.

    ``sampling`` is any object; its attributes named like a sampling column are taken over, None
    or a missing one leaves the default.
    """

    request_id: Hashable
    prompt_token_ids: Sequence[int] | TokenIds
    block_ids: Sequence[ArrayLike]
    num_computed_tokens: int = 0
    output_token_ids: Sequence[int] | TokenIds = ()
    sampling: Any = None
    adapter: int = -1
    extra: dict[str, Any] = field(default_factory=dict)
    """Values for columns made with `InputBatch.add_column`."""


class Moves(NamedTuple):
    """Rows that changed their place: what was row ``src[i]`` is row ``dst[i]`` now."""

    src: RowIds
    dst: RowIds


_NO_MOVES = Moves(np.zeros(0, np.int32), np.zeros(0, np.int32))


class InputBatch:
    """Per-request arrays and block tables whose rows move together.

    Attributes: ``request_ids`` (object [max_num_reqs], None where free), ``num_reqs``,
    ``block_table``, ``token_ids`` int32 [max_num_reqs, max_model_len] (lines; row r's is
    ``token_ids[batch["token_line"][r]]``, or `tokens`). ``batch[name]`` is a column over all rows.
    """

    def __init__(self, max_num_reqs: int, max_model_len: int, block_table: MultiGroupBlockTable):
        if block_table.max_num_reqs < max_num_reqs:
            raise RowError(
                f"{max_num_reqs} requests, but the block tables have "
                f"{block_table.max_num_reqs} rows"
            )
        self.max_num_reqs, self.max_model_len = max_num_reqs, max_model_len
        self.block_table = block_table
        self.token_ids = np.zeros((max_num_reqs, max_model_len), np.int32)
        self.request_ids: NDArray[Any] = np.full(max_num_reqs, None, object)
        self._row_of: dict[Hashable, int] = {}
        self._occupied = np.zeros(max_num_reqs, bool)
        # columns of one dtype lie in one array, so a move is one operation for all of them
        self._real = np.zeros((len(REAL_COLUMNS), max_num_reqs), np.float32)
        self._whole = np.zeros((len(WHOLE_COLUMNS), max_num_reqs), np.int64)
        self._columns: dict[str, NDArray[Any]] = {}
        self._empty: dict[str, Any] = {}
        for block, names in ((self._real, REAL_COLUMNS), (self._whole, WHOLE_COLUMNS)):
            for line, (name, empty) in zip(block, names, strict=True):
                line[:] = empty
                self._columns[name], self._empty[name] = line, empty
        self._real_empty = self._real[:, :1].copy()
        self._whole_empty = self._whole[:, :1].copy()
        self._whole[-1] = np.arange(max_num_reqs)
        self._extra: list[str] = []

    # -- reading --------------------------------------------------------------------------------

    @property
    def num_reqs(self) -> int:
        """Requests in the batch. After `condense` they are rows 0 .. num_reqs - 1."""
        return len(self._row_of)

    def __getitem__(self, name: str) -> NDArray[Any]:
        """A column over all rows: [max_num_reqs, ...]. Written in place by the caller as needed."""
        return self._columns[name]

    def __contains__(self, request_id: Hashable) -> bool:
        return request_id in self._row_of

    def rows(self, request_ids: Iterable[Hashable]) -> RowIds:
        """Rows of these requests; RowError names the first one that is not in the batch."""
        return self._rows(list(request_ids)).astype(np.int32)

    def _rows(self, ids: list[Hashable]) -> NDArray[np.int64]:
        try:
            return np.fromiter(map(self._row_of.__getitem__, ids), np.int64, len(ids))
        except KeyError:
            missing = next(request for request in ids if request not in self._row_of)
            raise RowError(f"request {missing!r} is not in the batch") from None

    def occupied_rows(self) -> RowIds:
        """Rows that hold a request, ascending."""
        return np.flatnonzero(self._occupied).astype(np.int32)

    def tokens(self, row: int) -> TokenIds:
        """Prompt and output token ids of a row, a view."""
        return self.token_ids[self["token_line"][row], : self["num_tokens"][row]]

    def uncomputed(self, rows: ArrayLike) -> NDArray[np.int64]:
        """Tokens of each of these rows that are known but not computed, [n]."""
        where = self._check_occupied(rows)
        return self["num_tokens"][where] - self["num_computed_tokens"][where]

    def next_tokens(self, rows: ArrayLike, counts: ArrayLike) -> TokenIds:
        """The first ``counts[i]`` uncomputed tokens of ``rows[i]``, row after row: a step's input
        ids, int32 [sum(counts)]. RowError where a row has fewer, or is free."""
        where, counts = self._check_occupied(rows), whole_numbers("counts", counts)
        known = self.uncomputed(where)
        if len(counts) != len(where) or (counts < 0).any() or (counts > known).any():
            raise RowError(f"rows {where.tolist()} do not have {counts.tolist()} tokens to compute")
        first = self["num_computed_tokens"][where] - (np.cumsum(counts) - counts)
        position = np.repeat(first, counts) + np.arange(int(counts.sum()))
        return self.token_ids[np.repeat(self["token_line"][where], counts), position]

    # -- columns --------------------------------------------------------------------------------

    def add_column(
        self, name: str, dtype: DTypeLike, empty: Any, shape: tuple[int, ...] = ()
    ) -> NDArray[Any]:
        """A further per-request array [max_num_reqs, *shape] that moves with the rows.

        ``empty`` fills free rows. RowError where the name is taken.
        """
        if name in self._columns:
            raise RowError(f"the batch has a column {name!r} already")
        self._columns[name] = np.full((self.max_num_reqs, *shape), empty, dtype)
        self._empty[name] = empty
        self._extra.append(name)
        return self._columns[name]

    # -- requests -------------------------------------------------------------------------------

    def add(self, requests: Sequence[BatchRequest]) -> RowIds:
        """Put requests into the lowest free rows, in order; their rows. All or none.

        RowError: the batch is full, an id is there already, a request is longer than
        ``max_model_len``, a column cannot hold its value, or a block table refuses its blocks.
        """
        free = np.flatnonzero(~self._occupied)
        self._check_new(requests, len(free))
        rows = free[: len(requests)].astype(np.int32)
        groups = range(len(self.block_table))
        shares = [[np.size(r.block_ids[g]) for r in requests] for g in groups]
        try:  # free rows first: what was written there before an error is cleared again
            ids = [_joined([r.block_ids[g] for r in requests]) for g in groups]
            for row, request in zip(rows.tolist(), requests, strict=True):
                self._fill(row, request)
            self.block_table.add_rows(rows, shares, ids)
        except Exception:
            self._clear_columns(rows)
            raise
        for row, request in zip(rows.tolist(), requests, strict=True):
            self.request_ids[row] = request.request_id
            self._row_of[request.request_id] = row
        self._occupied[rows] = True
        return rows

    def _check_new(self, requests: Sequence[BatchRequest], free: int) -> None:
        if len(requests) > free:
            raise RowError(f"{len(requests)} requests, but {free} rows are free")
        names = [request.request_id for request in requests]
        if None in names:
            raise RowError("None is no request id: it marks a free row")
        taken = [name for name in names if name in self._row_of]
        if taken or len(set(names)) < len(names):
            raise RowError(f"request ids {taken or names} are in the batch already, or twice")
        for request in requests:
            length = len(request.prompt_token_ids) + len(request.output_token_ids)
            if length > self.max_model_len:
                raise RowError(
                    f"request {request.request_id!r} has {length} tokens; "
                    f"max_model_len is {self.max_model_len}"
                )
            _check_computed(request.request_id, request.num_computed_tokens, length)
            if len(request.block_ids) != len(self.block_table):
                raise RowError(
                    f"request {request.request_id!r} has blocks for {len(request.block_ids)} "
                    f"groups, the batch has {len(self.block_table)}"
                )
            unknown = set(request.extra) - set(self._extra)
            if unknown:
                raise RowError(f"the batch has no column {sorted(unknown)[0]!r}")

    def _fill(self, row: int, request: BatchRequest) -> None:
        prompt, output = _tokens(request.prompt_token_ids), _tokens(request.output_token_ids)
        line = self.token_ids[self["token_line"][row]]
        line[: len(prompt)] = prompt
        line[len(prompt) : len(prompt) + len(output)] = output
        values = {
            name: getattr(request.sampling, name, None)
            for name in (*(name for name, _ in REAL_COLUMNS), *_SAMPLING_INTS)
        }
        values |= {"adapter": request.adapter, **request.extra}
        for name, value in values.items():
            column = self._columns[name]
            try:
                if value is not None and column.dtype.kind in "iu":
                    whole_numbers("values", value)  # NumPy would cut 1.5 to 1
                column[row] = self._empty[name] if value is None else value
            except (RowError, TypeError, ValueError, OverflowError) as error:
                which = f"request {request.request_id!r}: column {name!r}"
                raise RowError(f"{which} cannot hold {value!r}: {error}") from None
        self["num_tokens"][row] = len(prompt) + len(output)
        self["num_prompt_tokens"][row] = len(prompt)
        self["num_computed_tokens"][row] = request.num_computed_tokens

    def remove(self, request_ids: Iterable[Hashable]) -> RowIds:
        """Take requests out; their rows, which are free and empty now. All or none (RowError).

        Rows of the others stay where they are until `condense`.
        """
        ids = list(request_ids)
        rows = self._take_rows(ids)
        self.request_ids[rows] = None
        self._clear_columns(rows)
        self.block_table.clear_rows(rows)
        return rows.astype(np.int32)

    def _take_rows(self, ids: list[Hashable]) -> NDArray[np.int64]:
        """Rows of these requests, which are looked up no more: one pass, and undone by RowError
        (a lookup in a dict that has left the caches takes 0.4 us)."""
        try:
            return np.fromiter(map(self._row_of.pop, ids), np.int64, len(ids))
        except KeyError as error:
            names = enumerate(self.request_ids.tolist())
            self._row_of = {name: row for row, name in names if name is not None}
            raise RowError(
                f"request {error.args[0]!r} is not in the batch, or named twice"
            ) from None

    def _clear_columns(self, rows: NDArray) -> None:
        self._occupied[rows] = False
        self._real[:, rows] = self._real_empty
        self._whole[:-1, rows] = self._whole_empty[:-1]  # the token line stays the row's own
        for name in self._extra:
            self._columns[name][rows] = self._empty[name]

    def condense(self) -> Moves:
        """Close the gaps: the last rows move into the lowest free ones, so that requests are rows
        0 .. num_reqs - 1. On the device that is a row copy, not an upload."""
        n = self.num_reqs
        dst = np.flatnonzero(~self._occupied[:n])
        if not len(dst):
            return _NO_MOVES
        src = (np.flatnonzero(self._occupied[n:]) + n)[::-1]
        lines = self._whole[-1, dst].copy()
        self._permute(src, dst)
        self._whole[-1, src] = lines
        self._occupied[dst] = True
        self.request_ids[src] = None
        self._clear_columns(src)
        self.block_table.move_rows(src, dst)
        return Moves(src.astype(np.int32), dst.astype(np.int32))

    def swap(self, a: ArrayLike, b: ArrayLike) -> Moves:
        """Exchange rows ``a[i]`` and ``b[i]``; free rows may take part, no row twice."""
        src, dst = exchange(a, b)
        if (
            len(np.unique(src)) < len(src)
            or src.min(initial=0) < 0
            or (src.max(initial=0) >= self.max_num_reqs)
        ):
            half = len(src) // 2
            raise RowError(f"cannot exchange rows {src[:half].tolist()} with {dst[:half].tolist()}")
        self.block_table.move_rows(src, dst)
        occupied = self._occupied[src]
        self._permute(src, dst)
        self._occupied[dst] = occupied
        return Moves(src.astype(np.int32), dst.astype(np.int32))

    def _permute(self, src: NDArray, dst: NDArray) -> None:
        """Columns and ids of rows ``src`` go to rows ``dst``."""
        self._real[:, dst] = self._real[:, src]
        self._whole[:, dst] = self._whole[:, src]
        for name in self._extra:
            column = self._columns[name]
            column[dst] = column[src]
        names = self.request_ids[src]
        self.request_ids[dst] = names
        self._row_of.update(zip(names.tolist(), dst.tolist(), strict=True))
        self._row_of.pop(None, None)  # free rows

    def resume(
        self,
        rows: ArrayLike,
        counts: Sequence[ArrayLike],
        block_ids: Sequence[ArrayLike],
        num_computed_tokens: ArrayLike,
    ) -> None:
        """Preempted requests run again: their new blocks take the place of the old ones.

        ``counts`` and ``block_ids`` have one entry a group, as `MultiGroupBlockTable.add_rows`.
        """
        where = self._check_occupied(rows)
        computed = np.broadcast_to(
            whole_numbers("numbers of tokens", num_computed_tokens), where.shape
        )
        for row, count in zip(where.tolist(), computed.tolist(), strict=True):
            _check_computed(self.request_ids.item(row), count, int(self["num_tokens"][row]))
        self.block_table.add_rows(where, counts, block_ids)
        self["num_computed_tokens"][where] = computed

    def append_blocks(
        self, rows: ArrayLike, counts: Sequence[ArrayLike], block_ids: Sequence[ArrayLike]
    ) -> None:
        """Running requests got further blocks (`MultiGroupBlockTable.append_rows`)."""
        self.block_table.append_rows(self._check_occupied(rows), counts, block_ids)

    def append_tokens(self, rows: ArrayLike, token_ids: ArrayLike) -> None:
        """One sampled token for each row; RowError where a row is full or named twice. Changes all
        or none."""
        where, ids = self._check_occupied(rows), _tokens(token_ids)
        if ids.shape != where.shape or np.bincount(where).max(initial=0) > 1:
            raise RowError(
                f"{ids.size} token ids for rows {where.tolist()}: each row takes one, once"
            )
        at = self["num_tokens"][where]
        if at.max(initial=0) >= self.max_model_len:
            full = where[at >= self.max_model_len][0]
            raise RowError(f"row {full} holds max_model_len {self.max_model_len} tokens already")
        self.token_ids[self["token_line"][where], at] = ids
        self["num_tokens"][where] = at + 1

    def _check_occupied(self, rows: ArrayLike) -> RowIds:
        where = whole_numbers("row numbers", rows)
        if len(where) and (where.min() < 0 or where.max() >= self.max_num_reqs):
            raise RowError(f"rows {where.tolist()} of a batch of {self.max_num_reqs}")
        if not self._occupied[where].all():
            raise RowError(f"row {where[~self._occupied[where]][0]} holds no request")
        return where


def _check_computed(request_id: Hashable, computed: Any, known: int) -> None:
    if isinstance(computed, bool) or not isinstance(computed, (int, np.integer)):
        raise RowError(f"request {request_id!r}: num_computed_tokens is {computed!r}")
    if not 0 <= computed <= known:
        raise RowError(
            f"request {request_id!r}: num_computed_tokens is {computed}, outside 0 .. {known}"
        )


def _tokens(token_ids: ArrayLike) -> NDArray[np.integer]:
    """Token ids as an array [n]; RowError for what is no int32 (NumPy would cut 1.5 and 2**40)."""
    if isinstance(token_ids, np.ndarray) and token_ids.dtype == np.int32:
        ids = token_ids
    else:
        ids = whole_numbers("token ids", token_ids)
    if ids.size and (ids.min() < 0 or ids.max() > _INT32_MAX):
        bad = ids[(ids < 0) | (ids > _INT32_MAX)][0]
        raise RowError(f"token id {bad} is outside 0 .. {_INT32_MAX}")
    return ids


def _joined(parts: Sequence[ArrayLike]) -> NDArray[np.int64]:
    """Lists of block ids one behind another."""
    if not parts:
        return np.zeros(0, np.int64)
    return np.concatenate([whole_numbers("block ids", np.ravel(part)) for part in parts])
