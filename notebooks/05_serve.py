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
# - proof, token by token and in nats, that it says what transformers says,
# - its speed with one and with many asking at once, next to plain `generate` and `transformers serve`,
# - base and tuned side by side under one address, and a chat with both.
#
# Takes 3 minutes with the tiny model. The first time, building the serving environment adds some minutes and 3 GB of disk (12 GB with a card).

# %% [markdown]
# The next cell installs the course where it is missing; on a machine that has it, it does nothing. If it stops, say where from in a
# cell above it: `%env NBUTILS_SOURCE=git+https://github.com/YOU/YOUR-FORK@v0.1.0`, or a folder, or one of the wheels it found.

# %% tags=["setup"]
import importlib.util, re, subprocess, sys; from glob import glob; from os import getenv, path, sep
if importlib.util.find_spec("nbutils") is None:
    OURS = "git+https://github.com/YOUR-NAME/finetune-course@v0.1.0"
    ALL = glob(getenv("NBUTILS_FS_ROOT", "") + sep + "kaggle/input/**/nbutils*.whl", recursive=True)
    SOURCE = getenv("NBUTILS_SOURCE") or "\n".join(ALL) or OURS
    assert re.fullmatch("(?!-|.*YOUR-).*/.*", SOURCE), f"Set NBUTILS_SOURCE, see above; found {ALL}"
    print("Installing the course from", re.sub(r"(?<=//)[^/]*@|[?#].*", "", SOURCE))
    ALONE = ["--no-index", "--only-binary=:all:", "-f", path.dirname(SOURCE)] * (SOURCE in ALL)
    PIP = subprocess.run([sys.executable, "-m", "pip", "install", "-q", SOURCE, *ALONE], stderr=-1)
    assert PIP.returncode == 0, re.sub(r"(?<=//)[^/\s]*@|[?#]\S*", "", PIP.stderr.decode())

# %% [markdown]
# The dials. `FOLDER` is a model folder to serve instead of the one lesson 04 left, also one of its exports (fp8, w4a16); `PORT` 0 takes
# a free one; `QUESTIONS` 0 leaves their number to the profile. `RIVALS` are what the server is measured against, `SIDE_BY_SIDE` serves
# base and adapter together at the end. `KEEP_RUNNING` leaves the last server up when the lesson is over, until the kernel ends, with a
# chat box to type in. `STOP_OTHERS` may end a server that another notebook of this run has up.

# %% tags=["parameters"]
PROFILE: str = "auto"
MODEL: str = ""
RUN_NAME: str = ""
FOLDER: str = ""
ENGINE: str = "auto"
PORT: int = 0
QUESTIONS: int = 0
RIVALS: str = "generate,transformers-serve"
SIDE_BY_SIDE: bool = True
KEEP_RUNNING: bool = False
STOP_OTHERS: bool = False

# %% [markdown]
# If there is no merged model in this run folder yet, lesson 04 runs now.

# %%
import nbutils
from pathlib import Path
from nbutils import profiles

lesson = nbutils.start("05_serve", globals())
lesson.require("02_data_prep" if FOLDER else "04_merge")
folder = Path(profiles.model_folder(Path(FOLDER).expanduser() if FOLDER else lesson.run.merged))

# %% [markdown]
# A server that an earlier start of this lesson left up would hold the card's memory: it is ended here. One that another open notebook
# uses is named instead, with its address, so that you can ask it; `STOP_OTHERS` ends that one too. Unknown rivals are told now as well.

# %%
from nbutils import bench, serving

serving.make_way(lesson.run.path, STOP_OTHERS)
print("measured beside the server:", ", ".join(bench.chosen(RIVALS)) or "nothing")

# %% [markdown]
# ## What it should say
#
# A server is measured against plain transformers. That needs the whole model on this machine once, in 16 or 32 bits. Where it does
# not fit (a 7B on a T4), and for an export, which only vLLM reads, what lesson 04 kept of the merged model takes its place.

# %%
from nbutils import exporting

reference = exporting.reference(folder, lesson, ENGINE)
dtype = reference.dtype
print(reference.reason)

# %% [markdown]
# The questions are the held-back rows; those that the server could not take are left out.

# %%
from transformers import AutoModelForCausalLM, AutoTokenizer
from nbutils import data, evaluation

