"""`python -m nbutils ...`: each command parses its options and calls one room."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import IO, Any

import click
from click import argument, option

# the other rooms load numpy
from nbutils import checkpoints, course, display, distributed, doctor, hardware, install, plan, record, sharing
from nbutils.errors import CourseError
from nbutils.language import print_whatever, printable, say, tr

PATH = click.Path(path_type=Path)
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
COUNT = click.IntRange(1)
AMOUNT = click.FloatRange(1e-3, 1e9)
Words = tuple[str, ...]
set_option = option(
    "--set",
    "settings",
    multiple=True,
    metavar="TEXT",
    help='Values of the profile: "sft.learning_rate=1e-4, lora.r=64".',
)
json_option = option("--json", "as_json", is_flag=True, help="The result as JSON, for programs.")


class CourseGroup(click.Group):
    """Commands end a CourseError with its message and exit status 1, without a traceback."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except BrokenPipeError:  # whoever read it, as `head` or a pager, has ended: click ends quietly
            raise
        except (CourseError, OSError) as error:
            failure = error if isinstance(error, CourseError) else CourseError(str(error), todo="")
            print(f"\n[FAIL] {failure}", file=sys.stderr)
            sys.exit(1)


def _print_json(value: Any) -> None:
    print(printable(json.dumps(value, indent=2, ensure_ascii=False)))  # JSON spells them the same way


def _print_result(as_json: bool, value: Any, text: str) -> None:
    if as_json:
        _print_json(value)
    else:
        print(text)


@click.group(cls=CourseGroup, context_settings={"help_option_names": ["-h", "--help"]})
def app() -> None:
    """The course from the command line."""
    print_whatever()


@app.command()
@option("--profile", default="", help="A profile of configs/ or the path of one; default: auto.")
@option("--only", multiple=True, help="A lesson, as 03 or 03_qlora; may be given several times.")
@option("-p", "--parameter", multiple=True, nargs=2, metavar="NAME VALUE", help="A parameter of the lessons.")
@set_option
def run(
    profile: str,
    only: Words,
    parameter: tuple[tuple[str, str], ...],
    settings: Words,
) -> None:
    """Run lessons 01-05 (or those named) headless and print where the results are."""
    parameters = dict(parameter)
    if profile:
        parameters["PROFILE"] = profile
    if settings:
        parameters["SET"] = ", ".join(settings)
    folder = course.run_lessons(course.select(only), parameters)
    print(f"\n{record.summary(folder)}")


@app.command("compare")
@argument("runs", nargs=-1, required=True)
@option("--out", type=PATH, help="A folder for compare.png, the curves.")
@json_option
def compare_runs(runs: Words, out: Path | None, as_json: bool) -> None:
    """Show RUNS (names, or paths of run folders) side by side: settings that differ, losses, scores, verdict."""
    from nbutils import compare

    by_name = {name: compare.load_run(record.find_run(name)) for name in runs}
    if as_json:
        values = {name: run.model_dump() for name, run in by_name.items()}
        _print_json({"differing": compare.differing(by_name), "runs": values})
    else:
        compare.show_runs(by_name)
    if out:
        compare.plot_runs(by_name, out / "compare.png")


@app.command("progress")
@option("--name", default="", help="Your name, for the certificate.")
@option("--class", "students", type=FOLDER, help="For a teacher: a folder with one folder of runs for each student.")
def show_progress(name: str, students: Path | None) -> None:
    """Show which exercises are solved; when those of lessons 01-05 are, write a certificate beside the runs."""
    from nbutils import platforms, progress

    if students:
        print(display.aligned(progress.of_class(students)) or tr("no folder of a student"))
        return
    keep = platforms.folders().keep
    solved = progress.solved(keep)
    print(progress.text(solved))
    if progress.course_done(solved):
        file = progress.write_certificate(keep, solved, name)
        say("certificate  {file}", file=file)


@app.command("fetch")
@argument("model", default="")
@argument("data", default="")
@option("--profile", default="", help="A profile of configs/ or the path of one; default: the one for the GPU.")
def fetch_files(model: str, data: str, profile: str) -> None:
    """Download MODEL and DATA, named as in the lessons, before a training; by default the profile's. Needs no GPU."""
    from nbutils import fetch

    fetch.fetch_inputs(model, data, profile)


@app.command("notice")
def send_test_notice() -> None:
    """Send a test notice to where NBUTILS_NOTICE_URL leads. Exit status 1 if none was sent."""
    from nbutils import notices, platforms

    platforms.prepare_network(platforms.detect(), probe=False)
    service = notices.send(tr("nbutils: a test notice"), tr("Notices of this course arrive here."))
    say("Notice sent to {service}. See whether it has arrived there.", service=service)


@app.command("install")
def install_packages() -> None:
    """Install what the lessons need and this Python lacks; its torch and CUDA stay as they are."""
    install.ensure("train")
    install.ensure("serve")
    gpu = hardware.gpu()
    if gpu and gpu.capability >= hardware.BF16_FROM:
        install.ensure("kernels")
    say("Everything the lessons need is installed.")


