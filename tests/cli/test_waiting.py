"""When is what was asked for there, and when will it never be?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from elasticd.cli import waiting
from elasticd.cli.failures import WaitInterruptedError
from elasticd.cli.talk import Talk
from elasticd.cli.waiting import PATIENCE, Errand, Sight, wait
from elasticd.errors import (
    ConflictError,
    DaemonUnavailableError,
    ElasticdError,
    JobFailedError,
    KVUnavailableError,
    NotRunningError,
    WaitTimeoutError,
)
from tests.cli.pretend import job, member, node

ERRAND = Errand(wanted="job 'llm' on 4 nodes", see="elasticctl status llm", cancel="elasticctl scale llm 2")
Goal = Callable[[dict[str, Any]], Sight]


@pytest.mark.parametrize(
    ("goal", "seen", "done", "line"),
    [
        (waiting.started, {"state": "waiting", "why": "0 of at least 1 nodes are here"}, False, "llm: waiting: 0 of at least 1 nodes are here"),
        (waiting.started, {"state": "forming", "why": "form"}, False, "llm: forming: form"),
        (waiting.started, {}, True, "llm: training, generation 7, 2 nodes, 16 workers"),
        # It begins with as many as are there: a cluster that is short of nodes must not hold up whoever starts a job.
        (waiting.started, {"nodes_desired": 4}, True, "llm: training, generation 7, 2 of 4 nodes, 16 workers"),
        (waiting.started, {"state": "succeeded", "why": "every worker finished"}, True, "llm: succeeded: every worker finished"),
        (waiting.stopped, {"state": "stopping", "why": "wrong data", "run": False}, False, "llm: stopping: wrong data"),
        (waiting.stopped, {"state": "stopped", "why": "wrong data", "run": False}, True, "llm: stopped: wrong data"),
        (waiting.stopped, {"state": "succeeded", "why": "every worker finished"}, True, "llm: succeeded: every worker finished"),
        (waiting.stopped, {"state": "stopping", "run": False, "nodes": []}, True, "llm: no node runs it any more"),
        (waiting.stopped, {"state": "stopping", "run": False, "nodes": [member("a", state="lost")]}, True, "llm: no node runs it any more"),
        (waiting.stopped, {"state": "stopping", "run": False, "nodes": [member("a", state="stopped")]}, False, "llm: stopping"),
        (partial(waiting.scaled, nodes=2), {}, True, "llm: training, generation 7, 2 nodes, 16 workers"),
        (partial(waiting.scaled, nodes=4), {"nodes_desired": 4}, False, "llm: training, generation 7, 2 of 4 nodes, 16 workers"),
        (partial(waiting.scaled, nodes=2), {"nodes_training": 3}, False, "llm: training, generation 7, 3 nodes (2 wanted), 16 workers"),
        (partial(waiting.scaled, nodes=2), {"state": "restarting", "why": "scale of node-3"}, False, "llm: restarting: scale of node-3"),
        (partial(waiting.restarted, generation=7), {}, False, "llm: training, generation 7, 2 nodes, 16 workers"),
        (partial(waiting.restarted, generation=7), {"state": "restarting", "generation": 8}, False, "llm: restarting"),
        (partial(waiting.restarted, generation=6), {"nodes_training": 1, "world_size": 1}, True, "llm: training, generation 7, 1 of 2 nodes, 1 worker"),
        (partial(waiting.checkpointed, generation=7, step=100), {"checkpoint_step": 100}, False, "llm: waiting for a checkpoint after step 100"),
        (partial(waiting.checkpointed, generation=7, step=100), {"checkpoint_step": 140}, True, "llm: checkpoint of step 140"),
        (partial(waiting.checkpointed, generation=7, step=100), {"checkpoint_step": 140, "state": "succeeded"}, True, "llm: checkpoint of step 140"),
    ],
)
def test_what_was_asked_of_a_job_is_there_or_on_its_way(goal: Goal, seen: dict[str, Any], done: bool, line: str) -> None:
    assert goal(job(**seen)) == Sight(line=line, done=done)


@pytest.mark.parametrize(
    ("goal", "seen", "error", "message"),
    [
        (waiting.started, {"state": "failed", "why": "restart budget used up"}, JobFailedError, "job 'llm' failed: restart budget used up"),
        (waiting.started, {"state": "stopped", "run": False}, ConflictError, "asked to stop meanwhile (by root (uid 0, pid 1))"),
        (waiting.stopped, {"reason": "no, go on"}, ConflictError, "asked to run again (no, go on; by root (uid 0, pid 1))"),
        (partial(waiting.scaled, nodes=4), {"nodes_desired": 3}, ConflictError, "was scaled to 3 nodes meanwhile (by root (uid 0, pid 1))"),
        (partial(waiting.scaled, nodes=2), {"state": "stopping"}, ConflictError, "asked to stop meanwhile"),
        (partial(waiting.scaled, nodes=2), {"state": "succeeded"}, NotRunningError, "job 'llm' succeeded before that"),
        (partial(waiting.restarted, generation=7), {"state": "failed", "why": "x"}, JobFailedError, "job 'llm' failed: x"),
        (partial(waiting.checkpointed, generation=6, step=100), {"checkpoint_step": 100}, ConflictError, "generation 7 of job 'llm' formed first"),
    ],
)
def test_what_can_never_be_there_any_more_ends_the_waiting(goal: Goal, seen: dict[str, Any], error: type[ElasticdError], message: str) -> None:
    with pytest.raises(error) as caught:
        goal(job(**seen))
    assert message in caught.value.message


def test_a_node_is_drained_when_its_daemon_says_so() -> None:
    leaving, kept_out = {"name": "llm", "state": "leaving", "slots": 8, "why": ""}, {"name": "eval", "state": "kept_out", "slots": 0, "why": ""}
    busy = node(state="draining", jobs=[leaving, kept_out])
    assert waiting.drained(busy, ()) == Sight(line="node-3: draining (llm is leaving)")
    assert waiting.drained(node(state="drained"), ()) == Sight(line="node-3: drained", done=True)


def test_a_node_that_is_down_is_drained_when_no_job_has_it() -> None:
    down = node(state="down", jobs=[])
    assert not waiting.drained(down, [job(nodes=[member("node-3")])]).done
    assert waiting.drained(down, [job(nodes=[member("node-3")])]).line == "node-3: its daemon is down, and llm may still run there"
    assert waiting.drained(down, [job(nodes=[member("node-3", state="lost"), member("node-1")])]).done


def test_a_drain_that_is_taken_back_ends_the_waiting() -> None:
    with pytest.raises(ConflictError, match=r"is not to drain any more, it is cordoned \(bad fan; by ann\)"):
        waiting.drained(node(state="cordoned", reason="bad fan", by="ann"), ())


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


def follow(sights: list[Sight | Exception], *, timeout: float = 0.0, clock: Clock | None = None) -> Sight:
    """Wait over scripted looks; the last is seen for ever."""
    clock = clock or Clock()

    def look() -> Sight:
        sight = sights.pop(0) if len(sights) > 1 else sights[0]
        if isinstance(sight, BaseException):
            raise sight
        return sight

    return wait(look, ERRAND, timeout=timeout, talk=Talk(), clock=clock, sleep=clock.sleep)


def test_it_looks_twice_a_second_and_says_each_change_once(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    sights: list[Sight | Exception] = [Sight(line="a"), Sight(line="a"), Sight(line=""), Sight(line="b"), Sight(line="c", done=True)]
    assert follow(sights, clock=clock) == Sight(line="c", done=True)
    assert clock.now == 1002.0
    out, err = capsys.readouterr()
    assert (out, err) == ("", "a\nb\n")  # the end is told on stdout, by whoever waited


def test_it_gives_up_when_the_time_is_over_and_says_how_things_stand() -> None:
    clock = Clock()
    with pytest.raises(WaitTimeoutError) as caught:
        follow([Sight(line="llm: waiting")], timeout=1.2, clock=clock)
    assert str(caught.value) == "gave up waiting for job 'llm' on 4 nodes after 1.2 s, it goes on (llm: waiting); see elasticctl status llm"
    assert clock.now == pytest.approx(1001.2)


@pytest.mark.parametrize("error", [DaemonUnavailableError("no daemon answers"), KVUnavailableError("no endpoint answered")])
def test_who_does_not_answer_is_waited_for(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    assert follow([Sight(line="a"), error, error, Sight(line="b", done=True)]).line == "b"
    assert capsys.readouterr().err == f"a\ncannot look, trying again: {error}\n"


def test_who_does_not_answer_for_long_ends_the_waiting() -> None:
    clock = Clock()
    with pytest.raises(DaemonUnavailableError):
        follow([Sight(line="a"), DaemonUnavailableError("no daemon answers")], clock=clock)
    assert PATIENCE < clock.now - 1000 < PATIENCE + 2


def test_an_answer_in_between_is_an_answer() -> None:
    away = DaemonUnavailableError("no daemon answers")
    looks = round(PATIENCE / waiting.LOOK_EVERY) - 2
    sights: list[Sight | Exception] = [*[away] * looks, Sight(line="a"), *[away] * looks, Sight(line="b", done=True)]
    assert follow(sights).done


def test_what_can_never_be_there_is_not_waited_for() -> None:
    clock = Clock()
    with pytest.raises(ConflictError):
        follow([ConflictError("somebody else")], clock=clock)
    assert clock.now == 1000


@pytest.mark.parametrize(
    ("cancel", "remedy"), [("elasticctl scale llm 2", "to cancel it: elasticctl scale llm 2"), ("", "to follow it: elasticctl status llm")]
)
def test_an_interrupt_says_that_the_work_goes_on_and_how_to_cancel_it(cancel: str, remedy: str) -> None:
    def look() -> Sight:
        raise KeyboardInterrupt

    errand = Errand(wanted=ERRAND.wanted, see=ERRAND.see, cancel=cancel)
    with pytest.raises(WaitInterruptedError) as caught:
        wait(look, errand, timeout=0.0, talk=Talk())
    assert (caught.value.message, caught.value.remedy, caught.value.exit_code) == ("interrupted; job 'llm' on 4 nodes goes on", remedy, 130)
