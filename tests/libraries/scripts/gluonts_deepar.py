"""DeepAR on synthetic series, as the quick start of GluonTS trains it."""

import numpy as np
import pandas as pd
from gluonts.dataset.common import ListDataset
from gluonts.torch import DeepAREstimator
from lightning.pytorch import seed_everything

seed_everything(1)
rng = np.random.default_rng(0)
start = pd.Period("2020-01-01", freq="D")
training_data = ListDataset(
    [{"start": start, "target": 10 + np.sin(np.arange(100) / 7) + 0.1 * rng.standard_normal(100)} for _ in range(10)],
    freq="D",
)

estimator = DeepAREstimator(
    prediction_length=7,
    freq="D",
    hidden_size=8,
    batch_size=8,
    num_batches_per_epoch=8,
    trainer_kwargs={"max_epochs": 3, "accelerator": "cpu", "enable_progress_bar": False},
)
model = estimator.train(training_data)
seed_everything(2)
for forecast in model.predict(training_data):
    print("forecast", forecast.mean.tolist())
