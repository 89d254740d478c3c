"""The `aft` command: what it may be given, and which function that goes to.

This module imports neither torch nor Transformers, so that `--help` and a mistyped option answer at once;
commands import what they need. Every mistake of a user ends in one line on stderr and exit status 2.
"""

import contextlib
import dataclasses
import difflib
import io
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import tyro

from aft.data.errors import DataError
from aft.training.errors import RunError, SamplingError
from aft.training.recipes import RECIPES, Recipe, RecipeError, find_recipe

INTERRUPTED = 130  # what shells report for a process that Ctrl-C ended
BROKEN_PIPE = 141  # and for one whose reader went away

_USAGE = """\
usage: aft COMMAND [OPTIONS]

The Attention Free Transformer: train, measure and sample byte-level language models.

commands:
  train RECIPE [--data FILE] [--out DIR] [--field value ...]    train a model into a run directory
  train --resume RUN [--data FILE]                              go on with a run that was stopped
  evaluate RUN [--data FILE] [--split validation|test]          exact bits per byte
  generate RUN --prompt TEXT [--temperature 0.8 ...]            sample text, streamed as it comes
  recipes                                                       the recipes, a line each
  info                                                          versions, devices, implementations

`aft COMMAND --help` explains the options of a command, `aft train RECIPE --help` the fields of a recipe.
"""

Options = TypeVar("Options")


class CommandError(Exception):
    """A command line that cannot be followed."""


@dataclass(frozen=True)
class TrainOptions:
    """Train a model by a recipe, whose fields can be changed one by one, into a run directory."""

    recipe: tyro.conf.OmitArgPrefixes[Recipe]
    data: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Any file, opened as bytes, or the enwik8 zip. Without it: the recipe's default data, if it has any."""
    out: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Run directory; runs/RECIPE if not given."""
    overwrite: tyro.conf.FlagCreatePairsOff[bool] = False
    """Replace the run that stands in the run directory."""


@dataclass(frozen=True)
class ResumeOptions:
    """Go on with a run from its last checkpoint, exactly as if it had not been stopped."""

    resume: Annotated[str, tyro.conf.arg(metavar="RUN")]
    """Run directory of the run that was stopped."""
    data: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Where the run's data are now, if they were moved; they must be the same bytes."""


@dataclass(frozen=True)
class EvaluateOptions:
    """Exact bits per byte: every byte is counted once."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """Run directory."""
    data: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Another file. Without --split all of it is scored, its first byte at log2(vocabulary) bits."""
    split: Literal["train", "validation", "test"] | None = None
    """Part of the run's data, or of --data cut the same way; without --data the default is validation."""
    stride: int | None = None
    """Distance between windows; bytes have at least context - stride bytes before them. None: the context."""


@dataclass(frozen=True)
class GenerateOptions:
    """Sample text from a trained model and write it to stdout as it comes."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """Run directory."""
    prompt: Annotated[str, tyro.conf.arg(metavar="TEXT")] = ""
    """Text to go on from. An empty prompt starts after a newline, which is not shown."""
    max_new_tokens: int = 400
    """Bytes to add; 0 writes the prompt alone."""
    temperature: float = 0.8
    """Below 1 keeps to what is likely; 0 (or below 1e-6) always takes the likeliest byte."""
    top_k: int = 0
    """Choose among the k likeliest bytes; 0 is off."""
    top_p: float = 1.0
    """Choose among the likeliest bytes that make up this probability; 1 is off."""
    seed: int = 0
    """Seed of the choices."""


@dataclass(frozen=True)
class NoOptions:
    """This command has no options."""


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line (by default the process's own) and exit with its status."""
    arguments = list(sys.argv[1:] if args is None else args)
    # A closed stream is None to Python; nobody reads it, and nothing should fail for that.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (for as long as the process runs)
    try:
        status = _dispatch(arguments)
        sys.stdout.flush()
    except (CommandError, RecipeError, DataError, RunError, SamplingError) as error:
        status = _complain(str(error))
    except KeyboardInterrupt:
        _complain("interrupted")
        status = INTERRUPTED
    except BrokenPipeError:
        # Python would flush stdout at exit, and complain that nobody reads it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = BROKEN_PIPE
    except OSError as error:
        status = _complain(": ".join(str(part) for part in (error.filename, error.strerror or error) if part))
    sys.exit(status)


