"""The prefix tree, drawn from the blocks that carry a key: runs of blocks without a branch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Node = dict[str, Any]
_SHOWN = 8


def prefix_tree(
    blocks: NDArray[np.int32],
    parents: NDArray[np.int32],
    hits: NDArray[np.int32],
    references: NDArray[np.int32],
    places: NDArray[np.int32],
    text_of: Callable[[list[int]], str],
    max_nodes: int = 400,
) -> list[Node]:
    """Nodes in depth-first order, each a run of blocks without a branch.

    All arrays are [n], one entry a cached block. A node: ``depth`` in the tree, ``block`` (its
    first), ``blocks`` (how many), ``start`` (index of its first block in a row), ``hits`` and
    ``refs`` of its first block, ``children``, and ``text`` (``text_of`` its first blocks, less what
    its siblings begin with too). A block whose parent is gone begins a tree of its own. Most-hit
    branches come first; O(n).
    """
    known = {block: i for i, block in enumerate(blocks.tolist()) if places[i] >= 0}
    children: dict[int, list[int]] = {}
    for block, i in known.items():
        parent = int(parents[i])
        linked = parent in known and places[known[parent]] == places[i] - 1
        children.setdefault(parent if linked else 0, []).append(block)
    nodes: list[Node] = []
    stack = [(block, 0, 0) for block in _least_hit_first(children.get(0, ()), known, hits)]
    while stack and len(nodes) < max_nodes:
        head, depth, common = stack.pop()
        run = [head]
        while len(children.get(run[-1], ())) == 1:
            run.append(children[run[-1]][0])
        branches = children.get(run[-1], ())
        i, text = known[head], text_of(run[:_SHOWN])
        nodes.append(
            {"depth": depth, "block": head, "blocks": len(run), "start": int(places[i]),
             "hits": int(hits[i]), "refs": int(references[i]), "children": len(branches),
             "text": f"...{text[common:]}" if common else text}
        )  # fmt: skip
        same = _common([text_of([block]) for block in branches])
        stack += [(b, depth + 1, same) for b in _least_hit_first(branches, known, hits)]
    return nodes


def _least_hit_first(blocks: Any, known: dict[int, int], hits: NDArray[np.int32]) -> list[int]:
    return sorted(blocks, key=lambda block: (int(hits[known[block]]), -block))


def _common(texts: list[str]) -> int:
    """How many characters all texts begin with."""
    if not texts:
        return 0
    low, high = min(texts), max(texts)
    pairs = zip(low, high, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(low))
