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

from nbutils import evaluation, parity, paths
from nbutils.config import Evaluation
from nbutils.errors import CourseError
from nbutils.evaluation import general_rows
from nbutils.parity import fitting, fixed
from nbutils.parity.reading import Reading

SIZE = Evaluation(batch_size=8, max_new_tokens=16, rows=0)
KEY = "not-a-secret-only-a-test"


@pytest.fixture(scope="module")
def base() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(paths.TINY_MODEL, dtype="float32")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter on every linear layer, with random weights in both matrices."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    folder = tmp_path_factory.mktemp("adapter")
    fresh = AutoModelForCausalLM.from_pretrained(paths.TINY_MODEL, dtype="float32")
    get_peft_model(fresh, lora).save_pretrained(folder)
    return folder


def with_adapter(adapter: Path, dtype: str = "float32", **kind: Any) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(paths.TINY_MODEL, dtype=dtype, **kind)
    return PeftModel.from_pretrained(model, adapter, **kind)


@pytest.fixture(scope="module")
def exam(tmp_path_factory: pytest.TempPathFactory) -> evaluation.Exam:
    from transformers import AutoTokenizer

    run, tokenizer = tmp_path_factory.mktemp("run"), AutoTokenizer.from_pretrained(paths.TINY_MODEL)
    return evaluation.Exam(run, tokenizer, general_rows()[:30], SIZE, "float32", limit=256)


@pytest.fixture(scope="module")
def texts(exam: evaluation.Exam) -> parity.Fixed:
    return parity.fixed_set(exam, exam.general(), model=str(paths.TINY_MODEL), limit=256)


@pytest.fixture(scope="module")
def readings(base: Any, adapter: Path, texts: parity.Fixed) -> dict[str, Reading]:
    """Every form of one tuned model, and the base; measured once for all tests."""
    tuned = with_adapter(adapter)
    found = {"base": parity.measure(base, texts), "full": parity.measure(tuned, texts)}
    return found | {"merged": parity.measure(tuned.merge_and_unload(), texts)}


def judged(folder: Path, texts: parity.Fixed, about: Any = None, **given: Reading) -> parity.Report:
    kept = parity.Readings(folder, texts, about=about)
    for name, reading in given.items():
        kept[name.removeprefix("_")] = reading
    return parity.Report(kept)


def test_the_set_is_small_and_its_texts_end_within_the_wanted_answers(
    exam: evaluation.Exam, texts: parity.Fixed
) -> None:
    assert len(texts.texts) == fixed.HELD_BACK + fixed.GENERAL and 100 < texts.positions <= 256
    assert texts.stops == [2] and "predictions compared" in str(texts)
    for text, count in zip(texts.texts, texts.measured, strict=True):
        assert 0 < count <= fixed.MEASURED and count < len(text) <= 256
    row = exam.rows[0]
    answer = exam.tokenizer.decode(texts.texts[0][-texts.measured[0] :], skip_special_tokens=True)
    assert row["messages"][-1]["content"].startswith(answer.strip()[:8])
    assert exam.prompts[0] == texts.texts[0][: -texts.measured[0]]


def test_the_same_rows_make_the_same_set_and_others_another(exam: evaluation.Exam, texts: parity.Fixed) -> None:
    again = parity.fixed_set(exam, exam.general(), model=str(paths.TINY_MODEL), limit=256)
    assert again.mark == texts.mark != parity.fixed_set(exam, limit=256).mark


def test_what_is_too_long_loses_its_beginning(exam: evaluation.Exam) -> None:
    short = parity.fixed_set(exam, limit=40)
    assert max(map(len, short.texts)) == 39 and max(map(len, short.prompts)) <= 40 - fixed.ANSWER_TOKENS


def test_a_reading_is_what_the_model_says_without_padding(base: Any, texts: parity.Fixed, readings: dict) -> None:
    logs, at = readings["base"].logs, 0
    for text, count in zip(texts.texts[:3], texts.measured[:3], strict=True):
        alone = base(input_ids=torch.tensor([text])).logits[0].log_softmax(-1)[-count - 1 : -1]
        assert torch.allclose(logs[at : at + count], alone, atol=1e-4)
        at += count


