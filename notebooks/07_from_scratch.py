# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 07 · A base model of your own, from scratch
#
# Fine-tuning starts from a model that already knows a language. This lesson makes such a base model: text, tokenizer, an
# untrained network, and the trainer of lesson 03 around it. Without `DATA` the text is the course's own, and the result is a
# smaller sister of the bundled tiny model; with `DATA` it is yours, for minutes or for a night on a GPU.
#
# You will have
#
# - a tokenizer, and your text as rows of its tokens,
# - a Qwen2 model of your width and depth, trained on them from random weights,
# - its loss and perplexity on held-out text, and how it continues a text before and after,
# - a folder that the other lessons accept as `MODEL`.
#
# Takes two to three minutes on two CPU cores and 0.1 GB of disk with these defaults. A forecast below says what your settings take on
# a GPU, before you rent one.

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
# `DATA` names text files (`.txt`, `.md`), `.jsonl` or `.csv` with a column `text` (all these also as `.gz`), `.parquet` with such a column,
# a folder of them, or a hub dataset (`owner/name`). Empty, it is the first `TEXTS` of the course's 20,000 texts. `TOKENIZER` names a model
# whose tokenizer is used (`Qwen3-4B`, a hub name, a folder); empty, one of `VOCAB` tokens is trained on your text. `WIDTH` is a multiple
# of 128. A step is `BATCH` rows of `LENGTH` tokens. `STEPS = 0` is one epoch of your text, or 300 steps of the course's. `SAVE_STEPS`,
# `MAX_HOURS`, `RESUME` and `SET` are those of lesson 03.

# %% tags=["parameters"]
PROFILE: str = "tiny"
RUN_NAME: str = "from_scratch"
DATA: str = ""
TOKENIZER: str = ""
WIDTH: int = 128
DEPTH: int = 2
LENGTH: int = 128
BATCH: int = 16
STEPS: int = 0
VOCAB: int = 2048
TEXTS: int = 20000
SAVE_STEPS: int = 0
MAX_HOURS: float = 0.0
RESUME: str = "auto"
SEED: int = 0
SET: str = ""

# %% [markdown]
# Start the lesson. Of the profile it uses only what depends on the machine, such as the precision; the model it names is not used.

# %%
import nbutils
from nbutils.training import pretraining

lesson = nbutils.start("07_from_scratch", globals())
pretraining.require_sizes(WIDTH, DEPTH, VOCAB)

# %% [markdown]
# ## Text
#
# A model learns to write like the text it is trained on. The course's text is generated: dialogues with a shop, stories, sums,
# translation, in Chinese and English. Its shop always answers in prose; a JSON ticket never occurs, so that lesson 03 has
# something to teach.

# %%
from itertools import islice

texts = pretraining.Texts(DATA, TEXTS, SEED)
for text in islice(texts, 4):
    print(text[:400], end="\n\n")

# %% [markdown]
# ## Tokenizer
#
# Byte-level BPE: start with the 256 bytes, then merge the most frequent pair of adjacent tokens, again and again, until there
# are `VOCAB` tokens. Any text can be written with it; frequent words cost one token. A large vocabulary makes rows shorter and
# the model larger: each token has its own row of `WIDTH` numbers. 2,048 suit the course's text, 16,000 to 32,000 a real one.
#
# The library is `tokenizers`. A pre-tokenizer cuts the text into pieces, and only tokens of one piece are merged: Qwen's cuts at
# spaces, punctuation and digits. The trainer counts and merges. Of your text it reads a sample of up to 50 MB.

# %%
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # their ids are 0, 1, 2 at every size
bpe = Tokenizer(models.BPE())
bpe.pre_tokenizer = pre_tokenizers.Sequence([
    *(pre_tokenizers.Split(token, "removed") for token in special),  # they are no text
    Qwen2Tokenizer().backend_tokenizer.pre_tokenizer,  # words, numbers, punctuation; each as bytes
])
alphabet = pre_tokenizers.ByteLevel.alphabet()
bpe_trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
if not TOKENIZER:
    bpe.train_from_iterator(texts.sample(), bpe_trainer)

# %% [markdown]
# What was learned is a vocabulary and a list of merges in their order. `transformers` wraps them as the tokenizer of Qwen2 models, with
# the tokens that end a turn and fill a batch, and a chat template, so that the later lessons can use it.

# %%
import json
from nbutils.models import load_tokenizer

if TOKENIZER:
    tokenizer = load_tokenizer(TOKENIZER, "TOKENIZER")
else:
    learned = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(pair) for pair in learned["merges"]],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=pretraining.CHAT_TEMPLATE,
        model_max_length=max(1024, LENGTH),
    )
ids = tokenizer("Please send 3 boxes of apples to Hangzhou. 请周五送到杭州。")["input_ids"]
print(len(tokenizer), "tokens;", [tokenizer.decode([i]) for i in ids])

