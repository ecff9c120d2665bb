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
# Kaggle gives two T4s, and lesson 03 uses one of them. Here the same lesson 03, the same file, trains on all GPUs of a
# machine, one process for each. They share the rows of a step, and, where a model does not fit one GPU, the model too. Without
# a GPU, two processes on the CPU train the tiny model in the same way.
#
# You will have
#
# - one training shared by several processes, with the engine that your model and your GPUs need, and its command line,
# - a comparison with one process: the same rows in every step, the same losses, and how much faster it is,
# - the memory of 1 to 16 cards, the speed and cost of 1 to 64, from formulas that you can check against your own comparison,
# - an adapter in the run folder, ready for lesson 04.
#
# Takes about three minutes with the tiny model on 2 cores; with a larger one as long as lesson 03, divided by your GPUs, and a
# few minutes for the comparison. Disk: as lesson 03.

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
# `PROCESSES` 0 starts one for each GPU. `ENGINE` is a name of the table below; `"auto"` chooses by the size of your model.
# `TRIAL_STEPS` is the length of the comparison; 0 leaves it out, for example when a long run is started a second time. The
# others are those of lesson 03. A run that lesson 03 has finished leaves nothing to train: give it a larger `MAX_STEPS`, or take
# another `RUN_NAME`.

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
# Start the lesson.

# %%
import nbutils

lesson = nbutils.start("06_scale_out", globals())

# %% [markdown]
# How many processes? One for each GPU. Without a GPU, two, with one CPU thread each.

# %%
from nbutils import distributed

choice = distributed.processes_for(lesson.gpu.count if lesson.gpu else 0, PROCESSES)
processes, threads = choice.value, 0 if lesson.gpu else 1
print(f"processes: {processes} ({choice.reason})")

# %% [markdown]
# ## Which engine
#
# Every process takes its share of the rows of a step. Then all average their gradients and take the same step, so that the
# adapters stay equal. `conversations_per_step` in a profile is the step of all GPUs together: with two GPUs each takes half of its
# rows, so learning rate and number of steps need no change. Engines differ in what a process holds, and what it must send.
#
# | engine | each process holds | sent in a step | for |
# |---|---|---|---|
# | `ddp` | the whole model | the adapter's gradients | a model that fits one GPU; as fast as it gets |
# | `fsdp_qlora` | its part of the 4-bit model and of the optimizer | the model, twice in each micro-step | a model whose 4 bits do not fit one GPU |
# | `fsdp_lora` | the same in 16 bits | the same, three to four times as much | LoRA without 4 bits (`method: lora`) on GPUs that one by one are too small |
# | `zero2` | the whole model, its part of gradients and optimizer | the adapter's gradients in each micro-step | who knows DeepSpeed |
# | `zero2_offload` | the whole model; the optimizer is in RAM | the same | adapters of a very large rank |
# | `zero3` | as `fsdp_lora` | as `fsdp_lora`, and gradients in each micro-step | who knows DeepSpeed, with `method: lora`; slower than FSDP |
#
# ZeRO-2 divides gradients and optimizer, and with LoRA these are small. By the forecast of this course it even needs more: a 7B
# in 4 bits takes 6.4 GiB of each of two GPUs with DDP, 7.4 with ZeRO-2 and 7.1 with offload (in the setting of the table further
# below), because DeepSpeed has a buffer of its own and no 8-bit optimizer here. The three `zero` engines need `pip install deepspeed`.
# For 16 bits set `SET = "method=lora, quantization.load_in_4bit=false"`.
#
# So: DDP if the model fits one GPU, else FSDP. `auto` does the same.

# %%
from nbutils import plan

choice = plan.engine_for(lesson.resolved, processes, ENGINE)
engine = choice.value
print(f"engine: {engine} ({choice.reason})")

