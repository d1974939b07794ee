"""What can be typed about nodes.

Owns: the options and help of nodes, drain, cordon and uncordon. Must not: do anything itself (`nodes` does).
"""

from __future__ import annotations

from typing import Annotated

import typer

from elasticd.cli.arguments import (
    EXIT_CODES,
    SOCKET,
    DetachOption,
    NeededReason,
    NodeArgument,
    Output,
    OutputOption,
    ReasonOption,
    SocketOption,
    TimeoutOption,
    YesOption,
)
from elasticd.cli.completion import node_names
from elasticd.cli.failures import reported


def register(app: typer.Typer) -> None:
    """Add these verbs."""
    app.command("nodes", epilog=_NODES)(nodes)
    app.command("drain", epilog=_DRAIN)(drain)
    app.command("cordon", epilog=_CORDON)(cordon)
    app.command("uncordon", epilog=_UNCORDON)(uncordon)


_NODES = f"""\b
Examples:
  elasticctl nodes                                 all of them: state and reason, slots, jobs
  elasticctl nodes node-3                          everything about one
  elasticctl nodes -o json | jq -r '.data.nodes[] | select(.state == "ready") | .name'

\b
States: ready, cordoned (nothing new is started there), draining, drained (nothing runs there, nothing is started), down (its daemon is silent).

{EXIT_CODES}"""


def nodes(
    node: Annotated[str | None, typer.Argument(metavar="NODE", help="Only this node.", show_default=False, autocompletion=node_names)] = None,
    *,
    socket: SocketOption = SOCKET,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the nodes of the cluster: how each is and why, and what runs there."""
    with reported(as_json=output is Output.JSON):
        from elasticd.cli.asking import Manner
        from elasticd.cli.nodes import show

        show(node, Manner(socket=socket, as_json=output is Output.JSON))


_DRAIN = f"""\b
Examples:
  elasticctl drain node-3 --reason "replace fan"   jobs leave it in order, then it is kept out
  elasticctl drain --self --reason reboot -y       the node this is typed on
  elasticctl uncordon node-3                       takes it back, also while it drains

{EXIT_CODES}"""


def drain(
    node: Annotated[str | None, typer.Argument(metavar="NODE", help="The node.", show_default=False, autocompletion=node_names)] = None,
    *,
    this: Annotated[bool, typer.Option("--self", help="This node: the one whose daemon is asked.")] = False,
    reason: NeededReason,
    yes: YesOption = False,
    detach: DetachOption = False,
    timeout: TimeoutOption = 0.0,
    socket: SocketOption = SOCKET,
    output: OutputOption = Output.TABLE,
) -> None:
    """Let all jobs leave NODE in order, keep it out, and wait until nothing runs there."""
    with reported(as_json=output is Output.JSON):
        from elasticd.cli import nodes as verbs
        from elasticd.cli.asking import Manner

        verbs.drain(verbs.which(node, this=this), reason, Manner(socket=socket, as_json=output is Output.JSON, detach=detach, timeout=timeout, yes=yes))


_CORDON = f"""\b
Examples:
  elasticctl cordon node-3 --reason "ECC errors"

{EXIT_CODES}"""


def cordon(
    node: NodeArgument,
    *,
    reason: NeededReason,
    socket: SocketOption = SOCKET,
    output: OutputOption = Output.TABLE,
) -> None:
    """Start nothing new on NODE. What runs there goes on."""
    with reported(as_json=output is Output.JSON):
        from elasticd.cli import nodes as verbs
        from elasticd.cli.asking import Manner

        verbs.cordon(node, reason, Manner(socket=socket, as_json=output is Output.JSON))


_UNCORDON = f"""\b
Examples:
  elasticctl uncordon node-3

{EXIT_CODES}"""


def uncordon(
    node: NodeArgument,
    *,
    reason: ReasonOption = "",
    socket: SocketOption = SOCKET,
    output: OutputOption = Output.TABLE,
) -> None:
    """Use NODE as usual again, after cordon and after drain."""
    with reported(as_json=output is Output.JSON):
        from elasticd.cli import nodes as verbs
        from elasticd.cli.asking import Manner

        verbs.uncordon(node, reason, Manner(socket=socket, as_json=output is Output.JSON))
