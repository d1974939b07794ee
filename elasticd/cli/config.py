"""The verbs about settings of training: show, set, unset.

Owns: what each asks of the daemon, and what it says about the answer. Must not: know a setting, or what it may be (the daemon does).
"""

from __future__ import annotations

from collections.abc import Sequence

from elasticd.cli.asking import Document, Manner, given, put
from elasticd.cli.asking import change as ask
from elasticd.cli.checks import check_range
from elasticd.errors import UsageError
from elasticd.rendezvous.keys import checked_name


def parse(texts: Sequence[str]) -> dict[str, str]:
    """What NAME=VALUE means. Values stay text: the daemon knows which are numbers.

    Raises:
        UsageError: it is not of that form, or a name is given twice.
    """
    values: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise UsageError(f"{text!r} is not NAME=VALUE")
        if name in values:
            raise UsageError(f"{name} is given twice")
        values[name] = value
    return values


def body(
    values: dict[str, str] | None = None, *, unset: Sequence[str] = (), if_revision: int | None = None, dry_run: bool = False, reason: str = ""
) -> Document:
    """What is asked of the daemon.

    Raises:
        UsageError: the revision is out of range, or a name twice there or none.
    """
    if if_revision is not None:
        check_range("--if-revision", if_revision, 0, 2**53 - 1)
    for name in unset:
        if not name or "=" in name:
            raise UsageError(f"{name!r} is no name of a setting")
    return given(set=values or {}, unset=list(dict.fromkeys(unset)) or None, if_revision=if_revision, dry_run=dry_run, reason=reason)


def show(job: str | None, manner: Manner) -> None:
    """Everything that counts on this node."""
    envelope = manner.client().get(_path(job))
    if manner.as_json:
        put(envelope)
        return
    from elasticd.cli.looking import console
    from elasticd.cli.render_config import config_screen

    console().print(config_screen(envelope["data"]))


def change(job: str | None, wanted: Document, manner: Manner) -> None:
    """Ask for a change, and say what it changes."""
    envelope = ask(manner, _path(job), wanted)
    if manner.as_json:
        return
    data = envelope["data"]
    before, after = data.get("before") or {}, data.get("after") or {}
    told = [f"{name} {_word(before.get(name))} -> {_word(after.get(name))}" for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    who = job or "every job"
    if not data.get("changed"):
        print(f"{who}: it was so already", flush=True)
        return
    verb = "would be set" if data.get("dry_run") else "is set, and counts from the next generation on"
    print(f"{who}: {', '.join(told) or 'nothing of what counts'} {verb}", flush=True)


def _word(value: object) -> str:
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _path(job: str | None) -> str:
    return "/v1/config" if job is None else f"/v1/config/{checked_name('job', job)}"
