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
# product to each weight. It is done on the unquantised base, never in 4 bits, which would round the tuning away, and weight by
# weight from disk to disk, so that a 7B needs no more memory than a small program.
#
# You will have
#
# - a merged model with tokenizer, chat template and generation config,
# - proof that it computes what base + adapter computed, and the price of leaving the 4-bit base it was trained on,
# - base and merged on the same held-back rows: loss, exact match, F1 and more, each with an interval,
# - a verdict on whether the tuning helped, which can be no, and on what was forgotten,
# - an HTML report you can send to somebody, and smaller forms of the model if you ask for them.
#
# Takes a minute or two with the tiny model; a 7B needs 16 GB of disk and 2 GB of memory for the merge.

# %% [markdown]
# The next cell installs the course where it is missing; on a machine that has it, it does nothing. If it stops, say where from in a
# cell above it: `%env NBUTILS_SOURCE=git+https://github.com/YOU/YOUR-FORK@v0.1.0`, or a folder, or one of the wheels it found.

# %% tags=["setup"]
import importlib.util, re, subprocess, sys; from glob import glob; from os import getenv, path, sep
if importlib.util.find_spec("nbutils") is None:
    OURS = "git+https://github.com/YOUR-NAME/finetune-course@v0.1.0"
    ALL = glob(getenv("NBUTILS_FS_ROOT", "") + sep + "kaggle/input/**/nbutils*.whl", recursive=True)
    SOURCE = getenv("NBUTILS_SOURCE") or "\n".join(ALL) or OURS
    assert re.fullmatch("(?!-|.*YOUR-).*/.*", SOURCE), f"Set NBUTILS_SOURCE, see above; found {ALL}"
    print("Installing the course from", re.sub(r"(?<=//)[^/]*@|[?#].*", "", SOURCE))
    ALONE = ["--no-index", "--only-binary=:all:", "-f", path.dirname(SOURCE)] * (SOURCE in ALL)
    PIP = subprocess.run([sys.executable, "-m", "pip", "install", "-q", SOURCE, *ALONE], stderr=-1)
    assert PIP.returncode == 0, re.sub(r"(?<=//)[^/\s]*@|[?#]\S*", "", PIP.stderr.decode())

# %% [markdown]
# The dials. Leave them as they are to merge what lesson 03 trained last with this profile. `MERGE_ONTO = "dequantized"` merges into
# the 4-bit base made wide again, see below. The rest is for those who ask for it: `EXPORTS` names smaller forms (`"fp8, gguf-q8_0"`),
# `PUSH_TO` a place to upload to (`"hub:owner/name"`, also `modelscope:` and `kaggle:`) or `"file"` for one file to download, and
# `LM_EVAL_TASKS` public benchmarks, separated by commas.

# %% tags=["parameters"]
PROFILE: str = "auto"
MODEL: str = ""
RUN_NAME: str = ""
MERGE_ONTO: str = "full"
EXPORTS: str = ""
PUSH_TO: str = ""
LM_EVAL_TASKS: str = ""

# %% [markdown]
# The precision of everything below: 16 bits on a card, 32 on a CPU. What cannot be done is told now and not after an hour.

# %%
import nbutils
import torch
from nbutils import evaluation, exporting, merging, parity, sharing, training

lesson = nbutils.start("04_merge", globals())
dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[lesson.profile.machine.precision]
dtype_name = str(dtype).removeprefix("torch.")
parity.require_onto(MERGE_ONTO, lesson.profile.method)
formats = exporting.chosen(EXPORTS)
if PUSH_TO not in ("", "file"):
    sharing.pushing.parse(PUSH_TO)
bench = evaluation.Harness(LM_EVAL_TASKS, lesson.run.path, dtype_name)

# %% [markdown]
# If lesson 03 has not run in this run folder, it runs now.

# %%
lesson.require("03_qlora")

# %% [markdown]
# First the checks that save an hour: the base is not quantised, it is the one the adapter was trained on, and names and shapes fit.
# Nothing but the first bytes of each file is read for that.

