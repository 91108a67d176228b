"""Faults that real systems of this kind had, as cases: inputs and the right values."""

from __future__ import annotations

import pytest
from worlds import World

from blocktable.core.errors import ConfigError, RequestError


@pytest.mark.parametrize(
    ("block", "prompt", "cached", "scheduled"),
    [(256, 512, 256, 256), (16, 48, 32, 16), (16, 16, 0, 16)],
)
def test_whole_prompt_cached_leaves_something_to_run(
    block: int, prompt: int, cached: int, scheduled: int
) -> None:
    world = World(64, block)
    first = world.add("a", prompt, max_tokens=4)
    world.run()
    again = world.add("b", first.prompt_token_ids.tolist(), max_tokens=4)
    output, _ = world.step()
    assert output.admitted[0].num_cached == cached == again.num_cached_tokens
    assert output.num_scheduled.tolist() == [scheduled]
    world.run()
    assert again.output_token_ids.tolist() == first.output_token_ids.tolist()


def test_blocks_of_an_aborted_prompt_are_not_hit() -> None:
    # (a) aborted between scheduling and running; (b) after one chunk of four
    world = World(64, 16, max_num_batched_tokens=64)
    a = world.add("a", 33)
    output = world.scheduler.schedule()
    world.scheduler.abort(["a"])
    world.scheduler.cancel(output)
    world.add("again", a.prompt_token_ids.tolist())
    output, _ = world.step()
    assert output.admitted[0].num_cached == 0
    world.run()
    third = world.add("third", a.prompt_token_ids.tolist())
    world.step()
    assert third.num_cached_tokens == 32

    world = World(64, 16, max_num_batched_tokens=16)
    b = world.add("b", 49)
    world.step()
    world.scheduler.abort(["b"])
    again = world.add("again", b.prompt_token_ids.tolist())
    world.step()
    assert again.num_cached_tokens <= 16


def test_equal_prompts_in_one_step_are_both_right() -> None:
    world = World(64, 16)
    a = world.add("a", 33)
    b = world.add("b", a.prompt_token_ids.tolist())
    world.run()
    assert a.output_token_ids.tolist() == b.output_token_ids.tolist() == world.alone(a)


def test_start_up_is_refused_where_one_request_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="98304"):
        World(12, 8192, max_model_len=106496)
    with pytest.raises(ConfigError, match="1024 tokens does not fit into 63 usable blocks"):
        World(63, 16, max_model_len=1024)
    World(64, 16, max_model_len=1024)


def test_request_that_never_fits_is_refused_and_the_next_one_served() -> None:
    world = World(12, 8192, max_model_len=106496, max_model_len_must_fit=False)
    with pytest.raises(RequestError, match="98305 tokens is too long: the block pool holds 98304"):
        world.add("big", 98305)
    small = world.add("small", 10)
    world.run()
    assert small.finish_reason == "length"
    assert world.free == 12


def test_request_that_outgrows_the_pool_ends_by_length_in_bounded_steps() -> None:
    world = World(62, 16, max_model_len=2048, max_model_len_must_fit=False)
    request = world.add("a", 900, max_tokens=200)
    world.run(limit=100)
    assert request.finish_reason == "length"
    assert len(request.tokens) == 62 * 16
    assert request.num_preemptions == 0


def test_full_sequence_must_fit_prevents_a_preemption_storm() -> None:
    # A chunk of 516: 4 running requests take 4 of its tokens, and 512 are left for a prompt.
    world = World(1000, 16, max_num_batched_tokens=516)
    for name in "abcd":
        world.add(name, 3600, max_tokens=500)
    while len(world.running) < 4 or any(
        world.manager.num_computed[row] < 3600 for row in world.scheduler.running_rows
    ):
        world.step()
    fifth = world.add("fifth", 3600, max_tokens=500)
    for _ in range(50):
        world.step()
    assert world.waiting == ["fifth"] and fifth.num_cached_tokens == -1
    assert world.scheduler.stats.preemptions == 0
    world.scheduler.finish(["a"])
    output, _ = world.step()
    assert [entry.request for entry in output.admitted] == [fifth]


