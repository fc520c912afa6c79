#!/usr/bin/env bash
# From class folders of photographs to predictions without this package: bash photographs.sh FOLDER NUMBER_OF_PRIVATE_RECORDS
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
privknn fit --data "$1" --epsilon 1 --private-records "$2" --run_dir runs/photographs
privknn predict runs/photographs "$1/test" --output by_run.csv
privknn export runs/photographs
privknn predict runs/photographs/export/model.pt2 "$1/test" --output by_file.csv
cp runs/photographs/export/model.pt2 model.pt2
python "$here/predict_alone.py" "$1"/test/*/*.png > alone.txt
