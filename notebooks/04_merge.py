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
# An adapter needs its base model beside it. To *merge* is to add what the adapter learned to the weights of the unquantized base. The
# merged model stands alone, and every server can load it. It is done one weight at a time from disk to disk, so even a 7B needs little memory.
#
# You will have
#
# - a merged model with tokenizer, chat template and generation config,
# - proof that it computes what base and adapter computed,
# - base and merged model scored on the same held-out rows, each score with its confidence interval,
# - a verdict on whether the tuning helped, which can be no, and an HTML report.
#
# Takes about two minutes with the tiny model on 2 cores. A 7B needs 16 GB of disk, and for the merge 2 GB of memory in all.
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
import torch
from nbutils import data

train_rows, eval_rows = data.load(lesson.run.data)
[row, *_] = data.own_language_first(eval_rows)
*asked, reference = row["messages"]
[from_adapter] = evaluation.answer_rows(tuned, tokenizer, [row])
print("question ", asked[-1]["content"])
print("reference", reference["content"])
print("adapter  ", from_adapter)

# %% [markdown]
# An answer is written token by token. At each position the model gives every token of its vocabulary a *probability*: the softmax of the
# last layer's numbers, the *logits*. Here they are all along this answer, with the adapter and, where PEFT switches it off, without it:
# `predicted["adapter"]` has a row for each position and a column for each token. We look at them below, beside those of the merged model.
#
# The last lines take the matrices of the first layer with an adapter, for the exercise that follows; `scale` is alpha / r of lesson 03.

# %%
prompt = tokenizer.apply_chat_template(asked, tools=row.get("tools"), tokenize=False, add_generation_prompt=True)
before, whole = (
    tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids for text in (prompt, prompt + from_adapter)
)
answer = whole[0, before.shape[1]:]


def next_tokens(model):
    with torch.inference_mode():
        logits = model(whole.to(model.device), logits_to_keep=len(answer) + 1).logits
    return logits[0].float().softmax(-1).cpu()


predicted = {"adapter": next_tokens(tuned)}
with tuned.disable_adapter():
    predicted["base"] = next_tokens(tuned)

name, layer = next((name, module) for name, module in tuned.named_modules() if getattr(module, "lora_A", None))
weight = name.removeprefix("base_model.model.") + ".weight"
W = merging.read_weight(lesson.model, weight)  # from disk, unquantized
A, B = (matrix["default"].weight.detach().float().cpu() for matrix in (layer.lora_A, layer.lora_B))
scale = layer.scaling["default"]
print(f"{weight}: W {tuple(W.shape)}, B {tuple(B.shape)}, A {tuple(A.shape)}, scale {scale:g}")

# %% [markdown]
# ## Exercise: one merged weight
#
# A layer with an adapter computes W·x + scale · B·(A·x): what its weight W says, and what the adapter adds. That is the same as (W + scale
# · B·A)·x, so the sum in brackets can replace W. (This is LoRA. DoRA also scales the rows of the sum; the merge below can do that too.)
# Compute the sum for the layer printed above. In torch, `@` multiplies matrices and `*` each number.

# %% tags=["exercise"]
from nbutils import exercises

my_merged = None
lesson.check(exercises.merged_weight, my_merged, W, A, B, scale)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# my_merged = W + scale * (B @ A)
# ```
#
# `B @ A` has the shape of W, though both matrices are thin: this is why an adapter is a small file.
#
# </details>

# %% [markdown]
# ## The merge
#
# Now all weights. `merge_adapter` computes the sums in float32, rounds each once, and writes it to disk as it comes. It never
# leaves half a model behind, and keeps a finished merge of this very adapter. The folder then has all a server needs: weights, config,
# tokenizer, chat template, generation config. `complete.json` is written last and says what it was made from.
#
# The weight of the exercise is in there three times over: by hand, by PEFT's own `get_delta_weight`, and as it stands in the file, rounded to
# the file's dtype. (Onto the dequantized base, hand and file differ by what 4 bits lose.)

