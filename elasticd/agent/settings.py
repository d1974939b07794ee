"""The settings of training on this node: the layers that are known here, merged, and fitted to the agent's own times.

Owns: where each layer comes from, and what agent and trainer must agree on. Must not: define a setting (`trainer.settings` does), or read etcd.

An agent reads the two keys of etcd when it starts, and again for each generation: what an operator sets counts from the next generation on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from elasticd.errors import UsageError
from trainer.errors import SetupError
from trainer.settings import Layer, Settings, Value, check, from_environment, merge

if TYPE_CHECKING:
    from elasticd.agent.config import AgentConfig
    from elasticd.rendezvous.records import ConfigRecord

_STOP_SHARE: Final = 0.75
"""Of the time from SIGTERM to SIGKILL, and of a collective's time limit, what workers have to reach the end of a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnLayers:
    """The layers that are made on the node itself.

    Attributes:
        file: the table [trainer] of the job's file.
        environ: a whole environment, of which the variables ELASTICD_TRAINER_* count.
        command: text.
    """

    file: Mapping[str, Value] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    command: Mapping[str, str] = field(default_factory=dict)

    @property
    def layers(self) -> list[tuple[str, Mapping[str, object]]]:
        """Low to high.

        Raises:
            SetupError: a variable names no setting.
        """
        return [(Layer.FILE, self.file), (Layer.ENVIRONMENT, from_environment(self.environ)), (Layer.COMMAND, self.command)]


def resolve(config: AgentConfig, cluster: ConfigRecord | None, job: ConfigRecord | None, environ: Mapping[str, str]) -> tuple[Settings, dict[str, str]]:
    """What counts for an agent.

    Args:
        config: what the agent was told.
        cluster: `config/cluster`, None if nobody has set anything.
        job: `config/job/JOB`, likewise.
        environ: the agent's environment.

    Returns:
        The settings, `stop_step_timeout_s` among them as a time and not as 0; and for each the name of the layer that set it.

    Raises:
        UsageError: a value is not allowed where it is, or two do not fit each other; it names them, and where each is from.
    """
    own = OwnLayers(file=config.trainer_file, environ=environ, command=config.trainer_command)
    return fitted(own, cluster, job, stop_grace=config.stop_grace, ttl=config.ttl)


def fitted(own: OwnLayers, cluster: ConfigRecord | None, job: ConfigRecord | None, *, stop_grace: float, ttl: float) -> tuple[Settings, dict[str, str]]:
    """The same for an agent that is not there yet.

    Args:
        own: the node's layers.
        cluster: as in `resolve`.
        job: as in `resolve`.
        stop_grace: seconds from SIGTERM to SIGKILL when the world changes and everybody is well.
        ttl: seconds after which a silent node is missed.

    Raises:
        UsageError: as `resolve`.
    """
    settings, origins = merged(own, cluster, job)
    for lower, low, upper, high, why in (
        ("stop_step_timeout_s", settings.stop_step_timeout_s, "stop_grace", stop_grace, "workers would be killed on their way to a common stop"),
        ("ttl", ttl, "process_group_timeout_s", settings.process_group_timeout_s, "workers would fail before the loss of a node is known"),
    ):
        if low and not low < high:
            mine = lower if lower in origins else upper
            raise UsageError(f"{lower} {low:g} < {upper} {high:g} does not hold: {why}", remedy=f"{mine} is from {origins[mine]}; change one of them")
    if settings.checkpoint_shared and settings.checkpoint_dir is None:
        remedy = f"checkpoint_shared is from {origins['checkpoint_shared']}; name the shared directory in [trainer] of the job file"
        raise UsageError("checkpoint_shared needs checkpoint_dir", remedy=remedy)
    if not settings.stop_step_timeout_s:
        share = _STOP_SHARE * min(stop_grace, settings.process_group_timeout_s)
        settings = settings.model_copy(update={"stop_step_timeout_s": share})
    return settings, origins


def merged(own: OwnLayers, cluster: ConfigRecord | None, job: ConfigRecord | None) -> tuple[Settings, dict[str, str]]:
    """The layers over each other, whatever the agent's times are.

    Raises:
        UsageError: as `resolve`.
    """
    with said_as_usage():
        return merge([(Layer.CLUSTER, cluster.values if cluster else {}), (Layer.JOB, job.values if job else {}), *own.layers])


@contextmanager
def said_as_usage() -> Iterator[None]:
    """The trainer's word for a mistake in a setting as this project's.

    Raises:
        UsageError: in place of the SetupError.
    """
    try:
        yield
    except SetupError as error:
        raise UsageError(error.message, remedy=error.remedy) from None


def parse_settings(texts: Sequence[str], option: str) -> dict[str, str]:
    """What `--trainer NAME=VALUE`, given so many times, means: text by name, each fit by itself.

    Raises:
        UsageError: one is not of that form, given twice, unknown, or not allowed.
    """
    values: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"{option} {text!r} is not NAME=VALUE")
        if name in values:
            raise UsageError(f"{option} {name} is given twice")
        values[name] = value
    with said_as_usage():
        check(Layer.COMMAND, values)
    return values
