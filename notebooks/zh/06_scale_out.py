# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 06 · 用多块 GPU 训练
#
# Kaggle 给两块 T4，第 03 课只用了一块。这一课还是跑第 03 课，同一个文件，但用上机器的所有 GPU，每块一个进程。没有 GPU 时，CPU 上的两个进程用同样的办法训练自带的小模型。
#
# 学完这一课，你会得到
#
# - 由几个进程分担的一次训练，以及启动训练的命令行；
# - 和单个进程的比较：每一步的样本相同，损失相同，以及快了多少；
# - 运行目录里的一个适配器，可以直接用于第 04 课。
#
# 自带的小模型在 2 核 CPU 上约需两分钟；更大的模型，用时是第 03 课的时间除以 GPU 数，另加几分钟做比较。磁盘和第 03 课一样。

# %% [markdown]
# 先选定语言：课程打印的文字和报错都用中文。想看英文，把 `zh` 改成 `en`。

# %% tags=["language"]
import os; os.environ["NBUTILS_LANG"] = "zh"

# %% [markdown]
# 如果还没装课程，下一个单元格会自动安装。安装失败（例如提示 `Set NBUTILS_SOURCE, see above`）时，在上面加一个单元格，写明从哪里安装：`%env NBUTILS_SOURCE=git+https://github.com/<you>/<fork>@v0.1.0`（不要带密码），也可以填一个目录，或者报错里列出的某个 wheel 文件。

# %% tags=["setup"]
import importlib.util, re, subprocess, sys; from glob import glob; from os import getenv, path
if importlib.util.find_spec("nbutils") is None:
    OURS = ""
    WHEELS = glob("/kaggle/input/**/nbutils*.whl", recursive=True)
    SOURCE = getenv("NBUTILS_SOURCE") or "\n".join(WHEELS) or OURS
    assert re.match(r"[^-@?][^@?\n]*/[^:?/]*$", SOURCE), f"Set NBUTILS_SOURCE, see above: {WHEELS}"
    ALONE = ["--no-index", "--only-binary=:all:", "-f", path.dirname(SOURCE)] * (SOURCE in WHEELS)
    subprocess.run([sys.executable, "-m", "pip", "install", SOURCE, *ALONE], check=True)

# %% [markdown]
# `PROCESSES` 填 0，就给每块 GPU 启动一个进程。`TRIAL_STEPS` 是比较时跑的步数；填 0 不做比较，例如一次很长的训练第二次启动的时候。其他参数和第 03 课一样。

# %% tags=["parameters"]
PROFILE: str = "auto"
MODEL: str = ""
DATA: str = ""
RUN_NAME: str = ""
PROCESSES: int = 0
TRIAL_STEPS: int = 20
MAX_STEPS: int = 0
MAX_HOURS: float = 0.0

# %% [markdown]
# 开始这一课。

# %%
import nbutils

lesson = nbutils.start("06_scale_out", globals())

# %% [markdown]
# 开几个进程？每块 GPU 一个。没有 GPU 就开两个，每个用一个 CPU 线程。输出里 `processes` 就是进程数。

# %%
from nbutils import distributed

choice = distributed.processes_for(lesson.gpu.count if lesson.gpu else 0, PROCESSES)
processes, threads = choice.value, 0 if lesson.gpu else 1
distributed.require_shares(lesson.profile.train.batch, processes)
print(f"processes: {processes} ({choice.reason})")

# %% [markdown]
# ## 原理
#
# `torchrun` 把第 03 课启动几份，给每个进程分一个编号（叫 rank，和 LoRA 的秩无关）和一块 GPU。每个进程都加载整个 4 bit 模型，每一步的样本各算一份。然后各进程把梯度取平均，走同样的一步，适配器就始终一致。这就是分布式数据并行（DDP）。只有适配器有梯度，占模型的百分之几，要传的数据很少，所以两块 T4 之间没有高速互联也能提速。
#
# 配置里的 `train.batch` 是所有 GPU 加起来一步的样本数。两块 GPU 各算一半，所以学习率和步数都不用改。

# %%
from nbutils import files

print(f"torchrun --nproc_per_node={processes} {files.NOTEBOOKS / '03_qlora.py'} --PROFILE {lesson.resolved.source}")

# %% [markdown]
# ## 先单独跑，再一起跑
#
# 在临时目录里把同样的几步跑两遍：先用一个进程，再用全部进程。输出里 `alone` 是单独跑，`together` 是一起跑。（只有一块 GPU 时没什么可比，这里会跳过。）

