"""Transformers' Auto classes know AFT as soon as `aft` is imported, before or after Transformers itself.

Neither is loaded for that. Transformers finds configurations and tokenizers by name, in a module
``transformers.models.<model_type>``: `announce` adds ours to its tables of names when it makes them, and
answers for those modules with `aft.models`, whose import registers all the rest. So importing Transformers
costs what it did, and the models are loaded when the first configuration of theirs is read.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_NAMES = {
    "transformers.models.auto.configuration_auto": (
        "CONFIG_MAPPING_NAMES",
        {"aft": "AFTConfig", "aft_image": "AFTImageConfig"},
    ),
    "transformers.models.auto.tokenization_auto": ("TOKENIZER_MAPPING_NAMES", {"aft": "AFTTokenizer"}),
}
_ALIASES = ("transformers.models.aft", "transformers.models.aft_image")


def announce() -> None:
    """Make the Auto classes know AFT, now or when they are imported; to announce twice changes nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for module in _NAMES:
        if sys.modules.get(module) is not None:
            _add_names(importlib.import_module(module))  # waits if another thread is still importing it


class _Finder(MetaPathFinder):
    """Finds the aliases, and the modules with tables so that names are added once those are filled."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _ALIASES:
            return ModuleSpec(fullname, _Alias())
        if fullname not in _NAMES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            loader = spec.loader

            def exec_module(module: ModuleType) -> None:
                type(loader).exec_module(loader, module)
                _add_names(module)

            # On the instance: it stays the loader that tracebacks and `inspect` know.
            vars(loader)["exec_module"] = exec_module
        return spec


class _Alias(Loader):
    """`aft.models` under another name."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module("aft.models")


def _add_names(module: ModuleType) -> None:
    # A Transformers without such a table is left as it is: there, `import aft.models` registers what it can.
    table, names = _NAMES[module.__name__]
    for model_type, name in names.items():
        getattr(module, table, {}).setdefault(model_type, name)
