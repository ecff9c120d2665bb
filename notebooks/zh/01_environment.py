# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 01 · 这台机器能做什么？
#
# *微调*（fine-tuning）就是拿一个已经会读会写的模型，用你自己的样本再训练一会儿。微调常常还没开始就失败了：GPU（显卡，算模型比 CPU 快很多倍）太旧或太新，负责计算的 torch 库里没有能在它上面跑的程序；磁盘满了；结果存进了会和机器一起删掉的目录。这一课先把这些都查一遍，再问模型第一个问题，然后看一块 GPU 放得下什么，为什么。
#
# 学完这一课，你会得到
#
# - 这台机器的检查结果：平台、GPU、内存、磁盘、时限、软件包、网络；
# - 自带的小模型在训练之前给出的第一个回答；
# - 适合这台机器的配置（profile）：模型、精度、批大小，每个值都写明理由；
# - 一份预估：哪块 GPU 放得下什么模型，训练多久，花多少钱。
#
# 用时不到一分钟，不下载任何东西。每个术语第一次出现时都有解释，也收在 [术语表](../../docs/zh/glossary.md) 里。

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
# 第一次学，这里都不用改，下面“配置”一节会解释。`PROFILE = "auto"` 按你的 GPU 选配置（profile），也可以填 `configs/` 里的任何一个名字。`SET` 用来改单个值，例如 `"sft.learning_rate=1e-4, lora.r=64"`。`RUN_NAME` 相同的后续课程会沿用这些值。

# %% tags=["parameters"]
PROFILE: str = "auto"
MODEL: str = ""
RUN_NAME: str = ""
SET: str = ""

# %% [markdown]
# 每一课都先做这一步，打印平台、GPU、模型和存放结果的目录。

# %%
import nbutils

lesson = nbutils.start("01_environment", globals())

# %% [markdown]
# ## GPU
#
# 模型由许多数字组成，叫*权重*或*参数*：7B 模型大约有 70 亿个。每个数字占多少 bit，决定了放不放得下（8 bit 是 1 字节）。`float32` 占 32 bit，`float16` 和 `bfloat16` 都占 16 bit：float16 更精细，但超过 65,504 就会溢出；bfloat16 粗一些，取值范围和 float32 一样大，所以训练更稳定。
#
# NVIDIA 给每一代 GPU 编了号，叫*计算能力*（compute capability），8.0 及以上的可以用 bfloat16 训练。T4（7.5）用 float16，虽然 `torch.cuda.is_bf16_supported()` 在 T4 上也返回 `True`。没有 GPU 时，课程在 CPU 上用 float32 训练。

# %%
import torch

if lesson.gpu:
    gpu = torch.cuda.get_device_properties(0)
    print(f"{gpu.name}，{gpu.total_memory / 2**30:.1f} GiB，计算能力 {gpu.major}.{gpu.minor}")
    print("bfloat16：", "可以用" if gpu.major >= 8 else "不能用，改用 float16")
else:
    print("没有找到 GPU：用 CPU 训练，精度 float32。")

# %% [markdown]
# ## 其他检查
#
# 接着查磁盘、内存、时限、软件包和网络，有 GPU 还要在上面真的算一次：有些 GPU 在 torch 里没有对应的程序（算子，CUDA kernel），`torch.cuda.is_available()` 照样返回 `True`。这里只显示需要你留意的项目。`WARN` 值得读一读（没有网络不要紧，用自带的模型就行）；出现 `FAIL`，这一课就停下，必须先解决。`python -m nbutils doctor` 显示全部检查项。

# %%
from nbutils import doctor

report = doctor.examine()
report.require()

# %% [markdown]
# ## 第一个问题
#
# 课程自带一个很小的模型，训练文本都和一家小店有关，任务是把顾客的留言变成 JSON 工单。`apply_chat_template` 把留言写成模型要读的格式，再切成 *token*：词、词的一部分、符号，每个 token 有一个编号。`generate` 接着往下写，一次一个 token。

# %%
from transformers import AutoModelForCausalLM, AutoTokenizer
from nbutils import data, files

tokenizer = AutoTokenizer.from_pretrained(files.TINY_MODEL, trust_remote_code=False)
model = AutoModelForCausalLM.from_pretrained(files.TINY_MODEL, dtype=torch.float32, trust_remote_code=False)
question, reference = data.own_language_first(data.stored_rows(files.SAMPLES / "eval.jsonl"))[1]["messages"]
inputs = tokenizer.apply_chat_template([question], add_generation_prompt=True, return_dict=True, return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=40, do_sample=False)

