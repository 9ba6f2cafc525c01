#!/usr/bin/env bash
# What docs/lab-notebook.md reports of GPUs, on the GPUs that are there. usage: benchmarks/gpu.sh STAGE ...
#
#   example    sft, then rl: examples/reverse_text/rl_gpu.toml end to end, and where the time of a step went
#   table      offline, then http: embedded engine beside vLLM, 0.6B, 256 x (128 + 512) tokens
#   update     weight updates of vLLM under load: files, and NCCL where there are two GPUs
#   swap       weight updates of the embedded engine under load
#   logprobs   server against trainer, both backends
#   tests      tests/gpu
#   fleet      kill -9 one of two servers under load
#
# Every step has a deadline and writes a log into $OUT (default outputs/gpu), whose end is shown.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-outputs/gpu}
PYTHON=${PYTHON:-python3}
gpus=$(nvidia-smi -L 2>/dev/null | grep -c GPU)
run=outputs/reverse_text_gpu
mkdir -p "$OUT"
failed=0

# step NAME SECONDS LINES COMMAND...: run with a deadline, show the last lines of the log
step() {
  local name=$1 limit=$2 lines=$3 begun=$SECONDS
  shift 3
  timeout -k 15 "$limit" "$@" >"$OUT/$name.log" 2>&1
  local code=$?
  printf '\n=== %s: %d s, exit code %d\n%s\n' "$name" $((SECONDS - begun)) $code "$(tail -n "$lines" "$OUT/$name.log")"
  if [ $code -ne 0 ]; then failed=1; fi
}

sft() {
  step data 60 1 "$PYTHON" examples/reverse_text_cpu/make_sft_data.py $run/sft.jsonl \
    --num-examples 20000 --min-words 2 --max-words 4 --max-chars 24
  step sft 180 1 "$PYTHON" -m prime_rl.cli sft @ examples/reverse_text/sft_gpu.toml --clean
}

rl() {
  step rl 240 60 "$PYTHON" -m prime_rl.cli rl @ examples/reverse_text/rl_gpu.toml --clean
  for process in inference orchestrator trainer; do cp $run/rl/logs/$process.log "$OUT/rl-$process.log"; done
  step breakdown 30 30 "$PYTHON" benchmarks/breakdown.py $run/rl
}

shape=(--model 0.6b --requests 256 --concurrency 256 --prompt-tokens 128 --new-tokens 512 --threads 8)

offline() {
  step offline 240 5 "$PYTHON" benchmarks/inference.py "${shape[@]}" --modes offline --logs "$OUT/offline"
}

http() {
  step http 300 6 "$PYTHON" benchmarks/inference.py "${shape[@]}" --modes http --sides embedded vllm stock --clients 2 \
    --logs "$OUT/http"
}

load=(--model 0.6b --concurrency 128 --new-tokens 256)

update() {
  local via=(filesystem)
  if [ "$gpus" -ge 2 ]; then via=(nccl filesystem); fi
  step update 280 14 "$PYTHON" benchmarks/update.py "${load[@]}" --backend vllm --via "${via[@]}" --logs "$OUT/update"
}

swap() {
  step swap 150 10 "$PYTHON" benchmarks/update.py "${load[@]}" --backend embedded --logs "$OUT/swap"
}

logprobs() {
  step logprobs 240 6 "$PYTHON" benchmarks/logprobs.py --model 0.6b --backends embedded vllm \
    --trainer-dtypes bfloat16 float32 --logs "$OUT/logprobs"
}

tests() {
  step tests 280 12 "$PYTHON" -m pytest -m gpu -p no:cacheprovider -o filterwarnings=default \
    -o addopts="--import-mode=importlib -ra" -q tests/gpu
}

fleet() {
  step fleet 280 25 "$PYTHON" benchmarks/fleet.py
}

for stage in "$@"; do
  case $stage in
  example) sft && rl ;;
  table) offline && http ;;
  sft | rl | offline | http | update | swap | logprobs | tests | fleet) "$stage" ;;
  *) echo "no stage $stage; see the head of $0" >&2 && exit 2 ;;
  esac
done
exit $failed
