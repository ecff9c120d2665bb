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
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from nbutils import checkpoints, display, distributed, hardware, install, notices, platforms, profiles, record
from nbutils.config import flat, settings_in, settings_text
from nbutils.errors import CourseError
from nbutils.files import NOTEBOOKS, make_folder, read_object, stamp
from nbutils.language import joined, language, print_whatever, tr
from nbutils.record import RunFolder

COURSE = ("01_environment", "02_data_prep", "03_qlora", "04_merge", "05_serve")
OF_AN_ADAPTER = ("04_merge", "05_serve", "08_export", "09_benchmark")  # what they measure is of one adapter
LAUNCHERS = ("05_serve", "06_scale_out", "09_benchmark")  # their processes may use every GPU
TRY_NO_GPU = ("06_scale_out", "99_when_it_breaks")  # its processes try their own; a broken one is what it is for
OVERRIDES = {"MAX_STEPS": "sft.max_steps", "SAVE_STEPS": "sft.save_steps"}  # 0 leaves them to the profile
LARGEST_ON_CPU = 1  # billions of parameters that a profile without a GPU begins to train
RUN_NAME = re.compile(r"\w[\w.-]{0,79}")
TYPES: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool}


@dataclass
class Lesson(record.LessonLike):
    """A lesson that was started by `begin`."""

    stem: str
    parameters: dict[str, Any]
    platform: platforms.Platform
    folders: platforms.Folders
    gpu: hardware.GPU | None
    resolved: profiles.Resolved
    run: RunFolder
    started: float
    work: notices.Work

    def __post_init__(self) -> None:
        self.profile = self.resolved.profile
        self.model = self.resolved.model  # what `from_pretrained` is given: a folder or a hub id
        self.model_name = self.resolved.called  # in facts.json, where it means the same on the next machine
        self.device: int | str = distributed.local_rank() if self.gpu else "cpu"
        self.scratch = self.folders.scratch / self.run.name  # on the fast disk that may vanish

    @property
    def device_map(self) -> dict[str, int | str] | None:
        """Where `from_pretrained` puts the weights, as the engine of this training wants it."""
        return distributed.device_map(self.device, str(self.profile.from_pretrained.dtype), str(self.profile.method))

    def with_recipe(self, lengths: Sequence[int], held_out: int | None = None) -> Lesson:
        """The same lesson with the recipe for examples of these lengths (in tokens), `held_out` rows beside them."""
        from transformers.utils import cached_file

        cached_file(self.model, "config.json")  # of a hub model: its size decides learning rate and method
        rows = profiles.Rows.of(lengths, held_out)
        fitted = replace(self, resolved=self.fitted(rows))
        processes = distributed.world_size()
        print(tr("recipe    {schedule}", schedule=profiles.schedule(fitted.profile.sft, rows, processes)))
        if warning := profiles.few_steps(fitted.profile, self.resolved.given, rows, processes):
            print(f"[WARN] {warning}")
        return fitted

    def fitted(self, rows: profiles.Rows) -> profiles.Resolved:
        """The profile for these rows; a run that has begun keeps the rows of its steps and of its validation."""
        goes_on = distributed.is_main() and self.parameters.get("RESUME") != "never"
        began = distributed.broadcast(checkpoints.newest(self.folders, self.run.name) if goes_on else None)
        resolved = self.resolved
        if began:
            resolved = profiles.keep_begun(resolved, began.fingerprint, began.validation_rows)
        return profiles.fit(resolved, rows)

    def require(self, stem: str) -> None:
        """Make sure that an earlier lesson's result is in the run folder; if it is not, run that lesson now."""
        if not self.run.has(stem):
            others = ", ".join(name for name, run in record.runs(self.folders.keep).items() if run.has(stem))
            if others and stem != "02_data_prep" and not self.parameters.get("RUN_NAME"):  # hours that nobody asked for
                raise CourseError(
                    tr(
                        "RUN_NAME is empty, and {run}, the run of this profile, has no result of lesson {lesson}. "
                        "These runs have one: {others}.",
                        run=self.run.name,
                        lesson=stem,
                        others=others,
                    ),
                    todo=tr(
                        'Set RUN_NAME to the run you mean. RUN_NAME = "{run}" runs {lesson} now.',
                        run=self.run.name,
                        lesson=stem,
                    ),
                )
            text = tr("Lesson {lesson} has not run in {run} yet: running it now.", lesson=stem, run=self.run.path)
            print(text, flush=True)
            self.launch([sys.executable, str(NOTEBOOKS / f"{stem}.py"), *self.arguments(stem)])
        if stem == "03_qlora":
            trained = record.read(self.run.facts).get("lessons", {}).get(stem, {})
            if not record.complete(trained):
                raise CourseError(
                    tr(
                        "The training of this run has ended at step {step} of {steps}.",
                        step=trained["steps"],
                        steps=trained["planned_steps"],
                    ),
                    todo=tr(
                        "Run lesson 03 again, unchanged, which continues it. To use the adapter as it is, run lesson "
                        "03 with MAX_STEPS = {step}.",
                        step=trained["steps"],
                    ),
                )
            made, rows = stamp(self.run.adapter) or {}, read_object(self.run.data / "data_card.json").get("fingerprint")
            if rows and made.get("fingerprint", {}).get("data", rows) != rows:
                raise CourseError(
                    tr("The adapter of this run was trained on other rows than {data} holds now.", data=self.run.data),
                    todo=tr("Train on these rows with another RUN_NAME, or put the former data folder back."),
                )

    def arguments(self, stem: str, **values: Any) -> list[str]:
        """The words after a lesson's name on its command line: this profile, model and run, and what is given here."""
        given = {"PROFILE": self.resolved.source, "MODEL": self.parameters.get("MODEL", ""), "RUN_NAME": self.run.name}
        given["SET"] = settings_text(self.resolved.set_values)
        types = declared_in(NOTEBOOKS / f"{stem}.py")
        words = []
        for name, value in (given | values).items():
            if value and name in types:
                words += [f"--{name}", str(value)]
        return words

    def launch(self, command: list[str], processes: int = 1, threads: int = 0, keep: Path | None = None) -> None:
        """Run the command line of a lesson, which ends with this kernel; its runs are kept here or elsewhere."""
        with notices.deferred():
            calm = self.stem == "06_scale_out"  # it compares three runs of lesson 03, and shows what it compares
            distributed.launch(command, keep or self.folders.keep, processes, threads, calm)

    def finish(self, *measured: Any, **facts: Any) -> None:
        """Write what was measured to facts.json and print where that is."""
        facts = {name: value for one in measured for name, value in one.facts().items()} | facts
        top = {
            "platform": asdict(self.platform), "profile": self.resolved.name, "profile_source": self.resolved.source,
            "model": self.model_name, "card": asdict(self.gpu) if self.gpu else None, "versions": record.versions(),
        }  # fmt: skip
        entry = {"seconds": round(time.monotonic() - self.started, 1), **facts}
        if self.stem == "03_qlora":  # what the adapter was made with
            top["set"], entry["settings"] = self.resolved.set_values, flat(self.profile.model_dump())
        changed = self.stem == "03_qlora" and (entry.get("train_seconds") or self.run.merge_is_outdated)
        whole = record.update(self.run.facts, top, self.stem, entry, OF_AN_ADAPTER if changed else ())
        record.write_report(self.run.report, self.run.name, whole)
        about = {"lesson": self.stem, "seconds": entry["seconds"], "facts": self.run.facts}
        print(tr("Lesson {lesson} done in {seconds:.0f} s. Facts: {facts}", **about))
        self.work.ended("finished" if record.complete(entry) else "unfinished", f"{self.stem}: {_summary(entry)}")


