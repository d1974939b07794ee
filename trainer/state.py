"""What a script registered, as named tensors and a table of everything else; and back again.

Owns: the names, which objects can be kept and how, fresh state for optimizers. Must not: copy a state anywhere, know buffers, files or ranks.

==============  ===========================================  ==========================================
registered      its tensors                                  everything else
==============  ===========================================  ==========================================
module          "model.<name>", parameters and buffers       what get_extra_state returns
optimizer       "optimizer.state.<module>.<name>.<key>"      options of its groups, a sum of whose parameters they are
tensor          its own name                                 -
dict            "name.<path>"                                the rest of it
anything with   "name.<path>", from its state_dict           the rest of it
state_dict
==============  ===========================================  ==========================================

An optimizer's state goes by the names of the parameters, not by their places, so frozen parameters and empty groups do no harm. Two names of one
tensor (tied weights) are kept once. Values that depend on the rank have no place in a state: the same bytes must lie on every node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.errors import SetupError, StateError
from trainer.values import flatten, join, rebuild, sound

_COMPILED: Final = "_orig_mod"


class Part(Protocol):
    """One registered object."""

    @property
    def in_place(self) -> bool:
        """It copies a state into tensors that it has; else it keeps the ones that it is given."""

    def collect(self, found: dict[str, Tensor]) -> Any:
        """Put its tensors into `found` by their full names, always in the same order: live ones, not copies. Return everything else, for `pack_extras`."""

    def restore(self, tensors: Mapping[str, Tensor], rest: Any) -> None:
        """Take over a state: its tensors by full names, in host memory, and everything else."""


def unwrapped(module: nn.Module) -> nn.Module:
    """The user's own module inside DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif _COMPILED in module._modules:  # noqa: SLF001 - OptimizedModule forwards attributes to what it wraps, so hasattr would find too much
            module = module._modules[_COMPILED]  # type: ignore[assignment]  # noqa: SLF001
        else:
            return module


