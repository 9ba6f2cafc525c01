#!/usr/bin/env bash
# Installs prime-rl into .venv of a checkout, which it clones where there is none. Meant to be run again as often as you like.
#   curl -sSL <address of this file> | bash -s -- [options] [extra ...]
set -euo pipefail

REPO=${REPO:-https://github.com/PrimeIntellect-ai/prime-rl.git}
UV_INSTALLER=https://astral.sh/uv/install.sh
PYTHON_FOR_UV=3.12
script=${BASH_SOURCE[0]:-} # empty when the script comes through a pipe

usage() {
  cat <<MSG
usage: install.sh [--dir DIR] [--yes] [--dry-run] [EXTRA ...]

Makes .venv with Python 3.11, 3.12 or 3.13 in a checkout of prime-rl and installs the package into it. The checkout is the one
that it is run in; where there is none, it clones one.

  EXTRA ...   extras of the package: vllm wandb tensorboard hub flash-attn, or none for the plain package.
              Not given: vllm where an NVIDIA GPU is seen, else none
  --dir DIR   the checkout, cloned where it does not exist; default: prime-rl
  --yes       never ask; installs uv where neither it nor a suitable Python is found
  --dry-run   print the steps and do nothing
  -h, --help

  REPO        variable: what is cloned, now $REPO
  PYTHON      variable: the Python to use
MSG
}

say() { printf '%s\n' "==> $*"; }
fail() {
  printf 'install.sh: %s\n' "$*" >&2
  exit 1
}

# run COMMAND ...: does it, or with --dry-run says it.
run() {
  printf '+'; printf ' %q' "$@"; printf '\n'
  if [ -z "$dry_run" ]; then "$@"; fi
}

is_checkout() { grep -qs '^name = "prime-rl"' "$1/pyproject.toml"; }

is_suitable() {
  "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

# Prints a suitable Python; nothing where there is none.
find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11; do
    if is_suitable "$candidate"; then command -v "$candidate"; return; fi
    if [ "$candidate" = "${PYTHON:-}" ]; then
      fail "PYTHON=$PYTHON is no Python 3.11, 3.12 or 3.13 with venv and ensurepip"
    fi
  done
}

# The script itself may come through standard input, so the answer is read from the terminal.
ask() {
  if [ -n "$yes" ] || [ -n "$dry_run" ]; then return; fi
  if ! { : >/dev/tty; } 2>/dev/null; then fail "$1 There is no terminal to ask at: run it with --yes"; fi
  local answer
  printf '%s [y/N] ' "$1" >/dev/tty
  read -r answer </dev/tty
  case $answer in [yY]*) ;; *) fail stopped ;; esac
}

get_uv() {
  if command -v uv >/dev/null; then return; fi
  command -v curl >/dev/null || fail "no Python 3.11, 3.12 or 3.13 was found, nor uv, nor curl to get it; install one of them"
  ask "No Python 3.11, 3.12 or 3.13 was found. Install uv, which brings one, from $UV_INSTALLER?"
  run bash -c "set -o pipefail; curl -LsSf $UV_INSTALLER | sh"
  PATH="$HOME/.local/bin:$PATH"
}

# Sets `checkout`: the one the script lies in, the one it is run in, the one it cloned before, or a new clone.
get_checkout() {
  if [ -z "$dir" ]; then
    if [ -f "$script" ] && is_checkout "$(dirname "$script")/.."; then checkout=$(cd "$(dirname "$script")/.." && pwd)
    elif is_checkout .; then checkout=$PWD
    fi
  fi
  if [ -z "$checkout" ]; then
    checkout=${dir:-prime-rl}
    case $checkout in /*) ;; *) checkout=$PWD/$checkout ;; esac
    if [ -e "$checkout" ]; then
      is_checkout "$checkout" || fail "$checkout is there and holds no prime-rl; choose another place with --dir"
    else
      run git clone "$REPO" "$checkout"
    fi
  fi
  say "installing into $checkout"
}

make_venv() {
  local venv=$checkout/.venv python
  if is_suitable "$venv/bin/python" && "$venv/bin/python" -c 'import pip'; then say "using $venv as it is"; return; fi
  [ ! -e "$venv" ] || fail "$venv holds no Python 3.11, 3.12 or 3.13 with pip; remove it and run this again"
  python=$(find_python)
  if [ -n "$python" ]; then run "$python" -m venv "$venv"
  else get_uv; run uv venv --seed --python "$PYTHON_FOR_UV" "$venv"
  fi
}

has_gpu() { nvidia-smi -L 2>/dev/null | grep -q GPU; }

install_package() {
  if [ -z "$extras" ]; then
    if has_gpu; then extras=vllm; else extras=none; fi
  fi
  if [ "$extras" != none ]; then
    say "installing the extras $extras (a few minutes the first time)"
    run "$checkout/.venv/bin/python" -m pip install -q --disable-pip-version-check -e "$checkout[$extras]"
  fi
  run make -C "$checkout" install
}

main() {
  dry_run="" yes="" dir="" extras="" checkout=""
  while [ $# -gt 0 ]; do
    case $1 in
      -h | --help) usage; return ;;
      --dry-run) dry_run=1 ;;
      --yes) yes=1 ;;
      --dir) [ $# -gt 1 ] || fail "--dir needs a directory"; dir=$2; shift ;;
      vllm | wandb | tensorboard | hub | flash-attn | all | none) extras=${extras:+$extras,}$1 ;;
      *) fail "unknown argument $1; see: install.sh --help" ;;
    esac
    shift
  done
  command -v git >/dev/null || fail "git is not installed (apt-get install git, or: xcode-select --install)"
  command -v make >/dev/null || fail "make is not installed (apt-get install make, or: xcode-select --install)"
  get_checkout
  make_venv
  install_package
  say "what next:"
  if [ "$checkout" != "$PWD" ]; then printf '  cd %q\n' "$checkout"; fi
  printf '  make demo                     # a model learns in front of you, without a GPU\n'
  printf '  source .venv/bin/activate     # then: rl --help\n'
}

main "$@"
