# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 05 · Serve it
#
# A model is useful when other programs can ask it. vLLM is a server for language models: it answers many requests at once, through an
# OpenAI-compatible API, so most clients can already talk to it. It is not the program that trained your model, so this
# lesson checks that it gives the same answers. Where vLLM cannot run, `transformers serve` takes its place, and the lesson says so.
#
# You will have
#
# - your model behind an OpenAI-compatible API, in a server process of its own,
# - a request from Python, from a terminal, and one whose answer arrives word by word,
# - a measurement of what 32 requests at once cost,
# - proof that the server gives the answers of lesson 04, and a chat with your model.
#
# Takes about a minute with the tiny model on 2 cores. The first time, building the serving environment adds some minutes and 3 GB of
# disk (12 GB with a GPU).

# %% [markdown]
# The next cell installs the course if it is missing; on Colab, from the repository this notebook was opened from. If it stops, name
# a source in a cell above it: `%env NBUTILS_SOURCE=https://github.com/<you>/<fork>/archive/main.zip`, a folder or a wheel.

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
# `FOLDER` is a model folder to serve instead of the merged model of lesson 04, for example an export. `PORT` 0 takes
# a port that the platform makes public (AutoDL), or else any free port. `QUESTIONS` 0 asks as many held-out questions as lesson 04 did.
# `KEEP_RUNNING` leaves the server up at the end, with a chat box; it stops when you close this notebook. `STOP_OTHERS` stops a server
# that another notebook of this run has started.

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
# If this run has no merged model yet, lesson 04 runs now. A server that an earlier start of this lesson left running is stopped,
# because it holds memory that the new one needs.

# %%
import nbutils
from nbutils import serving

lesson = nbutils.start("05_serve", globals())
lesson.require("02_data_prep" if FOLDER else "04_merge")
serving.stop_leftover_servers(lesson.run.path, STOP_OTHERS)

# %% [markdown]
# ## An environment for vLLM
#
# vLLM brings its own version of PyTorch. Installed here, it would replace the one you train with. So it gets a virtual environment of
# its own, which is built once. The server is a separate process, and this notebook only talks to it. vLLM needs a T4 or
# newer GPU, or a CPU; older GPUs are served by `transformers serve`, and so are hybrid models (Qwen3.5) on a CPU: vLLM computes their
# Gated DeltaNet layers there in bfloat16 only, and float32 is what gives the answers of lesson 04.

# %%
from pathlib import Path

served_folder = Path(FOLDER or lesson.run.merged).expanduser()
environment = serving.ensure_environment(ENGINE, served_folder)
print(f"{environment.engine}, with the Python {environment.python}")
print(environment.reason or "as ENGINE says")

# %% [markdown]
# ## The command line
#
# The block `vllm` of the profile holds flags of `vllm serve`, written with underscores:
#
# - `max_model_len`: the longest prompt and answer together, in tokens,
# - `max_num_seqs`: how many requests are computed together; more wait in a queue,
# - `gpu_memory_utilization`: the share of the GPU memory that the server takes.
#
# More flags may be added there, for example `SET = "vllm.enable_prefix_caching=false"` in lesson 01 or 03. `model.flags` are those that
# this machine and this model need, such as the precision of lesson 04; the last lines say why. You can copy the command to any machine
# that has the program and the folder. Of a model that also sees, `transformers serve` gets the text model alone: a folder with its own
# `config.json` and links to the other files.

# %%
import shlex
from nbutils.served_model import ServedModel

model = ServedModel(lesson.run, lesson.profile, FOLDER, engine=environment.engine, rows=QUESTIONS)
flags = {
    **model.flags,  # dtype: the precision of weights and computation; enforce-eager: no compilation, starts sooner
    **lesson.profile.vllm,
    "served_model_name": "course",  # the name that clients ask for
}
if not lesson.gpu:
    del flags["gpu_memory_utilization"]
