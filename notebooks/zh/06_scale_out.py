# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 06 · 用多块 GPU、多台机器训练
#
# Kaggle 给两块 T4，第 03 课只用了一块。这一课还是跑第 03 课，同一个文件，但用上机器的所有 GPU，每块一个*进程*（运行中的一个程序）。各进程分担每一步的样本；一块 GPU 放不下模型时，模型也由各进程分担。没有 GPU 时，CPU 上的两个进程用同样的办法训练自带的小模型。
#
# 学完这一课，你会得到
#
# - 由几个进程分担的一次训练，以及启动训练的命令行；
# - DDP 和 FSDP 各在每块 GPU 上放什么，GPU 之间传什么；
# - 和单个进程的比较：每一步的样本相同，损失相同，以及快了多少；
# - 1 到 64 块 GPU 的速度和费用，算法可以拿自己的比较结果来检验；
# - 运行目录里的一个适配器，可以直接用于第 04 课。
#
# 自带的小模型在 2 核 CPU 上约需三分钟；更大的模型，用时是第 03 课的时间除以 GPU 数，另加几分钟做比较。磁盘和第 03 课一样。
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
# `PROCESSES` 填 0，就给每块 GPU 启动一个进程。`ENGINE` 是并行策略，填下面表里的名字；填 `"auto"` 就按模型大小自动选。`TRIAL_STEPS` 是比较时跑的步数，填 0 不做比较。其他参数和第 03 课一样。第 03 课已经训练完的运行目录，这里没有什么可训练的了：把 `MAX_STEPS` 调大，或者换一个 `RUN_NAME`。

# %% tags=["parameters"]
PROFILE: str = "auto"
MODEL: str = ""
DATA: str = ""
RUN_NAME: str = ""
SET: str = ""
PROCESSES: int = 0
ENGINE: str = "auto"
TRIAL_STEPS: int = 20
MAX_STEPS: int = 0
MAX_HOURS: float = 0.0

# %% [markdown]
# 开始这一课。每块 GPU 一个进程；没有 GPU 就开两个，每个用一个 CPU 线程。

# %%
import nbutils
from nbutils import distributed

lesson = nbutils.start("06_scale_out", globals())
choice = distributed.processes_for(lesson.gpu.count if lesson.gpu else 0, PROCESSES)
processes, threads = choice.value, 0 if lesson.gpu else 1
print(f"进程数：{processes}（{choice.reason}）")

# %% [markdown]
# ## DDP：每个进程一个完整的模型
#
# *DDP*（distributed data parallel，数据并行）：每个进程都有完整的模型，各算一部分样本的*梯度*（适配器的每个权重应该往哪个方向改），再用 *all-reduce* 求梯度平均：所有进程都拿到同一个平均值，做同样的更新，适配器就始终一致。这个平均值，就是单个进程用全部样本算出的梯度。下面用四个权重亲手验证：

# %%
import torch

torch.manual_seed(0)
small, rows, answers = torch.nn.Linear(4, 1, bias=False), torch.randn(8, 4), torch.randn(8, 1)

def gradient_of(share):
    loss = torch.nn.functional.mse_loss(small(rows[share]), answers[share])
    return torch.autograd.grad(loss, small.weight)[0]

first, second, whole = (gradient_of(share) for share in (slice(0, 4), slice(4, 8), slice(0, 8)))
average = (first + second) / 2
print(f"进程 1    {first[0]}\n进程 2    {second[0]}")
print(f"平均      {average[0]}\n全部样本  {whole[0]}  相同：{torch.allclose(average, whole)}")

# %% [markdown]
# ## FSDP：每块 GPU 只放一份
#
# *FSDP*（fully sharded data parallel，完全分片数据并行）把模型分开放：每块 GPU 只保存一个*分片*（shard），也就是权重和优化器状态的一份。计算某一层之前，每块 GPU 先用 *all-gather* 收齐这一层的权重，算完就丢掉。每个 *micro-step*（一块 GPU 一次同时计算的样本）的前向和反向都要这样做一遍。
#
# | `ENGINE` | 每块 GPU 放什么 | 一步传什么 | 适合 |
# |---|---|---|---|
# | `ddp` | 整个模型 | 适配器的梯度 | 一块 GPU 放得下的模型，速度最快 |
# | `fsdp_qlora` | 4 bit 模型的一个分片 | 每个 micro-step 把模型传两遍，另加梯度 | 4 bit 也放不进一块 GPU 的模型 |
# | `fsdp_lora` | 16 bit 模型的一个分片 | 同上，数据量是三到四倍 | `method: lora`，单块 GPU 放不下 |
#
# 下图是预估：4 bit 的 72B 模型，用 24 GB 的卡（更多的组合见 [docs/zh/clusters.md](../../docs/zh/clusters.md)）。激活值不能分摊，因为每块 GPU 计算自己的样本；收齐的那几层也不能。所以卡数翻倍，每张卡的显存也不会减半。

