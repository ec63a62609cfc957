"""Any sequence of changes: the records alone lead to the state that the changes made."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.models.wanted import (
    Author,
    Change,
    ChangeRefused,
    Deployment,
    add_versions,
    fold,
    load,
    make_record,
    remove_label,
    roll_back,
    set_default,
    set_label,
    unload,
)
from headrace.protocol.codec.control import decode_control, encode_control
from headrace.protocol.control import ControlRecord

MODELS = st.sampled_from(["a", "b"])
VERSIONS = st.sampled_from(["1", "2", "10"])
ASCENDING = st.sampled_from([["1"], ["2", "10"], ["1", "2", "10"]])
LABELS = st.sampled_from(["canary", "stable"])
OVERRIDES = st.sampled_from([None, {}, {"max_batch_size": 8}, {"range": {"x": [0, 0.5]}}])


def is_given(overrides: object) -> bool:
    """Whether there are overrides."""
    return overrides is not None


CHANGES = st.one_of(
    st.builds(load, MODELS, VERSIONS, OVERRIDES),
    st.builds(load, MODELS, VERSIONS, instead_of=VERSIONS),
    st.builds(add_versions, MODELS, ASCENDING, OVERRIDES.filter(is_given)),
    st.builds(unload, MODELS, st.none() | VERSIONS),
    st.builds(set_label, MODELS, LABELS, VERSIONS),
    st.builds(remove_label, MODELS, LABELS),
    st.builds(set_default, MODELS, VERSIONS),
)
STEPS = st.lists(CHANGES | st.integers(0, 30), max_size=30)


def run(steps: list[Change | int], snapshot_every: int) -> list[tuple[ControlRecord, Deployment]]:
    """Make each change, or roll back to a generation; the records, and the states after them."""
    done: list[tuple[ControlRecord, Deployment]] = []
    state = Deployment()
    for step in steps:
        if isinstance(step, int):
            if not 0 < step <= len(done):
                continue
            change = roll_back(done[step - 1][1].models)
        else:
            change = step
        try:
            record = make_record(change, state, Author("x"), "id", 0, snapshot_every)
        except ChangeRefused:
            continue
        if record is not None:
            state = state.after(record)
            done.append((decode_control(encode_control(record)), state))
    return done


@given(STEPS, st.integers(1, 5))
def test_records_lead_to_state_of_changes(steps: list[Change | int], snapshot_every: int) -> None:
    """At each generation, and from each snapshot on, with what names meant before it."""
    done = run(steps, snapshot_every)
    records = [record for record, _ in done]
    for record, state in done:
        assert fold(records, until=record.generation) == state
    for place, record in enumerate(records):
        if record.snapshot is not None:
            assert fold(records[place:]) == done[-1][1]


@given(STEPS)
def test_every_name_means_loaded_version(steps: list[Change | int]) -> None:
    """No sequence leaves a default or a label without its version."""
    for _, state in run(steps, 64):
        for wanted in state.models.values():
            assert wanted.versions == sorted(set(wanted.versions), key=int)
            assert {wanted.default, *wanted.labels.values()} <= set(wanted.versions)


@given(STEPS)
def test_former_meanings_of_names_are_other_versions_that_are_still_wanted(
    steps: list[Change | int],
) -> None:
    """A process that starts can have them ready."""
    for _, state in run(steps, 64):
        for model, names in state.former.items():
            wanted = state.models[model]
            meant = {"": wanted.default, **wanted.labels}
            for name, numbers in names.items():
                assert numbers
                assert meant[name] not in numbers
                assert set(numbers) <= set(wanted.versions)
