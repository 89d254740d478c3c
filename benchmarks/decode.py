"""Milliseconds a token: AFT through `generate` and `stream`, and Transformers' GPT-2 with its KV cache.

All models have 6 layers, width 256 and a vocabulary of 256, random weights and position biases, float32,
batch 1, and take turns in one process. A position is reached by a state of as many random keys and values, so
that nobody waits for 64k tokens to be read; how long reading takes is a row of its own ("prefill", of the
whole prompt). Medians, and the ratio to GPT-2 at the same position. With --busy two more processes keep the
cores busy while a second run of `stream` (and of GPT-2, a few tokens) is measured.

    python benchmarks/decode.py --csv benchmarks/results/decode.csv --busy
"""

import argparse
import csv
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel
from transformers.generation.streamers import BaseStreamer

from aft.models import AFTConfig, AFTForCausalLM
from aft.models.cache import AFTCache
from aft.models.streaming import stream
from aft.ops.state import extend

LAYERS, WIDTH, VOCABULARY = 6, 256, 256
MIXERS: dict[str, dict[str, Any]] = {
    "simple": {"mixer": "simple"},
    "local-32": {"mixer": "local", "window_size": 32, "bias_rank": 32},
    "conv-32": {"mixer": "conv", "kernel_size": 32, "num_attention_heads": 8},
    "full": {"mixer": "full", "bias_rank": 32},
}
BASELINE = "gpt2"
POSITIONS = (64, 1024, 8192, 65536)
PREFILLS = (1024, 8192)
ROOM = 1024  # positions past the last of those
WARM = 4  # tokens that `generate` makes before they are timed
COLUMNS = ("model", "way", "position", "milliseconds", "ratio_to_gpt2", "state_bytes")
Row = dict[str, Any]


def aft(name: str, longest: int) -> AFTForCausalLM:
    config = AFTConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        max_position_embeddings=longest,
        **MIXERS[name],
    )
    model = AFTForCausalLM(config).eval()
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            if "position_bias" in label or "kernel_" in label:
                parameter.normal_(std=0.3)
    return model


def gpt2(longest: int) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=longest,
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=4,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).eval()


def aft_cache(model: AFTForCausalLM, length: int) -> AFTCache:
    """The cache of a model that has read ``length`` tokens, made of random keys and values."""
    states = model(torch.zeros(1, 1, dtype=torch.int64), use_cache=True).cache.states
    return AFTCache(
        states=[
            extend(
                state,
                torch.randn(1, length - 1, state.keys.shape[2]),
                torch.randn(1, length - 1, state.values.shape[2]),
            )
            for state in states
        ]
    )


