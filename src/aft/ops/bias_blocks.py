"""Position biases as a source of blocks: read the block a plan asks for, add up its gradient.

A block is [G, count, rows, columns] (G or ``count`` may be 1 and broadcast), where G are groups that do not
share a bias: one for AFT-full, B when each sequence brings its own, the heads of AFT-conv.
"""

from abc import ABC, abstractmethod
from functools import cached_property

import torch
from torch import Tensor

from aft.ops.tiles import Blocks

# A bound in nats on biases that float32 products of low rank give to 1e-6.
SMALL_BIAS = 8.0
# Biases of low rank looked at together for their bounds.
ROWS_BUDGET = 1 << 18


class BlockSource(ABC):
    """A bias that can be read in blocks, and whose gradient is accumulated in blocks."""

    @abstractmethod
    def read(self, blocks: Blocks) -> Tensor:
        """w on these blocks, float32 or wider."""

    @abstractmethod
    def allocate(self, dtype: torch.dtype) -> None:
        """Makes room for the gradient, zeros."""

    @abstractmethod
    def add(self, blocks: Blocks, grad: Tensor) -> None:
        """Adds the gradient [G, count, rows, columns] of these blocks."""

    @abstractmethod
    def gradients(self) -> list[Tensor]:
        """What was added up, for each parameter, in its dtype."""

    @abstractmethod
    def spread(self) -> float:
        """A bound on the distance of two finite biases of a row, in nats."""

    @abstractmethod
    def bounds(self, enough: float) -> tuple[float, float]:
        """Bounds on all finite biases, in nats; they may be loose where they are within ``enough`` of 0."""


def window(table: Tensor, blocks: Blocks) -> Tensor:
    """The blocks of a [G, T, S] table as a view [G, count, rows, columns]."""
    per_group, per_row, per_column = table.stride()
    return table.as_strided(
        (table.shape[0], blocks.count, blocks.rows, blocks.columns),
        (per_group, (per_row + per_column) * blocks.step, per_row, per_column),
        table.storage_offset() + blocks.row * per_row + blocks.column * per_column,
    )


def pieces(x: Tensor, start: int, step: int, length: int, count: int) -> Tensor:
    """Rows start + i * step ... + length of ``x`` [G, L, ...] as a view [G, count, length, ...]."""
    strides = x.stride()
    return x.as_strided(
        (x.shape[0], count, length, *x.shape[2:]),
        (strides[0], strides[1] * step, strides[1], *strides[2:]),
        x.storage_offset() + start * strides[1],
    )


def add_pieces(x: Tensor, start: int, step: int, update: Tensor) -> None:
    """Adds ``update`` [G, count, length, ...] to the rows of ``x`` that `pieces` reads; they may overlap."""
    count, length = update.shape[1:3]
    if length <= step or count == 1:
        pieces(x, start, step, length, count).add_(update)
    else:
        for i in range(count):
            x.narrow(1, start + i * step, length).add_(update[:, i])


def spread(x: Tensor, dim: int) -> float:
    """The largest distance between two finite entries along ``dim``."""
    if x.numel() == 0:
        return 0.0
    x = x.detach()
    low, top = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    hidden = torch.isneginf(x) if torch.isneginf(low).any() else None
    if hidden is not None:
        low = torch.where(hidden, top, x).amin(dim, keepdim=True)
    return float((top - low).nan_to_num(0.0).amax())


def finite_bounds(table: Tensor) -> tuple[float, float]:
    """The smallest and the largest entry of a table [G, T, S] but for -inf, (0, 0) if there is none."""
    if table.numel() == 0:
        return 0.0, 0.0
    low, high = (float(x) for x in table.detach().aminmax())
    if high == -torch.inf:
        return 0.0, 0.0
    if low == -torch.inf:
        low = min(float(x.masked_fill(torch.isneginf(x), high).amin()) for x in table.detach().split(64, 1))
    return low, high


class ZeroBlocks(BlockSource):
    """No bias (AFT-simple)."""

    def __init__(self, like: Tensor):
        self.like = like

    def read(self, blocks: Blocks) -> Tensor:
        return self.like.new_zeros(1, 1, blocks.rows, blocks.columns)

    def allocate(self, dtype: torch.dtype) -> None:
        pass

    def add(self, blocks: Blocks, grad: Tensor) -> None:
        pass

    def gradients(self) -> list[Tensor]:
        return []

    def spread(self) -> float:
        return 0.0

    def bounds(self, enough: float) -> tuple[float, float]:
        return 0.0, 0.0


