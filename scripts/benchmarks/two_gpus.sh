#!/usr/bin/env bash
# What two GPUs tell about data parallelism in four minutes: what each variant costs, and proof on NCCL.
#
# Each part has its own limit, so that one that hangs costs itself alone; a part whose result is there is left out.
#
#     bash scripts/benchmarks/two_gpus.sh runs/two_gpus
set -u
out=${1:-runs/two_gpus}
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONWARNINGS=ignore OMP_NUM_THREADS=8
variants() { python3 -m torch.distributed.run --standalone --nproc-per-node 2 scripts/benchmarks/ddp_variants.py --out "$out" "$@"; }
export -f variants
export out

part() { # name, seconds, command …
    local name=$1 limit=$2 began=$SECONDS status
    shift 2
    [ -e "$out/$name.done" ] && { echo "== $name: done before"; return; }
    timeout -k 5 "$limit" "$@" >"$out/$name.log" 2>&1
    status=$?
    [ $status = 0 ] && touch "$out/$name.done"
    echo "== $name: status $status, $((SECONDS - began)) s"
    grep -v USDT "$out/$name.log" | tail -n 45
}

why='torch_ddp 100 MB, view$|ddp_overlap$|ddp_bucketed 100 MB$|carve-out, cublasLt$|100 MB, bf16$'
part medium 60 bash -c "variants --size medium --rounds 3 --steps 10 --budget-s 45 --explain '$why'"
part xl2026 100 bash -c "variants --size 2.7B --rounds 3 --steps 4 --budget-s 80 --explain '$why'"
part proof 80 python3 -m pytest -q -m gpu -p no:cacheprovider tests/model/parallel