def _complain(message: str) -> int:
    """One line on stderr, whatever the message holds."""
    if os.environ.get("RANK", "0") == "0":  # under torchrun once, not once a process
        print("aft: " + " ".join(message.split()), file=sys.stderr)
    return 2


def _dispatch(args: list[str]) -> int:
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": _train,
        "evaluate": _evaluate,
        "generate": _generate,
        "recipes": _recipes,
        "info": _info,
    }
    if not args or args[0] in ("-h", "--help", "help"):
        print(_USAGE, end="")
        return 0 if args else 2
    if args[0] == "--version":
        from aft import __version__

        print(__version__)
        return 0
    if args[0] not in commands:
        raise CommandError(f"no command is called {args[0]!r}; {_nearest(args[0], commands)}")
    return commands[args[0]](args[1:])


def _train(args: list[str]) -> int:
    if any(arg == "--resume" or arg.startswith("--resume=") for arg in args):
        if "-h" in args or "--help" in args:
            args = ["--help"]  # also without the run that --resume asks for
        options = _parse(ResumeOptions, args, "aft train")
        _quieten()
        from pathlib import Path

        from aft.training.run import resume

        return _report(resume(Path(options.resume), options.data))
    if not args:
        raise CommandError("train needs a recipe: aft train RECIPE [--data FILE]; `aft recipes` lists them")
    if args[0] in ("-h", "--help"):
        print(
            f"usage: aft train RECIPE [OPTIONS]\n       aft train --resume RUN\n\nrecipes:\n{_recipe_lines()}"
        )
        print("\n`aft train RECIPE --help` explains the fields of a recipe.")
        return 0
    if args[0].startswith("-"):
        raise CommandError(
            f"the recipe comes before {args[0]}: aft train RECIPE [--data FILE] [--field value ...]"
        )
    entry = find_recipe(args[0])
    options = _parse(TrainOptions, args[1:], f"aft train {entry.name}", default=TrainOptions(entry.recipe))
    _quieten()
    from pathlib import Path

    from aft.training.run import start

    changed = dataclasses.replace(entry, recipe=options.recipe)
    out = Path(options.out if options.out is not None else f"runs/{entry.name}")
    return _report(start(changed, options.data, out, overwrite=options.overwrite))


def _report(outcome: Any) -> int:
    from aft.training.run import is_first_process

    if outcome.interrupted:
        if is_first_process():
            how = f"`aft train --resume {outcome.run}` goes on"
            print(f"aft: stopped after step {outcome.step:,}, saved; {how}", file=sys.stderr)
        return INTERRUPTED
    if is_first_process():
        score = f"{outcome.result.bpc:.4f} bits per byte over all {outcome.result.count:,} validation bytes"
        print(f"{score}; saved in {outcome.run}")
    return 0


def _evaluate(args: list[str]) -> int:
    options = _parse(EvaluateOptions, args, "aft evaluate")
    _quieten()
    from pathlib import Path

    from aft.training.evaluation import score
    from aft.training.loading import load_model
    from aft.training.run import evaluation_text

    run = Path(options.run)
    model = load_model(run)
    context = model.config.max_position_embeddings
    if options.stride is not None and not 1 <= options.stride <= context:
        raise CommandError(f"stride is {options.stride}; expected 1 to the model's context, {context}")
    text = evaluation_text(run, model.config.alphabet, options.data, options.split)
    result = score(_on_device(model), text.tokens, before=text.before, stride=options.stride)
    print(f"{result.bpc:.4f} bits per byte over {result.count:,} bytes ({text.label})")
    return 0


def _generate(args: list[str]) -> int:
    options = _parse(GenerateOptions, args, "aft generate")
    _quieten()
    from pathlib import Path

    from aft.training.loading import load_model
    from aft.training.sampling import generate_text, generation_config

    if options.max_new_tokens < 0:
        raise CommandError(f"max_new_tokens is {options.max_new_tokens}; expected at least 0")
    if not 0 <= options.seed < 2**32:
        raise CommandError(f"seed is {options.seed}; expected at least 0 and below 2**32")
    model = load_model(Path(options.run))
    choice = generation_config(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        vocab_size=model.config.vocab_size,
    )
    # Bytes that are not UTF-8 come from a shell as surrogates, and go to the model as the bytes they were.
    prompt = options.prompt.encode("utf-8", "surrogateescape")
    generate_text(_on_device(model), prompt, options.max_new_tokens, choice, options.seed, _write_stdout)
    if sys.stdout.isatty():
        print()
    return 0


