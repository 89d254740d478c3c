"""Learned positions of one grid taken to another: how a model goes from one image size to the next."""

import torch
import torch.nn.functional as F
from torch import Tensor

from aft.layers.biased import AFTFull, AFTLocal

Grid = tuple[int, int]


def resample_positions(table: Tensor, old: Grid, new: Grid, prefix: int = 0) -> Tensor:
    """Rows for the cells of another grid: [prefix + Y X, C] to [prefix + Y' X', C].

    Bicubic, with antialiasing where the grid shrinks: what timm does with the position embedding of a ViT.
    The first ``prefix`` rows (a class token's) stay as they are.
    """
    if old == new:
        return table
    cells = table[prefix:].float().T.unflatten(1, old)
    cells = F.interpolate(cells[None], size=new, mode="bicubic", antialias=True)[0]
    return torch.cat([table[:prefix], cells.flatten(1).T.to(table.dtype)])


def resample_position_bias(layer: AFTFull, old: Grid, new: Grid, prefix: int = 0) -> dict[str, Tensor]:
    """The position bias of a layer over another grid, by the names of the layer's parameters.

    A table w is resampled along both of its sides by `resample_positions`. That is linear, so that for a pair
    (u, v) it is the same as resampling u and v.

    Raises:
        ValueError: AFT-local, whose window counts distances in the flattened sequence: in a grid of another
            width the same distance leads to another cell.
    """
    if isinstance(layer, AFTLocal):
        raise ValueError(
            "AFTLocal: its window is over the flattened sequence and cannot be taken from a grid of "
            f"{old[0]} x {old[1]} to one of {new[0]} x {new[1]}"
        )
    if layer.position_bias is None:
        pair = {"position_bias_u": layer.position_bias_u, "position_bias_v": layer.position_bias_v}
        return {name: resample_positions(side, old, new, prefix) for name, side in pair.items()}
    rows = resample_positions(layer.position_bias, old, new, prefix)
    return {"position_bias": resample_positions(rows.T, old, new, prefix).T}
