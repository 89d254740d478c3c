"""Language models over bytes: the recipe, two small ones and the rows of the paper's enwik8 tables."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from aft.data.splits import check_sizes
from aft.training.recipes.base import NamedRecipe, Pace, Recipe, RecipeError


@dataclass(frozen=True, kw_only=True)
class ByteRecipe(Recipe):
    """A byte-level language model and how it is trained."""

    kind: ClassVar[str] = "bytes"

    context: int = 256
    """Bytes that the model sees at once (T)."""
    tie_embeddings: bool = True
    """Predict with the transposed token embedding."""

    alphabet: Literal["bytes", "distinct"] = "bytes"
    """Symbols: all 256 bytes, or only the distinct ones of the data."""
    split: tuple[float, ...] = (0.9, 0.1)
    """Train, validation and, if wanted, test: fractions that add up to 1, or numbers of bytes."""
    default_data: Literal["none", "stdlib"] = "none"
    """Without --data: refuse, or train on the source text of Python's standard library."""

    steps: int = 1000
    """Steps of the optimiser."""
    warmup_steps: int = 100
    """Steps in which the learning rate rises linearly to lr."""
    eval_every: int = 250
    """Steps between two validations on the first eval_bytes; 0 validates at the end alone."""
    eval_bytes: int = 65_536
    """Held-out bytes of a validation while training; the last one always takes them all."""
    save_every: int = 0
    """Steps between two checkpoints; 0 saves at the end alone (and when interrupted)."""

    def pace(self, examples: int) -> Pace:
        return Pace(self.steps, self.warmup_steps, self.eval_every, self.save_every)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(1, "context", "steps", "eval_bytes")
        self._at_least(0, "warmup_steps", "eval_every", "save_every")
        try:
            check_sizes(self.split)
        except ValueError as error:
            raise RecipeError(f"split: {error}") from None


def _enwik8(name: str, summary: str, *, context: int = 1024, **fields: object) -> NamedRecipe:
    """A row of the paper's enwik8 tables.

    The paper has "the usual Transformer warm-up" and leaves its length and what follows open: here it is
    1,000 steps, then a cosine to a tenth. Clipping and the betas are ours too. The paper's hundred epochs are
    counted in steps.
    """
    batch_size, epochs, sizes = 128, 100, (90_000_000, 5_000_000, 5_000_000)
    defaults = {
        "num_layers": 24,
        "hidden_size": 256,
        "num_heads": 4,
        "bias_rank": 256,
        "dropout": 0.1,
        "lr": 3e-3,
        "warmup_steps": 1000,
        "weight_decay": 0.5,
        "split": sizes,
        "batch_size": batch_size,
        "context": context,
        "steps": epochs * sizes[0] // (batch_size * context),
        "log_every": 50,
        "eval_every": 1000,
        "eval_bytes": 1_000_000,
        "save_every": 1000,
    }
    return NamedRecipe(name, f"enwik8, {summary}", ByteRecipe(**(defaults | fields)))  # type: ignore[arg-type]


def _enwik8_rows() -> list[NamedRecipe]:
    """Tables 4, 5 and 6, with the paper's test bits per character."""
    wide = {"num_layers": 12, "hidden_size": 512}
    rows = [
        _enwik8("enwik8-local-32", "24 x 256, AFT-local, window 32 (Table 4: 1.154)"),
        _enwik8("enwik8-local-32-12x512", "12 x 512, AFT-local, window 32 (Table 4: 1.180)", **wide),
        _enwik8("enwik8-simple", "24 x 256, AFT-simple (Table 4: 1.209)", mixer="simple"),
        _enwik8("enwik8-transformer", "24 x 256, attention, 4 heads (Table 4: 1.130)", mixer="attention"),
        _enwik8(
            "enwik8-transformer-12x512",
            "12 x 512, attention, 8 heads (Table 4: 1.137)",
            mixer="attention",
            num_heads=8,
            **wide,
        ),
    ]
    table_5 = {
        1: 1.205,
        2: 1.176,
        4: 1.165,
        8: 1.162,
        64: 1.160,
        128: 1.165,
        256: 1.164,
        512: 1.171,
        1024: 1.173,
    }
    for window, bpc in table_5.items():
        summary = f"24 x 256, AFT-local, window {window} (Table 5: {bpc:.3f})"
        rows.append(_enwik8(f"enwik8-local-{window}", summary, window_size=window))
    for context, bpc in {2048: 1.135, 4096: 1.134}.items():
        summary = f"24 x 256, AFT-local, window 32, context {context:,} (Table 6: {bpc:.3f})"
        rows.append(_enwik8(f"enwik8-local-32-{context}", summary, context=context))
    return rows


_SMALL = [
    NamedRecipe(
        "bytes-tiny",
        "the demo: Python's standard library or any file, about three minutes on two cores",
        ByteRecipe(
            mixer="conv",
            num_layers=4,
            hidden_size=128,
            num_heads=64,
            kernel_size=16,
            context=128,
            split=(0.98, 0.02),
            default_data="stdlib",
            batch_size=8,
            steps=1000,
            lr=4e-3,
            eval_every=200,
            eval_bytes=32_768,
            save_every=500,
        ),
    ),
    NamedRecipe(
        "shakespeare-char",
        "tiny Shakespeare by character, nanoGPT's CPU setting: 0.8M parameters, 2,000 steps",
        ByteRecipe(
            mixer="conv",
            num_layers=4,
            hidden_size=128,
            num_heads=64,
            context=64,
            window_size=16,
            kernel_size=16,
            alphabet="distinct",
            split=(0.9, 0.1),
            batch_size=12,
            steps=2000,
            lr=4.5e-3,
        ),
    ),
]

BYTE_RECIPES = _SMALL + _enwik8_rows()
