"""The compiled helper and the NumPy code do the same, array for array."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest

from blocktable.core import native
from blocktable.core.errors import OutOfBlocks, RequestError
from blocktable.core.invariants import check
from blocktable.core.pool import FRESH, TOP
from blocktable.core.specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SinkWindowSpec,
    SlidingWindowSpec,
)
from blocktable.manager import KVCacheManager, RemovedBlocks, StoredBlocks

built = pytest.mark.skipif(native.load() is None, reason="the compiled helper was not built")


def spec_of(layer: int | str) -> KVCacheSpec:
    """4 = full attention; "window 4 7", "chunk 4 6", "sinks 4 7 5", "align 4": kind, block size,
    and what else the kind has."""
    kind, size, *more = ["full", layer] if isinstance(layer, int) else layer.split()
    width, *sinks = [*map(int, more), 1]
    shape = {"block_size": int(size), "num_kv_heads": 1, "head_size": 1}
    if kind == "full":
        return FullAttentionSpec(**shape)
    if kind == "window":
        return SlidingWindowSpec(**shape, sliding_window=width)
    if kind == "sinks":
        return SinkWindowSpec(**shape, sliding_window=width, num_sink_tokens=sinks[0])
    if kind == "chunk":
        return ChunkedLocalAttentionSpec(**shape, attention_chunk_size=width)
    state = {"block_size": int(size), "shapes": ((1,),), "dtypes": ("uint8",)}
    return MambaSpec(**state, cache_mode=kind)


def make(
    sizes: list, caching: bool, compiled: bool, monkeypatch, blocks: int | None = None,
    sink: object = None,
) -> KVCacheManager:  # fmt: skip
    specs = [spec_of(layer) for layer in sizes]
    if blocks is None:
        blocks = 70 if any(isinstance(spec, FullAttentionSpec) for spec in specs) else 30
    with monkeypatch.context() as patch:
        if not compiled:
            for where in ("manager", "prefix.keys", "prefix.sequence"):
                patch.setattr(f"blocktable.{where}.load", lambda: None)
        manager = KVCacheManager(
            KVCacheConfig(blocks, tuple(KVCacheGroupSpec((), s) for s in specs)), max_num_rows=12,
            max_model_len=60, enable_caching=caching, seed=3, sink=sink,
        )  # fmt: skip
    assert (manager.pool.native is not None) == (compiled and sink is None)
    return manager


def arrays(manager: KVCacheManager) -> dict[str, np.ndarray]:
    pool = manager.pool
    live = {name: getattr(pool, name) for name in ("ref", "state", "keyed", "scalars")}
    live["stack"] = pool.stack[: pool.scalars[TOP]]
    live["place"] = np.where(pool.state == 3, pool.place, -1)
    live["order"] = pool.eviction.order()
    for group in manager.groups:
        for name in ("capacity", "keyed", "key_due", "skipped"):
            live[f"{group.group_id} {name}"] = getattr(group, name)
        live[f"{group.group_id} rows"] = group.table.rows
        live[f"{group.group_id} counts"] = group.table.counts
    if manager.index is not None:
        blocks = pool.num_blocks
        live["buckets"], live["size"] = manager.index.links[:blocks], manager.index.size
        live["next"] = manager.index.links[blocks:][pool.keyed]
        live["words"] = manager.index.words[pool.keyed]
        live["counters"] = manager.book.counters
        live["num_hashed"] = manager.row_keys.num_hashed
    return live | {n: getattr(manager, n) for n in ("tokens", "num_tokens", "num_computed")}


@built
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(
    "sizes",
    [[4], [1], [5], [2, 4], [3, 2], ["window 4 7"], [2, "window 4 3"], ["chunk 3 6"],
     [4, "sinks 2 5 3"], [4, "all 4"], [2, "align 4"], [4, "none 4"], ["window 1 1", "chunk 2 5"]],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("few", [0, 4, 16])  # rows that NumPy's side takes one after another
def test_same_arrays_after_any_traffic(sizes: list, caching: bool, few: int, monkeypatch) -> None:
    monkeypatch.setattr("blocktable.groups.growth.FEW", few)
    monkeypatch.setattr("blocktable.prefix.index.FEW", few)
    both = [make(sizes, caching, compiled, monkeypatch) for compiled in (True, False)]
    rng = np.random.default_rng(len(str(sizes)))
    for step in range(400):
        choices = rng.integers(0, 2**31)
        outcomes = [act(manager, np.random.default_rng(choices)) for manager in both]
        assert outcomes[0] == outcomes[1]
        compiled, plain = (arrays(manager) for manager in both)
        for name, array in plain.items():
            assert np.array_equal(compiled[name], array), (step, name)
        deltas = [[table.drain() for table in manager.tables] for manager in both]
        for one, other in zip(*deltas, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    check(both[0])
    assert both[0].pool.scalars[FRESH] == both[0].pool.num_blocks  # the pool was full at some time


class Heard:
    """A sink's diary, entry by entry."""

    def __init__(self) -> None:
        self.events: list[tuple] = []

    def stored(self, event: StoredBlocks) -> None:
        for row, column, block, key, parent, tokens in zip(*event[1:7], strict=True):
            parent = parent.tobytes() if column else None
            what = int(row), int(column), int(block), key.tobytes(), parent, tokens.tolist()
            self.events.append(("stored", event.group, *what))

    def removed(self, event: RemovedBlocks) -> None:
        for group, block, key in zip(*event, strict=True):
            self.events.append(("removed", int(group), int(block), key.tobytes()))

    def cleared(self) -> None:
        self.events.append(("cleared",))


