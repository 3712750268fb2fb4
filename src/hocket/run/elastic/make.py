"""Makes what freezes the layers of a pipeline, once its first layout is set up.

A policy may look at how far each layer's activations are from a reference copy's:

    batch ─▶ a ─▶ b │ c ─▶ d      the weights now             │: from worker to worker
    batch ─▶ a'─▶ b'│ c'─▶ d'     those at the last decision
             ↕    ↕   ↕    ↕      distance of the similarities between samples

Source: the plasticity of Egeria (EuroSys 2023). Its reference is quantised; here it is
a plain copy of the weights that train, on the workers of the first replica.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, assert_never

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hocket.core.schedule import Schedule
from hocket.errors import ConfigError
from hocket.freeze.policy import Measures
from hocket.freeze.shapes import shapes_of
from hocket.model.capture.captured import Captured
from hocket.model.stages.cut import StageModule, cut
from hocket.model.stages.on_tensors import on_tensors
from hocket.model.trace.value import SentTensor
from hocket.run.cluster.layout import Layout, make_layout
from hocket.run.cluster.world import World
from hocket.run.data.batch import Microbatch, on_device, split_batch
from hocket.run.diagnostics.job_folder import Json
from hocket.run.elastic.cache.cached_prefix import CachedPrefix
from hocket.run.elastic.cache.training_order import TrainingOrder
from hocket.run.elastic.freezing import Freezing
from hocket.run.elastic.measures import GradientMeasure, LayerMeasure, NoMeasure
from hocket.run.elastic.reshape import Reshaper, SameSettings
from hocket.run.elastic.shape_choice import FreezingOptions
from hocket.run.engine.executor import Executor, PlayedLayout
from hocket.run.engine.plan import Plan
from hocket.run.engine.worker_context import WorkerContext
from hocket.run.nets.freezable import freezable_modules, frozen_edges
from hocket.run.nets.net import NetOnWorker
from hocket.run.nets.transfer import Bundle, finish, receive_bundles, send_bundles
