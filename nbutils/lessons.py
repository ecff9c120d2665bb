"""A lesson from its first to its last cell: parameters, machine, profile, run folder, results of earlier lessons.

A lesson runs in a kernel (Colab, Kaggle, papermill) or as a plain script. Its parameters are the annotated upper-case
names of its `parameters` cell; an unknown name or a wrong type is refused: a misspelt parameter would change nothing.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nbutils import checkpoints, dashboard, hardware, install, platforms, profiles, record, scaling
from nbutils.config import flat, settings_in, settings_text
from nbutils.errors import CourseError
from nbutils.paths import NOTEBOOKS, make_folder
from nbutils.record import RunFolder

COURSE = ("01_environment", "02_data_prep", "03_qlora", "04_merge", "05_serve")
NOTICE, POWER_OFF = "NBUTILS_NOTICE", "NBUTILS_POWER_OFF"  # 1: after a lesson, or the course, has ended well
LAUNCHERS = ("05_serve", "06_scale_out")  # their processes may use every GPU
OVERRIDES = {"MAX_STEPS": "train.max_steps", "SAVE_STEPS": "train.save_steps"}  # 0 leaves them to the profile
RUN_NAME = re.compile(r"\w[\w.-]{0,79}")
Types = dict[str, type]
TYPES: Types = {"str": str, "int": int, "float": float, "bool": bool}


@dataclass(frozen=True)
class Lesson:
    """A lesson that was started by `begin`."""

    stem: str
    parameters: dict[str, Any]
    platform: platforms.Platform
    folders: platforms.Folders
    card: hardware.Card | None
    resolved: profiles.Resolved
    run: RunFolder
    started: float

    @property
    def profile(self) -> profiles.Profile:
        """The resolved profile."""
        return self.resolved.profile

    @property
    def model(self) -> str:
        """What `from_pretrained` is given: a folder or a hub id."""
        return self.resolved.model

    @property
    def model_name(self) -> str:
        """The model's name in facts.json, which means the same on the next machine."""
        return self.resolved.called

    @property
    def device(self) -> int | str:
        """Where the model is loaded: the index of this process's GPU, or the CPU."""
        return scaling.rank() if self.card else "cpu"

    @property
    def scratch(self) -> Path:
        """This run's folder on the fast disk that may vanish."""
        return self.folders.scratch / self.run.name

    def with_recipe(self, lengths: Sequence[int]) -> Lesson:
        """The same lesson with the recipe that fits examples of these lengths (in tokens)."""
        from transformers.utils import cached_file

        cached_file(self.model, "config.json")  # of a hub model: its size decides learning rate and method
        rows = profiles.Rows.of(lengths)
        fitted = replace(self, resolved=profiles.fit(self.resolved, rows))
        print(f"recipe    {profiles.schedule(fitted.profile.train, rows)}")
        if warning := profiles.few_steps(fitted.profile.train, self.resolved.given.train, rows):
            print(f"[WARN] {warning}")
        return fitted

    def require(self, stem: str) -> None:
        """Make sure that an earlier lesson's result is in the run folder; if it is not, run that lesson now."""
        if not self.run.has(stem):
            print(f"Lesson {stem} has not run in {self.run.path} yet: running it now with this profile.", flush=True)
            self.launch(stem)

    def launch(self, stem: str, processes: int = 1, threads: int = 0, keep: Path | None = None, **values: Any) -> None:
        """Run a lesson as a script of `processes` processes with this profile and model, here or in another folder."""
        script = NOTEBOOKS / f"{stem}.py"
        given = {"PROFILE": self.resolved.source, "MODEL": self.parameters.get("MODEL", ""), "RUN_NAME": self.run.name}
        given["SET"] = settings_text(self.resolved.set_values)
        types = declared_in(script)
        passed = {name: value for name, value in (given | values).items() if value and name in types}
        with deferred_goodbye():
            quiet = self.stem == "06_scale_out"  # it compares three runs of lesson 03, and shows what it compares
            scaling.launch(script, passed, keep or self.folders.keep, processes, threads, quiet)

    def finish(self, **facts: Any) -> None:
        """Write this lesson's facts and print where they are."""
        top = {
            "platform": asdict(self.platform), "profile": self.resolved.name, "profile_source": self.resolved.source,
            "model": self.model_name, "card": asdict(self.card) if self.card else None, "versions": record.versions(),
        }  # fmt: skip
        entry = {"seconds": round(time.monotonic() - self.started, 1), **facts}
        if self.stem == "03_qlora":  # what the adapter was made with
            top["set"], entry["settings"] = self.resolved.set_values, flat(self.profile.model_dump())
        whole = record.update(self.run.facts, top, self.stem, entry)
        record.write_report(self.run.report, self.run.name, whole)
        print(f"Lesson {self.stem} done in {entry['seconds']:.0f} s. Facts: {self.run.facts}")
        say_goodbye(self.platform, self.run, f"Lesson {self.stem}: {record.summary(entry)}")