def _summary(entry: Mapping[str, Any]) -> str:
    """What a lesson came to, in the few words of a notice."""
    parts = []
    if "planned_steps" in entry:
        parts.append(tr("step {steps} of {planned}", steps=entry["steps"], planned=entry["planned_steps"]))
    if best := (entry.get("validation_loss") or {}).get("best"):
        parts.append(tr("validation loss {loss:.3g}", loss=best))
    if "verdict" in entry.get("evaluation", {}):
        parts.append(record.outcome(entry["evaluation"]))
    return joined(parts) or display.clock(entry["seconds"])


def begin(stem: str, namespace: dict[str, Any]) -> Lesson:
    """Start a lesson and print the platform, the profile, the model and where the run is kept."""
    started = time.monotonic()
    work = notices.begin(stem)
    if not platforms.in_kernel():
        print_whatever()
    display.calm_bars()
    hardware.share_processors()
    if stem not in LAUNCHERS:
        hardware.use_one_gpu()
        hardware.leave_no_gaps()
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # asks for a kernel no lesson needs
    values = collect(stem, namespace)
    distributed.join()
    notices.require_settings()
    work.watch()
    with distributed.main_first():
        install.ensure("train")
        if language() == "zh":
            display.pyplot()  # the figures that a lesson draws by itself are in Chinese too
        platform, folders, gpu = find_machine(values, try_gpu=stem not in TRY_NO_GPU)
        run, resolved = open_run(values, platform, folders, gpu)
        work.opened(run)
    if stem == "03_qlora" and (line := distributed.hint(gpu.count if gpu else 0)):
        print(line)
    print(tr("profile   {name}: {reason}", name=resolved.name, reason=resolved.choices["profile"].reason))
    print(tr("model     {model}", model=resolved.model), tr("run       {folder}", folder=run.path), sep="\n")
    if values.get("DATA") and stem in ("02_data_prep", "03_qlora") and profiles.is_tiny(resolved.model):
        print(tr('[WARN] the tiny model learns only its sample task: PROFILE "laptop" is for rows of your own'))
    if distributed.strategy():
        words = {"engine": distributed.strategy_name(str(resolved.profile.method)), "count": distributed.world_size()}
        print(tr("engine    {engine}, processes: {count}", **words))
    return Lesson(stem, values, platform, folders, gpu, resolved, run, started, work)


