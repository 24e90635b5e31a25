#!/bin/bash
# Heatmaps by a Slurm array job: each task works off its share of the parts, all of them into one folder.
#
#   sbatch examples/slurm.sh IMAGES FOLDER [OPTIONS of camscope batch]
#   sbatch examples/slurm.sh /data/images /data/heatmaps --model torchvision:resnet50 --device cuda
#
# FOLDER must be one that all nodes see. Tasks that were killed or ran out of time: submit the same again, with the whole
# array. What is done is not done twice, and tasks with nothing left to do end at once.
#
# On one machine there is nothing to share, and cron needs no more than one line, of which one at a time runs:
#   */30 * * * *  flock --nonblock /tmp/heatmaps.lock camscope batch /data/images --output /data/heatmaps

#SBATCH --job-name=camscope
#SBATCH --array=0-7
#SBATCH --cpus-per-task=4
#SBATCH --mem=8G
#SBATCH --time=08:00:00
#SBATCH --requeue
##SBATCH --gpus-per-task=1

set -euo pipefail

usage="usage: sbatch slurm.sh IMAGES FOLDER [OPTIONS of camscope batch]"
images=${1:?$usage}
output=${2:?$usage}
shift 2

cores=${SLURM_CPUS_PER_TASK:-1} # those of the task, not of the node
export OMP_NUM_THREADS=$cores
exec camscope batch "$images" --output "$output" --threads "$cores" \
  --shard "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT" "$@"
