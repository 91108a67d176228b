"""Which blocks each attention kind keeps, skips and counts as a hit."""

from blocktable.core.errors import ConfigError
from blocktable.core.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SinkWindowSpec,
    SlidingWindowSpec,
)
from blocktable.groups.attention import (
    ChunkedLocalGroup,
    FullAttentionGroup,
    SinkWindowGroup,
    SlidingWindowGroup,
)
from blocktable.groups.base import Group
from blocktable.groups.state import (
    CrossAttentionGroup,
    EncoderOnlyGroup,
    OneStateGroup,
    StateGroup,
)

__all__ = [
    "ChunkedLocalGroup",
    "CrossAttentionGroup",
    "EncoderOnlyGroup",
    "FullAttentionGroup",
    "Group",
    "OneStateGroup",
    "SinkWindowGroup",
    "SlidingWindowGroup",
    "StateGroup",
    "group_class",
]

_KINDS: dict[str, type[Group]] = {
    FullAttentionSpec.kind: FullAttentionGroup,
    MLAAttentionSpec.kind: FullAttentionGroup,
    SinkFullAttentionSpec.kind: FullAttentionGroup,
    SlidingWindowSpec.kind: SlidingWindowGroup,
    SinkWindowSpec.kind: SinkWindowGroup,
    ChunkedLocalAttentionSpec.kind: ChunkedLocalGroup,
    CrossAttentionSpec.kind: CrossAttentionGroup,
    EncoderOnlyAttentionSpec.kind: EncoderOnlyGroup,
}


def group_class(spec: KVCacheSpec) -> type[Group]:
    """The class that serves a spec's kind; ConfigError for a kind nobody serves."""
    if isinstance(spec, MambaSpec):
        return OneStateGroup if spec.cache_mode == "none" else StateGroup
    if spec.kind not in _KINDS:
        raise ConfigError(f"no group serves the kind {spec.kind!r}")
    return _KINDS[spec.kind]
