"""The command line: verbs, options, help.

Owns: what can be typed, and nothing else; each verb imports what it needs when it runs, so that help and completion stay quick.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from elasticd import __version__
from elasticd.cli import commands_config, commands_detect, commands_jobs, commands_nodes, commands_telemetry, commands_watching
from elasticd.cli.arguments import CacertOption, CertOption, ClusterOption, EtcdOption, KeyOption
from elasticd.cli.failures import reported
from elasticd.cli.grammar import Verbs

app = typer.Typer(
    name="elasticctl",
    cls=Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its boxes cost more than everything else that --help does
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Keep PyTorch DDP jobs training while nodes come, go, slow down and fail.",
    epilog="""\b
Examples:
  elasticctl run --nodes 2 -- train.py --epochs 3     two nodes on this machine
  elasticctl status                                   the cluster, or what runs here, and how it is
  elasticctl start llm --nodes 4                      a job of the cluster, by its job file
  elasticctl scale llm 6                              and wait until it trains on 6 nodes
  elasticctl drain node-3 --reason "replace fan"      jobs leave it in order, then it is kept out

\b
Exit codes: 0 ok, 1 it failed, 2 wrong usage, 3 no such job or node, or it does not run, 4 the daemon or etcd is out of reach,
5 somebody else changed it first, 6 gave up waiting (the work goes on), 7 not permitted, 8 a rule forbids it,
9 no node allows a job of that name, 11 of run: the job was ended since it would fail the same way again, 128 + N ended by signal N (130: Ctrl-C).

\b
Shell completion: elasticctl --install-completion (jobs and nodes are completed as the daemon knows them).""",
)


class RunOutput(StrEnum):
    """What `run` prints."""

    TEXT = "text"
    JSONL = "jsonl"


class ShowOption(StrEnum):
    """Whose output `run` passes through."""

    RANK0 = "rank0"
    ALL = "all"
    NONE = "none"


def _version(*, wanted: bool) -> None:
    if wanted:
        print(f"elasticctl {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=lambda value: _version(wanted=value), is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version


@app.command(
    "run",
    context_settings={"allow_interspersed_args": False},
    epilog="""\b
Examples:
  Two nodes on this machine; one may die, a third may join:
    elasticctl run --nodes 2 --max-nodes 3 -- train.py --epochs 3
  This machine's part of a job on four machines, the same command on each:
    elasticctl run --etcd https://etcd1:2379,https://etcd2:2379 --cacert ca.pem --cert node.pem --key node.key \\
      --job llm --nodes 4 --min-nodes 2 --nproc-per-node 8 -- train.py
  For a script or CI:
    elasticctl run --nodes 2 --summary result.json --show none -- train.py

\b
Output: the script's output goes to stdout, everything elasticctl says to stderr. With -o jsonl stdout carries one JSON object a line instead:
every event of the agents, `output` for each line of the workers, `run_started` and `run_ended`.

\b
Ctrl-C stops the job in order (with --etcd: this node leaves, the job goes on elsewhere); a second one kills at once. SIGTERM and SIGHUP do the same.

