"""parity: the same model is found to be the same, a changed one is not, whoever computes it."""

import json
import math
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import torch
from support import refused

from nbutils import data, evaluation, files, hardware, merging, parity, platforms, profiles, record, served_model
from nbutils.evaluation import placement as placing
from nbutils.parity import FixedSet, Predictions

URL = "http://127.0.0.1:8000/v1"
KEY = "not-a-secret-only-a-test"
Forms = dict[str, Predictions]
Patch = pytest.MonkeyPatch


def tiny(**options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    loading = {"dtype": "float32"} | options
    return AutoModelForCausalLM.from_pretrained(files.TINY_MODEL, **loading)


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

    rows = data.stored_rows(files.SAMPLES / "general.jsonl")
    return evaluation.Evaluator(
        run=tmp_path_factory.mktemp("run"),
        tokenizer=AutoTokenizer.from_pretrained(files.TINY_MODEL),
        held_out=rows[:30],
        size=evaluation.Size(batch_size=8, max_new_tokens=16, rows=0),
        dtype="float32",
        limit=256,
    )


@pytest.fixture(scope="module")
def texts(evaluator: evaluation.Evaluator) -> FixedSet:
    return parity.fixed_set(evaluator)


@pytest.fixture(scope="module")
def forms(base: Any, adapter: Path, texts: FixedSet) -> Forms:
    """The predictions of the base, the tuned model, and the merged one; measured once for all tests."""
    from peft import PeftModel

    tuned = PeftModel.from_pretrained(tiny(), adapter)
    measured = {
        "base": parity.measure(base, texts),
        "full": parity.measure(tuned, texts),
    }
    merged = tuned.merge_and_unload()
    measured["merged"] = parity.measure(merged, texts)
    return measured


def store_of(run: Path, texts: FixedSet, forms: Forms, stamp: dict[str, Any] | None = None) -> parity.PredictionStore:
    store = parity.new_store(run, texts, stamp or {})
    for name, predictions in forms.items():
        store.add(name, predictions)
    return store


def likeliest(log_probs: torch.Tensor, count: int) -> Predictions:
    """As many of the likeliest tokens, out of the log-probabilities of all."""
    top = log_probs.topk(count)
    return Predictions(top.values, top.indices)


def shortened(predictions: Predictions, count: int = 20) -> Predictions:
    return Predictions(predictions.log_probs[:, :count], predictions.tokens[:, :count])


def shifted(predictions: Predictions, by: float) -> Predictions:
    """Other probabilities of the same tokens, with the same sum."""
    torch.manual_seed(0)
    log_probs = predictions.log_probs
    log_of_sum = log_probs.logsumexp(-1, keepdim=True)
    noise = by * torch.randn_like(log_probs)
    moved = (log_probs + noise).log_softmax(-1) + log_of_sum
    falling, order = moved.sort(descending=True)
    return Predictions(falling, predictions.tokens.gather(1, order))


def test_the_fixed_set_is_small_and_ends_within_the_references(
    evaluator: evaluation.Evaluator, texts: FixedSet
) -> None:
    assert len(texts.texts) == parity.HELD_OUT_ROWS + parity.GENERAL_ROWS
    assert 100 < sum(texts.measured) <= 256
    first_text = texts.texts[0]
    answer_start = len(first_text) - texts.measured[0]
    assert first_text[:answer_start] == evaluator.prompts[0]
    answer = evaluator.tokenizer.decode(first_text[answer_start:], skip_special_tokens=True)
    first_characters = answer.strip()[:8]
    assert evaluator.references[0].startswith(first_characters)


def test_the_fixed_set_is_the_same_each_time(evaluator: evaluation.Evaluator, texts: FixedSet) -> None:
    assert parity.fixed_set(evaluator) == texts


def test_a_text_that_is_too_long_loses_its_beginning(evaluator: evaluation.Evaluator, monkeypatch: Patch) -> None:
    monkeypatch.setattr(parity, "LONGEST_TEXT", 40)
    lengths = [len(text) for text in parity.fixed_set(evaluator).texts]
    assert max(lengths) == 39


@pytest.mark.slow
def test_predictions_are_what_the_model_says_without_padding(base: Any, texts: FixedSet, forms: Forms) -> None:
    start = 0
    for text, count in zip(texts.texts[:3], texts.measured[:3], strict=True):
        end = start + count
        log_probs = forms["base"].log_probs[start:end]
        tokens = forms["base"].tokens[start:end]
        start = end
        logits = base(input_ids=torch.tensor([text])).logits[0]
        alone = logits[-count - 1 : -1].log_softmax(-1)  # each position predicts the token after it
        assert torch.allclose(log_probs, alone.gather(1, tokens), atol=1e-4)
        assert torch.equal(tokens[:, 0], alone.argmax(-1))


def test_predictions_that_are_no_numbers_are_refused(base: Any, texts: FixedSet, monkeypatch: Patch) -> None:
    monkeypatch.setattr(base.lm_head, "forward", lambda hidden: hidden @ base.lm_head.weight.T * torch.nan)
    with refused("The model's logits contain NaN or infinity: a value"):
        parity.measure(base, texts)


def test_the_gap_is_the_divergence_of_the_book() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2]]).log()
    q = torch.tensor([[0.3, 0.5, 0.2]]).log()
    divergence = 0.5 * math.log(0.5 / 0.3) + 0.3 * math.log(0.3 / 0.5)

    gap = parity.gap(likeliest(p, 3), likeliest(q, 3))

    assert gap.mean == pytest.approx(divergence, abs=1e-6)
    assert gap.worst == pytest.approx(gap.mean)
    assert gap.same_choices == 0
    assert gap.positions == 1


