#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# A service of class latency answers 20 requests a second while a batch job takes all the rest of the
# GPU. First the service alone, then beside the job. A kernel that runs cannot be interrupted: a request
# that comes meanwhile waits for what runs of the job, one kernel in each of its streams at worst. The
# median grows little, the slowest requests by some milliseconds.
#
#   sh service_beside_batch.sh          on a simulated GPU
#   ON= sh service_beside_batch.sh      on a real one
set -eu

on=${ON---simulated a100-80gb}
seconds=${SECONDS_EACH:-5}
out=$(mktemp -d)
started=
trap 'rm -rf "$out"' EXIT
# A shell runs EXIT's trap for no signal, and what it started with & does not hear of Ctrl-C.
trap 'kill $started 2>/dev/null || true; exit 130' INT TERM

serve="allot burn --memory 4Gi --kernel 1ms --rate 20 --seconds $seconds"
batch="allot burn --memory 32Gi --kernel 500us --streams 4 --seconds $((seconds + 2))"

allot run $on --memory 8Gi --compute 20:100 --class latency --name service -- $serve >"$out/alone"

allot run $on --memory 40Gi --compute 0:100 --class besteffort --name batch -- $batch \
  >"$out/batch" &
started=$!
allot run $on --memory 8Gi --compute 20:100 --class latency --name service -- $serve >"$out/beside"
wait $started

echo "the service alone:  $(grep '^latency' "$out/alone")"
echo "beside the batch:   $(grep '^latency' "$out/beside")"
echo "the batch job:      $(sed -n 's/^\(kernels [^,]*\).*/\1/p' "$out/batch")"
