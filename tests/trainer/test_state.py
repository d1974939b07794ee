"""What can be registered, under which names it is kept, and that it comes back as it was."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, MultiStepLR, ReduceLROnPlateau, SequentialLR
from torch.optim.swa_utils import AveragedModel

from trainer.errors import SetupError, StateError
from trainer.state import Parts, unwrapped
from trainer.wire.extras import pack_extras, unpack_extras

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Kept:
    """A state that went through bytes: a `trainer.state.Source`."""

    def __init__(self, parts: Parts) -> None:
        found, rest = parts.collect()
        self.tensors = {name: tensor.detach().cpu().clone() for name, tensor in found.items()}
        self.rest = unpack_extras(pack_extras(rest))

    @property
    def names(self) -> Sequence[str]:
        return list(self.tensors)

    def views(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        return {name: self.tensors[name] for name in names}

    def copies(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        return {name: self.tensors[name].clone() for name in names}


def registered(**objects: object) -> Parts:
    parts = Parts()
    parts.add(objects)
    return parts


def restored(kept: Kept, **objects: object) -> Parts:
    parts = Parts()
    parts.restore(parts.add(objects), kept)
    return parts


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def step(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    model(torch.randn(5, 2)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def same(one: Any, other: Any) -> bool:
    """Deep equality, bit for bit for tensors."""
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_a_modules_tensors_go_by_their_names_and_are_the_live_ones() -> None:
    model = net()
    found, rest = registered(model=model).collect()
    assert list(found) == [f"model.{name}" for name in model.state_dict()]
    assert found["model.0.weight"] is model[0].weight
    assert rest == {"model": {}}


def test_a_module_comes_back_in_place() -> None:
    model, other = net(), net()
    weight = other[0].weight
    restored(Kept(registered(model=model)), model=other)
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert other[0].weight is weight


def test_a_buffer_that_is_replaced_by_another_tensor_is_followed() -> None:
    model = net()
    parts = registered(model=model)
    model[1].running_mean = torch.ones(3)
    assert parts.collect()[0]["model.1.running_mean"] is model[1].running_mean


def test_what_compile_and_ddp_put_around_a_module_does_not_show() -> None:
    model = net()
    whole: Any = torch.compile(model, backend="eager")
    assert unwrapped(whole) is model
    assert list(registered(model=whole).collect()[0]) == list(registered(model=model).collect()[0])
    inner = net()
    inner[0] = torch.compile(inner[0], backend="eager")  # type: ignore[assignment]
    assert list(registered(model=inner).collect()[0]) == list(registered(model=model).collect()[0])


def test_tied_weights_are_kept_once_and_stay_tied() -> None:
    def tied() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight = model[0].weight
        return model

    model, other = tied(), tied()
    found, _ = registered(model=model).collect()
    assert list(found) == ["model.0.weight", "model.0.bias", "model.1.bias"]
    restored(Kept(registered(model=model)), model=other)
    assert other[1].weight is other[0].weight
    assert torch.equal(other[1].weight, model[0].weight)


def test_a_buffer_that_is_not_persistent_is_left_out() -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("cache", torch.zeros(9), persistent=False)
    assert list(registered(model=model).collect()[0]) == ["model.weight", "model.bias"]


class Counting(nn.Module):
    """Has a state of its own besides tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.seen: Any = {"words": 0}

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def test_extra_state_of_a_module_comes_back() -> None:
    model, other = nn.Sequential(Counting()), nn.Sequential(Counting())
    model[0].seen = {"words": 7, "by": (1, 2)}
    with torch.no_grad():
        model[0].weight.fill_(3)
    restored(Kept(registered(model=model)), model=other)
    assert other[0].seen == {"words": 7, "by": (1, 2)}
    assert other[0].weight.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("extra", [torch.ones(3), {"table": torch.arange(4), "n": 1}])
def test_tensors_in_extra_state_come_back(extra: Any) -> None:
    model, other = nn.Sequential(Counting()), nn.Sequential(Counting())
    model[0].seen = extra
    other[0].seen = torch.zeros(3) if isinstance(extra, Tensor) else {}
    restored(Kept(registered(model=model)), model=other)
    assert same(other[0].seen, extra)


