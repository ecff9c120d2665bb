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
# A model is useful when other programs can ask it. A *server* is a program that waits for requests and answers them. vLLM is a server for
# language models: it computes many requests together, and its *API* (what a program may send, and what comes back) is that of OpenAI, so
# most programs can already talk to it. It is not the program that trained your model, so this lesson checks that it gives the same
# answers. Where vLLM cannot run, `transformers serve` takes its place, and the lesson says so.
#
# You will have
#
# - your model behind an OpenAI-compatible API, in a server process of its own,
# - a request from Python, from a terminal, and one whose answer arrives word by word,
# - an idea of what happens inside: decoding by hand, temperature, the KV cache, and a picture of 32 requests at once,
# - proof that the server gives the answers of lesson 04, and a chat with your model.
#
# Takes about a minute with the tiny model on 2 cores. The first time, building the serving environment adds some minutes and 3 GB of
# disk (12 GB with a GPU).
#
# Every word is explained where it first appears, and in the [glossary](../docs/glossary.md).

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
# `FOLDER` is a model folder to serve instead of the merged model of lesson 04, for example an export. A *port* is the number under which
# programs reach a server on a machine; `PORT` 0 takes one that the platform makes public (AutoDL), or else any free one. `QUESTIONS` 0 asks
# as many held-out questions as lesson 04 did. `KEEP_RUNNING` leaves the server up at the end, with a chat box; it stops when you close this
# notebook. `STOP_OTHERS` stops a server that another notebook of this run has started.

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
# vLLM brings its own version of PyTorch. Installed here, it would replace the one you train with. So it gets a *virtual environment* of its
# own: a folder with a Python and its packages, built once. The server is a separate *process*, a running program with memory of its own,
# and this notebook only talks to it. vLLM needs a T4 or newer GPU, or a CPU. What it cannot run, `transformers serve` does: older GPUs, and
# hybrid models (Qwen3.5) on a CPU, where vLLM computes in bfloat16 only.

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
# this machine and this model need, such as the precision of lesson 04; the last lines say why. You can copy the command to any machine that
# has the program and the folder.

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
# ## By hand: how an answer is written
#
# Before the server starts, here is what it will do for each request. The model reads the prompt and gives every token of its vocabulary a
# score, a *logit*. The likeliest token is appended, and the model is asked again, until it writes a stop token. It need not read everything
# again: attention looks back at a *key* and a *value* of each earlier token, and the *KV cache* keeps these. So from the second step on
# only one token goes in. `generate` must write the same tokens.
#
# The first lines load the model; the loop is in the middle. (A model that does not fit here beside the server is served only; the bundled
# tiny model takes its place in this cell.)

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
        cache = output.past_key_values  # the keys and values of all tokens so far
        ids = output.logits[:, -1:].argmax(-1)  # the likeliest next token; the next step reads only this one
        written.append(ids.item())
    library = language_model.generate(**prompt, max_new_tokens=64, do_sample=False, eos_token_id=sorted(stop_ids))
    prompt_logits = language_model(prompt["input_ids"]).logits[0].float().cpu()  # for the exercise on temperature
print(tokenizer.decode(written, skip_special_tokens=True))
print("the same tokens as generate:", written == library[0, prompt["input_ids"].shape[1] :].tolist())
del language_model, output, cache  # the server needs the memory

# %% [markdown]
# ## Start
#
# The command is run with two additions: the server listens on this machine only, and every client of vLLM must send an *API key*, a
# password for programs (`transformers serve` asks for none). The server imports its libraries, loads the weights, and reserves memory for
# the KV cache. Then it answers. It stops when you stop it, and when this notebook's kernel ends.

# %%
startup_seconds = server.start().wait()
print(serving.public_address(lesson.platform, server.port))

# %% [markdown]
# ## One request
#
# A *client* is the program that asks. It needs three things: an address (the *endpoint*), the name of the model, and messages.
# `temperature=0` always takes the likeliest token. (Of a model that thinks first, a server gives the thoughts apart from the answer,
# `message.content`; `serving.generated_text` puts both together again.)

# %%
from openai import OpenAI

client = OpenAI(base_url=server.url, api_key=server.api_key or "no key is checked")
print("Models:  ", *server.names)
response = client.chat.completions.create(model=server.model_name, messages=question, max_tokens=64, temperature=0)
print("Question:", question[-1]["content"])
print("Answer:  ", serving.generated_text(response.choices[0].message))

