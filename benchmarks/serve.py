"""How fast one model is served: vLLM against plain `generate` and `transformers serve`, and its other forms at 1.

    python benchmarks/serve.py MODEL_FOLDER --where h200 \
        --variants fp8=FOLDER,w4a16=FOLDER       results: benchmarks/results/serve_<where>.json, after each step

Steps come in this order: generate, vLLM, `transformers serve`, the variants. With a GPU the copy bandwidth is measured
too, and what share of its limit one stream gets.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from nbutils import bench
from nbutils.bench import Benchmark, Load

RESULTS = Path(__file__).resolve().parent / "results"


def read_variants(text: str) -> dict[str, Path]:
    """`fp8=FOLDER,w4a16=FOLDER` as a mapping."""
    pairs = [part.partition("=") for part in text.split(",") if part]
    if wrong := [name for name, _, folder in pairs if not folder]:
        raise click.UsageError(f"--variants has {', '.join(wrong)} without a folder; write NAME=FOLDER,…")
    return {name: Path(folder) for name, _, folder in pairs}


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--where", default="cpu", help="The machine, for the name of the file.")
@click.option("--variants", default="", metavar="NAME=FOLDER,…", help="Other forms of the same model.")
@click.option("--concurrency", default="1,8,32,128")
@click.option("--prompt-tokens", default=128)
@click.option("--answer-tokens", default=128)
@click.option("--rivals", default=",".join(bench.RIVALS))
@click.option("--out", type=click.Path(path_type=Path), help="Another file.")
def main(
    model: Path, where: str, variants: str, concurrency: str, prompt_tokens: int, answer_tokens: int, rivals: str,
    out: Path | None,
) -> None:  # fmt: skip
    """Measure MODEL, and its variants."""
    settings = Load(bench.parse_concurrency(concurrency), prompt_tokens, answer_tokens)
    board = Benchmark(out or RESULTS / f"serve_{where}.json", settings, {"where": where})
    bench.bench_model(model, board, bench.parse_rivals(rivals))
    for name, folder in read_variants(variants).items():
        board.attempt(f"vllm {name}", partial(board.vllm, name=f"vllm {name}"), folder)
    board.show()


if __name__ == "__main__":
    main()
