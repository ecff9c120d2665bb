"""The README is true: its tree, its commands, the address in one place."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def tree() -> list[str]:
    block = re.search(r"(?s)## The tree.*?```\n(.*?)```", README)
    assert block
    return [line.split("#")[0].rstrip() for line in block.group(1).splitlines() if line.strip()]


def listed() -> set[str]:
    """Paths of the tree, folders by indentation of four spaces."""
    stack: list[str] = []
    found = set()
    for line in tree():
        depth = (len(line) - len(line.lstrip())) // 4
        stack = [*stack[:depth], line.strip().rstrip("/")]
        found.add("/".join(stack))
    return found


def tracked() -> set[str]:
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(files.stdout.split())


def test_every_path_in_the_tree_exists() -> None:
    missing = [path for path in listed() if not (ROOT / path).exists() and not list(ROOT.glob(f"{path}.*"))]
    assert missing == [] and len(listed()) > 25


def test_every_room_and_every_top_level_entry_is_in_the_tree() -> None:
    top = {path.split("/")[0] for path in tracked()}
    rooms = {"nbutils/" + path.split("/")[1] for path in tracked() if path.startswith("nbutils/")}
    known = {path.split(".")[0] if path.startswith("nbutils/") else path for path in listed()}
    hidden = {".gitignore", ".gitattributes"}
    assert top - hidden <= listed(), top - hidden - listed()
    absent = {room for room in rooms if room.removesuffix(".py") not in known and "__" not in room}
    assert absent == set()


def test_no_number_is_left_to_be_measured() -> None:
    assert "MEASURE_" not in README


def test_the_two_commands_are_in_the_readme_and_in_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in ("course", "test"):
        assert f"make {target}" in README and re.search(rf"^{target}:", makefile, re.M)
    assert "make test" in (ROOT / ".ci/run").read_text()


def test_the_address_stands_in_one_place_and_is_carried_from_there() -> None:
    address = re.search(r'Repository = "([^"]+)"', (ROOT / "pyproject.toml").read_text()).group(1)
    texts = {path for path in tracked() if Path(path).suffix in (".py", ".md", ".yml", ".yaml", ".toml", ".json")}
    others = [path for path in texts if path != "pyproject.toml" and not path.startswith("notebooks/")]
    plain = address.removeprefix("https://")
    by_hand = [path for path in others if plain in (ROOT / path).read_text(encoding="utf-8")]
    assert by_hand in ([], ["README.md"])
    outside_badges = re.sub(r"(?s)<!-- badges -->.*?<!-- /badges -->", "", README)
    assert address not in outside_badges