def test_the_gap_of_some_tokens_is_a_lower_bound() -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(40, 3000)
    noise = 0.1 * torch.randn(40, 3000)
    full = logits.log_softmax(-1)
    near = (logits + noise).log_softmax(-1)
    divergences = (full.exp() * (full - near)).sum(-1)
    exact = divergences.mean().item()

    by_few = parity.gap(likeliest(full, 256), likeliest(near, 20)).mean
    by_many = parity.gap(likeliest(full, 256), likeliest(near, 256)).mean
    by_all = parity.gap(likeliest(full, 3000), likeliest(near, 3000)).mean

    assert 0 < by_few < by_many < exact
    assert exact < 3 * by_many
    assert by_all == pytest.approx(exact, rel=1e-3)


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    """A complete folder of a merged model, with its stamp alone."""
    with files.complete_folder(tmp_path / "merged", {"adapter": 1}):
        pass
    return tmp_path / "merged"


def test_merging_keeps_the_model(tmp_path: Path, texts: FixedSet, forms: Forms) -> None:
    report = parity.ParityReport(store_of(tmp_path, texts, forms))
    report.require()
    assert report.holds
    assert report.facts()["parity"]["holds"]
    assert report.noise == 1e-6
    tuning, merging = report.lines
    assert tuning.verdict == "what the tuning changed"
    assert tuning.gap.mean > 1e-2
    assert merging.verdict == "the same model"
    assert merging.gap.mean < 1e-7
    positions = sum(texts.measured)
    assert merging.gap.columns["same next token"] == f"{positions} of {positions}"


def test_the_server_is_added_later(tmp_path: Path, merged: Path, texts: FixedSet, forms: Forms) -> None:
    first = store_of(tmp_path, texts, forms, {"adapter": 1})

    later = parity.load_predictions(tmp_path, merged)
    assert set(later.forms) == {"base", "full", "merged"}
    assert later.fixed == texts
    assert parity.ParityReport(later).lines == parity.ParityReport(first).lines

    later.add("vllm", shortened(forms["merged"]))
    report = parity.ParityReport(parity.load_predictions(tmp_path, merged))
    assert [line.verdict for line in report.lines] == ["what the tuning changed", "the same model", "the same model"]
    assert str(report.lines[-1]).endswith("between [merged, in vLLM] and [merged]")