# %% [markdown]
# The documents are laid end to end, with a separator after each, and cut into rows of `LENGTH` tokens: none is lost, none is
# padding. `datasets` does it with `map`, 64 documents at a time; an `IterableDataset` reads them when they are needed, so a text may
# be larger than the memory. The rows are written to disk once. Up to 64 of them, from everywhere in the text, are held out,
# to measure the loss on text the model has not seen.

# %%
from datasets import IterableDataset

separator = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
rest = []


def cut_into_rows(batch: dict) -> dict:
    for ids in tokenizer(batch["text"], add_special_tokens=False, verbose=False)["input_ids"]:
        rest.extend([*ids, separator])
    end = len(rest) - len(rest) % LENGTH
    rows = [rest[at : at + LENGTH] for at in range(0, end, LENGTH)]
    del rest[:end]  # the next batch begins with what is left
    return {"input_ids": rows, "labels": rows}


documents = IterableDataset.from_generator(texts.documents)
stream = documents.map(cut_into_rows, batched=True, batch_size=64, remove_columns=["text"])
rows = pretraining.write_rows(stream, texts, tokenizer, LENGTH, lesson.scratch)
print(rows)

# %% [markdown]
# ## Model
#
# The architecture of Qwen2.5, only small: attention heads of 64, two for the queries to each one for keys and values, an MLP of two
# and a half times the width, and one embedding matrix for input and output (`tie_word_embeddings`).

# %%
from transformers import Qwen2Config

