"""Text from a model without a server: a batch, a stream, a chat, JSON, and scores of a prompt.

python examples/offline.py [MODEL]
"""

import json
import sys

from blocktable import LLM, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "large": {"type": "boolean"}},
    "required": ["city", "large"],
    "additionalProperties": False,
}


def main(model: str = "smollm2") -> None:
    """Each way to ask, once."""
    llm = LLM(model)
    greedy = SamplingParams(temperature=0, max_tokens=16)

    print("--- a batch")
    for output in llm.generate(["The capital of France is", "Two and two is"], greedy):
        print(repr(output.outputs[0].text))

    print("--- a stream")
    shown = ""
    for output in llm.stream("Once upon a time", greedy):
        text = output.outputs[0].text
        print(text[len(shown) :], end="", flush=True)
        shown = text

    print("\n--- a chat")
    (output,) = llm.chat([{"role": "user", "content": "What is gravity?"}], greedy)
    print(repr(output.outputs[0].text))

    print("--- JSON that follows a schema")
    guided = SamplingParams(temperature=0, max_tokens=60, json_schema=json.dumps(SCHEMA))
    (output,) = llm.chat([{"role": "user", "content": "Name a city, as JSON."}], guided)
    print(output.outputs[0].text)

    print("--- how likely a text is")
    scoring = SamplingParams(max_tokens=1, prompt_logprobs=0)
    texts = ["The sky is blue.", "The sky is toast."]
    for text, output in zip(texts, llm.generate(texts, scoring), strict=True):
        scored = [entry for entry in output.prompt_logprobs or () if entry is not None]
        print(f"{text:20} {sum(entry.chosen.logprob for entry in scored):8.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
