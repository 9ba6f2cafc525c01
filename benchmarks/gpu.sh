#!/usr/bin/env bash
# What docs/lab-notebook.md and docs/benchmarks.md report of GPUs, on the GPUs that are there.
#
#   benchmarks/gpu.sh all             every stage but `training`, in this order: what has never been measured comes first
#   benchmarks/gpu.sh STAGE ...       these stages
#   DRY=1 benchmarks/gpu.sh all       say what would run, and for how long at most; without GPUs: as with two
#
#   nccl       tests/gpu/test_nccl.py: every parameter from the trainer to vLLM, from GPU to GPU and through files
#   update     weight updates under load: NCCL (two GPUs), then files, each with a table of its own
#   http       tokens/s over HTTP: embedded engine, vLLM behind our server, vLLM's own; 0.6B, 256 x (128 + 512) tokens
#   logprobs   server against trainer on the same tokens, both backends
#   contract   tests/contract, both backends on the GPU
#   fleet      kill -9 one of two servers under load (two GPUs)
#   gputests   tests/gpu without test_nccl.py, and tests/parity; nothing else may hold the GPU
#   swap       weight updates of the embedded engine under load
#   offline    tokens/s without HTTP
#   filters    offline with top_p and a repetition penalty
#   trainer    the trainer beside the published figures: the main rows of benchmarks/trainer.py, most important first
#   profile    where the GPU time of three of these rows goes
#   scaling    the 4B shape under torchrun on one, two, four GPUs (two GPUs or more)
#   training   the other rows: LoRA, 65,536 tokens, without activation checkpointing, offload (20 minutes at most)
#   example    sft, then rl: examples/reverse_text/rl_gpu.toml end to end, and where the time of a step went
#
# Every step has a deadline. Its lines are shown as they come, and are in $OUT (default outputs/gpu) as well.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-outputs/gpu}
PYTHON=${PYTHON:-python3}
DRY=${DRY:-}
gpus=$(nvidia-smi -L 2>/dev/null | grep -c GPU)
if [ -n "$DRY" ] && [ "$gpus" -eq 0 ]; then gpus=2; fi
run=outputs/reverse_text_gpu
mkdir -p "$OUT"
failed=0
running=
trap 'if [ -n "$running" ]; then kill $running 2>/dev/null; fi' EXIT
export PYTHONUNBUFFERED=1

# step NAME SECONDS COMMAND...: run with a deadline
step() {
  local name=$1 limit=$2 begun=$SECONDS
  shift 2
  printf '\n=== %s: at most %d s: %s\n' "$name" "$limit" "$*"
  if [ -n "$DRY" ]; then return; fi
  : >"$OUT/$name.log"
  timeout -k 15 "$limit" "$@" >"$OUT/$name.log" 2>&1 &
  running=$!
  tail -n +1 -f --pid=$running "$OUT/$name.log" # not a pipe: what a step leaves behind would hold that open
  wait $running
  local code=$?
  printf '=== %s: %d s, exit code %d\n' "$name" $((SECONDS - begun)) "$code"
  if [ "$code" -ne 0 ]; then failed=1; fi
}

# free_gpus: a server that some step left behind would make the next one fail for its memory
free_gpus() {
  if [ -n "$DRY" ]; then return; fi
  local end=$((SECONDS + 20))
  while nvidia-smi --query-compute-apps=pid,used_memory --format=csv,noheader | grep .; do
    if [ $SECONDS -ge $end ]; then
      echo "something else holds the GPU (above): end it first" >&2
      failed=1
      return 1
    fi
    sleep 1
  done
}

# The same whatever pytest the machine has: no plugins of the project's configuration are needed.
pytest=("$PYTHON" -m pytest -p no:cacheprovider -o filterwarnings=default -o addopts=--import-mode=importlib -ra -v)
shape=(--model 0.6b --requests 256 --concurrency 256 --prompt-tokens 128 --new-tokens 512 --threads 8)
load=(--model 0.6b --concurrency 128 --new-tokens 256 --updates 3)

nccl() { if [ "$gpus" -ge 2 ]; then step nccl 400 "${pytest[@]}" -s -m gpu tests/gpu/test_nccl.py; fi; }