def test_what_a_state_dict_hook_leaves_out_is_left_out() -> None:
    def adapter() -> nn.Sequential:
        model = net()
        model.register_state_dict_post_hook(lambda _module, state, _prefix, _meta: state.__delitem__("0.weight"))
        model.register_load_state_dict_post_hook(lambda _module, keys: keys.missing_keys.clear())
        return model

    model, other = adapter(), adapter()
    untouched = other[0].weight.clone()
    restored(Kept(registered(model=model)), model=other)
    assert "model.0.weight" not in registered(model=model).collect()[0]
    assert torch.equal(other[0].weight, untouched)
    assert torch.equal(other[2].weight, model[2].weight)


OPTIMIZERS = [
    lambda params: torch.optim.SGD(params, lr=0.1),
    lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    lambda params: torch.optim.Adam(params, lr=torch.tensor(1e-2), betas=(0.7, 0.8), amsgrad=True),
    lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.3),
    torch.optim.Adagrad,
    lambda params: torch.optim.RMSprop(params, centered=True, momentum=0.1),
    torch.optim.NAdam,
    torch.optim.Adafactor,
    torch.optim.ASGD,
    torch.optim.Rprop,
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_an_optimizer_goes_on_bit_for_bit(make: Any) -> None:
    model, other = net(), net()
    optimizer, fresh = make(model.parameters()), make(other.parameters())
    for _ in range(3):
        step(model, optimizer)
    restored(Kept(registered(model=model, optimizer=optimizer)), optimizer=fresh, model=other)
    assert same(fresh.state_dict(), optimizer.state_dict())
    torch.manual_seed(1)
    step(model, optimizer)
    torch.manual_seed(1)
    step(other, fresh)
    assert same(dict(other.state_dict()), dict(model.state_dict()))


def test_an_optimizers_state_goes_by_the_names_of_its_parameters() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    parts = registered(model=model, optimizer=optimizer)
    assert not any(name.startswith("optimizer") for name in parts.collect()[0])
    step(model, optimizer)
    found, rest = parts.collect()
    assert found["optimizer.state.model.0.weight.exp_avg"] is optimizer.state[model[0].weight]["exp_avg"]
    assert rest["optimizer"]["groups"][0]["options"]["betas"] == (0.9, 0.999)
    assert rest["optimizer"]["state"] == {}


def test_frozen_parameters_and_empty_groups_keep_their_options() -> None:
    """torch's own get_optimizer_state_dict loses the state of the former and the betas of the latter."""

    def make(model: nn.Sequential) -> torch.optim.Optimizer:
        model[0].requires_grad_(False)
        groups: list[dict[str, Any]] = [{"params": model.parameters(), "lr": 0.5}, {"params": [], "betas": (0.1, 0.2)}]
        return torch.optim.Adam(groups)

    model, other = net(), net()
    optimizer, fresh = make(model), make(other)
    step(model, optimizer)
    fresh.param_groups[0]["lr"] = fresh.param_groups[1]["lr"] = 9.0
    fresh.param_groups[1]["betas"] = (0.9, 0.9)
    restored(Kept(registered(model=model, optimizer=optimizer)), model=other, optimizer=fresh)
    assert same(fresh.state_dict(), optimizer.state_dict())
    assert fresh.param_groups[1]["betas"] == (0.1, 0.2)
    assert other[0].weight not in fresh.state


def test_moments_keep_their_type_where_parameters_have_less() -> None:
    model, other = (nn.Linear(2, 2, dtype=torch.bfloat16) for _ in range(2))
    optimizer, fresh = (torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, other))
    optimizer.state[model.weight]["master"] = torch.full((2, 2), 1 / 3)
    restored(Kept(registered(model=model, optimizer=optimizer)), model=other, optimizer=fresh)
    assert fresh.state[other.weight]["master"].dtype == torch.float32
    assert same(fresh.state[other.weight]["master"], optimizer.state[model.weight]["master"])


