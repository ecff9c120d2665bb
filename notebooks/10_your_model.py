# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 10 · Your own model
#
# Until now the task was ours. This lesson takes yours, from one sentence to a report that you can hand in: what the model could do
# before, what it learned from, what it can do now, and what it still gets wrong. Run it once as it is, with the bundled task, to see how
# it goes; then put your own files into the parameters. [docs/your_model.md](../docs/your_model.md) says how to write questions and rows.
#
# You will have
#
# - a baseline: what the model does with a good prompt alone, measured before any training,
# - rows made from documents, each with the place in the text that it is from, checked and apart from your questions,
# - two trainings that differ in their data only, compared with the baseline on the same questions, with intervals,
# - twenty errors read, five of them with a note,
# - a report, filled in from the runs.
#
# Takes about five minutes with the tiny model on 2 cores, if lessons 03, 04 and 05 have run.
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
# Leave everything empty for the bundled task. For your own:
#
# - `PROFILE` `auto` takes the bundled model where there is no GPU, and that one can only learn the bundled task. Without a GPU set `"laptop"`:
#   SmolLM2-135M, mostly English. It learns the form of short Chinese answers, but knows little Chinese: for a Chinese task use a GPU.
# - `TASK` is the task in one sentence. `QUESTIONS` is a file with 33 questions and the answers you want, as rows of lesson 02.
# - `DATA` are rows that you wrote, a file or a folder. `DOCUMENTS` is a file or folder (txt, md, pdf, docx) to make rows from, by the model
#   `ENDPOINT_MODEL` of an `ENDPOINT`, the base URL of any API in OpenAI's style. Its key is read from the environment variable
#   `OPENAI_API_KEY`, and never belongs into a notebook.
# - `WAY` is what it writes: `"questions"`, questions and answers about each piece of text, or `"answers"`, the answer to each piece.
# - `MORE_DATA` and `MORE_DOCUMENTS` are for the second training, and may stay empty the first time.
# - `SET` changes values of the profile in both trainings, as in lesson 03.

# %% tags=["parameters"]
PROFILE: str = "auto"
MODEL: str = ""
TASK: str = ""
QUESTIONS: str = ""
DATA: str = ""
DOCUMENTS: str = ""
MORE_DATA: str = ""
MORE_DOCUMENTS: str = ""
ENDPOINT: str = ""
ENDPOINT_MODEL: str = ""
WAY: str = "auto"
RUN_NAME: str = ""
SET: str = ""

# %% [markdown]
# Start the lesson. What does not go together is refused now, not after an hour.

# %%
import nbutils
from nbutils import your_model

lesson = nbutils.start("10_your_model", globals())
your_model.require_sources(TASK, QUESTIONS, DATA + MORE_DATA, DOCUMENTS + MORE_DOCUMENTS, ENDPOINT, ENDPOINT_MODEL)
bundled = not QUESTIONS
own_folder = lesson.run.path / your_model.FOLDER

# %% [markdown]
# ## Should you fine-tune at all?
#
# Often not. Try the ways from top to bottom, and stop at the first that is good enough.
#
# | way | takes | right when | wrong when |
# |---|---|---|---|
# | a better prompt | an hour | the model can do it once it is told what you want | the prompt grows to pages, and is still not followed |
# | few-shot: examples in the prompt | an hour | a format or a tone is easier shown than told | every request pays for the examples; there are many cases |
# | RAG: look it up, and put it into the prompt | days | the answers stand in documents, change, or must be quoted | it is not knowledge that is missing, but a skill |
# | fine-tuning | days, and rows | one narrow task, one form, often; a small model instead of a large one | facts that change; fewer than a hundred good rows; no test |
#
# Fine-tuning teaches *how* to answer, and is a poor way to teach *facts*: a model learns them from many rows only, and then cannot say
# where it has them from. What you know about your answers belongs into RAG, how they should look into the rows; both go together. (Tried
# with the handbook of a library: 125 rows taught SmolLM2-135M the form of every answer, ROUGE-L from 0.23 to 0.89, and not one of 30 facts:
# exact match 0 %. Each fact stood in one or two rows.)
#
# ## The task in one sentence
#
# If you cannot say it in one sentence, no row will be consistent with the next. The sentence is the instruction for the baseline. (The rows
# are trained without it: what a model has learned to do need not be told any more.)