def collect(stem: str, namespace: dict[str, Any]) -> dict[str, Any]:
    """The checked parameters of a lesson; in a plain script the command line is applied to `namespace` first."""
    types = declared_in(NOTEBOOKS / f"{stem}.py")
    if platforms.in_kernel():  # the cell that papermill adds
        cells = [ast.parse(cell) for cell in namespace.get("In", []) if cell.lstrip().startswith("# Parameters")]
        names = [ast.unparse(node.targets[0]) for cell in cells for node in cell.body if isinstance(node, ast.Assign)]
        refuse_unknown([name for name in names if not name.startswith("PAPERMILL_")], types)
    elif namespace.get("__name__") == "__main__":
        parser = argparse.ArgumentParser(allow_abbrev=False, description="Parameters of this lesson.")
        for name, kind in types.items():
            parser.add_argument(f"--{name}", default=argparse.SUPPRESS, metavar=kind.__name__)
        given, others = parser.parse_known_args()
        refuse_unknown([word[2:].partition("=")[0] for word in others if word.startswith("--")], types)
        if others:
            parser.error(tr("write --NAME VALUE; what is {word}?", word=others[0]))
        namespace.update({name: parse(name, text, types[name]) for name, text in vars(given).items()})
    values = {name: parse(name, namespace[name], types[name], strict=True) for name in types if name in namespace}
    namespace.update(values)
    return values


def declared_in(source: Path) -> dict[str, type]:
    """The parameters of a lesson and their types, read from its `.py` without running it."""
    body = ast.parse(source.read_text(encoding="utf-8")).body
    declared = {ast.unparse(node.target): ast.unparse(node.annotation) for node in body if type(node) is ast.AnnAssign}
    return {name: TYPES[kind] for name, kind in declared.items() if name.isupper()}


def parse(name: str, value: Any, kind: type, strict: bool = False) -> Any:
    """A parameter as its declared type: text from a command line, or with `strict` the value in a cell."""
    if kind is str and type(value) in (int, float):
        return str(value)  # papermill's -p makes a number of RUN_NAME 2024
    bounded: Any = Annotated[kind, Field(ge=0, le=2**32 - 1)] if kind in (int, float) else kind
    try:
        return TypeAdapter(bounded).validate_python(value, strict=strict)
    except ValidationError as problem:
        raise CourseError(
            tr("Parameter {name} is {value!r}.", name=name, value=value),
            allowed=tr("a value of type {type} (numbers: from 0 to 4294967295)", type=kind.__name__),
            todo=tr("Correct {name} in the parameters cell, or after -p {name}.", name=name),
        ) from problem


def refuse_unknown(names: Iterable[str], types: dict[str, type]) -> None:
    """Stop if any name is not a parameter of this lesson."""
    if unknown := [name for name in names if name not in types]:
        near = difflib.get_close_matches(unknown[0].upper(), types, n=1)
        elsewhere = [file.stem for file in sorted(NOTEBOOKS.glob("*.py")) if unknown[0] in declared_in(file)]
        hint = tr("Remove it; it is for {lessons}.", lessons=", ".join(elsewhere) or tr("no lesson"))
        hint = tr("Did you mean {name}?", name=near[0]) if near else hint
        listed = ", ".join(f"{name} ({kind.__name__})" for name, kind in types.items())
        raise CourseError(tr("Unknown parameter {names}.", names=", ".join(unknown)), allowed=listed, todo=hint)


