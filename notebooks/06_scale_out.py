# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 06 · Train on several GPUs, and on several machines
#
# Kaggle gives two T4s, and lesson 03 uses one of them. Here the same lesson 03, the same file, trains on all GPUs of a machine, one
# *process* (a program that runs) for each. They share the rows of a step, and, where a model does not fit one GPU, the model too.
# Without a GPU, two processes on the CPU train the tiny model in the same way.
#
# You will have
#
# - one training shared by several processes, and its command line,
# - what DDP and FSDP keep on each GPU, and what GPUs send each other,
# - a comparison with one process: the same rows in every step, the same losses, and how much faster it is,
# - the speed and cost of 1 to 64 GPUs, from a calculation that you can hold against your own comparison,
# - an adapter in the run folder, ready for lesson 04.
#
# Takes about three minutes with the tiny model on 2 cores; with a larger one as long as lesson 03, divided by your GPUs, and a
# few minutes for the comparison. Disk: as lesson 03.
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
# `PROCESSES` 0 starts one for each GPU. `ENGINE` is how they share the work: a name of the table below, or `"auto"`, by the size
# of your model. `TRIAL_STEPS` is the length of the comparison; 0 leaves it out. The others are those of lesson 03. A run that lesson 03
# has finished leaves nothing to train: give it a larger `MAX_STEPS`, or take another `RUN_NAME`.

# %% tags=["parameters"]
PROFILE: str = "auto"
MODEL: str = ""
DATA: str = ""
RUN_NAME: str = ""
SET: str = ""
PROCESSES: int = 0
ENGINE: str = "auto"
TRIAL_STEPS: int = 20
MAX_STEPS: int = 0
MAX_HOURS: float = 0.0

# %% [markdown]
# Start the lesson. There is one process for each GPU; without a GPU there are two, with one CPU thread each.

# %%
import nbutils
from nbutils import distributed

lesson = nbutils.start("06_scale_out", globals())
choice = distributed.processes_for(lesson.gpu.count if lesson.gpu else 0, PROCESSES)
processes, threads = choice.value, 0 if lesson.gpu else 1
print(f"processes: {processes} ({choice.reason})")

# %% [markdown]
# ## DDP: everybody has the whole model
#
# With *DDP* (distributed data parallel) each process has the whole model, and computes the *gradients* (in which direction each weight
# of the adapter should change) of its share of the rows. Then an *all-reduce* gives everybody their average. All take the same step
# with it, so the adapters stay equal. It is the gradient that one process would have computed on all rows. By hand, with four weights:

# %%
import torch

torch.manual_seed(0)
small, rows, answers = torch.nn.Linear(4, 1, bias=False), torch.randn(8, 4), torch.randn(8, 1)

def gradient_of(share):
    loss = torch.nn.functional.mse_loss(small(rows[share]), answers[share])
    return torch.autograd.grad(loss, small.weight)[0]

first, second, whole = (gradient_of(share) for share in (slice(0, 4), slice(4, 8), slice(0, 8)))
average = (first + second) / 2
print(f"process 1  {first[0]}\nprocess 2  {second[0]}")
print(f"average    {average[0]}\nall rows   {whole[0]}  equal: {torch.allclose(average, whole)}")

# %% [markdown]
# ## FSDP: everybody has a part of it
#
# *FSDP* (fully sharded data parallel) divides the model: each GPU keeps a *shard*, its part of the weights and of the optimizer's
# state. Just before a layer is computed, an *all-gather* puts its weights together on each GPU; afterwards they are dropped. That
# happens forward and backward, in each *micro-step* (the rows of a step that a GPU computes at once).
#
# | `ENGINE` | each GPU holds | GPUs send in a step | for |
# |---|---|---|---|
# | `ddp` | the whole model | the adapter's gradients | a model that fits one GPU; as fast as it gets |
# | `fsdp_qlora` | its shard of the 4-bit model | the model, twice in each micro-step, and the gradients | a model whose 4 bits do not fit one GPU |
# | `fsdp_lora` | its shard of the model in 16 bits | the same, three to four times as much | `method: lora`, where one GPU is too small |
#
# The figure is a forecast for a 72B in 4 bits on GPUs of 24 GB (more in [docs/clusters.md](../docs/clusters.md)). Not divided
# are the activations, because each GPU computes its own rows, and the layers it has gathered. So twice the GPUs never halve the memory.