\b
The summary is {"result": "succeeded|failed|stopped|interrupted", "reason", "job", "generations": [{"number", "cause", "world_size", "formed_at",
"first_worker_up_at"}], "restarts", "log_dir"}, its times seconds since the epoch, its restarts the failures charged to --max-restarts.""",
)
def run_command(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file, a program on PATH, or with -m a module.", show_default=False)],
    args: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="What SCRIPT is given.", show_default=False)] = None,
    *,
    nodes: Annotated[int, typer.Option("--nodes", "-N", metavar="N", help="Nodes to begin with. Without --etcd all of them are started here.")] = 1,
    nproc_per_node: Annotated[int, typer.Option("--nproc-per-node", metavar="M", help="Workers on each node.")] = 1,
    min_nodes: Annotated[int, typer.Option("--min-nodes", metavar="N", help="With fewer the job waits.")] = 1,
    max_nodes: Annotated[
        int | None, typer.Option("--max-nodes", metavar="N", help="It takes in nodes up to this many; more stand by.  [default: --nodes]", show_default=False)
    ] = None,
    job: Annotated[str | None, typer.Option("--job", metavar="NAME", help="The job's name.  [default: the script's name]", show_default=False)] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a Python module.")] = False,
    etcd: EtcdOption = None,
    cacert: CacertOption = None,
    cert: CertOption = None,
    key: KeyOption = None,
    cluster: ClusterOption = "default",
    node: Annotated[
        str | None, typer.Option("--node", metavar="NAME", help="With --etcd: this node's name.  [default: the host's name]", show_default=False)
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            "--address", metavar="HOST", help="With --etcd: where other nodes reach this one.  [default: the address on the way to etcd]", show_default=False
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="A TOML file whose table [trainer] holds settings of training.", show_default=False)
    ] = None,
    trainer: Annotated[
        list[str] | None,
        typer.Option("--trainer", metavar="NAME=VALUE", help="A setting of training, above all others. May be repeated.", show_default=False),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", metavar="N", help="Failures of workers after which the job fails. Lost nodes do not count.")
    ] = 10,
    again: Annotated[bool, typer.Option("--again", "--reopen", help="Start a job again that has ended.")] = False,
    lease_ttl: Annotated[float, typer.Option("--lease-ttl", metavar="SEC", help="A node that says nothing for so long is lost; at least 2.")] = 10.0,
    settle: Annotated[float, typer.Option("--settle", metavar="SEC", help="Wait so long for more nodes before going on with fewer than wanted.")] = 1.0,
    stop_grace: Annotated[float, typer.Option("--stop-grace", metavar="SEC", help="From SIGTERM to SIGKILL when workers are to stop and all is well.")] = 30.0,
    frozen_max: Annotated[float, typer.Option("--frozen-max", metavar="SEC", help="How long workers go on without etcd.")] = 600.0,
    detect: Annotated[
        bool, typer.Option("--detect", help="Look for drifts and failures in logs and numbers on each node, and act on them; about 150 MB a node.")
    ] = False,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", metavar="NAME=VALUE", help="A setting of what is done about failures and drifts. May be repeated.", show_default=False),
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option("--log-dir", metavar="DIR", help="Root of all logs.  [default: ~/.local/state/elasticd/logs]", show_default=False)
    ] = None,
    summary: Annotated[Path | None, typer.Option("--summary", metavar="FILE", help="Write how it ended as JSON.")] = None,
    show: Annotated[ShowOption, typer.Option("--show", help="Whose output to pass through.")] = ShowOption.RANK0,
    output: Annotated[RunOutput, typer.Option("--output", "-o", help="Talk to a person, or print JSON lines.")] = RunOutput.TEXT,
) -> None:
    """Run SCRIPT as an elastic job, on this machine alone or as this machine's part of a job.

    Without --etcd everything runs here: an etcd of its own, and --nodes agents that live and die like separate machines. With --etcd one node is
    started, which joins the job there.
    """
    with reported(as_json=output is RunOutput.JSONL):
        from elasticd.cli import options as o
        from elasticd.cli.logs import quiet_logs

        quiet_logs()
        store = o.parse_store(etcd or [], cacert, cert, key)
        if store is None and (node or address):
            raise o.needs_etcd("--node" if node else "--address")
        cwd = Path.cwd()
        options = o.RunOptions(
            fresh_name=job is None and store is None,
            job=job or o.default_job(script, local=store is None),
            cluster=cluster,
            store=store,
            node=node,
            address=address,
            sizes=o.parse_sizes(nodes, min_nodes, max_nodes),
            nproc=nproc_per_node,
            script=(script, *(args or ())),
            module=module,
            argv=o.worker_command((script, *(args or ())), module=module, cwd=cwd),
            cwd=cwd,
            log_dir=(log_dir or o.default_log_dir()).absolute(),
            summary=summary,
            config=config.absolute() if config else None,
            trainer_file=o.read_trainer(config) if config else {},
            trainer=o.parse_trainer(trainer or []),
            max_restarts=max_restarts,
            lease_ttl=lease_ttl,
            settle=settle,
            stop_grace=stop_grace,
            frozen_max=frozen_max,
            detect=detect,
            policy=o.parse_policy(policy or []),
            again=again,
            show=o.Show(show.value),
            jsonl=output is RunOutput.JSONL,
        )
        options.check()

        from elasticd.cli.run import run

        raise typer.Exit(run(options))


commands_watching.register(app)
commands_telemetry.register(app)
commands_detect.register(app)
commands_jobs.register(app)
commands_nodes.register(app)
commands_config.register(app)
commands_watching.register_version(app)


def main() -> None:
    """The console entry point."""
    app(prog_name="elasticctl")
