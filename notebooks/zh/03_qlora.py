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
# QLoRA 把基座模型量化到 4 bit 并冻结，只训练旁边的 LoRA 小矩阵。免费的 T4 用这种方法能训练 4B 模型；在没有 GPU 的笔记本电脑上，同样的单元格会训练课程自带的小模型。
#
# 学完这一课，你会得到
#
# - 用你的样本训练出来的 LoRA 适配器，损失只算在回答上；
# - 验证损失最低的那一步，而不只是最后一步；
# - 同样几个问题在训练前和训练后的回答；
# - 校验过的 checkpoint：会话断了，只丢上一个 checkpoint 之后的那几步。
#
# 自带的小模型在 2 核 CPU 上约需两分钟；更大的模型在 GPU 上要几分钟到几小时。磁盘要放得下模型和三个 checkpoint（7B 模型的每个约 0.25 GB）。

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
# ## 样本
#
# 第 02 课已经把样本放进运行目录。如果还没跑过第 02 课，现在就准备，检查和第 02 课一样。

# %%
from nbutils import data

data.prepare(DATA, lesson.run.data, default=lesson.profile.course.data, rows=lesson.profile.course.rows)
train_rows, eval_rows = data.load(lesson.run.data)
print(f"训练集 {len(train_rows)} 条，验证集 {len(eval_rows)} 条")

# %% [markdown]
# ## Token
#
# 对话模板把样本变成 token，掩码让损失只算在回答上。超过 `max_length` 的样本整条剔除：截断会丢掉结束符。最后按第 02 课的约定检查每一条样本。

# %%
from transformers import AutoTokenizer
from nbutils import chat

tokenizer = AutoTokenizer.from_pretrained(lesson.model, trust_remote_code=False)
stop_ids = chat.find_stop_ids(tokenizer, lesson.model)
dataset = chat.filter_by_length(tokenizer, train_rows, lesson.profile.sft.max_length, stop_ids)
dataset.write_too_long(lesson.run.data)
print(dataset)
print(chat.check_contract(dataset))

# %% [markdown]
# ## 4 bit 还是 16 bit？
#
# QLoRA 把基座模型压到 4 bit，普通 LoRA 保持 16 bit。4 bit 时每个权重只剩 16 种取值：内存大约只要三分之一，代价却因模型而异，有的忘掉不少，有的几乎没有影响。所以训练之前先测：基座模型在一部分验证集样本上的损失，再把线性层的权重都舍入到 4 bit（bitsandbytes 的 `quantize_4bit` 和 `dequantize_4bit`），重新算一遍。在 GPU 上，损失每个 token 最多升高 0.05 nat，或者 16 bit 放不下，`method: auto` 就用 4 bit。没有 GPU 或者没法测的时候，不到 10 亿参数的模型用 16 bit，其他的用 4 bit。自带的小模型不论代价多少都用 4 bit 训练，这样这一课走的就是真实流程；在 CPU 上，没量化的那个是 float32。它们还完全不会这个任务，损失本来就高，舍入反而可能让损失下降：错误的猜测不那么肯定了。

# %%
from nbutils import evaluation, training

training.require_unquantized(lesson.model)
training.require_own_weights(lesson.model)
losses = evaluation.base_losses(lesson.begun(), dataset, eval_rows)

# %% [markdown]
# ## 训练配方
#
# 批大小、轮数（epoch）和学习率取决于你的样本：样本总数不变时，批越大，更新次数越少；更新太少，损失就降不下来。`conversations_per_step` 是一步的大小；GPU 只决定怎么算：一次算 `per_device_train_batch_size` 条，累积 `gradient_accumulation_steps` 次。开启 packing 后，几段对话会拼成一条序列，所以 2 条序列的一步里可能有 8 段对话。接下来是最要紧的几个值和理由（去掉 `only` 可以看全部），最后是这次训练要占用多少机器资源。每个名称就是对应的库里的参数名。验证损失用验证集里的多少条来算，也由配方决定（`validation`），渲染方式和训练样本一样。

# %%
from nbutils import display, plan

lesson = lesson.with_recipe(dataset.lengths, len(eval_rows), losses)
profile = lesson.profile
validation = chat.validation_dataset(dataset, eval_rows, profile.course.validation_rows)
most = ("method", "from_pretrained", "lora.r", "sft.max_length", "sft.per_device_train_batch_size",
        "sft.gradient_accumulation_steps", "sft.num_train_epochs", "sft.max_steps", "sft.learning_rate", "sft.packing",
        "course.conversations_per_step")
