"""What the tests of the predictor share."""

import numpy as np
import torch

from pl_privknn.labelers.ind_knn.algorithm import IndKNNParameters
from pl_privknn.labelers.ind_knn.predictor import IndKNNPredictor
from pl_privknn.privacy.noise import SeededNoise

PARAMETERS = IndKNNParameters(0.4, 4.0, 0.5, 0.2)
D, C = 6, 3


def new(**settings):
    return IndKNNPredictor(
        settings.pop("parameters", PARAMETERS), C, D, noise_source=SeededNoise(0), **settings
    )


def rows(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % C
    return torch.eye(D)[labels] + 0.3 * torch.randn(count, D, generator=generator), labels


def filled(count=40, **settings):
    predictor = new(**settings)
    predictor.add(np.arange(count), *rows(count))
    return predictor


QUERIES = rows(9, seed=8)[0]
