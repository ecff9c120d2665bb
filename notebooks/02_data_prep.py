# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 02 · Data you can trust
#
# Most failed fine-tunes fail here: a column with another name, an empty answer, a stop token that is never trained. This
# lesson finds such rows by line number before a GPU is paid for.
#
# You will have
#
# - `train.jsonl` and `eval.jsonl`: checked chat rows without duplicates and near duplicates, split by their content,
# - `rejected.jsonl`: every row that was refused, with its line, its field and what to do about it,
# - a data card (JSON, and a page to read): counts, languages, lengths, and a fingerprint that later lessons verify,
# - proof that exactly the answers are trained, and that each ends with a token generation stops at.
#
# Takes less than a minute for the bundled sample and about two minutes per million rows. Disk: three times the data.

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
# `DATA` is a file (`.jsonl`, `.json`, `.csv`, `.tsv`, `.parquet`, also as `.gz` or `.zst`), a folder of them, or a dataset of
# the hub as `owner/name`; empty means what the profile names, mostly the bundled sample. `EVAL_DATA` names rows to be held back; empty lets the lesson hold
# back a tenth of `DATA`. `COLUMNS` is for columns with names of your own: `"user=title+body, assistant=reply"`; leave it
# empty first, the lesson asks if it needs it. Other data, other `RUN_NAME`.

# %% tags=["parameters"]
PROFILE: str = "auto"
MODEL: str = ""
DATA: str = ""
EVAL_DATA: str = ""
COLUMNS: str = ""
RUN_NAME: str = ""

# %% [markdown]
# Starting finds the platform, the card and the run folder.

# %%
import nbutils

lesson = nbutils.start("02_data_prep", globals())

# %% [markdown]
# ## Look first
#
# Three raw rows of your data, phone numbers and the like masked. The bundled sample asks for a small, strict thing: a customer's
# message, Chinese or English, becomes a one-line JSON ticket. Such a task shows at a glance whether a tune worked.

# %%
from itertools import islice
from nbutils import data, paths

source = lesson.profile.data.source
for row in islice(data.read_rows(DATA or source or paths.SAMPLES / "train.jsonl"), 3):
    print(f"{row.file} line {row.line}: {data.private.mask(str(row.raw))[:600]}\n")

# %% [markdown]
# ## One shape for all
#
# Data comes in many shapes: alpaca, ShareGPT, OpenAI messages, prompt and completion, question and answer, with English or
# Chinese column names. All of them become `messages`, the one shape chat templates understand.

# %%
shapes = [
    {"instruction": "Translate.", "input": "你好", "output": "Hello"},
    {"conversations": [{"from": "human", "value": "你好"}, {"from": "gpt", "value": "Hello"}]},
    {"问题": "你好", "答案": "Hello"},
]
for raw in shapes:
    print(list(raw), "->", data.check_row(data.Row("shapes", 1, raw)).messages)

# %% [markdown]
# ## Broken rows
#
# `broken_rows.jsonl` holds a row for each mistake people make most, and one sound row twice. Read the table once; you will meet
# half of it in your own data. A bad line never hides the next one, so one pass shows everything.

# %%
broken = [data.check_row(row) for row in data.read_rows(paths.SAMPLES / "broken_rows.jsonl")]
refused = [row for row in broken if isinstance(row, data.RowError)]
data.show_problems(refused)
print(f"{len(broken)} rows read, {len(refused)} refused, {len(broken) - len(refused)} sound")

# %% [markdown]
# ## Prepare
#
# Now the real data: check every row, drop repeated ones, split, count. The side a row falls on depends on its question
# alone (case, width and punctuation do not count), so adding rows later never moves old ones, and no question is both
# learned and tested. One exception: where so few rows leave `eval` empty, `train` lends it one, and the card says so; with
# more rows it may go back. A profile's `data.rows` takes a smaller set for an experiment (20,000, 50,000, 100,000): the
# smaller always lies inside the larger, `eval` stays the same.

# %%
card = data.prepare(
    DATA, lesson.run.data, default=source, eval_source=EVAL_DATA, columns=COLUMNS, rows=lesson.profile.data.rows
)
print(card)

# %% [markdown]
# A *near duplicate* says what another row says: same numbers and symbols, and both question and answer share 80 % or more of
# their three-character pieces with those of the other; case, width, blanks and punctuation do not count. It teaches nothing new,
# and in `eval` it makes a model look better than it is: `near_leak`. Many rows that fill in one form stay, counted as
# `templated` among the warnings. Here is what became of every row.

# %%
import matplotlib.pyplot as plt

fate = {"train": card.train, "eval": card.eval, "unused": card.unused, **card.reasons}
figure, axes = plt.subplots(figsize=(7, 0.8 + 0.3 * len(fate)))
colours = ["tab:blue"] * 3 + ["tab:orange"] * len(card.reasons)
axes.bar_label(axes.barh(list(fate), list(fate.values()), color=colours), padding=3)
axes.invert_yaxis()
axes.margins(x=0.12)
axes.set(title=f"{card.rows} rows, {card.rejected} of them rejected", xlabel="rows")
lesson.run.logs.mkdir(parents=True, exist_ok=True)
figure.savefig(lesson.run.logs / "rows.png", bbox_inches="tight")

