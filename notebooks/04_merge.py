# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 04 · Merge, and see whether the tuning helped
#
# An adapter needs its base model beside it. A merged model stands alone, and every server can load it. Merging adds the product of
# the adapter's matrices to each weight of the unquantized base, one weight at a time from disk to disk. So even a 7B needs little memory.
#
# You will have
#
# - a merged model with tokenizer, chat template and generation config,
# - proof that it computes what base and adapter computed,
# - base and merged model scored on the same held-out rows, each score with its confidence interval,
# - a verdict on whether the tuning helped, which can be no, and an HTML report.
#
# Takes about a minute with the tiny model on 2 cores. A 7B needs 16 GB of disk, and for the merge 2 GB of memory in all.

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
# Leave these as they are to merge what lesson 03 trained last with this profile. `MERGE_ONTO = "dequantized"` merges onto the 4-bit base,
# see "Proof" below. Exports and uploads are in lesson 08, public benchmarks in lesson 09.

# %% tags=["parameters"]
PROFILE: str = "auto"
MODEL: str = ""
RUN_NAME: str = ""
MERGE_ONTO: str = "full"

# %% [markdown]
# If lesson 03 has not run in this run folder yet, it runs now. Then the names and shapes of base and adapter are compared, so that
# nothing can fail halfway.

# %%
import nbutils
from nbutils import merging

lesson = nbutils.start("04_merge", globals())
lesson.require("03_qlora")
merging.check(lesson.model, lesson.run.adapter, MERGE_ONTO, method=lesson.profile.method)

# %% [markdown]
# ## The adapter beside its base
#
# transformers loads the base, and PEFT adds the adapter to it. This is the model we want to keep. `placement` says how the base is loaded
# on this machine: unquantized if it fits, in 4 bits if it does not (a 7B on a T4).

# %%
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from nbutils import evaluation

placement = evaluation.place_model(lesson.model, lesson.run.adapter, lesson.profile)
print(placement.reason)
tokenizer = AutoTokenizer.from_pretrained(lesson.run.adapter, trust_remote_code=False)
base = AutoModelForCausalLM.from_pretrained(lesson.model, **placement.loading, trust_remote_code=False)
tuned = PeftModel.from_pretrained(base, lesson.run.adapter)

# %% [markdown]
# One held-out question, and what the adapter makes of it. We ask the merged model the same below.

# %%
from nbutils import data

train_rows, eval_rows = data.load(lesson.run.data)
*_, question, reference = eval_rows[0]["messages"]
[from_adapter] = evaluation.answer_rows(tuned, tokenizer, eval_rows[:1])
print("question ", question["content"])
print("reference", reference["content"])
print("adapter  ", from_adapter)

# %% [markdown]
# ## One weight by hand
#
# A layer with an adapter computes W·x + scale · B·(A·x). That is the same as (W + scale · B·A)·x, so the sum can replace W. Here it is
# for the first such layer, beside what PEFT's own `get_delta_weight` gives. (This is LoRA. DoRA also scales the rows of the sum; the merge
# below can do that too.)

# %%
name, layer = next((name, module) for name, module in tuned.named_modules() if getattr(module, "lora_A", None))
weight = name.removeprefix("base_model.model.") + ".weight"
W = merging.read_weight(lesson.model, weight)  # from disk, unquantized
A, B = (matrix["default"].weight.float().cpu() for matrix in (layer.lora_A, layer.lora_B))
scale = layer.scaling["default"]
by_hand = W + scale * (B @ A)
print(f"{weight}: W {tuple(W.shape)} + {scale:g} · B {tuple(B.shape)} · A {tuple(A.shape)}")
delta = layer.get_delta_weight("default").float().cpu()
print(f"largest difference to PEFT's product: {(delta - scale * (B @ A)).abs().max():.2g}")

# %% [markdown]
# ## The merge
#
# Now all of them. `merge_adapter` computes the sums in float32, rounds each once, and writes it to disk as it comes. It never
# leaves half a model behind, and keeps a finished merge of this very adapter.

# %%
dtype = lesson.profile.from_pretrained.dtype
four_bit = dict(lesson.profile.quantization) | {"dtype": dtype}
gib = merging.size_gib(lesson.model, lesson.run.adapter, dtype)
folder = merging.choose_folder(lesson.run, lesson.scratch, gib)
merge = merging.merge_adapter(lesson.model, lesson.run.adapter, folder, dtype=dtype, onto=MERGE_ONTO, quantization=four_bit)
print(merge)

# %% [markdown]
# Is our weight in it? It must be the sum we computed, rounded to the same dtype. (Onto the dequantized base, the two differ by what
# 4 bits lose.)

# %%
import torch

written = merging.read_weight(folder, weight)
print(f"largest difference: {(written - by_hand.to(getattr(torch, dtype)).float()).abs().max():.2g}")

# %% [markdown]
# In memory, PEFT merges with one call: `merge_and_unload` adds every product to its weight and removes the adapter's layers. In 16 bits
# it rounds twice, first the product and then the sum. In float32 and rounded once at the end, as here, it gives the bits of our
# folder. That takes two whole models in memory, so it is left out where they need more than is free, or more than 8 GiB (from a billion
# parameters on). (With `MERGE_ONTO = "dequantized"`, merged weights differ here as well.)

# %%
from nbutils import platforms


def weights_equal():
    whole = AutoModelForCausalLM.from_pretrained(lesson.model, dtype="float32", trust_remote_code=False)
    merged = PeftModel.from_pretrained(whole, lesson.run.adapter).merge_and_unload()
    theirs = merged.to(getattr(torch, dtype)).state_dict()
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False).state_dict()
    return [torch.equal(ours[name], theirs[name]) for name in theirs]


