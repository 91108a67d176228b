"""An engine that publishes which blocks its prefix cache holds (``LLM(kv_events=...)``)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from blocktable.core.errors import ConfigError
from blocktable.core.specs import KVCacheConfig
from blocktable.engine.engine import Engine
from blocktable.engine.options import EngineOptions
from blocktable.engine.outputs import RequestOutput
from blocktable.parallel.event_stream import EventPublisher
from blocktable.parallel.events import EventRecorder


class PublishingEngine:
    """An `Engine` that sends a batch of events after every step in which the cache changed.

    ``publisher`` has the endpoints in use; everything else is the engine's own.
    """

    def __init__(self, engine: Engine, recorder: EventRecorder, publisher: EventPublisher) -> None:
        self.__dict__.update(_engine=engine, _recorder=recorder, publisher=publisher)
        weakref.finalize(self, publisher.close)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_engine"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_engine"], name, value)

    def step(self) -> list[RequestOutput]:
        """See `Engine.step`."""
        outputs = self._engine.step()
        batch = self._recorder.take()
        if batch is not None:
            self.publisher.publish(batch)
        return outputs


def build_publishing_engine(options: EngineOptions, build: Callable[..., Engine]) -> Any:
    """The engine that ``build(make_sink=...)`` makes, with events at ``options.kv_events``.
    ConfigError without prefix cache."""
    if options.kv_events is None or not options.enable_prefix_caching:
        raise ConfigError("kv_events needs an endpoint and the prefix cache")
    opened: list[tuple[EventRecorder, EventPublisher]] = []

    def make(config: KVCacheConfig) -> EventRecorder:  # called by rank 0 alone
        publisher = EventPublisher(str(options.kv_events), options.kv_events_replay)
        opened.append((EventRecorder(config), publisher))
        return opened[0][0]

    try:
        return PublishingEngine(build(make_sink=make), *opened[0])
    except BaseException:
        for _, publisher in opened:
            publisher.close()
        raise
