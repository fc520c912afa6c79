#!/usr/bin/env bash
# From one table of customer tickets to predictions without this package: bash tickets.sh TABLE NUMBER_OF_CUSTOMERS
# NEW_TEXTS
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
privknn fit --data "$1" --text body --label topic --person customer --epsilon 1 --private-records "$2" --run_dir runs/tickets
privknn export runs/tickets
cp runs/tickets/export/model.pt2 model.pt2
python "$here/predict_texts_alone.py" < "$3" > alone.txt
