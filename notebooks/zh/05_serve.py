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
# 别的程序能调用，模型才派得上用场。vLLM 是大语言模型的推理服务：能同时回答很多请求，提供兼容 OpenAI 的接口，大多数客户端直接就能连。训练和推理用的不是同一个程序，所以这一课还会检查回答是否一致。vLLM 跑不了的地方改用 `transformers serve`，到时会说明。
#
# 学完这一课，你会得到
#
# - 你的模型，部署成兼容 OpenAI 的接口，跑在独立的服务进程里；
# - 三种请求：从 Python 发，从终端发，以及回答逐字返回的流式请求；
# - 一次实测：32 个请求同时发出，要多花多少时间；
# - 一份证明：服务的回答和第 04 课一致；还能和你的模型聊天。
#
# 自带的小模型在 2 核 CPU 上约需一分钟。第一次运行要搭建推理环境，多花几分钟和 3 GB 磁盘（有 GPU 时 12 GB）。

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
# `FOLDER` 是要部署的模型目录，用来代替第 04 课合并后的模型，例如一个导出的模型。`PORT` 填 0，就用平台对外开放的端口（AutoDL），没有这样的端口就随便用一个空闲的。`QUESTIONS` 填 0，问的验证集问题就和第 04 课一样多。`KEEP_RUNNING` 让服务在结束后继续运行，并给出聊天框；关掉这个 notebook，服务就停止。`STOP_OTHERS` 停掉同一次训练里其他 notebook 启动的服务。

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
# vLLM 要用自己的 PyTorch 版本，装在这里会把训练用的那个替换掉。所以给 vLLM 单独建一个虚拟环境，只建一次。服务是一个独立的进程，这个 notebook 只和服务通信。vLLM 需要 T4 或更新的 GPU，也可以用 CPU；更老的 GPU 用 `transformers serve`。没有 GPU 时，混合架构的模型（Qwen3.5）也用 `transformers serve`：vLLM 在 CPU 上只能用 bfloat16 计算其中的 Gated DeltaNet 层，而要和第 04 课的回答一致，得用 float32。

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
# 别的启动参数也可以加在这里，例如在第 01 课或第 03 课设 `SET = "vllm.enable_prefix_caching=false"`。`model.flags` 是这台机器和这个模型需要的参数，例如第 04 课用的精度；最后几行说明理由。这条命令可以复制到任何装了这个程序、也有这个模型文件夹的机器上用。如果模型还能看图，`transformers serve` 只加载其中的文本模型：用的是另一个文件夹，里面有它自己的 `config.json`，其余文件都是链接。

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
# ## 启动
#
# 运行这条命令时还加了两点：服务只监听本机，vLLM 的客户端都要带 API key（`transformers serve` 不要）。服务先导入各种库，再加载权重，给 KV cache 预留显存或内存，然后就能回答。你手动停止，或者这个 notebook 的内核（kernel）结束，服务就会停。

# %%
startup_seconds = server.start().wait()
print(serving.public_address(lesson.platform, server.port))

# %% [markdown]
# ## 一个请求
#
# 客户端只需要三样东西：地址、模型名、消息。`temperature=0` 总是取概率最高的 token。先思考再回答的模型，两种服务都可以把思考内容和回答分开：vLLM 设了 `reasoning-parser` 参数时放在 `message.reasoning` 里，`transformers serve` 放在 `message.reasoning_content` 里。还没思考完时，`message.content` 是空的。`serving.generated_text` 把两部分重新合在一起。64 个 token 可能还不够思考完。

# %%
from openai import OpenAI

client = OpenAI(base_url=server.url, api_key=server.api_key or "no key is checked")
print("模型：", *server.names)
question = model.questions[0]
response = client.chat.completions.create(model=server.model_name, messages=question, max_tokens=64, temperature=0)
print("问题", question[-1]["content"])
print("回答", serving.generated_text(response.choices[0].message))

# %% [markdown]
# 同样的请求也可以从这台机器的终端发：把打印出来的粘贴进去。用 vLLM 时，第一行从服务的进程里读出 key，所以这里不会显示 key。不要把 key 写进 notebook；想自己定，就在启动 Jupyter 之前设好环境变量 `VLLM_API_KEY`。最后一行是一个网页，列出服务支持的所有接口。

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
# 加上 `stream=True`，模型一边生成，回答一边分段返回。聊天程序就是这样一边写一边显示的。竖线是前后两段的分界。思考内容也分段返回。

# %%
options = {"model": server.model_name, "messages": question, "max_tokens": 64, "temperature": 0}
with client.chat.completions.create(**options, stream=True) as stream:
    for chunk in stream:
        piece = chunk.choices[0].delta
        print(serving.thoughts(piece) or piece.content or "", end="|")
print()

# %% [markdown]
# ## 猜一猜：32 个请求同时发
#
# 一个请求要花一点时间。32 个请求同时发出，要花几倍的时间？把你猜的数填进 `my_guess`：32 表示一个接一个地回答，1 表示不多花时间。

