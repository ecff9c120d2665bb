# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 05 · Serve it, and check that it says the same
#
# A model is useful when other programs can ask it. vLLM answers many at once over the interface OpenAI made common, so every client
# already knows how to talk to it. But a server is another program: another tokenizer call, another attention kernel, another template.
# So we do not hope that it says what we trained, we compare.
#
# You will have
#
# - your model behind an OpenAI-compatible endpoint, in an environment that leaves the training one alone,
# - proof, prompt by prompt and token by token, that it says what transformers says,
# - its start-up time and its speed, next to plain `generate`.
#
# Takes 2 minutes with the tiny model. The first time, building the serving environment adds some minutes and 3 GB of disk (12 GB with a card).

# %% [markdown]
# The next cell installs the course where it is missing; on a machine that has it, it does nothing.

# %% tags=["setup"]
import glob, importlib.util, os, re, subprocess, sys
if importlib.util.find_spec("nbutils") is None:
    SOURCE = os.environ.get("NBUTILS_SOURCE") or max(glob.glob(os.path.join(os.environ.get("NBUTILS_FS_ROOT", "/"), "kaggle/input/**/nbutils-*.whl"), recursive=True), default="git+https://github.com/finetune-course/finetune-course")
    print("Installing the course from", re.sub("//[^/]*@", "//", SOURCE)); subprocess.check_call([sys.executable, "-m", "pip", "install", "-q", SOURCE] + SOURCE.endswith(".whl") * ["--no-index", "--find-links", os.path.dirname(SOURCE)])

# %% [markdown]
# The dials. `FOLDER` is a model folder to serve instead of the one lesson 04 left; `PORT` 0 takes a free one; `QUESTIONS` 0 leaves their
# number to the profile. `KEEP_RUNNING` leaves the server up when the lesson is over, until the kernel ends.

# %% tags=["parameters"]
PROFILE: str = "auto"
MODEL: str = ""
RUN_NAME: str = ""
FOLDER: str = ""
ENGINE: str = "auto"
PORT: int = 0
QUESTIONS: int = 0
KEEP_RUNNING: bool = False

# %% [markdown]
# If there is no merged model in this run folder yet, lesson 04 runs now.

# %%
import nbutils
from pathlib import Path
from nbutils import profiles

lesson = nbutils.start("05_serve", globals())
lesson.require("02_data_prep" if FOLDER else "04_merge")
folder = profiles.model_folder(Path(FOLDER).expanduser() if FOLDER else lesson.run.merged)

# %% [markdown]
# ## What it should say
#
# First the answers of plain transformers to the held-back questions, greedy, in the precision we will serve in. They are what the
# server will be measured against; rows that the server could not take are left out. Then the model leaves the memory: a server wants the card to itself.

# %%
import time
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from nbutils import data, evaluation

size = lesson.profile.evaluation
dtype = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[lesson.profile.machine.precision]
_, held_back = data.load(lesson.run.data)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map={"": 0 if lesson.card else "cpu"})
tokenizer = AutoTokenizer.from_pretrained(folder)
wanted = size.model_copy(update={"rows": QUESTIONS or size.rows})
limit = evaluation.reach(model, lesson.profile.serve.max_model_len)
exam = evaluation.Exam(lesson.run.path, tokenizer, held_back, wanted, dtype, limit=limit)
questions, references = exam.questions, exam.references

# %% [markdown]
# The clock runs along, so that the server has something to beat.

# %%
started = time.perf_counter()
local = exam.generate(model)
local_seconds = time.perf_counter() - started
del model
torch.cuda.empty_cache()

# %% [markdown]
# ## The engine
#
# vLLM needs a card of capability 7.5 (a T4) or newer, and has a build for CPUs. Older cards are served by transformers itself.

# %%
from nbutils import hardware, serving

engine = hardware.engine(lesson.card) if ENGINE == "auto" else hardware.Choice(ENGINE, "parameter ENGINE")
print(f"engine: {engine.value} ({engine.reason})")

# %% [markdown]
# vLLM brings its own torch, and installing it here would replace the one you train with. So it lives in a virtual environment of its
# own, built once; the server is another process, and this notebook only talks to it.

# %%
environment = serving.ensure_environment(engine.value)
print("serving from", environment.python)

# %% [markdown]
# ## The flags
#
# - `dtype`: the precision we measured in. A T4 has no bfloat16, there it is float16, which vLLM also calls `half`.
# - `max-model-len`: prompt and answer together. The cache is planned for it, so ask for what you need and not for what the model could.
# - `max-num-seqs`: how many requests are answered together; more wait in line.
# - `gpu-memory-utilization`: the share of the card vLLM takes, weights and cache.
# - `enforce-eager`: no compilation. A slower server that starts sooner: right for a CPU and for a look, wrong for a long service on a card.
#
# The chat template is not among them: the server reads the model's own, from the same folder.

# %%
serve = lesson.profile.serve
shared = {"served-model-name": "course", "dtype": dtype, "max-model-len": serve.max_model_len, "max-num-seqs": serve.max_num_seqs}
flags = {
    "vllm": {**shared, "gpu-memory-utilization": serve.gpu_memory},
    "vllm-cpu": {**shared, "enforce-eager": True},
    "transformers": {"dtype": dtype, "device": "cuda:0" if lesson.card else "cpu"},
}[engine.value]

# %% [markdown]
# This is the line you would type in a terminal; here it is run for you. The server listens on this machine only (`127.0.0.1`). Some
# platforms lead from outside to certain ports, and then one of those is taken.

