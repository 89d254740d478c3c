"""What models are measured by: sums over all that was counted, so that the scores of shares add up."""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self


@dataclass(frozen=True)
class Measure:
    """How a kind of score is written down and drawn.

    Attributes:
        name: its main figure, a field in the rows of metrics.jsonl.
        axis: what that figure is, in words.
        counted: what a score counts, a field in its rows.
        falls: whether less is better.
        per_nat: the main figure of training is its loss in nats times this; None: training has none.
    """

    name: str
    axis: str
    counted: str
    falls: bool
    per_nat: float | None


@dataclass(frozen=True)
class Score(ABC):
    """Sums, from which the figures that people read are made.

    Attributes:
        count: what was counted: bytes, sub-pixels or images.
    """

    measure: ClassVar[Measure]
    count: int

    @property
    @abstractmethod
    def loss(self) -> float:
        """Nats for each thing counted."""

    @abstractmethod
    def figures(self) -> dict[str, float]:
        """What a row of metrics.jsonl holds beside the loss."""

    @abstractmethod
    def summary(self) -> str:
        """The figures in a line."""

    @classmethod
    @abstractmethod
    def of_row(cls, row: dict[str, Any]) -> Self:
        """The score that a row of metrics.jsonl holds."""

    @property
    def main(self) -> float:
        """The figure that the measure names."""
        return self.figures()[self.measure.name]

    def row(self) -> dict[str, Any]:
        """The fields of a row of metrics.jsonl."""
        return {"loss": self.loss, **self.figures(), self.measure.counted: self.count}

    def counted(self, which: str = "") -> str:
        """How much was counted, in words: `1,000 validation bytes`."""
        return " ".join(filter(None, (f"{self.count:,}", which, self.measure.counted.replace("_", "-"))))

    def sums(self) -> list[float]:
        """The fields."""
        return list(dataclasses.astuple(self))

    @classmethod
    def of_sums(cls, sums: Sequence[float]) -> Self:
        """The inverse of `sums`, also after a journey through a tensor of floats."""
        kinds: list[Any] = [field.type for field in dataclasses.fields(cls)]
        return cls(*(kind(value) for kind, value in zip(kinds, sums, strict=True)))


@dataclass(frozen=True)
class BitScore(Score):
    """What data cost under a model: `bits` in all, over `count` symbols."""

    bits: float

    @property
    def per_symbol(self) -> float:
        """Bits for each symbol."""
        return self.bits / self.count

    @property
    def loss(self) -> float:
        return self.per_symbol * math.log(2)

    def figures(self) -> dict[str, float]:
        return {self.measure.name: self.per_symbol}

    def summary(self) -> str:
        return f"{self.per_symbol:.4f} {self.measure.axis}"

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> Self:
        count = row[cls.measure.counted]
        return cls(count, row[cls.measure.name] * count)


class ByteScore(BitScore):
    """Bits per byte."""

    measure = Measure("bpc", "bits per byte", "bytes", falls=True, per_nat=1 / math.log(2))

    @property
    def bpc(self) -> float:
        """Bits per byte."""
        return self.per_symbol


class PixelScore(BitScore):
    """Bits per dim: for each sub-pixel."""

    measure = Measure("bpd", "bits per dim", "sub_pixels", falls=True, per_nat=1 / math.log(2))

    @property
    def bpd(self) -> float:
        """Bits per dim."""
        return self.per_symbol


@dataclass(frozen=True)
class ClassScore(Score):
    """How `count` images were classified.

    Attributes:
        nats: the cross-entropy of all images together.
        first: images whose class came first.
        among_five: images whose class was among the five likeliest, or among all where there are fewer.
    """

    nats: float
    first: int
    among_five: int
    measure = Measure("top1", "top-1 accuracy", "images", falls=False, per_nat=None)

    @property
    def top1(self) -> float:
        """Share of the images whose class came first."""
        return self.first / self.count

    @property
    def top5(self) -> float:
        """Share of the images whose class was among the five likeliest."""
        return self.among_five / self.count

    @property
    def loss(self) -> float:
        return self.nats / self.count

    def figures(self) -> dict[str, float]:
        return {"top1": self.top1, "top5": self.top5}

    def summary(self) -> str:
        return f"top-1 {100 * self.top1:.2f} %, top-5 {100 * self.top5:.2f} %, loss {self.loss:.4f}"

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> Self:
        count = row["images"]
        return cls(count, row["loss"] * count, round(row["top1"] * count), round(row["top5"] * count))
