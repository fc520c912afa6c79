import torch
from scipy import stats

from pl_privknn.labelers.partitions import (
    ClassBalancedPartition,
    GuidedPartition,
    Partitioner,
    RandomPartition,
    deal_clusters,
)
from pl_privknn.privacy.noise import SeededNoise
from tests.setup.refusals import refusals


def table(n=120, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (n,), generator=generator)
    return torch.randn(n, 4, generator=generator) + 3 * labels[:, None], labels


def assign(partitioner, features, labels, parts=10, seed=0, groups=None):
    noise = SeededNoise(seed)
    return partitioner.assign(features, labels, num_classes=3, num_parts=parts, noise=noise, groups=groups)


def test_random_parts_are_uniform_and_independent_and_read_no_data():
    features, labels = table(20_000)
    parts = assign(RandomPartition(), features, labels, parts=5)
    # Pairs of neighbouring rows: 25 cells, uniform if draws are uniform and independent. Fixed seed; a
    # correct partition fails for one seed in a thousand.
    pairs = torch.bincount(parts[::2] * 5 + parts[1::2], minlength=25)
    assert stats.chisquare(pairs.numpy()).pvalue > 1e-3
    other = assign(RandomPartition(), torch.zeros_like(features), torch.zeros_like(labels), parts=5)
    assert torch.equal(parts, other)
    assert RandomPartition().adjacencies == ("add_remove", "replace_one")


def test_classes_are_dealt_out_evenly_and_a_record_of_the_same_class_takes_the_old_place():
    features, labels = table(125)
    parts = assign(ClassBalancedPartition(), features, labels)
    for label in range(3):
        sizes = torch.bincount(parts[labels == label], minlength=10)
        assert sizes.max() - sizes.min() <= 1
    changed = features.clone()
    changed[7] = 99.0
    assert torch.equal(assign(ClassBalancedPartition(), changed, labels), parts)
    # The condition that is stated: a record of another class moves others.
    relabelled = labels.clone()
    relabelled[7] = (labels[7] + 1) % 3
    moved = assign(ClassBalancedPartition(), features, relabelled) != parts
    assert moved.sum() > 1


def test_guided_spreads_similar_records_over_all_teachers():
    generator = torch.Generator().manual_seed(0)
    centres = torch.arange(6).repeat_interleave(20)
    features = torch.randn(120, 2, generator=generator) * 0.01 + torch.stack([centres, centres % 2], 1) * 10.0
    partitioner = GuidedPartition(num_clusters=6, features="given")
    parts = assign(partitioner, features, centres % 3, parts=10)
    for centre in range(6):
        assert torch.bincount(parts[centres == centre], minlength=10).tolist() == [2] * 10
    trained = assign(GuidedPartition(6, hidden=16, steps=100), features, centres % 3, parts=10)
    assert torch.bincount(trained, minlength=10).tolist() == [12] * 10


def test_dealing_is_the_loop_of_the_paper():
    clusters = torch.tensor([2, 0, 1, 0, 2, 2, 0, 1, 0, 0])
    literal, teacher = [None] * 10, 0
    for cluster in range(3):
        for record in range(10):
            if clusters[record] == cluster:
                literal[record], teacher = teacher, (teacher + 1) % 4
    carried = deal_clusters(clusters, 4)
    assert carried.tolist() == literal
    sizes = torch.bincount(carried, minlength=4)
    assert sizes.max() - sizes.min() <= 1


def test_groups_stay_together():
    features, labels = table(200)
    groups = torch.randint(0, 30, (200,), generator=torch.Generator().manual_seed(1)) * 1000 - 5
    parts = assign(RandomPartition(), features, labels, parts=4, groups=groups)
    assert all(len(parts[groups == group].unique()) == 1 for group in groups.unique())
    assert len(parts.unique()) == 4


class Own(Partitioner):
    """A user's own, which may answer anything."""

    def __init__(self, parts):
        self.parts = parts

    def _deal(self, features, labels, num_classes, num_parts, noise):
        return self.parts


def dealt(partitioner, parts, groups=None):
    return lambda: assign(partitioner, *table(9), parts=parts, groups=groups)


THREES = torch.arange(9) // 3
test_bad_input_is_named = refusals(
    {
        "fewer records than 10 teachers": dealt(RandomPartition(), 10),
        "fewer groups than 5 teachers": dealt(RandomPartition(), 5, THREES),
        "parts of shape": dealt(RandomPartition(), 2, THREES[:8]),
        "deals out single records": dealt(ClassBalancedPartition(), 2, THREES),
        "num_clusters=20": dealt(GuidedPartition(20), 2),
        "features='raw'": lambda: GuidedPartition(features="raw"),
        "float32": dealt(Own(torch.zeros(9)), 2),
        r"shape \(n,\)": dealt(Own(torch.zeros(8, dtype=torch.int64)), 2),
        "outside": dealt(Own(torch.full((9,), 2)), 2),
    }
)
