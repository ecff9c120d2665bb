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
# A 4-bit base that never changes, small adapters that learn. On a free T4 this trains a 3B model (a 7B trains there too, but
# does not fit when it is served); on a laptop without a card the same cells train the bundled tiny model.
#
# You will have
#
# - a LoRA adapter trained on your data with a recipe that fits it, with the loss only on the assistant's words,
# - the step that did best on rows held back from the training, not just the last one,
# - checkpoints that verify, so that a lost session costs a few steps,
# - a TensorBoard log and a W&B run (offline without a key),
# - proof that the adapter learned and the base stayed as it was.
#
# Takes about a minute with the tiny model on 2 cores, and minutes to hours with a larger one, by its size and your rows.
# Disk: the model, and three checkpoints (of a quarter of a GB each for a 7B).

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
# The dials. Empty or zero leaves a value to the profile; `SET = "train.learning_rate=1e-4, lora.rank=64"` replaces any of
# them. `RESUME = "auto"` continues an interrupted run; `"80"` goes back to the checkpoint of step 80; `"never"` deletes its
# checkpoints and starts anew. `MAX_HOURS` 0 is the platform's own limit.

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
# Starting finds the platform, the card and the run folder.

# %%
import nbutils

lesson = nbutils.start("03_qlora", globals())

# %% [markdown]
# ## Data
#
# Lesson 02 left the rows in the run folder. If it has not run, they are prepared now, with the same checks.

# %%
from nbutils import data

card = data.prepare(DATA, lesson.run.data, default=lesson.profile.data.source, rows=lesson.profile.data.rows)
train_rows, eval_rows = data.load(lesson.run.data)
print(f"{len(train_rows)} rows to train on, {len(eval_rows)} held back")

# %% [markdown]
# ## The contract between training and serving
#
# First, which rows fit: cutting a row cuts off its stop token, and a model that never sees one never stops. Rows that are too
# long for `max_length` are left out, not cut; they stand in `too_long.jsonl` of the run's data folder. The stop tokens are
# those the model's generation config names.

# %%
from transformers import AutoTokenizer
from nbutils import chat

tokenizer = AutoTokenizer.from_pretrained(lesson.model, trust_remote_code=False)
stop_ids = chat.find_stop_ids(tokenizer, lesson.model)
fitting = chat.fitting(tokenizer, train_rows, lesson.profile.train.max_length, stop_ids=stop_ids)
fitting.write(lesson.run.data)
print(fitting)

# %% [markdown]
# The model must be trained on exactly the text a server will build, on all that your answers say, and must learn to stop.
# The check names the first row and token that break this.

# %%
report = chat.check_contract(tokenizer, fitting, fitting.max_length)
print(report)

# %% [markdown]
# One row as the trainer sees it, with the tokens that are trained marked.

# %%
row = fitting.kept[0]
chat.show_row(tokenizer, row["messages"], tools=row.get("tools"))

# %% [markdown]
# ## The recipe
#
# How much to learn from each step is a question of your rows, not of the card. Too many conversations a step leave too few
# steps: the loss hardly moves, and nobody says why. So the rows decide batch, epochs and learning rate, as far as the profile
# leaves them open; the card only decides how a step is cut into micro-batches. The table has every value of this run and why it
# has it; nothing below uses a number that is not in it.

# %%
from nbutils import dashboard

lesson = lesson.with_recipe(fitting.lengths)
profile = lesson.profile
dashboard.show_choices(lesson.resolved.choices, lesson.resolved.table())

# %% [markdown]
# Will it fit, how long will it take, what will it cost? The plan adds up the card's memory before the model is downloaded
# (lesson 01 explains the formula), and stops here, not at night, where not even the smallest setting fits.

# %%
from nbutils import plan

print(plan.describe(plan.require(lesson.resolved)))

# %% [markdown]
# ## The base in 4 bits
#
# `nf4` fits the shape of trained weights, double quantisation also compresses the scales, and the products are computed in
# the precision of the card. Left to its defaults, bitsandbytes would take `fp4` and float32.

# %%
import torch

dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[profile.machine.precision]

# %% [markdown]
# This is all there is to 4 bits. `method: lora` leaves it out: `auto` takes that for models under a billion parameters, which
# lose much in 4 bits and fit in 16.

# %%
from transformers import BitsAndBytesConfig

four_bit = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type=profile.quantization.type,
    bnb_4bit_use_double_quant=profile.quantization.double,
    bnb_4bit_compute_dtype=dtype,
)

# %% [markdown]
# Loading quantises each weight on the way in. With `method: lora` it stays as it is.

# %%
from transformers import AutoModelForCausalLM, set_seed
from nbutils import attention, training

