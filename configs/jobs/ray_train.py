"""Lesson 03 on a Ray cluster: Ray Train starts one worker for each GPU, and each worker runs the lesson.

Needs    the course and `pip install "ray[train]"` in one environment, in a folder that all machines see under FOLDER;
         `ray start --head` on one of them, `ray start --address=HEAD:6379` on the others.
Run      python configs/jobs/ray_train.py, on any of them
Stop     Ctrl-C. Ray kills its workers: the steps since the last checkpoint are lost (--SAVE_STEPS says how many).
Go on    after a lost worker or machine Ray starts all workers again, RETRIES times, and the lesson goes on from its
         newest checkpoint. After that: the same command, also with another number of GPUs.
"""

import os
import subprocess
import sys
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

FOLDER = "/shared/finetune-course"
LESSON = ["notebooks/03_qlora.py", "--PROFILE", "ampere_40gb", "--RUN_NAME", "big"]
WORKER = {"GPU": 1, "CPU": 4}
WORKERS = 16
RETRIES = 3
PORT = 29500  # free on all machines, and open between them


def run_lesson(_: dict[str, Any]) -> None:
    """In each worker, where Ray has set RANK, LOCAL_RANK, WORLD_SIZE and MASTER_ADDR as torchrun does.

    A process of its own, because Ray calls this in a thread, where Python hears no signals, and after it has joined the
    workers to a process group, which occupies MASTER_PORT.
    """
    env = os.environ | {"NBUTILS_HOME": f"{FOLDER}/runs", "MASTER_PORT": str(PORT)}
    subprocess.run([sys.executable, *LESSON], cwd=FOLDER, env=env, check=True)


if __name__ == "__main__":
    ray.init(address="auto")  # the cluster; without it Ray would start one on this machine alone
    TorchTrainer(
        run_lesson,
        train_loop_config={},
        torch_config=TorchConfig(backend="gloo"),  # Ray's own group: the GPUs belong to the lesson
        scaling_config=ScalingConfig(num_workers=WORKERS, use_gpu="GPU" in WORKER, resources_per_worker=WORKER),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=RETRIES)),
    ).fit()
