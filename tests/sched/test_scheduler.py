"""Policies and operations of the scheduler, each alone."""

from __future__ import annotations

import numpy as np
import pytest
from worlds import World

from blocktable.core.errors import BlocktableError, RequestError
from blocktable.sched.request import RequestStatus


def test_budget_is_shared_and_long_prompts_are_chunked() -> None:
    world = World(64, 16, max_num_batched_tokens=32)
    world.add("a", 50)
    world.add("b", 50)
    chunks = [world.step()[0] for _ in range(4)]
    assert [out.num_scheduled.tolist() for out in chunks] == [[32], [18, 14], [1, 31], [1, 5]]
    assert [out.samples.tolist() for out in chunks[:3]] == [[False], [True, False], [True, False]]
    assert chunks[1].query_start_loc.tolist() == [0, 18, 32]
    assert chunks[1].seq_lens.tolist() == [50, 14]


def test_max_prefill_chunk_lets_others_in() -> None:
    world = World(64, 16, max_num_batched_tokens=32, max_prefill_chunk=10)
    world.add("a", 50)
    world.add("b", 50)
    assert world.step()[0].num_scheduled.tolist() == [10, 10]


def test_without_chunked_prefill_a_prompt_runs_whole_or_waits() -> None:
    world = World(64, 16, max_model_len=64, max_num_batched_tokens=64, chunked_prefill=False)
    world.add("a", 40)
    world.add("b", 40)
    assert world.step()[0].num_scheduled.tolist() == [40]
    assert world.step()[0].num_scheduled.tolist() == [1, 40]


def test_watermark_holds_back_admission_only_while_others_run() -> None:
    world = World(20, 16, watermark=0.25)
    world.add("a", 310)  # all 20 blocks: alone it may
    assert world.step()[0].rows.size == 1
    world = World(20, 16, watermark=0.25, max_num_batched_tokens=4096)
    world.add("a", 160)
    world.add("b", 96)  # 6 blocks, 10 are free, 5 must stay
    world.step()
    assert world.running == ["a"] and world.waiting == ["b"]


def test_priority_decides_who_enters_and_who_leaves() -> None:
    world = World(8, 16, policy="priority", full_sequence_must_fit=False)
    world.add("late", 60, max_tokens=30, priority=5)
    world.add("early", 60, max_tokens=30, priority=1)
    world.step()
    assert world.running == ["early", "late"]
    world.run()
    victims = [r.request_id for out in world.outputs for r in out.preempted]
    assert victims and set(victims) == {"late"}
    assert world.done[0].request_id == "early"


def test_head_start_ends_starvation() -> None:
    world = World(8, 16, max_num_seqs=1, policy="priority", priority_head_start=10.0)
    world.add("low", 16, max_tokens=2, priority=1)
    for i in range(30):
        world.add(f"high{i}", 16, max_tokens=2, priority=0)
        world.step()
        world.step()
        if any(r.request_id == "low" for r in world.done):
            break
    assert 4 <= i <= 8, "10 seconds are 5 requests of 2 steps"


def test_lookahead_passes_a_blocked_head_until_its_patience_ends() -> None:
    world = World(10, 16, lookahead=2, lookahead_patience=3, max_num_batched_tokens=4096)
    world.add("hog", 80, max_tokens=60)
    world.step()
    head = world.add("head", 140)
    for i in range(6):
        world.add(f"small{i}", 4, max_tokens=2)
        world.step()
    assert head.passed_over == 3
    admitted = [e.request.request_id for out in world.outputs for e in out.admitted]
    assert admitted == ["hog", "small0", "small1", "small2"]
    world.scheduler.abort(["hog"])
    world.run()
    assert head.finish_reason == "length"


def test_without_lookahead_order_is_strict() -> None:
    world = World(10, 16)
    world.add("hog", 80, max_tokens=40)
    world.add("head", 140)
    world.add("small", 4)
    world.step()
    assert world.running == ["hog"] and world.waiting == ["head", "small"]


