"""``blocktable generate``: many prompts at once, their text as it comes, and a summary."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from blocktable.cli.live import LiveView, PlainView, answer_panels
from blocktable.cli.prompts import Prompt, chat_prompt, read_prompts
from blocktable.cli.summary import RunFacts, RunMeter, print_summary, summary_panel
from blocktable.core.errors import RequestError
from blocktable.engine.loader import check_path
from blocktable.engine.outputs import RequestOutput
from blocktable.engine.params import SamplingParams


def gather_prompts(
    path: str | None, texts: Sequence[str], system: str | None, raw: bool
) -> list[Prompt]:
    """Prompts of the file, then those of the command line."""
    prompts = read_prompts(path, system) if path else []
    for text in texts:
        if not text.strip():
            raise RequestError("a prompt must not be empty: at least 1 token is needed")
        prompts.append(Prompt(text=text) if raw else chat_prompt(text, system))
    if not prompts:
        raise RequestError("no prompts: give --prompts FILE or --prompt TEXT")
    return prompts


def generate(
    model: str,
    path: str | None,
    texts: Sequence[str],
    system: str | None,
    raw: bool,
    params: SamplingParams,
    options: dict[str, Any],
    json_out: bool,
) -> None:
    """Run the command; RequestError, ConfigError or LoadError for bad input."""
    check_path(model)  # before the prompts: the first mistake on the line is named first
    prompts = gather_prompts(path, texts, system, raw)
    console = Console()
    terminal = console.is_terminal and not json_out
    llm = load(model, options, console if terminal else None)
    meter = RunMeter()
    view: LiveView | PlainView | _Quiet
    view = LiveView(console, prompts) if terminal else PlainView(prompts)
    if json_out:
        view = _Quiet()
    started = time.perf_counter()
    with view:
        outputs = run_requests(llm, prompts, params, meter, view.update)
    facts = run_facts(llm, model, outputs, time.perf_counter() - started)
    if json_out:
        for output in outputs:
            print(json.dumps(asdict(output), ensure_ascii=False))
    elif terminal:
        for panel in answer_panels(prompts, outputs):
            console.print(panel)
        console.print(summary_panel(meter, facts, console.width))
    else:
        print_summary(meter, facts)


class _Quiet:
    """Shows nothing while requests run."""

    def __enter__(self) -> _Quiet:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def update(self, index: int, output: RequestOutput) -> None:
        """Nothing to show yet."""


def load(model: str, options: dict[str, Any], console: Console | None) -> Any:
    """Load a model, with a spinner if there is a terminal."""
    if console is None:
        from blocktable.llm import LLM

        return LLM(model, **options)
    with console.status(f"loading {model}"):
        from blocktable.llm import LLM

        return LLM(model, **options)


def prompt_ids(llm: Any, prompt: Prompt) -> list[int]:
    """Token ids of a prompt, through the model's chat template if it is a chat."""
    if prompt.text is not None:
        return llm.encode(prompt.text)
    return llm.encode_chat(list(prompt.messages))


def run_requests(
    llm: Any,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    meter: RunMeter,
    update: Callable[[int, RequestOutput], None],
) -> list[RequestOutput]:
    """Add all requests, step the engine until they are done, tell ``update`` of each change."""
    engine = llm.engine
    numbers: dict[str, int] = {}
    ids = [prompt_ids(llm, prompt) for prompt in prompts]
    for number, token_ids in enumerate(ids):
        request_id = f"prompt-{number}"
        numbers[request_id] = number
        meter.name(request_id, number)
        engine.add_request(request_id, token_ids, params)
    latest: list[RequestOutput | None] = [None] * len(prompts)
    while engine.has_unfinished:
        before = time.perf_counter()
        outputs = engine.step()
        meter.step(engine.scheduler, time.perf_counter() - before)
        meter.look(engine.scheduler)
        for output in outputs:
            number = numbers[output.request_id]
            latest[number] = output
            update(number, output)
    return [output for output in latest if output is not None]


def run_facts(llm: Any, model: str, outputs: Sequence[RequestOutput], seconds: float) -> RunFacts:
    """What the summary needs to know of the engine and of the requests."""
    engine = llm.engine
    manager = engine.scheduler.manager
    return RunFacts(
        model=model,
        num_requests=len(outputs),
        prompt_tokens=sum(len(o.prompt_token_ids) for o in outputs),
        cached_tokens=sum(o.num_cached_tokens for o in outputs),
        generated_tokens=sum(len(c.token_ids) for o in outputs for c in o.outputs),
        seconds=seconds,
        block_size=engine.block_size,
        usable_blocks=manager.pool.usable,
        max_model_len=engine.max_model_len,
        block_bytes=engine.block_bytes,
        preemptions=engine.scheduler.stats.preemptions,
        drafted_tokens=engine.scheduler.stats.drafted_tokens,
        accepted_tokens=engine.scheduler.stats.accepted_tokens,
    )
