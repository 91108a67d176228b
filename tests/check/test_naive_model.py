"""The naive model itself, against answers recorded from another implementation where present."""

from __future__ import annotations

import json
from pathlib import Path

from naive_model import run_naive


def test_naive_model_equals_the_recorded_answers(shared_dir: Path) -> None:
    scripts = sorted((shared_dir / "oracle").glob("*script_*.jsonl"))
    assert len(scripts) == 40
    for path in scripts:
        script = [json.loads(line) for line in path.open()]
        answers = path.with_name(path.name.replace("script", "answer"))
        assert run_naive(script) == [json.loads(line) for line in answers.open()], path.name