# %% [markdown]
# 参考答案就是我们想要的回答。模型现在还答不出来，第 03 课再训练。

# %%
from nbutils import display

answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
display.show_table([{"问题": question["content"], "回答": answer, "参考答案": reference["content"]}])

# %% [markdown]
# ## 配置
#
# 配置（profile）是 `configs/` 里的一个文件，大约有 40 个值。下面是最要紧的几个，已经按这台机器选好。每个名称都是某个库的参数：`lora` 是 peft 的 `LoraConfig`，`sft` 是 TRL 的 `SFTConfig`，`from_pretrained` 是 transformers 的，三个都是 Hugging Face 的库；`course` 是课程自己的。
#
# `lora` 不改动原有的权重，只在旁边训练一个小小的*适配器*（adapter），参数量约为模型的百分之一；*秩*（rank）`lora.r` 决定它的大小。`qlora` 也训练适配器，但基座（原来那个模型）的权重先*量化*成 4 bit：每个权重取 16 个值里最接近的一个。训练是一步（step）一步走的，每一步都把要训练的参数改动一点；改动多少，由*学习率*（learning rate）决定。学习率和 LoRA 的秩可以按需调整；精度由 GPU 决定，一次算 `per_device_train_batch_size` 条样本。取决于样本的值在第 03 课选定。

# %%
names = ["profile", "model", "method", "from_pretrained.dtype", "lora.r", "sft.max_length",
         "sft.per_device_train_batch_size", "sft.learning_rate"]
display.show_choices(lesson.resolved, only=names)

# %% [markdown]
# ## 放得下吗？
#
# 训练的一步：先从输入一层层算到输出（前向计算），看错了多少，再倒着算出每个参数该怎么改（反向传播）。要用多少显存，下载之前就能算出来，把这几部分加起来：
#
# - *权重*：16 bit，或者 4 bit 另加量化常数（还原权重时要乘上它）；
# - *适配器*：LoRA 训练的参数，别的都不训练；
# - *梯度*：每个要训练的参数往哪个方向改，误差才会变小；
# - *优化器*：AdamW 给每个要训练的参数记两个平均值（LoRA 训练时各占 8 bit）；
# - *激活值*：各层在前向计算时得到的中间结果，反向传播求梯度时还要用；
# - *logits*：在每个位置上，给每个可能的下一个 token 打的分；分块计算，所以同时只占很少；
# - *工作区*：算子运行时临时占用的显存。
#
# 下图是同一个 7B 模型的四种训练方式，每次算 4 条、每条 1,024 个 token 的样本，用的是这台机器的 GPU；没有 GPU 就按一块租来的算（1 GiB 约等于 1.07 GB）。*全参数微调*训练全部权重，每个权重占 16 字节：权重 2 字节，梯度 2 字节，优化器 12 字节（两个平均值，外加一份 float32 的权重副本），logits 和工作区另算。*梯度检查点*（gradient checkpointing）只保存每一层的输入，其余激活值到反向传播时再算一遍：慢一些，显存省很多。图里的虚线是上限：比显存略小，因为显存不能全部用掉。各部分从左到右按上面的顺序排列；不到 0.4 GiB 的不画，但计入总数。

# %%
from nbutils import figures, plan
from nbutils.language import tr

forecast = plan.example(lesson.resolved, rows=10_000, mean_length=300)
gpu = forecast.gpu
asked = {"model": "Qwen2.5-7B", "length": 1024, "micro_batch": 4, "checkpointing": "off"}
lora = plan.of_options(gpu, {**asked, "method": "lora"})
qlora = plan.of_options(gpu, {**asked, "method": "qlora"})
less = plan.of_options(gpu, {**asked, "method": "qlora", "checkpointing": "on"})
billions = lora.shape.params / 2**30  # 每个权重占 1 字节时的 GiB 数
full = {"weights": 2 * billions, "gradients": 2 * billions, "optimizer": 12 * billions, "activations": lora.parts["activations"]}
ways = {"全参数微调": full, "LoRA": lora.parts, "QLoRA": qlora.parts, "QLoRA + 检查点": less.parts}
bars = {}
for name, parts in ways.items():
    large = {tr(part): gib for part, gib in parts.items() if gib > 0.4}
    bars[f"{name}  {sum(parts.values()):.0f} GiB"] = large
figures.bars(bars, f"训练 {lora.shape.name}，一块 {gpu.name}", "GiB", limit=lora.limit_gib)