def say_goodbye(platform: platforms.Platform, run: RunFolder, text: str) -> None:
    """After the work, where the environment asks for it: send a notice, and power off if all checkpoints are kept."""
    on = [
        name for name in (NOTICE, POWER_OFF) if os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on")
    ]
    if NOTICE in on:
        print(platforms.send_notice(f"Run {run.name} has ended", text))
    if POWER_OFF in on:
        print(platforms.power_off(platform, checkpoints.unsafe(run.checkpoints)))


@contextmanager
def deferred_goodbye() -> Iterator[None]:
    """Lessons within this block neither notify nor power off: they are a part of something larger, which does."""
    variables = {name: os.environ.pop(name) for name in (NOTICE, POWER_OFF) if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(variables)


def begin(stem: str, namespace: dict[str, Any]) -> Lesson:
    """Start a lesson and print the platform, the profile, the model and where the run is kept."""
    started = time.monotonic()
    if not platforms.in_kernel():
        sys.excepthook = _print_exception
    dashboard.calm_bars()
    hardware.share_processors()
    if stem not in LAUNCHERS:
        hardware.use_one_card()
        hardware.leave_no_gaps()
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # asks for a kernel no lesson needs
    values = collect(namespace)
    scaling.join()
    with scaling.main_first():
        install.ensure("train")
        # The processes of lesson 06 try their own GPUs; a try here would take memory from them.
        platform, folders, card = find_machine(may_download(values), try_card=stem != "06_scale_out")
        run, resolved = open_run(values, platform, folders, card)
    if stem == "03_qlora" and (line := scaling.hint(card.count if card else 0)):
        print(line)
    print(f"profile   {resolved.name}: {resolved.choices['profile'].reason}")
    print(f"model     {resolved.model}")
    print(f"run       {run.path}")
    return Lesson(stem, values, platform, folders, card, resolved, run, started)


def _print_exception(kind: type[BaseException], problem: BaseException, trace: Any) -> None:
    """In a plain script a CourseError ends with its message alone; anything else keeps its traceback."""
    if issubclass(kind, CourseError):
        print(f"\n[FAIL] {problem}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, problem, trace)


def collect(namespace: dict[str, Any]) -> dict[str, Any]:
    """The checked parameters of a lesson; in a plain script the command line is applied to `namespace` first."""
    annotations = namespace.get("__annotations__") or {}
    if not annotations and callable(namespace.get("__annotate__")):  # Python 3.14 computes them on demand
        annotations = namespace["__annotate__"](1)
    types = _parameter_types(annotations)
    if platforms.in_kernel():
        refuse_unknown(_injected(namespace.get("In", [])), types)
    elif namespace.get("__name__") == "__main__":
        namespace.update(_from_command_line(sys.argv[1:], types))
    values = {name: parse(name, namespace[name], kind, strict=True) for name, kind in types.items()}
    namespace.update(values)
    return values


def declared_in(source: Path) -> Types:
    """The parameters of a lesson and their types, read from its `.py` without running it."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    nodes = [node for node in tree.body if isinstance(node, ast.AnnAssign)]
    return _parameter_types({ast.unparse(node.target): ast.unparse(node.annotation) for node in nodes})


def _parameter_types(annotations: Mapping[str, Any]) -> Types:
    kinds = {name: kind for name, kind in annotations.items() if name.isupper()}
    return {name: kind if isinstance(kind, type) else TYPES[kind.strip("'\"")] for name, kind in kinds.items()}


def _from_command_line(arguments: Sequence[str], types: Types) -> dict[str, Any]:
    """`--NAME VALUE` pairs as typed values."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False, description="Parameters of this lesson.")
    for name, kind in types.items():
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS, metavar=kind.__name__)
    try:
        given, others = parser.parse_known_args(arguments)
        refuse_unknown([word[2:].partition("=")[0] for word in others if word.startswith("--")], types)
        if others:
            raise argparse.ArgumentError(None, f"what is {others[0]}?")
    except argparse.ArgumentError as problem:
        raise CourseError("lessons.command_line", problem=problem, parameters=_listing(types)) from problem
    return {name: parse(name, text, types[name]) for name, text in vars(given).items()}


def parse(name: str, value: Any, kind: type, strict: bool = False) -> Any:
    """A parameter as its declared type: text from a command line, or with `strict` the value in a cell."""
    from pydantic import TypeAdapter, ValidationError

    if kind is str and type(value) in (int, float):
        return str(value)  # papermill's -p makes a number of RUN_NAME 2024
    try:
        parsed: Any = TypeAdapter(kind).validate_python(value, strict=strict)
    except ValidationError as problem:
        raise CourseError("lessons.parameter_type", name=name, value=value, type=kind.__name__) from problem
    if type(parsed) in (int, float) and not parsed >= 0:
        raise CourseError("lessons.parameter_negative", name=name, value=parsed)
    return parsed


def refuse_unknown(names: Iterable[str], types: Types) -> None:
    """Stop if any name is not a parameter of this lesson."""
    if unknown := [name for name in names if name not in types]:
        near = difflib.get_close_matches(unknown[0].upper(), types, n=1)
        hint = f"did you mean {near[0]}?" if near else "remove it"
        raise CourseError("lessons.parameter_unknown", names=", ".join(unknown), parameters=_listing(types), hint=hint)


def _listing(types: Types) -> str:
    return ", ".join(f"{name} ({kind.__name__})" for name, kind in types.items())


def _injected(history: Sequence[str]) -> list[str]:
    """The names in the cell that papermill adds."""
    cells = [ast.parse(cell) for cell in history if cell.lstrip().startswith("# Parameters")]
    names = [ast.unparse(node.targets[0]) for cell in cells for node in cell.body if isinstance(node, ast.Assign)]
    return [name for name in names if not name.startswith("PAPERMILL_")]


def may_download(values: Mapping[str, Any]) -> bool:
    """Whether the model may have to be downloaded; the one that `auto` chooses depends on the GPU."""
    profile, model = values.get("PROFILE", "auto"), values.get("MODEL", "")
    return not profiles.is_tiny(model or ("tiny" if profile == "auto" else profiles.load(profile).model))


def find_machine(
    needs_model: bool, try_card: bool = True
) -> tuple[platforms.Platform, platforms.Folders, hardware.Card | None]:
    """The platform with its network and Drive ready, its folders, and a GPU that was tried."""
    platform, card = platforms.detect(), hardware.card()
    print(f"platform  {platform.name} ({platform.evidence})")
    for line in platforms.prepare_network(platform, probe=card is not None or needs_model):
        print(line)
    if platform.name == "colab":
        print(f"drive     {platforms.mount_drive(platform)}")
    folders = platforms.folders(platform)
    if not folders.lasting:
        print(f"[WARN] {folders.keep} may go away with this machine: download what you want to keep ({folders.remark})")
    if moved := platforms.use_model_cache(platform, folders):
        print(f"cache     {moved}")
    print(f"card      {card or 'none: this machine trains on its CPU'}")
    if try_card:
        hardware.require_working(card)
    return platform, folders, card


def open_run(
    values: dict[str, Any], platform: platforms.Platform, folders: platforms.Folders, card: hardware.Card | None
) -> tuple[RunFolder, profiles.Resolved]:
    """The run folder and the resolved profile; an existing run keeps the profile and SET it started with."""
    profile, model, name = values.get("PROFILE", "auto"), values.get("MODEL", ""), values.get("RUN_NAME", "")
    resume = values.get("RESUME", "auto")
    if resume not in ("auto", "never") and not resume.isdecimal():
        raise CourseError("lessons.resume", value=resume)
    if name and not RUN_NAME.fullmatch(name):
        raise CourseError("lessons.run_name", value=name)
    make_folder(folders.keep, "runs")
    make_folder(folders.scratch, "scratch files")
    unnamed = profile == "auto" and not model and not name
    name = unfinished_run(folders.keep, card) if unnamed else name

    def folder_of(chosen: str) -> RunFolder:
        run = RunFolder(folders.keep / (name or default_run_name(chosen, values.get("MODEL", ""))))
        _copy_earlier(run, folders, values)
        return run

    earlier = record.read(folder_of("").facts) if name else {}
    continued = profile == "auto" and not model and {"profile_source", "model"} <= set(earlier)
    if continued:
        profile, model = earlier["profile_source"], earlier["model"]
    resolved = profiles.resolve(
        profile, model, card=card, platform=platform, online=platforms.hub_online,
        overrides=lambda chosen: _overrides(folder_of(chosen), values),
    )  # fmt: skip
    if continued:
        began_with = {"profile": resolved.name, "model": resolved.model}
        reasons = {field: hardware.Choice(value, "this run began with it") for field, value in began_with.items()}
        resolved = replace(resolved, choices=resolved.choices | reasons)
    run = folder_of(resolved.name)
    resolved = replace(resolved, set_values=_set_values(run, values))
    if (former := record.read(run.facts).get("set")) and not values.get("SET"):
        kept = "this run began with it" if resolved.set_values else 'dropped: RESUME is "never", or another profile'
        print(f"SET       {settings_text(former)}: {kept}")
    make_folder(run.path, "this run")
    top: dict[str, Any] = {"profile": resolved.name, "profile_source": resolved.source, "model": resolved.called}
    trained = any(any(store.glob("checkpoint-*.json")) for store in checkpoints.stores(folders, run.name))
    if not trained or resume == "never":  # else the kept checkpoints have another SET, until lesson 03 continues them
        top["set"] = resolved.set_values
    record.begin(run.facts, top, unnamed)  # an invalid facts.json is an error now, not after the training
    return run, resolved


def _set_values(run: RunFolder, values: dict[str, Any]) -> dict[str, Any]:
    """SET; if it is empty, the one this run started with, unless another profile is named or it starts anew."""
    if text := values.get("SET"):
        return settings_in(text)
    earlier = record.read(run.facts)
    same = values.get("PROFILE", "auto") in ("auto", earlier.get("profile"), earlier.get("profile_source"))
    return earlier.get("set", {}) if same and values.get("RESUME") != "never" else {}


def _overrides(run: RunFolder, values: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    """What replaces values of the profile; MAX_STEPS and SAVE_STEPS win over SET."""
    reason = "parameter SET" if values.get("SET") else "parameter SET, with which this run began"
    given = {name: (value, reason) for name, value in _set_values(run, values).items()}
    steps = {field: (values[name], f"parameter {name}") for name, field in OVERRIDES.items() if values.get(name, 0) > 0}
    return given | steps


def _copy_earlier(run: RunFolder, folders: platforms.Folders, values: Mapping[str, Any]) -> None:
    """Copy data and facts of this run from where an earlier session left them: an attached output, a former keep."""
    for store in checkpoints.stores(folders, run.name)[2:]:  # after those of scratch and keep
        former = RunFolder(store.parent)
        attached = folders.is_attached(store)
        if attached and any(place.is_symlink() for place in (store, former.path, former.data, former.facts)):
            print(f"[WARN] {former.path} is not used: a part of it is a link, which could lead anywhere")
            continue
        facts = {} if run.facts.exists() else record.read(former.facts)
        if attached and facts:
            _require_named(facts, former.path, values)
            facts["set"] = {name: value for name, value in facts.get("set", {}).items() if name != "data.source"}
        if former.has("02_data_prep") and not run.has("02_data_prep") and not any(run.data.glob("*")):
            print(f"data      copied from {former.data}")
            make_folder(run.path, "this run")
            shutil.copytree(former.data, run.data, dirs_exist_ok=True, ignore=_links_and_pipes)
        if facts:
            make_folder(run.path, "this run")
            record.begin(run.facts, facts, by_auto=False)


def _require_named(facts: dict[str, Any], place: Path, values: Mapping[str, Any]) -> None:
    """Show what an attached run started with; a model or profile that is not the course's must be named here."""
    there = {"MODEL": str(facts.get("model", "")), "PROFILE": str(facts.get("profile_source", ""))}
    shown = {"profile": there["PROFILE"], "model": there["MODEL"], "SET": settings_text(facts.get("set", {}))}
    print(f"facts     copied from {place}: " + ", ".join(f"{name} {text or '-'}" for name, text in shown.items()))
    own = {"MODEL": profiles.is_known(there["MODEL"]), "PROFILE": there["PROFILE"] in profiles.names()}
    named = {name: (text, os.path.abspath(os.path.expanduser(text))) for name in there if (text := values.get(name))}
    strange = [name for name, text in there.items() if text and not own[name] and text not in named.get(name, ())]
    if strange:
        settings = " and ".join(f"{name} = {there[name]!r}" for name in strange)
        raise CourseError("lessons.attached_run", folder=place, settings=settings)


def _links_and_pipes(folder: str, names: list[str]) -> set[str]:
    """What is not copied from an attached folder: with a link it could name any file of this machine."""
    places = {name: Path(folder, name) for name in names}
    return {name for name, place in places.items() if place.is_symlink() or not (place.is_file() or place.is_dir())}


def unfinished_run(keep: Path, card: hardware.Card | None) -> str:
    """The newest run that `auto` began here for a GPU and did not finish, whatever GPU is here today; "" if none."""
    found: list[tuple[float, str]] = []
    for run in map(RunFolder, keep.iterdir()):
        with suppress(CourseError):  # an invalid facts.json
            facts = record.read(run.facts)
            trained = facts.get("lessons", {}).get("03_qlora")
            finished = trained and record.complete(trained)
            if facts.get("by_auto") and facts.get("profile") != "tiny" and not finished:
                found += [(file.stat().st_mtime, run.name) for file in run.checkpoints.glob("checkpoint-*.json")]
    if not found:
        return ""
    _, name = max(found)
    if card is None:
        print(f"[WARN] run {name} is not finished, and it needs a GPU: start it on a machine with one to continue.")
        return ""
    print(f"run {name} was begun here and is not finished: continuing it. PROFILE or RUN_NAME begins another.")
    return name


def default_run_name(profile: str, model: str) -> str:
    """A run without a name is called after its profile, and its model if that was named too."""
    first, second = (re.sub(r"[^\w.-]+", "-", Path(text).name).strip("-._") for text in (profile, model))
    return f"{first}-{second}" if second and second != first else first or "run"
