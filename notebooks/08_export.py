# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 08 · Export: smaller, and for other programs
#
# The merged model has 16 bits for each weight (32 if it was trained on a CPU). Most uses need fewer: a server with a smaller GPU, a laptop,
# a phone. To store a weight in fewer bits is to *quantize* it. Each format makes the model smaller, changes its predictions a little, and
# runs in some programs only. This lesson makes the ones you choose, and measures size and change.
#
# You will have
#
# - weights of your model rounded to 8 and to 4 bits by hand, with what that costs,
# - a table of the formats, with their size for your model and where each of them runs,
# - your model in the formats you chose, each complete and ready to load,
# - for each of them the price: how far its predictions moved,
# - if you ask for it, an upload to a hub or one file to download.
#
# Takes about half a minute with the tiny model on 2 cores; each further format adds about 20 seconds, `awq` some minutes. The first export also
# builds an environment for the export libraries: some minutes, 3 GB of disk, 9 GB on a machine with a GPU. An export takes as much disk as the
# table says.
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
# `EXPORTS` names formats, for example `"fp8, gguf-q8_0"`; if it is empty, the lesson makes `gguf-q8_0`, which every machine can make and
# run. `PUSH_TO` is a place to upload to, `"hub:owner/name"` (or `"modelscope:owner/name"`), or `"file"` for one file to download.

# %% tags=["parameters"]
PROFILE: str = "auto"
MODEL: str = ""
RUN_NAME: str = ""
EXPORTS: str = ""
PUSH_TO: str = ""

# %% [markdown]
# Names are checked first, so that a typo does not cost an hour. If lesson 04 has not run in this run folder yet, it runs now.

# %%
import nbutils
from nbutils import exporting, sharing

lesson = nbutils.start("08_export", globals())
formats = exporting.parse_formats(EXPORTS or "gguf-q8_0")
if PUSH_TO not in ("", "file"):
    sharing.parse_target(PUSH_TO)
lesson.require("04_merge")
folder = lesson.run.merged

# %% [markdown]
# ## Fewer bits by hand
#
# Four bits can tell 16 values apart, so a weight becomes an integer from -7 to 7 and a factor, the *scale*: weight ≈ integer · scale.
# Neighbouring weights share one scale; they are a *group*. The largest weight of a group decides its scale, so small groups round more
# exactly, and need more scales. Here are 4,096 weights of your model in groups of 32, rounded in three lines, and beside it torch's own
# rounding.

# %%
import torch
from safetensors import safe_open

with safe_open(min(folder.glob("*.safetensors")), "pt") as file:
    name = next(key for key in file.keys() if key.endswith("_proj.weight"))  # noqa: SIM118
    groups = file.get_tensor(name).float().flatten()[:4096].reshape(-1, 32)

def quantized(groups, bits):
    highest = 2 ** (bits - 1) - 1  # 7 for 4 bits, 127 for 8
    scales = groups.abs().amax(dim=1, keepdim=True) / highest  # one for each group
    return (groups / scales).round(), scales

integers, scales = quantized(groups, bits=4)
of_torch = torch.fake_quantize_per_channel_affine(groups, scales.flatten(), torch.zeros(len(scales), dtype=torch.int), 0, -7, 7)
print(f"{name}: largest difference to torch's rounding {(integers * scales - of_torch).abs().max():.1g}")

# %% [markdown]
# The first six weights. In 8 bits they are nearly what they were; in 4 bits the third digit is gone, and small weights become zero.

# %%
from nbutils import display

table = [{"weight": f"{weight:.5f}"} for weight in groups[0, :6]]
for bits in (8, 4):
    integers, scales = quantized(groups, bits)
    for row, integer in zip(table, integers[0], strict=False):
        row |= {f"{bits} bits: integer · scale": f"{integer:.0f} · {scales[0, 0]:.5f} = {integer * scales[0, 0]:.5f}"}
display.show_table(table)

# %% [markdown]
# The relative error of all 4,096: the length of what rounding changed, divided by the length of the weights. Each bit less about doubles it.
# A scale of 16 bits for 32 weights adds half a bit to each; bfloat16 needs no scale. Lesson 03 rounds with NF4, whose 16 values are not
# evenly spaced: closer to each other near zero, where most weights are.

