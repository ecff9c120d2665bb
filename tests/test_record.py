"""record and masking: facts that add up, and no secrets in them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import refused

from nbutils import files, masking, record


def written(folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """One lesson's facts as the file has them."""
    record.update(folder / "facts.json", {}, "x", facts)
    text = (folder / "facts.json").read_text(encoding="utf-8")
    return dict(json.loads(text, parse_constant=pytest.fail)["lessons"]["x"])


def test_lessons_are_merged_and_none_keeps_what_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    record.update(file, {"profile": "tiny"}, "03_qlora", {"steps": 5, "speed": 7.5})
    record.update(file, {"profile": "tiny"}, "04_merge", {"rows": 1, "loss": float("nan")})
    record.update(file, {"profile": "tiny"}, "03_qlora", {"steps": 6, "speed": None})
    facts = {"03_qlora": {"steps": 6, "speed": 7.5}, "04_merge": {"rows": 1, "loss": None}}
    assert record.read_facts(file) == {"profile": "tiny", "lessons": facts}


WRONG_STEPS = '{"lessons": {"03_qlora": {"steps": "x", "planned_steps": [1]}}}'
WRONG_SETTINGS = '{"lessons": {"03_qlora": {"settings": "x"}}}'
WRONG_SCORES = '{"lessons": {"04_merge": {"evaluation": {"scores": {"stopped": {"merged": "x"}}}}}}'


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"half":', ""),
        ("[]", ""),
        ('{"lessons": {"x": 1}}', "lessons.x"),
        ('{"lessons": []}', "lessons"),
        ('{"set": []}', "set"),
        ('{"by_auto": "x"}', "by_auto"),
        (WRONG_STEPS, "lessons.03_qlora.steps"),
        (WRONG_SETTINGS, "lessons.03_qlora.settings"),
        (WRONG_SCORES, "lessons.04_merge.evaluation.scores.stopped.merged"),
    ],
)
def test_an_invalid_record_is_refused_in_one_sentence(tmp_path: Path, text: str, place: str) -> None:
    (tmp_path / "facts.json").write_text(text)
    with refused(str(tmp_path / "facts.json"), f"cannot be read: {place}") as caught:
        record.read_facts(tmp_path / "facts.json")
    assert "\n" not in caught.value.seen


def test_the_report_is_for_people(tmp_path: Path) -> None:
    entry = {
        "exact_match": {"base": 0.0, "merged": 0.95}, "settings": {"lora.r": 8}, "oom_rungs": [], "hours_left": None,
        "evaluation": {"verdict": "helped", "why": "prose", "summary": ["verdict: helped", "a | b: 1"]},
        "limits": {"memory_gib": 1.2345, "hours": None}, "exports": [{"format": "w4", "verdict": "same"}], "fits": True,
        "adapter_moved": 84, "trained_tokens": 261070, "tokens_per_second": 16929.5,
    }  # fmt: skip
    record.write_report(tmp_path / "report.md", "demo", {"lessons": {"04_merge": entry}})
    head, _, text = (tmp_path / "report.md").read_text().partition("|---|---|\n")
    assert "# Run demo" in head and "[facts.json](facts.json)" in head
    assert text.splitlines() == [
        "| exact match | base 0, merged 0.95 |", "| evaluation | verdict: helped; a \\| b: 1 |",
        "| limits | memory GiB 1.2345 |", "| exports | w4 same |", "| fits | yes |",
        "| weight matrices changed, of those that are trained | 84 |",
        "| tokens to learn from, in one epoch | 261,070 |", "| tokens per second | 16,929.5 |",
    ]  # fmt: skip


def test_a_merge_of_an_earlier_adapter_does_not_count(tmp_path: Path) -> None:
    run = record.RunFolder(tmp_path)
    assert not run.has("03_qlora") and not run.has("04_merge")
    for folder, about in ((run.adapter, {"steps": 10}), (run.merged, {"adapter": {"steps": 10}})):
        with files.complete_folder(folder, about):
            pass
    assert run.has("03_qlora") and run.has("04_merge")
    with files.complete_folder(run.adapter, {"steps": 20}):
        pass
    assert run.has("03_qlora") and not run.has("04_merge")


