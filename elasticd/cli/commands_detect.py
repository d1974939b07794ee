"""What can be typed about failures and drifts: anomalies, explain, ack, detect.

Owns: the options and help of these verbs. Must not: judge anything: `python -m detectors` does, as a process of its own, for it may need scikit-learn.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from elasticd.cli.arguments import EXIT_CODES, SOCKET, LineOutput, LineOutputOption, Output, SocketOption
from elasticd.cli.completion import job_names
from elasticd.cli.failures import reported
from elasticd.errors import UsageError


def register(app: typer.Typer) -> None:
    """Add these verbs."""
    app.command("anomalies", epilog=_ANOMALIES)(anomalies)
    app.command("explain", epilog=_EXPLAIN)(explain)
    app.command("ack", epilog=_ACK)(ack)
    app.command("detect", epilog=_DETECT)(detect)


_ANOMALIES = f"""\b
Examples:
  elasticctl anomalies                 what was found and is believed, on all nodes
  elasticctl anomalies llm -f          job llm, and what comes
  elasticctl anomalies --all           suspicions too, and what is over
  elasticctl anomalies -o jsonl | jq -r .root.summary

\b
Each line: since when, the job, how sure it is, whose fault, where, what, and the name that `elasticctl explain` takes. Nodes whose detectors do not run
or do not answer are named on stderr. What each word means: docs/detection.md.

{EXIT_CODES}"""


def anomalies(
    job: Annotated[str | None, typer.Argument(metavar="JOB", help="Only this job.", show_default=False, autocompletion=job_names)] = None,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Suspicions too, and what is over.")] = False,
    socket: SocketOption = SOCKET,
    output: LineOutputOption = LineOutput.TABLE,
) -> None:
    """Show what the detectors have found."""
    with reported(as_json=output is not LineOutput.TABLE):
        from elasticd.cli import anomalies as room
        from elasticd.cli.asking import Manner
        from elasticd.rendezvous.keys import checked_name

        if job is not None:
            checked_name("job", job)
        manner = Manner(socket=socket, as_json=output is LineOutput.JSON)
        room.anomalies(job, manner, lines=output is LineOutput.JSONL, follow=follow, everything=everything)


_EXPLAIN = f"""\b
Examples:
  elasticctl explain g7-straggler-node-3-r5

{EXIT_CODES}"""


def explain(
    incident: Annotated[str, typer.Argument(metavar="ID", help="The name of an incident, as `elasticctl anomalies` shows it.", show_default=False)],
    *,
    socket: SocketOption = SOCKET,
    output: Annotated[Output, typer.Option("--output", "-o", help="For a person, or for a program.")] = Output.TABLE,
) -> None:
    """Show what an incident rests on, what was decided about it, and why."""
    with reported(as_json=output is Output.JSON):
        from elasticd.cli import anomalies as room
        from elasticd.cli.asking import Manner

        room.explain(incident, Manner(socket=socket, as_json=output is Output.JSON))


_ACK = f"""\b
Examples:
  elasticctl ack g7-straggler-node-3-r5 --reason "fan is being replaced, ticket 4711"

\b
Nothing more is done about the incident of free will, and nobody is alerted. What was done stays; recovery from failures goes on. A new incident of the
same kind has a new name, and is not covered.

{EXIT_CODES}"""


def ack(
    incident: Annotated[str, typer.Argument(metavar="ID", help="The name of an incident, as `elasticctl anomalies` shows it.", show_default=False)],
    *,
    job: Annotated[
        str | None, typer.Option("--job", metavar="JOB", help="Whose, where several jobs have one of that name.", show_default=False, autocompletion=job_names)
    ] = None,
    reason: Annotated[str, typer.Option("--reason", "-r", help="Why, for whoever looks later.", show_default=False)] = "",
    socket: SocketOption = SOCKET,
    output: Annotated[Output, typer.Option("--output", "-o", help="For a person, or for a program.")] = Output.TABLE,
) -> None:
    """Say that you see to an incident."""
    with reported(as_json=output is Output.JSON):
        from elasticd.cli import anomalies as room
        from elasticd.cli.asking import Manner
        from elasticd.rendezvous.keys import checked_name

        if job is not None:
            checked_name("job", job)
        checked_name("incident", incident)
        room.acknowledge(incident, job, reason, Manner(socket=socket, as_json=output is Output.JSON))


_DETECT = """\b
Examples:
  elasticctl detect --replay /var/log/elasticd/llm          what the detectors say of a job's logs, of all nodes that are there
  elasticctl detect --replay ~/.local/state/elasticd/logs/digits
  elasticctl detect --replay run-7 -o json | jq '.incidents[].root.summary'
  elasticctl detect --replay good-run --memory usual/llm --learn      learn from a run that went well what is usual
  elasticctl detect --replay bad-run --memory usual/llm               and judge another by it

\b
It reads what agents write (agent.jsonl, telemetry.jsonl, rank-*/stdout.log), JSON lines of anybody's, and plain text; kernel logs as kmsg or dmesg files.
Nothing is changed and nobody is asked. What each verdict means: docs/detection.md.

\b
Exit codes: 0 judged, 2 wrong usage or not to be read, 3 with --exit-code: an incident was confirmed, 130 Ctrl-C."""


def detect(
    *,
    replay: Annotated[Path, typer.Option("--replay", metavar="DIR", help="The logs, a directory or one file.", show_default=False)],
    signatures: Annotated[
        list[Path] | None,
        typer.Option("--signatures", metavar="FILE", help="TOML that changes the built-in table of signatures. May be repeated.", show_default=False),
    ] = None,
    memory: Annotated[Path | None, typer.Option("--memory", metavar="DIR", help="What is usual for this type of job.", show_default=False)] = None,
    learn: Annotated[bool, typer.Option("--learn", help="Write what these logs showed to --memory.")] = False,
    width: Annotated[float | None, typer.Option("--width", metavar="SEC", help="Seconds of a window.  [default: 10]", show_default=False)] = None,
    forest: Annotated[bool, typer.Option("--forest/--no-forest", help="With the isolation forest, which needs scikit-learn.")] = True,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 3 if an incident was confirmed.")] = False,
    output: Annotated[Output, typer.Option("--output", "-o", help="For a person, or for a program.")] = Output.TABLE,
) -> None:
    """Say what the detectors find in recorded logs."""
    with reported(as_json=output is Output.JSON):
        if learn and memory is None:
            raise UsageError("--learn needs --memory DIR, where it writes to")
        given = [str(replay)]
        given += [word for path in signatures or () for word in ("--signatures", str(path))]
        given += ["--memory", str(memory)] if memory is not None else []
        given += ["--width", str(width)] if width is not None else []
        flags = {"--learn": learn, "--no-forest": not forest, "--exit-code": exit_code, "--json": output is Output.JSON}
        given += [flag for flag, wanted in flags.items() if wanted]
        sys.stdout.flush()
        code = subprocess.run([sys.executable, "-m", "detectors", *given], check=False).returncode
        raise typer.Exit(130 if code < 0 else code)
