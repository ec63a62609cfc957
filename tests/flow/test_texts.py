"""Texts in JSON as requests, for a model of tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from headrace.client import Client, InferenceError
from headrace.config import make_settings
from headrace.topics import STAGES
from tests.support.models import add_version, identity
from tests.support.pipelines import log_for, serving

TRANSFORM = '[transform.tokens]\nids = "x"\nmax_tokens = 8\ndecode = "y"\n'


async def test_text_in_json_becomes_tokens(tmp_path: Path) -> None:
    """For this model a map is no request of the protocol; too many tokens are refused. Ids of an
    output become text again.
    """
    add_version(tmp_path, "texts", 1, identity("INT64", ("batch", "sequence")), TRANSFORM)
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "good": 1, "bad": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "texts" / "1" / "tokenizer.json"))
    settings = make_settings({"models": {"repository": str(tmp_path)}})
    log = await log_for(settings)
    async with serving(settings, log, [STAGES]), Client(log=log, settings=settings) as client:
        answer = await client.infer_raw("texts", b'{"text": "bad good x"}', "application/json")
        two = await client.infer_raw("texts", b'["bad good", "good good"]', "application/json")
        with pytest.raises(InferenceError, match="at most max_tokens = 8, got 9"):
            await client.infer_raw("texts", b"bad " * 9, "text/plain")

    assert answer.outputs["y"].tolist() == [[2, 1, 0]]
    assert two.outputs["y_text"].tolist() == [b"bad good", b"good good"]
    assert answer.outputs["y_text"].tolist() == [b"bad good [UNK]"]
