"""Run by test_checkpoint_crash: stops a writer of checkpoints before each call that changes the disk, and looks what a start would find then.

    python -m tests.trainer._checkpoint_crash ROOT ACTION

For every index: a fresh directory with the checkpoint of step 1, a child that is to do ACTION and ends before its call number INDEX (the one after the
last is never reached: the action is complete), and then what `load_newest` finds, once as the dead process has left it (SIGKILL: the kernel
keeps all that was called), and then as a power cut may leave it: what no fsync covers is lost, in each way that it can be. One JSON line for each.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.states import make_state, newest
from trainer.checkpoint import Keep, retain, scan, tidy, verify
from trainer.errors import DamagedError

NBYTES = 100_000
CALLS = ("open", "pwrite", "fsync", "mkdir", "rename", "rmdir", "unlink", "flock")
JOURNAL = 900


def write_second(root: Path) -> None:
    make_state(1, 2, nbytes=NBYTES).write(root)


def write_second_and_retain(root: Path) -> None:
    write_second(root)
    retain(root, Keep(last=1))


def write_over_damaged(root: Path) -> None:
    make_state(1, 2, nbytes=NBYTES).write(root)


def first_ever(root: Path) -> None:
    make_state(1, 1, nbytes=NBYTES).write(root)


ACTIONS: dict[str, Callable[[Path], None]] = {
    "write": write_second,
    "retain": write_second_and_retain,
    "damaged": write_over_damaged,
    "first": first_ever,
}


def prepare(root: Path, action: str) -> None:
    if action != "first":
        make_state(1, 1, nbytes=NBYTES).write(root)
    if action == "damaged":
        make_state(1, 2, nbytes=NBYTES).write(root)
        data = root / "step-000000000002.g1" / "state.safetensors"
        content = bytearray(data.read_bytes())
        content[-1] ^= 1
        data.write_bytes(content)
        os.sync()


# --- the child: counts its calls, keeps a journal of them, and ends before one ----------------------------------------------


def run_child(root: Path, action: str, index: int, journal: Path) -> bool:
    """True if the action was complete before call `index`."""
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            fd = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
            os.dup2(fd, JOURNAL)
            intercept(index)
            ACTIONS[action](root)
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in {0, 99}, f"the child ended with {code}"
    return code == 0


def intercept(index: int) -> None:
    import fcntl

    seen = [0]
    real_write = os.write
    for name in CALLS:
        module: Any = fcntl if name == "flock" else os
        real = getattr(module, name)

        def call(*arguments: Any, _name: str = name, _real: Callable[..., Any] = real, **named: Any) -> Any:
            if seen[0] == index:
                os._exit(99)
            seen[0] += 1
            event = describe(_name, arguments, named)
            result = _real(*arguments, **named)
            if event is not None:
                real_write(JOURNAL, (json.dumps(event) + "\n").encode())
            return result

        setattr(module, name, call)


def describe(name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> list[str] | None:
    """What a call does to which path, before it is made."""
    if name == "open":
        path = resolve(arguments[0], named)
        return ["create", path] if arguments[1] & os.O_CREAT and not os.path.lexists(path) else None
    if name in {"pwrite", "fsync"}:
        return [name, path_of(arguments[0])]
    if name == "rename":
        return [name, str(arguments[0]), str(arguments[1])]
    if name in {"mkdir", "rmdir", "unlink"}:
        return [name, resolve(arguments[0], named)]
    return None


def resolve(path: Any, named: dict[str, Any]) -> str:
    base = named.get("dir_fd")
    return str(path) if base is None else str(Path(path_of(base)) / path)


def path_of(fd: int) -> str:
    return str(Path(f"/proc/self/fd/{fd}").readlink())


# --- the power cut: what the journal says was not made durable, is lost -----------------------------------------------------


@dataclass
class Undurable:
    """What a power cut may take. Paths are where things are now."""

    content: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    renames: list[tuple[str, str]] = field(default_factory=list)


def undurable(journal: Path) -> Undurable:
    lost = Undurable()
    for line in journal.read_text().splitlines():
        kind, *paths = json.loads(line)
        path = paths[0]
        if kind in {"create", "mkdir"}:
            lost.names.add(path)
        elif kind == "pwrite":
            lost.content.add(path)
        elif kind == "fsync":
            lost.content.discard(path)
            lost.names = {name for name in lost.names if str(Path(name).parent) != path}
            lost.renames = [(old, new) for old, new in lost.renames if str(Path(new).parent) != path]
        elif kind == "rename":
            old, new = paths
            lost.content = {moved(item, old, new) for item in lost.content}
            lost.names = {moved(item, old, new) for item in lost.names if item != old}
            lost.renames.append((old, new))
    return lost


def moved(path: str, old: str, new: str) -> str:
    return new + path[len(old) :] if path == old or path.startswith(old + "/") else path


def cut_power(lost: Undurable, *, names: bool, content: str, renames: bool) -> None:
    """One of the ways it can end. A name that is lost takes what is below it along."""
    for path in map(Path, sorted(lost.content)):
        if path.exists() and content != "kept":
            size = path.stat().st_size
            os.truncate(path, size // 2 if content == "short" else 0)
            if content == "zeros":
                os.truncate(path, size)
    for path in map(Path, sorted(lost.names) if names else ()):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for old, new in reversed(lost.renames if renames else []):
        if Path(new).exists():
            Path(new).rename(old)


# --- looking ----------------------------------------------------------------------------------------------------------------


def look(root: Path, action: str, index: int, how: str, *, done: bool) -> dict[str, Any]:
    broken = [found.path.name for found in scan(root) if not whole(found.path)]
    order, reports = newest(root, nbytes=NBYTES)
    drafts = [path for path in root.iterdir() if path.name.endswith(".tmp")] if root.exists() else []
    tidy(root, 1)
    left = [path.name for path in root.iterdir() if path.name.endswith(".tmp")] if root.exists() else []
    ACTIONS[action](root)  # whatever was left behind, the next one goes well
    after, later = newest(root, nbytes=NBYTES)
    return {
        "index": index,
        "how": how,
        "done": done,
        "newest": order,
        "reports": reports,
        "broken": broken,
        "drafts": len(drafts),
        "left": left,
        "after": after,
        "later": later,
        "count": len(scan(root)),
    }


def whole(path: Path) -> bool:
    try:
        verify(path)
    except DamagedError:
        return False
    return True


def main() -> None:
    base, action = Path(sys.argv[1]), sys.argv[2]
    root, pristine, kept, journal = base / "root", base / "pristine", base / "kept", base / "journal"
    pristine.mkdir()
    prepare(pristine, action)
    ways = [(names, content, renames) for names in (False, True) for content in ("kept", "short", "zeros") for renames in (False, True)]
    done, index = False, 0
    while not done:
        renew(pristine, root)
        if action == "first":
            shutil.rmtree(root)
        done = run_child(root, action, index, journal)
        lost = undurable(journal)
        renew(root, kept)
        print(json.dumps(look(root, action, index, "killed", done=done)), flush=True)
        for names, content, renames in ways:
            if not differs(lost, names=names, content=content, renames=renames):
                continue
            renew(kept, root)
            cut_power(lost, names=names, content=content, renames=renames)
            how = f"power: names {'lost' if names else 'kept'}, content {content}, renames {'lost' if renames else 'kept'}"
            print(json.dumps(look(root, action, index, how, done=done)), flush=True)
        index += 1


def differs(lost: Undurable, *, names: bool, content: str, renames: bool) -> bool:
    """Whether this way to end is another one than the death of the process alone."""
    if (names and not lost.names) or (content != "kept" and not lost.content) or (renames and not lost.renames):
        return False
    return names or renames or content != "kept"


def renew(source: Path, target: Path) -> None:
    if target.exists():
        shutil.rmtree(target)
    if source.exists():
        shutil.copytree(source, target)


if __name__ == "__main__":
    main()