# %%
port = PORT or serving.preferred_port(lesson.platform)
server = serving.Server(folder, environment, flags=flags, port=port, log=lesson.run.logs / "serve.log")
print(server.shell_line())
print(serving.public_address(lesson.platform, server.port))

# %% [markdown]
# Start it and wait until it says it is healthy. Its log is shown on the way; should it fail, the cause stands here and not only in a file.
# The server ends when you stop it, when a cell fails, and when this kernel goes away, however it goes.

# %%
server.start()
startup_seconds = server.wait()

# %% [markdown]
# ## One request, in full view
#
# This is all a client needs: an address, the name the model is served under, and messages. `temperature=0` means greedy.

# %%
from openai import OpenAI

client = OpenAI(base_url=server.url, api_key="none-is-checked")
response = client.chat.completions.create(
    model=server.model_name, messages=questions[0], max_tokens=size.max_new_tokens, temperature=0
)
print(questions[0][-1]["content"], "\n->", response.choices[0].message.content)

# %% [markdown]
# ## All of them at once
#
# `serving.ask` makes that same call for every question, many in flight. vLLM also tells which tokens went in and came out.

# %%
started = time.perf_counter()
served = serving.ask(
    client,
    server.model_name,
    questions,
    size.max_new_tokens,
    tools=exam.tools,
    token_ids=engine.value != "transformers",
    at_once=serve.max_num_seqs,
)
served_seconds = time.perf_counter() - started

# %% [markdown]
# ## Does it say the same?
#
# Prompts first: if they differ, the server uses another template than training did, and everything after that is luck. Then the
# answers. In float32 not one token may differ. In 16 bits two kernels round differently and a close choice may tip: that is reported.

# %%
parity = serving.compare(served, local)
print(parity)
serving.require_parity(parity, dtype)

# %% [markdown]
# Some of the answers, for your own eyes; a tick means that it is exactly what was wanted.

# %%
from nbutils import dashboard

columns = {"transformers": [answer.text for answer in local], "server": [answer.text for answer in served]}
dashboard.show_table(evaluation.before_after_table(questions, references, columns, rows=4), "The same words")

# %% [markdown]
# And the scores of lesson 04, of both: the server's are what your users will get.

# %%
scores = evaluation.score_table(exam, {"transformers": local, "server": served})
dashboard.show_table(scores, "The same scores", evaluation.aligned(scores))

# %% [markdown]
# The speed of both, in answer tokens a second. With the tiny model on a CPU most of the server's time is HTTP; on a card it is the
# other way round, and the more ask at once the wider the gap.

# %%
tokens = sum(len(answer.token_ids) for answer in local)
speed = {"transformers": tokens / local_seconds, "server": tokens / served_seconds}
print(f"server ready after {startup_seconds:.0f} s; {tokens} tokens in {len(questions)} answers")
print(*(f"{name:13} {value:8.0f} tokens/s" for name, value in speed.items()), sep="\n")

# %% [markdown]
# ## Talk to it
#
# One example. With `KEEP_RUNNING` set, the server stays up and a chat box follows in which you can type.

# %%
def reply(text: str) -> str:
    messages = [*questions[0][:-1], {"role": "user", "content": text}]
    answer = client.chat.completions.create(
        model=server.model_name, messages=messages, max_tokens=size.max_new_tokens, temperature=0
    )
    return answer.choices[0].message.content


dashboard.chat(reply, example=questions[-1][-1]["content"], live=KEEP_RUNNING)

# %% [markdown]
# ## Exercise
#
# The server throws dice only if you ask it to. Set `temperature` to 1.5, run this cell again, and see what happens to a model that was so
# sure. After *Run all* the server has stopped: set `KEEP_RUNNING = True` above and run all again first.

# %%
temperature = 0.0
asked = dict(model=server.model_name, messages=questions[0], max_tokens=size.max_new_tokens, temperature=temperature)
times = 3 if server.running else 0
said = {client.chat.completions.create(**asked).choices[0].message.content for _ in range(times)}
expected = [1] if temperature == 0 else [2, 3]
mark = "TODO: set KEEP_RUNNING" if not times else " OK " if len(said) in expected else "FAIL"
print(f"[{mark}] saw {len(said)} different answers at temperature {temperature}, expected {expected}: try 0.0, 1.0 and 1.5")

# %% [markdown]
# A server nobody needs is memory nobody has. One that stays up is noted in the run folder: lesson 04, run again, then lets it answer.

# %%
if KEEP_RUNNING:
    serving.leave_note(server, lesson.run.path)
else:
    server.stop()
print("the server is", f"running at {server.url}" if server.running else "stopped", "| log:", server.log)

# %% [markdown]
# ## You now have
#
# - your model behind an OpenAI-compatible endpoint, in an environment that leaves the training one alone,
# - proof, prompt by prompt and token by token, that it says what transformers says,
# - its start-up time and its speed, next to plain `generate`.
#
# That is the whole course. Lesson 07 shows where a base model comes from.

# %%
lesson.finish(
    engine=engine.value,
    rows_left_out=exam.left_out,
    identical_answers={"count": parity.identical, "total": parity.total},
    identical_prompts={"count": parity.same_prompts, "total": parity.total},
    exact_match=evaluation.exact_match([answer.text for answer in served], references),
    startup_seconds=round(startup_seconds, 1),
    tokens_per_second=round(speed["server"], 1),
    transformers_tokens_per_second=round(speed["transformers"], 1),
)
