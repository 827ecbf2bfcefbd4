"""Arguments of the Trainer and of the callback."""

from __future__ import annotations

from tests.laws.rows import add

add("accumulation", part="gradients", shows="weights", trainer={"accumulate_grad_batches": 3}, repeats=3)
add("clipping", trainer={"gradient_clip_val": 0.1})
add("async_save", options={"async_save": True}, repeats=12)
