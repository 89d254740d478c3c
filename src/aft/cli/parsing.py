"""Options from arguments by tyro. Whatever is wrong with them becomes one line."""

import contextlib
import dataclasses
import difflib
import io
import itertools
from collections.abc import Iterable
from typing import Any, TypeVar, get_origin

import tyro

from aft.cli.options import ResumeOptions

Options = TypeVar("Options")


class CommandError(Exception):
    """A command line that cannot be followed."""


def parse(kind: type[Options], args: list[str], prog: str, default: Options | None = None) -> Options:
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
        raise CommandError(_unknown(unknown[0], kind, default, prog))
    return options


def nearest(word: str, known: Iterable[str]) -> str:
    """Which of the known words may have been meant."""
    known = list(known)
    if not known:
        return "it takes none"
    near = difflib.get_close_matches(word, known, n=2, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"


def _unboxed(box: str) -> str:
    """The message in one of tyro's boxes: from the title and its rule to the next rule or gap."""
    body = (line.strip() for line in box.splitlines()[2:])
    message = itertools.takewhile(lambda line: line.strip("-"), body)
    return " ".join(message).removeprefix("Error parsing ")


def _unknown(token: str, kind: type[Any], default: Any, prog: str) -> str:
    if not token.startswith("-"):
        return f"{prog} does not take a further argument, {token!r} (see {prog} --help)"
    option = token.split("=")[0]
    if kind is ResumeOptions:
        return f"a run goes on by its own recipe: --resume takes --data and no other option, got {option}"
    known = [f.name for f in dataclasses.fields(get_origin(kind) or kind)]
    if "recipe" in known:
        known += [f.name for f in dataclasses.fields(default.recipe)] + ["resume"]
    positional = ("recipe", "run", "images")
    options = ["--" + name.replace("_", "-") for name in known if name not in positional]
    return f"{prog} has no option {option}; {nearest(option.replace('_', '-'), options)}"
