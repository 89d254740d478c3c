"""The tokenizer of bytes, what is saved beside a model, and what `import aft` alone makes of Transformers."""

import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    LogitsProcessor,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)

from aft import AFTConfig, AFTForCausalLM, AFTForImageClassification, AFTImageConfig, AFTTokenizer
from aft.training import rundir
from aft.training.run import start
from small_runs import TINY, TINY_PIXELS, tiny, write_images, write_text

LETTERS = [10, 32, *range(97, 123)]
WORDS = ["naïve", "日本語", "x", "😀 smile", "\n", "two  spaces", "é"]


def small_model(**fields) -> AFTForCausalLM:
    """A model with weights large enough that its choices differ."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "initializer_range": 0.3}
    return AFTForCausalLM(AFTConfig(**sizes | {"max_position_embeddings": 32} | fields)).eval()


def without_tokenizer(folder: Path, **fields) -> Path:
    """A saved model as runs were before they had a tokenizer."""
    small_model(**fields).save_pretrained(folder)
    return folder


def in_a_new_process(code: str, *args: object) -> str:
    """What a script prints, run with warnings as errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *map(str, args)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# Text to tokens and back


@given(st.text())
def test_any_text_comes_back(text):
    tokenizer = AFTTokenizer()
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    for skip in (False, True):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == text
    assert tokenizer.convert_tokens_to_string(tokenizer.tokenize(text)) == text


@given(st.text(alphabet=[chr(byte) for byte in LETTERS]))
def test_text_in_an_alphabet_comes_back(text):
    tokenizer = AFTTokenizer(LETTERS)
    ids = tokenizer(text)["input_ids"]
    assert bytes(LETTERS[i] for i in ids) == text.encode()
    for skip in (False, True):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == text


@given(st.binary())
def test_any_bytes_decode(content):
    assert AFTTokenizer().decode(list(content)) == content.decode(errors="replace")


@pytest.mark.parametrize("name", ["<0xFF>", "<0x0A>", "ÿ", "<pad>", " <0xFF> <0xFF>"])
def test_a_name_of_a_token_in_a_text_is_text(name):
    tokenizer = AFTTokenizer()
    assert tokenizer(name)["input_ids"] == list(name.encode())
    assert tokenizer.encode(name, split_special_tokens=False) == list(name.encode())


def test_pairs_and_batches_of_ids_and_tensors():
    tokenizer = AFTTokenizer()
    assert tokenizer("a", "b")["input_ids"] == [97, 98]
    assert tokenizer.decode(97) == "a"
    assert tokenizer.decode(torch.tensor([97, 98])) == "ab"
    assert tokenizer.batch_decode(torch.tensor([[97], [98]])) == ["a", "b"]
    assert tokenizer.decode([]) == ""
    assert tokenizer("abcd", truncation=True, max_length=2)["input_ids"] == [97, 98]


def test_the_vocabulary_agrees_with_itself():
    for tokenizer, bytes_known in ((AFTTokenizer(), list(range(256))), (AFTTokenizer(LETTERS), LETTERS)):
        vocabulary = tokenizer.get_vocab()
        assert len(tokenizer) == tokenizer.vocab_size == len(vocabulary) == len(bytes_known)
        for i, byte in enumerate(bytes_known):
            name = tokenizer.convert_ids_to_tokens(i)
            assert name == (chr(byte) if 32 <= byte < 127 else f"<0x{byte:02X}>")
            assert vocabulary[name] == i == tokenizer.convert_tokens_to_ids(name)
        assert tokenizer.convert_tokens_to_ids(["<s>", "a"]) == [None, vocabulary["a"]]
        assert tokenizer.get_added_vocab() == {}


def test_errors_name_what_came():
    letters = AFTTokenizer(LETTERS)
    message = r"byte 0xc3 of 'é', character 3 of the text, is not one of the 28 bytes"
    with pytest.raises(ValueError, match=message):
        letters(["fine", "cafés"])
    with pytest.raises(ValueError, match="surrogates not allowed"):
        AFTTokenizer()("\ud800")
    for wrong in (28, -1):
        with pytest.raises(ValueError, match=rf"ids must be 0 to 27, got {wrong}"):
            letters.decode([0, wrong])
    with pytest.raises(ValueError, match="tokens must be names of bytes, got 'zz'"):
        letters.convert_tokens_to_string(["a", "zz"])
    for alphabet in ([], [1, 1], [256]):
        with pytest.raises(ValueError, match=r"different bytes, 0 to 255, at least one; got \["):
            AFTTokenizer(alphabet)
    with pytest.raises(ValueError, match="'</s>' cannot be added to a vocabulary of bytes"):
        AFTTokenizer(eos_token="</s>")
    with pytest.raises(ValueError, match="'word' cannot be added"):
        letters.add_tokens(["word"])


