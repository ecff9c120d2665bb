"""Reading `configs/*.yaml`: values, the comment beside each value as its reason, and every mistake at once, by name.

Not here: which profile suits a machine (choosing). Scalars are read as YAML 1.2 does: `on` is text, `2e-4` a number.
"""

from __future__ import annotations

import difflib
import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import ValidationError

from nbutils import paths
from nbutils.errors import CourseError
from nbutils.profiles.schema import RULES, Profile, flat, keys, shown

RENAMED = {"train.accumulation": "is now train.batch, the rows of a step: micro_batch x accumulation"}
CHECKPOINTING = "train.gradient_checkpointing"
NOT_PROFILES = ("models", "cards", "serving", "exports")
_BOOL, _FLOAT = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:float"


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader without the surprises of YAML 1.1."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in known if tag not in (_BOOL, _FLOAT)]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(_BOOL, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(r"^(?:[-+]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?|[-+]?\.inf|\.nan)$"),
    list("-+.0123456789"),
)


@dataclass(frozen=True)
class Sheet:
    """A YAML file as read: its tree, the comment beside each dotted name, and keys that were given twice."""

    file: Path
    tree: dict[str, Any]
    reasons: dict[str, str]
    twice: list[str]


@dataclass(frozen=True)
class Document:
    """A valid profile with the reason written beside each of its values, and of those that were replaced since."""

    profile: Profile
    reasons: dict[str, str]
    file: Path
    replaced: Mapping[str, str] = field(default_factory=dict)


def load(name: str) -> Profile:
    """The profile of that name, or of a YAML file of your own."""
    return read(name).profile


def names() -> list[str]:
    """The profiles of the course."""
    return sorted(file.stem for file in paths.CONFIGS.glob("*.yaml") if file.stem not in NOT_PROFILES)


def read(name: str) -> Document:
    """The profile of that name with its reasons; all mistakes in it are told at once."""
    sheet = read_sheet(find(name))
    refuse([*sheet.twice, *problems(sheet.tree)], str(sheet.file))
    return Document(Profile.model_validate(sheet.tree), sheet.reasons, sheet.file)


def find(name: str) -> Path:
    """The file behind a profile name or a path."""
    file = Path(name).expanduser()
    if file.suffix in (".yaml", ".yml") and file.is_file():
        return file.absolute()
    if name in names():
        return paths.CONFIGS / f"{name}.yaml"
    near = difflib.get_close_matches(file.stem.lower(), names(), n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise CourseError(
        f"there is no profile {name!r}.",
        f"auto, {', '.join(names())}, or the path of a .yaml file of your own",
        f"{hint}Set PROFILE to one of these, or copy one of {paths.CONFIGS} and change it",
    )


def settings_in(text: str) -> dict[str, Any]:
    """`train.learning_rate=1e-4, lora.rank=64` as {dotted name: value}, values read as a profile's; not yet checked."""
    found: dict[str, Any] = {}
    for part in filter(str.strip, re.split(r",(?![^\[]*\])", text)):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if part.count("=") != 1:
            raise CourseError(
                f"SET has {part.strip()!r}.", "name=value, with a comma before the next",
                'write it like "train.learning_rate=1e-4, lora.rank=64"',
            )  # fmt: skip
        if name in found:
            raise CourseError(f"SET gives {name} twice.", "each name once", "remove one of them")
        try:
            found[name] = yaml.load(value, _Loader)
        except yaml.YAMLError:
            found[name] = value  # no value of any key: the schema says so, by name and with all other mistakes
    return found


def settings_text(settings: Mapping[str, Any]) -> str:
    """The same as text again."""
    return ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in settings.items())


def read_sheet(file: Path) -> Sheet:
    """Any YAML of the course as tree and reasons."""
    try:
        text = file.read_text(encoding="utf-8")
        loader = _Loader(text)
        node = loader.get_single_node()
        tree = loader.construct_document(node) if node else None
    except (yaml.YAMLError, UnicodeDecodeError) as problem:
        raise _unreadable(file, problem) from None
    if not isinstance(tree, dict):
        raise CourseError(f"{file} holds no keys.", "lines of `key: value`", f"copy a file of {paths.CONFIGS} into it")
    sheet = Sheet(file, tree, {}, [])
    _walk(cast(yaml.MappingNode, node), text.splitlines(), "", sheet)
    return sheet


