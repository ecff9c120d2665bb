"""Draws which room of nbutils imports which: `python .ci/graph.py` writes docs/imports.svg.

A room stands above all it imports; of two ways to a room, the longer is drawn. A red line closes a cycle.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
WIDTH, ROW, BOX = 1200, 90, 26
STYLE = (
    "text{font:13px sans-serif;text-anchor:middle}rect{fill:#eef3fb;stroke:#4a6fa5}"
    "path{fill:none;stroke:#9aa7b8}path.cycle{stroke:#c62828;stroke-width:2}"
)


def room_imports() -> dict[str, set[str]]:
    """room -> the rooms it imports, also inside functions and for types alone."""
    graph = grimp.build_graph("nbutils", cache_dir=None)
    found: dict[str, set[str]] = defaultdict(set)
    for module in graph.modules - {"nbutils", "nbutils.__main__"}:
        room = module.split(".")[1]
        imported = (name.split(".")[1] for name in graph.find_modules_directly_imported_by(module) if "." in name)
        found[room] |= set(imported) - {room}
    return found


def arrange(imports: dict[str, set[str]]) -> tuple[dict[str, int], dict[str, set[str]], set[tuple[str, str]]]:
    """room -> its height above the leaves; room -> all it reaches; the imports that close a cycle."""
    heights, reached, cycles = dict[str, int](), dict[str, set[str]](), set[tuple[str, str]]()

    def visit(room: str, path: tuple[str, ...]) -> None:
        below = sorted(imports[room])
        cycles.update((room, name) for name in below if name in path)
        below = [name for name in below if name not in path]
        for name in below:
            if name not in heights:
                visit(name, (*path, name))
        heights[room] = 1 + max((heights[name] for name in below), default=-1)
        reached[room] = {*below, *(far for name in below for far in reached[name])}

    for room in sorted(imports):
        if room not in heights:
            visit(room, (room,))
    return heights, reached, cycles


def drawing() -> str:
    """The picture as SVG text."""
    imports = room_imports()
    heights, reached, cycles = arrange(imports)
    top, lines, places = max(heights.values()), [], {}
    for height in range(top + 1):
        members = sorted(room for room in heights if heights[room] == height)
        for number, room in enumerate(members, 1):
            places[room] = (WIDTH * number // (len(members) + 1), ROW * (top - height) + 40)
    for room, names in sorted(imports.items()):
        implied = {far for name in names if (room, name) not in cycles for far in reached[name]}
        for name in sorted(names - implied | {other for one, other in cycles if one == room}):
            (x, y), (u, v), bend = places[room], places[name], ROW // 2
            kind = "cycle" if (room, name) in cycles else "import"
            lines.append(f'<path class="{kind}" d="M{x} {y + 13}C{x} {y + bend} {u} {v - bend} {u} {v - 13}"/>')
    for room, (x, y) in sorted(places.items()):
        width = 9 * len(room) + 14
        lines.append(f'<rect x="{x - width // 2}" y="{y - BOX // 2}" width="{width}" height="{BOX}" rx="5"/>')
        lines.append(f'<text x="{x}" y="{y + 5}">{room}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {ROW * top + 80}"><style>{STYLE}</style>'
    return "\n".join([head, *lines, "</svg>\n"])


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    (ROOT / "docs").mkdir(exist_ok=True)
    (ROOT / "docs/imports.svg").write_text(drawing(), encoding="utf-8")