# %%
dtype = lesson.profile.from_pretrained.dtype
four_bit = dict(lesson.profile.quantization) | {"dtype": dtype}
gib = merging.size_gib(lesson.model, lesson.run.adapter, dtype)
folder = merging.choose_folder(lesson.run, lesson.scratch, gib)
merge = merging.merge_adapter(lesson.model, lesson.run.adapter, folder, dtype=dtype, onto=MERGE_ONTO, quantization=four_bit)
print(merge)
print(*sorted(file.name for file in folder.iterdir()), sep=", ")
by_hand = W + scale * (B @ A)
by_peft = W + layer.get_delta_weight("default").float().cpu()
written = merging.read_weight(folder, weight)
print(f"by hand and by PEFT, largest difference:     {(by_peft - by_hand).abs().max():.2g}")
print(f"by hand and in the file, largest difference: {(written - by_hand.to(getattr(torch, dtype)).float()).abs().max():.2g}")

# %% [markdown]
# In memory, PEFT merges with one call, `merge_and_unload`. In float32, rounded once at the end, it gives the bits of our folder. That takes
# two whole models in memory, so it is left out where they need more than is free, or more than 8 GiB (from a billion parameters on). All
# tensors are counted, also those that no adapter changes; an output layer that shares the weights of the embeddings counts again. (With
# `MERGE_ONTO = "dequantized"`, merged weights differ.)

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
    print(f"{sum(same)} of {len(same)} tensors have the bits of merge_and_unload")
else:
    print(f"left out: two models in float32 take {gib:.1f} GiB of memory")

# %% [markdown]
# ## The same question again
#
# The merged model is loaded like any other model, without PEFT. First the old one is removed from memory. `placement.load` calls
# `AutoModelForCausalLM.from_pretrained(folder, **placement.loading)` and keeps that one model, so that the next cells need not load it again.
# The figure shows the likeliest next tokens at the first position where base and adapter would go on differently, often the first of all. A
# probability too small to be seen has no bar.

# %%
from nbutils import figures

del base, tuned, layer
[from_merged] = evaluation.answer_rows(placement.load(folder), tokenizer, [row])
print("adapter", from_adapter)
print("merged ", from_merged)
predicted["merged"] = next_tokens(placement.load(folder))
place = int((predicted["adapter"].argmax(-1) != predicted["base"].argmax(-1)).int().argmax())  # 0 if they never differ
top = (predicted["adapter"] + predicted["base"])[place].topk(5).indices
labels = {"base": "base", "adapter": "adapter", "merged": "merged"}
bars = {
    repr(tokenizer.decode(token)): {label: float(predicted[name][place, token]) for name, label in labels.items()} for token in top
}
so_far = tokenizer.decode(answer[:place])[-50:]
figures.bars(bars, f"The next token after: {so_far or 'the question'}", "probability", stacked=False, path=lesson.run.logs / "next_token.png")

# %% [markdown]
# ## Exercise: KL divergence
#
# How far apart are two such predictions? The *KL divergence* says it in one number: the sum of p · ln(p / q) over all tokens, in *nats* (the
# unit of the natural logarithm). It is 0 if both give every token the same probability. Here p is what the merged model predicts at this
# position and q what the base does: the five tokens of the figure, and all others together as the sixth. Compute it; `math.log` is the
# natural logarithm.

# %% tags=["exercise"]
import math

p, q = (predicted[name][place, top].tolist() for name in ("merged", "base"))
p, q = ([*five, max(1e-6, 1 - math.fsum(five))] for five in (p, q))
print("p (merged) and q (base):", *(f"{a:<10.3g} {b:<10.3g} {name}" for a, b, name in zip(p, q, [*bars, "all others"], strict=False)), sep="\n")
my_kl = None
lesson.check(exercises.kl, my_kl, p, q)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# my_kl = sum(p[i] * math.log(p[i] / q[i]) for i in range(len(p)))
# ```
#
# Each logarithm is weighted by p: what the merged model finds likely counts most. With q and p swapped it is another number.
#
# </details>

