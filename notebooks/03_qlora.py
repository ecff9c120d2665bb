# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 03 · Fine-tune with QLoRA
#
# *LoRA* leaves the weights of the base model as they are and trains a few small matrices beside them: the *adapter*. *QLoRA* does the
# same with a base model whose weights are *quantized*, that is rounded to 4 bits each. On a free T4 this trains a 4B model; on a laptop
# without a GPU the same cells train the bundled tiny model. Words you do not know are in the [glossary](../docs/glossary.md).
#
# You will have
#
# - a LoRA adapter trained on your rows, with the loss only on the answers,
# - the step with the lowest validation loss, not just the last one,
# - the same questions answered before and after the training,
# - a loss and a training step computed by hand, equal to the library's,
# - three trainings that failed, to compare yours with,
# - verified checkpoints: a lost session costs the steps since the last checkpoint.
#
# Takes about three minutes with the tiny model on 2 cores; minutes to hours with a larger one on a GPU. Disk: the model and three
# checkpoints (a quarter of a GB each for a 7B).

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
# Empty or zero leaves a value to the profile; `SET = "sft.learning_rate=1e-4, lora.r=64"` replaces any value of it.
# `RESUME = "auto"` continues an interrupted run, `"80"` goes back to the checkpoint of step 80, `"never"` deletes the run's
# checkpoints and starts over. `MAX_HOURS = 0` uses the platform's own limit.

# %% tags=["parameters"]
PROFILE: str = "auto"
MODEL: str = ""
DATA: str = ""
RUN_NAME: str = ""
MAX_STEPS: int = 0
SAVE_STEPS: int = 0
MAX_HOURS: float = 0.0
RESUME: str = "auto"
SEED: int = 42
SET: str = ""

# %% [markdown]
# Start the lesson. It finds the platform, the GPU, the profile and the folder of this run.

# %%
import nbutils

lesson = nbutils.start("03_qlora", globals())

# %% [markdown]
# ## Rows and tokens
#
# Lesson 02 left your rows in the run folder. If it has not run, they are prepared now, with the same checks. The chat template turns
# them into tokens, and a mask limits the loss to the answers. Rows longer than `max_length` are left out: cut off, they would lose
# their stop token. Then the contract of lesson 02 is checked for every row.

# %%
from transformers import AutoTokenizer
from nbutils import chat, data

data.prepare(DATA, lesson.run.data, default=lesson.profile.course.data, rows=lesson.profile.course.rows)
train_rows, eval_rows = data.load(lesson.run.data)
tokenizer = AutoTokenizer.from_pretrained(lesson.model, trust_remote_code=False)
stop_ids = chat.find_stop_ids(tokenizer, lesson.model)
dataset = chat.filter_by_length(tokenizer, train_rows, lesson.profile.sft.max_length, stop_ids)
dataset.write_too_long(lesson.run.data)
print(f"{len(train_rows)} rows to train on, {len(eval_rows)} held out")
print(dataset)
print(chat.check_contract(dataset))

# %% [markdown]
# ## Exercise: the loss of a batch
#
# A *batch* is the rows that are computed together. For every position the model gives each token of its vocabulary a score, the
# *logits*; `softmax` makes probabilities of them. The *loss* is the mean of -ln p, where p is the probability of the right next token:
# 0 if the model was sure and right, and larger the less it expected the token. Training makes it smaller.
#
# Here are the logits of the bundled tiny model for four rows, of the shape rows x positions x vocabulary, and the labels. Compute their
# loss. Two things decide: the logits at position t are a guess at the token at position t + 1, and labels of -100 do not count.
#
# Both are *tensors*, and are indexed like lists: `logits[0][5]` are the scores at position 5 of row 0, `labels[0][6]` is the id of the
# token they guess at, `logits[0][5].log_softmax(-1)` is ln p for every token of the vocabulary, and `[labels[0][6]]` behind it picks the
# right one. `len(labels)` is the number of rows, `len(labels[0])` that of positions. Two loops will do.

