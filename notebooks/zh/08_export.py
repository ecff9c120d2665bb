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
# 合并后的模型每个权重占 16 bit（在 CPU 上训练的是 32 bit）。多数场合用不着这么多：显存更小的服务器、笔记本电脑、手机。用更少的 bit 存权重，就是*量化*（quantization）。每种格式都会让模型变小，让预测有一点变化，并且只能在某些程序里运行。这一课做出你选的格式，测量大小和变化。
#
# 学完这一课，你会得到
#
# - 亲手把自己模型的权重舍入到 8 bit 和 4 bit，看到误差有多大；
# - 一张格式表：你的模型用每种格式有多大，在哪里能运行；
# - 你选的几种格式的模型，每个都完整，可以直接加载；
# - 每种格式的代价：预测偏了多少；
# - 如果需要，上传到模型社区，或者打包成一个文件供下载。
#
# 自带的小模型在 2 核 CPU 上约需半分钟；每多一种格式约加 20 秒，`awq` 要几分钟。第一次导出还要给导出用的库搭一个环境：几分钟，3 GB 磁盘，有 GPU 的机器 9 GB。导出的文件占多少磁盘，见下面的表。
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
# ## 亲手量化
#
# 4 bit 只能区分 16 个值，所以一个权重变成一个 -7 到 7 的整数，再乘一个系数，也就是*量化常数*（scale）：权重 ≈ 整数 · 量化常数。相邻的一些权重共用一个量化常数，合称一*组*（group）。组里绝对值最大的权重决定量化常数，所以组越小，舍入越准，但量化常数也越多。下面取你的模型的 4,096 个权重，每 32 个一组，用三行代码舍入，再和 torch 自己的舍入比较。

# %%
import torch
from safetensors import safe_open

with safe_open(min(folder.glob("*.safetensors")), "pt") as file:
    name = next(key for key in file.keys() if key.endswith("_proj.weight"))  # noqa: SIM118
    groups = file.get_tensor(name).float().flatten()[:4096].reshape(-1, 32)

def quantized(groups, bits):
    highest = 2 ** (bits - 1) - 1  # 4 bit 是 7，8 bit 是 127
    scales = groups.abs().amax(dim=1, keepdim=True) / highest  # 每组一个
    return (groups / scales).round(), scales

integers, scales = quantized(groups, bits=4)
of_torch = torch.fake_quantize_per_channel_affine(groups, scales.flatten(), torch.zeros(len(scales), dtype=torch.int), 0, -7, 7)
print(f"{name}：和 torch 的舍入最多相差 {(integers * scales - of_torch).abs().max():.1g}")

# %% [markdown]
# 看前六个权重。8 bit 几乎和原来一样；4 bit 丢掉了后面的数字，小的权重变成了 0。

# %%
from nbutils import display

table = [{"权重": f"{weight:.5f}"} for weight in groups[0, :6]]
for bits in (8, 4):
    integers, scales = quantized(groups, bits)
    for row, integer in zip(table, integers[0], strict=False):
        row |= {f"{bits} bit：整数 · 量化常数": f"{integer:.0f} · {scales[0, 0]:.5f} = {integer * scales[0, 0]:.5f}"}
display.show_table(table)

# %% [markdown]
# 全部 4,096 个权重的相对误差：舍入改变的部分的长度（范数），除以权重的长度。每少一个 bit，误差大约翻一倍。每 32 个权重共用一个 16 bit 的量化常数，相当于每个权重多半个 bit；bfloat16 不需要量化常数。第 03 课的 NF4 有 16 个取值，间隔不均匀：0 附近更密，因为多数权重在那里。

# %%
from nbutils import figures

errors = {"bfloat16": (16.0, float((groups.bfloat16() - groups).norm() / groups.norm()))}
for bits in (8, 6, 5, 4, 3):
    integers, scales = quantized(groups, bits)
    error = float((integers * scales - groups).norm() / groups.norm())
    errors[f"{bits} bit: {error:.1%}"] = (bits + 16 / 32, error)
figures.dots({"": errors}, "bit 越少，误差越大", x="每个权重的 bit 数（含分摊的量化常数）", y="相对误差")

# %% [markdown]
# ## 练习：字节数
#
# Qwen2.5-7B 最大的层有 3,584 行、18,944 列。用 `w4a16` 格式，这样一层占多少字节？每个权重 4 bit，每组 128 个权重有一个 16 bit 的量化常数。可以让 Python 算。

# %% tags=["exercise"]
from nbutils import exercises

