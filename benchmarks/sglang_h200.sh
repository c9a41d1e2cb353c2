#!/usr/bin/env bash
# SGLang 0.5.14 offline on H200s, from the carry of ../shared/peers/sglang-h200 copied to .sgl/ (ignored by git):
#     bash benchmarks/sglang_h200.sh --arms off+fa3,dflash+fa3,dflash+triton,dscale+fa3 --concurrency 8,16,32 --limit 500
#     SCRIPT=sglang_tp.py bash benchmarks/sglang_h200.sh --pairs .gpu/pairs --limit 150           (two GPUs)
#     bash benchmarks/sglang_h200.sh --tp 2 --arms dflash+fa3,dscale+fa3 --concurrency 8,16,32    (two GPUs)
# Arguments are those of sglang_h200.py, or of the script that SCRIPT names. The record and the logs of the arms go to
# $OUT (or /tmp/sglang_h200).
# Where a transfer is too small for both parts: send .sgl/sg.tar.xz.aa first, run this script with --unpack-only, then
# the rest; parts are kept in /tmp/sgl_parts.
set -euo pipefail
out=${OUT:-/tmp/sglang_h200}
mkdir -p "$out" /tmp/sgl_parts
cp .sgl/sg.tar.xz.* /tmp/sgl_parts/ 2>/dev/null || true
if [ "${1:-}" = --unpack-only ]; then ls -l /tmp/sgl_parts; exit 0; fi
if [ ! -d /tmp/sgsite/sglang ]; then
  cat /tmp/sgl_parts/sg.tar.xz.aa /tmp/sgl_parts/sg.tar.xz.ab > /tmp/sg.tar.xz
  if command -v xz > /dev/null; then xz -T0 -dc /tmp/sg.tar.xz | tar -C /tmp -xf -
  else python3 -c "import tarfile; tarfile.open('/tmp/sg.tar.xz', 'r:xz').extractall('/tmp')"; fi
fi
export PYTHONPATH=/tmp/sgsite${PYTHONPATH:+:$PYTHONPATH} TVM_FFI_CACHE_DIR=/tmp/sgsite/_tvmffi SGLANG_ENABLE_JIT_DEEPGEMM=0
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
script=${SCRIPT:-sglang_h200.py} name=$(basename "${SCRIPT:-sglang_h200.py}" .py)
if [ "$name" = sglang_h200 ]; then set -- --models /tmp/sgsite/_models "$@"; fi
exec python3 "benchmarks/$script" --out "$out/$name.json" --logs "$out/logs" "$@"
