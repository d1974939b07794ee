"""Values from etcd: what is believed, and what is refused by a message that names the key."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from elasticd.errors import RecordError, UsageError
from elasticd.rendezvous.keys import EVENT_SLOTS, JobKeys, checked_name, jobs_prefix
from elasticd.rendezvous.records import (
    MAX_BYTES,
    MAX_BYTES_WORLD,
    TEXT_MAX,
    AuditRecord,
    BudgetRecord,
    Cause,
    CauseKind,
    CheckpointRecord,
    EventRecord,
    GenerationMember,
    GenerationRecord,
    GenerationState,
    IncidentsRecord,
    MemberId,
    MemberRecord,
    Mode,
    NodeJob,
    NodeJobState,
    NodePolicyRecord,
    NodeRecord,
    Outcome,
    PolicyRecord,
    ProposalRecord,
    Record,
    RequestKind,
    RequestRecord,
    Result,
    ResumePoint,
    SnapshotRef,
    StoreAddress,
    TargetRecord,
    Verdict,
    Void,
    WorkerExit,
    parse,
)
from tests.rendezvous.world import KEYS, generation, member, mid, proposal, target

pytestmark = pytest.mark.timeout(30)

SCOPE = KEYS.scope
EXAMPLES: dict[str, Record] = {
    "target": target().record,
    "proposal": proposal(2, "ab").record,
    "generation": generation(2, "ab").record,
    "budget": BudgetRecord(scope=SCOPE, used=3),
    "checkpoint": CheckpointRecord(scope=SCOPE, generation=2, step=7, digest="sha256:00", holders=("a",)),
    "member": member("a", 1, failed=1, detail="x", unreachable=[mid("b")]).record,
    "event": EventRecord(scope=SCOPE, number=1, at=1.5, what="formed"),
    "request": RequestRecord(scope=SCOPE, kind=RequestKind.RESTART, generation=2, reason="x", by="kim", at=1.5),
    "node": NodeRecord(
        scope=SCOPE,
        node="a",
        incarnation="0" * 16,
        address="host-a",
        slots=2,
        version="1",
        boot_id="b",
        jobs=(NodeJob(name="job", state=NodeJobState.RUNNING, slots=2),),
    ),
    "policy": NodePolicyRecord(scope=SCOPE, cordoned=True, reason="fan", by="kim", at=1.5),
    "audit": AuditRecord(scope=SCOPE, at=1.5, node="a", by="kim", action="scale", subject="job"),
}


def changed(name: str, **fields: Any) -> bytes:
    return json.dumps({**json.loads(EXAMPLES[name].to_bytes()), **fields}).encode()


def refused(name: str, value: bytes) -> str:
    with pytest.raises(RecordError) as caught:
        parse(type(EXAMPLES[name]), f"/key/of/{name}", value, SCOPE)
    assert caught.value.message.startswith(f"/key/of/{name}: ")
    assert len(caught.value.message) < 1000
    return caught.value.message


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_was_written_is_read_back(name: str) -> None:
    record = EXAMPLES[name]
    assert parse(type(record), "k", record.to_bytes(), SCOPE) == record


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"garbage",
        b"\xff\xfe\x00",
        b"null",
        b"[]",
        b'"text"',
        b"{}",
        b"[" * 60_000,
        b'{"v":1,"x":' + b"[" * 5_000 + b"]" * 5_000 + b"}",
        b'{"v":1,"scope":"\\ud800"}',
        b"9" * 60_000,
        b'{"v":1',
    ],
    ids=["empty", "no JSON", "no UTF-8", "null", "list", "text", "empty object", "deep", "deep inside", "half a character", "huge number", "cut short"],
)
@pytest.mark.parametrize("name", EXAMPLES)
def test_what_is_no_record_is_refused(name: str, value: bytes) -> None:
    refused(name, value)


@pytest.mark.parametrize("name", EXAMPLES)
def test_another_schema_version_is_refused(name: str) -> None:
    assert "v: " in refused(name, changed(name, v=2))


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_unknown_field_is_refused_by_its_name(name: str) -> None:
    assert "surprise" in refused(name, changed(name, surprise=1))


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_record_of_another_job_is_refused(name: str) -> None:
    message = refused(name, changed(name, scope="cluster/other"))
    assert "'cluster/other'" in message
    assert "'cluster/job'" in message


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("target", {"min_nodes": "2"}),
        ("target", {"min_nodes": 0}),
        ("target", {"max_restarts": -1}),
        ("target", {"run": 1}),
        ("target", {"command": "rm -rf /"}),
        ("generation", {"number": 0}),
        ("generation", {"number": 2**53}),
        ("generation", {"number": 1.5}),
        ("generation", {"state": "paused"}),
        ("generation", {"frozen_max": -1}),
        ("generation", {"store": {"address": "host", "port": 0}}),
        ("generation", {"store": {"address": "", "port": 1}}),
        ("generation", {"members": {}}),
        ("proposal", {"mode": "gently"}),
        ("proposal", {"not_ready": {"x": "1"}}),
        ("budget", {"used": -1}),
        ("checkpoint", {"step": None}),
        ("member", {"store_port": 65536}),
        ("member", {"slots": 0}),
        ("member", {"state_port": 0}),
        ("member", {"lost": ["d"] * 17}),
        ("member", {"fingerprint": {f"part{number}": "d" for number in range(9)}}),
        ("member", {"fingerprint": {"../x": "d"}}),
        ("member", {"inventory": [{"generation": 1, "step": 1, "digest": "d"}] * 65}),
        ("checkpoint", {"shared": "no"}),
        ("member", {"leaving": "no"}),
        ("member", {"outcome": {"generation": 1, "result": "maybe", "detail": ""}}),
        ("member", {"id": {"node": "../x", "incarnation": "0" * 16}}),
        ("member", {"id": {"node": "a\nb", "incarnation": "0" * 16}}),
        ("member", {"id": {"node": "a", "incarnation": "x" + "0" * 16}}),
        ("member", {"id": {"node": "a", "incarnation": "0" * 17}}),
        ("event", {"at": "now"}),
    ],
)
def test_a_field_of_a_wrong_kind_is_refused_by_its_name(name: str, fields: dict[str, Any]) -> None:
    assert next(iter(fields)) in refused(name, changed(name, **fields))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize(("name", "field"), [("generation", "frozen_max"), ("generation", "formed_at"), ("event", "at")])
def test_a_number_that_is_none_is_refused(name: str, field: str, number: str) -> None:
    """NaN in frozen_max would end the wait for frozen workers at once: every comparison with it is false."""
    value = changed(name, **{field: 12345.5}).replace(b"12345.5", number.encode())
    assert field in refused(name, value)


def test_a_value_too_large_is_refused_unread() -> None:
    assert "bytes" in refused("member", b" " * (MAX_BYTES + 1))
    assert "bytes" in refused("generation", b" " * (MAX_BYTES_WORLD + 1))
    assert "bytes" not in refused("generation", b" " * (MAX_BYTES + 1))


def test_a_thousand_members_fit_into_a_generation() -> None:
    record = generation(1, [mid(f"node-{number:04d}") for number in range(1000)]).record
    assert len(record.to_bytes()) < MAX_BYTES_WORLD / 2
    assert parse(GenerationRecord, "k", record.to_bytes(), SCOPE) == record


def test_records_do_not_change() -> None:
    with pytest.raises(ValidationError):
        EXAMPLES["budget"].used = 4  # type: ignore[attr-defined]


def test_ranks_count_the_slots_of_those_before() -> None:
    record = generation(1, "abc").record
    record = record.model_copy(update={"members": tuple(one.model_copy(update={"slots": slots}) for one, slots in zip(record.members, (2, 3, 1), strict=True))})
    assert [record.base_rank(identity) for identity in record.ids] == [0, 2, 5]
    assert record.world_size == 6
    with pytest.raises(KeyError, match="d/"):
        record.base_rank(mid("d"))


def test_a_cause_reads_as_a_sentence() -> None:
    assert str(Cause(kind=CauseKind.LOSS, nodes=("a", "b"), detail="x")) == "loss of a, b (x)"
    assert str(Cause(kind=CauseKind.FORM)) == "form"


# --- every record there can be -------------------------------------------------------------------------------------------

names = st.text("aZ9_.-", max_size=20).map(lambda text: "n" + text)
ids = st.builds(MemberId, node=names, incarnation=st.integers(0, 2**64 - 1).map(lambda number: f"{number:016x}"))
texts = st.text(max_size=50) | st.just("ä" * TEXT_MAX)
numbers = st.integers(0, 2**53 - 1)
digests = st.text(max_size=128)
positive = st.integers(1, 2**53 - 1)
ports = st.integers(1, 65535)
sizes = st.integers(1, 100_000)
slots = st.integers(1, 1024)
addresses = st.text(min_size=1, max_size=255)
seconds = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
times = st.floats(allow_nan=False, allow_infinity=False)
parameters = st.booleans() | st.integers(-(2**53), 2**53) | times | st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}", fullmatch=True)
marks = st.dictionaries(st.text(max_size=16), st.integers(-(2**63), 2**63), max_size=4)


def few(values: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(values, max_size=4).map(tuple)


documents = st.dictionaries(
    st.text(max_size=8),
    st.recursive(
        st.none() | st.booleans() | numbers | times | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=8,
    ),
    max_size=3,
)
causes = st.builds(Cause, kind=st.sampled_from(CauseKind), detail=texts, nodes=few(names))
errors = st.text(max_size=500)
exits = st.builds(WorkerExit, rank=numbers, code=st.integers(-1024, 1024), exception=errors, message=errors, at=times)
outcomes = st.none() | st.builds(Outcome, generation=numbers, result=st.sampled_from(Result), detail=texts, ends=few(exits), step=st.none() | numbers)
stretches = st.builds(Void, generation=numbers, step=numbers, until=numbers, skip=st.booleans())
left_out = st.dictionaries(st.text(max_size=16), texts, max_size=4)
verdicts = st.builds(
    Verdict,
    generation=numbers,
    root=texts,
    delay=st.floats(0, 86_400),
    stop=texts,
    code=st.integers(0, 255),
    without=left_out,
    void=st.none() | stretches,
)
RECORDS: dict[type[Record], dict[str, st.SearchStrategy[Any]]] = {
    TargetRecord: {
        "min_nodes": sizes,
        "max_nodes": sizes,
        "desired": sizes,
        "max_restarts": st.integers(0, 1_000_000),
        "run": st.booleans(),
        "reason": texts,
        "paused": st.booleans(),
        "parameters": st.dictionaries(names, parameters, max_size=4),
        "by": texts,
    },
    RequestRecord: {
        "kind": st.sampled_from(RequestKind),
        "generation": positive,
        "reason": texts,
        "by": texts,
        "at": times,
        "at_once": st.booleans(),
        "before": st.none() | numbers,
        "until": st.none() | numbers,
        "skip_data": st.booleans(),
        "code": st.integers(0, 255),
    },
    PolicyRecord: {
        "ledger": documents,
        "decisions": few(documents),
        "hold": st.none() | numbers,
        "acks": st.dictionaries(st.text(max_size=16), texts, max_size=4),
        "verdict": st.none() | verdicts,
    },
    IncidentsRecord: {"node": names, "incidents": few(documents), "at": times},
    NodeRecord: {
        "node": names,
        "incarnation": st.from_regex(r"[0-9a-f]{16}", fullmatch=True),
        "address": addresses,
        "slots": numbers.map(lambda n: n % 1025),
        "gpus": few(texts),
        "labels": st.dictionaries(names, digests, max_size=4),
        "version": st.text(max_size=64),
        "boot_id": st.text(max_size=64),
        "started_at": times,
        "problems": few(texts),
        "jobs": few(st.builds(NodeJob, name=names, state=st.sampled_from(NodeJobState), slots=slots, why=texts)),
        "peer_port": st.none() | ports,
    },
    NodePolicyRecord: {
        "cordoned": st.booleans(),
        "draining": st.booleans(),
        "reason": texts,
        "by": texts,
        "at": times,
        "until": st.none() | times,
        "about": st.text(max_size=300),
        "statistic": st.booleans(),
    },
    AuditRecord: {"at": times, "node": names, "by": texts, "action": st.text(max_size=64), "subject": st.text(max_size=256), "detail": texts},
    ProposalRecord: {
        "number": positive,
        "mode": st.sampled_from(Mode),
        "members": few(ids),
        "cause": causes,
        "proposer": ids,
        "not_ready": marks,
        "counted": st.booleans(),
    },
    GenerationRecord: {
        "number": positive,
        "state": st.sampled_from(GenerationState),
        "reason": texts,
        "cause": causes,
        "restarts": numbers,
        "members": few(st.builds(GenerationMember, id=ids, address=addresses, slots=slots, probe_port=ports)),
        "not_ready": marks,
        "store": st.builds(StoreAddress, address=addresses, port=ports),
        "frozen_max": seconds,
        "formed_at": seconds,
        "drained": st.booleans(),
        "resume": st.none() | st.builds(ResumePoint, generation=numbers, step=numbers, digest=digests, holders=few(names)),
        "void": few(stretches),
        "code": st.integers(0, 255),
        "without": left_out,
    },
    BudgetRecord: {"used": numbers},
    CheckpointRecord: {"generation": numbers, "step": numbers, "digest": digests, "holders": few(names), "shared": st.booleans()},
    MemberRecord: {
        "id": ids,
        "address": addresses,
        "slots": slots,
        "boot_id": st.text(max_size=64),
        "store_port": ports,
        "probe_port": ports,
        "stopped": numbers,
        "outcome": outcomes,
        "unreachable": few(st.text(max_size=16)),
        "leaving": st.booleans(),
        "inventory": few(st.builds(SnapshotRef, generation=numbers, step=numbers, digest=digests)),
        "state_port": st.none() | ports,
        "fingerprint": st.dictionaries(names, digests, max_size=4),
        "lost": few(digests),
    },
    EventRecord: {"number": numbers, "at": seconds, "what": st.text(max_size=64), "detail": texts},
}
records = st.one_of([st.builds(model, scope=st.just(SCOPE), **fields) for model, fields in RECORDS.items()])


def test_the_strategies_below_cover_every_field() -> None:
    """So that a field added tomorrow is tested tomorrow."""
    for model, fields in RECORDS.items():
        assert set(model.model_fields) == {"v", "scope", *fields}


@settings(max_examples=150, deadline=None)
@given(record=records)
def test_every_record_survives_the_way_through_etcd(record: Record) -> None:
    """Lone surrogates excepted: they cannot be encoded, and nothing of ours makes them."""
    assert parse(type(record), "k", record.to_bytes(), SCOPE) == record


@settings(max_examples=100, deadline=None)
@given(name=st.sampled_from(sorted(EXAMPLES)), value=st.binary(max_size=200))
def test_random_bytes_are_refused_and_nothing_worse(name: str, value: bytes) -> None:
    refused(name, value)


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(sorted(EXAMPLES)), data=st.data())
def test_a_damaged_record_is_refused_or_still_a_record(name: str, data: st.DataObject) -> None:
    """One byte changed, anywhere: never an error of another kind."""
    value = bytearray(EXAMPLES[name].to_bytes())
    value[data.draw(st.integers(0, len(value) - 1))] = data.draw(st.integers(0, 255))
    with suppress(RecordError):
        parse(type(EXAMPLES[name]), "k", bytes(value), SCOPE)


# --- names ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/a", "a\\b", "-a", "_a", "a b", "a\n", "\na", "a\x00", "ä", "a:b", "~", "a" * 129, "%2e%2e"])
def test_a_name_that_could_leave_its_prefix_is_refused(name: str) -> None:
    for attempt in (lambda: checked_name("node", name), lambda: KEYS.member(name), lambda: JobKeys("c", name), lambda: JobKeys(name, "j")):
        with pytest.raises(UsageError, match="is not a usable name"):
            attempt()
    with pytest.raises(UsageError, match="cluster"):
        jobs_prefix(name)


@pytest.mark.parametrize("name", ["a", "0", "node-1.example.com", "A_b", "a" * 128])
def test_an_ordinary_name_is_taken(name: str) -> None:
    assert KEYS.member(name) == f"/elasticd/v1/cluster/jobs/job/members/{name}"
    assert MemberId(node=name, incarnation="0" * 16).node == name


def test_the_ring_of_events_forgets() -> None:
    assert KEYS.event(3, "formed") == KEYS.event(3 + EVENT_SLOTS, "formed") != KEYS.event(4, "formed")
