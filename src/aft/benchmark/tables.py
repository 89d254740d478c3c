"""Rows as text: aligned columns, Markdown, CSV."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def aligned(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns side by side: the first to the left, the others, which are figures, to the right."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = []
    for line in lines:
        first, *others = (
            cell.ljust(widths[0]) if i == 0 else cell.rjust(widths[i]) for i, cell in enumerate(line)
        )
        text.append("  ".join([first, *others]).rstrip())
    return "\n".join(text)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, columns, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def figure(value: float, digits: int = 3) -> str:
    """A number with so many significant digits, as people write it: no exponent unless it is tiny."""
    if value != value:
        return "nan"
    if value and abs(value) < 1e-3:
        return f"{value:.1e}"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    text = f"{value:.{digits}g}"
    return text if "e" not in text else f"{value:.{digits}f}"
