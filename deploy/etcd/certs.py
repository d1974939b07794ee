#!/usr/bin/env python3
"""Certificates for an etcd with mTLS, its members, and the nodes and operators that use it, made by openssl.

Owns: one directory with two authorities and what they signed, laid out as it goes to the machines. Must not: need anything beyond Python 3.11
and the openssl command, copy files to machines, or talk to etcd (`roles.py` does).

    certs.py init                      the two authorities
    certs.py member etcd-1 10.0.0.1    a member of etcd: certificates for its clients and for its peers
    certs.py node gpu-1 [10.0.0.11]    a node: user elasticd-node-gpu-1; with addresses, a certificate for its own peer listener, too
    certs.py operator alice            an operator: user elasticd-operator-alice
    certs.py root                      etcd's administrator: user root
    certs.py renew [--within 30]       anew what ends within so many days; all of it without --within
    certs.py list                      what there is, and when it ends

Members trust `peer-ca.pem` for each other and `ca.pem` for everybody else. Were they one, each node's certificate would open etcd's peer port,
which knows no roles.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

AUTHORITIES: Final = {"ca": "elasticd etcd CA", "peer-ca": "elasticd etcd peer CA"}
AUTHORITY_DAYS: Final = 3650
HOSTS_FILE: Final = "hosts"
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
COMMON_NAME_MAX: Final = 64
"""Characters that X.509 allows."""


class CertsError(Exception):
    """One line for whoever called."""


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """A certificate that an authority signs.

    Attributes:
        folder: where it lies, with its key and what its owner has to trust.
        stem: of the two file names.
        authority: which one signs it.
        usage: X.509's extended key usage.
        hosts: IP addresses and DNS names it is good for; none for a client's. etcd compares a client's, if it has any, with where it comes from.
    """

    folder: Path
    stem: str
    common_name: str
    authority: str = "ca"
    usage: str = "clientAuth"
    hosts: tuple[str, ...] = ()

    @property
    def cert(self) -> Path:
        """The certificate's file."""
        return self.folder / f"{self.stem}.pem"

    @property
    def key(self) -> Path:
        """The private key's file."""
        return self.folder / f"{self.stem}.key"


