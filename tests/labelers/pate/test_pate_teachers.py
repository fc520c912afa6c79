import pytest
import torch
from torch import nn

from pl_privknn.labelers.teachers import CNNTeachers, LinearTeachers, ModuleTeachers
from tests.setup.refusals import refusals

SEVENTHS = torch.arange(300) % 7


def quiet(fraction):
    assert 0 <= fraction <= 1 + 1e-9


def table(n=300, d=16, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (n,), generator=generator)
    centres = torch.randn(classes, d, generator=generator) * 2
    return centres[labels] + torch.randn(n, d, generator=generator), labels


MAKERS = {
    "linear": lambda **more: LinearTeachers(steps=30, batch_size=8, **more),
    "decayed": lambda **more: LinearTeachers(steps=30, batch_size=8, weight_decay=0.5, **more),
    "cnn": lambda **more: CNNTeachers((1, 4, 4), channels=(3, 4), steps=30, batch_size=8, **more),
    "own": lambda **more: ModuleTeachers(
        lambda d, c: nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 6), nn.Tanh(), nn.Linear(6, c)),
        steps=30,
        batch_size=8,
        **more,
    ),
}


def params_of(trained, teacher):
    return {name: trained.params(name)[teacher] for name in trained.blocks[0]}


@pytest.mark.parametrize("kind", MAKERS)
def test_stacked_training_equals_one_after_another_in_plain_torch(kind):
    maker = MAKERS[kind]()
    features, labels = table()
    parts = SEVENTHS
    trained = maker.train(features, labels, parts, 3, 7, quiet)
    for teacher in (0, 3, 6):
        x, y = features[parts == teacher], labels[parts == teacher]
        module = maker.initial(teacher, 16, 3)
        optimizer = torch.optim.AdamW(
            module.parameters(), lr=maker.learning_rate, weight_decay=maker.weight_decay
        )
        generator = maker.batch_generator(teacher)
        for step in range(maker.steps):
            rows = (torch.rand(8, generator=generator, dtype=torch.float64) * len(x)).long()
            for group in optimizer.param_groups:
                group["lr"] = maker.rate(step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x[rows]), y[rows]).backward()
            optimizer.step()
        for name, value in module.state_dict().items():
            torch.testing.assert_close(params_of(trained, teacher)[name], value, rtol=1e-3, atol=1e-5)
        with torch.no_grad():
            torch.testing.assert_close(trained.predict(features)[:, teacher], module(features).argmax(1))


@pytest.mark.parametrize("kind", MAKERS)
def test_a_teacher_is_bit_for_bit_a_function_of_its_own_part(kind):
    maker = MAKERS[kind]()
    features, labels = table()
    parts = SEVENTHS
    before = maker.train(features, labels, parts, 3, 7, quiet)
    # Part 2 loses most of its records, and those that stay change.
    keep = (parts != 2) | (torch.arange(300) < 20)
    other = torch.where((parts == 2)[:, None], -3 * features, features)
    after = maker.train(other[keep], labels[keep], parts[keep], 3, 7, quiet)
    for teacher in range(7):
        same = [
            torch.equal(params_of(before, teacher)[name], value)
            for name, value in params_of(after, teacher).items()
        ]
        assert all(same) == (teacher != 2)


def test_blocks_of_teachers_do_not_matter_and_seeds_do():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    weights = []
    for more in ({}, {"teachers_at_once": 3}, {"seed": 1}):
        trained = MAKERS["cnn"](**more).train(*table(), SEVENTHS, 3, 7, quiet)
        weights.append(torch.cat([trained.params(part).flatten() for part in trained.blocks[0]]))
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(weights[0], weights[2], rtol=1e-2)
    assert torch.equal(torch.rand(3), expected)  # the global generator is left alone


def test_who_is_empty_or_not_finite_abstains_alone():
    features, labels = table()
    # 0 and 5 are empty, 1 knows one class, and the weights of 4 are not finite.
    parts = torch.where(labels == 0, 1, 2 + torch.arange(300) % 3)
    extreme = torch.where((parts == 4)[:, None], features * 1e38, features)
    trained = MAKERS["linear"]().train(extreme, labels, parts, 3, 6, quiet)
    assert trained.empty.tolist() == [True, False, False, False, False, True]
    assert trained.failed.nonzero().tolist() == [[4]]
    assert trained.failures == {"not finite"}
    queries = features.clone()
    queries[1] = torch.nan
    votes = trained.predict(queries)
    assert (votes[1] == -1).all()  # a score that is no number does not win
    votes = votes[torch.arange(300) != 1]
    assert (votes[:, [0, 4, 5]] == -1).all()
    assert (votes[:, 1] == 0).all()
    assert ((votes[:, 2:4] == 1) | (votes[:, 2:4] == 2)).all()


def trained(maker):
    return lambda: maker.train(*table(), SEVENTHS, 3, 7, quiet)


test_modules_that_do_not_fit_are_refused = refusals(
    {
        "batch normalisation": trained(
            ModuleTeachers(lambda d, c: nn.Sequential(nn.BatchNorm1d(d), nn.Linear(d, c)))
        ),
        r"image_shape=.* has 784 values, the features have 16": trained(CNNTeachers()),
        "steps=0": lambda: LinearTeachers(steps=0),
        "image_shape": lambda: CNNTeachers((28, 28)),
    }
)