# %%
merging.check_base(lesson.model, lesson.run.adapter)

# %% [markdown]
# Public benchmarks come first where they were asked for, while the memory is still free.

# %%
base_mark = training.model_fingerprint(lesson)
bench.run("base", lesson.model, base_mark)

# %% [markdown]
# ## The merge
#
# For each weight with an adapter: W + scale · B · A, computed in float32 and rounded once. Here it is for one weight, by hand.
# (This is plain LoRA. DoRA also scales the rows of the result; the merge below knows that too.)

# %%
from peft import LoraConfig
from safetensors.torch import load_file

lora, learned = LoraConfig.from_pretrained(lesson.run.adapter), load_file(lesson.run.adapter / "adapter_model.safetensors")
first = next(name for name in learned if name.endswith("lora_A.weight"))
A, B = learned[first].float(), learned[first.replace("lora_A", "lora_B")].float()
weight = first.removeprefix("base_model.model.").replace("lora_A.", "")
W = merging.bases.open_base(lesson.model).weights[weight].tensor().float()
scale = lora.lora_alpha / (lora.r**0.5 if lora.use_rslora else lora.r)
by_hand = W + (B @ A) * scale
print(f"{weight}: W {tuple(W.shape)} + {scale:g} · B {tuple(B.shape)} · A {tuple(A.shape)}")

# %% [markdown]
# Now all of them. It is written to a side folder that takes its name only when everything is in it and on the disk, so half a
# model is never served. An interrupted merge goes on where it was; a finished one of this very adapter is kept. Where the run
# folder has no room (Kaggle keeps 20 GB), the model goes to the machine's own disk.

# %%
gib = merging.size_gib(lesson.model, lesson.run.adapter, dtype_name)
folder = merging.choose_place(lesson.run, lesson.folders, gib)
four_bits = {"quant_type": lesson.profile.quantization.type, "double_quant": lesson.profile.quantization.double, "dtype": dtype_name}
made = merging.merge_adapter(
    lesson.model, lesson.run.adapter, folder, dtype=dtype_name, onto=MERGE_ONTO,
    quantization=four_bits if MERGE_ONTO == "dequantized" else None,
)
print(made)

# %% [markdown]
# What was written for our one weight, against what we computed by hand. (Merged into the dequantised base, they differ by what 4 bits lose.)

# %%
from nbutils import paths

about = paths.stamp(folder)
written = merging.bases.open_base(folder).weights[weight].tensor().float()
print(f"{weight}: largest difference to our own sum {(written - by_hand.to(dtype).float()).abs().max():.2g}")
print(*sorted(file.name for file in folder.iterdir()), sep="\n")

# %% [markdown]
# And without believing the merge: the first and last rows of every weight are computed once more from base and adapter, and compared
# with the folder. A layer that was forgotten, or a file that was changed since, hardly shows in answers; here it does.

# %%
print(merging.prove(lesson.model, lesson.run.adapter, folder, onto=MERGE_ONTO))

# %% [markdown]
# ## The exam
#
# Does the unquantised model fit into this card? If it does not (a 7B on a T4), the questions are asked in 4 bits, both models
# alike, and only the comparison below is made in full width, a piece of the model at a time.

# %%
room = parity.room_for(gib, lesson.card, lesson.scratch / "offload")
print(room.reason)

# %% [markdown]
# The 4-bit base the adapter was trained on, as in lesson 03; and what `from_pretrained` is given for the models of the exam.

# %%
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

four_bit = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type=four_bits["quant_type"],
    bnb_4bit_use_double_quant=four_bits["double_quant"],
    bnb_4bit_compute_dtype=dtype,
)
narrow = {"quantization_config": four_bit, "device_map": {"": 0 if lesson.card else "cpu"}}
kind = room.wide if room.fits else narrow

# %% [markdown]
# The base. If a server of lesson 05 holds the card and memory runs out here, stop that server first.

# %%
tokenizer = AutoTokenizer.from_pretrained(lesson.run.adapter, trust_remote_code=False)
model = parity.as_trained(AutoModelForCausalLM.from_pretrained(lesson.model, dtype=dtype, **kind, trust_remote_code=False))

