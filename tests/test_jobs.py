"""The job files of configs/jobs: each names a real lesson with real parameters, and its scheduler would take it.

A scheduler's own code is asked where it is installed, else that part is skipped:
`pip install kubeflow-trainer-api skypilot "ray[train]"`, and the package slurm-client of Debian.
"""

import ast
import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import ROOT

from nbutils import config, environments, lesson
from nbutils.serving import engine

JOBS = ROOT / "configs/jobs"
SLURM, KUBEFLOW, SKYPILOT, RAY = (
    JOBS / name for name in ("slurm.sbatch", "kubeflow.yaml", "skypilot.yaml", "ray_train.py")
)
OPTIONS = """
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
print(*(option for action in make_arg_parser(FlexibleArgumentParser())._actions for option in action.option_strings))
"""


def loaded(path: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(path.read_text(encoding="utf-8")))


def given_to_the_lesson(job: Path) -> list[str]:
    """The words from the lesson's path on."""
    if job == RAY:
        body = ast.parse(RAY.read_text(encoding="utf-8")).body
        [words] = [ast.literal_eval(one.value) for one in body if ast.unparse(one).startswith("LESSON = ")]
    elif job == KUBEFLOW:
        trainer = loaded(KUBEFLOW)["spec"]["trainer"]
        words = [*trainer["command"], *trainer["args"]]
    else:
        [line] = re.findall(r"notebooks/\S+\.py --[^\"\n]+", job.read_text(encoding="utf-8"))
        words = shlex.split(line)
    start = next(i for i, word in enumerate(words) if word.endswith(".py"))
    return [words[start].removeprefix("/course/"), *words[start + 1 :]]


def bash_accepts(text: str) -> bool:
    return subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


@pytest.mark.parametrize("job", sorted(one for one in JOBS.iterdir() if one.is_file()), ids=lambda job: job.name)
def test_a_job_runs_lesson_03_with_parameters_it_has(job: Path) -> None:
    script, *words = given_to_the_lesson(job)
    given = dict(zip((one.removeprefix("--") for one in words[::2]), words[1::2], strict=True))
    assert script == "notebooks/03_qlora.py"
    assert set(given) <= set(lesson.declared_in(ROOT / script)) and given["RUN_NAME"]
    assert (ROOT / f"configs/{given['PROFILE']}.yaml").exists()


