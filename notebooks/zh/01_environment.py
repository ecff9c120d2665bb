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
# 微调常常还没开始就失败了：torch 不支持这块 GPU，磁盘满了，结果存进了会和机器一起删掉的目录。这一课先把这些都查一遍，再问模型第一个问题。
#
# 学完这一课，你会得到
#
# - 这台机器的检查结果：平台、GPU、内存、磁盘、时限、软件包、网络；
# - 自带的小模型在训练之前给出的第一个回答；
# - 适合这台机器的配置（profile）：模型、精度、批大小，每个值都写明理由；
# - 一份预估：哪块 GPU 放得下什么模型，训练多久，花多少钱。
#
# 用时不到一分钟，不下载任何东西。

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
# `PROFILE = "auto"` 按你的 GPU 选配置（profile），也可以填 `configs/` 里的任何一个名字。`SET` 用来改单个值，例如 `"sft.learning_rate=1e-4, lora.r=64"`。`RUN_NAME` 相同的后续课程会沿用这些值。

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
# 计算能力 8.0 及以上的 GPU 可以用 bfloat16 训练。T4（7.5）用 float16，虽然 `torch.cuda.is_bf16_supported()` 在 T4 上也返回 `True`。没有 GPU 时，课程在 CPU 上用 float32 训练。

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
# 接着查磁盘、内存、时限、软件包和网络，还要在 GPU 上真的算一次矩阵乘法：有些 GPU 在 torch 里没有对应的算子（CUDA kernel），`torch.cuda.is_available()` 照样返回 `True`。这里只显示需要你留意的项目。`WARN` 值得读一读；出现 `FAIL`，这一课就停下，必须先解决。`python -m nbutils doctor` 显示全部检查项。

# %%
from nbutils import doctor

report = doctor.examine()
report.require()

# %% [markdown]
# ## 第一个问题
#
# 课程自带一个很小的模型，训练文本都和一家小店有关，任务是把顾客的留言变成 JSON 工单。`apply_chat_template` 把留言写成模型要读的格式，`generate` 接着往下写。

# %%
from transformers import AutoModelForCausalLM, AutoTokenizer
from nbutils import data, files

tokenizer = AutoTokenizer.from_pretrained(files.TINY_MODEL, trust_remote_code=False)
model = AutoModelForCausalLM.from_pretrained(files.TINY_MODEL, dtype=torch.float32, trust_remote_code=False)
question, reference = data.stored_rows(files.SAMPLES / "eval.jsonl")[1]["messages"]
inputs = tokenizer.apply_chat_template([question], add_generation_prompt=True, return_dict=True, return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=40, do_sample=False)

# %% [markdown]
# 参考答案就是我们想要的回答。模型现在还答不出来，第 03 课再训练。

# %%
answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
print("问题    ", question["content"])
print("回答    ", answer)
print("参考答案", reference["content"])

# %% [markdown]
# ## 配置
#
# 配置（profile）是 `configs/` 里的一个文件，大约有 40 个值。下面是最要紧的几个，已经按这台机器选好。每个名称都是某个库的参数：`lora` 是 peft 的 `LoraConfig`，`sft` 是 TRL 的 `SFTConfig`，`from_pretrained` 是 transformers 的；`course` 是没有哪个库有的。学习率和 LoRA 的秩（rank）可以按需调整；精度由 GPU 决定，一次算 `per_device_train_batch_size` 条样本。取决于样本的值在第 03 课选定。

# %%
from nbutils import display

names = ["profile", "model", "method", "from_pretrained.dtype", "lora.r", "sft.max_length",
         "sft.per_device_train_batch_size", "sft.learning_rate"]
display.show_choices(lesson.resolved, only=names)

