# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 01 · Where am I, and what can this machine do?
#
# Fine-tuning fails most often before it begins: a card torch has no kernels for, a full disk, a folder that vanishes.
# This lesson looks first.
#
# You will have
#
# - the name of the platform and the evidence for it,
# - proof that the card (or the CPU) really computes,
# - the folders of this machine: which one lasts, which one is fast, how much room is left,
# - a profile: model, precision and batch for this machine, each value with its reason.
#
# Takes under a minute, downloads nothing.

# %% [markdown]
# The next cell installs the course where it is missing; on a machine that has it, it does nothing.

# %% tags=["setup"]
import importlib.util, os, subprocess, sys
SOURCE = os.environ.get("NBUTILS_SOURCE") or "git+https://github.com/finetune-course/finetune-course"
if importlib.util.find_spec("nbutils") is None:
    print("Installing the course from", SOURCE); subprocess.check_call([sys.executable, "-m", "pip", "install", "-q", SOURCE])

# %% [markdown]
# These are the dials. `PROFILE = "auto"` lets the machine decide; any name from `configs/` works too.

# %% tags=["parameters"]
PROFILE: str = "auto"
MODEL: str = ""
RUN_NAME: str = ""

# %% [markdown]
# Starting a lesson prints what was found. The evidence matters: Kaggle's image also carries Colab's package.

# %%
import nbutils

lesson = nbutils.start("01_environment", globals())

# %% [markdown]
# `torch.cuda.is_available()` also says yes to cards that torch has no kernels for. So we let the device multiply.

# %%
from nbutils import hardware

works = hardware.working_operation(lesson.card)
print("[ OK ]" if works.value else "[FAIL]", works.reason)
assert works.value, works.reason

# %% [markdown]
# The card's capability decides the rest: which number format to train in, which attention, which server.

# %%
choices = {
    "precision": hardware.precision(lesson.card),
    "attention": hardware.attention(lesson.card),
    "fused kernels": hardware.liger(lesson.card),
    "server": hardware.engine(lesson.card),
}
for name, choice in choices.items():
    print(f"{name:14} {choice.value!s:18} {choice.reason}")

# %% [markdown]
# Each platform has a fast folder, a folder that may vanish, and one that outlives the machine. Only the last is for keeps.

# %%
from nbutils import disk

for name in ("work", "scratch", "keep"):
    folder = getattr(lesson.folders, name)
    print(f"{name:8} {disk.free_gib(folder):8.1f} GiB free   {folder}")

# %% [markdown]
# Memory and processors: in a container the machine's numbers are not yours, so both are shown.

# %%
import os
import psutil

print(f"processors this process may use: {len(os.sched_getaffinity(0))} of {os.cpu_count()}")
memory = psutil.virtual_memory()
print(f"memory: {memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB available")

# %% [markdown]
# The resolved profile, every value with its reason. Learning rate and rank are choices; precision is a fact of the card.

# %%
from nbutils import dashboard

dashboard.show_choices(lesson.resolved.choices, lesson.resolved.table())

# %% [markdown]
# ## Exercise
#
# Choose another profile and look at what changes. Set `wanted` to the profile you would use on a free Colab T4.

# %%
from nbutils import profiles

wanted = "t4_16gb"
other = profiles.load(wanted)
batch = other.train.micro_batch * other.train.accumulation
print("model", other.model, "| precision", other.machine.precision, "| effective batch", batch)

# %% [markdown]
# The check says what it saw and what it expected.

# %%
good = "t4" in wanted
print(f"[{' OK ' if good else 'FAIL'}] saw {wanted!r}, expected a profile for a T4")
print("" if good else "try the names in configs/")

# %% [markdown]
# ## You now have
#
# - the name of the platform and the evidence for it,
# - proof that the card (or the CPU) really computes,
# - the folders of this machine: which one lasts, which one is fast, how much room is left,
# - a profile: model, precision and batch for this machine, each value with its reason.
#
# The last cell writes them to `facts.json`.

# %%
lesson.finish(
    device_works=works.value,
    precision=choices["precision"].value,
    free_gib=round(disk.free_gib(lesson.folders.keep), 1),
)
