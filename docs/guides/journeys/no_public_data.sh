#!/usr/bin/env bash
# Private and test photographs in class folders, and no public data: bash no_public_data.sh FOLDER NUMBER_OF_PRIVATE_RECORDS
set -euo pipefail
privknn fit --data "$1" --epsilon 1 --private-records "$2" --run_dir runs/no_public
here=$(cd "$(dirname "$0")" && pwd)
privknn export runs/no_public
cp runs/no_public/export/model.pt2 model.pt2
python "$here/predict_alone.py" "$1"/test/*/*.png > alone.txt
