"""Settings of training: what each layer may say, which one counts, and what a mistake is told."""

from __future__ import annotations

import subprocess
import sys
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import ValidationError

from trainer.errors import SetupError
from trainer.settings import ALIKE, SAFE, VARIABLE, Backend, Compress, Layer, Settings, allowed, check, from_environment, from_text, merge, plain, unit
from trainer.settings_page import page

ROOT = Path(__file__).resolve().parents[2]
ORDER = [Layer.CLUSTER, Layer.JOB, Layer.FILE, Layer.ENVIRONMENT, Layer.COMMAND]
ETCD = [Layer.CLUSTER, Layer.JOB]
FREE: dict[str, Any] = {
    "checkpoint_dir": "/srv/ckpt",
    "checkpoint_url": "s3://bucket/prefix",
    "gloo_interface": "eth0",
    "nccl_interface": "ib0",
    "telemetry_file": "/srv/telemetry.jsonl",
}
pytestmark = pytest.mark.timeout(60)


def refused(*layers: tuple[str, dict[str, Any]]) -> str:
    with pytest.raises(SetupError) as caught:
        merge(layers)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- what there is -------------------------------------------------------------------------------------------------------


def test_without_a_layer_everything_is_as_its_default_and_says_so() -> None:
    settings, origins = merge([])
    assert settings == Settings()
    assert origins == dict.fromkeys(Settings.model_fields, "default")
    assert (settings.backend, settings.compress, settings.process_group_timeout_s) == (Backend.AUTO, Compress.NONE, 600.0)


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_has_a_description_and_every_number_a_unit_and_a_range(name: str) -> None:
    field = Settings.model_fields[name]
    assert field.description
    if field.annotation in (int, float):
        assert unit(name)
        assert {"Ge", "Le"} <= {type(one).__name__ for one in field.metadata}
    assert check(Layer.FILE, {name: value} if (value := plain(field.default)) not in (None, "") else {}) is not None


def test_etcd_may_hold_just_the_numbers_booleans_and_words_of_a_list() -> None:
    """By their types, so that a new setting is sorted by what it is, and not by who remembers to."""
    for name, field in Settings.model_fields.items():
        kind = field.annotation
        assert (name in SAFE) == (isinstance(kind, type) and (kind in (bool, int, float) or issubclass(kind, Enum))), name
    assert set(Settings.model_fields) - SAFE == set(FREE)


def test_what_a_node_may_have_for_itself_need_not_be_alike() -> None:
    own = {"gloo_interface", "nccl_interface", "checkpoint_dir", "snapshot_memory_percent", "snapshot_memory_mib", "expandable_segments"}
    own |= {"telemetry_every_s", "telemetry_file"}
    assert set(Settings.model_fields) - ALIKE == own


def test_settings_do_not_change_and_take_nothing_unknown() -> None:
    with pytest.raises(ValidationError):
        Settings().backend = Backend.GLOO  # type: ignore[misc]
    with pytest.raises(ValidationError):
        Settings(bakend="gloo")  # type: ignore[call-arg]


def test_settings_survive_being_written_as_json() -> None:
    settings, _ = merge([(Layer.FILE, {**FREE, "backend": "nccl", "snapshots": False})])
    assert Settings.model_validate_json(settings.model_dump_json()) == settings


def test_the_module_does_not_load_torch() -> None:
    code = "import sys, trainer.settings, trainer.settings_page; assert not {'torch', 'elasticd'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (0, "")


# --- which layer counts --------------------------------------------------------------------------------------------------


def test_each_layer_lies_above_those_before_it() -> None:
    values = [100, 200, 300, "400", "500"]
    for top in range(len(ORDER)):
        layers = [(layer, {"process_group_timeout_s": value}) for layer, value in zip(ORDER, values, strict=True)][: top + 1]
        settings, origins = merge(layers)
        assert settings.process_group_timeout_s == (top + 1) * 100
        assert origins["process_group_timeout_s"] == ORDER[top].value
        assert set(origins.values()) == {"default", ORDER[top].value}


def of_kind(name: str) -> st.SearchStrategy[Any]:
    """Values that a setting takes, as files and etcd have them."""
    field = Settings.model_fields[name]
    bounds = {bound: getattr(one, bound) for one in field.metadata for bound in ("ge", "le") if hasattr(one, bound)}
    if field.annotation is bool:
        return st.booleans()
    if field.annotation is int:
        return st.integers(bounds["ge"], bounds["le"])
    if field.annotation is float:
        # Below and above what the ordering asks for, so that it holds; that it is asked for is tested by itself.
        least, most = {"stop_step_timeout_s": (0, 400), "process_group_timeout_s": (500, 86_400)}.get(name, (bounds["ge"], bounds["le"]))
        return st.floats(least, most)
    if name in FREE:
        return st.just(FREE[name])
    assert isinstance(field.annotation, type)
    return st.sampled_from([word.value for word in field.annotation])  # type: ignore[attr-defined]


def as_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value) if isinstance(value, float) else str(value)


