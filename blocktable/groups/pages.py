"""One page size for all groups of a hybrid model, so that they can share a pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from blocktable.core.errors import ConfigError
from blocktable.core.specs import AttentionSpec, KVCacheSpec, MambaSpec, ceil_div


def unify_page_sizes(specs: Sequence[KVCacheSpec], granularity: int = 16) -> list[KVCacheSpec]:
    """The specs with equal page sizes, in the same order.

    Attention blocks grow, in multiples of ``granularity`` positions (what the kernels need), until
    a page holds the largest recurrent state; then whatever is smaller is padded. Without states,
    blocks of cheaper layers grow by whole factors to the dearest layer's page where they can, and
    are padded where they cannot. 512 bytes a token against a state of 540,672 bytes gives blocks
    of 1,056 tokens at granularity 16 (no padding) and 1,088 at 64 (the state padded by 16,384).
    """
    if granularity < 1:
        raise ConfigError(f"granularity must be positive, got {granularity}")
    states = [s for s in specs if isinstance(s, MambaSpec)]
    attention = [s for s in specs if isinstance(s, AttentionSpec)]
    other = [type(s).__name__ for s in specs if not isinstance(s, (MambaSpec, AttentionSpec))]
    if other:
        raise ConfigError(f"cannot unify the pages of {', '.join(other)}")
    need = max((s.real_page_size_bytes for s in states), default=0)
    grown = {id(s): _grow(s, need, granularity) if need else s for s in attention}
    page = max([need, *(_page(grown[id(s)]) for s in attention)], default=0)
    unified: list[KVCacheSpec] = []
    for spec in specs:
        if isinstance(spec, AttentionSpec) and not need:
            unified.append(_fill(spec, page))
        else:
            unified.append(_pad(grown.get(id(spec), spec), page))
    return unified


def _page(spec: KVCacheSpec) -> int:
    return spec.page_size_bytes


def _grow(spec: AttentionSpec, need: int, granularity: int) -> AttentionSpec:
    """The spec with the smallest block, a multiple of granularity, whose page holds ``need``."""
    if spec.page_size_bytes == 0:
        return spec
    tokens = max(spec.block_size, ceil_div(need, spec.bytes_per_token))
    size = ceil_div(tokens, granularity) * granularity
    return replace(spec, block_size=size, page_size_padded=None)


def _fill(spec: AttentionSpec, page: int) -> AttentionSpec:
    """The spec with its block multiplied to the page where that is exact, else padded."""
    own = spec.page_size_bytes
    if own == 0 or own == page:
        return spec
    if page % own == 0 and spec.page_size_padded is None:
        return replace(spec, block_size=spec.block_size * (page // own))
    return replace(spec, page_size_padded=page)


def _pad(spec: KVCacheSpec, page: int) -> KVCacheSpec:
    if spec.page_size_bytes in (0, page):
        return spec
    if isinstance(spec, (AttentionSpec, MambaSpec)):
        return replace(spec, page_size_padded=page)
    return spec
