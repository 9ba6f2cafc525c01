#!/usr/bin/env bash
# A tmux session in which a run is started and its logs are followed. usage: scripts/tmux.sh -h
set -euo pipefail

usage() {
  cat <<'MSG'
usage: bash scripts/tmux.sh [-s NAME] [-o DIR]
       bash scripts/tmux.sh NAME [DIR]         DIR is outputs/NAME unless given
       bash scripts/tmux.sh kill [NAME]

Opens a tmux session, or attaches to it where it exists. Its panes:
  Trainer       a shell: start the run here
  Orchestrator  follows DIR/logs/orchestrator.log; Ctrl-C gives a shell
  Inference     follows DIR/logs/inference.log; Ctrl-C gives a shell

  -s, --session-name NAME   default: prime-rl
  -o, --output-dir DIR      the run's output_dir, seen from the repository; default: outputs
  -h, --help
MSG
}

fail() {
  printf 'tmux.sh: %s\n' "$1" >&2
  exit 1
}

command=open session="" directory="" name="" second=""
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit ;;
    -s | --session-name) [ $# -gt 1 ] || fail "$1 needs a name"; session=$2; shift ;;
    -o | --output-dir) [ $# -gt 1 ] || fail "$1 needs a directory"; directory=$2; shift ;;
    --session-name=*) session=${1#*=} ;;
    --output-dir=*) directory=${1#*=} ;;
    -*) fail "unknown option $1; see: bash scripts/tmux.sh -h" ;;
    kill) command=kill ;;
    *)
      if [ -z "$name" ]; then name=$1
      elif [ -z "$second" ]; then second=$1
      else fail "one word too many: $1; see: bash scripts/tmux.sh -h"; fi
      ;;
  esac
  shift
done
[ -z "$session" ] || [ -z "$name" ] || fail "two names for one session: $session and $name"
[ -z "$directory" ] || [ -z "$second" ] || fail "two directories for one session: $directory and $second"
session=${session:-${name:-prime-rl}}
directory=${directory:-${second:-outputs${name:+/$name}}}
case $session in *[.:]*) fail "the name of a session cannot hold '.' or ':', got $session" ;; esac
command -v tmux >/dev/null || fail "tmux is not installed (apt-get install tmux, or brew install tmux)"

if [ "$command" = kill ]; then
  tmux kill-session -t "=$session" 2>/dev/null || fail "no session $session is running"
  echo "session $session is gone"
  exit
fi

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# furnish PANE TITLE [LOG]: what a person would type there, so that it is seen, and Ctrl-C leads back to the shell.
# The title is an option of our own because many a prompt sets the pane's.
furnish() {
  tmux set-option -p -t "$1" @title "$2"
  if [ -f "$root/.venv/bin/activate" ]; then tmux send-keys -t "$1" '. .venv/bin/activate' Enter; fi
  if [ $# -gt 2 ]; then tmux send-keys -t "$1" "tail -n 1000 -F $(printf %q "$3") 2>/dev/null" Enter; fi
}

open_session() {
  local trainer orchestrator inference
  trainer=$(tmux new-session -d -P -F '#{pane_id}' -s "$session" -c "$root" -x 200 -y 50)
  orchestrator=$(tmux split-window -v -l 66% -P -F '#{pane_id}' -t "$trainer" -c "$root")
  inference=$(tmux split-window -v -l 50% -P -F '#{pane_id}' -t "$orchestrator" -c "$root")
  tmux set-option -w -t "$trainer" pane-border-status top
  tmux set-option -w -t "$trainer" pane-border-format ' #{@title} '
  tmux set-option -t "$trainer" mouse on
  furnish "$trainer" Trainer
  furnish "$orchestrator" Orchestrator "$directory/logs/orchestrator.log"
  furnish "$inference" Inference "$directory/logs/inference.log"
  tmux select-pane -t "$trainer"
}

if tmux has-session -t "=$session" 2>/dev/null; then
  echo "session $session exists"
else
  open_session
  echo "session $session follows $directory"
fi
if [ ! -t 1 ]; then
  echo "attach to it: tmux attach -t $session"
elif [ -n "${TMUX:-}" ]; then
  exec tmux switch-client -t "=$session"
else
  exec tmux attach-session -t "=$session"
fi
