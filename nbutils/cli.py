"""`python -m nbutils …`: thin; every command calls one room."""
from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import typer

from nbutils.errors import CourseError

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="The course from the command line.", pretty_exceptions_enable=False
)


def told_plainly(command: Callable[..., None]) -> Callable[..., None]:
    """Mistakes end with their message and exit status 1, not with a traceback."""
    from functools import wraps

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except CourseError as mistake:
            print(f"\n[FAIL] {mistake}", file=sys.stderr)
            raise typer.Exit(1) from None

    return wrapped


@app.command()
@told_plainly
def run(
    profile: str = typer.Option("", help="A profile of configs/, or a path to one; default: auto."),
    only: list[str] = typer.Option([], help="A lesson, as 03 or 03_qlora; may be given several times."),
    parameter: list[tuple[str, str]] = typer.Option([], "-p", "--parameter", help="NAME VALUE of a lesson parameter."),
) -> None:
    """Run lessons 01-05 (or those named) headless and say where the results are."""
    from nbutils import course

    given = dict(parameter) | ({"PROFILE": profile} if profile else {})
    folder = course.run(course.select(only), given)
    print(f"\n{course.summary(folder)}")


@app.command("serve-env")
@told_plainly
def serve_env() -> None:
    """Make the environment that lesson 05 serves from, or check that it is there."""
    from nbutils import hardware, serving

    made = serving.ensure_environment(hardware.engine(hardware.card()).value)
    print(f"serving environment: {made.engine}, {made.python}")
