"""A lesson from its first to its last cell: parameters, machine, profile, run folder, results of earlier lessons.

A lesson runs in a kernel (Colab, Kaggle, papermill) or as a plain script. Its parameters are the annotated upper-case
names of its `parameters` cell; an unknown name or a wrong type is refused: a misspelt parameter would change nothing.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import logging
import os
import re
import shutil
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from nbutils import (
    checkpoints,
    display,
    distributed,
    exercises,
    hardware,
    install,
    models,
    notices,
    platforms,
    profiles,
    record,
)
from nbutils.config import Overrides, flat, settings_in, settings_text
from nbutils.errors import CourseError, Unfinished
from nbutils.exercises import Check, wrong
from nbutils.files import NOTEBOOKS, make_folder, read_object, stamp
from nbutils.hardware import GPU
from nbutils.language import language, print_whatever, say, tr
from nbutils.plan.recipe import BaseLosses, Begun
from nbutils.platforms import Folders, Platform
from nbutils.profiles import Resolved
from nbutils.record import Facts, RunFacts, RunFolder

TRAINING = ("00_quickstart", "03_qlora")  # each leaves an adapter that lessons 04 and 05 take
COURSE = ("01_environment", "02_data_prep", "03_qlora", "04_merge", "05_serve")
LESSONS_ABOUT_ADAPTER = ("04_merge", "05_serve", "08_export", "09_benchmark")  # a new adapter outdates their facts
LAUNCHERS = ("05_serve", "06_scale_out", "09_benchmark", "10_your_model")  # their processes may use every GPU
GPU_UNTESTED = ("06_scale_out", "99_when_it_breaks")  # each process of 06 tests its own; 99 is for broken ones
SEVERAL_RUNS = ("06_scale_out", "10_your_model")  # they launch trainings to compare them
LARGEST_ON_CPU = 1  # billions of parameters; without a GPU, no training of a larger model is begun
NUMBER = Field(ge=0, le=2**32 - 1)
LIMITS = {  # of a parameter by its name, else by its type
    int: NUMBER,
    float: NUMBER,
    "RUN_NAME": Field(pattern=r"^(\w[\w.-]{0,79})?$"),  # it becomes the name of a folder
    "RESUME": Field(pattern=r"^(auto|never|\d+)$"),
    "NAME": Field(pattern=r"^[^\n<>]{0,39}\w[^\n<>]{0,39}$"),  # it is said in a sentence
    "MAKER": Field(pattern=r"^[^\n<>]{1,80}$"),
    "MANNER": Field(pattern=r"^[^\n<>]{0,80}$"),
}
ParameterTypes = Mapping[str, type]  # by name


class RunParameters(BaseModel, alias_generator=str.upper):
    """The parameters that decide which run a lesson works in, and how; each lesson has some of them."""

    profile: str = "auto"
    model: str = ""
    run_name: str = ""
    set: str = ""
    resume: str = "auto"
    max_steps: int = 0  # 0 leaves it to the profile
    save_steps: int = 0
    name: str = ""  # these three of the learner's own assistant, in lesson 00
    maker: str = ""
    manner: str = ""

    @property
    def assistant(self) -> str:
        """In the name of a run: another name, maker or manner is another run."""
        if not self.name:
            return ""
        words = f"{self.name}\n{self.maker}\n{self.manner}"
        return f"{self.name}-{zlib.crc32(words.encode()) & 0xFFFF:04x}"


@dataclass
class Machine:
    """Where a lesson runs."""

    platform: Platform
    folders: Folders
    gpu: GPU | None


@dataclass
class Lesson(Machine):
    """A lesson that was started by `begin`."""

    stem: str
    parameters: Facts
    resolved: Resolved
    run: RunFolder
    started: float
    work: notices.Work

    def __post_init__(self) -> None:
        self.profile = self.resolved.profile
        self.model = self.resolved.model  # what `from_pretrained` is given: a folder or a hub id
        self.model_name = self.resolved.model_name  # in facts.json, where it means the same on the next machine
        self.device: int | str = distributed.local_rank() if self.gpu else "cpu"
        self.scratch = self.folders.scratch / self.run.name  # on the fast disk that may vanish

    def with_recipe(
        self, lengths: Sequence[int], held_out: int | None = None, losses: BaseLosses | None = None
    ) -> Lesson:
        """This lesson with the recipe for examples of these lengths in tokens, and for so many `held_out` rows.

        The losses of the base model, where they are given, decide between 4 and 16 bits.

        Example: lesson = lesson.with_recipe(dataset.lengths, len(eval_rows), losses)
        """
        from transformers.utils import cached_file

        cached_file(self.model, "config.json")  # downloads it: the model's size decides the learning rate
        rows = profiles.Rows.of(lengths, held_out)
        fitted = replace(self, resolved=profiles.fit(self.begun(), rows, losses))
        processes = distributed.world_size()
        say("recipe    {schedule}", schedule=profiles.schedule(fitted.profile.sft, rows, processes))
        if warning := profiles.few_steps_warning(fitted.profile, self.resolved.as_written, rows, processes):
            print(f"[WARN] {warning}")
        return fitted

    def begun(self) -> Resolved:
        """The profile, with the rows per step, the validation rows and the method that a resumed run keeps.

        Example: lesson.begun().begun.method
        """
        newest = None
        if distributed.is_main() and self.parameters.get("RESUME") != "never":
            saved = checkpoints.newest_first(checkpoints.stores(self.folders, self.run.name))
            newest = saved[0] if saved else None
        newest = distributed.broadcast(newest)  # only the main process looks: all must decide alike
        if newest:
            return profiles.keep_begun(self.resolved, newest.fingerprint, newest.validation_rows)
        if self.gpu is None and not self.parameters.get("MODEL"):  # one that is named is meant
            _require_gpu(self.model_name)
        return replace(self.resolved, begun=Begun())

    def require(self, stem: str) -> None:
        """Make sure that the run folder has the result of an earlier lesson; if not, run that lesson now.

        Example: lesson.require("03_qlora")
        """
        if not self.run.has(stem):
            if stem != "02_data_prep" and not self.parameters.get("RUN_NAME"):
                self._refuse_if_elsewhere(stem)
            say("Lesson {lesson} has not run in {run} yet: running it now.", lesson=stem, run=self.run.path)
            self.launch([sys.executable, str(NOTEBOOKS / f"{stem}.py"), *self.arguments(stem)])
        if stem == "03_qlora":
            require_trained(self.run)

    def _refuse_if_elsewhere(self, stem: str) -> None:
        """Do not train for hours unasked if other runs have this result: the learner may mean one of them."""
        others = [name for name, run in record.runs(self.folders.keep).items() if run.has(stem)]
        if others:
            raise CourseError(
                "RUN_NAME is empty, and {run}, the run of this profile, has no result of lesson {lesson}. "
                "These runs have one: {others}.",
                todo="Set RUN_NAME to the run you mean, or to the name of this one, which runs the lesson now.",
                run=self.run.name,
                lesson=stem,
                others=", ".join(others),
            )

    def arguments(self, stem: str, **values: Any) -> list[str]:
        """The command-line arguments of a lesson: this profile, model and run, and `values`, as far as it has them."""
        chosen = {
            "PROFILE": self.resolved.source,
            "MODEL": self.parameters.get("MODEL"),
            "RUN_NAME": self.run.name,
            "SET": settings_text(self.resolved.set_values),
            **values,
        }
        words = []
        for name in declared_in(NOTEBOOKS / f"{stem}.py"):
            if chosen.get(name):
                words += [f"--{name}", str(chosen[name])]
        return words

    def launch(self, command: list[str], processes: int = 1, threads: int = 0, keep: Path | None = None) -> None:
        """Run the command line of a lesson; it ends with this kernel, and its runs go to `keep` or where ours go."""
        calm = self.stem in SEVERAL_RUNS  # of each, only the progress is shown
        with notices.deferred():
            distributed.launch(command, keep or self.folders.keep, processes, threads, calm)

    def check(self, check: Check, answer: Any, *given: Any) -> None:
        """Show what the check of an exercise says of an answer, and note in facts.json whether it was right.

        Example: lesson.check(exercises.adapter_parameters, my_answer, 64, d_in, d_out)
        """
        name = check.__name__
        if answer is None:
            say("[todo] exercise {name}: put your answer in the place of None, and run this cell again", name=name)
            return
        try:
            if kind := exercises.other_kind(check, answer):
                checked = wrong("saw {answer!r:.200}, expected {kind}", answer=answer, kind=kind)
            else:
                checked = check(answer, *given)
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError) as problem:
            checked = wrong("saw {answer!r:.200}, which cannot be checked: {problem}", answer=answer, problem=problem)
        mark = "[ OK ]" if checked.right else tr("[ no ]")
        say("{mark} exercise {name}: {told}", mark=mark, name=name, told=checked.text)
        record.note_exercise(self.run.facts, self.stem, name, checked.right)  # last: a full disk hides no verdict

    def finish(self, *measured: Any, **facts: Any) -> None:
        """Write the facts of each result, and further facts by name, to facts.json; print where that is.

        Example: lesson.finish(dataset, result, note="first try")
        """
        entry: Facts = {"seconds": round(time.monotonic() - self.started, 1)}
        for result in measured:
            entry |= result.facts()
        entry |= facts
        top = _chosen(self.resolved) | {  # beside the entries of the lessons
            "platform": self.platform.as_dict(),
            "card": asdict(self.gpu) if self.gpu else None,
            "versions": record.versions(),
        }
        outdated: Sequence[str] = ()
        if self.stem in TRAINING:  # what the adapter was made with
            top["set"] = self.resolved.set_values
            entry["settings"] = flat(self.profile.model_dump())
            other_merged = self.run.merged.is_dir() and not self.run.has("04_merge")
            if entry.get("train_seconds") or other_merged:
                outdated = LESSONS_ABOUT_ADAPTER
        all_facts = record.update(self.run.facts, top, self.stem, entry, outdated)
        record.write_report(self.run.report, self.run.name, all_facts)
        say(
            "Lesson {lesson} done in {seconds:.0f} s. Facts: {facts}",
            lesson=self.stem,
            seconds=entry["seconds"],
            facts=self.run.facts,
        )
        self._tell_exercises()
        status: notices.Status = "finished" if record.complete(entry) else "unfinished"
        self.work.ended(status, f"{self.stem}\n{record.summary(self.run)}")

    def _tell_exercises(self) -> None:
        """How many exercises of this lesson are solved, and which are not."""
        facts = self.run.recorded
        asked = exercises.names_of(self.stem)
        if not asked:
            return
        todo = [name for name in asked if not facts.has_solved(self.stem, name)]
        done = len(asked) - len(todo)
        say("Exercises: {solved} of {all} solved", solved=done, all=len(asked))
        if todo:
            say("  to do: {names}", names=", ".join(todo))


def _require_gpu(model: str) -> None:
    """Refuse to begin a training that would take days on a CPU."""
    known = models.course_model(model)
    if known and known.billions > LARGEST_ON_CPU:
        raise CourseError(
            "The training of {model} needs a GPU, and there is none here.",
            todo=(
                "Set PROFILE to auto, tiny or laptop, or use a machine with a GPU (Colab: Runtime > Change runtime "
                "type). `python -m nbutils plan` lists GPUs to rent."
            ),
            model=known.name,
        )


def require_trained(run: RunFolder) -> None:
    """Refuse an adapter whose training is unfinished, or was on other rows than the run has now."""
    trained = run.recorded.trained
    if trained.diverged:
        raise CourseError(
            "The training of this run ended at step {step} of {steps}: its validation loss was not a number.",
            todo=(
                "Run lesson 03 again with another RUN_NAME, and with sft.learning_rate on auto or a tenth of yours. To "
                "use the best step so far, run it with MAX_STEPS = {step}."
            ),
            step=trained.steps,
            steps=trained.planned_steps,
        )
    if not trained.ended:
        raise Unfinished(
            "The training of this run has ended at step {step} of {steps}.",
            todo=(
                "Run lesson 03 again, unchanged, which continues it. To use the adapter as it is, run lesson "
                "03 with MAX_STEPS = {step}."
            ),
            step=trained.steps,
            steps=trained.planned_steps,
        )
    adapter = stamp(run.adapter) or {}
    rows = read_object(run.data / "data_card.json").get("fingerprint")
    trained_on = adapter.get("fingerprint", {}).get("data")
    if rows and trained_on and rows != trained_on:
        raise CourseError(
            "The adapter of this run was trained on other rows than {data} holds now.",
            todo="Train on these rows with another RUN_NAME, or put the former data folder back.",
            data=run.data,
        )


def begin(stem: str, namespace: Facts) -> Lesson:
    """Start a lesson and print the platform, the profile, the model and where the run is kept."""
    started = time.monotonic()
    work = notices.begin(stem)
    _prepare_process(stem)
    values = collect(stem, namespace)
    parameters = RunParameters.model_validate(values)
    distributed.join()
    notices.require_settings()
    with distributed.main_first():
        install.ensure("train")
        if language() == "zh":
            display.pyplot()  # the figures that a lesson draws by itself are in Chinese too
        machine = find_machine(parameters, test_gpu=stem not in GPU_UNTESTED)
        run, resolved = open_run(parameters, machine)
        install_for(resolved)
        work.set_lesson(stem, run)
    lesson = Lesson(
        **vars(machine), stem=stem, parameters=values, resolved=resolved, run=run, started=started, work=work
    )
    _introduce(lesson)
    return lesson


def install_for(resolved: Resolved) -> None:
    """Install what a hybrid model needs beyond the others; without its kernels it is trained all the same."""
    if resolved.shape is None or resolved.shape.linear_attention is None:
        return
    # what transformers says of missing kernels, lesson 03 says in the learner's language
    logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)
    install.ensure("hybrid")
    gpu = resolved.gpu
    if gpu and gpu.capability >= hardware.BF16_FROM:
        try:
            install.ensure("kernels")
        except CourseError as problem:
            print(f"[WARN] {problem}")


def _prepare_process(stem: str) -> None:
    """Settle how this process prints and which processors and GPUs it uses, before any library asks."""
    if not platforms.in_kernel():
        print_whatever()
    display.calm_bars()
    hardware.share_processors()
    if stem not in LAUNCHERS:
        hardware.use_one_gpu()
        hardware.leave_no_gaps()
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # wants a package no lesson needs


def _introduce(lesson: Lesson) -> None:
    """Print what a lesson starts with."""
    resolved = lesson.resolved
    say(
        "profile   {name}: {reason}\nmodel     {model}\nrun       {folder}",
        name=resolved.name,
        reason=resolved.choices["profile"].reason,
        model=resolved.model,
        folder=lesson.run.path,
    )
    own_rows = lesson.parameters.get("DATA") or lesson.parameters.get("DOCUMENTS")
    if own_rows and models.bundled_name(resolved.model):
        say('[WARN] the tiny model learns only its sample task: PROFILE "laptop" is for rows of your own')
    if distributed.strategy():
        strategy = distributed.strategy_name(str(resolved.profile.method))
        say("engine    {engine}, processes: {count}", engine=strategy, count=distributed.world_size())


def collect(stem: str, namespace: Facts) -> Facts:
    """The checked parameters of a lesson, also put into `namespace`; a plain script takes its command line first."""
    types = declared_in(NOTEBOOKS / f"{stem}.py")
    names = set(types)
    if platforms.in_kernel():
        names.update(_set_by_papermill(namespace.get("In", [])))
    elif namespace.get("__name__") == "__main__":
        parser = argparse.ArgumentParser(allow_abbrev=False, description="Parameters of this lesson.")
        for name, kind in types.items():
            parser.add_argument(f"--{name}", default=argparse.SUPPRESS, metavar=kind.__name__)
        namespace.update(vars(parser.parse_args()))
    values = check({name: namespace[name] for name in names if name in namespace}, types)
    namespace.update(values)
    return values


def _set_by_papermill(cells: Iterable[str]) -> Iterator[str]:
    """The names assigned in the cell that papermill injects, its own PAPERMILL_ ones aside."""
    for cell in cells:
        if cell.lstrip().startswith("# Parameters"):
            yield from re.findall(r"^(?!PAPERMILL_)(\w+) =", cell, re.MULTILINE)


def declared_in(source: Path) -> dict[str, type]:
    """The parameters of a lesson and their types, read from its `.py` without running it."""
    declared = re.findall(r"^([A-Z_]+): (\w+) =", source.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: getattr(builtins, kind) for name, kind in declared}  # str, int, float or bool


def defaults_in(source: Path) -> Facts:
    """The parameters of a lesson with the values in its source."""
    written = re.findall(r"^([A-Z_]+): \w+ = (.+)$", source.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: ast.literal_eval(value) for name, value in written}


def check(values: Facts, types: ParameterTypes) -> Facts:
    """The values from a cell or a command line as the declared types, within their limits; other names are refused."""
    fields: Any = {name: (Annotated[kind, LIMITS.get(name) or LIMITS.get(kind)], None) for name, kind in types.items()}
    # `papermill -p RUN_NAME 2024` passes a number
    rules = ConfigDict(extra="forbid", coerce_numbers_to_str=True)
    parameters = create_model("Parameters", __config__=rules, **fields)
    try:
        return parameters.model_validate(values).model_dump(exclude_unset=True)
    except ValidationError as problem:
        first = problem.errors()[0]
        name = first["loc"][0]
        seen = tr("Parameter {name} is {value!r}. {reason}.", name=name, value=first["input"], reason=first["msg"])
        allowed = ""
        if name not in types:
            seen = tr("There is no parameter {name}.", name=name)
            allowed = ", ".join(types)
        raise CourseError(
            seen,
            allowed=allowed,
            todo="Correct it in the parameters cell, after -p, or after --NAME of a script.",
        ) from problem


def find_machine(parameters: RunParameters, test_gpu: bool = True) -> Machine:
    """Prepare network, Drive and caches of this platform, and test its GPU; print what was found."""
    platform = platforms.detect()
    gpu = hardware.gpu()
    if gpu is None:  # nothing is compiled for a CPU; this saves the two seconds in which bitsandbytes imports dynamo
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    say("platform  {name} ({evidence})", name=platform.name, evidence=tr(platform.evidence))
    # without a GPU, `auto` takes the bundled model: no hub is needed
    is_bundled = parameters.profile in ("auto", *models.bundled()) and not parameters.model
    if line := platforms.prepare_network(platform, probe=gpu is not None or not is_bundled):
        print(line)
    if platform.name == "colab":
        say("drive     {status}", status=platforms.mount_drive())
    folders = platforms.folders(platform)
    if not folders.lasting:
        say(
            "[WARN] {folder} may go away with this machine: download what you want to keep ({remark})",
            folder=folders.keep,
            remark=folders.remark,
        )
    if moved := platforms.use_model_cache(platform, folders):
        say("cache     {status}", status=moved)
    say("gpu       {gpu}", gpu=gpu or tr("none: this machine trains on its CPU"))
    if test_gpu:
        hardware.require_working(gpu)
    return Machine(platform, folders, gpu)


def open_run(parameters: RunParameters, machine: Machine) -> tuple[RunFolder, Resolved]:
    """The run folder and the resolved profile; an existing run keeps the profile and SET it started with."""
    folders = machine.folders
    make_folder(folders.keep)
    make_folder(folders.scratch)
    leaves_open = parameters.profile == "auto" and not parameters.model
    by_auto = leaves_open and not parameters.run_name
    if by_auto and machine.gpu:
        parameters = parameters.model_copy(update={"run_name": unfinished_run(folders.keep)})
    beginning = RunFacts()
    if leaves_open and parameters.run_name:
        beginning = _find_run(parameters, folders, profile="").recorded
    resolved = profiles.resolve(
        beginning.profile_source or parameters.profile,
        beginning.model or parameters.model,
        gpu=machine.gpu,
        platform=machine.platform,
        online=platforms.hub_online,
        # which run it is may depend on the profile
        overrides=lambda profile: _overrides(parameters, _find_run(parameters, folders, profile)),
    )
    if beginning.profile_source:
        for name in ("profile", "model"):
            resolved.choices[name] = replace(resolved.choices[name], reason=tr("this run began with it"))
    run = _find_run(parameters, folders, resolved.name)
    if method := run.recorded.trained.settings.get("method"):
        resolved = profiles.fit(replace(resolved, begun=Begun(method=method)), None)
    resolved = replace(resolved, set_values=_settings_of_run(parameters, run))
    make_folder(run.path)
    has_checkpoint = any(map(_has_checkpoint, checkpoints.stores(folders, run.name)))
    # a training that has begun keeps what it began with: lesson 03 may refuse what is set today
    goes_on = has_checkpoint and parameters.resume != "never" and run.facts.exists()
    if distributed.is_main() and not goes_on:
        record.note_beginning(run.facts, _chosen(resolved) | {"set": resolved.set_values}, by_auto)
    return run, resolved


def _find_run(parameters: RunParameters, folders: Folders, profile: str) -> RunFolder:
    """The run folder: RUN_NAME, or profile and model if one is named; with what earlier sessions left elsewhere."""
    name = parameters.run_name
    if not name:
        names = dict.fromkeys(Path(text).name for text in (profile, parameters.model) if text)
        plain = re.sub(r"[^\w.-]+", "-", "-".join([*names, parameters.assistant]))
        name = plain.strip("-._") or "run"
    run = RunFolder(folders.keep / name)
    _adopt_earlier(run, folders, parameters)
    return run


def unfinished_run(keep: Path) -> str:
    """The name of the newest unfinished run that `auto` began for any GPU; empty if there is none."""
    for run in record.runs(keep).values():
        with suppress(CourseError):  # a run with an invalid facts.json is passed over
            facts = run.recorded
            finished = facts.trained.planned_steps and facts.trained.ended
            needs_gpu = facts.profile not in models.bundled()
            if facts.by_auto and needs_gpu and not finished and _has_checkpoint(run.checkpoints):
                say(
                    "run {run} was begun here and is not finished: it goes on. PROFILE or RUN_NAME begins another.",
                    run=run.name,
                )
                return run.name
    return ""


def _has_checkpoint(store: Path) -> bool:
    return any(store.glob("checkpoint-*.json"))


def _settings_of_run(parameters: RunParameters, run: RunFolder) -> Facts:
    """SET; if empty, the one this run started with, unless another profile is named or the run starts over."""
    if parameters.set:
        return settings_in(parameters.set)
    beginning = run.recorded
    if parameters.resume == "never" or parameters.profile not in ("auto", beginning.profile, beginning.profile_source):
        return {}
    return beginning.set


def _overrides(parameters: RunParameters, run: RunFolder) -> Overrides:
    """Values that replace those of the profile, each with its reason; MAX_STEPS and SAVE_STEPS win over SET."""
    values = {field: (value, tr("SET of this run")) for field, value in _settings_of_run(parameters, run).items()}
    for name in ("max_steps", "save_steps"):
        steps = getattr(parameters, name)
        if steps:
            values[f"sft.{name}"] = (steps, tr("parameter {name}", name=name.upper()))
    return values


def _chosen(resolved: Resolved) -> Facts:
    """Profile and model as facts.json has them."""
    return {"profile": resolved.name, "profile_source": resolved.source, "model": resolved.model_name}


def _adopt_earlier(run: RunFolder, folders: Folders, parameters: RunParameters) -> None:
    """Copy data and facts of this run from where an earlier session left them: an attached output, a former folder."""
    for store in checkpoints.stores(folders, run.name)[1:]:  # the first is that of the run itself
        former = RunFolder(store.parent)
        attached = folders.is_attached(store)
        if attached:
            _refuse_links(former.path, store, former.data, former.facts)
        if former.facts.exists() and not run.facts.exists():
            facts = record.read_facts(former.facts)
            if attached:
                _require_trusted(former, parameters)
                facts.get("set", {}).pop("course.data", None)  # it chooses no data of this machine
            make_folder(run.path)
            record.note_beginning(run.facts, facts, by_auto=False)
            say("facts     copied from {file}", file=former.facts)
        if former.has("02_data_prep") and not any(run.data.glob("*")):
            _copy_data(former.data, run.data)


def _refuse_links(*parts: Path) -> None:
    """Refuse an attached run of which a part is a link."""
    for part in parts:
        if part.is_symlink():
            raise CourseError(
                "{path} of an attached run is a link, which could lead anywhere.",
                todo="Detach that run, or choose another RUN_NAME.",
                path=part,
            )


def _require_trusted(run: RunFolder, parameters: RunParameters) -> None:
    """Refuse an attached run with a model or profile that is neither the course's own nor named by the learner."""
    facts = run.recorded
    model = facts.model
    profile = facts.profile_source
    knows_model = model in ("", parameters.model) or models.bundled_name(model) or models.course_model(model)
    if not knows_model or profile not in ("", parameters.profile, *profiles.names()):
        raise CourseError(
            "The attached run in {folder} was started with MODEL = {model!r} and PROFILE = {profile!r}. They are "
            "not both part of the course.",
            todo=(
                "If you trust that run, set these in the parameters cell; otherwise detach it or choose "
                "another RUN_NAME."
            ),
            folder=run.path,
            model=model,
            profile=profile,
        )


def _copy_data(former: Path, data: Path) -> None:
    """Copy the plain files of a data folder, the card last: it says that all the others are there."""
    make_folder(data)
    for file in sorted(former.iterdir(), key=lambda file: file.name == "data_card.json"):  # False comes first
        if file.is_file() and not file.is_symlink():
            shutil.copyfile(file, data / file.name)
