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
# Kaggle 给两块 T4，第 03 课只用了一块。这一课还是跑第 03 课，同一个文件，但用上机器的所有 GPU，每块一个进程。各进程分担每一步的样本；一块 GPU 放不下模型时，模型也由各进程分担。没有 GPU 时，CPU 上的两个进程用同样的办法训练自带的小模型。
#
# 学完这一课，你会得到
#
# - 由几个进程分担的一次训练，用适合你的模型和显卡的并行策略，以及启动训练的命令行；
# - 和单个进程的比较：每一步的样本相同，损失相同，以及快了多少；
# - 1 到 16 张卡的显存、1 到 64 张卡的速度和费用，算式可以拿自己的比较结果来检验；
# - 运行目录里的一个适配器，可以直接用于第 04 课。
#
# 自带的小模型在 2 核 CPU 上约需三分钟；更大的模型，用时是第 03 课的时间除以 GPU 数，另加几分钟做比较。磁盘和第 03 课一样。

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
# `PROCESSES` 填 0，就给每块 GPU 启动一个进程。`ENGINE` 填下面表里的并行策略，填 `"auto"` 就按模型大小自动选。`TRIAL_STEPS` 是比较时跑的步数；填 0 不做比较，例如一次很长的训练第二次启动的时候。其他参数和第 03 课一样。第 03 课已经训练完的运行目录，这里没有什么可训练的了：把 `MAX_STEPS` 调大，或者换一个 `RUN_NAME`。

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
# 开始这一课。

# %%
import nbutils

lesson = nbutils.start("06_scale_out", globals())

# %% [markdown]
# 开几个进程？每块 GPU 一个。没有 GPU 就开两个，每个用一个 CPU 线程。

# %%
from nbutils import distributed

choice = distributed.processes_for(lesson.gpu.count if lesson.gpu else 0, PROCESSES)
processes, threads = choice.value, 0 if lesson.gpu else 1
print(f"进程数：{processes}（{choice.reason}）")

# %% [markdown]
# ## 用哪种并行策略
#
# 每个进程各算一部分样本，再用 all-reduce 求梯度平均，做同样的更新，适配器就始终一致。配置里的 `conversations_per_step` 是所有 GPU 加起来一步的对话数：两块 GPU 各算一半，所以学习率和步数都不用改。并行策略（参数 `ENGINE`）之间的区别是：每个进程放什么，要传什么。
#
# | 并行策略 | 每个进程放什么 | 一步传什么 | 适合 |
# |---|---|---|---|
# | `ddp` | 整个模型 | 适配器的梯度 | 一块 GPU 放得下的模型，速度最快 |
# | `fsdp_qlora` | 4 bit 模型和优化器的一份 | 每个 micro-step 把模型传两遍 | 4 bit 也放不进一块 GPU 的模型 |
# | `fsdp_lora` | 同上，但模型是 16 bit | 同上，数据量是三到四倍 | 不量化的 LoRA（`method: lora`），单块 GPU 放不下 |
# | `zero2` | 整个模型，梯度和优化器的一份 | 每个 micro-step 传适配器的梯度 | 熟悉 DeepSpeed 的人 |
# | `zero2_offload` | 整个模型，优化器在内存里 | 同上 | 秩特别大的适配器 |
# | `zero3` | 同 `fsdp_lora` | 同 `fsdp_lora`，另外每个 micro-step 还传梯度 | 熟悉 DeepSpeed、用 `method: lora` 的人；比 FSDP 慢 |
#
# ZeRO-2 分摊的是梯度和优化器，而 LoRA 的这两样本来就小。按课程的预估，显存反而用得更多：4 bit 的 7B 模型放在两块 GPU 上，DDP 每块 6.4 GiB，ZeRO-2 是 7.4 GiB，offload 是 7.1 GiB（设置和后面的表相同），因为 DeepSpeed 自己要一块缓冲区，这里又不能用 8 bit 优化器。三种 `zero` 策略要先运行 `pip install deepspeed`。要用 16 bit，就设 `SET = "method=lora, quantization.load_in_4bit=false"`。
#
# 所以：一块 GPU 放得下就用 DDP，放不下就用 FSDP。`auto` 也是这样选的。