@built
@pytest.mark.parametrize("few", [0, 16])
@pytest.mark.parametrize("layers", [[4], [2, 4], [2, "window 4 3"], ["sinks 2 5 3"], [4, "all 4"]],
                         ids=str)  # fmt: skip
def test_a_sink_hears_the_same_of_the_compiled_step(layers: list, few: int, monkeypatch) -> None:
    monkeypatch.setattr("blocktable.groups.growth.FEW", few)
    diaries = [Heard(), Heard()]
    both = [
        make(layers, True, compiled, monkeypatch, sink=diary)
        for compiled, diary in zip((True, False), diaries, strict=True)
    ]
    if "all 4" not in layers:  # states give keys before they release: NumPy's part
        both[0]._native = counted = Counted(both[0]._native)
    rng = np.random.default_rng(len(str(layers)))
    for _ in range(300):
        choices = rng.integers(0, 2**31)
        outcomes = [act(manager, np.random.default_rng(choices)) for manager in both]
        assert outcomes[0] == outcomes[1]
        assert diaries[0].events == diaries[1].events
    kinds = {event[0] for event in diaries[0].events}
    assert kinds >= {"stored", "removed"}
    assert "all 4" in layers or True in counted.outcomes


class Counted:
    """A compiled core that counts the steps it did and the ones it left to NumPy."""

    def __init__(self, core: object) -> None:
        self.core, self.outcomes = core, []

    def __getattr__(self, name: str) -> object:
        return getattr(self.core, name)

    def grow(self, *arguments: object) -> bool:
        self.outcomes.append(self.core.grow(*arguments))
        return self.outcomes[-1]


@built
@pytest.mark.parametrize(
    "layers", [[4], [4, "window 4 7"], [4, "sinks 2 5 3"], ["chunk 3 6"], [4, "all 4"],
               [4, "none 4"], [2, "align 2"]], ids=str,
)  # fmt: skip
def test_every_kind_decodes_in_the_compiled_step(layers: list, monkeypatch) -> None:
    manager, rows = make(layers, True, True, monkeypatch, blocks=300), np.array([0, 1])
    manager._native = counted = Counted(manager._native)
    for row in rows.tolist():
        tokens = np.arange(9) + 10 * row
        hit = manager.find_hit(manager.sequence(tokens))
        manager.admit(row, hit, 9 - hit.num_tokens)
    for _ in range(40):
        manager.append_tokens(rows, [5, 6])
        manager.allocate(rows, 1)
        for table in manager.tables:
            table.drain()
    assert counted.outcomes == [True] * 40
    step = manager.begin_step()
    for _ in range(8):
        manager.append_tokens(rows, [5, 6])
        manager.allocate(rows, 1)
    manager.end_step(step)  # blocks released meanwhile were fenced, which is NumPy's part
    skips = any(group.skips for group in manager.groups)
    assert (False in counted.outcomes) == skips
    check(manager)


