"""Every form of line that is known tells what it says, in our words; no line can do harm, nor say more than its writer may."""

from __future__ import annotations

import json
import math
import time
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detectors.observations import Change, Line, Phase, Ranks, Reading, Steps, Stream
from detectors.sources import (
    LINE_MAX,
    Origin,
    Reader,
    harmless,
    kernel_line,
    level_of,
    observations,
    parse_jsonl,
    parse_time,
    plain_line,
)
from elasticd.agent.telemetry import COLUMNS
from elasticd.observability.times import rfc3339
from trainer.wire.window import PHASES, STEP_BOUNDS, Spread, Window

pytestmark = pytest.mark.timeout(30)

AT = 1_796_093_927.0
HOSTILE = st.text(st.characters() | st.sampled_from('\x00\x07\x1b\x7f\x9b\u202e\u2066\u2028\u2029\ud800\udfff\r\n\t{}[]":,'), max_size=200)


def told(event: str, at: float = AT, **fields: Any) -> str:
    """A line as an agent writes it."""
    return json.dumps({"time": rfc3339(at), "level": "info", "event": event, "job": "digits", "node": "node-1", **fields})


def window(*, rank: int = 3, first: int = 11, last: int = 14, ended: float = AT, **values: Spread) -> str:
    """A line of telemetry.jsonl, made of what a worker sends."""
    made = Window(
        rank=rank,
        generation=2,
        first=first,
        last=last,
        began=ended - 2.0,
        ended=ended,
        seconds=2.0,
        phases={name: (0.25 * (place + 1), 0.1) for place, name in enumerate(PHASES)},
        buckets=(0,) * len(STEP_BOUNDS) + (last - first + 1,),
        slowest=(first, 0.9),
        samples=128,
        values=values,
        memory={"rss": 4096},
    )
    return told("window", ended, local_rank=1, step=made.last, **made.as_dict())


def all_of(line: str, **origin: Any) -> list[Any]:
    return list(observations(line, Origin(**origin)))


# --- steps and ranks -----------------------------------------------------------------------------------------------------


def test_a_window_is_what_the_worker_sent() -> None:
    (steps,) = all_of(window(loss=Spread.of([1.0, 3.0, math.nan]), grad_norm=Spread.of([math.inf])))
    assert steps == Steps(
        at=AT,
        rank=3,
        first=11,
        last=14,
        seconds=2.0,
        phases={name: 0.25 * (place + 1) for place, name in enumerate(PHASES)},
        node="node-1",
        generation=2,
        samples=128,
        values={"loss": 2.0, "grad_norm": None},
        highest={"loss": 3.0},
        nonfinite={"loss": 1, "grad_norm": 1},
        memory={"rss": 4096},
    )


def test_ranks_are_told_by_rank() -> None:
    columns = {name: [0.1, 0.2 + place] for place, name in enumerate(COLUMNS)}
    (ranks,) = all_of(told("ranks", generation=2, rank=0, step=18, steps=16, columns=columns))
    assert ranks == Ranks(
        at=AT,
        step=18,
        node="node-1",
        generation=2,
        ranks=(dict.fromkeys(COLUMNS, 0.1), {name: 0.2 + place for place, name in enumerate(COLUMNS)}),
    )


@pytest.mark.parametrize(
    "change",
    [
        {"rank": None},
        {"rank": -1},
        {"rank": True},
        {"first": 0},
        {"first": 99},
        {"last": "14"},
        {"seconds": -1.0},
        {"ended": "now"},
        {"phases": []},
        {"phases": {"data": 3}},
        {"values": [1]},
    ],
)
def test_a_window_that_makes_no_sense_is_none(change: dict[str, Any]) -> None:
    assert all_of(json.dumps({**json.loads(window()), **change})) == []


@pytest.mark.parametrize("columns", [{}, [], {"data": []}, {"data": [1.0], "other": [1.0, 2.0]}, {"data": 1.0}])
def test_ranks_that_make_no_sense_are_none(columns: Any) -> None:
    assert all_of(told("ranks", rank=0, step=1, columns=columns)) == []


# --- events --------------------------------------------------------------------------------------------------------------


