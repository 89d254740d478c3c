"""Bytes of a file, as they stand on disk, turned into tensors.

Names are imported when first used: only `windows` needs torch, the others no more than numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aft.data.alphabet import decode as decode
    from aft.data.alphabet import distinct_bytes as distinct_bytes
    from aft.data.alphabet import encode as encode
    from aft.data.errors import DataError as DataError
    from aft.data.files import open_bytes as open_bytes
    from aft.data.files import standard_library_source as standard_library_source
    from aft.data.splits import split_bytes as split_bytes
    from aft.data.windows import ByteWindows as ByteWindows

_HOMES = {
    "ByteWindows": "windows",
    "DataError": "errors",
    "decode": "alphabet",
    "distinct_bytes": "alphabet",
    "encode": "alphabet",
    "open_bytes": "files",
    "split_bytes": "splits",
    "standard_library_source": "files",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
