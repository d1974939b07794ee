"""What a training script imports to lose nothing when the world around it changes.

Owns: the script's side of elastic training (session, data order, state, the channel to the agent). Must not: import anything of `elasticd`,
so that it works under plain torchrun too.

Names are imported when they are first used: whoever wants `trainer.wire` alone, as the agent does, does not load torch. `trainer.fit` is a module:
``from trainer.fit import fit``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from trainer.data import ElasticLoader, Evaluation, Microbatch
    from trainer.errors import ChannelError, DamagedError, NoSpaceError, SetupError, StateError, Stopped, TrainerError
    from trainer.session import Session, Turn, join
    from trainer.settings import Settings
    from trainer.wrap import ElasticDDP

_HOME: Final = {
    "ChannelError": "errors",
    "DamagedError": "errors",
    "ElasticDDP": "wrap",
    "ElasticLoader": "data",
    "Evaluation": "data",
    "Microbatch": "data",
    "NoSpaceError": "errors",
    "Session": "session",
    "SetupError": "errors",
    "Settings": "settings",
    "StateError": "errors",
    "Stopped": "errors",
    "TrainerError": "errors",
    "Turn": "session",
    "join": "session",
}

__all__ = [
    "ChannelError",
    "DamagedError",
    "ElasticDDP",
    "ElasticLoader",
    "Evaluation",
    "Microbatch",
    "NoSpaceError",
    "Session",
    "Settings",
    "SetupError",
    "StateError",
    "Stopped",
    "TrainerError",
    "Turn",
    "join",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
