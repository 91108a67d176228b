"""The choice between the learned order and LRU, and the ghosts it is made with."""

import numpy as np
import pytest

from blocktable.prefix.density import BINS, HitDensity
from blocktable.prefix.duel import Duel
from blocktable.prefix.ghosts import REMEMBERED, Ghosts, GhostTable
from tests.prefix.test_eviction import make

OLD, YOUNG = np.array([900]), np.array([10])


def ready() -> Duel:
    """Two classes of 100 waiting blocks each, of ages 0 to 99 and 100 to 999; room for 100.
    The learned order keeps class 1, LRU the young ones."""
    duel = Duel()
    density = np.zeros((2, 4))
    density[1] = 1.0
    waiting = np.array([[50.0, 50, 0, 0], [0, 0, 50, 50]])
    duel.renew(density, waiting, np.concatenate([np.arange(100), 100 + 9 * np.arange(100)]), 100)
    return duel


def again(duel: Duel) -> bool:
    duel.renew(np.ones((2, 4)), np.ones((2, 4)), np.arange(8), 4)
    return duel.lru


def test_lru_decides_until_something_is_known() -> None:
    assert Duel().lru and not ready().lru


def test_hits_that_only_the_learned_order_keeps_speak_for_it() -> None:
    duel = ready()
    duel.judge(np.array([1, 1, 0]), np.array([3, 3, 0]), np.concatenate([OLD, OLD, YOUNG]))
    assert not again(duel)


def test_hits_that_only_lru_keeps_speak_for_it() -> None:
    duel = ready()
    duel.judge(np.array([0, 0, 1]), np.array([0, 0, 3]), np.concatenate([YOUNG, YOUNG, OLD]))
    assert again(duel)


def test_hits_both_keep_or_neither_keeps_say_nothing() -> None:
    duel = ready()
    duel.judge(np.array([0]), np.array([3]), OLD)
    duel.judge(np.array([1]), np.array([0]), YOUNG)
    assert not again(duel)


def test_a_cache_with_room_for_all_keeps_all() -> None:
    density = HitDensity(2, 1000)
    ages = np.arange(500)
    density.rank(ages % 2, ages, room=500)
    density.learn_hits(np.array([0, 1]), np.array([499, 3]))
    density.rank(ages % 2, ages, room=500)
    assert not density.duel.lru and density.density.shape == (2, BINS)


def keys(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(1, 2**63, count, dtype=np.uint64)


def ghosts(first: int, count: int) -> Ghosts:
    return Ghosts(first + np.arange(count), np.full(count, 3, np.int8), np.full(count, 7, np.uint8))


def test_evicted_keys_are_met_once_and_strangers_never() -> None:
    rng, table = np.random.default_rng(0), GhostTable(1000)
    mine = keys(rng, 1000 * REMEMBERED)
    for at in range(0, len(mine), 100):
        table.remember(mine[at : at + 100], ghosts(at + 1, 100))
    assert not table.meet(keys(rng, 4000))[0].any()
    met, known = table.meet(mine)
    assert met.mean() > 0.95
    assert (known.born == 1 + np.flatnonzero(met)).all() and (known.hits == 7).all()
    assert not table.meet(mine)[0].any() and not len(table.sample(1).born)


def test_the_oldest_ghosts_make_room() -> None:
    rng, table = np.random.default_rng(1), GhostTable(100)
    mine = keys(rng, 900)
    gone = [len(table.remember(mine[at : at + 50], ghosts(at + 1, 50)).born)
            for at in range(0, 900, 50)]  # fmt: skip
    assert not any(gone[: 2 * REMEMBERED]) and min(gone[2 * REMEMBERED :]) > 30
    met = table.meet(mine)[0]
    assert not met[:500].any() and met[500:].mean() > 0.95


def hits(eviction: str, kind: str) -> float:
    """Percent of the prompt tokens hit, of requests through the real manager."""
    manager, rng = make(eviction, 301), np.random.default_rng(5)
    recent: list[int] = []
    for i in range(3000):
        if kind == "recency" and recent and rng.random() < 0.5:  # nothing but age matters
            name = recent.pop(-1 - min(int(rng.exponential(25)), len(recent) - 1))
        elif kind == "popularity":
            name = int(rng.zipf(1.3)) % 5000
        else:
            name = 10_000 + i
        recent = [*recent[-500:], name]
        tokens = [name] * (8 + 2 * (name % 10))
        hit = manager.find_hit(manager.sequence(tokens))
        manager.admit(0, hit, len(tokens) - hit.num_tokens)
        manager.release(np.array([0], np.int32))
    return 100 * manager.admission.hit_tokens / manager.admission.query_tokens


@pytest.mark.parametrize(("kind", "least"), [("recency", -0.5), ("popularity", 2.0)])
def test_it_gains_where_there_is_something_to_learn_and_does_not_lose_elsewhere(
    kind: str, least: float
) -> None:
    assert hits("reuse", kind) - hits("lru", kind) > least
