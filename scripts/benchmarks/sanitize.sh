#!/usr/bin/env bash
# Do attention kernels touch memory that is not theirs, or race in shared memory? compute-sanitizer over random small calls.
#
# First two planted errors, which the tools must find: what finds nothing proves nothing. Then each backend: its kernels
# are compiled without the tool, and 16 calls of scripts/fuzz_attention.py, forward and backward, run under each tool,
# with every tensor an allocation of its own, so that one element past its end is seen. Each part has its own limit, logs
# are kept. racecheck knows shared memory alone, and of copies by TMA and of wgmma's reads only what it says it supports:
# what it finds there is to be read, what it does not find is no proof. Needs nvcc. Exit status 0: all clean.
#
#     bash scripts/benchmarks/sanitize.sh runs/sanitize flash_triton flash_cuda
#     TOOLS="memcheck racecheck synccheck" LIMIT_S=200 bash scripts/benchmarks/sanitize.sh runs/sanitize flash_gluon
set -u
out=${1:-runs/sanitize}
shift
backends=("$@")
[ $# = 0 ] && backends=(flash_triton flash_gluon flash_cuda)
tools=${TOOLS:-memcheck racecheck}
limit=${LIMIT_S:-100}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONWARNINGS=ignore PYTORCH_NO_CUDA_MEMORY_CACHING=1
for needed in compute-sanitizer nvcc; do
    command -v "$needed" >/dev/null || {
        echo "no $needed on PATH: it comes with the CUDA toolkit, export PATH=/usr/local/cuda/bin:\$PATH" >&2
        exit 2
    }
done
mkdir -p "$out"
unclean=0
FOUND=99 # what the tool makes the exit status if it found something

checked() { # tool, name of the log, command …
    local tool=$1 log=$out/$2.log began=$SECONDS status
    shift 2
    timeout -k 5 "$limit" compute-sanitizer --tool "$tool" --error-exitcode $FOUND --print-limit 20 \
        --target-processes application-only "$@" >"$log" 2>&1
    status=$?
    echo "== $(basename "$log" .log): status $status, $((SECONDS - began)) s; $(grep -h SUMMARY "$log" | tail -n 1)"
    return $status
}

cat >"$out/planted.cu" <<'CUDA'
#include <cstring>
__global__ void outside(float *x) { x[threadIdx.x + 1] = 1; }
__global__ void race(float *x) {
    __shared__ float shared[64];
    shared[threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = shared[63 - threadIdx.x];  // no __syncthreads
}
int main(int count, char **words) {
    float *x;
    if (cudaMalloc(&x, 64 * sizeof(float))) return 1;
    if (count > 1 && !strcmp(words[1], "race")) race<<<1, 64>>>(x);
    else outside<<<1, 64>>>(x);
    cudaDeviceSynchronize();
    return 0;
}
CUDA
nvcc -arch=native -o "$out/planted" "$out/planted.cu" || exit 2
for pair in memcheck:outside racecheck:race; do
    checked "${pair%:*}" "planted_${pair#*:}" "$out/planted" "${pair#*:}"
    [ $? = $FOUND ] || { echo "   ${pair%:*} did not find the planted error: what it says below proves nothing"; unclean=1; }
done

for backend in "${backends[@]}"; do
    calls=(python3 scripts/fuzz_attention.py "$backend" --device cuda --scores 65536 --kinds 10 --cases 16)
    timeout -k 5 "$limit" "${calls[@]}" >"$out/${backend}_alone.log" 2>&1
    status=$?
    echo "== ${backend} without a tool: status $status"
    [ $status = 0 ] || { tail -n 20 "$out/${backend}_alone.log"; unclean=1; continue; }
    for tool in $tools; do
        checked "$tool" "${backend}_$tool" "${calls[@]}" || {
            unclean=1
            grep -h "=========" "$out/${backend}_$tool.log" | head -n 30
        }
    done
done
exit $unclean
