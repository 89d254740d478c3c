"""What training needs to know of a kind of model: its data, its shape, and how it is scored.

A module a kind, each imported only when a recipe or a model of that kind comes along: bytes need no
torchvision.
"""

from importlib import import_module

from aft.training.errors import RunError
from aft.training.recipes import Recipe
from aft.training.tasks.base import Evaluation, EvaluationRequest, Task

__all__ = ["Evaluation", "EvaluationRequest", "Task", "open_task", "task_type"]

_HOMES = {"bytes": "byte_task", "pixels": "pixel_task", "classes": "class_task"}


def task_type(kind: str) -> type[Task]:
    """The task that recipes of a kind are followed by."""
    return import_module(f"{__name__}.{_HOMES[kind]}").TASK


def open_task(recipe: Recipe, data: str | None, name: str) -> Task:
    """The task of a recipe with its data opened: `data`, or else what the recipe has by default.

    Raises:
        RunError: the recipe has no default data.
        DataError: the data cannot be used.
    """
    if data is None and recipe.default_data == "none":
        raise RunError(f"recipe {name} has no default data; give it some with --data")
    return task_type(recipe.kind)(recipe, data)