@app.command("doctor")
@json_option
def show_checks(as_json: bool) -> None:
    """Check this machine: platform, folders, limits, GPU, packages, network. Exit status 1 on any FAIL."""
    report = doctor.examine()
    _print_result(as_json, report.as_dict(), report.text())
    sys.exit(bool(report.failures))


@app.command()
@argument("run", default="")
@option("--once", is_flag=True, help="Show it once instead of following it until it ends.")
def watch(run: str, once: bool) -> None:
    """Show the training of RUN (default: the one that runs now) from another terminal. Exit status 1 if it failed."""
    from nbutils import watch

    sys.exit(watch.follow(run, once) in ("failed", "died"))


@app.command("diagnose")
@argument("run", default="")
@option("--error", type=click.File("rb"), help="A file with an error message, or - for a paste.")
def find_causes(run: str, error: IO[bytes] | None) -> None:
    """Say what is wrong with RUN (its name, or the path of its folder), or what an error message means."""
    from nbutils import diagnose

    if not run and not error:
        raise click.UsageError(tr("name a RUN, or give an error message with --error FILE"))
    if error:
        diagnose.show(diagnose.explain(diagnose.read_log(error)))
    if run:
        trained = diagnose.Trained.of(record.find_run(run))
        diagnose.show(diagnose.examine(trained))


@app.group("checkpoints")
def of_a_run() -> None:
    """The checkpoints of a run: RUN is its name, or the path of its folder."""


def _show_checkpoints(run: str, thorough: bool) -> bool:
    """Print them; whether there are some, and all are sound."""
    rows, whole = checkpoints.listing(record.find_run(run).checkpoints, thorough)
    print(display.aligned(rows) or tr("no checkpoint yet"))
    return whole


@of_a_run.command("list")
@argument("run")
def list_checkpoints(run: str) -> None:
    """List them with size and place, checked by size and manifest."""
    _show_checkpoints(run, thorough=False)


@of_a_run.command()
@argument("run")
def verify(run: str) -> None:
    """Read every archive and compare its sha256; exit status 1 if one is damaged or there is none."""
    sys.exit(not _show_checkpoints(run, thorough=True))


@of_a_run.command()
@argument("run")
@option("--to", type=PATH, help="A folder that does not exist yet; default: ./checkpoint-N.")
@option("--step", type=int, help="Of this step, instead of the newest that verifies.")
def restore(run: str, to: Path | None, step: int | None) -> None:
    """Unpack the newest checkpoint that verifies."""
    folder = checkpoints.restore(record.find_run(run).checkpoints, to, step)
    say("restored: {folder}", folder=folder)


@app.group()
def data() -> None:
    """Your own data, before a lesson uses it."""


@data.command("check")
@argument("files", nargs=-1, required=True)
@option("--columns", default="", metavar="TEXT", help='Which column is what: "user=title+body, assistant=reply".')
@option(
    "--near",
    type=click.FloatRange(0, 1),
    default=0.8,
    help="Overlap from which rows are near duplicates; 0: do not look; default 0.8.",
)
@option("--no-repair", is_flag=True, help="Reject text read in the wrong encoding instead of fixing it.")
@option("--model", default="", help="Measure tokens with the tokenizer of this model, named as in the lessons.")
@option("--max-length", type=click.IntRange(0), default=0, help="Report rows with more tokens than this.")
@option("--out", type=PATH, help="Write train, eval, rejected rows and the data card here.")
@option("--rejected", type=PATH, help="Write the rejected rows with their reasons here.")
@json_option
def check_data(
    as_json: bool,
    files: Words,
    no_repair: bool,
    **options: Any,
) -> None:
    """Read, check and deduplicate FILES (files, folders, hub datasets). Exit status 1 only if no row can be used."""
    from nbutils.data.check import check

    report = check(
        files,
        repair=not no_repair,
        **options,
    )
    _print_result(as_json, report.as_json(), str(report))
    sys.exit(not report.card.accepted)


@app.command("plan")
@option("--profile", help="A profile of configs/ or the path of one; default: the one for the GPU.")
@option("--model", help="A course model, a hub id in the cache, or a folder; default: the profile's.")
@option("--gpu", default="", help='A GPU of configs/gpus.yaml, "T4 x2" for two; default: this machine\'s.')
@option(
    "--method",
    type=click.Choice(["qlora", "lora"]),
    help="Default: by profile and model size, until lesson 03 measures.",
)
@option("--micro-batch", type=COUNT, help="Rows at a time; default: the fastest that fits.")
@option("--checkpointing", type=click.Choice(["off", "on", "offload"]), help="Default: the fastest that fits.")
@option("--length", type=click.IntRange(16), help="Tokens of a row; default: the profile's.")
@option("--rank", type=COUNT, help="Rank of the adapter; default: the profile's.")
@option("--gpus", type=COUNT, help="How many GPUs share the batch.")
@option(
    "--engine", type=click.Choice(list(distributed.STRATEGIES)), help="What they share; default: ddp, the batch alone."
)
@option("--rows", type=COUNT, help="Rows of your data.")
@option("--mean-length", type=AMOUNT, help="Mean tokens of a row.")
@option("--epochs", type=AMOUNT, help="Default: the profile's.")
@set_option
@option("--vram", type=AMOUNT, help="Memory of the GPU in GiB, as torch reports it.")
@option("--tflops", type=AMOUNT, help="The GPU's dense 16-bit tensor TFLOP/s.")
@option("--capability", type=AMOUNT, help="The GPU's CUDA capability, as 7.5.")
@json_option
def forecast(as_json: bool, settings: Words, **options: Any) -> None:
    """Forecast memory, speed, time and cost of a training before anything is downloaded."""
    data, text = plan.answer(given=", ".join(settings), **options)
    _print_result(as_json, data, text)