BASE = None  # in place of a shift: a form that predicts as the base does


@pytest.mark.parametrize(("onto", "shifts", "holds"), [
    ("dequantized", {"4bit": 0.0, "full": 0.3, "merged": 0.0}, True),  # what the 4-bit one computes
    ("dequantized", {"4bit": 0.0, "full": 0.3, "merged": BASE}, False),
    ("full", {"full": 0.0, "merged": BASE}, False),  # the tuning was lost
    ("full", {"full": 0.0, "merged": 0.3, "again": 0.1}, True),  # far, but rounding: the weights are proven elsewhere
    ("full", {"full": 0.0, "merged": 0.0, "vllm": 0.05, "again": 0.02}, True),
    ("full", {"full": 0.0, "merged": 0.0, "vllm": 0.5, "again": 0.02}, False),  # another model is served
    ("full", {"full": 0.0, "merged": 0.0, "vllm": 0.5, "again": 0.4}, True),  # a coarse precision: this is rounding
    ("full", {"full": 0.0, "merged": 0.0, "vllm": BASE}, False),  # the base is served
    ("full", {"full": 0.0, "merged": 0.0, "4bit": 2.0}, True),  # what 4 bits cost never fails
    ("full", {"4bit": 0.0, "merged": 0.0}, False),  # nothing that must be the same was compared
])  # fmt: skip
def test_what_holds(
    tmp_path: Path, texts: FixedSet, forms: Forms, onto: str, shifts: dict[str, float | None], holds: bool
) -> None:
    """Each form predicts as the tuned model does, shifted by so much."""
    made = {"base": forms["base"]}
    for name, by in shifts.items():
        made[name] = forms["base"] if by is BASE else shifted(forms["full"], by)
    if "vllm" in made:
        made["vllm"] = shortened(made["vllm"])

    report = parity.ParityReport(store_of(tmp_path, texts, made, {"onto": onto}))

    assert report.holds is holds
    target = "4bit" if onto == "dequantized" else "full"
    must_equal = []  # the forms that the merged model is held against
    for line in report.lines:
        if line.other == "merged" and line.verdict in (parity.SAME, parity.FAILS):
            must_equal.append(line.reference)
    assert must_equal == ([target] if target in shifts else [])
    if not holds:
        with refused("Serve the folder that lesson 04 wrote. If the merged"):
            report.require()


def test_a_small_tuning_that_was_lost_is_found_beyond_the_noise(tmp_path: Path, texts: FixedSet, forms: Forms) -> None:
    base = forms["base"]
    lost = store_of(tmp_path, texts, {"base": base, "full": shifted(base, 0.1), "merged": base})
    assert not parity.ParityReport(lost).holds
    lost.add("again", shifted(base, 0.12))  # rounding alone moves it as far
    assert parity.ParityReport(lost).holds


def test_where_nothing_was_learned_nothing_is_lost(tmp_path: Path, texts: FixedSet, forms: Forms) -> None:
    same = dict.fromkeys(("base", "full", "merged", "again"), forms["base"])
    assert parity.ParityReport(store_of(tmp_path, texts, same)).holds


def test_the_noise_is_what_smaller_batches_change(
    tmp_path: Path, base: Any, texts: FixedSet, monkeypatch: Patch
) -> None:
    batch_sizes: list[int] = []
    forward = type(base).forward

    def watched(self: Any, **inputs: Any) -> Any:
        batch_sizes.append(len(inputs["input_ids"]))
        return forward(self, **inputs)

    monkeypatch.setattr(type(base), "forward", watched)
    store = parity.new_store(tmp_path, texts, {})
    store.measure_merged(base)

    assert batch_sizes == [16] + [1] * 16
    assert store.gap("merged", "again").mean < 1e-6
    assert parity.ParityReport(store).noise == 1e-6


