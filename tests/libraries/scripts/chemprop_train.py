"""A message-passing network on a few molecules, as the training notebook of Chemprop trains it."""

import numpy as np
from chemprop import data, featurizers, models, nn
from lightning import pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

pl.seed_everything(0)
smiles = ["C" * length + end for length in range(1, 16) for end in ("O", "N", "Cl", "F")]
targets = np.array([[len(each) + 0.5 * each.count("O")] for each in smiles], dtype=float)
all_data = [data.MoleculeDatapoint.from_smi(smi, y) for smi, y in zip(smiles, targets, strict=True)]
mols = [each.mol for each in all_data]
train_indices, val_indices, test_indices = data.make_split_indices(mols, "random", (0.8, 0.1, 0.1))
train_data, val_data, test_data = data.split_data_by_indices(all_data, train_indices, val_indices, test_indices)

featurizer = featurizers.SimpleMoleculeMolGraphFeaturizer()
train_dset = data.MoleculeDataset(train_data[0], featurizer)
scaler = train_dset.normalize_targets()
val_dset = data.MoleculeDataset(val_data[0], featurizer)
val_dset.normalize_targets(scaler)
test_dset = data.MoleculeDataset(test_data[0], featurizer)
train_loader = data.build_dataloader(train_dset, batch_size=8, num_workers=0)
val_loader = data.build_dataloader(val_dset, batch_size=8, num_workers=0, shuffle=False)
test_loader = data.build_dataloader(test_dset, batch_size=8, num_workers=0, shuffle=False)

output_transform = nn.UnscaleTransform.from_standard_scaler(scaler)
mpnn = models.MPNN(
    nn.BondMessagePassing(d_h=16, dropout=0.1),
    nn.MeanAggregation(),
    nn.RegressionFFN(input_dim=16, hidden_dim=16, output_transform=output_transform),
    batch_norm=True,
    metrics=[nn.metrics.RMSE(), nn.metrics.MAE()],
)
trainer = pl.Trainer(
    logger=False,
    enable_checkpointing=True,
    enable_progress_bar=False,
    accelerator="cpu",
    max_epochs=3,
    callbacks=[ModelCheckpoint("checkpoints", "best-{epoch}-{val_loss:.2f}", "val_loss", mode="min", save_last=True)],
)
trainer.fit(mpnn, train_loader, val_loader)
results = trainer.test(dataloaders=test_loader, weights_only=False)
print("results", results)
