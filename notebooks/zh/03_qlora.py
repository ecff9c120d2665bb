# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 03 · 用 QLoRA 微调
#
# *LoRA* 不改动基座模型的权重，只训练加在旁边的几个小矩阵，也就是*适配器*（adapter）。*QLoRA* 在此之上再把基座模型*量化*（quantize）：每个权重舍入到 4 bit。免费的 T4 用这种方法能训练 4B 模型；在没有 GPU 的笔记本电脑上，同样的单元格会训练课程自带的小模型。不认识的词可以查[术语表](../../docs/zh/glossary.md)。
#
# 学完这一课，你会得到
#
# - 用你的样本训练出来的 LoRA 适配器，损失只算在回答上；
# - 验证损失最低的那一步，而不只是最后一步；
# - 同样几个问题在训练前和训练后的回答；
# - 亲手算出的损失和一步训练，结果和库一致；
# - 三次失败的训练，可以和你的对照；
# - 校验过的 checkpoint：会话断了，只丢上一个 checkpoint 之后的那几步。
#
# 自带的小模型在 2 核 CPU 上约需三分钟；更大的模型在 GPU 上要几分钟到几小时。磁盘要放得下模型和三个 checkpoint（7B 模型的每个约 0.25 GB）。

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
# 留空或填 0，就用配置（profile）里的值；`SET = "sft.learning_rate=1e-4, lora.r=64"` 可以改其中任何一个。`RESUME = "auto"` 从中断的地方继续训练，`"80"` 回到第 80 步的 checkpoint，`"never"` 删掉这次训练的所有 checkpoint，从头开始。`MAX_HOURS = 0` 按平台自己的时限。

# %% tags=["parameters"]
PROFILE: str = "auto"
MODEL: str = ""
DATA: str = ""
RUN_NAME: str = ""
MAX_STEPS: int = 0
SAVE_STEPS: int = 0
MAX_HOURS: float = 0.0
RESUME: str = "auto"
SEED: int = 42
SET: str = ""

# %% [markdown]
# 开始这一课：找出平台、GPU、配置和这次训练的目录。

# %%
import nbutils

lesson = nbutils.start("03_qlora", globals())

# %% [markdown]
# ## 样本和 token
#
# 第 02 课已经把样本放进运行目录。如果还没跑过第 02 课，现在就准备，检查和第 02 课一样。对话模板把样本变成 token，掩码让损失只算在回答上。超过 `max_length` 的样本整条剔除：截断会丢掉结束符。最后按第 02 课的约定检查每一条样本。

# %%
from transformers import AutoTokenizer
from nbutils import chat, data

data.prepare(DATA, lesson.run.data, default=lesson.profile.course.data, rows=lesson.profile.course.rows)
train_rows, eval_rows = data.load(lesson.run.data)
tokenizer = AutoTokenizer.from_pretrained(lesson.model, trust_remote_code=False)
stop_ids = chat.find_stop_ids(tokenizer, lesson.model)
dataset = chat.filter_by_length(tokenizer, train_rows, lesson.profile.sft.max_length, stop_ids)
dataset.write_too_long(lesson.run.data)
print(f"训练集 {len(train_rows)} 条，验证集 {len(eval_rows)} 条")
print(dataset)
print(chat.check_contract(dataset))

# %% [markdown]
# ## 练习：一个批的损失
#
# *批*（batch）就是放在一起计算的几条样本。在每个位置上，模型给词表里的每个 token 打一个分，叫 *logits*；`softmax` 把分数变成概率。*损失*（loss）是 -ln p 的平均值，p 是正确的下一个 token 的概率：模型有把握而且对了，损失就是 0；越没料到，损失越大。训练就是让损失变小。
#
# 下面是自带的小模型对四条样本给出的 logits（形状是样本 × 位置 × 词表）和标签，请算出它们的损失。关键有两点：位置 t 的 logits 猜的是位置 t + 1 的 token；标签是 -100 的位置不算。
#
# 两者都是 *tensor*，可以像列表一样用下标：`logits[0][5]` 是样本 0 在位置 5 上的分数，`labels[0][6]` 是它要猜的那个 token 的 id；`logits[0][5].log_softmax(-1)` 是词表里每个 token 的 ln p，后面再加 `[labels[0][6]]`，就取出正确的那一项。`len(labels)` 是样本数，`len(labels[0])` 是位置数。写两层循环就够了。

