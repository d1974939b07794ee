"""Following what comes of a change until it is there.

Owns: for each verb the pure function that says whether what was wanted is there (or never will be), and the loop that looks twice a second.
Must not: ask for a change, or know how to read the API; the loop is handed a look.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from elasticd.cli.failures import WaitInterruptedError
from elasticd.errors import ConflictError, DaemonUnavailableError, JobFailedError, KVUnavailableError, NotRunningError, WaitTimeoutError

if TYPE_CHECKING:
    from elasticd.cli.talk import Talk

Document = Mapping[str, Any]

LOOK_EVERY: Final = 0.5
"""Seconds between two looks."""
PATIENCE: Final = 30.0
"""Seconds for which nobody may answer: a daemon may be restarted, an etcd elect a leader."""
OVER: Final = ("succeeded", "failed", "stopped")
_GONE: Final = ("lost", "ended")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sight:
    """What one look brought.

    Attributes:
        line: how things stand, for people; "" where a look brought nothing new.
        done: what was wanted is there.
    """

    line: str
    done: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Errand:
    """What is waited for, in words.

    Attributes:
        wanted: "job 'train' on 4 nodes".
        see: the command that shows how things stand.
        cancel: the command that takes the change back, "" if nothing does.
    """

    wanted: str
    see: str
    cancel: str = ""


# --- is it there yet? --------------------------------------------------------------------------------------------------


def started(job: Document) -> Sight:
    """Whether a job that was asked to run trains, on however many nodes it may begin with.

    Raises:
        JobFailedError: it ended, and not by success.
        ConflictError: somebody asked it to stop.
    """
    _check_wanted(job)
    return Sight(line=job_line(job), done=job["state"] in ("training", "succeeded"))


def stopped(job: Document) -> Sight:
    """Whether a job that was asked to stop has ended: closed, or with nobody left who could close it.

    Raises:
        ConflictError: somebody asked it to run again.
    """
    if job["state"] in OVER:
        return Sight(line=job_line(job), done=True)
    if job.get("run"):
        raise ConflictError(f"job {job['job']!r} was asked to run again{_whose(job)}", remedy=f"see elasticctl status {job['job']}")
    nobody = all(node["state"] in _GONE for node in job.get("nodes", ()))
    return Sight(line=f"{job['job']}: no node runs it any more" if nobody else job_line(job), done=nobody)


def scaled(job: Document, nodes: int) -> Sight:
    """Whether a job trains on exactly `nodes` nodes.

    Raises:
        JobFailedError, NotRunningError: it ended first.
        ConflictError: somebody asked for another number, or for its end.
    """
    _check_alive(job)
    if job.get("nodes_desired") not in (None, nodes):
        raise ConflictError(f"job {job['job']!r} was scaled to {job['nodes_desired']} nodes meanwhile{_whose(job)}", remedy="ask again if that is not meant")
    return Sight(line=job_line(job), done=job["state"] == "training" and job["nodes_training"] == nodes)


def restarted(job: Document, generation: int) -> Sight:
    """Whether a generation after `generation` trains.

    Raises:
        JobFailedError, NotRunningError: the job ended first.
        ConflictError: somebody asked for its end.
    """
    _check_alive(job)
    return Sight(line=job_line(job), done=job["state"] == "training" and job["generation"] > generation)


def checkpointed(job: Document, generation: int, step: int) -> Sight:
    """Whether generation `generation` has committed a checkpoint since that of `step`.

    Raises:
        JobFailedError, NotRunningError: the job ended first.
        ConflictError: another generation formed, with which the request is void.
    """
    now = job.get("checkpoint_step")
    if now is not None and now != step:
        return Sight(line=f"{job['job']}: checkpoint of step {now}", done=True)
    _check_alive(job)
    if job["generation"] != generation:
        raise ConflictError(f"generation {job['generation']} of job {job['job']!r} formed first, and the request is void with it", remedy="ask again")
    return Sight(line=f"{job['job']}: waiting for a checkpoint after step {step}")


def drained(node: Document, jobs: Sequence[Document]) -> Sight:
    """Whether no agent is left on a node that was asked to drain.

    Args:
        node: its NodeStatus.
        jobs: every job with its nodes; looked at only where the node is down, since nobody else knows what runs there.

    Raises:
        ConflictError: somebody took it back.
    """
    name, state = node["name"], node["state"]
    if state == "drained":
        return Sight(line=f"{name}: drained", done=True)
    if state == "down":
        left = [job["job"] for job in jobs for member in job.get("nodes", ()) if member["name"] == name and member["state"] not in _GONE]
        if left:
            return Sight(line=f"{name}: its daemon is down, and {', '.join(left)} may still run there")
        return Sight(line=f"{name}: down, and no job runs there; it is kept out when it comes back", done=True)
    if state != "draining":
        raise ConflictError(f"node {name!r} is not to drain any more, it is {state}{_whose(node)}", remedy=f"see elasticctl nodes {name}")
    left_to_go = [job for job in node.get("jobs", ()) if job["state"] in ("running", "leaving", "starting")]
    busy = ", ".join(f"{job['name']} is {job['state']}" for job in left_to_go)
    return Sight(line=f"{name}: draining" + (f" ({busy})" if busy else ""))


def job_line(job: Document) -> str:
    """How a job stands, in one line."""
    text = f"{job['job']}: {job['state']}"
    if job["state"] == "training":
        text += f", generation {job['generation']}, {_of(job['nodes_training'], job.get('nodes_desired'))}, {count(job['world_size'], 'worker')}"
    if not job.get("why"):
        return text
    return text + ("; " if job["state"] == "training" else ": ") + str(job["why"])


def _check_alive(job: Document) -> None:
    _check_wanted(job)
    if job["state"] in OVER:
        raise NotRunningError(f"job {job['job']!r} {job['state']} before that", remedy=f"see elasticctl status {job['job']}")


def _check_wanted(job: Document) -> None:
    name, why = job["job"], f": {job['why']}" if job.get("why") else ""
    if job["state"] == "failed":
        raise JobFailedError(f"job {name!r} failed{why}", remedy=f"see elasticctl history {name}")
    if job["state"] in ("stopping", "stopped"):
        raise ConflictError(f"job {name!r} was asked to stop meanwhile{_whose(job)}", remedy=f"see elasticctl status {name}")


def _whose(subject: Document) -> str:
    """Who said so and why, as far as is known: " (bad fan; by root)"."""
    words = [str(subject.get("reason") or ""), f"by {subject['by']}" if subject.get("by") else ""]
    said = "; ".join(word for word in words if word)
    return f" ({said})" if said else ""


def _of(number: int, wanted: int | None) -> str:
    if wanted is None or number == wanted:
        return count(number, "node")
    return f"{number} of {count(wanted, 'node')}" if number < wanted else f"{count(number, 'node')} ({wanted} wanted)"


def count(number: object, thing: str) -> str:
    """A number of things in words, as "1 node" or "2 nodes"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


