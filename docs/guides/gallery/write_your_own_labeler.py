# %% [markdown]
# # Write your own teacher in 20 lines
#
# A teacher is one class that plans the maximum cost of a run and answers queries. It never computes ε itself: it
# names the mechanism, pays for it through the run, and draws noise with the mechanism that was charged.

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from pl_privknn import (
    HOG,
    Budget,
    Charge,
    DigitsDataModule,
    Gaussian,
    Labeler,
    Ledger,
    PrivateRecords,
    Release,
    account,
    check_labeler,
)


# %%
class NoisyPrototypes(Labeler):
    """One noisy mean image feature for each class; a query gets the class of the most similar one."""

    def __init__(self, sigma: float):
        self.mechanism = Gaussian(sigma, l2_sensitivity=1.0)  # a unit vector enters one class's sum
        self.prototypes = None

    def plan(self, num_queries, max_answers, num_classes, rounds=1):
        """Plan the maximum cost of a run: one release per round, for any number of queries."""
        return [Charge(self.mechanism, rounds)]

    def answer(self, queries, run, max_answers):
        """Charge the ledger, draw noise, answer."""
        if self.prototypes is None:  # answers after the first are post-processing of one release
            units = torch.nn.functional.normalize(self.records.table()).double()  # float32 would round
            sums = torch.zeros(self.records.num_classes, units.shape[1], dtype=torch.float64)
            sums.index_add_(0, self.records.labels, units)
            noise = run.pay(self.mechanism, 1, "sums")
            self.prototypes = self.mechanism.add_noise(sums, noise)
        similarity = queries.double() @ torch.nn.functional.normalize(self.prototypes).T
        answers = similarity.argmax(dim=1)
        if max_answers is not None:
            answers[max_answers:] = -1  # refused
        return Release(answers)


# %% [markdown]
# ## Try it against a ledger
#
# The ledger records the plan and each charge before its noise is drawn, and recomputes ε for an auditor.

# %%
data = DigitsDataModule()
data.setup("fit")
features = HOG()
records = PrivateRecords(data.private, features)
public = features(data.public.images(torch.arange(len(data.public))))

# %%
teacher = NoisyPrototypes(sigma=4.0)
teacher.fit(records)
with tempfile.TemporaryDirectory() as folder:
    ledger = Ledger(Path(folder) / "run.sqlite", Budget(delta=1e-4))
    run = ledger.run("try", plan=teacher.plan(500, 500, data.num_classes))
    answers = teacher.label(public, run).labels
    epsilon = ledger.report().epsilon
    ledger.close()
accuracy = float((answers == data.public.truth).float().mean())
print(f"{accuracy:.3f} of {len(answers)} public labels right at ε = {epsilon:.2f}")

# %% [markdown]
# Before using the teacher, check that it charges before it draws and that its sensitivity is correct. The check
# removes records from many tables and measures the change of the exact release.

# %%
report = check_labeler(NoisyPrototypes(sigma=4.0))
print(report)
moved = report.largest["multiclass, add_remove"].moves["gaussian (L2)"].amount
assert epsilon == account(teacher.plan(500, 500, 10), delta=1e-4, exact=False).epsilon

# %% [markdown]
# In YAML, set `labeling.labeler.class_path: my_package.NoisyPrototypes`, for `privknn fit` and for `privknn compare`,
# which computes the noise for each ε with `find: labeling.labeler.init_args.sigma`.

# %% [markdown]
# Answers of the teacher about public digits; wrong ones are red:

# %%
figure, axes = plt.subplots(2, 6, figsize=(9, 3.4))
for number, place in enumerate(axes.flat):
    place.imshow(data.public.images(torch.tensor([number]))[0, 0], cmap="gray_r")
    right = answers[number] == data.public.truth[number]
    place.set_title(str(int(answers[number])), color="black" if right else "red")
    place.axis("off")
figure.savefig("write_your_own_labeler.png")