# %%
from nbutils import figures
from nbutils.language import tr
from nbutils.models import find_shape
from nbutils.plan import gpus, memory

held = {}
for name, engine, cards in [("1 GPU", "ddp", 1), ("DDP, each of 4", "ddp", 4), ("FSDP, each of 4", "fsdp_qlora", 4), ("FSDP, each of 8", "fsdp_qlora", 8)]:
    recipe = memory.Recipe(engine=engine, cards=cards, gradient_accumulation_steps=16 // cards)
    sizes = memory.parts(find_shape("Qwen2.5-72B"), recipe)
    held[name] = {tr(part): size for part, size in sizes.items() if size > 0.1}
figures.bars(held, "Memory of a 72B in 4 bits, on each GPU", "GiB", limit=memory.limit_gib(gpus.find("RTX 4090")))

# %% [markdown]
# ## The command line
#
# DDP if the model fits one GPU, else FSDP: `auto` chooses so. A YAML file in `configs/accelerate` tells it to `accelerate launch`,
# which starts the processes and gives each a number (its *rank*) and a GPU. What the keys mean, what DeepSpeed's ZeRO is, and how several
# machines start stands in [docs/clusters.md](../docs/clusters.md).
#
# The last line is the command that this notebook will run, for a terminal too. Ctrl-C saves a checkpoint, for which the variable gives
# ten minutes. Port 0 is any free one.

# %%
import shlex
import sys
from nbutils import files, plan

choice = plan.engine_for(lesson.resolved, processes, ENGINE)
engine, file = choice.value, distributed.config_file(choice.value)
print(f"engine: {engine} ({choice.reason})\n\n{file.read_text(encoding='utf-8')}")
alone = [sys.executable, str(files.NOTEBOOKS / "03_qlora.py")]
together = [
    sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file),
    "--num_processes", str(processes), "--main_process_port", "0", str(files.NOTEBOOKS / "03_qlora.py"),
]
if processes == 1 and engine == "ddp":
    together = alone
print("TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600", shlex.join([*together, *lesson.arguments("03_qlora", DATA=DATA)]))

# %% [markdown]
# ## Once together, once alone
#
# The same few steps twice, in a temporary folder: first with all processes, then with one. `conversations_per_step` in a profile is the
# step of all GPUs together: of two GPUs each takes half of its rows. So the losses agree within 1 %; the same numbers are added in another
# order, and rounded differently. (With dropout only the trend agrees.) On a CPU the processes share its cores: do not expect twice
# the speed. With one GPU, or a model that needs several, there is nothing to compare.

# %%
import shutil
from nbutils import compare, exercises, record

trials = lesson.scratch / "trials"
shutil.rmtree(trials, ignore_errors=True)
possible = processes > 1 and TRIAL_STEPS and plan.fits_alone(lesson.resolved)
for name, command, count in [("together", together, processes), ("alone", alone, 1)] if possible else []:
    print(f"--- {name}: {count} process{'es' if count > 1 else ''} {engine if count > 1 else ''}")
    words = lesson.arguments("03_qlora", RUN_NAME=name, MAX_STEPS=TRIAL_STEPS, DATA=DATA)
    lesson.launch([*command, *words], count, threads, trials)
compared = compare.speed_up(trials / "alone", trials / "together") if possible else None
if compared:
    print(f"tokens per second: {compared.alone['tokens_per_second']:,.0f} alone, {compared.together['tokens_per_second']:,.0f} together, "
          f"{compared.speedup:.2f} times as many; losses differ by at most {compared.loss_difference:.1e} of the loss")
    print(f"[{' OK ' if compared.same_work else 'WARN'}] equal steps, equal batch, losses within 1 %")

