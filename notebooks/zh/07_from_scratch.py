# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 07 · 从零训练一个自己的模型
#
# 微调的起点是基座模型，它已经学会了语言。这是在*预训练*（pre-training）里学会的：读大量普通文本，学着预测每一个下一个 token。这一课按同样的办法做一个很小的：文本、tokenizer、没训练过的网络，再套上第 03 课的 trainer。不填 `DATA`，用课程自带的文本，训练出来的模型和课程自带的小模型结构相同，只是更小；填了 `DATA`，就用你的文本，训练几分钟，或者在 GPU 上跑一整夜。
#
# 学完这一课，你会得到
#
# - 一个 tokenizer，以及切成 token 的文本；
# - 一个从随机权重训练出来的 Qwen2 模型，宽度和层数由你定；
# - 模型在验证集上的损失和困惑度，以及训练前后的续写；
# - 一个模型目录，在其他几课里可以直接填进 `MODEL`。
#
# 默认设置在两核 CPU 上约需两到三分钟，占 0.1 GB 磁盘。下面有一张预估表，租显卡之前就能看到，你的设置要多少时间、花多少钱。
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
# `DATA` 可以是文本文件（`.txt`、`.md`），带 `text` 列的 `.jsonl`、`.csv`（以上都可以压缩成 `.gz`）或 `.parquet`，装着这些文件的目录，或 Hugging Face Hub 上的数据集（`owner/name`）。留空就用课程自带的 20,000 篇文本中的前 `TEXTS` 篇。`TOKENIZER` 填一个模型（`Qwen3-4B`、Hub 名称或目录），就用那个模型的 tokenizer；留空就在你的文本上训练一个，词表大小是 `VOCAB`。`WIDTH` 必须是 128 的倍数。每步训练 `BATCH` 行，每行 `LENGTH` 个 token。`STEPS = 0` 表示把你的文本训练一轮（epoch，每一行都训练一次）；用课程自带的文本，则是 300 步。`SAVE_STEPS`、`MAX_HOURS`、`RESUME` 和 `SET` 与第 03 课相同。

# %% tags=["parameters"]
PROFILE: str = "tiny"
RUN_NAME: str = "from_scratch"
DATA: str = ""
TOKENIZER: str = ""
WIDTH: int = 128
DEPTH: int = 2
LENGTH: int = 128
BATCH: int = 16
STEPS: int = 0
VOCAB: int = 2048
TEXTS: int = 20000
SAVE_STEPS: int = 0
MAX_HOURS: float = 0.0
RESUME: str = "auto"
SEED: int = 0
SET: str = ""

# %% [markdown]
# 开始这一课。配置（profile）里只用到和机器有关的部分，例如精度；里面写的模型不用。

# %%
import nbutils
from nbutils.training import pretraining

lesson = nbutils.start("07_from_scratch", globals())
pretraining.require_sizes(WIDTH, DEPTH, VOCAB)

# %% [markdown]
# ## 文本
#
# 用什么文本训练，模型就学着那样写。课程的文本是程序生成的：和商店的对话、小故事、算术、翻译，中英文都有。商店总是用整句话回答，从不出现 JSON 工单，这样第 03 课才有东西可教。

# %%
from itertools import islice

texts = pretraining.Texts(DATA, TEXTS, SEED)
for text in islice(texts, 4):
    print(text[:400], end="\n\n")

# %% [markdown]
# ## Tokenizer
#
# *tokenizer*（分词器）把文本切成 token，给每个 token 一个编号；全部 token 的列表叫*词表*（vocabulary）。切法是从文本里学来的，这里用 *BPE*（byte-pair encoding，字节对编码）：从 256 个字节开始，反复把最常相邻出现的两个 token 合并成一个新的 token，直到词表有 `VOCAB` 个 token。任何文本都能表示，常用词只占一个 token。词表越大，同样的文本切出来越短，模型也越大：每个 token 都要用 `WIDTH` 个数来表示。课程的文本 2,048 就够，真实文本用 16,000 到 32,000。
#
# 用的库是 `tokenizers`。pre-tokenizer 先把文本切成小段，只有同一段里的 token 才会合并：Qwen 的 pre-tokenizer 在空格、标点和数字处切开。trainer 负责统计和合并；你的文本最多抽 50 MB 来训练。

