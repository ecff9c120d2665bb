# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 05 · 部署为服务
#
# 别的程序能调用，模型才派得上用场。*服务*（server）是一个等待请求、作出回答的程序。vLLM 是大语言模型的推理服务：能把很多请求放在一起计算，*API*（程序可以发什么、会收到什么的约定）和 OpenAI 兼容，大多数程序直接就能连。训练和推理用的不是同一个程序，所以这一课还会检查回答是否一致。vLLM 跑不了的地方改用 `transformers serve`，到时会说明。
#
# 学完这一课，你会得到
#
# - 你的模型，部署成兼容 OpenAI 的 API，跑在独立的服务进程里；
# - 三种请求：从 Python 发，从终端发，以及回答逐字返回的流式请求；
# - 看清服务内部：手写解码、温度、KV cache，还有一张 32 个请求同时计算的图；
# - 一份证明：服务的回答和第 04 课一致；还能和你的模型聊天。
#
# 自带的小模型在 2 核 CPU 上约需一分钟。第一次运行要搭建推理环境，多花几分钟和 3 GB 磁盘（有 GPU 时 12 GB）。
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
# `FOLDER` 是要部署的模型目录，用来代替第 04 课合并后的模型，例如一个导出的模型。*端口*（port）是一台机器上的程序用来找到某个服务的编号；`PORT` 填 0，就用平台对外开放的端口（AutoDL），没有这样的端口就随便用一个空闲的。`QUESTIONS` 填 0，问的验证集问题就和第 04 课一样多。`KEEP_RUNNING` 让服务在结束后继续运行，并给出聊天框；关掉这个 notebook，服务就停止。`STOP_OTHERS` 停掉同一次训练里其他 notebook 启动的服务。

# %% tags=["parameters"]
PROFILE: str = "auto"
MODEL: str = ""
RUN_NAME: str = ""
ENGINE: str = "auto"
FOLDER: str = ""
PORT: int = 0
QUESTIONS: int = 0
KEEP_RUNNING: bool = False
STOP_OTHERS: bool = False

# %% [markdown]
# 如果这次训练还没有合并后的模型，现在会先跑第 04 课。这一课上次运行留下的服务会停掉，因为新服务要用旧服务占着的显存或内存。

# %%
import nbutils
from nbutils import serving

lesson = nbutils.start("05_serve", globals())
lesson.require("02_data_prep" if FOLDER else "04_merge")
serving.stop_leftover_servers(lesson.run.path, STOP_OTHERS)

# %% [markdown]
# ## 给 vLLM 单独的环境
#
# vLLM 要用自己的 PyTorch 版本，装在这里会把训练用的那个替换掉。所以给 vLLM 单独建一个*虚拟环境*：一个目录，里面有自己的 Python 和软件包，只建一次。服务是一个独立的*进程*（运行中的程序，有自己的内存），这个 notebook 只和服务通信。vLLM 需要 T4 或更新的 GPU，也可以用 CPU。vLLM 跑不了的，用 `transformers serve`：更老的 GPU，还有 CPU 上的混合架构模型（Qwen3.5），vLLM 在那里只能用 bfloat16 计算。

# %%
from pathlib import Path

served_folder = Path(FOLDER or lesson.run.merged).expanduser()
environment = serving.ensure_environment(ENGINE, served_folder)
print(f"{environment.engine}，用的 Python 是 {environment.python}")
print(environment.reason or "由 ENGINE 指定")

# %% [markdown]
# ## 命令行
#
# 配置的 `vllm` 一节写的就是 `vllm serve` 的启动参数，连字符换成下划线：
#
# - `max_model_len`：提示词加回答最多多少 token；
# - `max_num_seqs`：一起计算的请求数，多出来的排队；
# - `gpu_memory_utilization`：服务占用显存的比例。
#
# 别的启动参数也可以加在这里，例如在第 01 课或第 03 课设 `SET = "vllm.enable_prefix_caching=false"`。`model.flags` 是这台机器和这个模型需要的参数，例如第 04 课用的精度；最后几行说明理由。这条命令可以复制到任何装了这个程序、也有这个模型文件夹的机器上用。

# %%
import shlex
from nbutils.served_model import ServedModel

