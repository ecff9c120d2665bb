"""How fast one model is served: vLLM against plain `generate` and `transformers serve`, and its other forms at 1.

    python benchmarks/serve.py MODEL_FOLDER --where h200 \
        --variants fp8=FOLDER,w4a16=FOLDER       results: benchmarks/results/serve_<where>.json, after each step

Steps come in this order: the rivals, vLLM, the variants. With a GPU the copy bandwidth is measured first, and how many
tokens a second it allows one stream.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click
import torch
from torch.utils.benchmark import Timer

from nbutils import bench, hardware
from nbutils.bench import Benchmark, Load
from nbutils.merging.folder import read_header

RESULTS = Path(__file__).resolve().parent / "results"


def read_variants(text: str) -> dict[str, Path]:
    """`fp8=FOLDER,w4a16=FOLDER` as a mapping."""
    pairs = [part.partition("=") for part in text.split(",") if part]
    if wrong := [name for name, _, folder in pairs if not folder]:
        raise click.UsageError(f"--variants has {', '.join(wrong)} without a folder; write NAME=FOLDER,…")
    return {name: Path(folder) for name, _, folder in pairs}


def bytes_read_per_token(folder: Path) -> int:
    """The size of the weights without the embedding, of which a token needs one row, unless it is the output too."""
    sizes = {name: tensor.size for file in folder.glob("*.safetensors") for name, tensor in read_header(file).items()}
    if "lm_head.weight" in sizes:
        sizes.pop("model.embed_tokens.weight", None)
    return sum(sizes.values())


def bandwidth_limit(folder: Path, device: str = "cuda", size: int = 2**30) -> dict[str, float]:
    """The most tokens a second for one stream, which reads all weights but an embedding: measured by copying."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    timer = Timer("target.copy_(source)", globals={"source": source, "target": torch.empty_like(source)})
    bandwidth = 2 * size / timer.timeit(10).mean  # each byte is read once and written once
    weights = bytes_read_per_token(folder)
    return {
        "weights_gb": weights / 1e9,
        "copy_gb_per_second": bandwidth / 1e9,
        "tokens_per_second": round(bandwidth / weights, 1),
    }


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
    forms = read_variants(variants)
    if hardware.gpu():
        folders = {"vllm": model} | {f"vllm {name}": folder for name, folder in forms.items()}
        board.about["bandwidth_limit"] = {name: bandwidth_limit(folder) for name, folder in folders.items()}
        hardware.free_memory()
    bench.bench_model(model, board, bench.parse_rivals(rivals))
    for name, folder in forms.items():
        board.attempt(f"vllm {name}", partial(board.vllm, name=f"vllm {name}"), folder)
    board.show()


if __name__ == "__main__":
    main()
