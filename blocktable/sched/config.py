"""What a scheduler may do, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from blocktable.core.errors import ConfigError

Policy = Literal["fcfs", "priority"]
Preemption = Literal["recompute", "swap"]


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits and policies of a :class:`~blocktable.sched.scheduler.Scheduler`.

    Raises ConfigError for a value that cannot work. Units: tokens, blocks, requests, steps.
    """

    max_num_seqs: int = 256
    """Most requests that run at once (rows of the block table in use)."""
    max_num_batched_tokens: int = 2048
    """Token budget of one step."""
    policy: Policy = "fcfs"
    """``fcfs``: first come, first served. ``priority``: lower ``Request.priority`` first, then
    arrival; the victim of a preemption is the running request that comes last in that order."""
    priority_head_start: float = 0.0
    """Seconds of waiting that one class of priority is worth: with 10, a request of priority 1
    goes before one of priority 0 that came over 10 s later, so nobody starves. 0 = strict classes
    """
    chunked_prefill: bool = True
    """A prompt may be computed over several steps. Without it the budget must cover
    ``max_model_len``, and a prompt that does not fit the rest of a step's budget waits."""
    max_prefill_chunk: int = 0
    """Most prompt tokens of one request in a step; 0 = only the budget limits it."""
    watermark: float = 0.0
    """Fraction of all blocks kept free when a request is admitted while others run."""
    full_sequence_must_fit: bool = True
    """Admit only when the whole known sequence fits, not just its first chunk: keeps a long
    prompt from being admitted, preempted and admitted again (case B26)."""
    lookahead: int = 0
    """How many waiting requests behind one that does not fit may be tried; 0 = none."""
    lookahead_patience: int = 32
    """Ageing: once the head of the queue was passed over in this many steps, nobody passes it."""
    preemption: Preemption = "recompute"
    """What happens to a victim's KV: dropped and recomputed, or copied to host memory (the
    manager's ``host_blocks``). A victim that does not fit into host memory is recomputed."""
    max_steps_in_flight: int = 1
    """2 = the next step may be scheduled before the last one's tokens are known."""
    num_draft_tokens: int = 0
    """Most draft tokens proposed for a request in a step; needs max_steps_in_flight 1."""
    max_model_len_must_fit: bool = True
    """Refuse a pool in which one request of the maximum length does not fit. Without it such a
    request ends at the pool's capacity with finish reason "length"."""

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be an integer >= {least}, got {value!r}")
        if self.policy not in ("fcfs", "priority"):
            raise ConfigError(f"policy must be fcfs or priority, got {self.policy!r}")
        if self.preemption not in ("recompute", "swap"):
            raise ConfigError(f"preemption must be recompute or swap, got {self.preemption!r}")
        if not 0.0 <= self.priority_head_start < float("inf"):
            raise ConfigError(
                f"priority_head_start must be a number of seconds, got {self.priority_head_start!r}"
            )
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"watermark must be in [0, 1), got {self.watermark!r}")
        if self.max_steps_in_flight > 2:
            raise ConfigError(f"max_steps_in_flight is 1 or 2, got {self.max_steps_in_flight}")
        if self.num_draft_tokens and self.max_steps_in_flight > 1:
            raise ConfigError(
                f"num_draft_tokens {self.num_draft_tokens} needs max_steps_in_flight 1: a draft "
                "continues tokens that a step in flight has not returned yet"
            )


_LEAST = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_prefill_chunk": 0,
    "lookahead": 0,
    "lookahead_patience": 1,
    "max_steps_in_flight": 1,
    "num_draft_tokens": 0,
}
