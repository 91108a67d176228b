"""What draft-and-verify gives: decode with and without n-gram drafts, SmolLM2-135M on a CPU.

    python bench/drafts.py --dtype float32 --drafts 4

Two kinds of text, greedy, 64 new tokens a request: one that the prompt mostly contains (a passage
to repeat, twice shown) and one it does not (plain questions). Each line gives tokens/s without and
with drafts, the best of ``--rounds`` rounds in turn in one process, their ratio, steps, and the
share of drafts accepted. The outputs of both are compared; "equal" counts the requests that agree
to the last token (in float32 all must; bfloat16 rounds by batch shape).
"""

from __future__ import annotations

import argparse
import time
from typing import Any

PASSAGE = (
    "The harbour master wrote down every ship: the Alma with salt, the Brava with timber, "
    "the Corvo with oranges, the Dalia with wool. At noon he counted {} crates on the quay. "
)
QUESTIONS = [
    "Why is the sky blue?", "How do I boil an egg?", "What is a prime number?", "Who wrote Hamlet?",
]  # fmt: skip


def prompts(kind: str, llm: Any, count: int) -> list[list[int]]:
    """Token ids of ``count`` prompts."""
    if kind == "repeated":
        texts = [PASSAGE.format(40 + i) * 2 + PASSAGE[:20] for i in range(count)]
        return [llm.encode(text) for text in texts]
    asked = [QUESTIONS[i % len(QUESTIONS)] for i in range(count)]
    return [llm.encode_chat([{"role": "user", "content": text}]) for text in asked]


def run(llm: Any, asked: list[list[int]]) -> tuple[float, int, list[list[int]]]:
    """(seconds, steps, token ids) of one round from an empty prefix cache."""
    from blocktable import SamplingParams

    llm.engine.manager.reset_prefix_cache()
    before = llm.stats()["scheduler"].steps
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(asked, params)
    took = time.perf_counter() - start
    steps = llm.stats()["scheduler"].steps - before
    return took, steps, [output.outputs[0].token_ids for output in outputs]


def compare(kind: str, count: int, plain: Any, drafting: Any, rounds: int) -> str:
    """One line of the table."""
    asked = prompts(kind, plain, count)
    stats = drafting.stats()["scheduler"]
    before = stats.drafted_tokens, stats.accepted_tokens
    ours = [run(llm, asked) for _ in range(rounds) for llm in (plain, drafting)]
    without, with_drafts = min(ours[::2]), min(ours[1::2])
    rates = [64 * count / took for took, _, _ in (without, with_drafts)]
    drafted = stats.drafted_tokens - before[0]
    share = (stats.accepted_tokens - before[1]) / max(drafted, 1)
    equal = sum(a == b for a, b in zip(without[2], with_drafts[2], strict=True))
    return (
        f"{kind:9} x{count:<2} {rates[0]:7.1f} -> {rates[1]:7.1f} tokens/s "
        f"({rates[1] / rates[0]:.2f}x)  steps {without[1]} -> {with_drafts[1]}  "
        f"accepted {share:.0%} of {drafted}  equal {equal}/{count}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    chosen = parser.parse_args()
    from blocktable import LLM

    plain = LLM("smollm2", dtype=chosen.dtype, num_blocks=400)
    drafting = LLM(
        plain.engine.runner.model, tokenizer=plain.tokenizer, dtype=chosen.dtype, num_blocks=400,
        num_draft_tokens=chosen.drafts,
    )  # fmt: skip
    for kind in ("repeated", "questions"):
        for count in (1, 4):
            print(compare(kind, count, plain, drafting, chosen.rounds), flush=True)


if __name__ == "__main__":
    main()
