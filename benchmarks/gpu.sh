#!/usr/bin/env bash
# What docs/lab-notebook.md reports of GPUs, on the GPUs that are there. usage: benchmarks/gpu.sh [STAGE ...]
#
#   example   sft and rl of examples/reverse_text/rl_gpu.toml, end to end, and where the time of a step went
#   table     embedded engine beside vLLM, 0.6B, 256 x (128 + 512) tokens: offline, and over HTTP with vLLM's own server
#   update    weight updates under load: files, and NCCL where there are two GPUs
#   logprobs  server against trainer, both backends
#   tests     tests/gpu
#   fleet     kill -9 one of two servers under load
#
# Every stage has a deadline and writes a log into $OUT (default outputs/gpu), whose end is shown.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-outputs/gpu}
PYTHON=${PYTHON:-python3}
gpus=$(nvidia-smi -L 2>/dev/null | grep -c GPU)
mkdir -p "$OUT"
failed=0

# step NAME SECONDS LINES COMMAND...: run with a deadline, show the last lines of the log
step() {
  local name=$1 limit=$2 lines=$3 begun=$SECONDS
  shift 3
  timeout -k 15 "$limit" "$@" >"$OUT/$name.log" 2>&1
  local code=$?
  printf '\n=== %s: %d s, exit code %d\n' "$name" $((SECONDS - begun)) $code
  tail -n "$lines" "$OUT/$name.log"
  if [ $code -ne 0 ]; then failed=1; fi
}

example() {
  local out=outputs/reverse_text_gpu
  step data 60 1 "$PYTHON" examples/reverse_text_cpu/make_sft_data.py $out/sft.jsonl \
    --num-examples 20000 --min-words 2 --max-words 4 --max-chars 24
  step sft 180 1 "$PYTHON" -m prime_rl.cli sft @ examples/reverse_text/sft_gpu.toml --clean
  step rl 300 60 "$PYTHON" -m prime_rl.cli rl @ examples/reverse_text/rl_gpu.toml --clean
  cp $out/rl/logs/inference.log "$OUT/rl-inference.log"
  cat $out/rl/logs/{orchestrator,trainer}.log >"$OUT/rl-processes.log"
  step breakdown 30 30 "$PYTHON" benchmarks/breakdown.py $out/rl
}

table() {
  local common=(--model 0.6b --requests 256 --concurrency 256 --prompt-tokens 128 --new-tokens 512 --threads 8)
  step offline 240 8 "$PYTHON" benchmarks/inference.py "${common[@]}" --modes offline --json "$OUT/offline.json" \
    --logs "$OUT/sides"
  step http 300 8 "$PYTHON" benchmarks/inference.py "${common[@]}" --modes http --sides embedded vllm stock --clients 2 \
    --json "$OUT/http.json" --logs "$OUT/sides"
}

update() {
  local via=(filesystem) common=(--model 0.6b --concurrency 128 --new-tokens 256)
  if [ "$gpus" -ge 2 ]; then via=(filesystem nccl); fi
  step update-vllm 280 14 "$PYTHON" benchmarks/update.py "${common[@]}" --backend vllm --via "${via[@]}" \
    --logs "$OUT/update-vllm"
  step update-embedded 150 10 "$PYTHON" benchmarks/update.py "${common[@]}" --backend embedded --logs "$OUT/update-embedded"
}

logprobs() {
  step logprobs 240 8 "$PYTHON" benchmarks/logprobs.py --model 0.6b --backends embedded vllm \
    --trainer-dtypes bfloat16 float32 --logs "$OUT/sides"
}

tests() {
  step tests 280 12 "$PYTHON" -m pytest -m gpu -p no:cacheprovider -o filterwarnings=default \
    -o addopts="--import-mode=importlib -ra" -q tests/gpu
}

fleet() {
  step fleet 280 25 "$PYTHON" benchmarks/fleet.py
}

for stage in "${@:-example}"; do
  case $stage in
  example | table | update | logprobs | tests | fleet) "$stage" ;;
  *) echo "no stage $stage; see the head of $0" >&2 && exit 2 ;;
  esac
done
exit $failed