update() {
  if [ "$gpus" -ge 2 ]; then
    step update-nccl 240 "$PYTHON" benchmarks/update.py "${load[@]}" --backend vllm --via nccl --logs "$OUT/update-nccl"
  fi
  step update-files 240 "$PYTHON" benchmarks/update.py "${load[@]}" --backend vllm --via filesystem \
    --logs "$OUT/update-files"
}

http() {
  step http 240 "$PYTHON" benchmarks/inference.py "${shape[@]}" --modes http --sides embedded vllm stock --clients 2 --budget 150 \
    --gpu-memory-utilization 0.25 --logs "$OUT/http"
}

logprobs() {
  for backend in embedded vllm; do
    step "logprobs-$backend" 240 "$PYTHON" benchmarks/logprobs.py --model 0.6b --backends "$backend" \
      --trainer-dtypes bfloat16 float32 --logs "$OUT/logprobs-$backend"
  done
}

contract() {
  local python
  python=$(command -v "$PYTHON")
  for backend in embedded vllm; do # a cause is told at the end only, which a deadline would cut off: end after eight
    step "contract-$backend" 480 env CONTRACT_VLLM_PYTHON="$python" CONTRACT_DEVICE=cuda \
      "${pytest[@]}" --maxfail=8 --tb=short tests/contract -k "$backend"
  done
}

fleet() { step fleet 280 "$PYTHON" benchmarks/fleet.py; }

gputests() {
  free_gpus || return
  step gputests 420 "${pytest[@]}" -m gpu tests/gpu tests/parity --ignore=tests/gpu/test_nccl.py
}

swap() {
  step swap 150 "$PYTHON" benchmarks/update.py "${load[@]}" --backend embedded --logs "$OUT/swap"
}

offline() {
  step offline 300 "$PYTHON" benchmarks/inference.py "${shape[@]}" --modes offline --logs "$OUT/offline"
}

filters() {
  step filters 300 "$PYTHON" benchmarks/inference.py "${shape[@]}" --modes offline --top-p 0.95 \
    --repetition-penalty 1.1 --logs "$OUT/filters"
}

trainer() { free_gpus && measure trainer 570 --rows main; }

profile() { free_gpus && measure profile 400 --profile rl-0.6b-16k rl-4b-lora-16k sft-0.6b-8k; }

scaling() {
  local rows=(sft-4b-8k-x1 sft-4b-8k-x2)
  if [ "$gpus" -lt 2 ]; then return; fi
  if [ "$gpus" -ge 4 ]; then rows+=(sft-4b-8k-x4); fi
  free_gpus && measure scaling 480 --rows "${rows[@]}"
}

training() { free_gpus && measure training-long 590 --rows long && measure training-more 590 --rows more offload; }

# measure NAME SECONDS ARGUMENT...: benchmarks/trainer.py, which ends by itself before the deadline
measure() {
  local name=$1 limit=$2
  shift 2
  step "$name" "$limit" "$PYTHON" benchmarks/trainer.py "$@" --budget $((limit - 15)) --logs "$OUT/training" \
    --models "${TMPDIR:-/tmp}/trainer-bench-models" --json "$OUT/$name.json"
}

sft() {
  step data 60 "$PYTHON" examples/reverse_text_cpu/make_sft_data.py $run/sft.jsonl \
    --num-examples 20000 --min-words 2 --max-words 4 --max-chars 24
  step sft 180 "$PYTHON" -m prime_rl.cli sft @ examples/reverse_text/sft_gpu.toml --clean
}

rl() {
  step rl 240 "$PYTHON" -m prime_rl.cli rl @ examples/reverse_text/rl_gpu.toml --clean
  for process in inference orchestrator trainer; do
    if [ -z "$DRY" ]; then cp $run/rl/logs/$process.log "$OUT/rl-$process.log"; fi
  done
  step breakdown 30 "$PYTHON" benchmarks/breakdown.py $run/rl
}

example() { sft && rl; }

all=(trainer profile scaling nccl update http logprobs contract fleet gputests swap offline filters example)
stages=("$@")
if [ "$*" = all ]; then stages=("${all[@]}"); fi
for stage in "${stages[@]}"; do
  case " ${all[*]} training sft rl " in
  *" $stage "*) "$stage" ;;
  *) echo "no stage $stage; see the head of $0" >&2 && exit 2 ;;
  esac
done
exit $failed
