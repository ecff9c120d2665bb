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
# - base, adapter and merged on the same held-back rows: loss, exact match, F1 and more, each with an interval,
# - a verdict on whether the tuning helped, which can be no, and on what was forgotten,
# - an HTML report you can send to somebody.
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
# The dials. Leave them as they are to merge what lesson 03 trained last with this profile. `LM_EVAL_TASKS` names public benchmarks,
# separated by commas, for those who have network and time: base and merged model then sit them too, with the `lm-eval` package.

# %% tags=["parameters"]
PROFILE: str = "auto"
MODEL: str = ""
RUN_NAME: str = ""
LM_EVAL_TASKS: str = ""

# %% [markdown]
# The precision of everything below: 16 bits on a card, 32 on a CPU. Benchmarks that cannot run are told now and not after an hour.

# %%
import nbutils
import torch
from nbutils import evaluation, training

lesson = nbutils.start("04_merge", globals())
dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[lesson.profile.machine.precision]
dtype_name = str(dtype).removeprefix("torch.")
bench = evaluation.Harness(LM_EVAL_TASKS, lesson.run.path, dtype_name)

# %% [markdown]
# If lesson 03 has not run in this run folder, it runs now.

# %%
lesson.require("03_qlora")

# %% [markdown]
# First the checks that save an hour: the base is not quantised, and it is the one the adapter was trained on.

# %%
from nbutils import merging

merging.check_base(lesson.model, lesson.run.adapter)

# %% [markdown]
# Public benchmarks come first where they were asked for, while the memory is still free.

# %%
base_mark = training.model_mark(lesson)
bench.run("base", lesson.model, base_mark)

# %% [markdown]
# The base in full precision. If a server of lesson 05 holds the card and memory runs out here, stop that server first.

# %%
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(lesson.run.adapter)
place = {"": 0 if lesson.card else "cpu"}
model = AutoModelForCausalLM.from_pretrained(lesson.model, dtype=dtype, device_map=place)

# %% [markdown]
# ## The exam
#
# Three models will sit it: the base, the base with the adapter beside it, and the merged one. The questions are the held-back rows,
# which no training has seen, and the decoding is greedy, so that the same model always says the same. A second, small exam asks for
# everyday knowledge, to see what the tuning cost.
#
# Some bases think aloud before they answer. Where your rows have no thoughts, all three are asked without thinking, if the template
# knows how: else the base would be cut off in mid-thought, and any tuning would look like a success.

# %%
from nbutils import chat, data

size, limit = lesson.profile.evaluation, evaluation.reach(model)
_, held_back = data.load(lesson.run.data)
thinking = False if chat.may_skip_thinking(tokenizer, held_back) else None
exam = evaluation.Exam(lesson.run.path, tokenizer, held_back, size, dtype_name, thinking=thinking, limit=limit)
general = exam.general()
print(f"{len(exam.rows)} held-back rows, {len(general.rows)} general ones, answers of at most {size.max_new_tokens} tokens")
print(f"thinking: {exam.mode}")

# %% [markdown]
# ## Before
#
# What the untouched base answers, and how surprised it is by the wanted answers (the loss). Answers are written down as they come:
# if the machine is taken away, the next start asks only for the missing ones.

# %%
base = exam.sit("base", model, base_mark)
base_general = general.sit("base", model, base_mark)
print(f"base: {base.mean('exact_match'):.1%} of {len(exam.rows)} answers are exactly right, loss {base.loss:.3f}")

# %% [markdown]
# A few prompts for the comparison of logits. Equal text can hide a changed model; equal logits cannot.

# %%
prompts = exam.prompts[:4]
base_logits = merging.logits(model, prompts)

# %% [markdown]
# ## The merge
#
# The adapter is put beside the base, its logits are recorded, it sits the exam, and then `merge_and_unload` adds scale · B · A to every weight.

# %%
from nbutils import paths
from peft import PeftModel

tuned = PeftModel.from_pretrained(model, lesson.run.adapter)
adapter_logits = merging.logits(tuned, prompts)
adapter = exam.sit("adapter", tuned, [base_mark, paths.stamp(lesson.run.adapter)])
merged = tuned.merge_and_unload()

# %% [markdown]
# It is written to a side folder that takes its name only when everything is in it, so half a model is never served. A merge of
# this very adapter that is there already is kept.

