# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 99 · 出了问题怎么办
#
# 某一课报错停下，而你看不懂；或者顺利跑完，回答却很糟，就来这一课。依次看四样东西：机器、报错信息、训练过程、你的样本。
#
# 学完这一课，你会得到
#
# - 对这台机器的完整检查，每个问题都写着怎么办；
# - 一条报错的原因和下一步；
# - 从损失曲线看出的训练问题。
#
# 用时不到一分钟；不下载任何东西，也不改动你的运行目录。
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
# `RUN_NAME` 填出问题的那次训练；留空，就是这台机器的配置（profile）对应的那一次。把报错粘贴到 `ERROR` 的引号里，最后几行就够。（如果是整份日志，在终端里更方便：`python -m nbutils diagnose --error train.log`。）

# %% tags=["parameters"]
PROFILE: str = "auto"
RUN_NAME: str = ""
ERROR: str = ""

# %% [markdown]
# 开始这一课。和其他课不同，即使显卡用不了，这一课也会往下走。

# %%
import nbutils

lesson = nbutils.start("99_when_it_breaks", globals())

# %% [markdown]
# ## 机器
#
# 先看这里。大部分报错都出自这几样：磁盘满了，torch 里没有这张显卡的算子，某个包的版本不对。可报错本身一个字也不提。

# %%
from nbutils import display, doctor
from nbutils.language import tr

report = doctor.examine()
checks = [{"结果": check.status, "项目": tr(check.name), "查到的情况": check.seen, "怎么办": check.todo} for check in report.checks]
display.show_table(checks, text=report.text())

# %% [markdown]
# ## 报错信息
#
# Python 把错误写在最后，上面是一层层的调用，所以要从下往上读。这里有一条真实的报错：自带的小模型只认识几千个 token，却收到一个编号大得多的 token。tokenizer 和模型不是一套时就会这样。

# %%
import torch
from transformers import AutoModelForCausalLM
from nbutils import files

model = AutoModelForCausalLM.from_pretrained(files.TINY_MODEL, trust_remote_code=False)
try:
    model(torch.tensor([[1_000_000]]))
except IndexError as problem:
    message = f"{type(problem).__name__}: {problem}"
print(message)

# %% [markdown]
# 同样的错误在 GPU 上显示为 `device-side assert triggered`，报错的位置离真正出错的那一行很远。`explain` 两种都认得。认的方法是匹配报错里的文字，所以报错给得越完整越好。

# %%
from nbutils import diagnose

diagnose.show(diagnose.explain(ERROR or message))

# %% [markdown]
# ## 训练过程
#
# 没有报错，训练也可能失败。*训练损失*看模型对训练样本预测得有多差，*验证损失*看模型对没学过的样本预测得有多差。课程用一个真实的模型测了四次训练：一次正常，一次学习率低太多，一次学习率高太多，还有一次把 32 条样本看了 25 遍。

# %%
display.plot_loss_examples()

# %% [markdown]
# `examine` 只看数字就能分清这四次，查出的问题各有一个名称；一次训练可能有好几个。`flat`（几乎不降）：训练损失几乎没有下降。`diverging`（发散）：训练损失上升。`overfitting`（过拟合）：训练损失在降，验证损失却在最低点之后回升。`never_better`：验证损失从没低于训练开始时。没有问题就是 `healthy`（正常）。

# %%
table = []
for name, curve in files.read_json(display.CURVES).items():
    found = diagnose.examine(diagnose.Trained(curve["train"], curve["validation"]))
    seen = "；".join(finding.symptom for finding in found.values())
    table.append({"训练": tr(name.replace("_", " ")), "查出的问题": ", ".join(found) or "healthy", "依据": seen or "两种损失都下降"})
display.show_table(table)

# %% [markdown]
# 再看你自己的训练。除了曲线，这里还会读第 02 到 04 课记下的结果：有多少样本没用上，步数够不够，回答会不会停不下来，第 04 课的结论是不是“有用”。还没训练过的运行目录，自然什么也查不出来。

# %%
findings = diagnose.examine(diagnose.Trained.of(lesson.run))
print(lesson.run.path)
diagnose.show(findings)

# %% [markdown]
# ## 样本
#
# 回答不好，常常是样本不好。拿第 02 课那个故意写坏的文件再检查一遍，下面是最后八条。第 02 课一次只看一条样本，查出 26 条不能用；这里看的是整个文件，查出 27 条：最后一行和第一行重复。检查你自己的文件用 `python -m nbutils data check FILE`。

# %%
from nbutils.data.check import check

