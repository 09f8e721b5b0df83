#!/bin/bash
# One worker on each of four nodes: sbatch slurm.sh
# A job that fails, or is requeued, goes on from the backups of its BackupState.
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

# Workers of several jobs on a node take ports by job and step; set TF_DGC_PORT, the
# first one, where only some are open.
export TF_DGC_TIMEOUT=600
srun --kill-on-bad-exit=1 --distribution=block python train.py "$@"
