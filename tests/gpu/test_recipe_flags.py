"""vLLM's own parser takes the command line of every recipe and reads the values that the recipe holds."""
import pytest
import torch
from prove import recipe

from launch import command

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: vLLM's parser asks for one")


@pytest.fixture(scope="module")
def parser():
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())


@pytest.mark.parametrize("name", recipe.names())
@pytest.mark.parametrize("invariant", [True, False])
def test_the_command_line_says_what_the_recipe_holds(name, invariant, parser):
    made = recipe.load(name, None)
    program, verb, model, *flags = command.serve(made, invariant, [])
    read = parser.parse_args(["--model", model, *flags])
    for flag, value in command.engine(made, invariant).items():
        if not isinstance(value, dict):  # a table becomes an object of vLLM's, its keys checked as it is made
            assert getattr(read, flag) == value, flag
