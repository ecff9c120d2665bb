# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 08 · 导出：更小的文件，给别的程序用
#
# 合并后的模型每个权重占 16 bit（在 CPU 上训练的是 32 bit）。多数场合用不着这么多：显存更小的服务器、笔记本电脑、手机。每种格式都会让模型变小，让预测有一点变化，并且只能在某些程序里运行。这一课做出你选的格式，测量大小和变化。
#
# 学完这一课，你会得到
#
# - 一张格式表：你的模型用每种格式有多大，在哪里能运行；
# - 你选的几种格式的模型，每个都完整，可以直接加载；
# - 每种格式的代价：预测偏了多少；
# - 如果需要，上传到模型社区，或者打包成一个文件供下载。
#
# 自带的小模型在 2 核 CPU 上约需半分钟；每多一种格式约加 20 秒，`awq` 要几分钟。第一次导出还要给导出用的库搭一个环境：几分钟，3 GB 磁盘，有 GPU 的机器 9 GB。导出的文件占多少磁盘，见下面的表。

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
# `EXPORTS` 填格式名，例如 `"fp8, gguf-q8_0"`；留空就做 `gguf-q8_0`，这种格式任何机器都能做、都能运行。`PUSH_TO` 是上传的地方，`"hub:owner/name"`（或者 `"modelscope:owner/name"`），填 `"file"` 就打包成一个文件供下载。

# %% tags=["parameters"]
PROFILE: str = "auto"
MODEL: str = ""
RUN_NAME: str = ""
EXPORTS: str = ""
PUSH_TO: str = ""

# %% [markdown]
# 先检查名字，免得一个拼写错误白费一小时。如果这个运行目录里还没跑过第 04 课，现在会先跑。

# %%
import nbutils
from nbutils import exporting, sharing

lesson = nbutils.start("08_export", globals())
formats = exporting.parse_formats(EXPORTS or "gguf-q8_0")
if PUSH_TO not in ("", "file"):
    sharing.parse_target(PUSH_TO)
lesson.require("04_merge")
folder = lesson.run.merged

# %% [markdown]
# ## 有哪些格式
#
# - *16 bit*（`bf16`、`fp16`、`gguf-f16`）：合并后的模型是 16 bit 就原样不变，是 32 bit 就减小一半。效果几乎不变。
# - *8 bit*（`fp8`、`int8`、`gguf-q8_0`）：比 16 bit 的一半大一点。差别很难察觉。
# - *4 bit*（`w4a16`、`awq`）：至少是 16 bit 的三分之一。有些回答会变；小模型比大模型效果下降得更多。
#
# `fp8`、`w4a16` 和 `awq` 给 vLLM 用，`int8` 给 CPU 上的 transformers 用，GGUF 文件给 llama.cpp 和基于它的程序用。4 bit 的 GGUF 由 llama.cpp 自己做：`llama-quantize model-f16.gguf model-q4_k_m.gguf q4_k_m`。大小是估计值：除了 GGUF，其他格式都不压缩 embedding。

# %%
from nbutils import display

display.show_table(exporting.offer(folder, lesson.gpu), "格式")

# %% [markdown]
# ## 猜一猜
#
# 第一个导出有多大？猜一个比例：导出的大小除以合并后的模型的大小。上面的表和下面打印的大小可以参考。把你猜的数填进 `my_share`，最后的练习会对答案。

# %%
my_share = None
megabytes = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6
print(f"第一个导出：{formats[0]}；合并后的模型：{megabytes:,.1f} MB")

# %% [markdown]
# ## recipe
#
# llm-compressor 靠 recipe 知道对哪些层做什么。recipe 可以是 YAML 文件，也可以用 Python 写。`fp8` 的 recipe 写成 Python 是
#
# ```python
# from llmcompressor import oneshot
# from llmcompressor.modifiers.quantization import QuantizationModifier
#
# recipe = QuantizationModifier(targets=["Linear"], scheme="FP8_DYNAMIC", ignore=["re:.*lm_head", "re:.*embed_tokens"])
# oneshot(model=model, recipe=recipe)
# ```
#
# `oneshot` 要把整个模型装进内存，recipe 需要数据时，就用 `dataset=` 校准：`awq` 就是这样做的。`fp8` 和 `w4a16` 的 recipe 不需要数据，llm-compressor 的 `model_free_ptq` 可以一个文件一个文件地做，只占一个文件的内存。想改 recipe，就在下面把 `recipes["fp8"]` 设成你自己的文本，例如在 `ignore` 里加上 `"re:.*down_proj"`，再到最后的表里看这些层的代价。

