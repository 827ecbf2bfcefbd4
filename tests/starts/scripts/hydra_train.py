"""Train with a Hydra configuration, like lightning-hydra-template."""

import logging
from typing import Any

import hydra
from interrupt import finished
from lightning.pytorch import Trainer, seed_everything
from omegaconf import DictConfig
from tiny import loader

log = logging.getLogger(__name__)


def train(cfg: DictConfig) -> dict[str, Any]:
    """Train, and return the metrics."""
    if cfg.get("seed"):
        seed_everything(cfg.seed, workers=True)
    model = hydra.utils.instantiate(cfg.model)
    callbacks = [hydra.utils.instantiate(callback) for callback in cfg.callbacks.values()]
    loggers = [hydra.utils.instantiate(logger) for logger in cfg.logger.values()]
    trainer: Trainer = hydra.utils.instantiate(cfg.trainer, callbacks=callbacks, logger=loggers)
    log.info("Starting training!")
    trainer.fit(model=model, train_dataloaders=loader(), ckpt_path=cfg.get("ckpt_path"))
    finished(f"lr={cfg.model.lr}", model, best=trainer.checkpoint_callback.best_model_path)  # type: ignore[union-attr]
    return trainer.callback_metrics


@hydra.main(version_base="1.3", config_path="configs", config_name="train.yaml")
def main(cfg: DictConfig) -> float:
    """Train with the configuration."""
    try:
        return float(train(cfg)["loss"])
    except Exception:
        log.exception("")
        raise
    finally:
        log.info("Output dir: %s", cfg.paths.output_dir)


if __name__ == "__main__":
    main()
