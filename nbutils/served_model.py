"""The model that lessons 05 and 09 serve: the flags it needs, and whether its server says what lesson 04 stored."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from heapq import nlargest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbutils import evaluation, files, hardware, merging, parity, serving
from nbutils.config import Profile
from nbutils.errors import CourseError
from nbutils.evaluation import Answer
from nbutils.evaluation.evaluator import Facts, Table
from nbutils.evaluation.placement import fit
from nbutils.exporting.make import Export, find_format, open_export, weights_bytes
from nbutils.language import tr
from nbutils.models import model_folder, read_config
from nbutils.record import RunFolder
from nbutils.serving.engine import tensor_parallel

if TYPE_CHECKING:
    from openai import OpenAI

SERVER_TOKENS = 20  # vLLM gives no more logprobs of a position unless --max-logprobs says so
SERVER_REQUESTS = 8  # in flight: logprobs take memory
MIN_KV_CACHE_GIB = 0.5  # what a server needs at least beside the weights
NOTHING_STORED = "Lesson 04 stored nothing for this model and precision: there is nothing to compare with."


@dataclass(frozen=True)
class ServerComparison:
    """What came of a comparison in a sentence, the numbers for facts.json, and the rows of a table."""

    text: str
    numbers: Facts
    table: Table = field(default_factory=list)

    def __str__(self) -> str:
        return self.text

    def facts(self) -> Facts:
        """For facts.json."""
        return self.numbers


class ServedModel:
    """A model folder (the merged model, an export of it, or any other) and the held-out questions for it.

    Example:
        model = ServedModel(lesson.run, lesson.profile, engine=environment.engine, rows=32)
        server = serving.Server(model.folder, environment, flags=model.flags)
    """

    def __init__(self, run: RunFolder, profile: Profile, folder: str = "", *, engine: str, rows: int = 0) -> None:
        self.run = run
        self.gpu = hardware.gpu()
        self.at_once = profile.vllm.max_num_seqs
        chosen = Path(folder).expanduser() if folder else run.merged
        self.folder = Path(model_folder(chosen))
        self.is_merged = self.folder.resolve() == run.merged.resolve()
        self.dtype, self.export = serving_dtype(
            self.folder,
            run.merged,
            profile,
            gpu=self.gpu,
            engine=engine,
        )
        self.compared_with = run.merged if self.export else self.folder
        self.evaluator, self.stored = evaluation.stored_answers(run, profile, self.compared_with, rows)
        self.questions = self.evaluator.questions

    @property
    def flags(self) -> Facts:
        """The flags this GPU and this model need; the lesson chooses the others."""
        flags = serving.flags_for(self.gpu, self.folder)
        flags["dtype"] = self.dtype
        if self.evaluator.thinking is not None:
            flags["default-chat-template-kwargs"] = {"enable_thinking": self.evaluator.thinking}
        if self.evaluator.opens_thinking:
            flags["reasoning-parser"] = "qwen3"
        return flags

    def ask(self, server: serving.Server, name: str = "") -> list[Answer]:
        """The server's greedy answers to all questions."""
        return serving.ask(
            server.client(),
            name or server.model_name,
            self.questions,
            self.evaluator.max_new_tokens,
            tools=[row.get("tools") for row in self.evaluator.rows],
            opens_thinking=self.evaluator.opens_thinking,
            token_ids=server.environment.engine != "transformers",
            at_once=self.at_once,
        )

    def compare_answers(self, server: serving.Server) -> ServerComparison:
        """Ask the server, and stop if the merged model does not answer as in lesson 04; an export is only reported."""
        evaluator = self.evaluator
        served = self.ask(server)
        text = tr(NOTHING_STORED)
        columns = {tr("server"): [answer.text for answer in served]}
        if server.environment.engine == "transformers" and any(row.get("tools") for row in evaluator.rows):
            text = tr("`transformers serve` gives tool calls apart, not as the model wrote them: nothing is compared.")
            return ServerComparison(text, {"rows_left_out": len(served)}, evaluator.table(columns, rows=len(served)))
        compared = evaluator.with_think_tag(served[: len(self.stored)])
        agreement = serving.compare_answers(compared, evaluator.with_think_tag(self.stored))
        if self.stored:
            text = tr("Server and lesson 04 (transformers, {dtype}): {found}", dtype=evaluator.dtype, found=agreement)
            columns = {tr("lesson 04"): [answer.text for answer in self.stored]} | columns
        if self.is_merged:
            agreement.require(evaluator.dtype)
        numbers = {
            "rows_left_out": evaluator.left_out,
            "identical_answers": {"count": agreement.identical, "total": agreement.total},
            "exact_match": evaluator.result("server", served).mean("exact_match"),
        }
        if server.environment.engine != "transformers":  # which returns no tokens
            numbers["identical_prompts"] = {"count": agreement.same_prompts, "total": agreement.total}
        return ServerComparison(text, numbers, evaluator.table(columns, rows=len(served)))

    def compare_predictions(self, server: serving.Server) -> ServerComparison:
        """The server's predictions on lesson 04's fixed set beside the merged model's; stops if it is another model."""
        if server.environment.engine == "transformers":
            return ServerComparison(tr("`transformers serve` does not return predictions."), {"parity": {}})
        try:
            store = parity.load_predictions(self.run.path, self.compared_with)
        except CourseError:
            return ServerComparison(tr(NOTHING_STORED), {"parity": {}})
        return self.judge(store, measure_server(server.client(), server.model_name, store.fixed))

    def judge(self, store: parity.PredictionStore, served: parity.Predictions) -> ServerComparison:
        """The server's predictions beside the merged model's; those of an export have a price, and cannot fail."""
        if not self.export:
            store.add("vllm", served)
            report = parity.ParityReport(store)
            report.require()
            return ServerComparison(str(report), report.facts())
        gap = parity.gap(store.forms["merged"], served)
        export = replace(self.export, gap=gap)
        verdict = tr(
            "The price of {name}, in vLLM: {verdict}, {mean:.2g} nats per token.",
            name=export.name,
            verdict=tr(export.verdict),
            mean=gap.mean,
        )
        return ServerComparison(verdict, {"parity": {"price": export.facts, "verdict": verdict}})


