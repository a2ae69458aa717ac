#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Two programs share one simulated GPU: the first asks for more than its share has and is stopped,
# the second does not notice.
#
#   sh two_at_once.sh
set -eu

gpu=a100-80gb
modest=
# What was started with & does not hear of Ctrl-C.
trap 'kill $modest 2>/dev/null || true; exit 130' INT TERM

allot run --simulated "$gpu" --memory 4Gi --name modest -- \
  allot burn --memory 2Gi --kernel 2ms --seconds 4 &
modest=$!

greedy=0
allot run --simulated "$gpu" --memory 4Gi --name greedy -- \
  allot burn --memory 6Gi --seconds 2 || greedy=$?
echo "the greedy one ended with $greedy (9: the driver refused memory)"

wait "$modest"
echo "the modest one ended with $?"
