#!/usr/bin/env bash
# Check of the package on one NVIDIA GPU in less than nine minutes. Run it in the project's root:
#
#     OUT=results bash benchmarks/gpu_check.sh
#
# Parts, each with a limit of its own: installation, checks with pass criteria, the project's tests with trainers on the
# GPU, a fit by the command line whose files a process without a GPU reads, rows of the speed benchmark. Every part runs
# even if one before it failed. $OUT holds at most seven files; summary.txt says what passed.
#
# Without a network, put wheels of what the machine lacks into .whl/ before, for its Python:
#     python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
#       --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux2014_x86_64 -d .whl \
#       jsonargparse==4.53.0 docstring-parser==0.18.0 typeshed-client==2.15.0 faiss-cpu==1.15.1 opacus==1.6.0 \
#       dp-accounting==0.6.0 dm-tree==0.1.10
#
# PLACE=cpu is a dry run of this file on a machine without a GPU, with eight times the limits; SECONDS_IN_ALL shortens it.
set -u
OUT=$(mkdir -p "${OUT:-gpu_results}" && cd "${OUT:-gpu_results}" && pwd)
PYTHON=${PYTHON:-python3}
PLACE=${PLACE:-cuda}
TIMES=$([ "$PLACE" = cpu ] && echo 8 || echo 1)
ALL=${SECONDS_IN_ALL:-$((530 * TIMES))}
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
export OUT PLACE WORK CONFIGS="$PWD/configs" PYTHONUNBUFFERED=1 MPLBACKEND=Agg OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
export PYTHONPATH="$PWD:${PYTHONPATH:-}"
: > "$OUT/summary.txt"

# part NAME LIMIT COMMAND...: run with a limit of seconds, or what is left; the log is $OUT/NAME.log
part() {
  local name=$1 limit=$(($2 * TIMES)) left=$((ALL - SECONDS)) begun=$SECONDS
  shift 2
  if ((left < 10)); then echo "SKIP $name: no time left" | tee -a "$OUT/summary.txt"; return 1; fi
  timeout --kill-after=5 "$((limit < left ? limit : left))" "$@" >> "$OUT/$name.log" 2>&1
  local code=$?
  echo "$([ $code = 0 ] && echo PASS || echo FAIL) part $name: status $code, $((SECONDS - begun)) s" | tee -a "$OUT/summary.txt"
  return $code
}

install() {
  if compgen -G ".whl/*.whl" > /dev/null; then
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$WORK/site" .whl/*.whl || return
  fi
  # The package itself, from a copy, since a build writes beside what it builds. PYTHONPATH serves as well, but commands
  # and versions want its metadata.
  mkdir -p "$WORK/source"
  cp -a pl_privknn callbacks datamodules configs pyproject.toml README.md LICENSE "$WORK/source"
  "$PYTHON" -m pip install -q --no-deps --no-build-isolation --no-index --target "$WORK/meta" "$WORK/source" ||
    echo "not installed; PYTHONPATH alone"
  rm -rf "$WORK/source" "$WORK/meta/pl_privknn"
  PYTHONPATH="$PYTHONPATH:$WORK/site:$WORK/meta" "$PYTHON" - <<'PY'
import os, torch, pytorch_lightning, pl_privknn
print("torch", torch.__version__, "lightning", pytorch_lightning.__version__)
if os.environ["PLACE"] == "cuda":
    print(torch.cuda.get_device_name(), torch.cuda.mem_get_info())
PY
}
export -f install
export PYTHON
part install 90 bash -c install || { cat "$OUT/install.log"; exit 1; }
export PYTHONPATH="$PYTHONPATH:$WORK/site:$WORK/meta"

# ------------------------------------------------------------------ checks with pass criteria
part checks 200 "$PYTHON" -m benchmarks.gpu_checks

# ------------------------------------------------------------------ the command line, and its files without a GPU
cat > "$WORK/commands.sh" <<'SH2'
set -eu
run="$PYTHON -m pl_privknn.cli"
gpu=$([ "$PLACE" = cuda ] && echo gpu || echo cpu)
cd "$WORK"
$run fit --config "$CONFIGS/digits_private_knn.yaml" --run_dir "$WORK/digits" --trainer.accelerator "$gpu" \
  --trainer.max_epochs 4 --trainer.enable_progress_bar false
export CUDA_VISIBLE_DEVICES=
$run report "$WORK/digits"
$run audit "$WORK/digits"
$run export "$WORK/digits" --output "$WORK/released"
SH2
part commands 60 bash "$WORK/commands.sh"

# ------------------------------------------------------------------ the project's tests
# Trainers that say accelerator="cpu" run on the GPU here; tests marked for devices run as they are, if there are any.
cat > "$WORK/on_the_gpu.py" <<'PY'
import functools
import os

import pytorch_lightning as pl

_made = pl.Trainer.__init__


@functools.wraps(_made)
def _placed(self, *args, **given):
    alone = given.get("devices", 1) in (1, "auto") and given.get("strategy", "auto") == "auto"
    if os.environ["PLACE"] == "cuda" and given.get("accelerator") == "cpu" and alone:
        given.update(accelerator="gpu", devices=1)
    _made(self, *args, **given)


pl.Trainer.__init__ = _placed
PY
mark=$(grep -oE '"(gpu|cuda|device|accelerator)(\([^)]*\))?:' pyproject.toml | head -1 | grep -oE '[a-z]+' | head -1 || true)
if [ -n "$mark" ]; then
  part tests 100 "$PYTHON" -m pytest -q -p no:cacheprovider -m "$mark" tests
fi
export PYTHONPATH="$WORK:$PYTHONPATH"
tests="tests/training/test_private_training.py tests/training/test_noisy_sgd.py tests/training/test_traced_step.py
  tests/training/test_paid_evaluation.py tests/callbacks/test_private_labeler.py tests/callbacks/test_released_head.py
  tests/students"
if [ "$PLACE" = cpu ]; then tests=tests/callbacks/test_released_head.py; fi # the others run in continuous integration
part tests 150 "$PYTHON" -m pytest -q -p no:cacheprovider -p on_the_gpu --numprocesses "$(($(nproc) < 8 ? $(nproc) : 8))" \
  --dist worksteal --maxfail 25 $tests

# ------------------------------------------------------------------ speed, row by row
if "$PYTHON" -m benchmarks speed --help 2> /dev/null | grep -q -- --device; then
  rows=("labelling, one thread" "extraction, resnet50" "epoch" "extraction, vit_tiny_patch16_224" "epoch, VAT")
  if [ "$PLACE" = cpu ]; then rows=("epoch"); fi # the others take minutes
  for row in "${rows[@]}"; do
    part speed 60 "$PYTHON" -m benchmarks speed --device "$PLACE" --repeat 2 --dry-run --only "$row"
  done
fi

echo "in all: $SECONDS s, $(grep -c ^PASS "$OUT/summary.txt") passed, $(grep -c ^FAIL "$OUT/summary.txt") failed" | tee -a "$OUT/summary.txt"
! grep -q ^FAIL "$OUT/summary.txt"
