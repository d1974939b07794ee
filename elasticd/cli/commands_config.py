"""What can be typed about the settings of training.

Owns: the options and help of `config show`, `config set` and `config unset`. Must not: do anything itself (`config` does).
"""

from __future__ import annotations

from typing import Annotated

import typer

from elasticd.cli.arguments import EXIT_CODES, SOCKET, Output, OutputOption, ReasonOption, SocketOption
from elasticd.cli.completion import job_names, setting_names
from elasticd.cli.failures import reported

JobOption = Annotated[
    str | None, typer.Option("--job", metavar="JOB", help="Of this job alone.  [default: of every job]", autocompletion=job_names, show_default=False)
]
RevisionOption = Annotated[
    int | None, typer.Option("--if-revision", metavar="REV", help="Only if it was last changed at REV; 0: if nobody has.", show_default=False)
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only say what would change.")]


def register(app: typer.Typer) -> None:
    """Add these verbs."""
    group = typer.Typer(no_args_is_help=True, help="Show and change the settings of training: those of every job, or of one.")
    group.command("show", epilog=_SHOW)(show)
    group.command("set", epilog=_SET)(set_)
    group.command("unset", epilog=_UNSET)(unset)
    app.add_typer(group, name="config")


_SHOW = f"""\b
Examples:
  elasticctl config show --job llm                 what counts on this node, and who said so
  elasticctl config show -o json | jq '.data.settings[] | select(.origin != "default")'

\b
From low to high: default, etcd:cluster, etcd:job (both `config set`), file (table [trainer] of the job's file), environment (ELASTICD_TRAINER_NAME
of the agent), command (`elasticctl run --trainer`). Of units of systemd the environment is not seen here.

{EXIT_CODES}"""


def show(
    *,
    job: JobOption = None,
    socket: SocketOption = SOCKET,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show every setting as it counts on this node, and which layer it is from."""
    with reported(as_json=output is Output.JSON):
        from elasticd.cli import config
        from elasticd.cli.asking import Manner

        config.show(job, Manner(socket=socket, as_json=output is Output.JSON))


_SET = f"""\b
Examples:
  elasticctl config set checkpoint_every_s=300               for every job
  elasticctl config set snapshots=false compress=bf16 --job llm
  elasticctl config set backend=gloo --job llm --if-revision 4711 --dry-run

\b
Etcd holds numbers, yes or no, and words of a list. What names a path, a URL or an interface is set in the job's file, table [trainer].

{EXIT_CODES}"""


def set_(
    settings: Annotated[list[str], typer.Argument(metavar="NAME=VALUE", help="What to set.", show_default=False, autocompletion=setting_names)],
    *,
    job: JobOption = None,
    if_revision: RevisionOption = None,
    dry_run: DryRunOption = False,
    reason: ReasonOption = "",
    socket: SocketOption = SOCKET,
    output: OutputOption = Output.TABLE,
) -> None:
    """Set NAMEs in etcd, for every job or for one. It counts from the next generation of a job on."""
    with reported(as_json=output is Output.JSON):
        from elasticd.cli import config
        from elasticd.cli.asking import Manner

        body = config.body(config.parse(settings), if_revision=if_revision, dry_run=dry_run, reason=reason)
        config.change(job, body, Manner(socket=socket, as_json=output is Output.JSON))


_UNSET = f"""\b
Examples:
  elasticctl config unset compress --job llm       as for every job again

{EXIT_CODES}"""


def unset(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="What to unset.", show_default=False, autocompletion=setting_names)],
    *,
    job: JobOption = None,
    if_revision: RevisionOption = None,
    dry_run: DryRunOption = False,
    reason: ReasonOption = "",
    socket: SocketOption = SOCKET,
    output: OutputOption = Output.TABLE,
) -> None:
    """Take NAMEs away from what is set in etcd, so that the layer below counts again."""
    with reported(as_json=output is Output.JSON):
        from elasticd.cli import config
        from elasticd.cli.asking import Manner

        body = config.body(unset=names, if_revision=if_revision, dry_run=dry_run, reason=reason)
        config.change(job, body, Manner(socket=socket, as_json=output is Output.JSON))
