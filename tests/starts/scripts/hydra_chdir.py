"""Train with Hydra and a plain Trainer: with ``hydra.job.chdir=True`` it writes to Hydra's directory."""

import hydra
from interrupt import Interrupt, finished
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from omegaconf import DictConfig
from tiny import Net, loader


@hydra.main(version_base="1.3", config_path=None)
def main(cfg: DictConfig) -> None:
    """Train."""
    seed_everything(1)
    model = Net()
    logger = CSVLogger("csv")
    trainer = Trainer(max_epochs=2, accelerator="cpu", logger=logger, log_every_n_steps=1, callbacks=[Interrupt()])
    trainer.fit(model, loader())
    finished("fit", model)


if __name__ == "__main__":
    main()
