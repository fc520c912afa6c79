# %% [markdown]
# # Read the plot of a comparison
#
# `privknn compare CONFIG` runs methods over ε and seeds and leaves JSON, a CSV, a table and a plot. Here a
# comparison made so small that it takes seconds; its figures mean nothing.

# %%
from pathlib import Path

import yaml

from pl_privknn.cli.main import main
from pl_privknn.comparison import markdown_table, read_results
from pl_privknn.comparison.table import best_at, cells_of, mean_and_spread

kernel_votes = {
    "labeler": {
        "class_path": "PrivateKNN",
        "init_args": {"k": 60, "sampling_rate": 0.8, "noise": {"class_path": "Gaussian"}},
    },
    "queries_per_round": 40,
}
comparison = {
    "name": "gallery",
    "base": {
        "data": {"class_path": "DigitsDataModule", "init_args": {"batch_size": 64}},
        "student": {"class_path": "SupervisedStudent", "init_args": {"network": "small_cnn"}},
        "trainer": {"max_epochs": 2, "accelerator": "cpu", "log_every_n_steps": 1},
        "labeling": {"features": {"class_path": "HOG"}, "selection": "clusters"},
    },
    "delta": 1e-4,
    "noise_seeded": True,  # repeatable, and no protection: for public data alone
    "seeds": [0, 1],
    "epsilons": [1, 2, 8],
    "methods": [
        {
            "name": "knn",
            "title": "Private-kNN",
            "labeling": kernel_votes,
            # The noise that just meets each ε is found from the teacher's own plan.
            "find": "labeling.labeler.init_args.noise.init_args.sigma",
        },
        {"name": "truth", "title": "true public labels", "true_labels": True},
    ],
}
Path("gallery.yaml").write_text(yaml.safe_dump(comparison, sort_keys=False))
status = main(["compare", "gallery.yaml", "--workers", "0"])

# %% [markdown]
# ## What to look at
#
# * The horizontal axis is ε, logarithmic, at the δ and adjacency written beside it: the
#   worst case stated before the first query, not what was spent. Further left is stronger.
# * A point is the mean over seeds of the last epoch's test accuracy, its bar one standard deviation. Two
#   methods whose bars overlap are not told apart by three seeds.
# * A mark behind a name says that the guarantee is **conditional (†)** or that there is **none (‡)**, and the text
#   below the plot says why. Here it is ‡ for all: the noise came from seeds. Hollow points and dashed lines are
#   weaker than others'; such a method is never named the best.
# * Dotted lines are the same method without its noise: the distance to them is the price of privacy. The
#   line across is the student on true labels: the distance from there is the price of the teacher.

# %%
results = read_results("runs/compare/gallery")
cells = cells_of(results)
print(markdown_table(results))
for epsilon in (1, 2, 8):
    best = best_at(cells, epsilon)
    mean, spread = mean_and_spread(cells[best, epsilon])
    found = cells[best, epsilon][0].values["calibrated"]
    print(f"ε ≤ {epsilon}: {best} with {mean:.3f} ± {spread:.3f}, noise {found}")

# %% [markdown]
# Every run was made on the same private records, so what the whole comparison costs is the composition of
# all of them: the command prints that ε too. On data that matters, compare on public data of the same kind,
# and run the winner once.
