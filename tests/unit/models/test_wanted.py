"""Which changes of the wanted models are refused, and what the others make of them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from headrace.errors import Rejected
from headrace.models.wanted import (
    Author,
    BrokenHistory,
    Change,
    ChangeRefused,
    Deployment,
    Wanted,
    add_versions,
    describe,
    find_requested,
    fold,
    keep_versions,
    load,
    make_record,
    remove_label,
    require_present,
    restore,
    roll_back,
    set_default,
    set_label,
    unload,
)
from headrace.protocol.codec.control import UnknownFormat, decode_control, encode_control
from headrace.protocol.control import (
    FORMAT,
    FORMAT_WITHOUT_OVERRIDES,
    ControlRecord,
    WantedModel,
)

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
    [model] = after.values()
    assert (model.versions, model.default) == (["2", "10"], "10")


def test_state_has_what_names_meant_before_the_latest_first() -> None:
    """A process that starts needs the former versions of names, as far as they are still wanted."""
    state = fold(
        history(
            load("digits", "1"),
            load("digits", "2"),
            load("digits", "3"),
            set_default("digits", "2"),
            set_default("digits", "3"),
            set_label("digits", "canary", "1"),
            set_label("digits", "canary", "2"),
            set_label("digits", "beta", "2"),
            load("other", "1"),
        )
    )
    assert state.former == {"digits": {"": ["2", "1"], "canary": ["1"]}}


def test_state_forgets_former_meanings_of_what_is_unloaded() -> None:
    """Neither a version nor a label, nor a model that was unloaded in between."""
    changes = [
        load("digits", "1"),
        load("digits", "2"),
        set_default("digits", "2"),
        set_label("digits", "canary", "1"),
        set_label("digits", "canary", "2"),
        remove_label("digits", "canary"),
        unload("digits", "1"),
    ]
    assert fold(history(*changes[:-2])).former == {"digits": {"": ["1"], "canary": ["1"]}}
    assert fold(history(*changes[:-1])).former == {"digits": {"": ["1"]}}
    assert fold(history(*changes)).former == {}
    assert fold(history(*changes[:-1], unload("digits"), load("digits", "1"))).former == {}


def loaded(*changes: Change) -> WantedModel:
    """The one model after these changes."""
    return dict(fold(history(*changes)).models)["digits"]


def test_later_version_must_be_compatible_with_default_of_that_time() -> None:
    """A process that starts later, when the default has moved, decides in the same way."""
    model = loaded(load("digits", "1"), load("digits", "2"), set_default("digits", "2"))
    assert model.compatible == {"2": "1"}
    assert describe("digits", model).endswith("default 2, 2 must be compatible with 1")


def test_permission_to_break_is_part_of_change() -> None:
    """The permission also lets a version load again that was refused."""
    once = loaded(load("digits", "1"), load("digits", "2", allow_breaking=True))
    later = loaded(
        load("digits", "1"), load("digits", "2"), load("digits", "2", allow_breaking=True)
    )
    assert once == later
    assert later.compatible == {}


def test_unloaded_version_is_compared_with_none() -> None:
    """It may be gone from the repository."""
    model = loaded(
        load("digits", "1"),
        load("digits", "2"),
        set_default("digits", "2"),
        unload("digits", "1"),
    )
    assert model.compatible == {}


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


def test_version_loaded_instead_of_another_gets_its_names() -> None:
    """One change does both, so memory for both is never needed; the signatures are compared."""
    records = history(
        load("digits", "1"),
        load("digits", "2"),
        set_label("digits", "stable", "1"),
        set_label("digits", "canary", "2"),
        load("digits", "3", instead_of="1"),
    )
    after = fold(records).models["digits"]
    assert after.versions == ["2", "3"]
    assert (after.default, after.labels) == ("3", {"stable": "3", "canary": "2"})
    assert after.compatible == {"3": "1"}
    assert ("digits", "3") in find_requested(records[-1])


@pytest.mark.parametrize(
    ("version", "old", "reason"),
    [
        ("1", "1", "expected another one than 1, which it replaces"),
        ("2", "7", "version: expected one that is loaded, 1, got '7'"),
    ],
)
def test_version_cannot_be_loaded_instead_of_itself_or_of_one_that_is_not_loaded(
    version: str, old: str, reason: str
) -> None:
    """Nothing changes."""
    with pytest.raises(ChangeRefused, match=reason):
        loaded(load("digits", "1"), load("digits", version, instead_of=old))


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
        format=FORMAT_WITHOUT_OVERRIDES,
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
    """Each third record has all models; the changes in front of the first one left are unused."""
    changes = [load(name, "1") for name in "abcdefg"]
    records = history(*changes, snapshot_every=3)
    for gone in range(6):
        assert fold(records[gone:]) == fold(records)


def test_fold_refuses_history_that_has_neither_beginning_nor_snapshot() -> None:
    """Half of the models would otherwise be unloaded by a process that starts."""
    records = history(load("a", "1"), load("b", "1"), load("c", "1"))
    with pytest.raises(BrokenHistory, match="got 2; records are missing, and no snapshot is left"):
        fold(records[1:])


def test_generation_before_the_oldest_snapshot_is_refused() -> None:
    """The state at that time is not known any more; the range that is known is shown."""
    records = history(*[load(name, "1") for name in "abcd"], snapshot_every=3)
    with pytest.raises(ChangeRefused, match="expected one from 3 to 4, got 2"):
        fold(records[1:], until=2)


def test_fold_refuses_missing_record() -> None:
    """A reader must not act on half of the history."""
    records = history(load("a", "1"), load("b", "1"), load("c", "1"))
    with pytest.raises(BrokenHistory, match="expected generation 2, got 3; records are missing"):
        fold([records[0], records[2]])


def test_fold_refuses_record_of_another_history() -> None:
    """The state before a record must be the one from which the record was made."""
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
    """Decoding returns the record that was encoded."""
    (record,) = history(load("digits", "1"), snapshot_every=1)
    assert decode_control(encode_control(record)) == record


def test_record_of_later_format_is_refused_by_name() -> None:
    """Its fields may be others; a reader that skipped it would miss a change."""
    later = encode_control(history(load("digits", "1"))[0]).replace(b"format\x01", b"format\x03")
    with pytest.raises(UnknownFormat, match="expected a format up to 2, got 3; upgrade"):
        decode_control(later)


@pytest.mark.parametrize("value", [b"", b"{}", b"\x81\xa6format\x01", b"\xc1"])
def test_record_of_other_program_is_rejected(value: bytes) -> None:
    """The reader skips it."""
    with pytest.raises(Rejected, match="expected a control record"):
        decode_control(value)


# --- overrides ----------------------------------------------------------------------------------

EIGHT = {"max_batch_size": 8}


def test_overrides_replace_former_ones_and_stay_when_none_are_given() -> None:
    """They are the model's, for all of its versions."""
    records = history(
        load("digits", "1", {"probe": False}), load("digits", "1", EIGHT), load("digits", "2")
    )
    assert fold(records).models["digits"].overrides == EIGHT
    assert fold(history(load("digits", "1", EIGHT), load("digits", "1", {}))).models == {
        "digits": WantedModel(versions=["1"], default="1")
    }


