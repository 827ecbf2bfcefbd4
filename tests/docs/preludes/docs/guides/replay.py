from lightning.pytorch import Trainer

from lightning_faulttolerant import FaultTolerance, FlightRecorder