# %%
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
parity = merging.parity(merged_logits, adapter_logits, base_logits, dtype_name)
print(parity)
merging.require_parity(parity)

# %% [markdown]
# ## After
#
# The same exam for the merged model. If the server of lesson 05 is up with this very model, it gives the answers, and faster.

# %%
from nbutils import serving

server = serving.running(lesson.run.path, lesson.run.merged)
after = exam.sit("merged", merged, about, server)
after_general = general.sit("merged", merged, about, server)
print(f"exact match: base {base.mean('exact_match'):.1%} -> merged {after.mean('exact_match'):.1%} ({len(exam.rows)} rows)")

# %% [markdown]
# The benchmarks again, if any were named, once the model has left the memory.

# %%
del merged
torch.cuda.empty_cache()
bench.run("merged", lesson.run.merged, about)
print(bench)

# %% [markdown]
# ## Did it help?
#
# A loss that falls proves little. Trained on *shuffled* answers a model still learns what answers look like: its loss falls, and it
# shares more characters with what was wanted. So every answer is also held against the references of other rows. What it scores
# beyond those is *content*, and only content that rises further than chance explains makes the verdict *helped*.

# %%
outcome = evaluation.Outcome([base, adapter, after], [base_general, after_general])
print(outcome.verdict)

# %% [markdown]
# All numbers. In brackets the interval that covers the true value in 95 of 100 cases; `p` is how probable a difference as large as
# this one is if the tuning had done nothing. Shares of rows have Wilson's interval: even 0 of 120 right answers leave room for 3 %.
# Characters are counted, in English too, so that Chinese is measured rightly.

# %%
from nbutils import dashboard

dashboard.show_table(outcome.table(), "Before and after", outcome.text())

# %% [markdown]
# The same as a picture: dots are means, bars the intervals. Where two bars are far apart, there is nothing to argue about.

# %%
evaluation.plot(outcome, exam.folder / "scores.png")

# %% [markdown]
# ## What did it cost?
#
# A model that learns one task may forget others. The general rows tell: a ratio of perplexities near 1, and answers as near to the
# wanted ones as before, mean that nothing was lost.
# (With the bundled sample: the tiny model knows nothing but its shop, and after the tuning it speaks in tickets only.)

# %%
print(outcome.forgetting)

# %% [markdown]
# Numbers first, then words: read some answers yourself before you believe a percentage.

# %%
columns = {one.name: one.texts for one in outcome.results}
dashboard.show_table(evaluation.before_after_table(exam.questions, exam.references, columns), "Side by side")

# %% [markdown]
# All of it in one file that opens by itself, also on a machine without this course.

# %%
page = evaluation.write_report(exam.folder / "report.html", lesson.run.name, exam, outcome, evaluation.about(lesson))
print(f"report: {page}")

# %% [markdown]
# ## Exercise
#
# Before you look: how many answers does the merged model still get wrong, and in what? Put your guess in, and run the cell.

# %%
guess = None
wrong = [row for row, right in enumerate(after.scores["exact_match"]) if not right]
for row in wrong[:2]:
    print("question", exam.questions[row][-1]["content"])
    print("wanted  ", exam.references[row], "\nsaid    ", after.texts[row])
mark = "TODO" if guess is None else " OK " if guess == len(wrong) else "FAIL"
print(f"[{mark}] saw {len(wrong)} wrong answers, you expected {guess}")
print("try: add rows that show what it gets wrong" if wrong else "try: a run of a quarter of the steps, and look again")

# %% [markdown]
# ## You now have
#
# - a merged model with tokenizer, chat template and generation config,
# - proof that it computes what base + adapter computed, after saving and loading,
# - base, adapter and merged on the same held-back rows: loss, exact match, F1 and more, each with an interval,
# - a verdict on whether the tuning helped, which can be no, and on what was forgotten,
# - an HTML report you can send to somebody.
#
# Lesson 05 serves it.

# %%
lesson.finish(
    exact_match={"base": base.mean("exact_match"), "merged": after.mean("exact_match")},
    rows=len(exam.rows),
    rows_left_out=exam.left_out,
    verdict=outcome.verdict.word,
    parity={"adapter_gap": parity.adapter_gap, "base_gap": parity.base_gap},
    evaluation=outcome.facts() | exam.facts() | {"lm_eval": bench.results, "report": str(page)},
)