@pytest.fixture
def stored(tmp_path: Path, merged: Path, texts: FixedSet, forms: Forms) -> Path:
    """The evaluation folder of a run whose stored predictions belong to `merged`."""
    store_of(tmp_path, texts, forms, {"adapter": 1})
    parity.load_predictions(tmp_path, merged)
    return tmp_path / "evaluation"


def test_a_damaged_file_of_predictions_is_refused(tmp_path: Path, merged: Path, stored: Path) -> None:
    (stored / "parity/merged.safetensors").write_bytes(b"short")
    with refused("No predictions of"):
        parity.load_predictions(tmp_path, merged)


def test_predictions_of_another_merge_are_refused(
    tmp_path: Path, merged: Path, stored: Path, texts: FixedSet, forms: Forms
) -> None:
    store_of(tmp_path / "other", texts, {"merged": forms["base"]}, {"adapter": 2})
    other = tmp_path / "other/evaluation/parity/merged.safetensors"
    shutil.copy(other, stored / "parity/merged.safetensors")
    with refused("No predictions of"):
        parity.load_predictions(tmp_path, merged)
    with refused("No predictions of"):
        parity.load_predictions(tmp_path / "other", merged)


def test_predictions_that_an_earlier_version_stored_are_read(
    tmp_path: Path, merged: Path, stored: Path, forms: Forms
) -> None:
    file = stored / "parity.json"
    content = json.loads(file.read_text())
    content["fixed"] |= {"prompts": [[1]], "stops": [2]}
    content |= {"positions": 9, "readings": {}, "gaps": {"x": {}}}
    file.write_text(json.dumps(content))
    assert set(parity.load_predictions(tmp_path, merged).forms) == set(forms)


@pytest.mark.parametrize("change", [{"fixed": {}}, {"mark": "another"}], ids=str)
def test_a_changed_parity_json_is_refused(tmp_path: Path, merged: Path, stored: Path, change: dict[str, Any]) -> None:
    file = stored / "parity.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | change))
    with refused("No predictions of"):
        parity.load_predictions(tmp_path, merged)


def test_a_damaged_parity_json_is_refused(tmp_path: Path, merged: Path, stored: Path) -> None:
    (stored / "parity.json").write_text("{")
    with refused("No predictions of"):
        parity.load_predictions(tmp_path, merged)


