"""Recipes, the Trainer that follows them, run directories, exact scores and sampling.

Nothing is imported here: `aft.training.recipes` answers `aft --help` and must not wait for torch.
"""
