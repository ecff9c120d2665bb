"""The package and its checkout: cheap imports, no code of a model, a true README."""

import ast
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
CHINESE_README = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")
HEAVY = ("torch", "transformers", "datasets", "vllm", "trl", "peft", "matplotlib", "ipywidgets", "openai")
LESSONS = runpy.run_path(str(ROOT / ".ci/sync.py"))["sources"]()


def tracked() -> set[str]:
    """The files in git: what lies beside them is the user's."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


def loaded_by(code: str) -> tuple[list[str], float]:
    """The heavy packages that are loaded after `code`, and the CPU seconds it took."""
    probe = f"import json, sys, time\nt = time.process_time()\n{code}\nt = time.process_time() - t\n"
    probe += f"print(json.dumps([[n for n in {HEAVY!r} if n in sys.modules], t]))"
    ran = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    names, seconds = json.loads(ran.stdout.splitlines()[-1])
    return names, seconds


def imported_on_top(file: Path) -> set[str]:
    """The packages a module imports outside its functions."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    words = [ast.unparse(node).split() for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    return {one[1].split(".")[0] for one in words}


def test_importing_the_package_is_cheap() -> None:
    runs = [loaded_by("import nbutils") for _ in range(3)]
    for heavy, _ in runs:
        assert heavy == []
    assert min(seconds for _, seconds in runs) < 0.3


def modules() -> list[Path]:
    """The modules of the package, without the files it carries and without `__main__`, which runs."""
    files = (ROOT / "nbutils").rglob("*.py")
    return [file for file in files if file.stem != "__main__" and "_files" not in file.parts]


def uses_torch_at_once(file: Path) -> bool:
    """Whether a module imports a heavy package outside its functions."""
    return bool(imported_on_top(file) & set(HEAVY))


def test_only_modules_of_training_import_heavy_packages_on_top() -> None:
    rooms = {file.parent.name for file in modules() if uses_torch_at_once(file)}
    assert rooms == {"training"}, "they are loaded when a trainer is there; elsewhere functions import"


def test_importing_all_other_modules_loads_nothing_heavy() -> None:
    light = [file.relative_to(ROOT) for file in modules() if not uses_torch_at_once(file)]
    names = [".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in light]
    heavy, _ = loaded_by("import " + ", ".join(names))
    assert heavy == []


def calls_in(file: Path) -> list[ast.Call]:
    """Every call of a module."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


SOURCES = [*sorted((ROOT / "nbutils").rglob("*.py")), *LESSONS]


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: file.stem)
def test_no_model_brings_code_of_its_own(file: Path) -> None:
    for call in calls_in(file):
        if re.fullmatch(r"Auto\w+\.from_pretrained", ast.unparse(call.func)):
            arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            assert arguments.get("trust_remote_code") == "False", f"line {call.lineno}"


def tree(text: str, heading: str) -> set[str]:
    """Paths of a tree on a page: one or several in a line, folders by indentation of four spaces."""
    block = re.search(rf"(?s)## {heading}\n.*?```\n(.*?)```", text)
    assert block
    found, folder = set(), ""
    for line in (line.split("#")[0].rstrip() for line in block.group(1).splitlines()):
        inside = folder if line.startswith("    ") else ""
        found |= {inside + name for name in line.split()}
        folder = inside or f"{line.strip()}/"
    return found


def test_the_tree_in_the_readme_is_the_tree() -> None:
    shown = tree(README, "The tree")
    assert [path for path in sorted(shown) if not (ROOT / path).exists()] == []
    top = {path.split("/")[0] for path in tracked()} - {".gitignore", ".gitattributes", ".github"}
    assert sorted(top - shown) == []
    assert tree(CHINESE_README, "目录结构") == shown


def test_the_rooms_in_contributing_are_the_rooms() -> None:
    shown = tree((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), "The rooms of nbutils")
    assert [path for path in sorted(shown) if not (ROOT / path).exists()] == []
    rooms = {"/".join(path.split("/")[:2]) for path in tracked() if re.match(r"nbutils/[a-z]\w*(\.py|/)", path)}
    assert sorted(rooms - shown) == []


def test_the_two_commands_and_the_address_are_where_they_should_be() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in ("course", "test"):
        assert f"make {target}" in README and re.search(rf"^{target}:", makefile, re.M)
    assert "make test" in (ROOT / ".ci/run").read_text() and "MEASURE_" not in README
    address = re.search(r'Repository = "https://([^"]+)"', (ROOT / "pyproject.toml").read_text())[1]  # type: ignore[index]
    suffixes = (".py", ".md", ".yml", ".yaml", ".toml", ".json")
    others = [path for path in tracked() if path.endswith(suffixes) and not path.startswith("notebooks/")]
    by_hand = {path for path in others if address in (ROOT / path).read_text(encoding="utf-8")}
    assert by_hand - {"README.md", "README.zh-CN.md"} == {"pyproject.toml"}
    assert address not in re.sub(r"(?s)<!-- badges -->.*?<!-- /badges -->", "", README)


def test_the_chinese_readme_has_the_sections_commands_parameters_and_variables_of_the_english_one() -> None:
    for pattern in (r"(?m)^## ", r"(?m)^\|", r"(?m)^- "):
        assert len(re.findall(pattern, CHINESE_README)) == len(re.findall(pattern, README)), pattern
    names = re.compile(
        r"python -m nbutils [\w-]+|make [\w-]+|test-\w+|NBUTILS_\w+|[A-Z]+_?[A-Z]+(?=[`=])|(?<=`)[\w./-]+/(?=`)"
    )
    assert sorted(set(names.findall(README)) - set(names.findall(CHINESE_README))) == []
    assert "(README.md)" in CHINESE_README


@pytest.mark.long
def test_files_a_user_leaves_in_the_checkout_turn_nothing_red(tmp_path: Path) -> None:
    for name in tracked():
        if not name.startswith("benchmarks/results"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tmp_path / name)
    git = ["git", "-c", "user.name=me", "-c", "user.email=me@example.org"]
    subprocess.run([*git, "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run([*git, "add", "-A"], cwd=tmp_path, check=True)
    for name in ("out.ipynb", "train.log", "mine.py", "my-runs/a.py", "notebooks/03_qlora_mine.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("import nothing as  x;; (")
    planned = subprocess.check_output(["make", "-n", "lint"], cwd=tmp_path, text=True)
    [ruff] = [line for line in planned.splitlines() if "ruff check" in line]
    tree_test = "-m pytest -q -p no:cacheprovider tests/test_package.py::test_the_tree_in_the_readme_is_the_tree"
    for words in (ruff.split()[1:], [".ci/sync.py", "--check"], tree_test.split()):
        ran = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-2000:]
