# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 10 · 你自己的模型
#
# 前面各课的任务是我们出的，这一课换成你的：从一句话的任务描述开始，到一份可以交上去的报告——模型原来会什么、学了哪些样本、现在会什么、还错在哪里。先原样跑一遍自带的任务，看清流程；再把参数换成你自己的文件。怎么写问题和样本，见 [docs/zh/your_model.md](../../docs/zh/your_model.md)。
#
# 学完这一课，你会得到
#
# - 一个基线：训练之前，只靠一句好的提示词，模型能做到什么；
# - 由文档生成的样本，每条都记着出自原文哪里，经过检查，和你的问题互不重复；
# - 两次只有数据不同的训练，和基线用同一批问题比较，分数带置信区间；
# - 读过二十个错误，其中五个写了评语；
# - 一份由训练记录自动填好的报告。
#
# 如果第 03、04、05 课已经跑过，用自带的小模型在 2 核 CPU 上约需五分钟。
#
# 每个术语第一次出现时都有解释，也收在 [术语表](../../docs/zh/glossary.md) 里。

# %% [markdown]
# 先选定语言：课程打印的文字和报错都用中文。英文版是 `notebooks/` 里同名的 notebook。

# %% tags=["language"]
import os; os.environ["NBUTILS_LANG"] = "zh"

# %% [markdown]
# 如果还没装课程，下一个单元格会自动安装；在 Colab 上，就从打开这个 notebook 的仓库安装。如果停下来提示 `Set NBUTILS_SOURCE`，在上面加一个单元格，写明从哪里安装：`%env NBUTILS_SOURCE=https://github.com/<you>/<fork>/archive/main.zip`，也可以填一个目录或 wheel 文件。

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
# 全部留空，就用自带的任务。换成你自己的任务：
#
# - `PROFILE`：没有 GPU 时，`auto` 会选自带的小模型，而它只学得会自带的任务。做自己的任务又没有 GPU，就填 `"laptop"`，用 SmolLM2-135M。它主要懂英文；简短中文回答的形式学得会，但不太懂中文，中文任务要用 GPU。
# - `TASK`：用一句话说清任务。`QUESTIONS`：一个文件，33 个问题和你想要的回答，格式和第 02 课的样本一样。
# - `DATA`：你手写的样本，文件或目录。`DOCUMENTS`：用来生成样本的文档，文件或目录（txt、md、pdf、docx）；由 `ENDPOINT` 上的模型 `ENDPOINT_MODEL` 生成。`ENDPOINT` 是任何兼容 OpenAI 的 API 的 base URL；密钥从环境变量 `OPENAI_API_KEY` 读取，千万不要写进 notebook。
# - `WAY`：让它写什么。`"questions"` 是针对每段文字写问题和回答，`"answers"` 是把每段文字当作问题，只写回答。
# - `MORE_DATA` 和 `MORE_DOCUMENTS` 给第二次训练用，第一次可以留空。
# - `SET` 修改两次训练的配置，用法和第 03 课一样。

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
# 开始这一课。互相矛盾的参数现在就会报错，不会等到一小时之后。

# %%
import nbutils
from nbutils import your_model

lesson = nbutils.start("10_your_model", globals())
your_model.require_sources(TASK, QUESTIONS, DATA + MORE_DATA, DOCUMENTS + MORE_DOCUMENTS, ENDPOINT, ENDPOINT_MODEL)
bundled = not QUESTIONS
own_folder = lesson.run.path / your_model.FOLDER