# %%
from nbutils import figures
from nbutils.language import tr
from nbutils.models import find_shape
from nbutils.plan import gpus, memory

held = {}
for name, engine, cards in [("1 块 GPU", "ddp", 1), ("DDP，共 4 块", "ddp", 4), ("FSDP，共 4 块", "fsdp_qlora", 4), ("FSDP，共 8 块", "fsdp_qlora", 8)]:
    recipe = memory.Recipe(engine=engine, cards=cards, gradient_accumulation_steps=16 // cards)
    sizes = memory.parts(find_shape("Qwen2.5-72B"), recipe)
    held[name] = {tr(part): size for part, size in sizes.items() if size > 0.1}
figures.bars(held, "4 bit 的 72B 模型：每块 GPU 的显存", "GiB", limit=memory.limit_gib(gpus.find("RTX 4090")))

# %% [markdown]
# ## 命令行
#
# 一块 GPU 放得下就用 DDP，放不下就用 FSDP，`auto` 也是这样选的。用哪种并行策略，写在一个 YAML 文件里（目录 `configs/accelerate`），由启动器 `accelerate launch` 读取；启动器启动各个进程，给每个进程分配一个编号（叫 *rank*，和 LoRA 的秩无关）和一块 GPU。各个键的含义、DeepSpeed 的 ZeRO，以及怎样用多台机器，见 [docs/zh/clusters.md](../../docs/zh/clusters.md)。
#
# 最后一行就是这个 notebook 要运行的命令，在终端里也能用。按 Ctrl-C 会先存 checkpoint，前面那个环境变量给它十分钟。端口 0 表示随便哪个空闲端口。

# %%
import shlex
import sys
from nbutils import files, plan

choice = plan.engine_for(lesson.resolved, processes, ENGINE)
engine, file = choice.value, distributed.config_file(choice.value)
print(f"并行策略：{engine}（{choice.reason}）\n\n{file.read_text(encoding='utf-8')}")
alone = [sys.executable, str(files.NOTEBOOKS / "03_qlora.py")]
together = [
    sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file),
    "--num_processes", str(processes), "--main_process_port", "0", str(files.NOTEBOOKS / "03_qlora.py"),
]
if processes == 1 and engine == "ddp":
    together = alone
print("TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600", shlex.join([*together, *lesson.arguments("03_qlora", DATA=DATA)]))

# %% [markdown]
# ## 先一起跑，再单独跑
#
# 在临时目录里把同样的几步跑两遍：先用全部进程（目录 `together`），再用一个进程（目录 `alone`）。配置里的 `conversations_per_step` 是所有 GPU 加起来一步的对话数：两块 GPU 各算一半。所以两遍的损失相差不超过 1 %；同样的数换了相加的顺序，舍入也就不同。（用了 dropout，就只有趋势一致。）在 CPU 上，两个进程共用同样的核，别指望快一倍。只有一块 GPU，或者一块放不下模型时，没什么可比，会跳过。

# %%
import shutil
from nbutils import compare, exercises, record

trials = lesson.scratch / "trials"
shutil.rmtree(trials, ignore_errors=True)
possible = processes > 1 and TRIAL_STEPS and plan.fits_alone(lesson.resolved)
for name, command, count in [("together", together, processes), ("alone", alone, 1)] if possible else []:
    print(f"--- {name}：{count} 个进程{'一起' if count > 1 else ''} {engine if count > 1 else ''}")
    words = lesson.arguments("03_qlora", RUN_NAME=name, MAX_STEPS=TRIAL_STEPS, DATA=DATA)
    lesson.launch([*command, *words], count, threads, trials)
compared = compare.speed_up(trials / "alone", trials / "together") if possible else None
if compared:
    print(f"每秒 token 数：单个进程 {compared.alone['tokens_per_second']:,.0f}，一起 {compared.together['tokens_per_second']:,.0f}，"
          f"是 {compared.speedup:.2f} 倍；损失最多相差 {compared.loss_difference:.1e}（相对值）")
    print(f"[{' OK ' if compared.same_work else 'WARN'}] 步数相同，批大小相同，损失相差不超过 1 %")

