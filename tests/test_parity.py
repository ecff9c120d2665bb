"""parity: the same model is found to be the same, a changed one is not, whoever computes it and wherever it lies."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import refused

from nbutils import data, evaluation, files, merging, parity, profiles, record
from nbutils.config import Evaluation
from nbutils.evaluation import models
from nbutils.parity import Fixed, Predictions, predictions

KEY = "not-a-secret-only-a-test"
Found = dict[str, Predictions]


def tiny(**kind: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(files.TINY_MODEL, **{"dtype": "float32"} | kind)


@pytest.fixture(scope="module")
def base() -> Any:
    return tiny()


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter on every linear layer, with random weights in both matrices."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    folder = tmp_path_factory.mktemp("adapter")
    get_peft_model(tiny(), lora).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> evaluation.Evaluator:
    from transformers import AutoTokenizer

    size, rows = Evaluation(batch_size=8, max_new_tokens=16, rows=0), evaluation.general_rows()[:30]
    tokenizer = AutoTokenizer.from_pretrained(files.TINY_MODEL)
    return evaluation.Evaluator(tmp_path_factory.mktemp("run"), tokenizer, rows, size, "float32", limit=256)


@pytest.fixture(scope="module")
def texts(evaluator: evaluation.Evaluator) -> Fixed:
    return parity.fixed_set(evaluator, evaluator.general(), model=str(files.TINY_MODEL), limit=256)


@pytest.fixture(scope="module")
def store(base: Any, adapter: Path, texts: Fixed) -> Found:
    """The base, the tuned model, and the merged one; measured once for all tests."""
    tuned = parity.add_adapter(tiny(), adapter)
    found = {"base": parity.measure(base, texts), "full": parity.measure(tuned, texts)}
    return found | {"merged": parity.measure(tuned.merge_and_unload(), texts)}


def kept(folder: Path, texts: Fixed, given: Found, about: Any = None) -> parity.PredictionStore:
    found = parity.PredictionStore(folder, texts, about=about)
    for name, reading in given.items():
        found[name] = reading
    return found


def shifted(reading: Predictions, by: float) -> Predictions:
    torch.manual_seed(0)
    return Predictions((reading.logs + by * torch.randn_like(reading.logs)).log_softmax(-1), None, reading.answers)


def test_the_fixed_set_is_small_and_ends_within_the_references(evaluator: evaluation.Evaluator, texts: Fixed) -> None:
    assert len(texts.texts) == predictions.HELD_BACK_ROWS + predictions.GENERAL_ROWS and texts.stops == [2]
    assert 100 < texts.positions <= 256 and str(texts.positions) in str(texts)
    answer = evaluator.tokenizer.decode(texts.texts[0][-texts.measured[0] :], skip_special_tokens=True)
    assert evaluator.references[0].startswith(answer.strip()[:8])
    assert evaluator.prompts[0] == texts.texts[0][: -texts.measured[0]]
    assert parity.fixed_set(evaluator, evaluator.general(), model=str(files.TINY_MODEL), limit=256) == texts
    short = parity.fixed_set(evaluator, limit=40)  # what is too long loses its beginning
    assert max(map(len, short.texts)) == 39 and max(map(len, short.prompts)) <= 40 - predictions.ANSWER_TOKENS


def test_predictions_are_what_the_model_says_without_padding(base: Any, texts: Fixed, store: Found) -> None:
    at = 0
    for text, count in zip(texts.texts[:3], texts.measured[:3], strict=True):
        alone = base(input_ids=torch.tensor([text])).logits[0].log_softmax(-1)[-count - 1 : -1]
        assert torch.allclose(store["base"].logs[at : at + count], alone, atol=1e-4)
        at += count
    ids = torch.tensor([texts.prompts[0]])
    alone = base.generate(ids, max_new_tokens=texts.answer_tokens, do_sample=False, eos_token_id=texts.stops)
    assert (store["base"].answers or [])[0] == alone[0, ids.shape[1] :].tolist()


def test_predictions_that_are_no_numbers_are_refused(base: Any, texts: Fixed, monkeypatch: Any) -> None:
    forward = type(base).forward

    def overflow(self: Any, **given: Any) -> Any:
        found = forward(self, **given)
        found.logits = found.logits * torch.nan
        return found

    monkeypatch.setattr(type(base), "forward", overflow)
    with refused("parity.not_finite"):
        parity.measure(base, texts, answers=False)


def test_the_gap_is_the_divergence_of_the_book_and_a_coarse_one_a_lower_bound(store: Found) -> None:
    p, q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.5, 0.25]])
    found = parity.gap(Predictions(p.log()), Predictions(q.log()))
    assert found.mean == pytest.approx(0.25 * torch.log(torch.tensor(2.0)).item(), abs=1e-6)
    assert found.worst == pytest.approx(found.mean) and (found.same_choices, found.positions) == (0, 1)
    full, near = store["full"], shifted(store["full"], 0.1)
    exact = parity.gap(full, near)
    for one, other in ((full, near.shortened(20)), (full.shortened(), near.shortened(20)), (full.shortened(64), near)):
        coarse = parity.gap(one, other)
        assert coarse.coarse and not exact.coarse
        assert 0 < coarse.mean <= exact.mean and coarse.same_choices == exact.same_choices


def test_merging_keeps_the_model_and_the_report_says_so(tmp_path: Path, texts: Fixed, store: Found) -> None:
    found = parity.Report(kept(tmp_path, texts, store))
    found.require()
    assert found.holds and found.facts()["holds"] and found.noise == 1e-6
    assert found.predictions.gap("full", "merged").mean < 1e-7 < 1e-2 < found.predictions.gap("full", "base").mean
    assert [line.verdict for line in found.lines] == ["what the tuning changed", "the same model"]
    assert found.table()[-1]["same answers"] == "16 of 16" and "KL mean" in found.text()


@pytest.mark.parametrize(
    ("given", "holds"),
    [
        ({"full": 0.0, "merged": None}, False),  # the tuning was lost
        ({"full": 0.0, "merged": 0.3, "again": 0.1}, True),  # far, but rounding: the weights are proven elsewhere
        ({"full": 0.0, "merged": 0.0, "vllm": 0.05, "again": 0.02}, True),
        ({"full": 0.0, "merged": 0.0, "vllm": 0.5, "again": 0.02}, False),  # another model is served
        ({"full": 0.0, "merged": 0.0, "vllm": 0.5, "again": 0.4}, True),  # a precision so coarse that this is rounding
        ({"full": 0.0, "merged": 0.0, "vllm": None}, False),  # the base is served
        ({"full": 0.0, "merged": 0.0, "4bit": 2.0}, True),  # a price never fails
        ({"4bit": 0.0, "merged": 0.0}, False),  # nothing that must be the same was compared
    ],
)
def test_what_holds(tmp_path: Path, texts: Fixed, store: Found, given: dict[str, Any], holds: bool) -> None:
    """Each form is the tuned model shifted by so much, or (None) the base."""
    tuned = store["full"]
    forms = {name: store["base"] if by is None else shifted(tuned, by) for name, by in given.items()}
    forms |= {"vllm": forms["vllm"].shortened(20)} if "vllm" in forms else {}
    report = parity.Report(kept(tmp_path, texts, {"base": store["base"]} | forms))
    assert report.holds is holds
    if not holds:
        with refused("parity.model_changed"):
            report.require()


def test_a_small_tuning_that_was_lost_is_found_beyond_the_noise(tmp_path: Path, texts: Fixed, store: Found) -> None:
    base = store["base"]
    found = kept(tmp_path, texts, {"base": base, "full": shifted(base, 0.1), "merged": base})
    assert not parity.Report(found).holds
    found["again"] = shifted(base, 0.12)  # rounding alone moves it as far
    assert parity.Report(found).holds
    same = kept(tmp_path / "same", texts, dict.fromkeys(("base", "full", "merged", "again"), base))
    assert parity.Report(same).holds  # nothing was learnt, so nothing was lost


def test_a_merge_into_the_dequantized_base_must_equal_the_4_bit_one(tmp_path: Path, texts: Fixed, store: Found) -> None:
    given = {"4bit": store["full"], "full": shifted(store["full"], 0.3), "base": store["base"]}
    good = parity.Report(kept(tmp_path, texts, given | {"merged": store["merged"]}, about={"onto": "dequantized"}))
    assert good.holds and [line.judged for line in good.lines] == [False, False, False, True]
    assert good.lines[-1].reference == "4bit"
    lost = kept(tmp_path, texts, given | {"merged": given["base"]}, about={"onto": "dequantized"})
    assert not parity.Report(lost).holds


def test_predictions_are_kept_and_the_servers_added_later(tmp_path: Path, texts: Fixed, store: Found) -> None:
    before = parity.Report(kept(tmp_path, texts, store, {"adapter": 1}))
    later = parity.PredictionStore(tmp_path, about={"adapter": 1})
    assert set(later) == {"base", "full", "merged"} and later.fixed == texts
    assert parity.Report(later).table() == before.table()
    later["vllm"] = store["merged"].shortened(20)
    table = parity.Report(parity.PredictionStore(tmp_path)).table()
    assert [row["verdict"] for row in table] == ["what the tuning changed", "the same model", "the same model"]
    assert table[-1]["KL mean"].startswith("at least")


def test_the_noise_is_what_smaller_batches_change(tmp_path: Path, base: Any, texts: Fixed, monkeypatch: Any) -> None:
    sizes, measured = list[int](), predictions._log_probabilities
    monkeypatch.setattr(predictions, "_log_probabilities", lambda *a: sizes.append(len(a[2])) or measured(*a))
    found = parity.PredictionStore(tmp_path, texts)
    tokens = torch.arange(3).repeat(texts.positions, 1)
    found["vllm"] = Predictions(torch.zeros(texts.positions, 3).log_softmax(-1), tokens)
    found.read_merged(base, answers=False)  # lies partly on disk: few runs
    stored = set(parity.PredictionStore(tmp_path, texts))
    assert stored == {"merged", "again"}  # an earlier server cannot refuse this merge
    assert sizes == [16, 8, 8] and found.gap("merged", "again").mean < 1e-6 == parity.Report(found).noise
    monkeypatch.setattr(predictions, "generate_ids", lambda _, prompts, *rest: [[2]] * len(prompts))
    found.read_merged(base)
    assert sizes[3:] == [16] + [1] * 16


def test_predictions_of_another_model_or_set_or_version_and_damaged_ones_are_dropped(
    tmp_path: Path, texts: Fixed, evaluator: Any, store: Found
) -> None:
    kept(tmp_path, texts, store, {"adapter": 1})
    assert not set(parity.PredictionStore(tmp_path, about={"adapter": 2}))
    assert not set(parity.PredictionStore(tmp_path, parity.fixed_set(evaluator, limit=100), about={"adapter": 1}))
    assert not set(parity.PredictionStore(tmp_path, texts, about={"adapter": 1}, name="parity_other"))
    file, tensors = tmp_path / "evaluation/parity.json", tmp_path / "evaluation/parity/merged.safetensors"
    kept(tmp_path / "other", texts, {"merged": store["base"]}, {"adapter": 2})
    for damaged in (b"short", (tmp_path / "other/evaluation/parity/merged.safetensors").read_bytes()):
        tensors.write_bytes(damaged)
        assert set(parity.PredictionStore(tmp_path, texts, about={"adapter": 1})) == {"base", "full"}
    good = json.loads(file.read_text())
    for wrong in ({"gaps": {"x": {"kl": 1.0}}}, {"readings": ["full"]}, None):
        file.write_text(json.dumps(good | wrong) if wrong else "{")
        assert not set(parity.PredictionStore(tmp_path, texts, about={"adapter": 1})), wrong
        with refused("parity.no_predictions"):
            parity.PredictionStore(tmp_path)


def test_a_folder_that_makes_other_tokens_is_refused(tmp_path: Path, evaluator: evaluation.Evaluator) -> None:
    evaluator.tokenizer.save_pretrained(tmp_path)
    parity.require_tokenizer(tmp_path, evaluator.tokenizer, evaluator.rows)
    settings = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = settings["model"]["vocab"]
    one, other = [piece for piece in ("a", "b", "e", "t") if piece in vocabulary][:2]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings), encoding="utf-8")
    with refused("parity.other_tokens"):
        parity.require_tokenizer(tmp_path, evaluator.tokenizer, evaluator.rows)


@pytest.fixture
def started(tmp_path: Path, adapter: Path) -> Any:
    """A lesson with data, an adapter and its tokenizer."""
    from transformers import AutoTokenizer

    run = record.RunFolder(tmp_path / "run")
    shutil.copytree(adapter, run.adapter)
    AutoTokenizer.from_pretrained(files.TINY_MODEL).save_pretrained(run.adapter)
    data.prepare(str(files.SAMPLES / "train.jsonl"), run.data, rows=60)
    profile = profiles.load("tiny")
    machine = profile.machine.model_copy(update={"precision": "fp32"})
    profile = profile.model_copy(update={"machine": machine, "method": "qlora"})
    given = {"run": run, "profile": profile, "model": str(files.TINY_MODEL), "gpu": None}
    return SimpleNamespace(**given, scratch=tmp_path / "scratch")


@pytest.mark.parametrize(("onto", "fits"), [("full", True), ("dequantized", False)])
def test_the_proof_of_a_lesson_holds_and_a_changed_model_stops_it(
    started: Any, onto: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the model does not fit: then it is read from disk, and nothing of it is left there."""
    if not fits:
        monkeypatch.setattr(models, "decide", lambda *sizes: (False, {"cpu": "8MiB"}))
    folder, settings = started.run.path / "merged", {"quant_type": "nf4", "double_quant": True, "dtype": "float32"}
    given: dict[str, Any] = {"dtype": "float32", "onto": onto, "quantization": settings, "progress": False}
    merging.merge_adapter(started.model, started.run.adapter, folder, **given)
    proof = parity.prove(started, folder, parity.place_model(started))
    facts = proof.facts()["parity"]
    assert facts["holds"] and str(proof).count("\n") == 1 and ("4-bit" in str(proof)) == (onto == "full")
    assert not (started.scratch / "offload").exists()
    target = "4bit" if onto == "dequantized" else "full"
    assert facts["gaps"][f"merged against {target}"]["mean"] < 1e-6 < facts["gaps"]["full against 4bit"]["mean"]
    with open(folder / "model.safetensors", "r+b") as file:
        file.seek(-4, 2)
        file.write(b"\0\0\0\x40")
    with refused("merging.not_proven"):
        parity.prove(started, folder, parity.place_model(started))