def a_layer(layer: Layer) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    names = sorted(SAFE) if layer in ETCD else list(Settings.model_fields)
    values = st.fixed_dictionaries({}, optional={name: of_kind(name) for name in names})
    if layer in (Layer.ENVIRONMENT, Layer.COMMAND):
        values = values.map(lambda given: {name: as_text(value) for name, value in given.items()})
    return values.map(lambda given: (layer.value, given))


@given(st.tuples(*map(a_layer, ORDER)))
@hypothesis_settings(max_examples=150, deadline=None)
def test_each_setting_is_from_the_highest_layer_that_says_it(layers: tuple[tuple[str, dict[str, Any]], ...]) -> None:
    settings, origins = merge(layers)
    for name in Settings.model_fields:
        saying = [(layer, given[name]) for layer, given in layers if name in given]
        value = plain(getattr(settings, name))
        if not saying:
            assert (value, origins[name]) == (plain(Settings.model_fields[name].default), "default")
            continue
        layer, said = saying[-1]
        assert origins[name] == layer
        assert as_text(value) == (as_text(float(said)) if isinstance(value, float) else as_text(said))


@given(st.tuples(*map(a_layer, ORDER)))
@hypothesis_settings(max_examples=50, deadline=None)
def test_merging_says_the_same_twice_and_an_empty_layer_changes_nothing(layers: tuple[tuple[str, dict[str, Any]], ...]) -> None:
    once = merge(layers)
    assert merge(layers) == once
    assert merge([one for layer in layers for one in (layer, (Layer.COMMAND.value, {}))]) == once


JUNK = st.one_of(st.none(), st.booleans(), st.integers(-(10**20), 10**20), st.floats(), st.text(max_size=20), st.lists(st.integers(), max_size=2))


@given(st.sampled_from([*ORDER, "somebody"]), st.dictionaries(st.sampled_from([*Settings.model_fields, "x"]) | st.text(max_size=8), JUNK, max_size=3))
@hypothesis_settings(max_examples=300, deadline=None)
def test_whatever_a_layer_says_is_taken_or_refused_in_one_line(layer: str, values: dict[str, Any]) -> None:
    try:
        settings, origins = merge([(layer, values)])
    except SetupError:
        assert refused((layer, values)).isprintable()
        return
    assert {name for name, origin in origins.items() if origin == layer} == set(values)
    assert Settings.model_validate(settings.model_dump()) == settings
    if layer in ETCD or layer == "somebody":
        assert set(values) <= SAFE


# --- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [*ETCD, "somebody"])
@pytest.mark.parametrize("name", FREE)
def test_what_names_a_path_a_url_or_an_interface_is_refused_in_etcd(layer: str, name: str) -> None:
    """Also from a layer that nobody knows."""
    said = refused((layer, {name: FREE[name]}))
    assert said.startswith(f"{name} = {FREE[name]!r} in ")
    assert "etcd may hold numbers, yes or no, and words of a list" in said
    assert said.endswith("put it into the table [trainer] of the job file on each node")


@pytest.mark.parametrize("name", FREE)
@pytest.mark.parametrize("layer", [Layer.FILE, Layer.ENVIRONMENT, Layer.COMMAND])
def test_it_is_taken_from_the_layers_of_the_node_itself(layer: Layer, name: str) -> None:
    settings, origins = merge([(layer, {name: FREE[name]})])
    assert (plain(getattr(settings, name)), origins[name]) == (FREE[name], layer.value)


@pytest.mark.parametrize(
    ("layer", "values", "said"),
    [
        (Layer.FILE, {"backend": "glo"}, "backend = 'glo' in the file is not allowed; give one of auto, gloo, nccl"),
        (Layer.CLUSTER, {"backend": "mpi"}, "backend = 'mpi' in etcd (config/cluster) is not allowed; give one of auto, gloo, nccl"),
        (Layer.JOB, {"snapshots": 1}, "snapshots = 1 in etcd (config/job) is not allowed; give true or false"),
        (Layer.FILE, {"bakend": "gloo"}, "'bakend' in the file is no setting; did you mean backend?; docs/configuration.md lists them all"),
        (Layer.FILE, {"zzz": 1}, "'zzz' in the file is no setting; docs/configuration.md lists them all"),
        (Layer.FILE, {"snapshot_every": True}, "snapshot_every = True in the file is not allowed; give a whole number (steps) from 0 to 1000000"),
        (Layer.FILE, {"snapshot_every": 3.0}, "snapshot_every = 3.0 in the file is not allowed; give a whole number (steps) from 0 to 1000000"),
        (Layer.FILE, {"snapshot_every": "3"}, "snapshot_every = '3' in the file is not allowed; give a whole number (steps) from 0 to 1000000"),
        (Layer.COMMAND, {"snapshot_every": "-1"}, "snapshot_every = '-1' on the command line is not allowed; give a whole number (steps) from 0 to 1000000"),
        (Layer.COMMAND, {"snapshot_every": "1.0"}, "snapshot_every = '1.0' on the command line is not allowed; give a whole number (steps) from 0 to 1000000"),
        (Layer.FILE, {"process_group_timeout_s": 0}, "process_group_timeout_s = 0 in the file is not allowed; give a number (s) from 1 to 86400"),
        (Layer.FILE, {"process_group_timeout_s": float("nan")}, "process_group_timeout_s = nan in the file is not allowed"),
        (Layer.FILE, {"process_group_timeout_s": float("inf")}, "process_group_timeout_s = inf in the file is not allowed"),
        (Layer.FILE, {"process_group_timeout_s": 10**400}, "is not allowed; give a number (s) from 1 to 86400"),
        (
            Layer.ENVIRONMENT,
            {"checkpoint_every_s": "soon"},
            "checkpoint_every_s = 'soon' in the environment (ELASTICD_TRAINER_CHECKPOINT_EVERY_S) is not allowed; give a number (s) from 0 to 604800",
        ),
        (Layer.FILE, {"checkpoint_dir": "ckpt"}, "checkpoint_dir = 'ckpt' in the file is not allowed (not an absolute path); give an absolute path"),
        (Layer.FILE, {"checkpoint_dir": "/a\0b"}, "(not an absolute path)"),
        (Layer.FILE, {"checkpoint_url": "bucket"}, "(not a URL such as s3://bucket/prefix)"),
        (Layer.FILE, {"gloo_interface": "eth0,eth1"}, "give the name of a network interface"),
        (Layer.FILE, {"gloo_interface": "a" * 16}, "give the name of a network interface"),
        (Layer.FILE, {"compress": ["fp16"]}, "compress = ['fp16'] in the file is not allowed; give one of none, fp16, bf16"),
    ],
)
def test_a_mistake_is_told_with_layer_name_value_and_remedy(layer: Layer, values: dict[str, Any], said: str) -> None:
    assert said in refused((layer, values))


