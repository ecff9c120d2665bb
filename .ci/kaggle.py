"""Makes dist/kaggle, which the `kaggle` command uploads: the course's wheel as a dataset, a lesson as a kernel with it.

    make kaggle KAGGLE_USER=me LESSON=03_qlora              LESSON=zh/03_qlora is the Chinese one
    make kaggle KAGGLE_USER=me LESSON=03_qlora OFFLINE=1    with every wheel that Kaggle's image lacks, internet off

Without OFFLINE the dataset has what the setup cell needs and no list of wheels: the lesson takes the rest from the net.
"""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
from pathlib import Path

import wheels

from nbutils.files import read_json, write_json
from nbutils.install import MARKER

ROOT = wheels.ROOT
TEMPLATE = ROOT / "configs/kaggle/kernel-metadata.json"
DATASET = "finetune-course-wheels"


def lessons() -> list[str]:
    """Every lesson by its path in notebooks/, without the ending."""
    found = [*(ROOT / "notebooks").glob("[0-9]*.ipynb"), *(ROOT / "notebooks/zh").glob("[0-9]*.ipynb")]
    return sorted(file.relative_to(ROOT / "notebooks").with_suffix("").as_posix() for file in found)


def dataset(folder: Path, user: str, offline: bool) -> None:
    """Fill the folder of the dataset."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("*.whl"), *folder.glob(MARKER)]:
        old.unlink()
    with tempfile.TemporaryDirectory() as place:
        built = Path(place) / "wheels"
        wheels.build(built, "train" if offline else "", wheels.Target(), wheels.read_image(*wheels.KAGGLE))
        if not offline:
            (built / MARKER).unlink()
        shutil.copytree(built, folder, dirs_exist_ok=True)
    title = DATASET.replace("-", " ").capitalize()
    about = {"id": f"{user}/{DATASET}", "title": title, "licenses": [{"name": "other"}]}
    write_json(folder / "dataset-metadata.json", about)


def kernel(folder: Path, user: str, lesson: str, offline: bool) -> None:
    """Fill the folder of the kernel, which attaches the dataset."""
    folder.mkdir(parents=True, exist_ok=True)
    language, _, stem = lesson.rpartition("/")
    title = f"Finetune course {stem[3:]} {language}".strip().replace("_", " ")
    about = read_json(TEMPLATE)
    about["title"] = title
    about["id"] = f"{user}/{title.lower().replace(' ', '-')}"  # anything else and Kaggle makes another kernel
    about["code_file"] = f"{stem}.ipynb"
    about["dataset_sources"] = [f"{user}/{DATASET}"]
    about["enable_internet"] = not offline
    shutil.copyfile(ROOT / f"notebooks/{lesson}.ipynb", folder / about["code_file"])
    write_json(folder / TEMPLATE.name, about)


def main() -> None:
    """Read the options, fill both folders, say what to type next."""
    options = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    options.add_argument("--user", default="")
    options.add_argument("--lesson", default="03_qlora")
    options.add_argument("--offline", action="store_true")
    options.add_argument("--into", type=Path, default=ROOT / "dist/kaggle")
    given = options.parse_args()
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", given.user):
        raise SystemExit(
            f"KAGGLE_USER is {given.user!r}, and must be your name on Kaggle: the last part of your profile's address, "
            "in lower case. For example: make kaggle KAGGLE_USER=me LESSON=03_qlora"
        )
    if given.lesson not in lessons():
        raise SystemExit(f"LESSON is {given.lesson!r}, and must be one of: {', '.join(lessons())}")
    kernel(given.into / "kernel", given.user, given.lesson, given.offline)
    dataset(given.into / "dataset", given.user, given.offline)
    print(f"kaggle datasets create -p {given.into}/dataset             # the first time")
    print(f"kaggle datasets version -p {given.into}/dataset -m update  # later; wait until the dataset is ready")
    print(f"kaggle kernels push -p {given.into}/kernel")


if __name__ == "__main__":
    main()
