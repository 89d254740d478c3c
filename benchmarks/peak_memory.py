"""Peak memory of forward and backward beyond inputs and outputs, in a process of its own.

Inputs (queries, keys, values, biases, the gradient of the output) and outputs (the result and the gradients
of all inputs) are not counted: a caller holds them whatever happens between. What is counted is

    highest resident memory during the call - resident memory before it - bytes of all outputs.

Before it, the same computation has run on a few positions, so that libraries are loaded and threads started,
and the inputs stand in memory. The highest is VmHWM of /proc/self/status, which writing 5 to
/proc/self/clear_refs sets back to what is resident. glibc is told to map every tensor by itself, as memory
that it keeps for later would be counted before, after or not at all. Linux only.

    python benchmarks/peak_memory.py local 65536 64      # bytes, as JSON
"""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from aft.benchmark import work
from aft.benchmark.work import Leaves, Work, normal_inputs

RANK, WINDOW, KERNEL, HEADS = 16, 32, 32, 8
WARM = 256  # positions


def by_weights(inputs: Leaves) -> Work:
    """Attention as the formula has it, with its T x T weights in memory: the paper's Transformer."""
    q, k, v = (inputs[name].detach().requires_grad_() for name in "qkv")

    def call() -> Tensor:
        heads = [x.unflatten(2, (HEADS, -1)).transpose(1, 2) for x in (q, k, v)]
        scores = heads[0] @ heads[1].transpose(2, 3) / heads[0].shape[3] ** 0.5
        future = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
        return (F.softmax(scores.masked_fill(future, -torch.inf), -1) @ heads[2]).transpose(1, 2).flatten(2)

    return Work("attention by its weights", {"q": q, "k": k, "v": v}, call)


KINDS = {
    "simple": work.simple,
    "local": lambda inputs: work.local(inputs, WINDOW, low_rank=True),
    "conv": lambda inputs: work.conv(inputs, KERNEL),
    "full-low-rank": lambda inputs: work.full(inputs, low_rank=True),
    "full": work.full,
    "dot-product": work.dot_product,
    "attention": by_weights,
}


def draw(kind: str, length: int, width: int) -> Work:
    return KINDS[kind](normal_inputs(1, length, width, HEADS, RANK))


def peak(kind: str, length: int, width: int, threads: int) -> tuple[int, int]:
    """(peak in bytes beyond inputs and outputs, bytes of the queries), measured in a new process."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "MALLOC_MMAP_THRESHOLD_": str(2**16),
    }
    command = [sys.executable, str(Path(__file__)), kind, str(length), str(width)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"ended by signal {-done.returncode}"])[-1]
        raise RuntimeError(f"{kind} at {length:,} x {width}: {reason}")
    found = json.loads(done.stdout)
    return found["peak"], found["q"]


def _measure(kind: str, length: int, width: int) -> dict[str, int]:
    small = draw(kind, min(length, WARM), width)
    small.results(_upstream(small))
    given = draw(kind, length, width)
    upstream = _upstream(given)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    outputs, grads = given.results(upstream)
    highest = _status("VmHWM")
    held = sum(x.nbytes for x in (*outputs, *grads) if x is not None)
    return {"peak": highest - before - held, "q": given.leaves["q"].nbytes}


def _upstream(given: Work) -> list[Tensor]:
    """As `Work.upstream`, without a forward pass: outputs are of the queries' shape."""
    return [torch.randn(given.leaves["q"].shape, generator=torch.Generator().manual_seed(1))]


def _status(name: str) -> int:
    """A field of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {name}")


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