def act(manager: KVCacheManager, rng: np.random.Generator) -> object:
    """One random operation, the same for equal managers."""
    used = np.flatnonzero(manager.num_tokens)
    idle = np.flatnonzero(manager.num_tokens == 0)
    move = rng.integers(0, 10)
    try:
        if move < 3 and idle.size:
            tokens = [1] * int(rng.integers(0, 12)) + rng.integers(0, 2, 8).tolist()
            hit = manager.find_hit(manager.sequence(tokens))
            manager.admit(int(idle[0]), hit, len(tokens) - hit.num_tokens)
            return hit.num_tokens
        if move < 8 and used.size:
            rows = used[manager.num_tokens[used] < 55]
            rows = rng.permutation(rows)[: rng.integers(1, 13)]
            if move == 7:
                rows = rows.astype(np.int32)
            manager.append_tokens(rows, rng.integers(0, 2, len(rows)).astype(np.int32))
            new = manager.num_tokens[rows] - manager.num_computed[rows]
            return manager.allocate(rows, new, lookahead=int(rng.integers(0, 3)), partial=True)
        if move == 8 and used.size:
            manager.release(rng.permutation(used)[: rng.integers(1, 4)])
        elif used.size and idle.size and rng.integers(0, 2):
            manager.fork(int(used[0]), idle[:1])
        else:
            manager.reset_prefix_cache()
    except OutOfBlocks as error:
        return str(error)
    return None


@built
def test_sha256_is_sha256() -> None:
    compiled = native.load()
    for size in [*range(200), 1000, 4096]:
        data = os.urandom(size)
        hasher = compiled.Sha256(data[: size // 3])
        twin = hasher.copy()
        hasher.update(data[size // 3 :])
        assert hasher.digest() == hashlib.sha256(data).digest() == hasher.digest()
        assert twin.digest() == hashlib.sha256(data[: size // 3]).digest()
        if size:
            joined = compiled.Sha256().blocks(data, 17)
            ends = range(17, size + 1, 17)
            assert joined == b"".join(hashlib.sha256(data[:end]).digest() for end in ends)


@built
@pytest.mark.parametrize("bad", [-1, 2**31, 2**63, 2**70, 1.5, "a", None, True, [1]])
@pytest.mark.parametrize("at", [0, 3])
def test_bad_token_ids_are_named(bad: object, at: int, monkeypatch) -> None:
    manager = make([4], True, True, monkeypatch)
    tokens: list = [1, 2, 3, 4]
    tokens[at] = bad
    with pytest.raises(RequestError, match=f"token {at} is"):
        manager.sequence(tokens)


@built
def test_wrong_arguments_are_errors_not_crashes() -> None:
    compiled = native.load()
    for arguments in (
        (),
        (1, 2, 3, 4, 5),
        ((), None, None, None, ()),
        ((1,) * 6, None, None, None, ()),
    ):
        with pytest.raises((TypeError, ValueError)):
            compiled.Core(*arguments)
    with pytest.raises(ValueError, match="block of 0"):
        compiled.Sha256().blocks(b"abc", 0)
    with pytest.raises(TypeError):
        compiled.token_ids(5, np.zeros(1, np.int32))


def test_it_can_be_switched_off() -> None:
    program = "from blocktable.core import native; print(native.load())"
    environment = os.environ | {"BLOCKTABLE_NATIVE": "0"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None" and not done.stderr