# %%
from nbutils import figures

errors = {"bfloat16": (16.0, float((groups.bfloat16() - groups).norm() / groups.norm()))}
for bits in (8, 6, 5, 4, 3):
    integers, scales = quantized(groups, bits)
    error = float((integers * scales - groups).norm() / groups.norm())
    errors[f"{bits} bit: {error:.1%}"] = (bits + 16 / 32, error)
figures.dots({"": errors}, "Fewer bits, larger error", x="bits for each weight, with its share of the scale", y="relative error")

# %% [markdown]
# ## Exercise: bytes
#
# The largest layers of Qwen2.5-7B have 3,584 rows and 18,944 columns. How many bytes does one of them take in the format `w4a16`: 4 bits
# for each weight, and a scale of 16 bits for each group of 128 weights? You can let Python count.

# %% tags=["exercise"]
from nbutils import exercises

rows, columns, group = 3584, 18944, 128  # of one layer; weights in a group
my_bytes = None
lesson.check(exercises.export_bytes, my_bytes, rows * columns, group)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# my_bytes = rows * columns * 4 / 8 + rows * columns / group * 2
# ```
#
# 35 MB in place of 136 MB in 16 bits. The scales are 3 percent of that: 16 bits shared by 128 weights are an eighth of a bit for each.
#
# </details>

# %% [markdown]
# ## The formats
#
# A *GGUF* file holds everything in one: weights, tokenizer and chat template. llama.cpp reads it, and programs built on llama.cpp do.
#
# - *16 bits* (`bf16`, `fp16`, `gguf-f16`): a merged model of 16 bits as it is, half the size of one of 32 bits. Next to nothing is lost.
# - *8 bits* (`fp8`, `int8`, `gguf-q8_0`): a little more than half the 16-bit size. The difference is hard to notice.
# - *4 bits* (`w4a16`, `awq`): a third of the 16-bit size or more. Some answers change; small models lose more than large ones.
#
# `fp8`, `w4a16` and `awq` are for vLLM, `int8` is for transformers on a CPU. llama.cpp itself makes a GGUF file of 4 bits:
# `llama-quantize model-f16.gguf model-q4_k_m.gguf q4_k_m`. The sizes are estimates: all but the GGUF files keep the embeddings as they are.

# %%
display.show_table(exporting.offer(folder, lesson.gpu), "Formats")

# %% [markdown]
# ## Exercise: formats
#
# You have a server with a T4, which is a Turing GPU, and want to serve the model with vLLM. You also want it on a laptop, in llama.cpp.
# Which format of the table do you export for which? Put a pair of names into `my_formats`, for example `("bf16", "int8")`. More than one
# pair is right.

# %% tags=["exercise"]
my_formats = None
lesson.check(exercises.export_format, my_formats)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# my_formats = ("w4a16", "gguf-q8_0")
# ```
#
# A T4 has neither bfloat16 nor 8-bit floats, so `bf16` and `fp8` are for newer GPUs; `fp16`, `w4a16` and `awq` run on it. llama.cpp reads
# GGUF files and nothing else.
#
# </details>

# %% [markdown]
# ## The recipe
#
# llm-compressor is told by a recipe what to do with which layers: a YAML file, or the same in Python. For `fp8` that is
#
# ```python
# from llmcompressor import oneshot
# from llmcompressor.modifiers.quantization import QuantizationModifier
#
# recipe = QuantizationModifier(targets=["Linear"], scheme="FP8_DYNAMIC", ignore=["re:.*lm_head", "re:.*embed_tokens"])
# oneshot(model=model, recipe=recipe)
# ```
#
# `oneshot` wants the whole model in memory, and calibrates on a `dataset=` if the recipe needs one: `awq` is made with it. To *calibrate*
# is to run some rows through the model, and to choose the scales by what its layers then compute. The recipes of `fp8` and
# `w4a16` need no data, so llm-compressor's `model_free_ptq` can follow them file by file, with the memory of one file. To
# change a recipe, set `recipes["fp8"]` to a text of your own below; for example, add `"re:.*down_proj"` to `ignore`, and see in the last
# table what these layers cost.

# %%
recipes = {name: exporting.recipe_for(folder, name) for name in ("fp8", "w4a16", "awq")}
print(recipes["fp8"])