def test_greedy_answers_are_those_of_generate(base: Any, texts: parity.Fixed, readings: dict) -> None:
    ids = torch.tensor([texts.prompts[0]])
    alone = base.generate(ids, max_new_tokens=texts.answer_tokens, do_sample=False, eos_token_id=texts.stops)
    said = readings["base"].answers
    assert said and said[0] == alone[0, ids.shape[1] :].tolist()


def test_merging_keeps_the_model_and_the_report_says_so(tmp_path: Path, texts: parity.Fixed, readings: dict) -> None:
    found = judged(tmp_path, texts, **readings)
    found.require()
    assert found.holds and "The merge kept the tuning" in found.verdict
    assert found.readings.gap("full", "merged").mean < 1e-7 < 1e-2 < found.readings.gap("full", "base").mean
    assert [line.verdict for line in found.lines] == ["what the tuning changed", "the same model"]
    assert found.table()[-1]["same answers"] == "16 of 16" and "KL mean" in found.text()
    assert found.facts()["holds"] and found.facts()["gaps"]["merged against full"]["same_answers"] == 16


def test_a_merge_that_lost_the_tuning_stops_the_lesson(tmp_path: Path, texts: parity.Fixed, readings: dict) -> None:
    lost = judged(tmp_path, texts, **(readings | {"merged": readings["base"]}))
    assert not lost.holds and lost.table()[-1]["verdict"] == "FAILS"
    with pytest.raises(CourseError, match="THE MODEL CHANGED: merged is not adapter on the unquantised base") as caught:
        lost.require()
    assert "nearer to the adapter than to the base" in caught.value.allowed


def shifted(reading: Reading, by: float) -> Reading:
    torch.manual_seed(0)
    return Reading((reading.logs + by * torch.randn_like(reading.logs)).log_softmax(-1), None, reading.answers)


def test_a_right_merge_is_reported_however_far_rounding_moves_it(
    tmp_path: Path, texts: parity.Fixed, readings: dict
) -> None:
    """A 7B in bfloat16 was 0.026 nats from its adapter, in every weight as it should be, and was refused."""
    found = judged(tmp_path, texts, base=readings["base"], full=readings["full"], merged=shifted(readings["full"], 0.3))
    found.readings["again"] = shifted(found.readings["merged"], 0.1)
    found.require()
    apart = found.readings.gap("full", "merged").mean
    assert apart > 0.026 and found.holds and 0.001 < found.noise < apart
    assert f"{apart / found.noise:.2g} times the noise of this run ({found.noise:.2g})" in found.verdict
    assert found.table()[-1]["times noise"] == f"{apart / found.noise:.2g}" and found.facts()["noise"] == found.noise