model = ServedModel(lesson.run, lesson.profile, FOLDER, engine=environment.engine, rows=QUESTIONS)
flags = {
    **model.flags,  # dtype：权重和计算的精度；enforce-eager：不编译，启动更快
    **lesson.profile.vllm,
    "served_model_name": "course",  # 客户端用的模型名
}
if not lesson.gpu:
    del flags["gpu_memory_utilization"]
port = PORT or serving.preferred_port(lesson.platform, engine=environment.engine)
server = serving.Server(model.folder, environment, flags=flags, port=port, log=lesson.run.logs / "serve.log")
program = environment.engine.removesuffix("-cpu")  # vllm 或 transformers
command = [program, "serve", server.model, *serving.to_words(server.flags)]
print(shlex.join(command))
print(serving.flags_reason(lesson.gpu, server.flags))

# %% [markdown]
# ## 亲手实现：回答是怎样写出来的
#
# 服务启动之前，先看看每个请求要做的事。模型读完提示词，给词表里的每个 token 打一个分，就是 *logits*。取分数最高的 token，接在后面，再问一次模型，直到写出结束符。前面的内容不用重读：注意力要用到前面每个 token 的*键*（key）和*值*（value），*KV cache* 把这些存了下来。所以从第二步起，每步只输入一个 token。`generate` 写出的 token 应该完全一样。
#
# 前几行加载模型，中间的循环才是重点。（模型太大、和服务一起放不下时，只部署不手写；这个单元格改用自带的小模型。）

# %%
import torch
from nbutils import chat, data, files
from nbutils.evaluation.placement import fit
from nbutils.exporting.make import weights_bytes
from transformers import AutoModelForCausalLM, AutoTokenizer

fits = model.is_merged and fit(weights_bytes(model.folder) / files.GIB, lesson.gpu)
folder = model.folder if fits else files.TINY_MODEL
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
placing = {"dtype": model.dtype, "device_map": {"": lesson.device}}
language_model = AutoModelForCausalLM.from_pretrained(folder, **placing, trust_remote_code=False)
question = data.own_language_first(model.questions)[0]
prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True, return_tensors="pt").to(lesson.device)
stop_ids = chat.find_stop_ids(tokenizer, language_model.generation_config)
cache, ids, written = None, prompt["input_ids"], []
with torch.inference_mode():
    while len(written) < 64 and not stop_ids & set(written):
        output = language_model(ids, past_key_values=cache, use_cache=True)
        cache = output.past_key_values  # 到目前为止所有 token 的键和值
        ids = output.logits[:, -1:].argmax(-1)  # 概率最高的下一个 token；下一步只读这一个
        written.append(ids.item())
    library = language_model.generate(**prompt, max_new_tokens=64, do_sample=False, eos_token_id=sorted(stop_ids))
    prompt_logits = language_model(prompt["input_ids"]).logits[0].float().cpu()  # 留给温度的练习
print(tokenizer.decode(written, skip_special_tokens=True))
print("和 generate 的 token 完全一样：", written == library[0, prompt["input_ids"].shape[1] :].tolist())
del language_model, output, cache  # 把内存或显存留给服务

# %% [markdown]
# ## 启动
#
# 运行这条命令时还加了两点：服务只监听本机，vLLM 的客户端都要带 *API key*，也就是给程序用的密码（`transformers serve` 不要）。服务先导入各种库，再加载权重，给 KV cache 预留显存或内存，然后就能回答。你手动停止，或者这个 notebook 的内核（kernel）结束，服务就会停。

# %%
startup_seconds = server.start().wait()
print(serving.public_address(lesson.platform, server.port))

# %% [markdown]
# ## 一个请求
#
# *客户端*（client）是提问的程序，只需要三样东西：地址（*endpoint*）、模型名、消息。`temperature=0` 总是取概率最高的 token。（先思考再回答的模型，服务会把思考内容和回答 `message.content` 分开返回；`serving.generated_text` 再把两部分合在一起。）

# %%
from openai import OpenAI

client = OpenAI(base_url=server.url, api_key=server.api_key or "no key is checked")
print("模型", *server.names)
response = client.chat.completions.create(model=server.model_name, messages=question, max_tokens=64, temperature=0)
print("问题", question[-1]["content"])
print("回答", serving.generated_text(response.choices[0].message))

