# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 04 · 合并模型，看微调有没有用
#
# LoRA 适配器不能单独使用，必须和基座模型一起加载。*合并*（merge）就是算出 B·A，加到未量化的基座权重上；合并后的模型可以单独使用，任何推理服务都能加载。逐个权重读、算、写，所以 7B 也只占很少内存。
#
# 学完这一课，你会得到
#
# - 合并后的模型，带 tokenizer、对话模板和生成配置（generation config）；
# - 一份证明：计算结果和“基座模型加适配器”一致；
# - 基座模型和合并后的模型在同一个验证集上的分数，每个分数都带置信区间；
# - 一个结论：微调有没有用（答案可以是“没有”），以及一份 HTML 报告。
#
# 自带的小模型在 2 核 CPU 上约需两分钟。7B 模型需要 16 GB 磁盘，合并时总共占 2 GB 内存。
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
# 不改这些参数，合并的就是这个配置（profile）下第 03 课最后训练的结果。`MERGE_ONTO = "dequantized"` 合并到 4 bit 的基座模型上，见下面的“证明”。导出和上传在第 08 课，公开基准测试在第 09 课。

# %% tags=["parameters"]
PROFILE: str = "auto"
MODEL: str = ""
RUN_NAME: str = ""
MERGE_ONTO: str = "full"

# %% [markdown]
# 如果这个运行目录里还没跑过第 03 课，现在会先跑。然后核对基座模型和适配器的权重名称与形状，免得中途出错。

# %%
import nbutils
from nbutils import merging

lesson = nbutils.start("04_merge", globals())
lesson.require("03_qlora")
merging.check(lesson.model, lesson.run.adapter, MERGE_ONTO, method=lesson.profile.method)

# %% [markdown]
# ## 适配器和基座模型
#
# transformers 加载基座模型，PEFT 再加上适配器，这就是我们想留下的模型。`placement` 说明在这台机器上怎样加载：放得下就不量化，放不下就用 4 bit（例如 T4 上的 7B）。

# %%
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from nbutils import evaluation

placement = evaluation.place_model(lesson.model, lesson.run.adapter, lesson.profile)
print(placement.reason)
tokenizer = AutoTokenizer.from_pretrained(lesson.run.adapter, trust_remote_code=False)
base = AutoModelForCausalLM.from_pretrained(lesson.model, **placement.loading, trust_remote_code=False)
tuned = PeftModel.from_pretrained(base, lesson.run.adapter)

# %% [markdown]
# 从验证集取一个问题，看带适配器的模型怎么答；下面会拿同一个问题问合并后的模型。

# %%
import torch
from nbutils import data

train_rows, eval_rows = data.load(lesson.run.data)
[row, *_] = data.own_language_first(eval_rows)
*asked, reference = row["messages"]
[from_adapter] = evaluation.answer_rows(tuned, tokenizer, [row])
print("问题    ", asked[-1]["content"])
print("参考答案", reference["content"])
print("适配器  ", from_adapter)

# %% [markdown]
# 回答是一个 token 一个 token 生成的。在每个位置，模型给词表里的每个 token 一个*概率*：最后一层输出的数叫 logits，做一次 softmax 就得到概率。下面沿着这个回答，把每个位置的概率都算出来：先带适配器算一遍，再用 PEFT 的 `disable_adapter` 关掉适配器算一遍。`predicted["adapter"]` 每行是一个位置，每列是一个 token。稍后和合并后的模型放在一起看。
#
# 最后几行取出第一个带适配器的层的矩阵，给后面的练习用；`scale` 就是第 03 课的 alpha / r。

# %%
prompt = tokenizer.apply_chat_template(asked, tools=row.get("tools"), tokenize=False, add_generation_prompt=True)
before, whole = (
    tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids for text in (prompt, prompt + from_adapter)
)
answer = whole[0, before.shape[1]:]


def next_tokens(model):
    with torch.inference_mode():
        logits = model(whole.to(model.device), logits_to_keep=len(answer) + 1).logits
    return logits[0].float().softmax(-1).cpu()


predicted = {"adapter": next_tokens(tuned)}
with tuned.disable_adapter():
    predicted["base"] = next_tokens(tuned)