def test_the_noise_is_what_smaller_batches_change(
    tmp_path: Path, base: Any, texts: parity.Fixed, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nbutils.parity import reading

    sizes: list[int] = []
    logs = reading._logs
    monkeypatch.setattr(reading, "_logs", lambda *given: sizes.append(len(given[2])) or logs(*given))
    kept = parity.Readings(tmp_path, texts)
    kept["vllm"] = Reading(torch.zeros(texts.positions, 3).log_softmax(-1), torch.arange(3).repeat(texts.positions, 1))
    kept.read_merged(base, answers=False)  # lies partly on disk: few runs
    assert set(parity.Readings(tmp_path, texts)) == {"merged", "again"}  # an earlier server cannot refuse this merge
    assert sizes == [16, 8, 8] and kept.gap("merged", "again").mean < 1e-6 == parity.Report(kept).noise
    monkeypatch.setattr(reading, "_answers", lambda *given: [])
    kept.read_merged(base)
    assert sizes[3:] == [16] + [1] * 16


def test_a_merge_that_lost_half_of_its_layers_is_refused_by_its_weights(tmp_path: Path, adapter: Path) -> None:
    from safetensors.torch import load_file, save_file

    from nbutils import merging

    half = shutil.copytree(adapter, tmp_path / "half")
    weights = load_file(half / "adapter_model.safetensors")
    for name in weights:
        if "lora_B" in name and int(name.split(".layers.")[1].split(".")[0]) % 2:
            weights[name].zero_()
    save_file(weights, half / "adapter_model.safetensors", {"format": "pt"})
    for made_from, right in ((adapter, True), (half, False)):
        folder = tmp_path / f"merged_{right}"
        merging.merge_adapter(paths.TINY_MODEL, made_from, folder, dtype="bfloat16", progress=False)
        if right:
            assert merging.prove(paths.TINY_MODEL, adapter, folder).changed
            continue
        with pytest.raises(CourseError, match="is not what base and adapter make"):
            merging.prove(paths.TINY_MODEL, adapter, folder)


def test_a_small_tuning_that_was_lost_is_found_beyond_the_noise_only(
    tmp_path: Path, texts: parity.Fixed, readings: dict
) -> None:
    small = shifted(readings["base"], 0.1)
    lost = judged(tmp_path, texts, base=readings["base"], full=small, merged=readings["base"])
    assert not lost.holds and "nearer to the base without the tuning" in lost.verdict
    lost.readings["again"] = shifted(readings["base"], 0.12)  # rounding alone moves it as far
    assert parity.Report(lost.readings).holds


def test_where_nothing_was_learnt_nothing_fails(tmp_path: Path, texts: parity.Fixed, readings: dict) -> None:
    same = judged(tmp_path, texts, **dict.fromkeys(("base", "full", "merged", "again"), readings["base"]))
    assert same.holds and same.noise == 1e-6


def test_a_server_of_another_model_is_refused_by_the_noise_of_the_run(
    tmp_path: Path, texts: parity.Fixed, readings: dict
) -> None:
    kept = judged(tmp_path, texts, again=shifted(readings["merged"], 0.02), **readings).readings
    for by, holds in ((0.05, True), (0.5, False)):
        kept["vllm"] = shifted(readings["merged"], by).shortened(20)
        assert parity.Report(kept).holds is holds, by
    assert "times the noise of this run" in parity.Report(kept).verdict
    kept["again"] = shifted(readings["merged"], 0.4)  # a precision so coarse that this is rounding
    assert parity.Report(kept).holds


def test_a_server_whose_answers_are_all_others_is_refused(tmp_path: Path, texts: parity.Fixed, readings: dict) -> None:
    kept = judged(tmp_path, texts, **readings).readings
    kept["vllm"] = Reading(readings["merged"].logs, None, [[1, 2]] * 16)
    with pytest.raises(CourseError, match="none of 16 greedy answers is the same"):
        parity.Report(kept).require()


def test_nothing_compared_is_no_proof(tmp_path: Path, texts: parity.Fixed, readings: dict) -> None:
    empty = judged(tmp_path, texts)
    assert not empty.holds and empty.text() == "nothing was compared"
    with pytest.raises(CourseError, match="nothing was compared"):
        empty.require()
    (tmp_path / "x").mkdir()
    told = judged(tmp_path / "x", texts, _4bit=readings["full"], merged=readings["merged"])
    with pytest.raises(CourseError, match="nothing was compared that must be the same"):
        told.require()


def test_the_price_of_another_base_is_told_and_never_fails(tmp_path: Path, texts: parity.Fixed, readings: dict) -> None:
    kept = judged(tmp_path, texts, **readings).readings
    for by, word in ((0.01, "hardly"), (0.3, "a little"), (2.0, "clearly")):
        kept["4bit"] = shifted(readings["full"], by)
        found = parity.Report(kept)
        assert found.holds and f"it speaks {word} differently" in found.verdict, by
        assert found.lines[1].verdict == "a price"


def test_a_merge_into_the_dequantised_base_must_equal_the_4_bit_one(
    tmp_path: Path, texts: parity.Fixed, readings: dict
) -> None:
    given = {"_4bit": readings["full"], "full": shifted(readings["full"], 0.3), "base": readings["base"]}
    good = judged(tmp_path, texts, about={"onto": "dequantized"}, merged=readings["merged"], **given)
    assert good.holds and "instead of" in good.verdict
    pairs = [(line.reference, line.other, line.judged) for line in good.lines]
    assert pairs == [
        ("full", "base", False),
        ("4bit", "full", False),
        ("full", "merged", False),
        ("4bit", "merged", True),
    ]
    assert not judged(tmp_path, texts, about={"onto": "dequantized"}, merged=given["base"], **given).holds


@pytest.mark.parametrize(
    ("onto", "method", "told"), [("half", "qlora", "'half'"), ("dequantized", "lora", "nothing was")]
)
def test_a_merge_onto_what_was_never_there_is_refused_early(onto: str, method: str, told: str) -> None:
    parity.require_onto("dequantized", "qlora")
    parity.require_onto("full", "lora")
    with pytest.raises(CourseError, match=told):
        parity.require_onto(onto, method)


def test_predictions_that_are_no_numbers_are_refused(base: Any, texts: parity.Fixed) -> None:
    class Overflowing:
        device, generation_config = base.device, base.generation_config

        def eval(self) -> None: ...

        def __call__(self, **given: Any) -> Any:
            found = base(**given)
            found.logits = found.logits * torch.nan
            return found

    with pytest.raises(CourseError, match="are not numbers"):
        parity.measure(Overflowing(), texts, answers=False)


def test_readings_of_two_sets_are_not_compared(readings: dict) -> None:
    fewer = Reading(readings["base"].logs[:-1])
    with pytest.raises(CourseError, match="positions"):
        parity.gap(readings["base"], fewer)


def test_a_coarse_gap_is_a_lower_bound_and_close_for_a_near_model(readings: dict) -> None:
    full, near = readings["full"], shifted(readings["full"], 0.1)
    exact = parity.gap(full, near)
    for one, other in ((full, near.shortened(20)), (full.shortened(), near.shortened(20)), (full.shortened(64), near)):
        coarse = parity.gap(one, other)
        assert coarse.coarse and not exact.coarse
        assert 0 < coarse.mean <= exact.mean and coarse.same_choices == exact.same_choices
    far = parity.gap(full, readings["base"].shortened(20))
    assert 0 < far.mean <= parity.gap(full, readings["base"]).mean


def test_the_gap_is_the_divergence_of_the_book() -> None:
    p, q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.5, 0.25]])
    found = parity.gap(Reading(p.log()), Reading(q.log()))
    assert found.mean == pytest.approx(0.25 * torch.log(torch.tensor(2.0)).item(), abs=1e-6)
    assert found.worst == pytest.approx(found.mean) and (found.same_choices, found.positions) == (0, 1)