# %%
recipes = {name: exporting.recipe_for(folder, name) for name in ("fp8", "w4a16", "awq")}
print(recipes["fp8"])

# %% [markdown]
# ## 导出
#
# 每种格式都用大家信得过的库来做：给 vLLM 的用 llm-compressor，给 CPU 的用 torchao，GGUF 用 llama.cpp 自己的转换工具。这些库需要的版本和训练不同，所以装在独立的环境里。同一个模型导出过的格式会直接沿用。`awq` 还会用训练样本校准，这样，对这些样本要紧的权重误差最小。

# %%
from nbutils import data

train_rows, _ = data.load(lesson.run.data)
exports = [exporting.export(folder, name, calibration=train_rows, recipe=recipes.get(name, "")) for name in formats]

# %% [markdown]
# 导出的文件在哪里，用哪一行命令加载：vLLM 用 `vllm serve`，llama.cpp 用 `llama-cli`。vLLM 的格式也可以用第 05 课部署，把第 05 课的参数 `FOLDER` 设成导出的目录就行。

# %%
print(*exports, sep="\n")

# %% [markdown]
# ## 每种格式的效果下降多少
#
# 把每个导出的模型都加载一遍，读第 04 课做证明用的那些文本。*KL* 是导出的模型和合并后的模型在预测上的距离，单位是 nats/token：0.001 以下没人看得出来，0.15 以上就能看出来。写着“至少”，是因为第 04 课在每个位置只存了概率最高的一些 token。模型太大、这台机器放不下时，不做比较。*下一个 token 相同*是概率最高的 token 没变的位置个数。

# %%
compared = exporting.check_exports(exports, lesson.run.path)
display.show_table([export.row for export in compared], "大小和代价")

# %% [markdown]
# ## 分享
#
# 不设 `PUSH_TO`，什么都不会离开这台机器。上传或打包的是 `EXPORTS` 里的第一种格式；`EXPORTS` 留空，就是合并后的模型。上传到 Hugging Face Hub 只要调用 `HfApi` 两次：`create_repo` 在没有仓库时建一个私有仓库，`upload_folder` 只传仓库里还没有的内容，所以上传中断后，再运行一次这个单元格就能接着传。
#
# `sharing.prepared` 处理容易忘的事：访问令牌（token）从平台的 secret 里取，任何报错都不会显示它；写一张注明基座模型的模型卡；去掉 JSON 文件里你机器上的目录。仓库已经是公开的，就拒绝上传。ModelScope 和打包成一个文件由 `sharing.push` 来做。

# %%
from huggingface_hub import HfApi

chosen = exports[0].folder if EXPORTS else folder
pushed = ""
if PUSH_TO.startswith("hub:"):
    with sharing.prepared(chosen, PUSH_TO) as upload:
        api = HfApi(endpoint="https://huggingface.co", token=upload.token)  # 不经过镜像站，因为要带上 token
        api.create_repo(upload.name, private=True, exist_ok=True)
        upload.require_private(api.model_info(upload.name).private)
        api.upload_folder(folder_path=upload.folder, repo_id=upload.name)
    pushed = f"{upload.page} ({upload.gib:.2f} GiB)"
elif PUSH_TO:
    pushed = sharing.push(chosen, PUSH_TO)
print(pushed or f"没有上传，模型在：{chosen}")

# %% [markdown]
# ## 练习
#
# 你猜对了吗？用格式的 bit 数除以合并后的模型的 bit 数。embedding 和输出层常常保留 16 bit，在小模型里占全部权重的一大部分，所以小模型压缩得比大模型少。把 `EXPORTS` 设成 `"fp8, gguf-q8_0"`，再猜一次，再运行一遍这一课。误差在 0.1 以内算对。

# %%
share = exports[0].ratio
if my_share is None:
    print("[待做] 把你猜的数填进上面的 `my_share`，再依次运行那个单元格和这一个")
else:
    print(f"[{' OK ' if abs(my_share - share) <= 0.1 else '待做'}] 你猜的是 {my_share}，实际是 {share:.2f}，误差在 0.1 以内算对")

# %% [markdown]
# ## 现在你有了
#
# - 一张格式表：你的模型用每种格式有多大，在哪里能运行；
# - 你选的几种格式的模型，每个都完整，可以直接加载；
# - 每种格式的代价：预测偏了多少；
# - 如果需要，上传到模型社区，或者打包成一个文件供下载。
# %%
lesson.finish(exports=[export.facts for export in compared], pushed=pushed)
