"""``blocktable chat``: a conversation in the terminal."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console

from blocktable.cli.generate import load
from blocktable.engine.outputs import RequestOutput
from blocktable.engine.params import SamplingParams

_HELP = "Enter sends, an empty line or Ctrl-D ends, Ctrl-C stops an answer, /reset forgets."


def chat(model: str, system: str | None, params: SamplingParams, options: dict[str, Any]) -> None:
    """Read questions until the input ends and stream the answers."""
    console = Console()
    terminal = console.is_terminal and sys.stdin.isatty()
    llm = load(model, options, console if terminal else None)
    if terminal:
        console.print(f"[dim]{model}. {_HELP}[/]")
    start: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    turn = 0
    while (question := _ask(console, terminal)) is not None:
        if question == "/reset":
            messages = list(start)
            continue
        turn += 1
        messages.append({"role": "user", "content": question})
        output, seconds = _answer(llm, f"chat-{turn}", messages, params)
        if output is None:
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": output.outputs[0].text})
        if terminal:
            console.print(f"[dim]{_note(output, seconds)}[/]\n")


def _ask(console: Console, terminal: bool) -> str | None:
    """The next question, None at the end of the input."""
    try:
        line = console.input("[bold cyan]you[/] > ") if terminal else input()
    except EOFError:
        return None
    if not line.strip():
        return None if terminal else _ask(console, terminal)
    return line.strip()


def _answer(
    llm: Any, request_id: str, messages: list[dict[str, str]], params: SamplingParams
) -> tuple[RequestOutput | None, float]:
    """Stream one answer to standard output; None if it was stopped before its first token."""
    engine = llm.engine
    engine.add_request(request_id, llm.encode_chat(messages), params)
    shown, latest, started = 0, None, time.perf_counter()
    try:
        while engine.has_unfinished:
            for output in engine.step():
                latest = output
                text = output.outputs[0].text
                print(text[shown:], end="", flush=True)
                shown = len(text)
    except KeyboardInterrupt:
        engine.abort([request_id])
    print()
    return latest, time.perf_counter() - started


def _note(output: RequestOutput, seconds: float) -> str:
    count = len(output.outputs[0].token_ids)
    return (
        f"{len(output.prompt_token_ids)} prompt tokens, {output.num_cached_tokens} from the "
        f"cache; {count} generated, {count / seconds:.0f} tokens/s"
    )