def test_a_megabyte_takes_no_seconds():
    text = "".join(f"line {i}: naïve 日本語\n" for i in range(40_000))
    assert len(text.encode()) > 1_000_000
    for tokenizer in (AFTTokenizer(), AFTTokenizer(sorted(set(text.encode())))):
        begun = time.perf_counter()
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        assert tokenizer.decode(ids[0], skip_special_tokens=True) == text
        assert time.perf_counter() - begun < 4


# Padding


def test_padding_is_to_the_left_and_masked():
    batch = AFTTokenizer()(["ab", "c"], padding=True, return_tensors="pt")
    assert batch["input_ids"].tolist() == [[97, 98], [255, 99]]
    assert batch["attention_mask"].tolist() == [[1, 1], [0, 1]]
    batch = AFTTokenizer(LETTERS)(["ab", "c"], padding=True, return_tensors="pt")
    assert batch["input_ids"].tolist() == [[2, 3], [0, 4]]
    assert batch["attention_mask"].tolist() == [[1, 1], [0, 1]]


def test_special_tokens_are_skipped_and_letters_are_not():
    every = AFTTokenizer()
    assert every.decode([255, 255, 0, 97, 0], skip_special_tokens=True) == "\0a\0"
    assert every.decode([255, 97]) == "\ufffda"
    letters = AFTTokenizer(LETTERS)  # padded with its newline
    assert (letters.pad_token, letters.pad_token_id, letters.all_special_ids) == ("<0x0A>", 0, [])
    assert letters.decode([0, 2, 0], skip_special_tokens=True) == "\na\n"
    binary = AFTTokenizer([0, 0xC0, 0xF5, 97])  # has bytes that are no text
    assert (binary.pad_token_id, binary.all_special_ids) == (2, [2])
    # Who makes a letter the end of a text wants it skipped, be it padding as well.
    ended = AFTTokenizer(LETTERS, eos_token="<0x0A>")
    assert ended.decode([2, 0], skip_special_tokens=True) == "a"
    letters.pad_token = "z"
    assert letters.pad_token_id == 27
    assert letters.decode([27], skip_special_tokens=True) == "z"


def test_padding_changes_nothing_in_the_model():
    model, tokenizer = small_model(), AFTTokenizer()
    batch = tokenizer(["a longer one", "short"], padding=True, return_tensors="pt")
    alone = tokenizer("short", return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits[1, -5:], model(**alone).logits[0])


# Streams


@pytest.mark.parametrize("alphabet", [None, sorted(set(" ".join(WORDS).encode()))])
def test_streams_are_of_whole_characters(alphabet, capsys):
    tokenizer = AFTTokenizer(alphabet)
    text = " ".join(WORDS)
    ids = tokenizer(text)["input_ids"]
    pieces = []

    class Recorder(TextStreamer):
        def on_finalized_text(self, text, stream_end=False):
            pieces.append(text)
            super().on_finalized_text(text, stream_end)

    streams = [Recorder(tokenizer), TextIteratorStreamer(tokenizer)]
    for stream in streams:
        for i in ids:
            stream.put(torch.tensor([i]))
        stream.end()
    assert "".join(pieces) == text == "".join(streams[1])
    assert sum(map(bool, pieces)) > len(WORDS) / 2
    assert not any("\ufffd" in piece for piece in pieces)
    assert capsys.readouterr().out == text + "\n"


# Saved and read again


@pytest.mark.parametrize("alphabet", [None, LETTERS])
def test_saved_and_loaded(alphabet, tmp_path):
    tokenizer = AFTTokenizer(alphabet)
    for folder in (tmp_path / "first", tmp_path / "second"):
        tokenizer.save_pretrained(folder)
        assert [path.name for path in folder.iterdir()] == ["tokenizer_config.json"]
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert isinstance(tokenizer, AFTTokenizer)
        assert tokenizer.alphabet == alphabet
    assert tokenizer.padding_side == "left"
    assert tokenizer.get_vocab() == AFTTokenizer(alphabet).get_vocab()
    assert tokenizer.all_special_ids == AFTTokenizer(alphabet).all_special_ids
    copied = pickle.loads(pickle.dumps(tokenizer))
    assert copied("a b")["input_ids"] == tokenizer("a b")["input_ids"]