# %%
my_guess = None

# %% [markdown]
# 现在实测。每个线程发一个请求，等自己的回答。vLLM 每走一步，就给所有请求各算一个 token（continuous batching），所以权重只读一遍，所有请求共用。在 GPU 上，读权重就是大部分开销；CPU 上的收益小一些。`transformers serve` 是一个答完再答下一个。你猜的在实际倍数的一半到两倍之间都算对。

# %%
import time
from concurrent.futures import ThreadPoolExecutor


def seconds_for(questions):
    started = time.perf_counter()
    with ThreadPoolExecutor(len(questions)) as pool:
        list(pool.map(lambda messages: client.chat.completions.create(**options | {"messages": messages}), questions))
    return time.perf_counter() - started


at_once = (model.questions * 32)[:32]
one = sum(seconds_for([messages]) for messages in at_once[:8]) / len(at_once[:8])
many = seconds_for(at_once)
print(f"1 个请求：{one:.2f} 秒。32 个同时发：{many:.2f} 秒。")
if my_guess is None:
    print("[待做] 把你猜的数填进 `my_guess`，再运行这两个单元格")
else:
    close = 0.5 < my_guess * one / many < 2
    print(f"[{' OK ' if close else '待做'}] 你猜的是 {my_guess} 倍，实际约 {many / one:.0f} 倍；一半到两倍之间都算对")

# %% [markdown]
# ## 和第 04 课的回答一样吗？
#
# 把验证集的问题全部发给服务，再拿服务的回答和第 04 课里 transformers 的回答比较。提示词的 token 必须相同，不然就是服务用了别的对话模板。用 float32，回答也必须相同。用 16 bit 可以有差别：两个程序的舍入不同，两个 token 概率几乎相等时，选中的可能是另一个。比较的是 token，思考内容也算在内；`transformers serve` 不返回 token，只好比较文本，不比思考内容；数据里带工具时不比较。

# %%
same_answers = model.compare_answers(server)
print(same_answers)

# %% [markdown]
# 自己读几条。

# %%
from nbutils import display

display.show_table(same_answers.table[:3])

# %% [markdown]
# 回答一样，不等于模型没变。所以还要在第 04 课存下的几百个位置上比较概率。距离用 KL 散度衡量，单位是 nats/token：0 表示概率完全相同，float32 的舍入误差不到 0.00001（1e-05）。前几行第 04 课已经见过，最后一行是新的：“合并后的模型（vLLM）”就是这个服务。vLLM 在每个位置只返回概率最高的 20 个 token，所以只比较这些。如果距离远超舍入误差，说明服务里跑的是另一个模型，这一课就会停下。`transformers serve` 不返回概率，这一步就没有可比的。

# %%
same_model = model.compare_predictions(server)
print(same_model)

# %% [markdown]
# ## 练习
#
# temperature 大于 0 时，服务按概率随机抽取每个 token。在 0 到 2 之间，`temperature` 要多高，五个回答里才会有两个不一样？趁服务还在运行，改一改再运行这个单元格。结果带有随机性，每个值多跑几次；接近 2 时，句子就不成样子了。点“全部运行”（*Run all*）跑完之后，服务已经停止：把上面的 `KEEP_RUNNING` 设成 `True`，再全部运行一遍。

# %%
temperature = 0.0

answers = set()
for _ in range(5 if server.running else 0):
    response = client.chat.completions.create(**options | {"temperature": temperature})
    answers.add(serving.generated_text(response.choices[0].message))
print(*answers, sep="\n")
print(f"[{' OK ' if len(answers) > 1 else '待做'}] 5 个回答有 {len(answers)} 种，需要 2 种或更多")

# %% [markdown]
# ## 聊天
#
# 先看一个例子。设了 `KEEP_RUNNING`，后面会有聊天框：输入文字，按回车，看着回答一点点出来，会思考的模型先显示思考内容；点“停止”可以中止。回答的长度上限和第 04 课一样，但不少于 64 个 token。

# %%
from nbutils import chat_widget

*opening, last = model.questions[-1]
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
print("服务", f"正在运行：{server.url}。" if server.running else "已停止。", f"日志：{server.log}")

# %% [markdown]
# ## 现在你有了
#
# - 你的模型，部署成兼容 OpenAI 的接口，跑在独立的服务进程里；
# - 三种请求：从 Python 发，从终端发，以及回答逐字返回的流式请求；
# - 一次实测：32 个请求同时发出，要多花多少时间；
# - 一份证明：服务的回答和第 04 课一致；还能和你的模型聊天。
#
# 课程的主线到此结束。还有四课可以深入：第 06 课用多块 GPU 训练，第 07 课从头训练一个小模型，第 08 课把你的模型导出成更小的文件，第 09 课测量服务有多快。
# %%
lesson.finish(same_answers, same_model, engine=environment.engine, startup_seconds=round(startup_seconds, 1))
