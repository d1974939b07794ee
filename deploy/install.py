"""Install elasticd on this machine, or into a directory that a package is made from: `python -m deploy.install install|uninstall`.

Owns: which file goes where, and the order in which it does: whatever can fail comes first, the link `current` last. Must not: start or stop the
service, touch a configuration that is there, or need anything but Python's own library. `environment` makes the virtual environments.

What is installed, PREFIX being /opt/elasticd::

    PREFIX/versions/VERSION/        a virtual environment, never changed once it is there
    PREFIX/current                  link to the one in use
    /usr/bin/{elasticd,elasticctl}  links into current
    /usr/lib/systemd/system, sysusers.d, tmpfiles.d; /usr/share/polkit-1/rules.d
    /etc/elasticd                   configuration, written only where it is not yet
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from deploy import environment
from elasticd.errors import ElasticdError, RefusedError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT: Final = Path(__file__).resolve().parent.parent
COMMANDS: Final = ("elasticd", "elasticctl")
BIN: Final = Path("/usr/bin")
FILES: Final = {
    "elasticd.service": Path("/usr/lib/systemd/system/elasticd.service"),
    "elasticd-agent@.service": Path("/usr/lib/systemd/system/elasticd-agent@.service"),
    "elasticd.slice": Path("/usr/lib/systemd/system/elasticd.slice"),
    "elasticd.sysusers": Path("/usr/lib/sysusers.d/elasticd.conf"),
    "elasticd.tmpfiles": Path("/usr/lib/tmpfiles.d/elasticd.conf"),
    "50-elasticd.rules": Path("/usr/share/polkit-1/rules.d/50-elasticd.rules"),
}
"""File of deploy/systemd -> where it goes. Written anew by each installation; what administrators change is in /etc, which comes first everywhere."""
CONFIGURATION: Final = {
    "elasticd.toml": Path("/etc/elasticd/elasticd.toml"),
    "jobs.d/example.toml.disabled": Path("/etc/elasticd/jobs.d/example.toml.disabled"),
}
SHARED: Final = ("deploy/systemd/elasticd.toml", "deploy/systemd/jobs.d/example.toml.disabled", "docs/operations.md", "docs/api.md", "docs/metrics.md")
"""What each version keeps in share/elasticd: its configuration as it would be written anew, and what a person reads in an emergency."""
LEFT: Final = "/etc/elasticd, /etc/credstore, /var/lib/elasticd, /var/log/elasticd, the user elasticd and its groups"
_POLKITD: Final = ("/usr/lib/polkit-1/polkitd", "/usr/libexec/polkitd", "/usr/lib/policykit-1/polkitd")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where to.

    Attributes:
        prefix: of the versions.
        destdir: what comes before every path that is written; "/" is this machine itself.
    """

    prefix: Path
    destdir: Path

    @property
    def live(self) -> bool:
        """Whether this machine itself is meant."""
        return self.destdir == Path("/")

    @property
    def current(self) -> Path:
        """The link to the version in use."""
        return self.at(self.prefix) / "current"

    @property
    def versions(self) -> Path:
        """The directory of all versions."""
        return self.at(self.prefix) / "versions"

    def at(self, path: Path) -> Path:
        """Where an absolute path is written."""
        return self.destdir / path.relative_to("/")

    def rendered(self, name: str) -> str:
        """The text of a file of this tree, made for this prefix."""
        return (ROOT / name).read_text(encoding="utf-8").replace("@PREFIX@", str(self.prefix))


def install(place: Place, wanted: environment.Wanted) -> None:
    """Install this tree.

    Raises:
        UsageError: something is missing or in the way.
        ElasticdError: a step failed; its output was shown, and the version in use is as it was.
    """
    _check_place(place)
    version = environment.provide(place.versions, place.prefix / "versions", wanted)
    for name, target in FILES.items():
        _write(place.at(target), place.rendered(f"deploy/systemd/{name}"))
    for name, target in CONFIGURATION.items():
        if place.at(target).exists():
            print(f"kept {target}")  # noqa: T201 - a command prints
        else:
            _write(place.at(target), place.rendered(f"deploy/systemd/{name}"))
    for name in COMMANDS:
        _link(place.at(BIN / name), place.prefix / "current" / "bin" / name)
    if place.live:
        _tell_system()
    _link(place.current, Path("versions") / version)
    print(f"installed version {version}; {place.prefix}/current is it now")  # noqa: T201
    if place.live:
        print(_next_step())  # noqa: T201


