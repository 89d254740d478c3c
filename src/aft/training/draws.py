"""The order in which images are taken for training, and the chance in what is done to them.

Both follow from the seed and from an image's place in the whole of training. So a run that goes on after a
stop draws what it would have drawn, and it does not matter how many processes or workers share the work.
"""

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch.utils.data import Dataset

Batch = dict[str, torch.Tensor]


class Order:
    """Epochs, each a permutation of all images, one after the other, without a gap where a batch ends.

    With `repeats` > 1 an epoch still takes as many, but each in that many copies, so that only the first
    part of the permutation is seen: repeated augmentation, as in DeiT. Copies stand apart in their batch, for
    MixUp mixes neighbours, and processes share a batch by its parts.

    Args:
        images: how many there are.
        batch_size: images a step, over all processes.
    """

    def __init__(self, images: int, batch_size: int, repeats: int, seed: int) -> None:
        self._images = images
        self._batch_size = batch_size
        self._repeats = repeats
        self._seed = seed
        self._epochs: dict[int, np.ndarray] = {}
        places = np.arange(batch_size)
        self._place_in_batch = np.concatenate([places[copy::repeats] for copy in range(repeats)])

    def image(self, draw: int) -> int:
        """The image that is drawn at this place of training."""
        step, place = divmod(draw, self._batch_size)
        epoch, place = divmod(step * self._batch_size + int(self._place_in_batch[place]), self._images)
        return int(self._permutation(epoch)[place // self._repeats])

    def _permutation(self, epoch: int) -> np.ndarray:
        if epoch not in self._epochs:
            earlier = {epoch - 1: self._epochs[epoch - 1]} if epoch - 1 in self._epochs else {}
            order = np.random.default_rng([self._seed, epoch]).permutation(self._images)
            self._epochs = earlier | {epoch: order}
        return self._epochs[epoch]


class Draws(Dataset[Batch]):
    """Images by their place in training. A list of places is a batch, which is made as a whole.

    Args:
        count: images of all steps together.
        make_batch: a batch of the images of these numbers; its chance comes from torch's generator.
    """

    def __init__(self, order: Order, count: int, make_batch: Callable[[list[int]], Batch], seed: int) -> None:
        self._order = order
        self._count = count
        self._make_batch = make_batch
        self._seed = seed

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])

    def __getitems__(self, draws: list[int]) -> Batch:
        """What torch's DataLoader calls for a batch."""
        with _chance(self._seed, draws[0]):
            return self._make_batch([self._order.image(draw) for draw in draws])


def whole_batch(batch: Batch) -> Batch:
    """The collator for `Draws`, whose batches are already whole."""
    return batch


@contextlib.contextmanager
def _chance(seed: int, draw: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        # The CPU's generator alone: torch.manual_seed would reset that of the accelerator, too.
        torch.default_generator.manual_seed((seed << 32) + draw)
        yield