def test_a_password_in_a_url_is_refused_and_not_shown() -> None:
    said = refused((Layer.FILE, {"checkpoint_url": "s3://me:secret@bucket/x"}))
    assert "a name or password in it" in said
    assert "secret" not in said


def test_values_that_do_not_fit_each_other_are_told_with_the_layer_of_each() -> None:
    said = refused((Layer.JOB, {"process_group_timeout_s": 20}), (Layer.FILE, {"stop_step_timeout_s": 25}))
    assert said.startswith("stop_step_timeout_s 25 < process_group_timeout_s 20 does not hold: ")
    assert said.endswith("stop_step_timeout_s is from file, process_group_timeout_s is from etcd:job; change one of them")
    settings, _ = merge(
        [(Layer.JOB, {"process_group_timeout_s": 20}), (Layer.FILE, {"stop_step_timeout_s": 25}), (Layer.COMMAND, {"stop_step_timeout_s": "19"})]
    )
    assert settings.stop_step_timeout_s == 19


# --- text ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("snapshots", "TRUE", True),
        ("snapshots", "no", False),
        ("snapshots", "0", False),
        ("snapshots", "maybe", "maybe"),
        ("snapshot_every", "+12", 12),
        ("snapshot_every", "1e3", "1e3"),
        ("checkpoint_every_s", "1e3", 1000.0),
        ("checkpoint_every_s", "12", 12),
        ("checkpoint_every_s", "\u0661", "\u0661"),
        ("checkpoint_every_s", "1_0", "1_0"),
        ("checkpoint_every_s", "nan", "nan"),
        ("backend", "gloo", "gloo"),
        ("checkpoint_dir", "/1", "/1"),
        ("unknown", "1", "1"),
    ],
)
def test_text_means_what_it_says_or_stays_text(name: str, text: str, value: Any) -> None:
    meant = from_text(name, text)
    assert (meant, type(meant)) == (value, type(value))


def test_the_environment_names_settings_in_capitals() -> None:
    environ = {"PATH": "/bin", f"{VARIABLE}BACKEND": "gloo", f"{VARIABLE}SNAPSHOT_EVERY": "5"}
    assert from_environment(environ) == {"backend": "gloo", "snapshot_every": "5"}
    settings, origins = merge([(Layer.ENVIRONMENT, from_environment(environ))])
    assert (settings.backend, settings.snapshot_every, origins["backend"]) == (Backend.GLOO, 5, "environment")


@pytest.mark.parametrize("variable", ["ELASTICD_TRAINER_BAKEND", "ELASTICD_TRAINER_backend", "ELASTICD_TRAINER_"])
def test_a_variable_that_names_no_setting_is_refused(variable: str) -> None:
    """A misspelt one would else count for nothing, unseen."""
    with pytest.raises(SetupError, match=f"{variable} in the environment names no setting.*unset it"):
        from_environment({variable: "gloo"})


# --- the page ------------------------------------------------------------------------------------------------------------


def test_the_page_of_the_documentation_is_up_to_date() -> None:
    """If not: python -m trainer.settings_page > docs/configuration.md."""
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == page()


def test_the_page_names_every_setting_with_what_it_takes() -> None:
    rows = {line.split("|")[1].strip(): line for line in page().splitlines() if line.startswith("| `")}
    for name in Settings.model_fields:
        assert allowed(name).replace("|", "\\|") in rows[f"`{name}`"]
        assert rows[f"`{name}`"].count(" | ") == 5
