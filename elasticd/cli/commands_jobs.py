"""What can be typed about one job.

Owns: the options and help of start, stop, scale, pause, resume, checkpoint and restart. Must not: do anything itself (`jobs` does).
"""

from __future__ import annotations

from typing import Annotated

import typer

from elasticd.cli.arguments import (
    EXIT_CODES,
    SOCKET,
    DetachOption,
    JobArgument,
    JobsArgument,
    MaxOption,
    MinOption,
    NeededReason,
    Output,
    OutputOption,
    ReasonOption,
    SocketOption,
    TimeoutOption,
    YesOption,
)
from elasticd.cli.failures import reported


def register(app: typer.Typer) -> None:
    """Add these verbs."""
    app.command("start", epilog=_START)(start)
    app.command("stop", epilog=_STOP)(stop)
    app.command("scale", epilog=_SCALE)(scale)
    app.command("pause", epilog=_PAUSE)(pause)
    app.command("resume", epilog=_RESUME)(resume)
    app.command("checkpoint", epilog=_CHECKPOINT)(checkpoint)
    app.command("restart", epilog=_RESTART)(restart)


def _check_nodes(**sizes: int | None) -> None:
    from elasticd.cli.checks import check_range

    for name, value in sizes.items():
        if value is not None:
            check_range(name if name == "N" else f"--{name}", value, 1, 100_000)


_START = f"""\b
Examples:
  elasticctl start llm                             as its job file says
  elasticctl start llm --nodes 4 --min 2 --set lr=0.001 --set precision=bf16
  elasticctl start llm --again --timeout 60        a job that has ended

{EXIT_CODES}"""


def start(
    job: JobArgument,
    *,
    nodes: Annotated[int | None, typer.Option("--nodes", "-N", metavar="N", help="Nodes wanted.", show_default=False)] = None,
    least: MinOption = None,
    most: MaxOption = None,
    max_restarts: Annotated[
        int | None, typer.Option("--max-restarts", metavar="N", help="Failures of workers after which it fails.", show_default=False)
    ] = None,
    parameters: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A parameter of its job file. May be repeated.", show_default=False)
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Start it again if it has ended.")] = False,
    reason: ReasonOption = "",
    detach: DetachOption = False,
    timeout: TimeoutOption = 0.0,
    socket: SocketOption = SOCKET,
    output: OutputOption = Output.TABLE,
) -> None:
    """Start JOB on the cluster, and wait until it trains.

    What JOB runs is in the job file of that name on each node. Sizes not given come from there, or stay as they were.
    """
    with reported(as_json=output is Output.JSON):
        from elasticd.cli import jobs
        from elasticd.cli.asking import Manner, given
        from elasticd.cli.checks import check_range

        _check_nodes(nodes=nodes, min=least, max=most)
        if max_restarts is not None:
            check_range("--max-restarts", max_restarts, 0, 1_000_000)
        body = given(
            nodes=nodes,
            min_nodes=least,
            max_nodes=most,
            max_restarts=max_restarts,
            parameters=jobs.parse_parameters(parameters or []),
            reason=reason,
            again=again,
        )
        jobs.start(job, body, Manner(socket=socket, as_json=output is Output.JSON, detach=detach, timeout=timeout))


_STOP = f"""\b
Examples:
  elasticctl stop llm --reason "wrong data"
  elasticctl stop llm -y --detach

{EXIT_CODES}"""


def stop(
    job: JobArgument,
    *,
    reason: ReasonOption = "",
    yes: YesOption = False,
    detach: DetachOption = False,
    timeout: TimeoutOption = 0.0,
    socket: SocketOption = SOCKET,
    output: OutputOption = Output.TABLE,
) -> None:
    """Stop JOB in order on all its nodes, and wait until it has ended."""
    with reported(as_json=output is Output.JSON):
        from elasticd.cli import jobs
        from elasticd.cli.asking import Manner

        jobs.stop(job, reason, Manner(socket=socket, as_json=output is Output.JSON, detach=detach, timeout=timeout, yes=yes))


_SCALE = f"""\b
Examples:
  elasticctl scale llm 6                           and wait until it trains on 6 nodes
  elasticctl scale llm 6 --max 8 --dry-run         only say what would change
  elasticctl scale llm 6 --if-revision 4711        unless somebody changed it since (target_revision of `status llm -o json`)

{EXIT_CODES}"""


