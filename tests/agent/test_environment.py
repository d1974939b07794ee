"""What workers find in their environment, and what of the agent's they do not."""

from __future__ import annotations

from pathlib import Path

from elasticd.agent.environment import inherited, torch_environment
from elasticd.agent.identity import Identity
from tests.rendezvous.world import generation

SOMEBODY = Identity(name="train", uid=4711, gid=4712, groups=(4712, 27), home="/home/train", shell="/bin/zsh")


def for_worker(base: dict[str, str], *devices: str, local_rank: int = 0, nproc: int = 2, interface: str = "") -> dict[str, str]:
    return torch_environment(
        base,
        generation(1, ["a"]).record,
        job="job",
        node="a",
        node_rank=0,
        base_rank=0,
        local_rank=local_rank,
        nproc=nproc,
        max_restarts=3,
        error_file=Path("/logs/error.json"),
        devices=devices,
        interface=interface,
    )


def test_what_configures_elasticd_and_etcd_is_not_the_workers() -> None:
    """A path to the agent's key, an endpoint, a password."""
    environ = {"ELASTICD_CONFIG": "/etc/x", "ETCDCTL_KEY": "k", "ETCD_NAME": "n", "PATH": "/bin", "MY_ETCD": "kept", "XDG_RUNTIME_DIR": "/run/user/0"}
    assert inherited(environ) == {"PATH": "/bin", "MY_ETCD": "kept", "XDG_RUNTIME_DIR": "/run/user/0"}


def test_another_users_worker_is_told_who_it_is() -> None:
    """And gets nothing of the agent's login session."""
    environ = {"HOME": "/root", "USER": "root", "PATH": "/bin", "XDG_RUNTIME_DIR": "/run/user/0", "SUDO_USER": "me", "SSH_AUTH_SOCK": "/s"}
    assert inherited(environ, SOMEBODY) == {"HOME": "/home/train", "USER": "train", "LOGNAME": "train", "SHELL": "/bin/zsh", "PATH": "/bin"}


def test_every_worker_sees_all_devices_of_the_job_on_this_node_in_the_order_of_local_ranks() -> None:
    """LOCAL_RANK is the index, as in a torchrun script."""
    seen = [for_worker({}, "GPU-a", "GPU-b", local_rank=rank) for rank in (0, 1)]
    assert [(one["CUDA_VISIBLE_DEVICES"], one["LOCAL_RANK"]) for one in seen] == [("GPU-a,GPU-b", "0"), ("GPU-a,GPU-b", "1")]


def test_without_devices_the_variable_is_left_alone() -> None:
    """Whoever started the agent may have set it."""
    assert "CUDA_VISIBLE_DEVICES" not in for_worker({"CUDA_VISIBLE_DEVICES": "1"})


def test_gloo_is_told_the_interface_that_bears_the_nodes_address_unless_somebody_chose() -> None:
    """By itself it takes what the host's name resolves to: on Debian a loopback address."""
    assert for_worker({}, interface="eth1")["GLOO_SOCKET_IFNAME"] == "eth1"
    assert "GLOO_SOCKET_IFNAME" not in for_worker({"GLOO_SOCKET_IFNAME": "ib0"}, interface="eth1")
    assert "GLOO_SOCKET_IFNAME" not in for_worker({})


def test_threads_are_limited_unless_somebody_chose() -> None:
    """As torchrun does."""
    assert for_worker({})["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in for_worker({"OMP_NUM_THREADS": "4"})
    assert "OMP_NUM_THREADS" not in for_worker({}, nproc=1)
