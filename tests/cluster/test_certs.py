"""`deploy/etcd/certs.py`: what it makes is what an operator needs, and renewal leaves no moment without a usable pair."""

from __future__ import annotations

import grp
import os
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.cluster.etcd import Certificates
from tests.cluster.hosts import HostError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the package openssl")


@pytest.fixture
def certs(tmp_path: Path) -> Certificates:
    made = Certificates(tmp_path / "certs")
    made.init()
    return made


def text(cert: Path) -> str:
    """A certificate in words."""
    return subprocess.run(["openssl", "x509", "-noout", "-text", "-in", cert], capture_output=True, text=True, check=True).stdout


def signed_by(cert: Path, authority: Path) -> bool:
    return subprocess.run(["openssl", "verify", "-CAfile", authority, cert], capture_output=True).returncode == 0


def mode(path: Path) -> str:
    return f"{path.stat().st_mode & 0o777:o}"


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_each_owner_gets_a_directory_with_all_it_needs_and_no_more(certs: Certificates) -> None:
    certs.run("member", "etcd-1", "10.0.0.1", "etcd-1.example")
    certs.run("node", "gpu-1")
    certs.run("node", "gpu-2", "10.0.0.12")
    certs.run("operator", "alice")
    member = {"server.pem", "server.key", "ca.pem", "peer.pem", "peer.key", "peer-ca.pem", "hosts"}
    client = {"client.pem", "client.key", "ca.pem"}
    assert tree(certs.folder / "members/etcd-1") == member
    assert tree(certs.folder / "nodes/gpu-1") == client
    assert tree(certs.folder / "nodes/gpu-2") == client | {"server.pem", "server.key", "hosts"}
    assert tree(certs.folder / "operators/alice") == client
    assert tree(certs.folder / "root") == client
    assert tree(certs.folder / "ca") == {"ca.pem", "ca.key", "peer-ca.pem", "peer-ca.key"}


@pytest.mark.parametrize(
    ("arguments", "cert", "name", "usage", "authority"),
    [
        (
            ["node", "gpu-1"],
            "nodes/gpu-1/client.pem",
            "elasticd-node-gpu-1",
            "TLS Web Client Authentication, TLS Web Server Authentication",
            "ca",
        ),
        (["operator", "alice"], "operators/alice/client.pem", "elasticd-operator-alice", "TLS Web Client Authentication", "ca"),
        (["root"], "root/client.pem", "root", "TLS Web Client Authentication", "ca"),
        (["node", "gpu-1", "10.0.0.11"], "nodes/gpu-1/server.pem", "elasticd-node-gpu-1", "TLS Web Server Authentication", "ca"),
        (["member", "m", "10.0.0.1"], "members/m/server.pem", "elasticd-etcd-m", "TLS Web Server Authentication", "ca"),
        (
            ["member", "m", "10.0.0.1"],
            "members/m/peer.pem",
            "elasticd-etcd-m",
            "TLS Web Server Authentication, TLS Web Client Authentication",
            "peer-ca",
        ),
    ],
)
def test_a_certificate_says_who_its_owner_is_and_what_it_is_good_for(
    certs: Certificates, arguments: list[str], cert: str, name: str, usage: str, authority: str
) -> None:
    certs.run(*arguments)
    told = text(certs.folder / cert)
    assert re.search(r"Subject: CN ?= ?(.*)", told).group(1) == name  # type: ignore[union-attr]
    assert re.search(r"Extended Key Usage: \n\s*(.*)", told).group(1) == usage  # type: ignore[union-attr]
    assert "CA:FALSE" in told
    other = {"ca": "peer-ca", "peer-ca": "ca"}[authority]
    assert signed_by(certs.folder / cert, certs.folder / f"ca/{authority}.pem")
    assert not signed_by(certs.folder / cert, certs.folder / f"ca/{other}.pem")


def test_addresses_and_names_are_in_a_servers_certificate_and_in_no_clients(certs: Certificates) -> None:
    certs.run("node", "gpu-1", "10.0.0.11", "gpu-1.example", "fd00::1")
    names = "DNS:gpu-1.example"
    told = text(certs.folder / "nodes/gpu-1/server.pem")
    assert f"IP Address:10.0.0.11, {names}, IP Address:FD00:0:0:0:0:0:0:1" in told
    assert "Subject Alternative Name" not in text(certs.folder / "nodes/gpu-1/client.pem")


def test_keys_are_their_owners_alone_unless_a_group_is_given(certs: Certificates) -> None:
    certs.run("node", "gpu-1")
    assert mode(certs.folder / "nodes/gpu-1/client.key") == "600"
    assert mode(certs.folder / "nodes/gpu-1/client.pem") == "644"
    group = grp.getgrgid(os.getgid()).gr_name
    certs.run(f"--group={group}", "node", "gpu-2")
    assert mode(certs.folder / "nodes/gpu-2/client.key") == "640"
    assert (certs.folder / "nodes/gpu-2/client.key").group() == group
    assert {mode(path) for path in (certs.folder / "ca").glob("*.key")} == {"600"}
    assert mode(certs.folder) == "700"