def test_an_event_is_a_line_in_which_everything_can_be_looked_for() -> None:
    error = "Traceback (most recent call last):\n  ...\nValueError: no such layer"
    line = json.dumps({"ts": AT * 1000, "levelname": "WARN", "event": "load_failed", "logger": "my.app", "rank": 5, "path": "/a", "exception": error})
    assert parse_jsonl(line, node="n") == Line(
        at=AT,
        stream=Stream.EVENT,
        text="load_failed ValueError: no such layer rank=5 path=/a",
        node="n",
        rank=5,
        event="load_failed",
        level="warning",
        logger="my.app",
        fields={"rank": 5, "path": "/a", "exception": error},
    )


def test_a_message_that_is_no_event_is_plain_text_with_its_level() -> None:
    line = parse_jsonl('{"message": "it is \\u001b[31mred", "severity": "FATAL"}', at=AT)
    assert isinstance(line, Line)
    assert (line.text, line.level, line.event, line.at) == ("it is red", "critical", "", AT)


def test_under_systemd_a_line_begins_with_its_priority() -> None:
    (line,) = all_of("<4>" + told("peer_dead", peer="node-0"))
    assert line.event == "peer_dead"


@pytest.mark.parametrize(
    ("line", "phase", "world_size"),
    [
        (told("generation_formed", generation=2, world_size=4, cause="node_lost node-0"), Phase.INIT, 4),
        (told("workers_started", generation=2), Phase.INIT, None),
        (told("directive", generation=2, action="stop", mode="kill", why="a node is gone"), Phase.RESCALE, None),
        (told("directive", generation=2, action="leave", mode="kill", why="job succeeded"), Phase.STOPPED, None),
        (told("worker_failed", generation=2, rank=1, detail="exit code 1"), Phase.RESCALE, None),
        (told("workers_stopped", generation=2, why="every worker returned 0", outcome="finished"), Phase.STOPPED, None),
        (told("workers_stopped", generation=2, why="told to", outcome=None), Phase.RESCALE, None),
        (told("agent_exit", generation=2, code=0), Phase.STOPPED, None),
        (told("checkpoint_written", generation=2, step=330, seconds=0.1), Phase.CHECKPOINT, None),
        (told("phase", generation=2, phase="eval"), Phase.EVAL, None),
    ],
)
def test_an_event_tells_its_line_and_then_the_change(line: str, phase: Phase, world_size: int | None) -> None:
    said, change = all_of(line)
    assert isinstance(said, Line)
    assert isinstance(change, Change)
    assert (change.at, change.phase, change.node, change.generation, change.world_size) == (AT, phase, "node-1", 2, world_size)


def test_a_kernel_event_of_the_daemon_is_a_line_of_the_kernel() -> None:
    (line,) = all_of(told("kernel_event", kind="xid", text="NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", xid=79))
    assert (line.stream, line.text, line.node) == (Stream.KERNEL, "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", "node-1")
    assert line.fields["xid"] == 79


@pytest.mark.parametrize(
    "line",
    [window(), told("ranks", rank=0, step=1, columns={"data": [1.0]}), told("kernel_event", text="Xid"), told("agent_exit"), told("phase", phase="stopped")],
)
def test_what_a_worker_prints_is_a_line_of_that_worker_whatever_it_looks_like(line: str) -> None:
    (said,) = all_of(line, node="mine", rank=7, generation=5, trusted=False, stream=Stream.OUT)
    assert isinstance(said, Line)
    assert said.stream is not Stream.KERNEL
    assert (said.node, said.rank, said.generation) == ("mine", 7, 5)


def test_a_worker_may_say_itself_that_it_evaluates() -> None:
    _, change = all_of('{"event": "phase", "phase": "eval"}', node="mine", rank=7, at=AT, trusted=False)
    assert change == Change(at=AT, phase=Phase.EVAL, node="mine", rank=7, why="phase")


# --- training begins with steps ------------------------------------------------------------------------------------------


def read(*lines: str) -> list[Any]:
    reader = Reader()
    return [found for line in lines for found in reader.observations(line, Origin()) if not isinstance(found, Line)]