# %%
from nbutils import plan

choice = plan.engine_for(lesson.resolved, processes, ENGINE)
engine = choice.value
print(f"并行策略：{engine}（{choice.reason}）")

# %% [markdown]
# 用哪种并行策略，写在 `accelerate launch` 读的 YAML 文件里；`configs/accelerate` 里每种策略一个文件。（自己的项目可以运行 `accelerate config`，回答几个问题就生成这样的文件。）各个键的含义：
#
# | 键 | 含义 |
# |---|---|
# | `distributed_type` | 并行策略：`MULTI_GPU` 就是 DDP，另外两种是 `FSDP` 和 `DEEPSPEED` |
# | `num_processes` | 所有机器加起来的进程数；文件里不写，由命令行给出 |
# | `mixed_precision` | `no`：精度由第 03 课在 `SFTConfig` 里用 `bf16` 或 `fp16` 指定 |
# | `fsdp_version` | 2 表示每个权重各自切分，所以 4 bit 的权重和要训练的权重可以放在一起 |
# | `fsdp_auto_wrap_policy` | 一次收齐多少：`TRANSFORMER_BASED_WRAP` 是一个 decoder 层 |
# | `fsdp_reshard_after_forward` | `true`：一层前向算完就放掉，反向时再收一次；`false`：一直留着，更快，但要占整个模型的显存 |
# | `fsdp_offload_params` | `true`：分片放在内存里，算到哪层再搬到 GPU，很慢 |
# | `fsdp_cpu_ram_efficient_loading` | `true`：每台机器只有一个进程读模型，再把分片发给其他进程；4 bit 时用不了 |
# | `fsdp_state_dict_type` | `FULL_STATE_DICT` 存成一个文件，换多少个进程都能接着训练；`SHARDED_STATE_DICT` 每个进程存一个 |
# | `fsdp_activation_checkpointing` | `false`，因为 `SFTConfig` 的 `gradient_checkpointing` 已经管了 |
# | `zero_stage` | 1 切分优化器，2 再加梯度，3 再加权重 |
# | `offload_optimizer_device`、`offload_param_device` | `cpu`：优化器或权重放在内存里 |
# | `zero3_init_flag` | `true`：每个进程只加载自己那一份权重 |
# | `gradient_accumulation_steps`、`gradient_clipping` | `auto`：由 `SFTConfig` 决定 |
#
# 下一个单元格像启动器那样读取你选的策略的文件，再各读一个 FSDP 和 DeepSpeed 的文件作比较。

# %%
from accelerate.commands.config.config_args import load_config_from_file

file = distributed.config_file(engine)
for name in dict.fromkeys([engine, "fsdp_qlora", "zero2_offload"]):
    config = load_config_from_file(str(file.with_stem(name)))
    print(f"{name}: distributed_type {config.distributed_type.value}, mixed_precision {config.mixed_precision}")
    for key, value in (config.fsdp_config | config.deepspeed_config).items():
        print(f"  {key:30} {value}")

# %% [markdown]
# 下面这行命令就是这个 notebook 要运行的，在终端里也能用：`accelerate launch` 加上这个文件。每个进程分到一个编号（叫 rank，和 LoRA 的秩无关）和一块 GPU。只有一个进程又用 DDP 时，就是普通的 Python 命令。配置、模型和样本都沿用这次训练的；需要的话可以加上 `--MAX_STEPS` 和 `--MAX_HOURS`。按 Ctrl-C 会先存 checkpoint，前面那个环境变量给它十分钟；之后那段 traceback 是启动器自己打印的。端口 0 表示随便哪个空闲端口。（`accelerate launch` 就是 `python -m accelerate.commands.launch`。用 DDP 时，`torchrun --nproc_per_node=2 --master-port=29500` 的效果一样，不需要文件。）

# %%
import shlex
import sys
from nbutils import files

alone = [sys.executable, str(files.NOTEBOOKS / "03_qlora.py")]
together = [
    sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file),
    "--num_processes", str(processes), "--main_process_port", "0", str(files.NOTEBOOKS / "03_qlora.py"),
]
if processes == 1 and engine == "ddp":
    together = alone
