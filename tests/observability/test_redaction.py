"""Secrets do not get into what is written, and what is none stays."""

from __future__ import annotations

import json
import string
import time
from collections.abc import Iterator

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from elasticd.observability.fields import clean
from elasticd.observability.redaction import HIDDEN, VALUE_MOST, Redactor, Secrecy, forget, hidden, know, redacted, secrecy

pytestmark = pytest.mark.timeout(30)

PEM = "-----BEGIN {0}PRIVATE KEY-----\nMIIEvQIBADANBgkqh\nkiG9w0BAQEFAAS\n-----END {0}PRIVATE KEY-----"
SURE = ["password", "PGPASSWORD", "db_password", "MYSQL_PWD", "passwd", "passphrase", "secret", "client_secret", "AWS_SECRET_ACCESS_KEY", "secret_value"]
SURE += ["api_key", "apiKey", "X-API-Key", "OPENAI_API_KEY", "authorization", "Proxy-Authorization", "private_key", "SMTP_PASS", "cookie", "Set-Cookie"]
SURE += ["REDISCLI_AUTH", "password2", "PASSWORD_OLD"]
LIKELY = ["token", "HF_TOKEN", "access-token", "authToken", "credential", "credentials", "WANDB_TOKEN"]
NONE = ["token_count", "tokens", "tokens_per_s", "max_tokens", "pad_token_id", "tokenizer", "TOKENIZERS_PARALLELISM", "password_file", "secret_name"]
NONE += ["CREDENTIALS_DIRECTORY", "SSH_AUTH_SOCK", "PWD", "OLDPWD", "key", "keys", "forward_pass", "passed", "author", "path", "node", "", "...", "monkey"]


@pytest.fixture(autouse=True)
def knowing_nothing() -> Iterator[None]:
    forget()
    yield
    forget()


# --- names


@pytest.mark.parametrize("name", SURE)
def test_a_name_that_leaves_no_doubt_is_known(name: str) -> None:
    assert secrecy(name) is Secrecy.SURE


@pytest.mark.parametrize("name", LIKELY)
def test_a_name_that_has_other_uses_is_likely_one(name: str) -> None:
    assert secrecy(name) is Secrecy.LIKELY


@pytest.mark.parametrize("name", NONE)
def test_a_name_that_only_speaks_of_secrets_is_none(name: str) -> None:
    assert secrecy(name) is Secrecy.NONE


@pytest.mark.parametrize("name", [*SURE, *LIKELY])
@pytest.mark.parametrize(
    "form", ["{}=hunter2x", "--{} hunter2x", "--{}=hunter2x", "{}: hunter2x", '{{"{}": "hunter2x"}}', "{{'{}': 'hunter2x', 'a': 1}}", "a?{}=hunter2x&b=1"]
)
@pytest.mark.parametrize("before", ["", "step=5 ", "url=https://h/p?x=1 "])
def test_a_value_is_hidden_after_its_name_however_they_are_put_together(name: str, form: str, before: str) -> None:
    told = redacted(before + form.format(name))
    assert "hunter2x" not in told
    assert HIDDEN in told
    assert told.startswith(before)


def test_what_stands_around_a_secret_stays() -> None:
    assert redacted("--lr 0.1 --token abcdef12 --steps 100") == f"--lr 0.1 --token {HIDDEN} --steps 100"
    assert redacted("a=1&password=p%20w&b=2") == f"a=1&password={HIDDEN}&b=2"
    assert redacted('{"password": "a b, c", "n": 5}') == f'{{"password": "{HIDDEN}", "n": 5}}'
    assert redacted('"{\\"password\\": \\"a b\\", \\"n\\": 5}"') == f'"{{\\"password\\": \\"{HIDDEN}\\", \\"n\\": 5}}"'
    assert redacted("Authorization: Bearer abc.def-ghi\nnext") == f"Authorization: {HIDDEN}\nnext"


