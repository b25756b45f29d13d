#!/usr/bin/env bash
# Starts a server on free loopback ports, runs the demo against it, stops that server.
#
#   tools/demo.sh [build folder] [ssmd-demo flags...]      default: build/release
#
# Exit status: the demo's; 1 when the server does not start. SSMD_KEEP_LOG=FILE keeps the server's log.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$root/build/release
if [[ $# -gt 0 && $1 != -* ]]; then
  build=$1
  shift
fi
server=$build/service/ssmd-server
demo=$build/client/demo/ssmd-demo
for binary in "$server" "$demo"; do
  if [[ ! -x $binary ]]; then
    echo "demo.sh: $binary is missing: build first (make demo does)" >&2
    exit 1
  fi
done

folder=$(mktemp -d)
log=${SSMD_KEEP_LOG:-$folder/server.log}
server_pid=
demo_pid=
stop() {
  for pid in $demo_pid $server_pid; do
    kill -TERM "$pid" 2>/dev/null || true
    wait "$pid" 2>/dev/null || true
  done
  rm -rf "$folder"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# The server refuses SSMD_ variables that are not settings of its own.
env -u SSMD_KEEP_LOG "$server" --listen 127.0.0.1:0 --metrics-listen 127.0.0.1:0 \
  --drain-timeout-ms 0 >"$folder/ready" 2>"$log" &
server_pid=$!

# The server prints one line when it listens: "ssmd-server listening on A, metrics on B".
ready=
for _ in $(seq 100); do
  ready=$(grep -m1 '^ssmd-server listening on ' "$folder/ready" || true)
  [[ -n $ready ]] && break
  kill -0 "$server_pid" 2>/dev/null || break
  sleep 0.1
done
if [[ ! $ready =~ ^ssmd-server\ listening\ on\ ([^,]+),\ metrics\ on\ (.+)$ ]]; then
  echo "demo.sh: the server did not start:" >&2
  tail -n 5 "$log" >&2
  exit 1
fi
address=${BASH_REMATCH[1]}
metrics=${BASH_REMATCH[2]}

"$demo" --server "$address" --metrics "$metrics" \
  --weights "$root/client/demo/weights/hybrid-kjv.safetensors" \
  --text "$root/client/demo/text/heldout.txt" "$@" &
demo_pid=$!  # in the background, so that a signal to this script is heard at once
status=0
wait "$demo_pid" || status=$?
demo_pid=
exit "$status"