# %%
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # id 总是 0、1、2
bpe = Tokenizer(models.BPE())
bpe.pre_tokenizer = pre_tokenizers.Sequence([
    *(pre_tokenizers.Split(token, "removed") for token in special),  # 不算文本
    Qwen2Tokenizer().backend_tokenizer.pre_tokenizer,  # 切成单词、数字和标点，再转成字节
])
alphabet = pre_tokenizers.ByteLevel.alphabet()
bpe_trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
if not TOKENIZER:
    bpe.train_from_iterator(texts.sample(), bpe_trainer)

# %% [markdown]
# 学到的是一个词表，和一串按先后排好的合并规则。`transformers` 把这两样包成 Qwen2 模型的 tokenizer，再配上结束一轮对话的 token、填充用的 token 和对话模板，后面几课就能直接用。

# %%
import json
from nbutils.models import load_tokenizer

if TOKENIZER:
    tokenizer = load_tokenizer(TOKENIZER, "TOKENIZER")
else:
    learned = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(pair) for pair in learned["merges"]],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=pretraining.CHAT_TEMPLATE,
        model_max_length=max(1024, LENGTH),
    )
ids = tokenizer("Please send 3 boxes of apples to Hangzhou. 请周五送到杭州。")["input_ids"]
print(len(tokenizer), "个 token；", [tokenizer.decode([i]) for i in ids])

# %% [markdown]
# BPE 怎样处理一句话？开始时每个字母是一个字节（空格写成 `Ġ`；一个汉字是三个字节，所以这里用英文句子），再按学到的先后顺序逐条应用合并规则。下面亲手做一遍：表里是最先起作用的五条，然后应用其余所有规则，最后看结果和 tokenizer 的切法是否相同。

# %%
from nbutils import display, figures

sentence = "Send the tea to Hangzhou on Monday."
pieces, table = list(sentence.replace(" ", "Ġ")), []
for pair in [] if TOKENIZER else [["", ""], *learned["merges"]]:
    merged = []
    for piece in pieces:
        if merged and [merged[-1], piece] == list(pair):
            merged[-1] += piece
        else:
            merged.append(piece)
    if len(table) < 6 and (not table or len(merged) < len(pieces)):
        table.append({"合并": " + ".join(pair) if table else "-", "token 数": len(merged), "切分": " | ".join(merged)})
    pieces = merged
display.show_table(table)
print(f"{len(pieces)} 个 token：", " | ".join(pieces), "，相同：", pieces == tokenizer.tokenize(sentence))

# %% [markdown]
# ## 练习：两句话各有多少个 token
#
# 意思相同的一句英文和一句中文，你的 tokenizer 各切成多少个 token？先猜：答案写成一对数，例如 `(20, 20)`，检查会告诉你差多远。再用 `tokenizer.tokenize(...)` 数一数，它返回一个列表。

# %% tags=["exercise"]
from nbutils import exercises

sentences = "Please send 3 boxes of apples to Hangzhou on Friday.", "请周五把三箱苹果送到杭州。"
my_counts = None
lesson.check(exercises.token_counts, my_counts, sentences, tokenizer)

# %% [markdown]
# <details><summary>参考答案</summary>
#
# ```python
# my_counts = [len(tokenizer.tokenize(sentence)) for sentence in sentences]
# ```
#
# 用课程的文本时，中文这句 39 个字节，英文那句 52 个字节，中文的 token 反而更少：文本里的常用词各自成了一个 token，例如“苹果”。如果 tokenizer 只在英文上训练过，一个汉字就要两三个 token。
#
# </details>

# %% [markdown]
# 文档首尾相接，每篇后面加一个分隔符，再切成每行 `LENGTH` 个 token：一个不丢，也不填充。这一步用 `datasets` 的 `map`，一次处理 64 篇文档；`IterableDataset` 用到哪篇才读哪篇，所以文本可以比内存大。切好的行只写一次磁盘。从全文各处抽出最多 64 行作为验证集，用来测模型在没见过的文本上的损失。

# %%
from datasets import IterableDataset

separator = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
rest = []


