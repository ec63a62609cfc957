"""Conversion of texts to token ids: by `tokenizer.json` of tokenizers, or by SentencePiece.

A payload is one text, or texts and pairs of texts in JSON, which become rows. Rows of one request
are padded to the longest of them, as the mask says; padding to the lengths of other requests is
left to `sequence_buckets`. What a text may cost is bounded before it is split into tokens. Ids in
an output of the model become texts by the same tokenizer.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.errors import Code, ConfigurationError, Rejected, describe_error
from headrace.models.inputs.records import JSON_LINES, check_json_memory
from headrace.models.media_config import TokensTransform
from headrace.models.processing import read_in_version
from headrace.models.signature import Signature, TensorSpec
from headrace.protocol.codec.faults import describe_json_error, shown
from headrace.protocol.compression import too_large
from headrace.protocol.headers import JSON
from headrace.protocol.messages import InputTensor
from headrace.protocol.tensors import DATATYPES, from_array

TEXT = "text/plain"
INSTALL = "pip install 'headrace[text]'"
_DATATYPES = ("INT64", "INT32")


class _Row(NamedTuple):
    """A text, or a pair of them."""

    text: str
    pair: str | None = None


class _Encoded(NamedTuple):
    """Tokens of a row. Offsets are characters of the text, or of its pair."""

    ids: Sequence[int]
    type_ids: Sequence[int] = ()
    offsets: Sequence[tuple[int, int]] = ()


class _Library(Protocol):
    """A tokenizer.

    Attributes:
        pad_id: id that fills rows; 0 if the tokenizer has none.
        size: one more than the largest id.
        special_count: tokens that it puts around the texts of a row.
    """

    pad_id: int
    size: int
    special_count: int

    def truncate(self, most: int) -> None:
        """Shorten rows to so many tokens from now on."""
        ...

    def encode(self, row: _Row) -> _Encoded:
        """Return the tokens of a row."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids below `size`, without special tokens."""
        ...