# %% [markdown]
# 同样的请求也可以从这台机器的终端发：把打印出来的粘贴进去。用 vLLM 时，第一行从服务的进程里读出 key，所以这里不会显示 key。不要把 key 写进 notebook；想自己定，就在启动 Jupyter 之前设好环境变量 `VLLM_API_KEY`。最后一行是一个网页，列出服务支持的所有接口。vLLM 还会给自己计数：和 `/docs` 并列的 `/metrics`（要带同一个 key）能查到有多少请求正在计算、多少在排队。

# %%
import json

body = json.dumps({"model": server.model_name, "messages": question, "temperature": 0}, ensure_ascii=False)
key = ' -H "Authorization: Bearer $VLLM_API_KEY"' if server.api_key else ""
if key:
    print(f"export VLLM_API_KEY=$(tr '\\0' '\\n' < /proc/{server.process.pid}/environ | sed -n 's/^VLLM_API_KEY=//p')")
print(f'curl {server.url}/chat/completions -H "Content-Type: application/json"{key} -d {shlex.quote(body)}')
print(f"{server.root}/docs")

# %% [markdown]
# ## 流式输出
#
# *流式输出*（streaming）就是一边生成一边返回：加上 `stream=True`，回答会分段到达，聊天程序就是这样显示的。竖线是前后两段的分界；第一段和最后一段是空的。

# %%
options = {"model": server.model_name, "messages": question, "max_tokens": 64, "temperature": 0}
with client.chat.completions.create(**options, stream=True) as stream:
    for chunk in stream:
        piece = chunk.choices[0].delta
        print(serving.thoughts(piece) or piece.content or "", end="|")
print()

# %% [markdown]
# ## 练习：温度
#
# temperature 大于 0 时，服务按概率随机抽取每个 token。概率是这样算的：logits 先除以*温度*（temperature），再做 softmax。温度高于 1，各个概率更接近；低于 1，概率最高的 token 更占优势。下图取顾客留言里的一个位置，往下会写什么，模型拿不准。温度为 2 时，概率最高的那个 token 概率是多少？`logits` 是一个 tensor，里面是所有 token 的分数。对这样的 tensor `x`，`x.softmax(-1)` 把它变成概率，`.max()` 取最大的一个。（图里没有画温度 2，留给你来算。）

# %% tags=["exercise"]
from nbutils import exercises, figures

doubt = (prompt_logits.softmax(-1).amax(-1) - 0.5).abs().argmin()  # 最高的概率最接近一半的位置
logits = prompt_logits[doubt]
likeliest = logits.topk(5).indices
shown = {f"温度 {t}": (logits / t).softmax(-1)[likeliest].tolist() for t in (0.5, 1)}
tokens = [f"{number}: {tokenizer.decode([i])!r}" for number, i in enumerate(likeliest, 1)]
parts = {token: {name: values[n] for name, values in shown.items()} for n, token in enumerate(tokens)}
read = tokenizer.decode(prompt["input_ids"][0, max(0, doubt - 9) : doubt + 1]).replace("\n", "⏎")
figures.bars(parts, f"“…{read}”之后的下一个 token", "概率", stacked=False)
my_probability = None
lesson.check(exercises.temperature, my_probability, logits)

# %% [markdown]
# <details><summary>参考答案</summary>
#
# ```python
# my_probability = (logits / 2).softmax(-1).max()
# ```
#
# logits 除以 2，彼此更接近，概率也更接近：本来不太可能的 token 更容易被抽中。接近 2 时，很多模型写出的句子就不成样子了。可以自己试：设 `KEEP_RUNNING`，用 `temperature=1.5` 多问服务几次。
#
# </details>

# %% [markdown]
# ## KV cache
#
# 前面手写解码用到的 cache，现在看看有多大。权重在显存里只存一份，所有请求共用，每生成一个 token 都要把它全部读一遍。KV cache 则随提示词和回答的每个 token 增长，每个请求各有一份。所以服务能同时计算多少请求，就看 KV cache 放得下多少。下图比较你的模型和一个 16 bit 的 7B 模型，每个请求 1,000 个 token；虚线是一块 24 GB 的 GPU。

# %%
from nbutils import models

