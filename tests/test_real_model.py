"""A real chat model, made out of its package by the course's own code, learns on the CPU as lesson 03 trains it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nbutils import chat, data, training
from nbutils import models as packaged
from nbutils.errors import CourseError
from nbutils.paths import SAMPLES

pytestmark = pytest.mark.install
LENGTH, STEPS = 256, 8


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> str:
    work = tmp_path_factory.mktemp("work")
    try:
        return packaged.from_package(work)
    except CourseError as problem:
        if "pip could not get" in problem.seen:
            pytest.skip(f"the package registry does not answer: {problem.seen}")
        raise


def test_what_was_made_is_kept_and_knows_the_world(smollm: str, capsys: pytest.CaptureFixture[str]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert packaged.from_package(Path(smollm).parents[2]) == smollm and capsys.readouterr().out == ""
    tokenizer = AutoTokenizer.from_pretrained(smollm)
    model = AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    answer = tokenizer.decode(model.generate(**prompt, max_new_tokens=12, do_sample=False)[0])
    assert "Paris" in answer and model.config.architectures == ["LlamaForCausalLM"]


def trainer_of(model: str, folder: Path) -> Any:
    """The trainer of lesson 03, on the rows of profile laptop."""
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
    from trl import SFTConfig, SFTTrainer

    set_seed(42)
    tokenizer = AutoTokenizer.from_pretrained(model)
    stops = chat.find_stop_ids(tokenizer, model)
    train, held_back = (
        chat.fitting(tokenizer, data.stored_rows(SAMPLES / "assistant_en" / f"{name}.jsonl"), LENGTH, stop_ids=stops)
        for name in ("train", "eval")
    )
    settings = SFTConfig(
        output_dir=str(folder), max_length=LENGTH, packing=True, per_device_train_batch_size=1, max_steps=STEPS,
        learning_rate=2e-3, lr_scheduler_type="cosine", optim="adamw_torch_fused", gradient_checkpointing=False,
        use_cpu=True, bf16=False, report_to="none", save_strategy="no",
    )  # fmt: skip
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), args=settings,
        processing_class=tokenizer, train_dataset=chat.training_dataset(train),
        eval_dataset=chat.training_dataset(held_back),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )  # fmt: skip
    training.make_lean(trainer, fused=False)
    return trainer


def test_a_few_steps_lower_the_loss_on_held_back_rows(smollm: str, tmp_path: Path) -> None:
    trainer = trainer_of(smollm, tmp_path)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert after < 0.7 * before, (before, after)
