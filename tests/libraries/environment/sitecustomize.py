"""Lets torchvision be imported with a torch without CUDA, for which no torchvision build exists.

Its compiled operators don't load there, and it looks for two of them during the import.
"""

import importlib.abc
import sys

_OPERATORS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _Operators(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                self.library.define(operator + _OPERATORS)
            sys.modules["_torchvision_operators"] = self
        return


sys.meta_path.insert(0, _Operators())
