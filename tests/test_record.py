"""record: facts that add up, and no secrets in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nbutils import masking, record
from nbutils.errors import CourseError


def test_lessons_are_merged_and_none_keeps_what_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    record.update(file, {"profile": "tiny"}, "03_qlora", {"steps": 5, "speed": 7.5})
    record.update(file, {"profile": "tiny"}, "04_merge", {"rows": 1})
    record.update(file, {"profile": "tiny"}, "03_qlora", {"steps": 6, "speed": None})
    assert json.loads(file.read_text())["lessons"] == {"03_qlora": {"steps": 6, "speed": 7.5}, "04_merge": {"rows": 1}}


@pytest.mark.parametrize("value", ["hf_" + "a" * 30, {"inner": "sk-" + "b" * 30}, "f" * 40])
def test_what_looks_like_a_secret_is_masked(tmp_path: Path, value: object) -> None:
    record.update(tmp_path / "facts.json", {}, "x", {"note": value, "loss": 0.5})
    text = (tmp_path / "facts.json").read_text()
    assert "[masked]" in text and not any(letter * 10 in text for letter in "abf") and '"loss": 0.5' in text


def test_the_value_of_a_secret_variable_is_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "correct-horse-battery")
    record.update(tmp_path / "facts.json", {}, "x", {"note": "url?key=correct-horse-battery"})
    assert "horse" not in (tmp_path / "facts.json").read_text()


def test_a_secret_found_elsewhere_is_masked_from_then_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "_found", set())
    value = 'quo"te\\back 密码'
    masking.remember_secret(value)
    masking.remember_secret("short")
    record.update(tmp_path / "facts.json", {}, "x", {"note": [f"a short url?key={value}"], value: 1, "rows": 12345678})
    written = record.read(tmp_path / "facts.json")["lessons"]["x"]
    assert written == {"note": ["a short url?key=[masked]"], "[masked]": 1, "rows": 12345678}


def test_digits_that_are_a_secret_do_not_break_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "12345678")
    record.update(tmp_path / "facts.json", {}, "x", {"rows": 1234567890})
    assert record.read(tmp_path / "facts.json")["lessons"]["x"]["rows"] == 1234567890


def test_a_snapshot_folder_of_the_hub_is_no_secret(tmp_path: Path) -> None:
    folder = "/cache/models--Qwen/snapshots/a09a35458c702b33eeacc393d103063234e8bc28"
    record.update(tmp_path / "facts.json", {"model": folder}, "x", {})
    assert record.read(tmp_path / "facts.json")["model"] == folder


@pytest.mark.parametrize("text", ['{"half":', "[]", "null", '{"lessons": null}'])
def test_a_file_that_is_no_record_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "facts.json").write_text(text)
    with pytest.raises(CourseError, match="cannot be read"):
        record.read(tmp_path / "facts.json")


def test_versions_name_the_stack() -> None:
    assert {"torch", "transformers", "peft", "trl", "bitsandbytes"} <= set(record.versions())


def test_the_report_is_readable(tmp_path: Path) -> None:
    facts = {
        "platform": {"name": "local"}, "profile": "tiny", "model": "m", "card": None, "versions": {"torch": "2"},
        "lessons": {"04_merge": {"exact_match": {"base": 0.0, "merged": 0.95}}},
    }  # fmt: skip
    record.write_report(tmp_path / "report.md", "demo", facts)
    text = (tmp_path / "report.md").read_text()
    assert "# Run demo" in text and "| exact_match | base 0, merged 0.95 |" in text


def test_a_fact_with_a_summary_is_a_list_of_its_own(tmp_path: Path) -> None:
    told = {"verdict": "helped", "why": "prose " * 50, "todo": "", "summary": ["verdict: helped", "a | b: 1"]}
    facts = {"lessons": {"04_merge": {"rows": 120, "evaluation": told}}}
    record.write_report(tmp_path / "report.md", "demo", facts)
    text = (tmp_path / "report.md").read_text()
    assert "| rows | 120 |\n\n### evaluation\n\n- verdict: helped\n- a \\| b: 1\n" in text and "prose" not in text
    assert record.summary({"evaluation": told, "rows": 3}) == "evaluation verdict: helped; a \\| b: 1, rows 3"


def test_a_password_in_an_address_is_masked() -> None:
    text = masking.mask_secrets(
        "models come from https://me:pass@mirror.example/x and git+https://tok3n@github.com/a/b"
    )
    assert "pass" not in text and "tok3n" not in text and "mirror.example/x" in text and "github.com/a/b" in text


def test_a_number_that_is_none_is_written_as_null(tmp_path: Path) -> None:
    record.update(tmp_path / "facts.json", {}, "03_qlora", {"final_loss": float("nan"), "steps": 3})
    written = (tmp_path / "facts.json").read_text()
    assert json.loads(written, parse_constant=pytest.fail)["lessons"]["03_qlora"] == {"final_loss": None, "steps": 3}


KEYS = {
    "github fine": "github_pat_11ABCDEFG0aBcDeFgHiJkL_mNoPqRsTuVwXyZ", "github oauth": "gho_" + "a1B2" * 9,
    "aws": "AKIAIOSFODNN7EXAMPLE", "aliyun": "LTAI5tAbCdEfGhIjKlMnOpQr", "hugging face": "hf_" + "aB3" * 10,
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P",
    "openai": "sk-" + "a1" * 20,
    "wandb": "wandb_v1_AbCdEfGhIjKlMnOpQrStUvWx", "older wandb": "0123456789abcdef0123456789abcdef01234567",
    "modelscope": "ms-01234567-89ab-cdef-0123-456789abcdef", "gitlab": "glpat-" + "a1B2" * 6,
    "volcengine": "AKLT" + "a1B2" * 8, "temporary aws": "ASIAIOSFODNN7EXAMPLE", "slack": "xoxb-123456789012-abcdefgh",
    "repr": repr("\nsk-" + "a1" * 20), "header": "Authorization: Basic bWU6cGFzc3dvcmQxMjM=",
    "bearer": "Bearer " + "a1" * 12,
    "parameter": "https://example.org/x?access_token=" + "a1" * 10,
    "password with @": "https://me:p@ss-word-1234@host-name",
    "private key": "-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEA\nabcdefghijklmnop\n-----END RSA PRIVATE KEY-----",
    "kaggle": '{"username":"me","key":"0123456789abcdef0123456789abcdef"}', "new kaggle": "KGAT_" + "0a1b" * 8,
}  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
def test_every_kind_of_key_is_masked_in_the_facts(tmp_path: Path, name: str) -> None:
    record.update(tmp_path / "facts.json", {}, "01", {"note": f"it is {KEYS[name]} there"})
    written = (tmp_path / "facts.json").read_text(encoding="utf-8")
    assert masking.MASK in written
    for part in ("p@ss-word", "MIIEowIB") if name in ("private key", "password with @") else (KEYS[name][-16:-4],):
        assert part not in written


def test_a_kaggle_key_file_in_the_facts_is_masked(tmp_path: Path) -> None:
    record.update(tmp_path / "facts.json", {}, "01", {"kaggle": {"username": "me", "key": "0123456789abcdef" * 2}})
    assert record.read(tmp_path / "facts.json")["lessons"]["01"]["kaggle"] == {"username": "me", "key": masking.MASK}


def test_a_source_that_is_a_folder_and_the_place_of_a_token_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBUTILS_SOURCE", "/some/course")
    monkeypatch.setenv("HF_TOKEN_PATH", "/some/course/token")
    assert masking.mask_secrets("/some/course/token/x") == "/some/course/token/x"
    assert "NBUTILS_SOURCE" not in masking.without_secrets(os.environ)


def test_a_long_text_does_not_hang() -> None:
    code = "from nbutils.masking import mask_secrets as mask\n" + "".join(
        f"mask({text!r} * 100_000);" for text in ("eyJ", "hf_", "sk-", "wandb", "?key=", "//")
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)  # looked at from every eyJ: minutes


def test_an_error_shows_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "correct-horse")
    told = CourseError("pip said https://me:secret@host/x", "correct-horse", "sk-" + "a1" * 20)
    assert (
        not any(one in str(told) + told.todo for one in ("secret@", "correct-horse", "a1a1")) and "host/x" in told.seen
    )


def test_checksums_and_words_are_not_masked() -> None:
    for text in (
        "sha256 " + "0a" * 32,
        "Qwen/Qwen2.5-7B-Instruct",
        "task-classification-of-rows",
        "tokens_per_second",
        "commit " + "0a" * 20,
        "/kaggle/input/rows.jsonl " + "0a" * 16,
        "Basic understanding of authorization",
    ):
        assert masking.mask_secrets(text) == text


def test_processes_of_others_get_no_secret() -> None:
    secret = dict.fromkeys(
        (
            "HF_TOKEN",
            "AUTODL_TOKEN",
            "WANDB_API_KEY",
            "AWS_SECRET_ACCESS_KEY",
            "MY_PASSWORD",
            "DB_PASS",
            "PASSPHRASE",
            "MYSQL_PWD",
            "GITHUB_PAT",
            "HF_AUTH",
            "COOKIE",
            "NBUTILS_SOURCE",
        ),
        "x",
    )
    plain = {
        "PATH": "/bin",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HOME": "/x",
        "CUDA_VISIBLE_DEVICES": "0",
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
        "PWD": "/x",
        "SSH_AUTH_SOCK": "/x",
        "KEYBOARD": "de",
        "MAX_TOKENS": "9",
    }
    assert masking.without_secrets(secret | plain) == plain
