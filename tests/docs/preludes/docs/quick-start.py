import os
import time

__name__ = "__main__"  # as the script that the page is
time.sleep = lambda seconds: None
os.environ["PL_TRAINER_LIMIT_TRAIN_BATCHES"] = "5"
