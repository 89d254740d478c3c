"""A tokenizer of bytes: what it reads is UTF-8, and it never fails to write."""

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizer

from aft.models.configuration import AFTConfig


class AFTTokenizer(PreTrainedTokenizer):
    """Text to the bytes of its UTF-8 and back: token i is byte i or, with an alphabet, byte `alphabet[i]`.

    A token is written as its ASCII character if that can be printed, else as its number: ``a``, ``<0x0A>``.
    Nothing is added to a text, and nothing in it is taken for a token's name: all text comes back as it was.
    Decoding takes any tokens; what is not UTF-8 becomes U+FFFD.

    Padding goes to the left, as generation wants it, and is one of the bytes, since a model knows no others:
    one that UTF-8 never uses, 0xFF where a token is a byte, and ``skip_special_tokens`` takes it out of what
    is decoded. An alphabet without such a byte is padded with its first, which is then no special token:
    decoding never drops it, and only ``attention_mask`` tells padding from text.

    Encoding and decoding take time linear in the text, about a tenth of a second a megabyte.

    Args:
        alphabet: different bytes, 0 to 255; None for all 256 in order. As `AFTConfig.alphabet`.
        pad_token: name of the token to pad with; None chooses as above.
        kwargs: what `PreTrainedTokenizer` takes. Special tokens have to be names of bytes.

    Raises:
        ValueError: an alphabet that is not one, a special token that is no byte; in encoding, a byte that the
            alphabet lacks; in decoding, an id outside the vocabulary.
    """

    # Runs from before there was a tokenizer have only the model's configuration to say what a token is.
    vocab_files_names = {"config_file": "config.json"}  # noqa: RUF012 (as Transformers' own tokenizers do)
    padding_side = "left"

    def __init__(
        self,
        alphabet: Sequence[int] | None = None,
        pad_token: str | AddedToken | None = None,
        **kwargs: Any,
    ) -> None:
        known = list(range(256)) if alphabet is None else list(alphabet)
        if not known or len(set(known) & set(range(256))) != len(known):
            raise ValueError(f"alphabet must hold different bytes, 0 to 255, at least one; got {alphabet}")
        self.alphabet = None if alphabet is None else known
        self._name_of = {i: _NAMES[byte] for i, byte in enumerate(known)}
        self._id_of = {name: i for i, name in self._name_of.items()}
        if pad_token is None:
            unused = [byte for byte in known if byte in _NOT_IN_UTF8]
            pad_token = _NAMES[unused[-1] if unused else known[0]]
        kwargs.pop("config_file", None)
        super().__init__(alphabet=self.alphabet, pad_token=pad_token, **kwargs)

    @property
    def vocab_size(self) -> int:
        return len(self._name_of)

    def get_vocab(self) -> dict[str, int]:
        return dict(self._id_of)

    @property
    def all_special_tokens(self) -> list[str]:
        """Special tokens that stand for no text: padding is one only if UTF-8 never uses its byte."""
        others = {token for role, token in self.special_tokens_map.items() if role != "pad_token"}
        others.update(self.extra_special_tokens)
        return [
            token
            for token in super().all_special_tokens
            if token in others or _BYTES.get(token) in _NOT_IN_UTF8
        ]

    def tokenize(self, text: str, **kwargs: Any) -> list[str]:
        """The names of the bytes of `text`.

        Raises:
            ValueError: a byte that the alphabet lacks, or half a surrogate pair, which has no UTF-8.
        """
        content = text.encode()
        if self.alphabet is not None and (unknown := set(content).difference(self.alphabet)):
            where = next(i for i, c in enumerate(text) if not unknown.isdisjoint(c.encode()))
            byte = next(byte for byte in text[where].encode() if byte in unknown)
            raise ValueError(
                f"byte 0x{byte:02x} of {text[where]!r}, character {where:,} of the text, is not one of the "
                f"{self.vocab_size} bytes that the model knows"
            )
        return list(map(_NAMES.__getitem__, content))

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> Any:
        """The ids of tokens by name; None for what is no token, as Transformers has it."""
        if isinstance(tokens, str):
            return self._id_of.get(tokens)
        return list(map(self._id_of.get, tokens))

    def convert_ids_to_tokens(self, ids: int | list[int], skip_special_tokens: bool = False) -> Any:
        """The names of tokens by id, without special ones if asked so."""
        if isinstance(ids, int):
            return self.convert_ids_to_tokens([ids])[0]
        skipped = self.all_special_tokens if skip_special_tokens else []
        try:
            names = list(map(self._name_of.__getitem__, map(int, ids)))
        except KeyError as error:
            raise ValueError(f"ids must be 0 to {self.vocab_size - 1}, got {error.args[0]}") from None
        return [name for name in names if name not in skipped] if skipped else names

    def _convert_id_to_token(self, index: int) -> str:
        return self.convert_ids_to_tokens(index)

    @property
    def backend_tokenizer(self) -> SimpleNamespace:
        """What `generate` asks how to match ``stop_strings``: byte by byte, whatever characters they make."""
        return SimpleNamespace(decoder=_Decoder())

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """The text of tokens by name."""
        try:
            return bytes(map(_BYTES.__getitem__, tokens)).decode(errors="replace")
        except KeyError as error:
            raise ValueError(f"tokens must be names of bytes, got {error.args[0]!r}") from None

    def _add_tokens(self, new_tokens: list[str] | list[AddedToken], special_tokens: bool = False) -> int:
        """Nothing to do for names of bytes: the vocabulary is the model's, and closed."""
        for token in map(str, new_tokens):
            if token not in self._id_of:
                raise ValueError(
                    f"{token!r} cannot be added to a vocabulary of bytes; tokens are its {self.vocab_size} "
                    f"bytes, by names such as {self._name_of[0]!r}"
                )
        return 0

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        return ()  # tokenizer_config.json holds the alphabet

    @classmethod
    def convert_to_native_format(cls, **kwargs: Any) -> dict[str, Any]:
        """Called by ``from_pretrained`` with what it read: with no tokenizer saved, the model's alphabet."""
        if "alphabet" not in kwargs and kwargs.get("config_file") is not None:
            kwargs["alphabet"] = _alphabet_of(kwargs["config_file"])
        return kwargs


class _Decoder:
    """Says as the decoders of `tokenizers` do that ``<0x0A>`` is a byte."""

    def __getstate__(self) -> bytes:
        return b'{"type": "ByteFallback"}'


def _alphabet_of(path: str) -> list[int] | None:
    """The alphabet of the model with this configuration file; ValueError if its tokens are not bytes."""
    with open(path, encoding="utf-8") as file:
        fields = json.load(file)
    if fields.get("model_type") != AFTConfig.model_type:
        raise ValueError(f"{path} is of model_type {fields.get('model_type')!r}; 'aft' was expected")
    config = AFTConfig.from_dict(fields)
    if config.image_shape is not None:
        raise ValueError(f"{path} is of a model of pixels, which has no tokenizer")
    if config.alphabet is None and config.vocab_size != 256:
        raise ValueError(
            f"{path} is of a model with {config.vocab_size} tokens that are not bytes; "
            "its tokenizer was not saved beside it"
        )
    return config.alphabet


_NAMES = [chr(byte) if 0x20 <= byte < 0x7F else f"<0x{byte:02X}>" for byte in range(256)]
_BYTES = {name: byte for byte, name in enumerate(_NAMES)}
_NOT_IN_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}

AutoTokenizer.register(AFTConfig, AFTTokenizer, exist_ok=True)