# %% [markdown]
# ## 到底要不要微调？
#
# 往往不需要。从上往下试，够用了就停。
#
# | 办法 | 代价 | 适合 | 不适合 |
# |---|---|---|---|
# | 改进提示词 | 一小时 | 说清楚要求，模型就能做到 | 提示词写了好几页，模型还是不照做 |
# | few-shot：在提示词里放例子 | 一小时 | 格式和语气，举例比描述容易 | 每次请求都要为例子付费；情况太多，例子放不下 |
# | RAG：先检索，再放进提示词 | 几天 | 答案就在文档里，会变，或者必须注明出处 | 缺的不是知识，而是能力 |
# | 微调 | 几天，外加样本 | 任务单一，格式固定，用量大；想用小模型代替大模型 | 知识经常变；好样本不到一百条；没有测试 |
#
# 微调教的是*怎么答*，不适合教*知识*：样本要很多条，模型才记得住，而且说不出是从哪里学来的。回答里要用到的知识交给 RAG，回答的样子写进样本；两者可以一起用。（用一本图书馆手册试过：125 条样本让 SmolLM2-135M 学会了每个回答的样子，ROUGE-L 从 0.23 升到 0.89；30 个知识点却一个也没记住，完全一致 0%。每个知识点只出现在一两条样本里。）
#
# ## 一句话的任务
#
# 一句话说不清的任务，样本也不会前后一致。这句话就是基线用的指令。（训练样本里不放它：模型已经学会的事，不必再说。）

# %%
task = TASK or (
    "把顾客的留言转换成一行 JSON，键是 intent（order、refund、delivery 或 cancel）、item、count、city、day。"
    "名称照抄顾客的原文，数量写成数字，没有说的写 null。"
)
print(task)

# %% [markdown]
# ## 先写问题
#
# 33 个问题，连同你想要的回答，在看到任何模型的回答之前就由你写好。前三个会当作例子给模型看，其余 30 个是测试：绝不能拿来训练，否则分数毫无意义。问题要和实际用到时一样，难的也要有。

# %%
from nbutils import data, display

rows = your_model.read_questions(QUESTIONS or str(your_model.SAMPLE / "questions.jsonl"))
examples, questions = rows[:3], rows[3:]
test_file = data.write_rows(own_folder / "test.jsonl", questions)
display.show_answers(data.own_language_first(questions)[:3])
print(f"{len(questions)} 个问题用作测试，{len(examples)} 个当作例子")

# %% [markdown]
# ## 基线
#
# 完全不训练，模型能做到什么？先把任务当作*系统提示词*（system prompt）给它；再加上三个例子，每个例子都像是之前已经答过的一问一答：这就是 *few-shot*。下面是模型回答第一个问题之前读到的全部内容。

# %%
def prompted(row, shown=()):
    before = [message for example in shown for message in example["messages"]]
    return {"messages": [{"role": "system", "content": task}, *before, *row["messages"]]}


display.show_table([{"role": message["role"], "text": message["content"]} for message in prompted(questions[0], examples)["messages"][:-1]])

# %% [markdown]
# 分数和第 04 课一样，温度为 0。结果连同时间一起存下来，谁也不能事后挑选，包括你自己。如果现在就够好了，那就不用训练：这也是一个结论。

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
print(f"测量时间 {times['baseline']}；第一个回答：{results['few-shot'].texts[0]}")

# %% [markdown]
# ## 文档
#
# *文段*（span）是文档里的一小段：一个段落；如果要针对它提问，就是同一标题下的几个段落，合起来不超过 1,200 个字符。由它生成的每条样本都记着文件、页码，以及从 `start` 到 `end` 是第几个字符，你或者读报告的人可以去原文核对。自带的文档里是顾客的留言。看看这样切出来的文段，交给一个人做，他做得了吗？

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
# ## 教师模型
#
# 样本得有一个模型来写。教小模型的大模型叫*教师模型*（teacher），这种做法叫*蒸馏*（distillation）。先确认服务商的条款允许这样做。自带任务的教师，就是你在第 03 课微调好的模型，像第 05 课那样部署：它会做这个任务，没微调过的模型不会；新模型就从它的回答里学。只有还缺样本时，才会启动服务。

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
        f"有人要完成这样的任务：{task}根据这段文字，用它的语言写出最多五个不同的问题和回答，问题要像别人真的会问他的那样，"
        "不要提到“这段文字”。每个回答只能依据这段文字，而且要完整。只输出 JSON："
        '[{"question": "问题", "answer": "回答"}]'
    )
options = {"temperature": 0, "max_tokens": 256 if bundled else 2048}  # 如果你的模型不接受其中一个，在这里改
writer = distilling.Writer(own_folder / "written.jsonl", ENDPOINT_MODEL or "teacher", way, instruction, options, version)
all_spans = [span for part in spans.values() for span in part]
print(f"{len(all_spans)} 个文段中还有 {len(writer.missing(all_spans))} 个要问")

