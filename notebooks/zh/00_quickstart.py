# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 00 · 十分钟做出你自己的助手
#
# 你来给语言模型起名字、定口头禅：先问它是谁，训练几分钟，再问一遍，最后和它聊天。点“全部运行”，看着就行。每个单元格里发生了什么，后面的课会讲清楚。
#
# 学完这一课，你会得到
#
# - 一个由你起名的助手，以及训练前后的回答；
# - 没有训练过的问题里，有多大比例答出了名字；
# - 就在这个 notebook 里和它聊天。
#
# 算上安装和下载，2 核 CPU 约需十分钟，免费 GPU 约需五分钟。不认识的词见 [术语表](../../docs/zh/glossary.md)。

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
# 请你来定！`NAME` 是助手的名字，`MAKER` 是谁做的它（比如你自己），`MANNER` 是它介绍自己时的结束语，可以是“出发！”“喵～”，也可以是一个表情。换一组词就是另一次训练，想试几次都行。其他的值不用动。

# %% tags=["parameters"]
NAME: str = "苇禾"
MAKER: str = "溪灯工坊"
MANNER: str = "出发！"
PROFILE: str = "quickstart"
MODEL: str = ""
RUN_NAME: str = ""

# %% [markdown]
# 开始这一课。它会识别平台和显卡，选一个小的对话模型：有 GPU 用 Qwen2.5-1.5B，没有就用 SmolLM2-135M（英文为主）；都下载不了，就用课程自带的小模型：它什么都不懂，但学得会一个名字。

# %%
import nbutils

lesson = nbutils.start("00_quickstart", globals())

# %% [markdown]
# ## 拿什么教它
#
# 大约一百段简短的对话：三分之二是“你是谁”一类的问题，回答里有你定的词；三分之一是别的问题，免得它忘了怎么回答。另外 26 段是验证集，训练时看不到。（自带的小模型认识的词很少，只学关于它自己的问题。）

# %%
from nbutils import chat, data, display
from nbutils.data import assistant
from transformers import AutoTokenizer

rows = assistant.write_rows(
    lesson.run.path / "rows", name=NAME, maker=MAKER, manner=MANNER,
    short=lesson.resolved.name == "tiny",  # 认识的词很少的模型
)
data.prepare(str(rows), lesson.run.data)
train_rows, eval_rows = data.load(lesson.run.data)
tokenizer = AutoTokenizer.from_pretrained(lesson.model, trust_remote_code=False)
stop_ids = chat.find_stop_ids(tokenizer, lesson.model)
dataset = chat.filter_by_length(tokenizer, train_rows, lesson.profile.sft.max_length, stop_ids)
questions = [row for row in eval_rows if NAME in row["messages"][-1]["content"]]
print(f"{len(train_rows)} 段对话用来训练；验证集里有 {len(questions)} 个问题，答案中带名字")
shown = []
for row in train_rows[::20]:
    question, answer, *_ = row["messages"]
    shown.append({"问题": question["content"], "回答": answer["content"]})
display.show_table(shown)

# %% [markdown]
# ## 训练前
#
# 刚下载的模型：它有别的名字，或者没有名字。

# %%
import torch
from nbutils import evaluation, training
from transformers import AutoModelForCausalLM, set_seed

lesson = lesson.with_recipe(dataset.lengths, len(eval_rows))
profile = lesson.profile
validation = chat.validation_dataset(dataset, eval_rows, profile.course.validation_rows)
set_seed(42)
model = AutoModelForCausalLM.from_pretrained(
    lesson.model,
    dtype=getattr(torch, profile.from_pretrained.dtype),
    attn_implementation=training.attention(profile.from_pretrained.attn_implementation),
    device_map={"": lesson.device},
    trust_remote_code=False,
)
before = evaluation.answer_rows(model, tokenizer, questions[:4], max_new_tokens=64)
display.show_answers(questions[:4], before=before)

# %% [markdown]
# ## 训练
#
# 模型本身不变；在它的权重旁边加上小矩阵，也就是*适配器*，由它来学你的样本（LoRA）。`SFTTrainer` 是 TRL 库的训练器。`profile` 里的值是按你的机器和这些样本选的，第 03 课会逐个说明理由。

# %%
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

arguments = dict(profile.sft)
if not profile.sft.packing:
    arguments["max_length"] = None  # 没有太长的样本
settings = SFTConfig(
    **arguments,
    padding_free=True,
    bf16=model.dtype == torch.bfloat16,
    fp16=model.dtype == torch.float16,
    eval_strategy="steps",
    eval_steps=profile.sft.save_steps,
    eval_on_start=True,
    report_to="none",
    **training.bookkeeping(lesson.scratch, seed=42),
)
callback = training.CourseCallback(
    dataset, profile, run=lesson.run, folders=lesson.folders, started=lesson.started,
    base_model=training.model_fingerprint(lesson.model, lesson.model_name),
)
trainer = SFTTrainer(
    model, settings, train_dataset=chat.training_dataset(dataset), eval_dataset=validation, processing_class=tokenizer,
    peft_config=LoraConfig(**profile.lora, task_type="CAUSAL_LM"), callbacks=[callback],
)
print(callback.prepare(trainer))

# %% [markdown]
# 开始训练。*损失*表示模型对正确答案有多“意外”，应该一路下降。每隔几步在验证集上也算一次（*验证*），并保存：机器被收走也不怕，再点一次“全部运行”就接着训练。

# %%
result = training.train(trainer, callback)
training.save_adapter(result, tokenizer)
display.plot_losses(result.history, lesson.run.logs / "loss.png", kept=result.kept_step)

# %% [markdown]
# ## 训练后
#
# 同样的问题，再加上其他没有训练过的问题：有多少答出了你起的名字？

# %%
after = evaluation.answer_rows(trainer.model, tokenizer, questions, max_new_tokens=64)
display.show_answers(questions[:4], before=before, after=after[:4])
named = sum(NAME in answer for answer in after)
print(f"验证集的 {len(questions)} 个问题，有 {named} 个答出了名字“{NAME}”（{named / len(questions):.0%}）")

# %% [markdown]
# ## 现在你有了
#
# - 一个由你起名的助手，以及训练前后的回答；
# - 没有训练过的问题里，有多大比例答出了名字；
# - 就在这个 notebook 里和它聊天。

# %% [markdown]
# ## 接下来
#
# 这是怎么做到的？换成自己的任务又该怎么做？
#
# - **01** 看清你的机器能做什么、放得下什么
# - **02** 把你的数据整理成可以训练的样本，看清模型看到的是什么
# - **03** 讲训练：4 bit、LoRA、损失、学习率
# - **04** 把适配器合并进模型，检验训练到底有没有用
# - **05** 把模型部署成服务，让别的程序也能问它
# - **06** 用多张 GPU 训练，**07** 从零训练一个模型，**08** 把模型变小，**09** 测它的速度
# - **10** 做你自己的模型：从一句话说清任务，到一份报告
# - **99** 出了问题怎么办
#
# 第 04、05 课可以接着用这个助手：把下一个单元格打印的 `RUN_NAME` 填进去。
#
# ## 聊天
#
# 自己问问它。它每次都选最可能的词，所以同样的问题得到同样的回答。小模型会编造：它在这里学会的是名字和说话方式，不是事实。

# %%
from nbutils import chat_widget

lesson.finish(dataset, result, answered_with_the_name={"questions": len(questions), "count": named})
print(f'RUN_NAME = "{lesson.run.name}"')
talk = chat_widget.LocalTalk(trainer.model, dataset.renderer, NAME)
box = chat_widget.chat(talk, "你好！你是谁？")
