"""Soak: random traffic over tiny pools, for minutes; ends with every block free.

``python -m blocktable.check.soak --minutes 10`` (``make soak``). Each round makes a small random
world (pool, block size, window, recurrent state, policy, eviction, swap, drafts, steps in flight),
drives it through arrivals, aborts, preemptions, forks, swaps, hints, resets, failed steps and
weight updates, checks every
invariant after every operation, and drains it. The seed of a round that fails is printed, and
``--seed N --rounds 1`` runs it again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from blocktable.check.traffic import EVENTS, run_traffic
from blocktable.core.errors import BlocktableError

ENOUGH_ROUNDS = 100
"""From so many rounds on, a soak in which something never happened has failed."""


@dataclass
class SoakResult:
    """What a soak did."""

    rounds: int = 0
    operations: int = 0
    steps: int = 0
    finished: int = 0
    preemptions: int = 0
    checked_slots: int = 0
    events: Counter[str] = field(default_factory=Counter)

    @property
    def missing(self) -> list[str]:
        """What never happened and should have, in that many rounds."""
        return [name for name in EVENTS if not self.events[name] and self.rounds >= ENOUGH_ROUNDS]

    def line(self) -> str:
        """One line for people."""
        return (
            f"{self.rounds:,} rounds, {self.operations:,} operations, {self.steps:,} steps, "
            f"{self.finished:,} requests finished, {self.preemptions:,} preemptions, "
            f"{self.checked_slots:,} slots checked"
        )


class SoakFailure(BlocktableError):
    """A round failed; names its seed."""


def soak(
    minutes: float, seed: int = 0, operations: int = 300, rounds: int | None = None
) -> SoakResult:
    """Run rounds until ``minutes`` are over (at least one) or ``rounds`` are done. Raises
    SoakFailure at the first round in which anything is wrong."""
    result = SoakResult()
    end = time.monotonic() + 60 * minutes
    shown = time.monotonic()
    while rounds is None or result.rounds < rounds:
        number = seed + result.rounds
        try:
            traffic = run_traffic(number, operations)
        except Exception as error:
            raise SoakFailure(
                f"round with seed {number} ({operations} operations) failed: "
                f"{type(error).__name__}: {error}"
            ) from error
        result.rounds += 1
        result.operations += operations
        result.steps += traffic.scheduler.stats.steps
        result.finished += traffic.finished
        result.preemptions += traffic.scheduler.stats.preemptions
        result.checked_slots += traffic.device.checked_slots
        result.events.update(traffic.events)
        now = time.monotonic()
        if now >= end:
            break
        if now - shown > 30:
            shown = now
            print(f"  {(end - now) / 60:.1f} min left: {result.line()}", flush=True)
    return result


def main(arguments: list[str] | None = None) -> int:
    """Command line; 0 = nothing was wrong, 1 = something was, 2 = bad arguments."""
    parser = argparse.ArgumentParser(prog="blocktable.check.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first round")
    parser.add_argument("--operations", type=int, default=300, help="operations a round")
    parser.add_argument("--rounds", type=int, default=None, help="stop after so many rounds")
    options = parser.parse_args(arguments)
    if not 0 <= options.minutes < float("inf"):  # NaN neither
        parser.error(f"minutes must be a number >= 0, got {options.minutes}")
    if options.operations < 1:
        parser.error(f"operations must be at least 1, got {options.operations}")
    try:
        result = soak(options.minutes, options.seed, options.operations, options.rounds)
    except SoakFailure as failure:
        print(f"FAILED: {failure}", file=sys.stderr)
        return 1
    print(", ".join(f"{name} {result.events[name]:,}" for name in EVENTS))
    if result.missing:
        print(f"FAILED: never happened: {', '.join(result.missing)}", file=sys.stderr)
        return 1
    print(f"soak passed: {result.line()}; every pool ended with free = usable")
    return 0


if __name__ == "__main__":
    sys.exit(main())
