# %% [markdown]
# # Read the plot of a comparison
#
# `privknn compare CONFIG` runs methods over values of ε and seeds and writes a CSV file, a table and a plot. The
# comparison in this example is so small that it takes seconds; its figures are not meaningful.

# %%
from pathlib import Path

import yaml

from pl_privknn.cli import main
from pl_privknn.comparison import markdown_table, read_results
from pl_privknn.comparison.table import best_at, cells_of, mean_and_spread

kernel_votes = {
    "labeling.labeler": {
        "class_path": "PrivateKNN",
        # The smallest noise that meets each ε is computed from the plan of the teacher.
        "init_args": {"k": 60, "sampling_rate": 0.8, "noise": {"class_path": "Gaussian"}},
    },
    "labeling.queries_per_round": 40,
}
comparison = {
    "config": {
        "data": {"class_path": "DigitsDataModule", "init_args": {"batch_size": 64}},
        "model": {"class_path": "SupervisedStudent", "init_args": {"network": "small_cnn"}},
        "trainer": {"max_epochs": 2, "accelerator": "cpu", "log_every_n_steps": 1},
        "labeling": {"features": {"class_path": "HOG"}, "selection": "ClusterSelection"},
    },
    "budget": {"delta": 1e-4},
    "seeds": [0, 1],
    "epsilons": [1, 2, 8],
    "methods": {
        "knn": {"title": "Private-kNN", "set": kernel_votes},
        "truth": {"title": "true public labels", "set": {"data.init_args.train_on_truth": True}},
    },
}
Path("gallery.yaml").write_text(yaml.safe_dump(comparison, sort_keys=False))
status = main(["compare", "gallery.yaml", "--workers", "0"])

# %% [markdown]
# ## How to read the plot
#
# * The horizontal axis is ε on a logarithmic scale, at the δ and adjacency in its label: the worst case stated before
#   the first query, not the ε spent. Further left is stronger.
# * A point is the mean test accuracy over seeds after the last epoch, and its error bar is one standard deviation.
#   Three seeds do not distinguish two methods whose bars overlap.
# * A mark after a name means that the guarantee is **conditional (†)** or that there is **none (‡)**; the text below
#   the plot gives the reason. Hollow points and dashed lines show such weaker guarantees; such a method is never
#   the best.
# * Dotted lines show the same method without noise: the distance to them is the loss of accuracy due to privacy. The
#   horizontal line is the student on true labels: the distance to it is the loss of accuracy due to the teacher.

# %%
results = read_results("runs/compare/gallery")
cells = cells_of(results)
print(markdown_table(results))
for epsilon in (1, 2, 8):
    best = best_at(cells, epsilon)
    mean, spread = mean_and_spread(cells[best, epsilon])
    print(f"ε ≤ {epsilon}: {best} with {mean:.3f} ± {spread:.3f}")

# %% [markdown]
# All runs use the same private records, so the cost of the whole comparison is their composition; the command prints
# this ε too. For sensitive data, compare methods on public data of the same kind, and run only the best method on the
# private data.