def test_without_that_rule_progress_is_still_guaranteed() -> None:
    world = World(60, 16, max_num_batched_tokens=64, full_sequence_must_fit=False)
    for name in "abcdef":
        world.add(name, 300, max_tokens=60)
    while world.scheduler.has_work:
        output, result = world.step()
        assert len(result.rows) or output.num_total, "a step that did nothing"
        assert len(world.outputs) < 2000
    assert len(world.done) == 6


@pytest.mark.parametrize(("budget", "chunks"), [(1024, [88]), (50, [50, 38])])
def test_resume_counts_tokens_after_the_lookup(budget: int, chunks: list[int]) -> None:
    world = World(16, 256, max_num_batched_tokens=1024)
    world.add("a", 600, max_tokens=30)
    world.step()
    world.scheduler.preempt(["a"])
    row_tokens = 601  # the prompt and the token it made
    object.__setattr__(world.scheduler.config, "max_num_batched_tokens", budget)
    seen = []
    for _ in chunks:
        output, _ = world.step()
        seen.append(int(output.num_scheduled[0]))
    assert world.outputs[1].num_computed.tolist() == [512]
    assert sum(seen) == row_tokens - 512
    assert seen[0] == min(budget, row_tokens - 512)


@pytest.mark.parametrize("moment", ["waiting", "mid prefill", "running", "flying", "finishing"])
def test_abort_at_any_moment_frees_everything(moment: str) -> None:
    for _ in range(20):
        world = World(64, 16, max_num_batched_tokens=16)
        world.add("a", 60, max_tokens=1 if moment == "finishing" else 8)
        steps = {"waiting": 0, "mid prefill": 1, "running": 5, "flying": 3, "finishing": 3}
        for _ in range(steps[moment]):
            world.step()
        if moment in ("flying", "finishing"):  # between scheduling and the step's end
            output = world.schedule()
            assert [r.request_id for r in world.scheduler.abort(["a"])] == ["a"]
            assert world.free < 64, "blocks that the step in flight writes are fenced"
            result = world.scheduler.update(output, *world.sampled)
            assert result.finished == () and len(result.rows) == 0
        else:
            world.scheduler.abort(["a"])
        assert world.free == 64
        assert not world.scheduler.has_work
        assert world.scheduler.abort(["a"]) == []


def test_hit_statistics_count_a_request_once() -> None:
    world = World(11, 16, max_model_len=160, full_sequence_must_fit=False)
    seed = world.add("seed", 32, max_tokens=1)
    world.run()
    stats = world.scheduler.stats
    base = (stats.query_tokens, stats.hit_tokens)
    hog = world.add("hog", 140, max_tokens=5)
    world.step()
    p = world.add("p", seed.prompt_token_ids.tolist() + [7] * 32)
    for _ in range(3):  # three tries fail for lack of blocks
        output, _ = world.step()
        assert output.blocked is p and output.blocked_hit == 32
    world.run()
    assert hog.finish_reason == "length"
    queries, hits = stats.query_tokens - base[0] - 140, stats.hit_tokens - base[1]
    assert (queries, hits) == (64, 32)

    world.add("q", 64)
    world.step()
    world.scheduler.preempt(["q"])
    world.run()
    assert stats.preemptions == 1
    assert (stats.query_tokens - base[0] - 140, stats.hit_tokens - base[1]) == (128, 32)
    cache = world.manager.stats()
    assert (cache.query_tokens, cache.hit_tokens) == (stats.query_tokens, stats.hit_tokens)
    assert 0.0 <= world.scheduler.load().usage <= 1.0


def test_the_chapter_s_example_of_three_prompts() -> None:
    world = World(20, 16, max_num_batched_tokens=1024)
    for name, length in (("a", 100), ("b", 200), ("c", 150)):
        world.add(name, length)
    output, _ = world.step()
    assert [entry.request.request_id for entry in output.admitted] == ["a", "b"]
    assert world.manager.tables[0].counts[output.rows].tolist() == [7, 13]
    assert world.waiting == ["c"] and world.free == 0
