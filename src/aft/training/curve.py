"""The learning curve as a picture."""

import io
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aft.training.scores import Measure

_SHORT = 20  # rows of a run all of which are shown whole

Rows = Sequence[dict[str, Any]]


def draw_curve(rows: Rows, title: str, measure: Measure) -> bytes:
    """A PNG of the measure's main figure against steps, from rows of metrics.jsonl.

    Where training is not measured by that figure, a second panel has the loss.
    """
    # Without pyplot, which would pick a window system and keep the figure alive.
    with_loss = measure.per_nat is None
    figure = Figure(figsize=(7, 7 if with_loss else 4.5), layout="constrained")
    panels = figure.subplots(1 + with_loss, sharex=True, squeeze=False)[:, 0]
    _draw(panels[0], rows, measure, measure.name, measure.axis)
    values = [row[measure.name] for row in rows if measure.name in row]
    if measure.falls and len(values) >= _SHORT:
        # The first steps stand several times higher than all that follows and would flatten the rest.
        panels[0].set_ylim(min(values) - 0.15, min(max(values), min(values) * 2.2) + 0.15)
    if with_loss:
        _draw(panels[1], rows, measure, "loss", "loss in nats")
    panels[0].set_title(title)
    panels[-1].set_xlabel("step")
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=150)
    return image.getvalue()


def _draw(axes: Axes, rows: Rows, measure: Measure, name: str, axis: str) -> None:
    """The figure `name` of all rows that have it."""
    rows = [row for row in rows if name in row]
    training = [row for row in rows if row["split"] == "train"]
    final = [row for row in rows if row.get("final")]
    validation = [row for row in rows if row["split"] != "train" and row not in final]
    counted = measure.counted.replace("_", "-")

    def points(chosen: Rows) -> tuple[list[int], list[float]]:
        return [row["step"] for row in chosen], [row[name] for row in chosen]

    if training:
        axes.plot(*points(training), lw=0.8, alpha=0.6, color="tab:blue", label="training")
    if validation:
        label = f"{validation[-1]['split']}, {validation[-1][measure.counted]:,} {counted}"
        axes.plot(*points(validation), "o-", ms=3.5, lw=1.6, color="tab:orange", label=label)
    for row in final:
        label = f"{row[name]:.3f} over all {row[measure.counted]:,} held-out {counted}"
        axes.plot(*points([row]), "D", ms=6, color="tab:red", label=label)
    if rows:
        axes.legend(frameon=False)
    axes.set_ylabel(axis)
    axes.grid(alpha=0.25)
