#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Two trainings share a GPU, 30 % and 70 % of its time. Both always have work; each gets its part.
#
#   sh two_trainings.sh          on a simulated GPU
#   ON= sh two_trainings.sh      on a real one
set -eu

on=${ON---simulated a100-80gb}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

# A training: 16 GiB of weights, and steps whose kernels follow each other without a gap.
train="allot burn --memory 16Gi --kernel 2ms --streams 4 --seconds ${SECONDS_EACH:-6}"

allot run $on --memory 20Gi --compute 30 --name small -- $train >"$out/small" &
small=$!
allot run $on --memory 20Gi --compute 70 --name large -- $train >"$out/large" &
large=$!
wait $small
wait $large

for name in small large; do
  echo "$name:"
  sed 's/^/  /' "$out/$name"
done