size = lesson.profile.evaluation
_, held_back = data.load(lesson.run.data)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
wanted = size.model_copy(update={"rows": QUESTIONS or size.rows})
asked = {"thinking": reference.thinking(tokenizer, held_back), "limit": reference.reach(lesson.profile.serve.max_model_len)}
exam = evaluation.Exam(lesson.run.path, tokenizer, held_back, wanted, dtype, **asked)
questions, references = exam.questions, exam.references

# %% [markdown]
# The answers: greedy, in the precision we will serve in; or those of lesson 04.

# %%
model = None
if reference.loads:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map={"": 0 if lesson.card else "cpu"}, trust_remote_code=False)
local = exam.generate(model) if reference.loads else reference.answers(exam, held_back, size)
print(f"{len(local)} answers, {sum(len(answer.token_ids) for answer in local)} tokens")

# %% [markdown]
# Equal answers can hide a changed model, so the predictions of lesson 04's fixed set are compared too. If lesson 04 left none for
# this model, they are read now.

# %%
readings = reference.readings(exam, model)
print(readings.fixed)

# %% [markdown]
# ## How fast without a server
#
# The same prompts for everybody: words at random, so that nobody has an answer ready, and answers of a fixed length. Plain `generate`
# takes one at a time, or a batch that waits for its slowest. Everything measured goes to `bench.json` in the run folder.

# %%
settings = bench.Settings((1, 8, 32, 128) if lesson.card else (1, 8, 32), *((128, 128) if lesson.card else (64, 64)))
board = bench.Board(lesson.run.path / "bench.json", settings, {"model": lesson.model_name, "dtype": dtype})
rivals = board.invited(RIVALS, reference.obstacle)
if "generate" in rivals:
    board.add(bench.static(model, settings, tokenizer))

# %% [markdown]
# When one person asks, every token needs all weights read from memory once. That is the limit no engine can beat on this card.

# %%
if lesson.card:
    board.limit("vllm", bench.limit(folder, bench.copy_bandwidth()))

# %% [markdown]
# Then the model leaves the memory: a server wants the card to itself. Should somebody else hold a part of it, he is named.

# %%
del model
serving.free_card()

# %% [markdown]
# ## The engine
#
# vLLM needs a card of capability 7.5 (a T4) or newer, and has a build for CPUs. Older cards are served by transformers itself.

# %%
from nbutils import hardware

engine = hardware.engine(lesson.card) if ENGINE == "auto" else hardware.Choice(ENGINE, "parameter ENGINE")
print(f"engine: {engine.value} ({engine.reason})")

# %% [markdown]
# vLLM brings its own torch, and installing it here would replace the one you train with. So it lives in a virtual environment of its
# own, built once, in the version that fits driver and Python; the server is another process, and this notebook only talks to it.

# %%
environment = serving.ensure_environment(engine.value)
print(environment)

# %% [markdown]
# ## The flags
#
# - `dtype`: the precision we measured in (16 bits for an export). A T4 has no bfloat16, there it is float16, which vLLM also calls `half`.
# - `max-model-len`: prompt and answer together. The cache is planned for it, so ask for what you need and not for what the model could.
# - `max-num-seqs`: how many requests are answered together; more wait in line. Older texts say `--max-batch-size`: vLLM has no such flag.
#   It fills every step anew from whoever is there; this flag and `max-num-batched-tokens` bound a step.
# - `gpu-memory-utilization`: the share of the card vLLM takes, weights and cache.
# - `--swap-space` is gone too: when the cache is full, a request is computed again later. `kv-offloading-size` lends it RAM instead.
# - `enforce-eager`: no compilation. A slower server that starts sooner: right for a CPU and for a look, wrong for a long service on a card.
#
# The chat template is not among them: the server reads the model's own, from the same folder. What this machine wants of them:

# %%
from nbutils import dashboard

own = serving.flags_for(lesson.card, folder)
dashboard.show_choices(own, "\n".join(f"{flag}: {choice.value} ({choice.reason})" for flag, choice in own.items()))

# %% [markdown]
# All together. A flag that the installed version does not know stops the start, with the nearest name it does know.

# %%
serve = lesson.profile.serve
shared = {"served-model-name": "course", "dtype": reference.served_in, **reference.flags(exam.thinking)}
shared |= {"max-model-len": serve.max_model_len, "max-num-seqs": serve.max_num_seqs}
own = {flag: choice.value for flag, choice in own.items()}
flags = {
    "vllm": {**own, **shared, "gpu-memory-utilization": serve.gpu_memory},
    "vllm-cpu": {**own, **shared},
    "transformers": {"dtype": dtype, "device": "cuda:0" if lesson.card else "cpu"},
}[engine.value]