print("TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600", shlex.join([*together, *lesson.arguments("03_qlora", DATA=DATA)]))

# %% [markdown]
# 用多台机器也还是跑第 03 课：每台机器上启动同样的命令，加上 `torchrun --nnodes=2` 或 `accelerate launch --num_machines 2`，再给一个会合的地址。完整的命令，SLURM、Kubernetes、SkyPilot 和 Ray 的作业文件，以及机器之间要共享什么，见 [docs/zh/clusters.md](../../docs/zh/clusters.md)。先把一台机器的 GPU 都用上：机器之间的数据全要走网络。

# %% [markdown]
# ## 几张卡放得下多大的模型
#
# 表里是每张卡要用的显存（GiB），括号里是最小要多大的卡（另留 8 % 和 0.5 GiB 余量）。`2 x 8` 指两台机器、每台八张卡。`ddp` 和 `fsdp_qlora` 的模型是 4 bit，`fsdp_lora` 是 16 bit；micro-batch 是一条 2,048 个 token 的样本，打开梯度检查点。这些都是预估。想看其他并行策略，就把名字写进单元格里（DeepSpeed 的预估没有那么准）。机器还要有足够的内存：用 `fsdp_qlora` 时每个进程都要先在内存里加载一份 4 bit 模型，所以八张卡训练 72B，启动时要 307 GiB 内存。

# %%
from nbutils import display
from nbutils.models import find_shape
from nbutils.plan import gpus, memory

cards = {141: "H200", 80: "A100-80GB", 48: "L40S", 24: "RTX 4090", 16: "T4"}
limits = {size: memory.limit_gib(gpus.find(name)) for size, name in cards.items()}