class Tokens:
    """Converts payloads to the inputs of one version.

    Args:
        directory: of the version, which has the tokenizer's file.

    Raises:
        ConfigurationError: the settings do not fit the inputs, or a file or package is missing.
    """

    def __init__(self, config: TokensTransform, signature: Signature, directory: Path) -> None:
        self._config = config
        self._specs = signature.inputs
        _check_inputs(config, signature)
        self._encoder = _open(config, directory)
        spec = next(spec for spec in signature.inputs if spec.name == config.ids)
        self._width = spec.shape[1]
        most = config.max_tokens if self._width < 0 else min(config.max_tokens, self._width)
        if most <= self._encoder.special_count:
            raise _unfit(
                f"max_tokens and {config.ids} with room for a token beside the "
                f"{self._encoder.special_count} that {config.tokenizer} adds",
                f"room for {most}",
            )
        if config.truncate:
            self._encoder.truncate(most)
        self._pad_id = int(spec.pad) if signature.buckets else self._encoder.pad_id
        self._max_bytes = config.max_bytes or 16 * config.max_tokens
        self._has_mask = any(spec.name == config.mask for spec in signature.inputs)

    def __call__(self, payload: bytes, content_type: str) -> list[InputTensor]:
        """Return the inputs of a payload.

        Raises:
            Rejected: `TOO_LARGE` over a limit, `INVALID_REQUEST` if it cannot be read.
        """
        found = self._read(payload, content_type)
        for row, where in found:
            self._check_bytes(row, where)
        rows = [self._encode(row, where) for row, where in found]
        width = self._width if self._width >= 0 else max(len(row.ids) for row in rows)
        if any(len(row.ids) != width for row in rows):
            self._check_padded(rows, width)
        return [self._make_input(spec, rows, width) for spec in self._specs]

    def is_slow(self, payload: bytes, _content_type: str, inline_bytes: int) -> bool:
        """See `headrace.models.inputs.transforms.Transform`."""
        return len(payload) > inline_bytes // 8  # about what parsing JSON costs more bytes

    def _check_bytes(self, row: _Row, where: str) -> None:
        size = len(row.text.encode("utf-8", "replace"))
        size += len((row.pair or "").encode("utf-8", "replace"))
        if size > self._max_bytes:
            raise too_large(where, self._max_bytes, str(size))

    def _encode(self, row: _Row, where: str) -> _Encoded:
        try:
            encoded = self._encoder.encode(row)
        except BaseException as error:
            if not _is_of_library(error):
                raise
            # Whatever a text may make the library raise is the caller's.
            raise _unreadable(where, "a text for the tokenizer", describe_error(error)) from error
        if len(encoded.ids) > self._config.max_tokens:
            raise Rejected.mismatch(
                Code.TOO_LARGE,
                where,
                expected=f"at most max_tokens = {self._config.max_tokens}",
                got=str(len(encoded.ids)),
            )
        return encoded

    def _check_padded(self, rows: Sequence[_Encoded], width: int) -> None:
        longest = max(len(row.ids) for row in rows)
        if longest > width:
            raise Rejected.mismatch(
                Code.TOO_LARGE,
                "payload",
                expected=f"at most {width} tokens, as the input has",
                got=str(longest),
            )
        if not self._has_mask:
            raise Rejected.mismatch(
                Code.INVALID_TENSOR,
                "payload",
                expected=f"{width} tokens in each text, as no input masks padding",
                got=", ".join(str(len(row.ids)) for row in rows[:8]),
            )

    def _make_input(self, spec: TensorSpec, rows: Sequence[_Encoded], width: int) -> InputTensor:
        config = self._config
        shape = (len(rows), width, 2) if spec.name == config.offsets else (len(rows), width)
        fill = self._pad_id if spec.name == config.ids else 0
        array = np.full(shape, fill, DATATYPES[spec.datatype].dtype)
        for place, row in enumerate(rows):
            length = len(row.ids)
            if spec.name == config.ids:
                array[place, :length] = row.ids
            elif spec.name == config.mask:
                array[place, :length] = 1
            elif spec.name == config.type_ids:
                array[place, :length] = row.type_ids or 0
            elif length:
                array[place, :length] = row.offsets
        tensor = from_array(spec.name, array)
        return InputTensor(
            name=spec.name,
            datatype=tensor.datatype,
            shape=list(tensor.shape),
            data=memoryview(tensor.data),
        )

    # --- payloads --------------------------------------------------------------------------------

    def _read(self, payload: bytes, content_type: str) -> list[tuple[_Row, str]]:
        """Return the rows of a payload, and what each is called in messages."""
        if content_type == TEXT and not self._config.pair:
            if len(payload) > self._max_bytes:  # before it is copied
                raise too_large("payload", self._max_bytes, str(len(payload)))
            return [(_Row(_decode(payload)), "payload")]
        texts: Sequence[bytes | msgspec.Raw]
        if content_type in JSON_LINES:
            check_json_memory(payload)
            texts = [line for line in payload.split(b"\n") if line.strip()]
        elif content_type == JSON or content_type.endswith("+json"):
            check_json_memory(payload)
            texts = _split(payload)
        else:
            text = "" if self._config.pair else f"{TEXT}, "
            raise Rejected.mismatch(
                Code.INVALID_REQUEST,
                "header content-type",
                expected=f"one of {text}{JSON}, {', '.join(sorted(JSON_LINES))}",
                got=content_type or "none",
            )
        self._check_count(len(texts))  # before each costs more than its bytes
        found: list[tuple[_Row, str]] = []
        for number, content in enumerate(texts):
            where = f"rows[{number}]"
            value = _parse(content, "payload" if content is payload else where)
            found.append((self._make_row(value, where), where))
        return found

    def _check_count(self, count: int) -> None:
        if not 1 <= count <= self._config.max_rows:
            code = Code.TOO_LARGE if count else Code.INVALID_REQUEST
            expected = f"1 to max_rows = {self._config.max_rows} texts"
            raise Rejected.mismatch(code, "payload", expected=expected, got=str(count))

    def _make_row(self, value: Any, where: str) -> _Row:
        """Return the row in a string, or in an object with the named fields."""
        config = self._config
        if isinstance(value, str) and not config.pair:
            return _Row(value)
        if not isinstance(value, dict):
            kind = "an object" if config.pair else "a string or an object"
            raise _unreadable(where, kind, shown(value))
        text = _find_text(value, config.text, where)
        return _Row(text, _find_text(value, config.pair, where) if config.pair else None)


def _find_text(value: dict[str, Any], field: str, where: str) -> str:
    text = value.get(field)
    if not isinstance(text, str):
        got = shown(text) if field in value else "none"
        raise _unreadable(f"{where}.{field}", "a string", got)
    return text


def _decode(payload: bytes) -> str:
    try:
        return payload.decode()
    except UnicodeDecodeError as error:
        got = f"byte {payload[error.start]:#04x} at {error.start}"
        raise _unreadable("payload", "UTF-8", got) from error


_split_array = msgspec.json.Decoder(list[msgspec.Raw]).decode


