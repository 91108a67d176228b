"""Forks of requests on models with recurrent states: whatever happens to the parent before the
child's first step, the child goes on from the state it was forked from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_equal_tokens import generated_alone, make_engine, prompts
from tiny_models import tiny_model

from blocktable.attention import paged_attention, write_kv
from blocktable.engine.probe import probe_model
from blocktable.sched.request import Request

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT, OTHER = prompts()[:2]


class Greedy:
    """A scheduler and a runner without an engine's book-keeping, so that anyone may fork."""

    def __init__(self, name: str, **options: Any) -> None:
        self.model = tiny_model(name)
        self.probed = probe_model(self.model, paged_attention, write_kv)
        engine = make_engine(self.model, self.probed, block_size=4, num_blocks=120, **options)
        self.scheduler, self.runner = engine.scheduler, engine.runner
        self.done: dict[str, list[int]] = {}
        self.right = generated_alone(self.model, PROMPT)

    def add(self, name: str, prompt: list[int]) -> None:
        tokens = np.array(prompt, np.int32)
        self.scheduler.add(Request(request_id=name, prompt_token_ids=tokens, max_tokens=7))

    def step(self) -> None:
        output = self.scheduler.schedule()
        logits = self.runner.execute(output)
        drawn = np.zeros(0, np.int64) if logits is None else logits.argmax(-1).numpy()
        for request in self.scheduler.update(output, drawn).finished:
            self.done[request.request_id] = request.output_token_ids.tolist()

    def finish(self) -> dict[str, list[int]]:
        while self.scheduler.has_work:
            self.step()
        self.step()  # an empty one tells the device of the last rows given up
        pool = self.scheduler.manager.pool
        assert pool.available == pool.usable and not self.probed.mixers._states
        return self.done


@pytest.fixture(params=["lfm2", "mamba2"])
def forked(request: pytest.FixtureRequest) -> Any:
    """ "a" has run three steps; nothing was scheduled since "b" was forked from it."""
    made = Greedy(request.param)
    made.add("a", PROMPT)
    for _ in range(3):
        made.step()
    made.scheduler.fork("a", ["b"])
    yield made
    made.probed.mixers.close()


def test_parent_aborted_before_the_childs_first_step(forked: Any) -> None:
    forked.scheduler.abort(["a"])
    assert forked.finish() == {"b": forked.right}


def test_grandchild_survives_parent_and_child(forked: Any) -> None:
    forked.scheduler.fork("b", ["c"])
    forked.scheduler.abort(["b"])
    forked.scheduler.abort(["a"])
    assert forked.finish() == {"c": forked.right}


def test_parents_row_is_taken_by_another_request(forked: Any) -> None:
    forked.scheduler.abort(["a"])
    forked.add("d", OTHER)
    expected = generated_alone(forked.model, OTHER)
    assert forked.finish() == {"b": forked.right, "d": expected}


def test_parents_row_is_taken_by_another_child(forked: Any) -> None:
    forked.scheduler.abort(["a"])
    forked.scheduler.fork("b", ["c"])  # in the parent's row
    forked.scheduler.abort(["b"])
    assert forked.finish() == {"c": forked.right}


def test_preempted_parent_is_computed_again(forked: Any) -> None:
    forked.scheduler.preempt(["a"])
    assert forked.finish() == {"a": forked.right, "b": forked.right}


@pytest.mark.parametrize("name", ["lfm2", "mamba2"])
def test_child_that_waits_for_the_token_budget(name: str) -> None:
    """Its parent runs on before it: the child's state is that of before the parent's step."""
    made = Greedy(name, max_num_batched_tokens=1)
    made.add("a", PROMPT)
    for _ in range(len(PROMPT) + 1):
        made.step()
    made.scheduler.fork("a", ["b"])
    assert made.finish() == {"a": made.right, "b": made.right}
    made.probed.mixers.close()
