#!/usr/bin/env bash
# From your own arrays to a first private model: bash first_model.sh FOLDER_OF_ARRAYS NUMBER_OF_PRIVATE_RECORDS
set -euo pipefail
privknn init --data "$1" --epsilon 1 --private-records "$2"
privknn fit --config private_run.yaml --run_dir runs/first
privknn report runs/first
privknn audit runs/first/summary.json runs/first/run.sqlite
privknn export runs/first --format torch
