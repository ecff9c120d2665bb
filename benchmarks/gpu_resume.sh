#!/usr/bin/env bash
# A 7B-shaped training on a CUDA machine, killed with SIGKILL after its second kept checkpoint and started again unchanged.
#   benchmarks/gpu_resume.sh FOLDER      results: FOLDER/q7b/facts.json, FOLDER/first.log, FOLDER/second.log
# Needs a Python with the course and its extra train, 30 GB of disk in FOLDER and a GPU of 24 GB or more; no network.
set -euo pipefail
cd "$(dirname "$0")/.."
export NBUTILS_HOME="$1"
mkdir -p "$1"
python3 benchmarks/random_model.py Qwen2.5-7B "$1/random-7b"
lesson=(python3 notebooks/03_qlora.py --PROFILE ampere_24gb --MODEL "$1/random-7b" --MAX_STEPS 30 --SAVE_STEPS 5 --RUN_NAME q7b)
"${lesson[@]}" > "$1/first.log" 2>&1 &
until [ -e "$1/q7b/checkpoints/checkpoint-10.json" ]; do sleep 0.1; kill -0 $!; done
kill -9 $!
"${lesson[@]}" > "$1/second.log" 2>&1
python3 -m nbutils checkpoints verify q7b
grep -a "resumed_from_step" "$1/q7b/facts.json"
