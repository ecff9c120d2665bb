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
# Most failed fine-tunes fail here: a column with another name, an empty answer, a sign for *the end* that the model never learns. This lesson
# finds such rows by line number, before you pay for a GPU.
#
# You will have
#
# - `train.jsonl` and `eval.jsonl`: checked chat rows without duplicates, split by content,
# - `rejected.jsonl`: every row that was left out, with its line, its field and what to do about it,
# - a data card with counts, languages, lengths and a fingerprint that later lessons verify,
# - proof that exactly the answers are trained, and that each ends with a stop token.
#
# Takes less than a minute for the bundled sample, and about two minutes per million rows. Disk: three times your data.
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
# `DATA` is a file (`.parquet` or `.jsonl`, `.json`, `.csv`, `.tsv`, these also as `.gz` or `.zst`), a folder of them, with subfolders,
# or a hub dataset (`owner/name`); empty means the bundled sample. `EVAL_DATA` names a separate evaluation set; if it is empty,
# about a tenth of `DATA` is held out, and at least one row (of a small file that is more than a tenth), unless `DATA` has an eval,
# test or valid file or folder of its own, as the bundled sample has (120 rows). `COLUMNS` is for your own column names,
# `"user=title+body, assistant=reply"`; every row must have them then. Use another `RUN_NAME` for other data.

# %% tags=["parameters"]
PROFILE: str = "auto"
MODEL: str = ""
DATA: str = ""
EVAL_DATA: str = ""
COLUMNS: str = ""
RUN_NAME: str = ""

# %% [markdown]
# Start the lesson.

# %%
import nbutils

lesson = nbutils.start("02_data_prep", globals())

# %% [markdown]
# ## Look first
#
# Three rows, as question and answer. A *row* is one example to learn from. The bundled sample asks for something small and strict: a
# customer's message, in Chinese or English, becomes a JSON ticket on one line. A task like this shows at a glance whether the training
# worked.

# %%
from itertools import islice
from nbutils import data, files

source = DATA or lesson.profile.course.data or files.SAMPLES / "train.jsonl"
for raw in data.own_language_first(islice(data.read_rows(source), 30))[:3]:
    data.show(raw, COLUMNS)

# %% [markdown]
# ## A good row and a bad one
#
# A good answer is complete, consistent with all the others, and what you would want to read. The bad row's question lacks what
# the answer needs, and its answer has another format: a model trained on it learns to guess. No program can find this for you.

# %%
from nbutils import display

good = {"question": "Where are my 26 bottles of juice for Wuxi?",
        "answer": '{"intent": "delivery", "item": "juice", "count": 26, "city": "Wuxi", "day": null}'}
bad = {"question": "Where is it?", "answer": "Your 26 bottles of juice will arrive in Wuxi soon!"}
table = [{"row": "good", **good}, {"row": "bad", **bad}]
display.show_table(table)

# %% [markdown]
# ## One format for all
#
# Data comes in many formats: alpaca, ShareGPT, question and answer, with English or Chinese column names. All of them
# become `messages`, the format that chat templates read.

# %%
formats = [
    {"instruction": "Translate.", "input": "你好", "output": "Hello"},
    {"conversations": [{"from": "human", "value": "你好"}, {"from": "gpt", "value": "Hello"}]},
    {"问题": "你好", "答案": "Hello"},
]
for example in formats:
    print(list(example), "->", data.check_row(data.Row("example", 1, example)).messages)

# %% [markdown]
# ## Broken rows
#
# `broken_rows.jsonl` holds the mistakes people make most often. Here are six of them, with what the check says. A bad line
# never hides the next one, so one pass finds them all.

# %%
checked = [data.check_row(row) for row in data.read_rows(files.SAMPLES / "broken_rows.jsonl")]
broken = [row for row in checked if isinstance(row, data.RowError)]
data.show_problems(broken[1:7])
print(f"{len(checked)} rows, {len(broken)} of them cannot be used")

# %% [markdown]
# ## Your own file
#
# A spreadsheet saved as CSV is enough. To train on it, put its path into `DATA` above and run the lesson again.

