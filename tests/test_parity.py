"""parity: the same model is found to be the same, a changed one is not, whoever computes it."""

import json
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
from nbutils.evaluation import Size
from nbutils.evaluation import placement as placing
from nbutils.parity import FixedSet, Predictions

URL, KEY = "http://127.0.0.1:8000/v1", "not-a-secret-only-a-test"
Forms = dict[str, Predictions]


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

    size, rows = Size(batch_size=8, max_new_tokens=16, rows=0), data.stored_rows(files.SAMPLES / "general.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(files.TINY_MODEL)
    return evaluation.Evaluator(tmp_path_factory.mktemp("run"), tokenizer, rows[:30], size, "float32", limit=256)


@pytest.fixture(scope="module")
def texts(evaluator: evaluation.Evaluator) -> FixedSet:
    return parity.fixed_set(evaluator)


@pytest.fixture(scope="module")
def store(base: Any, adapter: Path, texts: FixedSet) -> Forms:
    """The base, the tuned model, and the merged one; measured once for all tests."""
    from peft import PeftModel

    tuned = PeftModel.from_pretrained(tiny(), adapter)
    forms = {"base": parity.measure(base, texts), "full": parity.measure(tuned, texts)}
    return forms | {"merged": parity.measure(tuned.merge_and_unload(), texts)}


def kept(folder: Path, texts: FixedSet, forms: Forms, stamp: Any = ()) -> parity.PredictionStore:
    store = parity.new_store(folder, texts, dict(stamp))
    for name, predictions in forms.items():
        store.add(name, predictions)
    return store


def shortened(predictions: Predictions, count: int = 20) -> Predictions:
    return Predictions(predictions.log_probs[:, :count], predictions.tokens[:, :count])


def shifted(predictions: Predictions, by: float) -> Predictions:
    """Other probabilities of the same tokens, with the same sum."""
    torch.manual_seed(0)
    logs = predictions.log_probs
    moved = (logs + by * torch.randn_like(logs)).log_softmax(-1) + logs.logsumexp(-1, keepdim=True)
    log_probs, order = moved.sort(descending=True)
    return Predictions(log_probs, predictions.tokens.gather(1, order))


def test_the_fixed_set_is_small_and_ends_within_the_references(
    evaluator: evaluation.Evaluator, texts: FixedSet, monkeypatch: Any
) -> None:
    assert len(texts.texts) == parity.HELD_OUT_ROWS + parity.GENERAL_ROWS
    assert 100 < sum(texts.measured) <= 256
    answer = evaluator.tokenizer.decode(texts.texts[0][-texts.measured[0] :], skip_special_tokens=True)
    assert evaluator.references[0].startswith(answer.strip()[:8])
    assert evaluator.prompts[0] == texts.texts[0][: -texts.measured[0]]
    assert parity.fixed_set(evaluator) == texts
    monkeypatch.setattr(parity, "LONGEST_TEXT", 40)  # what is too long loses its beginning
    assert max(map(len, parity.fixed_set(evaluator).texts)) == 39


@pytest.mark.slow
def test_predictions_are_what_the_model_says_without_padding(base: Any, texts: FixedSet, store: Forms) -> None:
    at = 0
    for text, count in zip(texts.texts[:3], texts.measured[:3], strict=True):
        alone = base(input_ids=torch.tensor([text])).logits[0].log_softmax(-1)[-count - 1 : -1]
        likeliest = Predictions(store["base"].log_probs[at : at + count], store["base"].tokens[at : at + count])
        assert torch.allclose(likeliest.log_probs, alone.gather(1, likeliest.tokens), atol=1e-4)
        assert torch.equal(likeliest.tokens[:, 0], alone.argmax(-1))
        at += count


def test_predictions_that_are_no_numbers_are_refused(base: Any, texts: FixedSet, monkeypatch: Any) -> None:
    monkeypatch.setattr(base.lm_head, "forward", lambda hidden: hidden @ base.lm_head.weight.T * torch.nan)
    with refused("The model's logits contain NaN or infinity: a value"):
        parity.measure(base, texts)


def test_the_gap_is_the_divergence_of_the_book_and_with_fewer_tokens_a_lower_bound() -> None:
    p, q = (Predictions(*torch.tensor([row]).log().sort(descending=True)) for row in ([0.5, 0.3, 0.2], [0.3, 0.5, 0.2]))
    measured = parity.gap(p, q)
    assert measured.mean == pytest.approx(0.2 * torch.log(torch.tensor(5 / 3)).item(), abs=1e-6)
    assert measured.worst == pytest.approx(measured.mean) and (measured.same_choices, measured.positions) == (0, 1)
    torch.manual_seed(0)
    logits = 3 * torch.randn(40, 3000)
    full, near = (values.log_softmax(-1) for values in (logits, logits + 0.1 * torch.randn(40, 3000)))
    exact = (full.exp() * (full - near)).sum(-1).mean().item()
    bounds = [parity.gap(Predictions(*full.topk(256)), Predictions(*near.topk(count))).mean for count in (20, 256)]
    assert 0 < bounds[0] < bounds[1] < exact < 3 * bounds[1]
    whole = parity.gap(Predictions(*full.topk(3000)), Predictions(*near.topk(3000)))
    assert whole.mean == pytest.approx(exact, rel=1e-3)


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    """A complete folder."""
    with files.complete_folder(tmp_path / "merged", {"adapter": 1}):
        pass
    return tmp_path / "merged"


def test_merging_keeps_the_model_and_the_server_is_added_later(
    tmp_path: Path, merged: Path, texts: FixedSet, store: Forms
) -> None:
    report = parity.ParityReport(kept(tmp_path, texts, store, {"adapter": 1}))
    report.require()
    assert report.holds and report.facts()["parity"]["holds"] and report.noise == 1e-6
    tuning, merge = report.lines
    assert merge.gap.mean < 1e-7 < 1e-2 < tuning.gap.mean
    assert (tuning.verdict, merge.verdict) == ("what the tuning changed", "the same model")
    assert merge.gap.columns["same next token"] == f"{sum(texts.measured)} of {sum(texts.measured)}"
    later = parity.load_predictions(tmp_path, merged)
    assert set(later.forms) == {"base", "full", "merged"} and later.fixed == texts
    assert parity.ParityReport(later).lines == report.lines
    later.add("vllm", shortened(store["merged"]))
    lines = parity.ParityReport(parity.load_predictions(tmp_path, merged)).lines
    assert [line.verdict for line in lines] == ["what the tuning changed", "the same model", "the same model"]
    assert str(lines[-1]).startswith("merged, in vLLM, ")


@pytest.mark.parametrize(("given", "holds"), [
    ({"4bit": 0.0, "full": 0.3, "merged": 0.0, "onto": "dequantized"}, True),  # what the 4-bit one computes
    ({"4bit": 0.0, "full": 0.3, "merged": None, "onto": "dequantized"}, False),
    ({"full": 0.0, "merged": None}, False),  # the tuning was lost
    ({"full": 0.0, "merged": 0.3, "again": 0.1}, True),  # far, but rounding: the weights are proven elsewhere
    ({"full": 0.0, "merged": 0.0, "vllm": 0.05, "again": 0.02}, True),
    ({"full": 0.0, "merged": 0.0, "vllm": 0.5, "again": 0.02}, False),  # another model is served
    ({"full": 0.0, "merged": 0.0, "vllm": 0.5, "again": 0.4}, True),  # a precision so coarse that this is rounding
    ({"full": 0.0, "merged": 0.0, "vllm": None}, False),  # the base is served
    ({"full": 0.0, "merged": 0.0, "4bit": 2.0}, True),  # a price never fails
    ({"4bit": 0.0, "merged": 0.0}, False),  # nothing that must be the same was compared
])  # fmt: skip
def test_what_holds(tmp_path: Path, texts: FixedSet, store: Forms, given: dict[str, Any], holds: bool) -> None:
    """Each form is the tuned model shifted by so much, or (None) the base."""
    tuned, onto = store["full"], given.get("onto", "full")
    shifts = {name: by for name, by in given.items() if name != "onto"}
    forms = {name: store["base"] if by is None else shifted(tuned, by) for name, by in shifts.items()}
    forms |= {"vllm": shortened(forms["vllm"])} if "vllm" in forms else {}
    report = parity.ParityReport(kept(tmp_path, texts, {"base": store["base"]} | forms, {"onto": onto}))
    judged = [
        line.reference
        for line in report.lines
        if line.other == "merged" and line.verdict in ("the same model", "FAILS")
    ]
    assert report.holds is holds and judged in ([], ["4bit" if onto == "dequantized" else "full"])
    if not holds:
        with refused("Serve the folder that lesson 04 wrote. If the merged"):
            report.require()


def test_a_small_tuning_that_was_lost_is_found_beyond_the_noise(tmp_path: Path, texts: FixedSet, store: Forms) -> None:
    base = store["base"]
    lost = kept(tmp_path, texts, {"base": base, "full": shifted(base, 0.1), "merged": base})
    assert not parity.ParityReport(lost).holds
    lost.add("again", shifted(base, 0.12))  # rounding alone moves it as far
    assert parity.ParityReport(lost).holds
    same = kept(tmp_path / "same", texts, dict.fromkeys(("base", "full", "merged", "again"), base))
    assert parity.ParityReport(same).holds  # nothing was learnt, so nothing was lost


def test_the_noise_is_what_smaller_batches_change(tmp_path: Path, base: Any, texts: FixedSet, monkeypatch: Any) -> None:
    sizes, forward = list[int](), type(base).forward
    watched = lambda self, **inputs: sizes.append(len(inputs["input_ids"])) or forward(self, **inputs)  # noqa: E731
    monkeypatch.setattr(type(base), "forward", watched)
    store = parity.new_store(tmp_path, texts, {})
    store.measure_merged(base)
    assert sizes == [16] + [1] * 16
    assert store.gap("merged", "again").mean < 1e-6 == parity.ParityReport(store).noise


def test_other_or_damaged_predictions_are_refused(tmp_path: Path, merged: Path, texts: FixedSet, store: Forms) -> None:
    def kept_again() -> Path:
        kept(tmp_path, texts, store, {"adapter": 1})
        parity.load_predictions(tmp_path, merged)
        return tmp_path / "evaluation"

    kept(tmp_path / "other", texts, {"merged": store["base"]}, {"adapter": 2})
    for damaged in (b"short", (tmp_path / "other/evaluation/parity/merged.safetensors").read_bytes()):
        (kept_again() / "parity/merged.safetensors").write_bytes(damaged)
        with refused("No predictions of"):
            parity.load_predictions(tmp_path, merged)
    good = json.loads((kept_again() / "parity.json").read_text())
    older = {
        "fixed": good["fixed"] | {"prompts": [[1]], "stops": [2]},
        "positions": 9,
        "readings": {},
        "gaps": {"x": {}},
    }
    (tmp_path / "evaluation/parity.json").write_text(json.dumps(good | older))
    assert set(parity.load_predictions(tmp_path, merged).forms) == set(store)
    for wrong in (json.dumps(good | {"fixed": {}}), json.dumps(good | {"mark": "another"}), "{"):
        (kept_again() / "parity.json").write_text(wrong)
        with refused("No predictions of"):
            parity.load_predictions(tmp_path, merged)
    for run, folder in ((tmp_path / "other", merged), (tmp_path / "none", merged), (tmp_path, tmp_path)):
        with refused("No predictions of"):
            parity.load_predictions(run, folder)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, adapter: Path) -> Path:
    """A run with data, an adapter and its tokenizer."""
    from transformers import AutoTokenizer

    run = record.RunFolder(tmp_path_factory.mktemp("prepared") / "run")
    shutil.copytree(adapter, run.adapter)
    AutoTokenizer.from_pretrained(files.TINY_MODEL).save_pretrained(run.adapter)
    data.prepare(str(files.SAMPLES / "train.jsonl"), run.data, rows=60)
    return run.path


