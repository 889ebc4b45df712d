#!/bin/bash
# A hybrid ladder of a public checkpoint: chats by the model itself, conversion, adaptation with distillation, comparison with the
# original. The commands are those of docs/training.md. What is done is in out/real-ladder, and the same command goes on where it was
# stopped. Hours on a GPU; on a CPU, to try it: MILLIONS=0.002 LENGTH=128 BATCH=4 MICRO=1 CHATS=4 HELD_OUT=300 TASKS="--problems 0 --calls 0"
set -euo pipefail
cd "$(dirname "$0")/../.."
: "${NAME:=smollm2}" "${LAYERS:=8 15 23}" "${MILLIONS:=10 50 200}" "${SEEDS:=0}" "${RANKS:=1}" "${RATE:=1e-4}"
: "${LENGTH:=1024}" "${BATCH:=64}" "${MICRO:=8}" "${CHATS:=1024}" "${HELD_OUT:=50000}" "${TASKS:=}"
py=.venv/bin/python out=out/real-ladder/$NAME models=("$NAME")
dir=$($py -c "import sys; from scripts.lib.real_models import fetch; print(fetch(sys.argv[1]))" "$NAME")
mkdir -p "$out"
steps() { echo $(($(printf %.0f "${1}e6") / (BATCH * LENGTH))); }
most=$(printf '%s\n' $MILLIONS | sort -g | tail -1)
$py -m training.own_chats --model "$dir" --tokens "$HELD_OUT" --length "$LENGTH" --batch "$CHATS" --first 1000000 --out "$out/held-out.jsonl"
$py -m training.own_chats --model "$dir" --tokens "$(printf %.0f "${most}e6")" --length "$LENGTH" --batch "$CHATS" --out "$out/chats.jsonl"
[ -e "$out/chats.json" ] || $py -m training.tokenize_data --model "$dir" --chat --sequence-length "$LENGTH" --out "$out/chats.bin" "$out/chats.jsonl"
for layers in $LAYERS; do
  converted=$out/$layers-0/model
  [ -e "$converted/config.json" ] || $py -m training.convert --model "$dir" --ladder-layers "$layers" --out "$converted" --force
  models+=("$converted")
  for millions in $MILLIONS; do
    for seed in $SEEDS; do
      run=$out/$layers-$millions-$seed
      [ -e "$run/model/config.json" ] || $py launch.py --ranks "$RANKS" -m training.adapt --model "$dir" --ladder-layers "$layers" \
        --data "$out/chats.bin" --sequence-length "$LENGTH" --global-batch "$BATCH" --micro-batch "$MICRO" --steps "$(steps "$millions")" \
        --learning-rate "$RATE" --seed "$seed" --out "$run" --resume
      models+=("$run/model")
    done
  done
done
$py -m scripts.quality.tasks --models "${models[@]}" --widths bfloat16 --chats "$out/held-out.jsonl" --name "real-ladder-$NAME" $TASKS
