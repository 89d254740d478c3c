"""Language models over bytes."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, RandomSampler, Sampler, default_collate

from aft.data import ByteWindows, distinct_bytes, encode, open_bytes, split_bytes, standard_library_source
from aft.data.splits import check_lengths
from aft.models import AFTConfig, AFTForCausalLM, AFTTokenizer
from aft.training import rundir
from aft.training.errors import RunError
from aft.training.evaluation import score
from aft.training.recipes import ByteRecipe
from aft.training.reporting import Speed
from aft.training.scores import ByteScore
from aft.training.tasks.base import Evaluation, EvaluationRequest, Task


class ByteTask(Task):
    """A text as tokens, cut into parts.

    Attributes:
        path: the file, or `stdlib`.
        digest: sha256 of its bytes, hexadecimal.
        alphabet: the byte that each token stands for; None where a token is a byte.
        parts: `train`, `validation` and perhaps `test`, uint8 tokens each.
    """

    model_type = AFTForCausalLM
    score_type = ByteScore
    default_path = "stdlib"
    options = ("stride",)
    held_out = "validation"
    workers = 0

    def __init__(self, recipe: ByteRecipe, data: str | None) -> None:
        self.recipe = recipe
        content = standard_library_source() if data is None else open_bytes(data)
        source = "the standard library's source" if data is None else data
        self.alphabet = distinct_bytes(content) if recipe.alphabet == "distinct" else None
        self.parts = split_bytes(encode(content, self.alphabet, source), recipe.split, source)
        check_lengths(self.parts, recipe.context, source)
        self.path = self.default_path if data is None else str(Path(data).resolve())
        self.size = len(content)
        self.digest = hashlib.sha256(content.data).hexdigest()
        self.examples = len(self.parts["train"]) - recipe.context
        tokens = recipe.batch_size * recipe.context
        self.speed = Speed("bytes", tokens, lambda speed: f"{speed / 1e3:.0f}kB/s")

    def data_record(self) -> dict[str, Any]:
        sizes = {name: len(part) for name, part in self.parts.items()}
        return {"path": self.path, "bytes": self.size, "sha256": self.digest, **sizes}

    @classmethod
    def data_identity(cls, record: dict[str, Any]) -> str:
        return f"{record['bytes']:,} bytes, sha256 {record['sha256'][:12]}…"

    def describe_data(self) -> str:
        return f"bytes of {self.path}: " + ", ".join(f"{len(p):,} {name}" for name, p in self.parts.items())

    def new_config(self) -> AFTConfig:
        recipe = self.recipe
        return AFTConfig(
            vocab_size=256 if self.alphabet is None else len(self.alphabet),
            hidden_size=recipe.hidden_size,
            num_hidden_layers=recipe.num_layers,
            max_position_embeddings=recipe.context,
            mixer=recipe.mixer,
            num_attention_heads=recipe.num_heads,
            window_size=recipe.window_size,
            kernel_size=recipe.kernel_size,
            bias_rank=recipe.bias_rank,
            dropout=recipe.dropout,
            tie_word_embeddings=recipe.tie_embeddings,
            alphabet=self.alphabet,
        )

    def train_set(self, draws: int) -> ByteWindows:
        return ByteWindows(self.parts["train"], self.recipe.context)

    def sampler(self, train_set: Dataset[Any], draws: int) -> Sampler[int]:
        # Crops are drawn with replacement, as many as the recipe takes: all of training is one epoch, no
        # permutation of a large file is held, and a resumed run skips indices. Accelerate seeds the sampler.
        return RandomSampler(train_set, replacement=True, num_samples=draws)  # type: ignore[arg-type]

    def collator(self) -> Callable[[Any], Any]:
        return default_collate

    def score(self, model: Any, *, whole: bool, rank: int, world_size: int) -> ByteScore:
        tokens = self.parts["validation"][: None if whole else self.recipe.eval_bytes]
        before = int(self.parts["train"][-1])
        return score(model, tokens, before=before, rank=rank, world_size=world_size)

    def save_processor(self, folder: Path) -> None:
        AFTTokenizer(self.alphabet).save_pretrained(folder)

    @classmethod
    def evaluate(cls, run: Path, model: AFTForCausalLM, request: EvaluationRequest) -> Evaluation:
        """Score a part of the run's data or of other data cut the same way, or other data alone and whole."""
        alphabet, stride = model.config.alphabet, request.stride
        context = model.config.max_position_embeddings
        if stride is not None and not 1 <= stride <= context:
            raise RunError(f"stride is {stride}; expected 1 to the model's context, {context}")
        data, part = request.data, request.split
        if data is not None and part is None:
            tokens = encode(open_bytes(data), alphabet, data)
            return Evaluation(score(model, tokens, stride=stride), f"all of {data}")
        record = rundir.read_record(run)
        if data is None:
            task = cls.reopen(record, run)
            label, parts = task.path, task.parts
        else:
            recipe = rundir.recipe_of(record, run)
            assert isinstance(recipe, ByteRecipe)
            label, parts = data, split_bytes(encode(open_bytes(data), alphabet, data), recipe.split, data)
        part = part or "validation"
        if part not in parts:
            raise RunError(f"{run}: its data were split into {', '.join(parts)}; there is no {part} part")
        before = list(parts)[list(parts).index(part) - 1] if part != "train" else None
        if len(parts[part]) == 0 or (before and len(parts[before]) == 0):
            raise RunError(f"{label} is too short: one of its parts is empty")
        last = int(parts[before][-1]) if before else None
        found = score(model, parts[part], before=last, stride=stride)
        return Evaluation(found, f"the {part} part of {label}")


TASK = ByteTask