# %% tags=["exercise"]
from nbutils import exercises
from nbutils.training import practice

small, batch = practice.small_model(), practice.small_batch(4)
logits, labels = small(batch["input_ids"]).logits.detach(), batch["labels"]
my_loss = None
lesson.check(exercises.batch_loss, my_loss, logits, labels)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# my_losses = []
# for row in range(len(labels)):
#     for t in range(len(labels[row]) - 1):
#         token = labels[row][t + 1]
#         if token != -100:
#             my_losses.append(-logits[row][t].log_softmax(-1)[token])
# my_loss = sum(my_losses) / len(my_losses)
# ```
#
# The last position guesses at a token that is not there, and the first token is guessed by none. In libraries it is one call for all
# positions, `cross_entropy`: it comes in the next cell.
#
# </details>

# %% [markdown]
# ## One training step by hand
#
# This is what a trainer does, again and again. `backward` computes for each trained weight how the loss changes with it: the gradient.
# The *optimizer* moves each weight a little against its gradient; how far, the *learning rate* `lr` says. Here only the adapter is
# trained, on the four rows from above. The library's loss is the same number, and after the step the loss on the same rows is lower.

# %%
import torch
from torch.nn.functional import cross_entropy

optimizer = torch.optim.AdamW([weight for weight in small.parameters() if weight.requires_grad], lr=2e-3)
logits = small(batch["input_ids"]).logits
by_hand = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
by_library = small(**batch).loss
by_hand.backward()
optimizer.step()
print(f"by hand {by_hand:.5f}, by the library {by_library:.5f}, after one step {small(**batch).loss:.5f}")

# %% [markdown]
# ## What each technique saves
#
# From the forward pass a training keeps the results of every layer for `backward`. They often need more memory than the weights do.
#
# - *4 bits*: a weight of a linear layer takes an eighth of what it takes in 32 bits, and has to be unpacked for every
#   product. The embeddings and the adapter are not quantized.
# - *Gradient checkpointing* keeps only what goes into each layer, and computes the rest a second time in `backward`.
# - *Gradient accumulation* computes a batch in parts, and adds up their gradients. The step is the same; small parts use a GPU badly.
# - *Packing* puts short rows behind each other. Padded to the longest row, they take memory and time for nothing.
# - *sdpa* computes attention without keeping, as *eager* does, a number for every pair of tokens. It costs nothing.
#
# Measured on the CPU with a tiny model, one step each, so the seconds are rough. *Kept* is what waits for `backward`. With a large model
# the shares are others.

# %%
from nbutils import display
from transformers import BitsAndBytesConfig

padded, part, packed = practice.small_batch(8), practice.small_batch(2), practice.small_batch(8, padding_free=True)
in_4_bits = practice.small_model(quantization_config=BitsAndBytesConfig(load_in_4bit=True), device_map={"": "cpu"})
recomputing = practice.small_model(use_cache=False).train()
recomputing.enable_input_require_grads()
recomputing.gradient_checkpointing_enable({"use_reentrant": True})
practice.step(small, part)  # the first step of a process is slow
table = []
for name, variant, rows in [
    ("8 rows, padded", small, padded),
    ("8 rows, padded, in 4 bits", in_4_bits, padded),
    ("8 rows, padded, with gradient checkpointing", recomputing, padded),
    ("2 rows, padded: a quarter of a step with gradient accumulation", small, part),
    (f"8 rows, packed: {packed['input_ids'].numel()} positions instead of {padded['input_ids'].numel()}", small, packed),
    ("8 rows, packed, with eager attention", practice.small_model(attn_implementation="eager"), packed),
]:
    kept, seconds = practice.step(variant, rows)
    size = variant.get_memory_footprint() / 2**20
    table.append({"one step": name, "weights, MiB": f"{size:.1f}", "kept, MiB": f"{kept:.1f}", "seconds": f"{seconds:.2f}"})
