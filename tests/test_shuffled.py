"""The verdict can say no: real trainings of the tiny model on true and on shuffled answers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from nbutils import evaluation, paths
from nbutils.config import Evaluation

pytestmark = pytest.mark.notebook
STEPS = 60  # the form is learnt from shuffled answers; of the true ones four seeds got 57 to 88 % right


def rows_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (paths.SAMPLES / name).read_text(encoding="utf-8").splitlines()]


def shuffled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every question with the answer of some other row."""
    answers = [row["messages"][-1] for row in rows]
    random.Random(1).shuffle(answers)
    return [{"messages": [*row["messages"][:-1], answer]} for row, answer in zip(rows, answers, strict=True)]


def trained_on(rows: list[dict[str, Any]], folder: Path) -> Any:
    """The tiny model after a short LoRA training, merged."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    settings = SFTConfig(
        str(folder), max_length=256, packing=True, assistant_only_loss=True, per_device_train_batch_size=2,
        max_steps=STEPS, learning_rate=3e-3, lr_scheduler_type="cosine", warmup_steps=5, gradient_checkpointing=False,
        bf16=False, fp16=False, use_cpu=True, seed=1, save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(paths.TINY_MODEL, dtype="float32"), settings,
        train_dataset=Dataset.from_list(rows), processing_class=AutoTokenizer.from_pretrained(paths.TINY_MODEL),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )  # fmt: skip
    trainer.train()
    return trainer.model.merge_and_unload()


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> tuple[evaluation.Exam, evaluation.Result]:
    """The exam on the bundled evaluation rows, and what the untouched base makes of it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(paths.TINY_MODEL)
    size = Evaluation(batch_size=60, max_new_tokens=64, rows=0)
    exam = evaluation.Exam(tmp_path_factory.mktemp("run"), tokenizer, rows_of("eval.jsonl"), size, "float32")
    return exam, exam.sit("base", AutoModelForCausalLM.from_pretrained(paths.TINY_MODEL, dtype="float32"), "base")


def test_true_answers_help(before: tuple[evaluation.Exam, evaluation.Result], tmp_path: Path) -> None:
    exam, base = before
    tuned = exam.sit("true", trained_on(rows_of("train.jsonl"), tmp_path), "true")
    outcome = evaluation.Outcome([base, tuned])
    assert tuned.mean("exact_match") > 0.3 and tuned.mean("content") > base.mean("content")
    assert outcome.verdict.word == "helped" and outcome.verdict.flags == []
    assert "which answer belongs to which question" in outcome.verdict.why


def test_shuffled_answers_do_not_though_loss_and_f1_improve(
    before: tuple[evaluation.Exam, evaluation.Result], tmp_path: Path
) -> None:
    exam, base = before
    tuned = exam.sit("shuffled", trained_on(shuffled(rows_of("train.jsonl")), tmp_path), "shuffled")
    outcome = evaluation.Outcome([base, tuned])
    print(outcome.text())  # the numbers README quotes; pytest -s shows them
    for score in ("character_f1", "rouge_l"):  # what a naive report would call a success
        assert outcome.changes[score].estimate.low > 0.2 and outcome.changes[score].p < 0.001
    assert outcome.changes["loss"].estimate.high < -2
    assert abs(tuned.mean("content")) < 0.03 and tuned.mean("exact_match") == 0
    assert outcome.verdict.word != "helped" and outcome.facts()["verdict"] != "helped"
    assert "wrong answers of the right form do that too" in outcome.verdict.why
    assert "each answer belongs to its question" in outcome.verdict.todo
    page = evaluation.write_report(tmp_path / "report.html", "shuffled", exam, outcome, {}).read_text(encoding="utf-8")
    assert outcome.verdict.headline in page and "The tuning helped" not in page
