"""What a sink hears is enough to mirror the cache."""

import numpy as np

from blocktable.core.specs import SlidingWindowSpec
from blocktable.manager import RemovedBlocks, StoredBlocks
from tests.test_manager import admit, full, manager_of, release


class Sink:
    """Keeps what is cached, as a router would."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, bytes], int] = {}
        self.tokens: dict[bytes, list[int]] = {}
        self.parents: dict[bytes, bytes] = {}

    def stored(self, event: StoredBlocks) -> None:
        for i, key in enumerate(event.keys):
            where = (event.group, key.tobytes())
            self.held[where] = self.held.get(where, 0) + 1
            self.tokens[key.tobytes()] = event.tokens[i].tolist()
            if event.columns[i]:
                self.parents[key.tobytes()] = event.parents[i].tobytes()

    def removed(self, event: RemovedBlocks) -> None:
        for group, key in zip(event.groups.tolist(), event.keys, strict=True):
            self.held[group, key.tobytes()] -= 1

    def cleared(self) -> None:
        self.held.clear()


def test_a_sink_can_mirror_the_cache() -> None:
    sink = Sink()
    window = SlidingWindowSpec(block_size=4, num_kv_heads=1, head_size=1, sliding_window=6)
    manager = manager_of(full(4), window, blocks=24, sink=sink)
    rng = np.random.default_rng(0)
    for _ in range(30):
        tokens = [1] * 8 + rng.integers(0, 3, 10).tolist()
        admit(manager, 0, tokens)
        release(manager, 0)
        held = {where: n for where, n in sink.held.items() if n}
        assert sum(held.values()) == manager.stats().cached_blocks
        assert len(held) == manager.stats().cached_keys
    chain = manager.sequence([1] * 8 + [2] * 10)
    admit(manager, 0, chain.tokens.tolist())
    for parent, key in zip(chain.keys(), chain.keys()[1:], strict=False):
        assert sink.parents[key.tobytes()] == parent.tobytes()
    assert sink.tokens[chain.keys()[0].tobytes()] == [1, 1, 1, 1]
    release(manager, 0)
    assert manager.reset_prefix_cache() and not sink.held