display.show_table(table)

# %% [markdown]
# ## 4 or 16 bits?
#
# In 4 bits each weight becomes one of 16 values, times a *scale* that it shares with 63 neighbours. Where should these values lie? The
# figure shows them as lines over the weights of one matrix of the tiny model. Most weights are small. `nf4` has its values close together
# there. `fp4`, the numbers of a 4-bit floating point, spends four of them on nearly 0 and leaves gaps beside it; its error is larger.
#
# What that costs depends on the model: some lose much of what they know, others hardly anything. So it is measured before anything is
# trained: the loss of the base model on some held-out rows, then the same with every weight of its linear layers rounded to 4 bits. The
# bundled tiny models are trained in 4 bits whatever it says, so that the lesson is the real one. They know nothing of their task yet:
# their loss is high, and rounding can even lower it, as it makes wrong guesses less sure. (For other models `method: auto` decides. On a
# GPU it takes 4 bits if they raise the loss by at most 0.05, in nats per token, the unit of a loss, or if 16 do not fit; without one, 16
# below a billion parameters, else 4.)

# %%
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from nbutils import evaluation, figures, training

weight = next(weight.detach() for name, weight in small.named_parameters() if "q_proj" in name)
blocks = weight.view(-1, 64)
levels = {}
for kind in ("nf4", "fp4"):
    codes, state = quantize_4bit(weight, quant_type=kind)
    error = (dequantize_4bit(codes, state) - weight).norm() / weight.norm()
    levels |= {f"{kind}: relative error {error:.3f}": state.code}
figures.levels((blocks / blocks.abs().amax(1, keepdim=True)).flatten(), levels)
training.require_unquantized(lesson.model)
training.require_own_weights(lesson.model)
losses = evaluation.base_losses(lesson.begun(), dataset, eval_rows)

# %% [markdown]
# ## The recipe
#
# An *epoch* is one pass over all rows. Too many rows per step leave too few steps, and the loss hardly moves; so batch size, epochs and
# learning rate depend on your rows. `conversations_per_step` is the size of a step. The GPU only decides how it is computed:
# `per_device_train_batch_size` rows at a time, `gradient_accumulation_steps` times. With packing a row is a sequence of several
# conversations, so a step of 2 rows may hold 8 of them. Where `num_train_epochs` is 0, `max_steps` decides; the first line says how many
# epochs that makes.
#
# Here are the values that matter most, with their reasons (leave out `only` to see all), and on a GPU what the training will need
# of it. Each name is the keyword argument of the library that takes it. The recipe also says on how many held-out rows the loss is
# measured (`validation`); they are rendered as the others are.

# %%
from nbutils import plan

lesson = lesson.with_recipe(dataset.lengths, len(eval_rows), losses)
profile = lesson.profile
validation = chat.validation_dataset(dataset, eval_rows, profile.course.validation_rows)
most = ("method", "from_pretrained", "lora.r", "sft.max_length", "sft.per_device_train_batch_size",
        "sft.gradient_accumulation_steps", "sft.num_train_epochs", "sft.max_steps", "sft.learning_rate", "sft.packing",
        "course.conversations_per_step")
display.show_choices(lesson.resolved, only=most)
if forecast := plan.require(lesson.resolved):
    print(plan.describe(forecast))

# %% [markdown]
# ## The base model in 4 bits
#
# The block `quantization` of the profile holds arguments of `BitsAndBytesConfig`: `nf4` from above, double quantization, which also
# compresses the scales, and matrix products in the precision of your machine. (Left to its defaults, bitsandbytes would use `fp4` and
# float32.) With `method: lora` the base model stays in 16 bits, and all this is not used.
#
# Each weight is quantized while it is loaded. Gradients will flow through these weights, but none of them will change.