# %% [markdown]
# The same request from a terminal of this machine: paste what is printed. With vLLM a first line reads the key from the server's process,
# so that no key is shown here. Never write a key into a notebook; to choose it yourself, set the variable `VLLM_API_KEY` before you start
# Jupyter. The last line is a page that documents everything the server understands. vLLM also counts what it does: `/metrics` beside
# `/docs`, with the same key, says among other things how many requests are running and how many wait.

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
# *Streaming* means that the answer is sent while it is written: with `stream=True` it arrives in pieces, as chat programs show it. A bar
# marks where one piece ends and the next begins; the first and the last one are empty.

# %%
options = {"model": server.model_name, "messages": question, "max_tokens": 64, "temperature": 0}
with client.chat.completions.create(**options, stream=True) as stream:
    for chunk in stream:
        piece = chunk.choices[0].delta
        print(serving.thoughts(piece) or piece.content or "", end="|")
print()

# %% [markdown]
# ## Exercise: temperature
#
# Above temperature 0 the server draws each token at random, by its probability. The probabilities are the softmax of the logits divided by
# the *temperature*: above 1 it makes them more alike, below 1 the likeliest token gets even likelier. Here is a place in the customer's
# message where your model was in two minds about how it goes on. What is the probability of its likeliest token at temperature 2? `logits`
# is a tensor with the logits of all tokens. `x.softmax(-1)` makes probabilities of any such tensor `x`, and `.max()` takes the largest.

# %% tags=["exercise"]
from nbutils import exercises, figures

doubt = (prompt_logits.softmax(-1).amax(-1) - 0.5).abs().argmin()  # where the likeliest token is nearest to one half
logits = prompt_logits[doubt]
likeliest = logits.topk(5).indices
shown = {f"temperature {t}": (logits / t).softmax(-1)[likeliest].tolist() for t in (0.5, 1)}
tokens = [f"{number}: {tokenizer.decode([i])!r}" for number, i in enumerate(likeliest, 1)]
parts = {token: {name: values[n] for name, values in shown.items()} for n, token in enumerate(tokens)}
read = tokenizer.decode(prompt["input_ids"][0, max(0, doubt - 9) : doubt + 1]).replace("\n", "⏎")
figures.bars(parts, f"The next token after … {read}", "probability", stacked=False)
my_probability = None
lesson.check(exercises.temperature, my_probability, logits)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# my_probability = (logits / 2).softmax(-1).max()
# ```
#
# Divided by 2, the logits lie closer together, and so do the probabilities: unlikely tokens are drawn more often. Near 2 many models write
# nonsense. Try it: with `KEEP_RUNNING`, ask the server a few times with `temperature=1.5`.
#
# </details>

# %% [markdown]
# ## The KV cache
#
# The cache of the decoding by hand, in numbers. The weights are in memory once, for all requests, and each step reads all of them once. The
# KV cache grows with every token of every prompt and answer, and each request has its own. So it decides how many requests a server can
# compute at once. Here is your model beside a 7B in 16 bits, for requests of 1,000 tokens each; the limit is a GPU with 24 GB.

# %%
from nbutils import models

shape = models.find_shape(lesson.model)  # of config.json
number_bytes = 4 if model.dtype == "float32" else 2
memory = {}
for name, of_model, size in ((lesson.model_name, shape, number_bytes), ("Qwen2.5-7B", models.find_shape("Qwen2.5-7B"), 2)):
    for users in (1, 32, 256):
        cache_gb = users * 1000 * of_model.cache_bytes(size) / 1e9
        row = f"{name}, requests: {users}"
        memory[row] = {"weights": of_model.params * size / 1e9, "KV cache": cache_gb}
figures.bars(memory, "Memory of a server, 1,000 tokens in each request", "GB", limit=24)

# %% [markdown]
# ## Exercise: cache bytes
#
# How many bytes does the cache of your model need for 1,000 tokens? Each layer keeps a key and a value for each token. Both are lists of
# numbers, in pieces called *heads*: what the cell prints says how many key/value heads there are, and how many numbers are in a head.
# (Several *query heads*, which look, share one key/value head: *grouped-query attention* saves memory. Of a hybrid model only the layers
# with softmax attention count.)

# %% tags=["exercise"]
print(f"{shape.softmax_layers} layers, {shape.heads} query heads, {shape.kv_heads} key/value heads in each")
print(f"{shape.head_dim} numbers in a head, {number_bytes} bytes each ({model.dtype})")
my_bytes = None
lesson.check(exercises.cache_bytes, my_bytes, shape, number_bytes)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# my_bytes = 2 * shape.softmax_layers * shape.kv_heads * shape.head_dim * number_bytes * 1000
# ```
#
# The 2 is for keys and values. The number of weights is not in it: a model with fewer key/value heads can serve
# more people on the same GPU.
#
# </details>

# %% [markdown]
# ## 32 requests
#
# Now 32 questions are asked twice: first one after the other, then all in the same moment, each from a thread that waits for its answer. The
# cell keeps the times to itself, because you are going to guess them.

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