def uninstall(place: Place) -> None:
    """Remove what `install` made, except for configuration, logs, state and users.

    Raises:
        RefusedError: the service or an agent runs.
    """
    if place.live:
        _check_root()
        running = _running_units()
        if running:
            raise RefusedError(f"{', '.join(running)} runs", remedy="systemctl disable --now elasticd lets its agents leave, and stops it")
        if place.at(FILES["elasticd.service"]).exists():
            _systemctl("disable", "elasticd.service")
    for name in COMMANDS:
        link = place.at(BIN / name)
        if link.is_symlink() and link.readlink().is_relative_to(place.prefix):
            link.unlink()
    for target in FILES.values():
        place.at(target).unlink(missing_ok=True)
    place.current.unlink(missing_ok=True)
    if place.versions.exists():
        shutil.rmtree(place.versions)
    if place.at(place.prefix).exists() and not any(place.at(place.prefix).iterdir()):
        place.at(place.prefix).rmdir()
    if place.live:
        _systemctl("daemon-reload")
    print(f"uninstalled; left as they are: {LEFT}")  # noqa: T201


def _check_place(place: Place) -> None:
    if place.live:
        _check_root()
        environment.check_open_to_all(place.prefix, "PREFIX")
    for name in COMMANDS:
        path = place.at(BIN / name)
        ours = path.is_symlink() and path.readlink() == place.prefix / "current" / "bin" / name
        if (path.is_symlink() or path.exists()) and not ours:
            raise UsageError(f"{path} is there, and is not ours", remedy="remove it, or install with the PREFIX that it belongs to")
    if place.current.exists() and not place.current.is_symlink():
        raise UsageError(f"{place.current} is there, and is no link", remedy="move it away")


def _check_root() -> None:
    if os.geteuid() != 0:
        raise UsageError("only root can install on this machine", remedy="use sudo, or name a directory: make install DESTDIR=build/root")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text, encoding="utf-8")
    fresh.chmod(0o644)
    fresh.replace(path)


def _link(path: Path, target: Path) -> None:
    """Make or turn a link, so that whoever follows it finds the old or the new, never nothing."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.replace(path)


def _tell_system() -> None:
    """Users and directories now rather than at the next boot, and units made known where systemd runs."""
    for command in (["systemd-sysusers", str(FILES["elasticd.sysusers"])], ["systemd-tmpfiles", "--create", str(FILES["elasticd.tmpfiles"])]):
        if shutil.which(command[0]) is None:
            raise UsageError(f"there is no {command[0]}", remedy="apt install systemd")
        environment.run(command)
    _systemctl("daemon-reload")


def _systemd_runs() -> bool:
    return Path("/run/systemd/system").is_dir()  # sd_booted(3)


def _systemctl(*arguments: str) -> None:
    if _systemd_runs():
        environment.run(["systemctl", *arguments])


def _running_units() -> list[str]:
    if not _systemd_runs():
        return []
    states = "--state=active,activating,deactivating,reloading"
    command = ["systemctl", "list-units", "--plain", "--no-legend", states, "elasticd.service", "elasticd-agent@*"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return [line.split()[0] for line in listed.splitlines() if line.strip()]


def _next_step() -> str:
    if not any(Path(path).exists() for path in _POLKITD):
        return "polkitd is missing, without which the daemon may start no agent: apt install polkitd"
    if "elasticd.service" in _running_units():
        return "the daemon that runs is still the old one: systemctl restart elasticd (training goes on meanwhile)"
    return "next: edit /etc/elasticd/elasticd.toml, then elasticd check-config, then systemctl enable --now elasticd"


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m deploy.install", description="Install elasticd, or take it away.")
    parser.add_argument("action", choices=["install", "uninstall"])
    parser.add_argument("--prefix", default="/opt/elasticd", help="where the versions go (default: %(default)s)")
    parser.add_argument("--destdir", default="", help="directory that stands for / ; nothing outside it is touched, and systemd is not told")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment (default: the one that runs this)")
    parser.add_argument("--from-venv", default="", help="environment whose packages are used, instead of installing torch and the rest")
    parser.add_argument("--wheel", default="", help="a wheel of elasticd to install, instead of building one from this tree")
    parser.add_argument("--pip-args", default="", help="passed on to pip install, to take packages from another place")
    return parser.parse_args(argv)


def _wanted(options: argparse.Namespace, place: Place) -> environment.Wanted:
    return environment.Wanted(
        root=ROOT,
        python=environment.found(options.python),
        from_venv=Path(options.from_venv).absolute() if options.from_venv else None,
        wheel=Path(options.wheel).absolute() if options.wheel else None,
        pip_args=tuple(options.pip_args.split()),
        shared={Path(name).name: place.rendered(name) for name in SHARED},
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or that of the error, which is printed as one line."""
    options = _options(argv)
    os.umask(0o022)  # root's may be 077, and the daemon is not root
    try:
        if not Path(options.prefix).is_absolute():
            raise UsageError(f"PREFIX {options.prefix!r} is not an absolute path")
        place = Place(prefix=Path(options.prefix), destdir=Path(options.destdir).resolve() if options.destdir else Path("/"))
        if options.action == "uninstall":
            uninstall(place)
        else:
            install(place, _wanted(options, place))
    except ElasticdError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
