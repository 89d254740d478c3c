"""Recipes, the Trainer that follows them, run directories, exact bits per byte and sampling.

Nothing is imported here: `aft.training.recipes` answers `aft --help` and must not wait for torch.
"""