port = PORT or serving.preferred_port(lesson.platform, engine=environment.engine)
server = serving.Server(model.folder, environment, flags=flags, port=port, log=lesson.run.logs / "serve.log")
program = environment.engine.removesuffix("-cpu")  # vllm or transformers
command = [program, "serve", server.model, *serving.to_words(server.flags)]
print(shlex.join(command))
print(serving.flags_reason(lesson.gpu, server.flags))

# %% [markdown]
# ## Start
#
# The command is run with two additions: the server listens on this machine only, and every client of vLLM must send an API key
# (`transformers serve` asks for none). The server imports its libraries, loads the weights, and reserves memory for the KV cache. Then it
# answers. It stops when you stop it, and when this notebook's kernel ends.

# %%
startup_seconds = server.start().wait()
print(serving.public_address(lesson.platform, server.port))

# %% [markdown]
# ## One request
#
# A client needs three things: an address, the name of the model, and messages. `temperature=0` always takes the likeliest token. Both
# servers can give the thoughts of a model that thinks first apart from its answer: vLLM in `message.reasoning`, where the flag
# `reasoning-parser` is set, `transformers serve` in `message.reasoning_content`. While the model still thinks, `message.content` is empty.
# `serving.generated_text` puts both together again. 64 tokens may not reach the end of its thoughts.

# %%
from openai import OpenAI

client = OpenAI(base_url=server.url, api_key=server.api_key or "no key is checked")
print("Models:  ", *server.names)
question = model.questions[0]
response = client.chat.completions.create(model=server.model_name, messages=question, max_tokens=64, temperature=0)
print("Question:", question[-1]["content"])
print("Answer:  ", serving.generated_text(response.choices[0].message))

# %% [markdown]
# The same request from a terminal of this machine: paste what is printed. With vLLM a first line reads the key from the server's process,
# so that no key is shown here. Never write a key into a notebook; to choose it yourself, set the variable `VLLM_API_KEY` before you start
# Jupyter. The last line is a page that documents everything the server understands.

# %%
import json

body = json.dumps({"model": server.model_name, "messages": question, "temperature": 0}, ensure_ascii=False)
key = ' -H "Authorization: Bearer $VLLM_API_KEY"' if server.api_key else ""
if key:
    print(f"export VLLM_API_KEY=$(tr '\\0' '\\n' < /proc/{server.process.pid}/environ | sed -n 's/^VLLM_API_KEY=//p')")
print(f'curl {server.url}/chat/completions -H "Content-Type: application/json"{key} -d {shlex.quote(body)}')
print(f"{server.root}/docs")

# %% [markdown]
# ## Streaming
#
# With `stream=True` the answer arrives in pieces, as the model generates it. This is how chat programs show text while it is
# written. A bar marks where one piece ends and the next begins. Thoughts arrive in pieces of their own.

# %%
options = {"model": server.model_name, "messages": question, "max_tokens": 64, "temperature": 0}
with client.chat.completions.create(**options, stream=True) as stream:
    for chunk in stream:
        piece = chunk.choices[0].delta
        print(serving.thoughts(piece) or piece.content or "", end="|")
print()

# %% [markdown]
# ## Predict: 32 requests at once
#
# One request takes some time. How many times as long do 32 requests take if they are sent at the same moment? Put your guess into
# `my_guess`: 32 means that they are answered one after the other, 1 that they cost nothing extra.

# %%
my_guess = None

# %% [markdown]
# Now measure it. Each thread sends one request and waits for its answer. vLLM computes one token for all of them in each step
# (continuous batching), so the weights are read once for everybody. On a GPU that is most of the work; a CPU gains less.
# `transformers serve` answers one request after the other.

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
print(f"1 request: {one:.2f} s. 32 at once: {many:.2f} s.")
if my_guess is None:
    print("[todo] exercise: put a number into `my_guess` and run both cells again")