# %%
from transformers import AutoModelForCausalLM, set_seed
from nbutils import distributed

dtype = getattr(torch, profile.from_pretrained.dtype)
quantization = BitsAndBytesConfig(
    **profile.quantization,  # load_in_4bit, bnb_4bit_quant_type, bnb_4bit_use_double_quant
    bnb_4bit_compute_dtype=dtype,
    bnb_4bit_quant_storage=dtype,  # so that FSDP can divide the weights among GPUs
)
set_seed(SEED)
model = AutoModelForCausalLM.from_pretrained(
    lesson.model,
    quantization_config=quantization if profile.method == "qlora" else None,
    dtype=dtype,
    attn_implementation=training.attention(profile.from_pretrained.attn_implementation),
    device_map=distributed.device_map(lesson.device, profile.from_pretrained.dtype, profile.method),
    trust_remote_code=False,
)
print(f"{model.get_memory_footprint() / 2**20:,.0f} MiB in memory")

# %% [markdown]
# ## Before
#
# Three held-out questions, answered by the model as it is. We ask the same three after the training.

# %%
questions = data.own_language_first(eval_rows)[:3]
before = evaluation.answer_rows(model, tokenizer, questions)
display.show_answers(questions, before=before)

# %% [markdown]
# ## The adapter
#
# LoRA adds two small matrices, A and B, to a weight W: instead of W·x the layer computes W·x + (alpha/r)·B·(A·x). A has r rows,
# B has r columns, and only these two are trained. The rank `r` limits how much can be learned, `alpha / r`, the *scale*, how much
# the adapter says.

# %%
from peft import LoraConfig

lora = LoraConfig(
    **profile.lora,  # r, lora_alpha, lora_dropout, target_modules, use_rslora: each explained in the profile's file
    task_type="CAUSAL_LM",
)
print(f"r {lora.r}, lora_alpha {lora.lora_alpha}, lora_dropout {lora.lora_dropout}, target_modules {lora.target_modules}")

# %% [markdown]
# ## Exercise: the size of an adapter
#
# Below are the sizes in the first linear layer of this model. How many parameters would A and B of this layer have together at rank 64?

# %% tags=["exercise"]
first = next(part for part in model.modules() if isinstance(part, torch.nn.Linear))
d_in, d_out, r = first.in_features, first.out_features, lora.r
print(f"W {d_out} x {d_in}; at rank {r} A {r} x {d_in}, B {d_out} x {r}")
my_parameters = None
lesson.check(exercises.adapter_parameters, my_parameters, d_in, d_out, r)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# my_parameters = 64 * d_in + d_out * 64
# ```
#
# A grows with the sum of the two sides of W, and W with their product. So the larger the model, the smaller the share that is trained.
#
# </details>

# %% [markdown]
# ## The training
#
# The block `sft` of the profile holds arguments of `SFTConfig`; the table above explains the main ones. Rows are concatenated without
# padding (`padding_free`). With packing they are first packed into sequences of up to `max_length` tokens. The *validation loss*, the loss
# on held-out rows, is measured before the first step (`eval_on_start`) and at every save (`eval_steps`); `load_best_model_at_end` keeps the
# step where it was lowest. `training.bookkeeping` adds what is not about learning: folders, saving, the seed. In another terminal,
# `python -m nbutils watch` shows the training.
#
# `report_to` names the *trackers*, programs that keep and draw the numbers; there is nothing to do for them. TensorBoard always gets them
# (the second line below says how to open it here), W&B online if there is a `WANDB_API_KEY`, and SwanLab, where it is installed, if there
# is a `SWANLAB_API_KEY` or `SWANLAB_MODE=offline`. `SET = "sft.report_to=[mlflow]"` names another one that transformers knows.

# %%
from nbutils import tracking
from trl import SFTConfig

