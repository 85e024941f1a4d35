#!/bin/bash
# Makes the head that is shipped for qwen2.5-coder-1.5b again, on a GPU: examples/qwen_head.sh FOLDER [CHATS.jsonl]
# CHATS.jsonl: more questions of your own, such as the training part of a public data set.
set -eu
FOLDER=$1 CHATS=${2:-} MODEL=${MODEL:-qwen2.5-coder-1.5b}
TEXTS=${TEXTS:-5400} TASKS=${TASKS:-36000} PROMPTS=${PROMPTS:-10000} PROBLEMS=${PROBLEMS:-13000}
ANSWERS=${ANSWERS:---max-prompt-tokens 560 --max-tokens 384} MINUTES=${MINUTES:-9}
TRAINING=${TRAINING:---batch-tokens 12288 --keep-states 88 --draft-vocab-size 16384 --intermediate-size 4096}
cd "$(dirname "$0")/.." && mkdir -p "$FOLDER"
python examples/training_tasks.py texts "$TEXTS" > "$FOLDER/texts.jsonl"
python -m paceline train answers "$MODEL" --data "$FOLDER/texts.jsonl" $ANSWERS --temperatures 0.9 --out "$FOLDER/written.jsonl"
python examples/training_tasks.py tasks "$TASKS" --answers "$FOLDER/written.jsonl" --model "$MODEL" > "$FOLDER/tasks.jsonl"
python examples/training_prompts.py "$PROMPTS" > "$FOLDER/prompts.jsonl"
python examples/training_problems.py "$PROBLEMS" ${CHATS:+--questions "$CHATS"} > "$FOLDER/problems.jsonl"
DATA="--data $FOLDER/tasks.jsonl --data $FOLDER/prompts.jsonl --data $FOLDER/problems.jsonl ${CHATS:+--data $CHATS}"
python -m paceline train answers "$MODEL" $DATA $ANSWERS --temperatures 0 --out "$FOLDER/answers.jsonl"
python -m paceline train eagle3 "$MODEL" --data "$FOLDER/answers.jsonl" --data "$FOLDER/written.jsonl" --minutes "$MINUTES" \
    --unroll 6 --step-decay 0.85 --learning-rate 0.0012 --average 0.999 --round-weights --max-length 960 --held-out 0.008 \
    $TRAINING --out "$FOLDER/head"
python -m paceline export "$FOLDER/head" "$FOLDER/small" --format sglang --quantization int4
