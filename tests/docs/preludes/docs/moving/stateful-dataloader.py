import warnings

from tests.docs.small import MyModel, my_dataset

# torchdata 0.11 calls functions that torch 2.13 has deprecated.
warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
dataset, model = my_dataset(), MyModel()