def _split(payload: bytes) -> Sequence[bytes | msgspec.Raw]:
    """Return the elements of an array, undecoded, or what is no array."""
    if not payload.lstrip().startswith(b"["):
        return [payload]
    try:
        return _split_array(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _unreadable("payload", "JSON", describe_json_error(error, payload)) from error


def _parse(content: bytes | msgspec.Raw, where: str) -> Any:
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _unreadable(where, "JSON", describe_json_error(error, bytes(content))) from error


def _is_of_library(error: BaseException) -> bool:
    """Return True for errors of a tokenizer, also for a panic of its Rust code: pyo3 derives that
    from BaseException, and no module has its class.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _unreadable(where: str, expected: str, got: str) -> Rejected:
    return Rejected.mismatch(Code.INVALID_REQUEST, where, expected=expected, got=got)


class TokenDecoder:
    """Makes texts of ids, for the outputs of one version.

    Raises:
        ConfigurationError: the tokenizer's file or its package is missing.
    """

    def __init__(self, config: TokensTransform, directory: Path) -> None:
        self._library = _open(config, directory)

    def decode(self, ids: NDArray[Any]) -> NDArray[Any]:
        """Return the texts of rows of ids, as bytes; ids that the tokenizer does not have are
        passed over, such as -100, which stands for none.

        Raises:
            Rejected: `MODEL_FAILED` if the tokenizer fails.
        """
        texts: NDArray[Any] = np.empty(len(ids), object)
        for place, row in enumerate(ids):
            known = row[(row >= 0) & (row < self._library.size)]
            texts[place] = self._decode(known.tolist()).encode("utf-8", "replace")
        return texts

    def _decode(self, ids: list[int]) -> str:
        try:
            return self._library.decode(ids)
        except BaseException as error:
            if not _is_of_library(error):
                raise
            raise Rejected.mismatch(
                Code.MODEL_FAILED,
                "output",
                expected="ids that the tokenizer decodes",
                got=describe_error(error),
            ) from error


# --- settings -----------------------------------------------------------------------------------


def _check_inputs(config: TokensTransform, signature: Signature) -> None:
    """Check that each input of the model is one that tokens make."""
    names = [spec.name for spec in signature.inputs]
    made = {config.ids, config.mask, config.type_ids, config.offsets}
    asked = {name for name in config.asked if name not in names}
    if set(names) - made or config.ids not in names or asked:
        expected = f"{config.ids}, {config.mask}, {config.type_ids} and what the keys name"
        raise _unfit(f"inputs among {expected}", ", ".join(names))
    for spec in signature.inputs:
        rank = 3 if spec.name == config.offsets else 2
        if len(spec.shape) != rank or spec.datatype not in _DATATYPES:
            raise _unfit(
                f"{spec.name} of {rank} dimensions in {' or '.join(_DATATYPES)}",
                f"{spec.datatype} {list(spec.shape)}",
            )


def _unfit(expected: str, got: str) -> ConfigurationError:
    return ConfigurationError(f"transform.tokens: expected {expected}, got {got}")


# --- tokenizers ---------------------------------------------------------------------------------


def _open(config: TokensTransform, directory: Path) -> _Library:
    content = read_in_version(directory, config.tokenizer, "transform.tokens.tokenizer")
    is_json = config.tokenizer.endswith(".json")
    package = "tokenizers" if is_json else "sentencepiece"
    try:
        library = importlib.import_module(package)
    except ImportError as error:
        raise ConfigurationError(
            f"transform.tokens: {config.tokenizer} needs the package {package}: {INSTALL}"
        ) from error
    try:
        return (_Tokenizer if is_json else _SentencePiece)(library, content, config)
    except ConfigurationError:
        raise
    except Exception as error:  # both raise anything for a file that is none
        raise ConfigurationError(
            f"transform.tokens.tokenizer: {config.tokenizer}: {describe_error(error)}"
        ) from error


class _Tokenizer:
    """A `tokenizer.json`; its own padding and truncation are replaced by the settings."""

    def __init__(self, library: Any, content: bytes, config: TokensTransform) -> None:
        self._tokenizer = library.Tokenizer.from_buffer(content)
        self.pad_id = int((self._tokenizer.padding or {}).get("pad_id", 0))
        # Not the number of ids: there may be unused ones between them.
        self.size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._special_tokens = config.special_tokens
        self.special_count = 0
        if config.special_tokens:
            self.special_count = self._tokenizer.num_special_tokens_to_add(bool(config.pair))
        self._has_offsets = bool(config.offsets)
        if config.bos or config.eos:
            raise _unfit("bos and eos only for SentencePiece", config.tokenizer)

    def truncate(self, most: int) -> None:
        self._tokenizer.enable_truncation(most)

    def encode(self, row: _Row) -> _Encoded:
        text = row.text if row.pair is None else (row.text, row.pair)
        # Unlike `encode`, this releases the interpreter lock.
        (found,) = self._tokenizer.encode_batch([text], add_special_tokens=self._special_tokens)
        return _Encoded(found.ids, found.type_ids, found.offsets if self._has_offsets else ())

    def decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids)
        return text


class _SentencePiece:
    """A model of SentencePiece."""

    def __init__(self, library: Any, content: bytes, config: TokensTransform) -> None:
        self._processor = library.SentencePieceProcessor(model_proto=content)
        self.pad_id = max(0, int(self._processor.pad_id()))
        self.size = int(self._processor.get_piece_size())
        self._head = [int(self._processor.bos_id())] if config.bos else []
        self._tail = [int(self._processor.eos_id())] if config.eos else []
        if min([*self._head, *self._tail], default=0) < 0:
            raise _unfit("a model with tokens for bos and eos", config.tokenizer)
        self.special_count = len(self._head) + len(self._tail)
        self._room: int | None = None
        if config.pair or config.offsets or not config.special_tokens:
            raise _unfit(
                "pair, offsets and special_tokens only with a tokenizer.json", config.tokenizer
            )

    def truncate(self, most: int) -> None:
        self._room = most - self.special_count

    def encode(self, row: _Row) -> _Encoded:
        found = self._processor.encode(row.text, out_type=int)
        return _Encoded([*self._head, *found[: self._room], *self._tail])

    def decode(self, ids: list[int]) -> str:
        text: str = self._processor.decode(ids)
        return text
