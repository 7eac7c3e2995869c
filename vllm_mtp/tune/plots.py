"""A run as a picture: loss and acceptance by draft step, over updates."""

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def draw(journal: Path, output: Path) -> None:
    """Draw what a run has noted.

    Args:
        journal: Of the run, one JSON object a line.
        output: Picture to write; its ending says of which kind.
    """
    lines = journal.read_text(encoding="utf-8").splitlines()
    entries: list[dict[str, Any]] = [json.loads(line) for line in lines]
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    losses = [(each["update"], each["loss"]) for each in entries if "loss" in each]
    if losses:
        left.plot(*zip(*losses, strict=True), linewidth=0.8)
    left.set(xlabel="update", ylabel="loss")
    measured = [each for each in entries if "held_out" in each]
    updates = [each["update"] for each in measured]
    for step in range(len(measured[0]["held_out"]["acceptance"])):
        shares = [each["held_out"]["acceptance"][step] for each in measured]
        right.plot(updates, shares, marker=".", label=f"draft step {step + 1}")
    right.set(xlabel="update", ylabel="acceptance of held-out texts at T=1")
    right.legend(fontsize=7, ncols=2)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(output)
