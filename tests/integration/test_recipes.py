"""What the recipes in examples/ start is understood by what they start."""

from typing import Any

import pytest
import yaml

from tests.unit.test_recipes import COMPOSED, CONTAINER_SPEC, KUBERNETES, documents
from vllm_mtp.config import METHOD

SERVER_ARGUMENTS = {
    "kubernetes": CONTAINER_SPEC["args"],
    "compose": COMPOSED["services"]["server"]["command"],
}


@pytest.mark.parametrize("recipe", SERVER_ARGUMENTS)
def test_vllm_serve_takes_the_arguments(recipe: str) -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    found = parser.parse_args(SERVER_ARGUMENTS[recipe])
    assert found.port == 8000
    assert found.speculative_config == {"method": METHOD}


def test_ray_serve_takes_the_application() -> None:
    from ray.serve.llm import LLMServingArgs
    from ray.serve.schema import ServeDeploySchema

    spec = documents(KUBERNETES / "ray-service.yaml")["RayService"]["spec"]
    deployed = ServeDeploySchema.model_validate(yaml.safe_load(spec["serveConfigV2"]))
    (application,) = deployed.applications
    arguments: Any = LLMServingArgs.model_validate(application.args)
    (config,) = arguments.llm_configs
    assert config.engine_kwargs["speculative_config"] == {"method": METHOD}
