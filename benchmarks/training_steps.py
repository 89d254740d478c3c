"""Training steps of two of the paper's recipes: forward, backward, clipping and AdamW, as in `aft train`."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from aft.models import AFTForCausalLM
from aft.training.recipes import find_recipe
from aft.training.tasks.byte_task import ByteTask
from aft.training.trainer import parameter_groups

PAPER = {"enwik8-local-32": 2.04, "enwik8-transformer": 1.57}  # steps a second, Table 4, 8 V100, batch 128


def stepper(name: str, batch: int, context: int, data: str | None) -> Callable[[], None]:
    """A function that makes one step of a recipe, its batch and context cut to fit."""
    recipe = dataclasses.replace(
        find_recipe(name).recipe, batch_size=batch, context=context, split=(0.9, 0.1)
    )
    task = ByteTask(recipe, data)
    torch.manual_seed(recipe.seed)
    model = AFTForCausalLM(task.new_config()).train()
    optimizer = torch.optim.AdamW(
        parameter_groups(model, recipe.weight_decay),
        lr=recipe.lr,
        betas=(recipe.beta1, recipe.beta2),
        fused=True,
    )
    batches = _batches(task, batch)

    def step() -> None:
        loss = model(**next(batches)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.grad_clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _batches(task: ByteTask, batch: int) -> Iterator[dict[str, Any]]:
    windows = task.train_set(batch)
    while True:
        drawn = task.sampler(windows, 1024 * batch)
        yield from DataLoader(windows, batch_size=batch, sampler=drawn)