# %%
mine = lesson.scratch / "mine.csv"
mine.parent.mkdir(parents=True, exist_ok=True)
mine.write_text("question,answer\nWhere is order 2041?,It left our warehouse today.\n", encoding="utf-8")
data.show(next(data.read_rows(mine)))

# %% [markdown]
# ## Prepare
#
# Now the real data: check every row, leave out duplicates, split, count. Whether a row is held out depends on its question
# alone. So rows you add later never move old ones, and no question is both trained on and tested. Few held-out rows prove
# little, whatever the training does, and the card says so. The first rejected rows of each reason follow, with file and line; the
# bundled sample has none. (The *fingerprint* changes if any row does.)

# %%
card = data.prepare(
    DATA, lesson.run.data, default=lesson.profile.course.data, eval_source=EVAL_DATA, columns=COLUMNS,
    rows=lesson.profile.course.rows,
)
card.show()
print(card.rejected_text(lesson.run.data / "rejected.jsonl"))

# %% [markdown]
# Does any row hold private data (phone numbers, e-mail addresses, keys)? A model can repeat what it was trained on. A *near duplicate*
# among the rejected rows says what another row says in almost the same words; in the held-out rows it would make a model look better
# than it is (`near_leak`).

# %%
print(*card.examples or ["no private data found"], sep="\n")

# %% [markdown]
# Reading the rows back compares them with the card. If you edit a file by hand, this cell refuses it.

# %%
train_rows, eval_rows = data.load(lesson.run.data)
print(f"{len(train_rows)} rows to train on, {len(eval_rows)} held out, fingerprint {card.fingerprint[:12]}")

# %% [markdown]
# ## What the model reads
#
# The chat template turns messages into text. This is what a server sends to the model when somebody asks, up to the answer.

# %%
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(lesson.model, trust_remote_code=False)
row = data.row_to_show(train_rows)
print(tokenizer.apply_chat_template(row["messages"][:-1], tools=row.get("tools"), tokenize=False, add_generation_prompt=True))

# %% [markdown]
# ## From text to labels
#
# A model reads no letters. A *tokenizer* cuts the text into *tokens*: words, parts of words, signs. Each token has a number, its *id*.
# The *labels* are what the model is trained to write: at each position the id of the token, or -100 where nothing is to be learned.
# Here is the row from the end of its question on: what belongs to the question is grey, the answer green. (A space is drawn as ·, a new line
# as ⏎.) The last green one is the *stop token*, the end of a message: a model that never learns to write it never stops writing.

# %%
from nbutils import chat, figures

stop_ids = chat.find_stop_ids(tokenizer, lesson.model)
examples = chat.filter_by_length(tokenizer, train_rows, lesson.profile.sft.max_length, stop_ids=stop_ids)
example = examples.examples[train_rows.index(row)]
first = max(0, example.trained.find(1) - 10)
ids, labels = list(example.ids)[first:][:50], example.labels[first:][:50]
figures.token_labels([tokenizer.decode([i]) for i in ids], ids, labels)

# %% [markdown]
# ## Exercise: labels
#
# Write the labels of another row by hand, from its beginning. `ids` are its tokens up to and with the stop token, and `first` is the
# position where the answer begins. `my_labels` must be a list as long as `ids`: -100 for every token of the question, the id itself for
# every token of the answer. In Python `[0] * 3` is `[0, 0, 0]`, and `ids[3:]` is everything from position 3 on.

# %% tags=["exercise"]
from nbutils import exercises

ids, first = examples.examples[-1].first_answer()
my_labels = None
lesson.check(exercises.labels, my_labels, ids, first, [tokenizer.decode([i]) for i in ids])

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# my_labels = [-100] * first + ids[first:]
# ```
#
# The loss is computed where the label is not -100. So the model learns to write the answer, and not to write questions.
#
# </details>

