"""Every exception that blocktable raises on purpose, in one place.

A message names the offending value and the limit it broke. An operation that raises has changed
nothing.
"""


class BlocktableError(Exception):
    """Base of all errors below."""


class OutOfBlocks(BlocktableError):
    """A call needs more blocks than can be handed out now.

    ``fenced`` blocks come back once the steps in flight that may touch them are done: a caller
    with ``available + fenced >= needed`` should wait a step rather than preempt.
    """

    def __init__(
        self, request: object, *, held: int, needed: int, available: int, fenced: int = 0
    ) -> None:
        self.request, self.held, self.needed = request, held, needed
        self.available, self.fenced = available, fenced
        super().__init__(
            f"request {request!r} holds {held} blocks and needs {needed} more, "
            f"but {available} are available and {fenced} are fenced"
        )

    def __reduce__(self) -> tuple:  # keyword-only arguments do not survive pickling by default
        return _rebuild_out_of_blocks, (
            self.request, self.held, self.needed, self.available, self.fenced,
        )  # fmt: skip


def _rebuild_out_of_blocks(
    request: object, held: int, needed: int, available: int, fenced: int
) -> OutOfBlocks:
    return OutOfBlocks(request, held=held, needed=needed, available=available, fenced=fenced)


class BlockStateError(BlocktableError):
    """An illegal move in a block's life (double release, touching a free block, writing a shared
    one). The message names the block and, where known, the request."""


class RowError(BlocktableError, IndexError):
    """A row, an entry or a group that a table does not have."""


class RequestError(BlocktableError, ValueError):
    """A request that can never be served as it is: a bad field, or larger than model or pool."""


class ConfigError(BlocktableError, ValueError):
    """A configuration that cannot work; raised once, at the border."""


class LoadError(BlocktableError):
    """A model that cannot be loaded: missing path, corrupt file, unknown format."""


class UnsupportedModel(LoadError):
    """A model whose attention layers do not all go through the paged attention function."""


class WireError(BlocktableError, ValueError):
    """Bytes that are truncated, corrupted, of another version, or not ours at all."""


class RankError(BlocktableError):
    """A rank that diverged, died or stalled; names the rank, the step and the first bad row."""


class PeerLost(RankError):
    """A collective failed because another rank is gone or silent: that one is to be named."""


class TransferError(BlocktableError):
    """A block transfer that failed, timed out, or whose layouts cannot be converted exactly."""
