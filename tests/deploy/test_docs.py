"""What ten-nodes.md and operations.md tell a person to type: it parses, it makes files that the project takes, and it names what exists."""

from __future__ import annotations

import re
import subprocess
import tomllib
from typing import TYPE_CHECKING

import pytest
import typer.main

from elasticd.cli.main import app as elasticctl
from elasticd.daemon.__main__ import app as elasticd
from elasticd.daemon.config import DaemonConfig
from elasticd.daemon.jobs import JobSpec
from tests.deploy.installation import ROOT
from tests.deploy.test_units import DAEMON, settings

if TYPE_CHECKING:
    from pathlib import Path

TEN_NODES = (ROOT / "docs" / "ten-nodes.md").read_text()
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", TEN_NODES, flags=re.MULTILINE | re.DOTALL)

# In place of ssh: whatever a machine is told to write goes into a directory of its address.
ON = """
on() { local address=$1; shift; case "$*" in
    *"cat >"*) mkdir -p "$OUT/$address"; local path="${*##*cat >}"; cat >"$OUT/$address/$(basename "${path%%[; ]*}")" ;;
    "ip -o"*) echo "2: eth0    inet $address/24" ;;
esac; }
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands of the steps 6 and 7 write onto the nodes."""
    out = tmp_path_factory.mktemp("nodes")
    script = "\n".join([BLOCKS[0], ON, *(block for block in BLOCKS if "elasticd.toml" in block or "jobs.d" in block)])
    subprocess.run(["bash", "-c", script], cwd=ROOT, env={"OUT": str(out), "HOME": str(out), "PATH": "/usr/bin:/bin"}, stderr=subprocess.DEVNULL, timeout=60)
    return out


def test_there_are_steps() -> None:
    assert len(BLOCKS) > 15


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split("\n")[0][:40])
def test_a_step_is_shell(block: str) -> None:
    done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_each_node_gets_a_configuration_of_its_own(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", "/etc/credstore")
    configs = [DaemonConfig.read(written / f"10.0.0.{number}" / "elasticd.toml") for number in range(11, 21)]
    assert [config.node for config in configs] == [f"gpu-{number:02}" for number in range(1, 11)]
    assert [config.address for config in configs] == [f"10.0.0.{number}" for number in range(11, 21)]
    assert {config.etcd.endpoints for config in configs} == {("10.0.0.1:2379", "10.0.0.2:2379", "10.0.0.3:2379")}
    assert {config.cluster for config in configs} == {"prod"}


def test_the_keys_that_it_names_are_put_there_and_handed_over(written: Path) -> None:
    text = (written / "10.0.0.11" / "elasticd.toml").read_text()
    (credential,) = re.findall(r'"credential:(.*)"', text)
    assert credential in settings(DAEMON)["LoadCredential"]
    assert f"/etc/credstore/{credential}" in TEN_NODES


def test_each_node_gets_the_job(written: Path) -> None:
    jobs = [JobSpec.model_validate(tomllib.loads((written / f"10.0.0.{number}" / "digits.toml").read_text())) for number in range(11, 21)]
    assert {(job.name, job.user, job.min_nodes, job.max_nodes) for job in jobs} == {("digits", "trainer", 2, 10)}


def typed(program: str) -> list[str]:
    """Every command line of a program in both documents, as far as it is one."""
    text = re.sub(r"\$\([^)]*\)", "N", TEN_NODES + OPERATIONS)
    return [line.strip() for line in re.findall(rf"\b{program} ([a-z][^`\n|;&#',]*)", text)]


@pytest.mark.parametrize(("program", "app"), [("elasticctl", elasticctl), ("elasticd", elasticd)])
def test_every_verb_and_option_exists(program: str, app: typer.Typer) -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    lines = [line for line in typed(program) if line.split()[0] in commands or "--" in line]
    assert {line for line in lines if line.split()[0] not in commands} == set()
    assert len({line.split()[0] for line in lines}) > (5 if program == "elasticctl" else 0)
    for line in lines:
        options = {option for parameter in commands[line.split()[0]].params for option in parameter.opts}
        assert {word for word in line.split() if re.fullmatch(r"--?[a-z][a-z-]*", word)} <= options, line
