import pytest
import torch
from torch import nn

from pl_privknn.labelers.pate_training import CNNTeachers, LinearTeachers, ModuleTeachers


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
    parts = torch.arange(300) % 7
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
    parts = torch.arange(300) % 7
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
    features, labels = table()
    parts = torch.arange(300) % 7
    votes = {
        name: MAKERS["cnn"](**more).train(features, labels, parts, 3, 7, quiet)
        for name, more in {"all": {}, "by three": {"teachers_at_once": 3}, "other seed": {"seed": 1}}.items()
    }
    weights = {
        name: torch.cat([trained.params(part).flatten() for part in trained.blocks[0]])
        for name, trained in votes.items()
        for name, trained in votes.items()
    }
    torch.testing.assert_close(weights["all"], weights["by three"], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(weights["all"], weights["other seed"], rtol=1e-2)


def test_training_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    MAKERS["cnn"]().train(*table(), torch.arange(300) % 7, 3, 7, quiet)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("kind", MAKERS)
def test_teachers_learn(kind):
    maker = MAKERS[kind]()
    maker.steps = 150
    features, labels = table(600)
    trained = maker.train(features[:500], labels[:500], torch.arange(500) % 10, 3, 10, quiet)
    votes = trained.predict(features[500:])
    assert votes.shape == (100, 10)
    # Chance would be one third; a nearest-centre rule has 0.99 here.
    assert (votes == labels[500:, None]).float().mean() > 0.8
    assert (votes.mode(dim=1).values == labels[500:]).float().mean() > 0.93


def test_empty_part_abstains_and_a_missing_class_is_no_problem():
    features, labels = table()
    parts = torch.where(labels == 0, 1, 2 + torch.arange(300) % 2)  # 0 and 4 are empty, 1 knows one class
    trained = MAKERS["linear"]().train(features, labels, parts, 3, 5, quiet)
    assert trained.empty.tolist() == [True, False, False, False, True]
    assert not trained.failed.any()
    votes = trained.predict(features)
    assert (votes[:, [0, 4]] == -1).all()
    assert (votes[:, 1] == 0).all()
    assert ((votes[:, 2:4] == 1) | (votes[:, 2:4] == 2)).all()


def test_a_teacher_with_weights_that_are_not_finite_abstains_alone():
    features, labels = table()
    parts = torch.arange(300) % 7
    extreme = torch.where((parts == 3)[:, None], features * 1e38, features)
    trained = MAKERS["linear"]().train(extreme, labels, parts, 3, 7, quiet)
    assert trained.failed.tolist() == [teacher == 3 for teacher in range(7)]
    assert trained.failures == {"not finite"}
    votes = trained.predict(features[:50])
    assert (votes[:, 3] == -1).all()
    assert (votes[:, [0, 1, 2, 4, 5, 6]] >= 0).all()


def test_a_nan_score_abstains_instead_of_winning():
    features, labels = table()
    trained = MAKERS["linear"]().train(features, labels, torch.arange(300) % 7, 3, 7, quiet)
    queries = features[:4].clone()
    queries[1] = torch.nan
    votes = trained.predict(queries)
    assert (votes[[0, 2, 3]] >= 0).all()
    assert (votes[1] == -1).all()


def test_modules_that_do_not_fit_are_refused():
    features, labels = table()
    batch_norm = ModuleTeachers(lambda d, c: nn.Sequential(nn.BatchNorm1d(d), nn.Linear(d, c)))
    with pytest.raises(ValueError, match="batch normalisation"):
        batch_norm.train(features, labels, torch.arange(300) % 7, 3, 7, quiet)
    with pytest.raises(ValueError, match=r"image_shape=.* has 784 values, the features have 16"):
        CNNTeachers().train(features, labels, torch.arange(300) % 7, 3, 7, quiet)
    with pytest.raises(ValueError, match="steps=0"):
        LinearTeachers(steps=0)
    with pytest.raises(ValueError, match="image_shape"):
        CNNTeachers((28, 28))


def test_progress_bar_also_inside_another_one(monkeypatch, capsys):
    from rich.progress import Progress

    from pl_privknn.labelers.pate_training import progress_bar

    monkeypatch.setenv("FORCE_COLOR", "1")
    with Progress(), progress_bar("training 7 teachers", True) as progress:
        progress(0.5)
        progress(1.0)
    with progress_bar("training 8 teachers", True) as progress:
        progress(1.0)
    shown = capsys.readouterr().out
    assert "training 8 teachers" in shown
    with progress_bar("training 9 teachers", False) as progress:
        progress(1.0)
    assert "training 9 teachers" not in capsys.readouterr().out
