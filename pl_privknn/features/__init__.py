"""From images and texts to vectors. Names are loaded on first use: a backbone brings Lightning."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "backbone": ["BackboneFeatures", "CheckpointFeatures"],
        "base": ["Extractor"],
        "hog": ["HOG"],
        "joined": ["CachedFeatures", "JoinedFeatures"],
        "kernel_pca": ["PublicKernelPCA", "PublicPCA"],
        "patches": ["PatchDictionary"],
        "pixels": ["Pixels"],
        "pretrained": ["TimmFeatures"],
        "public": ["PublicFeatures", "Resized"],
        "scattering": ["Scattering"],
        "text": ["SentenceFeatures", "TextExtractor", "WordLlamaFeatures"],
    },
)
