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
from nbutils import doctor

report = doctor.examine()
print(report.text())

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
# 没有报错，训练也可能失败。课程用一个真实的模型测了四次训练：一次正常，一次学习率低太多，一次学习率高太多，还有一次把 32 条样本看了 25 遍。

# %%
from nbutils import display

display.plot_loss_examples()

# %% [markdown]
# `examine` 只看数字就能分清这四次：训练损失从多少降到多少，验证损失在最低点之后有没有回升。查出的问题用代号表示：`flat` 是几乎不降，`diverging` 是发散，`overfitting` 是过拟合，`never_better` 是验证损失从没低于训练开始时。

# %%
for name, curve in files.read_json(display.CURVES).items():
    print(name, "->", *diagnose.examine(diagnose.Trained(curve["train"], curve["validation"])) or ["没有问题"])

# %% [markdown]
# 再看你自己的训练。除了曲线，这里还会读第 02 到 04 课记下的结果：有多少样本没用上，步数够不够，回答会不会停不下来，第 04 课的结论是不是“有用”。还没训练过的运行目录，自然什么也查不出来。

# %%
findings = diagnose.examine(diagnose.Trained.of(lesson.run))
print(lesson.run.path)
diagnose.show(findings)

# %% [markdown]
# ## 样本
#
# 回答不好，常常是样本不好。拿一个故意写坏的文件，用第 02 课的检查跑一遍，看看会报告什么：文件、行号、字段和原因。检查你自己的文件用 `python -m nbutils data check FILE`。

# %%
from nbutils.data.check import check

print(check([str(files.SAMPLES / "broken_rows.jsonl")]))

# %% [markdown]
# ## 练习
#
# 下面是一次 60 步训练的损失。问题出在哪里？在 `"healthy"`（正常）、`"flat"`（几乎不降）、`"diverging"`（发散）、`"overfitting"`（过拟合）里选一个填进 `my_guess`，再运行这个单元格。

# %%
my_guess = None
train = [(step, 2.0 * 0.93**step) for step in range(1, 61)]
validation = [(step, 1.2 + abs(step - 20) / 60) for step in range(0, 61, 5)]
display.plot_losses({"train": train, "validation": validation})
found = next(iter(diagnose.examine(diagnose.Trained(train, validation))), "healthy")
if my_guess is None:
    print("[待做] 看看验证损失在哪一步最低，再从四个词里选一个填进 my_guess")
else:
    print(f"[{' OK ' if my_guess == found else '不对'}] 你的答案是 {my_guess}，正确答案是 {found}")

# %% [markdown]
# ## 现在你有了
#
# - 对这台机器的完整检查，每个问题都写着怎么办；
# - 一条报错的原因和下一步；
# - 从损失曲线看出的训练问题。
#
# 本课程认得的所有症状都列在 `docs/zh/faq.md` 里。如果还是没解决：运行 `python -m nbutils doctor --json`，带上输出和完整的报错去提问，两处的密钥都已经打码。最后留两个问题：哪些毛病在训练开始之前就能看出来？哪一个没人盯着时最费钱？

# %%
lesson.finish(report, findings=", ".join(findings) or "none")
