"""What a rank other than the driver does: take messages until told to stop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from blocktable.core.errors import BlocktableError, PeerLost, RankError
from blocktable.parallel.channel import DONE, FAILED, LOST, Ack, RankChannel
from blocktable.parallel.rank import RankState, RankStep
from blocktable.parallel.wire import decode_step


def serve_rank(
    state: RankState,
    channel: RankChannel,
    run: Callable[[RankStep], None],
    is_driver_alive: Callable[[], bool],
) -> None:
    """Apply and run steps until the driver stops.

    A step is acknowledged once the tables are changed and checked, before it is run. Whatever goes
    wrong is told to the driver, then raised: a rank that failed once takes no further step.
    """
    number = 0
    try:
        while (data := channel.receive(is_driver_alive)) is not None:
            message = decode_step(data)
            number = message.step
            step = state.apply(message)
            channel.send(
                Ack(
                    DONE, state.rank, message.sequence, message.step, state.digest,
                    state.blocks.digest, state.blocks.available,
                )
            )  # fmt: skip
            run(step)
    except Exception as error:
        known = isinstance(error, BlocktableError) and f"rank {state.rank}" in str(error)
        text = str(error) if known else f"rank {state.rank} failed at step {number}: {error!r}"
        with suppress(RankError):  # the driver is gone: there is nobody to tell
            kind = LOST if is_left_alone(error) else FAILED
            channel.send(Ack(kind, state.rank, 0, number, 0, 0, 0, text))
        raise
    finally:
        channel.close()


def is_left_alone(error: Exception) -> bool:
    """Whether a collective failed, ours or one of a distributed tensor, because of another rank."""
    return isinstance(error, PeerLost) or (isinstance(error, RuntimeError) and "gloo" in str(error))