training.require_unquantised(lesson.model)
set_seed(SEED)
model = AutoModelForCausalLM.from_pretrained(
    lesson.model,
    quantization_config=four_bit if profile.method == "qlora" else None,
    dtype=dtype,
    attn_implementation=attention.use(profile.machine.attention),
    device_map={"": lesson.device},
    trust_remote_code=False,
)

# %% [markdown]
# Look at what was loaded: with `method: qlora` the linear layers in 4 bits, embeddings and norms as they were.

# %%
kinds = training.weight_kinds(model)
print(f"{model.get_memory_footprint() / 2**20:,.0f} MiB in memory; weights by kind: {kinds}")

# %% [markdown]
# ## The adapter
#
# Two thin matrices beside every linear layer. `rank` is how much they can learn, `alpha / rank` how loudly they speak.

# %%
from peft import LoraConfig

lora = LoraConfig(
    r=profile.lora.rank,
    lora_alpha=profile.lora.alpha,
    lora_dropout=profile.lora.dropout,
    target_modules=profile.lora.target_modules,
    use_rslora=profile.lora.use_rslora,
    task_type="CAUSAL_LM",
)

# %% [markdown]
# ## The training
#
# Rows are laid end to end, so that nothing is spent on padding; where a step holds many of them, packing fills sequences of
# equal length first. Checkpoints and logs go to fast scratch first. TensorBoard always logs; W&B goes online only if a key is there, and never asks for one.

# %%
from nbutils import scaling
from trl import SFTConfig

settings = SFTConfig(
    output_dir=str(lesson.scratch / "trainer"),
    max_length=profile.train.max_length if profile.train.packing else None,
    packing=profile.train.packing,
    padding_free=True,
    per_device_train_batch_size=profile.train.micro_batch,
    gradient_accumulation_steps=profile.train.accumulation_on(scaling.world_size()),
    num_train_epochs=profile.train.epochs,
    max_steps=profile.train.max_steps or -1,
    learning_rate=profile.train.learning_rate,
    lr_scheduler_type=profile.train.scheduler,
    warmup_steps=profile.train.warmup_ratio,
    weight_decay=profile.train.weight_decay,
    max_grad_norm=profile.train.max_grad_norm,
    optim=profile.train.optimizer,
    gradient_checkpointing=profile.train.gradient_checkpointing != "off",
    activation_offloading=profile.train.gradient_checkpointing == "offload",
    bf16=profile.machine.precision == "bf16",
    fp16=profile.machine.precision == "fp16",
    **training.bookkeeping(lesson, SEED),
)

# %% [markdown]
# What must be equal for a run to be continued: the model, the data, the adapter, the way of training and the seed. How long to
# train and how often to save may change, and so may the card and with it precision, micro-batch and recomputation.

# %%
from nbutils import checkpoints

mark = checkpoints.fingerprint(
    model=training.model_fingerprint(lesson),
    data=card.fingerprint,
    method=[profile.method, profile.quantization.model_dump()],
    lora=profile.lora.model_dump(),
    train=profile.train.model_dump(exclude=training.MAY_CHANGE),
    seed=SEED,
)

# %% [markdown]
# The newest checkpoint of this very training that verifies: on this machine, in the run folder, or in an attached output of
# an earlier run. What does not verify is skipped with a line that says why.

# %%
resume_from = training.resume_point(lesson, mark, RESUME)
print(f"resuming {resume_from.name}" if resume_from else "starting at step 0")

# %% [markdown]
# A falling training loss may be learning by rote. The loss on rows the training never sees tells: it is measured at the start,
# at each save and at the end. The step where it was lowest is the one that is kept.
#
# Every saved checkpoint is carried to the run folder in the background, and checked there. A Drive that drops or a full disk costs a
# line, not the training. The clock ends the run before the platform does.

# %%
validation = training.Validation(
    chat.validation_dataset(fitting, eval_rows, profile.train.validation_rows),
    every=profile.train.save_steps,
    keep_best=profile.train.keep_best,
    patience=profile.train.early_stopping,
)

sync = training.start_sync(lesson, mark, profile.train.keep_checkpoints)
watchers = [
    validation,
    training.KeepCheckpoints(sync),
    training.TimeBudget(lesson, sync, MAX_HOURS),
    training.LiveNumbers(lesson),
]

# %% [markdown]
# The trainer. It gets the very tokens and labels that were checked, and lays them end to end; rows are kept apart by their
# restarting positions: a test of this course compares their logits with those of single rows, for every attention it uses.

# %%
from trl import SFTTrainer

trainer = SFTTrainer(
    model=model,
    args=settings,
    train_dataset=chat.training_dataset(fitting),
    processing_class=tokenizer,
    peft_config=lora,
    callbacks=watchers,
)
training.require_room(trainer, lesson.run.checkpoints, profile.train.keep_checkpoints)
print(chat.check_trainer(trainer, report))

