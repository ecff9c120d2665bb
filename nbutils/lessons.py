"""A lesson from its first to its last cell: parameters, profile, run folder, what earlier lessons left, facts.

Not here: what a lesson teaches. A lesson may run in a kernel (Colab, Kaggle, papermill) or as a plain script.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nbutils import checkpoints, dashboard, hardware, install, parameters, platforms, profiles, record, scaling
from nbutils.config import flat, settings_in, settings_text
from nbutils.errors import CourseError
from nbutils.paths import NOTEBOOKS, make_folder, stamp

COURSE = ("01_environment", "02_data_prep", "03_qlora", "04_merge", "05_serve")
NOTICE, POWER_OFF = "NBUTILS_NOTICE", "NBUTILS_POWER_OFF"  # 1: after a lesson, or the course, has ended well
LAUNCHING = ("05_serve", "06_scale_out")  # their work is done by processes of their own, which may use every card
OVERRIDES = {"MAX_STEPS": "train.max_steps", "SAVE_STEPS": "train.save_steps"}  # 0 leaves them to the profile


class RunFolder:
    """The folder of one run; lessons meet here."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name
        self.data = path / "data"  # train.jsonl, eval.jsonl, data_card.json
        self.checkpoints = path / "checkpoints"  # verified archives
        self.adapter = path / "adapter"
        self.elsewhere = path / "merged.json"  # where the merged model is, if it did not fit here
        self.logs = path / "logs"  # TensorBoard and W&B
        self.notebooks = path / "notebooks"  # executed copies of headless runs
        self.facts = path / "facts.json"
        self.report = path / "report.md"  # the facts for people

    @property
    def merged(self) -> Path:
        """The merged model: here, or where lesson 04 found room for it on this machine."""
        try:
            place = Path(json.loads(self.elsewhere.read_text(encoding="utf-8"))["folder"])
        except (OSError, ValueError, KeyError, TypeError):
            return self.path / "merged"
        return place if place.parent.is_dir() else self.path / "merged"

    def has(self, stem: str) -> bool:
        """Whether that lesson's result is here and whole; a merge older than its adapter does not count."""
        if stem == "02_data_prep":
            return (self.data / "data_card.json").exists()
        adapter, merged = stamp(self.adapter), stamp(self.merged)
        if stem == "03_qlora":
            return adapter is not None
        return merged is not None and merged.get("adapter") == adapter


@dataclass(frozen=True)
class Lesson:
    """What a lesson knows about itself; made by `begin`."""

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

    def with_recipe(self, lengths: Sequence[int]) -> Lesson:
        """The same lesson with the recipe that suits examples of these lengths (in tokens), and what it comes to."""
        from transformers.utils import cached_file

        cached_file(self.model, "config.json")  # of a hub model: its size decides learning rate and method
        rows = profiles.Rows.of(lengths)
        fitted = replace(self, resolved=profiles.fit(self.resolved, rows))
        print(f"recipe    {profiles.schedule(fitted.profile.train, rows)}")
        if told := profiles.few_steps(fitted.profile.train, self.resolved.given.train, rows):
            print(f"[WARN] {told}")
        return fitted

    @property
    def model(self) -> str:
        """What `from_pretrained` is given: a folder or a hub name."""
        return self.resolved.model

    @property
    def model_name(self) -> str:
        """The model as it is written down, which means the same on the next machine."""
        return self.resolved.called

    @property
    def device(self) -> int | str:
        """Where the model is loaded: the number of this process's card, or the CPU."""
        return scaling.rank() if self.card else "cpu"

    @property
    def scratch(self) -> Path:
        """This run's folder on the fast disk that may vanish."""
        return self.folders.scratch / self.run.name

    def require(self, stem: str) -> None:
        """Make sure an earlier lesson's result is in the run folder; if it is not, run that lesson now."""
        if self.run.has(stem):
            return
        print(f"Lesson {stem} has not run in {self.run.path} yet: running it now with this profile.", flush=True)
        self.launch(stem)

    def launch(self, stem: str, processes: int = 1, threads: int = 0, keep: Path | None = None, **values: Any) -> None:
        """Run a lesson as a script of `processes` processes with this profile and model, here or in another folder."""
        script = NOTEBOOKS / f"{stem}.py"
        wanted = {"PROFILE": self.resolved.source, "MODEL": self.parameters.get("MODEL", ""), "RUN_NAME": self.run.name}
        wanted["SET"] = settings_text(self.resolved.set_values)
        types = parameters.declared_in(script)
        passed = {name: value for name, value in (wanted | values).items() if value and name in types}
        with goodbye_later():
            calm = self.stem == "06_scale_out"  # it shows what it compares, and runs lesson 03 three times
            scaling.launch(script, passed, keep or self.folders.keep, processes, threads, calm)

    def finish(self, **facts: Any) -> None:
        """Write this lesson's facts and say where everything is."""
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
    """What the environment asks for after the work: a WeChat notice, and switching the machine off if all is safe."""
    if _wished(NOTICE):
        print(platforms.send_notice(f"Run {run.name} has ended", text))
    if _wished(POWER_OFF):
        print(platforms.power_off(platform, checkpoints.unsafe(run.checkpoints)))


