"""SGLang on a machine without a GPU: its layers and loaders can be imported; its kernels and its engine cannot run."""

import os

import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("W4PLUGIN_CLAIM", None)

# SGLang imports torchvision, whose operators are built against CUDA and do not load beside PyTorch's CPU build; it then
# describes two of them to PyTorch all the same, which needs their names.
for name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
