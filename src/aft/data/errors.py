"""The one exception of this package."""


class DataError(ValueError):
    """Data that cannot be used; the message names the file, what came and what was expected, in one line."""