def _unreadable(file: Path, problem: Exception) -> CourseError:
    mark = getattr(problem, "problem_mark", None)
    place = f"{file}, line {mark.line + 1}" if mark else str(file)
    said = getattr(problem, "problem", None) or str(problem).splitlines()[0]
    return CourseError(
        f"{place}: {said}.", "YAML in UTF-8: `key: value`, groups indented by two spaces", f"correct {place}"
    )


def _walk(node: yaml.MappingNode, lines: Sequence[str], above: str, sheet: Sheet) -> None:
    """Collect the comment beside each value and the keys given twice."""
    first: dict[str, int] = {}
    for key, value in node.value:
        name, line = f"{above}{key.value}", key.start_mark.line
        if name in first:
            sheet.twice.append(f"{name}: given twice, in lines {first[name]} and {line + 1}")
        first.setdefault(name, line + 1)
        if isinstance(value, yaml.MappingNode):
            _walk(value, lines, f"{name}.", sheet)
            continue
        ends_here = value.end_mark.line == line
        rest = lines[line][value.end_mark.column if ends_here else key.end_mark.column :]
        if comment := re.search(r"(?:^|\s)#\s*(.*\S)", rest):
            sheet.reasons[name] = comment.group(1)


def problems(tree: dict[str, Any]) -> list[str]:
    """Every mistake of a profile, by dotted name: unknown and missing keys, types, ranges, impossible pairs."""
    wrong = mistakes(tree, Profile)
    values = flat(tree)
    pairs = [
        f"{' and '.join(f'{key}: {shown(values[key])}' for key in rule.keys)}: {rule.advice}"
        for rule in RULES
        if all(key in values and key not in wrong for key in rule.keys)
        and rule.broken(*(values[key] for key in rule.keys))
    ]
    return [*(f"{name}: {said}" for name, said in wrong.items()), *pairs]


def mistakes(tree: Any, model: type[Any]) -> dict[str, str]:
    """What pydantic holds against a tree, as {dotted name: words}."""
    try:
        model.model_validate(tree)
    except ValidationError as error:
        said: dict[str, list[str]] = {}
        for item in error.errors(include_url=False):
            name = _dotted(item["loc"], keys(model))
            said.setdefault(name, []).append(_explain(name, item, keys(model)))
        return {name: " or ".join(words) for name, words in said.items()}
    return {}


def _dotted(place: tuple[Any, ...], known: Sequence[str]) -> str:
    """A place as dotted name; pydantic goes on into the branches of a union, a learner need not."""
    parts = [".".join(map(str, place[: depth + 1])) for depth in range(len(place))]
    return next((name for name in parts if name in known), parts[-1] if parts else "the file")


def _explain(name: str, item: Any, known: Sequence[str]) -> str:
    if item["type"] == "extra_forbidden":
        return RENAMED.get(name) or f"unknown key{did_you_mean(name, known)}"
    if name == CHECKPOINTING and isinstance(item["input"], bool):
        return f"{item['input']} is now written {'on' if item['input'] else 'off'} (or auto, or offload)"
    if item["type"] == "missing":
        return "missing"
    if item["type"] == "model_type":
        return f"{reprlib.repr(item['input'])} should be a group of keys"
    said = item["msg"].removeprefix("Input ")
    return f"{reprlib.repr(item['input'])} {said}" if said.startswith("should") else said


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """A hint at the key that was probably meant: the same word in another group, or a similar one in this group."""
    group, _, leaf = name.rpartition(".")
    groups = {key.rpartition(".")[0] for key in known} - {""}
    everywhere = {key.rpartition(".")[2]: key for key in known}
    if leaf in everywhere:
        return f", did you mean {everywhere[leaf]}?"
    here = [key for key in [*known, *groups] if key != name and key.rpartition(".")[0] == group]
    near = difflib.get_close_matches(name, here, n=1)
    near = near or [everywhere[one] for one in difflib.get_close_matches(leaf, everywhere, n=1)]
    return f", did you mean {near[0]}?" if near else ""


def refuse(found: Sequence[str], where: str, allowed: str = "tiny.yaml") -> None:
    """Stop with all problems at once, if there are any."""
    if found:
        count = "1 problem" if len(found) == 1 else f"{len(found)} problems"
        raise CourseError(
            f"{where} has {count}:" + "".join(f"\n    - {line}" for line in found),
            f"the keys and kinds of value shown in {paths.CONFIGS / allowed}, all of them",
            "correct what is named above and run the cell again",
        )
