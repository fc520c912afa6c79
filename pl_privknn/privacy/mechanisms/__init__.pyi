from .base import (
    AdditiveNoise as AdditiveNoise,
)
from .base import (
    Adjacency as Adjacency,
)
from .base import (
    Charge as Charge,
)
from .base import (
    Mechanism as Mechanism,
)
from .base import (
    VoteNoise as VoteNoise,
)
from .local import (
    NegativeBinomial as NegativeBinomial,
)
from .local import (
    RandomizedResponse as RandomizedResponse,
)
from .local import (
    ShuffleAmplification as ShuffleAmplification,
)
from .noisy_votes import ExponentialArgmax as ExponentialArgmax
from .noisy_votes import Gaussian as Gaussian
from .noisy_votes import Laplace as Laplace
from .screening import NoisyScreening as NoisyScreening
from .stated import (
    Conditional as Conditional,
)
from .stated import (
    Exposure as Exposure,
)
from .stated import (
    GaussianDPStream as GaussianDPStream,
)
from .stated import (
    NoNoise as NoNoise,
)
from .stated import (
    PureDP as PureDP,
)

__all__ = [
    "AdditiveNoise",
    "Adjacency",
    "Charge",
    "Conditional",
    "ExponentialArgmax",
    "Exposure",
    "Gaussian",
    "GaussianDPStream",
    "Laplace",
    "Mechanism",
    "NegativeBinomial",
    "NoNoise",
    "NoisyScreening",
    "PureDP",
    "RandomizedResponse",
    "ShuffleAmplification",
    "VoteNoise",
]