# %% [markdown]
# ## Proof
#
# Equal answers can hide a damaged merge. So some rows of every weight are computed again from base and adapter. Then adapter and
# merged model predict the next token at about 200 positions, and we compare the probabilities of the 256 likeliest. Their distance
# (the KL divergence again, in nats per token) is 0 for equal models; rounding makes it a very small number: the line *the same model*. The
# first line is there for comparison: how far the tuning has moved the model.
#
# QLoRA trained the adapter on the 4-bit base, and the merged model is unquantized. That step changes the predictions too, usually a little:
# the line *what 4 bits cost*. To avoid it, set `MERGE_ONTO = "dequantized"`; the base then stays as coarse as it was in training. The
# lesson stops here if the merged model is not the adapter's. Where the unquantized model does not fit into memory, the weights alone are
# the proof.

# %%
from nbutils import parity

print(merging.prove(lesson.model, lesson.run.adapter, folder, onto=MERGE_ONTO))
proof = parity.prove(lesson.run, lesson.profile, placement, folder)
print(proof)

# %% [markdown]
# ## Before and after
#
# Base and merged model answer the same held-out questions with temperature 0. None of them was trained on; lesson 03 only used some of them
# to choose its best step. A second, small set asks for general knowledge. Answers are saved as they come, so an interrupted run continues.
#
# Read six of them before you believe a number: a tick means that the answer is the reference to the letter. An answer with a
# cross may be right all the same.

# %%
comparison = evaluation.compare_models(lesson.run, lesson.profile, placement, folder, model_name=lesson.model_name)
comparison.show_answers(6)

# %% [markdown]
# ## Three scores
#
# - *exact match*: the share of answers that match the reference exactly,
# - *character F1*: the characters shared with the reference, from 0 (none) to 1 (all); not words, so that it also works for Chinese,
# - *loss*: how unlikely the model finds the reference, in nats per token; lower is better.
#
# In brackets is the 95 % *confidence interval*: with other questions of the same kind, the score would most likely be in there. The *p-value*
# `p` is the probability of a difference at least this large if the tuning had changed nothing. Where p is small, chance hardly explains it.

# %%
comparison.show_scores("exact_match", "character_f1", "loss")

# %% [markdown]
# ## What was forgotten?
#
# A model that learns one task may get worse at what it could do before: *catastrophic forgetting*. Here are two answers to general
# questions, and the ratio of the perplexities on all of them. *Perplexity* is the loss in other words, e to the power of the loss: among
# how many equally likely tokens the model would have to choose. A ratio near 1 means that nothing was lost. (The bundled tiny model knows
# nothing but its shop, and after the tuning answers everything in its format.)

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
# (all). In the bundled sample all answers look alike, so even a perfect one is closer to its own reference than to the others by
# 0.2 only. The base model had reached 0.1 of it before the tuning; the verdict shows what the tuning added.

# %%
print(comparison.verdict)
print(f"report: {comparison.page}")

# %% [markdown]
# ## Three trainings that went wrong
#
# Your training was meant to work; the practice runs of lesson 03 were not. One was too short, one had only five rows and memorized them,
# one was trained on *shuffled* answers, which belong to other questions. Here they are judged as your model was, with 40 questions of the
# bundled sample. (A practice run that is missing is trained now.) Look at the last one: its loss fell from over 8 to about 0.5, and its
# character F1 rose. Then read its verdict.

# %%
judged = evaluation.compare_practice(lesson.run.path)
for run in judged.values():
    print(f"{run.title}: loss {run.tuned.mean('loss'):.2f}, exact match {run.tuned.mean('exact_match'):.0%}, {run.verdict.outcome}")
shuffled = judged["shuffled answers"]
shuffled.show_scores("loss", "character_f1", "exact_match", "content")
print(shuffled.verdict)

