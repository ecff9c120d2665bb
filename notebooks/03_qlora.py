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
# QLoRA keeps the base model frozen in 4 bits and trains small LoRA matrices beside it. On a free T4 this trains a 4B model; on
# a laptop without a GPU the same cells train the bundled tiny model.
#
# You will have
#
# - a LoRA adapter trained on your rows, with the loss only on the answers,
# - the step with the lowest validation loss, not just the last one,
# - the same questions answered before and after the training,
# - verified checkpoints: a lost session costs the steps since the last checkpoint.
#
# Takes about two minutes with the tiny model on 2 cores; minutes to hours with a larger one on a GPU. Disk: the model and three
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
# Empty or zero leaves a value to the profile; `SET = "train.learning_rate=1e-4, lora.rank=64"` replaces any value of it.
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
# Start the lesson. It finds the platform, the GPU, the profile and the folder of this run. If `RESUME` names a step
# that has no checkpoint, the lesson stops here.

# %%
import nbutils
from nbutils import checkpoints

lesson = nbutils.start("03_qlora", globals())
checkpoints.require_step(lesson.folders, lesson.run.name, RESUME)

# %% [markdown]
# ## Rows
#
# Lesson 02 left your rows in the run folder. If it has not run, they are prepared now, with the same checks.

# %%
from nbutils import data

data.prepare(DATA, lesson.run.data, default=lesson.profile.data.source, rows=lesson.profile.data.rows)
train_rows, eval_rows = data.load(lesson.run.data)
print(f"{len(train_rows)} rows to train on, {len(eval_rows)} held out")

# %% [markdown]
# ## Tokens
#
# The chat template turns rows into tokens, and a mask limits the loss to the answers. Rows longer than `max_length` are left
# out: cut off, they would lose their stop token. Then the contract of lesson 02 is checked for every row.

# %%
from transformers import AutoTokenizer
from nbutils import chat

tokenizer = AutoTokenizer.from_pretrained(lesson.model, trust_remote_code=False)
dataset = chat.build_dataset(tokenizer, train_rows, eval_rows, lesson)
print(dataset)

# %% [markdown]
# ## The recipe
#
# Batch size, epochs and learning rate depend on your rows: too many rows per step leave too few steps, and the loss hardly
# moves. The GPU only decides how a step is split into micro-batches. With packing, several conversations share one row, and
# `train.batch` counts packed rows: a step of 2 rows may hold 8 conversations, as the first line says. Below it are the values
# that matter most, with their reasons (leave out `only` to see all), and what the training will need of this machine.

# %%
from nbutils import display, plan

lesson = lesson.with_recipe(dataset.lengths, len(eval_rows))
profile = lesson.profile
most = ("method", "machine", "lora.rank", "train.max_length", "train.batch", "train.micro_batch", "train.epochs",
        "train.max_steps", "train.learning_rate", "train.packing")
display.show_choices(lesson.resolved, only=most)
print(plan.describe(plan.require(lesson.resolved)))

# %% [markdown]
# ## The base model in 4 bits
#
# `nf4` fits the distribution of trained weights, double quantization also compresses the scales, and matrix products are
# computed in the precision of your machine. (Left to its defaults, bitsandbytes would use `fp4` and float32.) Models under a
# billion parameters lose too much in 4 bits; for those, `auto` sets `method: lora`, which leaves the base model in 16 bits.
# (The bundled tiny model is trained in 4 bits all the same, so that the lesson is the real one.)

# %%
import torch
from transformers import BitsAndBytesConfig

dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[profile.machine.precision]
quantization = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type=profile.quantization.type,
    bnb_4bit_use_double_quant=profile.quantization.double,
    bnb_4bit_compute_dtype=dtype,
    bnb_4bit_quant_storage=dtype,  # so that FSDP can divide the weights among GPUs
)

# %% [markdown]
# Each weight is quantized while it is loaded. Gradients will flow through these weights, but none of them will change.

# %%
from transformers import AutoModelForCausalLM, set_seed
from nbutils import training

