#!/usr/bin/env bash
# Do kernels touch memory that is not theirs, or race in shared memory? compute-sanitizer over random small calls.
#
# First two planted errors, which the tools must find: what finds nothing proves nothing. And two hand-overs of memory
# by an mbarrier, both right: each lane of the reading warp arrives, or one lane does for all after __syncwarp, which
# racecheck does not follow. So the kernels are compiled with an arrival of every lane (CS_SYSTEMS_FOR_RACECHECK), and
# whether it still reports the second kind is told.
#
# Then each backend, by 16 calls of scripts/fuzz_attention.py, forward and backward, and each part of the training step
# with CUDA kernels of its own (fused_weight_update, fused_feed_forward), by its tests against float64. The kernels are
# compiled without the tool; then the calls run under each tool, with every tensor an allocation of its own, so that
# one element past its end is seen. Each part has its own limit, logs are kept. racecheck knows shared memory alone, and
# of copies by TMA and of wgmma's reads only what it says it supports: what it finds there is to be read, what it does
# not find is no proof. Needs nvcc.
# Exit status 0: all clean.
#
#     bash scripts/benchmarks/sanitize.sh runs/sanitize flash_triton flash_cuda
#     bash scripts/benchmarks/sanitize.sh runs/sanitize fused_weight_update fused_feed_forward
#     TOOLS="memcheck racecheck synccheck" LIMIT_S=200 bash scripts/benchmarks/sanitize.sh runs/sanitize flash_triton
set -u
out=${1:-runs/sanitize}
shift
backends=("$@")
[ $# = 0 ] && backends=(flash_triton flash_cuda)
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
    # Triton asks the driver for a kernel's parameters until it answers CUDA_ERROR_INVALID_VALUE: that is no finding.
    [ "$tool" = memcheck ] && set -- --report-api-errors no "$@"
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
__device__ void wait(unsigned barrier, unsigned parity) {
    unsigned done = 0;
    while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
}
__global__ void handed(float *x, bool by_all) {  // warp 0 writes anew what warp 1 has read
    __shared__ float shared[32];
    __shared__ unsigned long long full, empty;
    const unsigned lane = threadIdx.x % 32, first = __cvta_generic_to_shared(&full), second = __cvta_generic_to_shared(&empty);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 32;" ::"r"(first));
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(second), "r"(by_all ? 32 : 1));
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        for (int i = 0; i < 4; i++) {
            wait(second, (i & 1) ^ 1);
            shared[lane] = i;
            asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(first) : "memory");
        }
    } else {
        float sum = 0;
        for (int i = 0; i < 4; i++) {
            wait(first, i & 1);
            sum += shared[31 - lane];
            __syncwarp();
            if (by_all || lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(second) : "memory");
        }
        x[lane] = sum;
    }
}
int main(int count, char **words) {
    float *x;
    if (cudaMalloc(&x, 64 * sizeof(float))) return 1;
    if (count > 1 && !strcmp(words[1], "race")) race<<<1, 64>>>(x);
    else if (count > 1 && !strncmp(words[1], "handed", 6)) handed<<<1, 64>>>(x, !strcmp(words[1], "handed_by_all"));
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

checked racecheck planted_handed_by_all "$out/planted" handed_by_all ||
    { echo "   racecheck reports a hand-over that is right: what it says below proves nothing"; unclean=1; }
checked racecheck planted_handed_by_one "$out/planted" handed_by_one &&
    echo "   racecheck follows an arrival of one lane for its warp now: CS_SYSTEMS_FOR_RACECHECK is not needed"
export CS_SYSTEMS_FOR_RACECHECK=1

for backend in "${backends[@]}"; do
    case $backend in
    fused_*) calls=(python3 -m pytest -q -m gpu -p no:cacheprovider -k kernel "tests/model/training/test_${backend#fused_}.py") ;;
    *) calls=(python3 scripts/fuzz_attention.py "$backend" --device cuda --scores 65536 --kinds 10 --cases 16) ;;
    esac
    timeout -k 5 "$limit" "${calls[@]}" >"$out/${backend}_alone.log" 2>&1
    status=$?
    echo "== ${backend} without a tool: status $status"
    [ $status = 0 ] || { tail -n 20 "$out/${backend}_alone.log"; unclean=1; continue; }
    for tool in $tools; do
        checked "$tool" "${backend}_$tool" "${calls[@]}"
        [ $? = 0 ] || { grep -h "=========" "$out/${backend}_$tool.log" | head -n 30; unclean=1; }
    done
done
exit $unclean