def test_training_begins_with_the_first_steps_of_a_generation_on_a_node_and_is_told_once() -> None:
    found = read(told("workers_started", AT - 30, generation=2), window(), window(first=15, last=18, ended=AT + 1))
    assert [type(one) for one in found] == [Change, Change, Steps, Steps]
    assert (found[1].phase, found[1].at, found[1].generation) == (Phase.TRAIN, AT - 2.0, 2)


def test_steps_that_were_made_before_a_stop_do_not_begin_training_again() -> None:
    found = read(window(), told("directive", AT + 0.5, generation=2, action="stop"), window(first=15, last=18, ended=AT + 1))
    assert [one.phase for one in found if isinstance(one, Change)] == [Phase.TRAIN, Phase.RESCALE]


def test_steps_after_an_evaluation_end_it() -> None:
    found = read(window(), told("phase", AT + 1, generation=2, phase="eval"), window(first=15, last=18, ended=AT + 60))
    assert [one.phase for one in found if isinstance(one, Change)] == [Phase.TRAIN, Phase.EVAL, Phase.TRAIN]


def test_a_checkpoint_while_training_goes_on_is_over_at_once_and_one_after_it_changes_nothing() -> None:
    written = told("checkpoint_written", AT + 1, generation=2, step=14)
    found = read(window(), written, told("workers_stopped", AT + 2, generation=2, outcome="finished"), written)
    phases = [one.phase for one in found if isinstance(one, Change)]
    assert phases == [Phase.TRAIN, Phase.CHECKPOINT, Phase.TRAIN, Phase.STOPPED]


# --- readings ------------------------------------------------------------------------------------------------------------


def test_a_reading_as_it_is_recorded() -> None:
    (reading,) = all_of(told("reading", gpu=1, values={"temperature_c": 71, "DCGM_FI_DEV_FB_USED": 2, "nobody": 3, "power_w": math.nan}))
    assert reading == Reading(at=AT, values={"temperature_c": 71.0, "memory_used_bytes": 2 * 1048576.0}, node="node-1", gpu=1)


def test_a_daemons_word_of_its_node() -> None:
    part = {
        "name": "node-3",
        "problem": "",
        "at": rfc3339(AT),
        "clock": AT,
        "host": {"cpu": 0.5, "load": 2.0, "memory_total": 100, "memory_available": None},
        "gpus": [{"index": 2, "utilization": 0.9, "memory_used": 7, "temperature": 60.0, "power": None, "throttled": True}],
        "jobs": [],
    }
    assert all_of(json.dumps(part)) == [
        Reading(at=AT, values={"cpu": 0.5, "load1": 2.0, "memory_total_bytes": 100.0}, node="node-3"),
        Reading(at=AT, values={"utilization": 0.9, "memory_used_bytes": 7.0, "temperature_c": 60.0, "throttled": 1.0}, node="node-3", gpu=2),
    ]


# --- plain lines, and the kernel's ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("step 1 loss 2.0", ""),
        ("ERROR: no such file", "error"),
        ("2026-12-01 03:00:00,123 WARNING root: low", "warning"),
        ("[rank0]:[E1130 12:00:00.123456789 ProcessGroupNCCL.cpp:616] timed out", "error"),
        ("[W1130 12:00:00.1 TCPStore.cpp:1] slow", "warning"),
        ("F1130 12:00:00.1 1 main.cc:1] dead", "critical"),
        ("FATAL no memory", "critical"),
        ("WANDB_ERRORS=x TERRA WARNS", ""),
        ("RuntimeError: x", ""),
        ("x" * 400 + " ERROR", ""),
    ],
)
def test_a_plain_line_may_say_its_level(text: str, level: str) -> None:
    assert level_of(text) == level


def test_a_plain_line_is_harmless_and_short() -> None:
    line = plain_line(b"\x1b[31mred\x1b[0m\x07 \xff " + b"x" * 5000 + b"\r\n", at=AT, stream=Stream.ERR, node="n", rank=1, generation=2)
    assert line.text.startswith("red  \ufffd xxx")
    assert len(line.text) == LINE_MAX
    assert (line.at, line.stream, line.node, line.rank, line.generation) == (AT, Stream.ERR, "n", 1, 2)


def test_of_a_bar_of_progress_the_last_state_is_told() -> None:
    assert harmless(b" 10%|#\r 20%|##\r\n") == " 20%|##"


