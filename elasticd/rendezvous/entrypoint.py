"""What stock torchrun loads for `--rdzv-backend=etcd-v3`.

Owns: reading torchrun's options into a `MemberConfig`. Must not import anything heavy before it is called: every torchrun on the machine, for
whatever backend, imports this module.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from elasticd.errors import UsageError
from elasticd.rendezvous.address import address_on_the_way_to

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousParameters

    from elasticd.rendezvous.config import MemberConfig

_NUMBERS: Final = ("ttl", "settle", "ready_timeout", "drain_timeout", "frozen_max", "join_timeout", "call_timeout")
_TEXTS: Final = ("cacert", "cert", "key", "cluster", "node", "state_dir")
# torchrun adds these by itself; they mean nothing here.
_IGNORED: Final = ("timeout", "rank")


def create_handler_factory() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """What torch calls, with no argument, to get the creator of handlers."""
    return create_handler


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """A handler for one torchrun agent.

    Options of --rdzv-conf: cacert, cert, key (paths; TLS is on with cacert), ttl, settle, ready_timeout, drain_timeout, frozen_max,
    join_timeout, call_timeout (seconds), cluster, node (names), state_dir.

    Raises:
        UsageError: an unknown option, a value that is no number, an endpoint that is none, a file that cannot be read.
    """
    from elasticd.rendezvous.handler import EtcdRendezvousHandler, ignore_rank_exchange
    from elasticd.rendezvous.member import Member

    options = parse_options(params.config)
    config = member_config(params.endpoint, params.run_id, params.min_nodes, params.max_nodes, params.local_addr, options)
    ignore_rank_exchange()
    return EtcdRendezvousHandler(Member(config), params.run_id, float(options.get("join_timeout", 600.0)))


def parse_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Check --rdzv-conf.

    Raises:
        UsageError: an unknown key or a value that does not fit; the message names it.
    """
    options: dict[str, Any] = {}
    for key, value in config.items():
        if key in _IGNORED:
            continue
        if key in _TEXTS:
            options[key] = str(value)
        elif key in _NUMBERS:
            try:
                options[key] = float(value)
            except (TypeError, ValueError):
                msg = f"--rdzv-conf {key}={value!r} is not a number of seconds"
                raise UsageError(msg) from None
            if not 0 <= options[key] <= 86_400:
                msg = f"--rdzv-conf {key}={value!r} is out of range"
                raise UsageError(msg, remedy="give seconds between 0 and 86400")
        else:
            msg = f"--rdzv-conf has no key {key!r}"
            raise UsageError(msg, remedy=f"known keys: {', '.join((*_TEXTS, *_NUMBERS))}")
    return options


def split_endpoints(text: str) -> tuple[str, ...]:
    """Cut "host:2379,other:2379" into "host:port" each, with or without http(s)://.

    Raises:
        UsageError: there is none.
    """
    parts = [part.strip().removeprefix("https://").removeprefix("http://").rstrip("/") for part in text.split(",")]
    endpoints = tuple(part if ":" in part else f"{part}:2379" for part in parts if part)
    if not endpoints:
        msg = "no etcd endpoint was given"
        raise UsageError(msg, remedy="name at least one as host:2379")
    return endpoints


def address_towards(endpoint: str) -> str:
    """The address of this machine that its packets to `endpoint` ("host:port") bear: what peers on that network can reach.

    Raises:
        UsageError: the host is unknown.
    """
    try:
        return address_on_the_way_to(endpoint)
    except (OSError, ValueError) as error:
        msg = f"cannot find the way to etcd endpoint {endpoint!r}: {error}"
        raise UsageError(msg, remedy="give --local-addr (torchrun) or --address, and check the endpoint") from None


def member_config(endpoint: str, run_id: str, min_nodes: int, max_nodes: int, local_addr: str | None, options: Mapping[str, Any]) -> MemberConfig:
    """What torchrun's options mean for a member."""
    from elasticd.kv.types import KVConfig, TLSFiles
    from elasticd.rendezvous.config import MemberConfig
    from elasticd.rendezvous.keys import JobKeys
    from elasticd.rendezvous.membership import Timing
    from elasticd.rendezvous.nodelock import default_state_dir

    endpoints = split_endpoints(endpoint)
    tls = None
    if "cacert" in options:
        tls = TLSFiles(
            cacert=Path(options["cacert"]),
            cert=Path(options["cert"]) if "cert" in options else None,
            key=Path(options["key"]) if "key" in options else None,
        )
    timing = Timing(**{name: options[name] for name in ("ttl", "settle", "ready_timeout", "drain_timeout", "frozen_max") if name in options})
    return MemberConfig(
        keys=JobKeys(options.get("cluster", "default"), run_id),
        # Two torchrun agents of one job on one machine are usual, so the pid is part of the name.
        node=options.get("node", f"{socket.gethostname()}-{os.getpid()}"),
        address=local_addr or address_towards(endpoints[0]),
        slots=1,
        kv=KVConfig(endpoints=endpoints, tls=tls, call_timeout=options.get("call_timeout", min(2.0, timing.ttl / 2))),
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        desired=max_nodes,
        max_restarts=1_000_000,  # torchrun counts its own
        timing=timing,
        state_dir=Path(options["state_dir"]) if "state_dir" in options else default_state_dir(),
    )