class Store:
    """The directory.

    Args:
        root: where it is.
        days: how long what is signed is good.
        group: group that may read the keys besides their owner; None: nobody.
    """

    def __init__(self, root: Path, *, days: int, group: str | None) -> None:
        self.root = root
        self._days = days
        self._group = group

    # --- what there is -------------------------------------------------------------------------------------------------

    def member(self, name: str) -> list[Leaf]:
        """A member's two: for its clients and for its peers."""
        folder = self.root / "members" / name
        common, hosts = f"elasticd-etcd-{name}", read_hosts(folder)
        return [
            Leaf(folder=folder, stem="server", common_name=common, usage="serverAuth", hosts=hosts),
            Leaf(folder=folder, stem="peer", common_name=common, usage="serverAuth,clientAuth", hosts=hosts, authority="peer-ca"),
        ]

    def node(self, name: str) -> list[Leaf]:
        """A node's: as etcd's client, and as a server if it has addresses."""
        folder = self.root / "nodes" / name
        common, hosts = f"elasticd-node-{name}", read_hosts(folder)
        server = [Leaf(folder=folder, stem="server", common_name=common, usage="serverAuth", hosts=hosts)] if hosts else []
        # Agents show it to each other, to fetch states: one of the two is the server then. Without an address it is none for etcd or the API.
        return [Leaf(folder=folder, stem="client", common_name=common, usage="clientAuth,serverAuth"), *server]

    def operator(self, name: str) -> list[Leaf]:
        """An operator's."""
        return [Leaf(folder=self.root / "operators" / name, stem="client", common_name=f"elasticd-operator-{name}")]

    def administrator(self) -> list[Leaf]:
        """The one of etcd's root."""
        return [Leaf(folder=self.root / "root", stem="client", common_name="root")]

    def leaves(self) -> Iterator[Leaf]:
        """All that are there."""
        for kind, make in (("members", self.member), ("nodes", self.node), ("operators", self.operator)):
            folder = self.root / kind
            for name in sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []:
                yield from make(name)
        if (self.root / "root").is_dir():
            yield from self.administrator()

    def authority(self, name: str) -> tuple[Path, Path]:
        """An authority's certificate and key."""
        return self.root / "ca" / f"{name}.pem", self.root / "ca" / f"{name}.key"

    # --- making it -----------------------------------------------------------------------------------------------------

    def init(self) -> None:
        """Make the authorities; never over existing ones."""
        for name, common_name in AUTHORITIES.items():
            cert, key = self.authority(name)
            if key.exists():
                raise CertsError(f"{key} exists already; another directory makes another authority")
            place(key, new_key(), 0o600, None)
            self._sign_authority(name, common_name)
            say(f"made {cert}, good for {AUTHORITY_DAYS} days; keep {key} off the cluster's machines")

    def issue(self, leaves: Iterable[Leaf], *, new_keys: bool = False) -> None:
        """Sign anew. A key that is there is kept unless `new_keys`, so that only one file changes, at once."""
        for leaf in leaves:
            self._issue(leaf, new_keys=new_keys)

    def renew(self, *, within: int | None, new_keys: bool) -> None:
        """Sign anew what ends within so many days, authorities included; all of it if None."""
        count = 0
        for name, common_name in AUTHORITIES.items():
            if within is not None and ends_within(self.authority(name)[0], within):
                self._sign_authority(name, common_name)
                say(f"renewed {self.authority(name)[0]}, with the same key: what it signed stays good. Copy it to every machine")
        for leaf in self.leaves():
            if within is None or not leaf.cert.exists() or ends_within(leaf.cert, within):
                self._issue(leaf, new_keys=new_keys)
                count += 1
            self._trust(leaf)
        say(f"{count} certificate{'' if count == 1 else 's'} renewed" if count else "nothing ends so soon")

    def _sign_authority(self, name: str, common_name: str) -> None:
        cert, key = self.authority(name)
        config = (
            "[req]\ndistinguished_name=dn\nx509_extensions=ext\nprompt=no\n"
            f"[dn]\nCN={common_name}\n"
            "[ext]\nbasicConstraints=critical,CA:TRUE,pathlen:0\nkeyUsage=critical,keyCertSign,cRLSign\nsubjectKeyIdentifier=hash\n"
        )
        with self._scratch() as scratch:
            (scratch / "config").write_text(config)
            signed = openssl("req", "-x509", "-new", "-sha256", "-key", key, "-days", str(AUTHORITY_DAYS), "-config", scratch / "config")
        place(cert, signed, 0o644, None)

    def _issue(self, leaf: Leaf, *, new_keys: bool) -> None:
        ca_cert, ca_key = self.authority(leaf.authority)
        if not ca_key.exists():
            raise CertsError(f"{ca_key} is not there; `certs.py init` makes it")
        existed = leaf.cert.exists()
        key = new_key() if new_keys or not leaf.key.exists() else leaf.key.read_bytes()
        with self._scratch() as scratch:
            (scratch / "key").write_bytes(key)
            (scratch / "ext").write_text(extensions(leaf))
            (scratch / "config").write_text(f"[req]\ndistinguished_name=dn\nprompt=no\n[dn]\nCN={leaf.common_name}\n")
            (scratch / "csr").write_bytes(openssl("req", "-new", "-sha256", "-key", scratch / "key", "-config", scratch / "config"))
            serial = f"0x{secrets.randbits(127) | 1:x}"
            by = ("-CA", ca_cert, "-CAkey", ca_key, "-set_serial", serial, "-days", str(self._days), "-extfile", scratch / "ext")
            cert = openssl("x509", "-req", "-sha256", "-in", scratch / "csr", *by)
        place(leaf.key, key, 0o640 if self._group else 0o600, self._group)
        place(leaf.cert, cert, 0o644, None)
        self._trust(leaf)
        good_for = f" for {', '.join(leaf.hosts)}" if leaf.hosts else ""
        say(f"{'renewed' if existed else 'made'} {leaf.cert}: {leaf.common_name}{good_for}, {self._days} days{', with a new key' if new_keys else ''}")

    def _trust(self, leaf: Leaf) -> None:
        """Lay the authority's certificate beside what it signed, if it is not there as it is now."""
        ours = self.authority(leaf.authority)[0].read_bytes()
        beside = leaf.folder / f"{leaf.authority}.pem"
        if not beside.exists() or beside.read_bytes() != ours:
            place(beside, ours, 0o644, None)

    @contextlib.contextmanager
    def _scratch(self) -> Iterator[Path]:
        """A directory for a moment, beside the keys, of their owner alone."""
        with tempfile.TemporaryDirectory(dir=self.root, prefix=".work-") as folder:
            yield Path(folder)


def extensions(leaf: Leaf) -> str:
    """What X.509 is to say beyond the name."""
    lines = [
        "basicConstraints=critical,CA:FALSE",
        "keyUsage=critical,digitalSignature",
        f"extendedKeyUsage={leaf.usage}",
        "subjectKeyIdentifier=hash",
        "authorityKeyIdentifier=keyid",
    ]
    if leaf.hosts:
        lines.append("subjectAltName=" + ",".join(("IP:" if is_address(host) else "DNS:") + host for host in leaf.hosts))
    return "\n".join(lines) + "\n"


