"""The learning curve as a picture."""

import io
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from aft.training.scores import Measure


def draw_curve(rows: Sequence[dict[str, Any]], title: str, measure: Measure) -> bytes:
    """A PNG of the measure's main figure against steps, from rows of metrics.jsonl."""
    # Without pyplot, which would pick a window system and keep the figure alive.
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    rows = [row for row in rows if measure.name in row]
    training = [row for row in rows if row["split"] == "train"]
    final = [row for row in rows if row.get("final")]
    validation = [row for row in rows if row["split"] != "train" and row not in final]
    counted = measure.counted.replace("_", "-")

    def points(chosen: Sequence[dict[str, Any]]) -> tuple[list[int], list[float]]:
        return [row["step"] for row in chosen], [row[measure.name] for row in chosen]

    if training:
        axes.plot(*points(training), lw=0.8, alpha=0.6, color="tab:blue", label="training")
    if validation:
        label = f"{validation[-1]['split']}, {validation[-1][measure.counted]:,} {counted}"
        axes.plot(*points(validation), "o-", ms=3.5, lw=1.6, color="tab:orange", label=label)
    for row in final:
        label = f"{row[measure.name]:.3f} over all {row[measure.counted]:,} held-out {counted}"
        axes.plot(*points([row]), "D", ms=6, color="tab:red", label=label)
    if rows and measure.falls:
        # The first steps stand several times higher than all that follows and would flatten the rest.
        lowest, highest = min(points(rows)[1]), max(points(rows)[1])
        axes.set_ylim(lowest - 0.15, min(highest, lowest * 2.2) + 0.15)
    if rows:
        axes.legend(frameon=False)
    axes.set(title=title, xlabel="step", ylabel=measure.axis)
    axes.grid(alpha=0.25)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=150)
    return image.getvalue()