# %% [markdown]
# Nothing disappears silently: `rows = accepted + rejected`. These are the first refused rows of your data, if there are any.

# %%
import json

with open(lesson.run.data / "rejected.jsonl", encoding="utf-8") as file:
    for entry in map(json.loads, islice(file, 5)):
        for problem in entry["problems"][:1]:
            print(f"{entry['file']} line {entry['line']}, {problem['field']}: {problem['kind']} -> {problem['todo']}")
print(f"{card.rejected} rows refused")

# %% [markdown]
# Rows that are kept but worth a look: phone and identity numbers, e-mail addresses, keys (a model can repeat what it was
# trained on), and text that was repaired. What is shown is masked; whether it may stay is yours to decide.

# %%
for kind, count in card.warnings.items():
    print(f"{count:6d} rows: {kind}")
print(*card.examples or ["nothing to warn of"], sep="\n")

# %% [markdown]
# Reading the rows back compares them with the card first. Edit a file by hand, and this cell refuses it.

# %%
train_rows, eval_rows = data.load(lesson.run.data)
print(f"{len(train_rows)} rows to train on, {len(eval_rows)} held back, fingerprint {card.fingerprint[:12]}")

# %% [markdown]
# ## What is trained
#
# The chat template turns messages into the text a model reads. Only the answer may carry the loss, and its last token must
# be one that generation stops at; otherwise the model never stops talking. Here are the trained tokens of one row, one
# without private data if there is such a row.

# %%
from transformers import AutoTokenizer
from nbutils import chat

tokenizer = AutoTokenizer.from_pretrained(lesson.model, trust_remote_code=False)
row = data.row_to_show(train_rows)
chat.show_row(tokenizer, row["messages"], tools=row.get("tools"))

# %% [markdown]
# The server will build the same text up to the answer. Compare this with the part above that is not trained.

# %%
asked = row["messages"][:-1]
print(tokenizer.apply_chat_template(asked, tools=row.get("tools"), tokenize=False, add_generation_prompt=True))

# %% [markdown]
# ## Lengths
#
# A row longer than `max_length` would be cut, and with its end goes the stop token: such rows are left out, not cut, and
# stand in `too_long.jsonl`. If they are many, raise `train.max_length` in the profile (memory grows with it) or shorten them.

# %%
fitting = chat.fitting(tokenizer, train_rows, lesson.profile.train.max_length)
fitting.write(lesson.run.data)
print(fitting)

# %% [markdown]
# If all rows are far below `max_length`, a smaller value saves memory and loses nothing.

# %%
import numpy

tokens = [len(example.ids) for example in fitting.examples] + [one.tokens for one in fitting.long if one.stop_lost]
for share in (50, 90, 99, 100):
    print(f"{share:3d} % have at most {numpy.percentile(tokens, share):.0f} tokens")

# %% [markdown]
# The same as pictures: characters of all accepted rows from the card, tokens of what is trained beside `max_length`.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3))
left.bar(list(card.characters), list(card.characters.values()))
left.set(title="Characters per row", ylabel="rows")
left.tick_params(axis="x", rotation=45)
right.hist(tokens, bins=30)
right.axvline(fitting.max_length, color="tab:red", linestyle="--", label=f"max_length {fitting.max_length}")
right.set(title="Tokens per training example", ylabel="examples")
right.legend()
figure.savefig(lesson.run.logs / "lengths.png", bbox_inches="tight")

# %% [markdown]
# ## The contract
#
# The same check for every row: the prompt is the beginning of the training text, every token of each answer is trained and
# nothing else, and the stop token is one the generation config names. A row that breaks it stops the run, by its number.

# %%
stop_ids = chat.find_stop_ids(tokenizer, lesson.model)
report = chat.check_contract(tokenizer, fitting, fitting.max_length, stop_ids)
print(report)

# %% [markdown]
# ## Exercise
#
# Mend this row so that it can be trained on. It has two mistakes.

# %%
MY_ROW = {
    "messages": [
        {"role": "customer", "content": "Where is order 2041?"},
        {"role": "assistant", "content": ""},
    ]
}

# %% [markdown]
# The check says what it saw, what it expected and what to try.

# %%
found = data.problems_of(MY_ROW)
print(f"[{'TODO' if found else ' OK '}] saw {len(found)} problems, expected none")
for problem in found:
    print(f"  {problem.field}: {problem.kind}, {problem.seen} -> {problem.todo}")

# %% [markdown]
# ## You now have
#
# - `train.jsonl` and `eval.jsonl`: checked chat rows without duplicates and near duplicates, split by their content,
# - `rejected.jsonl`: every row that was refused, with its line, its field and what to do about it,
# - a data card (JSON, and a page to read): counts, languages, lengths, and a fingerprint that later lessons verify,
# - proof that exactly the answers are trained, and that each ends with a token generation stops at.
#
# Lesson 03 trains on them.

# %%
lesson.finish(
    rows=card.rows,
    accepted=card.accepted,
    rejected=card.rejected,
    train=card.train,
    eval=card.eval,
    fingerprint=card.fingerprint,
    warnings=card.warnings,
    longest_row_tokens=fitting.longest,
    rows_too_long=len(fitting.left_out),
)