# %% tags=["exercise"]
from nbutils import exercises
from nbutils.training import practice

small, batch = practice.small_model(), practice.small_batch(4)
logits, labels = small(batch["input_ids"]).logits.detach(), batch["labels"]
my_loss = None
lesson.check(exercises.batch_loss, my_loss, logits, labels)

# %% [markdown]
# <details><summary>参考答案</summary>
#
# ```python
# my_losses = []
# for row in range(len(labels)):
#     for t in range(len(labels[row]) - 1):
#         token = labels[row][t + 1]
#         if token != -100:
#             my_losses.append(-logits[row][t].log_softmax(-1)[token])
# my_loss = sum(my_losses) / len(my_losses)
# ```
#
# 最后一个位置猜的 token 并不存在，第一个 token 也没有谁来猜。在库里，所有位置一次调用就算完：`cross_entropy`，下一个单元格就会用到。
#
# </details>

# %% [markdown]
# ## 亲手训练一步
#
# trainer 反复做的就是下面这些。`backward` 对每个参与训练的权重算出梯度：这个权重变一点，损失变多少。*优化器*（optimizer）让每个权重沿梯度的反方向走一小步，步子多大由*学习率*（learning rate）`lr` 决定。这里只训练适配器，用的是上面那四条样本。库算出的损失和手算的相同；走完这一步，同样四条样本的损失变低了。

# %%
import torch
from torch.nn.functional import cross_entropy

optimizer = torch.optim.AdamW([weight for weight in small.parameters() if weight.requires_grad], lr=2e-3)
logits = small(batch["input_ids"]).logits
by_hand = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
by_library = small(**batch).loss
by_hand.backward()
optimizer.step()
print(f"手算 {by_hand:.5f}，库算 {by_library:.5f}，走一步之后 {small(**batch).loss:.5f}")

# %% [markdown]
# ## 每种技术省下什么
#
# 训练在前向传播时要把每一层的中间结果留给 `backward` 用，这些结果占的内存往往比权重还多。
#
# - *4 bit*：线性层的权重只占 32 bit 时的八分之一，代价是每次做乘法都要先还原；嵌入层和适配器不量化。
# - *梯度检查点*（gradient checkpointing）：每层只留输入，其余的在 `backward` 里重算一遍。
# - *梯度累积*（gradient accumulation）：一个批分几份算，梯度加起来。这一步的结果不变；但每份太小，GPU 就吃不饱。
# - *packing*：短样本首尾相接。如果都补齐（padding）到最长的一条，补的部分白占内存和时间。
# - *sdpa*：计算注意力时，不像 *eager* 那样为每一对 token 保存一个数，没有代价。
#
# 下面是在 CPU 上用小模型实测的结果，每种只跑一步，所以秒数只是大概。“中间结果”就是留给 `backward` 用的。换成大模型，比例也会不同。

# %%
from nbutils import display
from transformers import BitsAndBytesConfig

padded, part, packed = practice.small_batch(8), practice.small_batch(2), practice.small_batch(8, padding_free=True)
in_4_bits = practice.small_model(quantization_config=BitsAndBytesConfig(load_in_4bit=True), device_map={"": "cpu"})
recomputing = practice.small_model(use_cache=False).train()
recomputing.enable_input_require_grads()
recomputing.gradient_checkpointing_enable({"use_reentrant": True})
practice.step(small, part)  # 进程的第一步很慢
table = []
for name, variant, rows in [
    ("8 条样本，补齐", small, padded),
    ("8 条样本，补齐，4 bit", in_4_bits, padded),
    ("8 条样本，补齐，梯度检查点", recomputing, padded),
    ("2 条样本，补齐：梯度累积时的四分之一步", small, part),
    (f"8 条样本，packing：{packed['input_ids'].numel()} 个位置，补齐时是 {padded['input_ids'].numel()} 个", small, packed),
    ("8 条样本，packing，eager 注意力", practice.small_model(attn_implementation="eager"), packed),
]:
    kept, seconds = practice.step(variant, rows)
    size = variant.get_memory_footprint() / 2**20
    table.append({"一步训练": name, "权重（MiB）": f"{size:.1f}", "中间结果（MiB）": f"{kept:.1f}", "秒": f"{seconds:.2f}"})
