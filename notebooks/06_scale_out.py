# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 06 · Train on every card
#
# Kaggle gives two T4s, and lesson 03 uses one of them. Here the same lesson 03, the same file, trains on all cards of a
# machine, one process for each. Without a card, two processes on the CPU do it with the tiny model: the lesson is the real one.
#
# You will have
#
# - one training shared by several processes, and the command line that starts it,
# - a comparison with one process: the same rows in every step, the same losses, and how much faster it is,
# - an adapter in the run folder, ready for lesson 04.
#
# Takes about two minutes with the tiny model on 2 cores; with a larger one as long as lesson 03, shared by your cards, and a few
# minutes for the comparison. Disk: as lesson 03.

# %% [markdown]
# The next cell installs the course where it is missing; on a machine that has it, it does nothing. If it stops, say where from in a
# cell above it: `%env NBUTILS_SOURCE=git+https://github.com/YOU/YOUR-FORK@v0.1.0`, or a folder, or one of the wheels it found.

# %% tags=["setup"]
import importlib.util, re, subprocess, sys; from glob import glob; from os import getenv, path, sep
if importlib.util.find_spec("nbutils") is None:
    OURS = "git+https://github.com/YOUR-NAME/finetune-course@v0.1.0"
    ALL = glob(getenv("NBUTILS_FS_ROOT", "") + sep + "kaggle/input/**/nbutils*.whl", recursive=True)
    SOURCE = getenv("NBUTILS_SOURCE") or "\n".join(ALL) or OURS
    assert re.fullmatch("(?!-|.*YOUR-).*/.*", SOURCE), f"Set NBUTILS_SOURCE, see above; found {ALL}"
    print("Installing the course from", re.sub(r"(?<=//)[^/]*@|[?#].*", "", SOURCE))
    ALONE = ["--no-index", "--only-binary=:all:", "-f", path.dirname(SOURCE)] * (SOURCE in ALL)
    PIP = subprocess.run([sys.executable, "-m", "pip", "install", "-q", SOURCE, *ALONE], stderr=-1)
    assert PIP.returncode == 0, re.sub(r"(?<=//)[^/\s]*@|[?#]\S*", "", PIP.stderr.decode())

# %% [markdown]
# The dials. `PROCESSES` 0 takes one for each card. `TRIAL_STEPS` is the length of the comparison; 0 leaves it out, for the second
# start of a long run. The others are those of lesson 03.

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
# Starting finds the platform, the cards and the run folder.

# %%
import nbutils

lesson = nbutils.start("06_scale_out", globals())

# %% [markdown]
# How many processes? One for each card. Without a card, two, with one thread each: a core then plays the part of a card.

# %%
from nbutils import scaling

choice = scaling.processes_for(lesson.card.count if lesson.card else 0, PROCESSES)
processes, threads = choice.value, 0 if lesson.card else 1
scaling.require_shares(lesson.profile.train.batch, processes)
print(f"processes: {processes} ({choice.reason})")

# %% [markdown]
# ## What happens
#
# `torchrun` starts lesson 03 several times and gives each process a number and a card. Every process loads the whole 4-bit model
# and takes its share of the rows of a step. Then the processes average their gradients and take the same step, so that the
# adapters stay equal. This is data parallelism (DDP). Only the adapter has gradients, a few per cent of the model: little to
# send, which is why even two T4s without a fast link between them are worth it.
#
# `train.batch` in a profile is the rows of a step on all cards together. With two cards each takes half of it, and learning rate
# and number of steps stay right.

# %%
from nbutils import paths

print(f"torchrun --nproc_per_node={processes} {paths.NOTEBOOKS / '03_qlora.py'} --PROFILE {lesson.resolved.source}")

# %% [markdown]
# ## Once alone, once together
#
# The same few steps twice, into a folder that may vanish: first with one process, then with all. (With one card there is nothing
# to compare, and this is left out.)

# %%
import shutil

trials = lesson.scratch / "trials"
shutil.rmtree(trials, ignore_errors=True)
counts = {"alone": 1, "together": processes} if processes > 1 and TRIAL_STEPS else {}
for name, count in counts.items():
    print(f"--- {name}: {count} process{'es' if count > 1 else ''}")
    lesson.launch("03_qlora", count, threads, trials, RUN_NAME=name, MAX_STEPS=TRIAL_STEPS, DATA=DATA)

# %% [markdown]
# What to look at: the number of steps and the rows in each are equal, and the losses agree. They would agree to the last digit if
# numbers were exact. The same rows are added up in another order, which costs a rounding: 2^-8 of a value in bfloat16, the
# coarsest type used here, so that 1 % is the most a few steps may differ. More means that something else is different. (With
# dropout each process draws its own: then only the trend agrees.)

# %%
compared = scaling.compare(trials / "alone", trials / "together") if counts else None
if compared:
    print(compared)
    print(f"[{' OK ' if compared.same_work else 'WARN'}] equal steps, equal batch, losses within 1 %")

# %% [markdown]
# Two cards should need little more than half the time, as long as a step is long against sending the adapter's gradients. Two
# processes on two cores share the memory of one machine, and whatever else runs there, so that a few short steps say little. Two
# real cards were not at hand when this was written: the measurement is your own, in the table above.
#
# What this does not do: make room. Each card holds the whole model, so that one which does not fit a single card does not fit
# two this way either. Sharding the weights (FSDP, DeepSpeed ZeRO-3) is for that; the documentation of `accelerate` is the place to
# begin, and this course does not go there.

# %% [markdown]
# ## The training
#
# Now the whole run, with all processes. Checkpoints, resuming and the time limit are those of lesson 03: a run that was begun on
# one card goes on with two, and the other way round. On Kaggle, *Save Version > Save & Run All* runs this notebook in the
# background; it ends before the 12 hours do, and goes on when its output is attached to the next version.

# %%
lesson.launch("03_qlora", processes, threads, DATA=DATA, MAX_STEPS=MAX_STEPS, MAX_HOURS=MAX_HOURS)

# %% [markdown]
# What it took; lesson 03 wrote it to the facts of this run.

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
# Does a run belong to the number of processes it began with? Start this lesson again with `PROCESSES` 1, `MAX_STEPS` 10 larger and
# `TRIAL_STEPS` 0.

# %%
first, last = trained["resumed_from_step"], trained["steps"]
good = 0 < first < last
print(f"[{' OK ' if good else 'TODO'}] saw steps {first} to {last} with {trained['processes']} processes; expected a start after 0",
      "" if good else "-> run again as above")

# %% [markdown]
# ## You now have
#
# - one training shared by several processes, and the command line that starts it,
# - a comparison with one process: the same rows in every step, the same losses, and how much faster it is,
# - an adapter in the run folder, ready for lesson 04.

# %%
lesson.finish(processes=processes, **scaling.facts(compared))