arguments = dict(profile.sft)  # learning_rate, num_train_epochs, per_device_train_batch_size, packing, optim, ...
if not profile.sft.packing:
    arguments["max_length"] = None  # nothing has to be cut: rows that are too long were left out above
arguments["report_to"] = tracking.report_to(profile.sft, lesson.scratch)
settings = SFTConfig(
    **arguments,
    padding_free=True,
    bf16=dtype == torch.bfloat16,
    fp16=dtype == torch.float16,
    eval_strategy="steps" if validation else "no",
    eval_steps=profile.sft.save_steps,
    eval_on_start=bool(validation),
    **training.bookkeeping(lesson.scratch, SEED),
)
print(f"learning_rate {settings.learning_rate:g}, {settings.per_device_train_batch_size} x {settings.gradient_accumulation_steps} rows per step")

# %% [markdown]
# The trainer gets the model, the adapter, the tokens, and two callbacks. `EarlyStoppingCallback` is transformers' own: it ends the
# training when the validation loss has not fallen for a while. Ours copies each checkpoint to the run folder in the background and
# verifies it there, ends the run before the platform does, and shows progress. `prepare` makes the validation loss a mean over all
# tokens (the trainer's own averages batches), casts the adapter to float32 (TRL makes it bfloat16, which a T4 cannot train) and fuses
# LoRA's additions into its matrix products, which gives the same numbers in less time.
#
# TRL shows bars such as *Truncating* and *Dropping fully masked examples*. It looks for such rows and finds none: they were left out
# above. `prepare` checks that not one trained token is missing.

# %%
from transformers import EarlyStoppingCallback
from trl import SFTTrainer

callback = training.CourseCallback(
    dataset, profile, run=lesson.run, folders=lesson.folders, started=lesson.started, max_hours=MAX_HOURS,
    base_model=training.model_fingerprint(lesson.model, lesson.model_name),
)
callbacks = [callback]
if profile.course.early_stopping_patience:
    callbacks.append(EarlyStoppingCallback(profile.course.early_stopping_patience))
trainer = SFTTrainer(
    model=model,
    args=settings,
    train_dataset=chat.training_dataset(dataset),
    eval_dataset=validation,
    processing_class=tokenizer,
    peft_config=lora,
    callbacks=callbacks,
)
print(callback.prepare(trainer))

# %% [markdown]
# ## Training and validation loss
#
# Train. The training loss alone can fall because the rows are memorized. The validation loss is measured on rows the training never
# sees, and the adapter of the step where it was lowest is the one that is kept. After *Run all* the page stands at the last cell: come
# back here, where the live numbers and then the curves appear.
#
# A run that was interrupted continues from its newest checkpoint that verifies. If GPU memory runs out, the step is repeated with
# smaller micro-batches (and more of them, so that the batch stays), then with gradient checkpointing. If the machine is taken away, run
# this notebook again, unchanged. Small gradients would vanish in float16, so the loss is multiplied by a large number, the *loss scale*;
# until a good one is found, the first steps may be skipped. At the end the base model is compared with what it was: none of its weights
# may have changed.

# %%
result = training.train(trainer, callback, resume=RESUME)
result.show()
display.plot_losses(result.history, lesson.run.logs / "loss.png", kept=result.kept_step)

# %% [markdown]
# ## After
#
# The same three questions, now answered with the adapter. Lesson 04 asks all held-out questions and compares the scores. Only A and B are
# saved, so the adapter is small: of a 7B about a hundredth of the model. (The tiny model is itself hardly larger than its adapter.) It is
# written to a temporary folder and renamed when it is complete.

# %%
after = evaluation.answer_rows(trainer.model, tokenizer, questions)
display.show_answers(questions, before=before, after=after)
training.save_adapter(result, tokenizer)
print(f"adapter: {lesson.run.adapter} ({sum(file.stat().st_size for file in lesson.run.adapter.iterdir()) / 2**20:,.1f} MiB)")