display.show_table(table)

# %% [markdown]
# ## 4 bit 还是 16 bit？
#
# 4 bit 时，每个权重只能取 16 个值之一，再乘上*量化常数*（scale）；每 64 个相邻的权重共用一个。这 16 个值放在哪里好？图里是小模型的一个真实矩阵，竖线就是这 16 个值。训练好的权重大多很小，NF4 的 16 个取值按正态分布设置，0 附近更密，正好适合。`fp4` 的取值是 4 bit 浮点数：四个值都挤在 0 上，0 的两旁反而空着，所以误差更大。（两端的尖峰：每组里最大的那个总是 ±1。）
#
# 代价因模型而异：有的效果下降不少，有的几乎没有影响。所以训练之前先测：基座模型在一部分验证集样本上的损失，再把线性层的权重都舍入到 4 bit，重新算一遍。自带的小模型不论结果如何都用 4 bit 训练，这样这一课走的就是真实流程。它还完全不会这个任务，损失本来就高，舍入反而可能让损失下降：错误的猜测不那么肯定了。（别的模型由 `method: auto` 决定。有 GPU 时，每个 token 的损失最多升高 0.05 nat，或者 16 bit 放不下，就用 4 bit；nat 是用自然对数时损失的单位。没有 GPU 时，不到 10 亿参数的用 16 bit，其他的用 4 bit。）

# %%
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from nbutils import evaluation, figures, training

weight = next(weight.detach() for name, weight in small.named_parameters() if "q_proj" in name)
blocks = weight.view(-1, 64)
levels = {}
for kind in ("nf4", "fp4"):
    codes, state = quantize_4bit(weight, quant_type=kind)
    error = (dequantize_4bit(codes, state) - weight).norm() / weight.norm()
    levels |= {f"{kind}：相对误差 {error:.3f}": state.code}
figures.levels((blocks / blocks.abs().amax(1, keepdim=True)).flatten(), levels)
training.require_unquantized(lesson.model)
training.require_own_weights(lesson.model)
losses = evaluation.base_losses(lesson.begun(), dataset, eval_rows)

# %% [markdown]
# ## 训练配方
#
# 全部样本过一遍叫一*轮*（epoch）。样本总数不变时，批越大，更新次数越少；更新太少，损失就降不下来。所以批大小、轮数和学习率取决于你的样本。`conversations_per_step` 是一步的大小；GPU 只决定怎么算：一次算 `per_device_train_batch_size` 条，累积 `gradient_accumulation_steps` 次。开启 packing 后按拼接后的序列计数：2 条序列里可能有 8 段对话。`num_train_epochs` 是 0 的时候，由 `max_steps` 决定；相当于几轮，看输出的第一行。
#
# 接下来是最要紧的几个值和理由（去掉 `only` 可以看全部）；有 GPU 的话，最后还有这次训练要占用多少资源。每个名称就是对应的库里的参数名。验证损失用验证集里的多少条来算，也由配方决定（`validation`），渲染方式和训练样本一样。

# %%
from nbutils import plan

lesson = lesson.with_recipe(dataset.lengths, len(eval_rows), losses)
profile = lesson.profile
validation = chat.validation_dataset(dataset, eval_rows, profile.course.validation_rows)
most = ("method", "from_pretrained", "lora.r", "sft.max_length", "sft.per_device_train_batch_size",
        "sft.gradient_accumulation_steps", "sft.num_train_epochs", "sft.max_steps", "sft.learning_rate", "sft.packing",
        "course.conversations_per_step")
display.show_choices(lesson.resolved, only=most)
if forecast := plan.require(lesson.resolved):
    print(plan.describe(forecast))

# %% [markdown]
# ## 4 bit 的基座模型
#
# 配置里的 `quantization` 一块就是 `BitsAndBytesConfig` 的参数：上面讲的 `nf4`；双重量化（double quantization），把量化常数也压缩；矩阵乘法用你这台机器的精度计算。（不设置的话，bitsandbytes 默认用 `fp4` 和 float32。）如果是 `method: lora`，基座模型保持 16 bit，这些都用不上。
#
# 权重一边加载一边量化。反向传播会经过这些权重，但它们已冻结，不会更新。

