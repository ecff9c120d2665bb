# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 06 · Train on several GPUs
#
# Kaggle gives two T4s, and lesson 03 uses one of them. Here the same lesson 03, the same file, trains on all GPUs of a
# machine, one process for each. Without a GPU, two processes on the CPU train the tiny model in the same way.
#
# You will have
#
# - one training shared by several processes, and the command line that starts it,
# - a comparison with one process: the same rows in every step, the same losses, and how much faster it is,
# - an adapter in the run folder, ready for lesson 04.
#
# Takes about two minutes with the tiny model on 2 cores; with a larger one as long as lesson 03, divided by your GPUs, and a few
# minutes for the comparison. Disk: as lesson 03.

# %% [markdown]
# The next cell installs the course if it is missing. If it fails, name the source in a cell above it:
# `%env NBUTILS_SOURCE=git+https://github.com/<you>/<fork>@v0.1.0` (without a password), a folder, or one of the wheels it found.

# %% tags=["setup"]
import importlib.util, re, subprocess, sys; from glob import glob; from os import getenv, path
if importlib.util.find_spec("nbutils") is None:
    OURS = ""
    WHEELS = glob("/kaggle/input/**/nbutils*.whl", recursive=True)
    SOURCE = getenv("NBUTILS_SOURCE") or "\n".join(WHEELS) or OURS
    assert re.match(r"[^-@?][^@?\n]*/[^:?/]*$", SOURCE), f"Set NBUTILS_SOURCE, see above: {WHEELS}"
    ALONE = ["--no-index", "--only-binary=:all:", "-f", path.dirname(SOURCE)] * (SOURCE in WHEELS)
    subprocess.run([sys.executable, "-m", "pip", "install", SOURCE, *ALONE], check=True)

# %% [markdown]
# `PROCESSES` 0 starts one for each GPU. `TRIAL_STEPS` is the length of the comparison; 0 leaves it out, for example when a long
# run is started a second time. The others are those of lesson 03.

# %% tags=["parameters"]
PROFILE: str = "auto"
MODEL: str = ""
DATA: str = ""
RUN_NAME: str = ""
PROCESSES: int = 0
TRIAL_STEPS: int = 20
MAX_STEPS: int = 0
MAX_HOURS: float = 0.0

# %% [markdown]
# Start the lesson.

# %%
import nbutils

lesson = nbutils.start("06_scale_out", globals())

# %% [markdown]
# How many processes? One for each GPU. Without a GPU, two, with one CPU thread each.

# %%
from nbutils import distributed

choice = distributed.processes_for(lesson.gpu.count if lesson.gpu else 0, PROCESSES)
processes, threads = choice.value, 0 if lesson.gpu else 1
distributed.require_shares(lesson.profile.train.batch, processes)
print(f"processes: {processes} ({choice.reason})")

# %% [markdown]
# ## What happens
#
# `torchrun` starts lesson 03 several times and gives each process a number (its rank) and a GPU. Every process loads the whole 4-bit model
# and takes its share of the rows of a step. Then the processes average their gradients and take the same step, so that the
# adapters stay equal. This is distributed data parallel training (DDP). Only the adapter has gradients, a few percent of the model,
# so little is sent, and even two T4s without a fast link between them help.
#
# `train.batch` in a profile is the rows of a step on all GPUs together. With two GPUs each takes half of it, so learning rate
# and number of steps need no change.

# %%
from nbutils import files

print(f"torchrun --nproc_per_node={processes} {files.NOTEBOOKS / '03_qlora.py'} --PROFILE {lesson.resolved.source}")

# %% [markdown]
# ## Once alone, once together
#
# The same few steps twice, in a temporary folder: first with one process, then with all. (With one GPU there is nothing to
# compare, and this is left out.)

# %%
import shutil

trials = lesson.scratch / "trials"
shutil.rmtree(trials, ignore_errors=True)
counts = {"alone": 1, "together": processes} if processes > 1 and TRIAL_STEPS else {}
for name, count in counts.items():
    print(f"--- {name}: {count} process{'es' if count > 1 else ''}")
    lesson.launch("03_qlora", count, threads, trials, RUN_NAME=name, MAX_STEPS=TRIAL_STEPS, DATA=DATA)

# %% [markdown]
# The number of steps and the rows of each step are equal, and the losses agree within 1 %. They are not equal to the last digit,
# because the same numbers are added in another order and rounded differently. A larger difference means that something else
# is different. (With dropout each process draws its own random numbers: then only the trend agrees.)

# %%
compared = distributed.compare(trials / "alone", trials / "together") if counts else None
if compared:
    print(compared)
    print(f"[{' OK ' if compared.same_work else 'WARN'}] equal steps, equal batch, losses within 1 %")

# %% [markdown]
# Two GPUs should need little more than half the time, as long as computing a step takes much longer than sending the adapter's
# gradients. Two processes on two CPU cores share the memory bandwidth, so a few short steps say little there. This course was not
# measured on two GPUs: the table above is your own measurement.
#
# DDP does not make room for a larger model: each GPU holds all of it. Models that do not fit on one GPU need sharded weights (FSDP,
# DeepSpeed ZeRO-3), see the documentation of `accelerate`.

# %% [markdown]
# ## The training
#
# Now the whole run, with all processes. Checkpoints, resuming and the time limit are those of lesson 03: a run that was started on
# one GPU continues on two, and the other way round. On Kaggle, *Save Version > Save & Run All* runs this notebook in the
# background; it ends before the 12 hours are over, and continues when its output is attached to the next version.

# %%
lesson.launch("03_qlora", processes, threads, DATA=DATA, MAX_STEPS=MAX_STEPS, MAX_HOURS=MAX_HOURS)

# %% [markdown]
# What it took, as lesson 03 recorded it in `facts.json`.

# %%
from nbutils import record

trained = record.read(lesson.run.facts)["lessons"]["03_qlora"]
for name in ("processes", "batch", "steps", "planned_steps", "final_loss", "tokens_per_second", "peak_memory_gib"):
    print(f"{name:18} {trained[name]}")
if trained["resumed_from_step"] == trained["steps"]:
    print("This run was finished before: nothing was trained now. Raise MAX_STEPS, or choose another RUN_NAME.")
print(f"adapter: {lesson.run.adapter}" if record.complete(trained) else "not finished: run this notebook again")

# %% [markdown]
# ## Exercise
#
# Is a run tied to the number of processes it was started with? Start this lesson again with one process and ten more steps, without
# the comparison. The next cell says how.

# %%
first, last = trained["resumed_from_step"], trained["steps"]
good = 0 < first < last
print(f"[{' OK ' if good else 'TODO'}] saw steps {first} to {last} with {trained['processes']} processes, expected a start after 0")
if not good:
    print(f"Run this lesson again with PROCESSES = 1, MAX_STEPS = {last + 10} and TRIAL_STEPS = 0: it continues at step {last}.")

# %% [markdown]
# ## You now have
#
# - one training shared by several processes, and the command line that starts it,
# - a comparison with one process: the same rows in every step, the same losses, and how much faster it is,
# - an adapter in the run folder, ready for lesson 04.

# %%
lesson.finish(processes=processes, **distributed.facts(compared))