options["max_tokens"] = 64 if lesson.gpu else 16  # a CPU takes long enough
questions = (model.questions * 32)[:32]
one_by_one, at_once = spans_of(1), spans_of(32)
alone, together = one_by_one[-1][1] / 32, max(end for _, end in at_once)

# %% [markdown]
# ## Exercise: many at once
#
# How many times as long as one request do 32 take that are sent at once? Guess before you look at the picture below: 32 means that they are
# answered one after the other, 1 that they cost nothing extra. They are computed in the same steps; a CPU takes longer for such a step than
# for one with a single request, a GPU hardly. Half or twice the right number counts.

# %% tags=["exercise"]
my_guess = None
lesson.check(exercises.many_at_once, my_guess, alone, together)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# my_guess = together / alone
# ```
#
# For each token of an answer all weights are read once. *Batching* computes one token for every request in the same step, so all of
# them share that reading. On a GPU that is most of the work; a CPU gains less. `transformers serve` on a CPU answers one after the other.
#
# </details>

# %% [markdown]
# The picture: a line for each request, from the moment it was sent until its answer was complete. Sent at once, they are computed side by
# side, and each leaves as soon as its answer ends; were there more than `max_num_seqs`, another would take its place in the very next step
# (*continuous batching*). The *latency*, how long one request takes, grows; the *throughput*, what all get together in a second, grows far
# more. (With `transformers serve` on a CPU you see a queue instead.)

# %%
from nbutils import display

figure, axes = display.pyplot().subplots(figsize=(figures.WIDTH, 4.2), layout="constrained")
for shift, label, color, spans in ((0, "one by one", figures.BLUE, one_by_one), (0.4, "all at once", figures.ORANGE, at_once)):
    starts, ends = zip(*spans, strict=True)
    axes.hlines([number + shift for number in range(1, 33)], starts, ends, color=color, linewidth=3, label=label)
axes.set(xlabel="seconds", ylabel="request")
axes.invert_yaxis()
axes.legend(frameon=False)
display.show_figure(figure, lesson.run.logs / "requests.png")
print(f"1 request: {alone:.2f} s. 32 at once: {together:.2f} s, which is {together / alone:.1f} times as long.")

# %% [markdown]
# ## The same answers as in lesson 04?
#
# The server gets all held-out questions, and its answers are compared with those that transformers gave in lesson 04. The prompts must
# be the same tokens, or the server uses another chat template. In float32 the answers must be the same, too. In 16 bits they may
# differ: two programs round differently, and where two tokens are almost equally likely, the other one may win. Tokens are compared,
# thoughts included; `transformers serve` returns none, so its answers are compared as texts, without thoughts, and not where rows have
# tools. Read the first ones yourself.

# %%
same_answers = model.compare_answers(server)
print(same_answers)
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
# ## Chat
#
# One example. With `KEEP_RUNNING` a chat box follows: type, press Enter, and watch the answer grow, after the thoughts of a model that
# thinks; *Stop* ends it. An answer is cut off where lesson 04 cut it off, but not before 64 tokens.

# %%
from nbutils import chat_widget

*opening, last = data.own_language_first(model.questions)[:2][-1]
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
print(f"The server is running at {server.url}." if server.running else "The server is stopped.", f"Its log: {server.log}")

# %% [markdown]
# ## Question
#
# A GPU writes 60 tokens per second for one request alone, and 1,500 for 32 requests together. Why so many more? Put `"a"`, `"b"` or `"c"`
# into `my_choice`.
#
# - **a**: because each step reads all weights from memory, and one reading serves all requests
# - **b**: because the server starts a copy of the model for each request
# - **c**: because the requests share one KV cache, so that most of the tokens are known already

# %% tags=["exercise"]
my_choice = None
lesson.check(exercises.quiz, my_choice, lesson.stem)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# my_choice = "a"
# ```
#
# </details>

# %% [markdown]
# ## You now have
#
# - your model behind an OpenAI-compatible API, in a server process of its own,
# - a request from Python, from a terminal, and one whose answer arrives word by word,
# - an idea of what happens inside: decoding by hand, temperature, the KV cache, and a picture of 32 requests at once,
# - proof that the server gives the answers of lesson 04, and a chat with your model.
#
# That is the course. Now take a task of your own: lesson 10 goes with you from one sentence to a report. Four more lessons go further:
# lesson 06 trains on several GPUs, lesson 07 trains a small model from scratch, lesson 08 makes smaller files of your model, and lesson
# 09 measures how fast it is served.

# %%
lesson.finish(same_answers, same_model, engine=environment.engine, startup_seconds=round(startup_seconds, 1))
