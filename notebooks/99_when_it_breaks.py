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
#
# Every word is explained where it first appears, and in the [glossary](../docs/glossary.md).

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
from nbutils import display, doctor
from nbutils.language import tr

report = doctor.examine()
checks = [{"result": check.status, "what": tr(check.name), "seen": check.seen, "what to do": check.todo} for check in report.checks]
display.show_table(checks, text=report.text())

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
# A training can also fail without any error. The *training loss* says how badly the model predicts the rows it learns from, and the
# *validation loss* how badly it predicts rows it does not learn from. Four trainings of a real model were measured for this course: one
# healthy, one with a learning rate far too low, one far too high, and one that saw 32 rows 25 times.

# %%
display.plot_loss_examples()

# %% [markdown]
# `examine` tells them apart by their numbers, and gives each fault a name; a training may have several. `flat`: the training loss hardly
# falls. `diverging`: it rises. `overfitting`: it falls, but the validation loss rises again after its best step. `never_better`: the
# validation loss was lowest before the first step.

# %%
table = []
for name, curve in files.read_json(display.CURVES).items():
    found = diagnose.examine(diagnose.Trained(curve["train"], curve["validation"]))
    seen = "; ".join(finding.symptom for finding in found.values())
    table.append({"training": tr(name.replace("_", " ")), "found": ", ".join(found) or "healthy", "seen": seen or "both losses fall"})
display.show_table(table)

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
# Bad answers often come from bad rows. Here is the check of lesson 02 on its file of broken ones; the table has the last eight.
# Lesson 02 looked at one row at a time and found 26 that cannot be used; this check sees the whole file, and finds 27: the last line is
# the first one again. `python -m nbutils data check FILE` does the same with yours.

# %%
from nbutils.data.check import check

checked = check([str(files.SAMPLES / "broken_rows.jsonl")])
table = []
for problem in checked.card.problems[-8:]:
    kind = tr(problem.kind).replace("_", " ")
    table.append({"line": problem.line, "where": problem.field, "what is wrong": kind, "seen": problem.seen, "what to do": problem.todo})
display.show_table(table, text=str(checked))
print(f"{checked.card.rows} rows, {checked.card.rejected} of them cannot be used")

# %% [markdown]
# ## Exercise: three curves
#
# Three trainings of 60 steps. Name each by one of `"healthy"`, `"flat"`, `"diverging"` and `"overfitting"`, and put the three words into
# `my_names`, as in `["flat", "flat", "healthy"]`. Look at the numbers on the left, too.

# %% tags=["exercise"]
from nbutils import exercises

steps = range(0, 61, 3)
panels = {
    "curve 1": {"training": [(step, 0.5 + 1.7 * 0.92**step) for step in steps],
                "validation": [(step, 0.65 + 1.6 * 0.92**step) for step in steps]},
    "curve 2": {"training": [(step, 0.1 + 2.0 * 0.93**step) for step in steps],
                "validation": [(step, 0.8 + 1.4 * 0.85**step + 0.012 * step) for step in steps]},
    "curve 3": {"training": [(step, 2.2 - 0.001 * step + 0.03 * (-1) ** step) for step in steps],
                "validation": [(step, 2.3 - 0.001 * step) for step in steps]},
}
display.plot_panels(panels)
my_names = None
lesson.check(exercises.named_curves, my_names)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# my_names = ["healthy", "overfitting", "flat"]
# ```
#
# Curve 1 falls twice, and stays down. In curve 2 the validation loss is lowest at step 18; from there on the model learns its rows by
# heart. Curve 3 has lost 3 % in 60 steps.
#
# </details>

# %% [markdown]
# ## Exercise: three messages
#
# Which cause has each message? Put three letters into `my_causes`, as in `["d", "d", "b"]`. One of the four is not needed.
#
# - **a**: the GPU's memory is full
# - **b**: the machine's memory (RAM) is full, and the system ended the process
# - **c**: a token has a number that the model does not know: the tokenizer belongs to another model
# - **d**: the model is not on this machine, and its hub cannot be reached

# %% tags=["exercise"]
messages = [
    """Traceback (most recent call last):
  File "train.py", line 41, in <module>
    trainer.train()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has a total capacity of 14.56 GiB of which 1.02 GiB is free.""",
    """Indexing.cu:1553: indexSelectSmallIndex: Assertion `srcIndex < srcSelectDimSize` failed.
torch.AcceleratorError: CUDA error: device-side assert triggered
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.""",
    """  File "train.py", line 12, in <module>
    tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-4B-Instruct-2507")
OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached files.""",
]
print(*messages, sep="\n\n")
my_causes = None
lesson.check(exercises.named_causes, my_causes)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# my_causes = ["a", "c", "d"]
# ```
#
# The second one is the message of the tiny model above, as a GPU words it: `srcIndex` is the number of the token, `srcSelectDimSize` the size
# of the vocabulary. `diagnose.show(diagnose.explain(messages[0]))` says what to do about the first.
#
# </details>

# %% [markdown]
# ## Question
#
# Both losses look healthy, and the answers are bad all the same. Where do you look first? Put `"a"`, `"b"` or `"c"` into `my_choice`.
#
# - **a**: at the learning rate
# - **b**: at the rows the model was trained on
# - **c**: at the GPU

# %% tags=["exercise"]
my_choice = None
lesson.check(exercises.quiz, my_choice, lesson.stem)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# my_choice = "b"
# ```
#
# </details>

# %% [markdown]
# ## You now have
#
# - a full check of this machine, with what to do about each finding,
# - the cause of an error message, and the next step,
# - what the loss curve of a training says about it.
#
# `docs/faq.md` lists every symptom that this course recognises. If none of this helped: run `python -m nbutils doctor --json`, and
# ask with its output and the whole error message. Secrets are masked in both.

# %%
lesson.finish(report, findings=", ".join(findings) or "none")
