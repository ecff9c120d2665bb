"""The length of a row that `data check` estimates without a tokenizer, beside what a tokenizer counts.

    python benchmarks/row_length.py TOKENIZER FILE [FILE …]

TOKENIZER is a folder or a hub id whose tokenizer has a chat template, FILE a file of rows.
"""

from __future__ import annotations

import re
from pathlib import Path

import click

from nbutils.data.check import check


@click.command()
@click.argument("tokenizer")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
def main(tokenizer: str, files: tuple[Path, ...]) -> None:
    """Print both lengths of each file, and their ratio."""
    for file in files:
        estimate = mean_length(check([str(file)]).next)
        counted = mean_length(check([str(file)], model=tokenizer).next)
        print(f"{file}: {estimate} estimated, {counted} counted, {estimate / counted:.2f}")


def mean_length(lines: list[str]) -> int:
    """The length in the `plan` command of a report."""
    [found] = re.findall(r"--mean-length (\d+)", "\n".join(lines))
    return int(found)


if __name__ == "__main__":
    main()