@pytest.mark.parametrize(
    "change",
    [
        load("digits", "3"),
        unload("digits", "2"),
        set_label("digits", "new", "1"),
        remove_label("digits", "new"),
        set_default("digits", "2"),
    ],
    ids=lambda change: change.action,
)
def test_other_changes_keep_overrides(change: Change) -> None:
    """None of them forgets a part of the model that it does not concern."""
    known = WantedModel(
        versions=["1", "2"], default="1", labels={"new": "1"}, overrides=EIGHT, reads=3
    )
    after = change.apply({"digits": known})["digits"]
    assert (after.overrides, after.reads) == (EIGHT, 3)


def test_rollback_restores_overrides() -> None:
    """They are part of what was wanted."""
    records = history(load("digits", "1", EIGHT), load("digits", "1", {}))
    after = roll_back(fold(records, until=1).models).apply(fold(records).models)
    assert after["digits"].overrides == EIGHT


def test_override_of_versions_is_refused() -> None:
    """The wanted state says which versions are loaded."""
    with pytest.raises(ChangeRefused, match="overrides: versions: expected other keys"):
        load("digits", "1", {"versions": "all"}).apply({})


def test_format_rises_with_overrides_alone() -> None:
    """Processes of the release before follow a deployment that has none."""
    records = history(load("a", "1"), load("b", "1", EIGHT), load("a", "2"), load("b", "1", {}))
    assert [record.format for record in records] == [1, 2, 2, 2]


