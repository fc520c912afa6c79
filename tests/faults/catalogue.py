"""All faults."""

from __future__ import annotations

from . import (
    accounting_faults,
    cost_faults,
    federated_faults,
    ind_knn_faults,
    ind_knn_shard_faults,
    knn_faults,
    lattice_faults,
    ledger_faults,
    multilabel_faults,
    noise_faults,
    noisy_sgd_faults,
    pate_faults,
    report_faults,
    reverse_knn_faults,
    run_faults,
    scale_faults,
    statistics_faults,
    training_faults,
    training_parts_faults,
)
from .fault import Fault

FAULTS: tuple[Fault, ...] = (
    *noise_faults.FAULTS,
    *accounting_faults.FAULTS,
    *cost_faults.FAULTS,
    *ledger_faults.FAULTS,
    *report_faults.FAULTS,
    *knn_faults.FAULTS,
    *pate_faults.FAULTS,
    *multilabel_faults.FAULTS,
    *reverse_knn_faults.FAULTS,
    *federated_faults.FAULTS,
    *ind_knn_faults.FAULTS,
    *ind_knn_shard_faults.FAULTS,
    *noisy_sgd_faults.FAULTS,
    *run_faults.FAULTS,
    *scale_faults.FAULTS,
    *statistics_faults.FAULTS,
    *lattice_faults.FAULTS,
    *training_faults.FAULTS,
    *training_parts_faults.FAULTS,
)