@pytest.mark.parametrize(
    "text",
    [
        "token_count=5 tokens_per_s=3.2 max_tokens=4096 pad_token_id=0",
        "token=5 loss=2.3",
        "token: 12.5",
        "token=None password=",
        "invalid token: expected a number, got 6",
        "unexpected token }",
        "credential:elasticd.operator.key: there are no credentials here",
        "key=/etc/elasticd/tls/client.key cert=/etc/elasticd/tls/client.pem",
        "jobs/llm/target = 3 at /elasticd/default/jobs/llm/target",
        "ssh://git@github.com/a/b and mail@example.org and http://[::1]:2379/v3",
        "Basic authentication is required; Bearer of bad news",
        "forward_pass=12.3 bypass=1 compass: north",
        "task-2024-learning-rate-schedule-cosine sk-learn",
        "/var/log/elasticd/job/node/generation-000007/rank-3/stderr.log",
        "rank 3 on gpu-01: exit code 1: ValueError: no such layer",
    ],
)
def test_what_is_no_secret_is_left_alone(text: str) -> None:
    assert redacted(text) == text


@given(st.text(string.ascii_letters + string.digits + " _-./:,()[]", max_size=200))
def test_a_text_without_a_word_for_secrets_is_left_alone(text: str) -> None:
    low = text.lower()
    assume(not any(word in low for word in ("pass", "pwd", "secret", "token", "key", "auth", "cred", "cookie", "bearer", "basic", "negotiate", "_", "-")))
    assert redacted(text) == text


# --- looks


@pytest.mark.parametrize("kind", ["", "RSA ", "EC ", "OPENSSH ", "ENCRYPTED "])
def test_a_private_key_is_hidden_whole_or_cut(kind: str) -> None:
    key = PEM.format(kind)
    assert redacted(f"before {key} after") == f"before {HIDDEN} after"
    assert redacted(f"before {key[:60]}") == f"before {HIDDEN}"
    assert redacted(repr(f"before {key} after")) == f"'before {HIDDEN} after'"
    certificate = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----"
    assert redacted(certificate) == certificate


@pytest.mark.parametrize(
    "secret",
    [
        "ghp_" + "a1B2" * 9,
        "github_pat_" + "a1B2_" * 6,
        "glpat-" + "a1B2" * 5,
        "hf_" + "aBcD" * 8,
        "sk-" + "a1B2" * 8,
        "sk-ant-api03-" + "a1B2" * 8,
        "sk_live_" + "a1B2" * 6,
        "xoxb-123456789012-abcdef",
        "AKIAIOSFODNN7EXAMPLE",
        "AIza" + "a1B2c" * 7,
        "npm_" + "a1B2" * 9,
        "nvapi-" + "a1B2" * 8,
        "hvs." + "a1B2" * 6,
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dBjftJeZ4CVP",
    ],
)
def test_tokens_of_well_known_makers_are_hidden_wherever_they_are(secret: str) -> None:
    assert redacted(f"cannot fetch ({secret}) twice") == f"cannot fetch ({HIDDEN}) twice"


def test_a_password_in_a_url_is_hidden() -> None:
    assert redacted("s3://user:pass%40word@host:9000/b") == f"s3://user:{HIDDEN}@host:9000/b"
    assert redacted("https://oauth0123456789abcdef@host/r") == f"https://{HIDDEN}@host/r"


# --- values


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=12, max_size=60), st.sampled_from(["HF_TOKEN", "DB_PASSWORD", "MY_SECRET"]))
def test_what_a_variable_holds_is_hidden_in_every_form(value: str, name: str) -> None:
    value = value.strip()
    assume(len(value) >= 12 and not value.startswith(("/", "~", ".")) and not value.replace(".", "").isdigit() and len(set(value)) > 3)
    redactor = Redactor().knowing({name: value})
    assert value not in redactor(f"it said {value} and went")
    assert repr(value)[1:-1] not in redactor(f"it said {value!r} and went")


