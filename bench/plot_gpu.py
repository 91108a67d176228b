"""Draw docs/images/gpu_attention.png from bench/results: achieved bandwidth over batch and context.

    python bench/plot_gpu.py
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

READ_CEILING = 4.50  # TB/s, a plain read kernel on the same device
ROOT = Path(__file__).resolve().parent


def main() -> None:
    """Decode cases as bars of TB/s, ours beside contiguous SDPA; shared prefixes as times."""
    record = json.loads((ROOT / "results" / "gpu_attention.json").read_text())
    decode = [row for row in record["rows"] if row["case"].startswith("B") and " shared" not in
              row["case"]]  # fmt: skip
    shared = [row for row in record["rows"] if " shared" in row["case"]]
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(13, 4.8), width_ratios=[3, 1], layout="constrained"
    )
    names = [row["case"].replace(", 32/8", "") for row in decode]
    for at, (name, colour) in enumerate((("ours", "#1f6feb"), ("contiguous SDPA", "#9aa4b2"))):
        heights = [row.get(f"{name} rate", 0) for row in decode]
        places = [i + (at - 0.5) * 0.38 for i in range(len(decode))]
        left.bar(places, heights, 0.36, label=name + (", paged" if at == 0 else ""), color=colour)
    left.axhline(READ_CEILING, color="black", linewidth=0.8, linestyle="--")
    left.text(-0.4, READ_CEILING + 0.04, "plain read kernel", fontsize=8)
    left.set_xticks(range(len(decode)), names, rotation=25, ha="right", fontsize=8)
    left.set_ylabel("TB/s of keys and values")
    left.legend(loc="lower left", fontsize=8)
    left.set_title(f"Decode attention, bfloat16, {record['device']}, {record['date']}", fontsize=10)
    for at, (name, colour) in enumerate((("ours", "#1f6feb"), ("ours, not sharing", "#9aa4b2"))):
        places = [i + (at - 0.5) * 0.38 for i in range(len(shared))]
        right.bar(places, [row[name] for row in shared], 0.36, color=colour,
                  label="sharing found" if at == 0 else "sharing off")  # fmt: skip
    labels = [row["case"].replace(": ", "\n").replace(" shared", "\nshared") for row in shared]
    right.set_xticks(range(len(shared)), labels, fontsize=8)
    right.set_ylabel("microseconds")
    right.legend(fontsize=8)
    right.set_title("Behind a shared prefix", fontsize=10)
    figure.savefig(ROOT.parent / "docs" / "images" / "gpu_attention.png", dpi=110)


if __name__ == "__main__":
    main()