class Source(Protocol):
    """A state to take over."""

    @property
    def names(self) -> Sequence[str]:
        """Of its tensors."""

    @property
    def rest(self) -> Mapping[str, Any]:
        """Everything else, by part."""

    def views(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """Tensors as they lie there, to be read at once."""

    def copies(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """Tensors to keep."""


class Parts:
    """Everything that was registered, by name."""

    def __init__(self) -> None:
        self._parts: dict[str, Part] = {}
        self._names: dict[int, str] = {}  # id of a parameter -> its name with its module's
        self.modules: dict[str, nn.Module] = {}

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, objects: Mapping[str, object]) -> list[str]:
        """Register objects. Modules and tensors come first, whatever the order: an optimizer goes by the names of their parameters.

        Returns:
            their names.

        Raises:
            SetupError: a name is taken or no word, or the object is of no kind that can be kept.
        """
        order = sorted(objects, key=lambda name: not isinstance(objects[name], nn.Module | Tensor))
        for name in order:
            if not name.isidentifier() or name == "elasticd":
                raise SetupError(f"nothing can be registered as {name!r}", remedy="use a plain word")
            if name in self._parts:
                raise SetupError(f"{name} is registered already")
            self._parts[name] = self._part(name, objects[name])
        return order

    def collect(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All tensors, live, by their full names; and all that is no tensor, by part."""
        found: dict[str, Tensor] = {}
        rest = {name: part.collect(found) for name, part in self._parts.items()}
        return found, rest

    def restore(self, names: Iterable[str], state: Source) -> None:
        """Give some parts what a state has for them.

        Raises:
            StateError: it does not fit; names the first tensor, or the part.
        """
        for name in names:
            if name not in state.rest:
                raise StateError(f"{name} is registered, the state has nothing for it", remedy="begin anew, or register what the state was made with")
            part = self._parts[name]
            mine = [full for full in state.names if full == name or full.startswith(f"{name}.")]
            try:
                part.restore(state.views(mine) if part.in_place else state.copies(mine), state.rest[name])
            except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
                raise StateError(f"{name} cannot take over its state: {type(error).__name__}: {error}"[:500]) from error

    def knows(self, module: nn.Module) -> bool:
        """Whether a registered module has all of its parameters."""
        return all(id(parameter) in self._names for parameter in unwrapped(module).parameters())

    def kept(self) -> list[str]:
        """Those that keep the tensors they are given: whoever restores them has to make room for those."""
        return [name for name, part in self._parts.items() if not part.in_place]

    def left_over(self, rest: Mapping[str, Any]) -> list[str]:
        """Parts of a state that nothing registered has asked for."""
        return sorted(rest.keys() - self._parts.keys())

    def buffers(self) -> list[Tensor]:
        """Buffers of all modules: those may differ between ranks."""
        found = {id(buffer): buffer for module in self.modules.values() for buffer in module.buffers()}
        return list(found.values())

    def _part(self, name: str, value: object) -> Part:
        if isinstance(value, nn.Module):
            module = unwrapped(value)
            self.modules[name] = module
            self._names.update((id(tensor), join(name, path)) for path, tensor in _named(module))
            return ModulePart(name, module)
        if isinstance(value, Tensor):
            self._names[id(value)] = name
            return TensorPart(name, value)
        if isinstance(value, torch.optim.Optimizer):
            return OptimizerPart(name, value, self._names)
        if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            return StatefulPart(name, value.state_dict, value.load_state_dict)
        if isinstance(value, MutableMapping):
            return StatefulPart(name, lambda: value, _into(value))
        raise SetupError(
            f"{name} is a {type(value).__qualname__}, which cannot be kept",
            remedy="register modules, optimizers, tensors, dicts, or objects with state_dict and load_state_dict",
        )


class TensorPart:
    """A tensor of the user's own."""

    in_place: Final = True

    def __init__(self, name: str, tensor: Tensor) -> None:
        self._name = name
        self._tensor = sound(name, tensor)

    def collect(self, found: dict[str, Tensor]) -> None:
        """See `Part`."""
        found[self._name] = self._tensor

    def restore(self, tensors: Mapping[str, Tensor], rest: Any) -> None:
        """See `Part`."""
        del rest
        _check_all({self._name: self._tensor}, tensors)
        with torch.no_grad():
            self._tensor.copy_(tensors[self._name])


class ModulePart:
    """A module: parameters and buffers in place. If its state_dict says something else than they hold, what state_dict and load_state_dict do."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name = name
        self._module = module
        self._places = self._find_places()

    @property
    def in_place(self) -> bool:
        """See `Part`."""
        return self._places is not None

    def collect(self, found: dict[str, Tensor]) -> dict[str, Any]:
        """See `Part`."""
        if self._places is not None:
            for name, owner, key in self._places:
                found[name] = owner[key]
            return {}
        state = self._state()
        found.update(_distinct({name: value for name, value in state.items() if isinstance(value, Tensor)}))
        return {name: flatten(value, name, found) for name, value in state.items() if not isinstance(value, Tensor)}

    def restore(self, tensors: Mapping[str, Tensor], rest: Any) -> None:
        """See `Part`."""
        mine: dict[str, Tensor] = {}
        own = self.collect(mine)
        if self._places is not None:
            _check_all(mine, tensors)
            with torch.no_grad():
                for name, tensor in mine.items():
                    tensor.copy_(tensors[name])
            return
        state = self._state()
        plain = _distinct({name: value for name, value in state.items() if isinstance(value, Tensor)})
        _check_all(plain, {name: tensor for name, tensor in tensors.items() if name in plain or not any(name.startswith(other) for other in rest)})
        if own.keys() != rest.keys():
            raise StateError(f"{self._name} has {', '.join(own.keys() ^ rest.keys())} either in the state alone or here alone")
        first = {id(value): name for name, value in plain.items()}
        values = {name: tensors[first[id(value)]] if isinstance(value, Tensor) else rebuild(rest[name], tensors) for name, value in state.items()}
        self._module.load_state_dict(dict(zip(self._module.state_dict(keep_vars=True), values.values(), strict=True)))

    def _state(self) -> dict[str, Any]:
        return {join(self._name, _clean(key)): value for key, value in self._module.state_dict(keep_vars=True).items()}

    def _find_places(self) -> list[tuple[str, dict[str, Any], str]] | None:
        """Where each tensor hangs, so that a snapshot need not ask the modules; None if state_dict says something else than they hold."""
        places: dict[int, tuple[dict[str, Any], str]] = {}
        for module in self._module.modules():
            for owner in (module._parameters, module._buffers):  # noqa: SLF001 - a buffer may be replaced by another tensor
                places.update((id(value), (owner, key)) for key, value in owner.items() if value is not None)
        state = self._state()
        if not all(isinstance(value, Tensor) and id(value) in places for value in state.values()):
            return None
        return [(name, *places[id(value)]) for name, value in _distinct(state).items()]


class OptimizerPart:
    """An optimizer. Its state comes into being with its first step."""

    in_place: Final = False

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
        self._name = name
        self._optimizer = optimizer
        self._names = names
        self._groups: list[_Group] = []
        self._look()

    def collect(self, found: dict[str, Tensor]) -> dict[str, Any]:
        """See `Part`."""
        groups: list[dict[str, Any]] = []
        rest: dict[str, dict[str, Any]] = {}
        for index, (group, known) in enumerate(zip(self._optimizer.param_groups, self._look(), strict=True)):
            options = {key: value for key, value in group.items() if key not in {"params", "param_names"}}
            flat = flatten(options, f"{self._name}.groups.{index}", found)
            groups.append({"options": flat, "parameters": known.digest, "count": len(known.named)})
            for name, parameter in known.named:
                values = self._optimizer.state.get(parameter)
                if values and (other := _tensors_out(values, f"{self._name}.state.{name}", found)):
                    rest[name] = other
        return {"groups": groups, "state": rest}

    def restore(self, tensors: Mapping[str, Tensor], rest: Any) -> None:
        """See `Part`."""
        known = self._look()
        if len(known) != len(rest["groups"]):
            raise StateError(f"{self._name} has {len(known)} groups of parameters, and {len(rest['groups'])} in the state")
        state = self._state_of(tensors, rest["state"])
        groups, first = [], 0
        for index, (group, theirs) in enumerate(zip(known, rest["groups"], strict=True)):
            if group.digest != theirs["parameters"]:
                raise StateError(f"group {index} of {self._name} has {len(group.named)} parameters, and {theirs['count']}, or others, in the state")
            groups.append({**rebuild(theirs["options"], tensors), "params": list(range(first, first + len(group.named)))})
            first += len(group.named)
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        self._keep_types(state)

    def _state_of(self, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """By the place of the parameter, as load_state_dict wants it."""
        places = {name: place for place, name in enumerate(name for group in self._groups for name, _ in group.named)}
        state: dict[int, dict[str, Any]] = {}
        below = f"{self._name}.state."
        for full, tensor in tensors.items():
            name, _, key = full.removeprefix(below).rpartition(".")
            if full.startswith(below) and name in places:
                state.setdefault(places[name], {})[key] = tensor
            elif full.startswith(below) and not any(full.startswith(f"{below}{one}.") for one in rest):
                raise StateError(f"{full} is in the state, and {self._name} has no such parameter now")
        for name, values in rest.items():
            if name not in places:
                raise StateError(f"{self._name} has a state for {name}, and no such parameter now")
            state.setdefault(places[name], {}).update(rebuild(values, tensors))
        return state

    def _look(self) -> list[_Group]:
        """The groups with the names of their parameters, anew if any was added."""
        now = [group["params"] for group in self._optimizer.param_groups]
        if [len(group.named) for group in self._groups] != [len(parameters) for parameters in now]:
            self._groups = [self._named(index, parameters) for index, parameters in enumerate(now)]
        return self._groups

    def _named(self, index: int, parameters: Sequence[Tensor]) -> _Group:
        for place, parameter in enumerate(parameters):
            if id(parameter) not in self._names:
                raise SetupError(
                    f"parameter {place} in group {index} of {self._name}, of the shape {list(parameter.shape)}, belongs to no registered module",
                    remedy="register its module, or the tensor itself, in the same call or before",
                )
        named = [(self._names[id(parameter)], parameter) for parameter in parameters]
        return _Group(named=named, digest=xxhash.xxh3_64_hexdigest("\0".join(name for name, _ in named).encode()))

    def _keep_types(self, state: Mapping[int, Any]) -> None:
        """load_state_dict casts state to its parameter's type: float32 moments of bfloat16 parameters would lose half their bits."""
        flat = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        for place, values in state.items():
            loaded = self._optimizer.state[flat[place]]
            for key, value in values.items():
                if isinstance(value, Tensor) and loaded[key].dtype != value.dtype:
                    loaded[key] = value.to(loaded[key].device)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """Parameters of one group by name, and a sum of the names."""

    named: list[tuple[str, Tensor]]
    digest: str


def _tensors_out(values: Mapping[str, Any], path: str, found: dict[str, Tensor]) -> dict[str, Any]:
    """What one parameter's state has besides tensors. Those need no mark: their names say whose they are, and there may be many thousands."""
    other: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Tensor) and "." not in key:
            found[f"{path}.{key}"] = value
        else:
            other[key] = flatten(value, f"{path}.{key}", found)
    return other


class StatefulPart:
    """Anything that has a state_dict: schedulers, scalers, averages, counters."""

    in_place: Final = False

    def __init__(self, name: str, get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        self._name = name
        self._get = get
        self._put = put

    def collect(self, found: dict[str, Tensor]) -> Any:
        """See `Part`."""
        return flatten(self._get(), self._name, found)

    def restore(self, tensors: Mapping[str, Tensor], rest: Any) -> None:
        """See `Part`."""
        self._put(rebuild(rest, tensors))


def _into(value: MutableMapping[str, Any]) -> Callable[[Mapping[str, Any]], None]:
    def put(new: Mapping[str, Any]) -> None:
        value.clear()
        value.update(new)

    return put


def _clean(key: str) -> str:
    """A name without what torch.compile put in: the same module may be compiled in one run and not in another."""
    return ".".join(word for word in key.split(".") if word != _COMPILED)


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for key, tensor in module.named_parameters():
        yield _clean(key), tensor


def _distinct(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor once, under the first of its names."""
    first: dict[int, str] = {}
    for name, tensor in named.items():
        first.setdefault(id(tensor), name)
    return {name: sound(name, named[name]) for name in first.values()}


def _check_all(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    for name, tensor in mine.items():
        other = theirs.get(name)
        if other is None:
            raise StateError(f"{name} is not in the state")
        if other.shape != tensor.shape:
            raise StateError(f"{name} has the shape {list(other.shape)} in the state, and {list(tensor.shape)} here")
        if other.dtype != tensor.dtype:
            raise StateError(f"{name} is {_short(other)} in the state, and {_short(tensor)} here")
    more = next((name for name in theirs if name not in mine), None)
    if more is not None:
        raise StateError(f"{more} is in the state, and not here")


def _short(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