@pytest.mark.parametrize("alphabet", [None, LETTERS])
def test_a_model_saved_without_a_tokenizer_has_one(alphabet, tmp_path):
    size = 256 if alphabet is None else len(alphabet)
    without_tokenizer(tmp_path, vocab_size=size, alphabet=alphabet)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(tokenizer, AFTTokenizer)
    assert tokenizer.alphabet == alphabet
    assert tokenizer.get_vocab() == AFTTokenizer(alphabet).get_vocab()


def test_a_tokenizer_saved_beside_a_model_is_the_one_that_counts(tmp_path):
    without_tokenizer(tmp_path, vocab_size=len(LETTERS), alphabet=LETTERS)
    AFTTokenizer(LETTERS[::-1], padding_side="right").save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.alphabet == LETTERS[::-1]
    assert tokenizer.padding_side == "right"


def test_models_of_something_else_have_no_tokenizer_of_bytes(tmp_path):
    pixels = {"image_shape": [4, 4, 1], "max_position_embeddings": 16, "bos_token_id": 0}
    with pytest.raises(ValueError, match="of a model of pixels, which has no tokenizer"):
        AutoTokenizer.from_pretrained(without_tokenizer(tmp_path / "pixels", **pixels))
    with pytest.raises(ValueError, match="300 tokens that are not bytes"):
        AutoTokenizer.from_pretrained(without_tokenizer(tmp_path / "words", vocab_size=300))
    GPT2Config().save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match="model_type 'gpt2'; 'aft' was expected"):
        AFTTokenizer.from_pretrained(tmp_path / "gpt2")


def test_training_saves_the_tokenizer(tmp_path):
    run = tmp_path / "run"
    text = write_text(tmp_path / "text.txt")
    start(tiny(TINY, alphabet="distinct"), text, run, overwrite=False)
    checkpoint = rundir.last_checkpoint(run)
    assert checkpoint is not None
    config = json.loads((run / "config.json").read_text())
    for folder in (run, checkpoint):
        fields = json.loads((folder / "tokenizer_config.json").read_text())
        assert fields["alphabet"] == config["alphabet"]
        assert fields["tokenizer_class"] == "AFTTokenizer"
    pipe = pipeline("text-generation", model=str(run))
    assert pipe("line 4 of", max_new_tokens=3, do_sample=False)[0]["generated_text"].startswith("line 4 of")


def test_training_on_pixels_saves_none(tmp_path):
    run = tmp_path / "run"
    data = write_images(tmp_path / "images", {"train": 12, "val": 4})
    start(tiny(TINY_PIXELS), data, run, overwrite=False)
    assert not list(run.rglob("tokenizer_config.json"))


# Generation


@pytest.fixture
def run(tmp_path) -> Path:
    """A model with its tokenizer, as training leaves them."""
    small_model().save_pretrained(tmp_path / "run")
    AFTTokenizer().save_pretrained(tmp_path / "run")
    return tmp_path / "run"


