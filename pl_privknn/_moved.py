"""Modules under earlier names: saved configurations and users' imports find them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

#: Old and new name of each module, below the package.
MOVED = {
    "baselines.books": "training.training_run",
    "baselines.clipping": "training.clipping",
    "baselines.network_checks": "training.network_checks",
    "baselines.settings": "training.settings",
    "baselines.trainer_checks": "training.trainer_checks",
    "baselines.training_run": "training.training_run",
    "cli_compare": "cli.compare",
    "cli_errors": "cli.errors",
    "cli_privacy": "cli.privacy",
    "cli_worker": "cli.worker",
    "config_plan": "planning.configuration_plan",
    "comparison.nested_settings": "nested_settings",
    "comparison.planning": "comparison.noise_search",
    "comparison.reading": "comparison.specification_file",
    "comparison.sections": "nested_settings",
    "datamodules.array_files": "datamodules.formats.array_files",
    "datamodules.idx": "datamodules.formats.idx",
    "datamodules.images": "datamodules.formats.images",
    "datamodules.loading": "datamodules.formats.loaders",
    "datamodules.parts": "datamodules.formats.partition_checks",
    "datamodules.private_loader": "datamodules.formats.poisson_loader",
    "datamodules.published": "datamodules.formats.published",
    "datamodules.stores": "datamodules.formats.stores",
    "datamodules.targets": "datamodules.formats.targets",
    "labelers.ind_knn_core": "labelers.ind_knn.algorithm",
    "labelers.ind_knn_engine": "labelers.ind_knn.prediction",
    "labelers.ind_knn_folder": "labelers.ind_knn.predictor_files",
    "labelers.ind_knn_predictor": "labelers.ind_knn.predictor",
    "labelers.ind_knn_records": "labelers.ind_knn.identities",
    "labelers.ind_knn_search": "labelers.ind_knn.hyperparameters",
    "labelers.ind_knn_state": "labelers.ind_knn.labeler_budgets",
    "labelers.ind_knn_store": "labelers.ind_knn.record_store",
    "labelers.ind_knn_stream": "labelers.ind_knn.stream",
    "labelers.ind_knn_table": "labelers.ind_knn.private_table",
    "neighbors.sums": "neighbors.poisson",
    "neighbors.votes": "neighbors.poisson",
    "networks.timm_door": "networks.timm_models",
    "privacy.accountant": "privacy.accounting.accountant",
    "privacy.audit": "privacy.auditing.lower_bound",
    "privacy.audit_pairs": "privacy.auditing.worst_pairs",
    "privacy.budgets": "privacy.per_record.budgets",
    "privacy.calibration": "privacy.accounting.calibration",
    "privacy.exact": "privacy.accounting.exact",
    "privacy.individual": "privacy.per_record.filter",
    "privacy.individual_table": "privacy.per_record.table",
    "privacy.induction": "privacy.accounting.induction",
    "privacy.journal": "privacy.per_record.journal",
    "privacy.planning": "planning.plan",
    "privacy.plans": "planning.planner",
    "privacy.pld": "privacy.accounting.pld",
    "privacy.rdp": "privacy.accounting.rdp",
    "privacy.accounting.plan": "planning.plan",
    "privacy.accounting.teacher_plans": "planning.planner",
    "testing.doors": "testing.drawing_methods",
    "testing.protocol_doors": "testing.protocol_methods",
    "training_cli": "cli.train",
}


class _Alias(Loader):
    """Loads a module by giving out another one."""

    def __init__(self, target: str) -> None:
        self.target = target

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return importlib.import_module(self.target)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _MovedModules(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != "pl_privknn" or name not in MOVED:
            return None
        return ModuleSpec(fullname, _Alias(f"pl_privknn.{MOVED[name]}"))


def install() -> None:
    """Let old names be imported."""
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(_MovedModules())