checked = check([str(files.SAMPLES / "broken_rows.jsonl")])
table = []
for problem in checked.card.problems[-8:]:
    kind = tr(problem.kind).replace("_", " ")
    table.append({"行": problem.line, "位置": problem.field, "错误": kind, "看到的内容": problem.seen, "怎么办": problem.todo})
display.show_table(table, text=str(checked))
print(f"共 {checked.card.rows} 条样本，其中 {checked.card.rejected} 条不能用")

# %% [markdown]
# ## 练习：三条曲线
#
# 下面是三次 60 步的训练。每次从 `"healthy"`（正常）、`"flat"`（几乎不降）、`"diverging"`（发散）、`"overfitting"`（过拟合）里选一个，把三个词按顺序填进 `my_names`，例如 `["flat", "flat", "healthy"]`。纵轴上的数字也要看。

# %% tags=["exercise"]
from nbutils import exercises

steps = range(0, 61, 3)
panels = {
    "曲线 1": {"训练": [(step, 0.5 + 1.7 * 0.92**step) for step in steps],
                "验证": [(step, 0.65 + 1.6 * 0.92**step) for step in steps]},
    "曲线 2": {"训练": [(step, 0.1 + 2.0 * 0.93**step) for step in steps],
                "验证": [(step, 0.8 + 1.4 * 0.85**step + 0.012 * step) for step in steps]},
    "曲线 3": {"训练": [(step, 2.2 - 0.001 * step + 0.03 * (-1) ** step) for step in steps],
                "验证": [(step, 2.3 - 0.001 * step) for step in steps]},
}
display.plot_panels(panels)
my_names = None
lesson.check(exercises.named_curves, my_names)

# %% [markdown]
# <details><summary>参考答案</summary>
#
# ```python
# my_names = ["healthy", "overfitting", "flat"]
# ```
#
# 曲线 1 的两种损失都下降，没有回升。曲线 2 的验证损失在第 18 步最低，之后模型是在死记训练样本。曲线 3 走了 60 步，只降了 3 %。
#
# </details>

# %% [markdown]
# ## 练习：三条报错
#
# 每条报错的原因是什么？把三个字母按顺序填进 `my_causes`，例如 `["d", "d", "b"]`。四个原因里有一个用不上。
#
# - **a**：GPU 的显存满了
# - **b**：机器的内存（RAM）满了，系统结束了进程
# - **c**：有 token 的编号模型不认识：分词器（tokenizer）是另一个模型的
# - **d**：模型不在本机，下载模型的网站又连不上

# %% tags=["exercise"]
messages = [
    """Traceback (most recent call last):
  File "train.py", line 41, in <module>
    trainer.train()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has a total capacity of 14.56 GiB of which 1.02 GiB is free.""",
    """Indexing.cu:1553: indexSelectSmallIndex: Assertion `srcIndex < srcSelectDimSize` failed.
torch.AcceleratorError: CUDA error: device-side assert triggered
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.""",
    """  File "train.py", line 12, in <module>
    tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-4B-Instruct-2507")
OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached files.""",
]
print(*messages, sep="\n\n")
my_causes = None
lesson.check(exercises.named_causes, my_causes)

# %% [markdown]
# <details><summary>参考答案</summary>
#
# ```python
# my_causes = ["a", "c", "d"]
# ```
#
# 第二条就是上面小模型的那个错误，只是换成了 GPU 上的说法：`srcIndex` 是 token 的编号，`srcSelectDimSize` 是词表大小。第一条该怎么办，看 `diagnose.show(diagnose.explain(messages[0]))`。
#
# </details>

# %% [markdown]
# ## 思考题
#
# 两种损失看起来都正常，回答却很糟。先查哪里？把 `"a"`、`"b"` 或 `"c"` 填进 `my_choice`。
#
# - **a**：学习率
# - **b**：训练用的样本
# - **c**：GPU

# %% tags=["exercise"]
my_choice = None
lesson.check(exercises.quiz, my_choice, lesson.stem)

# %% [markdown]
# <details><summary>参考答案</summary>
#
# ```python
# my_choice = "b"
# ```
#
# </details>

# %% [markdown]
# ## 现在你有了
#
# - 对这台机器的完整检查，每个问题都写着怎么办；
# - 一条报错的原因和下一步；
# - 从损失曲线看出的训练问题。
#
# 本课程认得的所有症状都列在 `docs/zh/faq.md` 里。如果还是没解决：运行 `python -m nbutils doctor --json`，带上输出和完整的报错去提问，两处的密钥都已经打码。

# %%
lesson.finish(report, findings=", ".join(findings) or "none")
