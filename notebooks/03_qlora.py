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
# ## Rows
#
# Lesson 02 left your rows in the run folder. If it has not run, they are prepared now, with the same checks.

# %%
from nbutils import data

data.prepare(DATA, lesson.run.data, default=lesson.profile.course.data, rows=lesson.profile.course.rows)
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
stop_ids = chat.find_stop_ids(tokenizer, lesson.model)
dataset = chat.filter_by_length(tokenizer, train_rows, lesson.profile.sft.max_length, stop_ids)
dataset.write_too_long(lesson.run.data)
print(dataset)
print(chat.check_contract(dataset))

# %% [markdown]
# ## 4 or 16 bits?
#
# QLoRA keeps the base model in 4 bits, plain LoRA in 16. In 4 bits each weight becomes one of 16 values: that takes about a third of the
# memory, and costs much of what some models know and hardly anything of what others do. So it is measured before anything is trained: the
# loss of the base model on some held-out rows, then the same with every weight of its linear layers rounded to 4 bits (bitsandbytes'
# `quantize_4bit` and `dequantize_4bit`). On a GPU `method: auto` takes 4 bits if they raise the loss by at most 0.05 nats per token, or
# if 16 do not fit. Without a GPU, and where it cannot be measured, models below a billion parameters get 16 bits and others 4. The
# bundled tiny models are trained in 4 bits whatever they cost, so that the lesson is the real one; unquantized is float32 on a CPU. They
# know nothing of their task yet, so their loss is high, and rounding can even lower it: it makes wrong guesses less sure.

# %%
from nbutils import evaluation, training

training.require_unquantized(lesson.model)
training.require_own_weights(lesson.model)
losses = evaluation.base_losses(lesson.begun(), dataset, eval_rows)

# %% [markdown]
# ## The recipe
#
# Batch size, epochs and learning rate depend on your rows: too many rows per step leave too few steps, and the loss hardly
# moves. `conversations_per_step` is the size of a step. The GPU only decides how it is computed: `per_device_train_batch_size` rows
# at a time, `gradient_accumulation_steps` times. With packing, several conversations share one row, so that a step of 2 rows may
# hold 8 of them. Here are the values that matter most, with their reasons (leave out `only` to see all), and what the training
# will need of this machine. Each name is the keyword argument of the library that takes it. The recipe also says on how many
# held-out rows the validation loss is measured (`validation`); they are rendered as the others are.

# %%
from nbutils import display, plan

lesson = lesson.with_recipe(dataset.lengths, len(eval_rows), losses)
profile = lesson.profile
validation = chat.validation_dataset(dataset, eval_rows, profile.course.validation_rows)
most = ("method", "from_pretrained", "lora.r", "sft.max_length", "sft.per_device_train_batch_size",
        "sft.gradient_accumulation_steps", "sft.num_train_epochs", "sft.max_steps", "sft.learning_rate", "sft.packing",
        "course.conversations_per_step")
display.show_choices(lesson.resolved, only=most)
print(plan.describe(plan.require(lesson.resolved)))

# %% [markdown]
# ## The base model in 4 bits
#
# The block `quantization` of the profile holds arguments of `BitsAndBytesConfig`: `nf4` fits the distribution of trained weights,
# double quantization also compresses the scales, and matrix products are computed in the precision of your machine. (Left to its
# defaults, bitsandbytes would use `fp4` and float32.) With `method: lora` the base model stays in 16 bits, and all this is not used.

# %%
import torch
from transformers import BitsAndBytesConfig

dtype = getattr(torch, profile.from_pretrained.dtype)
quantization = BitsAndBytesConfig(
    **profile.quantization,  # load_in_4bit, bnb_4bit_quant_type, bnb_4bit_use_double_quant
    bnb_4bit_compute_dtype=dtype,
    bnb_4bit_quant_storage=dtype,  # so that FSDP can divide the weights among GPUs
)

# %% [markdown]
# Each weight is quantized while it is loaded. Gradients will flow through these weights, but none of them will change.

# %%
from transformers import AutoModelForCausalLM, set_seed
from nbutils import distributed

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
questions = eval_rows[:3]
before = evaluation.answer_rows(model, tokenizer, questions)
display.show_answers(questions, before=before)

# %% [markdown]
# ## The adapter
#
# LoRA adds two small matrices, A and B, to a weight W: instead of W·x the layer computes W·x + (alpha/r)·B·(A·x). A has r rows,
# B has r columns, and only these two are trained. The rank `r` limits how much can be learned, `alpha / r` scales the adapter's effect.

# %%
from peft import LoraConfig

lora = LoraConfig(
    **profile.lora,  # r, lora_alpha, lora_dropout, target_modules, use_rslora: each explained in the profile's file
    task_type="CAUSAL_LM",
)
print(f"r {lora.r}, lora_alpha {lora.lora_alpha}, lora_dropout {lora.lora_dropout}, target_modules {lora.target_modules}")

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
# The block `sft` of the profile holds arguments of `SFTConfig`; the table above explains the main ones. Rows are concatenated without
# padding (`padding_free`). With packing they are first packed into sequences of up to `max_length` tokens. The validation loss is
# measured before the first step (`eval_on_start`) and at every save (`eval_steps`); `load_best_model_at_end` keeps the step where
# it was lowest. `training.bookkeeping` adds what is not about learning: folders, saving, the seed. `report_to` names the
# trackers that get the numbers: TensorBoard (the second line below says how to open it here), W&B, online if there is a `WANDB_API_KEY`,
# and SwanLab, where it is installed, if there is a `SWANLAB_API_KEY` or `SWANLAB_MODE=offline`. `SET = "sft.report_to=[mlflow]"` names
# another one that transformers knows. In another terminal, `python -m nbutils watch` shows the training.

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
#
# Below are four trainings of a 135M model to compare yours with. *Healthy*: both losses fall and flatten (learning rate 2e-4). *Too slow*:
# the learning rate is too small (1e-6), or there are too few steps. *Diverging*: the learning rate is too large (0.05).
# *Overfitting*: 32 rows are memorized, and the validation loss rises.

# %%
display.plot_losses(result.history, lesson.run.logs / "loss.png")
display.plot_loss_examples()

# %% [markdown]
# ## After
#
# The same three questions, now answered with the adapter. Lesson 04 asks all held-out questions and compares the scores.

# %%
after = evaluation.answer_rows(trainer.model, tokenizer, questions)
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
# `python -m nbutils run --profile tiny --only 03 --set sft.learning_rate=2e-2 -p RUN_NAME fast`, the same with `2e-4` and `slow`,
# then `python -m nbutils compare tiny fast slow`.

# %%
from nbutils import compare

runs = compare.beside(lesson.run, trained=dataset.facts() | result.facts())
missing = [name for name in ("fast", "slow") if name not in runs]
print(f"[{'todo' if missing else ' OK '}] exercise: saw the runs {', '.join(runs)}, expected fast and slow among them")
if missing:
    print(f'Run this notebook with RUN_NAME = "{missing[0]}" and SET = "sft.learning_rate=..." to compare them.')

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
lesson.finish(dataset, result, base_losses=losses and vars(losses))