shape = models.find_shape(lesson.model)  # 来自 config.json
number_bytes = 4 if model.dtype == "float32" else 2
memory = {}
for name, of_model, size in ((lesson.model_name, shape, number_bytes), ("Qwen2.5-7B", models.find_shape("Qwen2.5-7B"), 2)):
    for users in (1, 32, 256):
        cache_gb = users * 1000 * of_model.cache_bytes(size) / 1e9
        row = f"{name}，请求数：{users}"
        memory[row] = {"权重": of_model.params * size / 1e9, "KV cache": cache_gb}
figures.bars(memory, "服务占用的内存或显存，每个请求 1,000 个 token", "GB", limit=24)

# %% [markdown]
# ## 练习：KV cache 的字节数
#
# 你的模型处理 1,000 个 token，KV cache 占多少字节？每一层都为每个 token 存一个键和一个值。两者都是一串数，分成几段，每段叫一个*头*（head）；有几个 KV 头（key/value head）、每个头有几个数，下面会打印出来。（几个*查询头*共用一个 KV 头，可以省显存，这叫*分组查询注意力*，GQA。混合架构的模型只算 softmax 注意力的层。）

# %% tags=["exercise"]
print(f"{shape.softmax_layers} 层，每层 {shape.heads} 个查询头，{shape.kv_heads} 个 KV 头")
print(f"每个头 {shape.head_dim} 个数，每个数 {number_bytes} 字节（{model.dtype}）")
my_bytes = None
lesson.check(exercises.cache_bytes, my_bytes, shape, number_bytes)

# %% [markdown]
# <details><summary>参考答案</summary>
#
# ```python
# my_bytes = 2 * shape.softmax_layers * shape.kv_heads * shape.head_dim * number_bytes * 1000
# ```
#
# 开头的 2 是键和值各一份。式子里没有参数量：KV 头少的模型，同一块 GPU 能服务更多的人。
#
# </details>

# %% [markdown]
# ## 32 个请求
#
# 把 32 个问题问两遍：先一个接一个，再 32 个同时发，每个请求由一个线程发出并等待回答。这个单元格先不公布时间，因为接下来要你猜。

# %%
import time
from concurrent.futures import ThreadPoolExecutor


def span(messages):
    begun = time.perf_counter()
    client.chat.completions.create(**options | {"messages": messages})
    return begun, time.perf_counter()


def spans_of(in_flight):
    with ThreadPoolExecutor(in_flight) as pool:
        spans = list(pool.map(span, questions))
    return [(begun - spans[0][0], end - spans[0][0]) for begun, end in spans]


options["max_tokens"] = 64 if lesson.gpu else 16  # CPU 慢，少写一些
questions = (model.questions * 32)[:32]
one_by_one, at_once = spans_of(1), spans_of(32)
alone, together = one_by_one[-1][1] / 32, max(end for _, end in at_once)

# %% [markdown]
# ## 练习：同时发 32 个
#
# 32 个请求同时发，用的时间是一个请求的几倍？先猜，再看下面的图：32 表示一个接一个地回答，1 表示不多花时间。这些请求是在同一步里一起算的；这样的一步，CPU 要比只算一个请求慢，GPU 几乎不慢。猜的数在实际倍数的一半到两倍之间都算对。

# %% tags=["exercise"]
my_guess = None
lesson.check(exercises.many_at_once, my_guess, alone, together)

# %% [markdown]
# <details><summary>参考答案</summary>
#
# ```python
# my_guess = together / alone
# ```
#
# 回答里每生成一个 token，都要把全部权重读一遍。*批处理*（batching）在同一步里给每个请求各算一个 token，读一遍权重，所有请求共用。在 GPU 上，读权重就是大部分开销；CPU 上的收益小一些。`transformers serve` 在 CPU 上是一个答完再答下一个。
#
# </details>

# %% [markdown]
# 每条线是一个请求，从发出到回答完成。同时发出的请求并排计算，谁先答完谁先离开；如果请求多于 `max_num_seqs`，空出的位置下一步就给别的请求（*连续批处理*，continuous batching）。*延迟*（latency，一个请求要多久）变长了，*吞吐量*（throughput，所有请求合起来每秒处理多少）却提高得更多。（在 CPU 上用 `transformers serve`，看到的会是排队。）

# %%
from nbutils import display

