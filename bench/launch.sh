#!/bin/bash
# launch.sh SECONDS RANKS script.py args...: one process a rank on this host, killed after SECONDS.
limit=$1 ranks=$2; shift 2
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + RANDOM % 20000)) WORLD_SIZE=$ranks PYTHONUNBUFFERED=1
pids=()
for ((r = 0; r < ranks; r++)); do
  RANK=$r LOCAL_RANK=$r timeout -s KILL "$limit" python3 "$@" & pids+=($!)
done
failed=0
for _ in "${pids[@]}"; do
  wait -n "${pids[@]}" 2>/dev/null || { failed=$?; kill -KILL "${pids[@]}" 2>/dev/null; }
done
echo "exit $failed after ${SECONDS} s: $*"
exit "$failed"
