"""N-BEATS and a recurrent network on series, as the guides of Darts train them."""

import numpy as np
from darts import TimeSeries
from darts.dataprocessing.transformers import Scaler
from darts.models import NBEATSModel
from darts.utils.timeseries_generation import gaussian_timeseries, sine_timeseries

np.random.seed(0)
series = sine_timeseries(length=160, value_frequency=0.05) + 0.1 * gaussian_timeseries(length=160)
train, val = series[:-36], series[-36:]
scaler = Scaler()
train_scaled = scaler.fit_transform(train)
val_scaled = scaler.transform(val)

model = NBEATSModel(
    input_chunk_length=24,
    output_chunk_length=6,
    n_epochs=3,
    batch_size=16,
    num_stacks=2,
    num_blocks=1,
    num_layers=1,
    layer_widths=16,
    dropout=0.1,
    random_state=0,
    pl_trainer_kwargs={"accelerator": "cpu"},
)
model.fit(train_scaled, val_series=val_scaled, verbose=False)
prediction: TimeSeries = model.predict(n=12, verbose=False)
print("prediction", prediction.values().flatten().tolist())
