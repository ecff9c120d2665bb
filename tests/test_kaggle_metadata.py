"""configs/kaggle/kernel-metadata.json: what Kaggle would refuse, or silently do wrong, is caught here."""

from __future__ import annotations

import json
import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "configs/kaggle"
METADATA = json.loads((FOLDER / "kernel-metadata.json").read_text(encoding="utf-8"))
KNOWN = {
    "id", "id_no", "title", "code_file", "language", "kernel_type", "is_private", "enable_gpu", "enable_tpu",
    "enable_internet", "machine_shape", "dataset_sources", "competition_sources", "kernel_sources", "model_sources",
    "docker_image", "docker_image_pinning_type", "keywords",
}  # fmt: skip


def slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def test_the_id_is_a_name_and_the_slug_of_the_title() -> None:
    owner, _, name = METADATA["id"].partition("/")
    assert owner and name == slug(METADATA["title"]) == "finetune-course-qlora"


def test_every_key_is_one_kaggle_knows() -> None:
    assert set(METADATA) <= KNOWN


def test_a_t4_is_asked_for_by_name() -> None:
    assert METADATA["enable_gpu"] is True and METADATA["machine_shape"] == "NvidiaTeslaT4"
    assert METADATA["enable_tpu"] is False and METADATA["enable_internet"] is True and METADATA["is_private"] is True


def test_the_code_file_is_lesson_03_and_small_enough_to_upload() -> None:
    assert (METADATA["language"], METADATA["kernel_type"]) == ("python", "notebook")
    code = (FOLDER / METADATA["code_file"]).resolve()
    assert code.name == "03_qlora.ipynb" and json.loads(code.read_text(encoding="utf-8"))["nbformat"] == 4
    assert code.stat().st_size < 700_000


def test_nothing_is_attached_until_the_learner_says_so() -> None:
    sources = {key: value for key, value in METADATA.items() if key.endswith("_sources")}
    assert len(sources) == 4 and all(value == [] for value in sources.values())