# %%
from transformers import AutoModelForCausalLM, set_seed
from nbutils import distributed

dtype = getattr(torch, profile.from_pretrained.dtype)
quantization = BitsAndBytesConfig(
    **profile.quantization,  # load_in_4bit, bnb_4bit_quant_type, bnb_4bit_use_double_quant
    bnb_4bit_compute_dtype=dtype,
    bnb_4bit_quant_storage=dtype,  # 这样 FSDP 才能把权重分到各张 GPU 上
)
set_seed(SEED)
model = AutoModelForCausalLM.from_pretrained(
    lesson.model,
    quantization_config=quantization if profile.method == "qlora" else None,
    dtype=dtype,
    attn_implementation=training.attention(profile.from_pretrained.attn_implementation),
    device_map=distributed.device_map(lesson.device, profile.from_pretrained.dtype, profile.method),
    trust_remote_code=False,
)
print(f"模型占用 {model.get_memory_footprint() / 2**20:,.0f} MiB")

# %% [markdown]
# ## 训练前
#
# 从验证集取三个问题，让还没微调的基座模型回答。训练后再问同样三个。

# %%
questions = data.own_language_first(eval_rows)[:3]
before = evaluation.answer_rows(model, tokenizer, questions)
display.show_answers(questions, before=before)

# %% [markdown]
# ## 适配器
#
# LoRA 给权重 W 加上两个小矩阵 A 和 B：这一层原来算 W·x，现在算 W·x + (alpha/r)·B·(A·x)。A 有 r 行，B 有 r 列，只训练这两个。秩（rank）`r` 限制能学多少，`alpha / r`（也叫 scale）调节适配器的作用大小。

# %%
from peft import LoraConfig

lora = LoraConfig(
    **profile.lora,  # r、lora_alpha、lora_dropout、target_modules、use_rslora：配置文件里逐个有说明
    task_type="CAUSAL_LM",
)
print(f"r {lora.r}, lora_alpha {lora.lora_alpha}, lora_dropout {lora.lora_dropout}, target_modules {lora.target_modules}")

# %% [markdown]
# ## 练习：适配器有多大
#
# 下面是这个模型第一个线性层的尺寸。如果秩是 64，这一层的 A 和 B 一共有多少个参数？

# %% tags=["exercise"]
first = next(part for part in model.modules() if isinstance(part, torch.nn.Linear))
d_in, d_out, r = first.in_features, first.out_features, lora.r
print(f"W 是 {d_out} x {d_in}；秩为 {r} 时，A 是 {r} x {d_in}，B 是 {d_out} x {r}")
my_parameters = None
lesson.check(exercises.adapter_parameters, my_parameters, d_in, d_out, r)

# %% [markdown]
# <details><summary>参考答案</summary>
#
# ```python
# my_parameters = 64 * d_in + d_out * 64
# ```
#
# A 和 B 的大小随 W 的两边之和增长，W 随两边之积增长。所以模型越大，要训练的比例越小。
#
# </details>

# %% [markdown]
# ## 训练设置
#
# 配置里的 `sft` 一块就是 `SFTConfig` 的参数，上面的表讲了主要几个的理由。样本首尾相接，不补 padding（`padding_free`）；开了 packing，会先拼成不超过 `max_length` 个 token 的序列。*验证损失*（validation loss）是在验证集上算的损失，第一步之前（`eval_on_start`）和每次保存时（`eval_steps`）都会算；`load_best_model_at_end` 保留验证损失最低的那一步。`training.bookkeeping` 补上和学习本身无关的设置：目录、保存、随机种子。在另一个终端里运行 `python -m nbutils watch`，可以看训练进度。
#
# 第一次学可以跳过这一段。`report_to` 写的是把数字记到哪些工具里：TensorBoard 总会记（下面输出的第二行写着在这台机器上怎么打开）；有 `WANDB_API_KEY`，W&B 就在线记录；装了 SwanLab，并设了 `SWANLAB_API_KEY` 或 `SWANLAB_MODE=offline`，也会记到 SwanLab。想用 transformers 支持的别的工具，就写 `SET = "sft.report_to=[mlflow]"`。