# %%
task = TASK or (
    "Turn the customer's message into one line of JSON with the keys intent (order, refund, delivery or cancel), item, count, city and "
    "day. Copy names as the customer wrote them, write the count as a number, and null for what is not said."
)
print(task)

# %% [markdown]
# ## Questions before anything else
#
# 33 questions with the answers you want, written by you, before you look at any model's answers. The first three will be shown to the model as
# examples, the other 30 are the test: nothing may be trained on them, or the score says nothing. Take them as they will come in
# practice, the difficult ones too.

# %%
from nbutils import data, display

rows = your_model.read_questions(QUESTIONS or str(your_model.SAMPLE / "questions.jsonl"))
examples, questions = rows[:3], rows[3:]
test_file = data.write_rows(own_folder / "test.jsonl", questions)
display.show_answers(data.own_language_first(questions)[:3])
print(f"{len(questions)} questions are the test, {len(examples)} are shown as examples")

# %% [markdown]
# ## The baseline
#
# What can the model do without any training? It gets the task as the *system prompt*; and then the same with the three examples, each as a
# question that was answered before: *few-shot*. This is what it reads for the first question.

# %%
def prompted(row, shown=()):
    before = [message for example in shown for message in example["messages"]]
    return {"messages": [{"role": "system", "content": task}, *before, *row["messages"]]}


display.show_table([{"role": message["role"], "text": message["content"]} for message in prompted(questions[0], examples)["messages"][:-1]])

# %% [markdown]
# The scores are those of lesson 04, at temperature 0. The result is stored with its time, so that nobody, you included, can choose it
# afterwards. If it is good enough already, you are done: that is a result, too.

# %%
from nbutils import evaluation
from nbutils.training import model_fingerprint

placement = evaluation.place_model(lesson.model, None, lesson.profile)
base_model = model_fingerprint(lesson.model, lesson.model_name)
asking = {"in_4_bits": not placement.fits}
results = {}
for name, shown in {"prompt": [], "few-shot": examples}.items():
    asked = [prompted(row, shown) for row in questions]
    evaluator = evaluation.open_evaluator(lesson.run, lesson.profile, lesson.model, rows=asked, subject=f"-{name}", **asking)
    results[name] = evaluator.evaluate("base", placement.load(lesson.model), base_model)
placement.free()
times = {"baseline": your_model.note_time(own_folder / "baseline.json", [task, base_model, rows])}
display.show_table(evaluation.result_table(results))
print(f"measured at {times['baseline']}; the first answer: {results['few-shot'].texts[0]}")

# %% [markdown]
# ## Documents
#
# A *span* is a piece of a document: a paragraph, or, for questions about it, several up to 1,200 characters, from one heading to the next.
# Its file, its page and the characters from `start` to `end` are kept with every row that is made from it: so you, or whoever reads your
# report, can check it. The bundled documents hold customers' messages. Look whether the spans are what you would give to a person.

# %%
from collections import Counter
from dataclasses import asdict
from nbutils.data import documents
from nbutils.language import tr

way = WAY if WAY != "auto" else "answers" if bundled else "questions"
sources = {"round-1": DOCUMENTS, "round-2": MORE_DOCUMENTS}
if bundled:
    sources = {"round-1": str(your_model.SAMPLE / "first"), "round-2": str(your_model.SAMPLE / "more")}
spans = {name: documents.read_spans(source, join=1200 if way == "questions" else 0) if source else [] for name, source in sources.items()}
if spans["round-1"]:
    display.show_table([asdict(span) for span in data.own_language_first(spans["round-1"])[:3]])
for name, found in spans.items():
    if found:
        print(tr(name), dict(Counter(span.file for span in found)))

