"""Which changes of the wanted models are refused, and what the others make of them."""

from __future__ import annotations

import pytest

from headrace.errors import Rejected
from headrace.models.wanted import (
    Author,
    BrokenHistory,
    Change,
    ChangeRefused,
    Deployment,
    Wanted,
    fold,
    load,
    make_record,
    remove_label,
    require_present,
    roll_back,
    set_default,
    set_label,
    unload,
)
from headrace.protocol.codec.control import UnknownFormat, decode_control, encode_control
from headrace.protocol.control import FORMAT, ControlRecord, WantedModel

ADA = Author("ada", "ticket 1")
TWO = {"digits": WantedModel(versions=["1", "2"], default="1", labels={"canary": "2"})}


def record_of(change: Change, state: Deployment, snapshot_every: int = 64) -> ControlRecord:
    """The record of a change that changes something."""
    record = make_record(change, state, ADA, "id", 1000, snapshot_every)
    assert record is not None
    return record


def history(*changes: Change, snapshot_every: int = 64) -> list[ControlRecord]:
    """The records of these changes, one after the other."""
    state, records = Deployment(), []
    for change in changes:
        records.append(record_of(change, state, snapshot_every))
        state = state.after(records[-1])
    return records


def test_first_version_of_model_becomes_default() -> None:
    """A request without a version has an answer from then on."""
    assert load("digits", "3").apply({}) == {"digits": WantedModel(versions=["3"], default="3")}


def test_later_version_does_not_become_default() -> None:
    """Loading changes nothing for requests that come already; versions are in order."""
    after = load("digits", "2").apply(load("digits", "10").apply({}))
    assert after == {"digits": WantedModel(versions=["2", "10"], default="10")}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (load("../x", "1"), "expected a name of letters"),
        (load("digits", "01"), "expected a number such as 1, got '01'"),
        (unload("other"), "expected one that is loaded, digits, got 'other'"),
        (unload("digits", "1"), "digits/1: it is the default version; make one of 2 the default"),
        (unload("digits", "2"), "digits/2: labels name it: canary; move or remove them first"),
        (set_label("digits", "new", "3"), "expected one that is loaded, 1, 2, got '3'"),
        (set_label("digits", "7", "1"), "label: expected a letter"),
        (set_default("digits", "3"), "expected one that is loaded, 1, 2, got '3'; load it first"),
        (remove_label("digits", "blue"), "label: expected one of canary, got 'blue'"),
        (roll_back({}, "other"), "model: expected one of digits, got 'other'"),
    ],
)
def test_senseless_change_is_refused_with_reason(change: Change, reason: str) -> None:
    """The error says what was expected, and what to do first."""
    with pytest.raises(ChangeRefused) as refused:
        change.apply(TWO)
    assert reason in str(refused.value)


def test_unloading_model_removes_versions_and_labels() -> None:
    """Without a version the whole model goes, its default included."""
    assert unload("digits").apply(TWO) == {}


def test_change_that_changes_nothing_has_no_record() -> None:
    """Commands may be repeated."""
    state = Deployment(1, TWO)
    assert make_record(load("digits", "2"), state, ADA, "id", 0, 64) is None


def test_record_says_who_changed_what() -> None:
    """The history needs nothing but the records."""
    record = record_of(set_default("digits", "2"), Deployment(4, TWO))
    after = WantedModel(versions=["1", "2"], default="2", labels={"canary": "2"})
    assert record == ControlRecord(
        format=FORMAT,
        generation=5,
        change_id="id",
        at_ms=1000,
        who="ada",
        why="ticket 1",
        action="default",
        before={"digits": TWO["digits"]},
        after={"digits": after},
    )


def test_rollback_restores_earlier_generation() -> None:
    """All models of that generation, and none that came later."""
    records = history(load("digits", "1"), load("digits", "2"), load("other", "1"))
    earlier = fold(records, until=1)
    after = roll_back(earlier.models).apply(fold(records).models)
    assert after == {"digits": WantedModel(versions=["1"], default="1")}


def test_rollback_of_one_model_leaves_others() -> None:
    """Only the named model is restored."""
    records = history(load("digits", "1"), load("other", "1"), load("digits", "2"))
    after = roll_back(fold(records, until=1).models, "digits").apply(fold(records).models)
    assert {name: each.versions for name, each in after.items()} == {
        "digits": ["1"],
        "other": ["1"],
    }


def test_fold_begins_with_snapshot_where_older_records_are_gone() -> None:
    """Each second record has all models."""
    changes = (load("a", "1"), load("b", "1"), load("c", "1"))
    records = history(*changes, snapshot_every=2)
    assert fold(records[1:]) == fold(records)


def test_fold_refuses_missing_record() -> None:
    """A reader must not act on half of the history."""
    records = history(load("a", "1"), load("b", "1"), load("c", "1"))
    with pytest.raises(BrokenHistory, match="expected generation 2, got 3; records are missing"):
        fold([records[0], records[2]])


def test_fold_refuses_record_of_another_history() -> None:
    """What a record was made of must be what was there."""
    records = history(load("a", "1"), load("a", "2"))
    with pytest.raises(BrokenHistory, match="expected a: versions 1, default 1, got a: nothing"):
        fold([history(load("b", "1"))[0], records[1]])


def test_generation_that_never_was_is_refused() -> None:
    """The range of the history is shown."""
    with pytest.raises(ChangeRefused, match="expected one from 1 to 1, got 7"):
        fold(history(load("a", "1")), until=7)


@pytest.mark.parametrize(
    ("present", "listed"), [({"digits": [1, 2]}, "1, 2"), ({}, "which has none")]
)
def test_version_that_is_not_in_repository_is_refused(
    present: dict[str, list[int]], listed: str
) -> None:
    """The versions that are there are listed."""
    after: Wanted = load("digits", "3").apply(TWO)
    with pytest.raises(ChangeRefused, match=f"expected one of the repository, {listed}, got 3"):
        require_present(TWO, after, present)


def test_loaded_version_need_not_be_in_repository() -> None:
    """Labels of a version can be moved after its files were removed."""
    require_present(TWO, set_default("digits", "2").apply(TWO), {})


def test_record_survives_encoding() -> None:
    """What is decoded is what was encoded."""
    (record,) = history(load("digits", "1"), snapshot_every=1)
    assert decode_control(encode_control(record)) == record


def test_record_of_later_format_is_refused_by_name() -> None:
    """Its fields may be others; a reader that skipped it would miss a change."""
    later = encode_control(history(load("digits", "1"))[0]).replace(b"format\x01", b"format\x02")
    with pytest.raises(UnknownFormat, match="expected a format up to 1, got 2; upgrade"):
        decode_control(later)


@pytest.mark.parametrize("value", [b"", b"{}", b"\x81\xa6format\x01", b"\xc1"])
def test_record_of_other_program_is_rejected(value: bytes) -> None:
    """The reader skips it."""
    with pytest.raises(Rejected, match="expected a control record"):
        decode_control(value)
