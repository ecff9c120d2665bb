"""parity: the same model is found to be the same, a changed one is not, whoever computes it and wherever it lies."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from support import refused

from nbutils import evaluation, merging, parity, paths
from nbutils.config import Evaluation
from nbutils.parity import Fixed, Reading, offload, predictions

KEY = "not-a-secret-only-a-test"
Found = dict[str, Reading]


def tiny(**kind: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(paths.TINY_MODEL, **{"dtype": "float32"} | kind)


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
def exam(tmp_path_factory: pytest.TempPathFactory) -> evaluation.Exam:
    from transformers import AutoTokenizer

    size, tokenizer = (
        Evaluation(batch_size=8, max_new_tokens=16, rows=0),
        AutoTokenizer.from_pretrained(paths.TINY_MODEL),
    )
    rows = evaluation.general_rows()[:30]
    return evaluation.Exam(tmp_path_factory.mktemp("run"), tokenizer, rows, size, "float32", limit=256)


@pytest.fixture(scope="module")
def texts(exam: evaluation.Exam) -> Fixed:
    return parity.fixed_set(exam, exam.general(), model=str(paths.TINY_MODEL), limit=256)


@pytest.fixture(scope="module")
def readings(base: Any, adapter: Path, texts: Fixed) -> Found:
    """The base, the tuned model, and the merged one; measured once for all tests."""
    tuned = parity.put_beside(tiny(), adapter)
    found = {"base": parity.measure(base, texts), "full": parity.measure(tuned, texts)}
    return found | {"merged": parity.measure(tuned.merge_and_unload(), texts)}


def kept(folder: Path, texts: Fixed, given: Found, about: Any = None) -> parity.Readings:
    found = parity.Readings(folder, texts, about=about)
    for name, reading in given.items():
        found[name] = reading
    return found


def shifted(reading: Reading, by: float) -> Reading:
    torch.manual_seed(0)
    return Reading((reading.logs + by * torch.randn_like(reading.logs)).log_softmax(-1), None, reading.answers)


def test_the_fixed_set_is_small_and_ends_within_the_references(exam: evaluation.Exam, texts: Fixed) -> None:
    assert len(texts.texts) == predictions.HELD_BACK_ROWS + predictions.GENERAL_ROWS and texts.stops == [2]
    assert 100 < texts.positions <= 256 and str(texts.positions) in str(texts)
    for text, count in zip(texts.texts, texts.measured, strict=True):
        assert 0 < count <= predictions.MEASURED and count < len(text) <= 256
    answer = exam.tokenizer.decode(texts.texts[0][-texts.measured[0] :], skip_special_tokens=True)
    assert exam.references[0].startswith(answer.strip()[:8])
    assert exam.prompts[0] == texts.texts[0][: -texts.measured[0]]
    again = parity.fixed_set(exam, exam.general(), model=str(paths.TINY_MODEL), limit=256)
    assert again.fingerprint == texts.fingerprint != parity.fixed_set(exam, limit=256).fingerprint
    short = parity.fixed_set(exam, limit=40)  # what is too long loses its beginning
    assert max(map(len, short.texts)) == 39 and max(map(len, short.prompts)) <= 40 - predictions.ANSWER_TOKENS


def test_a_reading_is_what_the_model_says_without_padding(base: Any, texts: Fixed, readings: Found) -> None:
    at = 0
    for text, count in zip(texts.texts[:3], texts.measured[:3], strict=True):
        alone = base(input_ids=torch.tensor([text])).logits[0].log_softmax(-1)[-count - 1 : -1]
        assert torch.allclose(readings["base"].logs[at : at + count], alone, atol=1e-4)
        at += count
    ids = torch.tensor([texts.prompts[0]])
    alone = base.generate(ids, max_new_tokens=texts.answer_tokens, do_sample=False, eos_token_id=texts.stops)
    assert (readings["base"].answers or [])[0] == alone[0, ids.shape[1] :].tolist()


def test_predictions_that_are_no_numbers_are_refused(base: Any, texts: Fixed, monkeypatch: Any) -> None:
    forward = type(base).forward

    def overflow(self: Any, **given: Any) -> Any:
        found = forward(self, **given)
        found.logits = found.logits * torch.nan
        return found

    monkeypatch.setattr(type(base), "forward", overflow)
    with refused("parity.not_finite"):
        parity.measure(base, texts, answers=False)


def test_the_gap_is_the_divergence_of_the_book_and_a_coarse_one_a_lower_bound(readings: Found) -> None:
    p, q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.5, 0.25]])
    found = parity.gap(Reading(p.log()), Reading(q.log()))
    assert found.mean == pytest.approx(0.25 * torch.log(torch.tensor(2.0)).item(), abs=1e-6)
    assert found.worst == pytest.approx(found.mean) and (found.same_choices, found.positions) == (0, 1)
    full, near = readings["full"], shifted(readings["full"], 0.1)
    exact = parity.gap(full, near)
    for one, other in ((full, near.shortened(20)), (full.shortened(), near.shortened(20)), (full.shortened(64), near)):
        coarse = parity.gap(one, other)
        assert coarse.coarse and not exact.coarse
        assert 0 < coarse.mean <= exact.mean and coarse.same_choices == exact.same_choices
    assert 0 < parity.gap(full, readings["base"].shortened(20)).mean <= parity.gap(full, readings["base"]).mean
    with refused("parity.other_positions"):
        parity.gap(full, Reading(full.logs[:-1]))


def test_merging_keeps_the_model_and_the_report_says_so(tmp_path: Path, texts: Fixed, readings: Found) -> None:
    found = parity.Report(kept(tmp_path, texts, readings))
    found.require()
    assert found.holds and found.facts()["holds"] and found.noise == 1e-6
    assert found.readings.gap("full", "merged").mean < 1e-7 < 1e-2 < found.readings.gap("full", "base").mean
    assert [line.verdict for line in found.lines] == ["what the tuning changed", "the same model"]
    assert found.table()[-1]["same answers"] == "16 of 16" and "KL mean" in found.text()
    assert found.facts()["gaps"]["merged against full"]["same_answers"] == 16


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
def test_what_holds(tmp_path: Path, texts: Fixed, readings: Found, given: dict[str, Any], holds: bool) -> None:
    """Each form is the tuned model shifted by so much, or (None) the base."""
    tuned = readings["full"]
    forms = {name: readings["base"] if by is None else shifted(tuned, by) for name, by in given.items()}
    forms |= {"vllm": forms["vllm"].shortened(20)} if "vllm" in forms else {}
    report = parity.Report(kept(tmp_path, texts, {"base": readings["base"]} | forms))
    assert report.holds is holds
    if not holds:
        with refused("parity.nothing_compared" if "full" not in given else "parity.model_changed"):
            report.require()


def test_a_small_tuning_that_was_lost_is_found_beyond_the_noise_only(
    tmp_path: Path, texts: Fixed, readings: Found
) -> None:
    base = readings["base"]
    found = kept(tmp_path, texts, {"base": base, "full": shifted(base, 0.1), "merged": base})
    assert not parity.Report(found).holds
    found["again"] = shifted(base, 0.12)  # rounding alone moves it as far
    assert parity.Report(found).holds
    same = kept(tmp_path / "same", texts, dict.fromkeys(("base", "full", "merged", "again"), base))
    assert parity.Report(same).holds  # nothing was learnt, so nothing was lost


def test_a_server_whose_answers_are_all_others_is_refused(tmp_path: Path, texts: Fixed, readings: Found) -> None:
    found = kept(tmp_path, texts, readings | {"vllm": Reading(readings["merged"].logs, None, [[1, 2]] * 16)})
    with refused("parity.model_changed", "none of 16 greedy answers"):
        parity.Report(found).require()


def test_a_merge_into_the_dequantized_base_must_equal_the_4_bit_one(
    tmp_path: Path, texts: Fixed, readings: Found
) -> None:
    given = {"4bit": readings["full"], "full": shifted(readings["full"], 0.3), "base": readings["base"]}
    good = parity.Report(kept(tmp_path, texts, given | {"merged": readings["merged"]}, about={"onto": "dequantized"}))
    assert good.holds and [line.judged for line in good.lines] == [False, False, False, True]
    assert good.lines[-1].reference == "4bit" and "instead of" in good.verdict
    lost = kept(tmp_path, texts, given | {"merged": given["base"]}, about={"onto": "dequantized"})
    assert not parity.Report(lost).holds
    parity.require_onto("dequantized", "qlora")
    parity.require_onto("full", "lora")
    for onto, method in (("half", "qlora"), ("dequantized", "lora")):
        with refused("parity.wrong_onto", onto=onto, method=method):
            parity.require_onto(onto, method)


def test_readings_outlive_their_process_and_the_server_is_added_later(
    tmp_path: Path, texts: Fixed, readings: Found
) -> None:
    before = parity.Report(kept(tmp_path, texts, readings, {"adapter": 1}))
    later = parity.Readings(tmp_path, about={"adapter": 1})
    assert set(later) == {"base", "full", "merged"} and later.fixed == texts
    assert parity.Report(later).table() == before.table()
    later["vllm"] = readings["merged"].shortened(20)
    table = parity.Report(parity.Readings(tmp_path)).table()
    assert [row["verdict"] for row in table] == ["what the tuning changed", "the same model", "the same model"]
    assert table[-1]["KL mean"].startswith("at least")
    assert sum(file.stat().st_size for file in (tmp_path / "evaluation/parity").iterdir()) < 4 * 2**20
    with refused("parity.unknown_name", name="mine"):
        later["mine"] = readings["base"]


def test_the_noise_is_what_smaller_batches_change(tmp_path: Path, base: Any, texts: Fixed, monkeypatch: Any) -> None:
    sizes, measured = list[int](), predictions._log_probabilities
    monkeypatch.setattr(predictions, "_log_probabilities", lambda *a: sizes.append(len(a[2])) or measured(*a))
    found = parity.Readings(tmp_path, texts)
    found["vllm"] = Reading(torch.zeros(texts.positions, 3).log_softmax(-1), torch.arange(3).repeat(texts.positions, 1))
    found.read_merged(base, answers=False)  # lies partly on disk: few runs
    assert set(parity.Readings(tmp_path, texts)) == {"merged", "again"}  # an earlier server cannot refuse this merge
    assert sizes == [16, 8, 8] and found.gap("merged", "again").mean < 1e-6 == parity.Report(found).noise
    monkeypatch.setattr(predictions, "generate_ids", lambda _, prompts, *rest: [[2]] * len(prompts))
    found.read_merged(base)
    assert sizes[3:] == [16] + [1] * 16


def test_readings_of_another_model_or_set_or_version_and_damaged_ones_are_dropped(
    tmp_path: Path, texts: Fixed, exam: Any, readings: Found
) -> None:
    kept(tmp_path, texts, readings, {"adapter": 1})
    assert not set(parity.Readings(tmp_path, about={"adapter": 2}))
    assert not set(parity.Readings(tmp_path, parity.fixed_set(exam, limit=100), about={"adapter": 1}))
    assert not set(parity.Readings(tmp_path, texts, about={"adapter": 1}, name="parity_other"))
    file, tensors = tmp_path / "evaluation/parity.json", tmp_path / "evaluation/parity/merged.safetensors"
    kept(tmp_path / "other", texts, {"merged": readings["base"]}, {"adapter": 2})
    for damaged in (b"short", (tmp_path / "other/evaluation/parity/merged.safetensors").read_bytes()):
        tensors.write_bytes(damaged)
        assert set(parity.Readings(tmp_path, texts, about={"adapter": 1})) == {"base", "full"}
    good = json.loads(file.read_text())
    for wrong in ({"gaps": {"x": {"kl": 1.0}}}, {"gaps": None}, {"readings": ["full"]}, {"fixed": {"new": 1}}, None):
        file.write_text(json.dumps(good | wrong) if wrong else "{")
        assert not set(parity.Readings(tmp_path, texts, about={"adapter": 1})), wrong
        with refused("parity.no_readings"):
            parity.Readings(tmp_path)


def test_a_folder_that_makes_other_tokens_is_refused(tmp_path: Path, exam: evaluation.Exam) -> None:
    exam.tokenizer.save_pretrained(tmp_path)
    assert parity.require_tokenizer(tmp_path, exam.tokenizer, exam.rows) == len(exam.rows)
    settings = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = settings["model"]["vocab"]
    one, other = [piece for piece in ("a", "b", "e", "t") if piece in vocabulary][:2]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings), encoding="utf-8")
    with refused("parity.other_tokens"):
        parity.require_tokenizer(tmp_path, exam.tokenizer, exam.rows)
    with refused("parity.no_tokenizer"):
        parity.require_tokenizer(tmp_path / "none", exam.tokenizer, exam.rows)


def on_disk(folder: Path, adapter: Path, memory: dict[int | str, str]) -> Any:
    model = tiny(device_map="auto", max_memory=memory, offload_folder=str(folder))
    assert "disk" in model.hf_device_map.values()
    return parity.put_beside(model, adapter)


def test_a_model_that_lies_on_disk_reads_the_same(
    tmp_path: Path, adapter: Path, texts: Fixed, readings: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT's own way left a copy of the whole base in the current folder."""
    from safetensors.torch import load_file, save_file

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    found = parity.Readings(tmp_path, texts)
    found.read("full", on_disk(tmp_path / "offload", adapter, {"cpu": "8MiB"}), answers=False)
    assert found["full"].answers is None and parity.gap(readings["full"], found["full"]).mean < 1e-9
    assert parity.gap(readings["base"], found["base"]).mean < 1e-9 and found.gap("full", "base").same_answers is None
    later = parity.Readings(tmp_path, texts)
    later.read("full", None)  # nothing is measured again
    later["merged"] = readings["merged"]
    assert parity.Report(later).holds and not list((tmp_path / "here").iterdir())
    odd = shutil.copytree(adapter, tmp_path / "odd")
    weights = load_file(odd / "adapter_model.safetensors")
    save_file(weights | {"base_model.model.extra.weight": torch.zeros(2)}, odd / "adapter_model.safetensors")
    with refused("parity.adapter_not_lora"):
        on_disk(tmp_path / "offload2", odd, {"cpu": "8MiB"})


