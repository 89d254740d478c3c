"""The machine and the versions that a measurement depends on."""

import contextlib
import os
import platform
from importlib import metadata

import torch

PACKAGES = ("attention-free", "torch")


def processor() -> str:
    """The processor's own name, or the architecture where nobody says."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {name: metadata.version(name) for name in PACKAGES}


def description() -> str:
    """Processor, cores, threads and versions in one line."""
    named = ", ".join(f"{name} {version}" for name, version in versions().items())
    threads = torch.get_num_threads()
    return f"{processor()}, {os.cpu_count()} cores, {threads} thread{'s' * (threads != 1)}; {named}"


def record() -> dict[str, str | int]:
    """The same as columns of a table."""
    return {"processor": processor(), "threads": torch.get_num_threads(), **versions()}
