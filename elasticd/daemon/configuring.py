"""Settings of training: what operators have set in etcd, what a change makes of it, and what counts on this node.

Owns: these as pure functions, and reading the keys. Must not: write (`operations` does), or define a setting (`trainer.settings` does).
A key that holds garbage is named, and counts as nothing set; the next change replaces it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from elasticd.agent.settings import OwnLayers, fitted, merged, said_as_usage
from elasticd.daemon.values import printable
from elasticd.errors import RecordError, RefusedError, UsageError
from elasticd.rendezvous.records import ConfigRecord, parse
from trainer.settings import ALIKE, SAFE, Layer, Settings, Value, check, from_text, plain, unit

if TYPE_CHECKING:
    from elasticd.daemon.board import Board
    from elasticd.daemon.cluster import ClusterReader
    from elasticd.kv import EtcdKV
    from elasticd.kv.types import Listing
    from elasticd.rendezvous.keys import ClusterKeys


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """One key: what operators have set for all jobs, or for one.

    Attributes:
        revision: the key's mod revision, for `if_revision`; 0 if there is none.
        record: None if there is none, or it holds garbage.
        problem: what is wrong with it.
    """

    revision: int = 0
    record: ConfigRecord | None = None
    problem: str = ""

    @property
    def values(self) -> dict[str, Value]:
        """By name, in order."""
        return dict(sorted(self.record.values.items())) if self.record else {}


@dataclass(frozen=True, kw_only=True, slots=True)
class AllKept:
    """Everything that is set in etcd, at one revision."""

    revision: int = 0
    cluster: Kept = Kept()
    jobs: Mapping[str, Kept] = field(default_factory=dict)

    def of(self, job: str | None) -> Kept:
        """For one job, or for all."""
        return self.cluster if job is None else self.jobs.get(job, Kept())

    def with_values(self, job: str | None, scope: str, values: Mapping[str, Value]) -> AllKept:
        """As it would be after a change."""
        kept = Kept(record=ConfigRecord(scope=scope, values=dict(values)))
        return replace(self, cluster=kept) if job is None else replace(self, jobs={**self.jobs, job: kept})


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingView:
    """One setting on this node.

    Attributes:
        value: what counts.
        origin: the layer that it is from.
        layers: what each layer says that says something, low to high.
        etcd: it may be set by `elasticctl config set`.
        alike: nodes of a job must not differ in it.
    """

    name: str
    value: Value | None
    origin: str
    unit: str
    layers: Mapping[str, Value]
    etcd: bool
    alike: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigView:
    """What counts on this node, for one job or for one that says nothing itself. `own` is None without a job."""

    revision: int
    job: str | None
    settings: tuple[SettingView, ...]
    cluster: Kept
    own: Kept | None
    problems: tuple[str, ...]


def all_kept(listing: Listing, keys: ClusterKeys) -> AllKept:
    """Sort the keys below `config/`."""
    cluster, jobs = Kept(), {}
    for item in listing.items:
        job = item.key.removeprefix(keys.config_of_jobs) if item.key.startswith(keys.config_of_jobs) else None
        scope = keys.scope if job is None else f"{keys.scope}/{job}"
        kept = Kept(revision=item.mod_revision)
        try:
            kept = replace(kept, record=parse(ConfigRecord, item.key, item.value, scope))
        except RecordError as error:
            kept = replace(kept, problem=error.message)
        if job is not None:
            jobs[job] = kept
        elif item.key == keys.config_of_cluster:
            cluster = kept
    return AllKept(revision=listing.revision, cluster=cluster, jobs=jobs)


def changed(old: Mapping[str, Value], job: str | None, give: Mapping[str, object], take: Sequence[str]) -> dict[str, Value]:
    """What a change makes of what was set.

    Args:
        old: what was set there.
        job: whose settings these are; None: all jobs'.
        give: values to set; text is taken for what a command line means by it.
        take: names that are not to be set there any more, known or not.

    Raises:
        RefusedError: a setting is not for etcd: it names a path, a URL or an interface.
        UsageError: a setting is unknown, both set and taken away, or a value is not allowed.
    """
    for name in take:
        if name in give:
            raise UsageError(f"{name[:80]} is both set and unset")
        if name not in Settings.model_fields and name not in old:
            raise UsageError(f"{name[:80]!r} is no setting", remedy="elasticctl config show lists them all")
    layer = Layer.CLUSTER if job is None else Layer.JOB
    unsafe = {name: value for name, value in give.items() if name in Settings.model_fields and name not in SAFE}
    typed = {name: from_text(name, value) if isinstance(value, str) else value for name, value in give.items()}
    try:
        with said_as_usage():
            check(layer, unsafe)
    except UsageError as error:
        raise RefusedError(error.message, remedy=error.remedy) from None
    with said_as_usage():
        checked = check(layer, typed)
    return dict(sorted(({name: value for name, value in old.items() if name not in take} | checked).items()))


def check_change(before: AllKept, after: AllKept, job: str | None, board: Board) -> None:
    """Refuse a change after which the settings of a job would no longer fit each other, as far as this node can tell.

    What did not fit before is not this change's fault, and keeps nobody from mending it.

    Raises:
        UsageError: names the job and the settings.
    """
    for one in [job] if job is not None else [None, *sorted({*after.jobs, *board.turn.allowed})]:
        try:
            counting(after, one, board)
        except UsageError as error:
            try:
                counting(before, one, board)
            except UsageError:
                continue
            raise UsageError(f"job {one}: {error.message}" if one else error.message, remedy=error.remedy) from None


def own_layers(job: str | None, board: Board) -> OwnLayers:
    """What this node itself says about a job's settings."""
    spec = board.turn.allowed.get(job) if job is not None else None
    return replace(board.own, file=spec.trainer if spec else {})