def on_disk(folder: Path, adapter: Path, memory: dict[int | str, str]) -> Any:
    model = tiny(device_map="auto", max_memory=memory, offload_folder=str(folder))
    assert "disk" in model.hf_device_map.values()
    return parity.add_adapter(model, adapter)


def test_a_model_that_lies_on_disk_reads_the_same(
    tmp_path: Path, adapter: Path, texts: Fixed, store: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT's own way left a copy of the whole base in the current folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    found = parity.PredictionStore(tmp_path, texts)
    found.read("full", lambda: on_disk(tmp_path / "offload", adapter, {"cpu": "8MiB"}), answers=False)
    assert found["full"].answers is None and parity.gap(store["full"], found["full"]).mean < 1e-9
    assert parity.gap(store["base"], found["base"]).mean < 1e-9 and found.gap("full", "base").same_answers is None
    later = parity.PredictionStore(tmp_path, texts)
    later.read("full", lambda: pytest.fail("read"))  # nothing is measured again
    later["merged"] = store["merged"]
    assert parity.Report(later).holds and not list((tmp_path / "here").iterdir())


def test_a_merge_into_the_dequantized_base_is_what_the_4_bit_model_computes(
    tmp_path: Path, adapter: Path, texts: Fixed
) -> None:
    """bitsandbytes' CPU path for bfloat16 moved a float32 model by 1e-4 nats: `load_model` keeps it off."""
    from transformers import BitsAndBytesConfig

    kind = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "float32"}
    loading = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, **kind), "device_map": {"": "cpu"}}
    model = models.load_model(files.TINY_MODEL, loading | {"dtype": "float32"})
    trained = parity.measure(parity.add_adapter(model, adapter), texts, answers=False)
    merging.merge_adapter(
        files.TINY_MODEL, adapter, tmp_path / "merged", dtype="float32", onto="dequantized", progress=False,
        quantization={"quant_type": "nf4", "double_quant": True, "dtype": "float32"},
    )  # fmt: skip
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="float32")
    assert parity.gap(trained, parity.measure(merged, texts, answers=False)).mean < 1e-7