# %%
from nbutils import tracking
from trl import SFTConfig

arguments = dict(profile.sft)  # learning_rate、num_train_epochs、per_device_train_batch_size、packing、optim 等
if not profile.sft.packing:
    arguments["max_length"] = None  # 不需要截断：太长的样本前面已经剔除了
arguments["report_to"] = tracking.report_to(profile.sft, lesson.scratch)
settings = SFTConfig(
    **arguments,
    padding_free=True,
    bf16=dtype == torch.bfloat16,
    fp16=dtype == torch.float16,
    eval_strategy="steps" if validation else "no",
    eval_steps=profile.sft.save_steps,
    eval_on_start=bool(validation),
    **training.bookkeeping(lesson.scratch, SEED),
)
print(f"learning_rate {settings.learning_rate:g}，每步 {settings.per_device_train_batch_size} x {settings.gradient_accumulation_steps} 条拼接后的序列")

# %% [markdown]
# trainer 接收模型、适配器、token，以及两个回调（callback）。`EarlyStoppingCallback` 是 transformers 自带的：验证损失连续几次不再下降，就结束训练。另一个是课程写的：在后台把 checkpoint 复制到运行目录并在那里校验，赶在平台到时限之前结束训练，还会显示进度。`prepare` 让验证损失按全部 token 取平均（trainer 自己的算法是按批取平均），把适配器转成 float32（TRL 会转成 bfloat16，而 T4 不能用 bfloat16 训练），再把 LoRA 的加法融合到矩阵乘法里：结果一样，时间更短。
#
# TRL 会显示 *Truncating*（截断）、*Dropping fully masked examples*（丢掉没有标签的样本）之类的进度条。它会找这样的样本，但一条也找不到：前面已经剔除了。`prepare` 会核对，参与训练的 token 一个都没少。

# %%
from transformers import EarlyStoppingCallback
from trl import SFTTrainer

callback = training.CourseCallback(
    dataset, profile, run=lesson.run, folders=lesson.folders, started=lesson.started, max_hours=MAX_HOURS,
    base_model=training.model_fingerprint(lesson.model, lesson.model_name),
)
callbacks = [callback]
if profile.course.early_stopping_patience:
    callbacks.append(EarlyStoppingCallback(profile.course.early_stopping_patience))
trainer = SFTTrainer(
    model=model,
    args=settings,
    train_dataset=chat.training_dataset(dataset),
    eval_dataset=validation,
    processing_class=tokenizer,
    peft_config=lora,
    callbacks=callbacks,
)
print(callback.prepare(trainer))

# %% [markdown]
# ## 训练损失和验证损失
#
# 开始训练。只看训练损失不够：样本背下来了，训练损失也会降。验证损失在训练从没见过的样本上计算，留下的就是验证损失最低那一步的适配器。点了*全部运行*之后，页面会停在最后一个单元格：请回到这里看，实时数字显示在这个单元格下面，训练完还有曲线。
#
# 中断过的训练会从最新的、校验通过的 checkpoint 继续。显存不足时，用更小的 micro-batch 重做这一步（个数变多，批大小不变），还不够就打开梯度检查点。机器要是被收回，把这个 notebook 原样再运行一遍，就会继续训练。float16 里太小的梯度会变成 0，所以先把损失乘上一个大数（*损失缩放*，loss scale），训练会自动调整它；调好之前的几步会跳过，属正常现象。训练结束后会检查基座模型：一个权重都不许变。

# %%
result = training.train(trainer, callback, resume=RESUME)
result.show()
display.plot_losses(result.history, lesson.run.logs / "loss.png", kept=result.kept_step)

# %% [markdown]
# ## 训练后
#
# 还是那三个问题，现在带着适配器回答。第 04 课会问完验证集的所有问题，再比较分数。保存时只存 A 和 B，所以适配器很小：7B 模型的适配器只有模型的百分之一左右。（自带的模型太小，和它的适配器差不多大。）先写到临时目录，写完整了再改名。

# %%
after = evaluation.answer_rows(trainer.model, tokenizer, questions)
display.show_answers(questions, before=before, after=after)
training.save_adapter(result, tokenizer)
print(f"适配器：{lesson.run.adapter}（{sum(file.stat().st_size for file in lesson.run.adapter.iterdir()) / 2**20:,.1f} MiB）")