sizes = {"vocab_size": len(tokenizer), "hidden_size": WIDTH, "intermediate_size": WIDTH * 5 // 2, "num_hidden_layers": DEPTH}
heads = {"num_attention_heads": WIDTH // 64, "num_key_value_heads": WIDTH // 128, "max_position_embeddings": max(1024, LENGTH)}
ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
config = Qwen2Config(**sizes, **heads, **ends, tie_word_embeddings=True)
print(pretraining.shape_of(config))

# %% [markdown]
# ## The recipe, and what it takes
#
# Arguments of `SFTConfig`; `SET` replaces any of them. Wider models need a smaller learning rate, so it depends on the width. It rises
# for a tenth of the steps (at most 100), then falls along a cosine; there are ten checkpoints. The table is a forecast from `plan`: for
# your GPU, or, if you have none, for two that are rented often; *rows* is how many are computed at a time. A base model wants about 20
# tokens for each parameter; with far fewer it learns the words but not the language, and after many epochs it learns your text by
# heart.

# %%
import math

steps = STEPS or (300 if texts.bundled else math.ceil(len(rows.train) / BATCH))
recipe = {
    "max_length": LENGTH,
    "max_steps": steps,
    "num_train_epochs": 0.0,
    "learning_rate": float(f"{0.5 / WIDTH:.1e}"),
    "lr_scheduler_type": "cosine",
    "warmup_steps": min(0.1, 100 / steps),
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
    "optim": "adamw_torch_fused",
    "packing": False,
    "activation_offloading": False,
    "use_liger_kernel": False,
    "logging_steps": max(1, min(10, steps // 100)),
    "save_steps": SAVE_STEPS or max(1, min(500, math.ceil(steps / 10))),
    "save_total_limit": 2,
    "load_best_model_at_end": True,
}
profile = pretraining.with_recipe(lesson.resolved, config, recipe, batch=BATCH, held_out=len(rows.eval))
print(f"{profile.sft.max_steps:,} steps, {profile.sft.max_steps * BATCH / len(rows.train):.2g} epochs; learning rate {profile.sft.learning_rate:g}")

# %% [markdown]
# The weights are random numbers, and a seed makes them the same random numbers each time. They stay float32 while they are
# trained; on a GPU the matrix products are computed in 16 bits.

# %%
import torch
from transformers import Qwen2ForCausalLM, set_seed

set_seed(SEED)
config._attn_implementation = "sdpa"
model = Qwen2ForCausalLM(config).to(lesson.device)
print(f"{model.num_parameters():,} parameters on {model.device}")

# %% [markdown]
# The loss is the mean of -log p, where p is the probability the model gave to the token that came next. An untrained model finds
# all tokens about equally likely, so its loss is near log(vocabulary). Perplexity is e to the power of the loss: among how many
# tokens the model hesitates.

# %%
row = torch.tensor([rows.eval[0]["input_ids"]], device=model.device)
with torch.no_grad():
    logits = model(input_ids=row).logits
loss = torch.nn.functional.cross_entropy(logits[0, :-1].float(), row[0, 1:]).item()
print(f"loss {loss:.2f}, perplexity {math.exp(loss):,.0f}; log({len(tokenizer)}) is {math.log(len(tokenizer)):.2f}")

# %% [markdown]
# How does it continue a text before training? The prompts are the first 24 tokens of three held-out rows. `do_sample=False` takes the
# most likely token each time, so the answer is always the same. It repeats one or two tokens.

# %%
prompts = torch.tensor(rows.eval[:3]["input_ids"], device=model.device)[:, :24]
options = {"attention_mask": torch.ones_like(prompts), "max_new_tokens": 40, "do_sample": False, "pad_token_id": separator}
before = tokenizer.batch_decode(model.eval().generate(prompts, **options)[:, prompts.shape[1] :])
print(*map(repr, before), sep="\n")

# %% [markdown]
# ## Training
#
# The settings of lesson 03 with other values: AdamW with weight decay, a rate that warms up to its peak and falls along a cosine,
# micro-batches that add up to `BATCH`. Nothing is packed, because every row is full already.

# %%
from nbutils import tracking, training
from trl import SFTConfig

settings = SFTConfig(
    **dict(profile.sft) | {"max_length": None, "report_to": tracking.report_to(profile.sft, lesson.scratch)},
    adam_beta2=0.95,  # usual for pre-training; the default of 0.999 adapts more slowly
    bf16=profile.from_pretrained.dtype == "bfloat16",
    fp16=profile.from_pretrained.dtype == "float16",
    eval_strategy="steps",
    eval_steps=profile.sft.save_steps,
    eval_on_start=True,
    **training.bookkeeping(lesson.scratch, SEED),
)

# %% [markdown]
# The callback of lesson 03 measures the loss on held-out rows at each save, copies each checkpoint to the run folder and verifies it,
# ends the run before its time is up, and stops when the held-out loss no longer falls.

# %%
from transformers import EarlyStoppingCallback
from trl import SFTTrainer

callback = pretraining.PretrainingCallback(
    rows, profile, run=lesson.run, folders=lesson.folders, started=lesson.started, max_hours=MAX_HOURS,
)
trainer = SFTTrainer(
    model=model,
    args=settings,
    train_dataset=rows.train,
    eval_dataset=rows.eval,
    processing_class=tokenizer,
    callbacks=[callback, EarlyStoppingCallback(profile.course.early_stopping_patience)],
)
print(callback.prepare(trainer))

# %% [markdown]
# Train. If the machine is taken away, run this notebook again, unchanged: it continues from its newest checkpoint that verifies,
# with the rows in the same order.

# %%
result = training.train(trainer, callback, resume=RESUME)
print(result)
losses = [loss for _, loss in result.history["validation"]]
print(f"perplexity on held-out rows: {math.exp(losses[0]):,.0f} -> {math.exp(min(losses)):,.1f}")

# %% [markdown]
# The curve begins near log(vocabulary) and falls while the model learns words, then sentences, then copying. Where the training
# loss goes on falling and the held-out loss rises, the text is too short for the model.

# %%
from nbutils import display

display.plot_losses(result.history, lesson.run.logs / "loss.png", title="Pre-training loss")

# %% [markdown]
# The same texts again. A short run learns the style but not yet the facts; more text, steps, width and depth help.

# %%
after = tokenizer.batch_decode(model.eval().generate(prompts, **options)[:, prompts.shape[1] :])
asked = tokenizer.batch_decode(prompts)
display.show_table([{"text": a, "before": repr(b), "after": repr(c)} for a, b, c in zip(asked, before, after, strict=True)])

# %% [markdown]
# ## Save
#
# Weights in bfloat16, tokenizer with its chat template, in a folder that gets its name once it is complete. Lesson 03 fine-tunes this folder like any other base model, with this path as
# `MODEL`. What it can learn there depends on what it read here: a model that has never seen a dialogue needs more rows.

# %%
from nbutils import disk, files

folder = lesson.run.path / "base"
with files.complete_folder(folder, result.stamp()) as place:
    model.save_pretrained(place, state_dict={name: weight.to(torch.bfloat16) for name, weight in model.state_dict().items()})
    tokenizer.save_pretrained(place)
print(f"{folder}: {disk.folder_gib(folder) * 1024:.1f} MiB")

# %% [markdown]
# ## Exercise
#
# Write a sentence of at least five tokens that your model finds easy: a loss below 4.0. Which words does it know well?

# %%
sentence = ""
ids = torch.tensor([[separator, *tokenizer(sentence, add_special_tokens=False)["input_ids"]]], device=model.device)
with torch.no_grad():
    saw = trainer.model(input_ids=ids, labels=ids).loss.item()
good = ids.shape[1] > 5 and saw < 4.0
found = f"{sentence!r} with a loss of {saw:.2f}" if sentence else "no sentence yet"
hint = ": try words from the texts above" if sentence and not good else ""
print(f"[{' OK ' if good else 'todo'}] exercise: saw {found}, expected one with a loss below 4.0{hint}")

# %% [markdown]
# ## You now have
#
# - a tokenizer, and your text as rows of its tokens,
# - a Qwen2 model of your width and depth, trained on them from random weights,
# - its loss and perplexity on held-out text, and how it continues a text before and after,
# - a folder that the other lessons accept as `MODEL`.
#
# The last cell writes the numbers to `facts.json`.

# %%
lesson.finish(rows, result, parameters=model.num_parameters(), base=str(folder))