# %% [markdown]
# ## A teacher
#
# Some model has to write the rows. A large model that teaches a small one is called a *teacher*, and this *distillation*. Check that the
# terms of your provider allow it. For the bundled messages the teacher is the model that you tuned in lesson 03, served as in lesson 05: it
# does the task, the untuned model does not, and from its answers a new one will learn. The server is only started if something is missing.

# %%
from nbutils import distilling, serving
from nbutils.files import stamp
from nbutils.served_model import ServedModel

if bundled:
    lesson.require("04_merge")
    your_model.require_teacher(lesson.run)
version = stamp(lesson.run.merged) if bundled else None
instruction = "" if bundled else task
if way == "questions":
    instruction = (
        f"Somebody will be asked to do this: {task} Write up to five different questions that the text answers, in its language, as such a "
        "person would be asked them, without mentioning the text. Each answer must follow from the text alone, and be complete. Write JSON "
        'only: [{"question": "...", "answer": "..."}]'
    )
options = {"temperature": 0, "max_tokens": 256 if bundled else 2048}  # if your model refuses one of them, change it here
writer = distilling.Writer(own_folder / "written.jsonl", ENDPOINT_MODEL or "teacher", way, instruction, options, version)
all_spans = [span for part in spans.values() for span in part]
print(f"{len(writer.missing(all_spans))} of {len(all_spans)} spans are to be asked about")

# %% [markdown]
# Now they are asked, eight at a time. Every answer is written to `written.jsonl` as it comes: if this cell is stopped, or your credit ends,
# run it again, and only the rest is asked. What was cut off, or is not the JSON that was asked for, becomes no row and is listed. (What
# `MORE_DOCUMENTS` names is written in the same go; it is trained on later.)

# %%
missing = writer.missing(all_spans)
if bundled and missing:
    environment = serving.ensure_environment("auto", lesson.run.merged)
    served = ServedModel(lesson.run, lesson.profile, engine=environment.engine)
    flags = {**served.flags, **lesson.profile.vllm, "served_model_name": "teacher"}
    if not lesson.gpu:
        del flags["gpu_memory_utilization"]
    with serving.Server(served.folder, environment, flags=flags, log=lesson.run.logs / "teacher.log") as server:
        writer.write(server.client(), all_spans, server.model_name)
elif missing:
    writer.write(distilling.connect(ENDPOINT), all_spans)
written = {name: writer.written(part) for name, part in spans.items()}
origin = {"teacher": writer.model, "spans": len(all_spans), "tokens": sum(entry.tokens for part in written.values() for entry in part)}
failed = [{**asdict(entry.span), "problem": entry.problem} for part in written.values() for entry in part if entry.problem]
if written["round-1"]:
    display.show_table([asdict(entry.span) | {"answer": entry.pairs[0].answer} for entry in written["round-1"] if entry.pairs][:3])
print(f"{sum(len(part) for part in written.values())} spans answered, {len(failed)} of them without a row")
if failed:
    display.show_table(failed[:10])

# %% [markdown]
# Read at least twenty of them beside their spans: `written.jsonl` has them all. A wrong answer of the teacher is a wrong answer of your
# model. The rows then pass the checks of lesson 02, beside those you wrote yourself: what is broken, said twice, or too close to one of your
# questions is rejected, with its file and line.

# %%
from nbutils.record import RunFolder


def prepare(title, *parts):
    folder = your_model.gather(own_folder / title, [DATA, MORE_DATA][:len(parts)], [entry for part in parts for entry in part])
    content = data.card.hash_files(sorted(folder.iterdir()), [test_file])
    run = RunFolder(lesson.folders.keep / f"{lesson.run.name}-{title}-{content[:4]}")
    card = data.prepare(str(folder), run.data, eval_source=str(test_file), rows=lesson.profile.course.rows)
    print(card.rejected_text(run.data / "rejected.jsonl"))
    return run, card


first, first_card = prepare("round-1", written["round-1"])
first_card.show()

# %% [markdown]
# ## Exercise: enough rows
#
# How many rows will the first training learn from? The table says it. Fewer than a hundred are too few.

# %% tags=["exercise"]
from nbutils import exercises