def test_readings_outlive_their_process_and_the_server_is_added_later(
    tmp_path: Path, texts: parity.Fixed, readings: dict
) -> None:
    before = judged(tmp_path, texts, about={"adapter": 1}, **readings)
    later = parity.Readings(tmp_path, about={"adapter": 1})
    assert set(later) == {"base", "full", "merged"} and later.fixed == texts
    assert parity.Report(later).table() == before.table()
    later["vllm"] = readings["merged"].shortened(20)
    table = parity.Report(parity.Readings(tmp_path)).table()
    assert [row["verdict"] for row in table] == ["what the tuning changed", "the same model", "the same model"]
    assert table[-1]["KL mean"].startswith("at least") and "vLLM says the same" in parity.Report(later).verdict
    wrong = parity.Readings(tmp_path)
    wrong["vllm"] = readings["base"].shortened(20)
    with pytest.raises(CourseError, match="merged, in vLLM is not merged"):
        parity.Report(wrong).require()
    kept = list((tmp_path / "evaluation/parity").glob("*.safetensors"))
    assert len(kept) == 4 and sum(file.stat().st_size for file in kept) < 4 * 2**20


def test_readings_of_another_model_or_set_are_dropped(
    tmp_path: Path, texts: parity.Fixed, exam: Any, readings: dict
) -> None:
    judged(tmp_path, texts, about={"adapter": 1}, **readings)
    assert not set(parity.Readings(tmp_path, about={"adapter": 2}))
    assert not set(parity.Readings(tmp_path, parity.fixed_set(exam, limit=100), about={"adapter": 1}))
    assert not set(parity.Readings(tmp_path, texts, about={"adapter": 1}, name="parity_other"))
    with pytest.raises(CourseError, match="no readings are kept"):
        parity.Readings(tmp_path / "elsewhere")
    with pytest.raises(CourseError, match="a reading is called 'mine'"):
        parity.Readings(tmp_path, texts)["mine"] = readings["base"]


