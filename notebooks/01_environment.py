# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 01 · What can this machine do?
#
# *Fine-tuning* means: a model that can already read and write is trained a little further, on examples of your own. It often fails before
# it starts: a GPU (the chip that computes a model many times as fast as a CPU) that torch, the library that computes here, has no programs
# for; a full disk, a folder that is deleted with the machine. This lesson checks all of that first, asks a model its first question, and
# shows what fits into a GPU and why.
#
# You will have
#
# - a check of this machine: platform, GPU, memory, disk, time limit, packages, network,
# - a first answer from the bundled model, before any training,
# - a profile: model, precision and batch size for this machine, each value with its reason,
# - a forecast: what fits on which GPU, how long it trains and what it costs.
#
# Takes under a minute and downloads nothing. Each new word is explained where it first appears; the [glossary](../docs/glossary.md) lists
# them all.

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
# Leave these as they are the first time; *The profile* below explains them. `PROFILE = "auto"` chooses the profile for your GPU; any name
# from `configs/` works too. `SET` replaces single values, as in `"sft.learning_rate=1e-4, lora.r=64"`. Later lessons of the same run
# keep these values.

# %% tags=["parameters"]
PROFILE: str = "auto"
MODEL: str = ""
RUN_NAME: str = ""
SET: str = ""

# %% [markdown]
# Every lesson starts with this call. It prints the platform, the GPU, the model, and the folder in which results are kept.

# %%
import nbutils

lesson = nbutils.start("01_environment", globals())

# %% [markdown]
# ## The GPU
#
# A model is made of numbers, its *weights* or *parameters*: a 7B model has about 7 billion of them. How many bits each one takes decides
# what fits (8 bits are a byte). `float32` has 32. `float16` and `bfloat16` have 16: float16 is finer, but overflows above 65,504; bfloat16
# is coarser and reaches as far as float32, so a training in it is more stable.
#
# NVIDIA counts its generations of GPUs as *compute capability*: 8.0 and newer can train in bfloat16. A T4 (7.5) trains in float16, even though
# `torch.cuda.is_bf16_supported()` says yes there. Without a GPU the course trains on the CPU, in float32.

# %%
import torch