name, layer = next((name, module) for name, module in tuned.named_modules() if getattr(module, "lora_A", None))
weight = name.removeprefix("base_model.model.") + ".weight"
W = merging.read_weight(lesson.model, weight)  # 从磁盘读，未量化
A, B = (matrix["default"].weight.detach().float().cpu() for matrix in (layer.lora_A, layer.lora_B))
scale = layer.scaling["default"]
print(f"{weight}：W {tuple(W.shape)}，B {tuple(B.shape)}，A {tuple(A.shape)}，scale {scale:g}")

# %% [markdown]
# ## 练习：合并一个权重
#
# 带适配器的层计算 W·x + scale · B·(A·x)：前一项来自权重 W，后一项是适配器加上去的。这等于 (W + scale · B·A)·x，所以可以用括号里的和代替 W。（这是 LoRA。DoRA 还要缩放这个和的每一行，下面的合并也支持。）请给上面打印的那一层算出这个和。在 torch 里，`@` 是矩阵乘法，`*` 是逐个元素相乘。如果报错 size of tensor…，看打印出来的形状：结果要和 W 一样大。

# %% tags=["exercise"]
from nbutils import exercises

my_merged = None
lesson.check(exercises.merged_weight, my_merged, W, A, B, scale)

# %% [markdown]
# <details><summary>参考答案</summary>
#
# ```python
# my_merged = W + scale * (B @ A)
# ```
#
# A 和 B 都是细长的矩阵，乘积 `B @ A` 却和 W 一样大：所以适配器文件很小。
#
# </details>

# %% [markdown]
# ## 合并
#
# 现在合并全部权重。`merge_adapter` 用 float32 计算这些和，每个只舍入一次，算完一个就写一个到磁盘。不会留下半个模型；这个适配器已经合并过的话，直接沿用。推理服务要用的文件都在这个目录里：权重、配置、tokenizer、对话模板、生成配置。`complete.json` 最后才写，记录这个模型由什么合并而来。
#
# 练习里的那个权重，这里对比三份：手工算的，用 PEFT 自己的 `get_delta_weight` 算的，还有写进文件的（按文件的 dtype 舍入）。（合并到反量化的基座模型上时，手工算的和文件里的之差，就是 4 bit 丢掉的部分。）

# %%
dtype = lesson.profile.from_pretrained.dtype
four_bit = dict(lesson.profile.quantization) | {"dtype": dtype}
gib = merging.size_gib(lesson.model, lesson.run.adapter, dtype)
folder = merging.choose_folder(lesson.run, lesson.scratch, gib)
merge = merging.merge_adapter(lesson.model, lesson.run.adapter, folder, dtype=dtype, onto=MERGE_ONTO, quantization=four_bit)
print(merge)
print(*sorted(file.name for file in folder.iterdir()), sep=", ")
by_hand = W + scale * (B @ A)
by_peft = W + layer.get_delta_weight("default").float().cpu()
written = merging.read_weight(folder, weight)
print(f"手工算的和 PEFT 的最多相差   {(by_peft - by_hand).abs().max():.2g}")
print(f"手工算的和文件里的最多相差   {(written - by_hand.to(getattr(torch, dtype)).float()).abs().max():.2g}")

# %% [markdown]
# 在内存里，PEFT 一次调用就能合并：`merge_and_unload`。用 float32 算、最后只舍入一次，结果就和我们的目录逐位相同。这要在内存里放两个完整的模型，所以空闲内存不够，或者两个模型超过 8 GiB（约 10 亿参数以上）时跳过。这里数的是模型的全部张量，适配器没有改动的也算在内；输出层和嵌入层共用权重时，会数两次。（设了 `MERGE_ONTO = "dequantized"` 时，合并过的权重会不同。）

# %%
from nbutils import platforms


def weights_equal():
    whole = AutoModelForCausalLM.from_pretrained(lesson.model, dtype="float32", trust_remote_code=False)
    merged = PeftModel.from_pretrained(whole, lesson.run.adapter).merge_and_unload()
    theirs = merged.to(getattr(torch, dtype)).state_dict()
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False).state_dict()
    return [torch.equal(ours[name], theirs[name]) for name in theirs]