def test_slurm_reads_all_options_and_each_node_gets_its_torchrun(tmp_path: Path) -> None:
    text = SLURM.read_text(encoding="utf-8")
    assert bash_accepts(text)
    before, _, after = text.partition("\nexport ")  # what comes after the first command is a comment to SLURM
    assert "#SBATCH --nodes=" in before and "\n#SBATCH" not in after
    for name, says in {"scontrol": "printf 'node1\\nnode2\\n'", "srun": 'echo "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{says}\n")
        (tmp_path / name).chmod(0o755)
    sizes = {"SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_PER_TASK": "4"}
    env = os.environ | sizes | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    env |= {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": "7"}
    ran = subprocess.run(["bash", SLURM], env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
    words = shlex.split(ran.stdout)
    assert {"--nnodes=2", "--nproc-per-node=8", "--rdzv-endpoint=node1:29500", "--rdzv-id=7"} <= set(words)
    assert words[words.index("notebooks/03_qlora.py") :] == given_to_the_lesson(SLURM)


def test_slurm_signals_torchrun_alone() -> None:
    [pattern] = re.findall(r'pkill -TERM -f "(.+?)"', SLURM.read_text(encoding="utf-8"))
    pattern = pattern.replace("$SLURM_JOB_ID", "7")
    assert re.search(pattern, "/x/.venv/bin/python3 .venv/bin/torchrun --nnodes=2 --rdzv-id=7 notebooks/03_qlora.py")
    others = [
        "srun .venv/bin/torchrun --rdzv-id=7 notebooks/03_qlora.py",
        "/x/python -u notebooks/03_qlora.py --RUN_NAME big",
    ]
    others += ["/x/python .venv/bin/torchrun --rdzv-id=77 notebooks/03_qlora.py"]
    assert not any(re.search(pattern, one) for one in others)


@pytest.mark.skipif(not shutil.which("sbatch"), reason="SLURM is not installed")
def test_sbatch_knows_the_options(tmp_path: Path) -> None:
    conf = tmp_path / "slurm.conf"  # without one it does not even say which options it has
    conf.write_text("ClusterName=none\nSlurmctldHost=localhost\nNodeName=none\nPartitionName=none Nodes=none\n")
    env = os.environ | {"SLURM_CONF": str(conf)}
    options = re.findall(r"^#SBATCH (--\S+)", SLURM.read_text(encoding="utf-8"), re.MULTILINE)
    codes = [
        subprocess.run(["sbatch", *given, "--help"], env=env, capture_output=True, check=False).returncode
        for given in (options, [*options, "--no-such-option"], ["--signal=nonsense"])
    ]
    assert codes[0] == 0 and 0 not in codes[1:]


def test_a_trainjob_has_a_process_for_each_gpu() -> None:
    job = loaded(KUBEFLOW)
    trainer = job["spec"]["trainer"]
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]


def test_kubeflow_knows_every_field_of_the_trainjob() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    job = loaded(KUBEFLOW)
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job  # an unknown field would be dropped


def test_bash_reads_what_skypilot_runs() -> None:
    assert all(bash_accepts(loaded(SKYPILOT)[part]) for part in ("setup", "run"))


def test_skypilot_accepts_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # it writes there when it is imported
    sky = pytest.importorskip("sky")
    monkeypatch.chdir(ROOT)
    task = sky.Task.from_yaml(str(SKYPILOT))
    assert task.num_nodes == 2 and list(task.storage_mounts) == ["/bucket"]
    used = set(re.findall(r"SKYPILOT_\w+", SKYPILOT.read_text(encoding="utf-8")))
    assert used <= {value for value in vars(sky.skylet.constants).values() if isinstance(value, str)}


def test_ray_accepts_the_trainer_and_a_worker_starts_the_lesson(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")
    trainers = pytest.importorskip("ray.train.torch")
    built = []
    monkeypatch.setattr(ray, "init", lambda address: None)
    monkeypatch.setattr(trainers.TorchTrainer, "fit", lambda self: built.append(self))
    runpy.run_path(str(RAY), run_name="__main__")
    assert len(built) == 1
    spec = importlib.util.spec_from_file_location("ray_job", RAY)
    assert spec and spec.loader
    job = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(job)
    said = "[os.environ[name] for name in ('RANK', 'MASTER_PORT', 'NBUTILS_HOME')]"
    (tmp_path / "lesson.py").write_text(f"import os; open('said', 'w').write(' '.join({said}))")
    job.FOLDER, job.LESSON = str(tmp_path), ["lesson.py"]
    monkeypatch.setenv("RANK", "3")
    job.run_lesson({})
    assert (tmp_path / "said").read_text().split() == ["3", str(job.PORT), f"{tmp_path}/runs"]


@pytest.mark.slow
@pytest.mark.long
def test_vllm_has_the_options_that_the_page_and_profiles_name() -> None:
    python = environments.place(engine.PREFIX, "serve") / "bin/python"
    if not python.exists():
        pytest.skip("there is no environment for serving: make test makes it")
    page = (ROOT / "docs/clusters.md").read_text(encoding="utf-8")
    [prose] = re.findall(r"`(--distributed-executor-backend) ", page)
    used = {
        prose,
        *(one for line in re.findall(r"^vllm serve .+", page, re.MULTILINE) for one in re.findall(r"--[a-z-]+", line)),
    }
    env = environments.variables({})
    known = subprocess.run([python, "-c", OPTIONS], capture_output=True, text=True, check=True, env=env).stdout.split()
    assert len(used) > 8 and used <= set(known)
    in_profiles = {f"--{name.replace('_', '-')}" for name in config.Vllm.model_fields}
    assert in_profiles <= set(known)
