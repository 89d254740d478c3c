"""Ctrl-C and SIGTERM ask for a stop; the step at hand is finished first."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class StopRequest:
    """Whether somebody asked to stop."""

    def __init__(self) -> None:
        self.made = False


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """In the block the first SIGINT or SIGTERM makes the request; the second does what it does outside."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # Python delivers signals to the main thread alone
        return
    earlier = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in earlier.items():
            signal.signal(number, handler)

    def ask(number: int, frame: FrameType | None) -> None:
        request.made = True
        restore()

    for number in earlier:
        signal.signal(number, ask)
    try:
        yield request
    finally:
        restore()


class StopWhenAsked(TrainerCallback):
    """Ends training after the step in which the request came, with a row of metrics and a checkpoint.

    Several processes have to stop at the same step: they compare notes when a row of metrics is due, since to
    do so at every step would cost each of them a wait.
    """

    def __init__(self, request: StopRequest) -> None:
        self.request = request

    # The Trainer takes the control that comes back; its base class is annotated as if it took none.
    def on_step_end(  # pyrefly: ignore[bad-override]
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        if self._asked(args, state):
            control.should_training_stop = control.should_save = control.should_log = True
        return control

    def _asked(self, args: TrainingArguments, state: TrainerState) -> bool:
        if args.world_size == 1:
            return self.request.made
        if state.global_step % args.logging_steps != 0:
            return False
        asked = torch.tensor(int(self.request.made), device=args.device)
        torch.distributed.all_reduce(asked, op=torch.distributed.ReduceOp.MAX)
        return bool(asked)
