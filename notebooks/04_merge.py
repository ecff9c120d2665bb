# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 04 · Merge, prove it, and see whether the tuning helped
#
# An adapter needs its base beside it; a merged model stands alone and any server takes it. Merging adds the adapter's
# product to each weight. It is done on the 16-bit base (32-bit on a CPU), never on the 4-bit one, which would round the tuning away.
#
# You will have
#
# - a merged model with tokenizer, chat template and generation config,
# - proof that it computes what base + adapter computed, after saving and loading,
# - a before/after table on the held-back rows, with exact match in numbers.
#
# Takes a minute with the tiny model; a 7B needs 16 GB of memory and of disk.

# %% [markdown]
# The next cell installs the course where it is missing; on a machine that has it, it does nothing.

# %% tags=["setup"]
import glob, importlib.util, os, re, subprocess, sys
if importlib.util.find_spec("nbutils") is None:
    SOURCE = os.environ.get("NBUTILS_SOURCE") or max(glob.glob(os.path.join(os.environ.get("NBUTILS_FS_ROOT", "/"), "kaggle/input/**/nbutils-*.whl"), recursive=True), default="git+https://github.com/finetune-course/finetune-course")
    print("Installing the course from", re.sub("//[^/]*@", "//", SOURCE)); subprocess.check_call([sys.executable, "-m", "pip", "install", "-q", SOURCE] + SOURCE.endswith(".whl") * ["--no-index", "--find-links", os.path.dirname(SOURCE)])

# %% [markdown]
# The dials. Leave them as they are to merge what lesson 03 trained last with this profile.

# %% tags=["parameters"]
PROFILE: str = "auto"
MODEL: str = ""
RUN_NAME: str = ""

# %% [markdown]
# If lesson 03 has not run in this run folder, it runs now.

# %%
import nbutils

lesson = nbutils.start("04_merge", globals())
lesson.require("03_qlora")

# %% [markdown]
# First the checks that save an hour: the base is not quantised, and it is the one the adapter was trained on.

# %%
from nbutils import merging

merging.check_base(lesson.model, lesson.run.adapter)

# %% [markdown]
# The base in full precision. On a card that is 16 bits, on a CPU 32.

# %%
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[lesson.profile.machine.precision]
tokenizer = AutoTokenizer.from_pretrained(lesson.run.adapter)
place = {"": 0 if lesson.card else "cpu"}
model = AutoModelForCausalLM.from_pretrained(lesson.model, dtype=dtype, device_map=place)

# %% [markdown]
# ## Before
#
# The held-back questions, and what the untouched base answers. Greedy, so that the same model always says the same.

# %%
from nbutils import data, evaluation

size = lesson.profile.evaluation
_, held_back = data.load(lesson.run.data)
questions, references = evaluation.questions_of(held_back, size.rows)
base_answers = evaluation.generate(model, tokenizer, questions, size.max_new_tokens, size.batch_size)
base_match = evaluation.exact_match([answer.text for answer in base_answers], references)
print(f"base: {base_match:.1%} of {len(references)} answers are exactly right")

# %% [markdown]
# A few prompts for the comparison of logits. Equal text can hide a changed model; equal logits cannot.

# %%
prompts = [answer.prompt_ids for answer in base_answers[:4]]
base_logits = merging.logits(model, prompts)

# %% [markdown]
# ## The merge
#
# The adapter is put beside the base, its logits are recorded, and then `merge_and_unload` adds scale · B · A to every weight.

# %%
from peft import PeftModel

tuned = PeftModel.from_pretrained(model, lesson.run.adapter)
adapter_logits = merging.logits(tuned, prompts)
merged = tuned.merge_and_unload()

# %% [markdown]
# It is written to a side folder that takes its name only when everything is in it, so half a model is never served. A merge of
# this very adapter that is there already is kept.

# %%
from nbutils import paths

about = {"base": lesson.model_name, "dtype": str(dtype), "adapter": paths.stamp(lesson.run.adapter)}
if paths.stamp(lesson.run.merged) != about:
    merging.require_room(lesson.run.merged, merged)
    with paths.whole_folder(lesson.run.merged, about) as folder:
        merged.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
print(*sorted(file.name for file in lesson.run.merged.iterdir()), sep="\n")

# %% [markdown]
# ## Is it the same model?
#
# We forget everything in memory, load the folder as a server would, and compare logits: merged against adapter (must be
# equal up to rounding) and against the base (must differ).

# %%
del model, tuned, merged
merged = AutoModelForCausalLM.from_pretrained(lesson.run.merged, dtype=dtype, device_map=place)
merged_logits = merging.logits(merged, prompts)
parity = merging.parity(merged_logits, adapter_logits, base_logits, str(dtype).removeprefix("torch."))
print(parity)
merging.require_parity(parity)

# %% [markdown]
# ## After
#
# The same questions to the merged model.

# %%
merged_answers = evaluation.generate(merged, tokenizer, questions, size.max_new_tokens, size.batch_size)
merged_match = evaluation.exact_match([answer.text for answer in merged_answers], references)
print(f"exact match: base {base_match:.1%} -> merged {merged_match:.1%} ({len(references)} rows)")

# %% [markdown]
# Numbers first, then words: read some answers yourself before you believe a percentage.

# %%
from nbutils import dashboard

columns = {"base": [a.text for a in base_answers], "merged": [a.text for a in merged_answers]}
dashboard.show_table(evaluation.before_after_table(questions, references, columns), "Before and after")

# %% [markdown]
# ## Exercise
#
# Before you run this cell: how many answers does the merged model still get wrong, and in which field? Put your guess in.

# %%
guess = 0
wrong = [i for i, answer in enumerate(merged_answers) if answer.text.strip() != references[i].strip()]
for index in wrong[:2]:
    print("question", questions[index][-1]["content"])
    print("wanted  ", references[index], "\nsaid    ", merged_answers[index].text)
print(f"[{' OK ' if len(wrong) == guess else 'FAIL'}] saw {len(wrong)} wrong answers, you expected {guess}")
print("try: add rows that show the field it gets wrong" if wrong else "try: a run of 60 steps, and look again")

# %% [markdown]
# ## You now have
#
# - a merged model with tokenizer, chat template and generation config,
# - proof that it computes what base + adapter computed, after saving and loading,
# - a before/after table on the held-back rows, with exact match in numbers.
#
# Lesson 05 serves it.

# %%
lesson.finish(
    exact_match={"base": base_match, "merged": merged_match},
    rows=len(references),
    parity={"adapter_gap": parity.adapter_gap, "base_gap": parity.base_gap},
)