@pytest.mark.parametrize("damage", ["json", "tensors", "stolen"])
def test_damaged_readings_are_measured_again_not_trusted(
    tmp_path: Path, texts: parity.Fixed, readings: dict, damage: str
) -> None:
    judged(tmp_path, texts, about={"adapter": 1}, **readings)
    folder = tmp_path / "evaluation"
    if damage == "json":
        (folder / "parity.json").write_text("{", encoding="utf-8")
    elif damage == "tensors":
        (folder / "parity/merged.safetensors").write_bytes(b"short")
    else:  # a file of another set of models
        judged(tmp_path / "other", texts, about={"adapter": 2}, merged=readings["base"])
        (tmp_path / "other/evaluation/parity/merged.safetensors").replace(folder / "parity/merged.safetensors")
    assert "merged" not in parity.Readings(tmp_path, texts, about={"adapter": 1})


def test_readings_of_another_version_are_measured_again(tmp_path: Path, texts: parity.Fixed, readings: dict) -> None:
    judged(tmp_path, texts, about={"adapter": 1}, **readings)
    file = tmp_path / "evaluation/parity.json"
    good = json.loads(file.read_text())
    for wrong in ({"gaps": {"x": {"kl": 1.0}}}, {"gaps": None}, {"readings": ["full"]}, {"readings": {"full": {}}},
                  {"fixed": {"new": 1}}):  # fmt: skip
        file.write_text(json.dumps(good | wrong))
        assert not list(parity.Readings(tmp_path, texts, about={"adapter": 1})), wrong
        with pytest.raises(CourseError, match="no readings are kept"):
            parity.Readings(tmp_path)


def test_the_reading_on_the_unquantised_base_is_always_wanted() -> None:
    for fits in (True, False):
        room = parity.Room(fits, "", {})
        assert set(room.wanted("qlora")) == {room.name, room.other} and room.wanted("lora") == ("full",)
    lesson = (Path(__file__).parents[1] / "notebooks/04_merge.py").read_text(encoding="utf-8")
    assert "if room.name in wanted:" in lesson and "if room.other in wanted and" in lesson


def test_a_folder_that_speaks_other_tokens_is_refused(tmp_path: Path, exam: evaluation.Exam) -> None:
    folder = tmp_path / "merged"
    exam.tokenizer.save_pretrained(folder)
    assert parity.require_tokenizer(folder, exam.tokenizer, exam.rows) == len(exam.rows)
    settings = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = settings["model"]["vocab"]
    one, other = [piece for piece in ("a", "b", "e", "t") if piece in vocabulary][:2]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (folder / "tokenizer.json").write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(CourseError, match="makes other tokens"):
        parity.require_tokenizer(folder, exam.tokenizer, exam.rows)
    shutil.rmtree(folder)
    folder.mkdir()
    with pytest.raises(CourseError, match="has no tokenizer"):
        parity.require_tokenizer(folder, exam.tokenizer, exam.rows)


def on_disk(folder: Path, adapter: Path, memory: dict[int | str, str]) -> Any:
    from transformers import AutoModelForCausalLM

    elsewhere = {"device_map": "auto", "max_memory": memory, "offload_folder": str(folder)}
    model = AutoModelForCausalLM.from_pretrained(paths.TINY_MODEL, dtype="float32", **elsewhere)
    assert "disk" in model.hf_device_map.values()
    return parity.put_beside(model, adapter)


