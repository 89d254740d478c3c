"""The one exception of this package."""


class DataError(ValueError):
    """Data that cannot be used; the message names the file, what came and what was expected, in one line."""

    def __init__(self, message: str) -> None:
        # torch's DataLoader raises what a worker raised anew, with the traceback in front of its message.
        if "Original Traceback" in message:
            message = message.rsplit(f"{type(self).__name__}: ", 1)[-1].strip()
        super().__init__(message)
