"""Networks of the papers, a small one for demos, and any timm model."""

from pl_privknn.networks.architectures import available_networks, build_network, register_network
from pl_privknn.networks.base import FeatureNetwork, Normalization

__all__ = ["FeatureNetwork", "Normalization", "available_networks", "build_network", "register_network"]
