"""Requests whose version has gone, bound to the one that is there instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import onnx
import pytest

from headrace.errors import Code, Rejected
from headrace.models.registry import Models
from headrace.protocol.ack import NULL_ACK
from headrace.protocol.codec import decode_items, encode_items, encode_request
from headrace.protocol.control import WantedModel
from headrace.protocol.events import UnreadyVersion
from headrace.protocol.messages import Envelope, Request
from headrace.transport.rebinding import Rebinder
from tests.support.models import add_version, digits, embedding, settings_for
from tests.support.work import make_request

GONE = Rejected(Code.UNKNOWN_MODEL, 'model_version: expected one of 2 of digits, got "1"')
MakeModel: TypeAlias = Callable[[], onnx.ModelProto]
PIXELS = np.ones((3, 64), np.float32)


class RebinderHarness:
    """A process that has version 2 of `digits`, and version 3 under the label `canary`.

    Args:
        model: the version's; None: `digits` has gone.
        awaited: why other processes are not ready for requests to a version.
    """

    def __init__(
        self,
        repository: Path,
        model: MakeModel | None = digits,
        awaited: Callable[[str, str], UnreadyVersion | None] | None = None,
    ) -> None:
        wanted = {}
        if model is not None:
            for number in (2, 3):
                add_version(repository, "digits", number, model())
            wanted = {
                "digits": WantedModel(versions=["2", "3"], default="2", labels={"canary": "3"})
            }
        models = Models(settings_for(repository), awaited=awaited)
        models.want(wanted)
        models.open()
        self.rebound = 0
        self._rebinder = Rebinder(models.catalog, self._count)

    def _count(self) -> None:
        self.rebound += 1

    def rebind(self, request: Request) -> None:
        """Bind a request again, whose version is not here."""
        self._rebinder.rebind(request, GONE)


def bound_to_first(
    version: str | None = None,
    content_type: str = "application/msgpack",
    header_version: str = "",
    name: str = "digits",
    header_name: str = "",
) -> Request:
    """A request that ingest has bound to version 1; it may name that, or a label."""
    envelope = Envelope(content_type=content_type, model=header_name, version=header_version)
    request = make_request(inputs={"pixels": PIXELS}, envelope=envelope)
    request.value = encode_request(content_type, name, {"pixels": PIXELS}, version=version)
    request.wanted, request.item = ("scores",), b"names version 1"
    return request


def test_request_whose_record_holds_its_value_is_rebound(tmp_path: Path) -> None:
    """The record names the inputs of the version that has gone."""
    sent = [bound_to_first(), bound_to_first()]
    request = decode_items(encode_items(sent), NULL_ACK)[1]

    RebinderHarness(tmp_path).rebind(request)

    assert (request.version, request.chunk) == ("2", None)
    assert bytes(request.inputs[0].data) == PIXELS.tobytes()


@pytest.mark.parametrize("content_type", ["application/msgpack", "application/json", "image/png"])
def test_request_without_version_is_rebound_to_current_one(
    tmp_path: Path, content_type: str
) -> None:
    """With all that follows from the signature; the item that names the old one is dropped."""
    bench, request = RebinderHarness(tmp_path), bound_to_first()
    request.envelope = request.envelope._replace(content_type=content_type)
    if content_type == "application/json":
        request.value = encode_request(content_type, "digits", {"pixels": PIXELS})
    bench.rebind(request)
    assert (request.version, request.rows, request.shape_class) == ("2", 3, ())
    assert (request.wanted, request.item, bench.rebound) == (("scores",), None, 1)


@pytest.mark.parametrize("content_type", ["application/msgpack", "application/json"])
@pytest.mark.parametrize(
    ("name", "header_name"),
    [("digits@canary", ""), ("digits", "digits@canary"), ("digits@canary", "digits@canary")],
    ids=["value", "header", "both"],
)
def test_request_with_label_is_rebound_to_version_that_label_means_now(
    tmp_path: Path, name: str, header_name: str, content_type: str
) -> None:
    """It stands in the value or in the header."""
    bench = RebinderHarness(tmp_path)
    request = bound_to_first(content_type=content_type, name=name, header_name=header_name)
    bench.rebind(request)
    assert (request.version, bench.rebound) == ("3", 1)


def test_payload_with_label_is_rebound_to_version_that_label_means_now(tmp_path: Path) -> None:
    """Its value names nothing."""
    bench = RebinderHarness(tmp_path)
    request = bound_to_first(header_name="digits@canary")
    request.envelope = request.envelope._replace(content_type="image/png")
    bench.rebind(request)
    assert (request.version, bench.rebound) == ("3", 1)


def announced_by_none(model: str, version: str) -> UnreadyVersion:
    """No executor has announced that it has loaded a version."""
    return UnreadyVersion(model, version, "announced by 0 of 1 executors", is_under_way=True)


@pytest.mark.parametrize(("name", "version"), [("digits", "2"), ("digits@canary", "3")])
def test_request_is_rebound_to_version_that_waits_for_executors(
    tmp_path: Path, name: str, version: str
) -> None:
    """A batcher that starts after an unload sends it to executors, where it waits if it has to."""
    bench = RebinderHarness(tmp_path, awaited=announced_by_none)
    request = bound_to_first(name=name)
    bench.rebind(request)
    assert (request.version, bench.rebound) == (version, 1)


def test_request_whose_label_was_removed_is_refused(tmp_path: Path) -> None:
    """The default is another version than the one that its caller wanted."""
    bench = RebinderHarness(tmp_path)
    with pytest.raises(Rejected, match="expected one of canary as a label of digits") as caught:
        bench.rebind(bound_to_first(name="digits@beta"))
    assert caught.value.code == Code.MODEL_NOT_READY


@pytest.mark.parametrize(
    "request_",
    [
        bound_to_first(version="1"),
        bound_to_first(version="1", header_name="digits@canary"),
        bound_to_first(version="1", content_type="application/json"),
        bound_to_first(header_version="1"),
    ],
    ids=["msgpack", "beside-label", "json", "header"],
)
def test_request_with_replaced_version_is_refused(tmp_path: Path, request_: Request) -> None:
    """It may be sent again: ingest decides then."""
    bench = RebinderHarness(tmp_path)
    with pytest.raises(Rejected) as caught:
        bench.rebind(request_)
    assert (caught.value.code, caught.value.message) == (Code.MODEL_NOT_READY, GONE.message)
    assert caught.value.retry_after_ms
    assert (request_.version, bench.rebound) == ("1", 0)


@pytest.mark.parametrize(
    ("model", "reason"),
    [(embedding, 'expected one of index, got "pixels"'), (None, "expected a model")],
    ids=["other inputs", "no model"],
)
def test_request_fitting_no_version_is_refused_with_both_reasons(
    tmp_path: Path, model: MakeModel | None, reason: str
) -> None:
    """The error says that its version is gone, and why the current one does not fit."""
    with pytest.raises(Rejected) as caught:
        RebinderHarness(tmp_path, model).rebind(bound_to_first())
    assert caught.value.code == Code.MODEL_NOT_READY
    assert caught.value.message.startswith(GONE.message)
    assert reason in caught.value.message
