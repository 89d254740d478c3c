"""What a conversion does with every tensor: the transfer that keeps the record, and the table of it."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ACTIONS = ("copied", "resampled", "new", "dropped")


@dataclass(frozen=True)
class Part:
    """``start`` up to ``stop`` along one dimension of a tensor that holds several projections."""

    start: int
    stop: int
    dim: int = 0

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.narrow(self.dim, self.start, self.stop - self.start)

    def __str__(self) -> str:
        return f"[{':, ' * self.dim}{self.start}:{self.stop}]"


@dataclass(frozen=True)
class Row:
    """What became of a tensor, or of a part of it.

    ``source`` and ``target`` are names in the state dicts of the two models, or None: no such side;
    ``part`` is of the source, None for all. ``shape`` and ``count`` (how many numbers) are those of the
    target, of the source where it is dropped. A tensor of two names counts under the first alone.
    """

    action: str
    source: str | None
    target: str | None
    shape: tuple[int, ...]
    count: int
    part: Part | None = None
    why: str = ""


@dataclass(frozen=True)
class ConversionReport:
    """A row for every tensor of both models; ``str`` of it is the table, layers that are alike in one line.

    ``notes`` tell what is no tensor: settings that have no place in the converted model.
    """

    source: str
    target: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def count(self, action: str) -> int:
        """Parameters "copied", "resampled" or "new" in the result, or "dropped" from the source."""
        if action not in ACTIONS:
            raise ValueError(f"action must be one of {', '.join(ACTIONS)}; got {action!r}")
        return sum(row.count for row in self.rows if row.action == action)

    def __str__(self) -> str:
        alike: dict[tuple[str, str, str, str, str], int] = {}
        for row in self.rows:
            source, target = _any_layer(row.source, row.part), _any_layer(row.target)
            line = (row.action, str(list(row.shape)), source, target, row.why)
            alike[line] = alike.get(line, 0) + 1
        lines = [("", "shape", f"from {self.source}", f"to {self.target}", "")]
        for (action, shape, source, target, why), times in alike.items():
            lines.append((action, shape if times == 1 else f"{times} x {shape}", source, target, why))
        widths = [max(len(line[column]) for line in lines) for column in range(4)]
        table = ["  ".join([*map(str.ljust, line, widths), line[4]]).rstrip() for line in lines]
        totals = ", ".join(f"{action} {self.count(action):,}" for action in ACTIONS)
        return "\n".join([*table, f"parameters: {totals}", *self.notes])


class Transfer:
    """Copies tensors from one model to another and keeps the record; nothing can be forgotten.

    The two may share names: a target that is a deep copy of its source is recorded in the same way.
    """

    def __init__(self, source: nn.Module, target: nn.Module):
        self._models = type(source).__name__, type(target).__name__
        self._source, self._target = source.state_dict(), target.state_dict()
        self._tied = {"source": _shared(source), "target": _shared(target)}
        self._rows: list[Row] = []

    def has(self, source: str) -> bool:
        """Whether the source has a tensor of this name."""
        return source in self._source

    def copy(
        self,
        source: str,
        target: str,
        *,
        part: Part | None = None,
        change: Callable[[Tensor], Tensor] | None = None,
        why: str = "",
    ) -> None:
        """The source tensor (its ``part``, rearranged by ``change``) becomes the target's, bit for bit."""
        self._move("copied", source, target, part, change, why)

    def resample(self, source: str, target: str, change: Callable[[Tensor], Tensor], why: str) -> None:
        """As `copy`, where ``change`` makes other numbers of them."""
        self._move("resampled", source, target, None, change, why)

    def new(self, target: str, why: str = "") -> None:
        """The target tensor stays as it was initialised."""
        tensor = self._target[target]
        self._rows.append(Row("new", None, target, tuple(tensor.shape), tensor.numel(), None, why))

    def drop(self, source: str, *, part: Part | None = None, why: str = "") -> None:
        """The source tensor, or its ``part``, goes nowhere."""
        tensor = self._part(source, part)
        self._rows.append(Row("dropped", source, None, tuple(tensor.shape), tensor.numel(), part, why))

    def same_names(self) -> None:
        """Copies what both have under one name in one shape, unless named before; what is left is new."""
        known = {row.source for row in self._rows} | {row.target for row in self._rows}
        for name, tensor in self._target.items():
            if name in known or name in self._tied["target"]:
                continue
            if name in self._source and self._source[name].shape == tensor.shape:
                self.copy(name, name)
            else:
                self.new(name)

    def report(self, notes: list[str] | None = None) -> ConversionReport:
        """The record, once every tensor has its place in it."""
        rows = list(self._rows)
        for name, first in self._tied["source"].items():
            shape = tuple(self._source[name].shape)
            rows.append(Row("dropped", name, None, shape, 0, None, f"the same tensor as {first}"))
        for name, first in self._tied["target"].items():
            shape = tuple(self._target[name].shape)
            rows.append(Row("copied", None, name, shape, 0, None, f"the same tensor as {first}"))
        left = {
            name: tensor.numel() for name, tensor in self._source.items() if name not in self._tied["source"]
        }
        for row in self._rows:
            if row.source is not None:
                left[row.source] -= self._part(row.source, row.part).numel()
        targets = [row.target for row in rows if row.target is not None]
        forgotten = [name for name, count in left.items() if count] + sorted(set(self._target) - set(targets))
        if forgotten or len(targets) != len(set(targets)):
            raise AssertionError(f"conversion is not accounted for: {forgotten or targets}")
        return ConversionReport(*self._models, tuple(rows), tuple(notes or ()))

    def _part(self, source: str, part: Part | None) -> Tensor:
        return self._source[source] if part is None else part.of(self._source[source])

    @torch.no_grad()
    def _move(
        self,
        action: str,
        source: str,
        target: str,
        part: Part | None,
        change: Callable[[Tensor], Tensor] | None,
        why: str,
    ) -> None:
        values = self._part(source, part)
        values = values if change is None else change(values)
        if values.shape != self._target[target].shape:
            raise AssertionError(
                f"{source} gives {tuple(values.shape)}, {target} is {tuple(self._target[target].shape)}"
            )
        self._target[target].copy_(values)
        self._rows.append(Row(action, source, target, tuple(values.shape), values.numel(), part, why))


def _shared(model: nn.Module) -> dict[str, str]:
    """Names of tensors that go by an earlier name too, and that name."""
    names: dict[int, str] = {}
    shared = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in names:
            shared[name] = names[id(tensor)]
        names.setdefault(id(tensor), name)
    return shared


def _any_layer(name: str | None, part: Part | None = None) -> str:
    return "" if name is None else re.sub(r"\.\d+\.", ".*.", name) + ("" if part is None else str(part))