def gpt2_cache(model: GPT2LMHeadModel, length: int) -> DynamicCache:
    heads = model.config.n_head
    cache = DynamicCache(config=model.config)
    for layer in range(LAYERS):
        cache.update(*(torch.randn(1, heads, length, WIDTH // heads) for _ in range(2)), layer)
    return cache


class Times(BaseStreamer):
    """When `generate` handed on each of its tokens."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def generating(model: Any, position: int, new_cache: Callable[[], Any]) -> Callable[[int], list[float]]:
    """A function that generates so many tokens, and some before they are timed: seconds for each."""
    prompt = torch.randint(VOCABULARY, (1, position + 1))

    def seconds(count: int) -> list[float]:
        streamer = Times()
        options = {"max_new_tokens": count + WARM, "do_sample": False, "pad_token_id": 0}
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            cache=new_cache(),
            streamer=streamer,
            **options,
        )
        return [after - before for before, after in itertools.pairwise(streamer.times[WARM:])]

    return seconds


def streaming(model: AFTForCausalLM, position: int, cache: AFTCache) -> Callable[[int], list[float]]:
    tokens = stream(model, torch.randint(VOCABULARY, (position + 1,)), do_sample=False, cache=cache)
    for _ in range(3):
        next(tokens)

    def seconds(count: int) -> list[float]:
        taken = []
        for _ in range(count):
            began = time.perf_counter()
            next(tokens)
            taken.append(time.perf_counter() - began)
        return taken

    return seconds


def contestants(models: dict[str, Any], position: int) -> Iterator[tuple[str, str, int, Callable]]:
    """(model, way, bytes of state, function that times tokens) for all that are measured at a position."""
    for name, model in models.items():
        if name == BASELINE:
            cache = gpt2_cache(model, position)

            def again(cache: DynamicCache = cache, position: int = position) -> DynamicCache:
                cache.crop(position - cache.get_seq_length())
                return cache

            size = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
            yield name, "generate", size, generating(model, position, again)
        else:
            cache = aft_cache(model, position)

            def copy(cache: AFTCache = cache) -> AFTCache:
                return AFTCache(states=cache.states)

            yield name, "generate", cache.nbytes, generating(model, position, copy)
            yield name, "stream", cache.nbytes, streaming(model, position, cache)


def decode(models: dict[str, Any], position: int, options: argparse.Namespace) -> list[Row]:
    """Every contestant's median at one position; they take turns."""
    running = list(contestants(models, position))
    taken: dict[tuple[str, str], list[float]] = {(name, way): [] for name, way, _, _ in running}
    for _ in range(options.rounds):
        for name, way, _, seconds in running:
            taken[name, way] += seconds(options.tokens)
    medians = {key: 1e3 * statistics.median(values) for key, values in taken.items()}
    return [row(name, way, position, medians, size) for name, way, size, _ in running]


def prefill(models: dict[str, Any], length: int) -> list[Row]:
    prompt = torch.randint(VOCABULARY, (1, length))
    taken: dict[tuple[str, str], list[float]] = {(name, "prefill"): [] for name in models}
    for _ in range(3):
        for name, model in models.items():
            began = time.perf_counter()
            with torch.inference_mode():
                model(prompt, use_cache=True, logits_to_keep=1)
            taken[name, "prefill"].append(time.perf_counter() - began)
    medians = {key: 1e3 * statistics.median(values) for key, values in taken.items()}
    return [row(name, "prefill", length, medians, "") for name in models]


@contextmanager
def busy_cores() -> Iterator[None]:
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        time.sleep(0.5)
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def busy(models: dict[str, Any], options: argparse.Namespace) -> list[Row]:
    """How much slower a token is while the cores are busy: a row for each contestant, at 1,024."""
    running = [
        (name, way, seconds)
        for name, way, _, seconds in contestants(models, 1024)
        if name == BASELINE or way == "stream"
    ]
    quiet = {(name, way): statistics.median(seconds(options.tokens)) for name, way, seconds in running}
    rows = []
    with busy_cores():
        for name, way, seconds in running:
            slow = statistics.mean(seconds(4 if name == BASELINE else 5 * options.tokens))
            ratio = slow / quiet[name, way]
            print(
                f"{name:<10} {way:<10} cores busy: {1e3 * slow:.2f} ms a token, {ratio:.1f} times the quiet"
            )
            rows.append(
                dict(
                    zip(
                        COLUMNS, (name, f"{way}, cores busy", 1024, round(1e3 * slow, 3), "", ""), strict=True
                    )
                )
            )
    return rows


def row(name: str, way: str, position: int, medians: dict[tuple[str, str], float], size: Any) -> Row:
    taken = medians[name, way]
    ratio = round(taken / medians[BASELINE, "prefill" if way == "prefill" else "generate"], 3)
    values = (name, way, position, round(taken, 3), ratio, size)
    print(
        f"{name:<10} {way:<10} {position:>6} {taken:>10.2f} ms {ratio:>8.3f} of GPT-2's {size:>12}",
        flush=True,
    )
    return dict(zip(COLUMNS, values, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--positions", nargs="+", type=int, default=POSITIONS)
    parser.add_argument("--prefills", nargs="*", type=int, default=PREFILLS)
    parser.add_argument("--mixers", nargs="+", choices=MIXERS, default=list(MIXERS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=40, help="timed in each round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--busy", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    longest = max(*options.positions, *options.prefills, 1024) + ROOM
    models: dict[str, Any] = {BASELINE: gpt2(longest)} | {name: aft(name, longest) for name in options.mixers}
    rows: list[Row] = []
    with torch.no_grad():
        for position in options.positions:
            rows += decode(models, position, options)
        for length in options.prefills:
            rows += prefill(models, length)
        if options.busy:
            rows += busy(models, options)
    if options.csv is not None:
        options.csv.parent.mkdir(parents=True, exist_ok=True)
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