# %% [markdown]
# ## What was learned
#
# The figure shows a corner of the first layer, drawn to scale. W is as it was; what the adapter adds to it is B·A, as large as W and made of
# two narrow matrices. That is why it has stripes: each of its rows is a mixture of the few rows of A. White is 0; each matrix has its
# own scale of colours.

# %%
from peft.utils.integrations import dequantize_module_weight

if distributed.world_size() == 1:  # else a process may have a part of each matrix only
    layer = next(part for part in trainer.model.modules() if hasattr(part, "lora_A"))
    a, b = layer.lora_A["default"].weight[:, :128], layer.lora_B["default"].weight[:128]
    corners = {"W": dequantize_module_weight(layer.base_layer)[:128, :128], "B·A": b @ a, "B": b, "A": a}
    figures.matrices({f"{name}, {len(corner)} x {corner.shape[1]}": corner.detach().float().cpu() for name, corner in corners.items()})

# %% [markdown]
# ## Trainings that failed
#
# Your training probably went well. These three, of the tiny model on the sample rows, did not. *Too short*: when it ends, both losses are
# still falling. *Memorized*: five rows, again and again; the training loss falls to nearly nothing, and the validation loss is lowest long
# before the end. *Shuffled answers*: every question got the answer to another one. The loss falls from over 8 to about 0.5, as in a good
# run; but what was learned is only what all answers have in common. Which loss is low enough, no curve says. Lesson 04 asks these models,
# too. (Each mark of the axis is about a third of the one above it.)

# %%
runs = practice.train_all(lesson.run.path) if result.ended else {}  # one that was stopped has no time for them
display.plot_panels({
    title: {"training": run.history["train"], "validation": run.history["validation"]}
    for title, run in zip(["Too short", "Memorized", "Shuffled answers"], runs.values(), strict=False)
}, log=True)

# %% [markdown]
# ## Exercise: the learning rate
#
# Which learning rate is better? Choose two, at least five times apart, for example the one of the recipe above and another one, and put
# them into `my_rates`, as `[0.1, 0.01]`. The cell trains the tiny model for 24 steps with each. Look at the curves, put the better rate, a
# number, into `my_winner`, and run the cell again; nothing is trained twice.

# %% tags=["exercise"]
my_rates = None
my_winner = None
runs = {rate: practice.train(practice.Practice(steps=24, learning_rate=rate), practice.folder(lesson.run.path, f"rate {rate}")) for rate in my_rates or []}
display.plot_panels({"Validation loss": {f"learning rate {rate:g}": run.history["validation"] for rate, run in runs.items()}}, log=True)
lesson.check(exercises.learning_rates, my_winner, my_rates, {rate: run.best[1] for rate, run in runs.items()})

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# my_rates = [2e-3, 2e-4]
# my_winner = 2e-3
# ```
#
# At 2e-4 the steps are too small: after 24 of them the loss is still far above that of 2e-3. More is not always better: at 0.1 they are too large, and the loss ends hardly lower than at 2e-4.
#
# </details>

# %% [markdown]
# ## Question
#
# In a training of 150 steps the training loss falls to the very end. The validation loss is lowest at step 60, and rises from there. Which
# adapter do you keep? Put `"a"`, `"b"` or `"c"` into `my_choice`.
#
# - **a**: that of step 150, where the training loss is lowest
# - **b**: that of step 150, as more training cannot hurt
# - **c**: that of step 60, where the validation loss is lowest

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
# - a LoRA adapter trained on your rows, with the loss only on the answers,
# - the step with the lowest validation loss, not just the last one,
# - the same questions answered before and after the training,
# - a loss and a training step computed by hand, equal to the library's,
# - three trainings that failed, to compare yours with,
# - verified checkpoints: a lost session costs the steps since the last checkpoint.
#
# Lesson 04 merges the adapter into the model and asks whether the training helped.

# %%
lesson.finish(dataset, result, base_losses=losses and vars(losses))