training.require_unquantized(lesson.model)
set_seed(SEED)
model = AutoModelForCausalLM.from_pretrained(
    lesson.model,
    quantization_config=quantization if profile.method == "qlora" else None,
    dtype=dtype,
    attn_implementation=training.attention(profile.machine.attention),
    device_map=lesson.device_map,
    trust_remote_code=False,
)
print(f"{model.get_memory_footprint() / 2**20:,.0f} MiB in memory")

# %% [markdown]
# ## Before
#
# Three held-out questions, answered by the model as it is. We ask the same three after the training.

# %%
questions = eval_rows[:3]
before = chat.answer(model, tokenizer, questions)
display.show_answers(questions, before=before)

# %% [markdown]
# ## The adapter
#
# LoRA adds two small matrices, A and B, to a weight W: instead of W·x the layer computes W·x + (alpha/r)·B·(A·x). A has r rows,
# B has r columns, and only these two are trained. The rank `r` limits how much can be learned, `alpha / r` scales the adapter's effect.

# %%
from peft import LoraConfig

lora = LoraConfig(
    r=profile.lora.rank,  # higher learns more and needs more memory
    lora_alpha=profile.lora.alpha,  # usually twice the rank
    lora_dropout=profile.lora.dropout,
    target_modules=profile.lora.target_modules,  # all linear layers learn more than q and v alone
    use_rslora=profile.lora.use_rslora,  # scales by alpha / sqrt(r), for large ranks
    task_type="CAUSAL_LM",
)

# %% [markdown]
# How large are A and B beside W? Here are the sizes in the first linear layer of this model.

# %%
first = next(part for part in model.modules() if isinstance(part, torch.nn.Linear))
d_in, d_out, r = first.in_features, first.out_features, lora.r
print(f"W        {d_out} x {d_in} = {d_out * d_in:,} parameters, frozen")
print(f"A and B  {r} x {d_in} and {d_out} x {r} = {r * (d_in + d_out):,} parameters, trained")

# %% [markdown]
# Predict: what percentage of the model's parameters will be trained? Of the other linear layers, those of the MLP are larger, and
# those for keys and values may be smaller. The embeddings get no adapter. Replace `None` with your number; a cell below compares
# it. You can come back to it later: run this cell again, then that one.

# %%
my_percent = None

# %% [markdown]
# ## The training
#
# `SFTConfig` holds the values that matter; the table above explains each of them. Rows are concatenated without
# padding (`padding_free`). With packing they are first packed into sequences of up to `max_length` tokens.
# `training.bookkeeping` adds what is not about learning: folders, saving, logging, the seed. TensorBoard always logs, and the
# second line below says how to open it here. W&B logs too, online if there is a `WANDB_API_KEY`; SwanLab if there is a
# `SWANLAB_API_KEY`, or with `SWANLAB_MODE=offline`. In another terminal, `python -m nbutils watch` shows the training.

# %%
from nbutils import distributed
from trl import SFTConfig

settings = SFTConfig(
    learning_rate=profile.train.learning_rate,
    lr_scheduler_type=profile.train.scheduler,
    warmup_steps=profile.train.warmup_ratio,  # below 1: a share of all steps
    num_train_epochs=profile.train.epochs,
    max_steps=profile.train.max_steps or -1,
    per_device_train_batch_size=profile.train.micro_batch,
    gradient_accumulation_steps=profile.train.accumulation_on(distributed.world_size()),
    max_length=profile.train.max_length if profile.train.packing else None,
    packing=profile.train.packing,
    padding_free=True,
    optim=distributed.optimizer_for(profile.train.optimizer),
    weight_decay=profile.train.weight_decay,
    max_grad_norm=profile.train.max_grad_norm,
    gradient_checkpointing=profile.train.gradient_checkpointing != "off",
    activation_offloading=profile.train.gradient_checkpointing == "offload",
    bf16=profile.machine.precision == "bf16",
    fp16=profile.machine.precision == "fp16",
    **training.bookkeeping(lesson, SEED),
)

# %% [markdown]
# The trainer gets the model, the adapter, the tokens, and one callback of ours. The callback measures the validation loss at
# each save, copies each checkpoint to the run folder in the background and verifies it there, ends the run before the platform
# does, and shows progress. `prepare` casts the adapter to float32 (TRL makes it bfloat16, which a T4 cannot train) and fuses
# LoRA's additions into its matrix products, which gives the same numbers in less time.