# %% [markdown]
# Two models will sit the exam: the base and the merged one. The questions are the held-back rows, which no training has seen, and
# the decoding is greedy, so that the same model always says the same. An answer may be half as long again as the longest wanted one;
# what is longer is judged by its beginning. A second, small exam asks for everyday knowledge, to see what the tuning cost.
#
# Some bases think aloud before they answer. Where your rows have no thoughts, both are asked without thinking, if the template
# knows how: else the base would be cut off in mid-thought, and any tuning would look like a success.

# %%
from nbutils import chat, data

size, limit = lesson.profile.evaluation, evaluation.reach(model)
train_rows, held_back = data.load(lesson.run.data)
thinking = False if chat.may_skip_thinking(tokenizer, held_back) else None
asked_in = dtype_name if room.fits else f"{dtype_name}, weights in 4 bits"
exam = evaluation.Exam(lesson.run.path, tokenizer, held_back, size, asked_in, thinking=thinking, limit=limit)
general = exam.general()
print(f"{len(exam.rows)} held-back rows, {len(general.rows)} general ones, answers of at most {exam.max_new_tokens} tokens")
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
# The merged folder has a tokenizer of its own, and a server will use that one. It must make the same tokens of the same rows.

# %%
print(parity.require_tokenizer(folder, tokenizer, held_back), "rows: the merged folder makes the tokens of the training")

# %% [markdown]
# For the comparison of the models a fixed set: a few texts of both exams. At some 200 of their positions we keep the whole
# prediction, a probability for each word of the vocabulary. Equal answers can hide a changed model; equal predictions cannot.

# %%
fixed = parity.fixed_set(exam, general, model=model, limit=lesson.profile.serve.max_model_len)
readings = parity.Readings(lesson.run.path, fixed, about=about)
print(fixed)

# %% [markdown]
# The predictions of the adapter beside the base are read, and a few greedy answers. They are kept in the run folder, a megabyte in
# all. Its whole exam would only repeat the merged model's, which has the same weights.

# %%
from peft import PeftModel

tuned = PeftModel.from_pretrained(model, lesson.run.adapter)
wanted = room.wanted(lesson.profile.method)
if room.name in wanted:
    readings.read(room.name, tuned)

# %% [markdown]
# ## Is it the same model?
#
# With QLoRA the adapter was trained on a 4-bit base, and will run on an unquantised one. Both are read, whichever has not been yet.
# (`as_trained`: on some CPUs bitsandbytes computes more coarsely once nothing is trained, not here. `put_beside`: PEFT's model, also
# for a base that lies partly on disk.)

# %%
from nbutils import hardware

del model, tuned
hardware.free_memory()
if room.other in wanted and room.other not in readings:
    other = narrow if room.other == "4bit" else room.wide
    model = parity.as_trained(AutoModelForCausalLM.from_pretrained(lesson.model, dtype=dtype, **other, trust_remote_code=False))
    tuned = parity.put_beside(model, lesson.run.adapter)
    readings.read(room.other, tuned, answers=room.fits)
    del model, tuned
hardware.free_memory()

# %% [markdown]
# The merged model is loaded from its folder, as a server would, and read at every start: the others are kept. It is read twice, all
# texts together and in smaller batches. Nothing but the order of additions differs then, and that is the noise of this run.

# %%
merged = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **room.wide, trust_remote_code=False)
readings.read_merged(merged, answers=room.fits)

# %% [markdown]
# KL is what it costs, in nats for each token, to predict with one model in place of another: 0 for equal ones. Rounding alone makes
# it a small number, the larger the deeper the model, so it is also told as a multiple of the noise. The weights are proven, so this
# distance is a price and no error; but a merged model that is nearer to the base than to the adapter has lost the tuning, and the
# lesson stops.
#
# The step from the 4-bit base to the unquantised one is not an error either but a price, usually a small one. Whoever will not pay it
# sets `MERGE_ONTO = "dequantized"`: the base then stays as coarse as it was in training, and the tuning sits exactly where it was learnt.

