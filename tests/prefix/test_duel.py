"""The choice between the learned order and LRU, and the ghosts it is made with."""

from collections import OrderedDict

import numpy as np
import pytest

from blocktable.prefix.duel import HIGHEST, LEAD, Decision, Duel, Window
from blocktable.prefix.ghosts import REMEMBERED, Ghosts, GhostTable
from blocktable.prefix.imagined import ImaginedCache, Used, unbroken
from tests.prefix.test_eviction import make


def test_lru_is_followed_until_a_lead_is_shown_in_both_windows() -> None:
    decision = Decision()
    for short, long in ((1.0, 0.0), (0.0, 1.0), (LEAD, LEAD), (-1.0, -1.0)):
        decision.take(5, short, long)
        assert decision.lru
    decision.take(5, 2 * LEAD, 2 * LEAD)
    assert not decision.lru


@pytest.mark.parametrize(("short", "long"), [(-1.0, 1.0), (1.0, -1.0)])
def test_a_lead_that_is_gone_in_either_window_ends_the_trial(short: float, long: float) -> None:
    decision = Decision()
    decision.take(0, 1.0, 1.0)
    decision.take(1, short, long)
    assert decision.lru


def test_trials_that_lost_raise_the_demand_and_others_do_not() -> None:
    decision = Decision()
    for won, demand in ((-1, 2 * LEAD), (3, 2 * LEAD), (-1, 4 * LEAD)):
        decision.take(0, 1.0, 1.0)
        decision.take(won, -1.0, -1.0)
        assert decision.lru and decision.demand == demand
    for _ in range(9):
        decision.take(0, 1.0, 1.0)
        decision.take(-1, -1.0, -1.0)
    assert decision.demand == HIGHEST


def test_a_window_forgets() -> None:
    window = Window(100.0)
    assert window.add(50, 100) == 0.5
    for _ in range(20):
        lead = window.add(-10, 100)
    assert lead == pytest.approx(-0.1, abs=1e-6)


def used(keys: np.ndarray, clock: int = 0, row: np.ndarray | None = None) -> Used:
    row = np.zeros(len(keys), np.intp) if row is None else row
    return Used(keys, row, np.zeros(len(keys), np.int8), clock + np.arange(len(keys)))


@pytest.mark.parametrize("seed", range(4))
def test_an_imagined_cache_without_classes_is_a_plain_lru_list(seed: int) -> None:
    rng, cache = np.random.default_rng(seed), ImaginedCache(100, 0, 100)
    names = keys(rng, 60)
    plain: OrderedDict[int, None] = OrderedDict()
    for clock in range(0, 9000, 30):
        chosen = names[rng.choice(60, int(rng.integers(1, 9)), replace=False)]
        here = [key in plain for key in chosen.tolist()]
        wanted = next((i for i, found in enumerate(here[::-1]) if not found), len(here))
        for key in chosen.tolist():
            plain.pop(key, None)
        while len(plain) > 20:
            plain.popitem(last=False)
        plain.update(dict.fromkeys(chosen.tolist()))
        assert cache.use(used(chosen, clock), 20, None) == wanted


def test_more_keys_than_an_imagined_cache_has_slots_keep_their_beginning() -> None:
    cache, many = ImaginedCache(10, 0, 10), keys(np.random.default_rng(0), 25)
    assert cache.use(used(many), 100, None) == 0
    assert cache.use(used(many[-10:]), 100, None) == 10
    assert cache.use(used(many[:10]), 100, None) == 0


def test_a_key_counts_only_with_all_before_it_in_its_row() -> None:
    here = np.array([1, 0, 1, 1, 1, 0, 0, 1], np.bool_)
    row = np.array([0, 0, 0, 1, 1, 2, 3, 3])
    assert unbroken(here, row).tolist() == [False, False, True, True, True, False, False, True]
    assert unbroken(here[:0], row[:0]).size == 0


def test_a_sample_has_always_the_same_keys_once() -> None:
    some = keys(np.random.default_rng(0), 4000)
    twice = used(np.concatenate([some, some[::-1]])).sample(8)
    assert twice.keys.tolist() == [key for key in some.tolist() if key % 8 == 0]
    assert 400 < len(twice.keys) < 600


def test_a_duel_of_equal_orders_stays_with_lru() -> None:
    rng, duel = np.random.default_rng(0), Duel(64, 1)
    names = keys(rng, 100)
    for clock in range(0, 4000, 8):
        chosen = names[rng.choice(100, 8, replace=False)]
        duel.use(used(chosen, clock), 56, lambda _, born: float(born))
        assert duel.lru


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


@pytest.mark.parametrize(("kind", "least"), [("recency", -0.2), ("popularity", 2.0)])
def test_it_gains_where_there_is_something_to_learn_and_does_not_lose_elsewhere(
    kind: str, least: float
) -> None:
    assert hits("reuse", kind) - hits("lru", kind) > least