# %%
from trl import SFTTrainer

callback = training.CourseCallback(lesson, dataset, max_hours=MAX_HOURS)
trainer = SFTTrainer(
    model=model,
    args=settings,
    train_dataset=dataset.train,
    eval_dataset=dataset.eval,
    processing_class=tokenizer,
    peft_config=lora,
    callbacks=[callback],
)
print(callback.prepare(trainer))

# %% [markdown]
# Your prediction, and how close it is. Anything between half and twice the real share counts.

# %%
trained, total = trainer.model.get_nb_trainable_parameters()
percent = 100 * trained / total
if my_percent is None:
    print("[todo] exercise: set my_percent above to a number, then run that cell and this one again")
elif 0.5 * percent <= my_percent <= 2 * percent:
    print(f"[ OK ] saw {my_percent}: {trained:,} of {total:,} parameters are trained, {percent:.2g} percent")
else:
    print(f"[todo] exercise: saw {my_percent}, expected {'more' if my_percent < percent else 'less'}: compare A and B with W above")

# %% [markdown]
# Train. A run that was interrupted continues from its newest checkpoint that verifies. If GPU memory runs out, the step is
# repeated with smaller micro-batches (and more of them, so that the batch stays), then with gradient checkpointing. If the
# machine is taken away, run this notebook again, unchanged. In float16 the first steps may be skipped while the loss scale is
# found. At the end the base model is compared with what it was: none of its weights may have changed.

# %%
result = training.train(trainer, callback, resume=RESUME)
print(result)

# %% [markdown]
# ## Training and validation loss
#
# The training loss alone can fall because the rows are memorized. The validation loss is measured on rows the training never
# sees, and the adapter of the step where it was lowest is the one that is kept.

# %%
display.plot_losses(result.history, lesson.run.logs / "loss.png")

# %% [markdown]
# Four trainings of a 135M model to compare yours with. *Healthy*: both losses fall and flatten. *Too slow*: the learning rate is
# too small, or there are too few steps. *Diverging*: the learning rate is too large. *Overfitting*: the rows are memorized, and
# the validation loss rises.

# %%
display.plot_loss_examples()

# %% [markdown]
# ## After
#
# The same three questions, now answered with the adapter. Lesson 04 asks all held-out questions and compares the scores.

# %%
after = chat.answer(trainer.model, tokenizer, questions)
display.show_answers(questions, before=before, after=after)

# %% [markdown]
# ## Save
#
# Only the adapter is saved, so it is small. It is written to a temporary folder and renamed when it is complete.

# %%
training.save_adapter(result, tokenizer)
mib = sum(file.stat().st_size for file in lesson.run.adapter.iterdir()) / 2**20
print(f"adapter: {lesson.run.adapter} ({mib:,.1f} MiB)")

# %% [markdown]
# ## Exercise
#
# How sensitive is the result to the learning rate? Run this notebook twice more: with `RUN_NAME = "fast"` and ten times the
# learning rate of the table above, then with `RUN_NAME = "slow"` and a tenth of it. The last of them shows all three side by
# side. Which validation loss is the lowest?
#
# With the tiny model the same can be done in a terminal, in a few minutes for each run on a CPU:
# `python -m nbutils run --profile tiny --only 03 --set train.learning_rate=2e-2 -p RUN_NAME fast`, the same with `2e-4` and `slow`,
# then `python -m nbutils compare tiny fast slow`.

# %%
from nbutils import compare

runs = compare.beside(lesson.run, trained=result.facts())
missing = [name for name in ("fast", "slow") if name not in runs]
print(f"[{'todo' if missing else ' OK '}] exercise: saw the runs {', '.join(runs)}, expected fast and slow among them")
if missing:
    print(f'Run this notebook with RUN_NAME = "{missing[0]}" and SET = "train.learning_rate=..." to compare them.')

# %% [markdown]
# ## You now have
#
# - a LoRA adapter trained on your rows, with the loss only on the answers,
# - the step with the lowest validation loss, not just the last one,
# - the same questions answered before and after the training,
# - verified checkpoints: a lost session costs the steps since the last checkpoint.
#
# Lesson 04 merges the adapter into the model and asks whether the training helped.

# %%
lesson.finish(dataset, result)