def counting(kept: AllKept, job: str | None, board: Board) -> tuple[Settings, dict[str, str]]:
    """What counts on this node: of a job whose file is here, fitted to the agent's times.

    Raises:
        UsageError: values do not fit each other, or one of this node's own layers is wrong.
    """
    own, cluster, mine = own_layers(job, board), kept.cluster.record, kept.of(job).record if job is not None else None
    spec = board.turn.allowed.get(job) if job is not None else None
    if spec is None:
        return merged(own, cluster, mine)
    times = board.turn.times
    stop_grace = times.stop_grace if spec.stop_grace is None else spec.stop_grace
    return fitted(own, cluster, mine, stop_grace=stop_grace, ttl=times.ttl if spec.ttl is None else spec.ttl)


class ConfigReader:
    """Reads what is set. Thread-safe.

    Args:
        kv: this node's connection.
        keys: the cluster.
        board: what this node allows, and its own layers.
        cluster: knows which jobs there are.
    """

    def __init__(self, kv: EtcdKV, keys: ClusterKeys, board: Board, cluster: ClusterReader) -> None:
        self._kv = kv
        self._keys = keys
        self._board = board
        self._cluster = cluster

    def show(self, job: str | None) -> ConfigView:
        """What counts on this node.

        Raises:
            NotRunningError: there is no such job.
            UsageError: what is set does not fit together.
            KVError: etcd does not answer, or refuses.
        """
        if job is not None:
            self._cluster.job(job)
        kept = all_kept(self._kv.list(self._keys.config), self._keys)
        settings, origins = counting(kept, job, self._board)
        said = self._layers(kept, job)
        views = tuple(
            SettingView(
                name=name,
                value=plain(getattr(settings, name)),
                origin=origins[name],
                unit=unit(name),
                layers={layer: values[name] for layer, values in said if name in values},
                etcd=name in SAFE,
                alike=name in ALIKE,
            )
            for name in Settings.model_fields
        )
        problems = tuple(printable(one.problem) for one in (kept.cluster, kept.of(job)) if one.problem)
        return ConfigView(
            revision=kept.revision,
            job=job,
            settings=views,
            cluster=kept.cluster,
            own=kept.of(job) if job is not None else None,
            problems=tuple(dict.fromkeys(problems)),
        )

    def _layers(self, kept: AllKept, job: str | None) -> list[tuple[str, dict[str, Value]]]:
        given: list[tuple[str, Mapping[str, object]]] = [(Layer.CLUSTER, kept.cluster.values)]
        given += [(Layer.JOB, kept.of(job).values)] if job is not None else []
        given += own_layers(job, self._board).layers
        return [(str(layer), check(layer, values)) for layer, values in given]