class DenseBlocks(BlockSource):
    """A table [G, T, S]."""

    def __init__(self, table: Tensor, window_size: int | None):
        self.table, self.window_size = table, window_size

    def read(self, blocks: Blocks) -> Tensor:
        view = window(self.table, blocks)
        return _inside(view.to(torch.promote_types(view.dtype, torch.float32)), blocks, self.window_size)

    def allocate(self, dtype: torch.dtype) -> None:
        self.grad = torch.zeros(self.table.shape, dtype=dtype, device=self.table.device)

    def add(self, blocks: Blocks, grad: Tensor) -> None:
        window(self.grad, blocks).add_(_inside(_sum_to(grad, self.table.shape[0]), blocks, self.window_size))

    def gradients(self) -> list[Tensor]:
        return [self.grad.to(self.table.dtype)]

    def spread(self) -> float:
        return spread(self.table, 2)

    def bounds(self, enough: float) -> tuple[float, float]:
        low, high = self._table_bounds
        return (low, high) if self.window_size is None else (min(low, 0.0), max(high, 0.0))

    @cached_property
    def _table_bounds(self) -> tuple[float, float]:
        return finite_bounds(self.table)


class LowRankBlocks(BlockSource):
    """left [T, R] times right [S, R]; in float64 unless small: a bias of 1e4 has few digits in float32."""

    def __init__(self, left: Tensor, right: Tensor, window_size: int | None):
        self.left, self.right, self.window_size = left[None], right[None], window_size
        narrow = torch.promote_types(left.dtype, torch.float32)
        self.dtype = narrow if self._bound <= SMALL_BIAS else torch.float64

    def _factors(self, blocks: Blocks) -> tuple[Tensor, Tensor]:
        return (
            pieces(self.left, blocks.row, blocks.step, blocks.rows, blocks.count),
            pieces(self.right, blocks.column, blocks.step, blocks.columns, blocks.count),
        )

    def read(self, blocks: Blocks) -> Tensor:
        left, right = self._factors(blocks)
        return _inside(left.to(self.dtype) @ right.to(self.dtype).mT, blocks, self.window_size)

    def allocate(self, dtype: torch.dtype) -> None:
        self.grad_left = torch.zeros(self.left.shape, dtype=dtype, device=self.left.device)
        self.grad_right = torch.zeros(self.right.shape, dtype=dtype, device=self.right.device)

    def add(self, blocks: Blocks, grad: Tensor) -> None:
        grad = _inside(_sum_to(grad, 1), blocks, self.window_size)
        left, right = (x.to(grad.dtype) for x in self._factors(blocks))
        add_pieces(self.grad_left, blocks.row, blocks.step, grad @ right)
        add_pieces(self.grad_right, blocks.column, blocks.step, grad.mT @ left)

    def gradients(self) -> list[Tensor]:
        return [self.grad_left[0].to(self.left.dtype), self.grad_right[0].to(self.right.dtype)]

    def spread(self) -> float:
        return min(2.0 * self._bound, self._seen[2]) if self._bound else 0.0

    def bounds(self, enough: float) -> tuple[float, float]:
        return (-self._bound, self._bound) if self._bound <= enough else self._seen[:2]

    @cached_property
    def _bound(self) -> float:
        """On the size of a bias, by the norms of its factors."""
        if 0 in (self.left.numel(), self.right.numel()):
            return 0.0
        left, right = (x.detach().double().norm(dim=2).amax() for x in (self.left, self.right))
        return float(left * right)

    @cached_property
    def _seen(self) -> tuple[float, float, float]:
        """The smallest and the largest bias, and the largest distance in a row, by a look at each."""
        narrow = torch.promote_types(self.left.dtype, torch.float32)
        left, right = (x[0].detach().to(narrow) for x in (self.left, self.right))
        low, high = left.new_full((), torch.inf), left.new_full((), -torch.inf)
        widest = left.new_zeros(())
        # In the same memory each time: small results between large temporaries would keep the heap in pieces.
        room = left.new_empty(max(1, ROWS_BUDGET // len(right)), len(right))
        for rows in left.split(len(room)):
            here = torch.mm(rows, right.mT, out=room[: len(rows)])
            least, most = here.amin(1), here.amax(1)
            # A NaN is passed on.
            low, high = torch.minimum(least.amin(), low), torch.maximum(most.amax(), high)
            if self.window_size is not None:  # it is 0 outside
                least, most = least.clamp(max=0.0), most.clamp(min=0.0)
            widest = torch.maximum((most - least).amax(), widest)
        return float(low), float(high), float(widest)


class KernelBlocks(BlockSource):
    """A kernel [G, Kh, Kw] that slides over a grid; 0 outside it."""

    def __init__(
        self, kernel: Tensor, query_width: int, key_width: int, anchor: tuple[int, int], one_row: bool
    ):
        self.kernel, self.anchor, self.one_row = kernel, anchor, one_row
        self.query_width, self.key_width = query_width, key_width

    def _cells(self, blocks: Blocks) -> Tensor:
        """[count or 1, rows, columns]: index into the flattened kernel, Kh * Kw for pairs outside it."""
        height, width = self.kernel.shape[1:]
        device = self.kernel.device
        # On a sequence every block along the diagonal looks alike.
        count = 1 if self.one_row else blocks.count
        shift = torch.arange(count, device=device)[:, None] * blocks.step
        query = (blocks.row + shift + torch.arange(blocks.rows, device=device))[:, :, None]
        key = (blocks.column + shift + torch.arange(blocks.columns, device=device))[:, None, :]
        row = key // self.key_width - query // self.query_width + self.anchor[0]
        column = key % self.key_width - query % self.query_width + self.anchor[1]
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        return torch.where(inside, row * width + column, height * width)

    def read(self, blocks: Blocks) -> Tensor:
        flat = self.kernel.flatten(1).to(torch.promote_types(self.kernel.dtype, torch.float32))
        cells = self._cells(blocks)
        padded = torch.nn.functional.pad(flat, (0, 1))
        return padded.index_select(1, cells.flatten()).unflatten(1, cells.shape)

    def allocate(self, dtype: torch.dtype) -> None:
        # One more entry a group, which collects the pairs outside the kernel and is dropped.
        self.padded_grad = torch.zeros(
            self.kernel.shape[0], self.kernel[0].numel() + 1, dtype=dtype, device=self.kernel.device
        )

    def add(self, blocks: Blocks, grad: Tensor) -> None:
        cells = self._cells(blocks)
        grad = grad.sum_to_size(grad.shape[0], *cells.shape)
        groups, size = self.padded_grad.shape
        index = torch.arange(groups, device=cells.device)[:, None] * size + cells.flatten()
        self.padded_grad.view(-1).index_add_(0, index.flatten(), grad.flatten())

    def gradients(self) -> list[Tensor]:
        return [self.padded_grad[:, :-1].unflatten(1, self.kernel.shape[1:]).to(self.kernel.dtype)]

    def spread(self) -> float:
        finite = self.kernel.detach().masked_fill(torch.isinf(self.kernel), 0.0)
        return 2.0 * float(finite.abs().amax())  # the bias outside the kernel is 0

    def bounds(self, enough: float) -> tuple[float, float]:
        low, high = finite_bounds(self.kernel)
        return min(low, 0.0), max(high, 0.0)


class MaskedBlocks(BlockSource):
    """Another source with keys hidden where ``hidden`` [B or 1, T, S] is True; B divides the ``groups``."""

    def __init__(self, source: BlockSource, hidden: Tensor, groups: int):
        self.source, self.hidden, self.groups = source, hidden, groups

    def read(self, blocks: Blocks) -> Tensor:
        hidden = window(self.hidden, blocks)
        if 1 < hidden.shape[0] < self.groups:
            hidden = hidden.repeat_interleave(self.groups // hidden.shape[0], 0)
        return torch.where(hidden, -torch.inf, self.source.read(blocks))

    def allocate(self, dtype: torch.dtype) -> None:
        self.source.allocate(dtype)

    def add(self, blocks: Blocks, grad: Tensor) -> None:
        self.source.add(blocks, grad)

    def gradients(self) -> list[Tensor]:
        return self.source.gradients()

    def spread(self) -> float:
        return self.source.spread()

    def bounds(self, enough: float) -> tuple[float, float]:
        return self.source.bounds(enough)


def _inside(block: Tensor, blocks: Blocks, window_size: int | None) -> Tensor:
    """Zero where |t - s| >= window_size (equation 4)."""
    if window_size is None:
        return block
    query = torch.arange(blocks.rows, device=block.device)[:, None] + blocks.row
    key = torch.arange(blocks.columns, device=block.device) + blocks.column
    return torch.where((query - key).abs() < window_size, block, 0.0)


def _sum_to(grad: Tensor, groups: int) -> Tensor:
    return grad if grad.shape[0] == groups else grad.sum(0, keepdim=True)