def _write_stdout(text: str) -> None:
    # UTF-8 whatever the locale says, as the bytes that were learnt are.
    sys.stdout.buffer.write(text.encode("utf-8"))
    sys.stdout.buffer.flush()


def _recipes(args: list[str]) -> int:
    _parse(NoOptions, args, "aft recipes")
    print(_recipe_lines())
    return 0


def _recipe_lines() -> str:
    width = max(map(len, RECIPES))
    return "\n".join(f"  {entry.name:<{width}}  {entry.summary}" for entry in RECIPES.values())


def _info(args: list[str]) -> int:
    _parse(NoOptions, args, "aft info")
    _quieten()
    from importlib.metadata import version

    import torch

    from aft import __version__
    from aft.ops import available_impls

    print(f"attention-free {__version__}, Python {sys.version.split()[0]}")
    for package in ("torch", "transformers", "accelerate", "numpy", "safetensors", "tyro"):
        print(f"  {package} {version(package)}")
    print(f"devices: cpu ({os.cpu_count()} cores, {torch.get_num_threads()} threads)")
    for index in range(torch.cuda.device_count()):
        print(f"         cuda:{index} ({torch.cuda.get_device_name(index)})")
    if torch.backends.mps.is_available():
        print("         mps")
    print("implementations:")
    for name, reason in available_impls().items():
        print(f"  {name}: {'available' if reason is None else f'not available, {reason}'}")
    return 0


def _on_device(model: Any) -> Any:
    """The model on the accelerator, where there is one: the device that the Trainer would take."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return model if accelerator is None else model.to(accelerator)


def _quieten() -> None:
    """Have Transformers report errors only, and show no progress bars of its own."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _parse(kind: type[Options], args: list[str], prog: str, default: Options | None = None) -> Options:
    """Fill a dataclass from the command line by tyro; what tyro would put into a box becomes one line."""
    parser: dict[str, Any] = {"prog": prog, "args": args, "config": (tyro.conf.AvoidSubcommands,)}
    if default is not None:
        parser["default"] = default
    complaint = io.StringIO()
    try:
        # stdout too: tyro looks at it to decide how to draw, and for a buffer uses neither colours nor lines.
        with contextlib.redirect_stderr(complaint), contextlib.redirect_stdout(io.StringIO()):
            options, unknown = tyro.cli(kind, return_unknown_args=True, **parser)
    except SystemExit as exit_request:
        if exit_request.code:
            raise CommandError(f"{_unboxed(complaint.getvalue())} (see {prog} --help)") from None
        tyro.cli(kind, return_unknown_args=True, **parser)  # --help: once more, for the terminal
        raise
    if unknown:
        raise CommandError(_unknown(unknown[0], kind, prog))
    return options


def _unboxed(box: str) -> str:
    """The message in one of tyro's boxes: from the title and its rule to the next rule or gap."""
    body = (line.strip() for line in box.splitlines()[2:])
    message = itertools.takewhile(lambda line: line.strip("-"), body)
    return " ".join(message).removeprefix("Error parsing ")


def _unknown(token: str, kind: type[Any], prog: str) -> str:
    if not token.startswith("-"):
        return f"{prog} does not take a further argument, {token!r} (see {prog} --help)"
    option = token.split("=")[0]
    if kind is ResumeOptions:
        return f"a run goes on by its own recipe: --resume takes --data and no other option, got {option}"
    known = [f.name for f in dataclasses.fields(kind)]
    if kind is TrainOptions:
        known += [f.name for f in dataclasses.fields(Recipe)] + ["resume"]
    options = ["--" + name.replace("_", "-") for name in known if name not in ("recipe", "run")]
    return f"{prog} has no option {option}; {_nearest(option.replace('_', '-'), options)}"


def _nearest(word: str, known: Sequence[str] | dict[str, Any]) -> str:
    if not known:
        return "it takes none"
    near = difflib.get_close_matches(word, known, n=2, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
