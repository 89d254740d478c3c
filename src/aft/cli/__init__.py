"""The `aft` command: which function a command line goes to, and how it ends.

Nothing here imports torch or Transformers, so that `--help` and a mistyped option answer at once. Every
mistake of a user ends in one line on stderr and exit status 2.
"""

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from aft.cli.commands import COMMANDS, INTERRUPTED
from aft.cli.parsing import CommandError, nearest
from aft.data.errors import DataError
from aft.training.errors import RunError, SamplingError
from aft.training.recipes import RecipeError

BROKEN_PIPE = 141  # what shells report for a process whose reader went away

_USAGE = """\
usage: aft COMMAND [OPTIONS]

The Attention Free Transformer: train, measure and use language models over bytes, models of pixels and image
classifiers.

commands:
  train RECIPE [--data PATH] [--out DIR] [--field value ...]    train a model into a run directory
  train --resume RUN [--data PATH]                              go on with a run that was stopped
  evaluate RUN [--data PATH] [--split validation|test]          exact bits per byte or dim; top-1 and top-5
  generate RUN --prompt TEXT [--temperature 0.8 ...]            bytes: sample text, streamed as it comes
  sample RUN [--count 16] [--out FILE]                          pixels: draw images into a PNG
  complete RUN IMAGE... [--keep 0.5] [--out FILE]               pixels: draw the hidden lower part of images
  classify RUN IMAGE... [--top 5]                               classes of images, with probabilities
  bench [--length T ...] [--threads N] [--csv FILE]             time the operations beside attention, a minute
  recipes                                                       the recipes, a line each
  info                                                          versions, devices, implementations

`aft COMMAND --help` explains the options of a command, `aft train RECIPE --help` the fields of a recipe.
"""


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
    if not args or args[0] in ("-h", "--help", "help"):
        print(_USAGE, end="")
        return 0 if args else 2
    if args[0] == "--version":
        from aft import __version__

        print(__version__)
        return 0
    if args[0] not in COMMANDS:
        raise CommandError(f"no command is called {args[0]!r}; {nearest(args[0], COMMANDS)}")
    return COMMANDS[args[0]](args[1:])
