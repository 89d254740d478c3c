"""What training says while it runs: rows of metrics.jsonl and a progress bar."""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from aft.training.errors import RunError
from aft.training.rundir import append_row
from aft.training.scores import Measure, Score


@dataclass(frozen=True)
class Speed:
    """What the speed of training is counted in.

    Attributes:
        counted: `bytes` or `images`.
        a_step: how many of them a step takes.
        shown: how the bar writes a number of them a second.
    """

    counted: str
    a_step: int
    shown: Callable[[float], str]


class Stopwatch:
    """Seconds since the start of a run, and the speed of its steps without the pauses between them.

    Args:
        earlier: seconds that the run took before it was interrupted.
    """

    def __init__(self, earlier: float = 0.0, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started = clock() - earlier
        self._lap_started = clock()
        self._paused = 0.0

    def seconds(self) -> float:
        """Seconds since the start, pauses and those before an interruption included."""
        return self._clock() - self._started

    def lap(self) -> float:
        """Seconds since the last lap, pauses not counted."""
        now = self._clock()
        length = now - self._lap_started - self._paused
        self._lap_started, self._paused = now, 0.0
        return length

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Time that does not count towards the lap: validation and saving."""
        began = self._clock()
        try:
            yield
        finally:
            self._paused += self._clock() - began


class Reporter(TrainerCallback):
    """Writes a row and moves the bar whenever the Trainer logs; silent in all processes but the first.

    Args:
        measure: what the model is measured by.
        first: whether this process is the one that reports.
    """

    def __init__(
        self, run: Path, measure: Measure, speed: Speed, stopwatch: Stopwatch, *, first: bool
    ) -> None:
        self.run = run
        self.stopwatch = stopwatch
        self._measure = measure
        self._speed = speed
        self._first = first
        self._last_step = 0
        self._bar: tqdm[Any] | None = None
        self._shown: dict[str, str] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._last_step = state.global_step
        self.stopwatch.lap()
        if self._first:
            # A log file gets a line now and then, where a terminal sees the bar move.
            pace = 0.1 if sys.stderr.isatty() else 10.0
            self._bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                unit="step",
                mininterval=pace,
                dynamic_ncols=True,
            )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._bar is not None:
            self._bar.update()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is None or "loss" not in logs:  # the Trainer's own summary at the end
            return
        counted = (state.global_step - self._last_step) * self._speed.a_step
        speed = counted / max(self.stopwatch.lap(), 1e-9)
        self._last_step = state.global_step
        loss = logs["loss"]
        _check_finite(loss, state.global_step)
        per_nat = self._measure.per_nat
        main = {} if per_nat is None else {self._measure.name: loss * per_nat}
        self._write(
            step=state.global_step,
            split="train",
            loss=loss,
            **main,
            lr=logs["learning_rate"],
            grad_norm=logs.get("grad_norm"),
            **{f"{self._speed.counted}_per_second": speed},
        )
        shown = {name: f"{value:.3f}" for name, value in main.items()}
        self._show(loss=f"{loss:.3f}", **shown, speed=self._speed.shown(speed))

    def validation(self, step: int, part: str, result: Score, *, final: bool) -> None:
        """Report the score of a held-out part, or of some of it."""
        _check_finite(result.loss, step)
        self._write(step=step, split=part, **result.row(), **{"final": final} if final else {})
        self._show(**{f"val_{result.measure.name}": f"{result.main:.3f}"})

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _write(self, **row: Any) -> None:
        if self._first:
            append_row(self.run, row | {"seconds": round(self.stopwatch.seconds(), 3)})

    def _show(self, **values: str) -> None:
        self._shown |= values
        if self._bar is not None:
            self._bar.set_postfix(self._shown, refresh=False)


def _check_finite(loss: float, step: int) -> None:
    if not math.isfinite(loss):
        raise RunError(
            f"the loss is {loss} at step {step:,}: training diverged; a lower learning rate may help"
        )