# %% [markdown]
# This is the line you would type in a terminal; here it is run for you. The server listens on this machine only (`127.0.0.1`). Some
# platforms lead from outside to certain ports; then one of those is taken. vLLM gets a key that every client must show: others may
# use this machine too.

# %%
port = PORT or serving.preferred_port(lesson.platform, engine=engine.value)
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

client = OpenAI(base_url=server.url, api_key=server.api_key or "none-is-checked")
response = client.chat.completions.create(
    model=server.model_name, messages=questions[0], max_tokens=size.max_new_tokens, temperature=0
)
print(questions[0][-1]["content"], "\n->", response.choices[0].message.content)

# %% [markdown]
# The same from a terminal, and the page that lists everything the server understands (its OpenAPI description, to be tried out there).
# vLLM asks for a key, `server.api_key`. To know it in a terminal too, choose one yourself: set `VLLM_API_KEY` there and for Jupyter
# before you start it. Never write it into a notebook.

# %%
import json, shlex

body = json.dumps({"model": server.model_name, "messages": questions[0], "temperature": 0}, ensure_ascii=False)
key = ' -H "Authorization: Bearer $VLLM_API_KEY"' if server.api_key else ""
print(f'curl {server.url}/chat/completions -H "Content-Type: application/json"{key} -d {shlex.quote(body)}')
print(f"everything it understands: {server.root}/docs")

# %% [markdown]
# ## All of them at once
#
# `serving.ask` makes that same call for every question, many in flight. vLLM also tells which tokens went in and came out.

# %%
asking = {"tools": exam.tools, "token_ids": engine.value != "transformers", "at_once": serve.max_num_seqs}
served = serving.ask(client, server.model_name, questions, exam.max_new_tokens, **asking)

# %% [markdown]
# ## Does it say the same?
#
# Prompts first: if they differ, the server uses another template than training did, and everything after that is luck. Then the
# answers. In float32 not one token may differ. In 16 bits two kernels round differently and a close choice may tip: that is reported.
# With the weights of an export more of them tip: that is its price, and no error.

# %%
same_answers = serving.compare(served, local)
print(same_answers)
serving.require_parity(same_answers, reference.precision)

# %% [markdown]
# Now the predictions: what vLLM expects at every position of the fixed set, against the merged model and, from lesson 04, the way
# there from the 4-bit base. A server that is nearer to the base, or many times further away than the noise lesson 04 measured, runs
# another model and stops the lesson. An export gets its line here, as in lesson 04.

# %%
from nbutils import parity

same_model = parity.Report(readings)
if engine.value != "transformers":
    told = parity.measure_server(server.url, server.model_name, readings.fixed, server.api_key)
    same_model = reference.compared(readings, told)
    dashboard.show_table(same_model.table(), "The same model?", same_model.text())
    print(same_model.verdict)
    same_model.require()

# %% [markdown]
# Some of the answers, for your own eyes; a tick means that it is exactly what was wanted.

# %%
columns = {reference.called: [answer.text for answer in local], "server": [answer.text for answer in served]}
dashboard.show_table(evaluation.before_after_table(questions, references, columns, rows=4), "The same words")

# %% [markdown]
# ## How fast with a server
#
# One asks, then eight, then more. *First token* is what a reader waits for; *per token* is how fast the text then grows; each with what
# half, nine of ten and 99 of 100 stay below. Meanwhile the server tells how many it works on, how many wait and how full its cache is.

# %%
label, load = ("vllm", settings) if engine.value != "transformers" else ("transformers serve", settings.few())
board.add(bench.measure(bench.target_of(server), label, load, tokenizer))

# %% [markdown]
# The rival that brings a server of its own: `transformers serve`, on the same prompts, after ours has made room.

# %%
if "transformers-serve" in rivals and engine.value != "transformers":
    server.stop()
    bench.Bench(folder, board, card=lesson.card).try_transformers()

# %% [markdown]
# The table, and what it means. With the tiny model on a CPU much of the time is HTTP; on a card the gap is the whole reason for a
# server: weights are read once for everybody who asks. (`python -m nbutils bench-serve --model FOLDER` measures this by itself.)

