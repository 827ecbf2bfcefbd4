"""NHITS and an LSTM on AirPassengers, as the README of NeuralForecast trains them."""

from neuralforecast import NeuralForecast
from neuralforecast.models import LSTM, NHITS
from neuralforecast.utils import AirPassengersDF

horizon = 12
models = [
    NHITS(input_size=24, h=horizon, max_steps=24, val_check_steps=8, accelerator="cpu", enable_progress_bar=False),
    LSTM(input_size=24, h=horizon, max_steps=16, val_check_steps=8, encoder_hidden_size=8, decoder_hidden_size=8,
         scaler_type="standard", accelerator="cpu", enable_progress_bar=False),
]  # fmt: skip
nf = NeuralForecast(models=models, freq="ME")
nf.fit(df=AirPassengersDF, val_size=horizon)
forecasts = nf.predict()
print("NHITS", forecasts["NHITS"].tolist())
print("LSTM", forecasts["LSTM"].tolist())