def find_machine(
    values: Mapping[str, Any], try_gpu: bool = True
) -> tuple[platforms.Platform, platforms.Folders, hardware.GPU | None]:
    """The platform with its network and Drive ready, its folders, and a GPU that was tried."""
    profile, model = values.get("PROFILE", "auto"), values.get("MODEL", "")
    is_tiny = profiles.is_tiny(model or ("tiny" if profile == "auto" else profiles.load(profile).model))
    platform, gpu = platforms.detect(), hardware.gpu()
    if gpu is None:  # nothing is compiled for a CPU, and bitsandbytes would import torch's compiler: two seconds
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    print(tr("platform  {name} ({evidence})", name=platform.name, evidence=tr(platform.evidence)))
    for line in platforms.prepare_network(platform, probe=gpu is not None or not is_tiny):
        print(line)
    if platform.name == "colab":
        print(tr("drive     {told}", told=platforms.mount_drive(platform)))
    folders = platforms.folders(platform)
    if not folders.lasting:
        told = {"folder": folders.keep, "remark": folders.remark}
        print(tr("[WARN] {folder} may go away with this machine: download what you want to keep ({remark})", **told))
    if moved := platforms.use_model_cache(platform, folders):
        print(tr("cache     {told}", told=moved))
    print(tr("gpu       {gpu}", gpu=gpu or tr("none: this machine trains on its CPU")))
    if try_gpu:
        hardware.require_working(gpu)
    return platform, folders, gpu


def open_run(
    values: dict[str, Any], platform: platforms.Platform, folders: platforms.Folders, gpu: hardware.GPU | None
) -> tuple[RunFolder, profiles.Resolved]:
    """The run folder and the resolved profile; an existing run keeps the profile and SET it started with."""
    profile, model, name = values.get("PROFILE", "auto"), values.get("MODEL", ""), values.get("RUN_NAME", "")
    resume = values.get("RESUME", "auto")
    if resume not in ("auto", "never") and not resume.isdecimal():
        raise CourseError(
            tr("RESUME is {value!r}.", value=resume),
            allowed=tr(
                "'auto' (the newest checkpoint that verifies), 'never' (start over), or the step of a checkpoint"
            ),
            todo=tr("Set RESUME to one of them."),
        )
    if name and not RUN_NAME.fullmatch(name):
        raise CourseError(
            tr("RUN_NAME is {value!r}.", value=name),
            allowed=tr("up to 80 letters, digits, '.', '_' and '-', the first a letter or digit"),
            todo=tr("Choose such a name, or leave it empty to name the run after its profile."),
        )
    make_folder(folders.keep, tr("runs"))
    make_folder(folders.scratch, tr("scratch files"))
    unnamed = profile == "auto" and not model and not name
    name = unfinished_run(folders.keep, gpu) if unnamed else name

    def folder_of(chosen: str) -> RunFolder:  # without a name it is called after its profile, and its model if named
        given = (re.sub(r"[^\w.-]+", "-", Path(text).name).strip("-._") for text in (chosen, values.get("MODEL", "")))
        run = RunFolder(folders.keep / (name or "-".join(dict.fromkeys(filter(None, given))) or "run"))
        _copy_earlier(run, folders, values)
        return run

    def set_of(run: RunFolder) -> dict[str, Any]:
        """SET; if it is empty, the one this run started with, unless another profile is named or it starts over."""
        if text := values.get("SET"):
            return settings_in(text)
        began = record.read(run.facts)
        same = values.get("PROFILE", "auto") in ("auto", began.get("profile"), began.get("profile_source"))
        return began.get("set", {}) if same and resume != "never" else {}

    def overrides(chosen: str) -> dict[str, tuple[Any, str]]:  # MAX_STEPS and SAVE_STEPS win over SET
        kept = {field: (value, tr("SET of this run")) for field, value in set_of(folder_of(chosen)).items()}
        wanted = {name: field for name, field in OVERRIDES.items() if values.get(name)}
        return kept | {field: (values[name], tr("parameter {name}", name=name)) for name, field in wanted.items()}

    if profile != "auto" and not model and gpu is None:
        known = profiles.known_models().get(profiles.load(profile).model)
        begun = record.read(folder_of(Path(profile).stem).facts)  # a run of a GPU may be merged and served here
        if known and known.billions > LARGEST_ON_CPU and not begun:
            raise CourseError(
                tr(
                    "The profile {profile} trains {model}, which needs a GPU, and there is none here.",
                    profile=profile,
                    model=known.name,
                ),
                allowed=tr("without a GPU: auto, tiny or laptop"),
                todo=tr(
                    "Set PROFILE to one of these, or use a machine with a GPU (Colab: Runtime > Change runtime "
                    "type). `python -m nbutils plan` lists GPUs to rent."
                ),
            )
    earlier = record.read(folder_of("").facts) if name else {}
    continued = profile == "auto" and not model and {"profile_source", "model"} <= set(earlier)
    if continued:
        profile, model = earlier["profile_source"], earlier["model"]
    resolved = profiles.resolve(
        profile, model, gpu=gpu, platform=platform, online=platforms.hub_online, overrides=overrides
    )
    if continued:
        began = {key: earlier.get("reasons", {}).get(key, tr("this run began with it")) for key in ("profile", "model")}
        first = {key: replace(resolved.choices[key], reason=str(reason)) for key, reason in began.items()}
        resolved = replace(resolved, choices=resolved.choices | first)
    run = folder_of(resolved.name)
    resolved = replace(resolved, set_values=set_of(run))
    make_folder(run.path, tr("this run"))
    trained = any(any(store.glob("checkpoint-*.json")) for store in checkpoints.stores(folders, run.name))
    top: dict[str, Any] = {}
    if not trained or resume == "never" or not run.facts.exists():  # else lesson 03 may refuse to continue with these
        top = {"profile": resolved.name, "profile_source": resolved.source, "model": resolved.called}
        reasons = {key: resolved.choices[key].reason for key in ("profile", "model")}
        top |= {"set": resolved.set_values, "reasons": reasons}
    if distributed.is_main():
        record.begin(run.facts, top, unnamed)  # an invalid facts.json is an error now, not after the training
    return run, resolved