# %% [markdown]
# 现在开始提问，同时最多八个请求。每个回答一到就写进 `written.jsonl`：中途停下，或者余额用完，再运行一次这个单元格，只会问剩下的。被截断的回答、格式不对的回答不会变成样本，会列出来。（`MORE_DOCUMENTS` 里的文段也在这里一起生成，之后才用来训练。）

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
print(f"已有 {sum(len(part) for part in written.values())} 个文段得到回答，其中 {len(failed)} 个没有变成样本")
if failed:
    display.show_table(failed[:10])

# %% [markdown]
# 至少读二十条，和文段对照着看，`written.jsonl` 里都有。教师答错的，你的模型也会学错。然后，这些样本和你手写的样本一起，接受第 02 课的检查：不合格的、重复的、和你的问题太像的，都会剔除，并注明文件和行号。

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
# ## 练习：样本够不够
#
# 第一次训练会从多少条样本里学？看上面的表。少于一百条就太少了。

# %% tags=["exercise"]
from nbutils import exercises

my_rows = None
lesson.check(exercises.enough_rows, my_rows, first_card.train, first_card.eval)

# %% [markdown]
# <details><summary>参考答案</summary>
#
# ```python
# my_rows = first_card.train
# ```
#
# 剔除的样本不算，留作测试的问题也不算：表里“划分结果”一行，“训练集”后面的条数才会用来训练。
#
# </details>

# %% [markdown]
# ## 第一次训练
#
# 原样运行第 03 课，用这些样本，训练结果放在单独的目录里。有的配置（例如 tiny）固定了步数，样本越少，每条重复的次数就越多；这里两次训练都让每条样本过两遍，于是样本越多，步数越多，和其他配置一样。训练时只显示进度。

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
# ## 二十个错误
#
# 用同样的 30 个问题问新模型，这次不带任务描述：PEFT 把适配器加到基座模型上，由第 04 课的评测来提问。

# %%
from peft import PeftModel


def ask(title, run):
    evaluator = evaluation.open_evaluator(lesson.run, lesson.profile, lesson.model, rows=questions, subject="-test", **asking)
    tuned = PeftModel.from_pretrained(placement.load(lesson.model), run.adapter)
    results[title] = evaluator.evaluate(title, tuned, stamp(run.adapter))
    tuned.unload()  # 基座模型恢复原样

# %% [markdown]
# 接下来是整个过程里最重要的一步，没有程序能替你做：读。最差的回答排在最前面（按 ROUGE-L，和参考答案最不像的）；完全正确的不列出来。

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
print(f"完全一致 {answers.estimate('exact_match').text('.0%')}，错误 {len(errors)} 个")

# %% [markdown]
# ## 练习：给错误写评语
#
# 至少挑五条，用几个字说明错在哪里，同一类错误用同样的字：`{3: "编造城市", 17: "漏了数量"}`，3 和 17 是行号。下面会按种类计数；最多的那一类，就是下一批样本该补的。

# %% tags=["exercise"]
my_notes = None
lesson.check(exercises.error_notes, my_notes, list(errors))
print(Counter((my_notes or {}).values()).most_common())

# %% [markdown]
# <details><summary>参考答案</summary>
#
# 工单的错误，程序可以指出哪些字段不对；如果是一段文字，就得自己读。
#
# ```python
# from nbutils.evaluation.scores import right_fields
#
# my_notes = {}
# for number in list(errors)[:5]:
#     fields = right_fields(errors[number]["answered"], errors[number]["wanted"])
#     my_notes[number] = "不对的字段：" + ", ".join(field for field in fields if not fields[field])
# ```
#
# </details>

# %% [markdown]
# ## 补充样本，第二次训练
#
# 针对错误补充样本：手写一些（`MORE_DATA`），或者找些有这类情况的文档（`MORE_DOCUMENTS`），再运行一遍这一课，做过的不会重做。（自带的任务另有 180 条留言。）第二次训练用第一次的样本加上新样本，第一次的所有设置都不变，包括当时根据样本自动选定的值。一次只改一样，否则就不知道是什么起了作用。

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
    print("请设置 MORE_DATA 或 MORE_DOCUMENTS，再运行一遍这一课。")

