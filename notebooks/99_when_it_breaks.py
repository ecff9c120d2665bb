# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 99 · When it breaks
#
# Come here when a lesson stops with an error you do not understand, or when it ends well and the answers are bad. The lesson
# looks at four things in turn: the machine, the error message, the training, and your rows.
#
# You will have
#
# - a full check of this machine, with what to do about each finding,
# - the cause of an error message, and the next step,
# - what the loss curve of a training says about it.
#
# Takes under a minute; nothing is downloaded, and nothing in your run is changed.

# %% [markdown]
# The next cell installs the course if it is missing; on Colab, from the repository this notebook was opened from. If it stops, name
# a source in a cell above it: `%env NBUTILS_SOURCE=https://github.com/<you>/<fork>/archive/main.zip`, a folder or a wheel.

# %% tags=["setup"]
import importlib.util, re, subprocess, sys; from glob import glob; from os import getenv, path
if importlib.util.find_spec("nbutils") is None:
    OURS = ""
    WHEELS = glob("/kaggle/input/**/nbutils*.whl", recursive=True)
    COLAB = "curl -sm2 http://$COLAB_JUPYTER_IP:9000/api/sessions | head -c 9999 | tr -dc ' -~'"
    PAGE = r'"fileId=https%3A(//github\.com/(?![^"]*\.\.)[\w-]+/[\w.-]+)/blob/([\w./-]+)/notebooks/'
    OPENED = re.findall(PAGE, subprocess.getoutput(COLAB).replace("%2F", "/"))
    REPOSITORY = [f"https:{repository}/archive/{ref}.zip" for repository, ref in OPENED][:1]
    SOURCE = getenv("NBUTILS_SOURCE") or "\n".join(WHEELS or REPOSITORY or [OURS])
    assert re.match(r"[^-@?][^@?\n]*/[^:?/]*$", SOURCE), f"Set NBUTILS_SOURCE, see above: {WHEELS}"
    ALONE = ["--no-index", "--only-binary=:all:", "-f", path.dirname(SOURCE)] * (SOURCE in WHEELS)
    print("Installing the course from", SOURCE, flush=True)
    subprocess.run([sys.executable, "-m", "pip", "install", SOURCE, *ALONE], check=True)

# %% [markdown]
# `RUN_NAME` is the run that went wrong; empty is the one of this machine's profile. Put the error message between the quotes of
# `ERROR`, its last lines are enough. (A log is easier to give in a terminal: `python -m nbutils diagnose --error train.log`.)

# %% tags=["parameters"]
PROFILE: str = "auto"
RUN_NAME: str = ""
ERROR: str = ""

# %% [markdown]
# Start the lesson. Unlike the others it goes on when the GPU does not work.

# %%
import nbutils

lesson = nbutils.start("99_when_it_breaks", globals())

# %% [markdown]
# ## The machine
#
# Look here first. A full disk, a GPU that torch has no kernels for and a package of the wrong version cause most errors, and
# none of them names itself in its message.

# %%
from nbutils import doctor

report = doctor.examine()
print(report.text())

# %% [markdown]
# ## The error message
#
# Python prints the error last, below the calls that led to it: read from the bottom. Here is a real one. The tiny model knows
# a few thousand tokens, and is given one with a larger number, as happens when the tokenizer belongs to another model.

# %%
import torch
from transformers import AutoModelForCausalLM
from nbutils import files

model = AutoModelForCausalLM.from_pretrained(files.TINY_MODEL, trust_remote_code=False)
try:
    model(torch.tensor([[1_000_000]]))
except IndexError as problem:
    message = f"{type(problem).__name__}: {problem}"
print(message)

# %% [markdown]
# On a GPU the same mistake reads `device-side assert triggered`, far from the line that caused it. `explain` knows both. It looks
# for patterns, so give it as much of the message as you have.

# %%
from nbutils import diagnose

diagnose.show(diagnose.explain(ERROR or message))

# %% [markdown]
# ## The training
#
# A training can also fail without any error. Four trainings of a real model were measured for this course: one healthy, one
# with a learning rate far too low, one far too high, and one that saw 32 rows 25 times.

# %%
from nbutils import display

display.plot_loss_examples()

# %% [markdown]
# `examine` tells them apart by their numbers: where the training loss began and ended, and whether the validation loss rose
# again after its best step. It gives each fault a short name; a training may have several.

# %%
for name, curve in files.read_json(display.CURVES).items():
    print(name, "->", *diagnose.examine(diagnose.Trained(curve["train"], curve["validation"])) or ["nothing wrong"])

# %% [markdown]
# Now your run. Beside its curves the check reads what lessons 02 to 04 measured: rows that were left out, steps that were
# missing, answers that never stop, a verdict that said no. A run that has not trained yet has nothing to find.

# %%
findings = diagnose.examine(diagnose.Trained.of(lesson.run))
print(lesson.run.path)
diagnose.show(findings)

# %% [markdown]
# ## The rows
#
# Bad answers often come from bad rows. The check of lesson 02 on a file of broken ones shows what it reports:
# file, line, field and reason. `python -m nbutils data check FILE` does the same with yours.

# %%
from nbutils.data.check import check

print(check([str(files.SAMPLES / "broken_rows.jsonl")]))

# %% [markdown]
# ## Exercise
#
# This is the loss of a training with 60 steps. What is wrong with it? Put one of `"healthy"`, `"flat"`, `"diverging"` and
# `"overfitting"` into `my_guess` and run the cell.

# %%
my_guess = None
train = [(step, 2.0 * 0.93**step) for step in range(1, 61)]
validation = [(step, 1.2 + abs(step - 20) / 60) for step in range(0, 61, 5)]
display.plot_losses({"train": train, "validation": validation})
found = next(iter(diagnose.examine(diagnose.Trained(train, validation))), "healthy")
if my_guess is None:
    print("[todo] exercise: look where the validation loss is lowest, then set my_guess to one of the four words")
else:
    print(f"[{' OK ' if my_guess == found else 'FAIL'}] saw {my_guess}, expected {found}")

# %% [markdown]
# ## You now have
#
# - a full check of this machine, with what to do about each finding,
# - the cause of an error message, and the next step,
# - what the loss curve of a training says about it.
#
# `docs/faq.md` lists every symptom that this course recognises. If none of this helped: run `python -m nbutils doctor --json`, and
# ask with its output and the whole error message. Secrets are
# masked in both. Two questions to take along: which of the findings would you have seen before the training began? Which one
# costs the most money if nobody looks?

# %%
lesson.finish(report, findings=", ".join(findings) or "none")