gib = 2 * 4 * base.num_parameters() / 2**30  # two models, 4 bytes a weight
if gib < min(8, platforms.free_memory_gib()):
    same = weights_equal()
    print(f"{sum(same)} of {len(same)} weights have the bits of merge_and_unload")
else:
    print(f"left out: two models in float32 take {gib:.1f} GiB of memory")

# %% [markdown]
# The folder has all a server needs: weights, config, tokenizer, chat template, generation config. `complete.json` is written last and says
# what it was made from.

# %%
for file in sorted(folder.iterdir()):
    print(f"{file.stat().st_size / 1e3:12,.1f} kB  {file.name}")

# %% [markdown]
# ## The same question again
#
# The merged model is loaded like any other model, without PEFT. First the old one is removed from memory. `placement.load` calls
# `AutoModelForCausalLM.from_pretrained(folder, **placement.loading)` and keeps that one model, so that the next cells need not load it again.

# %%
del base, tuned, layer
[from_merged] = evaluation.answer_rows(placement.load(folder), tokenizer, eval_rows[:1])
print("adapter", from_adapter)
print("merged ", from_merged)

# %% [markdown]
# ## Proof
#
# Equal answers can hide a damaged merge. So some rows of every weight are computed again from base and adapter. Then adapter and
# merged model predict the next token at about 200 positions, and we compare the probabilities of the 256 likeliest. Their distance
# (the KL divergence, in nats per token) is 0 for equal models; rounding makes it a very small number: the line *the same model*. The
# first line is there for comparison: how far the tuning has moved the model.
#
# QLoRA trained the adapter on the 4-bit base, and the merged model is unquantized. That step changes the predictions too, usually a
# little: the line *what 4 bits cost*. To avoid it, set `MERGE_ONTO = "dequantized"`; the base then stays as coarse as it was in training. The lesson
# stops here if the merged model is not the adapter's. Where the unquantized model does not fit into memory, the weights alone are the proof.

# %%
from nbutils import parity

print(merging.prove(lesson.model, lesson.run.adapter, folder, onto=MERGE_ONTO))
proof = parity.prove(lesson.run, lesson.profile, placement, folder)
print(proof)

# %% [markdown]
# ## Before and after
#
# Base and merged model answer the same held-out questions with temperature 0. None of them was trained on; lesson 03 only used some of them
# to choose its best step. A second, small set asks for
# general knowledge. Answers are saved as they come, so an interrupted run continues.

# %%
comparison = evaluation.compare_models(lesson.run, lesson.profile, placement, folder, model_name=lesson.model_name)

# %% [markdown]
# Read six of them before you believe a number. A tick means that the answer matches the reference exactly.

# %%
comparison.show_answers(6)

# %% [markdown]
# ## Exercise
#
# From what you have read: which share of all held-out answers does the merged model get exactly right? Put your guess into `my_guess`,
# as a number from 0 to 1, and run the cell. A guess within 0.1 counts.

# %%
my_guess = None
share = comparison.tuned.mean("exact_match")
if my_guess is None:
    print("[todo] exercise: count the ticks above, then set my_guess to a number from 0 to 1")
elif abs(my_guess - share) > 0.1:
    print(f"[todo] exercise: saw {my_guess}, expected {'more' if my_guess < share else 'less'}: show 20 answers in the cell above, and guess again")
else:
    print(f"[ OK ] saw {my_guess}, expected {share:.2f}, give or take 0.1")

# %% [markdown]
# ## Three scores
#
# - *exact match*: the share of answers that match the reference exactly,
# - *character F1*: the characters shared with the reference (characters and not words, so that it also works for Chinese),
# - *loss*: how unlikely the model finds the reference, in nats per token; lower is better.
#
# In brackets is the 95 % interval. `p` is the probability of a difference at least this large if the tuning had changed nothing.

# %%
comparison.show_scores("exact_match", "character_f1", "loss")

# %% [markdown]
# The same as a figure: dots are means, bars the intervals. Where the bars do not overlap, chance hardly explains the difference.

# %%
comparison.plot("exact_match", "character_f1", "loss")

# %% [markdown]
# ## What was forgotten?
#
# A model that learns one task may forget others. Two answers to general questions, and the ratio of the perplexities on all of them: near 1
# means that nothing was lost. (The bundled tiny model knows nothing but its shop, and after the tuning answers everything in its format.)

# %%
comparison.show_answers(2, general=True)
print(comparison.forgetting)

# %% [markdown]
# ## The verdict
#
# A lower loss proves little. Trained on *shuffled* answers, a model still learns what answers look like, and its loss and F1 improve. So every
# answer is also scored against the references of other rows. What it scores beyond those is *content*. The verdict is *helped* only
# if content rose by more than chance explains. The report has all scores, and opens in any browser.
#
# Content is measured twice, by exact match and by ROUGE-L: the characters that two texts share in the same order, from 0 (none) to 1
# (all). Where all answers look alike, even a perfect one is only a little closer to its own reference than to the others: by 0.2
# in the bundled sample, of which the base model already has half. The verdict shows what the tuning added.

# %%
print(comparison.verdict)
print(f"report: {comparison.page}")

# %% [markdown]
# ## You now have
#
# - a merged model with tokenizer, chat template and generation config,
# - proof that it computes what base and adapter computed,
# - base and merged model scored on the same held-out rows, each score with its confidence interval,
# - a verdict on whether the tuning helped, which can be no, and an HTML report.
#
# Two questions to take along: why does a lower loss alone not show that the tuning helped? And which questions would you add to the
# held-out rows, to find out what the model still gets wrong? Lesson 05 serves the model.

# %%
lesson.finish(merge, proof, comparison)