# %% [markdown]
# An engine is chosen by a YAML file that `accelerate launch` reads, one for each in `configs/accelerate`. (`accelerate config` asks
# questions and writes such a file for your own projects.) What the keys mean:
#
# | key | says |
# |---|---|
# | `distributed_type` | the engine: `MULTI_GPU` is DDP, the others are `FSDP` and `DEEPSPEED` |
# | `num_processes` | on all machines together; not in these files, because the command line says it |
# | `mixed_precision` | `no`: lesson 03 says it itself, with `bf16` or `fp16` in `SFTConfig` |
# | `fsdp_version` | 2 shards each weight by itself, so that 4-bit and trainable ones can stand side by side |
# | `fsdp_auto_wrap_policy` | what is gathered at once: with `TRANSFORMER_BASED_WRAP` one decoder layer |
# | `fsdp_reshard_after_forward` | `true` drops a layer after its forward pass and gathers it again for the backward pass; `false` keeps it, which is faster and needs the memory of a whole model |
# | `fsdp_offload_params` | `true` keeps the shards in RAM and brings them to the GPU for each layer: slow |
# | `fsdp_cpu_ram_efficient_loading` | `true`: one process of a machine reads the model and sends the others their shards; not possible in 4 bits |
# | `fsdp_state_dict_type` | `FULL_STATE_DICT` saves one file that any number of processes can continue, `SHARDED_STATE_DICT` one of each process |
# | `fsdp_activation_checkpointing` | `false`, because `gradient_checkpointing` of `SFTConfig` does it |
# | `zero_stage` | 1 shards the optimizer, 2 the gradients too, 3 the weights too |
# | `offload_optimizer_device`, `offload_param_device` | `cpu` keeps optimizer or weights in RAM |
# | `zero3_init_flag` | `true`: each process loads only its part of the weights |
# | `gradient_accumulation_steps`, `gradient_clipping` | `auto`: as `SFTConfig` says |
#
# The next cell reads your engine's file, and for comparison one of FSDP and one of DeepSpeed, as the launcher does.

# %%
from accelerate.commands.config.config_args import load_config_from_file

file = distributed.config_file(engine)
for name in dict.fromkeys([engine, "fsdp_qlora", "zero2_offload"]):
    config = load_config_from_file(str(file.with_stem(name)))
    print(f"{name}: distributed_type {config.distributed_type.value}, mixed_precision {config.mixed_precision}")
    for key, value in (config.fsdp_config | config.deepspeed_config).items():
        print(f"  {key:30} {value}")

# %% [markdown]
# The command line that this notebook will run, for a terminal too: `accelerate launch` with that file. Each process gets a number (its
# rank) and a GPU. With one process and DDP it is plain Python. Profile, model and rows are those of this run; `--MAX_STEPS` and
# `--MAX_HOURS` may be added. Ctrl-C saves a checkpoint, for which the variable gives ten minutes; the traceback that follows is the
# launcher's own. Port 0 is any free one. (`accelerate launch` is short for `python -m accelerate.commands.launch`. For DDP, `torchrun
# --nproc_per_node=2 --master-port=29500` does the same without a file.)

# %%
import shlex
import sys
from nbutils import files

alone = [sys.executable, str(files.NOTEBOOKS / "03_qlora.py")]
together = [
    sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file),
    "--num_processes", str(processes), "--main_process_port", "0", str(files.NOTEBOOKS / "03_qlora.py"),
]
if processes == 1 and engine == "ddp":
    together = alone
print("TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600", shlex.join([*together, *lesson.arguments("03_qlora", DATA=DATA)]))

# %% [markdown]
# Several machines need no other lesson. The same command is started on each of them, with `torchrun --nnodes=2` or
# `accelerate launch --num_machines 2`, and one address at which they meet. [docs/clusters.md](../docs/clusters.md) has the whole
# commands, job files for SLURM, Kubernetes, SkyPilot and Ray, and what the machines must share. First use all GPUs of one
# machine: between machines everything is sent over a network.

# %% [markdown]
# ## What fits on how many cards
#
# GiB of each card, and in brackets the smallest cards that have them and 8 % + 0.5 GiB to spare. `2 x 8` is two machines with
# eight cards. `ddp` and `fsdp_qlora` have the model in 4 bits, `fsdp_lora` in 16; a micro-batch is one row of 2,048 tokens, with gradient
# checkpointing. These are forecasts. Put the other engines into the cell to see them (those of DeepSpeed are less exact). A machine
# also needs RAM: with `fsdp_qlora` each process loads the 4-bit model for itself, so a 72B on eight cards takes 307 GiB while it
# starts.

# %%
from nbutils import display
from nbutils.models import find_shape
from nbutils.plan import gpus, memory

cards = {141: "H200", 80: "A100-80GB", 48: "L40S", 24: "RTX 4090", 16: "T4"}
limits = {size: memory.limit_gib(gpus.find(name)) for size, name in cards.items()}

