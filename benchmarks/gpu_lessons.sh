#!/usr/bin/env bash
# Lessons 01-04 under papermill on a CUDA machine: the tiny model, then random weights in the shape of Qwen2.5-7B for
# 10 steps; where a folder with a real model and a file of rows are named, that model on those rows as well.
#   benchmarks/gpu_lessons.sh FOLDER [MODEL ROWS]      results: FOLDER/{tiny,q7b,real}/facts.json, executed notebooks
# Needs a Python with the course and its extra train, 45 GB of disk in FOLDER and a GPU of 24 GB or more; no network.
set -euo pipefail
cd "$(dirname "$0")/.."
export NBUTILS_HOME="$1"
lessons=(--only 01 --only 02 --only 03 --only 04)
python3 -m nbutils run --profile tiny "${lessons[@]}"
python3 benchmarks/random_model.py Qwen2.5-7B "$1/random-7b"
python3 -m nbutils run --profile ampere_24gb -p MODEL "$1/random-7b" -p MAX_STEPS 10 -p RUN_NAME q7b "${lessons[@]}"
if [ $# -ge 3 ]; then python3 -m nbutils run -p MODEL "$2" -p DATA "$3" -p RUN_NAME real "${lessons[@]}"; fi
