"""The units: systemd understands them, they are as closed as they can be, and their times and names fit those of the code."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from elasticd.agent import identity
from elasticd.agent.config import AgentConfig
from elasticd.agent.launch import KILL_WAIT_SECONDS
from elasticd.daemon import backends
from elasticd.daemon.config import DaemonConfig, EtcdSection
from elasticd.daemon.kmsg import DEVICE
from elasticd.daemon.launching import LEAVE_SLACK, leave_budget
from elasticd.errors import UsageError
from tests.deploy.installation import PREFIX, ROOT, Installation

if TYPE_CHECKING:
    from pathlib import Path

DAEMON, AGENT, SLICE = "elasticd.service", "elasticd-agent@.service", "elasticd.slice"
CAPABILITIES = set(identity.CAPABILITIES)


def settings(name: str) -> dict[str, list[str]]:
    """Setting -> its values, in order, whichever section."""
    found: dict[str, list[str]] = {}
    for line in (ROOT / "deploy" / "systemd" / name).read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def one(name: str, key: str) -> str:
    (value,) = settings(name)[key]
    return value


def tool() -> str:
    path = shutil.which("systemd-analyze")
    if path is None:
        pytest.skip("needs systemd-analyze (package systemd)")
    return path


@pytest.fixture
def units(installed: Installation, tmp_path: Path) -> Path:
    """A directory of the installed units, whose commands are where they stand now."""
    for name in (DAEMON, AGENT, SLICE):
        text = installed.at(f"/usr/lib/systemd/system/{name}").read_text()
        (tmp_path / name).write_text(text.replace(str(PREFIX), str(installed.at(PREFIX))))
    return tmp_path


def verify(unit: Path) -> subprocess.CompletedProcess[str]:
    # Others' units, which ours name, are the machine's business.
    return subprocess.run([tool(), "verify", "--recursive-errors=no", str(unit)], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", [DAEMON, AGENT, SLICE])
def test_systemd_has_nothing_to_say_against_a_unit(units: Path, name: str) -> None:
    """Its exit code alone says nothing: an unknown setting is a line on stderr and exit 0."""
    done = verify(units / name)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_misspelt_setting_would_be_seen(units: Path) -> None:
    unit = units / DAEMON
    unit.write_text(unit.read_text().replace("\nRestart=", "\nRestrat="))
    assert "Unknown key" in verify(unit).stderr


def test_the_daemon_is_exposed_little(units: Path) -> None:
    """The threshold is systemd's level times ten: 30 is the upper end of "OK"."""
    command = [tool(), "security", "--offline=true", "--threshold=30", "--no-pager", str(units / DAEMON)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, "\n".join(done.stdout.splitlines()[-3:])
    assert re.search(r"Overall exposure level for elasticd.service: ([0-2]\.[0-9]|3\.0)", done.stdout)


# --- what the daemon's code takes for granted ----------------------------------------------------------------------------


def test_the_agents_unit_is_the_one_that_the_daemon_starts() -> None:
    assert backends.UNIT.format("") == AGENT


def test_the_agents_unit_reads_what_the_daemon_writes() -> None:
    run_dir = DaemonConfig(etcd=EtcdSection(endpoints=("127.0.0.1:2379",))).paths.run_dir
    assert one(AGENT, "ExecStart") == f"@PREFIX@/current/bin/elasticd-agent {run_dir}/agents/%i.json"
    assert one(AGENT, "AssertPathExists") == f"{run_dir}/agents/%i.json"


def test_a_bad_configuration_is_not_tried_again() -> None:
    assert str(UsageError.exit_code) in one(DAEMON, "RestartPreventExitStatus").split()


def test_the_watchdog_waits_longer_than_a_turn_of_the_loop() -> None:
    timing = DaemonConfig(etcd=EtcdSection(endpoints=("127.0.0.1:2379",))).timing
    assert int(one(DAEMON, "WatchdogSec")) >= 3 * timing.loop_wait


def test_an_agent_is_killed_only_after_its_longest_way_out() -> None:
    config = AgentConfig.model_fields
    longest = 2 * config["leave_timeout"].default + config["stop_grace"].default + KILL_WAIT_SECONDS
    assert int(one(AGENT, "TimeoutStopSec")) >= longest


def test_the_formula_for_a_longer_grace_is_enough() -> None:
    """As the comment in the unit gives it, with the daemon's leave_timeout of stop_grace + LEAVE_SLACK."""
    text = (ROOT / "deploy" / "systemd" / AGENT).read_text()
    factor, constant = map(int, re.search(r"(\d+) x stop_grace \+ (\d+)", text).groups())  # type: ignore[union-attr]
    for grace in (30.0, 600.0):
        assert factor * grace + constant >= 2 * (grace + LEAVE_SLACK) + grace + KILL_WAIT_SECONDS


def test_the_daemon_outlasts_its_agents_on_stop() -> None:
    config = DaemonConfig(etcd=EtcdSection(endpoints=("127.0.0.1:2379",)))
    stop = int(one(DAEMON, "TimeoutStopSec"))
    assert stop >= int(one(AGENT, "TimeoutStopSec")) + 30
    assert stop >= leave_budget(config, {})


# --- what must not creep in ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [DAEMON, AGENT])
def test_the_main_process_alone_is_asked_and_everything_is_killed_at_last(name: str) -> None:
    assert one(name, "KillMode") == "mixed"


def test_nothing_of_the_daemon_reaches_its_agents() -> None:
    """Training goes on through a restart and through a crash of the daemon."""
    tying = {"StopPropagatedFrom", "PartOf", "BindsTo", "Requires", "Requisite", "PropagatesStopTo", "PropagatesReloadTo", "Upholds"}
    assert tying & (settings(DAEMON).keys() | settings(AGENT).keys()) == set()
    assert DAEMON not in one(AGENT, "After").split()


def test_what_agents_left_outlives_the_daemon_and_each_agent() -> None:
    assert one(DAEMON, "RuntimeDirectoryPreserve") == "yes"
    assert "RuntimeDirectory" not in settings(AGENT)
    assert "RemoveIPC" not in settings(DAEMON)


def test_systemd_never_starts_an_agent_by_itself() -> None:
    found = settings(AGENT)
    assert one(AGENT, "Restart") == "no"
    assert {"WantedBy", "RequiredBy", "Alias"} & found.keys() == set()


def test_an_agent_has_the_rights_that_it_needs_and_no_others() -> None:
    assert set(one(AGENT, "AmbientCapabilities").split()) == CAPABILITIES
    assert set(one(AGENT, "CapabilityBoundingSet").split()) == CAPABILITIES
    assert (one(AGENT, "User"), one(AGENT, "Slice")) == ("elasticd", SLICE)


def test_the_daemon_may_run_checks_as_other_users_and_read_the_kernels_log_and_nothing_else() -> None:
    needed = {"CAP_SETUID", "CAP_SETGID", "CAP_KILL", "CAP_SYSLOG"}
    assert set(one(DAEMON, "AmbientCapabilities").split()) == needed
    assert set(one(DAEMON, "CapabilityBoundingSet").split()) == needed
    assert (one(DAEMON, "User"), one(DAEMON, "NoNewPrivileges")) == ("elasticd", "yes")


def test_the_daemon_stops_before_what_it_reaches_systemd_by() -> None:
    """At shutdown it is to ask which job is being done, and to stop agents."""
    assert {"dbus.socket", "dbus.service", "polkit.service"} <= set(" ".join(settings(DAEMON)["After"]).split())


def test_nobody_else_can_speak_for_the_daemon() -> None:
    assert (one(DAEMON, "Type"), one(DAEMON, "NotifyAccess")) == ("notify", "main")


def test_what_holds_for_workers_too_does_not_hinder_them() -> None:
    closing = re.compile(r"Private.*|Protect.*|Restrict.*|SystemCall.*|Device.*|MemoryDeny.*|NoNewPrivileges|LockPersonality|UMask|Memory.*|CPU.*|ProcSubset")
    assert [key for key in settings(AGENT) if closing.fullmatch(key)] == []
    assert (one(AGENT, "OOMPolicy"), one(AGENT, "LimitMEMLOCK"), one(AGENT, "TasksMax")) == ("continue", "infinity", "infinity")


@pytest.mark.parametrize("setting", ["PrivateDevices", "ProcSubset", "MemoryDenyWriteExecute", "ProtectClock", "ProtectKernelLogs", "PrivateUsers"])
def test_hardening_that_breaks_gpus_jit_the_api_or_the_kernels_log_stays_off(setting: str) -> None:
    assert setting not in settings(DAEMON)


def test_the_gpu_drivers_devices_can_be_opened_and_the_kernels_log_be_read() -> None:
    assert one(DAEMON, "DevicePolicy") == "closed"
    assert {f"{DEVICE} r"} == {device for device in settings(DAEMON)["DeviceAllow"] if not device.startswith("char-")}
    assert {"char-nvidia rw", "char-nvidia-uvm rw", "char-nvidia-caps rw"} <= set(settings(DAEMON)["DeviceAllow"])


# --- users and directories -----------------------------------------------------------------------------------------------


def lines(name: str) -> list[list[str]]:
    text = (ROOT / "deploy" / "systemd" / name).read_text()
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


def test_agents_configurations_and_keys_are_nobody_elses_business() -> None:
    modes = {line[1]: line[2:5] for line in lines("elasticd.tmpfiles")}
    assert modes == {
        "/run/elasticd": ["0755", "elasticd", "elasticd"],
        "/run/elasticd/agents": ["0700", "elasticd", "elasticd"],
        "/etc/elasticd/tls": ["0750", "root", "elasticd"],
        "/etc/credstore": ["0700", "root", "root"],
    }


def test_the_groups_are_those_that_the_api_asks_for() -> None:
    api = DaemonConfig(etcd=EtcdSection(endpoints=("127.0.0.1:2379",))).api
    assert [line[:2] for line in lines("elasticd.sysusers")] == [["u", api.readers], ["g", api.operators]]


@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="needs systemd-sysusers")
def test_sysusers_makes_a_user_that_cannot_log_in(installed: Installation, tmp_path: Path) -> None:
    source = installed.at("/usr/lib/sysusers.d/elasticd.conf")
    (tmp_path / "etc").mkdir()
    done = subprocess.run(["systemd-sysusers", f"--root={tmp_path}", str(source)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    (user,) = [line.split(":") for line in (tmp_path / "etc/passwd").read_text().splitlines() if line.startswith("elasticd:")]
    assert (user[4:], int(user[2]) < 1000) == (["elasticd daemon and agents", "/var/lib/elasticd", "/usr/sbin/nologin"], True)
    groups = {line.split(":")[0] for line in (tmp_path / "etc/group").read_text().splitlines()}
    assert {"elasticd", "elasticd-ops"} <= groups


def test_every_credential_that_the_configuration_may_name_is_handed_over() -> None:
    """By the name it has in /etc/credstore, so that `elasticd check-config` finds it there, too."""
    named = set(re.findall(r'"credential:([^"]+\.key)"', (ROOT / "deploy" / "systemd" / "elasticd.toml").read_text()))
    assert named == {"elasticd.operator.key", "elasticd.peer.key"}
    # Without a path, systemd looks into /etc/credstore and takes it well if there is none.
    assert set(settings(DAEMON)["LoadCredential"]) == named


def test_an_agent_has_no_credentials() -> None:
    """They are read at start alone, and an agent lives longer than a certificate may."""
    assert "LoadCredential" not in settings(AGENT)
