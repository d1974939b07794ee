"""Which job files are believed, and what command typed parameters make of them. The files are real ones, the program of the command is, too."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd.daemon.jobs import JobFiles, JobSpec, check_parameters, command, digest, load_jobs
from elasticd.daemon.parameters import ParameterSpec
from elasticd.daemon.trusted import LIMIT
from elasticd.errors import UsageError
from elasticd.rendezvous.records import TargetRecord, parse

if TYPE_CHECKING:
    from collections.abc import Callable

    Write = Callable[..., Path]

ME = os.geteuid()
ARGV = 'argv = ["/bin/true"]\n'
SIZES = "max_nodes = 2\n"
GOOD = 'name = "good"\n' + ARGV + SIZES

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it gives files to another user")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.d"
    path.mkdir()
    path.chmod(0o755)
    return path


@pytest.fixture
def write(directory: Path) -> Write:
    def write_file(name: str, text: str | bytes, mode: int = 0o644) -> Path:
        path = directory / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        path.chmod(mode)
        return path

    return write_file


def refused(files: JobFiles) -> dict[str, str]:
    return {item.file.name: item.why for item in files.refused}


# --- files -------------------------------------------------------------------------------------------------------------


def test_a_job_file_is_read_whole(directory: Path, write: Write) -> None:
    write(
        "mnist.toml",
        """
        name = "mnist"
        argv = ["/usr/bin/env", "python3", "-u", "train.py", "--lr", "{lr}", "--size={size}", "{{literal}}"]
        cwd = "/srv"
        slots = 2
        min_nodes = 2
        nodes = 3
        max_nodes = 4
        priority = -5
        stop_grace = 90
        env = { OMP_NUM_THREADS = "4" }
        health_check = ["/bin/true"]
        [parameters.lr]
        type = "float"
        default = 1e-3
        max = 1
        [parameters.size]
        type = "choice"
        choices = ["small", "v1.5+x"]
        """,
    )
    files = load_jobs(directory, owner=ME)
    assert files.refused == ()
    spec = files.jobs["mnist"]
    assert (spec.slots, spec.min_nodes, spec.nodes, spec.max_nodes, spec.priority, spec.stop_grace) == (2, 2, 3, 4, -5, 90.0)
    assert command(spec, {"size": "v1.5+x"}) == ("/usr/bin/env", "python3", "-u", "train.py", "--lr", "0.001", "--size=v1.5+x", "{literal}")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (ARGV + SIZES, "name: is missing"),
        ('name = "a/b"\n' + ARGV + SIZES, "name: String should match pattern '^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$'"),
        (GOOD + "max_node = 3\n", "max_node: unknown key; did you mean max_nodes?"),
        ('name = "a"\n' + ARGV + "max_node = 3\n", "max_node: unknown key; did you mean max_nodes?"),
        ('name = "a"\nargv = []\n' + SIZES, "argv: Tuple should have at least 1 item after validation, not 0"),
        ('name = "a"\nargv = "/bin/true"\n' + SIZES, "argv: Input should be a valid array"),
        ('name = "a"\nargv = ["true"]\n' + SIZES, "argv[0] 'true' is not an absolute path"),
        ('name = "a"\nargv = ["/bin/true", "a\\u0000b"]\n' + SIZES, "argv holds a NUL character"),
        ('name = "a"\nargv = ["/bin/not-there"]\n' + SIZES, "argv: cannot run '/bin/not-there': No such file or directory"),
        ('name = "a"\nargv = ["/etc/passwd"]\n' + SIZES, "argv: cannot run '/etc/passwd': not an executable file"),
        ('name = "a"\nargv = ["/usr"]\n' + SIZES, "argv: cannot run '/usr': not an executable file"),
        (
            'name = "a"\nargv = ["/usr/bin/env", "A=1", "python-not-there", "x.py"]\nenv = { PATH = "/usr/bin:/bin" }\n' + SIZES,
            "argv: '/usr/bin/env' finds no 'python-not-there' in /usr/bin:/bin",
        ),
        (GOOD + 'health_check = ["check.sh"]\n', "health_check[0] 'check.sh' is not an absolute path"),
        (GOOD + 'health_check = ["/opt/check.sh"]\n', "health_check: cannot run '/opt/check.sh': No such file or directory"),
        (GOOD + 'cwd = "here"\n', "cwd 'here' is not an absolute path"),
        (GOOD + "min_nodes = 3\n", "min_nodes 3 <= nodes 2 <= max_nodes 2 does not hold"),
        (GOOD + "nodes = 3\n", "min_nodes 1 <= nodes 3 <= max_nodes 2 does not hold"),
        (GOOD + "nodes = true\n", "nodes: Input should be a valid integer"),
        (GOOD + "ttl = 30\nfrozen_max = 20\n", "frozen_max 20 is shorter than the lease, ttl 30"),
        (GOOD + 'user = "nobody-by-that-name"\n', "user: 'nobody-by-that-name' is not known on this machine"),
        (GOOD + 'user = "root"\n', "user: 'root' is root; a job that is to run as root says so by allow_root = true"),
        (GOOD + 'env = { "A B" = "1" }\n', "env: 'A B' is no name for a variable; use letters, digits and '_', no digit first"),
        (GOOD + 'env = { A = "\\u0000" }\n', "env: A holds a NUL character"),
        (GOOD + "env = { A = 1 }\n", "env.A: Input should be a valid string"),
        ('name = "a"\nargv = ["/bin/true", "{lr}"]\n' + SIZES, "argv uses {lr}, which is not among parameters"),
        (
            'name = "a"\nargv = ["/bin/true", "{lrr}"]\n' + SIZES + '[parameters.lr]\ntype = "float"\n',
            "argv uses {lrr}, which is not among parameters; did you mean lr?",
        ),
        (GOOD + '[parameters.lr]\ntype = "float"\n', "parameter 'lr' is declared, and argv does not use it"),
        ('name = "a"\nargv = ["/bin/{p}"]\n' + SIZES, "argv[0] names the program, which no parameter may choose: it takes no braces"),
        ('name = "a"\nargv = ["/bin/true", "{a b}"]\n' + SIZES, "argv[1] '{a b}' has a lone '{'; write '{{' for a brace, '{name}' for a parameter"),
        ('name = "a"\nargv = ["/bin/true", "a}"]\n' + SIZES, "argv[1] 'a}' has a lone '}'; write '}}' for a brace, '{name}' for a parameter"),
        ("name = \n", "Invalid value (at line 1, column 8)"),
        (b"name = '\xff'\n", "'utf-8' codec can't decode byte 0xff in position 8: invalid start byte"),
        ("x = " + "[" * 100_000, "nested too deeply"),
        (b"#" * (LIMIT + 1), "larger than 256 KiB"),
    ],
)
def test_a_file_that_is_not_fit_is_refused_in_one_line_and_takes_no_other_with_it(directory: Path, write: Write, text: str | bytes, why: str) -> None:
    write("bad.toml", text)
    write("good.toml", GOOD)
    if isinstance(text, str) and text.startswith(GOOD):
        write("good.toml", GOOD.replace('"good"', '"other"'))
    files = load_jobs(directory, owner=ME)
    assert refused(files) == {"bad.toml": why}
    assert len(files.jobs) == 1


OURS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "ELASTICD_JOB", "CUDA_VISIBLE_DEVICES", "NOTIFY_SOCKET")


@pytest.mark.parametrize("name", OURS)
def test_variables_that_elasticd_sets_itself_are_refused(directory: Path, write: Write, name: str) -> None:
    write("bad.toml", GOOD + f'env = {{ {name} = "1" }}\n')
    assert refused(load_jobs(directory, owner=ME)) == {"bad.toml": f"env: {name} is for elasticd to set"}


@pytest.mark.parametrize(
    ("declared", "why"),
    [
        ('type = "text"', "parameters.p.type: Input should be 'int', 'float', 'bool' or 'choice'"),
        ('type = "int"\nmin = 3\nmax = 2', "parameters.p: min 3 is greater than max 2"),
        ('type = "bool"\nmin = 0', "parameters.p: min and max are for numbers, not for bool"),
        ('type = "int"\nmax = nan', "parameters.p.max: Input should be a finite number"),
        ('type = "int"\nmx = 3', "parameters.p.mx: unknown key; did you mean max?"),
        ('type = "int"\nchoices = ["a"]', "parameters.p: choices are for type choice, not for int"),
        ('type = "choice"', "parameters.p: type choice needs choices"),
        ('type = "choice"\nchoices = []', "parameters.p: type choice needs choices"),
        ('type = "choice"\nchoices = ["a", "a"]', "parameters.p: a choice is there twice"),
        (
            'type = "choice"\nchoices = ["a b"]',
            "parameters.p: choice 'a b' is not made of letters, digits, '_', '.', '+' and '-' alone, at most 64, a letter or digit first",
        ),
        (
            'type = "choice"\nchoices = ["--x"]',
            "parameters.p: choice '--x' is not made of letters, digits, '_', '.', '+' and '-' alone, at most 64, a letter or digit first",
        ),
        ('type = "choice"\nchoices = ["a", "b"]\ndefault = "c"', "parameters.p: default 'c' is not allowed; give one of a, b"),
        ('type = "int"\nmin = 1\nmax = 8\ndefault = 9', "parameters.p: default 9 is not allowed; give a whole number from 1 to 8"),
        ('type = "int"\ndefault = 1.5', "parameters.p: default 1.5 is not allowed; give a whole number"),
        ('type = "int"\ndefault = "1"', "parameters.p: default '1' is not allowed; give a whole number"),
        ('type = "float"\ndefault = true', "parameters.p: default True is not allowed; give a number"),
        ('type = "bool"\ndefault = 1', "parameters.p: default 1 is not allowed; give true or false"),
        ('type = "bool"\ndefault = "true"', "parameters.p: default 'true' is not allowed; give true or false"),
    ],
)
def test_a_parameter_that_makes_no_sense_is_refused(directory: Path, write: Write, declared: str, why: str) -> None:
    write("bad.toml", f'name = "a"\nargv = ["/bin/true", "{{p}}"]\n{SIZES}[parameters.p]\n{declared}\n')
    assert refused(load_jobs(directory, owner=ME)) == {"bad.toml": why}


def test_two_files_of_one_job_are_both_refused_and_each_names_the_other(directory: Path, write: Write) -> None:
    write("a.toml", GOOD)
    write("b.toml", GOOD + "priority = 3\n")
    write("c.toml", GOOD.replace('"good"', '"other"'))
    files = load_jobs(directory, owner=ME)
    assert refused(files) == {
        "a.toml": "name: job good is also defined in b.toml, and neither counts",
        "b.toml": "name: job good is also defined in a.toml, and neither counts",
    }
    assert list(files.jobs) == ["other"]
    assert set(files.refused_jobs) == {"good"}


def test_a_refusal_tells_which_job_it_is_about(directory: Path, write: Write) -> None:
    write("stem.toml", "name = \n")
    write("file.toml", 'name = "named"\n')
    write("no name.toml", "\n")
    write("taken.toml", 'name = "good"\n')
    write("good.toml", GOOD)
    files = load_jobs(directory, owner=ME)
    assert {item.file.name: item.job for item in files.refused} == {"stem.toml": "stem", "file.toml": "named", "no name.toml": "", "taken.toml": "good"}
    assert set(files.refused_jobs) == {"stem", "named"}, "job good has a file that is believed"
    assert files.refused_jobs["named"] == f"{directory}/file.toml: argv: is missing"


def test_only_toml_files_that_are_not_hidden_are_looked_at(directory: Path, write: Write) -> None:
    write("good.toml", GOOD)
    for name in ("README", "old.toml~", ".hidden.toml", "a.json"):
        write(name, "rubbish")
    files = load_jobs(directory, owner=ME)
    assert (list(files.jobs), files.refused) == (["good"], ())


def test_a_file_of_the_largest_size_is_read(directory: Path, write: Write) -> None:
    write("good.toml", GOOD + "#" * (LIMIT - len(GOOD)))
    assert list(load_jobs(directory, owner=ME).jobs) == ["good"]


def test_a_file_that_others_can_write_is_refused(directory: Path, write: Write) -> None:
    write("group.toml", GOOD, mode=0o664)
    write("world.toml", GOOD, mode=0o646)
    assert refused(load_jobs(directory, owner=ME)) == {
        "group.toml": "others can write it (mode 0664); chmod go-w",
        "world.toml": "others can write it (mode 0646); chmod go-w",
    }


def test_a_directory_that_others_can_write_gives_no_jobs(directory: Path, write: Write) -> None:
    write("good.toml", GOOD)
    directory.chmod(0o775)
    files = load_jobs(directory, owner=ME)
    assert files.jobs == {}
    assert [str(item) for item in files.refused] == [f"{directory}: others can write it (mode 0775); chmod go-w"]


def test_a_directory_that_is_not_there_gives_no_jobs(tmp_path: Path) -> None:
    files = load_jobs(tmp_path / "none", owner=ME)
    assert files.jobs == {}
    assert [str(item) for item in files.refused] == [f"{tmp_path}/none: cannot read the directory: No such file or directory"]


def test_a_file_of_another_owner_than_asked_for_is_refused(directory: Path, write: Write) -> None:
    write("good.toml", GOOD)
    files = load_jobs(directory, owner=ME + 1)
    assert [str(item) for item in files.refused] == [f"{directory}: belongs to uid {ME}, and only uid {ME + 1} is believed"]


@root_only
def test_another_users_file_in_roots_directory_is_refused(directory: Path, write: Write) -> None:
    os.chown(write("theirs.toml", GOOD), 65534, 65534)
    write("good.toml", GOOD)
    files = load_jobs(directory)
    assert refused(files) == {"theirs.toml": "belongs to uid 65534, and only uid 0 is believed"}
    assert list(files.jobs) == ["good"]


@root_only
def test_roots_file_in_another_users_directory_is_refused(directory: Path, write: Write) -> None:
    write("good.toml", GOOD)
    os.chown(directory, 65534, 65534)
    files = load_jobs(directory)
    assert files.jobs == {}
    assert [str(item) for item in files.refused] == [f"{directory}: belongs to uid 65534, and only uid 0 is believed"]


@root_only
def test_root_as_the_user_of_a_job_must_be_allowed_in_its_file(directory: Path, write: Write) -> None:
    write("good.toml", GOOD + 'user = "root"\nallow_root = true\n')
    assert load_jobs(directory).jobs["good"].user == "root"


@root_only
def test_a_program_in_a_place_that_only_the_jobs_user_may_see_is_not_called_missing() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own is closed to others
        directory = Path(name) / "jobs.d"
        directory.mkdir()
        (Path(name) / "private").mkdir(mode=0o700)
        (directory / "good.toml").write_text(f'name = "a"\nargv = ["{name}/private/train"]\n{SIZES}')
        for path in (Path(name), directory, directory / "good.toml"):
            path.chmod(0o755)
        # Root sees that there is none. And Python has loaded by then what it may need, from where others may not go.
        assert refused(load_jobs(directory)) == {"good.toml": f"argv: cannot run '{name}/private/train': No such file or directory"}
        os.seteuid(65534)
        try:
            files = load_jobs(directory)
        finally:
            os.seteuid(0)
        assert (list(files.jobs), files.refused) == (["a"], ())


def test_a_link_within_the_directory_is_followed(directory: Path, write: Write) -> None:
    write("v2", GOOD)
    (directory / "current").symlink_to(directory / "v2")
    (directory / "good.toml").symlink_to("current")
    files = load_jobs(directory, owner=ME)
    assert (list(files.jobs), files.refused) == (["good"], ())


@pytest.mark.parametrize("link", ["../outside", "/etc/passwd", "sub/inside", "..", "/outside.toml", "../jobs.d/v2"])
def test_a_link_that_leads_out_of_the_directory_is_refused(directory: Path, write: Write, tmp_path: Path, link: str) -> None:
    (tmp_path / "outside").write_text(GOOD)
    (directory / "sub").mkdir()
    (directory / "sub" / "inside").write_text(GOOD)
    write("v2", GOOD)
    (directory / "outside.toml").symlink_to(link)
    assert refused(load_jobs(directory, owner=ME)) == {"outside.toml": f"a link to {link!r}, outside the directory"}


def test_links_in_a_circle_and_to_nothing_are_refused(directory: Path) -> None:
    (directory / "a.toml").symlink_to("b.toml")
    (directory / "b.toml").symlink_to("a.toml")
    (directory / "c.toml").symlink_to("none")
    assert refused(load_jobs(directory, owner=ME)) == {
        "a.toml": "a link that leads through too many others",
        "b.toml": "a link that leads through too many others",
        "c.toml": "cannot read it: No such file or directory",
    }


def test_what_is_no_regular_file_is_refused_without_waiting_for_it(directory: Path) -> None:
    os.mkfifo(directory / "pipe.toml", 0o644)
    (directory / "folder.toml").mkdir()
    assert refused(load_jobs(directory, owner=ME)) == {"folder.toml": "not a regular file", "pipe.toml": "not a regular file"}


def test_a_file_name_that_is_no_text_does_not_reach_a_record(directory: Path, write: Write) -> None:
    write("ok.toml", GOOD)
    raw = os.fsencode(directory) + b"/\xff\x1b[31m.toml"
    Path(os.fsdecode(raw)).write_text("rubbish")
    (item,) = load_jobs(directory, owner=ME).refused
    assert str(item).encode() == f"{directory}/??[31m.toml: Expected '=' after a key in a key/value pair (at end of document)".encode()
    assert item.job == ""


# --- parameters and the command ----------------------------------------------------------------------------------------


def job(**parameters: dict[str, Any]) -> JobSpec:
    argv = ("/bin/echo", *(f"--{name}={{{name}}}" for name in parameters))
    return JobSpec(name="mnist", argv=argv, max_nodes=2, parameters={name: ParameterSpec(**declared) for name, declared in parameters.items()})


TRAIN = job(
    lr={"type": "float", "default": 0.1, "min": 0, "max": 1},
    epochs={"type": "int", "min": 1, "max": 100},
    amp={"type": "bool", "default": False},
    size={"type": "choice", "choices": ("small", "8"), "default": "small"},
)


@pytest.mark.parametrize(
    ("given_", "accepted", "arguments"),
    [
        ({"epochs": 3}, {"epochs": 3}, ("--lr=0.1", "--epochs=3", "--amp=false", "--size=small")),
        ({"epochs": "3", "lr": "3e-4", "amp": "true"}, {"lr": 0.0003, "epochs": 3, "amp": True}, ("--lr=0.0003", "--epochs=3", "--amp=true", "--size=small")),
        ({"epochs": 100, "lr": 1, "size": 8}, {"lr": 1, "epochs": 100, "size": "8"}, ("--lr=1", "--epochs=100", "--amp=false", "--size=8")),
        ({"epochs": 1, "lr": ".5"}, {"lr": 0.5, "epochs": 1}, ("--lr=0.5", "--epochs=1", "--amp=false", "--size=small")),
    ],
)
def test_parameters_become_arguments(given_: dict[str, object], accepted: dict[str, object], arguments: tuple[str, ...]) -> None:
    values = check_parameters(TRAIN, given_)
    assert list(values.items()) == list(accepted.items()), "in the order of the file"
    assert [type(value) for value in values.values()] == [type(value) for value in accepted.values()]
    assert command(TRAIN, values) == ("/bin/echo", *arguments)


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({}, "parameter epochs of job mnist has no default and is not given; give a whole number from 1 to 100"),
        ({"epoch": 3}, "job mnist has no parameter 'epoch'; did you mean epochs?; declared: lr, epochs, amp, size"),
        ({"zzz\n\x1b": 3}, "job mnist has no parameter 'zzz\\n\\x1b'; declared: lr, epochs, amp, size"),
        ({"epochs": 0}, "parameter epochs of job mnist: 0 is not allowed; give a whole number from 1 to 100"),
        ({"epochs": 3.0}, "parameter epochs of job mnist: 3.0 is not allowed; give a whole number from 1 to 100"),
        ({"epochs": "3.0"}, "parameter epochs of job mnist: '3.0' is not allowed; give a whole number from 1 to 100"),
        ({"epochs": True}, "parameter epochs of job mnist: True is not allowed; give a whole number from 1 to 100"),
        ({"epochs": None}, "parameter epochs of job mnist: None is not allowed; give a whole number from 1 to 100"),
        ({"epochs": "\u0661"}, "parameter epochs of job mnist: '\u0661' is not allowed; give a whole number from 1 to 100"),
        ({"epochs": 1, "lr": "nan"}, "parameter lr of job mnist: 'nan' is not allowed; give a number from 0 to 1"),
        ({"epochs": 1, "lr": float("inf")}, "parameter lr of job mnist: inf is not allowed; give a number from 0 to 1"),
        ({"epochs": 1, "lr": "1 "}, "parameter lr of job mnist: '1 ' is not allowed; give a number from 0 to 1"),
        ({"epochs": 1, "lr": "1_0"}, "parameter lr of job mnist: '1_0' is not allowed; give a number from 0 to 1"),
        ({"epochs": 1, "amp": 1}, "parameter amp of job mnist: 1 is not allowed; give true or false"),
        ({"epochs": 1, "amp": "yes"}, "parameter amp of job mnist: 'yes' is not allowed; give true or false"),
        ({"epochs": 1, "size": "large"}, "parameter size of job mnist: 'large' is not allowed; give one of small, 8"),
        ({"epochs": 1, "size": ["small"]}, "parameter size of job mnist: ['small'] is not allowed; give one of small, 8"),
        ({"epochs": 1, "size": "; rm -rf /"}, "parameter size of job mnist: '; rm -rf /' is not allowed; give one of small, 8"),
    ],
)
def test_a_parameter_that_is_not_allowed_is_named_with_what_is(given_: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_parameters(TRAIN, given_)
    assert str(caught.value) == said


def test_a_job_without_parameters_says_so() -> None:
    with pytest.raises(UsageError, match=r"^job mnist has no parameter 'lr'; declared: none$"):
        check_parameters(job(), {"lr": 1})


def test_the_command_itself_refuses_what_the_file_does_not_allow() -> None:
    """What is in etcd may have been written by anybody who can write there, or before the file changed."""
    with pytest.raises(UsageError, match="parameter epochs of job mnist: 1000 is not allowed"):
        command(TRAIN, {"epochs": 1000})


@pytest.mark.parametrize("huge", [2**53 + 1, -(2**60), "9" * 19, "9" * 10_000])
def test_a_number_that_json_would_change_is_not_allowed(huge: object) -> None:
    with pytest.raises(UsageError, match="is not allowed; give a whole number"):
        check_parameters(job(n={"type": "int"}), {"n": huge})


def test_braces_and_a_parameter_within_an_argument() -> None:
    spec = JobSpec(name="a", argv=("/bin/echo", "{{n}}={n}", "}}{{{n}{n}", ""), max_nodes=1, parameters={"n": ParameterSpec(type="int")})
    assert command(spec, {"n": -4}) == ("/bin/echo", "{n}=-4", "}{-4-4", "")


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=30), max_size=5))
def test_an_argument_of_the_file_is_one_argument_of_the_command(arguments: list[str]) -> None:
    """Whatever is in it: spaces, quotes, dollars, braces written twice. Nothing is split or interpreted."""
    written = tuple(argument.replace("{", "{{").replace("}", "}}") for argument in arguments)
    assert command(JobSpec(name="a", argv=("/bin/echo", *written), max_nodes=1), {}) == ("/bin/echo", *arguments)


def test_a_program_gets_the_arguments_as_they_are() -> None:
    odd = ("$HOME `id` 'x", "*", "", "a\nb")
    argv = ("/usr/bin/printf", "%s;", *odd, "--lr={lr}")
    spec = JobSpec(name="a", argv=argv, max_nodes=1, parameters={"lr": ParameterSpec(type="float")})
    done = subprocess.run(command(spec, check_parameters(spec, {"lr": "3e-4"})), capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.split(";") == [*odd, "--lr=0.0003", ""]


@given(
    st.one_of(
        st.integers(-(2**53), 2**53).map(lambda value: ("int", value)),
        st.floats(allow_nan=False, allow_infinity=False).map(lambda value: ("float", value)),
        st.booleans().map(lambda value: ("bool", value)),
    )
)
def test_a_value_is_the_same_after_its_way_through_etcd_and_as_text(typed: tuple[str, Any]) -> None:
    kind, value = typed
    spec = job(p={"type": kind})
    record = TargetRecord(scope="c/mnist", min_nodes=1, max_nodes=2, desired=1, parameters=check_parameters(spec, {"p": value}))
    parameters = parse(TargetRecord, "target", record.to_bytes(), "c/mnist").parameters
    assert check_parameters(spec, parameters) == {"p": value}
    assert type(check_parameters(spec, parameters)["p"]) is type(value)
    (_, argument) = command(spec, parameters)
    assert check_parameters(spec, {"p": argument.removeprefix("--p=")}) == {"p": value}


# --- digest ------------------------------------------------------------------------------------------------------------


def test_a_digest_changes_with_what_an_agent_is_started_with() -> None:
    spec = job(lr={"type": "float", "default": 0.1})
    base = digest(spec, {})
    assert len(base) == 16
    assert digest(spec, {"lr": 0.1}) == base, "the default, said aloud"
    changes: list[tuple[str, Any]] = [
        ("argv", ("/bin/echo", "-x", "{lr}")),
        ("env", {"A": "1"}),
        ("cwd", Path("/tmp")),
        ("user", "nobody"),
        ("slots", 1),
        ("stop_grace", 5.0),
    ]
    others = [digest(spec.model_copy(update={field: value}), {}) for field, value in changes] + [digest(spec, {"lr": 0.2})]
    assert len({base, *others}) == len(changes) + 2


def test_a_digest_does_not_change_with_sizes_priority_or_checks() -> None:
    spec = job()
    for field, value in (("priority", 5), ("max_nodes", 9), ("health_check", ("/bin/true",)), ("max_restarts", 0)):
        assert digest(spec.model_copy(update={field: value}), {}) == digest(spec, {})