# %%
import shutil

trials = lesson.scratch / "trials"
shutil.rmtree(trials, ignore_errors=True)
counts = {"alone": 1, "together": processes} if processes > 1 and TRIAL_STEPS else {}
for name, count in counts.items():
    print(f"--- {name}: {count} process{'es' if count > 1 else ''}")
    lesson.launch("03_qlora", count, threads, trials, RUN_NAME=name, MAX_STEPS=TRIAL_STEPS, DATA=DATA)

# %% [markdown]
# 两遍的步数相同，每一步的样本相同，损失相差不超过 1 %。最后几位数字会不一样，因为同样的数换了相加的顺序，舍入也就不同。如果差得更多，说明还有别的地方不同。（用了 dropout，每个进程各自抽随机数，就只有趋势一致。）`[ OK ] equal steps, equal batch, losses within 1 %` 表示步数、批大小和损失都对上了。

# %%
compared = distributed.compare(trials / "alone", trials / "together") if counts else None
if compared:
    print(compared)
    print(f"[{' OK ' if compared.same_work else 'WARN'}] equal steps, equal batch, losses within 1 %")

# %% [markdown]
# 只要算一步的时间远大于传输适配器梯度的时间，两块 GPU 的用时应该只比一半多一点。两个 CPU 核上的两个进程共用内存带宽，只跑几步说明不了什么。课程没有在两块 GPU 上实测过，上面的表就是你自己的测量结果。
#
# DDP 不能让你训练更大的模型，因为每块 GPU 都要装下整个模型。一块 GPU 装不下的模型，要把权重切开存放（FSDP、DeepSpeed ZeRO-3），见 `accelerate` 的文档。

# %% [markdown]
# ## 训练
#
# 现在用全部进程完整训练一次。checkpoint、断点续训和时限都和第 03 课一样：在一块 GPU 上开始的训练可以换到两块上继续，反过来也行。在 Kaggle 上，*Save Version > Save & Run All* 会在后台运行这个 notebook，12 小时到之前自己结束；把输出挂到下一个版本，就会继续训练。

# %%
lesson.launch("03_qlora", processes, threads, DATA=DATA, MAX_STEPS=MAX_STEPS, MAX_HOURS=MAX_HOURS)

# %% [markdown]
# 这次训练的记录，取自第 03 课写的 `facts.json`：进程数（`processes`）、批大小（`batch`）、已跑和计划的步数（`steps`、`planned_steps`）、最后的损失（`final_loss`）、每秒 token 数（`tokens_per_second`）、显存或内存的峰值（`peak_memory_gib`）。如果提示 `This run was finished before`，说明这次训练早就跑完，现在没有再训练：调大 `MAX_STEPS`，或者换一个 `RUN_NAME`。提示 `not finished`，就再运行一遍这个 notebook。

# %%
from nbutils import record

trained = record.read(lesson.run.facts)["lessons"]["03_qlora"]
for name in ("processes", "batch", "steps", "planned_steps", "final_loss", "tokens_per_second", "peak_memory_gib"):
    print(f"{name:18} {trained[name]}")
if trained["resumed_from_step"] == trained["steps"]:
    print("This run was finished before: nothing was trained now. Raise MAX_STEPS, or choose another RUN_NAME.")
print(f"adapter: {lesson.run.adapter}" if record.complete(trained) else "not finished: run this notebook again")

# %% [markdown]
# ## 练习
#
# 一次训练能不能中途换进程数？用一个进程、再多十步，不做比较，重新跑一遍这一课。下一个单元格的输出会写明参数该怎么填（`Run this lesson again with …`）。`saw steps … to …` 是这次从哪一步跑到哪一步，起点大于 0 才算通过。

# %%
first, last = trained["resumed_from_step"], trained["steps"]
good = 0 < first < last
print(f"[{' OK ' if good else 'TODO'}] saw steps {first} to {last} with {trained['processes']} processes, expected a start after 0")
if not good:
    print(f"Run this lesson again with PROCESSES = 1, MAX_STEPS = {last + 10} and TRIAL_STEPS = 0: it continues at step {last}.")

# %% [markdown]
# ## 现在你有了
#
# - 由几个进程分担的一次训练，以及启动训练的命令行；
# - 和单个进程的比较：每一步的样本相同，损失相同，以及快了多少；
# - 运行目录里的一个适配器，可以直接用于第 04 课。
# %%
lesson.finish(processes=processes, **distributed.facts(compared))
