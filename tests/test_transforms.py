"""Ways of calling in which a tensor stands for more than its storage. On a CPU the path is PyTorch's; the interpreter
runs the same file with the kernels (tests/interpreter/test_transforms_interpreter.py)."""

from support.transform_suite import TransformSuite


class TestTransforms(TransformSuite):
    pass