def _copy_earlier(run: RunFolder, folders: platforms.Folders, values: Mapping[str, Any]) -> None:
    """Copy data and facts of this run from where an earlier session left them: an attached output, a former keep."""
    for store in checkpoints.stores(folders, run.name)[1:]:  # after that of keep
        former, attached = RunFolder(store.parent), folders.is_attached(store)
        if attached and any(place.is_symlink() for place in (store, former.path, former.data, former.facts)):
            print(tr("[WARN] {run} is not used: a part of it is a link, which could lead anywhere", run=former.path))
            continue
        facts = {} if run.facts.exists() else record.read(former.facts)
        if attached and facts:  # it may choose no model or profile but the course's own and what the learner names
            model, profile = str(facts.get("model", "")), str(facts.get("profile_source", ""))
            ours = not model or profiles.is_tiny(model) or profiles.course_model(model)
            foreign = {} if ours else {"MODEL": model}
            foreign |= {"PROFILE": profile} if profile and profile not in profiles.names() else {}
            if unnamed := [f"{name} = {text!r}" for name, text in foreign.items() if text != values.get(name)]:
                raise CourseError(
                    tr(
                        "The attached run in {folder} was started with {settings}, which is not part of the course.",
                        folder=former.path,
                        settings=", ".join(unnamed),
                    ),
                    todo=tr(
                        "If you trust that run, set {settings} in the parameters cell; otherwise detach it or choose "
                        "another RUN_NAME.",
                        settings=", ".join(unnamed),
                    ),
                )
            facts.get("set", {}).pop("course.data", None)
        if former.has("02_data_prep") and not any(run.data.glob("*")):
            print(tr("data      copied from {folder}", folder=former.data))
            make_folder(run.data, tr("this run"))
            plain = [file for file in former.data.iterdir() if file.is_file() and not file.is_symlink()]
            for file in sorted(plain, key=lambda file: file.name == "data_card.json"):  # it says that all is there
                shutil.copyfile(file, run.data / file.name)
        if facts:
            told = {"file": former.facts, "settings": settings_text(facts.get("set", {})) or '""'}
            print(tr("facts     copied from {file}; SET = {settings}", **told))
            make_folder(run.path, tr("this run"))
            record.begin(run.facts, facts, by_auto=False)


def unfinished_run(keep: Path, gpu: hardware.GPU | None) -> str:
    """The newest run that `auto` began here for a GPU and did not finish, whatever GPU is here today; "" if none."""
    found: list[tuple[float, str]] = []
    for run in map(RunFolder, keep.iterdir()):
        with suppress(CourseError):  # an invalid facts.json
            facts = record.read(run.facts)
            trained = facts.get("lessons", {}).get("03_qlora")
            finished = trained and record.complete(trained)
            if facts.get("by_auto") and facts.get("profile") != "tiny" and not finished:
                found += [(file.stat().st_mtime, run.name) for file in run.checkpoints.glob("checkpoint-*.json")]
    if not found or gpu is None:
        return ""
    _, name = max(found)
    print(tr("run {run} was begun here and is not finished: it goes on. PROFILE or RUN_NAME begins another.", run=name))
    return name