@pytest.mark.gpu
def test_4_bit_and_offloaded_models_read_on_the_gpu(tmp_path: Path, adapter: Path, texts: Fixed) -> None:
    from transformers import BitsAndBytesConfig

    four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    model = tiny(quantization_config=four_bit, device_map={"": 0}, dtype=torch.bfloat16)
    assert len(parity.measure(parity.add_adapter(model, adapter), texts, answers=False).logs) == texts.positions
    whole = parity.measure(parity.add_adapter(tiny(device_map={"": 0}), adapter), texts, answers=False)
    found = parity.measure(on_disk(tmp_path, adapter, {0: "9MiB", "cpu": "5MiB"}), texts, answers=False)
    assert parity.gap(whole, found).mean < 1e-6


@pytest.mark.parametrize(
    ("gib", "gpu", "ram", "fits"),
    [
        (14.2, 14.7, 11.0, False),  # a 7B on a T4 of Colab
        (5.8, 14.7, 11.0, True),  # a 3B there
        (14.2, 22.1, 11.0, True),  # a 7B on 24 GB
        (14.2, None, 11.0, False),
    ],
)
def test_what_fits_is_decided_by_free_memory(gib: float, gpu: float | None, ram: float, fits: bool) -> None:
    decided, memory = models.decide(gib, gpu, ram)
    sizes = {place: int(size.removesuffix("MiB")) / 1024 for place, size in memory.items()}
    assert decided is fits and sizes["cpu"] < ram / 2 and (gpu is None or sizes[0] < gpu - 2)


