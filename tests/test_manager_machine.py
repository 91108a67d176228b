"""Every public operation of the manager against the naive model, all invariants after each."""

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from blocktable.core.errors import OutOfBlocks
from blocktable.core.invariants import check
from blocktable.core.specs import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SinkFullAttentionSpec,
    SinkWindowSpec,
    SlidingWindowSpec,
)
from blocktable.groups import growth as growth_module
from blocktable.manager import KVCacheManager
from blocktable.prefix import index as index_module
from tests.manager_model import Full, Model, Window

ROWS, MAX_LEN = 6, 40
FEW = growth_module.FEW, index_module.FEW


def spec_for(size: int, window: Window, static: int) -> KVCacheSpec:
    shape = {"block_size": size, "num_kv_heads": 1, "head_size": 1}
    if isinstance(window, tuple):
        return SinkWindowSpec(**shape, sliding_window=window[0], num_sink_tokens=window[1])
    if window is not None:
        return SlidingWindowSpec(**shape, sliding_window=window)
    if static:
        return SinkFullAttentionSpec(**shape, sink_len=size)
    return FullAttentionSpec(**shape)


class ManagerMachine(RuleBasedStateMachine):
    @initialize(
        size=st.sampled_from([1, 2, 3, 4, 5]),
        blocks=st.integers(4, 40),
        windows=st.sampled_from(
            [[None], [None], [5], [None, 6], [None, 3, 9], [(5, 3)], [None, (6, 1), 4]]
        ),
        static=st.sampled_from([0, 0, 1]),
        few=st.sampled_from([0, 2, 16]),
        compiled=st.booleans(),
        caching=st.sampled_from([True, True, True, False]),
        algo=st.sampled_from(["sha256", "blake3", "xxh3_128"]),
    )
    def start(self, size, blocks, windows, static, few, compiled, caching, algo):
        growth_module.FEW = index_module.FEW = few
        groups = [KVCacheGroupSpec((), spec_for(size, w, static)) for w in windows]
        static = sum(group.kv_cache_spec.static_blocks for group in groups)
        self.size, self.windows = size, windows
        self.manager = KVCacheManager(
            KVCacheConfig(blocks, tuple(groups)), max_num_rows=ROWS, max_model_len=MAX_LEN,
            max_num_batched_tokens=8, enable_caching=caching, hash_algo=algo, seed=1,
            host_blocks=20,
        )  # fmt: skip
        if not compiled:
            self.manager._native = self.manager.pool.native = None
            if self.manager.index is not None:
                self.manager.index.native = None
        self.model = Model(blocks - static, size, windows, MAX_LEN, 8, caching)
        self.swapped: list = []
        self.copies = 0

    def teardown(self):
        growth_module.FEW, index_module.FEW = FEW

    # -- helpers
    def pick(self, data, count=1):
        rows = data.draw(st.permutations(sorted(self.model.rows)), label="rows")
        return rows[: data.draw(st.integers(1, min(count, len(rows))), label="count")]

    def free_rows(self):
        return [r for r in range(ROWS) if r not in self.model.rows]

    # -- operations
    @precondition(lambda self: len(self.model.rows) < ROWS)
    @rule(
        data=st.data(), length=st.integers(1, 24), shared=st.integers(0, 24),
        late=st.integers(0, 2), salt=st.sampled_from([None, None, "a"]),
        lookahead=st.sampled_from([0, 0, 3]),
        reserve=st.sampled_from([0, 0, 2]), whole=st.booleans(),
    )  # fmt: skip
    def admit(self, data, length, shared, late, salt, lookahead, reserve, whole):
        tokens = [7] * min(shared, length) + [late] * max(0, length - shared)
        row = data.draw(st.sampled_from(self.free_rows()))
        hit = self.manager.find_hit(self.manager.sequence(tokens, salt=salt))
        assert hit.num_tokens == self.model.find_hit(tokens, salt)
        new = data.draw(st.integers(1, len(tokens) - hit.num_tokens))
        with self.expecting(
            lambda: self.model.admit(
                row, tokens, salt, new, lookahead=lookahead, reserve=reserve, whole=whole
            )
        ):
            self.manager.admit(
                row, hit, new, lookahead=lookahead, reserve_blocks=reserve, full_sequence=whole
            )

    def expecting(self, model_step):
        """The manager must succeed or raise OutOfBlocks exactly as the model does."""
        try:
            model_step()
        except Full:
            return pytest.raises(OutOfBlocks)
        return _Nothing()

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data(), lookahead=st.sampled_from([0, 0, 0, 2]))
    def allocate(self, data, lookahead):
        rows, counts = [], []
        for row in self.pick(data, ROWS):
            state = self.model.rows[row]
            room = len(state.tokens) - state.computed
            if room > 0:
                rows.append(row)
                counts.append(data.draw(st.integers(1, room)))
        served = self.manager.allocate(
            np.array(rows, np.int64), np.array(counts, np.int32), lookahead=lookahead, partial=True
        )
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            try:
                self.model.grow(row, count, lookahead)
            except Full:
                assert served == i
                return
        assert served == len(rows)

    @precondition(lambda self: self.model.rows and self.windows == [None])
    @rule(data=st.data())
    def allocate_all_or_nothing(self, data):
        rows = [r for r in self.pick(data, ROWS) if self.room(r)]
        need = 0
        for row in rows:
            state = self.model.rows[row]
            need += -(-(state.computed + 1) // self.size) > len(state.entries[0])
        if any(self.model.rows[row].tail_shared for row in rows):
            return
        before = self.manager.stats()
        if need > self.model.available:
            with pytest.raises(OutOfBlocks):
                self.manager.allocate(np.array(rows), 1)
            assert self.manager.stats() == before
        elif rows:
            self.manager.allocate(np.array(rows), 1)
            for row in rows:
                self.model.grow(row, 1, 0)

    def room(self, row):
        return len(self.model.rows[row].tokens) > self.model.rows[row].computed

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data(), token=st.integers(0, 2))
    def append(self, data, token):
        rows = [r for r in self.pick(data, ROWS) if len(self.model.rows[r].tokens) < MAX_LEN]
        if rows:
            self.manager.append_tokens(np.array(rows), [token] * len(rows))
            for row in rows:
                self.model.rows[row].tokens.append(token)

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data(), counts=st.lists(st.integers(0, 4), min_size=ROWS, max_size=ROWS))
    def append_lists(self, data, counts):
        rows = [r for r in self.pick(data, ROWS) if len(self.model.rows[r].tokens) < MAX_LEN - 4]
        counts = counts[: len(rows)]
        if rows:
            self.manager.append_token_lists(np.array(rows), counts, [1] * sum(counts))
            for row, count in zip(rows, counts, strict=True):
                self.model.rows[row].tokens += [1] * count

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data())
    def rollback(self, data):
        row = self.pick(data)[0]
        state = self.model.rows[row]
        low = self.lowest(state)
        to = data.draw(st.integers(low, state.computed))
        self.manager.rollback(np.array([row]), to)
        self.model.rollback(row, to)

    def lowest(self, state):
        """Blocks outside a window cannot be computed again without their neighbours."""
        return state.computed if self.windows != [None] else max(0, state.computed - 6)

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data())
    def truncate(self, data):
        row = self.pick(data)[0]
        state = self.model.rows[row]
        low = 1 if self.windows == [None] else state.computed
        count = data.draw(st.integers(max(1, low), len(state.tokens)))
        self.manager.truncate(np.array([row]), count)
        self.model.truncate(row, count)

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data())
    def release(self, data):
        rows = self.pick(data, 3)
        self.manager.release(np.array(rows))
        for row in rows:
            self.model.release(row)

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data())
    def release_not_run(self, data):
        row = self.pick(data)[0]
        state = self.model.rows[row]
        to = data.draw(st.integers(self.lowest(state), state.computed))
        self.manager.release(np.array([row]), num_computed=to)
        self.model.rollback(row, to)
        self.model.release(row)

    @precondition(lambda self: self.model.rows and len(self.model.rows) < ROWS)
    @rule(data=st.data())
    def fork(self, data):
        row = self.pick(data)[0]
        free = self.free_rows()
        children = free[: data.draw(st.integers(1, len(free)))]
        self.manager.fork(row, np.array(children))
        self.model.fork(row, children)

    @rule()
    def take_copies(self):
        copies = self.manager.take_copies()
        self.copies += len(copies.src)
        assert self.copies == self.model.copies
        assert not np.isin(copies.dst, 0).any() and (copies.src != copies.dst).all()

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data())
    def move(self, data):
        src = self.pick(data, ROWS)
        free = data.draw(st.permutations(self.free_rows() + src))
        dst = free[: len(src)]
        self.manager.move_rows(np.array(src), np.array(dst))
        moved = [self.model.rows.pop(r) for r in src]
        self.model.rows.update(zip(dst, moved, strict=True))

    @precondition(lambda self: self.model.rows and not self.model.in_flight)
    @rule(data=st.data())
    def swap_out(self, data):
        row = self.pick(data)[0]
        state = self.model.rows[row]
        held = sum(b is not None for e in state.entries for b in e)
        if held > self.manager.host_pool.available:
            return
        swapped = self.manager.swap_out(row)
        assert len(swapped.plan.host) == held
        shape = [[b is not None for b in e] for e in state.entries]
        self.swapped.append((swapped, dataclasses.replace(state), shape))
        self.model.release(row)

    @precondition(lambda self: self.swapped and len(self.model.rows) < ROWS)
    @rule(data=st.data(), drop=st.booleans())
    def swap_in(self, data, drop):
        swapped, state, shape = self.swapped[-1]
        row = data.draw(st.sampled_from(self.free_rows()))
        need = sum(map(sum, shape))
        if drop:
            self.manager.drop_swapped(swapped)
        elif need > self.model.available:
            with pytest.raises(OutOfBlocks):
                self.manager.swap_in(row, swapped)
            return
        else:
            plan = self.manager.swap_in(row, swapped)
            assert len(plan.device) == len(plan.host) == need
            entries = [[self.model.take() if real else None for real in e] for e in shape]
            state = dataclasses.replace(
                state, entries=entries, keyed=[0] * len(entries), tail_shared=False
            )
            self.model.rows[row] = state
            self.model.give_keys(state)
        self.swapped.pop()

    @precondition(lambda self: len(self.model.in_flight) < 3)
    @rule()
    def begin_step(self):
        self.model.in_flight.append(self.manager.begin_step())

    @precondition(lambda self: self.model.in_flight)
    @rule(data=st.data())
    def end_step(self, data):
        step = data.draw(st.sampled_from(self.model.in_flight))
        self.manager.end_step(step)
        self.model.end_step(step)

    @rule()
    def reset(self):
        assert self.manager.reset_prefix_cache() == self.model.reset()

    @precondition(lambda self: self.windows == [None] and self.model.caching)
    @rule(really=st.integers(0, 7))
    def invalidate(self, really):
        if really:
            return
        self.manager.invalidate_prefix_cache()
        model = self.model
        for block in [b for copies in model.cached.values() for b in copies]:
            block.key = None
        model.unkeyed += len(model.queue)
        model.queue, model.cached = [], {}
        model.cleared += 1
        for state in [*model.rows.values(), *(state for _, state, _ in self.swapped)]:
            state.no_more_keys = True

    # -- after each
    @invariant()
    def same(self):
        if not hasattr(self, "manager"):
            return
        manager, model = self.manager, self.model
        check(manager)
        stats = manager.stats()
        assert stats.pool.usable == model.num_blocks - 1
        assert stats.pool.available == model.available
        assert stats.pool.evictable == len(model.queue)
        assert stats.pool.fenced == len(model.fenced)
        assert stats.cached_blocks == sum(map(len, model.cached.values()))
        assert stats.cached_keys == len(model.cached)
        assert (stats.stored_blocks, stats.removed_blocks) == (model.stored, model.removed)
        assert stats.cleared == model.cleared and 0 <= stats.usage <= 1
        assert set(np.flatnonzero(manager.num_tokens)) == set(model.rows)
        for row, state in model.rows.items():
            self.same_row(row, state)

    def same_row(self, row, state):
        manager = self.manager
        count = manager.num_tokens[row]
        assert manager.tokens[row, :count].tolist() == state.tokens
        assert manager.num_computed[row] == state.computed
        for table, entries in zip(manager.tables, state.entries, strict=True):
            ids = table.rows[row, : table.counts[row]]
            assert (ids != 0).tolist() == [b is not None for b in entries]
            live = [b for b in entries if b is not None]
            assert manager.pool.ref[ids[ids != 0]].tolist() == [b.ref for b in live]
            keyed = manager.pool.keyed[ids[ids != 0]].tolist()
            assert keyed == [b.key is not None for b in live]


class _Nothing:
    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return False


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip
