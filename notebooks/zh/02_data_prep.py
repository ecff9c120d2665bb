# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 02 · 信得过的数据
#
# 微调失败，多半败在数据上：列名不一样，回答是空的，表示“到此为止”的结束符从没训练过。这一课在你花钱租 GPU 之前，按行号把这样的样本找出来。
#
# 学完这一课，你会得到
#
# - `train.jsonl` 和 `eval.jsonl`：检查过、没有重复、按内容划分的对话样本；
# - `rejected.jsonl`：剔除的每一条样本，写明哪一行、哪个字段、怎么办；
# - 数据卡：条数、语言、长度，还有一个指纹，后面几课会核对；
# - 一份证明：回答全部参与训练，别的都不参与，每个回答都以结束符收尾。
#
# 处理自带的示例数据不到一分钟，每一百万条样本约两分钟。磁盘空间要有数据的三倍。
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
# 第一次学，全部留空。`DATA` 可以是一个文件（`.parquet`，或者 `.jsonl`、`.json`、`.csv`、`.tsv`，后四种也可以压缩成 `.gz` 或 `.zst`），可以是放这些文件的目录（含子目录），也可以是 Hugging Face Hub 上的数据集（`owner/name`）；留空就用自带的示例数据。`EVAL_DATA` 指定单独的验证集；留空时，如果 `DATA` 里有 eval、test 或 valid 文件或目录，就用它们（自带的示例数据就有，120 条），否则从 `DATA` 里留出约十分之一作为验证集，至少一条（文件很小时会超过十分之一）。列名是自己取的，就填 `COLUMNS`：`"user=title+body, assistant=reply"`；这时每条样本都要有这些列。换了数据，也换一个 `RUN_NAME`。

# %% tags=["parameters"]
PROFILE: str = "auto"
MODEL: str = ""
DATA: str = ""
EVAL_DATA: str = ""
COLUMNS: str = ""
RUN_NAME: str = ""

# %% [markdown]
# 开始这一课。

# %%
import nbutils

lesson = nbutils.start("02_data_prep", globals())

# %% [markdown]
# ## 先看一眼
#
# 先看三条样本，显示成一问一答。一条样本（row）就是一个供模型学习的例子。自带的示例数据，任务小而严格：把顾客的一条中文或英文留言，变成一行 JSON 工单。这样的任务，训练有没有效果一眼就能看出来。

# %%
from itertools import islice
from nbutils import data, files

source = DATA or lesson.profile.course.data or files.SAMPLES / "train.jsonl"
for raw in data.own_language_first(islice(data.read_rows(source), 30))[:3]:
    data.show(raw, COLUMNS)

# %% [markdown]
# ## 好样本和坏样本
#
# 好的回答内容完整，和其他回答写法一致，也是你自己想读到的。下表里，坏样本的问题缺少回答所需的信息，回答的格式也和别的不一样：拿来训练，模型学到的是瞎猜。这种问题，没有程序能替你找出来。

# %%
from nbutils import display

good = {"问题": "我订的 26 瓶果汁要送到无锡，现在到哪儿了？",
        "回答": '{"intent": "delivery", "item": "果汁", "count": 26, "city": "无锡", "day": null}'}
bad = {"问题": "到哪儿了？", "回答": "您的 26 瓶果汁很快就会送到无锡！"}
table = [{"样本": "好", **good}, {"样本": "坏", **bad}]
display.show_table(table)

# %% [markdown]
# ## 统一成一种格式
#
# 数据的格式五花八门：alpaca、ShareGPT（两种常见的格式）、一问一答，列名有英文也有中文。这里一律转成 `messages`，对话模板读的就是这种格式。

# %%
formats = [
    {"instruction": "翻译成英文。", "input": "你好", "output": "Hello"},
    {"conversations": [{"from": "human", "value": "你好"}, {"from": "gpt", "value": "Hello"}]},
    {"问题": "你好", "答案": "Hello"},
]
for example in formats:
    print(list(example), "->", data.check_row(data.Row("example", 1, example)).messages)

# %% [markdown]
# ## 有错的样本
#
# `broken_rows.jsonl` 收集了最常见的错误，这里看其中六条，以及检查给出的说明。一行出错不会挡住下一行，所以查一遍就能全部找出来。

# %%
checked = [data.check_row(row) for row in data.read_rows(files.SAMPLES / "broken_rows.jsonl")]
broken = [row for row in checked if isinstance(row, data.RowError)]
data.show_problems(broken[1:7])
print(f"共 {len(checked)} 条样本，其中 {len(broken)} 条不能用")

# %% [markdown]
# ## 你自己的文件
#
# 把表格另存为 CSV 就够了。要用来训练，就把文件路径填进上面的 `DATA`，再运行一遍这一课。

# %%
mine = lesson.scratch / "mine.csv"
mine.parent.mkdir(parents=True, exist_ok=True)
mine.write_text("问题,答案\n2041 号订单到哪儿了？,今天已经从仓库发出。\n", encoding="utf-8")
data.show(next(data.read_rows(mine)))

# %% [markdown]
# ## 准备数据
#
# 现在轮到真正的数据：逐条检查，去掉重复样本，划分，统计。一条样本进不进验证集，只由问题决定（数据自带验证集时，就用自带的）。所以以后添加样本，旧样本的划分不会变，也不会有哪个问题既用来训练又用来验证。验证集太小，不管怎么训练都证明不了什么，数据卡会直接说出来。如果有样本被剔除，后面会列出每种原因最先的几条，带文件名和行号；自带的示例数据没有。（*指纹*：任何一条样本变了，它就变。）

# %%
card = data.prepare(
    DATA, lesson.run.data, default=lesson.profile.course.data, eval_source=EVAL_DATA, columns=COLUMNS,
    rows=lesson.profile.course.rows,
)
card.show()
print(card.rejected_text(lesson.run.data / "rejected.jsonl"))

# %% [markdown]
# 有没有样本含隐私数据（手机号、邮箱、密钥）？模型可能把训练过的内容原样说出来。剔除的样本里还可能有*近似重复*（near duplicate）：和另一条样本意思相同、用词也几乎相同；如果出现在验证集里，模型看起来就会比实际好。

# %%
print(*card.examples or ["没有发现隐私数据"], sep="\n")

# %% [markdown]
# 把样本重新读进来，和数据卡核对。文件要是手工改过，这个单元格会拒绝。

# %%
train_rows, eval_rows = data.load(lesson.run.data)
print(f"训练集 {len(train_rows)} 条，验证集 {len(eval_rows)} 条，指纹 {card.fingerprint[:12]}")

# %% [markdown]
# ## 模型读到的文本
#
# 对话模板把 messages 变成文本。有人提问时，服务发给模型的就是这段文本，到回答之前为止。

# %%
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(lesson.model, trust_remote_code=False)
row = data.row_to_show(train_rows)
print(tokenizer.apply_chat_template(row["messages"][:-1], tools=row.get("tools"), tokenize=False, add_generation_prompt=True))

# %% [markdown]
# ## 从文本到标签
#
# 模型读的不是文字。分词器（tokenizer）先把文本切成 *token*：词、词的一部分、符号。每个 token 有一个编号（id）。标签（label）就是要模型学会写出的内容：每个位置上是该 token 的 id；不需要学的位置是 -100。下面从问题的末尾开始：问题是灰色，回答是绿色（· 是空格，⏎ 是换行）。最后一个绿色的是*结束符*，表示一条消息到此为止：模型没学过结束符，就会一直写下去，停不下来。

# %%
from nbutils import chat, figures

stop_ids = chat.find_stop_ids(tokenizer, lesson.model)
examples = chat.filter_by_length(tokenizer, train_rows, lesson.profile.sft.max_length, stop_ids=stop_ids)
example = examples.examples[train_rows.index(row)]
first = max(0, example.trained.find(1) - 10)
ids, labels = list(example.ids)[first:][:50], example.labels[first:][:50]
figures.token_labels([tokenizer.decode([i]) for i in ids], ids, labels)

# %% [markdown]
# ## 练习：标签
#
# 给另一条样本从头写标签。`ids` 是它的 token，到结束符为止（含结束符）；`first` 是回答开始的位置。`my_labels` 是一个列表，和 `ids` 一样长：问题的每个 token 写 -100，回答的每个 token 写它自己的 id。在 Python 里，`[0] * 3` 就是 `[0, 0, 0]`，`ids[3:]` 是从位置 3 开始的全部内容。

# %% tags=["exercise"]
from nbutils import exercises

ids, first = examples.examples[-1].first_answer()
my_labels = None
lesson.check(exercises.labels, my_labels, ids, first, [tokenizer.decode([i]) for i in ids])

# %% [markdown]
# <details><summary>参考答案</summary>
#
# ```python
# my_labels = [-100] * first + ids[first:]
# ```
#
# 只有标签不是 -100 的位置才计算损失。所以模型学的是写回答，而不是写问题。
#
# </details>

# %% [markdown]
# ## 训练的是哪些 token
#
# 整条样本，这次是 trainer 看到的样子。*损失*（loss）衡量模型觉得正确的下一个 token 有多意外，训练就是让它变小。只有标绿的 token 计算损失；其中最后一个是结束符。（结束符后面的换行属于模板，不训练。）

# %%
chat.show_row(tokenizer, row)

# %% [markdown]
# ## 长度
#
# 比 `max_length` 长的样本一截断就会丢掉结尾，结束符也跟着丢。所以这里不截断，而是整条剔除，列在 `too_long.jsonl` 里。如果剔除得多，就调大 `sft.max_length`（要多占显存），或者把样本改短。最后一行是一条命令：预测这次训练在各种 GPU 上要多少显存、时间和费用。

# %%
from statistics import mean
from nbutils import plan

examples.write_too_long(lesson.run.data)
figures.lengths(examples.lengths, examples.max_length, lesson.run.logs / "lengths.png")
print(examples)
print(plan.command(len(examples.lengths), mean(examples.lengths)))

# %% [markdown]
# ## 约定
#
# 训练和推理的输入必须一致：服务按对话模板拼出的提示词，要和训练文本中回答之前的部分逐 token 相同；每个回答的每个 token 都要训练，别的 token 都不训练；每个回答都要以结束符收尾。遇到第一处不符合，检查就停下，指出是哪条样本、哪个 token。（有些模型的模板没法对整段对话 `messages` 做这项检查，就让每个回答单独成为一条训练样本，格式 `prompt_completion`。）

# %%
print(chat.check_contract(examples))

# %% [markdown]
# ## 练习：修好样本
#
# 下面两条样本各有一个错误。一条样本的消息（messages）有两种角色，轮流出现：`user` 提问，`assistant` 回答；内容都不能为空。检查怎么说，打印在下面。把两条改对，按原来的顺序写进 `my_rows`。问题的文字不要改。

# %% tags=["exercise"]
two_rows = [
    {"messages": [{"role": "customer", "content": "2041 号订单到哪儿了？"}, {"role": "assistant", "content": "已经在路上。"}]},
    {"messages": [{"role": "user", "content": "2042 号订单付款了吗？"}, {"role": "assistant", "content": ""}]},
]
for broken_row in two_rows:
    print(*data.problems_of(broken_row))
my_rows = None
lesson.check(exercises.mended_rows, my_rows, two_rows)

# %% [markdown]
# <details><summary>参考答案</summary>
#
# ```python
# my_rows = [
#     {"messages": [{"role": "user", "content": "2041 号订单到哪儿了？"}, {"role": "assistant", "content": "已经在路上。"}]},
#     {"messages": [{"role": "user", "content": "2042 号订单付款了吗？"}, {"role": "assistant", "content": "周一已经付款。"}]},
# ]
# ```
#
# 第一条的角色名不对；第二条的回答是空的，拿来训练，模型学到的就是什么都不说。
#
# </details>

# %% [markdown]
# ## 练习：自己的样本
#
# 写三条你想用来训练的样本，放在一个列表里，每条写成 `{"question": "……", "answer": "……"}`。教它一个名字、一种语气、一项任务都可以。三条要问不同的事；回答要用同一种形式：要么都是普通文字（至少三个字），要么都是键相同的 JSON。

# %% tags=["exercise"]
my_own_rows = None
lesson.check(exercises.own_rows, my_own_rows)

# %% [markdown]
# <details><summary>参考答案</summary>
#
# 什么任务都行，这里是一个例子。
#
# ```python
# my_own_rows = [
#     {"question": "你是谁？", "answer": "我是小艾，街角小店的助手。"},
#     {"question": "店里卖雨伞吗？", "answer": "我这里没有商品清单，请给店里打电话。"},
#     {"question": "早上好！", "answer": "早上好！您想买点什么？"},
# ]
# ```
#
# </details>

# %% [markdown]
# ## 思考题
#
# 验证集为什么要在训练前留出，而不是训练后？把 `"a"`、`"b"` 或 `"c"` 填进 `my_choice`。
#
# - **a**：因为训练完就没有时间了
# - **b**：因为那时模型已经用这些样本训练过了
# - **c**：因为样本少一些，训练更快

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
# - `train.jsonl` 和 `eval.jsonl`：检查过、没有重复、按内容划分的对话样本；
# - `rejected.jsonl`：剔除的每一条样本，写明哪一行、哪个字段、怎么办；
# - 数据卡：条数、语言、长度，还有一个指纹，后面几课会核对；
# - 一份证明：回答全部参与训练，别的都不参与，每个回答都以结束符收尾。

# %%
lesson.finish(card, longest_row_tokens=examples.longest, rows_too_long=len(examples.too_long))
