#!/usr/bin/env bash
# Checks, trains and audits your own teacher: nearest_centroid.py with the class of own_labeler.md is in this folder.
set -euo pipefail
cat > own_teacher.yaml <<'YAML'
data: {class_path: DigitsDataModule, init_args: {batch_size: 32}}
model: {class_path: SupervisedStudent, init_args: {network: small_cnn}}
labeling:
  labeler: {class_path: nearest_centroid.NearestCentroid, init_args: {sigma: 5.0}}
  queries_per_round: 30
  selection: ClusterSelection
  features: {class_path: HOG}
  budget: {epsilon: 1.0, delta: 1.0e-4}
trainer: {max_epochs: 12}
YAML
# Check first that the teacher charges before it draws, and that its sensitivity is correct.
python -c "
from nearest_centroid import NearestCentroid
from pl_privknn.testing import check_labeler
print(check_labeler(NearestCentroid()))"
privknn fit --config own_teacher.yaml --run_dir runs/own_teacher
privknn audit runs/own_teacher/summary.json runs/own_teacher/run.sqlite
privknn export runs/own_teacher
