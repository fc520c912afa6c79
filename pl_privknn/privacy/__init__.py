"""Accounting of differentially private releases: mechanisms, accountants and the ledger. Names load on first use."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "accounting.accountant": [
            "PrivacyReport",
            "account",
            "delta_for_epsilon",
            "epsilon_for_delta",
            "read_records",
        ],
        "accounting.exact": ["exact_epsilon"],
        "accounting.tradeoff": ["TradeOff", "trade_off"],
        "holdout": ["PaidEvaluation"],
        "budget": ["Budget", "BudgetExceeded"],
        "ledger": ["Ledger"],
        "mechanisms": [
            "Charge",
            "Conditional",
            "ExponentialArgmax",
            "Exposure",
            "Gaussian",
            "GaussianDPStream",
            "Laplace",
            "Mechanism",
            "NoisyScreening",
            "PureDP",
            "RandomizedResponse",
            "ShuffleAmplification",
        ],
        "noise": ["NoiseSource", "SeededNoise", "SystemNoise", "default_noise"],
    },
)