# %% [markdown]
# Two repairs. TRL casts QLoRA adapters to bfloat16 whatever was asked for, which is slow on a CPU and fatal on a T4: they
# are cast back. And LoRA's sums are folded into its matrix products, which gives the same numbers in fewer passes over memory.

# %%
print(training.patch_lora_kernels(trainer, fused=profile.machine.liger == "on"))

# %% [markdown]
# Before training, checksums of the weights: afterwards the adapter must have changed and the base must not.

# %%
before = training.weight_checksums(trainer.model)
trainer.model.print_trainable_parameters()

# %% [markdown]
# Now it trains: loss, validation loss, real tokens per second, memory, time left, and cost where a price is known. In float16 the first steps may
# be skipped while it looks for its loss scale: that is normal. If the card's memory runs out, the broken step is repeated with
# fewer rows at a time (and more of them added up, so that the batch stays), then with gradient checkpointing; one line says so,
# and nothing that was learnt is lost. If the machine is taken away, run this notebook again, unchanged.

# %%
import time

began = time.monotonic()
if training.steps_left(trainer, resume_from):
    training.train(trainer, lesson, resume_from)
else:
    training.load_finished(trainer, resume_from, chosen=RESUME.isdecimal())
seconds = time.monotonic() - began

# %% [markdown]
# The model gets back the weights of its best step. Only now we wait for the slow disk, until the last checkpoint and the logs are
# safe.

# %%
best = validation.restore_best()
print(f"kept: step {best[0]}, validation loss {best[1]:.4f}" if best else f"kept: the last step, {trainer.state.global_step}")

training.wait_for_sync(lesson, sync)

# %% [markdown]
# What it took. Tokens per second counts real tokens; peak memory is the card's, or this process's on a CPU.

# %%
numbers = training.measured(trainer, seconds, training.step_of(resume_from))
for name, value in numbers.items():
    print(f"{name:18} {value if value is not None else 'as measured before'}")

# %% [markdown]
# Both curves should fall quickly and then flatten. If they stay flat from the start, the learning rate is too small or the
# labels are wrong; if they jump up, the rate is too large; where only validation rises, the rows are being learnt by rote.

# %%
log = trainer.state.log_history
dashboard.plot_losses(training.loss_history(log), lesson.run.logs / "loss.png", validation=training.validation_history(log))
training.write_history(log, lesson.run.logs / "history.json")

# %% [markdown]
# Did the right weights move? (After one or two steps only half of the adapter has: one matrix of each pair starts at zero.)

# %%
moved = training.changed_weights(before, trainer.model)
print(moved)

# %% [markdown]
# The adapter is small; that is the point. It is written to a side folder and takes its name only when it is whole; one that
# is there already and of this very training is kept.

# %%
from nbutils import paths

about = {"steps": best[0] if best else numbers["steps"], "weights": training.adapter_checksum(trainer.model), "fingerprint": mark}
if paths.stamp(lesson.run.adapter) != about:
    with paths.whole_folder(lesson.run.adapter, about) as folder:
        trainer.save_model(str(folder))
        tokenizer.save_pretrained(folder)
print(f"adapter: {lesson.run.adapter}")

# %% [markdown]
# ## Exercise
#
# Run the notebook again with `MAX_STEPS` 50 larger than the steps the run has now. How much of the work is repeated?

# %%
first_step, steps = numbers["resumed_from_step"], numbers["steps"]
went_on = 0 < first_step < steps
print(f"[{' OK ' if went_on else 'TODO'}] saw steps {first_step} to {steps} trained, expected a start later than 0",
      "" if went_on else f"-> run again with MAX_STEPS = {steps + 50}")

# %% [markdown]
# ## You now have
#
# - a LoRA adapter trained on your data with a recipe that fits it, with the loss only on the assistant's words,
# - the step that did best on rows held back from the training, not just the last one,
# - checkpoints that verify, so that a lost session costs a few steps,
# - a TensorBoard log and a W&B run (offline without a key),
# - proof that the adapter learned and the base stayed as it was.
#
# Lesson 04 merges the adapter and asks whether the tuning helped.

# %%
lesson.finish(
    **numbers,
    form=report.form.value,
    examples=report.examples,
    trained_tokens=report.trained,
    rows_left_out=len(fitting.left_out),
    weights=kinds,
    adapter_moved=moved.adapter,
    base_moved=moved.base,
    data_fingerprint=card.fingerprint,
    oom_rungs=training.oom_rungs(lesson),
    kept_step=best[0] if best else numbers["steps"],
)
