"""pl_privknn: student models trained on privately released labels, with a stated ε.

The public names are loaded when they are first used, so that ``import pl_privknn`` stays cheap.
"""

import lazy_loader

__version__ = "0.2.0"

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "callbacks.private_labeler": ["PrivateLabeler"],
        "datamodules": [
            "ArraysDataModule",
            "DatasetsDataModule",
            "DigitsDataModule",
            "EmbeddingsDataModule",
            "ImageFolderDataModule",
            "TextDataModule",
        ],
        "features": ["HOG", "PublicFeatures", "TimmFeatures"],
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
        "labelers.base": ["Labeler", "Release"],
        "labelers.voting": ["PrivateKNN", "Screening"],
        "labelers.reverse_knn": ["ReverseKNN"],
        "labelers.local": ["LocalReverseKNN", "ShuffledReverseKNN"],
        "privacy.budget": ["Budget", "BudgetExceeded"],
        "privacy.ledger": ["Ledger"],
        "privacy.mechanisms": ["ExponentialArgmax", "Gaussian", "Laplace"],
        "privacy.holdout": ["PaidEvaluation"],
        "export.prediction": ["Predictions", "predict"],
        "recommendation.recommend": ["recommend"],
        "students": ["FixMatchStudent", "SupervisedStudent", "UDAStudent", "VATStudent"],
        "training": ["NoisySGD", "PrivateTraining"],
    },
)
__all__ += ["__version__"]