def recipe_for(engine, cards):
    method = "lora" if engine in ("fsdp_lora", "zero3") else "qlora"
    return memory.Recipe(method=method, engine=engine, cards=cards, gradient_accumulation_steps=max(1, 8 // cards))

table = []
for model in ("Qwen2.5-14B", "Qwen2.5-32B", "Qwen2.5-72B"):
    for machines, each in [(1, 1), (1, 2), (1, 4), (1, 8), (2, 8)]:
        row = {"model": model, "cards": f"{machines} x {each}" if machines > 1 else each}
        for name in ("ddp", "fsdp_qlora", "fsdp_lora"):
            gib = memory.peak_gib(find_shape(model), recipe_for(name, machines * each))
            row[name] = f"{gib:.1f} (none)"
            for size, limit in limits.items():
                if gib <= limit:
                    row[name] = f"{gib:.1f} ({size} GB)"
        table.append(row)
print(display.aligned(table))

# %% [markdown]
# Where the numbers come from, for a 72B on four cards of 24 GB. What stands before `/ 4` is divided by the cards. The scales of
# the 4-bit weights are not, and every card puts together the layers that it is about to compute. Activations, logits and workspace
# are whole: each card computes its own rows. That is why twice the cards never halve the memory.

# %%
from nbutils.language import tr

shape, recipe = find_shape("Qwen2.5-72B"), recipe_for("fsdp_qlora", 4)
for part, size in memory.parts(shape, recipe).items():
    print(f"{size:6.2f} GiB  {tr(part)}")
    for term in memory.terms(shape, recipe).get(part, []):
        print(f"{'':12} {tr(term.name)} {term.size / 2**30:.2f} / {term.shared_by}")

# %% [markdown]
# ## Once together, once alone
#
# The same few steps twice, in a temporary folder: first with all processes and the engine above, then with one. (With one GPU
# there is nothing to compare, and a model that needs several cannot be trained alone: then this is left out.)

# %%
import shutil

trials = lesson.scratch / "trials"
shutil.rmtree(trials, ignore_errors=True)
possible = processes > 1 and TRIAL_STEPS and plan.fits_alone(lesson.resolved)
for name, command, count in [("together", together, processes), ("alone", alone, 1)] if possible else []:
    print(f"--- {name}: {count} process{'es' if count > 1 else ''} {engine if count > 1 else ''}")
    words = lesson.arguments("03_qlora", RUN_NAME=name, MAX_STEPS=TRIAL_STEPS, DATA=DATA)
    lesson.launch([*command, *words], count, threads, trials)

# %% [markdown]
# The number of steps and the rows of each step are equal, and the losses agree within 1 %. They are not equal to the last digit,
# because the same numbers are added in another order and rounded differently. A larger difference means that something else
# is different. (With dropout each process draws its own random numbers: then only the trend agrees.) On a CPU the two processes
# share its cores, so do not expect twice the speed. With 3, 5, 6 or 7 processes an automatic batch is rounded up: name one in `SET`.

# %%
from nbutils import compare

compared = compare.speed_up(trials / "alone", trials / "together") if possible else None
if compared:
    print(f"tokens per second: {compared.alone['tokens_per_second']:,.0f} alone, {compared.together['tokens_per_second']:,.0f} together, "
          f"{compared.speedup:.2f} times as many; losses differ by at most {compared.loss_difference:.1e} of the loss")
    print(f"[{' OK ' if compared.same_work else 'WARN'}] equal steps, equal batch, losses within 1 %")

# %% [markdown]
# ## The arithmetic
#
# A step is computing and sending. Computing is the speed of one card: yours from the comparison above, or, without a GPU, the
# forecast for a 9B on a rented card.

# %%
forecast = plan.example(lesson.resolved, rows=10_000, mean_length=300)
shape, recipe = forecast.shape, forecast.recipe
rate = compared.alone["tokens_per_second"] if compared and lesson.gpu else forecast.tokens_per_second
rate = rate or 1000.0  # where nobody knows the speed of your GPU
print(f"{shape.name}, {recipe.method}, {forecast.gpu.name}: one card trains {rate:,.0f} tokens/s")

# %% [markdown]
# Sending is bytes divided by bandwidth. Of N cards in a ring each sends
#
# - with DDP, the adapter's gradients: 2 (N - 1) / N x 4 bytes x adapter parameters, once in a step,
# - with FSDP, the model: 2 (N - 1) / N x its bytes in each micro-step, and the adapter's gradients.

# %%
bits = 4 if recipe.method == "qlora" else 16
model_bytes = shape.linear_params * bits / 8 + (shape.params - shape.linear_params) * 2
gradient_bytes = shape.adapter_params(recipe.r) * 4

def sent_bytes(strategy, cards, micro_steps=1):
    others = (cards - 1) / cards
    if strategy == "ddp":
        return 2 * others * gradient_bytes
    return others * (2 * model_bytes * micro_steps + gradient_bytes)

for name in ("ddp", f"fsdp_{recipe.method}"):
    print(f"{name}: each of 8 cards sends {sent_bytes(name, 8) / 1e9:.2f} GB")

# %% [markdown]
# The table gives every card 8 rows in a step. Up to 8 cards are in one machine, on PCIe with 12 GB/s; more are in several, with
# 25 Gbit/s Ethernet between them (2.5 GB/s). Both bandwidths are assumptions. A card computes its rows in micro-batches; none is
# shorter than the time Python needs to start the kernels of all layers. Nothing is computed while something is sent: engines
# hide a part of it.

# %%
import math
from nbutils.plan import speed
from nbutils.plan.forecast import recipe_of

micro_batch = recipe.per_device_train_batch_size
row_tokens = recipe.length * (speed.PACKED if recipe.packing else 1)
shortest = min(speed.launch_seconds(shape, recipe), micro_batch * row_tokens / rate)  # of a micro-step

def seconds(strategy, cards, rows, gbps):
    micro_steps = math.ceil(rows / min(rows, micro_batch))
    computing = max(rows * row_tokens / rate, micro_steps * shortest)
    return computing, sent_bytes(strategy, cards, micro_steps) / gbps / 1e9

for name in ("ddp", f"fsdp_{recipe.method}"):
    table = []
    for cards in (1, 2, 4, 8, 16, 32, 64):
        computing, sending = seconds(name, cards, rows=8, gbps=12 if cards <= 8 else 2.5)
        tokens = cards * 8 * row_tokens / (computing + sending)
        price = forecast.gpu.price.times(cards * 1e6 / tokens / 3600)
        table.append({"cards": cards, "computing": f"{computing:.2f} s", "sending": f"{sending:.2f} s", "tokens/s": f"{tokens:,.0f}",
                      "efficiency": f"{tokens / cards / rate:.0%}", "a million tokens": str(price)})
    print(f"\n{name}\n{display.aligned(table)}")

# %% [markdown]
# More cards finish sooner, but a token never gets cheaper. DDP keeps nearly all the speed of every card, also over a slow
# network, because an adapter is small. FSDP sends the whole model. In the forecast for a 9B on RTX 4090s it leaves less than half
# of the speed on 8 cards with PCIe, and over Ethernet an eighth: there 16 cards in two machines are slower than 8 in one.
#
# From how many cards on does sending take as long as computing? With 8 rows for each card the step grows with the cards; with 8
# rows in all each card has less to compute, but never less than it takes to start a layer's kernels. A dash: no number of cards
# up to 4,096. `nvlink4` and `pcie4` are inside a machine, `ib400` (InfiniBand) and `25gbe` (Ethernet) between machines.

# %%
def cards_until_sending_wins(strategy, gbps, shared):
    for cards in range(2, 4097):
        computing, sending = seconds(strategy, cards, 8 / cards if shared else 8, gbps)
        if sending >= computing:
            return cards
    return "–"

table = []
for link, gbps in {"nvlink4": 360, "ib400": 40, "pcie4": 12, "25gbe": 2.5}.items():
    row = {"link": link, "GB/s": gbps}
    for name in ("ddp", f"fsdp_{recipe.method}"):
        row |= {f"{name}, 8 rows a card": cards_until_sending_wins(name, gbps, shared=False),
                f"{name}, 8 rows in all": cards_until_sending_wins(name, gbps, shared=True)}
    table.append(row)
print(display.aligned(table))

# %% [markdown]
# Does the arithmetic hold? Here is your own comparison: of N processes each computes an Nth of what one computed, then
# sends over PCIe. On two GPUs both numbers should come close with enough `TRIAL_STEPS`: the first steps are slow, and the
# validation counts too. If measured stays much longer, the cards may reach each other more slowly than 12 GB/s. On a CPU do not
# expect it: two processes share cores and memory bandwidth, and with so small a model most of a step is no computing.

# %%
if compared:
    single, several = compared.alone, compared.together
    computing = single["train_seconds"] / single["steps"] * several["batch"] / several["processes"] / single["batch"]
    sending = speed.sent_bytes(find_shape(lesson.model), recipe_of(several)) / 12e9
    print(f"each of {several['processes']} processes computes {computing:.3f} s and sends {sending:.3f} s at 12 GB/s: "
          f"{computing + sending:.3f} s predicted, {several['train_seconds'] / several['steps']:.3f} s measured")

# %% [markdown]
# What was measured so far: two processes on *one* H200, which send over the machine's loopback device, 1.8 GB/s
# (`benchmarks/scale_out.py`, its numbers are in `benchmarks/results`). A model of the shape of Qwen2.5-7B in 4 bits, 2 rows of 8,192 tokens
# in a step:
#
# | | seconds of a step |
# |---|---|
# | one plain process | 0.97 |
# | `torchrun` with one process | 0.99 |
# | FSDP with one process | 0.99 |
# | ZeRO-2 with one process | 1.04 |
# | DDP, two processes | 1.20; the arithmetic says 0.97 + 0.09 |
# | FSDP, two processes | 3.0; the arithmetic says 0.97 + 3.0, so a part of it was hidden |
#
# Both processes compute on the same card, so computing takes as long as with one, or longer. Memory was within 3.3 % of the
# forecast. In 16 bits FSDP takes 0.97 s as well, but ZeRO-3 about 2: it cannot use the course's fused LoRA layers.
#
# Not measured: two real GPUs, and two machines with a real network. There your own table is the measurement. That losses and
# adapter are those of one process was tried on a CPU in float32, with every engine: no logged loss differs by more than 1e-6
# (1.2e-5 with the optimizer in RAM). On the H200 in bfloat16, with two processes: DDP not at all, FSDP and ZeRO-2 by 0.04 %.

# %% [markdown]
# ## The training
#
# Now the whole run, with all processes. Checkpoints, resuming and the time limit are those of lesson 03: a run that was started on
# one GPU continues on two, and the other way round, also with another engine. On Kaggle, *Save Version > Save & Run All* runs
# this notebook in the background; it ends before the 12 hours are over, and continues when its output is attached to the next
# version. On a rented machine run it with `papermill`, or use the command line above.

# %%
from nbutils import record

earlier = record.read_facts(lesson.run.facts).get("lessons", {}).get("03_qlora", {})
words = lesson.arguments("03_qlora", DATA=DATA, MAX_STEPS=MAX_STEPS, MAX_HOURS=MAX_HOURS)
lesson.launch([*together, *words], processes, threads)

# %% [markdown]
# What it took, as lesson 03 recorded it in `facts.json`. The memory is that of one GPU; the engine of one plain
# process is empty.

# %%
trained = record.read_facts(lesson.run.facts)["lessons"]["03_qlora"]
for name in ("processes", "engine", "batch", "steps", "planned_steps", "final_loss", "tokens_per_second", "peak_memory_gib"):
    print(f"{name:18} {trained[name]}")
if trained["resumed_from_step"] == trained["steps"]:
    print("This run was finished before: nothing was trained now. Raise MAX_STEPS, or choose another RUN_NAME.")
print(f"adapter: {lesson.run.adapter}" if record.complete(trained) else "not finished: run this notebook again")

# %% [markdown]
# ## Exercise
#
# Is a run tied to the processes, or to the engine, it was started with? Start this lesson again with ten more steps, without the
# comparison, and with `PROCESSES = 1`, or with `ENGINE = "fsdp_qlora"` (`"fsdp_lora"` for 16 bits). The next cell expects steps that
# begin after 0, and another number of processes or another engine than before. (A model that needs all your GPUs stays with them.)

# %%
first, last = trained["resumed_from_step"], trained["steps"]
before, now = ((one.get("processes"), one.get("engine")) for one in (earlier, trained))
good = 0 < first < last and before != now
print(f"[{' OK ' if good else 'todo'}] exercise: saw steps {first} to {last}, first {before}, then {now}; expected a change after step 0")
if not good:
    print(f"Run this lesson again, not with {now}: MAX_STEPS = {last + 10}, TRIAL_STEPS = 0. It continues at step {last}.")

# %% [markdown]
# ## You now have
#
# - one training shared by several processes, with the engine that your model and your GPUs need, and its command line,
# - a comparison with one process: the same rows in every step, the same losses, and how much faster it is,
# - the memory of 1 to 16 cards, the speed and cost of 1 to 64, from formulas that you can check against your own comparison,
# - an adapter in the run folder, ready for lesson 04.

# %%
lesson.finish(
    processes=processes,
    engine=engine,
    speedup=compared and compared.speedup,  # None keeps what an earlier run measured
    loss_difference=compared and compared.loss_difference,
)