def measure_server(client: OpenAI, model_name: str, fixed: parity.FixedSet) -> parity.Predictions:
    """The predictions of the model on a vLLM server."""
    import torch

    def predict(number: int) -> torch.Tensor:
        """Logprob and token of the likeliest ones at each position; a token of the text that vLLM adds is cut off."""
        completion: Any = client.completions.create(
            model=model_name,
            prompt=fixed.texts[number],
            max_tokens=1,
            temperature=0.0,
            extra_body={"prompt_logprobs": SERVER_TOKENS},
        )
        positions = []
        for tokens in completion.choices[0].prompt_logprobs[-fixed.measured[number] :]:
            pairs = [(value["logprob"], int(token)) for token, value in tokens.items()]
            positions.append(nlargest(SERVER_TOKENS, pairs))
        return torch.tensor(positions, dtype=torch.float64)  # holds both of a pair, token ids exactly

    numbers = range(len(fixed.texts))
    likeliest = torch.cat(serving.send_concurrently(predict, numbers, str(client.base_url), SERVER_REQUESTS))
    return parity.Predictions(likeliest[..., 0].float(), likeliest[..., 1].long())


def serving_dtype(
    folder: Path, merged: Path, profile: Profile, *, gpu: hardware.GPU | None, engine: str
) -> tuple[str, Export | None]:
    """The dtype a folder is served in on this machine, and the export if it is one; stops if it cannot be served."""
    dtype = profile.from_pretrained.dtype
    config = read_config(folder / "config.json")
    if merging.is_quantized(config):
        export = open_export(folder, merged)
        _require_kernels(export, gpu, engine)
        return "bfloat16" if dtype == "float32" else dtype, export  # its kernels compute in 16 bits only
    gib = weights_bytes(folder) / files.GIB
    if gpu and engine != "transformers":
        gpus = tensor_parallel(folder, gpu.count)
        share = profile.vllm.gpu_memory_utilization * gpu.memory_gib
        fits = gib <= gpus * (share - MIN_KV_CACHE_GIB)
    else:
        fits = fit(gib, gpu)
    if not fits:
        raise CourseError(
            "{folder} has {gib:.1f} GiB of weights, too much for this machine.",
            todo=(
                'Set EXPORTS = "w4a16" in lesson 08 and FOLDER = "{small}" here, or take a larger or newer '
                "GPU (T4 or later)."
            ),
            folder=folder,
            gib=gib,
            small=folder.parent / "exports/w4a16",
        )
    return dtype, None


def _require_kernels(export: Export, gpu: hardware.GPU | None, engine: str) -> None:
    """Stop unless this GPU and this engine can compute with the weights of an export."""
    form = find_format(export.name)
    capability = gpu.capability if gpu else (0, 0)  # vLLM's CPU build has none of these kernels
    if capability >= form.capability and engine != "transformers" and form.load.startswith("vllm"):
        return
    raise CourseError(
        "{folder} has {name} weights, and {engine} on {gpu} cannot compute with them.",
        allowed="{name} runs in: {runs}",
        todo="Serve the merged model (leave FOLDER empty), or set EXPORTS to another format in lesson 08.",
        folder=export.folder,
        name=form.name,
        engine=engine,
        gpu=gpu.name if gpu else "CPU",
        runs=tr(form.runs),
    )
