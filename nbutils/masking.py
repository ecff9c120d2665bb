"""Secrets: what a key looks like, which variables hold one, and text without them; where one is read: platforms."""

import os
import re
from collections.abc import Mapping

# By the services learners have accounts at. The first group is sure by its prefix alone, also behind the `\n` of a
# repr; of the second, words could end in the prefix.
KEY = re.compile(
    r"(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{22,}|glpat-[\w-]{20,}|wandb_v1_\w{20,}"
    r"|KGAT_[A-Za-z0-9]{20,})"
    r"|(?:(?<![\w-])|(?<=\\[nrt])|(?<=\dm))(?:sk-[\w-]{20,}|A[KS]IA[0-9A-Z]{16}|AKID[A-Za-z0-9]{13,}"
    r"|AKLT[A-Za-z0-9]{20,}|LTAI[A-Za-z0-9]{12,}|AIza[\w-]{35}|xox[a-z]-[\w-]{10,}"
    r"|ms-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,})(?![\w-])"
    r"|-----BEGIN (?:[A-Z]+ ){0,2}PRIVATE KEY-----(?:[\s\S]{0,4000}?-----END [A-Z ]+-----)?"
    r"|(?i:wandb)[^\n]{0,40}?(?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f])"
    r"|(?:(?i:kaggle_key)|\bkey)\W{1,6}[0-9a-f]{32}(?![0-9a-f])"
    r"|(?:(?<=Bearer )|(?<=Basic )|(?<=uthorization: ))(?=[\w.~+/=-]*\d)[\w.~+/=-]{16,}"
    r"|[?&](?i:\w{0,20}(?:token|key|secret|passw\w{0,4}))=[^\s&'\"[]{8,}",
    re.ASCII,
)
BARE = re.compile(r"(?<![/\w@])(?<!commit )(?<!revision )[0-9a-f]{40}(?!\w)")  # an older W&B key
IN_ADDRESS = re.compile(r"(?<=//)[^/\s]+(?=@)")  # https://user:password@host
SECRET_NAME = re.compile(
    r"KEY(?!BOARD|RING)|(?<!IMPLICIT_)TOKEN(?!S|IZER)|SECRET|PASS(?:W|PHRASE|$)|_PWD$|CREDENTIAL|COOKIE"
    r"|(?:^|_)(?:PAT|AUTH)(?:_\d+)?$|NOTICE_URL$", re.I,
)  # fmt: skip
MASK = "[masked]"
SHORTEST = 8  # characters of a secret; fewer would mask words by accident
_found: set[str] = set()  # secrets from outside the environment


def remember_secret(value: str) -> None:
    """From now on this value is masked wherever the course writes."""
    if len(value) >= SHORTEST:
        _found.add(value)


def mask_secrets(text: str) -> str:
    """The text without what looks like a key, the value of a variable named like one, or a secret found elsewhere."""
    secrets = set(_found)
    for name, value in os.environ.items():
        is_path = value.startswith(("/", "~"))  # HF_TOKEN_PATH: where one lies is no secret
        if len(value) >= SHORTEST and not is_path and SECRET_NAME.search(name):
            secrets.add(value)
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, MASK)
    for pattern in (IN_ADDRESS, KEY, BARE):
        text = pattern.sub(MASK, text)
    return text


def describe(problem: BaseException) -> str:
    """The kind of an error and what it says, without secrets."""
    said = str(problem).strip()
    return mask_secrets(f"{type(problem).__name__}: {said}")


def without_secrets(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of a process that needs no key of the learner's; an address to install from may hold one."""
    return {name: text for name, text in variables.items() if not SECRET_NAME.search(name) and name != "NBUTILS_SOURCE"}
