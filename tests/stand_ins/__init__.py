"""Small modules with the interface of libraries that only the slow tests install: wandb and mlflow.

tests/libraries/test_trackers.py runs the same scripts with the real ones, against the same laws.
"""
