"""Settings of the test run."""

import signal

import pytest
import torch
from hypothesis import settings

# A shell's background jobs begin with Ctrl-C ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Tests run in as many processes as there are cores.
torch.set_num_threads(1)
settings.register_profile("aft", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("aft")


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """In its deterministic mode ``torch.empty`` holds NaN: reading memory nobody wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