def test_state_of_an_optimizer_that_is_no_tensor_comes_back() -> None:
    model, other = (nn.Linear(2, 2) for _ in range(2))
    optimizer, fresh = (torch.optim.LBFGS(module.parameters(), history_size=2) for module in (model, other))
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).pow(2).sum().backward()
        optimizer.step(lambda: float(model(torch.ones(1, 2)).pow(2).sum().detach()))
    restored(Kept(registered(model=model, optimizer=optimizer)), model=other, optimizer=fresh)
    assert same(fresh.state_dict(), optimizer.state_dict())


def test_an_optimizer_over_what_nobody_registered_is_refused() -> None:
    model = net()
    with pytest.raises(SetupError, match=r"parameter 0 in group 0 of optimizer, of the shape \[3, 2\], belongs to no registered module"):
        registered(optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def test_an_optimizer_over_a_tensor_of_the_users_own() -> None:
    heat = torch.ones(2, requires_grad=True)
    other = torch.zeros(2, requires_grad=True)
    optimizer, fresh = torch.optim.Adam([heat]), torch.optim.Adam([other])
    heat.sum().backward()
    optimizer.step()
    kept = Kept(registered(optimizer=optimizer, heat=heat))
    assert set(kept.tensors) == {"heat", *(f"optimizer.state.heat.{key}" for key in ("step", "exp_avg", "exp_avg_sq"))}
    restored(kept, heat=other, optimizer=fresh)
    assert same(other, heat)
    assert same(fresh.state_dict(), optimizer.state_dict())


def schedulers(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [
        CosineAnnealingLR(optimizer, 10),
        MultiStepLR(optimizer, [1, 1, 3]),
        LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
        SequentialLR(optimizer, [LinearLR(optimizer), CosineAnnealingLR(optimizer, 5)], milestones=[2]),
    ]


@pytest.mark.parametrize("kind", range(4))
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")
def test_schedulers_go_on(kind: int) -> None:
    lefts = []
    models = [net(), net()]
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        lefts.append((model, optimizer, schedulers(optimizer)[kind]))
    (model, optimizer, scheduler), (other, fresh, again) = lefts
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    restored(Kept(registered(model=model, optimizer=optimizer, scheduler=scheduler)), model=other, optimizer=fresh, scheduler=again)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
        fresh.step()
        again.step()
        assert again.get_last_lr() == scheduler.get_last_lr()
    assert type(again.state_dict().get("milestones")) is type(scheduler.state_dict().get("milestones"))


def test_a_plateau_scheduler_whose_best_is_infinite_goes_on() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    one, other = ReduceLROnPlateau(optimizer), ReduceLROnPlateau(optimizer)
    other.best = 3.0
    restored(Kept(registered(scheduler=one)), scheduler=other)
    assert other.best == math.inf


def test_an_average_of_weights_goes_on_with_its_counter() -> None:
    model, other = net(), net()
    ema, again = (AveragedModel(module, multi_avg_fn=None, use_buffers=True) for module in (model, other))
    for _ in range(2):
        step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        ema.update_parameters(model)
    restored(Kept(registered(model=model, ema=ema)), model=other, ema=again)
    assert same(dict(again.state_dict()), dict(ema.state_dict()))
    assert int(again.n_averaged) == 2


def test_a_grad_scaler_goes_on() -> None:
    one, other = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (2.0**10, 2.0))
    one.scale(torch.ones(1))
    restored(Kept(registered(scaler=one)), scaler=other)
    assert other.state_dict() == one.state_dict()


class Anything:
    """A state of every kind that is allowed."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


def test_every_kind_of_value_comes_back_in_its_type() -> None:
    one, other = Anything(), Anything()
    one.values = {
        "int": 2**70,
        "float": -0.1,
        "nan": math.inf,
        "tuple": (1, [2, (3,)]),
        "none": None,
        "text": "ä",
        "flag": True,
        "bytes": b"\0\xff",
        "by_number": {1: "a", (2, 3): torch.ones(2)},
        "counter": Counter(a=2),
        "ordered": OrderedDict(b=1, a=torch.zeros(())),
        "deque": deque([1, 2], maxlen=5),
        "set": {3, 1},
        "dtype": torch.bfloat16,
        "f32": np.float32(0.5),
        "i64": np.int64(5),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "deep": [{"t": torch.arange(3)}, torch.tensor(1.5, dtype=torch.float64)],
    }
    restored(Kept(registered(anything=one)), anything=other)
    assert other.values.keys() == one.values.keys()
    for key, value in one.values.items():
        back = other.values[key]
        assert type(back) is type(value), key
        if isinstance(value, np.ndarray):
            assert back.dtype == value.dtype
            assert np.array_equal(back, value)
        elif isinstance(value, deque):
            assert (list(back), back.maxlen) == ([1, 2], 5)
        else:
            assert same(back, value) if key != "by_number" else same(back[2, 3], value[2, 3]), key
    assert list(other.values["ordered"]) == ["b", "a"]
    assert type(other.values["f32"]) is np.float32


def test_a_dict_is_filled_in_place() -> None:
    best, again = {"loss": 0.5, "at": 7}, {"stale": 1}
    restored(Kept(registered(best=best)), best=again)
    assert again == {"loss": 0.5, "at": 7}


def test_what_a_part_is_given_is_its_own() -> None:
    """Not a window on the buffer that the next snapshot writes over."""
    one, other = Anything(), Anything()
    one.values = {"t": torch.ones(2)}
    kept = Kept(registered(anything=one))
    restored(kept, anything=other)
    kept.tensors["anything.t"].zero_()
    assert other.values["t"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), r"anything\.a\.b is a builtins\.object, which cannot be kept"),
        (torch.zeros(2).to_sparse(), r"anything\.a\.b is sparse_coo"),
        (torch.zeros(2, device="meta"), r"anything\.a\.b is on the meta device"),
        ({"$tensor": 1}, r"anything\.a\.b has a key like ours"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_its_path(value: Any, words: str) -> None:
    one = Anything()
    one.values = {"a": {"b": value}}
    with pytest.raises(SetupError, match=words):
        registered(anything=one).collect()


@pytest.mark.parametrize(
    ("objects", "words"),
    [
        ({"model": 3}, "model is a int, which cannot be kept"),
        ({"elasticd": {}}, "nothing can be registered as 'elasticd'"),
    ],
)
def test_what_cannot_be_registered_is_refused(objects: dict[str, Any], words: str) -> None:
    with pytest.raises(SetupError, match=words):
        registered(**objects)


def test_a_name_is_taken_once() -> None:
    parts = registered(model=net())
    with pytest.raises(SetupError, match="model is registered already"):
        parts.add({"model": net()})


def test_what_does_not_fit_is_named_and_changes_nothing() -> None:
    model, other = net(), nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(StateError, match=r"model\.2\.weight has the shape \[1, 3\] in the state, and \[2, 3\] here"):
        restored(Kept(registered(model=model)), model=other)
    assert same(dict(other.state_dict()), before)
    with pytest.raises(StateError, match=r"model\.0\.weight is float32 in the state, and float64 here"):
        restored(Kept(registered(model=model)), model=net().double())
    with pytest.raises(StateError, match=r"model\.1\.weight is in the state, and not here"):
        restored(Kept(registered(model=model)), model=nn.Sequential(nn.Linear(2, 3), nn.Identity(), nn.Linear(3, 1)))


def test_other_groups_are_named() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = Kept(registered(model=model, optimizer=optimizer))
    fewer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(StateError, match="group 0 of optimizer has 2 parameters, and 6, or others, in the state"):
        restored(kept, model=model, optimizer=fewer)
    split = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=0.1)
    with pytest.raises(StateError, match="optimizer has 2 groups of parameters, and 1 in the state"):
        restored(kept, model=model, optimizer=split)


def test_a_part_that_the_state_lacks_is_named_and_so_is_one_too_many() -> None:
    kept = Kept(registered(model=net(), best={}))
    with pytest.raises(StateError, match="ema is registered, the state has nothing for it"):
        restored(kept, ema=net())
    assert registered(model=net()).left_over(kept.rest) == ["best"]


def test_an_error_within_load_state_dict_names_the_part() -> None:
    class Choosy(Anything):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("gone")

    with pytest.raises(StateError, match="choosy cannot take over its state: KeyError: 'gone'"):
        restored(Kept(registered(choosy=Anything())), choosy=Choosy())