# %% [markdown]
# ## Exercise: bytes sent
#
# N GPUs add up their gradients in a *ring*. Each cuts its own into N pieces. In the first round each passes a piece to its neighbour,
# which adds its own and passes the sum on; after N - 1 turns every piece has been added up somewhere. In the second round the sums go
# around, in N - 1 turns again. There is a gradient for each parameter of the adapter, a float32 number (4 bytes).
#
# How many bytes does *each* of 8 GPUs send in a step with DDP? The adapter is that of your model, or, without a GPU, of a 9B.

# %% tags=["exercise"]
forecast = plan.example(lesson.resolved, rows=10_000, mean_length=300)
shape, recipe = forecast.shape, forecast.recipe
adapter_parameters = shape.adapter_params(recipe.r)
print(f"{shape.name}, rank {recipe.r}: the adapter has {adapter_parameters:,} parameters")
my_bytes = None
lesson.check(exercises.sent_bytes, my_bytes, adapter_parameters, 8)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# my_bytes = 2 * (8 - 1) * adapter_parameters / 8 * 4
# ```
#
# Two rounds, 7 turns each, a piece of an eighth in each turn, 4 bytes a parameter. With more GPUs it hardly grows: never more than twice
# the gradients.
#
# </details>

# %% [markdown]
# ## Speed and cost of 1 to 64 GPUs
#
# A step is computing and sending. Computing goes by the speed of one GPU: yours from the comparison, or, without a GPU, the forecast
# for a 9B on a rented RTX 4090. Sending is bytes divided by *bandwidth*. With FSDP a GPU sends (N - 1) / N of its gradients, and
# 2 (N - 1) / N of the model in each micro-step.
#
# Every GPU gets 8 rows in a step. Up to 8 GPUs are in one machine, on PCIe with 12 GB/s; more in several, with 25 Gbit/s Ethernet
# (2.5 GB/s). Both are assumptions, and so is that nothing is computed while something is sent.

# %%
import math
from dataclasses import replace
from nbutils import display
from nbutils.plan import speed
from nbutils.plan.forecast import recipe_of

rate = compared.alone["tokens_per_second"] if compared and lesson.gpu else forecast.tokens_per_second
rate = rate or 1000.0  # where nobody knows the speed of your GPU
tokens = 8 * recipe.length * (speed.PACKED if recipe.packing else 1)  # of a GPU in a step
micro_steps = math.ceil(8 / recipe.per_device_train_batch_size)
fsdp = f"fsdp_{recipe.method}"
speeds = {"ddp": {}, fsdp: {}}
for name, by_cards in speeds.items():
    table = []
    for cards in (1, 2, 4, 8, 16, 32, 64):
        shared = replace(recipe, engine=name, cards=cards, gradient_accumulation_steps=micro_steps)
        sending = speed.sent_bytes(shape, shared) / (12e9 if cards <= 8 else 2.5e9)
        by_cards[cards] = cards * tokens / (tokens / rate + sending)
        price = forecast.gpu.price.times(cards * 1e6 / by_cards[cards] / 3600)
        table.append({"GPUs": cards, "computing": f"{tokens / rate:.2f} s", "sending": f"{sending:.2f} s",
                      "tokens/s": f"{by_cards[cards]:,.0f}", "a million tokens": str(price)})
    print(f"\n{name}\n{display.aligned(table)}")

# %% [markdown]
# ## Exercise: half efficiency
#
# *Efficiency* is the tokens/s of N GPUs, divided by N times the tokens/s of one: how much of its speed each GPU keeps. What is the
# smallest number of GPUs in your table with which FSDP's efficiency is below a half? If it is not below with 64 either, answer 128.