def test_a_base_that_lies_whole_on_one_device_gets_its_adapter_there(adapter: Path) -> None:
    model = tiny()
    model.hf_device_map = {"": 0}  # whatever it says: the weights are where they are
    tuned = parity.put_beside(model, adapter)
    assert {str(weight.device) for weight in tuned.parameters()} == {"cpu"}
    assert any("lora_B" in name and weight.abs().sum() > 0 for name, weight in tuned.named_parameters())


def test_a_merge_into_the_dequantized_base_is_what_the_4_bit_model_computes(
    tmp_path: Path, adapter: Path, texts: Fixed
) -> None:
    """bitsandbytes' CPU path for bfloat16 moved a float32 model by 1e-4 nats: `as_trained` keeps it off."""
    from transformers import BitsAndBytesConfig

    kind = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "float32"}
    model = tiny(quantization_config=BitsAndBytesConfig(load_in_4bit=True, **kind), device_map={"": "cpu"})
    trained = parity.measure(parity.put_beside(parity.as_trained(model), adapter), texts, answers=False)
    merging.merge_adapter(
        paths.TINY_MODEL, adapter, tmp_path / "merged", dtype="float32", onto="dequantized", progress=False,
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
    assert len(parity.measure(parity.put_beside(model, adapter), texts, answers=False).logs) == texts.positions
    whole = parity.measure(parity.put_beside(tiny(device_map={"": 0}), adapter), texts, answers=False)
    found = parity.measure(on_disk(tmp_path, adapter, {0: "9MiB", "cpu": "5MiB"}), texts, answers=False)
    assert parity.gap(whole, found).mean < 1e-6


@pytest.mark.parametrize(
    ("gib", "gpu", "ram", "fits"),
    [
        (14.2, 14.7, 11.0, False),  # a 7B on a T4 of Colab
        (5.8, 14.7, 11.0, True),  # a 3B there
        (14.2, 22.1, 11.0, True),  # a 7B on 24 GB
        (14.2, None, 11.0, False),
        (0.03, None, 11.0, True),
    ],
)
def test_what_fits_is_decided_by_free_memory(gib: float, gpu: float | None, ram: float, fits: bool) -> None:
    decided, memory = offload.decide(gib, gpu, ram)
    sizes = {place: int(size.removesuffix("MiB")) / 1024 for place, size in memory.items()}
    assert decided is fits and sizes["cpu"] < ram / 2 and (gpu is None or sizes[0] < gpu - 2)


def test_the_room_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = parity.room_for(0.01, None, tmp_path)
    assert small.fits and small.wide == {"device_map": {"": "cpu"}} and (small.name, small.other) == ("full", "4bit")
    monkeypatch.setattr(offload, "_free_gpu_gib", lambda: 14.7)
    tight = parity.room_for(14.2, object(), tmp_path)
    assert not tight.fits and "14.7 GiB free" in tight.reason and (tight.name, tight.other) == ("4bit", "full")
    assert tight.wide["device_map"] == "auto" and tight.wide["offload_folder"] == str(tmp_path)
    for room in (small, tight):
        assert set(room.wanted("qlora")) == {room.name, room.other} and room.wanted("lora") == ("full",)
    small.clear()
    assert tmp_path.exists()
    tight.clear()
    assert not tmp_path.exists()


class FakeVllm(BaseHTTPRequestHandler):
    """Speaks /v1/completions as vLLM does, out of readings; asks for a key."""

    reading: Reading
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
        pairs = zip(
            short.tokens[start : start + count].tolist(), short.logs[start : start + count].tolist(), strict=True
        )
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
def server(texts: Fixed, readings: Found) -> Iterator[tuple[str, type[FakeVllm]]]:
    handler = type("Handler", (FakeVllm,), {"reading": readings["merged"], "fixed": texts})
    listening = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{listening.server_port}/v1", handler
    listening.shutdown()
    listening.server_close()


def test_a_server_is_read_token_by_token(server: Any, texts: Fixed, readings: Found) -> None:
    url, handler = server
    same = parity.gap(readings["merged"], parity.measure_server(url, "course", texts, api_key=KEY))
    assert same.mean < 1e-6 and same.coarse and (same.same_answers, same.answers) == (16, 16)
    assert same.same_choices == same.positions == texts.positions
    handler.reading = readings["base"]
    other = parity.gap(readings["merged"], parity.measure_server(url, "course", texts, api_key=KEY))
    assert other.mean > 0.01 and (other.same_answers or 0) < 16
    with refused("parity.server_refused", url=url):
        parity.measure_server(url, "course", texts, api_key="wrong")
    handler.tells = False
    with refused("parity.no_prompt_logprobs"):
        parity.measure_server(url, "course", texts, api_key=KEY)
