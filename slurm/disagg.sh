#!/usr/bin/env bash
# Brings a recipe up inside a Slurm job of ONE node and serves until the job ends or `pdserve down`.
#
#   sbatch [--gres=gpu:8 --time=08:00:00 ...] slurm/disagg.sh [RECIPE [--set KEY=VALUE ...]]
#
# A recipe that needs several nodes is refused by `pdserve up` with the device sum and what to type instead.
#SBATCH --job-name=pdserve
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --exclusive
#SBATCH --output=pdserve-%j.out
# The time limit must leave room to drain the proxy and stop in order. B: only this shell is signalled.
#SBATCH --signal=B:TERM@120
set -euo pipefail

# $0 of a batch script is a copy in the daemon's spool folder: only the submit folder says where the repository is.
repository=${PDSERVE_REPOSITORY:-${SLURM_SUBMIT_DIR:-$PWD}}
cd "$repository"
if [[ ! -f recipes/kimi-mi355x.yaml ]]; then
  echo "error: $repository is not pdserve's repository; submit from there, or export PDSERVE_REPOSITORY" >&2
  exit 2
fi
if (( ${SLURM_JOB_NUM_NODES:-1} != 1 )); then
  echo "error: this job has $SLURM_JOB_NUM_NODES nodes; this script brings up one: sbatch --nodes=1 slurm/disagg.sh" >&2
  exit 3
fi
if (( $# == 0 )); then set -- recipes/kimi-mi355x.yaml; fi

pdserve=$(command -v pdserve || true)
[[ -n $pdserve ]] || pdserve=$repository/.venv/bin/pdserve

# `cmd & wait`: bash runs a trap only when its foreground command ends, and `wait` can be interrupted.
"$pdserve" up "$@" &
launcher=$!
trap 'kill -TERM "$launcher" 2>/dev/null || true' TERM INT
code=0
while kill -0 "$launcher" 2>/dev/null; do
  code=0
  wait "$launcher" || code=$?
done
exit "$code"
