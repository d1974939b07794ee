"""What can be typed to see a job at work: logs, top.

Owns: the options and help of these verbs. Must not: do anything itself (`logs_view` and `top` do).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from elasticd.cli.arguments import EXIT_CODES, SOCKET, JobArgument, Output, OutputOption, SocketOption
from elasticd.cli.completion import job_names, node_names
from elasticd.cli.failures import reported


class LogOutput(StrEnum):
    """What `logs` prints."""

    TEXT = "text"
    JSONL = "jsonl"


class StreamOption(StrEnum):
    """Which of what is written."""

    STDOUT = "stdout"
    STDERR = "stderr"
    AGENT = "agent"


def register(app: typer.Typer) -> None:
    """Add these verbs."""
    app.command("logs", epilog=_LOGS)(logs)
    app.command("top", epilog=_TOP)(top)


_LOGS = f"""\b
Examples:
  elasticctl logs llm                              the last 100 lines of each worker, on all nodes
  elasticctl logs llm -f --rank 0                  rank 0, wherever it is, from one generation to the next
  elasticctl logs llm --node node-3 --stream stderr --generation 7
  elasticctl logs llm --stream agent --since 10m   what the agents did
  elasticctl logs llm -f -o jsonl | jq -r .text

\b
A line begins with the node and the rank that wrote it. Of a worker's output nobody knows when it was written, unless a line says so itself (JSON with
"time" or "timestamp", or a date at its beginning): --since goes by that, and else by when the file was written last.

\b
Who answers: the daemon of this machine, which asks those of the other nodes over their [peer] listeners; nodes that cannot be asked are named on
stderr. Where no daemon is, or it does not know JOB or does not let you in: your own `elasticctl run` on this machine. JSON is one line for each line:
{{"node", "rank", "stream", "generation", "at", "text"}}; what is said on stderr is then {{"note"}}.

{EXIT_CODES}"""


def logs(
    job: JobArgument,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C, over new generations and restarts of daemons.")] = False,
    rank: Annotated[int | None, typer.Option("--rank", metavar="N", help="Only of this rank.", show_default=False)] = None,
    node: Annotated[str | None, typer.Option("--node", metavar="NODE", help="Only of this node.", autocompletion=node_names, show_default=False)] = None,
    generation: Annotated[int | None, typer.Option("--generation", metavar="N", help="Of this generation.  [default: the newest]", show_default=False)] = None,
    stream: Annotated[
        StreamOption | None, typer.Option("--stream", help="What workers print, or the events of the agents.  [default: stdout and stderr]", show_default=False)
    ] = None,
    tail: Annotated[
        int | None, typer.Option("--tail", "-n", metavar="N", help="The last N lines of each worker.  [default: 100; --since: all]", show_default=False)
    ] = None,
    since: Annotated[str | None, typer.Option("--since", metavar="TIME", help="10m, 2h, 1d ago, or a date.", show_default=False)] = None,
    socket: SocketOption = SOCKET,
    output: Annotated[LogOutput, typer.Option("--output", "-o", help="For a person, or for a program.")] = LogOutput.TEXT,
) -> None:
    """Show what the workers of JOB, or its agents, have written, on all nodes."""
    as_json = output is LogOutput.JSONL
    with reported(as_json=as_json):
        import time

        from elasticd.cli import logs_view
        from elasticd.cli.checks import check_range
        from elasticd.cli.logs import quiet_logs
        from elasticd.cli.sources import source_for
        from elasticd.daemon.joblogs import TAIL_MOST
        from elasticd.rendezvous.keys import checked_name

        quiet_logs()
        checked_name("job", job)
        if node is not None:
            checked_name("node", node)
        for option, value, most in (("--rank", rank, 10**9), ("--generation", generation, 2**53 - 1), ("--tail", tail, TAIL_MOST)):
            if value is not None:
                check_range(option, value, 0, most)
        options = logs_view.LogOptions(
            job=job,
            follow=follow,
            rank=rank,
            node=node,
            generation=generation,
            stream=stream.value if stream else None,
            tail=logs_view.tail_of(tail, since),
            since=logs_view.parse_since(since, time.time()),
            as_json=as_json,
        )
        logs_view.show_logs(options, source_for(job, socket))


_TOP = f"""\b
Examples:
  elasticctl top                                   every job on every node, again every 2 s; q ends it
  elasticctl top llm --every 1
  elasticctl top llm --once -o json | jq '.data.nodes[].jobs[].report.step'

\b
For each rank: the mean step of the last ten seconds, and how much of it was waiting for data (data) and for other ranks (comm); its memory (on a GPU
what PyTorch has allocated there); its GPU. `slow` marks the rank whose own work takes longest, and how many times the median that is.
`goodput` is the share of time in which steps were made that had not been made before. What is not told any more stays, with its age.

\b
Who answers: the daemon of this machine, which asks those of the other nodes over their [peer] listeners, with etcd or without. Where no daemon is, or
it does not know JOB or does not let you in: your own `elasticctl run`s on this machine. JSON: kind Telemetry of docs/api.md, one line for each look.

{EXIT_CODES}"""


def top(
    job: Annotated[str | None, typer.Argument(metavar="JOB", help="Only this job.", show_default=False, autocompletion=job_names)] = None,
    *,
    every: Annotated[float, typer.Option("--every", metavar="SEC", help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once.")] = False,
    socket: SocketOption = SOCKET,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show how jobs do at this moment: steps, loss, and where the time of each rank goes."""
    as_json = output is Output.JSON
    with reported(as_json=as_json):
        from elasticd.cli import top as watching
        from elasticd.cli.checks import check_range
        from elasticd.cli.logs import quiet_logs
        from elasticd.cli.sources import source_for
        from elasticd.rendezvous.keys import checked_name

        quiet_logs()
        check_range("--every", every, 0.2, 3600)
        if job is not None:
            checked_name("job", job)
        watching.top(watching.TopOptions(job=job, every=None if once else every, as_json=as_json), source_for(job, socket))
