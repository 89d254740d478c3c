"""The learning curve as a picture."""

import io
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure


def draw_curve(rows: Sequence[dict[str, Any]], title: str) -> bytes:
    """A PNG of bits per byte against steps, from rows of metrics.jsonl."""
    # Without pyplot, which would pick a window system and keep the figure alive.
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    training = [row for row in rows if row["split"] == "train"]
    final = [row for row in rows if row.get("final")]
    validation = [row for row in rows if row["split"] == "validation" and row not in final]

    axes.plot(*_points(training), lw=0.8, alpha=0.6, color="tab:blue", label="training")
    if validation:
        label = f"validation, the first {validation[-1]['bytes']:,} bytes"
        axes.plot(*_points(validation), "o-", ms=3.5, lw=1.6, color="tab:orange", label=label)
    for row in final:
        label = f"{row['bpc']:.3f} over all {row['bytes']:,} held-out bytes"
        axes.plot(*_points([row]), "D", ms=6, color="tab:red", label=label)
    if rows:
        # The first steps stand several times higher than all that follows and would flatten the rest.
        lowest, highest = min(row["bpc"] for row in rows), max(row["bpc"] for row in rows)
        axes.set_ylim(lowest - 0.15, min(highest, lowest * 2.2) + 0.15)
        axes.legend(frameon=False)
    axes.set(title=title, xlabel="step", ylabel="bits per byte")
    axes.grid(alpha=0.25)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=150)
    return image.getvalue()


def _points(rows: Sequence[dict[str, Any]]) -> tuple[list[int], list[float]]:
    return [row["step"] for row in rows], [row["bpc"] for row in rows]
