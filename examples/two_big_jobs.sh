#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Two jobs that need most of a GPU's memory each, on one GPU. Without --oversubscribe the second
# would not be placed; with it their memory moves to the GPU and away again as they take turns, and
# the turns are long enough that moving hardly shows.
#
#   sh two_big_jobs.sh          on a simulated GPU with little memory, so that it takes seconds
#   ON= MEMORY=20Gi LIMIT=22Gi sh two_big_jobs.sh      on a real one of 24 GiB
set -eu

on=${ON---simulated t4[memory=3Gi]}
memory=${MEMORY:-2200Mi}
limit=${LIMIT:-2400Mi}
launches=${LAUNCHES:-2000}
out=$(mktemp -d)
started=
trap 'rm -rf "$out"' EXIT
# A shell runs EXIT's trap for no signal, and what it started with & does not hear of Ctrl-C.
trap 'kill $started 2>/dev/null || true; exit 130' INT TERM

# Each takes its memory and runs a fixed amount of work: 2,000 kernels of 2 ms.
job="allot burn --memory $memory --kernel 2ms --streams 4 --launches $launches"
share="allot run $on --memory $limit --compute 50:100"

began=$(date +%s%N)
$share --name alone -- $job >"$out/alone"
alone=$((($(date +%s%N) - began) / 1000000))

began=$(date +%s%N)
$share --oversubscribe --name first -- $job >"$out/first" &
first=$!
started=$first
$share --oversubscribe --name second -- $job >"$out/second" &
second=$!
started="$first $second"
wait $first
wait $second
both=$((($(date +%s%N) - began) / 1000000))

for name in first second; do
  echo "$name:"
  sed 's/^/  /; s/, [^,]* between events.*//' "$out/$name"
done
echo "one job alone took $alone ms, two together $both ms"