def cut_into_rows(batch: dict) -> dict:
    for ids in tokenizer(batch["text"], add_special_tokens=False, verbose=False)["input_ids"]:
        rest.extend([*ids, separator])
    end = len(rest) - len(rest) % LENGTH
    rows = [rest[at : at + LENGTH] for at in range(0, end, LENGTH)]
    del rest[:end]  # 剩下的接到下一批前面
    return {"input_ids": rows, "labels": rows}


documents = IterableDataset.from_generator(texts.documents)
stream = documents.map(cut_into_rows, batched=True, batch_size=64, remove_columns=["text"])
rows = pretraining.write_rows(stream, texts, tokenizer, LENGTH, lesson.scratch)
print(rows)

# %% [markdown]
# ## 模型
#
# 结构和 Qwen2.5 一样，只是小得多：每个注意力头的宽度是 64，两个查询头共用一组键和值，MLP 的宽度是模型的两倍半，输入和输出共用一个 embedding 矩阵（`tie_word_embeddings`）。

# %%
from transformers import Qwen2Config

sizes = {"vocab_size": len(tokenizer), "hidden_size": WIDTH, "intermediate_size": WIDTH * 5 // 2, "num_hidden_layers": DEPTH}
heads = {"num_attention_heads": WIDTH // 64, "num_key_value_heads": WIDTH // 128, "max_position_embeddings": max(1024, LENGTH)}
ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
config = Qwen2Config(**sizes, **heads, **ends, tie_word_embeddings=True)
print(pretraining.shape_of(config))

# %% [markdown]
# ## 训练配方和预估
#
# 这些都是 `SFTConfig` 的参数，用 `SET` 可以改任何一个。模型越宽，学习率要越小，所以学习率由宽度算出；它先用十分之一的步数（最多 100 步）升上去，这叫*预热*（warm-up）：权重还是随机数时，步子太大会训练坏；再沿*余弦*（cosine）曲线降到 0，最后几步迈得很小。*权重衰减*（weight decay）让每个权重每一步都缩小一点，除非文本需要它大。
#
# 下表是 `plan` 的预估：有 GPU 就列你的 GPU，没有就列两种常租的显卡；“样本”一列是一次算几行。从零训练，每个参数大约要 20 个 token；少得太多，模型学到的只是词，学不会语言；同一份文本训练太多轮，又会背下来。

# %%
import math

steps = STEPS or (300 if texts.bundled else math.ceil(len(rows.train) / BATCH))
recipe = {
    "max_length": LENGTH,
    "max_steps": steps,
    "num_train_epochs": 0.0,
    "learning_rate": float(f"{0.5 / WIDTH:.1e}"),
    "lr_scheduler_type": "cosine",
    "warmup_steps": min(0.1, 100 / steps),
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
    "optim": "adamw_torch_fused",
    "packing": False,
    "activation_offloading": False,
    "use_liger_kernel": False,
    "logging_steps": max(1, min(10, steps // 100)),
    "save_steps": SAVE_STEPS or max(1, min(500, math.ceil(steps / 10))),
    "save_total_limit": 2,
    "load_best_model_at_end": True,
}
profile = pretraining.with_recipe(lesson.resolved, config, recipe, batch=BATCH, held_out=len(rows.eval))
print(f"{profile.sft.max_steps:,} 步，{profile.sft.max_steps * BATCH / len(rows.train):.2g} 轮；学习率 {profile.sft.learning_rate:g}")

# %% [markdown]
# 权重一开始是随机数；种子固定，每次的随机数就一样。训练时权重保持 float32，在 GPU 上矩阵乘法用 16 bit 计算。
#
# *损失*（loss）是 -log p 的平均值，p 是模型给实际出现的下一个 token 的概率。没训练过的模型给所有 token 的概率都差不多，所以损失接近 `log(词表大小)`。下面亲手算一遍，再和 `transformers` 根据标签算出的损失比较：

# %%
import torch
from transformers import Qwen2ForCausalLM, set_seed

set_seed(SEED)
config._attn_implementation = "sdpa"
model = Qwen2ForCausalLM(config).to(lesson.device).eval()
print(f"{model.num_parameters():,} 个参数，在 {model.device} 上")
row = torch.tensor([rows.eval[0]["input_ids"]], device=model.device)
with torch.no_grad():
    output = model(input_ids=row, labels=row)
log_p = output.logits[0, :-1].float().log_softmax(-1)  # 除最后一个位置外，每个位置上词表里每个 token 的
by_hand = -log_p[torch.arange(LENGTH - 1), row[0, 1:]].mean().item()  # 只取实际出现的下一个 token
print(f"亲手算的损失 {by_hand:.4f}，transformers 算的 {output.loss.item():.4f}；log({len(tokenizer)}) 是 {math.log(len(tokenizer)):.4f}")

# %% [markdown]
# 训练之前，模型会怎样续写？先算出几个字之后下一个 token 的概率，留到后面比较。再取三行留出文本，各用前 24 个 token 作提示；`do_sample=False` 每次都取概率最大的 token，所以结果总是一样。现在它只会反复输出一两个 token。

# %%
def next_token_probabilities(text):
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]], device=model.device)
    with torch.no_grad():
        return model.eval()(ids).logits[0, -1].float().softmax(-1)

beginning = "我要订5箱"
untrained = next_token_probabilities(beginning)
prompts = torch.tensor(rows.eval[:3]["input_ids"], device=model.device)[:, :24]
options = {"attention_mask": torch.ones_like(prompts), "max_new_tokens": 40, "do_sample": False, "pad_token_id": separator}
before = tokenizer.batch_decode(model.generate(prompts, **options)[:, prompts.shape[1] :])
print(*map(repr, before), sep="\n")

# %% [markdown]
# ## 训练
#
# 设置项和第 03 课一样，取上面的值。每行本来就是满的，不需要 packing。回调就是第 03 课的那个：每次保存时测验证损失，把 checkpoint 复制到运行目录并校验，时间快用完时提前结束；验证损失不再下降，就停止训练。

# %%
from nbutils import tracking, training
from transformers import EarlyStoppingCallback
from trl import SFTConfig, SFTTrainer

settings = SFTConfig(
    **dict(profile.sft) | {"max_length": None, "report_to": tracking.report_to(profile.sft, lesson.scratch)},
    adam_beta2=0.95,  # 预训练常用；默认的 0.999 适应得更慢
    bf16=profile.from_pretrained.dtype == "bfloat16",
    fp16=profile.from_pretrained.dtype == "float16",
    eval_strategy="steps",
    eval_steps=profile.sft.save_steps,
    eval_on_start=True,
    **training.bookkeeping(lesson.scratch, SEED),
)
callback = pretraining.PretrainingCallback(
    rows, profile, run=lesson.run, folders=lesson.folders, started=lesson.started, max_hours=MAX_HOURS,
)
trainer = SFTTrainer(
    model=model,
    args=settings,
    train_dataset=rows.train,
    eval_dataset=rows.eval,
    processing_class=tokenizer,
    callbacks=[callback, EarlyStoppingCallback(profile.course.early_stopping_patience)],
)
print(callback.prepare(trainer))

# %% [markdown]
# 开始训练。平台收走机器也没关系，原样再运行一次这个 notebook，就会从最新的、校验通过的 checkpoint 继续训练，数据顺序不变。曲线从 `log(词表大小)` 附近开始一路下降：模型先学会词，再学会句子，最后学会照抄前文。如果训练损失继续下降，验证损失却上升，说明文本太少，撑不起这么大的模型。

# %%
result = training.train(trainer, callback, resume=RESUME)
result.show()
display.plot_losses(result.history, lesson.run.logs / "loss.png", title="预训练损失")

# %% [markdown]
# ## 练习：困惑度
#
# *困惑度*（perplexity）是 e 的损失次方，相当于模型在多少个同样可能的 token 之间拿不定主意。验证集上最低的损失，对应多大的困惑度？（e 的 x 次方写成 `math.exp(x)`。）

# %% tags=["exercise"]
losses = [loss for _, loss in result.history["validation"]]
print(f"验证集上的损失：训练前 {losses[0]:.3f}，最低 {min(losses):.3f}")
my_perplexity = None
lesson.check(exercises.perplexity, my_perplexity, min(losses))

# %% [markdown]
# <details><summary>参考答案</summary>
#
# ```python
# my_perplexity = math.exp(min(losses))
# ```
#
# 训练之前，困惑度差不多就是词表大小：哪个 token 都有可能。如果模型总能猜中下一个 token，困惑度就是 1。
#
# </details>

# %% [markdown]
# 再续写同样的文本；还是那几个字，训练后最可能的五个 token，在训练前后的概率各是多少？训练时间短，只学得到文风，学不到事实；增加文本、步数、宽度和层数都有用。

# %%
after = tokenizer.batch_decode(model.eval().generate(prompts, **options)[:, prompts.shape[1] :])
asked = tokenizer.batch_decode(prompts)
display.show_table([{"文本": a, "训练前": repr(b), "训练后": repr(c.split(tokenizer.decode([separator]))[0])} for a, b, c in zip(asked, before, after, strict=True)])
trained = next_token_probabilities(beginning)
likeliest = {repr(tokenizer.decode([i])): {"训练前": untrained[i].item(), "训练后": trained[i].item()} for i in trained.topk(5).indices.tolist()}
figures.bars(likeliest, f"“{beginning}”之后的下一个 token", "概率", stacked=False)

# %% [markdown]
# ## 保存
#
# 权重存成 bfloat16，tokenizer 带着对话模板；文件夹写完整了才改成正式的名字。把这个路径填进第 03 课的 `MODEL`，就能像其他模型一样微调。到时候能学会多少，要看模型在这里读过什么：从没见过对话的模型，需要更多样本。

# %%
from nbutils import disk, files

folder = lesson.run.path / "base"
with files.complete_folder(folder, result.stamp()) as place:
    model.save_pretrained(place, state_dict={name: weight.to(torch.bfloat16) for name, weight in model.state_dict().items()})
    tokenizer.save_pretrained(place)
print(f"{folder}：{disk.folder_gib(folder) * 1024:.1f} MiB")

# %% [markdown]
# ## 练习：容易的句子
#
# 写一个至少五个 token 的句子，要让模型觉得好猜：损失低于 4.0。哪些词、哪种词序，模型掌握得好？照抄上面的文本也可以；再换掉一个词，就能看出损失会差多少。`losses_of` 返回每个 token 的损失。

# %% tags=["exercise"]
def losses_of(text):
    ids = torch.tensor([[separator, *tokenizer(text, add_special_tokens=False)["input_ids"]]], device=model.device)
    logits = trainer.model(input_ids=ids).logits[0, :-1].float()
    return torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none").tolist()

my_sentence = None
lesson.check(exercises.easy_sentence, my_sentence, losses_of)

# %% [markdown]
# <details><summary>参考答案</summary>
#
# 用课程的文本训练，`"周六能送14袋盐到拉萨吗？我要下单。"` 就很容易，`"我们在柏林卖汽车。"` 的损失则要高得多：单个的词也许认识，但模型从没在这样的位置读到过。对任何模型都容易的，是它自己会写的话：
#
# ```python
# start = torch.tensor([[separator]], device=model.device)
# written = model.generate(start, min_new_tokens=12, max_new_tokens=12, do_sample=False, pad_token_id=separator)
# my_sentence = tokenizer.decode(written[0, 1:])
# ```
#
# </details>

# %% [markdown]
# ## 思考题
#
# 两个模型读了同样的文本。一个的词表有 2,048 个 token，验证集上的损失是 3.0；另一个的词表有 32,000 个 token，损失是 3.5。哪个模型预测得更好？把 `"a"`、`"b"` 或 `"c"` 填进 `my_choice`。
#
# - **a**：第一个，因为损失更低
# - **b**：第二个，因为词表更大
# - **c**：只看这些数字，说不准

# %% tags=["exercise"]
my_choice = None
lesson.check(exercises.quiz, my_choice, lesson.stem)

# %% [markdown]
# <details><summary>参考答案</summary>
#
# ```python
# my_choice = "c"
# ```
#
# </details>

# %% [markdown]
# ## 现在你有了
#
# - 一个 tokenizer，以及切成 token 的文本；
# - 一个从随机权重训练出来的 Qwen2 模型，宽度和层数由你定；
# - 模型在验证集上的损失和困惑度，以及训练前后的续写；
# - 一个模型目录，在其他几课里可以直接填进 `MODEL`。
#
# 最后一个单元格把数字写进 `facts.json`。

# %%
lesson.finish(rows, result, parameters=model.num_parameters(), base=str(folder))
