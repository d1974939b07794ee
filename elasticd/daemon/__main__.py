"""The command `elasticd`: the daemon, and checking what it would be told.

Owns: what can be typed, where the log goes, and exit codes. Exit 2: the configuration is bad, and starting again will not help.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path
from typing import Annotated

import structlog
import typer

from elasticd import __version__
from elasticd.daemon.config import DEFAULT_PATH, DaemonConfig
from elasticd.errors import ElasticdError

app = typer.Typer(
    name="elasticd",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="The daemon of a node: runs the agents of jobs, and serves elasticctl.",
)

ConfigOption = Annotated[Path, typer.Option("--config", "-c", metavar="FILE", envvar="ELASTICD_CONFIG", help="Its configuration.")]


@app.command("run")
def run_command(
    config: ConfigOption = DEFAULT_PATH,
    *,
    only: Annotated[
        str | None, typer.Option("--only", metavar="JOB", help="End when the agent of this job has ended, with its exit code.", show_default=False)
    ] = None,
    trainer: Annotated[
        list[str] | None,
        typer.Option("--trainer", metavar="NAME=VALUE", help="A setting of training, above all others. May be repeated.", show_default=False),
    ] = None,
) -> None:
    """Run the daemon in the foreground, until a signal ends it.

    SIGHUP reads configuration, job files and certificates again. SIGTERM lets agents leave first (under systemd: on stop, not on restart); SIGQUIT
    ends the daemon alone. The log is JSON lines on stderr.
    """
    from elasticd.agent.settings import parse_settings
    from elasticd.daemon.service import Service
    from elasticd.observability.logging import log_libraries, log_to_stream, log_uncaught
    from elasticd.observability.redaction import know, redacted

    know(os.environ)
    faulthandler.enable()  # so that the watchdog's SIGABRT leaves a trace of what the loop was stuck in
    log_to_stream(sys.stderr)
    log = structlog.get_logger("elasticd.daemon")
    log_uncaught(log, "elasticd")
    log_libraries(log)
    try:
        code = Service(config, only=only, trainer=parse_settings(trainer or [], "--trainer")).run()
    except ElasticdError as error:
        log.error("daemon_exit", code=error.exit_code, reason=str(error))  # noqa: TRY400 - an operator's mistake: no traceback
        print(f"elasticd: {redacted(str(error))}", file=sys.stderr)
        code = error.exit_code
    raise typer.Exit(code)


@app.command("check-config")
def check_config_command(
    config: ConfigOption = DEFAULT_PATH,
    *,
    owner: Annotated[int | None, typer.Option("--owner", metavar="UID", help="Who must own the job files.  [default: root]", show_default=False)] = None,
) -> None:
    """Read the configuration and all job files as the daemon would, and name everything that is wrong. Exit 2 if anything is."""
    from elasticd.daemon.jobs import load_jobs

    os.environ.setdefault("CREDENTIALS_DIRECTORY", "/etc/credstore")  # where the unit has them from; by hand there is no unit
    try:
        told = DaemonConfig.read(config)
        told.check_files()
    except ElasticdError as error:
        print(f"elasticd: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from None
    files = load_jobs(told.paths.jobs_dir, owner=0 if owner is None else owner)
    print(f"{config}: good")
    for name, spec in sorted(files.jobs.items()):
        print(f"job {name}: good ({' '.join(spec.argv)})")
    for refused in files.refused:
        print(f"elasticd: {refused.file}: {refused.why}", file=sys.stderr)
    raise typer.Exit(2 if files.refused else 0)


@app.command("version")
def version_command() -> None:
    """Print the version."""
    print(f"elasticd {__version__}")


def main() -> None:
    """The console entry point."""
    app(prog_name="elasticd")


if __name__ == "__main__":
    main()
