"""What can be typed to look: status, history, events, version.

Owns: the options and help of these verbs, and who answers `status`: the daemon, etcd, or the runs on this machine. Must not: do anything itself
(`watching` and `status` do).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from elasticd.cli.arguments import (
    EXIT_CODES,
    SOCKET,
    CacertOption,
    CertOption,
    ClusterOption,
    EtcdOption,
    JobArgument,
    KeyOption,
    LineOutput,
    LineOutputOption,
    Output,
    OutputOption,
    SocketOption,
)
from elasticd.cli.completion import job_names, node_names
from elasticd.cli.failures import reported
from elasticd.errors import AccessDeniedError, DaemonUnavailableError, NotRunningError

_FOLLOWED = 10
"""Events of before that `events --follow` begins with."""


def register(app: typer.Typer) -> None:
    """Add these verbs."""
    app.command("status", epilog=_STATUS)(status)
    app.command("history", epilog=_HISTORY)(history)
    app.command("events", epilog=_EVENTS)(events)


def register_version(app: typer.Typer) -> None:
    """Add `version`, apart: it is the last in the list."""
    app.command("version", epilog=_VERSION)(version)


_STATUS = f"""\b
Examples:
  elasticctl status                                            the cluster: etcd, jobs, nodes
  elasticctl status train -w                                   one job, again every 2 s
  elasticctl status -o json | jq .data.jobs[0].world_size
  elasticctl status llm --etcd https://etcd1:2379 --cacert ca.pem --cert me.pem --key me.key

\b
Who answers: with --etcd that etcd; else the daemon of this machine, where its socket is; else the runs of this user on this machine, also where the
daemon does not know JOB or does not let this user in.

\b
JSON: {{"apiVersion": "elasticd/v1", "kind": KIND, "revision": N, "data": {{...}}}}, KIND being JobStatus for one JOB, ClusterStatus for what the daemon
tells of all, JobStatusList for what is read elsewhere; errors are {{"error": {{"code", "message", "hint"}}}} on stderr. With -w one such line a look.

{EXIT_CODES}"""


def status(
    job: Annotated[str | None, typer.Argument(metavar="JOB", help="Only this job.", show_default=False, autocompletion=job_names)] = None,
    *,
    socket: SocketOption = SOCKET,
    etcd: EtcdOption = None,
    cacert: CacertOption = None,
    cert: CertOption = None,
    key: KeyOption = None,
    cluster: ClusterOption = "default",
    output: LineOutputOption = LineOutput.TABLE,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again and again, until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option("--every", metavar="SEC", help="With --watch: seconds between two looks.")] = 2.0,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 3 if a job shown has ended.")] = False,
) -> None:
    """Show how things are: the cluster, or JOB: its state and why, its generation, its nodes, what happened last."""
    as_json = output is not LineOutput.TABLE
    with reported(as_json=as_json):
        from elasticd.cli.checks import check_range

        check_range("--every", every, 0.1, 86_400)
        again = every if watch else None
        if not (etcd or cacert or cert or key) and _daemon_here(socket):
            code = _as_the_daemon_tells(job, socket, as_json=as_json, every=again, exit_code=exit_code)
            if code is not None:
                raise typer.Exit(code)

        from elasticd.cli.logs import quiet_logs
        from elasticd.cli.options import parse_store
        from elasticd.cli.status import StatusOptions
        from elasticd.cli.status import status as status_of_etcd

        quiet_logs()
        store = parse_store(etcd or [], cacert, cert, key)
        raise typer.Exit(status_of_etcd(StatusOptions(job=job, cluster=cluster, store=store, as_json=as_json, every=again, exit_code=exit_code)))


def _daemon_here(socket: Path) -> bool:
    """Whether a daemon is to be asked: its socket is there, or somebody named one."""
    return socket != SOCKET or os.path.lexists(socket)


def _as_the_daemon_tells(job: str | None, socket: Path, *, as_json: bool, every: float | None, exit_code: bool) -> int | None:
    """The exit code; None where a run of this user is meant: the daemon does not know JOB or lets nobody in, and nobody said that it is to answer."""
    from elasticd.cli import watching
    from elasticd.cli.asking import Manner

    watch, manner = watching.Watch(every=every, exit_code=exit_code), Manner(socket=socket, as_json=as_json)
    if socket != SOCKET:
        return watching.status(job, watch, manner)
    try:
        if every is not None:
            watching.look(job, manner)  # a watch would only show what is wrong, again and again
        return watching.status(job, watch, manner)
    except (AccessDeniedError, DaemonUnavailableError, NotRunningError):
        from elasticd.cli.status import runs_here

        if runs_here(job):
            return None
        if every is None:
            raise
    return watching.status(job, watch, manner)


_HISTORY = f"""\b
Examples:
  elasticctl history llm                           how each generation came and went
  elasticctl history llm -n 5 -o jsonl

