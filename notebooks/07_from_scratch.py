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
# Fine-tuning starts from a base model, which already knows a language. It learned that in its *pre-training*: it read plain text, and
# was trained to predict each next token. This lesson does the same on a small scale: text, tokenizer, an untrained network, and the
# trainer of lesson 03 around it. Without `DATA` the text is the course's own, and the result is a smaller sister of the bundled tiny
# model; with `DATA` it is yours, for minutes or for a night on a GPU.
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
# `DATA` names text files (`.txt`, `.md`), `.jsonl` or `.csv` with a column `text` (all these also as `.gz`), `.parquet` with such a column,
# a folder of them, or a hub dataset (`owner/name`). Empty, it is the first `TEXTS` of the course's 20,000 texts. `TOKENIZER` names a model
# whose tokenizer is used (`Qwen3-4B`, a hub name, a folder); empty, one of `VOCAB` tokens is trained on your text. `WIDTH` is a multiple
# of 128. A step is `BATCH` rows of `LENGTH` tokens. `STEPS = 0` is one *epoch*, in which every row is trained on once, or 300 steps of the
# course's text. `SAVE_STEPS`,
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
# A *tokenizer* cuts text into tokens and gives each its number; the list of all tokens is its *vocabulary*. It is learned from text,
# here by *BPE* (byte-pair encoding): start with the 256 bytes, then merge the most frequent pair of adjacent tokens into a new one, again
# and again, until there are `VOCAB` tokens. Any text can be written with it; frequent words cost one token. A large vocabulary makes
# rows shorter and the model larger: each token has its own row of `WIDTH` numbers. 2,048 suit the course's text, 16,000 to 32,000 a
# real one.
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
# What does BPE do to a sentence? Each letter is a byte at first (a space is written `Ġ`; a Chinese character is three bytes). Then
# the merges are applied in the order in which they were learned. By hand: the first five that change this sentence, then all the others, and
# whether the tokenizer cuts it in the same way.

# %%
from nbutils import display, figures

sentence = "Send the tea to Hangzhou on Monday."
pieces, table = list(sentence.replace(" ", "Ġ")), []
for pair in [] if TOKENIZER else [["", ""], *learned["merges"]]:
    merged = []
    for piece in pieces:
        if merged and [merged[-1], piece] == list(pair):
            merged[-1] += piece
        else:
            merged.append(piece)
    if len(table) < 6 and (not table or len(merged) < len(pieces)):
        table.append({"merge": " + ".join(pair) if table else "-", "count": len(merged), "tokens": " | ".join(merged)})
    pieces = merged
display.show_table(table)
print(f"{len(pieces)} tokens:", " | ".join(pieces), "- equal:", pieces == tokenizer.tokenize(sentence))

# %% [markdown]
# ## Exercise: tokens of two sentences
#
# How many tokens does your tokenizer make of an English and of a Chinese sentence that say the same thing? Guess first: your answer is a pair
# such as `(20, 20)`, and the check says how near it is. Then count with `tokenizer.tokenize(...)`, which gives a list.

# %% tags=["exercise"]
from nbutils import exercises

sentences = "Please send 3 boxes of apples to Hangzhou on Friday.", "请周五把三箱苹果送到杭州。"
my_counts = None
lesson.check(exercises.token_counts, my_counts, sentences, tokenizer)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# my_counts = [len(tokenizer.tokenize(sentence)) for sentence in sentences]
# ```
#
# With the course's text the Chinese sentence, 39 bytes, needs fewer tokens than the English one, 52 bytes: words that are frequent in the
# text became one token each, such as `苹果`. A tokenizer that was trained on English alone would need two or three tokens for each
# Chinese character.
#
# </details>

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
# Arguments of `SFTConfig`; `SET` replaces any of them. Wider models need a smaller learning rate, so it depends on the width. It rises for
# a tenth of the steps, at most 100 (*warm-up*: large steps at the start would spoil random weights), then falls along a *cosine* curve to
# 0, so that the last steps are small. *Weight decay* makes each weight a little smaller in every step, unless the text needs it large.
#
# The table is a forecast from `plan`: for your GPU, or, if you have none, for two that are rented often; *rows* is how many are computed at a
# time. A base model wants about 20 tokens for each parameter; with far fewer it learns the words but not the language, and after many
# epochs it learns your text by heart.

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
#
# The *loss* is the mean of -log p, where p is the probability the model gave to the token that came next. An untrained model finds
# all tokens about equally likely, so its loss is near log(vocabulary). By hand, and as `transformers` computes it when it is given labels:

# %%
import torch
from transformers import Qwen2ForCausalLM, set_seed

set_seed(SEED)
config._attn_implementation = "sdpa"
model = Qwen2ForCausalLM(config).to(lesson.device).eval()
print(f"{model.num_parameters():,} parameters on {model.device}")
row = torch.tensor([rows.eval[0]["input_ids"]], device=model.device)
with torch.no_grad():
    output = model(input_ids=row, labels=row)
log_p = output.logits[0, :-1].float().log_softmax(-1)  # of every token of the vocabulary, at each position but the last
by_hand = -log_p[torch.arange(LENGTH - 1), row[0, 1:]].mean().item()  # of those that came next
print(f"loss by hand {by_hand:.4f}, by transformers {output.loss.item():.4f}; log({len(tokenizer)}) is {math.log(len(tokenizer)):.4f}")

# %% [markdown]
# How does it continue a text before training? First the probabilities of the next token after a few words, kept for later. Then the beginnings
# of three held-out rows, 24 tokens each; `do_sample=False` takes the most likely token each time, so the answer is always the same. It
# repeats one or two tokens.