def test_only_variables_with_a_secrets_name_are_known_and_only_long_values() -> None:
    redactor = Redactor().knowing(
        {"HOME": "/home/somebody", "DB_PASSWORD": "short", "HF_TOKEN": "longenough1", "GOOGLE_APPLICATION_CREDENTIALS": "/etc/google.json"}
    )
    assert redactor("/home/somebody short longenough1 /etc/google.json") == f"/home/somebody short {HIDDEN} /etc/google.json"


def test_a_password_in_a_variables_url_is_known_by_itself() -> None:
    assert Redactor().knowing({"DATABASE_URL": "postgres://me:longpassword@db/x"})("said longpassword") == f"said {HIDDEN}"


def test_knowing_more_keeps_what_was_known() -> None:
    know({"A_SECRET": "first-secret"})
    know({"B_SECRET": "second-secret"})
    for _ in range(50):
        know({"A_SECRET": "first%secret"})
    assert redacted("first-secret second-secret first%secret") == f"{HIDDEN} {HIDDEN} {HIDDEN}"


@given(st.integers(0, 600), st.integers(20, 600), st.integers(0, 3))
@example(300, 400, 2)
def test_a_secret_across_the_cut_is_not_told_in_part(before: int, limit: int, hidden_before: int) -> None:
    """Nor where others that were hidden before it have made the text shorter."""
    secret, other = "q7Zp" * 64, "Ab3d" * 250
    forget()
    know({"THE_SECRET": secret, "OTHER_SECRET": other})
    text = f"{other} " * hidden_before + "x" * before + secret + "y" * 5000
    for told in (hidden(text, limit), hidden(text.encode(), limit)):
        assert "q7Zp" not in told
        assert "Ab3d" not in told


# --- fields


def test_secrets_are_found_in_fields_at_any_depth() -> None:
    event = {
        "event": "asked",
        "headers": {"Authorization": "Bearer x", "Accept": "json"},
        "pairs": [("cookie", "id=3"), ("a", "b")],
        "argv": ["train.py", "--token", "abcdef", "--lr", "0.1", "--api-key=xyz"],
        "env": {"deep": [{"password": "p", "token_count": 5}]},
        "token": 5,
        "password": 1234,
        "secret": None,
    }
    told = clean(event)
    assert told == {
        "event": "asked",
        "headers": {"Authorization": HIDDEN, "Accept": "json"},
        "pairs": [["cookie", HIDDEN], ["a", "b"]],
        "argv": ["train.py", "--token", HIDDEN, "--lr", "0.1", f"--api-key={HIDDEN}"],
        "env": {"deep": [{"password": HIDDEN, "token_count": 5}]},
        "token": 5,
        "password": HIDDEN,
        "secret": None,
    }


KEYS = st.sampled_from(["a", "password", "api_key", "n", "step"]) | st.text(max_size=5)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=50) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(KEYS, inner, max_size=5) | st.tuples(inner, inner),
    max_leaves=30,
)


@given(st.dictionaries(KEYS, VALUES, max_size=8))
def test_whatever_is_logged_becomes_plain_json_and_stays_the_same_when_done_again(event: dict[str, object]) -> None:
    told = clean(event)
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert clean(told) == told


@pytest.mark.parametrize(
    "text",
    [
        "a-" * 4096,
        "token=" * 1400,
        "'" * 8192,
        "token='" * 1100,
        "=:" * 4096,
        "://" * 2700,
        "-----BEGIN PRIVATE KEY-----" * 300,
        "eyJaaaaaaaaa." * 600,
        "bearer " * 1100,
        "\\" * 8192,
        "--token " * 1000,
        "sk-" + "a" * 8192,
        "sk-a" * 2000,
        "://a:" * 1600,
        "x" * (8192 + VALUE_MOST),
    ],
)
def test_the_cost_of_a_text_is_bounded_whatever_is_in_it(text: str) -> None:
    redactor = Redactor().knowing({f"SECRET_{number}": f"{number:020d}x" for number in range(100)})
    began = time.process_time()
    redactor(text)
    assert time.process_time() - began < 0.1
