"""Bridges to other libraries: timm's registry, and the conversion of other people's models."""
