"""Renders docs/images/generate.png from a real run: ``python docs/pictures.py``.

Needs playwright and a Chromium (``CHROMIUM`` names it, /usr/bin/chromium by default).
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from rich.console import Console

from blocktable import LLM, SamplingParams
from blocktable.cli.generate import gather_prompts, run_facts, run_requests
from blocktable.cli.live import answer_panels
from blocktable.cli.summary import RunMeter, summary_panel

HERE = Path(__file__).parent
SHOWN = (0, 5, 15)  # prompts whose answers are in the picture


def record() -> str:
    """Run the example prompts and draw what the terminal shows at the end, as SVG."""
    prompts = gather_prompts(str(HERE.parent / "examples/prompts.jsonl"), [], None, False)
    llm, meter = LLM("smollm2", max_num_seqs=64), RunMeter()
    params = SamplingParams(max_tokens=96, temperature=0.0)
    started = time.perf_counter()
    outputs = run_requests(llm, prompts, params, meter, lambda index, output: None)
    facts = run_facts(llm, "smollm2", outputs, time.perf_counter() - started)
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=118, file=nowhere, force_terminal=True)
        panels = list(answer_panels(prompts, outputs))
        for index in SHOWN:
            console.print(panels[index])
        console.print(summary_panel(meter, facts, console.width))
        return console.export_svg(title="blocktable generate smollm2")


def to_png(svg: str, path: Path) -> None:
    """Draw an SVG text into a PNG file with a headless browser."""
    from playwright.sync_api import sync_playwright

    chromium = os.environ.get("CHROMIUM", "/usr/bin/chromium")
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 900}, device_scale_factor=1)
        page.set_content(f"<body style='margin:0;background:#fff'>{svg}</body>")
        page.locator("svg").first.screenshot(path=str(path))
        browser.close()


if __name__ == "__main__":
    to_png(record(), HERE / "images" / "generate.png")