display.show_choices(lesson.resolved, only=most)
print(plan.describe(plan.require(lesson.resolved)))

# %% [markdown]
# ## 把模型量化到 4 bit
#
# NF4 的 16 个取值按正态分布设置，0 附近更密，正好适合训练好的权重；双重量化（double quantization）把量化常数也压缩；矩阵乘法用你这台机器的精度计算。（不设置的话，bitsandbytes 默认用 `fp4` 和 float32。）如果是 `method: lora`，基座模型保持 16 bit，这些都用不上。

# %%
import torch
from transformers import BitsAndBytesConfig

dtype = getattr(torch, profile.from_pretrained.dtype)
quantization = BitsAndBytesConfig(
    **profile.quantization,  # load_in_4bit, bnb_4bit_quant_type, bnb_4bit_use_double_quant
    bnb_4bit_compute_dtype=dtype,
    bnb_4bit_quant_storage=dtype,  # 这样 FSDP 才能把权重分到各张 GPU 上
)

# %% [markdown]
# 权重一边加载一边量化。反向传播会经过这些权重，但它们已冻结，不会更新。

# %%
from transformers import AutoModelForCausalLM, set_seed
from nbutils import distributed

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
questions = eval_rows[:3]
before = evaluation.answer_rows(model, tokenizer, questions)
display.show_answers(questions, before=before)

# %% [markdown]
# ## 适配器
#
# LoRA 给权重 W 加上两个小矩阵 A 和 B：这一层原来算 W·x，现在算 W·x + (alpha/r)·B·(A·x)。A 有 r 行，B 有 r 列，只训练这两个。秩 `r` 限制能学多少，`alpha / r` 调节适配器的作用大小。
#

# %%
from peft import LoraConfig

lora = LoraConfig(
    **profile.lora,  # r、lora_alpha、lora_dropout、target_modules、use_rslora：配置文件里逐个有说明
    task_type="CAUSAL_LM",
)
print(f"r {lora.r}, lora_alpha {lora.lora_alpha}, lora_dropout {lora.lora_dropout}, target_modules {lora.target_modules}")

# %% [markdown]
# A 和 B 比 W 小多少？下面是这个模型第一个线性层的尺寸。

# %%
first = next(part for part in model.modules() if isinstance(part, torch.nn.Linear))
d_in, d_out, r = first.in_features, first.out_features, lora.r
print(f"W      {d_out} x {d_in} = {d_out * d_in:,} 个参数，冻结")
print(f"A 和 B {r} x {d_in} 和 {d_out} x {r} = {r * (d_in + d_out):,} 个参数，参与训练")

# %% [markdown]
# 先猜一猜：模型参数里有百分之几会参与训练？别的线性层里，MLP 的更大，key 和 value 的可能更小；embedding 不加适配器。把 `None` 换成你猜的数，后面有一个单元格会对答案。也可以以后再填：先重新运行这个单元格，再重新运行那一个。

# %%
my_percent = None

# %% [markdown]
# ## 训练
#
# 配置里的 `sft` 一块就是 `SFTConfig` 的参数，上面的表讲了主要几个的理由。样本首尾相接，不补 padding（`padding_free`）；开了 packing，会先拼成不超过 `max_length` 个 token 的序列。第一步之前（`eval_on_start`）和每次保存时（`eval_steps`）都会算验证损失；`load_best_model_at_end` 保留验证损失最低的那一步。`training.bookkeeping` 补上和学习本身无关的设置：目录、保存、随机种子。`report_to` 写的是把数字记到哪些工具里：TensorBoard（下面输出的第二行写着在这台机器上怎么打开）；W&B，有 `WANDB_API_KEY` 就在线记录；设了 `SWANLAB_API_KEY` 或 `SWANLAB_MODE=offline`，装了 SwanLab 就还有它。想用 transformers 支持的别的工具，就写 `SET = "sft.report_to=[mlflow]"`。在另一个终端里运行 `python -m nbutils watch`，可以看训练进度。

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
print(f"learning_rate {settings.learning_rate:g}，每步 {settings.per_device_train_batch_size} x {settings.gradient_accumulation_steps} 条")

# %% [markdown]
# trainer 接收模型、适配器、token，以及两个回调（callback）。`EarlyStoppingCallback` 是 transformers 自带的：验证损失连续几次不再下降，就结束训练。另一个是课程写的：在后台把 checkpoint 复制到运行目录并在那里校验，赶在平台到时限之前结束训练，还会显示进度。`prepare` 让验证损失按全部 token 取平均（trainer 自己的算法是按批取平均），把适配器转成 float32（TRL 会转成 bfloat16，而 T4 不能用 bfloat16 训练），再把 LoRA 的加法融合到矩阵乘法里：结果一样，时间更短。

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
# 看看你猜得准不准：实际比例的一半到两倍之间都算对。