my_rows = None
lesson.check(exercises.enough_rows, my_rows, first_card.train, first_card.eval)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# my_rows = first_card.train
# ```
#
# Of all rows the rejected ones are left out, and the questions are held out: what is in *splits* as *train* is trained.
#
# </details>

# %% [markdown]
# ## The first training
#
# Lesson 03, as it is, in a run of its own with these rows. A profile that fixes the number of steps, as the tiny one does, would pass over
# few rows more often than over many; here every row is seen twice in both trainings, so that more data means more steps, as
# in the other profiles. Of what it prints only the progress is shown.

# %%
import shlex, sys
from nbutils import config, files
from nbutils.lesson import require_trained


def train(run, settings):
    words = lesson.arguments("03_qlora", RUN_NAME=run.name, SET=config.settings_text(settings))
    print(shlex.join(["python", "notebooks/03_qlora.py", *words]))
    times[run.name] = your_model.note_time(own_folder / f"{run.name}.json", run.name)
    if not (run.recorded.trained.steps and run.recorded.trained.ended):
        lesson.launch([sys.executable, str(files.NOTEBOOKS / "03_qlora.py"), *words])
    require_trained(run)


settings = {"sft.num_train_epochs": 2, "sft.max_steps": -1} if lesson.profile.sft.max_steps > 0 else {}
settings |= lesson.resolved.set_values
train(first, settings)

# %% [markdown]
# ## Twenty errors
#
# The same 30 questions for the new model, now without the task sentence: PEFT puts the adapter on its base, and lesson 04's evaluator asks.

# %%
from peft import PeftModel


def ask(title, run):
    evaluator = evaluation.open_evaluator(lesson.run, lesson.profile, lesson.model, rows=questions, subject="-test", **asking)
    tuned = PeftModel.from_pretrained(placement.load(lesson.model), run.adapter)
    results[title] = evaluator.evaluate(title, tuned, stamp(run.adapter))
    tuned.unload()  # the base is itself again

# %% [markdown]
# Now the most important part of the work, which no program does for you: reading. The worst answers come first (the least like what you
# wanted, by ROUGE-L); those that are right to the letter are left out.

# %%
ask("round-1", first)
answers = results["round-1"]
similarity = answers.scores["rouge_l"]
errors = {}
for number in sorted(range(len(similarity)), key=similarity.__getitem__):
    if not answers.scores["exact_match"][number]:
        question, wanted = answers.evaluator.questions[number][-1]["content"], answers.evaluator.references[number]
        errors[number + 1] = {"row": number + 1, "question": question, "wanted": wanted, "answered": answers.texts[number]}
display.show_table(list(errors.values())[:20])
print(f"exact match {answers.estimate('exact_match').text('.0%')}, errors: {len(errors)}")

# %% [markdown]
# ## Exercise: notes on errors
#
# Say of at least five of these rows what went wrong, in a few words, the same words for the same kind: `{3: "city invented", 17: "no
# count"}`, where 3 and 17 are numbers of rows. The kinds are counted below; the commonest is what your next rows should show.

# %% tags=["exercise"]
my_notes = None
lesson.check(exercises.error_notes, my_notes, list(errors))
print(Counter((my_notes or {}).values()).most_common())

# %% [markdown]
# <details><summary>Solution</summary>
#
# For tickets a program can name the fields that are wrong; for texts, you have to read.
#
# ```python
# from nbutils.evaluation.scores import right_fields
#
# my_notes = {}
# for number in list(errors)[:5]:
#     fields = right_fields(errors[number]["answered"], errors[number]["wanted"])
#     my_notes[number] = "wrong: " + ", ".join(field for field in fields if not fields[field])
# ```
#
# </details>

# %% [markdown]
# ## More rows, and the second training
#
# Rows for what went wrong: write some by hand (`MORE_DATA`), or take documents with such cases (`MORE_DOCUMENTS`), and run the lesson again.
# What is done is not repeated. (For the bundled task there are 180 more messages.) The second training gets the rows of the first and
# the new ones, and keeps every setting of the first: also what the recipe had chosen by its rows. Change one thing at a time, or you will not
# know what helped.