def test_how_models_are_loaded_on_this_machine(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    small = parity.place_model(started)
    assert small.fits and small.loading == small.unquantized == {"dtype": "float32", "device_map": {"": "cpu"}}
    monkeypatch.setattr(models, "_free_gpu_gib", lambda: 14.7)
    monkeypatch.setattr(merging, "size_gib", lambda *given: 14.2)
    started.gpu, folder = object(), started.scratch / "offload"
    tight = parity.place_model(started)
    assert not tight.fits and "14.7 GiB free" in str(tight) and tight.unquantized["device_map"] == "auto"
    assert tight.loading == tight.in_4_bits and tight.loading["quantization_config"].load_in_4bit
    folder.mkdir(parents=True)
    small.clear()
    assert folder.exists()
    tight.clear()
    assert not folder.exists()


class FakeVllm(BaseHTTPRequestHandler):
    """Speaks /v1/completions as vLLM does, out of store; asks for a key."""

    reading: Predictions
    fixed: Fixed
    tells = True

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != f"Bearer {KEY}":
            return self._say({"error": {"message": "Unauthorized"}}, 401)
        choice = {"index": 0, "text": "", "finish_reason": "stop", **self._choice(asked)}
        self._say({"id": "1", "object": "text_completion", "created": 0, "model": asked["model"], "choices": [choice]})

    def _choice(self, asked: dict[str, Any]) -> dict[str, Any]:
        if "prompt_logprobs" not in asked:
            assert asked["stop_token_ids"] == self.fixed.stops and asked["temperature"] == 0
            return {"token_ids": (self.reading.answers or [])[self.fixed.prompts.index(asked["prompt"])]}
        row = self.fixed.texts.index(asked["prompt"])
        start, count = sum(self.fixed.measured[:row]), self.fixed.measured[row]
        short = self.reading.shortened(asked["prompt_logprobs"])
        assert short.tokens is not None
        pairs = zip(*(one[start : start + count].tolist() for one in (short.tokens, short.logs)), strict=True)
        told = [{str(t): {"logprob": log, "rank": 1} for t, log in zip(*pair, strict=True)} for pair in pairs]
        return {"prompt_logprobs": [None] * (len(asked["prompt"]) - count) + told if self.tells else None}

    def _say(self, body: dict[str, Any], status: int = 200) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server(texts: Fixed, store: Found) -> Iterator[tuple[str, type[FakeVllm]]]:
    handler = type("Handler", (FakeVllm,), {"reading": store["merged"], "fixed": texts})
    listening = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{listening.server_port}/v1", handler
    listening.shutdown()
    listening.server_close()


def test_a_server_is_read_token_by_token(server: Any, texts: Fixed, store: Found) -> None:
    url, handler = server
    same = parity.gap(store["merged"], parity.measure_server(url, "course", texts, api_key=KEY))
    assert same.mean < 1e-6 and same.coarse and (same.same_answers, same.answers) == (16, 16)
    assert same.same_choices == same.positions == texts.positions
    handler.reading = store["base"]
    other = parity.gap(store["merged"], parity.measure_server(url, "course", texts, api_key=KEY))
    assert other.mean > 0.01 and (other.same_answers or 0) < 16
    with refused("parity.server_refused", url=url):
        parity.measure_server(url, "course", texts, api_key="wrong")
    handler.tells = False
    with refused("parity.server_refused", url=url):
        parity.measure_server(url, "course", texts, api_key=KEY)