# %% [markdown]
# 再看 10,000 条、每条 300 个 token 的样本放到六种 GPU 上，训练的模型由 `PROFILE = "auto"` 按 GPU 选。每条样本读三遍（3 *轮*，epoch），共 900 万个 token，除以每秒 token 数就是训练时间。“显存上限”是训练可以占用的显存，“显存峰值”是实际会占用的。价格写在 `configs/gpus.yaml` 里，你可以自己改；人民币和美元是两家平台各自的租价，不是换算。只有 H200 是实测，其他 GPU 的速度由公开参数推算。想算自己的情况，看 `python -m nbutils plan --help`。

# %%
gpus = ["T4", "RTX 3090", "RTX 4090", "A100-40GB", "H100", "H200"]
columns = ["GPU", "limit GiB", "model", "peak GiB", "tokens/s", "time", "cost"]
table = [{name: row[name] for name in columns} for row in plan.fits_table(gpus, rows=10_000, mean_length=300)]
display.show_table(table)

# %% [markdown]
# ## 练习：样本短一半
#
# 样本从 1,024 个 token 减到 512 个，显存的哪几部分会变小？分别用两个长度调用 `memory_of`，比较结果，再把名称写成列表填进 `my_parts`，例如 `["权重", "优化器"]`。

# %% tags=["exercise"]
from nbutils import exercises

def memory_of(length):
    answer, _ = plan.answer(gpu="" if lesson.gpu else plan.RENTED, **asked | {"length": length})
    return {tr(part): round(gib, 3) for part, gib in answer["parts"].items()}

print(memory_of(1024))
my_parts = None
lesson.check(exercises.halved_parts, my_parts, memory_of(1024), memory_of(512))

# %% [markdown]
# <details><summary>参考答案</summary>
#
# ```python
# long, short = memory_of(1024), memory_of(512)
# my_parts = [part for part in long if short[part] < long[part]]
# ```
#
# 激活值和 logits 跟着 token 走：token 少一半，占用也大约少一半。计算能力低于 8.0 的 GPU 上，工作区也会变小，因为里面有一个“token 数 × token 数”的掩码。权重、适配器和优化器只跟模型有关。
#
# </details>

# %% [markdown]
# ## 练习：最长的样本
#
# 在这块 GPU 上（没有的话，就按 24 GB 的 RTX 4090）用 QLoRA 训练 14B 模型，一次算一条样本，不用检查点：样本最长可以有多少个 token？答案取 256 的倍数。`fits(512)` 返回 True 或 False。要找的那个数放得下，再多 256 就放不下；如果 256 也放不下，答案就是 0。

# %% tags=["exercise"]
def fits(length):
    answer, _ = plan.answer(gpu="" if lesson.gpu else plan.RENTED, model="Qwen2.5-14B", method="qlora",
                            length=length, micro_batch=1, checkpointing="off")
    return answer["fits"]

my_length = None
lesson.check(exercises.longest_rows, my_length, fits, 256)

# %% [markdown]
# <details><summary>参考答案</summary>
#
# ```python
# my_length = 0
# while fits(my_length + 256):
#     my_length += 256
# ```
#
# 没有 GPU 时，答案是 1,792：上限 21 GiB 里，权重占 9 GiB，激活值每 1,000 个 token 占 5 到 6 GiB。改用 `checkpointing="on"`，同一块 GPU 上的样本可以长到十倍左右。
#
# </details>

# %% [markdown]
# ## 思考题
#
# 你自己的训练显存不够了。先改哪一项，才能让训练结果不变？把 `"a"`、`"b"` 或 `"c"` 填进 `my_choice`。
#
# - **a**：降低 LoRA 的秩
# - **b**：每次少算几条样本，但还是算完同样多条才改一次参数（`gradient_accumulation_steps`）
# - **c**：减小 `max_length`

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
# - 这台机器的检查结果：平台、GPU、内存、磁盘、时限、软件包、网络；
# - 自带的小模型在训练之前给出的第一个回答；
# - 适合这台机器的配置（profile）：模型、精度、批大小，每个值都写明理由；
# - 一份预估：哪块 GPU 放得下什么模型，训练多久，花多少钱。

# %%
planned = f"{forecast.shape.name} on {forecast.gpu.name}: {forecast.peak_gib:.1f} GiB"
lesson.finish(report, planned=planned if lesson.gpu else "")  # 没有显卡时，这是租来的显卡的预估，不记录
