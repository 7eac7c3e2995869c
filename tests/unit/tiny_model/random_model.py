"""Models with random weights: every one differs from 0 and 1, so nothing hides."""

import torch

from examples.tiny_model.model import MiMoModel
from examples.tiny_model.shape import ModelShape


def make_random_model(shape: ModelShape, seed: int) -> MiMoModel:
    model = MiMoModel(shape)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            mean = 1.0 if name.endswith("norm.weight") else 0.0
            std = 1.0 if weight.ndim == 1 else shape.hidden_size**-0.5
            weight.normal_(mean, 0.3 * std, generator=generator)
    return model.eval()