# %% [markdown]
# ## What is trained
#
# The whole row as the trainer sees it. The *loss* measures how unlikely the model finds the right next token; training makes it smaller. It
# is computed on the marked tokens only, and the last of them is the stop token. (The new line behind it belongs to the template, and is not
# trained.)

# %%
chat.show_row(tokenizer, row)

# %% [markdown]
# ## Lengths
#
# A row longer than `max_length` would lose its end, and with it the stop token. Such rows are left out, not cut, and listed in
# `too_long.jsonl`. If there are many, raise `sft.max_length` (it costs memory) or shorten them. The last line is a command: it forecasts
# memory, time and cost of this training on GPUs.

# %%
from statistics import mean
from nbutils import plan

examples.write_too_long(lesson.run.data)
figures.lengths(examples.lengths, examples.max_length, lesson.run.logs / "lengths.png")
print(examples)
print(plan.command(len(examples.lengths), mean(examples.lengths)))

# %% [markdown]
# ## The contract
#
# The text a server builds must be the beginning of the text that is trained; every token of every answer must be trained, and no other;
# each answer must end with a stop token. The check stops at the first row and token that break this. (Some models' templates allow no such
# check of whole conversations, `messages`. There each answer becomes an example of its own, `prompt_completion`.)

# %%
print(chat.check_contract(examples))

# %% [markdown]
# ## Exercise: mended rows
#
# Two rows with one mistake each. The messages of a row have the roles `user` (who asks) and `assistant` (who answers), in turn, and
# no text is empty. What is wrong is printed below the rows. Write both rows without their mistake. Their questions stay as they are.

# %% tags=["exercise"]
two_rows = [
    {"messages": [{"role": "customer", "content": "Where is order 2041?"}, {"role": "assistant", "content": "On its way."}]},
    {"messages": [{"role": "user", "content": "Is order 2042 paid?"}, {"role": "assistant", "content": ""}]},
]
for broken_row in two_rows:
    print(*data.problems_of(broken_row))
my_rows = None
lesson.check(exercises.mended_rows, my_rows, two_rows)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# my_rows = [
#     {"messages": [{"role": "user", "content": "Where is order 2041?"}, {"role": "assistant", "content": "On its way."}]},
#     {"messages": [{"role": "user", "content": "Is order 2042 paid?"}, {"role": "assistant", "content": "Yes, since Monday."}]},
# ]
# ```
#
# In the first row a role had a name of its own; in the second one the answer was empty, and would teach the model to say nothing.
#
# </details>

# %% [markdown]
# ## Exercise: rows of your own
#
# Write a list of three rows you would train on, each as `{"question": "…", "answer": "…"}`. They may teach a name, a style, or a task of
# your own. They must ask different things, and their answers must have one form: prose in all of them (three characters or more), or JSON
# with the same keys in all.

# %% tags=["exercise"]
my_own_rows = None
lesson.check(exercises.own_rows, my_own_rows)

# %% [markdown]
# <details><summary>Solution</summary>
#
# Any task will do; here is one.
#
# ```python
# my_own_rows = [
#     {"question": "Who are you?", "answer": "I am Ada, the assistant of the corner shop."},
#     {"question": "Do you sell umbrellas?", "answer": "I have no list of goods. Please call the shop."},
#     {"question": "Good morning!", "answer": "Good morning! What would you like to order?"},
# ]
# ```
#
# </details>

# %% [markdown]
# ## Question
#
# Why must the evaluation rows be held out before the training, and not after it? Put `"a"`, `"b"` or `"c"` into `my_choice`.
#
# - **a**: because there is no time left afterwards
# - **b**: because the model would have been trained on them
# - **c**: because the training is faster with fewer rows

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
# - `train.jsonl` and `eval.jsonl`: checked chat rows without duplicates, split by content,
# - `rejected.jsonl`: every row that was left out, with its line, its field and what to do about it,
# - a data card with counts, languages, lengths and a fingerprint that later lessons verify,
# - proof that exactly the answers are trained, and that each ends with a stop token.

# %%
lesson.finish(card, longest_row_tokens=examples.longest, rows_too_long=len(examples.too_long))
