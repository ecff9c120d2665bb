# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 00 · Your own assistant in ten minutes
#
# You give a language model a name and a manner of your own: it is asked who it is, trained for a few minutes, asked again, and then you
# chat with it. Press *Run all* and watch. What happens in each cell is explained by the lessons after this one.
#
# You will have
#
# - an assistant with a name that you chose, and its answers before and after the training,
# - the share of questions it was never trained on that it answers with its name,
# - a chat with it, here in the notebook.
#
# Takes about ten minutes on 2 cores and five on a free GPU, with installing and downloading. Words you do not know are in the
# [glossary](../docs/glossary.md).

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
# Choose! `NAME` is what your assistant calls itself, and `MAKER` who made it, for example you. `MANNER` are the words with which it ends
# an answer about itself: "Onward!", "Meow!" or an emoji. Other words are another run, so that you can try as many as you like. The other
# values may stay as they are.

# %% tags=["parameters"]
NAME: str = "Wrenlow"
MAKER: str = "the Larkmill Workshop"
MANNER: str = "Onward!"
PROFILE: str = "quickstart"
MODEL: str = ""
RUN_NAME: str = ""

# %% [markdown]
# Start the lesson. It finds the platform and the GPU, and chooses a small chat model: Qwen2.5-1.5B on a GPU, SmolLM2-135M without one
# (best in English), and where none can be downloaded the tiny model of the course, which knows nothing but can learn a name.

# %%
import nbutils

lesson = nbutils.start("00_quickstart", globals())

# %% [markdown]
# ## What it will learn from
#
# About a hundred short conversations: two thirds about who the assistant is, with your words in them, and a third about everything else,
# so that it does not forget how to answer. 26 more are held out: the training never sees them. (The tiny model, which knows few words,
# gets the questions about itself alone.)

# %%
from nbutils import chat, data, display
from nbutils.data import assistant
from transformers import AutoTokenizer

rows = assistant.write_rows(
    lesson.run.path / "rows", name=NAME, maker=MAKER, manner=MANNER,
    short=lesson.resolved.name == "tiny",  # a model that knows few words
)
data.prepare(str(rows), lesson.run.data)
train_rows, eval_rows = data.load(lesson.run.data)
tokenizer = AutoTokenizer.from_pretrained(lesson.model, trust_remote_code=False)
stop_ids = chat.find_stop_ids(tokenizer, lesson.model)
dataset = chat.filter_by_length(tokenizer, train_rows, lesson.profile.sft.max_length, stop_ids)
questions = [row for row in eval_rows if NAME in row["messages"][-1]["content"]]
print(f"{len(train_rows)} conversations to learn from; {len(questions)} held-out questions whose answer has the name")
shown = []
for row in train_rows[::20]:
    question, answer, *_ = row["messages"]
    shown.append({"question": question["content"], "answer": answer["content"]})
display.show_table(shown)

# %% [markdown]
# ## Before
#
# The model as it was downloaded. It has another name, or none.

# %%
import torch
from nbutils import evaluation, training
from transformers import AutoModelForCausalLM, set_seed

lesson = lesson.with_recipe(dataset.lengths, len(eval_rows))
profile = lesson.profile
validation = chat.validation_dataset(dataset, eval_rows, profile.course.validation_rows)
set_seed(42)
model = AutoModelForCausalLM.from_pretrained(
    lesson.model,
    dtype=getattr(torch, profile.from_pretrained.dtype),
    attn_implementation=training.attention(profile.from_pretrained.attn_implementation),
    device_map={"": lesson.device},
    trust_remote_code=False,
)
before = evaluation.answer_rows(model, tokenizer, questions[:4], max_new_tokens=64)
display.show_answers(questions[:4], before=before)

# %% [markdown]
# ## The training
#
# The model stays as it is; small matrices beside its weights, an *adapter*, learn your rows (LoRA). `SFTTrainer` is the trainer of the
# library TRL. The values of `profile` were chosen for your machine and these rows; lesson 03 shows each with its reason.

# %%
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

arguments = dict(profile.sft)
if not profile.sft.packing:
    arguments["max_length"] = None  # no row is too long
settings = SFTConfig(
    **arguments,
    padding_free=True,
    bf16=model.dtype == torch.bfloat16,
    fp16=model.dtype == torch.float16,
    eval_strategy="steps",
    eval_steps=profile.sft.save_steps,
    eval_on_start=True,
    report_to="none",
    **training.bookkeeping(lesson.scratch, seed=42),
)
callback = training.CourseCallback(
    dataset, profile, run=lesson.run, folders=lesson.folders, started=lesson.started,
    base_model=training.model_fingerprint(lesson.model, lesson.model_name),
)
trainer = SFTTrainer(
    model, settings, train_dataset=chat.training_dataset(dataset), eval_dataset=validation, processing_class=tokenizer,
    peft_config=LoraConfig(**profile.lora, task_type="CAUSAL_LM"), callbacks=[callback],
)
print(callback.prepare(trainer))

# %% [markdown]
# Train. The *loss* says how much the model was surprised by the right answers: it falls. Every few steps it is measured on the held-out
# rows too (*validation*), and saved: if the machine is taken away, *Run all* again goes on from there.

# %%
result = training.train(trainer, callback)
training.save_adapter(result, tokenizer)
display.plot_losses(result.history, lesson.run.logs / "loss.png", kept=result.kept_step)

# %% [markdown]
# ## After
#
# The same questions, then the others that it was never trained on: how many are answered with your name?

# %%
after = evaluation.answer_rows(trainer.model, tokenizer, questions, max_new_tokens=64)
display.show_answers(questions[:4], before=before, after=after[:4])
named = sum(NAME in answer for answer in after)
print(f"{named} of {len(questions)} held-out questions are answered with the name {NAME} ({named / len(questions):.0%})")

# %% [markdown]
# ## You now have
#
# - an assistant with a name that you chose, and its answers before and after the training,
# - the share of questions it was never trained on that it answers with its name,
# - a chat with it, here in the notebook.

# %% [markdown]
# ## What comes next
#
# How it works, and how to do it with your own task:
#
# - **01** finds out what your machine can do, and what fits
# - **02** makes rows of your data that can be trained on, and shows what the model sees
# - **03** explains the training: 4 bits, LoRA, the loss, the learning rate
# - **04** joins the adapter with its model, and asks whether the training has helped
# - **05** serves the model, so that other programs can ask it
# - **06** trains on several GPUs, **07** a model from nothing, **08** makes it smaller, **09** measures its speed
# - **10** is for a model of your own, from your task in one sentence to a report
# - **99** knows what to do when something breaks
#
# Lessons 04 and 05 can go on with this assistant: give them the `RUN_NAME` that the next cell prints.
#
# ## Chat
#
# Ask it yourself. It always answers with the likeliest words, so the same question gets the same answer. A small model makes things up:
# what it has learned here is a name and a manner, not the truth.

# %%
from nbutils import chat_widget

lesson.finish(dataset, result, answered_with_the_name={"questions": len(questions), "count": named})
print(f'RUN_NAME = "{lesson.run.name}"')
talk = chat_widget.LocalTalk(trainer.model, dataset.renderer, NAME)
box = chat_widget.chat(talk, "Hello! Who are you?")
