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
# Fine-tuning often fails before it starts: a GPU that torch has no kernels for, a full disk, a folder that is deleted with the
# machine. This lesson checks all of that first, and asks a model its first question.
#
# You will have
#
# - a check of this machine: platform, GPU, memory, disk, time limit, packages, network,
# - a first answer from the bundled model, before any training,
# - a profile: model, precision and batch size for this machine, each value with its reason,
# - a forecast: what fits on which GPU, how long it trains and what it costs.
#
# Takes under a minute and downloads nothing.

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
# `PROFILE = "auto"` chooses the profile for your GPU; any name from `configs/` works too. `SET` replaces single values, as in
# `"sft.learning_rate=1e-4, lora.r=64"`. Later lessons of the same run keep these values.

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
# GPUs of compute capability 8.0 and newer can train in bfloat16. A T4 (7.5) trains in float16, even though
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
# Now disk, memory, time limit, packages and network, and a real matrix product on the GPU: `torch.cuda.is_available()` also says
# yes to GPUs that torch has no kernels for. Only what needs your attention is shown. `WARN` is worth reading; `FAIL` must be
# fixed first, and stops the lesson. `python -m nbutils doctor` shows every check.

# %%
from nbutils import doctor

report = doctor.examine()
report.require()

# %% [markdown]
# ## A first question
#
# The course comes with a tiny model that was trained on text about one small shop. Its task is to turn a customer's message into a JSON
# ticket. `apply_chat_template` writes the message the way the model reads it, and `generate` continues the text.

# %%
from transformers import AutoModelForCausalLM, AutoTokenizer
from nbutils import data, files

tokenizer = AutoTokenizer.from_pretrained(files.TINY_MODEL, trust_remote_code=False)
model = AutoModelForCausalLM.from_pretrained(files.TINY_MODEL, dtype=torch.float32, trust_remote_code=False)
question, reference = data.stored_rows(files.SAMPLES / "eval.jsonl")[1]["messages"]
inputs = tokenizer.apply_chat_template([question], add_generation_prompt=True, return_dict=True, return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=40, do_sample=False)

# %% [markdown]
# The reference is the answer we want. The model does not give it yet; lesson 03 trains it.

# %%
answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
print("question: ", question["content"])
print("answer:   ", answer)
print("reference:", reference["content"])

# %% [markdown]
# ## The profile
#
# A profile is a file in `configs/` with about 40 values. These are the ones that matter most, as chosen for this machine.
# Each name is a keyword argument of a library: `lora` of peft's `LoraConfig`, `sft` of TRL's `SFTConfig`, `from_pretrained` of
# transformers; `course` is what no library has. Learning rate and rank are yours to change; precision follows from the GPU, which
# computes `per_device_train_batch_size` rows at a time. Values that depend on your rows are chosen in lesson 03.

# %%
from nbutils import display

names = ["profile", "model", "method", "from_pretrained.dtype", "lora.r", "sft.max_length",
         "sft.per_device_train_batch_size", "sft.learning_rate"]
display.show_choices(lesson.resolved, only=names)

# %% [markdown]
# ## What fits
#
# The memory of a training can be added up before anything is downloaded: the weights (4 bits each, plus their scales), the
# LoRA adapters with their gradients, the optimizer's two moments, the activations that the backward pass needs, the logits
# of the loss, and a workspace. Only activations, logits and workspace grow with the micro-batch and the length of the rows. Here
# for 10,000 rows of 300 tokens, on this GPU, or on a rented one if there is none. The dashed line is the limit: a little less than the
# GPU has, because not all of it can be used.

# %%
import matplotlib.pyplot as plt
from nbutils import plan
from nbutils.language import tr

forecast = plan.example(lesson.resolved, rows=10_000, mean_length=300)
figure, axes = plt.subplots(figsize=(9, 2.4), layout="constrained")
left = 0
for part, gib in forecast.parts.items():
    axes.barh([forecast.gpu.name], gib, left=left, label=f"{tr(part)} {gib:.1f} GiB")
    left += gib
axes.axvline(forecast.limit_gib, color="black", linestyle="--", label=f"limit {forecast.limit_gib:.1f} GiB")
axes.set(title=f"Training {forecast.shape.name}: {left:.1f} GiB of GPU memory", xlabel="GiB")
figure.legend(ncols=4, loc="outside lower center")
display.show_figure(figure)

# %% [markdown]
# The same rows on six GPUs, each with the model that `PROFILE = "auto"` trains there. Every row is read three times (3 epochs): 9
# million tokens, which divided by the tokens per second give the time. *limit* is what a training may use of the GPU's memory, *peak*
# what it uses. Prices are in `configs/gpus.yaml`, which is yours to edit.
# Only the H200 was measured; the other speeds follow from published numbers. `python -m nbutils plan --help` shows how to ask for
# your own case.

# %%
gpus = ["T4", "RTX 3090", "RTX 4090", "A100-40GB", "H100", "H200"]
columns = ["GPU", "limit GiB", "model", "peak GiB", "tokens/s", "time", "cost"]
table = [{name: row[name] for name in columns} for row in plan.fits_table(gpus, rows=10_000, mean_length=300)]
display.show_table(table, text=display.aligned(table))

# %% [markdown]
# ## Exercise
#
# Can a 14B model be trained on this GPU (or, without one, on a 24 GB RTX 4090), with rows of at most 1,024 tokens? Its weights
# take about 9 GiB: 4 bits for most of them, 16 for the embeddings. The other parts are chosen as small as they have to be (fewer
# rows at a time, recomputed activations). Put `True` or `False` into `my_guess` and run the cell: it answers only then.

# %%
my_guess = None
if my_guess is None:
    print("[todo] exercise: add up the parts, then set my_guess to True or False")
else:
    large, _ = plan.answer(gpu="" if lesson.gpu else "RTX 4090", model="Qwen2.5-14B", length=1024)
    print(f"[{' OK ' if my_guess == large['fits'] else 'FAIL'}] saw {my_guess}, expected {large['fits']}:",
          f"{large['peak_vram_gib']:.1f} of {large['limit_gib']:.1f} GiB",
          *(f"\n  {display.pad(tr(part), 12)} {gib:5.1f} GiB" for part, gib in large["parts"].items()))

# %% [markdown]
# ## You now have
#
# - a check of this machine: platform, GPU, memory, disk, time limit, packages, network,
# - a first answer from the bundled model, before any training,
# - a profile: model, precision and batch size for this machine, each value with its reason,
# - a forecast: what fits on which GPU, how long it trains and what it costs.
#
# Two questions to take along: which part of the memory would shrink if the rows were half as long? Which value of the profile
# would you change first if the loss hardly fell?

# %%
planned = f"{forecast.shape.name} on {forecast.gpu.name}: {forecast.peak_gib:.1f} GiB"
lesson.finish(report, planned=planned if lesson.gpu else "")  # without a GPU it was the forecast of a rented one