KEYS = {
    "github fine": "github_pat_11ABCDEFG0aBcDeFgHiJkL_mNoPqRsTuVwXyZ", "github oauth": "gho_" + "a1B2" * 9,
    "aws": "AKIAIOSFODNN7EXAMPLE", "aliyun": "LTAI5tAbCdEfGhIjKlMnOpQr", "hugging face": "hf_" + "aB3" * 10,
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P",
    "openai": "sk-" + "a1" * 20,
    "wandb": "wandb_v1_AbCdEfGhIjKlMnOpQrStUvWx", "older wandb": "0123456789abcdef0123456789abcdef01234567",
    "modelscope": "ms-01234567-89ab-cdef-0123-456789abcdef", "gitlab": "glpat-" + "a1B2" * 6,
    "volcengine": "AKLT" + "a1B2" * 8, "temporary aws": "ASIAIOSFODNN7EXAMPLE", "slack": "xoxb-123456789012-abcdefgh",
    "repr": repr("\nsk-" + "a1" * 20), "header": "Authorization: Basic bWU6cGFzc3dvcmQxMjM=",
    "bearer": "Bearer " + "a1" * 12, "parameter": "https://example.org/x?access_token=" + "a1" * 10,
    "password with @": "https://me:p@ss-word-1234@host-name", "git": "git+https://tok3n-tok3n@github.com/a/b",
    "private key": "-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEA\nabcdefghijklmnop\n-----END RSA PRIVATE KEY-----",
    "kaggle": '{"username":"me","key":"0123456789abcdef0123456789abcdef"}', "new kaggle": "KGAT_" + "0a1b" * 8,
}  # fmt: skip
PARTS = {"private key": "MIIEowIB", "password with @": "p@ss-word", "git": "tok3n"}


@pytest.mark.parametrize("name", KEYS)
def test_every_kind_of_key_is_masked(tmp_path: Path, name: str) -> None:
    facts = written(tmp_path, {"note": [f"it is {KEYS[name]} there"], "rows": 1})
    assert masking.MASK in facts["note"][0] and PARTS.get(name, KEYS[name][-16:-4]) not in facts["note"][0]


def test_secrets_of_the_environment_and_found_ones_are_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "_found", set())
    monkeypatch.setenv("SOME_TOKEN", "12345678")
    odd = 'quo"te\\back 密码'
    masking.remember_secret(odd)
    masking.remember_secret("short")
    kaggle = {"username": "me", "key": "0123456789abcdef" * 2}
    facts = written(tmp_path, {"note": f"a short url?key={odd} 12345678", odd: 1, "rows": 1234567890, "kaggle": kaggle})
    assert facts == {
        "note": "a short url?key=[masked] [masked]", "[masked]": 1, "rows": 1234567890,
        "kaggle": {"username": "me", "key": "[masked]"},
    }  # fmt: skip


def test_what_is_no_secret_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN_PATH", "/some/course/token")
    for text in (
        "sha256 " + "0a" * 32, "Qwen/Qwen2.5-7B-Instruct", "task-classification-of-rows", "tokens_per_second",
        "commit " + "0a" * 20, "/kaggle/input/rows.jsonl " + "0a" * 16, "Basic understanding of authorization",
        "/cache/models--Qwen/snapshots/a09a35458c702b33eeacc393d103063234e8bc28", "/some/course/token/x",
    ):  # fmt: skip
        assert masking.mask_secrets(text) == text


def test_a_long_text_does_not_hang() -> None:
    code = "from nbutils.masking import mask_secrets as mask\n" + "".join(
        f"mask({text!r} * 100_000);" for text in ("eyJ", "hf_", "sk-", "wandb", "?key=", "//")
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)  # looked at from every eyJ: minutes


def test_child_processes_get_no_secret() -> None:
    secret = "HF_TOKEN AUTODL_TOKEN WANDB_API_KEY AWS_SECRET_ACCESS_KEY MY_PASSWORD DB_PASS PASSPHRASE MYSQL_PWD"
    secret += " GITHUB_PAT HF_AUTH COOKIE NBUTILS_SOURCE"
    plain = "PATH TOKENIZERS_PARALLELISM HF_HOME CUDA_VISIBLE_DEVICES HF_HUB_DISABLE_IMPLICIT_TOKEN PWD SSH_AUTH_SOCK"
    plain += " KEYBOARD MAX_TOKENS"
    assert list(masking.without_secrets(dict.fromkeys(f"{plain} {secret}".split(), "x"))) == plain.split()