def scale(
    job: JobArgument,
    number: Annotated[int, typer.Argument(metavar="N", help="Nodes wanted in all.", show_default=False)],
    *,
    least: MinOption = None,
    most: MaxOption = None,
    if_revision: Annotated[int | None, typer.Option("--if-revision", metavar="REV", help="Only if it was last changed at REV.", show_default=False)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would change.")] = False,
    reason: ReasonOption = "",
    detach: DetachOption = False,
    timeout: TimeoutOption = 0.0,
    socket: SocketOption = SOCKET,
    output: OutputOption = Output.TABLE,
) -> None:
    """Let JOB train on N nodes, and wait until it does.

    N is absolute. Nodes that are too many finish their step and stand by; nodes that are missing join as they come.
    """
    with reported(as_json=output is Output.JSON):
        from elasticd.cli import jobs
        from elasticd.cli.asking import Manner, given
        from elasticd.cli.checks import check_range

        _check_nodes(N=number, min=least, max=most)
        if if_revision is not None:
            check_range("--if-revision", if_revision, 1, 2**53 - 1)
        body = given(min_nodes=least, max_nodes=most, if_revision=if_revision, dry_run=dry_run, reason=reason)
        jobs.scale(job, number, body, Manner(socket=socket, as_json=output is Output.JSON, detach=detach, timeout=timeout))


_PAUSE = f"""\b
Examples:
  elasticctl pause llm --reason "network work until 18:00"
  elasticctl pause --reason "network work"         every job that runs

{EXIT_CODES}"""


def pause(
    job: JobsArgument = None,
    *,
    reason: NeededReason,
    socket: SocketOption = SOCKET,
    output: OutputOption = Output.TABLE,
) -> None:
    """Change nothing of free will in JOB: nobody joins, nothing is scaled. It goes on training, and recovers from losses.

    Without JOB every job that runs is paused, and named.
    """
    with reported(as_json=output is Output.JSON):
        from elasticd.cli import jobs
        from elasticd.cli.asking import Manner

        jobs.pause(job, reason, Manner(socket=socket, as_json=output is Output.JSON))


_RESUME = f"""\b
Examples:
  elasticctl resume llm
  elasticctl resume                                every job that is paused

{EXIT_CODES}"""


def resume(
    job: JobsArgument = None,
    *,
    reason: ReasonOption = "",
    socket: SocketOption = SOCKET,
    output: OutputOption = Output.TABLE,
) -> None:
    """End the pause of JOB, or of every job that is paused."""
    with reported(as_json=output is Output.JSON):
        from elasticd.cli import jobs
        from elasticd.cli.asking import Manner

        jobs.resume(job, reason, Manner(socket=socket, as_json=output is Output.JSON))


_CHECKPOINT = f"""\b
Examples:
  elasticctl checkpoint llm --timeout 120

{EXIT_CODES}"""


def checkpoint(
    job: JobArgument,
    *,
    reason: ReasonOption = "",
    detach: DetachOption = False,
    timeout: TimeoutOption = 0.0,
    socket: SocketOption = SOCKET,
    output: OutputOption = Output.TABLE,
) -> None:
    """Ask JOB for a checkpoint now, and wait for it where the job says what it has committed."""
    with reported(as_json=output is Output.JSON):
        from elasticd.cli import jobs
        from elasticd.cli.asking import Manner

        jobs.checkpoint(job, reason, Manner(socket=socket, as_json=output is Output.JSON, detach=detach, timeout=timeout))


_RESTART = f"""\b
Examples:
  elasticctl restart llm --reason "new driver"

{EXIT_CODES}"""


def restart(
    job: JobArgument,
    *,
    reason: NeededReason,
    yes: YesOption = False,
    detach: DetachOption = False,
    timeout: TimeoutOption = 0.0,
    socket: SocketOption = SOCKET,
    output: OutputOption = Output.TABLE,
) -> None:
    """Restart JOB's workers on all nodes: an agreed stop, then the next generation. No restart is charged."""
    with reported(as_json=output is Output.JSON):
        from elasticd.cli import jobs
        from elasticd.cli.asking import Manner

        jobs.restart(job, reason, Manner(socket=socket, as_json=output is Output.JSON, detach=detach, timeout=timeout, yes=yes))