# %% tags=["exercise"]
efficiency = {name: {cards: by_cards[cards] / cards / by_cards[1] for cards in by_cards} for name, by_cards in speeds.items()}
my_gpus = None
lesson.check(exercises.half_efficiency, my_gpus, efficiency[fsdp])

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# my_gpus = min((cards for cards in speeds[fsdp] if speeds[fsdp][cards] / cards < 0.5 * speeds[fsdp][1]), default=128)
# ```
#
# For a 9B on RTX 4090s it is 8. With 16 in two machines FSDP is even slower than with 8 in one: the model must pass the network.
#
# </details>

# %% [markdown]
# The same as a figure: at each point the number of GPUs and the efficiency. DDP sends a small adapter and keeps nearly all the speed,
# also over a slow network. FSDP sends the model: it is for models that do not fit otherwise, and wants fast links. Training gets faster, never cheaper.

# %%
points = {"ddp": {}, fsdp: {}}
for name, shares in efficiency.items():
    for cards, share in shares.items():
        points[name][f"{cards}: {share:.0%}" if cards > 1 else ""] = cards, speeds[name][cards]
figures.dots(points, f"{shape.name}: speed and efficiency by number of GPUs", "GPUs", "tokens/s", log="xy")

# %% [markdown]
# Does the calculation hold? In your comparison each of N processes computes an Nth of what one computed, then sends over PCIe. On two
# GPUs both numbers should come close with enough `TRIAL_STEPS`: the first steps are slow. On a CPU do not expect it. What was
# measured on an H200, and what was not, stands in [benchmarks/README.md](../benchmarks/README.md).

# %%
if compared:
    single, several = compared.alone, compared.together
    computing = single["train_seconds"] / single["steps"] * several["batch"] / several["processes"] / single["batch"]
    sending = speed.sent_bytes(find_shape(lesson.model), recipe_of(several)) / 12e9
    print(f"each of {several['processes']} processes computes {computing:.3f} s and sends {sending:.3f} s at 12 GB/s: "
          f"{computing + sending:.3f} s predicted, {several['train_seconds'] / several['steps']:.3f} s measured")

# %% [markdown]
# ## The training
#
# Now the whole run, with all processes. Checkpoints and the time limit are those of lesson 03: a run that was started on one GPU continues
# on two, and the other way round, also with another engine. (Kaggle's *Save Version > Save & Run All* runs this notebook in the background,
# ends before the 12 hours are over, and continues with its output attached.) The numbers are those lesson 03 recorded.

# %%
words = lesson.arguments("03_qlora", DATA=DATA, MAX_STEPS=MAX_STEPS, MAX_HOURS=MAX_HOURS)
lesson.launch([*together, *words], processes, threads)
trained = record.read_facts(lesson.run.facts)["lessons"]["03_qlora"]
for name in ("processes", "engine", "batch", "steps", "planned_steps", "final_loss", "tokens_per_second", "peak_memory_gib"):
    print(f"{name:18} {trained[name]}")
print(f"adapter: {lesson.run.adapter}" if record.complete(trained) else "not finished: run this notebook again")

# %% [markdown]
# ## Question
#
# You trained on one GPU, and now train the same profile on two. What do you do with the learning rate? Put `"a"`, `"b"` or `"c"` into
# `my_choice`.
#
# - **a**: I leave it as it is
# - **b**: I double it, because two GPUs train twice the rows
# - **c**: I halve it, because each GPU now sees half the rows

# %% tags=["exercise"]
my_choice = None
lesson.check(exercises.quiz, my_choice, lesson.stem)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# my_choice = "a"
# ```
#
# </details>

# %% [markdown]
# ## You now have
#
# - one training shared by several processes, and its command line,
# - what DDP and FSDP keep on each GPU, and what GPUs send each other,
# - a comparison with one process: the same rows in every step, the same losses, and how much faster it is,
# - the speed and cost of 1 to 64 GPUs, from a calculation that you can hold against your own comparison,
# - an adapter in the run folder, ready for lesson 04.

# %%
lesson.finish(
    processes=processes,
    engine=engine,
    speedup=compared and compared.speedup,  # None keeps what an earlier run measured
    loss_difference=compared and compared.loss_difference,
)
