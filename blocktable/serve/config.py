"""How the server runs and what it accepts. Every limit that a client can meet is in here."""

from __future__ import annotations

from dataclasses import dataclass, field

from blocktable.core.errors import ConfigError
from blocktable.engine.params import SamplingLimits

TOOL_CALL_PARSERS = ("auto", "none", "hermes", "llama3_json", "mistral")
_LONGEST = 1e7  # seconds, some months


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Checked once, at start; ConfigError names the option and its limit.

    Attributes:
        host: loopback by default; anything else should come with an ``api_key``.
        port: 0 takes a free port.
        api_key: if set, every path but /health wants ``Authorization: Bearer <key>``.
        served_name: the model's name in the API; None takes the name it was loaded by.
        max_queue: completions that may wait beside those that run; one more is answered 429.
        max_body_bytes: larger request bodies are answered 413.
        max_prompts: most prompts in one completions request.
        max_salt: most characters of a ``cache_salt``.
        drain_seconds: how long SIGTERM waits for answers under way.
        sampling: limits of the sampling parameters.
        tool_call_parser: the form in which the model writes tool calls; "auto" takes the one that
            its chat template asks for, "none" reads none.
        read_seconds: how long a client may take to send a request's head, and then its body (408).
        max_head_bytes: largest head of a request; a larger one is answered 431.
        inspector: record table events and serve /inspect.
        ring_bytes: memory for recorded events, taken at the start; the oldest are dropped.
        trim_seconds: how often memory that is free is given back to the system; 0 never does.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    served_name: str | None = None
    max_queue: int = 256
    max_body_bytes: int = 16 * 2**20
    max_prompts: int = 256
    max_salt: int = 128
    drain_seconds: float = 30.0
    sampling: SamplingLimits = field(default_factory=lambda: SamplingLimits(max_n=64))
    tool_call_parser: str = "auto"
    read_seconds: float = 30.0
    max_head_bytes: int = 64 * 2**10
    inspector: bool = True
    ring_bytes: int = 16 * 2**20
    trim_seconds: float = 10.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be in [0, 65535], got {self.port}")
        for name in ("max_body_bytes", "max_head_bytes", "max_prompts", "max_salt", "ring_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_queue < 0:
            raise ConfigError(f"max_queue must be at least 0, got {self.max_queue}")
        if not 0 <= self.drain_seconds <= _LONGEST:  # NaN is in no range
            limits = f"[0, {_LONGEST:g}]"
            raise ConfigError(f"drain_seconds must be in {limits}, got {self.drain_seconds}")
        if not 0 <= self.trim_seconds <= _LONGEST:
            limits = f"[0, {_LONGEST:g}]"
            raise ConfigError(f"trim_seconds must be in {limits}, got {self.trim_seconds}")
        if not 0 < self.read_seconds <= _LONGEST:
            limits = f"(0, {_LONGEST:g}]"
            raise ConfigError(f"read_seconds must be in {limits}, got {self.read_seconds}")
        if self.tool_call_parser not in TOOL_CALL_PARSERS:
            raise ConfigError(
                f"tool_call_parser must be one of {', '.join(TOOL_CALL_PARSERS)}, "
                f"got {self.tool_call_parser!r}"
            )
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError("api_key must not be empty")