def test_a_pipeline_continues_prompts_of_any_length_in_batches(run):
    prompts = ["a longer prompt \n", "é", "abc", "日本"]
    pipe = pipeline("text-generation", model=str(run))
    options = {"max_new_tokens": 9, "do_sample": False, "return_full_text": False}
    batched = [found[0]["generated_text"] for found in pipe(prompts, batch_size=2, **options)]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(run), AFTTokenizer()
    for prompt, text in zip(prompts, batched, strict=True):
        inputs = tokenizer(prompt, return_tensors="pt")
        new = model.generate(**inputs, max_new_tokens=9, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert len(new) == 9
        assert tokenizer.decode(new, skip_special_tokens=True) == text
    assert len(set(batched)) == len(batched)


class _Dictated(LogitsProcessor):
    """After a prompt of one token comes a text, whatever the model thinks."""

    def __init__(self, text):
        self.text = text

    def __call__(self, input_ids, scores):
        dictated = torch.full_like(scores, -torch.inf)
        dictated[:, self.text[input_ids.shape[1] - 1]] = 0.0
        return dictated


@pytest.mark.parametrize(("stop", "length"), [("b", 2), ("é", 6), ("d\n", 8), (["x", "\u2028", "c"], 4)])
def test_generation_stops_at_strings(stop, length):
    text = b"ab\xffc" + "éd\nz".encode()
    tokenizer = AFTTokenizer()
    model = AFTForCausalLM(AFTConfig(hidden_size=8, num_hidden_layers=1, max_position_embeddings=32)).eval()
    options = {"do_sample": False, "logits_processor": [_Dictated(text)], "max_new_tokens": len(text)}
    inputs = tokenizer("?", return_tensors="pt")
    ids = model.generate(**inputs, **options, stop_strings=stop, tokenizer=tokenizer)[0, 1:]
    assert bytes(ids.tolist()) == text[:length]


def test_a_pipeline_samples(run):
    pipe = pipeline("text-generation", model=str(run))
    found = pipe("ab", max_new_tokens=6, do_sample=True, num_return_sequences=8, temperature=2.0)
    texts = {row["generated_text"] for row in found}
    assert len(texts) > 4
    assert all(text.startswith("ab") for text in texts)


# `import aft` alone

LOADED = """
import sys
assert "aft.models" not in sys.modules
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
print(type(model).__name__, type(tokenizer).__name__)
"""
ORDERS = {
    "aft first": "import aft\nfrom transformers import AutoModelForCausalLM, AutoTokenizer",
    "transformers first": "from transformers import AutoModelForCausalLM, AutoTokenizer\nimport aft",
    "bare transformers first": "import transformers, aft\n"
    "from transformers import AutoModelForCausalLM, AutoTokenizer",
    "twice": "import aft, importlib\nimportlib.reload(aft)\n"
    "from transformers import AutoModelForCausalLM, AutoTokenizer\nimportlib.reload(aft)",
    "tables made anew": "import aft, importlib\nimport transformers.models.auto.configuration_auto as table\n"
    "importlib.reload(table)\nfrom transformers import AutoModelForCausalLM, AutoTokenizer",
}


@pytest.mark.parametrize("order", ORDERS)
def test_importing_aft_is_all_it_takes(order, run):
    assert in_a_new_process(ORDERS[order] + LOADED, run) == "AFTForCausalLM AFTTokenizer\n"


def test_importing_aft_does_for_tokenizers_alone(tmp_path):
    AFTTokenizer(LETTERS).save_pretrained(tmp_path)
    for imports in (
        "import aft\nfrom transformers import AutoTokenizer\n",
        "from transformers import AutoTokenizer\nimport aft\n",
    ):
        code = imports + "import sys\nprint(AutoTokenizer.from_pretrained(sys.argv[1])('b')['input_ids'])"
        assert in_a_new_process(code, tmp_path) == "[3]\n"


def test_importing_aft_does_for_pipelines_and_images(run, tmp_path):
    code = (
        "import aft, sys\nfrom transformers import pipeline\n"
        "print(len(pipeline('text-generation', sys.argv[1])('ab', max_new_tokens=2)))"
    )
    assert in_a_new_process(code, run) == "1\n"
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8}
    AFTForImageClassification(AFTImageConfig(**sizes, patch_size=4)).save_pretrained(tmp_path / "images")
    code = (
        "import aft, sys\nfrom transformers import AutoConfig, AutoModel, AutoModelForImageClassification\n"
        "print(AutoConfig.for_model('aft_image', hidden_size=32).hidden_size)\n"
        "for auto in (AutoModel, AutoModelForImageClassification):\n"
        "    print(type(auto.from_pretrained(sys.argv[1])).__name__)"
    )
    assert in_a_new_process(code, tmp_path / "images").split() == [
        "32",
        "AFTImageModel",
        "AFTForImageClassification",
    ]


def test_importing_both_loads_no_models():
    code = (
        "import sys, aft\nassert 'transformers' not in sys.modules and 'torch' not in sys.modules\n"
        "import transformers\nfrom transformers import AutoConfig, AutoTokenizer\n"
        "found = [name for name in sys.modules if name.startswith('aft.')]\n"
        "assert found == ['aft.auto_classes'], found\n"
        "import inspect, transformers.models.auto.configuration_auto as table\n"
        "assert 'class AutoConfig' in inspect.getsource(table)\n"
        "import aft.models, transformers.models.aft as alias\n"
        "assert alias is aft.models and aft.models.__spec__.name == 'aft.models'\n"
    )
    in_a_new_process(code)


def test_a_transformers_that_works_otherwise_is_left_alone():
    code = (
        "import types, sys\n"
        "name = 'transformers.models.auto.configuration_auto'\n"
        "for parent in ('transformers', 'transformers.models', 'transformers.models.auto', name):\n"
        "    sys.modules[parent] = types.ModuleType(parent)\n"
        "import aft\n"
    )
    in_a_new_process(code)
