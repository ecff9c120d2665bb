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
# - a doctor's report: platform, folders and room, memory, hours left, packages, network,
# - proof that the card (or the CPU) really computes,
# - a profile: model, precision and batch for this machine, each value with its reason,
# - a plan: what fits this card or one you could rent, how fast it trains and what it costs.
#
# Takes under a minute, downloads nothing.

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
# These are the dials. `PROFILE = "auto"` lets the machine decide; any name from `configs/` works too. `SET` replaces any of its
# values, as in `"train.learning_rate=1e-4, lora.rank=64"`; the later lessons of the same run keep to it.

# %% tags=["parameters"]
PROFILE: str = "auto"
MODEL: str = ""
RUN_NAME: str = ""
SET: str = ""

# %% [markdown]
# Starting a lesson prints what was found. The evidence matters: Kaggle's image also carries Colab's package.

# %%
import nbutils

lesson = nbutils.start("01_environment", globals())

# %% [markdown]
# The doctor looks at everything a lesson will lean on: the folders (which one lasts, how much room is left), the memory
# and processors that are really yours in a container, the hours left, the packages, the network. `WARN` means read it,
# `FAIL` means mend it first. In a terminal, `python -m nbutils doctor` prints the same.

# %%
from nbutils import dashboard, doctor

report = doctor.examine()
dashboard.show_table(report.rows(), text=report.text())

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
# The resolved profile, every value with its reason. Learning rate and rank are choices; precision is a fact of the card.

# %%
dashboard.show_choices(lesson.resolved.choices, lesson.resolved.table())

# %% [markdown]
# ## What fits, how long it takes, what it costs
#
# The plan forecasts a training before anything is downloaded. The peak of the card's memory has six parts:
#
# - **weights**: the linear layers at 4 bits and a little more for their scales; embeddings, output head and norms at 16,
# - **adapters**: rank x (in + out) for every linear map, 4 bytes each and 4 for its gradient,
# - **optimizer**: two running means for each adapter weight, of 1 byte (8-bit) or 4,
# - **activations**: what the backward pass needs of every token. All of it is fastest; with checkpointing only each layer's
#   input is kept and the rest computed again; with offloading even the inputs wait in the computer's memory,
# - **logits**: the loss; the table of tokens x vocabulary is made in tiles, never whole, and often smaller than a layer at work,
# - **workspace**: masks of packed rows where the card needs them, and what libraries keep for themselves.
#
# The first three are paid once. Activations, logits and masks grow with the tokens of a step (micro-batch x length). On this machine's card, or on a rented one if there is none:

# %%
from nbutils import plan

planned = plan.example(lesson.resolved, rows=10_000, mean_length=300)
dashboard.show_table(plan.as_rows(planned), "10,000 rows of 300 tokens", plan.describe(planned))

# %% [markdown]
# The same peak, part by part, with the numbers put in.

# %%
print(plan.explain(plan.find(planned.model), planned))

# %% [markdown]
# Which profile fits where. An hour's price comes from `configs/cards.yaml`, which is yours to edit; where it says unknown, nobody
# filled it in. Only the H200 was measured, the other speeds follow from published numbers. Kaggle's two T4s are two: each
# holds its own copy and takes half of the rows (lesson 06). `python -m nbutils plan --model Qwen2.5-7B --gpu "T4 x2"` asks for one.

# %%
table = plan.fits_table()
dashboard.show_table(table, "What PROFILE auto trains on each card", dashboard.aligned(table))

# %% [markdown]
# ## Exercise
#
# Choose another profile and look at what changes. Set `wanted` to the profile you would use on a free Colab T4.

# %%
from nbutils import profiles

wanted = "t4_16gb"
other = profiles.load(wanted)
print("model", other.model, "| precision", other.machine.precision, "| learning rate", other.train.learning_rate)

# %% [markdown]
# The check says what it saw and what it expected.

# %%
good = "t4" in wanted
print(f"[{' OK ' if good else 'FAIL'}] saw {wanted!r}, expected a profile for a T4")
print("" if good else "try the names in configs/")

# %% [markdown]
# ## You now have
#
# - a doctor's report: platform, folders and room, memory, hours left, packages, network,
# - proof that the card (or the CPU) really computes,
# - a profile: model, precision and batch for this machine, each value with its reason,
# - a plan: what fits this card or one you could rent, how fast it trains and what it costs.
#
# The last cell writes them to `facts.json`.

# %%
from nbutils import disk

lesson.finish(
    device_works=works.value,
    precision=choices["precision"].value,
    free_gib=round(disk.free_gib(lesson.folders.keep), 1),
    keep_lasts=lesson.folders.lasting,
    limits=report.limits,
    planned=f"{planned.model} on {planned.card}: {planned.peak_vram_gib:.1f} GiB",
    warnings="; ".join(check.name for check in report.checks if check.status != "OK") or "none",
)
