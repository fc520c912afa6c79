#!/usr/bin/env bash
# Audits the two files of a run, and three forgeries that are refused: bash audit.sh RUN
set -euo pipefail
run=$1
privknn audit "$run/summary.json" "$run/run.sqlite"
mkdir -p forged

refused() {  # the audit must end with this exit status
  local wanted=$1 status=0
  shift
  echo "--- privknn audit $*"
  privknn audit "$@" || status=$?
  echo "exit status $status"
  test "$status" = "$wanted"
}

# 1. The summary states a smaller ε than its ledger.
sed 's/^  "epsilon": .*/  "epsilon": 0.1,/' "$run/summary.json" > forged/epsilon.json
refused 1 forged/epsilon.json "$run/run.sqlite"

# 2. The summary states more answers for the same ε.
sed 's/^  "answered": .*/  "answered": 100000,/' "$run/summary.json" > forged/answers.json
refused 1 forged/answers.json "$run/run.sqlite"

# 3. A row of the ledger is rewritten: each row contains the hash of the previous one.
cp "$run/run.sqlite" forged/run.sqlite
python - <<'PY'
import sqlite3

with sqlite3.connect("forged/run.sqlite") as ledger:
    ledger.execute("""UPDATE rows SET body = replace(body, '"delta":', '"delta":0.') WHERE position = 1""")
PY
refused 2 "$run/summary.json" forged/run.sqlite
