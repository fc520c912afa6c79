"""What the tests of multi-label labelers share."""

import torch


def clusters(per_cluster=60, seed=0):
    """Four far clusters, each with its own attributes (1 to 4 of 5), and queries near them."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.tensor([[0.0, 0.0], [9.0, 0.0], [0.0, 9.0], [9.0, 9.0]])
    attributes = torch.tensor([[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [1, 0, 0, 1, 0], [0, 1, 1, 1, 1]])
    which = torch.arange(4).repeat(per_cluster)
    features = centres[which] + torch.randn(len(which), 2, generator=generator)
    asked = torch.arange(4).repeat(20)
    queries = centres[asked] + torch.randn(80, 2, generator=generator)
    return features, attributes[which], queries, attributes[asked]
