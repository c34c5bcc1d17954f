"""The suite of tests/test_transforms.py on a GPU."""

import pytest
import torch
from support.transform_suite import TransformSuite

pytestmark = pytest.mark.gpu


@pytest.mark.usefixtures("lone_layers_fused")
class TestTransforms(TransformSuite):
    device = torch.device("cuda")
