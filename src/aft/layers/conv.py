"""AFT-conv as layers, over sequences and over grids: a kernel of position biases for each head."""

from typing import Any

import torch
from torch import Tensor, nn

from aft.layers.base import AFTLayer, check_positive
from aft.ops.functional import conv_problem
from aft.ops.spec import Problem, without_autocast
from aft.ops.state import AFTState
from aft.ops.streaming import aft_conv_step


class _AFTConv(AFTLayer):
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        kernel_size: int | tuple[int, int],
        *,
        reparameterize: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        super().__init__(embed_dim, num_heads, num_heads, device=device, dtype=dtype, **options)
        sizes = tuple(kernel_size) if isinstance(kernel_size, tuple | list) else (kernel_size,) * self._space
        name = type(self).__name__
        if len(sizes) != self._space:
            raise ValueError(f"{name}: kernel_size must be {self._space} ints, got {kernel_size}")
        if self._space == 2 and not self.batch_first:
            raise ValueError(f"{name}: inputs are [B, Y, X, D]; batch_first=False has no meaning for a grid")
        for size in sizes:
            check_positive(name, "kernel_size", size)
        self.kernel_size, self.reparameterize = sizes, reparameterize
        self.kernel = nn.Parameter(torch.empty(num_heads, *sizes, device=device, dtype=dtype))
        if reparameterize:
            self.kernel_gain = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
            self.kernel_shift = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.reset_kernel()

    def reset_kernel(self) -> None:
        """The kernel, its gain and its shift alone at their initial values."""
        if self.reparameterize:
            nn.init.normal_(self.kernel)
            nn.init.zeros_(self.kernel_gain)
            nn.init.zeros_(self.kernel_shift)
        else:
            nn.init.zeros_(self.kernel)

    def position_kernel(self) -> Tensor:
        """w, the kernel that the operation uses: [num_heads, *kernel_size], equation 8."""
        if not self.reparameterize:
            return self.kernel
        with without_autocast(self.kernel):
            flat = self.kernel.flatten(1).double()
            size = flat.detach().abs().amax(1, keepdim=True)
            flat = flat / size.masked_fill(size == 0, 1.0)  # squares that neither vanish nor overflow
            centred = flat - flat.mean(1, keepdim=True)
            # A constant kernel (a single cell, say) has rounding but no shape to scale: its normal form is 0.
            constant = centred.detach().abs().amax(1, keepdim=True) < 1e-12
            variance = centred.square().mean(1, keepdim=True).masked_fill(constant, 1.0)
            normal = centred.masked_fill(constant, 0.0) * torch.rsqrt(variance)
            kernel = self.kernel_gain[:, None] * normal + self.kernel_shift[:, None]
            return kernel.to(torch.promote_types(self.kernel.dtype, torch.float32)).view_as(self.kernel)

    def _problem(self, q, k, v, causal, key_padding_mask, attn_mask) -> Problem:
        return conv_problem(q, k, v, self.position_kernel(), causal, key_padding_mask, attn_mask)

    def _stream(self, q, k, v, state, **options):
        options |= {"query_gate": self.query_gate, "impl": self.impl}
        return aft_conv_step(q, k, v, self.position_kernel(), state, **options)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, num_heads={self.num_heads}, kernel_size={self.kernel_size}"


class AFTConv1d(_AFTConv):
    r"""AFT-conv over a sequence (equation 6): a position bias for each distance, a kernel for each head.

    Symbol        attribute                        shape
    W^Q, W^V      q_proj, v_proj                   [embed_dim, embed_dim]
    W^K           k_proj                           [num_heads, embed_dim], one channel a head
    w (eq. 8)     kernel                           [num_heads, kernel_size]
    gamma, beta   kernel_gain, kernel_shift        [num_heads]

    The bias is gamma (w - mean w) / std w + beta inside the kernel and 0 outside it: every position is seen.
    Where the kernel lies, causal and not, says `aft.ops.aft_conv`. Any length goes in.

    Initial values: gamma = beta = 0 as in the paper, so that the layer starts as AFT-simple. It leaves open w
    (N(0, 1) here), the epsilon beside std (none here; a constant kernel counts as 0), std itself (over all
    cells, biased) and the projections (see `reset_parameters`). ``reparameterize=False`` learns w itself,
    from zeros. Other arguments as `AFTFull`.

    Time O(T kernel_size D) a call, memory O((T + S) D).
    """

    _space = 1


class AFTConv2d(_AFTConv):
    r"""AFT-conv over a grid: `AFTConv1d` with kernels [num_heads, Ky, Kx] and inputs [B, Y, X, embed_dim].

    ``kernel_size`` is an int or a pair. Any grid goes in, also one smaller than the kernel, and another one
    than the layer was trained on. ``key_padding_mask`` is [B, Y, X], ``attn_mask`` is over Y X positions.

    Time O(Y X Ky Kx D) a call, memory O(Y X D).
    """

    _space = 2

    def step(  # pyrefly: ignore[bad-override] (a grid has a width)
        self,
        query: Tensor,
        state: AFTState | None = None,
        key_padding_mask: Tensor | None = None,
        lengths: Tensor | None = None,
        *,
        width: int,
    ) -> tuple[Tensor, AFTState]:
        """The layer over n more cells of its grids, in raster order.

        Args:
            query: [B, n, embed_dim], the cells row after row.
            width: of the grids, in cells.

        Other arguments, results and errors as for `AFTConv1d.step`.
        """
        return self._step(query, state, key_padding_mask, lengths, width=width)