# %%
rounds = {"round-1": first}
cards = {"round-1": first_card}
if MORE_DATA or spans["round-2"]:
    rounds["round-2"], cards["round-2"] = prepare("round-2", written["round-1"], written["round-2"])
    chosen = first.recorded.trained.settings
    before = config.flat(lesson.resolved.as_written.model_dump()) | {"course.conversations_per_step": chosen["course.conversations_per_step"]}
    train(rounds["round-2"], settings | {name: value for name, value in chosen.items() if value != before.get(name)})
    ask("round-2", rounds["round-2"])
else:
    print("Set MORE_DATA or MORE_DOCUMENTS, and run the lesson again.")

# %% [markdown]
# ## Did it help?
#
# Baseline and trainings on the same 30 questions. With 30 the intervals are wide: the exact match of two models must differ by about a third
# before `p` is below 0.05. If it does not, more questions help, not more digits. Where answers are prose, look at `rouge_l`. Is the last
# training better than the better prompt?

# %%
placement.free()
display.show_table(evaluation.result_table(results))
*others, last = results
same = [name for name in others if len(results[name].answers) == len(results[last].answers)]  # a long prompt may leave one out
changes = {(name, score): results[last].change(results[name], score) for name in same for score in ("exact_match", "rouge_l")}
print(*(f"{tr(last)} beyond {tr(name)}: {score} {change.text('+.3f')}, p {change.p_text}" for (name, score), change in changes.items()), sep="\n")

# %% [markdown]
# ## Exercise: a fair comparison
#
# What differs between the two trainings? Put the names of all settings that differ into a list, as in `["lora.r", "sft.learning_rate"]`. The
# cell shows both runs side by side, and what the course has recorded of each. (`data` is the fingerprint of the rows.) The check also looks at the
# recorded times.

# %% tags=["exercise"]
from nbutils import compare

runs = {tr(title): compare.load_run(run) for title, run in rounds.items()}
compare.show_runs(runs)
differing = [name for name in compare.differing(runs) if name != "course.conversations_per_step"]  # it follows from the rows
my_differing = None
lesson.check(exercises.fair_comparison, my_differing, differing, times)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# my_differing = ["data"]
# ```
#
# Both trainings have the same model and the same settings, and the baseline is older than both: what changed, the rows have changed.
#
# </details>

# %% [markdown]
# ## The report
#
# Everything above, filled in from what the runs have recorded. What no program can write is your notes, and the last paragraph: put what
# you would do next into `my_next`, and run the cell again.

# %%
my_next = ""
report = lesson.run.path / "report_your_model.md"
noted = [errors[number] | {"note": note} for number, note in (my_notes or {}).items() if number in errors]
measured = {"rounds": rounds, "results": results, "changes": changes, "differing": differing, "times": times, **origin}
your_model.write_report(report, **measured, notes=noted, name=lesson.run.name, task=task, model=lesson.model_name, what_next=my_next)
print(report.read_text(encoding="utf-8"))

# %% [markdown]
# ## Question
#
# Why are the questions written, and the baseline measured, before the first training? Put `"a"`, `"b"` or `"c"` into `my_choice`.
#
# - **a**: because whoever knows the model's answers chooses questions and prompts that suit what they want to show
# - **b**: because the baseline takes longer after the training
# - **c**: because the training reads the questions to know what to learn

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
# - a baseline: what the model does with a good prompt alone, measured before any training,
# - rows made from documents, each with the place in the text that it is from, checked and apart from your questions,
# - two trainings that differ in their data only, compared with the baseline on the same questions, with intervals,
# - twenty errors read, five of them with a note,
# - a report, filled in from the runs.
#
# To use the model, run lessons 04 and 05 with the name of the last training, printed above, as `RUN_NAME`.

# %%
lesson.finish(
    times=times,
    rows={title: card.train for title, card in cards.items()},
    exact_match={name: result.mean("exact_match") for name, result in results.items()},
    report=str(report),
)
