"""How well images are classified: exact counts over all of them."""

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from aft.data.image_parts import ImageSet
from aft.models import AFTForImageClassification
from aft.training.preprocessing import Preprocessing
from aft.training.scores import ClassScore

_PIXELS_A_BATCH = 64 * 224 * 224


class _Inputs(Dataset[Tensor]):
    """Images prepared for a classifier, a batch at a time."""

    def __init__(self, images: ImageSet, preprocessing: Preprocessing) -> None:
        self._images = images
        self._preprocessing = preprocessing

    def __getitem__(self, index: np.ndarray) -> Tensor:
        return self._preprocessing([self._images.read(int(image)) for image in index])


@torch.no_grad()
def score_classes(
    model: AFTForImageClassification,
    images: ImageSet,
    preprocessing: Preprocessing,
    *,
    workers: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> ClassScore:
    """Classify all of `images`, which have labels, on the device where the model is.

    Args:
        workers: processes that prepare the images; 0 prepares them here.
        rank, world_size: take only every `world_size`-th batch; the scores of all ranks add up to the whole.
    """
    assert images.labels is not None
    size = min(512, max(1, _PIXELS_A_BATCH // preprocessing.crop**2))
    batches = np.split(np.arange(len(images)), np.arange(size, len(images), size))[rank::world_size]
    score = ClassScore(0, 0.0, 0, 0)
    was_training = model.training
    model.eval()
    try:
        for batch, inputs in zip(batches, _prepared(images, preprocessing, batches, workers), strict=True):
            labels = torch.from_numpy(images.labels[batch]).to(model.device)
            score = _sum(score, _score_batch(class_logits(model, inputs), labels))
    finally:
        model.train(was_training)
    return score


@torch.no_grad()
def class_logits(model: AFTForImageClassification, inputs: Tensor) -> Tensor:
    """Logits `[B, classes]` of inputs `[B, 3, S, S]`, float64 where the device has that.

    Learnt positions are resampled where the inputs are not of the model's own size.
    """
    logits = model(pixel_values=inputs.to(model.device), interpolate_pos_encoding=True).logits
    return logits.to(torch.float32 if logits.device.type == "mps" else torch.float64)


def _prepared(
    images: ImageSet, preprocessing: Preprocessing, batches: list[np.ndarray], workers: int
) -> Iterator[Tensor]:
    loader = DataLoader(_Inputs(images, preprocessing), None, sampler=batches, num_workers=workers)  # type: ignore[arg-type]
    return iter(loader)


def _score_batch(logits: Tensor, labels: Tensor) -> ClassScore:
    nats = F.cross_entropy(logits, labels, reduction="sum")
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
    return ClassScore(len(labels), float(nats), int(best[:, 0].sum()), int(best.sum()))


def _sum(a: ClassScore, b: ClassScore) -> ClassScore:
    return ClassScore.of_sums([x + y for x, y in zip(a.sums(), b.sums(), strict=True)])
