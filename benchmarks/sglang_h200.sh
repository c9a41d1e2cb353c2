#!/usr/bin/env bash
# SGLang 0.5.14 offline on one H200, from the carry of ../shared/peers/sglang-h200 copied to .sgl/ (ignored by git):
#     bash benchmarks/sglang_h200.sh --arms off+fa3,dflash+fa3,dflash+triton,dscale+fa3 --concurrency 8,16,32 --limit 500
# Arguments are those of sglang_h200.py. The record and the logs of the arms go to $OUT (or /tmp/sglang_h200).
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
exec python3 benchmarks/sglang_h200.py --models /tmp/sgsite/_models --out "$out/sglang_h200.json" --logs "$out/logs" "$@"