gib = 2 * 4 * base.num_parameters() / 2**30  # 两个模型，每个权重 4 字节
if gib < min(8, platforms.free_memory_gib()):
    same = weights_equal()
    print(f"{len(same)} 个张量里，有 {sum(same)} 个和 merge_and_unload 的结果逐位相同")
else:
    print(f"跳过：两个 float32 的模型要 {gib:.1f} GiB 内存")

# %% [markdown]
# ## 再问同一个问题
#
# 合并后的模型和普通模型一样加载，不需要 PEFT。先从内存里清掉旧模型。`placement.load` 调用 `AutoModelForCausalLM.from_pretrained(folder, **placement.loading)`，并留住这一个模型，后面的单元格就不用再加载。图里是最可能的下一个 token：取两者第一次给出不同 token 的位置，往往就是回答的开头。概率太小的，条形看不见。

# %%
from nbutils import figures

del base, tuned, layer
[from_merged] = evaluation.answer_rows(placement.load(folder), tokenizer, [row])
print("适配器", from_adapter)
print("合并后", from_merged)
predicted["merged"] = next_tokens(placement.load(folder))
place = int((predicted["adapter"].argmax(-1) != predicted["base"].argmax(-1)).int().argmax())  # 没有不同就是 0
top = (predicted["adapter"] + predicted["base"])[place].topk(5).indices
labels = {"base": "基座", "adapter": "适配器", "merged": "合并后"}
bars = {
    repr(tokenizer.decode(token)): {label: float(predicted[name][place, token]) for name, label in labels.items()} for token in top
}
so_far = tokenizer.decode(answer[:place])[-50:]
figures.bars(bars, f"下一个 token，前面是：{so_far or '问题'}", "概率", stacked=False, path=lesson.run.logs / "next_token.png")

# %% [markdown]
# ## 练习：KL 散度
#
# 两个预测相差多远？*KL 散度*用一个数来回答：对所有 token 求 p · ln(p / q) 的和，单位是 *nat*（用自然对数时的单位）。两边给每个 token 的概率都相同，它就是 0。这里 p 是合并后的模型在这个位置的预测，q 是基座模型的预测：图里的五个 token，其余 token 合起来算第六个。请算出来；`math.log` 就是自然对数。

# %% tags=["exercise"]
import math

p, q = (predicted[name][place, top].tolist() for name in ("merged", "base"))
p, q = ([*five, max(1e-6, 1 - math.fsum(five))] for five in (p, q))
print("p（合并后）和 q（基座）：", *(f"{a:<10.3g} {b:<10.3g} {name}" for a, b, name in zip(p, q, [*bars, "其余"], strict=False)), sep="\n")
my_kl = None
lesson.check(exercises.kl, my_kl, p, q)

# %% [markdown]
# <details><summary>参考答案</summary>
#
# ```python
# my_kl = sum(p[i] * math.log(p[i] / q[i]) for i in range(len(p)))
# ```
#
# 每个对数都用 p 加权：合并后的模型认为可能的 token，影响最大。p 和 q 互换，结果就不一样。
#
# </details>

# %% [markdown]
# ## 证明
#
# 回答一样，不等于合并没出错。所以每个权重都抽几行，用基座模型和适配器重新算一遍。再让带适配器的模型和合并后的模型在约 200 个位置上预测下一个 token，比较概率最高的 256 个 token 的概率。两者的距离（还是 KL 散度，每个 token 多少 nat）在模型相同时为 0；有舍入误差时是一个很小的数，见“是同一个模型”那一行。第一行用来对照：微调让模型变了多少。
#
# QLoRA 的适配器是在 4 bit 的基座模型上训练的，而合并后的模型没有量化。这一步也会改变预测，通常只变一点，见“4 bit 的代价”那一行。想避免，就设 `MERGE_ONTO = "dequantized"`，这样合并用的模型就和训练时一样，只有 4 bit 的精度。如果合并后的模型和带适配器的模型对不上，这一课停在这里。未量化的模型放不进内存或显存时，只靠权重来证明。

# %%
from nbutils import parity

