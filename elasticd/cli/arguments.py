"""What several verbs take: the same option, the same words.

Owns: those options and arguments. Must not: import anything slow.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from elasticd.cli.completion import job_names, node_names

SOCKET: Final = Path("/run/elasticd/api.sock")
EXIT_CODES: Final = """\b
Exit codes: 0 ok, 1 it failed, 2 wrong usage, 3 no such job or node, or it does not run, 4 the daemon or etcd is out of reach,
5 somebody else changed it first, 6 gave up waiting (the work goes on), 7 not permitted, 8 a rule forbids it,
9 no node allows a job of that name, 130 Ctrl-C (the work goes on)."""


class Output(StrEnum):
    """What a verb prints."""

    TABLE = "table"
    JSON = "json"


class LineOutput(StrEnum):
    """What a verb prints that tells many things, or again and again."""

    TABLE = "table"
    JSON = "json"
    JSONL = "jsonl"


JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="The job.", show_default=False, autocompletion=job_names)]
JobsArgument = Annotated[str | None, typer.Argument(metavar="JOB", help="The job.  [default: every job]", show_default=False, autocompletion=job_names)]
NodeArgument = Annotated[str, typer.Argument(metavar="NODE", help="The node.", show_default=False, autocompletion=node_names)]

SocketOption = Annotated[Path, typer.Option("--socket", metavar="PATH", envvar="ELASTICCTL_SOCKET", help="The daemon's socket.")]
OutputOption = Annotated[Output, typer.Option("--output", "-o", help="For a person, or for a program.")]
LineOutputOption = Annotated[LineOutput, typer.Option("--output", "-o", help="For a person, or for a program: one document, or one line for each.")]
ReasonOption = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; it is kept with the change.", show_default=False)]
NeededReason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; it is kept with the change.", show_default=False)]
DetachOption = Annotated[bool, typer.Option("--detach", help="Do not wait for what comes of it.")]
TimeoutOption = Annotated[float, typer.Option("--timeout", metavar="SEC", help="Wait at most so long, then exit with 6; 0: as long as it takes.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask. Without a terminal nothing is asked anyway.")]
MinOption = Annotated[int | None, typer.Option("--min", "--min-nodes", metavar="N", help="With fewer nodes the job waits.", show_default=False)]
MaxOption = Annotated[int | None, typer.Option("--max", "--max-nodes", metavar="N", help="More nodes stand by.", show_default=False)]

EtcdOption = Annotated[
    list[str] | None,
    typer.Option(
        "--etcd",
        metavar="URL",
        envvar="ELASTICCTL_ETCD",
        help="An etcd endpoint: http(s)://HOST:PORT or HOST:PORT. May be repeated, or be a comma-separated list.",
    ),
]
CacertOption = Annotated[
    Path | None, typer.Option("--cacert", metavar="FILE", envvar="ELASTICCTL_CACERT", help="CA that signed etcd's certificate; turns TLS on.")
]
CertOption = Annotated[Path | None, typer.Option("--cert", metavar="FILE", envvar="ELASTICCTL_CERT", help="Our certificate for etcd.")]
KeyOption = Annotated[Path | None, typer.Option("--key", metavar="FILE", envvar="ELASTICCTL_KEY", help="The key of our certificate.")]
ClusterOption = Annotated[str, typer.Option("--cluster", metavar="NAME", help="Which of the clusters that share the etcd.")]
