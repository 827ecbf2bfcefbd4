"""SCVI on synthetic counts, as the introduction of scvi-tools trains it."""

import scvi

scvi.settings.seed = 0
adata = scvi.data.synthetic_iid(batch_size=120)
scvi.model.SCVI.setup_anndata(adata, batch_key="batch")
model = scvi.model.SCVI(adata, n_hidden=16, n_latent=4)
model.train(
    max_epochs=4, accelerator="cpu", batch_size=32, check_val_every_n_epoch=1, early_stopping=True,
    enable_progress_bar=False,
)  # fmt: skip
for name, values in sorted(model.history.items()):
    print("history", name, values.iloc[:, 0].tolist())
print("latent", model.get_latent_representation()[:5].tolist())
print("elbo", float(model.get_elbo()))
