"""The suite of tests/test_transforms.py over the kernels."""

from support.transform_suite import TransformSuite


class TestTransforms(TransformSuite):
    pass
