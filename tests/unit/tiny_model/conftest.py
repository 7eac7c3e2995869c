"""A small random model and tokens to feed it."""

import pytest
import torch

from examples.tiny_model.model import MiMoModel
from examples.tiny_model.shape import ModelShape
from tests.unit.tiny_model.random_model import make_random_model


@pytest.fixture(scope="session")
def small_shape() -> ModelShape:
    """Two query heads for each key head; head size 8."""
    return ModelShape(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_heads=4,
        num_kv_heads=2,
        max_position_embeddings=64,
    )


@pytest.fixture(scope="session")
def small_model(small_shape: ModelShape) -> MiMoModel:
    return make_random_model(small_shape, seed=1)


@pytest.fixture(scope="session")
def token_ids(small_shape: ModelShape) -> torch.Tensor:
    """Two sequences of 20 tokens, `[2, 20]`."""
    generator = torch.Generator().manual_seed(2)
    return torch.randint(small_shape.vocab_size, (2, 20), generator=generator)
