"""The verbs about one job: start, stop, scale, pause, resume, checkpoint, restart.

Owns: what each asks of the daemon, what it says about the answer, and what it waits for. Must not: decide whether a job may (the daemon does),
or know when something is there (`waiting`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from elasticd.cli import waiting
from elasticd.cli.asking import Document, Manner, change, check_reason, confirm, given, job_path
from elasticd.cli.failures import say
from elasticd.cli.talk import Talk
from elasticd.cli.waiting import Errand, Sight, wait
from elasticd.errors import ElasticdError, NotRunningError, UsageError

_LOOK_TIMEOUT: Final = 3.0
"""Seconds for each step of a look; one that hangs is tried again."""

Goal = Callable[[Document], Sight]


def parse_parameters(texts: Sequence[str]) -> dict[str, str]:
    """What `--set NAME=VALUE` means. Values stay text: the job file says which are numbers, and a word may look like one.

    Raises:
        UsageError: it is not of that form, or a name is given twice.
    """
    values: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise UsageError(f"--set {text!r} is not NAME=VALUE")
        if name in values:
            raise UsageError(f"--set {name} is given twice")
        values[name] = value
    return values


def start(job: str, body: Document, manner: Manner) -> None:
    """Ask for a job to run, and wait until it trains."""
    envelope = change(manner, job_path(job, "start"), body)
    wanted = envelope["data"].get("after") or {}
    least, most = wanted.get("min_nodes"), wanted.get("max_nodes")
    _tell(envelope, manner, f"{job}: is to run on {waiting.count(wanted.get('nodes'), 'node')}, {least} at least, {most} at most")
    errand = Errand(wanted=f"the start of job {job!r}", see=f"elasticctl status {job}", cancel=f"elasticctl stop {job}")
    _follow(job, waiting.started, errand, envelope, manner)


def stop(job: str, reason: str, manner: Manner) -> None:
    """Ask for a job to stop in order, and wait until it has."""
    confirm(lambda: f"Stop {_described(job, manner)}?", manner)
    envelope = change(manner, job_path(job, "stop"), given(reason=reason))
    _tell(envelope, manner, f"{job}: is to stop")
    errand = Errand(wanted=f"the stop of job {job!r}", see=f"elasticctl status {job}", cancel=f"elasticctl start {job} --again")
    _follow(job, waiting.stopped, errand, envelope, manner)


def scale(job: str, nodes: int, body: Document, manner: Manner) -> None:
    """Ask for a number of nodes, and wait until the job trains on so many."""
    envelope = change(manner, job_path(job, "scale"), {"nodes": nodes, **body})
    data = envelope["data"]
    _tell(envelope, manner, f"{job}: would be scaled" if data.get("dry_run") else f"{job}: is to be scaled")
    if data.get("dry_run"):
        return
    before = (data.get("before") or {}).get("nodes")
    errand = Errand(
        wanted=f"job {job!r} on {nodes} node{'' if nodes == 1 else 's'}",
        see=f"elasticctl status {job}",
        cancel=f"elasticctl scale {job} {before}" if before else "",
    )
    _follow(job, partial(waiting.scaled, nodes=nodes), errand, envelope, manner)


def restart(job: str, reason: str, manner: Manner) -> None:
    """Ask for an agreed stop and the next generation, and wait until that trains."""
    check_reason(reason)
    confirm(lambda: f"Restart {_described(job, manner)}?", manner)
    envelope = change(manner, job_path(job, "restart"), {"reason": reason})
    _tell(envelope, manner, f"{job}: is to restart")
    errand = Errand(wanted=f"the restart of job {job!r}", see=f"elasticctl status {job}")
    generation = int(envelope["data"].get("generation") or 0)
    _follow(job, partial(waiting.restarted, generation=generation), errand, envelope, manner)


def checkpoint(job: str, reason: str, manner: Manner) -> None:
    """Ask for a checkpoint; wait for it where the job says in etcd what it has committed."""
    before = manner.client().get(job_path(job))["data"].get("checkpoint_step")
    envelope = change(manner, job_path(job, "checkpoint"), given(reason=reason))
    _tell(envelope, manner, f"{job}: was asked for a checkpoint")
    if before is None:
        if not (manner.as_json or manner.detach):
            print(f"{job}: commits no checkpoints that can be seen here, so when it is done cannot be either")
        return
    errand = Errand(wanted=f"a checkpoint of job {job!r}", see=f"elasticctl status {job}")
    generation = int(envelope["data"].get("generation") or 0)
    _follow(job, partial(waiting.checkpointed, generation=generation, step=int(before)), errand, envelope, manner)


def pause(job: str | None, reason: str, manner: Manner) -> None:
    """Let nothing be changed of free will, in one job or in all that run.

    Raises:
        NotRunningError: none runs.
    """
    check_reason(reason)
    jobs = [job] if job else [one["job"] for one in _jobs(manner) if one["run"]]
    if not jobs:
        raise NotRunningError("no job runs", remedy="see elasticctl status")
    _each(jobs, "pause", {"reason": reason}, manner, "is paused: nobody joins, nothing is scaled, recovery goes on")


def resume(job: str | None, reason: str, manner: Manner) -> None:
    """Go on as usual, with one job or with all that are paused."""
    jobs = [job] if job else [one["job"] for one in _jobs(manner) if one["paused"]]
    if not jobs and not manner.as_json:
        print("no job is paused")
    _each(jobs, "resume", given(reason=reason), manner, "goes on as usual")


def _each(jobs: Sequence[str], verb: str, body: Document, manner: Manner, words: str) -> None:
    """Ask the same of several jobs. One that refuses does not keep the others from it."""
    refused: list[ElasticdError] = []
    for job in jobs:
        try:
            _tell(change(manner, job_path(job, verb), body), manner, f"{job}: {words}")
        except ElasticdError as error:
            refused.append(error)
    for other in refused[:-1]:
        say(other, as_json=manner.as_json)
    if refused:
        raise refused[-1]


def _jobs(manner: Manner) -> list[Document]:
    """Those that have not ended."""
    found: list[Document] = manner.client().get("/v1/jobs")["data"]["jobs"]
    return [job for job in found if job["state"] not in waiting.OVER]


def _described(job: str, manner: Manner) -> str:
    """A job for the question whether to disturb it: that it exists is found out before asking."""
    return f"job {waiting.job_line(manner.client().get(job_path(job))['data'])}"


def _tell(envelope: Document, manner: Manner, words: str) -> None:
    """One line about what was changed."""
    if manner.as_json:
        return
    data = envelope["data"]
    if not data.get("changed") and not data.get("dry_run"):
        words += " (it was so already)"
    differences = difference(data.get("before") or {}, data.get("after") or {})
    print(words + (f": {differences}" if differences else ""), flush=True)


def difference(before: Document, after: Document) -> str:
    """What a change changes, as "nodes 2 -> 4, max_nodes 3 -> 4"; what nobody counts, and what was not known before, is left out."""
    shown = [name for name in ("nodes", "min_nodes", "max_nodes", "max_restarts") if before.get(name) not in (None, after.get(name))]
    return ", ".join(f"{name} {before[name]} -> {after.get(name)}" for name in shown)


def _follow(job: str, goal: Goal, errand: Errand, envelope: Document, manner: Manner) -> None:
    if manner.detach:
        return
    client = manner.client(timeout=min(_LOOK_TIMEOUT, manner.timeout or _LOOK_TIMEOUT))
    since, path = envelope.get("revision") or 0, job_path(job)

    def look() -> Sight:
        seen = client.get(path)
        # A daemon that reads behind its own writes must not make us believe the past.
        return goal(seen["data"]) if (seen.get("revision") or since) >= since else Sight(line="")

    sight = wait(look, errand, timeout=manner.timeout, talk=Talk(as_json=manner.as_json))
    if not manner.as_json:
        print(sight.line, flush=True)
