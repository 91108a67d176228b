"""What a tensor-parallel plan leaves on one rank: a plan maps patterns of layer names ("*" for the
layer's index) to styles, as in transformers, whose plans this engine splits models by.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_INDEX = re.compile(r"\.\d+(?=\.|$)")  # of a layer; digits within a name, as in fc1, stay
_OWN_HEADS = "colwise"  # each rank goes on with its part; other styles bring the parts together
_PROJECTIONS = ("k_proj", "v_proj", "query_key_value", "qkv_proj")
_WHOLE = ("replicated", "moe_tp_experts", "sequence_parallel")


def splits_heads(plan: Mapping[str, str]) -> bool:
    """Whether a rank attends, and keeps KV, for its own heads alone. Where not, attention is not in
    the plan, or the parts are brought together before it: every rank keeps the KV of all heads."""
    return any(is_own_heads(name, plan) for name in plan)


def is_own_heads(name: str, plan: Mapping[str, str]) -> bool:
    """Whether the projection ``name`` hands a rank the keys or values of its own heads alone."""
    return name.rpartition(".")[2] in _PROJECTIONS and style_of(name, plan) == _OWN_HEADS


def style_of(name: str, plan: Mapping[str, str]) -> str | None:
    """The style of a layer, or of a weight by its layer; None for one that every rank has whole."""
    pattern = _INDEX.sub(".*", name)
    return plan.get(pattern, plan.get(pattern.rpartition(".")[0]))


def is_split(weight: str, plan: Mapping[str, str]) -> bool:
    """Whether each rank holds but its part of a weight."""
    style = style_of(weight, plan)
    if style is None or style.startswith(_WHOLE):
        return False
    return not (weight.endswith("bias") and style.startswith("rowwise"))