rows, columns, group = 3584, 18944, 128  # 这一层的行数和列数；一组有多少个权重
my_bytes = None
lesson.check(exercises.export_bytes, my_bytes, rows * columns, group)

# %% [markdown]
# <details><summary>参考答案</summary>
#
# ```python
# my_bytes = rows * columns * 4 / 8 + rows * columns / group * 2
# ```
#
# 35 MB，而 16 bit 要 136 MB。其中量化常数占 3%：128 个权重分摊 16 bit，每个权重是八分之一 bit。
#
# </details>

# %% [markdown]
# ## 有哪些格式
#
# *GGUF* 把权重、分词器和对话模板装在一个文件里，llama.cpp 和基于它的程序读的就是这种文件。
#
# - *16 bit*（`bf16`、`fp16`、`gguf-f16`）：合并后的模型是 16 bit 就原样不变，是 32 bit 就减小一半。效果几乎不变。
# - *8 bit*（`fp8`、`int8`、`gguf-q8_0`）：比 16 bit 的一半大一点。差别很难察觉。
# - *4 bit*（`w4a16`、`awq`）：至少是 16 bit 的三分之一。有些回答会变；小模型比大模型效果下降得更多。
#
# `fp8`、`w4a16` 和 `awq` 给 vLLM 用，`int8` 给 CPU 上的 transformers 用。4 bit 的 GGUF 由 llama.cpp 自己做：`llama-quantize model-f16.gguf model-q4_k_m.gguf q4_k_m`。大小是估计值：除了 GGUF，其他格式都不压缩 embedding。

# %%
display.show_table(exporting.offer(folder, lesson.gpu), "格式")

# %% [markdown]
# ## 练习：选格式
#
# 你有一台装着 T4（Turing 架构）的服务器，想用 vLLM 部署模型；还想在笔记本电脑上用 llama.cpp 运行。分别导出表里的哪种格式？把两个名字填进 `my_formats`，写法如 `("bf16", "int8")`。正确的组合不止一种。

# %% tags=["exercise"]
my_formats = None
lesson.check(exercises.export_format, my_formats)

# %% [markdown]
# <details><summary>参考答案</summary>
#
# ```python
# my_formats = ("w4a16", "gguf-q8_0")
# ```
#
# T4 既没有 bfloat16，也没有 8 bit 浮点数，`bf16` 和 `fp8` 要用更新的 GPU；`fp16`、`w4a16` 和 `awq` 都能在 T4 上运行。llama.cpp 只读 GGUF 文件。
#
# </details>

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
# `oneshot` 要把整个模型装进内存，recipe 需要数据时，就用 `dataset=` 校准：`awq` 就是这样做的。*校准*（calibration）是让一些样本先过一遍模型，再根据各层算出的值来定量化常数。`fp8` 和 `w4a16` 的 recipe 不需要数据，llm-compressor 的 `model_free_ptq` 可以一个文件一个文件地做，只占一个文件的内存。想改 recipe，就在下面把 `recipes["fp8"]` 设成你自己的文本，例如在 `ignore` 里加上 `"re:.*down_proj"`，再到最后的表里看这些层的代价。

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
# 画成图：越靠左，文件越小；越靠下，离合并后的模型越近。在 `EXPORTS` 里多写几种格式，就能看出哪种最划算。

# %%
merged = {"合并后的模型": {"": (exports[0].merged_bytes / 1e6, 0.0)}}
others = {export.name: {"": (export.bytes / 1e6, export.gap.mean)} for export in compared if export.gap}
figures.dots(merged | others, "大小和代价", x="MB", y="KL（nats/token，至少）")

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
# ## 思考题
#
# `fp8` 的一个权重占 8 bit，是 16 bit 的一半。可是 Qwen2.5-0.5B 导出后还有原来的 64%，Qwen2.5-7B 还有 57%。为什么比一半多，而且小模型多得更多？把 `"a"`、`"b"` 或 `"c"` 填进 `my_choice`。
#
# - **a**：因为每个权重还要有一个量化常数
# - **b**：因为校准用的样本也存了进去
# - **c**：因为 embedding 和输出层没有量化

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
# - 亲手把自己模型的权重舍入到 8 bit 和 4 bit，看到误差有多大；
# - 一张格式表：你的模型用每种格式有多大，在哪里能运行；
# - 你选的几种格式的模型，每个都完整，可以直接加载；
# - 每种格式的代价：预测偏了多少；
# - 如果需要，上传到模型社区，或者打包成一个文件供下载。

# %%
lesson.finish(exports=[export.facts for export in compared], pushed=pushed)
