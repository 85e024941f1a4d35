#!/bin/bash
# Makes the head that is shipped for smollm2-135m again, on a GPU: examples/smollm2_head.sh FOLDER [CHATS.jsonl]
# CHATS.jsonl: more questions of your own, such as the training part of a public data set.
set -eu
FOLDER=$1 CHATS=${2:-} MODEL=${MODEL:-smollm2-135m}
TEXTS=${TEXTS:-26000} TASKS=${TASKS:-50000} PROMPTS=${PROMPTS:-44000} PROBLEMS=${PROBLEMS:-84000}
SELF_WRITTEN=${SELF_WRITTEN:-48000} MINUTES=${MINUTES:-11.5} INIT_FROM=${INIT_FROM:-benchmarks/heads/smollm2-135m-first} SAMPLING=${SAMPLING:-}
TRAINING=${TRAINING:---batch-tokens 24576 --draft-vocab-size 12288 --intermediate-size 2304}
cd "$(dirname "$0")/.." && mkdir -p "$FOLDER"
python examples/training_tasks.py texts "$TEXTS" > "$FOLDER/texts.jsonl"
python examples/sample_answers.py "$MODEL" --data "$FOLDER/texts.jsonl" --temperatures 0.9 --max-tokens 400 \
    $SAMPLING --out "$FOLDER/written.jsonl"
python examples/training_tasks.py tasks "$TASKS" --answers "$FOLDER/written.jsonl" --model "$MODEL" > "$FOLDER/tasks.jsonl"
python examples/training_prompts.py "$PROMPTS" > "$FOLDER/prompts.jsonl"
python examples/training_problems.py "$PROBLEMS" ${CHATS:+--questions "$CHATS"} > "$FOLDER/problems.jsonl"
DATA="--data $FOLDER/tasks.jsonl --data $FOLDER/prompts.jsonl --data $FOLDER/problems.jsonl ${CHATS:+--data $CHATS}"
python examples/sample_answers.py "$MODEL" $DATA --self-written "$SELF_WRITTEN" --temperatures 0,0,0,0.7,1 \
    $SAMPLING --out "$FOLDER/answers.jsonl"
python -m paceline train eagle3 "$MODEL" --data "$FOLDER/answers.jsonl" --data "$FOLDER/written.jsonl" --minutes "$MINUTES" \
    --init-from "$INIT_FROM" --unroll 6 --step-decay 0.85 --learning-rate 0.001 --average 0.9985 --round-weights \
    --max-length 768 --held-out 0.004 $TRAINING --out "$FOLDER/head"
python -m paceline export "$FOLDER/head" "$FOLDER/small" --format sglang --quantization int4