# --- until it is -------------------------------------------------------------------------------------------------------


def wait(
    look: Callable[[], Sight],
    errand: Errand,
    *,
    timeout: float,
    talk: Talk,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Sight:
    """Look until what was wanted is there.

    A daemon or an etcd that does not answer is waited for, `PATIENCE` seconds in a row.

    Args:
        look: one look, by the functions above.
        errand: what is waited for.
        timeout: seconds to wait at most, 0 for as long as it takes.
        talk: where to say how things stand.
        clock: seconds, monotonic.
        sleep: lets seconds pass.

    Raises:
        WaitTimeoutError: it is not there in time; the work goes on.
        WaitInterruptedError: Ctrl-C; the work goes on.
        DaemonUnavailableError, KVUnavailableError: nobody answered for too long; the work goes on.
        ElasticdError: it never will be there, as `look` says.
    """
    try:
        return _wait(look, errand, timeout, talk, clock, sleep)
    except KeyboardInterrupt:
        remedy = f"to cancel it: {errand.cancel}" if errand.cancel else f"to follow it: {errand.see}"
        talk.end()
        raise WaitInterruptedError(f"interrupted; {errand.wanted} goes on", remedy=remedy) from None
    finally:
        talk.end()


def _wait(look: Callable[[], Sight], errand: Errand, timeout: float, talk: Talk, clock: Callable[[], float], sleep: Callable[[float], None]) -> Sight:
    began = answered = clock()
    line = "nothing is known yet"
    while True:
        try:
            sight = look()
            answered = clock()
        except (DaemonUnavailableError, KVUnavailableError) as error:
            if clock() - answered > PATIENCE:
                raise
            sight = Sight(line=f"cannot look, trying again: {error.message}")
        if sight.done:
            talk.done(sight.line, clock() - began)
            return sight
        line = sight.line or line
        talk.show(sight.line, clock() - began)
        left = began + timeout - clock() if timeout else LOOK_EVERY
        if left <= 0:
            raise WaitTimeoutError(f"gave up waiting for {errand.wanted} after {timeout:g} s, it goes on ({line})", remedy=f"see {errand.see}")
        sleep(min(LOOK_EVERY, left))
