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
# The course runs without a network because it carries a tiny base model. This lesson shows how that model was made: text,
# tokenizer, an untrained network, a training loop of a dozen lines. You choose width and depth.
#
# You will have
#
# - a tokenizer trained on text that this project wrote,
# - a Qwen2 model with your width and depth, trained by a loop you can read,
# - its loss curve, and its answers before and after,
# - a folder that the other lessons accept as `MODEL`.
#
# Takes one to two minutes on two CPU cores and 0.1 GB of disk with these defaults; the bundled model took two minutes on a large GPU.

# %% [markdown]
# The next cell installs the course if it is missing. If it fails, name the source in a cell above it:
# `%env NBUTILS_SOURCE=git+https://github.com/<you>/<fork>@v0.1.0` (without a password), a folder, or one of the wheels it found.

# %% tags=["setup"]
import importlib.util, re, subprocess, sys; from glob import glob; from os import getenv, path
if importlib.util.find_spec("nbutils") is None:
    OURS = ""
    WHEELS = glob("/kaggle/input/**/nbutils*.whl", recursive=True)
    SOURCE = getenv("NBUTILS_SOURCE") or "\n".join(WHEELS) or OURS
    assert re.match(r"[^-@?][^@?\n]*/[^:?/]*$", SOURCE), f"Set NBUTILS_SOURCE, see above: {WHEELS}"
    ALONE = ["--no-index", "--only-binary=:all:", "-f", path.dirname(SOURCE)] * (SOURCE in WHEELS)
    subprocess.run([sys.executable, "-m", "pip", "install", SOURCE, *ALONE], check=True)

# %% [markdown]
# `WIDTH` is a multiple of 128. The bundled model was made with width 256, depth 6 and the numbers in
# `data_samples/tiny_base/training.json`.

# %% tags=["parameters"]
PROFILE: str = "auto"
RUN_NAME: str = ""
WIDTH: int = 128
DEPTH: int = 2
STEPS: int = 500
BATCH: int = 16
LENGTH: int = 128
VOCAB: int = 2048
TEXTS: int = 20000
SEED: int = 0

# %% [markdown]
# Start the lesson.

# %%
import nbutils

lesson = nbutils.start("07_from_scratch", globals())

# %% [markdown]
# ## Text
#
# A model learns to write like the text it is trained on. Ours is generated: dialogues with a shop, stories, sums, translation, in Chinese and
# English. The shop always answers in prose; a JSON ticket never occurs, so that fine-tuning has something to teach.

# %%
from nbutils import corpus

for text in corpus.pretraining_texts(4, SEED):
    print(text, end="\n\n")

# %% [markdown]
# ## Tokenizer
#
# Byte-level BPE: start with the 256 bytes, then merge the most frequent pair of adjacent tokens, again and again, until there
# are `VOCAB` tokens. Any text can be written with it; frequent words cost one token.

# %%
tokenizer = corpus.build_tokenizer(corpus.pretraining_texts(min(TEXTS, 20000), SEED), VOCAB)
ids = tokenizer("Please send 3 boxes of apples to Hangzhou. 请周五送到杭州。")["input_ids"]
print(len(tokenizer), "tokens;", [tokenizer.decode([i]) for i in ids])

# %% [markdown]
# The corpus becomes rows of `LENGTH` tokens. The last rows are held out to measure the loss on text the model has not seen.