@pytest.mark.parametrize(
    ("raw", "at", "level"),
    [
        ("3,1234,5000000,-;NVRM: Xid (PCI:0000:3b:00): 79", 1005.0, "error"),
        ("[    5.000000] NVRM: Xid (PCI:0000:3b:00): 79", 1005.0, ""),
        (f"{datetime.fromtimestamp(AT, UTC).isoformat()} host7 kernel: [ 5.0] NVRM: Xid (PCI:0000:3b:00): 79", AT, ""),
        ("Dec  1 03:00:00 host7 kernel: NVRM: Xid (PCI:0000:3b:00): 79", 7.0, ""),
        ("NVRM: Xid (PCI:0000:3b:00): 79", 7.0, ""),
    ],
)
def test_what_the_kernel_says_is_found_in_all_its_forms(raw: str, at: float, level: str) -> None:
    assert kernel_line(raw, at=7.0, node="n", booted=1000.0) == Line(at=at, stream=Stream.KERNEL, text="NVRM: Xid (PCI:0000:3b:00): 79", node="n", level=level)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (AT, AT),
        (int(AT * 1e3), AT),
        (int(AT) * 10**9, AT),
        (str(AT), AT),
        ("2026-12-01T02:58:47Z", 1796093927.0),
        ("2026-12-01 02:58:47,500", 1796093927.5),
        ("2026-12-01T04:58:47+02:00", 1796093927.0),
        ("yesterday", None),
        (True, None),
        (None, None),
        (math.nan, None),
        (math.inf, None),
        (-1, None),
        (10**400, None),
        ("9" * 400, None),
    ],
)
def test_times_of_all_kinds(value: Any, seconds: float | None) -> None:
    assert parse_time(value) == seconds


# --- whatever comes ------------------------------------------------------------------------------------------------------

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | HOSTILE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["data", "loss", "host", "gpus", "index", "cpu"]) | HOSTILE, inner, max_size=3),
    max_leaves=8,
)
_NAMES = [*json.loads(window()), "columns", "values", "gpu", "host", "gpus", "name", "clock", "message", "exception", "logger", "phase", "world_size", "text"]
_EVENTS = st.sampled_from(["window", "ranks", "reading", "kernel_event", "phase", "generation_formed", "checkpoint_written", "directive"])


@given(st.dictionaries(st.sampled_from(_NAMES), _JSON, max_size=8), _EVENTS | _JSON, st.booleans())
def test_no_document_raises_or_tells_what_is_not_finite_or_not_harmless(document: dict[str, Any], event: Any, trusted: bool) -> None:
    for found in Reader().observations(json.dumps({**document, "event": event}), Origin(trusted=trusted)):
        assert math.isfinite(found.at)
        match found:
            case Line():
                assert found.text.isprintable()
                assert found.event.isprintable()
                assert len(found.text) <= LINE_MAX
            case Steps():
                numbers = [found.seconds, *found.phases.values(), *found.highest.values(), *(value for value in found.values.values() if value is not None)]
                assert all(math.isfinite(number) for number in numbers)
            case Ranks():
                assert all(math.isfinite(number) for rank in found.ranks for number in rank.values())
            case Reading():
                assert all(math.isfinite(number) for number in found.values.values())
            case Change():
                assert found.why.isprintable()


@given(HOSTILE | st.binary(max_size=300))
def test_no_line_raises_and_all_that_is_told_is_printable(raw: str | bytes) -> None:
    assert harmless(raw).isprintable()
    assert kernel_line(raw, at=0.0, booted=0.0).text.isprintable()
    assert plain_line(raw, at=0.0, stream=Stream.OUT).text.isprintable()
    list(observations(raw, Origin()))


@pytest.mark.parametrize(
    "raw", [b"{" * 100_000, b'{"a":' * 100_000, b'{"time": ' + b"9" * 5000 + b"}", b'{"event": "' + b"x" * 3_000_000 + b'"}', b"\x1b[" * 500_000]
)
def test_a_huge_or_deep_line_takes_a_moment_at_most(raw: bytes) -> None:
    began = time.process_time()
    list(observations(raw, Origin()))
    plain_line(raw, at=0.0, stream=Stream.OUT)
    assert time.process_time() - began < 1.0