# %% [markdown]
# ## Make them
#
# Each export is made by the library that its users trust: llm-compressor for vLLM, torchao for CPUs, llama.cpp's own converter for GGUF. They
# are installed in an environment of their own, because they need other versions than the training. An export that was made before from this very
# model is reused. `awq` is also calibrated on training rows, so that the weights that matter for them lose least.

# %%
from nbutils import data

train_rows, _ = data.load(lesson.run.data)
exports = [exporting.export(folder, name, calibration=train_rows, recipe=recipes.get(name, "")) for name in formats]

# %% [markdown]
# Where they are, and the line that loads each of them: `vllm serve` for vLLM, `llama-cli` for llama.cpp. Lesson 05 serves a vLLM format
# if you set its parameter `FOLDER` to the export's folder.

# %%
print(*exports, sep="\n")

# %% [markdown]
# ## What each format loses
#
# Each export is loaded and reads the texts that lesson 04 used for its proof. *KL* is the distance of its predictions to the merged model's, in
# nats per token: below 0.001 nobody will notice, above 0.15 you will. It says "at least" because lesson 04 stored only the likeliest tokens
# of each position. An export of a model that is too large for this machine is not compared. *Same next token* counts the
# positions where the likeliest token stayed the same.

# %%
compared = exporting.check_exports(exports, lesson.run.path)
display.show_table([export.row for export in compared], "Size and price")

# %% [markdown]
# The same as a figure: the farther to the left, the smaller; the lower, the nearer to the merged model. With more formats in `EXPORTS` you
# see which of them is worth its size.

# %%
merged = {"merged model": {"": (exports[0].merged_bytes / 1e6, 0.0)}}
others = {export.name: {"": (export.bytes / 1e6, export.gap.mean)} for export in compared if export.gap}
figures.dots(merged | others, "Size and price", x="MB", y="KL, nats per token (at least)")

# %% [markdown]
# ## Share it
#
# Nothing leaves this machine unless `PUSH_TO` says so. The first format in `EXPORTS` is uploaded or packed, or the merged model if
# `EXPORTS` is empty. An upload to the Hugging Face Hub takes two calls of `HfApi`: `create_repo` makes a private repository if there is
# none, and `upload_folder` sends what is not there yet, so an interrupted upload goes on when you run the cell again.
#
# `sharing.prepared` does what is easily forgotten. It takes the token from the platform's secrets, and no error message shows it. It
# writes a model card that names the base model, and leaves out the folders of your machine that stand in JSON files. A repository that is
# public already is refused. ModelScope and the one file are left to `sharing.push`.

# %%
from huggingface_hub import HfApi

chosen = exports[0].folder if EXPORTS else folder
pushed = ""
if PUSH_TO.startswith("hub:"):
    with sharing.prepared(chosen, PUSH_TO) as upload:
        api = HfApi(endpoint="https://huggingface.co", token=upload.token)  # never to a mirror: the token goes with it
        api.create_repo(upload.name, private=True, exist_ok=True)
        upload.require_private(api.model_info(upload.name).private)
        api.upload_folder(folder_path=upload.folder, repo_id=upload.name)
    pushed = f"{upload.page} ({upload.gib:.2f} GiB)"
elif PUSH_TO:
    pushed = sharing.push(chosen, PUSH_TO)
print(pushed or f"kept here: {chosen}")

# %% [markdown]
# ## Question
#
# In `fp8`, a weight takes 8 bits in place of 16. Yet Qwen2.5-0.5B still has 64 percent of its size, and Qwen2.5-7B 57 percent. Why is that
# more than half, and more for the small model? Put `"a"`, `"b"` or `"c"` into `my_choice`.
#
# - **a**: because each weight also needs a scale
# - **b**: because the rows of the calibration are stored, too
# - **c**: because the embeddings and the output layer are not quantized

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
# - weights of your model rounded to 8 and to 4 bits by hand, with what that costs,
# - a table of the formats, with their size for your model and where each of them runs,
# - your model in the formats you chose, each complete and ready to load,
# - for each of them the price: how far its predictions moved,
# - if you ask for it, an upload to a hub or one file to download.

# %%
lesson.finish(exports=[export.facts for export in compared], pushed=pushed)