def test_without_predictions_or_a_merged_model_nothing_is_read(tmp_path: Path, merged: Path, stored: Path) -> None:
    with refused("No predictions of"):
        parity.load_predictions(tmp_path / "no run", merged)
    with refused("No predictions of"):
        parity.load_predictions(tmp_path, tmp_path)  # not the folder of a merged model


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, adapter: Path) -> Path:
    """A run with data, an adapter and its tokenizer."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("prepared") / "run"
    run = record.RunFolder(folder)
    shutil.copytree(adapter, run.adapter)
    tokenizer = AutoTokenizer.from_pretrained(files.TINY_MODEL)
    tokenizer.save_pretrained(run.adapter)
    data.prepare(str(files.SAMPLES / "train.jsonl"), run.data, rows=60)
    return run.path


@pytest.fixture
def lesson(tmp_path: Path, prepared: Path, monkeypatch: Patch) -> Any:
    """A lesson of that run, whose fixed set is small."""
    monkeypatch.setattr(parity, "HELD_OUT_ROWS", 3)
    monkeypatch.setattr(parity, "GENERAL_ROWS", 1)
    shutil.copytree(prepared, tmp_path / "run")
    profile = profiles.load("tiny")
    load = profile.from_pretrained.model_copy(update={"dtype": "float32"})
    changes = {"from_pretrained": load, "method": "qlora"}
    return SimpleNamespace(
        run=record.RunFolder(tmp_path / "run"),
        profile=profile.model_copy(update=changes),
        model=str(files.TINY_MODEL),
    )


def place(lesson: Any) -> placing.Placement:
    return evaluation.place_model(lesson.model, lesson.run.adapter, lesson.profile)


def merged_onto(lesson: Any, onto: str) -> Path:
    folder = lesson.run.path / "merged"
    merging.merge_adapter(
        lesson.model,
        lesson.run.adapter,
        folder,
        dtype="float32",
        onto=onto,
        quantization={"bnb_4bit_quant_type": "nf4", "dtype": "float32"},
    )
    return folder


@pytest.mark.slow
def test_the_proof_holds_with_one_model_at_a_time(lesson: Any, monkeypatch: Patch) -> None:
    from transformers import AutoModelForCausalLM

    folder = merged_onto(lesson, "full")
    loaded: list[str] = []
    load = AutoModelForCausalLM.from_pretrained

    def watched(name: Any, **options: Any) -> Any:
        loaded.append(str(name))
        return load(name, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", watched)
    placement = place(lesson)
    assert placement.load(folder) is placement.load(folder)

    proof = parity.prove(lesson.run, lesson.profile, placement, folder)

    facts = proof.facts()["parity"]
    assert facts["holds"]
    assert "4-bit" in str(proof)
    assert facts["gaps"]["merged against full"]["mean"] < 1e-6
    assert facts["gaps"]["full against 4bit"]["mean"] > 1e-6
    assert loaded == [str(folder), lesson.model, lesson.model]
    assert placement.loaded is None
    stored = parity.load_predictions(lesson.run.path, folder)
    base_now = parity.measure(tiny(), stored.fixed)
    assert parity.gap(stored.forms["base"], base_now).mean < 1e-9


@pytest.mark.slow
def test_a_tokenizer_that_was_changed_stops_the_proof(lesson: Any) -> None:
    folder = merged_onto(lesson, "full")
    evaluator = evaluation.open_evaluator(lesson.run, lesson.profile, folder)
    text = parity.fixed_set(evaluator).texts[0]
    first, second = text[-3:-1]  # tokens of an answer
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    pieces = {number: piece for piece, number in vocabulary.items()}
    vocabulary[pieces[first]] = second
    vocabulary[pieces[second]] = first
    file.write_text(json.dumps(tokenizer), encoding="utf-8")

    with refused("tokenizes differently from the one used in training"):
        parity.prove(lesson.run, lesson.profile, place(lesson), folder)


@pytest.mark.slow
def test_a_merge_into_the_dequantized_base_is_what_the_4_bit_model_computes(lesson: Any) -> None:
    folder = merged_onto(lesson, "dequantized")
    proof = parity.prove(lesson.run, lesson.profile, place(lesson), folder)
    gaps = proof.facts()["parity"]["gaps"]
    assert gaps["merged against 4bit"]["mean"] < 1e-6
    assert gaps["full against 4bit"]["mean"] > 1e-6


def test_without_room_for_the_model_only_tokens_are_compared(lesson: Any, monkeypatch: Patch) -> None:
    monkeypatch.setattr(placing, "fit", lambda *sizes: False)
    folder = merged_onto(lesson, "full")
    placement = place(lesson)
    proof = parity.prove(lesson.run, lesson.profile, placement, folder)
    assert proof.facts() == {"parity": {}}
    assert "does not fit" in str(proof)
    assert placement.loaded is None
    with refused("No predictions of"):
        parity.load_predictions(lesson.run.path, folder)


@pytest.mark.gpu
def test_4_bit_models_read_on_the_gpu(adapter: Path, texts: FixedSet) -> None:
    from peft import PeftModel
    from transformers import BitsAndBytesConfig

    four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    model = tiny(quantization_config=four_bit, device_map={"": 0}, dtype=torch.bfloat16)
    tuned = PeftModel.from_pretrained(model, adapter)
    predictions = parity.measure(tuned, texts)
    assert len(predictions.log_probs) == sum(texts.measured)


@pytest.mark.parametrize(("model_gib", "gpu_gib", "fits"), [
    pytest.param(14.2, 14.7, False, id="a 7B on a T4 of Colab"),
    pytest.param(5.8, 14.7, True, id="a 3B on a T4 of Colab"),
    pytest.param(14.2, 22.1, True, id="a 7B on 24 GB"),
    pytest.param(14.2, None, False, id="a 7B without a GPU"),
])  # fmt: skip
def test_what_fits_is_decided_by_free_memory(model_gib: float, gpu_gib: Any, fits: bool, monkeypatch: Patch) -> None:
    monkeypatch.setattr(platforms, "free_memory_gib", lambda: 11.0)
    free_bytes = int((gpu_gib or 0) * 2**30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free_bytes, 0))
    assert placing.fit(model_gib, gpu_gib) is fits


def test_a_small_model_is_loaded_unquantized(lesson: Any) -> None:
    placement = place(lesson)
    assert placement.fits
    assert placement.loading == {"dtype": "float32", "device_map": {"": "cpu"}}


def test_a_model_that_is_larger_than_the_gpu_is_loaded_in_4_bits(lesson: Any, monkeypatch: Patch) -> None:
    free_bytes = int(14.7 * 2**30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free_bytes, 0))
    monkeypatch.setattr(merging, "size_gib", lambda *model: 14.2)
    monkeypatch.setattr(hardware, "gpu", object)
    placement = place(lesson)
    assert not placement.fits
    assert "14.2 GiB" in placement.reason
    assert placement.loading == placement.in_4_bits
    assert placement.loading["quantization_config"].load_in_4bit


@pytest.fixture
def server(texts: FixedSet, forms: Forms) -> Any:
    """Speaks /v1/completions as vLLM does, out of `predictions`; asks for a key."""
    server = SimpleNamespace(predictions=forms["merged"])

    def log_probs_of(prompt: list[int], count: int) -> list[Any]:
        """For each token of a prompt the `count` likeliest ones; None where the fixed set measures nothing."""
        row = texts.texts.index(prompt)
        measured = texts.measured[row]
        start = sum(texts.measured[:row])
        shown = shortened(server.predictions, count)
        answer: list[Any] = [None] * (len(prompt) - measured)
        for position in range(start, start + measured):
            tokens = shown.tokens[position].tolist()
            log_probs = shown.log_probs[position].tolist()
            likely = {}
            for token, log_prob in zip(tokens, log_probs, strict=True):
                likely[str(token)] = {"logprob": log_prob, "rank": 1}
            answer.append(likely)
        return answer

    def respond(request: httpx.Request) -> httpx.Response:
        if request.headers["Authorization"] != f"Bearer {KEY}" or request.url != f"{URL}/completions":
            return httpx.Response(401, json={"error": {"message": "Unauthorized"}})
        asked = json.loads(request.content)
        choice = {
            "index": 0,
            "text": "",
            "finish_reason": "stop",
            "prompt_logprobs": log_probs_of(asked["prompt"], asked["prompt_logprobs"]),
        }
        completion = {
            "id": "1",
            "object": "text_completion",
            "created": 0,
            "model": asked["model"],
            "choices": [choice],
        }
        return httpx.Response(200, json=completion)

    transport = httpx.MockTransport(respond)
    server.client = partial(openai.OpenAI, base_url=URL, http_client=httpx.Client(transport=transport))
    return server


def measure_server(server: Any, texts: FixedSet, key: str = KEY) -> Predictions:
    return served_model.measure_server(server.client(api_key=key), "course", texts)


def test_a_server_is_read_token_by_token(server: Any, texts: FixedSet, forms: Forms) -> None:
    same = parity.gap(forms["merged"], measure_server(server, texts))
    assert same.mean < 1e-6
    assert same.same_choices == sum(texts.measured)
    assert same.positions == sum(texts.measured)

    server.predictions = forms["base"]
    other = parity.gap(forms["merged"], measure_server(server, texts))
    assert other.mean > 0.01


def test_a_server_that_refuses_the_key_is_named(server: Any, texts: FixedSet) -> None:
    with refused(f"A request to the server at {URL}/ failed"):
        measure_server(server, texts, key="wrong")
