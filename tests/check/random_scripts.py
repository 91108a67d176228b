"""Random scripts of the replay format, guided by the naive model so that they reach deep states."""

from __future__ import annotations

import random

from naive_model import NaiveModel


def random_config(rng: random.Random, spec: str | None = None) -> dict:
    spec = spec or rng.choice(["full", "full", "swa", "hybrid"])
    block = rng.choice([1, 2, 4, 8, 16])
    blocks = rng.choice([8, 12, 16, 24, 32, 48])
    usable = blocks - 1 if spec != "hybrid" else (blocks - 1) // 2
    length = usable * block if spec != "hybrid" else max(block + 2, (usable - 1) * block)
    window = None if spec == "full" else rng.choice([1, 2, block, block + 1, 2 * block, 3 * block])
    return {
        "op": "config", "num_blocks": blocks, "block_size": block,
        "caching": rng.random() < 0.85, "max_model_len": max(4, length),
        "budget": rng.choice([1, block, 3 * block, 8 * block, 65536]), "spec": spec,
        "window": window, "watermark": rng.choice([0.0, 0.0, 0.15, 0.25, 0.4]),
        "full_fit": rng.random() < 0.5,
    }  # fmt: skip


def random_script(seed: int, operations: int = 80, spec: str | None = None) -> list[dict]:
    """A configuration and ``operations`` operations; the same seed gives the same script."""
    rng = random.Random(seed)
    config = random_config(rng, spec)
    model = NaiveModel(config)
    vocabulary = rng.choice([2, 50, 1000])
    script, prompts = [config], []

    def tokens(n: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(n)]

    def prompt() -> list[int]:
        most = max(1, config["max_model_len"] - 3)
        out = tokens(rng.randint(1, most))
        if prompts and rng.random() < 0.7:  # share a prefix with an earlier one
            old = rng.choice(prompts)
            keep = rng.randint(0, len(old))
            out = (old[:keep] + out)[: rng.randint(1, most)]
        prompts.append(out)
        return out

    for i in range(operations):
        live = [r.id for r in model.running + model.waiting]
        ready = [r.id for r in model.running if r.computed == len(r.tokens)]
        roll = rng.random()
        if roll < 0.22 or not live:
            salt = rng.choice([None, None, None, "s1"])
            op = {"op": "new", "id": f"r{i}", "tokens": prompt(),
                  "max_tokens": rng.randint(1, 24), "salt": salt}  # fmt: skip
        elif ready and roll < 0.50:
            some = [r for r in ready if rng.random() < 0.9] + rng.sample(live, k=rng.random() < 0.1)
            op = {"op": "sample", "tokens": {r: tokens(rng.choice([1, 1, 1, 2])) for r in some}}
        elif roll < 0.86:
            op = {"op": "step"}
        elif roll < 0.90:
            op = {"op": "preempt", "id": rng.choice(live)}
        elif roll < 0.94:
            op = {"op": "finish", "id": rng.choice([*live, "nobody"])}
        elif roll < 0.97:
            op = {"op": "probe", "tokens": prompt(), "salt": rng.choice([None, "s1"])}
        else:
            op = {"op": "reset"}
        script.append(op)
        model.answer(i, op)
    return script
