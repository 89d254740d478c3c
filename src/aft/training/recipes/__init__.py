"""Recipes: named, validated training configurations. `--help` reads them, so torch is not imported here."""

import difflib

from aft.training.recipes.base import NamedRecipe, Pace, Recipe, RecipeError
from aft.training.recipes.byte_recipes import BYTE_RECIPES, ByteRecipe
from aft.training.recipes.classifier_recipes import CLASSIFIER_RECIPES, ClassifierRecipe
from aft.training.recipes.pixel_recipes import PIXEL_RECIPES, PixelRecipe

__all__ = [
    "GROUPS",
    "KINDS",
    "RECIPES",
    "ByteRecipe",
    "ClassifierRecipe",
    "NamedRecipe",
    "Pace",
    "PixelRecipe",
    "Recipe",
    "RecipeError",
    "find_recipe",
]

KINDS: dict[str, type[Recipe]] = {
    recipe.kind: recipe for recipe in (ByteRecipe, PixelRecipe, ClassifierRecipe)
}

GROUPS = {
    "language models over bytes": BYTE_RECIPES,
    "autoregressive models of pixels": PIXEL_RECIPES,
    "image classifiers": CLASSIFIER_RECIPES,
}
RECIPES = {entry.name: entry for group in GROUPS.values() for entry in group}


def find_recipe(name: str) -> NamedRecipe:
    """The recipe of that name; a RecipeError that names the nearest ones where there is none."""
    if name in RECIPES:
        return RECIPES[name]
    near = difflib.get_close_matches(name, RECIPES, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else "`aft recipes` lists them"
    raise RecipeError(f"no recipe is called {name!r}; {hint}")