def test_stop_ids_min_tokens_and_eos() -> None:
    world = World(64, 16, vocabulary=5)
    free = world.add("free", 12, max_tokens=20)
    world.run()
    alone = free.output_token_ids.tolist()
    stop = alone[6]
    cut = alone.index(stop) + 1
    prompt = free.prompt_token_ids.tolist()
    early = world.add("early", prompt, max_tokens=20, stop_token_ids=(stop,))
    late = world.add("late", prompt, max_tokens=20, stop_token_ids=(stop,), min_tokens=cut + 1)
    eos = world.add("eos", prompt, max_tokens=20, eos_token_id=stop)
    deaf = world.add("deaf", prompt, max_tokens=20, eos_token_id=stop, ignore_eos=True)
    world.run()
    assert early.output_token_ids.tolist() == eos.output_token_ids.tolist() == alone[:cut]
    assert (early.finish_reason, early.stop_token) == ("stop", stop)
    assert len(late.output_token_ids) > cut
    assert deaf.output_token_ids.tolist() == alone
    assert (deaf.finish_reason, deaf.stop_token) == ("length", None)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_tight_pool_changes_no_token(preemption: str) -> None:
    world = World(
        14, 4, host_blocks=40 if preemption == "swap" else 0, preemption=preemption,
        full_sequence_must_fit=False,
    )  # fmt: skip
    requests = [world.add(f"r{i}", 8 + i, max_tokens=20) for i in range(5)]
    world.run()
    for request in requests:
        assert request.output_token_ids.tolist() == world.alone(request)
    stats = world.scheduler.stats
    assert stats.preemptions > 0
    assert world.free == 14
    if preemption == "swap":
        assert stats.swapped_out_blocks == stats.swapped_in_blocks > 0
        assert world.manager.host_pool.available == world.manager.host_pool.usable
        computed = sum(int(out.num_total) for out in world.outputs)
        assert computed == sum(r.num_prompt_tokens + 19 for r in requests), "nothing recomputed"


def test_swap_without_host_room_recomputes() -> None:
    world = World(14, 4, host_blocks=2, preemption="swap", full_sequence_must_fit=False)
    requests = [world.add(f"r{i}", 8 + i, max_tokens=20) for i in range(5)]
    world.run()
    assert all(r.output_token_ids.tolist() == world.alone(r) for r in requests)
    assert world.scheduler.stats.swapped_out_blocks == 0


def test_abort_of_a_swapped_request_frees_the_host() -> None:
    world = World(14, 4, host_blocks=40, preemption="swap")
    request = world.add("a", 20, max_tokens=20)
    world.step()
    world.scheduler.preempt(["a"])
    assert request.status == RequestStatus.SWAPPED
    assert world.manager.host_pool.used == 5
    world.scheduler.abort(["a"])
    assert world.manager.host_pool.available == world.manager.host_pool.usable
    assert world.free == 14


def test_two_steps_in_flight_give_the_same_tokens() -> None:
    world = World(20, 4, max_steps_in_flight=2, max_num_batched_tokens=16)
    requests = [world.add(f"r{i}", 5 + 3 * i, max_tokens=12) for i in range(5)]
    flying = []
    pending = 0
    while world.scheduler.has_work:
        while world.scheduler.num_in_flight < 2 and world.scheduler.has_requests:
            output = world.schedule()
            pending += output.pending is not None
            flying.append((output, *world.sampled))
        world.scheduler.update(*flying.pop(0))
    assert pending > 10
    for request in requests:
        assert request.output_token_ids.tolist() == world.alone(request)
    assert world.free == 20


def test_a_third_step_in_flight_and_a_wrong_order_are_refused() -> None:
    world = World(20, 4, max_steps_in_flight=2)
    world.add("a", 8)
    first = world.schedule()
    world.schedule()
    with pytest.raises(BlocktableError, match="2 steps are in flight"):
        world.scheduler.schedule()
    with pytest.raises(BlocktableError, match="not the oldest"):
        world.scheduler.update(world.outputs[1], *world.sampled)
    with pytest.raises(BlocktableError, match="not the newest"):
        world.scheduler.cancel(first)


def test_tokens_of_a_wrong_shape_change_nothing() -> None:
    world = World(20, 4)
    world.add("a", 8)
    output = world.schedule()
    with pytest.raises(RequestError, match="step of 1 sampled tokens was given shape"):
        world.scheduler.update(output, np.zeros(2, np.int32))
    world.scheduler.update(output, *world.sampled)
    with pytest.raises(BlocktableError, match="not the oldest"):
        world.scheduler.update(output, *world.sampled)


@pytest.mark.parametrize(("drafts", "chunk"), [(1, 0), (3, 0), (6, 0), (3, 1)])
def test_drafts_change_no_token_and_leave_no_key(drafts: int, chunk: int) -> None:
    world = World(60, 4, vocabulary=4, num_draft_tokens=drafts, max_prefill_chunk=chunk)
    requests = [world.add(f"r{i}", 9 + i, max_tokens=40) for i in range(4)]
    world.run()
    for request in requests:
        assert request.output_token_ids.tolist() == world.alone(request)
    stats = world.scheduler.stats
    assert 0 < stats.accepted_tokens <= stats.drafted_tokens
    assert len(world.outputs) < 40 + 13 * chunk, "fewer steps than tokens"
    for output in world.outputs:
        if output.num_drafts is not None:
            assert set(np.flatnonzero(output.num_drafts)) <= set(output.sample_index.tolist())
    assert world.free == 60