# %% [markdown]
# ## 学到了什么
#
# 图里是第一层的一角，按比例画。W 没有变；适配器加上去的是 B·A，它和 W 一样大，却只由两个窄矩阵相乘得到。所以它有条纹：每一行都是 A 那几行的混合。白色是 0，每个矩阵的颜色各用各的刻度。

# %%
from peft.utils.integrations import dequantize_module_weight

if distributed.world_size() == 1:  # 多个进程时，一个进程可能只有矩阵的一部分
    layer = next(part for part in trainer.model.modules() if hasattr(part, "lora_A"))
    a, b = layer.lora_A["default"].weight[:, :128], layer.lora_B["default"].weight[:128]
    corners = {"W": dequantize_module_weight(layer.base_layer)[:128, :128], "B·A": b @ a, "B": b, "A": a}
    figures.matrices({f"{name}, {len(corner)} x {corner.shape[1]}": corner.detach().float().cpu() for name, corner in corners.items()})

# %% [markdown]
# ## 失败的训练
#
# 你的训练大概很顺利。下面三次用小模型训练自带的样本，都失败了。*步数太少*：结束时两条曲线都还在降。*死记硬背*：五条样本反复训练，训练损失几乎降到 0，验证损失却早就过了最低点。*回答打乱*：每个问题配的是别的问题的答案。损失从 8 以上降到 0.5 左右，看上去和成功的训练一样，学到的却只是所有答案的共同之处。损失要多低才算好，曲线不会说；第 04 课会让这几个模型也来答题。（纵轴上，每一格大约是上一格的三分之一。）

# %%
runs = practice.train_all(lesson.run.path) if result.ended else {}  # 训练被中途停止时，没有时间做这些
display.plot_panels({
    title: {"训练损失": run.history["train"], "验证损失": run.history["validation"]}
    for title, run in zip(["步数太少", "死记硬背", "回答打乱"], runs.values(), strict=False)
}, log=True)

# %% [markdown]
# ## 练习：学习率
#
# 哪个学习率更好？选两个，至少相差五倍，比如上面配方里的那个和另外一个，像 `[0.1, 0.01]` 这样填进 `my_rates`。这个单元格会用每个学习率把小模型训练 24 步。看曲线，把更好的那个数（不加引号）填进 `my_winner`，再运行一遍；练过的不会重练。

# %% tags=["exercise"]
my_rates = None
my_winner = None
runs = {rate: practice.train(practice.Practice(steps=24, learning_rate=rate), practice.folder(lesson.run.path, f"rate {rate}")) for rate in my_rates or []}
display.plot_panels({"验证损失": {f"学习率 {rate:g}": run.history["validation"] for rate, run in runs.items()}}, log=True)
lesson.check(exercises.learning_rates, my_winner, my_rates, {rate: run.best[1] for rate, run in runs.items()})

# %% [markdown]
# <details><summary>参考答案</summary>
#
# ```python
# my_rates = [2e-3, 2e-4]
# my_winner = 2e-3
# ```
#
# 2e-4 的步子太小，24 步之后损失还远高于 2e-3。但也不是越大越好：0.1 的步子迈得太大，最后的损失和 2e-4 差不多。
#
# </details>

# %% [markdown]
# ## 思考题
#
# 一次训练共 150 步，训练损失一直降到最后；验证损失在第 60 步最低，之后一路上升。该留下哪一步的适配器？把 `"a"`、`"b"` 或 `"c"` 填进 `my_choice`。
#
# - **a**：第 150 步，训练损失最低
# - **b**：第 150 步，多训练总没有坏处
# - **c**：第 60 步，验证损失最低

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
# - 用你的样本训练出来的 LoRA 适配器，损失只算在回答上；
# - 验证损失最低的那一步，而不只是最后一步；
# - 同样几个问题在训练前和训练后的回答；
# - 亲手算出的损失和一步训练，结果和库一致；
# - 三次失败的训练，可以和你的对照；
# - 校验过的 checkpoint：会话断了，只丢上一个 checkpoint 之后的那几步。
#
# 第 04 课把适配器合并进模型，再看微调到底有没有用。

# %%
lesson.finish(dataset, result, base_losses=losses and vars(losses))