def test_record_with_overrides_is_refused_by_release_before() -> None:
    """It names the format that it knows; see `test_record_of_later_format_is_refused_by_name`."""
    (record,) = history(load("digits", "1", EIGHT))
    assert record.format == FORMAT > FORMAT_WITHOUT_OVERRIDES
    assert decode_control(encode_control(record)) == record


def test_description_shows_overrides() -> None:
    """Commands show what would change."""
    after = load("digits", "1", {"probe": False, **EIGHT}).apply({})
    assert describe("digits", after["digits"]) == (
        "digits: versions 1, default 1, max_batch_size = 8, probe = false"
    )


# --- loads of Triton's kind ---------------------------------------------------------------------


def test_versions_are_added_beside_others_and_default_stays() -> None:
    """Default and labels stay as they are until the new versions are ready everywhere."""
    after = add_versions("digits", ["3", "4"], EIGHT).apply(TWO)["digits"]
    assert after == WantedModel(
        versions=["1", "2", "3", "4"],
        default="1",
        labels={"canary": "2"},
        overrides=EIGHT,
        reads=1,
        compatible={"3": "1", "4": "1"},
    )


def test_load_of_loaded_versions_has_their_files_read_again() -> None:
    """The load is recorded, though versions, labels and default stay."""
    record = record_of(add_versions("digits", ["1", "2"], {}), Deployment(4, TWO))
    changed = record.after["digits"]
    assert changed is not None
    assert (changed.versions, changed.default, changed.reads) == (["1", "2"], "1", 1)


def test_kept_versions_are_selected_and_labelled_ones() -> None:
    """The highest selected one becomes the default."""
    added = add_versions("digits", ["3", "4"], {}).apply(TWO)
    after = keep_versions("digits", ["3", "4"]).apply(added)["digits"]
    assert (after.versions, after.default) == (["2", "3", "4"], "4")


def test_restored_model_is_as_before_or_gone() -> None:
    """A load that fails leaves no trace but in the history."""
    after = add_versions("digits", ["9"], EIGHT).apply(TWO)
    restored = restore("digits", TWO["digits"]).apply(after)
    assert restored == {"digits": replace(TWO["digits"], reads=2)}
    assert restore("digits", None).apply(after) == {}


def test_rollback_of_load_again_is_no_earlier_reading_of_files() -> None:
    """A process that is slow must not take the reading before the rollback for the one after it."""
    start = add_versions("digits", ["1"], {}).apply({})
    failed = add_versions("digits", ["1", "2"], {}).apply(start)
    undone = restore("digits", start["digits"]).apply(failed)
    again = add_versions("digits", ["1", "2"], {}).apply(undone)
    assert undone["digits"].versions == ["1"]
    reads = [each["digits"].reads for each in (start, failed, undone, again)]
    assert reads == [0, 1, 2, 3]
    assert roll_back(start).apply(again)["digits"].reads == 4
    assert roll_back(start).apply(undone) == undone


def test_rollback_to_change_before_any_load_again_reads_no_files() -> None:
    """A label or the default moves without a scan."""
    after = set_default("digits", "2").apply(TWO)
    assert roll_back(TWO).apply(after) == TWO
