"""Answers spread over rounds of a fit: what is asked, paid and told."""

import torch

from pl_privknn.callbacks import PrivateLabeler
from pl_privknn.callbacks.label_run import StoredQueries
from pl_privknn.callbacks.labeling_arguments import extractor_of, probabilities_of
from pl_privknn.callbacks.selection import ClusterSelection
from pl_privknn.datamodules import ArraysDataModule
from pl_privknn.labelers import ReverseKNN
from pl_privknn.labelers.base import Release
from pl_privknn.privacy import Budget
from pl_privknn.privacy.noise import SeededNoise
from pl_privknn.privacy.run import reading_run
from tests.setup.small_fit import easy_images, quiet_trainer, small_student


class _CountingKNN(ReverseKNN):
    """Releases its noisy counts and remembers what it was asked."""

    def answer(self, queries, run, max_answers):
        self.asked = [*getattr(self, "asked", []), queries]
        noise = self.mechanism(3)
        run.pay(noise, 1, "counts")
        noisy = noise.add_noise(self.counts(queries), self.noise_source.stream(len(self.asked)))
        return Release(noisy.argmax(dim=1), None, noisy, noise.deviation)


def _fit(folder, labeler, epochs=2, ckpt_path=None):
    callback = PrivateLabeler(
        labeler, rounds=2, epochs_per_round=1, queries_per_round=[12, 0],
        run_dir=folder / "run", options={"progress": False},
        selection=ClusterSelection(components=8, ask="means", spread="kernel"),
        features=[torch.nn.Flatten(), [torch.nn.Flatten(), "student"]],
    )  # fmt: skip
    trainer = quiet_trainer(folder, epochs, callbacks=[callback])
    data = ArraysDataModule(*easy_images(300, 60, 30), num_classes=3, batch_size=16)
    trainer.fit(small_student(), data, ckpt_path=ckpt_path)
    return callback, data, trainer


def test_a_round_without_queries_costs_nothing_and_gives_new_labels(tmp_path):
    labeler = _CountingKNN(k=1, budget=Budget(epsilon=0.5), noise_source=SeededNoise(0))
    callback, data, trainer = _fit(tmp_path, labeler)
    assert [len(queries) for queries in labeler.asked] == [12]
    # Pure ε = 0.5 at δ = 1e-5, however many rounds smooth the counts.
    assert callback.epsilon == callback.epsilon_spent
    assert 0.49 < callback.epsilon <= 0.5
    assert bool((data.public.labels >= 0).all())
    assert callback.metrics["labels/accuracy"] > 0.9
    # The second round's probabilities come from the first one's counts, smoothed in another space.
    with reading_run(callback.run_dir / "run.sqlite") as file:
        first, second = (StoredQueries(file).answers(rounds) for rounds in (1, 2))
    assert not torch.equal(first[2], second[2])
    assert torch.equal(data.public.soft_labels, second[2])
    # A resumed run reads all of it back and asks nothing.
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = _CountingKNN(k=1, budget=Budget(epsilon=0.5), noise_source=SeededNoise(1))
    resumed, data_again, _ = _fit(tmp_path, again, epochs=3, ckpt_path=tmp_path / "last.ckpt")
    assert not hasattr(again, "asked")
    assert resumed.epsilon_spent == callback.epsilon_spent
    assert torch.equal(data_again.public.soft_labels, data.public.soft_labels)


def test_probabilities_and_joined_features_of_a_student_leave_it_as_it_was():
    student = small_student().train()
    before = {name: value.clone() for name, value in student.state_dict().items()}
    images = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    probabilities = probabilities_of(student, images)
    joined = extractor_of([torch.nn.Flatten(), "student"], student)(images)
    assert torch.allclose(probabilities.sum(dim=1), torch.ones(5))
    # Each part is scaled to unit length, so that neither drowns the other.
    for part in (joined[:, :64], joined[:, 64:]):
        assert torch.allclose(part.norm(dim=1), torch.ones(5))
    assert student.training
    assert student.network.training
    assert all(torch.equal(value, before[name]) for name, value in student.state_dict().items())
