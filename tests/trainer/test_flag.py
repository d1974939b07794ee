"""The stop flag: what it fastens itself to, what is read of it and when, and the signals that raise it."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import time
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from trainer import flag as flags
from trainer.errors import SetupError
from trainer.flag import SAME_SECONDS, Flag, Hook, Reader, Signals, Wish, attach

if TYPE_CHECKING:
    from collections.abc import Iterator

Pair = namedtuple("Pair", "first second")  # noqa: PYI024 - as users write them


@dataclass
class Output:
    logits: Any
    note: str = "kept"


@dataclass(frozen=True)
class FrozenOutput:
    logits: Any


def a_flag(wish: Wish | None = None) -> Flag:
    return Flag(torch.zeros(1), lambda: wish or Wish(stop=True))


def test_the_gradient_is_what_the_rank_wants_when_backward_runs() -> None:
    wishes = [Wish()]
    flag = Flag(torch.zeros(1, dtype=torch.bfloat16), lambda: wishes[-1])
    x = torch.ones(2, requires_grad=True)
    loss = attach(flag, x * 2, of="Net").sum()
    wishes.append(Wish(checkpoint=True, unready=True))
    loss.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0]
    average = flag.take()
    assert average is not None
    assert average.dtype == torch.bfloat16
    assert average.tolist() == [0.0, 1.0, 0.0, 1.0]
    assert flag.take() is None


def test_microbatches_add_up_and_mean_the_same() -> None:
    flag = a_flag()
    for _ in range(3):
        attach(flag, torch.ones(2, requires_grad=True), of="Net").sum().backward()
    average = flag.take()
    assert average is not None
    assert Reader(1, late=False).read([average]) == Wish(stop=True)


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda t: t, lambda out: [out]),
        (lambda t: (t, "a", [t * 3]), lambda out: [out[0], out[2][0]]),
        (lambda t: Pair(t, None), lambda out: [out.first]),
        (lambda t: {"logits": t, "n": 3}, lambda out: [out["logits"]]),
        (lambda t: OrderedDict(logits=t), lambda out: [out["logits"]]),
        (lambda t: UserDict(logits=t), lambda out: [out["logits"]]),
        (lambda t: Output(logits=[t]), lambda out: out.logits),
        (lambda t: FrozenOutput(logits=t), lambda out: [out.logits]),
    ],
)
def test_tensors_are_found_in_what_modules_return(make: Any, parts: Any) -> None:
    flag = a_flag()
    x = torch.ones(2, requires_grad=True)
    made = make(x * 2)
    kind = type(made)
    out = attach(flag, made, of="Net")
    assert type(out) is kind
    sum(part.sum() for part in parts(out)).backward()
    assert flag.take() is not None


def test_one_output_that_the_loss_leaves_out_does_no_harm() -> None:
    flag = a_flag()
    x = torch.ones(2, requires_grad=True)
    _unused, used = attach(flag, (x * 2, x * 3), of="Net")
    used.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0]
    assert flag.take() is not None


def test_the_output_may_be_changed_in_place() -> None:
    flag = a_flag()
    x = torch.ones(2, requires_grad=True)
    first, second = attach(flag, (x * 2, x * 3), of="Net")
    first.add_(1).mul_(second)
    first.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [6.0 + 9.0, 6.0 + 9.0]


def test_a_change_in_place_of_what_backward_needs_is_still_an_error() -> None:
    """A detached copy must not hide from autograd what it watches."""
    x = torch.ones(2, requires_grad=True)
    out = attach(a_flag(), x.exp(), of="Net")
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_second_derivatives_pass_through() -> None:
    x = torch.tensor([3.0], requires_grad=True)
    out = attach(a_flag(), x**3, of="Net").sum()
    (first,) = torch.autograd.grad(out, x, create_graph=True)
    first.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [18.0]


def test_an_output_without_any_tensor_is_refused_by_name() -> None:
    with pytest.raises(SetupError, match="Net returns a Scale in which no tensor is to be found"):
        attach(a_flag(), type("Scale", (), {})(), of="Net")


def test_nothing_is_fastened_where_no_gradient_flows() -> None:
    hook = Hook(a_flag())
    module = nn.Linear(1, 1)
    out = torch.ones(1)
    assert hook(module, (), out) is out
    with torch.no_grad():
        same = torch.ones(1, requires_grad=True)
        assert hook(module, (), same) is same


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_of_the_module_carries_no_flag(copied: Any) -> None:
    flag = a_flag()
    module = nn.Linear(1, 1)
    module.register_forward_hook(Hook(flag))
    twin = copied(module)
    twin(torch.ones(1)).sum().backward()
    assert flag.take() is None
    module(torch.ones(1)).sum().backward()
    assert flag.take() is not None


@given(
    wishes=st.lists(st.builds(Wish, stop=st.booleans(), checkpoint=st.booleans(), snapshot=st.booleans(), unready=st.booleans()), min_size=1, max_size=512),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_the_average_over_any_world_in_any_type_says_what_anybody_wants(wishes: list[Wish], dtype: torch.dtype) -> None:
    shares = torch.tensor([wish.values for wish in wishes], dtype=dtype) / len(wishes)
    average = shares.sum(dim=0, dtype=dtype)
    wanted = Wish()
    for wish in wishes:
        wanted |= wish
    assert Reader(len(wishes), late=False).read([average]) == wanted


def test_noise_of_a_compressing_hook_raises_no_flag() -> None:
    assert Reader(8, late=False).read([torch.tensor([1e-3, -1e-3, 0.05, 0.0])]) == Wish()


def raised(*names: str) -> Tensor:
    return torch.tensor([float(name in names) for name in ("stop", "checkpoint", "snapshot", "unready")])


def test_of_several_models_any_counts() -> None:
    assert Reader(1, late=False).read([raised("stop"), raised("snapshot")]) == Wish(stop=True, snapshot=True)


def test_a_late_reader_hears_each_step_one_step_later() -> None:
    reader = Reader(1, late=True)
    said = [reader.read([raised(*names)]) for names in ((), ("checkpoint",), ("stop",), ())]
    assert said == [Wish(), Wish(), Wish(checkpoint=True), Wish(stop=True)]


def test_a_late_reader_does_not_hear_twice_what_a_snapshot_has_served() -> None:
    """The rank that wants it says so in the next step as well, not knowing yet that it was heard."""
    reader = Reader(1, late=True)
    reader.read([raised("checkpoint")])
    assert reader.read([raised("checkpoint", "stop")]) == Wish(checkpoint=True)
    reader.served()
    assert reader.read([raised("checkpoint")]) == Wish(stop=True)
    assert reader.read([]) == Wish(checkpoint=True)


def test_a_prompt_reader_forgets_nothing() -> None:
    reader = Reader(1, late=False)
    reader.read([raised("checkpoint")])
    reader.served()
    assert reader.read([raised("checkpoint")]) == Wish(checkpoint=True)


@pytest.fixture
def signals() -> Iterator[Signals]:
    made = Signals()
    yield made
    made.close()


def test_signals_are_heard_and_the_handlers_before_are_called_and_put_back(signals: Signals) -> None:
    called: list[int] = []
    before = {number: signal.signal(number, lambda number, _frame: called.append(number)) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        ours = {number: signal.getsignal(number) for number in before}
        signals.listen()
        signals.listen()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (signals.stop, signals.checkpoint) == (False, True)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.stop
        assert called == [signal.SIGUSR1, signal.SIGTERM]
        signals.close()
        assert {number: signal.getsignal(number) for number in before} == ours
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_fork_hears_nothing(signals: Signals) -> None:
    signals.listen()
    signals._pid += 1
    os.kill(os.getpid(), signal.SIGTERM)
    assert not signals.stop


def test_only_a_sigterm_well_after_the_first_is_another_one(signals: Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    signals.listen()
    os.kill(os.getpid(), signal.SIGTERM)
    monkeypatch.setattr(flags.os, "kill", lambda _pid, number: killed.append(number))
    began = time.monotonic()
    monkeypatch.setattr(flags.time, "monotonic", lambda: began)
    signals._terminate()
    assert killed == []
    monkeypatch.setattr(flags.time, "monotonic", lambda: began + SAME_SECONDS + 0.1)
    signals._terminate()
    assert killed == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