def test_a_model_that_lies_on_disk_reads_the_same(
    tmp_path: Path, adapter: Path, texts: parity.Fixed, readings: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT's own way left a copy of the whole base in the current folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    tuned = on_disk(tmp_path / "offload", adapter, {"cpu": "8MiB"})
    kept = parity.Readings(tmp_path, texts)
    kept.read("full", tuned, answers=False)
    assert kept["full"].answers is None and parity.gap(readings["full"], kept["full"]).mean < 1e-9
    assert parity.gap(readings["base"], kept["base"]).mean < 1e-9 and kept.gap("full", "base").same_answers is None
    later = parity.Readings(tmp_path, texts)
    later.read("full", None)  # nothing is measured again
    later["merged"] = readings["merged"]
    assert parity.Report(later).holds and later.gap("full", "merged").mean < 1e-7
    assert not list((tmp_path / "here").iterdir())


def test_an_adapter_that_has_no_place_beside_a_model_on_disk_is_refused(
    tmp_path: Path, base: Any, adapter: Path
) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(adapter, tmp_path / "odd")
    weights = load_file(adapter / "adapter_model.safetensors")
    save_file(weights | {"base_model.model.extra.weight": torch.zeros(2)}, tmp_path / "odd/adapter_model.safetensors")
    with pytest.raises(CourseError, match="has no place beside"):
        on_disk(tmp_path / "offload", tmp_path / "odd", {"cpu": "8MiB"})


def test_a_merge_into_the_dequantised_base_is_what_the_4_bit_model_computes(
    tmp_path: Path, adapter: Path, texts: parity.Fixed
) -> None:
    """bitsandbytes' CPU path for bfloat16 moved a float32 model by 1e-4 nats: `as_trained` keeps it off."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from nbutils import merging

    four_bit = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype="float32"
    )
    narrow = {"quantization_config": four_bit, "device_map": {"": "cpu"}, "dtype": "float32"}
    model = parity.as_trained(AutoModelForCausalLM.from_pretrained(paths.TINY_MODEL, **narrow))
    trained = parity.measure(parity.put_beside(model, adapter), texts, answers=False)
    merging.merge_adapter(
        paths.TINY_MODEL, adapter, tmp_path / "merged", dtype="float32", onto="dequantized", progress=False,
        quantization={"quant_type": "nf4", "double_quant": True, "dtype": "float32"},
    )  # fmt: skip
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="float32")
    assert parity.gap(trained, parity.measure(merged, texts, answers=False)).mean < 1e-7


def test_a_base_that_lies_whole_on_one_device_gets_its_adapter_there(adapter: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(paths.TINY_MODEL, dtype="float32")
    model.hf_device_map = {"": 0}  # whatever it says: the weights are where they are
    tuned = parity.put_beside(model, adapter)
    assert {str(weight.device) for weight in tuned.parameters()} == {"cpu"}
    assert any("lora_B" in name and weight.abs().sum() > 0 for name, weight in tuned.named_parameters())


@pytest.mark.gpu
def test_a_four_bit_base_on_the_card_gets_its_adapter_there(adapter: Path, texts: parity.Fixed) -> None:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    settings = {"quantization_config": four_bit, "device_map": {"": 0}, "dtype": torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(paths.TINY_MODEL, **settings)
    read = parity.measure(parity.put_beside(model, adapter), texts, answers=False)
    assert len(read.logs) == texts.positions


@pytest.mark.gpu
def test_a_model_larger_than_the_card_and_the_memory_reads_the_same(
    tmp_path: Path, adapter: Path, texts: parity.Fixed
) -> None:
    whole = parity.measure(with_adapter(adapter, device_map={"": 0}), texts, answers=False)
    found = parity.measure(on_disk(tmp_path, adapter, {0: "9MiB", "cpu": "5MiB"}), texts, answers=False)
    assert parity.gap(whole, found).mean < 1e-6


@pytest.mark.parametrize(
    ("gib", "card", "ram", "fits"),
    [
        (14.2, 14.7, 11.0, False),  # a 7B on a T4 of Colab
        (5.8, 14.7, 11.0, True),  # a 3B there
        (14.2, 22.1, 11.0, True),  # a 7B on 24 GB
        (14.2, None, 11.0, False),
        (0.03, None, 11.0, True),
    ],
)
def test_what_fits_is_decided_by_free_memory(gib: float, card: float | None, ram: float, fits: bool) -> None:
    decided, memory = fitting.decide(gib, card, ram)
    assert decided is fits
    if not fits:
        sizes = {place: int(size.removesuffix("MiB")) / 1024 for place, size in memory.items()}
        assert sizes["cpu"] < ram / 2 and (card is None or sizes[0] < card - 2)


def test_the_room_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = parity.room_for(0.01, None, tmp_path)
    assert small.fits and small.name == "full" and small.wide == {"device_map": {"": "cpu"}}
    monkeypatch.setattr(fitting, "_free_on_card", lambda: 14.7)
    tight = parity.room_for(14.2, object(), tmp_path)
    assert not tight.fits and tight.name == "4bit" and "do NOT fit into the card (14.7 GiB free)" in tight.reason
    assert tight.wide["device_map"] == "auto" and tight.wide["offload_folder"] == str(tmp_path)
    assert (small.other, tight.other) == ("4bit", "full")
    (tmp_path / "weights.dat").touch()
    tight.clear()
    small.clear()
    assert not tmp_path.exists()
    with pytest.raises(CourseError, match="what card and RAM cannot hold"):
        parity.room_for(1e6, object(), tmp_path)


class FakeVllm(BaseHTTPRequestHandler):
    """Speaks /v1/completions as vLLM does, out of readings; asks for a key."""

    reading: Reading
    fixed: parity.Fixed
    tells = True

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != f"Bearer {KEY}":
            return self._say({"error": {"message": "Unauthorized"}}, 401)
        self._say({"id": "1", "object": "text_completion", "created": 0, "model": asked["model"],
                   "choices": [{"index": 0, "text": "", "finish_reason": "stop", **self._choice(asked)}]})  # fmt: skip

    def _choice(self, asked: dict[str, Any]) -> dict[str, Any]:
        if "prompt_logprobs" not in asked:
            assert asked["stop_token_ids"] == self.fixed.stops and asked["temperature"] == 0
            return {"token_ids": self.reading.answers[self.fixed.prompts.index(asked["prompt"])]}
        row = self.fixed.texts.index(asked["prompt"])
        start, count = sum(self.fixed.measured[:row]), self.fixed.measured[row]
        short = self.reading.shortened(asked["prompt_logprobs"])
        places = zip(
            short.tokens[start : start + count].tolist(), short.logs[start : start + count].tolist(), strict=True
        )
        told = [{str(t): {"logprob": log, "rank": 1} for t, log in zip(*place, strict=True)} for place in places]
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
def server(texts: parity.Fixed, readings: dict) -> Iterator[tuple[str, type[FakeVllm]]]:
    handler = type("Handler", (FakeVllm,), {"reading": readings["merged"], "fixed": texts})
    listening = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{listening.server_port}/v1", handler
    listening.shutdown()
    listening.server_close()


def test_a_server_is_read_token_by_token(server: Any, texts: parity.Fixed, readings: dict) -> None:
    url, handler = server
    found = parity.measure_server(url, "course", texts, api_key=KEY)
    same = parity.gap(readings["merged"], found)
    assert same.mean < 1e-6 and same.coarse and (same.same_answers, same.answers) == (16, 16)
    assert same.same_choices == same.positions == texts.positions
    handler.reading = readings["base"]
    other = parity.gap(readings["merged"], parity.measure_server(url, "course", texts, api_key=KEY))
    assert other.mean > 0.01 and other.same_answers < 16


def test_a_server_that_refuses_or_does_not_tell_is_named(server: Any, texts: parity.Fixed) -> None:
    url, handler = server
    with pytest.raises(CourseError, match="did not answer"):
        parity.measure_server(url, "course", texts, api_key="wrong")
    handler.tells = False
    with pytest.raises(CourseError, match="does not tell what it expected"):
        parity.measure_server(url, "course", texts, api_key=KEY)
