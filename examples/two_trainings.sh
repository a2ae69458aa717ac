#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Two trainings share a GPU, 30 % and 70 % of its time. Both always have work; each gets its part,
# as `allot top` measures it while they run.
#
#   sh two_trainings.sh          on a simulated GPU
#   ON= sh two_trainings.sh      on a real one
set -eu

on=${ON---simulated a100-80gb}
out=$(mktemp -d)
started=
trap 'rm -rf "$out"' EXIT
# A shell runs EXIT's trap for no signal, and what it started with & does not hear of Ctrl-C.
trap 'kill $started 2>/dev/null || true; exit 130' INT TERM

# A training: 16 GiB of weights, and steps whose kernels follow each other without a gap.
train="allot burn --memory 16Gi --kernel 2ms --streams 4 --seconds ${SECONDS_EACH:-8}"

allot run $on --memory 20Gi --compute 30 --name small -- $train >"$out/small" &
small=$!
started=$small
allot run $on --memory 20Gi --compute 70 --name large -- $train >"$out/large" &
large=$!
started="$small $large"

# Both have begun by then.
sleep 3
allot top --interval 2s >"$out/top"
wait $small
wait $large

for name in small large; do
  echo "$name: $(sed -n 's/^\(kernels [^,]*\).*/\1/p' "$out/$name")"
done
# Its second table has a row for each share: name, GPU, compute, GPU time.
awk '
  of_time && NF { line = line (line ? ", " : "") $1 " " $4 }
  / GPU TIME / { of_time = 1 }
  END { print "of the GPU\047s time: " line }
' "$out/top"