# %%
def next_token_probabilities(text):
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]], device=model.device)
    with torch.no_grad():
        return model.eval()(ids).logits[0, -1].float().softmax(-1)

beginning = "Can you deliver on"
untrained = next_token_probabilities(beginning)
prompts = torch.tensor(rows.eval[:3]["input_ids"], device=model.device)[:, :24]
options = {"attention_mask": torch.ones_like(prompts), "max_new_tokens": 40, "do_sample": False, "pad_token_id": separator}
before = tokenizer.batch_decode(model.generate(prompts, **options)[:, prompts.shape[1] :])
print(*map(repr, before), sep="\n")

# %% [markdown]
# ## Training
#
# The settings of lesson 03 with the values above. Nothing is packed, because every row is full already. The callback of lesson 03 measures
# the loss on held-out rows at each save, copies each checkpoint to the run folder and verifies it, ends the run before its time is up, and
# stops when the held-out loss no longer falls.

# %%
from nbutils import tracking, training
from transformers import EarlyStoppingCallback
from trl import SFTConfig, SFTTrainer

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
# with the rows in the same order. The curve begins near log(vocabulary) and falls while the model learns words, then sentences, then copying.
# Where the training loss goes on falling and the held-out loss rises, the text is too short for the model.

# %%
result = training.train(trainer, callback, resume=RESUME)
result.show()
display.plot_losses(result.history, lesson.run.logs / "loss.png", title="Pre-training loss")

# %% [markdown]
# ## Exercise: perplexity
#
# *Perplexity* is e to the power of the loss. It says among how many tokens, all equally likely, the model might as well choose. Which
# perplexity belongs to the lowest loss on held-out rows? (`math.exp(x)` is e to the power of x.)

# %% tags=["exercise"]
losses = [loss for _, loss in result.history["validation"]]
print(f"held-out loss: {losses[0]:.3f} before the training, {min(losses):.3f} at best")
my_perplexity = None
lesson.check(exercises.perplexity, my_perplexity, min(losses))

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# my_perplexity = math.exp(min(losses))
# ```
#
# Before the training it was about the size of the vocabulary: every token was possible. A model that always knew the next token
# would have a perplexity of 1.
#
# </details>

# %% [markdown]
# The same texts again, and the same few words: how likely are the five tokens that the model now finds likeliest, before the training and after
# it? A short run learns the style but not yet the facts; more text, steps, width and depth help.

# %%
after = tokenizer.batch_decode(model.eval().generate(prompts, **options)[:, prompts.shape[1] :])
asked = tokenizer.batch_decode(prompts)
display.show_table([{"text": a, "before": repr(b), "after": repr(c.split(tokenizer.decode([separator]))[0])} for a, b, c in zip(asked, before, after, strict=True)])
trained = next_token_probabilities(beginning)
likeliest = {repr(tokenizer.decode([i])): {"before": untrained[i].item(), "after": trained[i].item()} for i in trained.topk(5).indices.tolist()}
figures.bars(likeliest, f"The next token after “{beginning}”", "probability", stacked=False)

# %% [markdown]
# ## Save
#
# Weights in bfloat16, tokenizer with its chat template, in a folder that gets its name once it is complete. Lesson 03 fine-tunes this
# folder like any other base model, with this path as `MODEL`. What it can learn there depends on what it read here: a model that has never
# seen a dialogue needs more rows.

# %%
from nbutils import disk, files

folder = lesson.run.path / "base"
with files.complete_folder(folder, result.stamp()) as place:
    model.save_pretrained(place, state_dict={name: weight.to(torch.bfloat16) for name, weight in model.state_dict().items()})
    tokenizer.save_pretrained(place)
print(f"{folder}: {disk.folder_gib(folder) * 1024:.1f} MiB")

# %% [markdown]
# ## Exercise: an easy sentence
#
# Write a sentence of at least five tokens that your model finds easy: a loss below 4.0. Which words does it know well, and in which order?
# To copy from the texts above is fine, and to change a word then shows what it costs. `losses_of` gives the loss of each token.

# %% tags=["exercise"]
def losses_of(text):
    ids = torch.tensor([[separator, *tokenizer(text, add_special_tokens=False)["input_ids"]]], device=model.device)
    logits = trainer.model(input_ids=ids).logits[0, :-1].float()
    return torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none").tolist()

my_sentence = None
lesson.check(exercises.easy_sentence, my_sentence, losses_of)

# %% [markdown]
# <details><summary>Solution</summary>
#
# With the course's text `"I want to buy 13 bags of corn."` is easy. The loss of `"We sell cars in Berlin."` is much higher: the model may know the
# words, but it never read them in such places. Easy for any model is what it would write itself:
#
# ```python
# start = torch.tensor([[separator]], device=model.device)
# written = model.generate(start, min_new_tokens=12, max_new_tokens=12, do_sample=False, pad_token_id=separator)
# my_sentence = tokenizer.decode(written[0, 1:])
# ```
#
# </details>

# %% [markdown]
# ## Question
#
# Two models read the same text. One has a vocabulary of 2,048 tokens and a held-out loss of 3.0, the other one of 32,000 and a loss of 3.5. Which
# predicts the text better? Put `"a"`, `"b"` or `"c"` into `my_choice`.
#
# - **a**: the first, because its loss is lower
# - **b**: the second, because its vocabulary is larger
# - **c**: that cannot be said from these numbers

# %% tags=["exercise"]
my_choice = None
lesson.check(exercises.quiz, my_choice, lesson.stem)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# my_choice = "c"
# ```
#
# </details>

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