print(merging.prove(lesson.model, lesson.run.adapter, folder, onto=MERGE_ONTO))
proof = parity.prove(lesson.run, lesson.profile, placement, folder)
print(proof)

# %% [markdown]
# ## 微调前后
#
# 基座模型和合并后的模型回答验证集里同样的问题，temperature 为 0。这些问题都没有参与训练，第 03 课只用其中一部分来挑最好的一步。另有一小组通用问题，看通用能力。回答一边生成一边保存，中断后可以接着做。
#
# 先读六个回答，再相信数字。打勾表示和参考答案一字不差；打叉的回答也可能是对的。

# %%
comparison = evaluation.compare_models(lesson.run, lesson.profile, placement, folder, model_name=lesson.model_name)
comparison.show_answers(6)

# %% [markdown]
# ## 三种分数
#
# - *完全一致*（exact match）：和参考答案完全一致的回答所占的比例；
# - *字符 F1*：和参考答案有多少字符相同，从 0（完全没有）到 1（全部相同）；按字符而不按词算，这样中文也适用；
# - *损失*：参考答案平均每个 token 的 -ln p（单位 nat）；越低，模型越认可参考答案。
#
# 括号里是 95 % *置信区间*：换一批同类的问题再测，分数多半还落在这个范围里。`p` 是 *p 值*：假设微调没有带来任何变化，出现至少这么大的差异的概率。p 很小，差异就不太可能只是随机波动（统计显著）。

# %%
comparison.show_scores("exact_match", "character_f1", "loss")

# %% [markdown]
# ## 有没有灾难性遗忘？
#
# 微调之后，模型原有的能力可能下降，这叫*灾难性遗忘*（catastrophic forgetting）。先看两个通用问题的回答，再看全部通用问题上困惑度的比值。*困惑度*（perplexity）是损失的另一种写法，即 e 的“损失”次方：好比模型每一步要在这么多个同样可能的 token 里选一个。比值接近 1 就是什么也没忘。（自带的小模型只懂那家小店，微调之后不管问什么都按工单格式回答。它本来就答不出这些问题，所以这一项对它没有多大意义。）

# %%
comparison.show_answers(2, general=True)
print(comparison.forgetting)

# %% [markdown]
# ## 结论
#
# 损失变低说明不了多少。就算用*打乱*的回答来训练，模型也能学会回答大概长什么样，损失和 F1 照样变好。所以每个回答除了和自己的参考答案比，还要和其他样本的参考答案比，前者高出的部分才是*内容得分*。只有内容得分显著提升（统计显著），结论才是“有用”。报告里有全部分数，用任何浏览器都能打开。
#
# 内容得分用两种方法各算一次：完全一致和 ROUGE-L。ROUGE-L 看两段文本有多少字符按同样的顺序出现，从 0（完全没有）到 1（全部相同）。自带的示例数据里，所有回答都长得差不多，就算全对，和自己的参考答案也只比和别的参考答案近 0.2。其中 0.1 基座模型本来就有；结论显示的是微调增加的部分。

# %%
print(comparison.verdict)
print(f"报告：{comparison.page}")

# %% [markdown]
# ## 三次失败的训练
#
# 你的训练本来就该成功，第 03 课的几次小训练则是故意做坏的：一次步数太少；一次只有五条样本，模型把它们背了下来；一次用的是*打乱*的回答，答非所问。这里用自带示例数据的 40 个验证问题，按同样的办法给它们下结论。（缺哪一次，现在就补训练。）请看最后一次：损失从 8 以上降到 0.5 左右，字符 F1 也提高了。再看它的结论。

# %%
judged = evaluation.compare_practice(lesson.run.path)
for run in judged.values():
    print(f"{run.title}：损失 {run.tuned.mean('loss'):.2f}，完全一致 {run.tuned.mean('exact_match'):.0%}，{run.verdict.outcome}")
shuffled = judged["shuffled answers"]
shuffled.show_scores("loss", "character_f1", "exact_match", "content")
print(shuffled.verdict)

