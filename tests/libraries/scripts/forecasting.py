"""A temporal fusion transformer, as the README of pytorch-forecasting trains it."""

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from lightning.pytorch.loggers import TensorBoardLogger
from pytorch_forecasting import QuantileLoss, TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.data.examples import generate_ar_data

pl.seed_everything(42)
data = generate_ar_data(seasonality=10.0, timesteps=60, n_series=12, seed=42)
data["static"] = "2"
training_cutoff = data["time_idx"].max() - 10

training = TimeSeriesDataSet(
    data[lambda x: x.time_idx <= training_cutoff],
    time_idx="time_idx",
    target="value",
    group_ids=["series"],
    max_encoder_length=20,
    max_prediction_length=5,
    static_categoricals=["static"],
    time_varying_known_reals=["time_idx"],
    time_varying_unknown_reals=["value"],
    allow_missing_timesteps=True,
)
validation = TimeSeriesDataSet.from_dataset(
    training, data, min_prediction_idx=training.index.time.max() + 1, stop_randomization=True
)
train_dataloader = training.to_dataloader(train=True, batch_size=16, num_workers=0)
val_dataloader = validation.to_dataloader(train=False, batch_size=16, num_workers=0)

trainer = pl.Trainer(
    max_epochs=2,
    accelerator="cpu",
    gradient_clip_val=0.1,
    limit_train_batches=8,
    callbacks=[LearningRateMonitor(), EarlyStopping(monitor="val_loss", min_delta=1e-4, patience=1, mode="min")],
    logger=TensorBoardLogger("lightning_logs"),
    enable_progress_bar=False,
)
sizes = {"hidden_size": 8, "attention_head_size": 1, "hidden_continuous_size": 8, "dropout": 0.1}
rates = {"log_interval": 2, "learning_rate": 0.03, "reduce_on_plateau_patience": 4}
tft = TemporalFusionTransformer.from_dataset(training, loss=QuantileLoss(), **sizes, **rates)
trainer.fit(tft, train_dataloaders=train_dataloader, val_dataloaders=val_dataloader)

best = TemporalFusionTransformer.load_from_checkpoint(trainer.checkpoint_callback.best_model_path, weights_only=False)
predictions = best.predict(val_dataloader, trainer_kwargs={"accelerator": "cpu", "logger": False})
print("predictions", predictions.flatten().tolist())
