"""`LLM(kv_events=...)` tells a subscriber what its prefix cache holds."""

import sys
import time
from pathlib import Path

import pytest

from blocktable import LLM, SamplingParams
from blocktable.core.errors import ConfigError
from blocktable.parallel.event_stream import EventSubscriber
from blocktable.parallel.events import BlockCounter

sys.path.insert(0, str(Path(__file__).parent / "engine"))
from tiny_models import tiny_model

OPTIONS = {"num_blocks": 12, "max_model_len": 64, "block_size": 8, "seed": 0}


def test_a_subscriber_follows_the_engine_through_evictions():
    endpoint = "tcp://127.0.0.1:*"
    llm = LLM(tiny_model("llama"), kv_events=endpoint, kv_events_replay=endpoint, **OPTIONS)
    publisher = llm.engine.publisher
    subscriber = EventSubscriber(publisher.endpoint, publisher.replay_endpoint, first_sequence=0)
    time.sleep(0.2)
    counter = BlockCounter()
    for first in range(3, 9):
        llm.generate([[first] * 30], SamplingParams(max_tokens=12, ignore_eos=True))
    while (received := subscriber.receive(0.5)) is not None:
        assert received.missed == 0
        counter.apply(received.batch.events)
    stats = llm.engine.manager.stats()
    assert stats.removed_blocks > 0
    assert len(counter) == stats.cached_keys > 0
    subscriber.close()
    publisher.close()


def test_events_need_a_prefix_cache():
    with pytest.raises(ConfigError, match="prefix cache"):
        LLM(tiny_model("llama"), kv_events="tcp://127.0.0.1:*", enable_prefix_caching=False,
            **OPTIONS)  # fmt: skip
