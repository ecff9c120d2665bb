"""`python -m nbutils …`: thin; every command calls one room."""

from __future__ import annotations

import sys
from typing import Any

import click

from nbutils.errors import CourseError


class PlainMistakes(click.Group):
    """A group whose commands end a learner's mistake with its message and exit status 1, not with a traceback."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except CourseError as mistake:
            print(f"\n[FAIL] {mistake}", file=sys.stderr)
            sys.exit(1)


@click.group(cls=PlainMistakes, context_settings={"help_option_names": ["-h", "--help"]})
def app() -> None:
    """The course from the command line."""


@app.command()
@click.option("--profile", default="", help="A profile of configs/ or the path of one; default: auto.")
@click.option("--only", multiple=True, help="A lesson, as 03 or 03_qlora; may be given several times.")
@click.option("-p", "--parameter", multiple=True, nargs=2, metavar="NAME VALUE", help="A parameter of the lessons.")
def run(profile: str, only: tuple[str, ...], parameter: tuple[tuple[str, str], ...]) -> None:
    """Run lessons 01-05 (or those named) headless and say where the results are."""
    from nbutils import course

    given = dict(parameter) | ({"PROFILE": profile} if profile else {})
    folder = course.run(course.select(only), given)
    print(f"\n{course.summary(folder)}")


@app.command("serve-env")
def serve_env() -> None:
    """Make the environment that lesson 05 serves from, or check that it is there."""
    from nbutils import hardware, serving

    made = serving.ensure_environment(hardware.engine(hardware.card()).value)
    print(f"serving environment: {made.engine}, {made.python}")
