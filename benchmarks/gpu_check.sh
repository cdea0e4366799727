#!/usr/bin/env bash
# On a machine with a CUDA device: the demo's Megatron half under collect, twice with different configurations, then breakdown and diff.
# Usage: benchmarks/gpu_check.sh [OUT]   (PYTHON=... and WHEELS=FOLDER are taken from the environment)
# Needs no network: what is missing is installed from the wheels in WHEELS into a folder of its own. Without a CUDA device it
# says so and exits 0. Under 4 minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${1:-$(mktemp -d)}
mkdir -p "$out"
out=$(cd "$out" && pwd)
limit=${LIMIT:-100} # seconds for each training run

if ! "$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>"$out/torch.log"; then
    echo "gpu_check: no CUDA device that torch can use here (see $out/torch.log): skipped"
    exit 0
fi
if [ -n "${WHEELS:-}" ]; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$out/site" "$WHEELS"/*.whl
    export PYTHONPATH="$out/site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" KINETO_LOG_LEVEL=6
"$python" -c '
import torch
print("gpu_check: torch", torch.__version__, "CUDA", torch.version.cuda, "on", torch.cuda.get_device_name())
missing = []
for name in ("megatron.core", "click", "msgspec", "numpy", "rich"):
    try:
        __import__(name)
    except ImportError as error:
        missing.append(f"{name} ({error})")
if missing:
    raise SystemExit("gpu_check: missing: " + ", ".join(missing) + ". Bring wheels along and name their folder in WHEELS.")
'

# one rank per GPU; the second configuration makes every launch wait for its kernel, a classic reason for a slower stack
train() { # name, environment...
    local name=$1
    shift
    echo "gpu_check: training, $name"
    timeout "$limit" env "$@" "$python" -m tracetools collect --profile megatron_lm --steps 6:14 --out "$out/$name" -- \
        "$python" -m tracetools.demo.launch megatron "$out/$name.log" --steps 18 --ranks 1 --metrics "$out/$name.metrics.jsonl" ||
        { tail -30 "$out/$name.log"; exit 1; }
}
train plain
train blocking CUDA_LAUNCH_BLOCKING=1

for name in plain blocking; do
    "$python" -m tracetools breakdown "$out/$name"
    "$python" - "$out/$name/run.json" <<'PYTHON'
import json, sys
run = json.load(open(sys.argv[1]))
assert run["processes"] and not run["missing"], run["missing"]
assert run["hosts"][0]["gpus"], "run.json does not name the GPU"
steps = [step["number"] for step in run["processes"][0]["steps"]]
assert steps == list(range(6, 14)), steps
print("gpu_check:", run["hosts"][0]["gpus"][0], run["versions"], run["parallel"])
PYTHON
done
"$python" -m tracetools diff "$out/plain" "$out/blocking"
echo "gpu_check: all went well; run folders in $out"
