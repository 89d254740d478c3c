"""The Attention Free Transformer (arXiv 2105.14103): operations, layers and models.

Names are loaded when first used, so that importing the package costs nothing: ``aft.AFTFull`` needs torch,
``aft.AFTForCausalLM`` the extra ``models``. Transformers' Auto classes and pipelines know the models from
then on, whichever of the two is imported first.
"""

from importlib import import_module, metadata
from typing import Any

from aft.auto_classes import announce

__version__ = metadata.version("attention-free")

_HOMES = {
    "aft.ops": (
        "AFTState",
        "aft_conv",
        "aft_conv_step",
        "aft_full",
        "aft_full_step",
        "aft_local",
        "aft_local_step",
        "aft_simple",
        "aft_simple_step",
        "available_impls",
        "combine",
    ),
    "aft.layers": ("AFTConv1d", "AFTConv2d", "AFTFull", "AFTLocal", "AFTSimple"),
    "aft.integrations.convert": ("convert",),
    "aft.models": (
        "AFTCache",
        "AFTConfig",
        "AFTForCausalLM",
        "AFTForImageClassification",
        "AFTImageConfig",
        "AFTImageModel",
        "AFTModel",
        "AFTTokenizer",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted([*_HOME_OF, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(import_module(_HOME_OF[name]), name)
    if f"aft.{name}" in _HOMES:
        return import_module(f"aft.{name}")
    raise AttributeError(f"module 'aft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])


announce()
