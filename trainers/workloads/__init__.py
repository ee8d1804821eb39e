"""The learning tasks: a model, a stream of local batches, and a score of the model. `WORKLOADS` has all by name."""

from __future__ import annotations

from trainers.workloads.base import Workload
from trainers.workloads.classification import Cifar, ImageNet
from trainers.workloads.digits import Digits, DigitsWide
from trainers.workloads.hyperplane import Hyperplane
from trainers.workloads.language import Bert, Language
from trainers.workloads.navigation import Navigation
from trainers.workloads.video import Video

__all__ = ["WORKLOADS", "Bert", "Digits", "DigitsWide", "Hyperplane", "Language", "Workload"]

_ALL: tuple[type[Workload], ...] = (Digits, DigitsWide, Hyperplane, Language, Bert, Video, Cifar, ImageNet, Navigation)
WORKLOADS: dict[str, type[Workload]] = {workload.name: workload for workload in _ALL}
