"""Training loaders inside a fit: labels of each epoch, resumption, checkpoints."""

import pytest
import pytorch_lightning as pl
import torch

from tests.datamodules.datamodule_setup import CLASSES, PUBLIC, Recorder, loaded, make_data, trainer


class Relabel(pl.Callback):
    """Plays the private teacher: labels at the start of the fit, others after each epoch."""

    def __init__(self, soft_from=99):
        self.soft_from, self.plan = soft_from, {}

    def label(self, trainer, epoch):
        indices = torch.arange(epoch * 5, epoch * 5 + 6)
        labels = (indices + epoch) % CLASSES
        soft = torch.full((6, CLASSES), 0.1).scatter(1, labels[:, None], 0.8)
        public = trainer.datamodule.public
        public.clear_labels()
        public.set_labels(indices, labels, soft if epoch >= self.soft_from else None)
        self.plan[epoch] = dict(zip(indices.tolist(), labels.tolist(), strict=True))

    def on_fit_start(self, trainer, pl_module):
        self.label(trainer, trainer.current_epoch)

    def on_train_epoch_end(self, trainer, pl_module):
        self.label(trainer, trainer.current_epoch + 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_each_epoch_trains_on_the_labels_of_its_beginning(tmp_path, workers):
    module = make_data(num_workers=workers)
    # The scheduler has the loader made before on_fit_start, when there is no label at all.
    model, teacher = Recorder(scheduled=True), Relabel(soft_from=2)
    trainer(tmp_path, callbacks=[teacher], limit_val_batches=0).fit(model, module)
    for epoch in range(3):
        assert sorted(torch.cat(model.unlabeled[epoch]).tolist()) == list(range(PUBLIC))
    assert [batch.tolist() for batch in model.unlabeled[0]] != [b.tolist() for b in model.unlabeled[1]]
    assert [model.seen(epoch) for epoch in range(2)] == [teacher.plan[epoch] for epoch in range(2)]
    assert all(y.dtype == torch.int64 for _, y in model.labeled[0])
    for number, (x, y) in enumerate(model.labeled[2]):  # soft ones came later than the workers
        torch.testing.assert_close(y.max(1).values, torch.full((4,), 0.8))
        model.labeled[2][number] = x, y.argmax(1)
    assert model.seen(2) == teacher.plan[2]


def test_a_resumed_run_goes_on_with_the_order_of_an_unbroken_one(tmp_path):
    def labeled_data():
        module = make_data()
        module.setup("fit")
        module.public.set_labels(torch.arange(9), torch.arange(9) % CLASSES)
        return module

    unbroken, first, second = Recorder(), Recorder(), Recorder()
    trainer(tmp_path, epochs=4).fit(unbroken, labeled_data())
    stopped = trainer(tmp_path, epochs=2)
    stopped.fit(first, labeled_data())
    stopped.save_checkpoint(tmp_path / "two.ckpt")
    trainer(tmp_path, epochs=4).fit(second, labeled_data(), ckpt_path=tmp_path / "two.ckpt")
    assert sorted(second.unlabeled) == [2, 3]
    for epoch in (2, 3):
        whole, resumed = (
            [*(x for x, _ in one.labeled[epoch]), *one.unlabeled[epoch]] for one in (unbroken, second)
        )
        assert len(whole) == len(resumed)
        assert all(map(torch.equal, whole, resumed))


def test_checkpoints_hold_nothing_of_the_data(tmp_path):
    data = loaded()
    data.public.set_labels([1, 2], [0, 1])
    stopped = trainer(tmp_path, epochs=1)
    stopped.fit(Recorder(), data)
    stopped.save_checkpoint(tmp_path / "last.ckpt")
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert not dict(data.hparams)
    assert not [key for key in checkpoint if "datamodule" in key.lower()]
    assert "ArraysDataModule" not in checkpoint
    assert "1." not in repr(data.private)
