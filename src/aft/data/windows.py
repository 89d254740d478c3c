"""Windows of a token array, each with the tokens that follow its own: what a language model trains on."""

import numpy as np
import torch
from torch.utils.data import Dataset

from aft.data.errors import DataError


class ByteWindows(Dataset[dict[str, torch.Tensor]]):
    """Item i is `{"input_ids": [T], "shift_labels": [T]}`, int64: tokens from `i * stride` and those after.

    Args:
        tokens: uint8 `[n]`, n > T; it may be a memory map, of which each item reads T + 1 bytes.
        context: T.
        stride: distance between the starts of neighbouring windows; 1 makes every crop of the text an item.
    """

    def __init__(self, tokens: np.ndarray, context: int, stride: int = 1) -> None:
        if len(tokens) < context + 1:
            raise DataError(f"{len(tokens):,} bytes; a context of {context:,} needs at least {context + 1:,}")
        self.tokens = tokens
        self.context = context
        self.stride = stride

    def __len__(self) -> int:
        return (len(self.tokens) - self.context - 1) // self.stride + 1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.stride
        # astype copies, which torch asks for: a memory map is read-only.
        window = torch.from_numpy(self.tokens[start : start + self.context + 1].astype(np.int64))
        return {"input_ids": window[:-1], "shift_labels": window[1:]}
