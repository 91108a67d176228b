"""Which blocks each attention kind keeps, skips and counts as a hit."""

from blocktable.core.errors import ConfigError
from blocktable.core.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from blocktable.groups.attention import ChunkedLocalGroup, FullAttentionGroup, SlidingWindowGroup
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
    "SlidingWindowGroup",
    "StateGroup",
    "group_class",
]

_KINDS: dict[str, type[Group]] = {
    "full_attention": FullAttentionGroup,
    "mla_attention": FullAttentionGroup,
    SlidingWindowSpec.kind: SlidingWindowGroup,
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