# %%
board.show("Speed on your own model")

# %% [markdown]
# The same as a picture.

# %%
board.plot(lesson.run.path / "bench.png")

# %% [markdown]
# ## Base and tuned, side by side
#
# An adapter need not be merged to be served: with `enable-lora` vLLM computes W·x + scale·B·(A·x) for each request, and one server
# has the base and any number of adapters, each under a name. It costs some speed; merged is for the one model you keep.
# Tokenizer and stop tokens are those of the merged folder, so that both are asked in the same words.

# %%
from nbutils.errors import CourseError

beside = SIDE_BY_SIDE and not FOLDER and engine.value != "transformers"
if beside:
    server.stop()
    both = flags | {"served-model-name": "base", "tokenizer": folder, "generation-config": folder}
    try:
        where = {"port": server.port, "log": lesson.run.logs / "serve_both.log", "api_key": server.api_key}
        server = serving.Server(lesson.model, environment, flags=both, adapters={"tuned": lesson.run.adapter}, **where)
    except CourseError as reason:
        beside = False
        print(f"merged only: {reason}")

# %% [markdown]
# The server that the rest of the lesson talks to: that one, or where it could not be, the merged model's again.

# %%
if not server.running:
    server.start()
    server.wait()
client = server.client()
print("names:", ", ".join(server.names))

# %% [markdown]
# The held-back questions again, to each of the names.

# %%
answers = {name: serving.ask(client, name, questions, exam.max_new_tokens, **asking) for name in server.names} if beside else {}
same = {name: serving.compare(said, served).identical for name, said in answers.items()}
print(*(f"{name:5}  {count} of {len(served)} answers are those of the merged model" for name, count in same.items()), sep="\n")

# %% [markdown]
# And the scores of lesson 04, of all: the server's are what your users will get.

# %%
scores = evaluation.score_table(exam, {reference.called: local, "server": served} | answers)
dashboard.show_table(scores, "The same scores", dashboard.aligned(scores))

# %% [markdown]
# ## Talk to it
#
# One example. With `KEEP_RUNNING` set, the server stays up and a chat box follows: type, press Enter, and watch both answer; *Stop*
# hangs up, and the server turns to others.

# %%
from nbutils import chatbox

told = {"opening": questions[-1][:-1], "max_tokens": size.max_new_tokens, "temperature": 0}
talks = [chatbox.Talk(Path(name).name, client, name, **told) for name in server.names]
box = chatbox.chat(talks, [questions[-1][-1]["content"]], live=KEEP_RUNNING)

# %% [markdown]
# ## Exercise
#
# The server throws dice only if you ask it to. Set `temperature` to 1.5, run this cell again, and see what happens to a model that was so
# sure. After *Run all* the server has stopped: set `KEEP_RUNNING = True` above and run all again first.

# %%
temperature = 0.0
asked = dict(model=server.names[-1], messages=questions[0], max_tokens=size.max_new_tokens, temperature=temperature)
times = 3 if server.running else 0
said = {client.chat.completions.create(**asked).choices[0].message.content for _ in range(times)}
expected = [1] if temperature == 0 else [2, 3]
mark = "TODO: set KEEP_RUNNING" if not times else " OK " if len(said) in expected else "FAIL"
print(f"[{mark}] saw {len(said)} different answers at temperature {temperature}, expected {expected}: try 0.0, 1.0 and 1.5")

# %% [markdown]
# A server nobody needs is memory nobody has. One that stays up is noted in the run folder: the next start of this lesson finds it, and
# with `SIDE_BY_SIDE` off, when it is the merged model's, lesson 04 lets it answer.

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
# - proof, token by token and in nats, that it says what transformers says,
# - its speed with one and with many asking at once, next to plain `generate` and `transformers serve`,
# - base and tuned side by side under one address, and a chat with both.
#
# That is the whole course. Lesson 06 trains on several cards, lesson 07 shows where a base model comes from.

# %%
lesson.finish(
    engine=engine.value,
    rows_left_out=exam.left_out,
    identical_answers={"count": same_answers.identical, "total": same_answers.total},
    identical_prompts={"count": same_answers.same_prompts, "total": same_answers.total},
    parity=same_model.facts(),
    side_by_side=same,
    exact_match=evaluation.exact_match([answer.text for answer in served], references),
    startup_seconds=round(startup_seconds, 1),
    tokens_per_second=board.speeds(),
)
