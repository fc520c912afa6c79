"""pl_privknn: student models trained on privately released labels, with a stated ε.

The public names are loaded when they are first used, so that ``import pl_privknn`` stays cheap.
"""

import lazy_loader

__version__ = "0.2.0"

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "callbacks.labeling_arguments": ["LabelingOptions"],
        "callbacks.private_labeler": ["PrivateLabeler"],
        "callbacks.selection": ["ClusterSelection", "FullSelection"],
        "datamodules": [
            "ArraysDataModule",
            "DatasetsDataModule",
            "DigitsDataModule",
            "EmbeddingsDataModule",
            "ImageFolderDataModule",
            "TableDataModule",
            "TextDataModule",
        ],
        "features": ["HOG", "Pixels", "PublicFeatures", "TimmFeatures", "WordLlamaFeatures"],
        "features.private_records": ["PrivateRecords"],
        "labelers": [
            "Attributes",
            "IndKNN",
            "IndKNNPredictor",
            "NoisySGDTeacher",
            "PATE",
            "PreconditionedGradients",
            "SufficientStatistics",
        ],
        "labelers.base": ["Capabilities", "Labeler", "Release"],
        "labelers.voting": ["PrivateKNN", "Screening"],
        "labelers.reverse_knn": ["ReverseKNN"],
        "labelers.teachers": ["LinearTeachers"],
        "labelers.local": ["LocalReverseKNN", "ShuffledReverseKNN"],
        "privacy.budget": ["Budget", "BudgetExceeded"],
        "privacy.ledger": ["Ledger"],
        "privacy.accounting.accountant": ["account"],
        "privacy.mechanisms": ["Charge", "ExponentialArgmax", "Gaussian", "Laplace"],
        "privacy.noise": ["SeededNoise"],
        "privacy.holdout": ["PaidEvaluation"],
        "export.prediction": ["Predictions", "predict"],
        "export.released_model": ["export_run"],
        "recommendation.recommend": ["recommend"],
        "report.page": ["write_report"],
        "students": [
            "FixMatchStudent",
            "StudentOptimization",
            "SupervisedStudent",
            "UDAStudent",
            "VATStudent",
            "WeakAugmentation",
        ],
        "testing": ["check_labeler"],
        "training": ["NoisyOptimization", "NoisySGD", "PrivateTraining", "TrainingOptions"],
    },
)
__all__ += ["__version__"]