# %% [markdown]
# ## Exercise: the commonest error
#
# The run that was too short helped, and is still wrong in almost half of its answers. A score says how many; only reading says what is
# wrong with them. Read some of its errors. Which field of the ticket does it get wrong most often? `right` is a list with a dict for each
# of its 40 answers, the right ones too: which fields are right; the first one is printed. (In broken JSON, none is.) The table shows some
# of the wrong answers, in another order. Count in all of `right`, and put the name of the field into `my_field`. (没有说 is Chinese for *not
# said*: rows and errors are in both languages.)

# %% tags=["exercise"]
from nbutils import display
from nbutils.evaluation import scores

short = judged["too short"].tuned
questions = [messages[-1]["content"] for messages in short.evaluator.questions]
asked = data.own_language_first(zip(questions, short.evaluator.references, range(len(questions)), strict=True))
wrong = [row for row in asked if not short.scores["exact_match"][row[-1]]]
errors = [{"question": question, "reference": reference, "answer": short.texts[number]} for question, reference, number in wrong]
display.show_table(errors[:8])
right = list(map(scores.right_fields, short.texts, short.evaluator.references))
print(right[0])
my_field = None
lesson.check(exercises.commonest_error, my_field, right)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# errors_of = {field: sum(not fields[field] for fields in right) for field in right[0]}
# my_field = max(errors_of, key=errors_of.get)
# ```
#
# This is what to do with errors: find the commonest one, write rows that show the right answer to such questions, and train again.
#
# </details>

# %% [markdown]
# The same as a figure, for all practice runs and for your merged model. An answer is an exact match only if all of its fields are right. Your
# model is left out if its answers are no JSON with these fields.

# %%
from statistics import mean


def shares(result):
    right = list(map(scores.right_fields, result.texts, result.evaluator.references))
    by_field = {field: mean(fields.get(field, False) for fields in right) for field in right[0]}
    return {"exact match": result.mean("exact_match"), **by_field}


by_run = {run.title: shares(run.tuned) for run in [*judged.values(), comparison]}
if right[0].keys() - by_run[comparison.title]:
    del by_run[comparison.title]
    print(f"the answers of your model have no such fields; exact match {comparison.tuned.mean('exact_match'):.0%}")
figures.bars(by_run, "Right answers: the whole, and by field", "share", stacked=False, path=lesson.run.logs / "fields.png")

# %% [markdown]
# ## An interval by hand
#
# How sure is the exact match of the run that was too short, measured with 40 questions? Draw 40 of its answers at random, some of them twice,
# some not at all, and compute the score again; do so 2,000 times. The middle 95 % of these scores are the interval. This is the
# *bootstrap*. The course takes it for F1 and loss, and for shares a formula (Wilson's), which gives nearly the same.

# %%
import random

matches = short.scores["exact_match"]  # 1 for each right answer, else 0
random.seed(0)
drawn = sorted(mean(random.choices(matches, k=len(matches))) for _ in range(2000))
print(f"by hand {mean(matches):.3f} [{drawn[50]:.3f}, {drawn[1949]:.3f}]")
print(f"nbutils {short.estimate('exact_match').text()}")

# %% [markdown]
# ## Question
#
# Why does a lower loss alone not show that the tuning helped? Put `"a"`, `"b"` or `"c"` into `my_choice`.
#
# - **a**: because the loss is measured on other rows than the answers
# - **b**: because a lower loss can be chance, and has no confidence interval
# - **c**: because it also falls when the model learns no more than what answers look like

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
# - a merged model with tokenizer, chat template and generation config,
# - proof that it computes what base and adapter computed,
# - base and merged model scored on the same held-out rows, each score with its confidence interval,
# - a verdict on whether the tuning helped, which can be no, and an HTML report.
#
# Lesson 05 serves the model.

# %%
lesson.finish(merge, proof, comparison)