# %%
trained, total = trainer.model.get_nb_trainable_parameters()
percent = 100 * trained / total
if my_percent is None:
    print("[待做] 把你猜的数填进上面的 my_percent，再依次运行那个单元格和这一个")
elif 0.5 * percent <= my_percent <= 2 * percent:
    print(f"[ OK ] 你猜的是 {my_percent}：{total:,} 个参数里训练 {trained:,} 个，占百分之 {percent:.2g}")
else:
    print(f"[待做] 你猜的是 {my_percent}，实际比这个{'多' if my_percent < percent else '少'}：拿上面的 A 和 B 跟 W 比一比")

# %% [markdown]
# 开始训练。中断过的训练会从最新的、校验通过的 checkpoint 继续。显存不足时，用更小的 micro-batch 重做这一步（个数变多，批大小不变），还不够就打开梯度检查点（gradient checkpointing）。机器要是被收回，把这个 notebook 原样再运行一遍，就会继续训练。float16 容易溢出，训练会自动调整损失缩放（loss scale）；调好之前的几步会跳过，属正常现象。训练结束后会检查基座模型：一个权重都不许变。

# %%
result = training.train(trainer, callback, resume=RESUME)
print(result)

# %% [markdown]
# ## 训练损失和验证损失
#
# 只看训练损失不够：样本背下来了，训练损失也会降。验证损失在训练从没见过的样本上计算，留下的就是验证损失最低那一步的适配器。
#
# 下面还有四次 135M 模型的训练，拿来和你的对照。*正常*：两条曲线都先下降再走平（学习率 2e-4）。*太慢*：学习率太小（1e-6），或者步数太少。*发散*：学习率太高（0.05），步子迈得太大，损失反而上升。*过拟合*：32 条样本背下来了，验证损失反而上升。

# %%
display.plot_losses(result.history, lesson.run.logs / "loss.png")
display.plot_loss_examples()

# %% [markdown]
# ## 训练后
#
# 还是那三个问题，现在带着适配器回答。第 04 课会问完验证集的所有问题，再比较分数。

# %%
after = evaluation.answer_rows(trainer.model, tokenizer, questions)
display.show_answers(questions, before=before, after=after)

# %% [markdown]
# ## 保存
#
# 只保存适配器，所以文件很小。先写到临时目录，写完整了再改名。

# %%
training.save_adapter(result, tokenizer)
mib = sum(file.stat().st_size for file in lesson.run.adapter.iterdir()) / 2**20
print(f"适配器：{lesson.run.adapter}（{mib:,.1f} MiB）")

# %% [markdown]
# ## 练习
#
# 学习率对结果的影响有多大？把这个 notebook 再跑两遍：一遍设 `RUN_NAME = "fast"`，学习率取上面表里的十倍；一遍设 `RUN_NAME = "slow"`，学习率取十分之一。最后跑的那一遍会把三次放在一起比较。哪一次的验证损失最低？
#
# 用自带的小模型可以直接在终端里做，每次在 CPU 上要几分钟：`python -m nbutils run --profile tiny --only 03 --set sft.learning_rate=2e-2 -p RUN_NAME fast`，再用 `2e-4` 和 `slow` 跑一次，最后 `python -m nbutils compare tiny fast slow`。

# %%
from nbutils import compare

runs = compare.beside(lesson.run, trained=dataset.facts() | result.facts())
missing = [name for name in ("fast", "slow") if name not in runs]
print(f"[{'待做' if missing else ' OK '}] 已有的训练：{', '.join(runs)}；其中要有 fast 和 slow")
if missing:
    print(f'再运行一遍这个 notebook，设 RUN_NAME = "{missing[0]}" 和 SET = "sft.learning_rate=..."，就能一起比较。')

# %% [markdown]
# ## 现在你有了
#
# - 用你的样本训练出来的 LoRA 适配器，损失只算在回答上；
# - 验证损失最低的那一步，而不只是最后一步；
# - 同样几个问题在训练前和训练后的回答；
# - 校验过的 checkpoint：会话断了，只丢上一个 checkpoint 之后的那几步。
#
# 第 04 课把适配器合并进模型，再看微调到底有没有用。
# %%
lesson.finish(dataset, result, base_losses=losses and vars(losses))
