"""A naive model of the cache: objects, lists and dictionaries, one request after the other.

It shares no code and no idea with the real manager: hits are searched by definition (is every
block that the next token attends to still cached?), the release order is a list.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Window = int | tuple[int, int] | None


class Full(Exception):
    """The model has no room."""


@dataclass(eq=False)
class Block:
    ref: int = 0
    key: tuple | None = None
    fence: int | None = None


@dataclass
class Row:
    tokens: list[int]
    salt: str | None
    computed: int
    entries: list[list[Block | None]]
    keyed: list[int]
    tail_shared: bool = False
    no_more_keys: bool = False


@dataclass
class Model:
    """``windows``: one entry a group; None = full attention, W = a window, (W, S) = a window and
    the first S tokens."""

    num_blocks: int
    block_size: int
    windows: list[Window]
    max_len: int
    step_tokens: int
    caching: bool = True
    rows: dict[int, Row] = field(default_factory=dict)
    unkeyed: int = 0
    queue: list[Block] = field(default_factory=list)
    fenced: list[Block] = field(default_factory=list)
    cached: dict[tuple, list[Block]] = field(default_factory=dict)
    in_flight: list[int] = field(default_factory=list)
    stored: int = 0
    removed: int = 0
    cleared: int = 0
    copies: int = 0

    def __post_init__(self) -> None:
        self.unkeyed = self.num_blocks - 1

    # -- blocks
    @property
    def available(self) -> int:
        return self.unkeyed + len(self.queue)

    def take(self) -> Block:
        if self.unkeyed:
            self.unkeyed -= 1
        elif self.queue:
            self.drop_key(self.queue.pop(0))
        else:
            raise Full
        return Block(ref=1)

    def touch(self, block: Block) -> None:
        if block in self.queue:
            self.queue.remove(block)
        if block in self.fenced:
            self.fenced.remove(block)
            block.fence = None
        block.ref += 1

    def drop_ref(self, block: Block | None) -> None:
        if block is None:
            return
        block.ref -= 1
        if block.ref == 0 and self.in_flight:
            block.fence = self.in_flight[-1]
            self.fenced.append(block)
        elif block.ref == 0:
            self.recycle(block)

    def recycle(self, block: Block) -> None:
        if block.key is None:
            self.unkeyed += 1
        else:
            self.queue.append(block)

    def drop_key(self, block: Block) -> None:
        copies = self.cached[block.key]
        copies.remove(block)
        if not copies:
            del self.cached[block.key]
        block.key = None
        self.removed += 1
        if block in self.queue:
            self.queue.remove(block)
            self.unkeyed += 1

    def end_step(self, step: int) -> None:
        self.in_flight.remove(step)
        done = [b for b in self.fenced if not self.in_flight or b.fence < min(self.in_flight)]
        for block in done:
            self.fenced.remove(block)
            block.fence = None
            self.recycle(block)

    # -- hits
    def key(self, group: int, tokens: list[int], salt: str | None, index: int) -> tuple:
        return group, salt, tuple(tokens[: (index + 1) * self.block_size])

    def window(self, group: int) -> tuple[int, int]:
        """Window, and tokens kept before it."""
        window = self.windows[group]
        return window if isinstance(window, tuple) else (window or self.max_len + 1, 0)

    def attends(self, group: int, computed: int, block: int) -> bool:
        """Whether any token after the first ``computed`` ones attends to the block."""
        window, sinks = self.window(group)
        last = (block + 1) * self.block_size - 1
        return last > computed - window or block * self.block_size < sinks

    def find_hit(self, tokens: list[int], salt: str | None) -> int:
        size = self.block_size
        for blocks in range((len(tokens) - 1) // size, 0, -1):
            needed = [
                (g, i)
                for g in range(len(self.windows))
                for i in range(blocks)
                if self.attends(g, blocks * size, i)
            ]
            if all(self.key(g, tokens, salt, i) in self.cached for g, i in needed):
                return blocks * size
        return 0

    # -- requests
    def admit(
        self, row: int, tokens: list[int], salt: str | None, new: int, *, lookahead: int,
        reserve: int, whole: bool,
    ) -> None:  # fmt: skip
        size, hit = self.block_size, self.find_hit(tokens, salt)
        limit = min(hit + new + lookahead, self.max_len)
        entries, fresh, most = [], [], 0
        for g, kind in enumerate(self.windows):
            found: list[Block | None] = [
                self.cached[self.key(g, tokens, salt, i)][0] if self.attends(g, hit, i) else None
                for i in range(hit // size)
            ]
            entries.append(found)
            fresh.append(max(0, -(-limit // size) - len(found)))
            cap = -(-min(len(tokens), self.max_len) // size)
            if kind is not None:
                window, sinks = self.window(g)
                step = min(window - 1 + self.step_tokens, self.max_len)
                cap = min(cap, -(-step // size) + 1 + -(-sinks // size))
            most += max(0, cap - len(found))
        idle = sum(b is not None and b in self.queue for found in entries for b in found)
        need = sum(fresh)
        if whole:
            need = max(need, most)
        if need + idle + reserve > self.available:
            raise Full
        for block in (b for found in entries for b in found if b is not None):
            self.touch(block)
        for found, count in zip(entries, fresh, strict=True):
            found.extend(self.take() for _ in range(count))
        keyed = [hit // size] * len(entries)
        self.rows[row] = Row(list(tokens), salt, hit + new, entries, keyed)
        self.give_keys(self.rows[row])

    def give_keys(self, row: Row) -> None:
        if not self.caching or row.no_more_keys:
            return
        full = min(row.computed, len(row.tokens)) // self.block_size
        for g, entries in enumerate(row.entries):
            for i in range(row.keyed[g], full):
                block = entries[i]
                if block is not None:
                    block.key = self.key(g, row.tokens, row.salt, i)
                    self.cached.setdefault(block.key, []).append(block)
                    self.stored += 1
            row.keyed[g] = max(row.keyed[g], full)

    def grow(self, number: int, new: int, lookahead: int) -> None:
        """Raises Full with only the skipped blocks released."""
        row, size = self.rows[number], self.block_size
        for g, entries in enumerate(row.entries):
            for i in reversed(range(len(entries))):
                if not self.attends(g, row.computed, i):
                    self.drop_ref(entries[i])
                    entries[i] = None
        limit = min(row.computed + new + lookahead, self.max_len)
        missing = [max(0, -(-limit // size) - len(entries)) for entries in row.entries]
        at = row.computed // size if row.computed % size and row.tail_shared else None
        written = [] if at is None else [e[at] for e in row.entries if at < len(e)]
        shared = [b for b in written if b is not None and b.ref > 1]
        if sum(missing) + len(shared) > self.available:
            raise Full
        for entries, count in zip(row.entries, missing, strict=True):
            if at is not None and at < len(entries) and entries[at] in shared:
                old, entries[at] = entries[at], self.take()
                self.drop_ref(old)
                self.copies += 1
            elif at is not None and at < len(entries) and entries[at] and entries[at].key:
                self.drop_key(entries[at])
            entries.extend(self.take() for _ in range(count))
        row.tail_shared = False
        row.computed += new
        self.give_keys(row)

    def rollback(self, number: int, computed: int) -> None:
        row = self.rows[number]
        row.computed = computed
        if row.tail_shared:  # nothing was scheduled since the fork: all of it is real
            self.cut(row)
            return
        for g, entries in enumerate(row.entries):
            keep = computed // self.block_size
            for i in range(keep, row.keyed[g] if not row.no_more_keys else 0):
                if i < len(entries) and entries[i] is not None and entries[i].key:
                    self.drop_key(entries[i])
            if not row.no_more_keys:
                row.keyed[g] = min(row.keyed[g], keep)
        again = [b for e in row.entries for b in e[computed // self.block_size :] if b is not None]
        if any(b.ref > 1 for b in again):
            self.cut(row)

    def truncate(self, number: int, count: int) -> None:
        row = self.rows[number]
        row.tokens = row.tokens[:count]
        row.computed = min(row.computed, count)
        self.cut(row)

    def cut(self, row: Row) -> None:
        for g, entries in enumerate(row.entries):
            while len(entries) > -(-row.computed // self.block_size):
                self.drop_ref(entries.pop())
            row.keyed[g] = min(row.keyed[g], row.computed // self.block_size)
        row.tail_shared = True

    def release(self, number: int) -> None:
        row = self.rows.pop(number)
        for entries in row.entries:
            for block in reversed(entries):
                self.drop_ref(block)

    def fork(self, number: int, children: list[int]) -> None:
        row = self.rows[number]
        keep = -(-row.computed // self.block_size)
        row.tail_shared = True
        for child in children:
            entries = [list(e[:keep]) for e in row.entries]
            for block in (b for e in entries for b in e if b is not None):
                self.touch(block)
            self.rows[child] = Row(
                list(row.tokens), row.salt, row.computed, entries, list(row.keyed), True,
                row.no_more_keys,
            )  # fmt: skip

    def reset(self) -> bool:
        if self.available != self.num_blocks - 1:
            return False
        for block in list(self.queue):
            block.key = None
        self.unkeyed, self.queue, self.cached = self.num_blocks - 1, [], {}
        self.cleared += 1
        return True