{EXIT_CODES}"""


def history(
    job: JobArgument,
    *,
    number: Annotated[int | None, typer.Option("--number", "-n", metavar="N", help="Only the last N entries.", show_default=False)] = None,
    socket: SocketOption = SOCKET,
    output: LineOutputOption = LineOutput.TABLE,
) -> None:
    """Show what happened to each generation of JOB, oldest first, as far as etcd remembers."""
    with reported(as_json=output is not LineOutput.TABLE):
        from elasticd.cli import watching
        from elasticd.cli.asking import Manner

        _check_number(number)
        watching.history(job, number, Manner(socket=socket, as_json=output is LineOutput.JSON), lines=output is LineOutput.JSONL)


_EVENTS = f"""\b
Examples:
  elasticctl events -f                             what happens, as it happens
  elasticctl events --job llm -n 20
  elasticctl events --node node-3 -o jsonl

\b
Kinds: generation (a job's generation formed or ended), audit (somebody changed something by elasticctl or the API: who, what, why).
With -f JSON comes a line for each event.

{EXIT_CODES}"""


def events(
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    job: Annotated[str | None, typer.Option("--job", metavar="JOB", help="Only of this job.", autocompletion=job_names, show_default=False)] = None,
    node: Annotated[str | None, typer.Option("--node", metavar="NODE", help="Only of this node.", autocompletion=node_names, show_default=False)] = None,
    number: Annotated[
        int | None, typer.Option("--number", "-n", metavar="N", help="Only the last N; with -f of what was before.  [default: all; -f: 10]", show_default=False)
    ] = None,
    socket: SocketOption = SOCKET,
    output: LineOutputOption = LineOutput.TABLE,
) -> None:
    """Show what happened in the cluster, oldest first: generations, and what operators changed."""
    with reported(as_json=output is not LineOutput.TABLE):
        from elasticd.cli import watching
        from elasticd.cli.asking import Manner

        _check_number(number)
        wanted = watching.Filter(job=job, node=node, number=_FOLLOWED if number is None and follow else number)
        manner = Manner(socket=socket, as_json=output is LineOutput.JSON)
        watching.events(wanted, manner, lines=output is LineOutput.JSONL, follow=follow)


def _check_number(number: int | None) -> None:
    from elasticd.cli.checks import check_range

    if number is not None:
        check_range("--number", number, 0, 1_000_000)


_VERSION = """\b
Examples:
  elasticctl version
  elasticctl version -o json | jq -r .data.daemon"""


def version(*, socket: SocketOption = SOCKET, output: OutputOption = Output.TABLE) -> None:
    """Print the version of this command, and of the daemon if one answers."""
    as_json = output is Output.JSON
    with reported(as_json=as_json):
        from elasticd.cli import watching
        from elasticd.cli.asking import Manner

        watching.version(Manner(socket=socket, as_json=as_json), named=socket != SOCKET)