# %% [markdown]
# ## 放得下吗？
#
# 训练要用多少显存，下载之前就能算出来，把这几部分加起来：权重（每个 4 bit，另加量化常数）、LoRA 适配器和它的梯度、Adam 的优化器状态（一阶矩和二阶矩）、反向传播要用的激活值、计算损失时的 logits，还有一块工作区。只有激活值、logits 和工作区会随 micro-batch 和样本长度变大。下面按 10,000 条、每条 300 个 token 来算，用的是这台机器的 GPU；没有 GPU 就按一块租来的算。图里的虚线是上限：比显存略小，因为显存不能全部用掉。

# %%
import matplotlib.pyplot as plt
from nbutils import plan
from nbutils.language import tr

forecast = plan.example(lesson.resolved, rows=10_000, mean_length=300)
figure, axes = plt.subplots(figsize=(9, 2.4), layout="constrained")
left = 0
for part, gib in forecast.parts.items():
    axes.barh([forecast.gpu.name], gib, left=left, label=f"{tr(part)} {gib:.1f} GiB")
    left += gib
axes.axvline(forecast.limit_gib, color="black", linestyle="--", label=f"上限 {forecast.limit_gib:.1f} GiB")
axes.set(title=f"训练 {forecast.shape.name}：需要 {left:.1f} GiB 显存", xlabel="GiB")
figure.legend(ncols=4, loc="outside lower center")
display.show_figure(figure)

# %% [markdown]
# 同样的样本放到六种 GPU 上，训练的模型由 `PROFILE = "auto"` 按 GPU 选。每条样本读三遍（3 轮），共 900 万个 token，除以每秒 token 数就是训练时间。“显存上限”是训练可以占用的显存，“显存峰值”是实际会占用的。价格写在 `configs/gpus.yaml` 里，你可以自己改。只有 H200 是实测，其他 GPU 的速度由公开参数推算。想算自己的情况，看 `python -m nbutils plan --help`。

# %%
gpus = ["T4", "RTX 3090", "RTX 4090", "A100-40GB", "H100", "H200"]
columns = ["GPU", "limit GiB", "model", "peak GiB", "tokens/s", "time", "cost"]
table = [{name: row[name] for name in columns} for row in plan.fits_table(gpus, rows=10_000, mean_length=300)]
display.show_table(table, text=display.aligned(table))

# %% [markdown]
# ## 练习
#
# 这块 GPU（没有的话，就按 24 GB 的 RTX 4090）能训练 14B 模型吗？样本最长 1,024 个 token。权重约占 9 GiB：大部分是 4 bit，embedding 是 16 bit。其他部分按需要缩小（每次少算几条样本，激活值不存，用时重算）。把 `True` 或 `False` 填进 `my_guess` 再运行，填了才给答案。

# %%
my_guess = None
if my_guess is None:
    print("[待做] 把各部分加起来，再把 True 或 False 填进 my_guess")
else:
    large, _ = plan.answer(gpu="" if lesson.gpu else "RTX 4090", model="Qwen2.5-14B", length=1024)
    print(f"[{' OK ' if my_guess == large['fits'] else '不对'}] 你猜的是 {my_guess}，正确答案是 {large['fits']}：",
          f"需要 {large['peak_vram_gib']:.1f} GiB，上限 {large['limit_gib']:.1f} GiB",
          *(f"\n  {display.pad(tr(part), 12)} {gib:5.1f} GiB" for part, gib in large["parts"].items()))

# %% [markdown]
# ## 现在你有了
#
# - 这台机器的检查结果：平台、GPU、内存、磁盘、时限、软件包、网络；
# - 自带的小模型在训练之前给出的第一个回答；
# - 适合这台机器的配置（profile）：模型、精度、批大小，每个值都写明理由；
# - 一份预估：哪块 GPU 放得下什么模型，训练多久，花多少钱。
#
# 留两个问题给你：样本长度减半，显存的哪一部分会变小？损失几乎不降，你会先改配置里的哪个值？
# %%
planned = f"{forecast.shape.name} on {forecast.gpu.name}: {forecast.peak_gib:.1f} GiB"
lesson.finish(report, planned=planned if lesson.gpu else "")  # 没有显卡时，这是租来的显卡的预估，不记录