def test_an_authority_is_never_overwritten(certs: Certificates) -> None:
    before = (certs.folder / "ca/ca.key").read_bytes()
    with pytest.raises(HostError, match=r"ca\.key exists already"):
        certs.run("init")
    assert (certs.folder / "ca/ca.key").read_bytes() == before


def test_without_an_authority_the_remedy_is_told(tmp_path: Path) -> None:
    with pytest.raises(HostError, match=r"ca/ca\.key is not there; `certs\.py init` makes it"):
        Certificates(tmp_path / "none").run("node", "gpu-1")


@pytest.mark.parametrize("name", ["../../etc", "a/b", "", "-x", "a b", "x" * 51])
def test_a_name_that_fits_no_certificate_or_path_is_refused(certs: Certificates, name: str) -> None:
    with pytest.raises(HostError, match=r"is no usable name|is too long"):
        certs.run("node", "--", name)
    assert not (certs.folder / "nodes").exists()


def test_renewal_keeps_the_key_and_changes_one_file(certs: Certificates) -> None:
    """So there is no moment in which certificate and key do not match."""
    certs.run("member", "m", "10.0.0.1")
    folder = certs.folder / "members/m"
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    told = certs.run("renew")
    after = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    assert {name for name in before if before[name][0] != after[name][0]} == {"server.pem", "peer.pem"}
    assert "IP Address:10.0.0.1" in text(folder / "server.pem")
    assert f"renewed {folder / 'server.pem'}: elasticd-etcd-m for 10.0.0.1, 365 days" in told
    assert "3 certificates renewed" in told  # root's is the third
    assert tree(certs.folder) == {str(path.relative_to(certs.folder)) for path in certs.folder.rglob("*") if path.is_file() and path.name[0] != "."}


def test_renewal_with_new_keys_makes_a_matching_pair(certs: Certificates) -> None:
    certs.run("node", "gpu-1")
    cert, key = (certs.folder / f"nodes/gpu-1/client.{kind}" for kind in ("pem", "key"))
    before = key.read_bytes()
    certs.run("renew", "--new-keys")
    assert key.read_bytes() != before
    publics = [
        subprocess.run(["openssl", *command], capture_output=True, check=True).stdout
        for command in (["x509", "-noout", "-pubkey", "-in", str(cert)], ["pkey", "-pubout", "-in", str(key)])
    ]
    assert publics[0] == publics[1]


def test_only_what_ends_soon_is_renewed_where_that_is_asked(certs: Certificates) -> None:
    certs.run("--days=10", "node", "soon")
    certs.run("--days=100", "node", "later")
    before = {name: (certs.folder / f"nodes/{name}/client.pem").read_bytes() for name in ("soon", "later")}
    assert "1 certificate renewed" in certs.run("renew", "--within=30")
    changed = {name for name, content in before.items() if (certs.folder / f"nodes/{name}/client.pem").read_bytes() != content}
    assert changed == {"soon"}
    assert "nothing ends so soon" in certs.run("renew", "--within=30")


def test_an_authority_that_is_renewed_keeps_what_it_signed_good(certs: Certificates) -> None:
    """Its key stays; its new certificate is laid beside everything it signed."""
    certs.run("node", "gpu-1")
    old_cert = certs.folder / "nodes/gpu-1/client.pem"
    before = (old_cert.read_bytes(), (certs.folder / "ca/ca.pem").read_bytes())
    certs.run("--days=5000", "renew", "--within=4000")
    certs_ca = (certs.folder / "ca/ca.pem").read_bytes()
    assert certs_ca != before[1]
    assert (certs.folder / "nodes/gpu-1/ca.pem").read_bytes() == certs_ca
    old_cert.write_bytes(before[0])
    assert signed_by(old_cert, certs.folder / "ca/ca.pem")


def test_what_there_is_is_listed_with_its_end(certs: Certificates) -> None:
    certs.run("node", "gpu-1")
    rows = [line.split("\t") for line in certs.run("list").splitlines()]
    assert [row[:2] for row in rows] == [
        ["ca/ca.pem", "elasticd etcd CA"],
        ["ca/peer-ca.pem", "elasticd etcd peer CA"],
        ["nodes/gpu-1/client.pem", "elasticd-node-gpu-1"],
        ["root/client.pem", "root"],
    ]
    assert all(re.fullmatch(r"until \w{3} +\d+ \d\d:\d\d:\d\d \d{4} GMT", row[2]) for row in rows)


def test_a_directory_without_any_is_said_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="there are no certificates in"):
        Certificates(tmp_path / "none").run("list")
    assert not (tmp_path / "none").exists()