# %% [markdown]
# ## 有用吗？
#
# 基线和两次训练，同样的 30 个问题。只有 30 个问题，置信区间会很宽：两个模型的完全一致率大约要相差三成多，`p` 才会小于 0.05。如果分不出高下，该增加的是问题，不是小数位。回答是大段文字时，看 `rouge_l`。最后，它比更好的提示词强吗？

# %%
placement.free()
display.show_table(evaluation.result_table(results))
*others, last = results
same = [name for name in others if len(results[name].answers) == len(results[last].answers)]  # 提示词太长时可能漏掉一个问题
changes = {(name, score): results[last].change(results[name], score) for name in same for score in ("exact_match", "rouge_l")}
print(*(f"{tr(last)} 比 {tr(name)}：{score} {change.text('+.3f')}，p {change.p_text}" for (name, score), change in changes.items()), sep="\n")

# %% [markdown]
# ## 练习：公平的比较
#
# 两次训练有什么不同？把所有不同的设置的名字写进列表，例如 `["lora.r", "sft.learning_rate"]`。单元格会把两次训练的记录并排列出来。（`data` 是数据的指纹。）检查时也会看记录下来的时间。

# %% tags=["exercise"]
from nbutils import compare

runs = {tr(title): compare.load_run(run) for title, run in rounds.items()}
compare.show_runs(runs)
differing = [name for name in compare.differing(runs) if name != "course.conversations_per_step"]  # 由样本的长度决定
my_differing = None
lesson.check(exercises.fair_comparison, my_differing, differing, times)

# %% [markdown]
# <details><summary>参考答案</summary>
#
# ```python
# my_differing = ["data"]
# ```
#
# 两次训练的模型相同，设置相同，基线早于两次训练：变化只能来自数据。
#
# </details>

# %% [markdown]
# ## 报告
#
# 上面的一切，都由训练记录自动填好。程序写不了的是你的评语和最后一段：把下一步打算写进 `my_next`，再运行一次这个单元格。

# %%
my_next = ""
report = lesson.run.path / "report_your_model.md"
noted = [errors[number] | {"note": note} for number, note in (my_notes or {}).items() if number in errors]
measured = {"rounds": rounds, "results": results, "changes": changes, "differing": differing, "times": times, **origin}
your_model.write_report(report, **measured, notes=noted, name=lesson.run.name, task=task, model=lesson.model_name, what_next=my_next)
print(report.read_text(encoding="utf-8"))

# %% [markdown]
# ## 思考题
#
# 为什么要在第一次训练之前就写好问题、测好基线？把 `"a"`、`"b"` 或 `"c"` 填进 `my_choice`。
#
# - **a**：因为看过模型的回答，就会不知不觉挑选对自己有利的问题和提示词
# - **b**：因为训练之后再测基线，要花更长时间
# - **c**：因为训练时要读这些问题，才知道该学什么

# %% tags=["exercise"]
my_choice = None
lesson.check(exercises.quiz, my_choice, lesson.stem)

# %% [markdown]
# <details><summary>参考答案</summary>
#
# ```python
# my_choice = "a"
# ```
#
# </details>

# %% [markdown]
# ## 现在你有了
#
# - 一个基线：训练之前，只靠一句好的提示词，模型能做到什么；
# - 由文档生成的样本，每条都记着出自原文哪里，经过检查，和你的问题互不重复；
# - 两次只有数据不同的训练，和基线用同一批问题比较，分数带置信区间；
# - 读过二十个错误，其中五个写了评语；
# - 一份由训练记录自动填好的报告。
#
# 要用这个模型，就把上面打印的最后一次训练的名字填进 `RUN_NAME`，运行第 04、05 课。

# %%
lesson.finish(
    times=times,
    rows={title: card.train for title, card in cards.items()},
    exact_match={name: result.mean("exact_match") for name, result in results.items()},
    report=str(report),
)