# %%
from nbutils import dashboard

same = parity.Report(readings)
dashboard.show_table(same.table(), "The same model?", same.text())
print(same.verdict)
if not same.holds:
    room.clear()
same.require()

# %% [markdown]
# ## After
#
# The same exam for the merged model. If the server of lesson 05 is up with this very model, it gives the answers, and faster.

# %%
from nbutils import serving

if not room.fits:
    del merged
    room.clear()
    hardware.free_memory()
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **narrow, trust_remote_code=False)
server = serving.running(lesson.run.path, folder)
after = exam.sit("merged", merged, about, server)
after_general = general.sit("merged", merged, about, server)
print(f"exact match: base {base.mean('exact_match'):.1%} -> merged {after.mean('exact_match'):.1%} ({len(exam.rows)} rows)")

# %% [markdown]
# The benchmarks again, if any were named, once the model has left the memory.

# %%
del merged
hardware.free_memory()
bench.run("merged", folder, about)
print(bench)

# %% [markdown]
# ## Did it help?
#
# A loss that falls proves little. Trained on *shuffled* answers a model still learns what answers look like: its loss falls, and it
# shares more characters with what was wanted. So every answer is also held against the references of other rows. What it scores
# beyond those is *content*, and only content that rises further than chance explains makes the verdict *helped*.

# %%
outcome = evaluation.Outcome([base, after], [base_general, after_general])
print(outcome.verdict)

# %% [markdown]
# All numbers. In brackets the interval that covers the true value in 95 of 100 cases; `p` is how probable a difference as large as
# this one is if the tuning had done nothing. Shares of rows have Wilson's interval: even 0 of 120 right answers leave room for 3 %.
# Characters are counted, in English too, so that Chinese is measured rightly.

# %%
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
# (The bundled tiny model knows nothing but its shop, and after the tuning on the bundled sample speaks in tickets only.)

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
# ## Other forms
#
# The merged model can be made smaller, for a server with less memory, for a laptop, for a phone. This is what this machine can make;
# name what you want in `EXPORTS`.

# %%
dashboard.show_table([one.row for one in exporting.offer(lesson.card)], "Exports")

# %% [markdown]
# Those you named, made in an environment of their own, each read and compared with the merged model: the size you save, and its price.

# %%
made_exports = [exporting.export(folder, name, calibration=train_rows) for name in formats]
exports = [exporting.check(one, fixed, readings["merged"]) for one in made_exports]
print(*made_exports, sep="\n")
if exports:
    dashboard.show_table(exporting.table(exports), "Smaller, and what it costs")

# %% [markdown]
# Nothing leaves this machine unless `PUSH_TO` says where to. Uploads are private, with a page that names the base and the form but
# no folder of yours; the token comes from the platform's secrets and is never shown.

# %%
if PUSH_TO == "file":
    print(sharing.single_file(folder))
elif PUSH_TO:
    print(sharing.push(folder, PUSH_TO))
else:
    print(f"kept here: {folder}")

# %% [markdown]
# Other runs you trained to their end, beside this one: the settings that differ, and what came of them.

# %%
from nbutils import compare

compare.beside(lesson.run, outcome.facts())

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
# - proof that it computes what base + adapter computed, and the price of leaving the 4-bit base it was trained on,
# - base and merged on the same held-back rows: loss, exact match, F1 and more, each with an interval,
# - a verdict on whether the tuning helped, which can be no, and on what was forgotten,
# - an HTML report you can send to somebody, and smaller forms of the model if you ask for them.
#
# Lesson 05 serves it.

# %%
lesson.finish(
    exact_match={"base": base.mean("exact_match"), "merged": after.mean("exact_match")},
    rows=len(exam.rows),
    rows_left_out=exam.left_out,
    verdict=outcome.verdict.word,
    merge=made.facts(),
    parity=same.facts(),
    exports=[one.facts for one in exports],
    evaluation=outcome.facts() | exam.facts() | {"lm_eval": bench.results, "report": str(page)},
)
