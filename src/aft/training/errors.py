"""Errors that a user can mend; each message is one line."""


class RunError(ValueError):
    """A run directory that cannot be used: names the file, what was found in it and what was expected."""


class SamplingError(ValueError):
    """A prompt or a sampling option that cannot be used."""