def test_n_continuations_share_the_prompt_and_copy_on_write() -> None:
    world = World(60, 4)
    parent = world.add("a", 18, max_tokens=6, n=3)
    output, _ = world.step()
    assert [fork.request.request_id for fork in output.forked] == ["a#1", "a#2"]
    assert len(output.sample_rows) == 3 and output.sample_index.tolist() == [0, 0, 0]
    used = world.manager.pool.used
    assert used == 5, "18 tokens, 5 blocks, once"
    output, _ = world.step()
    assert len(output.copies) == 2, "two of three writers copy the half-full tail"
    world.run()
    children = {r.request_id: r for r in world.done}
    for name in ("a", "a#1", "a#2"):
        made = children[name].output_token_ids.tolist()
        assert made == world.alone(children[name])
    assert len({tuple(r.output_token_ids.tolist()) for r in world.done}) == 3
    assert children["a"] is parent and children["a#1"].parent == "a"
    assert world.free == 60


def test_abort_of_a_parent_takes_its_children_along() -> None:
    world = World(60, 4)
    world.add("a", 18, max_tokens=6, n=3)
    world.step()
    assert len(world.scheduler.abort(["a"])) == 3
    assert world.free == 60 and not world.scheduler.has_work


def test_beam_fork_replaces_the_last_token() -> None:
    world = World(60, 4)
    parent = world.add("a", 10, max_tokens=6)
    world.step()
    child = world.scheduler.fork("a", ["b"], [3])[0]
    world.run()
    assert child.output_token_ids[0] == 3
    assert child.output_token_ids[0] != parent.output_token_ids[0]
    assert child.tokens[:10].tolist() == parent.tokens[:10].tolist()
    with pytest.raises(RequestError, match="does not run"):
        world.scheduler.fork("a", ["c"])


def test_a_step_that_failed_is_computed_again() -> None:
    world = World(30, 4, max_num_batched_tokens=16)
    requests = [world.add(f"r{i}", 10, max_tokens=6) for i in range(3)]
    for turn in range(6):
        output = world.scheduler.schedule()
        if turn % 2:
            world.device.run(output, world.scheduler.requests)
        world.scheduler.cancel(output)
        assert world.manager.stats().cached_blocks == 0
        assert world.waiting == ["r0", "r1", "r2"]
    world.run()
    assert all(r.output_token_ids.tolist() == world.alone(r) for r in requests)


def test_drop_cache_refuses_stale_hits() -> None:
    world = World(30, 4, host_blocks=20, preemption="swap")
    a = world.add("a", 17, max_tokens=10)
    b = world.add("b", 17, max_tokens=10)
    world.step()
    world.scheduler.preempt(["b"])
    assert not world.scheduler.reset_prefix_cache(), "refused while blocks are in use"
    world.scheduler.drop_cache()
    for memory in (*world.device.memory, *world.device.host):
        memory[:] = 0  # new weights
    assert world.free == 30 and world.manager.stats().cached_blocks == 0
    world.run()
    assert all(r.output_token_ids.tolist() == world.alone(r) for r in (a, b))


def test_reset_works_when_nothing_runs() -> None:
    world = World(30, 4)
    a = world.add("a", 17)
    world.run()
    assert world.scheduler.reset_prefix_cache()
    again = world.add("b", a.prompt_token_ids.tolist())
    world.run()
    assert again.num_cached_tokens == 0


def test_times_and_counts() -> None:
    world = World(30, 4)
    world.add("a", 9, max_tokens=4)
    world.add("b", 9, max_tokens=4)
    world.run()
    stats = world.scheduler.stats
    assert (stats.admitted, stats.finished, stats.generated_tokens) == (2, 2, 8)
    assert (stats.time_to_first_token.count, stats.inter_token_time.count) == (2, 6)
    assert stats.inter_token_time.mean == pytest.approx(1.0)
    assert stats.time_to_first_token.mean == pytest.approx(1.0)
    assert stats.scheduled_tokens == 2 * (9 + 3)
    load = world.scheduler.load()
    assert (load.running, load.waiting, load.used, load.usage) == (0, 0, 0, 0.0)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("steps", [1, 2])
def test_preempted_in_flight_and_then_the_device_fails(preemption: str, steps: int) -> None:
    world = World(
        30, 4, host_blocks=30 if preemption == "swap" else 0, preemption=preemption,
        max_steps_in_flight=steps,
    )  # fmt: skip
    a = world.add("a", 17, max_tokens=10)
    flying = [world.scheduler.schedule() for _ in range(steps)]
    world.scheduler.preempt(["a"])
    for output in reversed(flying):
        world.scheduler.cancel(output)
    assert a.late == 0 and world.manager.stats().cached_blocks == 0
    world.run()
    assert a.output_token_ids.tolist() == world.alone(a)
    assert world.free == 30


def test_preempted_in_flight_keeps_the_token_that_was_coming() -> None:
    world = World(30, 4, host_blocks=30, preemption="swap")
    a = world.add("a", 17, max_tokens=10)
    output = world.schedule()
    world.scheduler.preempt(["a"])
    assert a.late == 1
    result = world.scheduler.update(output, *world.sampled)
    assert len(result.rows) == 0 and len(a.output_token_ids) == 1
    world.run()
    assert a.output_token_ids.tolist() == world.alone(a)
