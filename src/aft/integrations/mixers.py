"""The names of the mixers that an attention can be replaced by."""

AFT_MIXERS = ("full", "simple", "local", "conv")


def check_mixer(name: str, mixer: object) -> None:
    """Raises ValueError, naming the choices, unless ``mixer`` is one of AFT's; ``name`` is the caller's."""
    if mixer not in AFT_MIXERS:
        raise ValueError(f"{name}: mixer must be one of {', '.join(AFT_MIXERS)}; got {mixer!r}")
