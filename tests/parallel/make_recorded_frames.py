"""Writes recorded_frames.json: batches as vLLM's own classes encode them.

Run with vLLM importable: ``python tests/parallel/make_recorded_frames.py``.
"""

import ast
import importlib.util
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path


def load_peer() -> types.ModuleType | None:
    """vLLM's module of KV events without the rest of vLLM, or None where it is not installed."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "distributed" / "kv_events.py"
    if not path.is_file():
        return None
    stand_ins = {
        "vllm.config.kv_events": {"KVEventsConfig": object},
        "vllm.logger": {"init_logger": lambda name: __import__("logging").getLogger(name)},
        "vllm.v1.core.kv_cache_utils": {"ExternalBlockHash": bytes | int},
    }
    saved = {name: sys.modules.get(name) for name in [*stand_ins, "vllm.config", "vllm.v1.core"]}
    try:
        for name, values in stand_ins.items():
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__dict__.update(values)
        found = importlib.util.spec_from_file_location("peer_kv_events", path)
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        sys.modules["peer_kv_events"] = module
        found.loader.exec_module(module)
        return module
    finally:
        for name, old in saved.items():
            if old is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = old


def load_extra_keys() -> Callable | None:
    """vLLM's function that says what besides tokens a block's key depends on, taken out of its
    module (which imports most of vLLM), or None where it is not installed."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "v1" / "core" / "kv_cache_utils.py"
    if not path.is_file():
        return None
    tree = ast.parse(path.read_text())
    wanted = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and (node.name.startswith("_gen_") or node.name == "generate_block_hash_extra_keys")
    ]
    scope = {"Request": object, "Any": object}
    exec(compile(ast.Module(wanted, []), str(path), "exec"), scope)
    return scope["generate_block_hash_extra_keys"]


SOURCES = [
    (None, None, []),
    ("sql", None, []),
    (None, "s", []),
    ("sql", "s", [(2, 3, "img"), (5, 6, "pic")]),
    (None, None, [(4, 4, "a"), (8, 1, "b"), (9, 3, "c")]),
    (None, "", [(0, 16, "all")]),
]
"""Adapter, salt and media (offset, length, identity) of prompts of four blocks of four tokens."""


def extra_keys(generate: Callable) -> list:
    """The extra keys of SOURCES' blocks, by vLLM's function."""
    made = []
    for adapter, salt, media in SOURCES:
        features = [
            types.SimpleNamespace(
                identifier=name, mm_position=types.SimpleNamespace(offset=offset, length=length)
            )
            for offset, length, name in media
        ]
        request = types.SimpleNamespace(
            lora_request=types.SimpleNamespace(lora_name=adapter) if adapter else None,
            cache_salt=salt, prompt_embeds=None, mm_features=features,
        )  # fmt: skip
        keys, at = [], 0
        for start in range(0, 16, 4):
            found, at = generate(request, start, start + 4, at)
            keys.append(found)
        made.append(keys)
    return made


def batches(events) -> list:
    """One of each kind of event and field, built from a module's classes."""
    stored, removed, cleared = events.BlockStored, events.BlockRemoved, events.AllBlocksCleared
    plain = {"lora_id": None, "medium": "GPU", "lora_name": None}
    return [
        [stored([2**64 - 1, 7], None, list(range(32)), 16, **plain)],
        [stored([9], 7, [1, 2, 151_935, 70_000], 4, **plain)],
        [stored([b"\xab" * 32], b"\x01" * 32, [5] * 4, 4, **plain)],
        [
            stored(
                [3], 2, [4], 1, 8, None, "sql", extra_keys=[("sql", "salt")], group_idx=1,
                kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=128,
            )
        ],
        [removed([7, 9], "GPU"), removed([3], None, 1), removed([b"\xab" * 32], "GPU", 0)],
        [cleared()],
        [],
    ]  # fmt: skip


def frames(module, batch_class) -> list[str]:
    """The payloads of `batches`, in hexadecimal."""
    import msgspec

    ranks = [0, 3, None, 0, 0, 1, None]
    return [
        msgspec.msgpack.encode(batch_class(1.5 * i, found, rank)).hex()
        for i, (found, rank) in enumerate(zip(batches(module), ranks, strict=True))
    ]


if __name__ == "__main__":
    peer = load_peer()
    if peer is None:
        sys.exit("vLLM is not importable here")
    out = Path(__file__).with_name("recorded_frames.json")
    out.write_text(json.dumps(frames(peer, peer.KVEventBatch), indent=1) + "\n")