@app.command("serve-env")
def serve_env() -> None:
    """Make the environment that lesson 05 serves from, or check that it is there."""
    from nbutils import serving

    environment = serving.ensure_environment()
    say("serving environment: {engine}, {python}", engine=environment.engine, python=environment.python)


@app.command("bench-serve")
@option("--model", type=PATH, help="A model folder; it is served here.")
@option("--url", default="", help="A server that is running; its key, if it has one, in VLLM_API_KEY.")
@option("--name", default="", help="The model's name on that server; default: the first it has.")
@option("--concurrency", default="1,8,32,128", help="Concurrent requests, separated by commas.")
@option("--prompt-tokens", type=COUNT, default=128)
@option("--answer-tokens", type=click.IntRange(2), default=128)
@option("--rivals", default="generate,transformers-serve", help="What --model is measured against; '' for none.")
@option("--out", type=PATH, help="A folder for bench.json and bench.png.")
@json_option
def bench_serve(
    as_json: bool,
    concurrency: str,
    prompt_tokens: int,
    answer_tokens: int,
    rivals: str,
    **options: Any,
) -> None:
    """Measure how fast a model is served: throughput, first token, time per token, latency, errors."""
    from nbutils import bench

    settings = bench.Load(bench.parse_concurrency(concurrency), prompt_tokens, answer_tokens)
    with redirect_stdout(sys.stderr if as_json else sys.stdout):  # its progress
        results = bench.measure_speed(settings=settings, rivals=bench.parse_rivals(rivals), **options)
    if as_json:
        _print_json(results.as_dict())
    else:
        results.show()


@app.command()
@argument("folder", type=FOLDER)
@argument("formats", nargs=-1)
@option("--out", type=PATH, help="Where the exports go; default: exports/ beside FOLDER.")
@option("--data", type=PATH, help="Train rows (.jsonl) that awq is calibrated on; other formats need none.")
@option("--check/--no-check", default=True, help="Compare each export with FOLDER.")
def export(folder: Path, formats: Words, out: Path | None, data: Path | None, check: bool) -> None:
    """Write the merged model FOLDER in other FORMATS, each with its size and its loss; without any: show them all."""
    from nbutils import exporting

    exporting.export_formats(folder, formats, out, data, check)


@app.command("export-env")
def export_env() -> None:
    """Make the environment that exports are made in, or check that it is there."""
    from nbutils import exporting

    say("export environment: {python}", python=exporting.ensure_environment())


@app.command()
@argument("folder", type=FOLDER)
@argument("to")
@option("--public", is_flag=True, help="Let everyone see it; without this it is private.")
def push(folder: Path, to: str, public: bool) -> None:
    """Upload the model FOLDER: TO is hub:owner/name, modelscope:owner/name, or a file.tar."""
    is_file = to.endswith(".tar")
    print(sharing.single_file(folder, Path(to)) if is_file else sharing.push(folder, to, private=not public))


@app.command()
@argument("base")
@argument("adapter", type=PATH)
@argument("out", type=PATH)
@option(
    "--dtype",
    type=click.Choice(["auto", "float32", "float16", "bfloat16"]),
    default="auto",
    help="float32, float16, bfloat16, or auto: the base's own.",
)
@option(
    "--onto",
    type=click.Choice(["full", "dequantized"]),
    default="full",
    help="full, or dequantized: the base as 4-bit training saw it.",
)
@option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    help="cpu needs no more than some hundred MB; cuda computes on the GPU.",
)
@option("--replace", "replace_other", is_flag=True, help="Replace another model of this course that is in OUT.")
def merge(base: str, adapter: Path, out: Path, **options: Any) -> None:
    """Merge ADAPTER into BASE, named as MODEL in the lessons, and write the result to OUT, in shards."""
    from nbutils import fetch, merging

    print(merging.merge_adapter(fetch.find_model(base), adapter, out, **options))


def _translate(command: click.Command) -> None:
    """Help texts in the language of the course."""
    command.help = tr(command.help or "")
    command.short_help = command.help  # click would cut a summary that it made itself
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            parameter.help = tr(parameter.help or "")
    if isinstance(command, click.Group):
        for below in command.commands.values():
            _translate(below)


_translate(app)
