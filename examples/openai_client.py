"""The official client on a running server: a chat, a stream, JSON by schema, tools.

make serve                                        # in another terminal
python examples/openai_client.py [URL] [MODEL]    # needs: pip install openai
"""

import json
import sys

import openai

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "large": {"type": "boolean"}},
    "required": ["city", "large"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def ask(text: str) -> list[dict[str, str]]:
    """A conversation of one question."""
    return [{"role": "user", "content": text}]


def main(url: str = "http://127.0.0.1:8000/v1", model: str = "smollm2") -> None:
    """Each way to ask, once."""
    chat = openai.OpenAI(base_url=url, api_key="none").chat.completions

    answer = chat.create(model=model, messages=ask("What is gravity?"), max_tokens=24)
    print("chat:", answer.choices[0].message.content)

    print("stream:", end=" ")
    stream = chat.create(
        model=model, messages=ask("Count to ten."), max_tokens=24, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        else:
            print(f"\nusage: {chunk.usage.prompt_tokens} + {chunk.usage.completion_tokens} tokens")

    answer = chat.create(
        model=model, messages=ask("Name a city, as JSON."), max_tokens=60, temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}},
    )  # fmt: skip
    print("schema:", answer.choices[0].message.content)

    answer = chat.create(
        model=model, messages=ask("How is the weather in Paris?"), max_tokens=80, temperature=0,
        tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "weather"}},
    )  # fmt: skip
    (call,) = answer.choices[0].message.tool_calls
    print("tool:", call.function.name, json.loads(call.function.arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