else:
    close = 0.5 < my_guess * one / many < 2
    print(f"[{' OK ' if close else 'todo'}] exercise: saw a guess of {my_guess}, expected about {many / one:.0f}; half or twice of it counts")

# %% [markdown]
# ## The same answers as in lesson 04?
#
# The server gets all held-out questions, and its answers are compared with those that transformers gave in lesson 04. The prompts must
# be the same tokens, or the server uses another chat template. In float32 the answers must be the same, too. In 16 bits they may
# differ: two programs round differently, and where two tokens are almost equally likely, the other one may win. Tokens are compared,
# thoughts included; `transformers serve` returns none, so its answers are compared as texts, without thoughts, and not where rows have
# tools.

# %%
same_answers = model.compare_answers(server)
print(same_answers)

# %% [markdown]
# Read some of them yourself.

# %%
from nbutils import display

display.show_table(same_answers.table[:3])

# %% [markdown]
# Equal answers can hide a changed model. So the probabilities are compared as well, at a few hundred positions that lesson 04 stored. The
# distance is the KL divergence, in nats per token: 0 means the same probabilities, and rounding in float32 stays below 0.00001 (1e-05).
# The first lines are those of lesson 04; the last one is new: *merged, in vLLM* is the server, *merged* is the model of lesson 04. It is
# compared by 20 tokens at each position, because vLLM returns no more. A server that is much further away than rounding
# explains runs another model, and stops the lesson. `transformers serve` returns no probabilities, so there is nothing to compare.

# %%
same_model = model.compare_predictions(server)
print(same_model)

# %% [markdown]
# ## Exercise
#
# Above temperature 0 the server draws each token at random, by its probability. How high must `temperature` be, between 0 and 2, before
# two of five answers differ? Change it and run this cell again while the server is up. It is chance: run it a few times at each value;
# near 2 the text falls apart. (After *Run all* the server has stopped: set `KEEP_RUNNING = True` above and run all again.)

# %%
temperature = 0.0

answers = set()
for _ in range(5 if server.running else 0):
    response = client.chat.completions.create(**options | {"temperature": temperature})
    answers.add(serving.generated_text(response.choices[0].message))
print(*answers, sep="\n")
print(f"[{' OK ' if len(answers) > 1 else 'todo'}] exercise: saw {len(answers)} kind(s) of answer in 5, expected 2 or more")

# %% [markdown]
# ## Chat
#
# One example. With `KEEP_RUNNING` a chat box follows: type, press Enter, and watch the answer grow, after the thoughts of a model that
# thinks; *Stop* ends it. An answer is cut off where lesson 04 cut it off, but not before 64 tokens.

# %%
from nbutils import chat_widget

*opening, last = model.questions[-1]
max_tokens = max(64, model.evaluator.max_new_tokens)
talk = chat_widget.Talk(client, server.model_name, opening=opening, max_tokens=max_tokens, temperature=0)
box = chat_widget.chat(talk, last["content"], live=KEEP_RUNNING)

# %% [markdown]
# ## Stop
#
# Stop the server to free its memory. With `KEEP_RUNNING` it stays up until you close this notebook.

# %%
if not KEEP_RUNNING:
    server.stop()
print("The server is", f"running at {server.url}." if server.running else "stopped.", f"Its log: {server.log}")

# %% [markdown]
# ## You now have
#
# - your model behind an OpenAI-compatible API, in a server process of its own,
# - a request from Python, from a terminal, and one whose answer arrives word by word,
# - a measurement of what 32 requests at once cost,
# - proof that the server gives the answers of lesson 04, and a chat with your model.
#
# That is the course. Four more lessons go further: lesson 06 trains on several GPUs, lesson 07 trains a small model from scratch,
# lesson 08 makes smaller files of your model, and lesson 09 measures how fast it is served.

# %%
lesson.finish(same_answers, same_model, engine=environment.engine, startup_seconds=round(startup_seconds, 1))
