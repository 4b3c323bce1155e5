#!/usr/bin/env bash
# Brings a recipe up over the nodes of a Slurm job and serves until `pdserve down`, scancel or the time limit.
#
#   sbatch [OPTION...] slurm/disagg.sh [RECIPE [--set KEY=VALUE ...]]
#
# Without arguments: recipes/kimi-mi355x-2node.yaml
# sbatch's own options (--partition, --account, --time, ...) win over the lines below. A recipe of another size needs
# its own --nodes and --gres: `pdserve render --slurm RECIPE` writes this script with them, and `pdserve up` refuses a
# job of the wrong shape with the line to type. A container: --set container.kind=docker, apptainer or pyxis.
#SBATCH --job-name=kimi-mi355x-2node
#SBATCH --nodes=2
#SBATCH --gres=gpu:8
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=08:00:00
#SBATCH --output=pdserve-%j.out
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@300
#SBATCH --no-requeue
set -euo pipefail

# $0 is a copy in slurmd's spool folder; where the job was submitted is the repository, or the folder of the recipes.
cd -- "${PDSERVE_REPOSITORY:-${SLURM_SUBMIT_DIR:-$PWD}}"
pdserve=$(command -v pdserve || true)
[[ -n $pdserve ]] || pdserve=$PWD/.venv/bin/pdserve
if [[ ! -x $pdserve ]]; then
  echo "error: no pdserve in PATH or in $PWD/.venv: submit from the repository, or export PDSERVE_REPOSITORY" >&2
  exit 2
fi
if (($# == 0)); then set -- recipes/kimi-mi355x-2node.yaml; fi

# In the background, because bash runs a trap only between commands, and a signal ends `wait` but no other command. The
# trap comes first: a signal that finds none ends this shell, and the launcher does not get it.
launcher="" asked=""
forward() { asked=yes; [[ -z $launcher ]] || kill -TERM "$launcher" 2>/dev/null || true; }
trap forward TERM INT
"$pdserve" up "$@" &
launcher=$!
[[ -z $asked ]] || forward
while kill -0 "$launcher" 2>/dev/null; do wait "$launcher" || true; done
wait "$launcher"
