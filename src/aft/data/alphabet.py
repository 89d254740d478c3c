"""Bytes to tokens and back: without an alphabet a token is a byte, with one token i is byte `alphabet[i]`."""

from collections.abc import Sequence

import numpy as np

from aft.data.errors import DataError


def distinct_bytes(data: np.ndarray) -> list[int]:
    """The values that occur in `data`, uint8 `[n]`, in rising order: an ASCII text's characters."""
    return np.flatnonzero(np.bincount(data, minlength=256)).tolist()


def encode(data: np.ndarray, alphabet: Sequence[int] | None, source: str) -> np.ndarray:
    """Tokens of `data`, both uint8 `[n]`; `data` itself where there is no alphabet.

    Raises:
        DataError: a byte that the alphabet lacks; the message names `source`, the byte and where it stands.
    """
    if alphabet is None:
        return data
    token_of = np.full(256, -1, dtype=np.int16)
    token_of[list(alphabet)] = np.arange(len(alphabet))
    tokens = token_of[data]
    unknown = np.flatnonzero(tokens < 0)
    if unknown.size:
        where = int(unknown[0])
        raise DataError(
            f"{source}: byte 0x{int(data[where]):02x} at offset {where:,} "
            f"is not one of the {len(alphabet)} bytes that the model knows"
        )
    return tokens.astype(np.uint8)


def decode(tokens: Sequence[int], alphabet: Sequence[int] | None) -> bytes:
    """The bytes that tokens stand for."""
    return bytes(tokens) if alphabet is None else bytes(alphabet[token] for token in tokens)