# %% [markdown]
# ## 练习：传了多少字节
#
# N 块 GPU 连成一个*环*来求梯度的和：每块把自己的梯度切成 N 份。第一轮，每块把一份传给下一块，下一块加上自己的再往下传；传 N - 1 次，每一份就都在某块 GPU 上加齐了。第二轮再传 N - 1 次，把加好的和转给所有 GPU。适配器的每个参数有一个梯度，是 float32（4 字节）。
#
# 用 DDP 时，8 块 GPU 里的*每一块*在一步里要传多少字节？适配器取你的模型的；没有 GPU 时，取 9B 模型的。

# %% tags=["exercise"]
forecast = plan.example(lesson.resolved, rows=10_000, mean_length=300)
shape, recipe = forecast.shape, forecast.recipe
adapter_parameters = shape.adapter_params(recipe.r)
print(f"{shape.name}，秩 {recipe.r}：适配器有 {adapter_parameters:,} 个参数")
my_bytes = None
lesson.check(exercises.sent_bytes, my_bytes, adapter_parameters, 8)

# %% [markdown]
# <details><summary>参考答案</summary>
#
# ```python
# my_bytes = 2 * (8 - 1) * adapter_parameters / 8 * 4
# ```
#
# 两轮，每轮传 7 次，每次八分之一，每个参数 4 字节。GPU 再多也几乎不会增加：最多是梯度大小的两倍。
#
# </details>

# %% [markdown]
# ## 1 到 64 块 GPU 的速度和费用
#
# 一步的时间是计算加通信。计算按单块 GPU 的速度算：用前面比较时测到的速度；没有 GPU 时，用租来的 RTX 4090 训练 9B 的预估速度。通信时间是字节数除以*带宽*。用 FSDP 时，一块 GPU 要传梯度的 (N - 1) / N，每个 micro-step 还要传模型的 2 (N - 1) / N。
#
# 每块 GPU 每步 8 条样本。8 块以内在一台机器里，走 PCIe，12 GB/s；再多就分到几台机器，机器之间是 25 Gbit/s 以太网（2.5 GB/s）。两个带宽都是假设值；这里还假设传输时不计算。

# %%
import math
from dataclasses import replace
from nbutils import display
from nbutils.plan import speed
from nbutils.plan.forecast import recipe_of

rate = compared.alone["tokens_per_second"] if compared and lesson.gpu else forecast.tokens_per_second
rate = rate or 1000.0  # 不知道这块 GPU 的速度时
tokens = 8 * recipe.length * (speed.PACKED if recipe.packing else 1)  # 一块 GPU 一步的 token 数
micro_steps = math.ceil(8 / recipe.per_device_train_batch_size)
fsdp = f"fsdp_{recipe.method}"
speeds = {"ddp": {}, fsdp: {}}
for name, by_cards in speeds.items():
    table = []
    for cards in (1, 2, 4, 8, 16, 32, 64):
        shared = replace(recipe, engine=name, cards=cards, gradient_accumulation_steps=micro_steps)
        sending = speed.sent_bytes(shape, shared) / (12e9 if cards <= 8 else 2.5e9)
        by_cards[cards] = cards * tokens / (tokens / rate + sending)
        price = forecast.gpu.price.times(cards * 1e6 / by_cards[cards] / 3600)
        table.append({"GPU 数": cards, "计算": f"{tokens / rate:.2f} s", "通信": f"{sending:.2f} s",
                      "tokens/s": f"{by_cards[cards]:,.0f}", "每百万 token": str(price)})
    print(f"\n{name}\n{display.aligned(table)}")

# %% [markdown]
# ## 练习：效率降到一半
#
# *效率*是 N 块 GPU 的 tokens/s，除以一块 GPU 的 tokens/s 的 N 倍，也就是每块 GPU 还剩下几成速度。在你的表里，FSDP 用到多少块 GPU 时，效率第一次低于一半？如果 64 块也不低于一半，就答 128。

# %% tags=["exercise"]
efficiency = {name: {cards: by_cards[cards] / cards / by_cards[1] for cards in by_cards} for name, by_cards in speeds.items()}
my_gpus = None
lesson.check(exercises.half_efficiency, my_gpus, efficiency[fsdp])

# %% [markdown]
# <details><summary>参考答案</summary>
#
# ```python
# my_gpus = min((cards for cards in speeds[fsdp] if speeds[fsdp][cards] / cards < 0.5 * speeds[fsdp][1]), default=128)
# ```
#
# 用 RTX 4090 训练 9B，答案是 8。两台机器 16 块 GPU 用 FSDP，反而比一台机器 8 块还慢：模型要走网络。
#
# </details>