def _wished(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on")


@contextmanager
def goodbye_later() -> Iterator[None]:
    """Within this block lessons are a part of something larger, which says goodbye itself."""
    wishes = {name: os.environ.pop(name) for name in (NOTICE, POWER_OFF) if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(wishes)


def begin(stem: str, namespace: dict[str, Any]) -> Lesson:
    """Start a lesson and print where it is, what it found and where its run is kept."""
    started = time.monotonic()
    if not platforms.in_kernel():
        sys.excepthook = _tell_plainly
    dashboard.calm_bars()
    hardware.share_processors()
    if stem not in LAUNCHING:
        hardware.use_one_card()
        hardware.leave_no_gaps()
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # asks for a kernel no lesson needs
    values = parameters.collect(namespace)
    scaling.join()
    with scaling.main_first():
        install.ensure("train")
        tried_here = stem != "06_scale_out"  # its processes try their own cards; a try here would take room from them
        platform, folders, card = find_machine(may_download(values), tried_here)
        run, resolved = open_run(values, platform, folders, card)
    if stem == "03_qlora" and (line := scaling.hint(card.count if card else 0)):
        print(line)
    print(f"profile   {resolved.name}: {resolved.choices['profile'].reason}")
    print(f"model     {resolved.model}")
    print(f"run       {run.path}")
    return Lesson(stem, values, platform, folders, card, resolved, run, started)


def may_download(values: Mapping[str, Any]) -> bool:
    """Whether the model that was named may have to come from the network; what `auto` takes is known by its card."""
    profile, model = values.get("PROFILE", "auto"), values.get("MODEL", "")
    return not profiles.is_tiny(model or ("tiny" if profile == "auto" else profiles.load(profile).model))


def find_machine(
    needs_model: bool, try_card: bool = True
) -> tuple[platforms.Platform, platforms.Folders, hardware.Card | None]:
    """The platform with its network and Drive made ready, its folders, and a card that was seen computing."""
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


def _tell_plainly(kind: type[BaseException], problem: BaseException, trace: Any) -> None:
    """In a plain script a learner's mistake ends with its message; anything else keeps its traceback."""
    if issubclass(kind, CourseError):
        print(f"\n[FAIL] {problem}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, problem, trace)


def open_run(
    values: dict[str, Any], platform: platforms.Platform, folders: platforms.Folders, card: hardware.Card | None
) -> tuple[RunFolder, profiles.Resolved]:
    """The run folder and the resolved profile; a run that exists already keeps the profile and SET it began with."""
    profile, model, name = values.get("PROFILE", "auto"), values.get("MODEL", ""), values.get("RUN_NAME", "")
    check_resume(values.get("RESUME", "auto"))
    make_folder(folders.keep, "runs")
    make_folder(folders.scratch, "what a run needs for a while")
    unnamed = profile == "auto" and not model and not name
    name = unfinished_run(folders.keep, card) if unnamed else name

    def folder_of(chosen: str) -> RunFolder:
        run = RunFolder(folders.keep / (name or default_run_name(chosen, values.get("MODEL", ""))))
        _take_over(run, folders, values)
        return run

    earlier = record.read(folder_of(check_run_name(name)).facts) if name else {}
    continued = profile == "auto" and not model and {"profile_source", "model"} <= set(earlier)
    if continued:
        profile, model = earlier["profile_source"], earlier["model"]
    resolved = profiles.resolve(
        profile, model, card=card, platform=platform, online=platforms.hub_online,
        overrides=lambda chosen: _overrides(folder_of(chosen), values),
    )  # fmt: skip
    if continued:
        values_then = {"profile": resolved.name, "model": resolved.model}
        reasons = {field: hardware.Choice(value, "this run began with it") for field, value in values_then.items()}
        resolved = replace(resolved, choices=resolved.choices | reasons)
    run = folder_of(resolved.name)
    resolved = replace(resolved, set_values=_given(run, values))
    if (former := record.read(run.facts).get("set")) and not values.get("SET"):
        held = "this run began with it" if resolved.set_values else 'dropped: RESUME is "never", or another profile'
        print(f"SET       {settings_text(former)}: {held}")
    make_folder(run.path, "this run")
    begun: dict[str, Any] = {"profile": resolved.name, "profile_source": resolved.source, "model": resolved.called}
    trained = any(one for store in checkpoints.stores(folders, run.name) for one in store.glob("checkpoint-*.json"))
    if not trained or values.get("RESUME") == "never":
        begun["set"] = resolved.set_values  # else what was trained is not of this SET, unless lesson 03 goes on with it
    record.begin(run.facts, begun, unnamed)  # a damaged record is told now, not after the training
    return run, resolved


def _given(run: RunFolder, values: dict[str, Any]) -> dict[str, Any]:
    """SET; where it is not given, the one this run began with, unless another profile is named or it starts anew."""
    if text := values.get("SET"):
        return settings_in(text)
    earlier = record.read(run.facts)
    same = values.get("PROFILE", "auto") in ("auto", earlier.get("profile"), earlier.get("profile_source"))
    return earlier.get("set", {}) if same and values.get("RESUME") != "never" else {}


def _overrides(run: RunFolder, values: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    """What replaces values of the profile; a parameter of its own wins over SET."""
    reason = "parameter SET" if values.get("SET") else "parameter SET, with which this run began"
    given = {name: (value, reason) for name, value in _given(run, values).items()}
    own = {field: (values[name], f"parameter {name}") for name, field in OVERRIDES.items() if values.get(name, 0) > 0}
    return given | own


def _take_over(run: RunFolder, folders: platforms.Folders, values: Mapping[str, Any]) -> None:
    """Copy data and record of this run from where an earlier start left them: an attached output, a former keep."""
    for store in checkpoints.stores(folders, run.name)[2:]:  # after those of scratch and keep
        former = RunFolder(store.parent)
        attached = folders.is_attached(store)
        if attached and any(place.is_symlink() for place in (store, former.path, former.data, former.facts)):
            print(f"{former.path} is not taken over: a part of it is a link, which could lead anywhere")
            continue
        facts = {} if run.facts.exists() else record.read(former.facts)
        if attached and facts:
            _require_named(facts, former.path, values)
            facts["set"] = {name: value for name, value in facts.get("set", {}).items() if name != "data.source"}
        if former.has("02_data_prep") and not run.has("02_data_prep") and not any(run.data.glob("*")):
            print(f"data      taken over from {former.data}")
            make_folder(run.path, "this run")
            shutil.copytree(former.data, run.data, dirs_exist_ok=True, ignore=_not_plain)
        if facts:
            make_folder(run.path, "this run")
            record.begin(run.facts, facts, by_auto=False)


def _require_named(facts: dict[str, Any], place: Path, values: Mapping[str, Any]) -> None:
    """Show what a run from elsewhere was begun with; a model or profile that is not the course's must be named here."""
    model, profile = str(facts.get("model", "")), str(facts.get("profile_source", ""))
    settings = settings_text(facts.get("set", {})) or "-"
    print(f"record    taken over from {place}: profile {profile or '-'}, model {model or '-'}, SET {settings}")
    strange = {"MODEL": model and not profiles.is_known(model), "PROFILE": profile and profile not in profiles.names()}
    there = {"MODEL": model, "PROFILE": profile}
    named = {name: (text, os.path.abspath(os.path.expanduser(text))) for name in there if (text := values.get(name))}
    if unnamed := [name for name, odd in strange.items() if odd and there[name] not in named.get(name, ())]:
        asked = " and ".join(f"{name} = {there[name]!r}" for name in unnamed)
        raise CourseError(
            f"the run in {place} was begun elsewhere, with {asked}.",
            "the course's own, or what you name yourself",
            f"set {asked} if that is what you want to go on with; else detach it or choose another RUN_NAME",
        )


def _not_plain(folder: str, names: list[str]) -> set[str]:
    """Those of a folder that are links or pipes: an attached output could name any file of this machine with one."""
    places = {name: Path(folder, name) for name in names}
    return {name for name, place in places.items() if place.is_symlink() or not (place.is_file() or place.is_dir())}


def unfinished_run(keep: Path, card: hardware.Card | None) -> str:
    """The newest run that `auto` began here and did not finish, also with another card than today's; "" if none."""
    found = [(since, place.name) for place in keep.iterdir() if (since := _unfinished_since(RunFolder(place)))]
    if not found:
        return ""
    _, name = max(found)
    if card is None:
        print(f"[WARN] run {name} is not finished. It needs a card: start it on a machine with one to go on.")
        return ""
    print(f"run {name} was begun here and is not finished: going on with it. PROFILE or RUN_NAME begins another.")
    return name


def _unfinished_since(run: RunFolder) -> float:
    """When the last checkpoint of an unfinished training was kept, if `auto` began it for a card; else 0."""
    try:
        facts = record.read(run.facts)
    except CourseError:
        return 0.0
    trained = facts.get("lessons", {}).get("03_qlora")
    if not facts.get("by_auto") or facts.get("profile") == "tiny" or (trained and record.complete(trained)):
        return 0.0
    return max((place.stat().st_mtime for place in run.checkpoints.glob("checkpoint-*.json")), default=0.0)


def default_run_name(profile: str, model: str) -> str:
    """A run without a name is called after its profile, and its model if that was named too."""
    first, second = (re.sub(r"[^\w.-]+", "-", Path(text).name).strip("-._") for text in (profile, model))
    return f"{first}-{second}" if second and second != first else first or "run"


def check_run_name(name: str) -> str:
    """The name, if it can be a folder of its own below the runs."""
    if not re.fullmatch(r"\w[\w.-]{0,79}", name):
        raise CourseError(
            f"RUN_NAME is {name!r}.", "up to 80 letters, digits, '.', '_' and '-', the first a letter or digit",
            "choose such a name, or leave it empty to name the run after its profile",
        )  # fmt: skip
    return name


def check_resume(resume: str) -> None:
    """Refuse what is neither a way to resume nor a step."""
    if resume not in ("auto", "never") and not resume.isdecimal():
        raise CourseError(
            f"RESUME is {resume!r}.", "'auto', 'never', or the step of a checkpoint",
            '"auto" continues from the newest checkpoint that verifies, "80" from that of step 80, "never" starts anew',
        )  # fmt: skip
