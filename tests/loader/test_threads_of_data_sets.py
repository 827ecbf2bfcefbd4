"""Data sets that a thread of their library changes while training continues."""

from __future__ import annotations

from torch.utils.data import DataLoader, Dataset

from lightning_faulttolerant.loader.exactness import why_not_exact


def test_data_set_that_a_thread_fills_is_refused() -> None:
    """The reason names MONAI's class, and another one that can be resumed."""
    smart: type[Dataset[int]] = type("SmartCacheDataset", (Dataset,), {"__module__": "monai.data.dataset"})
    reason = why_not_exact(DataLoader(smart(), sampler=[0]))
    assert reason is not None
    assert "a thread of its SmartCacheDataset" in reason
    assert "Use MONAI's CacheDataset" in reason
    assert why_not_exact(DataLoader(Dataset[int](), sampler=[0])) is None