figure, axes = display.pyplot().subplots(figsize=(figures.WIDTH, 4.2), layout="constrained")
for shift, label, color, spans in ((0, "一个接一个", figures.BLUE, one_by_one), (0.4, "32 个同时", figures.ORANGE, at_once)):
    starts, ends = zip(*spans, strict=True)
    axes.hlines([number + shift for number in range(1, 33)], starts, ends, color=color, linewidth=3, label=label)
axes.set(xlabel="秒", ylabel="请求")
axes.invert_yaxis()
axes.legend(frameon=False)
display.show_figure(figure, lesson.run.logs / "requests.png")
print(f"1 个请求：{alone:.2f} 秒。32 个同时发：{together:.2f} 秒，是 {together / alone:.1f} 倍。")

# %% [markdown]
# ## 和第 04 课的回答一样吗？
#
# 把验证集的问题全部发给服务，再拿服务的回答和第 04 课里 transformers 的回答比较。提示词的 token 必须相同，不然就是服务用了别的对话模板。用 float32，回答也必须相同。用 16 bit 可以有差别：两个程序的舍入不同，两个 token 概率几乎相等时，选中的可能是另一个。比较的是 token，思考内容也算在内；`transformers serve` 不返回 token，只好比较文本，不比思考内容；数据里带工具时不比较。表里是前几条，自己读一读。

# %%
same_answers = model.compare_answers(server)
print(same_answers)
display.show_table(same_answers.table[:3])

# %% [markdown]
# 回答一样，不等于模型没变。所以还要在第 04 课存下的几百个位置上比较概率。距离用 KL 散度衡量，单位是每个 token 多少 nat：0 表示概率完全相同，float32 的舍入误差不到 0.00001（1e-05）。前几行第 04 课已经见过，最后一行是新的：“合并后的模型（vLLM）”就是这个服务。vLLM 在每个位置只返回概率最高的 20 个 token，所以只比较这些。如果距离远超舍入误差，说明服务里跑的是另一个模型，这一课就会停下。`transformers serve` 不返回概率，这一步就没有可比的。

# %%
same_model = model.compare_predictions(server)
print(same_model)

# %% [markdown]
# ## 聊天
#
# 先看一个例子。设了 `KEEP_RUNNING`，后面会有聊天框：输入文字，按回车，看着回答一点点出来，会思考的模型先显示思考内容；点“停止”可以中止。回答的长度上限和第 04 课一样，但不少于 64 个 token。

# %%
from nbutils import chat_widget

*opening, last = data.own_language_first(model.questions)[:2][-1]
max_tokens = max(64, model.evaluator.max_new_tokens)
talk = chat_widget.Talk(client, server.model_name, opening=opening, max_tokens=max_tokens, temperature=0)
box = chat_widget.chat(talk, last["content"], live=KEEP_RUNNING)

# %% [markdown]
# ## 停止
#
# 停掉服务，释放显存或内存。设了 `KEEP_RUNNING`，服务就一直运行，直到你关掉这个 notebook。

# %%
if not KEEP_RUNNING:
    server.stop()
print(f"服务正在运行：{server.url}。" if server.running else "服务已停止。", f"日志：{server.log}")

# %% [markdown]
# ## 思考题
#
# 一块 GPU 只处理一个请求时，每秒写 60 个 token；同时处理 32 个请求，合计每秒 1,500 个。为什么多出这么多？把 `"a"`、`"b"` 或 `"c"` 填进 `my_choice`。
#
# - **a**：每一步都要从显存读一遍全部权重，读一遍可以供所有请求使用
# - **b**：服务给每个请求各启动一份模型
# - **c**：所有请求共用一份 KV cache，大部分 token 早就算好了

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
# - 你的模型，部署成兼容 OpenAI 的 API，跑在独立的服务进程里；
# - 三种请求：从 Python 发，从终端发，以及回答逐字返回的流式请求；
# - 看清服务内部：手写解码、温度、KV cache，还有一张 32 个请求同时计算的图；
# - 一份证明：服务的回答和第 04 课一致；还能和你的模型聊天。
#
# 课程的主线到此结束。接下来做你自己的任务：第 10 课带你从一句话的任务走到一份报告。还有四课可以深入：第 06 课用多块 GPU 训练，第 07 课从头训练一个小模型，第 08 课把你的模型导出成更小的文件，第 09 课测量服务有多快。
# %%
lesson.finish(same_answers, same_model, engine=environment.engine, startup_seconds=round(startup_seconds, 1))