# %% [markdown]
# 画成图，每个点旁边是 GPU 数和效率。适配器很小，所以 DDP 即使走慢网络，速度也几乎不打折。FSDP 要传整个模型：只在一块 GPU 放不下时才用，而且需要快的连接。GPU 越多，训练完得越早，但不会更便宜。

# %%
points = {"ddp": {}, fsdp: {}}
for name, shares in efficiency.items():
    for cards, share in shares.items():
        points[name][f"{cards}: {share:.0%}" if cards > 1 else ""] = cards, speeds[name][cards]
figures.dots(points, f"{shape.name}：不同 GPU 数的速度和效率", "GPU 数", "tokens/s", log="xy")

# %% [markdown]
# 算得准不准？拿自己的比较来检验：N 个进程各算单个进程的 N 分之一，再走 PCIe 通信。在两块 GPU 上，`TRIAL_STEPS` 够大时两个数应该接近（头几步会慢一些）。在 CPU 上对不上很正常。在 H200 上测过什么、没测过什么，见 [benchmarks/README.md](../../benchmarks/README.md)。

# %%
if compared:
    single, several = compared.alone, compared.together
    computing = single["train_seconds"] / single["steps"] * several["batch"] / several["processes"] / single["batch"]
    sending = speed.sent_bytes(find_shape(lesson.model), recipe_of(several)) / 12e9
    print(f"{several['processes']} 个进程各算 {computing:.3f} 秒，按 12 GB/s 通信 {sending:.3f} 秒："
          f"预测 {computing + sending:.3f} 秒，实测 {several['train_seconds'] / several['steps']:.3f} 秒")

# %% [markdown]
# ## 训练
#
# 现在用全部进程完整训练一次。checkpoint 和时限都和第 03 课一样：在一块 GPU 上开始的训练可以换到两块上继续，反过来也行，换并行策略也行。（Kaggle 的 *Save Version > Save & Run All* 会在后台运行这个 notebook，12 小时到之前自己结束；挂上输出就会继续训练。）下面是第 03 课记录的数字：进程数（`processes`）、并行策略（`engine`）、批大小（`batch`）、已跑和计划的步数（`steps`、`planned_steps`）、最后的损失（`final_loss`）、每秒 token 数（`tokens_per_second`）、一块 GPU 的显存峰值，没有 GPU 时是内存峰值（`peak_memory_gib`）。

# %%
words = lesson.arguments("03_qlora", DATA=DATA, MAX_STEPS=MAX_STEPS, MAX_HOURS=MAX_HOURS)
lesson.launch([*together, *words], processes, threads)
trained = record.read_facts(lesson.run.facts)["lessons"]["03_qlora"]
for name in ("processes", "engine", "batch", "steps", "planned_steps", "final_loss", "tokens_per_second", "peak_memory_gib"):
    print(f"{name:18} {trained[name]}")
print(f"适配器：{lesson.run.adapter}" if record.complete(trained) else "还没训练完：再运行一遍这个 notebook")

# %% [markdown]
# ## 思考题
#
# 原来在一块 GPU 上训练，现在用同样的配置在两块 GPU 上训练。学习率怎么办？把 `"a"`、`"b"` 或 `"c"` 填进 `my_choice`。
#
# - **a**：不用改
# - **b**：加倍，因为两块 GPU 训练的样本多一倍
# - **c**：减半，因为每块 GPU 只看到一半的样本

# %% tags=["exercise"]
my_choice = None
lesson.check(exercises.quiz, my_choice, lesson.stem)

# %% [markdown]
# <details><summary>参考答案</summary>
#
# ```python
# my_choice = "a"
# ```
#
# </details>

# %% [markdown]
# ## 现在你有了
#
# - 由几个进程分担的一次训练，以及启动训练的命令行；
# - DDP 和 FSDP 各在每块 GPU 上放什么，GPU 之间传什么；
# - 和单个进程的比较：每一步的样本相同，损失相同，以及快了多少；
# - 1 到 64 块 GPU 的速度和费用，算法可以拿自己的比较结果来检验；
# - 运行目录里的一个适配器，可以直接用于第 04 课。

# %%
lesson.finish(
    processes=processes,
    engine=engine,
    speedup=compared and compared.speedup,  # None 保留之前测得的值
    loss_difference=compared and compared.loss_difference,
)