if lesson.gpu:
    gpu = torch.cuda.get_device_properties(0)
    print(f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB, capability {gpu.major}.{gpu.minor}")
    print("bfloat16:", "yes" if gpu.major >= 8 else "no, float16 instead")
else:
    print("No GPU found: the CPU trains, in float32.")

# %% [markdown]
# ## The rest of the machine
#
# Now disk, memory, time limit, packages and network, and on a GPU one real computation: `torch.cuda.is_available()` also says yes to GPUs
# that torch has no programs (*kernels*) for. Only what needs your attention is shown. `WARN` is worth reading (without a network the
# bundled model is all you need); `FAIL` must be fixed first, and stops the lesson. `python -m nbutils doctor` shows every check.

# %%
from nbutils import doctor

report = doctor.examine()
report.require()

# %% [markdown]
# ## A first question
#
# The course comes with a tiny model that was trained on text about one small shop. Its task is to turn a customer's message into a JSON
# ticket. `apply_chat_template` writes the message the way the model reads it, as *tokens*: words, pieces of words and signs, each with a
# number. `generate` continues the text, one token after the other.

# %%
from transformers import AutoModelForCausalLM, AutoTokenizer
from nbutils import data, files

tokenizer = AutoTokenizer.from_pretrained(files.TINY_MODEL, trust_remote_code=False)
model = AutoModelForCausalLM.from_pretrained(files.TINY_MODEL, dtype=torch.float32, trust_remote_code=False)
question, reference = data.own_language_first(data.stored_rows(files.SAMPLES / "eval.jsonl"))[1]["messages"]
inputs = tokenizer.apply_chat_template([question], add_generation_prompt=True, return_dict=True, return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=40, do_sample=False)

# %% [markdown]
# The reference is the answer we want. The model does not give it yet; lesson 03 trains it.

# %%
from nbutils import display

answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
display.show_table([{"question": question["content"], "answer": answer, "reference": reference["content"]}])

# %% [markdown]
# ## The profile
#
# A profile is a file in `configs/` with about 40 values. These are the ones that matter most, as chosen for this machine.
# Each name is a keyword argument of a library: `lora` of peft's `LoraConfig`, `sft` of TRL's `SFTConfig`, `from_pretrained` of
# transformers; `course` is what no library has.
#
# `lora` leaves all weights as they are and trains a small *adapter* beside them, about one number for each hundred weights; the *rank*
# `lora.r` is its size. `qlora` does the same beside weights that are *quantized* to 4 bits: each is rounded to one of 16 values. A training
# goes in *steps*, each of which changes the trained numbers a little; how far, the *learning rate* says. Learning rate and rank are yours
# to change; precision follows from the GPU, which computes `per_device_train_batch_size` rows at a time. Values that depend on your rows
# are chosen in lesson 03.

# %%
names = ["profile", "model", "method", "from_pretrained.dtype", "lora.r", "sft.max_length",
         "sft.per_device_train_batch_size", "sft.learning_rate"]
display.show_choices(lesson.resolved, only=names)

# %% [markdown]
# ## What fits
#
# The memory of a training can be added up before anything is downloaded:
#
# - *weights*: in 16 bits, or in 4 with their scales (what was rounded is multiplied by these again),
# - *adapters*: the trained numbers, where LoRA trains no others,
# - *gradients*: for each trained number, which way to change it so that the error shrinks,
# - *optimizer*: AdamW keeps two averages of past gradients, its moments, for each trained number (with LoRA in 8 bits each),
# - *activations*: what the model, layer after layer, computed from the rows, and needs again to compute the gradients,
# - *logits*: at each position, a score for every token that could come next; computed in parts, so that few are there at a time,
# - *workspace*: room for the kernels.
#
# Here is one 7B model, trained in four ways on four rows of 1,024 tokens at a time, on this GPU, or on a rented one if there is none (a GiB
# is 1.07 GB). *Full fine-tuning* trains every weight, with 16 bytes for each: 2 for the weight, 2 for its gradient, and 12 for the
# optimizer, which keeps the two moments and an exact copy in float32; logits and workspace come on top. *Gradient checkpointing* keeps only
# what enters each layer, and computes the other activations a second time: slower, with far less memory. The limit is a little less than
# the GPU has, because not all of it can be used. The parts stand in the order of the list; those below 0.4 GiB are not drawn, but counted.

# %%
from nbutils import figures, plan
from nbutils.language import tr

forecast = plan.example(lesson.resolved, rows=10_000, mean_length=300)
gpu = forecast.gpu
asked = {"model": "Qwen2.5-7B", "length": 1024, "micro_batch": 4, "checkpointing": "off"}
lora = plan.of_options(gpu, {**asked, "method": "lora"})
qlora = plan.of_options(gpu, {**asked, "method": "qlora"})
less = plan.of_options(gpu, {**asked, "method": "qlora", "checkpointing": "on"})
billions = lora.shape.params / 2**30  # GiB of one byte for each weight
full = {"weights": 2 * billions, "gradients": 2 * billions, "optimizer": 12 * billions, "activations": lora.parts["activations"]}
ways = {"full fine-tuning": full, "LoRA": lora.parts, "QLoRA": qlora.parts, "QLoRA + checkpointing": less.parts}
bars = {}
for name, parts in ways.items():
    large = {tr(part): gib for part, gib in parts.items() if gib > 0.4}
    bars[f"{name}  {sum(parts.values()):.0f} GiB"] = large
figures.bars(bars, f"Training {lora.shape.name} on one {gpu.name}", "GiB", limit=lora.limit_gib)

# %% [markdown]
# Now 10,000 rows of 300 tokens on six GPUs, each with the model that `PROFILE = "auto"` trains there. Every row is read three times (3
# *epochs*): 9 million tokens, which divided by the tokens per second give the time. *limit* is what a training may use of the GPU's
# memory, *peak* what it uses. Prices are in `configs/gpus.yaml`, which is yours to edit. Only the H200 was measured; the other speeds
# follow from published numbers. `python -m nbutils plan --help` shows how to ask for your own case.

# %%
gpus = ["T4", "RTX 3090", "RTX 4090", "A100-40GB", "H100", "H200"]
columns = ["GPU", "limit GiB", "model", "peak GiB", "tokens/s", "time", "cost"]
table = [{name: row[name] for name in columns} for row in plan.fits_table(gpus, rows=10_000, mean_length=300)]
display.show_table(table)

# %% [markdown]
# ## Exercise: half as long
#
# Which parts of the memory shrink if the rows have 512 tokens in place of 1,024? Ask `memory_of` twice, compare, and put a list of names into
# `my_parts`, as in `["weights", "optimizer"]`.

# %% tags=["exercise"]
from nbutils import exercises

def memory_of(length):
    answer, _ = plan.answer(gpu="" if lesson.gpu else plan.RENTED, **asked | {"length": length})
    return {tr(part): round(gib, 3) for part, gib in answer["parts"].items()}

print(memory_of(1024))
my_parts = None
lesson.check(exercises.halved_parts, my_parts, memory_of(1024), memory_of(512))

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# long, short = memory_of(1024), memory_of(512)
# my_parts = [part for part in long if short[part] < long[part]]
# ```
#
# Activations and logits belong to tokens: half as many tokens, about half of the memory. On GPUs older than capability 8.0 the workspace
# shrinks too, because it holds a mask of tokens by tokens. Weights, adapters and optimizer belong to the model.
#
# </details>

# %% [markdown]
# ## Exercise: the longest rows
#
# Up to how many tokens may a row have, in multiples of 256, so that a 14B model can be trained on this GPU (or, without one, on a 24 GB
# RTX 4090) with QLoRA, one row at a time, without checkpointing? `fits(512)` is True or False. The number you look for fits, and 256
# more do not; if not even 256 fit, it is 0.

# %% tags=["exercise"]
def fits(length):
    answer, _ = plan.answer(gpu="" if lesson.gpu else plan.RENTED, model="Qwen2.5-14B", method="qlora",
                            length=length, micro_batch=1, checkpointing="off")
    return answer["fits"]

my_length = None
lesson.check(exercises.longest_rows, my_length, fits, 256)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# my_length = 0
# while fits(my_length + 256):
#     my_length += 256
# ```
#
# Without a GPU that is 1,792: of the 21 GiB the weights take 9, and each 1,000 tokens of activations take 5 to 6. With
# `checkpointing="on"` the same GPU trains rows about ten times as long.
#
# </details>

# %% [markdown]
# ## Question
#
# A training of your own runs out of GPU memory. What do you change first, so that the result stays the same? Put `"a"`, `"b"` or
# `"c"` into `my_choice`.
#
# - **a**: a lower LoRA rank
# - **b**: fewer rows at a time, but as many rows as before until the trained numbers are changed (`gradient_accumulation_steps`)
# - **c**: a smaller `max_length`

# %% tags=["exercise"]
my_choice = None
lesson.check(exercises.quiz, my_choice, lesson.stem)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# my_choice = "b"
# ```
#
# </details>

# %% [markdown]
# ## You now have
#
# - a check of this machine: platform, GPU, memory, disk, time limit, packages, network,
# - a first answer from the bundled model, before any training,
# - a profile: model, precision and batch size for this machine, each value with its reason,
# - a forecast: what fits on which GPU, how long it trains and what it costs.

# %%
planned = f"{forecast.shape.name} on {forecast.gpu.name}: {forecast.peak_gib:.1f} GiB"
lesson.finish(report, planned=planned if lesson.gpu else "")  # without a GPU it was the forecast of a rented one