def is_address(host: str) -> bool:
    """Whether it is an IP address rather than a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def read_hosts(folder: Path) -> tuple[str, ...]:
    """What the certificates in `folder` are good for, as given when they were first made."""
    path = folder / HOSTS_FILE
    return tuple(path.read_text().split()) if path.exists() else ()


def new_key() -> bytes:
    """A private key: P-256, PEM."""
    return openssl("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256")


def ends_within(cert: Path, days: int) -> bool:
    """Whether a certificate ends within so many days."""
    return subprocess.run(["openssl", "x509", "-checkend", str(days * 86_400), "-noout", "-in", str(cert)], capture_output=True).returncode != 0


def openssl(*arguments: str | Path) -> bytes:
    """What an openssl command wrote."""
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise CertsError(f"openssl {arguments[0]}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def place(path: Path, content: bytes, mode: int, group: str | None) -> None:
    """Put a file in place at once: readers see the old one or the new one, never half of it, and never with too wide a mode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            if group is not None:
                shutil.chown(temporary, group=group)
            os.fchmod(file.fileno(), mode)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def checked(prefix: str, name: str) -> str:
    """A name that fits into a Common Name and a path."""
    if not NAME.fullmatch(name):
        raise CertsError(f'{name!r} is no usable name: letters, digits, "_", "." and "-", beginning with a letter or digit')
    if len(prefix + name) > COMMON_NAME_MAX:
        raise CertsError(f"{name!r} is too long: with {prefix!r} a certificate's Common Name holds {COMMON_NAME_MAX} characters at most")
    return name


def say(line: str) -> None:
    """For the person who called."""
    sys.stdout.write(line + "\n")


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dir", type=Path, default=Path("etcd-certs"), help="the directory (default: %(default)s)")
    parser.add_argument("--days", type=int, default=365, help="how long a certificate is good (default: %(default)s)")
    parser.add_argument("--group", help="group that may read the keys (mode 0640); default: their owner alone (0600)")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("init", help="make the authorities")
    for kind, hosts, about in (("member", "+", "of etcd"), ("node", "*", "of elasticd; with addresses it gets a certificate as a server, too")):
        command = commands.add_parser(kind, help=f"a {kind} {about}")
        command.add_argument("name")
        command.add_argument("hosts", nargs=hosts, metavar="HOST", help="IP address or DNS name it is reached by")
    commands.add_parser("operator", help="somebody who may steer jobs and nodes").add_argument("name")
    commands.add_parser("root", help="etcd's administrator")
    renew = commands.add_parser("renew", help="sign anew, in place")
    renew.add_argument("--within", type=int, metavar="DAYS", help="only what ends within so many days")
    renew.add_argument("--new-keys", action="store_true", help="new private keys, too: two files change, one after the other")
    commands.add_parser("list", help="what there is")
    return parser


def make(store: Store, options: argparse.Namespace) -> None:
    """`member`, `node`, `operator` and `root`."""
    if options.command == "root":
        store.issue(store.administrator())
        return
    prefix = {"member": "elasticd-etcd-", "node": "elasticd-node-", "operator": "elasticd-operator-"}[options.command]
    name = checked(prefix, options.name)
    if getattr(options, "hosts", None):
        for host in options.hosts:
            if not is_address(host) and not NAME.fullmatch(host):
                raise CertsError(f"{host!r} is neither an IP address nor a DNS name")
        place(store.root / f"{options.command}s" / name / HOSTS_FILE, ("\n".join(options.hosts) + "\n").encode(), 0o644, None)
    store.issue({"member": store.member, "node": store.node, "operator": store.operator}[options.command](name))


def show(store: Store) -> None:
    """`list`."""
    certs = [store.authority(name)[0] for name in AUTHORITIES] + [leaf.cert for leaf in store.leaves()]
    for cert in (cert for cert in certs if cert.exists()):
        told = openssl("x509", "-noout", "-subject", "-enddate", "-nameopt", "multiline,-align,-esc_msb", "-in", cert).decode()
        common = re.search(r"commonName\s*=\s*(.*)", told)
        ends = re.search(r"notAfter=(.*)", told)
        say(f"{cert.relative_to(store.root)}\t{common[1] if common else '?'}\tuntil {ends[1] if ends else '?'}")


def run(argv: Sequence[str]) -> None:
    """Do what the command line says."""
    options = arguments().parse_args(argv)
    if options.command == "list" and not any(options.dir.glob("*")):
        raise CertsError(f"there are no certificates in {options.dir}; where they are says --dir")
    options.dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    store = Store(options.dir, days=options.days, group=options.group)
    if options.command == "init":
        store.init()
    elif options.command == "renew":
        store.renew(within=options.within, new_keys=options.new_keys)
    elif options.command == "list":
        show(store)
    else:
        make(store, options)


def main() -> NoReturn:
    """Exit codes: 0, or 1 with one line on stderr; 2 for wrong usage."""
    try:
        run(sys.argv[1:])
    except (CertsError, OSError, LookupError) as error:
        sys.exit(f"certs.py: {error}")
    sys.exit(0)


if __name__ == "__main__":
    main()
