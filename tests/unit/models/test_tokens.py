"""Texts on their way to token ids, against the same done by the libraries directly."""

from __future__ import annotations

import asyncio
import io
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers
from numpy.typing import NDArray

from headrace.config import make_settings
from headrace.errors import Code, ConfigurationError, Rejected
from headrace.models.config import TransformTable, make_model_config
from headrace.models.inputs.padding import add_padding
from headrace.models.inputs.tokens import TokenDecoder, Tokens
from headrace.models.media_config import TokensTransform
from headrace.models.processing import plan_processing
from headrace.models.signature import TensorSpec, make_signature
from headrace.protocol.messages import Tensor
from headrace.protocol.tensors import to_array
from tests.support.traced_memory import peak_bytes_of
from tests.unit.models.requests import spec

ALPHABET = "abcdefgh ijkl mnop\tqrstu vwxyz äöü éèê ß漢字かな 😀 .,!?'-0123456789\n"
FREE = [-1, -1]


def texts(count: int, seed: int = 19) -> list[str]:
    """Texts of letters of several scripts, some of them empty."""
    rng = random.Random(seed)
    return ["".join(rng.choices(ALPHABET, k=rng.randrange(60))) for _ in range(count)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A version with a `tokenizer.json` like that of BERT, and a model of SentencePiece."""
    directory = tmp_path_factory.mktemp("texts") / "1"
    directory.mkdir()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = tokenizers.trainers.WordPieceTrainer(vocab_size=300, special_tokens=special)
    tokenizer.train_from_iterator(texts(300, seed=1), trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.enable_padding(pad_id=0, length=128)  # which the transform leaves out
    tokenizer.save(str(directory / "tokenizer.json"))
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts(300, seed=1)),
        model_writer=model,
        vocab_size=150,
        pad_id=3,
        minloglevel=2,
    )
    (directory / "text.model").write_bytes(model.getvalue())
    return directory


def tokens_of(
    directory: Path, inputs: dict[str, list[int]] | None = None, /, **settings: Any
) -> Tokens:
    """The transform of a model with these inputs."""
    top = {
        key: settings.pop(key) for key in ("sequence_buckets", "mask_of", "pad") & settings.keys()
    }
    if "mask_of" in top:
        top["mask"] = top.pop("mask_of")
    config = make_model_config({"transform": {"tokens": settings}, **top}, make_settings({}))
    assert isinstance(config.transform, TransformTable)
    assert config.transform.tokens is not None
    given = inputs or {"input_ids": FREE, "attention_mask": FREE}
    signature = make_signature(
        [spec(name, "INT64", shape) for name, shape in given.items()],
        [spec("y", "FP32", [-1])],
    )
    return Tokens(config.transform.tokens, add_padding(signature, config), directory)


def convert(tokens: Tokens, payload: bytes, content_type: str) -> dict[str, NDArray[Any]]:
    """The inputs that a payload becomes, by name."""
    return {
        each.name: to_array(Tensor(each.name, each.datatype, tuple(each.shape), each.data))
        for each in tokens(payload, content_type)
    }


def refusal(tokens: Tokens, payload: bytes, content_type: str = "text/plain") -> Rejected:
    """The error with which a payload is refused."""
    with pytest.raises(Rejected) as caught:
        tokens(payload, content_type)
    return caught.value


def directly(directory: Path) -> Any:
    """The tokenizer itself, without padding."""
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_padding()
    return tokenizer


def test_thousand_texts_are_the_tokens_that_the_library_gives(directory: Path) -> None:
    """Each text alone, with all inputs that a model may have."""
    names = ("input_ids", "attention_mask", "token_type_ids")
    tokens = tokens_of(
        directory, dict.fromkeys(names, FREE) | {"spans": [-1, -1, 2]}, offsets="spans"
    )
    tokenizer = directly(directory)
    for text in texts(1000):
        expected = tokenizer.encode(text)
        got = convert(tokens, text.encode(), "text/plain")

        assert got["input_ids"].tolist() == [expected.ids]
        assert got["attention_mask"].tolist() == [expected.attention_mask]
        assert got["token_type_ids"].tolist() == [expected.type_ids]
        assert got["spans"].tolist() == [[list(span) for span in expected.offsets]]


def test_thousand_texts_are_the_ids_that_sentencepiece_gives(directory: Path) -> None:
    """With the token for the end, as T5 has it."""
    tokens = tokens_of(directory, {"input_ids": FREE}, tokenizer="text.model", eos=True)
    model = sentencepiece.SentencePieceProcessor(model_file=str(directory / "text.model"))
    for text in texts(1000):
        got = convert(tokens, text.encode(), "text/plain")
        assert got["input_ids"].tolist() == [[*model.encode(text), model.eos_id()]]


def test_rows_and_pairs_are_padded_as_the_library_pads_them(directory: Path) -> None:
    """In JSON, in its lines, truncated to the same tokens."""
    names = ("input_ids", "attention_mask", "token_type_ids")
    tokens = tokens_of(
        directory,
        dict.fromkeys(names, FREE),
        pair="question",
        text="context",
        truncate=True,
        max_tokens=40,
    )
    tokenizer = directly(directory)
    tokenizer.enable_truncation(40)
    tokenizer.enable_padding(pad_id=0)
    left, right = texts(48), texts(48, seed=5)
    for start in range(0, 48, 8):
        pairs = list(zip(left, right, strict=True))[start : start + 8]
        expected = tokenizer.encode_batch(pairs)
        rows = [{"context": first, "question": second, "id": 7} for first, second in pairs]
        lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        for payload, content_type in (
            (json.dumps(rows).encode(), "application/json"),
            (lines, "application/x-ndjson"),
        ):
            got = convert(tokens, payload, content_type)

            assert got["input_ids"].tolist() == [each.ids for each in expected]
            assert got["attention_mask"].tolist() == [each.attention_mask for each in expected]
            assert got["token_type_ids"].tolist() == [each.type_ids for each in expected]


def test_strings_are_rows_too(directory: Path) -> None:
    """A list of strings, or one."""
    tokens = tokens_of(directory)
    assert convert(tokens, b'["ab", "cd ef"]', "application/json")["input_ids"].shape[0] == 2
    assert convert(tokens, b'"ab"', "application/vnd.text+json")["input_ids"].shape[0] == 1


def test_fixed_length_is_filled_with_padding(directory: Path) -> None:
    """A model of 16 tokens gets 16; the mask says which count."""
    tokens = tokens_of(directory, {"input_ids": [-1, 16], "attention_mask": [-1, 16]})
    expected = directly(directory).encode("ab cd").ids
    got = convert(tokens, b"ab cd", "text/plain")
    assert got["input_ids"].tolist() == [expected + [0] * (16 - len(expected))]
    assert got["attention_mask"].sum() == len(expected)
    error = refusal(tokens, b"ab " * 40)
    assert error.code == Code.TOO_LARGE
    assert error.message.startswith("payload: expected at most 16 tokens, as the input has, got")


def test_rows_are_padded_with_the_value_of_the_buckets(directory: Path) -> None:
    """A row is the same beside a longer row of its own request and of another request."""
    tokens = tokens_of(
        directory,
        sequence_buckets=[16, 32],
        mask_of="attention_mask",
        pad={"input_ids": 9, "attention_mask": 0},
    )
    got = convert(tokens, b'["a", "a b c d"]', "application/json")
    assert got["input_ids"][0, -1] == 9


def test_truncated_text_keeps_the_tokens_of_sentencepiece_around_it(directory: Path) -> None:
    """Begin and end stay."""
    tokens = tokens_of(
        directory,
        {"input_ids": FREE},
        **{"tokenizer": "text.model", "bos": True, "eos": True, "truncate": True, "max_tokens": 6},
    )
    model = sentencepiece.SentencePieceProcessor(model_file=str(directory / "text.model"))
    text = texts(1, seed=3)[0] * 3
    got = convert(tokens, text.encode(), "text/plain")["input_ids"].tolist()
    assert got == [[model.bos_id(), *model.encode(text)[:4], model.eos_id()]]


def test_rows_are_counted_before_they_are_decoded(directory: Path) -> None:
    """Objects of a payload of 4 MB would take a hundred, and as many milliseconds."""
    tokens = tokens_of(directory)
    payload = b"[" + b'{"text":{}},' * 10_000 + b"{}]"

    peak_bytes = peak_bytes_of(lambda: refusal(tokens, payload, "application/json"))

    assert (
        "1 to max_rows = 64 texts, got 10001"
        in refusal(tokens, payload, "application/json").message
    )
    assert peak_bytes < 10 * len(payload)


def test_text_whose_other_fields_would_take_too_much_memory_is_too_large(directory: Path) -> None:
    """6 MB of empty objects would take 500."""
    payload = b'{"text":"a","more":[' + b"{}," * 2_000_000 + b"{}]}"

    error = refusal(tokens_of(directory), payload, "application/json")

    assert error.code == Code.TOO_LARGE
    assert error.message.startswith("payload: memory of its values: ")


@pytest.mark.parametrize("file", ["tokenizer.json", "text.model"])
def test_text_is_truncated_to_narrower_input(directory: Path, file: str) -> None:
    """`max_tokens` is larger by default than most models' inputs of a fixed width."""
    inputs = {"input_ids": [-1, 8], "attention_mask": [-1, 8]}
    tokens = tokens_of(directory, inputs, tokenizer=file, truncate=True)

    got = convert(tokens, b"ab cd ef " * 40, "text/plain")

    assert got["input_ids"].shape == (1, 8)
    assert got["attention_mask"].all()


@pytest.mark.parametrize(
    ("width", "settings"),
    [
        (-1, {"max_tokens": 2}),
        (2, {"truncate": True}),
        (-1, {"max_tokens": 3, "pair": "question"}),
        (-1, {"max_tokens": 1, "tokenizer": "text.model", "bos": True}),
    ],
)
def test_width_without_room_beside_special_tokens_is_refused_at_load(
    directory: Path, width: int, settings: dict[str, Any]
) -> None:
    """Every text would be an error of its caller."""
    with pytest.raises(ConfigurationError, match=r"room for a token beside the [123] that"):
        tokens_of(directory, {"input_ids": [-1, width], "attention_mask": FREE}, **settings)


@pytest.mark.parametrize("file", ["tokenizer.json", "text.model"])
def test_thousand_rows_of_ids_are_the_texts_that_the_library_gives(
    directory: Path, file: str
) -> None:
    """Ids that it does not have are passed over."""
    decoder = TokenDecoder(TokensTransform(tokenizer=file), directory)
    ids = np.random.default_rng(8).integers(-100, 140, (1000, 20))
    tokenizer = directly(directory)
    model = sentencepiece.SentencePieceProcessor(model_file=str(directory / "text.model"))
    decode = tokenizer.decode if file == "tokenizer.json" else model.decode

    texts = decoder.decode(ids)

    assert texts.tolist() == [decode([n for n in row if n >= 0]).encode() for row in ids.tolist()]
    assert decoder.decode(np.array([[-100, 10**9]])).tolist() == [b""]


# --- what is refused ----------------------------------------------------------------------------


def test_flood_of_tokens_is_too_large(directory: Path) -> None:
    """Its bytes are counted before it is split, and its tokens after that."""
    tokens = tokens_of(directory)
    flood = refusal(tokens, b"a " * 2_000_000)
    assert flood.code == Code.TOO_LARGE
    assert flood.message == "payload: expected at most 8192 bytes, got 4000000"
    row = refusal(tokens, json.dumps(["a", "b" * 9000]).encode(), "application/json")
    assert row.message == "rows[1]: expected at most 8192 bytes, got 9000"
    long = refusal(tokens, b"a " * 600)
    assert long.code == Code.TOO_LARGE
    assert long.message == "payload: expected at most max_tokens = 512, got 602"


@pytest.mark.parametrize(
    ("payload", "content_type", "message"),
    [
        (b"a\xff", "text/plain", "payload: expected UTF-8, got byte 0xff at 1"),
        (b"a", "image/png", "header content-type: expected one of text/plain, application/json,"),
        (b"[1", "application/json", "payload: expected JSON, got"),
        (b'["a", 3]', "application/json", "rows[1]: expected a string or an object, got 3"),
        (b'{"body": "a"}', "application/json", "rows[0].text: expected a string, got none"),
        (b'{"text": 3}\n', "application/x-ndjson", "rows[0].text: expected a string, got 3"),
        (b'"a"\n\n{\n', "application/x-ndjson", "rows[1]: expected JSON"),
        (b"[]", "application/json", "payload: expected 1 to max_rows = 64 texts, got 0"),
    ],
)
def test_payload_that_is_no_text_is_refused(
    directory: Path, payload: bytes, content_type: str, message: str
) -> None:
    """The place is named."""
    error = refusal(tokens_of(directory), payload, content_type)
    assert error.code == Code.INVALID_REQUEST
    assert error.message.startswith(message)


def test_plain_text_is_no_pair(directory: Path) -> None:
    """The model would get half of its input."""
    error = refusal(tokens_of(directory, pair="b"), b"a")
    expected = "application/json, application/jsonl, application/ndjson, application/x-ndjson"
    assert error.message == f"header content-type: expected one of {expected}, got text/plain"


def test_too_many_rows_are_too_large(directory: Path) -> None:
    """Before any of them is split."""
    error = refusal(tokens_of(directory), json.dumps(["a"] * 65).encode(), "application/json")
    assert (error.code, error.message.endswith("got 65")) == (Code.TOO_LARGE, True)
    lines = refusal(tokens_of(directory), b"{no JSON\n" * 100_000, "application/x-ndjson")
    assert (lines.code, lines.message.endswith("got 100000")) == (Code.TOO_LARGE, True)


def test_ids_behind_unused_ones_are_decoded(directory: Path, tmp_path: Path) -> None:
    """The largest id may be larger than the number of ids."""
    content = json.loads((directory / "tokenizer.json").read_text())
    far = {"id": 5000, "content": "far", "single_word": False, "lstrip": False, "rstrip": False}
    content["added_tokens"].append({**far, "normalized": False, "special": False})
    content["model"]["vocab"]["far"] = 5000
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    decoder = TokenDecoder(TokensTransform(), tmp_path)
    assert decoder.decode(np.array([[5000, 4999, 5001]])).tolist() == [b"far"]


class PanicException(BaseException):
    """Stand-in for what pyo3 raises when Rust code panics: a class of this name in no module."""


class StandInTokenizer:
    """A tokenizer that raises instead of encoding and decoding."""

    padding = None

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def from_buffer(self, _content: bytes) -> StandInTokenizer:
        """Itself, whatever the file holds."""
        return self

    def get_vocab(self) -> dict[str, int]:
        """One token."""
        return {"a": 1}

    def no_padding(self) -> None:
        """It has none."""

    def no_truncation(self) -> None:
        """It has none."""

    def num_special_tokens_to_add(self, _is_pair: bool) -> int:
        """It adds none."""
        return 0

    def encode_batch(self, *_: Any, **_more: Any) -> Any:
        """Raise."""
        raise self._error

    def decode(self, _ids: list[int]) -> str:
        """Raise."""
        raise self._error


def test_panic_of_tokenizer_fails_its_request_alone(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no `Exception`, and would end the event loop or the thread that it reached."""
    panic = StandInTokenizer(PanicException("index out of bounds"))
    monkeypatch.setitem(sys.modules, "tokenizers", SimpleNamespace(Tokenizer=panic))

    refused = refusal(tokens_of(directory), b"a text")
    assert refused.code == Code.INVALID_REQUEST
    assert refused.message == (
        "payload: expected a text for the tokenizer, got PanicException: index out of bounds"
    )
    with pytest.raises(Rejected, match=r"expected ids that .* index out of bounds") as raised:
        TokenDecoder(TokensTransform(), directory).decode(np.array([[1]]))
    assert raised.value.code == Code.MODEL_FAILED


@pytest.mark.parametrize("kind", [KeyboardInterrupt, asyncio.CancelledError, SystemExit])
def test_interruption_of_tokenizer_is_passed_on(
    directory: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    """It is no failure of the text."""
    interrupted = StandInTokenizer(kind())
    monkeypatch.setitem(sys.modules, "tokenizers", SimpleNamespace(Tokenizer=interrupted))

    with pytest.raises(kind):
        tokens_of(directory)(b"a text", "text/plain")
    with pytest.raises(kind):
        TokenDecoder(TokensTransform(), directory).decode(np.array([[1]]))


def test_rows_of_two_lengths_without_a_mask_are_refused(directory: Path) -> None:
    """The model could not tell padding from text."""
    tokens = tokens_of(directory, {"input_ids": FREE})
    error = refusal(tokens, b'["a", "a b"]', "application/json")
    assert error.code == Code.INVALID_TENSOR
    assert "as no input masks padding" in error.message


def test_large_text_is_slow_and_a_sentence_is_not(directory: Path) -> None:
    """A sentence is split on the event loop."""
    tokens = tokens_of(directory)
    assert [tokens.is_slow(b"a" * size, "text/plain", 16384) for size in (100, 4000)] == [
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("file", "package"), [("tokenizer.json", "tokenizers"), ("text.model", "sentencepiece")]
)
def test_missing_package_is_named_with_its_extra(
    directory: Path, monkeypatch: pytest.MonkeyPatch, file: str, package: str
) -> None:
    """The version cannot be served, and the reason says what to install."""
    monkeypatch.setitem(sys.modules, package, None)
    expected = rf"{file} needs the package {package}: pip install 'headrace\[text\]'"
    with pytest.raises(ConfigurationError, match=expected):
        tokens_of(directory, tokenizer=file)


INPUTS = {"input_ids": FREE, "attention_mask": FREE}


@pytest.mark.parametrize(
    ("inputs", "settings", "message"),
    [
        ({"input_ids": FREE, "pixels": FREE}, {}, "expected inputs among input_ids"),
        ({"ids": FREE}, {}, "expected inputs among input_ids"),
        ({"input_ids": FREE}, {"mask": "attention"}, "expected inputs among input_ids, attention"),
        ({"input_ids": [-1]}, {}, "input_ids of 2 dimensions in INT64 or INT32"),
        (INPUTS, {"tokenizer": "other.json"}, r"tokens.tokenizer: .*other.json: No such file"),
        (INPUTS, {"tokenizer": "../tokenizer.json"}, "a file in the version's directory"),
        (INPUTS, {"eos": True}, "expected bos and eos only for SentencePiece"),
        (INPUTS, {"tokenizer": "text.model", "pair": "b"}, "only with a tokenizer.json"),
        (INPUTS, {"tokenizer": "broken.json"}, "tokens.tokenizer: broken.json: "),
        (INPUTS, {"tokenizer": "broken.model"}, "tokens.tokenizer: broken.model: "),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    directory: Path, inputs: dict[str, list[int]], settings: dict[str, Any], message: str
) -> None:
    """The version cannot be served, and the reason names the key."""
    for name in ("broken.json", "broken.model"):
        (directory / name).write_bytes(b"no tokenizer")
    with pytest.raises(ConfigurationError, match=message):
        tokens_of(directory, inputs, **settings)


@pytest.mark.parametrize(
    "output", [spec("y", "FP32", [-1, -1]), spec("y", "INT64", [-1]), spec("z", "INT64", [-1, -1])]
)
def test_texts_of_an_output_without_ids_are_refused(output: TensorSpec) -> None:
    """There must be an output of that name with rows of integers."""
    config = make_model_config({"transform": {"tokens": {"decode": "y"}}}, make_settings({}))
    signature = make_signature([spec("input_ids", "INT64", FREE)], [output])
    with pytest.raises(ConfigurationError, match=r"decode: expected an output of 2 dimensions"):
        plan_processing(signature, config, Path())


def test_texts_of_a_model_in_python_are_refused() -> None:
    """Its own code makes them."""
    values = {"backend": "python", "transform": {"tokens": {"decode": "y"}}}
    with pytest.raises(ConfigurationError, match=r"decode: expected only with backend = onnx"):
        make_model_config(values, make_settings({}))
