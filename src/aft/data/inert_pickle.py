"""Pickles of plain values and uint8 arrays, read without running anything that they name.

A pickle may call any function that its reader lets it find. Here it finds stand-ins of ours for the few names
that stand around an array of NumPy's; they note what they are given, and any other name is refused.
"""

import io
import math
import pickle

import numpy as np

from aft.data.errors import DataError


def load_inert(content: bytes, name: str) -> object:
    """The value pickled in `content`; keys of its dictionary as str, arrays (uint8 only) as NumPy's.

    Args:
        name: what an error calls it.

    Raises:
        DataError: damaged, or it asks for something else than plain values and uint8 arrays.
    """
    try:
        found = _Unpickler(io.BytesIO(content), encoding="bytes").load()
        if not isinstance(found, dict):
            return found
        return {
            _text(key): _array(value) if isinstance(value, _Array) else value for key, value in found.items()
        }
    except DataError as error:
        raise DataError(f"{name} {error}") from None
    except Exception as error:  # damaged bytes make the unpickler raise errors of many kinds
        reason = str(error).split("\n")[0] or type(error).__name__
        raise DataError(f"{name} is damaged: {reason}") from error


class _Noted:
    """Stands in for something callable: keeps its arguments, and the state that a pickle sets afterwards."""

    __slots__ = ("arguments", "state")

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Array(_Noted):
    """`numpy.core.multiarray._reconstruct`; its state is (version, shape, dtype, Fortran order, bytes)."""

    __slots__ = ()


class _ArrayType(_Noted):
    """`numpy.ndarray`, which is only ever an argument."""

    __slots__ = ()


class _Dtype(_Noted):
    """`numpy.dtype`; its first argument is the type's code."""

    __slots__ = ()


class _Latin1(_Noted):
    """`_codecs.encode`, by which Python 3 writes bytes into an old protocol."""

    __slots__ = ()

    def content(self) -> bytes:
        text, encoding = self.arguments
        if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
            raise DataError("holds bytes in an unknown encoding")
        return text.encode("latin-1")


_STAND_INS = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _ArrayType,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _Latin1,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> type[_Noted]:
        stand_in = _STAND_INS.get((module_name, global_name))
        if stand_in is None:
            asked = f"{module_name}.{global_name}"
            raise DataError(f"asks for {asked!r}, which no data needs; it is refused")
        return stand_in


def _text(key: object) -> object:
    return key.decode("latin-1") if isinstance(key, bytes) else key


def _plain(value: object) -> object:
    return _array(value) if isinstance(value, _Array) else value


def _array(noted: _Array) -> np.ndarray:
    """The array that NumPy would have built."""
    if not (isinstance(noted.state, tuple) and len(noted.state) == 5):
        raise DataError("holds an array of an unknown form")
    _, shape, dtype, fortran, content = noted.state
    code = dtype.arguments[0] if isinstance(dtype, _Dtype) and dtype.arguments else None
    if code not in (b"u1", "u1"):
        raise DataError(f"holds an array of type {code!r}; u1 (uint8) was expected")
    if isinstance(content, _Latin1):
        content = content.content()
    sizes_known = isinstance(shape, tuple) and all(type(size) is int and size >= 0 for size in shape)
    if not (sizes_known and isinstance(content, bytes) and math.prod(shape) == len(content)):
        raise DataError("holds an array whose shape does not fit its bytes")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape, order="F" if fortran else "C")
