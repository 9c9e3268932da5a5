#!/bin/bash
# One task per node starts torchrun, which starts one rank per GPU; here 1. sbatch examples/deploy/slurm.sh
#SBATCH --job-name=atoll
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --output=atoll-%j.log
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun bash -c "torchrun --nnodes $SLURM_NNODES --nproc-per-node 1 --node-rank \$SLURM_NODEID --master-addr $first --master-port 29500 \
    -m atoll run demo-diloco --engine processes --set engine.network=trusted --out runs/slurm-$SLURM_JOB_ID"