# %% [markdown]
# ## 练习：最常见的错误
#
# 步数太少的那次训练是有用的，但仍有将近一半的回答不对。错了多少，看分数就知道；错在哪里，只有读了才知道。先读几个错误的回答。工单里哪个字段最常出错？`right` 是一个列表，40 个回答（答对的也在内）各有一个字典，记录每个字段对不对；下面打印了第一个。（JSON 格式坏掉的回答，所有字段都算错。）表里只是一部分答错的，顺序也不同。请数遍整个 `right`，把字段名加引号填进 `my_field`。（样例有中文也有英文，错误也是。）

# %% tags=["exercise"]
from nbutils import display
from nbutils.evaluation import scores

short = judged["too short"].tuned
questions = [messages[-1]["content"] for messages in short.evaluator.questions]
asked = data.own_language_first(zip(questions, short.evaluator.references, range(len(questions)), strict=True))
wrong = [row for row in asked if not short.scores["exact_match"][row[-1]]]
errors = [{"问题": question, "参考答案": reference, "回答": short.texts[number]} for question, reference, number in wrong]
display.show_table(errors[:8])
right = list(map(scores.right_fields, short.texts, short.evaluator.references))
print(right[0])
my_field = None
lesson.check(exercises.commonest_error, my_field, right)

# %% [markdown]
# <details><summary>参考答案</summary>
#
# ```python
# errors_of = {field: sum(not fields[field] for fields in right) for field in right[0]}
# my_field = max(errors_of, key=errors_of.get)
# ```
#
# 改进模型也是这样做：找出最常见的错误，针对它补一些答案正确的样本，再训练一次。
#
# </details>

# %% [markdown]
# 同样的内容画成图：几次小训练，加上你自己合并后的模型。所有字段都对，才算完全一致。如果你的模型的回答不是带这些字段的 JSON，图里就没有它。

# %%
from statistics import mean


def shares(result):
    right = list(map(scores.right_fields, result.texts, result.evaluator.references))
    by_field = {field: mean(fields.get(field, False) for fields in right) for field in right[0]}
    return {"完全一致": result.mean("exact_match"), **by_field}


by_run = {run.title: shares(run.tuned) for run in [*judged.values(), comparison]}
if right[0].keys() - by_run[comparison.title]:
    del by_run[comparison.title]
    print(f"你的模型的回答没有这些字段；完全一致 {comparison.tuned.mean('exact_match'):.0%}")
figures.bars(by_run, "答对的比例：整条和各个字段", "比例", stacked=False, path=lesson.run.logs / "fields.png")

# %% [markdown]
# ## 手工算一个置信区间
#
# 步数太少的那次训练，“完全一致”的比例是用 40 个问题测出来的，有多可靠？从 40 个回答里随机抽 40 次，抽完放回，所以有的会抽到两次，有的一次也抽不到；每抽一组算一次分数，重复 2,000 组。中间 95 % 的分数就是置信区间。这种方法叫 *bootstrap*（自助法）。F1 和损失的区间，课程就是这样算的；比例的区间用 Wilson 公式，结果几乎相同。

# %%
import random

matches = short.scores["exact_match"]  # 答对是 1，否则是 0
random.seed(0)
drawn = sorted(mean(random.choices(matches, k=len(matches))) for _ in range(2000))
print(f"手工算  {mean(matches):.3f} [{drawn[50]:.3f}, {drawn[1949]:.3f}]")
print(f"nbutils {short.estimate('exact_match').text()}")

# %% [markdown]
# ## 思考题
#
# 为什么只凭损失变低，不能说明微调有用？把 `"a"`、`"b"` 或 `"c"` 填进 `my_choice`。
#
# - **a**：因为损失和回答不是在同一批样本上测的
# - **b**：因为损失变低可能只是碰巧，它又没有置信区间
# - **c**：因为模型哪怕只学会了回答的样子，损失也会降低

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
# - 合并后的模型，带 tokenizer、对话模板和生成配置（generation config）；
# - 一份证明：计算结果和“基座模型加适配器”一致；
# - 基座模型和合并后的模型在同一个验证集上的分数，每个分数都带置信区间；
# - 一个结论：微调有没有用（答案可以是“没有”），以及一份 HTML 报告。
#
# 第 05 课把模型部署为服务。

# %%
lesson.finish(merge, proof, comparison)