@pytest.fixture
def started(tmp_path: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A lesson of that run, whose fixed set is small."""
    monkeypatch.setattr(parity, "HELD_OUT_ROWS", 3)
    monkeypatch.setattr(parity, "GENERAL_ROWS", 1)
    shutil.copytree(prepared, tmp_path / "run")
    profile = profiles.load("tiny")
    load = profile.from_pretrained.model_copy(update={"dtype": "float32"})
    profile = profile.model_copy(update={"from_pretrained": load, "method": "qlora"})
    given = {"run": record.RunFolder(tmp_path / "run"), "profile": profile, "model": str(files.TINY_MODEL)}
    return SimpleNamespace(**given)


def place(started: Any) -> placing.Placement:
    return evaluation.place_model(started.model, started.run.adapter, started.profile)


def merged_onto(started: Any, onto: str) -> Path:
    folder, settings = started.run.path / "merged", {"bnb_4bit_quant_type": "nf4", "dtype": "float32"}
    given: dict[str, Any] = {"dtype": "float32", "onto": onto, "quantization": settings}
    merging.merge_adapter(started.model, started.run.adapter, folder, **given)
    return folder


@pytest.mark.slow
def test_the_proof_holds_with_one_model_at_a_time_and_a_changed_model_stops_it(started: Any, monkeypatch: Any) -> None:
    from transformers import AutoModelForCausalLM as Auto

    loads, load, folder = list[str](), Auto.from_pretrained, merged_onto(started, "full")
    monkeypatch.setattr(Auto, "from_pretrained", lambda *a, **b: loads.append(str(a[0])) or load(*a, **b))
    placement = place(started)
    assert placement.load(folder) is placement.load(folder)
    proof = parity.prove(started.run, started.profile, placement, folder)
    facts = proof.facts()["parity"]
    assert facts["holds"] and "4-bit" in str(proof)
    assert facts["gaps"]["merged against full"]["mean"] < 1e-6 < facts["gaps"]["full against 4bit"]["mean"]
    assert loads == [str(folder), started.model, started.model] and placement.loaded is None
    read = parity.load_predictions(started.run.path, folder)
    assert parity.gap(read.forms["base"], parity.measure(tiny(), read.fixed)).mean < 1e-9
    words = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = words["model"]["vocab"]
    first, second = read.fixed.texts[0][-3:-1]  # tokens of an answer change places
    one, other = (next(piece for piece, number in vocabulary.items() if number == token) for token in (first, second))
    vocabulary[one], vocabulary[other] = second, first
    (folder / "tokenizer.json").write_text(json.dumps(words), encoding="utf-8")
    with refused("tokenizes differently from the one used in training"):
        parity.prove(started.run, started.profile, placement, folder)


@pytest.mark.slow
def test_a_merge_into_the_dequantized_base_is_what_the_4_bit_model_computes(started: Any) -> None:
    folder, placement = merged_onto(started, "dequantized"), place(started)
    gaps = parity.prove(started.run, started.profile, placement, folder).facts()["parity"]["gaps"]
    assert gaps["merged against 4bit"]["mean"] < 1e-6 < gaps["full against 4bit"]["mean"]


def test_without_room_for_the_model_only_tokens_are_compared(started: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(placing, "fit", lambda *sizes: False)
    folder, placement = merged_onto(started, "full"), place(started)
    proof = parity.prove(started.run, started.profile, placement, folder)
    assert proof.facts() == {"parity": {}} and "does not fit" in str(proof) and placement.loaded is None
    with refused("No predictions of"):
        parity.load_predictions(started.run.path, folder)


@pytest.mark.gpu
def test_4_bit_models_read_on_the_gpu(adapter: Path, texts: FixedSet) -> None:
    from peft import PeftModel
    from transformers import BitsAndBytesConfig

    four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    model = tiny(quantization_config=four_bit, device_map={"": 0}, dtype=torch.bfloat16)
    assert len(parity.measure(PeftModel.from_pretrained(model, adapter), texts).log_probs) == sum(texts.measured)


@pytest.mark.parametrize(("gib", "gpu", "fits"), [
    (14.2, 14.7, False), (5.8, 14.7, True), (14.2, 22.1, True), (14.2, None, False),
])  # fmt: skip
def test_what_fits_is_decided_by_free_memory(gib: float, gpu: Any, fits: bool, monkeypatch: Any) -> None:
    """A 7B does not fit on a T4 of Colab, a 3B does; a 7B fits on 24 GB, and not on a machine without a GPU."""
    monkeypatch.setattr(platforms, "free_memory_gib", lambda: 11.0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int((gpu or 0) * 2**30), 0))
    assert placing.fit(gib, gpu) is fits


def test_how_models_are_loaded_on_this_machine(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    small = place(started)
    assert small.fits and small.loading == {"dtype": "float32", "device_map": {"": "cpu"}}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(14.7 * 2**30), 0))
    monkeypatch.setattr(merging, "size_gib", lambda *given: 14.2)
    monkeypatch.setattr(hardware, "gpu", object)
    tight = place(started)
    assert not tight.fits and "14.2 GiB" in tight.reason
    assert tight.loading == tight.in_4_bits and tight.loading["quantization_config"].load_in_4bit


@pytest.fixture
def server(texts: FixedSet, store: Forms) -> Any:
    """Speaks /v1/completions as vLLM does, out of `predictions`; asks for a key."""
    serves = SimpleNamespace(predictions=store["merged"])

    def choice(asked: dict[str, Any]) -> dict[str, Any]:
        row = texts.texts.index(asked["prompt"])
        start, count = sum(texts.measured[:row]), texts.measured[row]
        short = shortened(serves.predictions, asked["prompt_logprobs"])
        positions = []
        for position in range(start, start + count):
            pairs = zip(short.tokens[position].tolist(), short.log_probs[position].tolist(), strict=True)
            positions.append({str(token): {"logprob": log, "rank": 1} for token, log in pairs})
        return {"prompt_logprobs": [None] * (len(asked["prompt"]) - count) + positions}

    def respond(request: httpx.Request) -> httpx.Response:
        asked = json.loads(request.content)
        if request.headers["Authorization"] != f"Bearer {KEY}" or request.url != f"{URL}/completions":
            return httpx.Response(401, json={"error": {"message": "Unauthorized"}})
        choices = [{"index": 0, "text": "", "finish_reason": "stop", **choice(asked)}]
        about = {"id": "1", "object": "text_completion", "created": 0, "model": asked["model"]}
        return httpx.Response(200, json=about | {"choices": choices})

    serves.client = partial(
        openai.OpenAI, base_url=URL, http_client=httpx.Client(transport=httpx.MockTransport(respond))
    )
    return serves


def test_a_server_is_read_token_by_token(server: Any, texts: FixedSet, store: Forms) -> None:
    def distance(key: str = KEY) -> parity.Gap:
        served = served_model.measure_server(server.client(api_key=key), "course", texts)
        return parity.gap(store["merged"], served)

    same = distance()
    assert same.mean < 1e-6 and same.same_choices == same.positions == sum(texts.measured)
    server.predictions = store["base"]
    assert distance().mean > 0.01
    with refused(f"A request to the server at {URL}/ failed"):
        distance("wrong")
