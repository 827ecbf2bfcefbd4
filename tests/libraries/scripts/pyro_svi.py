"""Stochastic variational inference in a LightningModule, as Pyro's example for Lightning does it."""

import lightning.pytorch as pl
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule


class Model(PyroModule):
    def __init__(self, size):
        super().__init__()
        self.size = size

    def forward(self, covariates, data=None):
        coeff = pyro.sample("coeff", dist.Normal(0, 1))
        bias = pyro.sample("bias", dist.Normal(0, 1))
        scale = pyro.sample("scale", dist.LogNormal(0, 1))
        with pyro.plate("data", self.size, len(covariates)):
            return pyro.sample("obs", dist.Normal(bias + coeff * covariates, scale), obs=data)


class Inference(pl.LightningModule):
    def __init__(self, loss_fn, lr):
        super().__init__()
        self.loss_fn = loss_fn
        self.model = loss_fn.model
        self.guide = loss_fn.guide
        self.lr = lr
        self.predictive = pyro.infer.Predictive(self.model, guide=self.guide, num_samples=1)

    def forward(self, *args):
        return self.predictive(*args)

    def training_step(self, batch, batch_idx):
        loss = self.loss_fn(*batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.loss_fn.parameters(), lr=self.lr)


if __name__ == "__main__":
    pyro.set_rng_seed(20200723)
    pyro.settings.set(module_local_params=True)
    model = Model(100)
    covariates = torch.randn(100)
    data = model(covariates)
    guide = AutoNormal(model)
    loss_fn = Trace_ELBO()(model, guide)
    training_plan = Inference(loss_fn, 0.01)
    dataset = torch.utils.data.TensorDataset(covariates, data)
    dataloader = torch.utils.data.DataLoader(dataset, batch_size=10)
    loss_fn(*dataset[:10])  # the guide makes its parameters
    trainer = pl.Trainer(accelerator="cpu", max_epochs=3, enable_progress_bar=False)
    trainer.fit(training_plan, train_dataloaders=dataloader)
    print("loss", trainer.callback_metrics["train_loss"].item())
    print("params", {name: value.tolist() for name, value in guide.named_parameters()})