def recipe_for(engine, cards):
    method = "lora" if engine in ("fsdp_lora", "zero3") else "qlora"
    return memory.Recipe(method=method, engine=engine, cards=cards, gradient_accumulation_steps=max(1, 8 // cards))

table = []
for model in ("Qwen2.5-14B", "Qwen2.5-32B", "Qwen2.5-72B"):
    for machines, each in [(1, 1), (1, 2), (1, 4), (1, 8), (2, 8)]:
        row = {"模型": model, "卡数": f"{machines} x {each}" if machines > 1 else each}
        for name in ("ddp", "fsdp_qlora", "fsdp_lora"):
            gib = memory.peak_gib(find_shape(model), recipe_for(name, machines * each))
            row[name] = f"{gib:.1f} (没有)"
            for size, limit in limits.items():
                if gib <= limit:
                    row[name] = f"{gib:.1f} ({size} GB)"
        table.append(row)
print(display.aligned(table))

# %% [markdown]
# 这些数怎么来的？以四张 24 GB 的卡训练 72B 为例。写着 `/ 4` 的部分由四张卡平分。4 bit 权重的量化常数不分；计算某一层之前，每张卡要先用 all-gather 收齐这一层的权重。激活值、logits 和工作区也不分：每张卡计算自己的样本。所以卡数翻倍，每张卡的显存也不会减半。

# %%
from nbutils.language import tr

shape, recipe = find_shape("Qwen2.5-72B"), recipe_for("fsdp_qlora", 4)
for part, size in memory.parts(shape, recipe).items():
    print(f"{size:6.2f} GiB  {tr(part)}")
    for term in memory.terms(shape, recipe).get(part, []):
        print(f"{'':12} {tr(term.name)} {term.size / 2**30:.2f} / {term.shared_by}")

# %% [markdown]
# ## 先一起跑，再单独跑
#
# 在临时目录里把同样的几步跑两遍：先用全部进程和上面选的策略（目录 `together`），再用一个进程（目录 `alone`）。（只有一块 GPU 时没什么可比；一块 GPU 放不下的模型没法单独跑。这两种情况都会跳过。）

# %%
import shutil

trials = lesson.scratch / "trials"
shutil.rmtree(trials, ignore_errors=True)
possible = processes > 1 and TRIAL_STEPS and plan.fits_alone(lesson.resolved)
for name, command, count in [("together", together, processes), ("alone", alone, 1)] if possible else []:
    print(f"--- {name}：{count} 个进程{'一起' if count > 1 else ''} {engine if count > 1 else ''}")
    words = lesson.arguments("03_qlora", RUN_NAME=name, MAX_STEPS=TRIAL_STEPS, DATA=DATA)
    lesson.launch([*command, *words], count, threads, trials)

# %% [markdown]
# 两遍的步数相同，每一步的样本相同，损失相差不超过 1 %。最后几位数字会不一样，因为同样的数换了相加的顺序，舍入也就不同。如果差得更多，说明还有别的地方不同。（用了 dropout，每个进程各自抽随机数，就只有趋势一致。）在 CPU 上，两个进程共用同样的核，别指望快一倍。用 3、5、6、7 个进程时，自动选的批大小会向上取整：在 `SET` 里写明一个。

# %%
from nbutils import compare

compared = compare.speed_up(trials / "alone", trials / "together") if possible else None
if compared:
    print(f"每秒 token 数：单个进程 {compared.alone['tokens_per_second']:,.0f}，一起 {compared.together['tokens_per_second']:,.0f}，"
          f"是 {compared.speedup:.2f} 倍；损失最多相差 {compared.loss_difference:.1e}（相对值）")
    print(f"[{' OK ' if compared.same_work else 'WARN'}] 步数相同，批大小相同，损失相差不超过 1 %")

# %% [markdown]
# ## 算一算
#
# 一步的时间是计算加通信。计算按单卡速度算：用上面比较时测到的速度；没有 GPU 时，用租来的卡训练 9B 的预估速度。

# %%
forecast = plan.example(lesson.resolved, rows=10_000, mean_length=300)
shape, recipe = forecast.shape, forecast.recipe
rate = compared.alone["tokens_per_second"] if compared and lesson.gpu else forecast.tokens_per_second
rate = rate or 1000.0  # 不知道这块 GPU 的速度时
print(f"{shape.name}, {recipe.method}, {forecast.gpu.name}：一张卡每秒训练 {rate:,.0f} 个 token")

# %% [markdown]
# 通信时间是字节数除以带宽。N 张卡连成一个环，每张卡要传
#
# - DDP：适配器的梯度，2 (N - 1) / N x 4 字节 x 适配器参数量，每步一次；
# - FSDP：模型，每个 micro-step 传 2 (N - 1) / N x 模型的字节数，另加适配器的梯度。

# %%
bits = 4 if recipe.method == "qlora" else 16
model_bytes = shape.linear_params * bits / 8 + (shape.params - shape.linear_params) * 2
gradient_bytes = shape.adapter_params(recipe.r) * 4

def sent_bytes(strategy, cards, micro_steps=1):
    others = (cards - 1) / cards
    if strategy == "ddp":
        return 2 * others * gradient_bytes
    return others * (2 * model_bytes * micro_steps + gradient_bytes)

for name in ("ddp", f"fsdp_{recipe.method}"):
    print(f"{name}：8 张卡，每张传 {sent_bytes(name, 8) / 1e9:.2f} GB")

# %% [markdown]
# 表里每张卡每步 8 条样本。8 张卡以内在一台机器里，走 PCIe，12 GB/s；再多就分到几台机器，机器之间是 25 Gbit/s 以太网（2.5 GB/s）。两个带宽都是假设值。每张卡分几个 micro-batch 来算，再短也不会短于 Python 启动各层 kernel 的时间。这里按传输时不计算来算，实际上会有一部分通信藏在计算后面。

# %%
import math
from nbutils.plan import speed
from nbutils.plan.forecast import recipe_of

micro_batch = recipe.per_device_train_batch_size
row_tokens = recipe.length * (speed.PACKED if recipe.packing else 1)
shortest = min(speed.launch_seconds(shape, recipe), micro_batch * row_tokens / rate)  # 一个 micro-step 至少要多久

def seconds(strategy, cards, rows, gbps):
    micro_steps = math.ceil(rows / min(rows, micro_batch))
    computing = max(rows * row_tokens / rate, micro_steps * shortest)
    return computing, sent_bytes(strategy, cards, micro_steps) / gbps / 1e9

for name in ("ddp", f"fsdp_{recipe.method}"):
    table = []
    for cards in (1, 2, 4, 8, 16, 32, 64):
        computing, sending = seconds(name, cards, rows=8, gbps=12 if cards <= 8 else 2.5)
        tokens = cards * 8 * row_tokens / (computing + sending)
        price = forecast.gpu.price.times(cards * 1e6 / tokens / 3600)
        table.append({"卡数": cards, "计算": f"{computing:.2f} s", "通信": f"{sending:.2f} s", "tokens/s": f"{tokens:,.0f}",
                      "效率": f"{tokens / cards / rate:.0%}", "每百万 token": str(price)})
    print(f"\n{name}\n{display.aligned(table)}")

# %% [markdown]
# 卡越多，训练完得越早，但每个 token 不会更便宜。适配器很小，所以 DDP 即使走慢网络，每张卡的速度也几乎不打折。FSDP 要传整个模型：按 RTX 4090 训练 9B 的预估，8 张卡走 PCIe 剩不到一半的速度，走以太网只剩八分之一，两台机器 16 张卡反而不如一台机器 8 张卡快。
#
# 用到多少张卡时，通信和计算的时间一样长？“每卡 8 条”时，卡越多，一步的样本越多；“共 8 条”时，卡越多，每张卡要算的越少，但再少也要花启动 kernel 的时间。短横线表示直到 4,096 张卡都不会。`nvlink4` 和 `pcie4` 是机器内部的连接，`ib400`（InfiniBand）和 `25gbe`（以太网）是机器之间的。

# %%
def cards_until_sending_wins(strategy, gbps, shared):
    for cards in range(2, 4097):
        computing, sending = seconds(strategy, cards, 8 / cards if shared else 8, gbps)
        if sending >= computing:
            return cards
    return "–"

table = []
for link, gbps in {"nvlink4": 360, "ib400": 40, "pcie4": 12, "25gbe": 2.5}.items():
    row = {"连接": link, "GB/s": gbps}
    for name in ("ddp", f"fsdp_{recipe.method}"):
        row |= {f"{name}，每卡 8 条": cards_until_sending_wins(name, gbps, shared=False),
                f"{name}，共 8 条": cards_until_sending_wins(name, gbps, shared=True)}
    table.append(row)
print(display.aligned(table))

# %% [markdown]
# 算得准不准？拿自己的比较来检验：N 个进程各算单个进程的 N 分之一，再走 PCIe 通信。在两块 GPU 上，`TRIAL_STEPS` 够大时两个数应该接近：头几步会慢一些，验证的时间也算在里面。如果实测一直长得多，可能是卡之间到不了 12 GB/s。在 CPU 上对不上很正常：两个进程共用 CPU 核和内存带宽，而且模型这么小，一步里大部分时间不在计算。

# %%
if compared:
    single, several = compared.alone, compared.together
    computing = single["train_seconds"] / single["steps"] * several["batch"] / several["processes"] / single["batch"]
    sending = speed.sent_bytes(find_shape(lesson.model), recipe_of(several)) / 12e9
    print(f"{several['processes']} 个进程各算 {computing:.3f} 秒，按 12 GB/s 通信 {sending:.3f} 秒："
          f"预测 {computing + sending:.3f} 秒，实测 {several['train_seconds'] / several['steps']:.3f} 秒")

# %% [markdown]
# 目前测过的是：两个进程放在*一块* H200 上，通过本机的回环设备通信，1.8 GB/s（`benchmarks/scale_out.py`，结果在 `benchmarks/results`）。模型是 Qwen2.5-7B 的结构、4 bit，一步 2 条 8,192 个 token 的样本：
#
# | | 一步多少秒 |
# |---|---|
# | 一个普通进程 | 0.97 |
# | `torchrun`，一个进程 | 0.99 |
# | FSDP，一个进程 | 0.99 |
# | ZeRO-2，一个进程 | 1.04 |
# | DDP，两个进程 | 1.20；按算式是 0.97 + 0.09 |
# | FSDP，两个进程 | 3.0；按算式是 0.97 + 3.0，可见有一部分通信藏在了计算后面 |
#
# 两个进程都在同一块卡上计算，所以计算的时间和一个进程时一样，或者更长。显存与预估相差不到 3.3 %。用 16 bit 时，FSDP 同样是 0.97 秒，ZeRO-3 却要 2 秒左右：它用不了本课程融合的 LoRA 层。
#
# 没有测过的是：两块真正的 GPU，以及用真实网络连接的两台机器。那里以你自己的表为准。损失和适配器与单个进程一致，这一点在 CPU 上用 float32 对每种并行策略都试过：记录下来的损失相差都不超过 1e-6（优化器放到内存时 1.2e-5）。在 H200 上用 bfloat16 和两个进程：DDP 完全相同，FSDP 和 ZeRO-2 相差 0.04 %。

# %% [markdown]
# ## 训练
#
# 现在用全部进程完整训练一次。checkpoint、断点续训和时限都和第 03 课一样：在一块 GPU 上开始的训练可以换到两块上继续，反过来也行，换并行策略也行。在 Kaggle 上，*Save Version > Save & Run All* 会在后台运行这个 notebook，12 小时到之前自己结束；把输出挂到下一个版本，就会继续训练。在租来的机器上，用 `papermill` 运行，或者用上面那行命令。

# %%
from nbutils import record

earlier = record.read_facts(lesson.run.facts).get("lessons", {}).get("03_qlora", {})
words = lesson.arguments("03_qlora", DATA=DATA, MAX_STEPS=MAX_STEPS, MAX_HOURS=MAX_HOURS)
lesson.launch([*together, *words], processes, threads)

# %% [markdown]
# 这次训练的记录，取自第 03 课写的 `facts.json`：进程数（`processes`）、并行策略（`engine`，单个普通进程时是空的）、批大小（`batch`）、已跑和计划的步数（`steps`、`planned_steps`）、最后的损失（`final_loss`）、每秒 token 数（`tokens_per_second`）、一块 GPU 的显存峰值，没有 GPU 时是内存峰值（`peak_memory_gib`）。

# %%
trained = record.read_facts(lesson.run.facts)["lessons"]["03_qlora"]
for name in ("processes", "engine", "batch", "steps", "planned_steps", "final_loss", "tokens_per_second", "peak_memory_gib"):
    print(f"{name:18} {trained[name]}")
if trained["resumed_from_step"] == trained["steps"]:
    print("这次训练早就跑完了，现在没有再训练：调大 MAX_STEPS，或者换一个 RUN_NAME。")
print(f"适配器：{lesson.run.adapter}" if record.complete(trained) else "还没训练完：再运行一遍这个 notebook")

# %% [markdown]
# ## 练习
#
# 一次训练能不能中途换进程数，或者换并行策略？重新跑一遍这一课，再多十步，不做比较，并设 `PROCESSES = 1`，或者 `ENGINE = "fsdp_qlora"`（16 bit 用 `"fsdp_lora"`）。下一个单元格会写明步数该怎么填。（要占满所有 GPU 的模型就不用换了。）

# %%
first, last = trained["resumed_from_step"], trained["steps"]
before, now = ((one.get("processes"), one.get("engine")) for one in (earlier, trained))
good = 0 < first < last and before != now
print(f"[{' OK ' if good else '待做'}] 第 {first} 步到第 {last} 步，原来是 {before}，现在是 {now}；要在第 0 步之后换一次")
if not good:
    print(f"再运行一遍这一课，不要再用 {now}：MAX_STEPS = {last + 10}，TRIAL_STEPS = 0。训练会从第 {last} 步继续。")

# %% [markdown]
# ## 现在你有了
#
# - 由几个进程分担的一次训练，用适合你的模型和显卡的并行策略，以及启动训练的命令行；
# - 和单个进程的比较：每一步的样本相同，损失相同，以及快了多少；
# - 1 到 16 张卡的显存、1 到 64 张卡的速度和费用，算式可以拿自己的比较结果来检验；
# - 运行目录里的一个适配器，可以直接用于第 04 课。

# %%
lesson.finish(
    processes=processes,
    engine=engine,
    speedup=compared and compared.speedup,  # None 保留之前测得的值
    loss_difference=compared and compared.loss_difference,
)
