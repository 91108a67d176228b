"""Watching requests run: panels in a terminal, plain lines anywhere else."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from blocktable.cli.blockmap import letter
from blocktable.cli.prompts import Prompt
from blocktable.engine.outputs import RequestOutput

_MIN_WIDTH = 38
_HEADER_LINES = 3


def _tail(text: str, width: int, lines: int) -> str:
    """The last ``lines`` lines of the text, wrapped at ``width``."""
    wrapped: list[str] = []
    for paragraph in text.splitlines() or [""]:
        wrapped += textwrap.wrap(paragraph, width) or [""]
    return "\n".join(wrapped[-lines:])


class LiveView:
    """Progress and one panel for each request, redrawn while they run.

    Use as a context manager; ``update`` takes outputs as they come, in any order.
    """

    def __init__(self, console: Console, prompts: Sequence[Prompt]) -> None:
        self._console, self._prompts = console, prompts
        self._latest: list[RequestOutput | None] = [None] * len(prompts)
        self._progress = Progress(
            TextColumn("[bold]requests[/]"), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]} tokens"), TimeElapsedColumn(),
            console=console,
        )  # fmt: skip
        self._task = self._progress.add_task("run", total=len(prompts), tokens=0)
        self._live = Live(
            self, console=console, refresh_per_second=8, transient=True, vertical_overflow="crop"
        )

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def update(self, index: int, output: RequestOutput) -> None:
        """Show the newest state of request number ``index``."""
        self._latest[index] = output
        seen = [o for o in self._latest if o is not None]
        self._progress.update(
            self._task,
            completed=sum(o.finished for o in seen),
            tokens=sum(len(c.token_ids) for o in seen for c in o.outputs),
        )

    def __rich__(self) -> RenderableType:
        """What fits on the screen: running requests first, each with the end of its text."""
        across = max(1, self._console.width // _MIN_WIDTH)
        width = self._console.width // across - 1
        room = self._console.height - _HEADER_LINES
        down = max(1, min(-(-len(self._prompts) // across), room // 5))
        lines = max(1, min(room // down - 2, 8))
        order = sorted(range(len(self._prompts)), key=self._rank)[: across * down]
        panels = [self._panel(i, width, lines) for i in sorted(order)]
        return Group(self._progress, Columns(panels, width=width, padding=(0, 1)))

    def _rank(self, index: int) -> int:
        output = self._latest[index]
        return 1 if output is None else 2 if output.finished else 0

    def _panel(self, index: int, width: int, lines: int) -> Panel:
        sign, colour = letter(index)
        output = self._latest[index]
        text = output.outputs[0].text.strip() if output and output.outputs else ""
        body = Text(_tail(text, width - 4, lines))
        body.append("\n" * max(0, lines - 1 - body.plain.count("\n")))
        style = "dim" if output is None or output.finished else colour
        title = Text(f" {sign} {self._prompts[index].title[: width - 8]} ")
        return Panel(body, title=title, title_align="left", border_style=style, width=width)


class PlainView:
    """For pipes and files: one block of lines when a request ends, nothing in between."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def update(self, index: int, output: RequestOutput) -> None:
        """Print the request once it has ended."""
        if output.finished:
            print_plain(index, self._prompts[index], output)


def print_plain(index: int, prompt: Prompt, output: RequestOutput) -> None:
    """A finished request as plain lines on standard output."""
    print(f"[{index + 1}] {prompt.title}")
    for completion in output.outputs:
        mark = f" ({completion.index + 1})" if len(output.outputs) > 1 else ""
        print(f"  ->{mark} {completion.text.strip()}")
    print(flush=True)


def answer_panels(
    prompts: Sequence[Prompt], outputs: Iterable[RequestOutput]
) -> Iterable[RenderableType]:
    """The whole answer of each request, to leave in the terminal when the run is over."""
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        sign, colour = letter(index)
        texts = [Text(c.text.strip()) for c in output.outputs]
        last = output.outputs[-1]
        foot = (
            f"{len(output.prompt_token_ids)} prompt tokens, {output.num_cached_tokens} from the "
            f"cache, {sum(len(c.token_ids) for c in output.outputs)} generated, "
            f"{last.finish_reason}"
        )
        yield Panel(
            Group(Text(prompt.title, style="italic dim"), *texts),
            title=f" {sign} ", title_align="left", border_style=colour,
            subtitle=Text(foot, style="dim"), subtitle_align="right",
        )  # fmt: skip
