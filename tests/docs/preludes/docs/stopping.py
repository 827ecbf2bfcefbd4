from datetime import datetime, timedelta, timezone

from lightning_faulttolerant import FaultTolerance

UTC = timezone.utc