# %%
rows = corpus.token_rows(corpus.pretraining_texts(TEXTS, SEED + 1), tokenizer, LENGTH)
kept = min(64, len(rows) // 10 + 1)
rows, held_out = rows[:-kept], rows[-kept:]
print(f"{len(rows):,} rows, {rows.numel() / 1e6:.1f} million tokens; {held_out.numel():,} held out")

# %% [markdown]
# ## Model
#
# The same architecture as Qwen2.5, only small. Input and output share one embedding matrix (`tie_word_embeddings`).

# %%
from transformers import Qwen2Config

config = Qwen2Config(
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    intermediate_size=WIDTH * 5 // 2,
    num_hidden_layers=DEPTH,
    num_attention_heads=WIDTH // 64,
    num_key_value_heads=WIDTH // 128,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=tokenizer.eos_token_id,
    pad_token_id=tokenizer.pad_token_id,
)

# %% [markdown]
# Its weights are random numbers, and a seed makes them the same random numbers each time.

# %%
import torch
from transformers import Qwen2ForCausalLM

device = "cuda" if lesson.gpu else "cpu"
torch.manual_seed(SEED)
model = Qwen2ForCausalLM(config).to(device)
print(f"{model.num_parameters() / 1e6:.2f} million parameters on {device}")

# %% [markdown]
# What does it say before training? An untrained model repeats one or two tokens.

# %%
from nbutils.evaluation import generate

questions = ["请周五给我送三箱苹果到杭州。", "Please send 3 boxes of apples to Hangzhou on Friday.", "三加四等于几？", "Who are you?"]
conversations = [[{"role": "user", "content": text}] for text in questions]
before = [answer.text for answer in generate(model, tokenizer, conversations, max_new_tokens=32, batch_size=4)]
print(*map(repr, before), sep="\n")

# %% [markdown]
# If this run already holds a model that was trained with the same settings, it is used and the loop below has nothing to do.

# %%
folder = lesson.run.path / "from_scratch"
settings = {name: value for name, value in lesson.parameters.items() if name not in ("PROFILE", "RUN_NAME")}
finished = corpus.finished_training(folder, settings)
if finished:
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
print("trained before:" if finished else "to be trained:", settings)

# %% [markdown]
# ## Training
#
# AdamW, with weight decay on matrices only. Wider models need a smaller learning rate, so its peak depends on the
# width. It warms up to the peak over a few steps, then decays along a cosine.

# %%
import math

peak, warmup = 0.5 / WIDTH, max(1, min(100, STEPS // 10))
groups = [
    {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
    {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95))
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min((step + 1) / warmup, 0.01 + 0.99 * (0.5 + 0.5 * math.cos(math.pi * step / STEPS)))
)

# %% [markdown]
# The loss (cross-entropy): how improbable the model finds each next token. A GPU computes in bfloat16, the weights stay float32.

# %%
def loss_of(batch):
    batch = batch.to(device, torch.long)
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        logits = model(input_ids=batch, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), batch[:, 1:].flatten())

# %% [markdown]
# And the loop: draw rows, compute the loss and its gradients, take a step.

# %%
import time

draw = torch.Generator().manual_seed(SEED)
losses, began = finished["losses"] if finished else [], time.perf_counter()
model.train()
for step in range(STEPS if finished else 0, STEPS):
    loss = loss_of(rows[torch.randint(len(rows), (BATCH,), generator=draw)])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step(), schedule.step(), optimizer.zero_grad()
    if step % max(1, STEPS // 100) == 0 or step == STEPS - 1:
        losses.append([step, round(loss.item(), 4)])
    if step % max(1, STEPS // 10) == 0:
        print(f"step {step:6}  loss {losses[-1][1]:.3f}  {time.perf_counter() - began:6.1f} s", flush=True)

# %% [markdown]
# The curve begins near the logarithm of the vocabulary size (every token equally likely) and falls while the model learns words,
# then sentences, then copying.

# %%
from nbutils import display

display.plot_losses({"train": losses}, folder / "loss.png", title="Pre-training loss")
model.eval()
with torch.no_grad():
    held_out_loss = loss_of(held_out).item()
print(f"loss on text it has not seen: {held_out_loss:.3f} (knowing nothing: {math.log(VOCAB):.3f})")

# %% [markdown]
# The same questions again. A short run learns the style of the answers but not yet the facts; more steps, width and depth help.

# %%
after = [answer.text for answer in generate(model, tokenizer, conversations, max_new_tokens=32, batch_size=4)]
display.show_table([{"question": a, "before": repr(b), "after": repr(c)} for a, b, c in zip(questions, before, after, strict=True)])

# %% [markdown]
# ## Save it
#
# Weights in bfloat16, tokenizer with its chat template, and how it was made; that record is written last, so a folder
# that has it is complete.

# %%
from datetime import date
from transformers import GenerationConfig
from nbutils import disk, files, record

if not finished:
    stop, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=stop, pad_token_id=pad)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    made = {"date": date.today().isoformat(), "hardware": lesson.gpu.name if lesson.gpu else "CPU", "versions": record.versions()}
    result = {"seconds": round(time.perf_counter() - began, 1), "held_out_loss": round(held_out_loss, 4), "losses": losses}
    files.write_json(folder / "training.json", {"settings": settings, **made, **result})
print(f"{folder}: {disk.folder_gib(folder) * 1024:.1f} MiB")

# %% [markdown]
# ## Exercise
#
# Write a sentence that your model finds easy: a loss below 3.0. Which words does it know well?

# %%
sentence = ""
tokens = tokenizer(corpus.chat(sentence))["input_ids"]
with torch.no_grad():
    saw = loss_of(torch.tensor([tokens])).item()
good = bool(sentence) and saw < 3.0
found = f"{sentence!r} with a loss of {saw:.2f}" if sentence else "no sentence"
hint = ": try words from the texts above" if sentence and not good else ""
print(f"[{' OK ' if good else 'TODO'}] saw {found}, expected one with a loss below 3.0{hint}")

# %% [markdown]
# ## You now have
#
# - a tokenizer trained on text that this project wrote,
# - a Qwen2 model with your width and depth, trained by a loop you can read,
# - its loss curve, and its answers before and after,
# - a folder that the other lessons accept as `MODEL`.
#
# The last cell writes the numbers to `facts.json`.

# %%
lesson.finish(parameters=model.num_parameters(), held_out_loss=round(held_out_loss, 4), **settings)
